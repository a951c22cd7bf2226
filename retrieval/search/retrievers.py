"""Retrievers: whatever ranks documents for queries, with one interface.

The command line, evaluations, the service and integrations search through them. A retriever holds no state of a search, so several threads
may search it; models that they share are wrapped in `SharedModel`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.progress import is_interruptible, progress_bar, timed_slices
from quiver.retrieval.cache import WORDS as WORD_TABLES
from quiver.retrieval.cache import folder_if_known
from quiver.retrieval.index.engines import WORDS, Setting, check_k, check_preset
from quiver.retrieval.index.files import format_version
from quiver.retrieval.index.filters import FilterLike
from quiver.retrieval.index.index import IndexReader, encoded_queries, open_index
from quiver.retrieval.models.bm25 import BM25, NAME
from quiver.retrieval.models.encoding import join_encodings, maxsim_packed
from quiver.retrieval.models.loading import load_index_model, load_model
from quiver.retrieval.records import (
    DenseEncoding,
    DenseModel,
    Document,
    Hits,
    ModelCard,
    Query,
    Role,
    Run,
    TextTokens,
    TokenCounts,
    TokenEncoding,
    TokenModel,
    short_names,
)
from quiver.retrieval.search.bm25 import WordScore, word_index, word_scores
from quiver.retrieval.search.explain import Explanation, explain, explain_texts
from quiver.retrieval.search.search import Fusion, check_fusible, fuse_hits, rerank

if TYPE_CHECKING:
    import torch

CANDIDATES = 100  # default number of documents that each ranking contributes to a fusion or a re-ranking

_WORD_MODEL = BM25()

Effort: TypeAlias = str | Mapping[str, Setting] | float | None
"""Effort of the searches of indexes: a preset, search parameters, or a recall to reach with the fastest parameters that were measured to
reach it. None for ``balanced``. BM25 is always exhaustive."""

Explained: TypeAlias = Explanation | Sequence[WordScore]  # explanation of a document's score in one ranking

Explanations: TypeAlias = dict[str, dict[str, Explained]]
"""Document id -> name of a ranking -> explanation; only rankings that contain the document."""


class Retriever(Protocol):
    """Ranks documents for queries. One that knows efforts also takes ``effort``, which it is given only where one was asked for."""

    @property
    def name(self) -> str:
        """Name in tables and reports."""

    def search(self, queries: Sequence[Query], k: int, *, filter: FilterLike = None) -> Hits:
        """The k >= 1 best documents of each query that meet the filter, in the order of the queries, of which there is at least one.

        Raises:
            InputError: The queries, the filter or a target recall cannot be used.
        """

    def explain(self, query: str, documents: Sequence[str]) -> Explanations:
        """Explain the scores of documents for a query text; empty where scores have no reasons."""

    def describe(self) -> Mapping[str, object]:
        """What the rankings depend on, as JSON; an evaluation records it. ``kind`` is what ranks, such as ``index`` or ``fusion``."""


def search_with(retriever: Retriever, queries: Sequence[Query], k: int, filter: FilterLike = None, effort: Effort = None) -> Hits:
    """Search a retriever, with an effort only where one was asked for."""
    given: dict[str, Any] = {} if effort is None else {"effort": effort}
    return retriever.search(queries, k, filter=filter, **given)


def search_without_self(retriever: Retriever, queries: Sequence[Query], k: int, filter: FilterLike = None, effort: Effort = None) -> Hits:
    """Search a retriever for the documents that do not have the id of the query."""
    hits = search_with(retriever, queries, min(k + 1, candidates_of(retriever) or k + 1), filter, effort)
    others = (((key, score) for key, score in hits.ranking(row).items() if key != query.id) for row, query in enumerate(queries))
    without = Hits.of(dict(islice(each, k)) for each in others)
    return replace(hits, ids=without.ids, scores=without.scores)


def candidates_of(retriever: Retriever) -> int | None:
    """The candidates of a fusion or re-ranking: a deeper search would take more of them than are in use."""
    return retriever.candidates if isinstance(retriever, FusedRetriever | RerankedRetriever) else None


def one_effort(effort: str | Mapping[str, Setting] | None, target_recall: float | None) -> Effort:
    """The effort or the target recall, of which only one may be given."""
    if effort is not None and target_recall is not None:
        raise ValueError("give either effort or target_recall, not both")
    return effort if target_recall is None else float(target_recall)


def search_slices(search: Callable[[slice], Hits], count: int, *, progress: bool) -> Hits:
    """Search a number of queries slice by slice under a bar or where it can be stopped, otherwise all at once; the hits are the same."""
    if count < 2 or not (progress or is_interruptible()):
        return search(slice(count))
    parts = list[Hits]()
    with progress_bar("searching", count, enabled=progress) as advance:
        for part in timed_slices(count):
            parts.append(search(part))
            advance(len(parts[-1]))
    missing = next((hits.missing for hits in parts if hits.missing is not None), None)
    return Hits([ids for hits in parts for ids in hits.ids], [scores for hits in parts for scores in hits.scores], missing)


class _FairLock:
    """A lock that threads get in the order in which they ask for it."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._waiting = deque[object]()  # the first holds the lock

    def __enter__(self) -> None:
        own, is_first = object(), False
        with self._turn:
            self._waiting.append(own)
            try:
                is_first = self._turn.wait_for(lambda: self._waiting[0] is own)
            finally:
                if not is_first:  # Ctrl-C: a thread that no longer waits must leave the queue, or nobody gets the lock again
                    self._waiting.remove(own)
                    self._turn.notify_all()

    def __exit__(self, *error: object) -> None:
        with self._turn:
            self._waiting.popleft()
            self._turn.notify_all()


