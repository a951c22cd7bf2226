"""The service: its retrievers, the access token, and how they are opened."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from quiver.encoder import InputError
from quiver.retrieval.index import open_index
from quiver.retrieval.models.bm25 import NAME
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_index_model, load_model
from quiver.retrieval.search.retrievers import SharedModel
from quiver.retrieval.search.search import check_fusible, differing_documents
from quiver.retrieval.serving.indexes import ServedIndex, open_generation
from quiver.retrieval.serving.metrics import Metrics
from quiver.retrieval.serving.retrievers import Part, Reranker, ServedRetriever
from quiver.retrieval.serving.schemas import Limits, RequestError, StoredDocument

logger = logging.getLogger(__name__)

VARIABLE = "QUIVER_TOKEN"  # environment variable with the token that allows changes, and reading
READING_VARIABLE = "QUIVER_READ_TOKEN"  # environment variable with the token that reading needs
_SHORTEST = 16  # least length of a token, in characters


class Access:
    """Allows changes of documents to clients that send a token, and if there is a ``read_token`` also reading.

    Without a token nobody changes documents; the one for changes allows reading too.

    Raises:
        InputError: Both tokens are equal.
    """

    def __init__(self, token: str | None, read_token: str | None = None) -> None:
        if token is not None and token == read_token:
            raise InputError("the tokens for changes and for reading are equal, so that readers could change documents; make another one")
        self._digests = [_digest(each) for each in (token, read_token) if each is not None]
        self.writable, self.private = token is not None, read_token is not None

    def check(self, given: str | None, *, change: bool) -> None:
        """Check the token of a request, None if it has none."""
        if change and not self.writable:
            raise RequestError(403, "read_only", "this service is read-only; start it with --token-file to allow changes")
        if not change and not self.private:
            return
        # Digests have equal lengths and are compared in constant time, all of them.
        allowed = self._digests[:1] if change else self._digests
        if given is None or not sum(hmac.compare_digest(_digest(given), each) for each in allowed):
            problem = "send the header Authorization: Bearer TOKEN" if given is None else "wrong token"
            raise RequestError(401, "unauthorized", problem, {"WWW-Authenticate": "Bearer"})


def read_token(file: Path | None, variable: str = VARIABLE) -> str | None:
    """Read a token from a file, or from an environment variable; None if there is neither.

    Raises:
        InputError: The file cannot be read, or the token is empty or too short.
    """
    if file is None:
        if (token := os.environ.get(variable)) is None:
            return None
        origin = variable
    else:
        origin = str(file)
        try:
            token = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
            raise InputError(f"{file}: the token cannot be read ({reason})") from error
    token = token.strip()
    if not token:
        # An empty token is a mistake, such as a secret that was not filled in: to go on without one would open the service.
        raise InputError(f"{origin}: the token is empty; make one with: openssl rand -hex 32, or remove {origin}")
    if len(token) < _SHORTEST:
        raise InputError(f"{origin}: the token must have at least {_SHORTEST} characters; make one with: openssl rand -hex 32")
    return token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


@dataclass
class Service:
    """State of the service; the first retriever is the default of searches."""

    retrievers: Mapping[str, ServedRetriever]
    limits: Limits
    access: Access
    metrics: Metrics
    threads: ThreadPoolExecutor
    draining: bool = field(init=False, default=False)
    indexes: list[ServedIndex] = field(init=False)
    _warnings: dict[str, tuple[object, str | None]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.indexes = list(dict.fromkeys(served for each in self.retrievers.values() for served in each.indexes))
        for name, each in self.retrievers.items():
            self.metrics.queue.labels(name).set_function(partial(lambda retriever: retriever.waiting, each))
            self.metrics.generation.labels(name).set_function(partial(lambda served: served.current.number, each.served))
            self.metrics.documents.labels(name).set_function(partial(lambda served: len(served.current.index), each.served))
            for served in each.indexes:
                reloads = partial(self.metrics.reloads.labels, name)
                served.observers.append(partial(lambda labels, worked: labels("done" if worked else "failed").inc(), reloads))

    def compared_warning(self, retriever: ServedRetriever) -> str | None:
        """Why the rankings of a retriever must not be compared with those of the first index; None if both rank the same documents."""
        first = self.first_index
        names = f"{first.name!r} and {retriever.name!r}"
        return self._warning(first.served, retriever, f"{names} rank different documents, so their rankings cannot be compared")

    def combined_warning(self, retriever: ServedRetriever) -> str | None:
        """Why a fused or re-ranked ranking can lack documents; None if the indexes that it combines hold the same documents."""
        problem = f"{retriever.name!r} combines indexes of different documents, and one that an index lacks ranks lower or not at all"
        return self._warning(retriever.served, retriever, problem)

    def _warning(self, first: ServedIndex, retriever: ServedRetriever, problem: str) -> str | None:
        others = [each for each in retriever.indexes if each is not first]
        states = [(each.current.number, each.current.index.manifest.created) for each in (first, *others)]
        known, warning = self._warnings.get(problem, (None, None))
        if known != states:
            found = (differing_documents(first.current.index, each.current.index) for each in others)
            difference = next(filter(None, found), None)
            warning = None if difference is None else f"{problem}: {difference}"
            self._warnings[problem] = states, warning
        return warning

    @asynccontextmanager
    async def watched(self, seconds: float) -> AsyncIterator[None]:
        """Look for newer generations of the indexes at an interval, until the block ends."""
        watching = [asyncio.create_task(served.watch(seconds)) for served in self.indexes]
        try:
            yield
        finally:
            for task in watching:
                task.cancel()

    def retriever(self, name: str | None) -> ServedRetriever:
        """Return a retriever by its name, or the first one for None."""
        if name is None:
            return next(iter(self.retrievers.values()))
        # In an address, the + of a fused retriever's name is a space unless it is written %2B.
        found = self.retrievers.get(name) or self.retrievers.get(name.replace(" ", "+"))
        if found is None:
            raise RequestError(404, "unknown_retriever", f"no such retriever; the retrievers are {', '.join(self.retrievers)}")
        return found

    @property
    def first_index(self) -> ServedRetriever:
        """The retriever of the first index alone, which changes are for by default."""
        return next(each for each in self.retrievers.values() if len(each.parts) == 1 and each.reranker is None)

    def document(self, key: str, retriever: str | None = None) -> StoredDocument:
        """Return a document by its id, from the index of a retriever, or of the first one for None."""
        found = self.retriever(retriever)
        generation = found.served.current
        index = generation.index
        if index.locate([key])[0] is None:
            raise RequestError(404, "unknown_document", f"document {key!r} is not in the index")
        if not index.manifest.policy.store_text:
            return StoredDocument(key, None, None, None, found.name, generation.number)
        stored = index.document(key)
        metadata = None if stored.metadata is None else dict(stored.metadata)
        return StoredDocument(key, stored.title, stored.text, metadata, found.name, generation.number)


@dataclass(frozen=True)
class Combinations:
    """Retrievers beside those of the indexes.

    Attributes:
        words: Add a BM25 retriever over the texts of the first index.
        fused: Names of the rankings that each fused retriever combines: of indexes, and ``bm25`` for the texts of the first of them.
        reranked_by: Name of an index of a ColBERT model, or such a model, that re-ranks every fused retriever, or the first index.
    """

    words: bool = False
    fused: Sequence[Sequence[str]] = ()
    reranked_by: str | None = None

    def with_words(self, first: str) -> list[str]:
        """Names of the indexes whose texts BM25 ranks: that of the retriever ``bm25``, then others; ``first`` is the first index."""
        fused = [_first_index(names, first) for names in self.fused if NAME in names]
        return list(dict.fromkeys([first, *fused] if self.words else fused))


def open_service(
    folders: Mapping[str, Path],
    *,
    combined: Combinations | None = None,
    model: str | None = None,
    device: str | None = None,
    access: Access | None = None,
    limits: Limits | None = None,
    workers: int = 2,
    verify: bool = True,
) -> Service:
    """Open indexes and their models.

    The first retriever, the default of searches, is the most that was asked for: the first re-ranking, otherwise the first fusion,
    otherwise the first index.

    Args:
        folders: Name -> folder of an index; one or more.
        combined: BM25, fused and re-ranked retrievers.
        model: Model of the first index; None for the one that built it.
        device: Device of the models; None for a GPU if available.
        access: Access control; None for a read-only service that everybody may read.
        limits: Limits on requests.
        workers: Number of batches that each retriever searches at the same time.
        verify: Verify the checksum of each block when it is first read.

    Raises:
        InputError: An index or its model cannot be opened, a name is not that of an index, or indexes to fuse share no document.
    """
    combined, limits, metrics = combined or Combinations(), limits or Limits(), Metrics()
    words = combined.with_words(next(iter(folders)))
    if words and NAME in folders:
        raise InputError(f"the name '{NAME}' is reserved for BM25; name the index with NAME=FOLDER")
    count = len(folders) + len(words) + 2 * max(1, len(combined.fused))
    threads = ThreadPoolExecutor(max_workers=workers * count + 2, thread_name_prefix="quiver-serve")
    models: dict[str, SharedModel] = {}
    parts: dict[str, Part] = {}
    for position, (name, folder) in enumerate(folders.items()):
        first = position == 0
        card = open_index(folder).manifest.model
        if card.fingerprint not in models:
            where = None if card.kind == NAME else device  # it is that of the other indexes
            models[card.fingerprint] = SharedModel(load_index_model(card, model if first else None, device=where))
        newest = partial(open_generation, folder, models[card.fingerprint], words=name in words, verify=verify)
        parts[name] = Part(name, ServedIndex(folder, newest, threads))
    by_words = {name: Part(NAME, parts[name].served, words=True) for name in words if name in parts}
    parts |= {part.name: part for part in list(by_words.values())[:1]}
    make = partial(ServedRetriever, threads=threads, limits=limits, workers=workers, metrics=metrics)
    retrievers = {name: make(name, [part]) for name, part in parts.items()}
    default = next(iter(retrievers))
    fused = [_choose_parts(names, parts, by_words) for names in combined.fused]
    for each in fused:
        name = "+".join(part.name for part in each)
        retrievers[name] = make(name, each)
    default = next((name for name in retrievers if name not in parts), default)
    if combined.reranked_by is not None:
        reranker = _open_reranker(combined.reranked_by, parts, device)
        for each in fused or [[next(iter(parts.values()))]]:
            name = f"{'+'.join(part.name for part in each)}>{reranker.name}"
            retrievers[name] = make(name, each, reranker=reranker)
        default = next(name for name, each in retrievers.items() if each.reranker is not None)
    retrievers = {default: retrievers[default], **retrievers}
    service = Service(retrievers, limits, access or Access(None), metrics, threads)
    warned = {name: warning for name, retriever in retrievers.items() if (warning := service.compared_warning(retriever)) is not None}
    if warned:
        others = " and ".join(repr(name) for name in list(warned)[1:])
        logger.warning("%s%s", next(iter(warned.values())), f"; the same holds for {others}" if others else "")
    return service


def _first_index(names: Sequence[str], default: str) -> str:
    return next((name for name in names if name != NAME), default)


def _choose_parts(names: Sequence[str], parts: Mapping[str, Part], by_words: Mapping[str, Part]) -> list[Part]:
    """The rankings that a fused retriever combines; ``by_words`` has BM25 of the texts of each index."""
    default = next(iter(parts))
    for name in names:
        if name not in parts and name != NAME:
            first = parts[default].served.current.index
            known = dict.fromkeys([*parts, *([NAME] if first.manifest.policy.store_text and first.kind != NAME else [])])
            given = " ".join(f"{each}=DIR{number}" for number, each in enumerate((each for each in names if each != NAME), 1))
            raise InputError(
                f"--fuse {'+'.join(names)}: there is no ranking '{name}'; there are {', '.join(known)}; a ranking of another index needs"
                f" its folder: quiver serve {given} --fuse {'+'.join(names)}"
            )
    if len(set(names)) < len(names):
        raise InputError(f"--fuse {'+'.join(names)}: a ranking occurs twice")
    chosen = [by_words[_first_index(names, default)] if name == NAME else parts[name] for name in names]
    ranked_by_words = [part.served for part in chosen if part.words]
    for part in chosen:
        if not part.words and part.served in ranked_by_words and part.served.current.index.kind == NAME:
            raise InputError(f"{part.name}: an index of BM25, which bm25 would fuse with itself; leave out bm25, or fuse NAME+bm25")
    for other in chosen[1:]:
        check_fusible(chosen[0].served.current.index, other.served.current.index)
    return chosen


def _open_reranker(given: str, parts: Mapping[str, Part], device: str | None) -> Reranker:
    if given in parts and not parts[given].words:
        served = parts[given].served
        kind = served.current.index.manifest.model.kind
        if kind != "colbert":
            raise InputError(f"--rerank {given}: only an index of a ColBERT model re-ranks, and this one is of the kind {kind}")
        return Reranker(given, served)
    loaded = load_model(given, device=device)
    if not isinstance(loaded, ColBERT):
        raise InputError(f"--rerank {given}: only a ColBERT model, or an index of one, re-ranks")
    return Reranker(Path(given).name, SharedModel(loaded))
