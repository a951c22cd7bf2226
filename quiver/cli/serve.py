"""``quiver serve`` and ``quiver mcp``."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from quiver.cli import options
from quiver.cli.output import print_json, say
from quiver.encoder.errors import InputError
from quiver.retrieval.display import short_names
from quiver.retrieval.units import parse_size

if TYPE_CHECKING:
    from quiver.retrieval.serving.service import Combinations

# Modules of the extras.
_SERVE = ("fastapi", "fastapi_offline", "uvicorn", "prometheus_client")
_MCP = (*_SERVE, "mcp")

Indexes: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="INDEX...", help="Index folders, each as FOLDER or NAME=FOLDER. The default is the first, or its --fuse or --rerank."
    ),
]
Fuse: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--fuse",
        help="Rankings to fuse by reciprocal ranks, such as dense+colbert or dense+bm25; a single one is fused with the first index. bm25"
        " ranks the texts of the index that it is fused with, and is served by itself too. Repeatable.",
    ),
]
Rerank: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--rerank",
        help="Name of an index of a ColBERT model, or a ColBERT model: it re-ranks 100 candidates of every --fuse, or of the first index.",
    ),
]


def serve(
    indexes: Indexes,
    fuse: Fuse = None,
    rerank: Rerank = None,
    model: options.OldIndexModel = None,
    device: options.Device = None,
    host: Annotated[str, typer.Option("--host", help="Network interface to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8080,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="File with the token that allows adding and deleting documents. Default: QUIVER_TOKEN, otherwise read-only.",
        ),
    ] = None,
    read_token_file: Annotated[
        Path | None,
        typer.Option(
            "--read-token-file",
            help="File with the token that searches, reading documents and using models need. The token of --token-file is accepted too."
            " Default: QUIVER_READ_TOKEN, otherwise everybody may read.",
        ),
    ] = None,
    origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin", help="Origin of web pages that may send requests (CORS), such as https://example.com, or *. Repeatable."
        ),
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            help="Host name to accept in requests, such as search.example.com, *.example.com, or * for any. Repeatable. Always accepted:"
            " localhost, 127.0.0.1, [::1] and --host; if --host is not a loopback address, also this machine's name and every IP address,"
            " which health checks of orchestrators use. Other requests are answered with status 421.",
        ),
    ] = None,
    max_k: Annotated[int, typer.Option("--max-k", min=1, help="Largest number of results per query.")] = 1000,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Largest number of queries per request.")] = 64,
    max_hits: Annotated[int, typer.Option("--max-hits", min=1, help="Largest number of results per request, over all its queries.")] = 2000,
    max_texts: Annotated[int, typer.Option("--max-texts", min=1, help="Largest number of texts that a request embeds or re-ranks.")] = 2048,
    max_body: Annotated[str, typer.Option("--max-body", help="Largest size of a request body, such as 1MB.")] = "8MB",
    max_queue: Annotated[
        int, typer.Option("--max-queue", min=1, help="Largest number of waiting queries; further requests are answered with status 429.")
    ] = 256,
    max_connections: Annotated[
        int,
        typer.Option(
            "--max-connections",
            min=1,
            help="Largest number of open connections, fewer where ulimit -n is low; further requests are answered with status 503.",
        ),
    ] = 1000,
    timeout: Annotated[float, typer.Option("--timeout", min=0.001, help="Time limit of a search, in seconds.")] = 10.0,
    client_timeout: Annotated[
        float, typer.Option("--client-timeout", min=0.1, help="Time limit for a client to send a request or read a response, in seconds.")
    ] = 10.0,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Number of batches that are searched at the same time, per index.")
    ] = 2,
    poll: Annotated[
        float, typer.Option("--poll", min=0.05, help="Interval between checks for a newer generation of an index, in seconds.")
    ] = 2.0,
    drain_delay: Annotated[
        float,
        typer.Option(
            "--drain-delay", min=0, help="Time after SIGTERM in which requests are still accepted while /readyz fails, in seconds."
        ),
    ] = 1.0,
    drain: Annotated[
        float, typer.Option("--drain", min=1, help="Grace period for running requests after --drain-delay, in seconds.")
    ] = 30.0,
    verify: options.Verify = True,
    as_json: options.Json = False,
) -> None:
    """Serve indexes over HTTP, with a search page, until SIGTERM or Ctrl-C.

    Examples: quiver serve indexes/scifact --fuse bm25

    quiver serve dense=indexes/dense colbert=indexes/colbert --fuse dense+bm25 --rerank colbert --token-file token
    """
    _check_extra("serve", _SERVE)
    _check_finite(
        {"--timeout": timeout, "--client-timeout": client_timeout, "--poll": poll, "--drain-delay": drain_delay, "--drain": drain}
    )
    body_bytes, folders = _body_size(max_body), named_folders(indexes)
    if all(folder.is_dir() for folder in folders.values()):
        # Before the imports, which take seconds, and on standard error: standard output says where the service listens.
        typer.echo(f"opening {', '.join(map(str, folders.values()))}; this can take some seconds", err=True)
    from quiver.retrieval.serving.middleware import host_name, web_origin
    from quiver.retrieval.serving.schemas import Limits
    from quiver.retrieval.serving.server import Address, run_service
    from quiver.retrieval.serving.service import READING_VARIABLE, Access, open_service, read_token

    limits = Limits(
        k=max_k,
        batch=max_batch,
        hits=max_hits,
        texts=max_texts,
        body_bytes=body_bytes,
        queue=max_queue,
        connections=max_connections,
        seconds=timeout,
        read_seconds=client_timeout,
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
    access = Access(read_token(token_file), read_token(read_token_file, READING_VARIABLE))
    service = open_service(
        folders,
        combined=_combinations(folders, fuse, rerank),
        model=model,
        device=device,
        access=access,
        limits=limits,
        workers=concurrency,
        verify=verify,
    )

    def started(url: str) -> None:
        if as_json:
            print_json({"url": url, "retrievers": list(service.retrievers), "writable": service.access.writable})
        else:
            say(f"serving {', '.join(service.retrievers)} at {url}; press Ctrl-C to stop")

    run_service(service, address, started=started)


def mcp(
    indexes: Indexes,
    fuse: Fuse = None,
    rerank: Rerank = None,
    model: options.OldIndexModel = None,
    device: options.Device = None,
    verify: options.Verify = True,
) -> None:
    """Let agents search indexes and read documents, by the Model Context Protocol over standard input and output.

    An agent starts it from its configuration, such as {"mcpServers": {"notes": {"command": "quiver", "args": ["mcp", "indexes/notes"]}}}.

    Example: quiver mcp indexes/notes
    """
    _check_extra("mcp", _MCP)
    from quiver.retrieval.serving.mcp_server import run_server
    from quiver.retrieval.serving.service import open_service

    folders = named_folders(indexes)
    combined = _combinations(folders, fuse, rerank)
    run_server(open_service(folders, combined=combined, model=model, device=device, verify=verify))


def _combinations(folders: Mapping[str, Path], fuse: Sequence[str] | None, rerank: str | None) -> Combinations:
    """The fused and re-ranked retrievers; a single ranking is fused with the first index."""
    from quiver.retrieval.serving.service import Combinations

    first = next(iter(folders))
    given = [each.split("+") for each in fuse or ()]
    return Combinations(fused=[names if len(names) > 1 else [first, *names] for names in given], reranked_by=rerank)


def _check_extra(extra: str, modules: Sequence[str]) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"quiver {extra} needs {', '.join(missing)}: pip install 'quiver-retrieval[{extra}]'")


def _body_size(text: str) -> int:
    size = parse_size(text)
    if size < 1:
        raise InputError(f"--max-body must be at least 1 byte, got {text}; write it as 64KB or 1MB")
    return size


def _check_finite(seconds: Mapping[str, float]) -> None:
    """Refuse nan and inf, which pass the check of a minimum."""
    for option, value in seconds.items():
        if not math.isfinite(value):
            raise InputError(f"{option} must be a finite number of seconds, got {value}")


def named_folders(given: Sequence[str]) -> dict[str, Path]:
    """Parse indexes given as FOLDER or NAME=FOLDER. The default name is the last part of the path.

    Raises:
        InputError: Two indexes have the same name, or a name or a folder is missing, or a name has a + or >.

    Example:
        >>> named_folders(["indexes/a", "second=indexes/b"])
        {'a': PosixPath('indexes/a'), 'second': PosixPath('indexes/b')}
    """
    named = ["=" in each and not Path(each).is_dir() for each in given]
    paths = [each.partition("=")[2] if has_name else each for each, has_name in zip(given, named, strict=True)]
    short = iter(short_names([path for path, has_name in zip(paths, named, strict=True) if not has_name]))
    names = [each.partition("=")[0] if has_name else next(short) for each, has_name in zip(given, named, strict=True)]
    for name, path in zip(names, paths, strict=True):
        if "+" in name or ">" in name:
            raise InputError(f"the name '{name}' has a + or >, as names of fused and re-ranked retrievers have; name it with NAME=FOLDER")
        if not name or not path:
            raise InputError(f"expected an index as FOLDER or NAME=FOLDER, got {'='.join((name, path))!r}")
        if names.count(name) > 1:
            raise InputError(f"two indexes have the name '{name}'; name them with NAME=FOLDER")
    return dict(zip(names, map(Path, paths), strict=True))
