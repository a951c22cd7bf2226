"""``quiver serve``."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from quiver.cli.output import JsonOption, VerifyOption, print_json, say
from quiver.cli.sources import short_names
from quiver.encoder import InputError
from quiver.retrieval.search import bm25
from quiver.retrieval.units import parse_size

# What the extra holds, by the names they are imported by.
_EXTRA = ("fastapi", "uvicorn", "prometheus_client")


def serve(
    indexes: Annotated[list[str], typer.Argument(metavar="INDEX...", help="Each as FOLDER or NAME=FOLDER; the first is the default.")],
    beside: Annotated[list[str] | None, typer.Option("--with", help="bm25 serves the words of the first index's texts too.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="The first index's model; by default the one that built it.")] = None,
    host: Annotated[str, typer.Option("--host", help="Interface to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="Port; 0 for any that is free.")] = 8080,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="Allow adding and deleting with the token in this file (or in QUIVER_TOKEN).")
    ] = None,
    origins: Annotated[
        list[str] | None,
        typer.Option("--allow-origin", help="Origin of web pages that may ask, such as https://example.com, or *; may be repeated."),
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            help="Host name that requests may be sent to, such as search.example.com, *.example.com, or * for any; may be repeated. Always"
            " allowed are localhost, 127.0.0.1, [::1] and --host. If --host is no loopback address, so are this machine's name and every IP"
            " address, by which orchestrators check health. Other requests get 421.",
        ),
    ] = None,
    max_k: Annotated[int, typer.Option("--max-k", min=1, help="Hits a query, at most.")] = 1000,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Queries of a request, at most.")] = 64,
    max_hits: Annotated[int, typer.Option("--max-hits", min=1, help="Hits of a request over all its queries, at most.")] = 2000,
    max_body: Annotated[str, typer.Option("--max-body", help="Size of a request, at most.")] = "1MB",
    max_queue: Annotated[int, typer.Option("--max-queue", min=1, help="Queries that wait; further ones are refused with 429.")] = 256,
    timeout: Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds until a search is given up.")] = 10.0,
    patience: Annotated[float, typer.Option("--patience", min=0.1, help="Seconds that a client may take to send or to read.")] = 10.0,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Batches of queries that a retriever searches at a time.")] = 2,
    poll: Annotated[float, typer.Option("--poll", min=0.05, help="Seconds from one look for newer generations to the next.")] = 2.0,
    drain_delay: Annotated[
        float, typer.Option("--drain-delay", min=0, help="Seconds behind SIGTERM in which requests are still taken, and readiness says no.")
    ] = 1.0,
    drain: Annotated[float, typer.Option("--drain", min=1, help="Seconds in which requests may end then.")] = 30.0,
    verify: Annotated[bool, VerifyOption] = True,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Serve indexes over HTTP, with a search page, until SIGTERM or Ctrl-C.

    Examples: quiver serve indexes/scifact --with bm25

    quiver serve dense=indexes/dense colbert=indexes/colbert --port 9000 --token-file token
    """
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"quiver serve needs {', '.join(missing)}: pip install 'quiver-retrieval[serve]'")
    from quiver.retrieval.serving.access import read_token
    from quiver.retrieval.serving.hosts import host_name, web_origin
    from quiver.retrieval.serving.limits import Limits
    from quiver.retrieval.serving.server import Address, run_service
    from quiver.retrieval.serving.service import open_service

    if beside not in (None, [], [bm25.NAME]):
        raise InputError(f"--with is for {bm25.NAME}; give further indexes as arguments")
    _check_finite({"--timeout": timeout, "--patience": patience, "--poll": poll, "--drain-delay": drain_delay, "--drain": drain})
    limits = Limits(
        k=max_k, batch=max_batch, hits=max_hits, body_bytes=_body_size(max_body), queue=max_queue, seconds=timeout, read_seconds=patience
    )
    address = Address(
        host,
        port,
        [web_origin(each) for each in origins or ()],
        [host_name(each) for each in hosts or ()],
        poll_seconds=poll,
        drain_delay=drain_delay,
        drain_seconds=drain,
    )
    folders = named_folders(indexes)
    token = read_token(token_file)
    service = open_service(folders, words=bool(beside), model=model, token=token, limits=limits, workers=workers, verify=verify)

    def started(url: str) -> None:
        if as_json:
            print_json({"url": url, "retrievers": list(service.retrievers), "writable": service.access.writable})
        else:
            say(f"{url} serves {', '.join(service.retrievers)}; Ctrl-C stops it")

    run_service(service, address, started=started)


def _body_size(text: str) -> int:
    size = parse_size(text)
    if size < 1:
        raise InputError(f"--max-body must be at least 1 byte, got {text}; write it as 64KB or 1MB")
    return size


def _check_finite(seconds: Mapping[str, float]) -> None:
    """Refuse what passes for a number above the least, and is none: nan, and inf, which no timer takes."""
    for option, value in seconds.items():
        if not math.isfinite(value):
            raise InputError(f"{option} must be a finite number of seconds, got {value}")


def named_folders(given: Sequence[str]) -> dict[str, Path]:
    """Name -> folder, in order; what has no name goes by the last part of its path.

    Raises:
        InputError: Two have one name, or a name or a folder is missing.

    Example:
        >>> named_folders(["indexes/a", "second=indexes/b"])
        {'a': PosixPath('indexes/a'), 'second': PosixPath('indexes/b')}
    """
    named = ["=" in each and not Path(each).is_dir() for each in given]
    paths = [each.partition("=")[2] if has_name else each for each, has_name in zip(given, named, strict=True)]
    short = iter(short_names([path for path, has_name in zip(paths, named, strict=True) if not has_name]))
    names = [each.partition("=")[0] if has_name else next(short) for each, has_name in zip(given, named, strict=True)]
    for name, path in zip(names, paths, strict=True):
        if not name or not path:
            raise InputError(f"an index is FOLDER or NAME=FOLDER, got {'='.join((name, path))!r}")
        if names.count(name) > 1:
            raise InputError(f"two indexes go by the name '{name}'; give each its own, as NAME=FOLDER")
    return dict(zip(names, map(Path, paths), strict=True))