_PIECE = 2048  # tokens of one piece: tenths of a second on one core


class SharedModel:
    """A model shared by several threads. Forward passes run one at a time, because parallel ones would compete for the same cores.

    Many texts are encoded in pieces, and whoever asks meanwhile gets a turn before the next piece. ``lock`` is held during a forward pass.
    """

    def __init__(self, model: DenseModel | TokenModel) -> None:
        self.model: Any = model
        self.lock = _FairLock()
        self.card = model.card

    @classmethod
    def of(cls, model: Any) -> SharedModel:
        """The model, wrapped unless it is already: a second wrapper would have a lock of its own."""
        return model if isinstance(model, SharedModel) else cls(model)

    @property
    def device(self) -> torch.device | None:
        """Device of the model; None for one that has none."""
        return getattr(self.model, "device", None)

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> Any:
        """Encode texts, as the model does."""
        limit = self.card.document_length if role == "document" else self.card.query_length
        found = []
        # A token has at least one character, and in English about four; the estimate need not be exact.
        for piece in self.pieces([min(limit or len(text), len(text) // 3 + 2) for text in texts]):
            with self.lock:
                found.append(self.model.encode_texts(texts[piece], role, progress=progress))
        return join_encodings(found)

    def pieces(self, lengths: Sequence[int]) -> list[slice]:
        """Consecutive pieces of texts with these numbers of tokens, each encoded at once: one text, or at most 2,048 tokens."""
        found, first, total = [], 0, 0
        for row, length in enumerate(lengths):
            if row > first and total + length > _PIECE:
                found.append(slice(first, row))
                first, total = row, 0
            total += length
        return [*found, slice(first, len(lengths))]


@dataclass(frozen=True)
class EncodedQueries:
    """A model that has encoded its queries already, by one forward pass for all searches; ``rows`` are those of the texts."""

    model: Any
    encoding: DenseEncoding | TokenEncoding
    rows: Mapping[str, int]

    @classmethod
    def of(cls, model: Any, texts: Sequence[str]) -> EncodedQueries:
        """Encode queries."""
        distinct = list(dict.fromkeys(texts))
        return cls(model, model.encode_texts(distinct, "query"), {text: row for row, text in enumerate(distinct)})

    @property
    def card(self) -> ModelCard:
        """Card of the model."""
        card: ModelCard = self.model.card
        return card

    @property
    def device(self) -> torch.device | None:
        """Device of the model; None for one that has none."""
        return getattr(self.model, "device", None)

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> Any:
        """Return the encoding of queries; encode documents."""
        if role != "query":
            return self.model.encode_texts(texts, role, progress=progress)
        rows = [self.rows[text] for text in texts]
        counts = self.encoding.tokens
        tokens = TextTokens(counts.tokens[rows], counts.truncated[rows], counts.empty[rows])
        if isinstance(self.encoding, DenseEncoding):
            return DenseEncoding(self.encoding.vectors[rows], tokens)
        return TokenEncoding([self.encoding.vectors[row] for row in rows], tokens)


class DistributedIndex(Protocol):
    """An index whose segments other processes search."""

    @property
    def whole(self) -> IndexReader:
        """The index in this process."""

    def search(self, queries: Any, k: int, *, filter: FilterLike = None, effort: str | Mapping[str, Setting] | None = None) -> Hits:
        """Search encoded queries, as `IndexReader.search` does."""


@dataclass(frozen=True)
class IndexSearcher:
    """Ranks the documents of an index with its model: by vectors, or an index of BM25 by words.

    An exact index in this process is searched on the model's device; ``sharded`` is the index distributed over shards, if it is.
    """

    index: IndexReader
    model: DenseModel | TokenModel = _WORD_MODEL
    name: str = NAME
    sharded: DistributedIndex | None = None
    progress: bool = False

    def search(self, queries: Sequence[Query], k: int, *, filter: FilterLike = None, effort: Effort = None) -> Hits:
        """See `Retriever`; another model than the one that built the index is refused too."""
        k = check_k(k)
        self.index.check_model(self.model.card)
        filter = self.index.check_filter(filter)
        if isinstance(effort, float | int):
            params = self.index.search_params_for(effort, k)
        elif isinstance(effort, Mapping):
            params = effort
        else:  # of a preset, only those that it sets
            check_preset(effort or "balanced")
            params = {str(name): own for name, own in self.index.presets(k).items()}[effort or "balanced"]
        if not queries:
            raise InputError("there are no queries to search")
        begun = time.perf_counter()
        encoding = self.model.encode_texts([query.text for query in queries], "query", progress=self.progress)
        encoded = time.perf_counter()
        device: torch.device | None = getattr(self.model, "device", None)
        if self.sharded is None and device is not None:
            self.index.search_on(device)
        vectors, index = encoded_queries(encoding, self.model.card), self.sharded or self.index
        hits = search_slices(
            lambda part: index.search(vectors[part], k, filter=filter, effort=params), len(vectors), progress=self.progress
        )
        seconds = {"encode": encoded - begun, "search": time.perf_counter() - encoded}
        return replace(hits, counts=encoding.counts, efforts={self.name: params}, seconds=seconds)

    def explain(self, query: str, documents: Sequence[str]) -> Explanations:
        """See `Retriever`; documents that are not in the index are left out."""
        present = _present_documents(self.index, documents)
        if self.index.kind == WORDS:
            return {each: {self.name: word_scores(self.index, query, each)} for each in present}
        return {each.document: {self.name: each} for each in explain(self.index, self.model, query, present)}

    def describe(self) -> Mapping[str, object]:
        """See `Retriever`."""
        return {"kind": "index", "name": self.name, **identity_of(self.index)}

    @property
    def indexes(self) -> Sequence[IndexReader]:
        """The indexes that are searched."""
        return [self.index]


def identity_of(index: IndexReader) -> dict[str, object]:
    """What tells an index from others and from its own other generations, as JSON."""
    manifest = index.manifest
    return {"engine": index.kind, "model": manifest.model.fingerprint, "generation": manifest.generation, "created": manifest.created}


def _present_documents(index: IndexReader, documents: Sequence[str]) -> list[str]:
    return [document for document, row in zip(documents, index.locate(documents), strict=True) if row is not None]


@dataclass(frozen=True)
class RunRetriever:
    """Ranks documents as a run does, query id -> document id -> score, by the ids of its queries."""

    run: Run
    name: str = "run"

    def search(self, queries: Sequence[Query], k: int, *, filter: FilterLike = None) -> Hits:
        """See `Retriever`; filters are refused."""
        if filter is not None:
            raise InputError("a run cannot be filtered: the fields of its documents are not known")
        k = check_k(k)
        return Hits.of(dict(islice(self.run.get(query.id, {}).items(), k)) for query in queries)

    def explain(self, query: str, documents: Sequence[str]) -> Explanations:
        """Explain nothing: a run has no reasons."""
        del query, documents
        return {}

    def describe(self) -> Mapping[str, object]:
        """See `Retriever`."""
        return {"kind": "run", "name": self.name}


@dataclass(frozen=True)
class FusedRetriever:
    """Fuses the rankings of several retrievers, of which those of weight 0 are not searched.

    Each contributes ``candidates`` documents, or k if that is more; with ``exclude_self`` without the document that has the query's id.
    """

    parts: Sequence[Retriever]
    fusion: Fusion = field(default_factory=Fusion)
    candidates: int = CANDIDATES
    exclude_self: bool = False

    def __post_init__(self) -> None:
        self.fusion.weights_of(len(self.parts))

    @property
    def name(self) -> str:
        """Names of the parts."""
        return " + ".join(part.name for part, _ in self._used)

    def search(self, queries: Sequence[Query], k: int, *, filter: FilterLike = None, effort: Effort = None) -> Hits:
        """See `Retriever`."""
        depth, find = max(check_k(k), self.candidates), search_without_self if self.exclude_self else search_with
        found = [find(part, queries, depth, filter, effort) for part, _ in self._used]
        begun = time.perf_counter()
        fused = fuse_hits(found, replace(self.fusion, weights=tuple(weight for _, weight in self._used)), k=k)
        counts = [asdict(each.counts).values() for each in found]
        return replace(
            fused,
            counts=TokenCounts(*map(sum, zip(*counts, strict=True))),
            missing=next((each.missing for each in found if each.missing is not None), None),
            lists={part.name: each for (part, _), each in zip(self._used, found, strict=True)},
            efforts={name: params for each in found for name, params in each.efforts.items()},
            seconds=sum_seconds([*(each.seconds for each in found), {"fuse": time.perf_counter() - begun}]),
        )

    def explain(self, query: str, documents: Sequence[str]) -> Explanations:
        """See `Retriever`; a document has an explanation in each ranking that contains it."""
        explained: Explanations = {}
        for part, _ in self._used:
            for document, why in part.explain(query, documents).items():
                explained.setdefault(document, {}).update(why)
        return explained

    def describe(self) -> Mapping[str, object]:
        """See `Retriever`."""
        fusion = self.fusion
        how = {"constant": fusion.constant} if fusion.method == "rrf" else {"normalize": fusion.normalise}
        weights = ", ".join(f"{weight:g}" for weight in fusion.weights_of(len(self.parts)))
        parts = [part.describe() for part in self.parts]
        return {"kind": "fusion", "method": fusion.method, **how, "weights": weights, "candidates": self.candidates, "parts": parts}

    @property
    def indexes(self) -> Sequence[IndexReader]:
        """The indexes that are searched."""
        return [index for part in self.parts for index in indexes_of(part)]

    @property
    def _used(self) -> list[tuple[Retriever, float]]:
        return [(part, weight) for part, weight in zip(self.parts, self.fusion.weights_of(len(self.parts)), strict=True) if weight]


def indexes_of(retriever: object) -> Sequence[IndexReader]:
    """The indexes that a retriever, or what scores candidates, searches; none of one that names none."""
    return getattr(retriever, "indexes", ())


def sum_seconds(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The times of several searches, added up by stage."""
    return {stage: sum(each.get(stage, 0.0) for each in seconds) for stage in dict.fromkeys(stage for each in seconds for stage in each)}


@dataclass(frozen=True)
class Scorer:
    """Scores documents by a ColBERT model: by the vectors that an index stores of them, or by encoding their texts.

    Attributes:
        name: Name in tables.
        model: The model.
        source: Index that this model built, so that only queries are encoded; or a function from the ids of all candidates to one from an
            id to its text, so that a corpus is read once.
        leave_out: Leave candidates out that are not in the index, such as those that were added to another one only.
        texts_per_batch: Texts encoded at a time; their vectors are in memory until their queries are scored.
        progress: Show a bar over the queries whose candidates are encoded, unless there is a single one.

    Raises:
        InputError: The index was built by another model.
    """

    name: str
    model: TokenModel
    source: IndexReader | Callable[[Iterable[str]], Callable[[str], str]]
    leave_out: bool = False
    texts_per_batch: int = 1024
    progress: bool = False

    def __post_init__(self) -> None:
        for index in self.indexes:
            index.check_model(self.model.card)

    def __call__(self, queries: Sequence[str], candidates: Sequence[Sequence[str]]) -> list[NDArray[np.float32]]:
        """The scores of each query's candidates, Q arrays (P,); minus infinity for a candidate without vectors."""
        vectors = self.model.encode_texts(queries, "query").vectors
        if not isinstance(self.source, IndexReader):
            return self._score_texts(vectors, candidates, self.source(key for own in candidates for key in own))
        scores = []
        for query, documents in zip(vectors, candidates, strict=True):
            present = _present_documents(self.source, documents) if self.leave_out else documents
            found = dict(zip(present, self.source.scores(query, present).tolist(), strict=True))
            scores.append(np.array([found.get(document, -np.inf) for document in documents], np.float32))
        return scores

    def _score_texts(
        self, vectors: Sequence[NDArray[np.float32]], candidates: Sequence[Sequence[str]], text_of: Callable[[str], str]
    ) -> list[NDArray[np.float32]]:
        """Encode the candidates of as many queries at a time as fit a batch, each distinct one once."""
        scores: list[NDArray[np.float32]] = []
        with progress_bar("re-ranking", len(vectors), enabled=self.progress and len(vectors) > 1) as advance:
            while len(scores) < len(vectors):
                first = last = len(scores)
                wanted: dict[str, int] = {}
                while last < len(vectors) and (last == first or len({*wanted, *candidates[last]}) <= self.texts_per_batch):
                    for document in candidates[last]:
                        wanted.setdefault(document, len(wanted))
                    last += 1
                documents = self.model.encode_texts(list(map(text_of, wanted)), "document").vectors if wanted else []
                for query, own in zip(vectors[first:last], candidates[first:last], strict=True):
                    chosen = [documents[wanted[document]] for document in own]
                    tokens = np.concatenate([np.zeros((0, query.shape[1]), np.float32), *chosen])
                    offsets = np.cumsum([0, *map(len, chosen)], dtype=np.int64)
                    scores.append(maxsim_packed([query], tokens, offsets)[0])
                advance(last - first)
        return scores

    def explain(self, query: str, documents: Sequence[str]) -> Mapping[str, Explanation]:
        """Explain the scores of documents; those that are not in the index are left out."""
        if isinstance(self.source, IndexReader):
            explained = explain(self.source, self.model, query, _present_documents(self.source, documents))
        else:
            text_of = self.source(documents)
            explained = explain_texts(self.model, query, {document: text_of(document) for document in documents})
        return {each.document: each for each in explained}

    def describe(self) -> Mapping[str, object]:
        """What the scores depend on, as JSON."""
        return {str(each.path): identity_of(each) for each in self.indexes} or {"model": self.model.card.fingerprint}

    @property
    def indexes(self) -> Sequence[IndexReader]:
        """The index, if there is one."""
        return [self.source] if isinstance(self.source, IndexReader) else []


@dataclass(frozen=True)
class RerankedRetriever:
    """Re-ranks the candidates of another retriever, whose scores are ignored; fields as those of `FusedRetriever`."""

    first: Retriever
    scorer: Scorer
    candidates: int = CANDIDATES
    exclude_self: bool = False

    @property
    def name(self) -> str:
        """Name of what re-ranks."""
        return self.scorer.name

    def search(self, queries: Sequence[Query], k: int, *, filter: FilterLike = None, effort: Effort = None) -> Hits:
        """See `Retriever`."""
        find = search_without_self if self.exclude_self else search_with
        found = find(self.first, queries, max(check_k(k), self.candidates), filter, effort)
        begun = time.perf_counter()
        best = rerank(found, [query.text for query in queries], self.scorer, k)
        seconds = sum_seconds([found.seconds, {"rerank": time.perf_counter() - begun}])
        return replace(found, ids=best.ids, scores=best.scores, candidates=found, seconds=seconds)

    def explain(self, query: str, documents: Sequence[str]) -> Explanations:
        """See `Retriever`: the scores of the re-ranking."""
        return {document: {self.name: why} for document, why in self.scorer.explain(query, documents).items()}

    def describe(self) -> Mapping[str, object]:
        """See `Retriever`."""
        return {"kind": "re-ranking", "candidates": self.candidates, "first": self.first.describe(), "second": self.scorer.describe()}

    @property
    def indexes(self) -> Sequence[IndexReader]:
        """The indexes that are searched, and that score."""
        return [*indexes_of(self.first), *self.scorer.indexes]


def storing(indexes: Sequence[IndexReader], key: str) -> IndexReader | None:
    """The first index that contains a document and stores texts; None if there is none."""
    texts = (index for index in indexes if index.manifest.policy.store_text)
    return next((index for index in texts if index.locate([key])[0] is not None), None)


def text_of(indexes: Sequence[IndexReader], key: str) -> str:
    """Text of a document as the first index that contains it and stores texts would encode it."""
    index = storing(indexes, key)
    if index is None:
        raise InputError(
            f"{indexes[0].path}: the index stores no texts, which a model needs for re-ranking; pass an index of a ColBERT model to"
            " --rerank (rerank=), or rebuild the index without --no-text (store_text=False)"
        )
    return index.text_of(key)


class OpenIndexes:
    """Indexes and models that are opened by folder or hub id, each once, and the retrievers over them; ``indexes`` are open already."""

    def __init__(
        self, indexes: Iterable[IndexReader] = (), *, device: str | None = None, verify: bool = True, progress: bool = False
    ) -> None:
        self._device, self._verify, self._progress = device, verify, progress
        self._indexes: dict[Path, IndexReader] = {}
        for each in indexes:
            path = _path_of(each)  # one for all indexes in memory
            self._indexes[path if path.is_dir() else path / str(len(self._indexes))] = each
        self._sharded: dict[Path, DistributedIndex] = {}
        self._sources: dict[Path, str | None] = {}  # of the indexes that were opened here: folder or hub id of the model
        self._words: dict[Path, IndexReader] = {}
        self._models: dict[str, SharedModel] = {}

    @property
    def indexes(self) -> list[IndexReader]:
        """The open indexes, in the order in which they were opened."""
        return list(self._indexes.values())

    def index(
        self,
        given: str | Path | IndexReader,
        *,
        model: str | None = None,
        generation: int | None = None,
        sharded: DistributedIndex | None = None,
    ) -> IndexReader:
        """Open an index, or return the open one of its path.

        Args:
            given: Folder of the index; or an open index, whose model it is searched with.
            model: Folder or hub id of the model of a folder; None for the one that built it.
            generation: Number of the generation; None for the newest.
            sharded: The index, distributed over shards; None to search it in this process.
        """
        path = _path_of(given)
        known = self._indexes.get(path)
        if isinstance(given, IndexReader) and not path.is_dir() and self._indexes and given is not known:
            raise InputError("an index in memory cannot be fused with another one or re-rank it; build it in a folder (out=DIR)")
        if known is None:
            if isinstance(given, IndexReader):
                self._indexes[path] = given
            else:
                whole = None if sharded is None else sharded.whole
                self._indexes[path] = whole or open_index(given, generation=generation, verify=self._verify)
                self._sources[path] = model
                if sharded is not None:
                    self._sharded[path] = sharded
        return self._indexes[path]

    def vectors(self, given: str | Path | IndexReader, *, name: str | None = None) -> IndexSearcher:
        """Make a retriever of an index and its model."""
        path, index = _path_of(given), self.index(given)
        shown = name or short_names([str(given.path if isinstance(given, IndexReader) else given)])[0]
        return IndexSearcher(index, self._model_of(index), shown, self._sharded.get(path), self._progress)

    def words(self, given: str | Path | IndexReader) -> IndexSearcher:
        """Make a BM25 retriever of the documents of an index, which must store texts."""
        path, index = _path_of(given), self.index(given)
        if path not in self._words:
            cache = folder_if_known(WORD_TABLES)
            self._words[path] = word_index(index, cache=cache, verify=self._verify, progress=self._progress)
        return IndexSearcher(self._words[path])

    def fused(self, given: Sequence[str | Path | IndexReader], fusion: Fusion | None = None, *, candidates: int = CANDIDATES) -> Retriever:
        """Make a retriever that fuses indexes, and BM25 over the documents of the first index.

        Args:
            given: Indexes, their folders, or ``bm25``; a single one is not fused. One of weight 0 is not opened.
            fusion: Method, weights and normalization; None for reciprocal ranks.
            candidates: Documents that each contributes.
        """
        names = [str(each.path if isinstance(each, IndexReader) else each) for each in given]
        # A folder that is called bm25 is an index in the first place, where no other index gives BM25 its documents.
        words = [name == NAME and (number > 0 or format_version(Path(name)) is None) for number, name in enumerate(names)]
        first = next((each for each, is_words in zip(given, words, strict=True) if not is_words), None)
        if first is None:
            raise InputError("bm25 ranks the documents of an index; name an index too")
        parts: list[Retriever] = []
        opened: list[IndexReader] = []
        weights = [1.0] * len(names) if fusion is None else fusion.weights_of(len(names))
        for each, name, weight, is_words in zip(given, short_names(names), weights, words, strict=True):
            if not weight:
                continue
            index = self.index(first if is_words else each)
            if is_words and opened and index.kind == WORDS:
                raise InputError(f"{index.path}: an index of BM25, which bm25 would fuse with itself; leave out bm25")
            if opened:
                check_fusible(opened[0], index)
            opened.append(index)
            parts.append(self.words(first) if is_words else self.vectors(each, name=name))
        if len(names) == 1:
            return parts[0]
        return FusedRetriever(parts, replace(fusion or Fusion(), weights=tuple(weight for weight in weights if weight)), candidates)

    def reranked(
        self, first: Retriever, given: str | Path | TokenModel | IndexReader, *, candidates: int = CANDIDATES
    ) -> RerankedRetriever:
        """Re-rank a retriever by an index of a ColBERT model, or by a ColBERT model, loaded or not; see `scorer`."""
        return RerankedRetriever(first, self.scorer(given), candidates)

    def scorer(self, given: str | Path | TokenModel | IndexReader) -> Scorer:
        """Open an index of a ColBERT model, or a ColBERT model, which encodes the texts in the open indexes."""
        needed = "re-ranking (--rerank, rerank=) needs a ColBERT model or an index of one"
        if isinstance(given, IndexReader) or (isinstance(given, str | Path) and format_version(Path(given)) is not None):
            index = self.index(given)
            if index.manifest.model.kind != "colbert":
                stored = "no vectors" if index.kind == WORDS else "a single vector per document"
                raise InputError(f"{index.path}: {needed}; this index has {stored}")
            return Scorer(short_names([str(given.path if isinstance(given, IndexReader) else given)])[0], self._model_of(index), index)
        if str(given) == NAME and not Path(NAME).exists():
            raise InputError(f"{NAME}: {needed}; BM25 has no vectors and can be fused (--fuse, fuse=)")
        model = load_model(str(given), device=self._device) if isinstance(given, str | Path) else given
        if not hasattr(model, "card"):
            raise InputError(f"{needed}, got a {type(given).__name__}")
        source = str(given) if isinstance(given, str | Path) else model.card.source
        if model.card.kind != "colbert":
            raise InputError(f"{source}: {needed}; this model gives a single vector per text")
        return Scorer(short_names([source])[0], SharedModel.of(model), lambda ids: self.text_of, progress=self._progress)

    def document(self, key: str) -> Document | None:
        """A document of the first index that contains it and stores texts; None if there is no such index."""
        index = storing(self.indexes, key)
        return None if index is None else index.document(key)

    def text_of(self, key: str) -> str:
        """Text of a document as it was encoded; see the function `text_of`."""
        return text_of(self.indexes, key)

    def _model_of(self, index: IndexReader) -> SharedModel:
        card, path = index.manifest.model, _path_of(index)
        if card.fingerprint not in self._models:
            model = index.model if path not in self._sources else None
            if model is None:
                device = None if index.kind == WORDS else self._device  # which may be that of another index
                model = load_index_model(card, self._sources[path], device=device)
                index.check_model(model.card)
            self._models[card.fingerprint] = SharedModel.of(model)
        return self._models[card.fingerprint]


def _path_of(given: str | Path | IndexReader) -> Path:
    return (given.path if isinstance(given, IndexReader) else Path(given)).resolve()


def open_retriever(
    index: str | Path,
    *,
    fuse: str | Path | Sequence[str | Path] = (),
    fusion: Fusion | None = None,
    rerank: str | Path | None = None,
    candidates: int = CANDIDATES,
    device: str | None = None,
) -> Retriever:
    """Open an index with its model as a retriever, fused with other rankings and re-ranked.

    Args:
        index: Folder of the index.
        fuse: Rankings to fuse with: ``bm25``, or folders of other indexes of the same documents.
        fusion: Method, weights and normalization; None for reciprocal ranks.
        rerank: ColBERT model, or index of one, that re-ranks the candidates.
        candidates: Documents that each ranking contributes to fusion and re-ranking.
        device: Device of the models; None for a GPU if available.

    Raises:
        InputError: An index or a model cannot be opened, or they do not go together.
    """
    opened = OpenIndexes(device=device)
    others = [fuse] if isinstance(fuse, str | Path) else fuse
    first = opened.fused([index, *others], fusion, candidates=candidates)
    return first if rerank is None else opened.reranked(first, rerank, candidates=candidates)
