"""``quiver serve`` and ``quiver mcp``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quiver.cli import options
from quiver.cli.options import argument, command, group, option, print_json, say
from quiver.encoder.errors import InputError
from quiver.retrieval.options import parse_size

if TYPE_CHECKING:
    from quiver.retrieval.serving.service import Combinations

# Modules of the extras.
_SERVE = ("fastapi", "fastapi_offline", "uvicorn", "prometheus_client")
_MCP = (*_SERVE, "mcp")

INDEXES = argument("Index folders, each as FOLDER or NAME=FOLDER. The default is the first, or its --fuse or --rerank.", metavar="INDEX...")


def parse_body_size(text: str) -> int:
    """Parse ``--max-body``, in bytes."""
    size = parse_size(text)
    if size < 1:
        raise InputError(f"--max-body must be at least 1 byte, got {text}; write it as 64KB or 1MB")
    return size


@dataclass(frozen=True)
@group
class Combining:
    """Fused and re-ranked retrievers beside those of the indexes."""

    fuse: tuple[str, ...] = option(
        (),
        "Rankings to fuse by reciprocal ranks, such as dense+colbert or dense+bm25; a single one is fused with the first index. bm25 ranks"
        " the texts of the index that it is fused with, and is served by itself too. Repeatable.",
    )
    rerank: str | None = option(
        None, "Index of a ColBERT model, or the model: it re-ranks 100 candidates of every --fuse or the first index."
    )

    def of(self, first: str) -> Combinations:
        """The combinations; a single ranking is fused with the first index."""
        from quiver.retrieval.serving.service import Combinations

        given = [each.split("+") for each in self.fuse]
        return Combinations(fused=[names if len(names) > 1 else [first, *names] for names in given], reranked_by=self.rerank)


@dataclass(frozen=True)
@group
class LimitOptions:
    """Fields of `quiver.retrieval.serving.schemas.Limits`."""

    k: int = option(1000, "Largest number of results per query.", "--max-k", min=1)
    batch: int = option(64, "Largest number of queries per request.", "--max-batch", min=1)
    hits: int = option(2000, "Largest number of results per request, over all its queries.", "--max-hits", min=1)
    texts: int = option(2048, "Largest number of texts that a request embeds or re-ranks.", "--max-texts", min=1)
    body_bytes: int = option("8MB", "Largest size of a request body, such as 1MB.", "--max-body", parse=parse_body_size)
    queue: int = option(256, "Largest number of waiting queries; further requests are answered with status 429.", "--max-queue", min=1)
    connections: int = option(
        1000, "Most open connections, fewer where ulimit -n is low; others get status 503.", "--max-connections", min=1
    )
    seconds: float = option(10.0, "Time limit of a search, in seconds.", "--timeout", min=0.001)
    read_seconds: float = option(10.0, "Time for a client to send a request or read a response, in seconds.", "--client-timeout", min=0.1)


@dataclass(frozen=True)
@group
class AddressOptions:
    """Fields of `quiver.retrieval.serving.server.Address`."""

    host: str = option("127.0.0.1", "Network interface to listen on; 0.0.0.0 for all.")
    port: int = option(8080, "Port to listen on; 0 for a free one.", "-p", min=0, max=65535)
    origins: tuple[str, ...] = option(
        (), "Origin of pages that may send requests (CORS): https://example.com, or *. Repeatable.", "--allow-origin"
    )
    hosts: tuple[str, ...] = option(
        (),
        "Host name to accept in requests, such as search.example.com, *.example.com, or * for any. Repeatable. Always accepted: localhost,"
        " 127.0.0.1, [::1] and --host; if --host is not a loopback address, also this machine's name and every IP address, which health"
        " checks of orchestrators use. Other requests are answered with status 421.",
        "--allow-host",
    )
    poll_seconds: float = option(2.0, "Interval between checks for a newer generation of an index, in seconds.", "--poll", min=0.05)
    drain_delay: float = option(1.0, "Time after SIGTERM in which requests are still accepted while /readyz fails, in seconds.", min=0)
    drain_seconds: float = option(30.0, "Grace period for running requests after --drain-delay, in seconds.", "--drain", min=1)


@command
def serve(
    indexes: tuple[str, ...] = INDEXES,
    *,
    combining: Combining,
    model: options.IndexModel,
    listen: AddressOptions,
    token_file: Path | None = option(None, "File with the token for adding and deleting documents. Default: QUIVER_TOKEN, else read-only."),
    read_token_file: Path | None = option(
        None,
        "File with the token that searches, reading documents and using models need. The token of --token-file is accepted too. Default:"
        " QUIVER_READ_TOKEN, otherwise everybody may read.",
    ),
    limits: LimitOptions,
    concurrency: int = option(2, "Number of batches that are searched at the same time, per index.", min=1),
    verify: bool = options.VERIFY,
    json: bool = options.JSON,
) -> None:
    """Serve indexes over HTTP, with a search page, until SIGTERM or Ctrl-C.

    Examples: quiver serve indexes/scifact --fuse bm25

    quiver serve dense=indexes/dense colbert=indexes/colbert --fuse dense+bm25 --rerank colbert --token-file token
    """
    _check_extra("serve", _SERVE)
    folders = named_folders(indexes)
    if all(folder.is_dir() for folder in folders.values()):
        # Before the imports, which take seconds, and on standard error: standard output says where the service listens.
        typer.echo(f"opening {', '.join(map(str, folders.values()))}; this can take some seconds", err=True)
    from quiver.retrieval.serving.middleware import host_name, web_origin
    from quiver.retrieval.serving.schemas import Limits
    from quiver.retrieval.serving.server import Address, run_service
    from quiver.retrieval.serving.service import READING_VARIABLE, Access, open_service, read_token

    origins, hosts = [web_origin(each) for each in listen.origins], [host_name(each) for each in listen.hosts]
    service = open_service(
        folders,
        combined=combining.of(next(iter(folders))),
        model=model.model,
        device=model.device,
        access=Access(read_token(token_file), read_token(read_token_file, READING_VARIABLE)),
        limits=Limits(**vars(limits)),
        workers=concurrency,
        verify=verify,
    )

    def started(url: str) -> None:
        if json:
            print_json({"url": url, "retrievers": list(service.retrievers), "writable": service.access.writable})
        else:
            say(f"serving {', '.join(service.retrievers)} at {url}; press Ctrl-C to stop")

    run_service(service, Address(**{**vars(listen), "origins": origins, "hosts": hosts}), started=started)


@command
def mcp(indexes: tuple[str, ...] = INDEXES, *, combining: Combining, model: options.IndexModel, verify: bool = options.VERIFY) -> None:
    """Let agents search indexes and read documents, by the Model Context Protocol over standard input and output.

    An agent starts it from its configuration, such as {"mcpServers": {"notes": {"command": "quiver", "args": ["mcp", "indexes/notes"]}}}.

    Example: quiver mcp indexes/notes
    """
    _check_extra("mcp", _MCP)
    from quiver.retrieval.serving.mcp_server import run_server
    from quiver.retrieval.serving.service import open_service

    folders = named_folders(indexes)
    combined = combining.of(next(iter(folders)))
    run_server(open_service(folders, combined=combined, model=model.model, device=model.device, verify=verify))


def _check_extra(extra: str, modules: Sequence[str]) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"quiver {extra} needs {', '.join(missing)}: pip install 'quiver-retrieval[{extra}]'")


def named_folders(given: Sequence[str]) -> dict[str, Path]:
    """Parse indexes given as FOLDER or NAME=FOLDER. The default name is the last part of the path.

    Example:
        >>> named_folders(["indexes/a", "second=indexes/b"])
        {'a': PosixPath('indexes/a'), 'second': PosixPath('indexes/b')}
    """
    from quiver.retrieval.records import short_names

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
