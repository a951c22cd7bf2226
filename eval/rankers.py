"""What an evaluation scores: models, BM25, TREC runs, indexes and retrievers, their fusions and re-rankings.

Each is a ranker: it ranks the documents of a collection for its queries. `Contenders` opens them and describes them as systems.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import file_sha256
from quiver.encoder.progress import progress_bar
from quiver.eval.datasets.benchmarks import Benchmark, Policy, cut, depth
from quiver.eval.results import IndexUsed, Library, Parameter, System, Truncated, index_name
from quiver.retrieval.data.corpus import Collection, DocumentSource, NamedDocuments, read_run
from quiver.retrieval.data.embedding_store import EmbeddingStore, StoredVectors
from quiver.retrieval.display import short_names
from quiver.retrieval.index.documents import Condition, Filter, FilterLike
from quiver.retrieval.index.engines import EXACT, WORDS, Setting, check_engine, check_k
from quiver.retrieval.index.index import Index, open_index
from quiver.retrieval.index.memory import index_vectors
from quiver.retrieval.index.on_device import device_of
from quiver.retrieval.index.store.reading import format_version
from quiver.retrieval.models.bm25 import PARAMETERS
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.models.options import FOLDERS_SETTINGS, ModelOptions
from quiver.retrieval.records import DenseModel, Document, Dtype, Hits, Query, Run, TokenModel
from quiver.retrieval.search.bm25 import BlockLimits, rank_streamed
from quiver.retrieval.search.groups import field_of, search_groups
from quiver.retrieval.search.retrievers import (
    CANDIDATES,
    CandidateScorer,
    Effort,
    Explained,
    Explanations,
    FusedRetriever,
    IndexScorer,
    OpenIndexes,
    RerankedRetriever,
    Retriever,
    SharedModel,
    TextScorer,
    VectorRetriever,
    WordRetriever,
)
from quiver.retrieval.search.search import Fusion, SearchResult, search_slices

if TYPE_CHECKING:
    from typing_extensions import TypeIs

logger = logging.getLogger(__name__)

OVERLAPS = (10, 100)
"""Depths of the overlap of an index with exact search; depths beyond ``k`` are left out."""


TIE = 1e-6
"""Relative tolerance for equal scores: float32 sums in another order differ by about this much."""


BM25 = System(source="bm25", kind="bm25", library="quiver")
"""System record of ``model="bm25"``."""


_BATCH = 10_000  # document ids that are looked up in an index at a time

_STAGES = {"encode": "encode_queries"}  # stage of a search -> step of an evaluation, where the names differ


@dataclass(frozen=True)
class Ranking:
    """Run of one collection, cut by its policy, with its index, truncation and timing; see the fields of ``CollectionResult``.

    ``depth`` is the number of documents per query that a fusion or a re-ranking was made of; None if it is that of the evaluation.
    """

    run: dict[str, dict[str, float]]
    index: IndexUsed
    truncated: Truncated
    seconds: Mapping[str, float]
    cached: int = 0
    depth: int | None = None


class Ranker(Protocol):
    """Ranks the documents of a collection for its queries."""

    def check(self, benchmark: Benchmark, collection: Collection) -> None:
        """Check before anything is encoded that this collection can be ranked.

        Raises:
            InputError: It cannot.
        """

    def __call__(self, benchmark: Benchmark, collection: Collection, k: int) -> Ranking:
        """The first k documents of every query, after applying the benchmark's policy."""


@dataclass
class Stopwatch:
    """Wall-clock time per step, in seconds."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, step: str) -> None:
        """Add the time since the last lap to ``step``."""
        now = time.perf_counter()
        self.seconds[step] = self.seconds.get(step, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True)
class ModelRanker:
    """Ranks documents by the vectors of a model.

    Attributes:
        model: Model that encodes the texts.
        store: Store for the vectors.
        engine: Index engine with settings, such as ``ivf-dense:nlist=64``; see `quiver.retrieval.index.engines.parse_engine`.
        effort: Search effort: a preset, or search parameters of the engine by name.
        progress: Show progress bars.
    """

    model: DenseModel | TokenModel
    store: EmbeddingStore
    engine: str = EXACT
    effort: str | Mapping[str, Setting] = "balanced"
    progress: bool = False

    def check(self, benchmark: Benchmark, collection: Collection) -> None:
        """See `Ranker`; any collection with texts can be encoded."""
        _check_texts(self.model.card.source, benchmark, collection)

    def __call__(self, benchmark: Benchmark, collection: Collection, k: int) -> Ranking:
        """See `Ranker`.

        Raises:
            InputError: The index cannot be built for this model or collection.
        """
        watch, policy = Stopwatch(), benchmark.policy
        # Queries first: they take seconds, and a faulty model fails on them already.
        queries = self._encode([query.text for query in collection.queries], "query", len(collection.queries))
        vectors = query_vectors(queries)
        watch.lap("encode_queries")
        ids: list[str] = []
        documents = self._encode(_contents(collection, policy, ids), "document", len(collection.documents))
        watch.lap("encode_documents")
        model, lengths = self.model, documents.lengths
        index = index_vectors(ids, documents.rows, model.card, lengths=lengths, engine=self.engine, device=device_of(model))
        watch.lap("index")
        wanted = depth(k, policy)
        hits = self._search(index, vectors, wanted, self.effort)
        watch.lap("search")
        exact = index.kind.startswith("exact-")
        overlaps = tuple(cut for cut in OVERLAPS if cut <= k)
        return Ranking(
            run=cut(hits.to_run([query.id for query in collection.queries]), k, policy),
            index=IndexUsed(
                kind=EXACT if exact else index.kind,
                # The work of an approximate search also depends on the number of requested documents.
                parameters={**index.parameters} if exact else {**index.parameters, **index.search_params(self.effort, wanted), "k": wanted},
                recall={_name(cut): 1.0 for cut in overlaps} if exact else self._overlaps(ids, documents, vectors, hits, overlaps),
                bytes=index.nbytes,
                query_milliseconds=1000 * watch.seconds["search"] / len(collection.queries),
            ),
            truncated=Truncated(documents=documents.counts.truncated, queries=queries.counts.truncated),
            seconds=watch.seconds,
            cached=documents.reused,
        )

    def _encode(self, texts: Any, role: Any, total: int) -> StoredVectors:
        return self.store.encode(self.model, texts, role, total=total, progress=self.progress)

    def _overlaps(self, ids: Sequence[str], documents: StoredVectors, queries: Any, hits: Hits, cuts: Sequence[int]) -> dict[str, float]:
        if not cuts:
            return {}
        model, lengths = self.model, documents.lengths
        index = index_vectors(ids, documents.rows, model.card, lengths=lengths, device=device_of(model))
        exact = self._search(index, queries, max(cuts), "balanced")
        return {_name(cut): overlap(exact, hits, cut) for cut in cuts}

    def _search(self, index: Index, queries: Any, k: int, effort: str | Mapping[str, Setting]) -> Hits:
        try:
            return search_slices(lambda part: index.search(queries[part], k, effort=effort), len(queries), progress=self.progress)
        except ValueError as error:  # the shapes are known to be right, so the cause is in the model's vectors
            raise InputError(f"{self.model.card.source}: its vectors cannot be searched: {error}") from error


def query_vectors(stored: StoredVectors) -> Any:
    """Query vectors in the form that an index expects: (Q, d), or for a ColBERT a list of (T_i, d)."""
    rows = stored.rows.span(0, stored.rows.shape[0])
    if stored.lengths is None:
        return rows
    return np.split(rows, np.cumsum(stored.lengths)[:-1])


def _name(k: int) -> str:
    return f"overlap@{k}"


def _contents(collection: Collection, policy: Policy, ids: list[str]) -> Iterator[str]:
    """Yield the text of each document and collect the ids in ``ids``, so that the corpus is read once."""
    for document in collection.documents:
        ids.append(document.id)
        yield document.content(use_title=policy.use_title)


def overlap(exact: Hits, hits: Hits, k: int) -> float:
    """Share of the first k documents of exact search that another search also returns among its first k, mean over queries.

    A document whose exact score ties with that of the k-th document also counts: the order of tied documents is arbitrary.

    Example:
        >>> scores = [np.array([2.0, 1.0], np.float32)]
        >>> overlap(Hits([["a", "b"]], scores), Hits([["b", "c"]], [np.array([1.0, 0.5], np.float32)]), 2)
        0.5
    """
    shares = []
    for wanted, bar, found, scores in zip(exact.ids, exact.scores, hits.ids, hits.scores, strict=True):
        best = {*wanted[:k]}
        least = float(bar[len(best) - 1]) if best else 0.0
        tied = TIE * max(1.0, abs(least))
        # Compare with a tolerance, not with >=: scores of compressed vectors may be too high.
        good = sum(document in best or abs(score - least) <= tied for document, score in zip(found[:k], scores[:k].tolist(), strict=True))
        shares.append(min(good, len(best)) / len(best) if best else 1.0)
    return sum(shares) / len(shares)


def bm25_run(
    collection: Collection,
    *,
    k: int = 1000,
    use_title: bool = True,
    exclude_self: bool = False,
    limits: BlockLimits | None = None,
    progress: bool = False,
) -> dict[str, dict[str, float]]:
    """Rank the collection's documents for its queries with BM25; the corpus is processed in blocks, so a large one needs little memory.

    Args:
        collection: Documents and queries.
        k: Documents per query, at most; k may exceed the size of the collection.
        use_title: Include titles in the text of the documents.
        exclude_self: Drop the document with the query's own id before the run is cut.
        limits: Size of the blocks in which the corpus is read.
        progress: Show a progress bar over the documents, which are read twice.

    Returns:
        A run with every query in it. It holds only documents that share a word with the query.
    """
    k = check_k(k)
    policy = Policy(exclude_self=exclude_self, use_title=use_title)
    with progress_bar("BM25", 2 * len(collection.documents), enabled=progress) as advance:
        hits = rank_streamed(
            lambda: ((document.id, document.content(use_title=use_title)) for document in collection.documents),
            [query.text for query in collection.queries],
            depth(k, policy),
            limits=limits,
            advance=advance,
        )
    return cut(hits.to_run([query.id for query in collection.queries]), k, policy)


@dataclass(frozen=True)
class WordRanker:
    """Ranks documents by BM25.

    Attributes:
        progress: Show a progress bar.
    """

    progress: bool = False

    def check(self, benchmark: Benchmark, collection: Collection) -> None:
        """See `Ranker`; any collection with texts has words."""
        _check_texts("BM25", benchmark, collection)

    def __call__(self, benchmark: Benchmark, collection: Collection, k: int) -> Ranking:
        """See `Ranker`."""
        started, policy = time.perf_counter(), benchmark.policy
        run = bm25_run(collection, k=k, use_title=policy.use_title, exclude_self=policy.exclude_self, progress=self.progress)
        return Ranking(run, IndexUsed("bm25", PARAMETERS), Truncated(0, 0), {"search": time.perf_counter() - started})


@dataclass(frozen=True)
class RunRanker:
    """Takes the rankings from a TREC run.

    Attributes:
        path: The file; or a folder with one file ``COLLECTION.SPLIT.trec`` per collection, as in a results folder.
    """

    path: Path

    def check(self, benchmark: Benchmark, collection: Collection) -> None:
        """See `Ranker`.

        Raises:
            InputError: The run cannot be read, has no judged query, or has a document that the collection lacks.
        """
        path, run = self._file(benchmark), self.read(benchmark)
        if run.keys().isdisjoint(collection.qrels):
            raise InputError(f"{path}: none of its {len(run):,} queries is judged in {benchmark.key}; pass its own run")
        found = {document for query in run.keys() & collection.qrels.keys() for document in run[query]}
        for document in collection.documents:
            found.discard(document.id)
        if found:
            several = f", and {len(found) - 1:,} others are not" if len(found) > 1 else ""
            raise InputError(f"{path}: document {min(found)!r} is not in {benchmark.key}{several}; pass the run of this collection")

    def __call__(self, benchmark: Benchmark, collection: Collection, k: int) -> Ranking:
        """See `Ranker`."""
        run = self.read(benchmark)
        judged = {query.id: run.get(query.id, {}) for query in collection.queries}
        settings: dict[str, Parameter] = {"depth": max(map(len, judged.values()), default=0)}
        if isinstance(collection.documents, NamedDocuments):
            settings["documents"] = "named by the run and the judgements"
        return Ranking(cut(judged, k, benchmark.policy), IndexUsed("run", settings), Truncated(None, None), {})

    def read(self, benchmark: Benchmark) -> Run:
        """The run of a collection.

        Raises:
            InputError: There is no such file, or it is malformed.
        """
        return read_run(self._file(benchmark))

    def _file(self, benchmark: Benchmark) -> Path:
        return self.path / f"{benchmark.key}.trec" if self.path.is_dir() else self.path


@dataclass(frozen=True)
class RetrieverRanker:
    """Ranks by a retriever, such as an index with its model.

    Attributes:
        retriever: The retriever.
        effort: Effort of the search.
    """

    retriever: Retriever
    effort: str | Mapping[str, Setting] = "balanced"

    def check(self, benchmark: Benchmark, collection: Collection) -> None:
        """See `Ranker`; only the documents of indexes are known.

        Raises:
            InputError: The documents of an index are not those of the collection, or one has titles in its texts and the other has not.
        """
        for index in _indexes(self.retriever):
            _check_index(index, benchmark, collection)

    def __call__(self, benchmark: Benchmark, collection: Collection, k: int) -> Ranking:
        """See `Ranker`."""
        wanted = depth(k, benchmark.policy)
        candidates = self.retriever.candidates if isinstance(self.retriever, (FusedRetriever, RerankedRetriever)) else None
        # A deeper search would take more candidates than the retriever has in use.
        found = self.retriever.search(collection.queries, wanted if candidates is None else min(wanted, candidates), effort=self.effort)
        seconds = {_STAGES.get(stage, stage): taken for stage, taken in found.seconds.items()}
        return Ranking(
            run=cut(found.run, k, benchmark.policy),
            index=self._used(found, wanted, collection),
            truncated=Truncated(documents=_documents_truncated(self.retriever), queries=found.counts.truncated),
            seconds=seconds,
            depth=candidates,
        )

    def _used(self, found: SearchResult, wanted: int, collection: Collection) -> IndexUsed:
        if not isinstance(self.retriever, VectorRetriever):
            return _combination(self.retriever)
        index, card = self.retriever.index, self.retriever.model.card
        milliseconds = 1000 * found.seconds["search"] / len(collection.queries)
        if card.kind not in ("dense", "colbert"):
            return IndexUsed("bm25", index.parameters, None, index.nbytes, milliseconds)
        cuts = tuple(cut for cut in OVERLAPS if cut <= wanted)
        if index.kind.startswith("exact-"):
            return IndexUsed(EXACT, index.parameters, {_name(cut): 1.0 for cut in cuts}, index.nbytes, milliseconds)
        exact = _hits(self.retriever.search(collection.queries, max(cuts, default=1), effort=EXACT).run)
        hits = _hits(found.run)
        recall = {_name(cut): overlap(exact, hits, cut) for cut in cuts}
        parameters = {**index.parameters, **found.efforts[self.retriever.name], "k": wanted}
        return IndexUsed(index.kind, parameters, recall, index.nbytes, milliseconds)


def _combination(retriever: Retriever) -> IndexUsed:
    """How a retriever that is no index ranks: its settings, and in one line those of its first stage."""
    if isinstance(retriever, FusedRetriever):
        return IndexUsed("fusion", _fusion_settings(retriever.fusion, len(retriever.parts), retriever.candidates))
    if isinstance(retriever, RerankedRetriever):
        return IndexUsed("re-ranking", {"candidates": retriever.candidates, "first": index_name(_combination(retriever.first))})
    if isinstance(retriever, VectorRetriever):
        return IndexUsed(retriever.index.kind, retriever.index.parameters)
    return IndexUsed("retriever", {"name": retriever.name})


def _fusion_settings(fusion: Fusion, parts: int, candidates: int) -> dict[str, Parameter]:
    how: dict[str, Parameter] = {"constant": fusion.constant} if fusion.method == "rrf" else {"normalize": fusion.normalise}
    weights = ", ".join(f"{weight:g}" for weight in fusion.weights_of(parts))
    return {"method": fusion.method, **how, "weights": weights, "candidates": candidates}


def _indexes(retriever: Retriever) -> list[Index]:
    """The indexes that a retriever searches or scores with."""
    if isinstance(retriever, VectorRetriever):
        return [retriever.index]
    if isinstance(retriever, WordRetriever):
        return [retriever.words]
    if isinstance(retriever, FusedRetriever):
        return [index for part in retriever.parts for index in _indexes(part)]
    if isinstance(retriever, RerankedRetriever):
        return [*_indexes(retriever.first), *_scored_by(retriever.scorer)]
    return []


def _scored_by(scorer: CandidateScorer | None) -> list[Index]:
    return [scorer.index] if isinstance(scorer, IndexScorer) else []


def _check_index(index: Index, benchmark: Benchmark, collection: Collection) -> None:
    key = benchmark.key
    documents, missing = iter(collection.documents), 0
    first = ""
    while batch := [document.id for document in islice(documents, _BATCH)]:
        absent = [each for each, row in zip(batch, index.locate(batch), strict=True) if row is None]
        first = first or next(iter(absent), "")
        missing += len(absent)
    if missing:
        several = f"; {missing:,} of {len(collection.documents):,} documents are missing" if missing > 1 else ""
        raise InputError(f"{index.path}: document {first!r} of {key} is not in the index{several}; build it from this collection")
    if len(index) != len(collection.documents):
        raise InputError(
            f"{index.path}: the index has {len(index):,} documents and {key} has {len(collection.documents):,}; build it from this"
            " collection"
        )
    with_titles = index.manifest.policy.use_title
    if with_titles != benchmark.policy.use_title:
        has, takes = ("with", "without") if with_titles else ("without", "with")
        raise InputError(f"{index.path}: the index was built {has} titles, and {key} is evaluated {takes} them; build it again")


def _check_texts(ranker: str, benchmark: Benchmark, collection: Collection) -> None:
    if isinstance(collection.documents, NamedDocuments):
        raise InputError(
            f"{benchmark.key}: {ranker} ranks texts, and only the ids of the documents are known; pass a folder with corpus.jsonl (--data),"
            " or an index that stores texts (--index)"
        )


class GroupedDocuments:
    """The values of a field of an index as documents; each has the text of the first passage with this value.

    Args:
        index: The index.
        field: The field, such as ``file``.

    Attributes:
        index: The index, whose documents are the passages.
        field: The field.
        values_of: Function from ids of passages to their values.

    Raises:
        InputError: No document of the index has the field, or it stores no texts.
    """

    def __init__(self, index: Index, field: str) -> None:
        self.index = index
        self.field = field
        self.values_of = field_of(index, field)
        self._count = len(set(self.values_of(index.ids)))

    def __iter__(self) -> Iterator[Document]:
        """Iterate over the values, in the order of their first passages."""
        seen: set[str] = set()
        for passage, value in zip(self.index.documents, self.values_of(self.index.ids), strict=True):
            if value not in seen:
                seen.add(value)
                yield passage._replace(id=value, metadata=None)

    def __len__(self) -> int:
        return self._count


@dataclass(frozen=True)
class SystemDocuments:
    """Documents that the evaluated system names: those of its index, the values of a field of this index, or those of its run.

    Attributes:
        index: The first index of the system; None if it has none.
        run: Its run; None if it has none, or an index.
        groups: The values of the field that it is grouped by.
    """

    index: Index | None
    run: RunRanker | None = None
    groups: GroupedDocuments | None = None

    @classmethod
    def of(cls, given: Sequence[object], group_by: str | None) -> SystemDocuments | None:
        """The documents of systems, each as `Contenders.of` takes it; None if none of them names documents.

        Args:
            given: The systems.
            group_by: Field that the rankings are grouped by.

        Raises:
            InputError: An index cannot be opened, or there is none with the field.
        """
        index = next((index for each in given for index in _indexes_of(each)), None)
        if group_by is not None and index is None:
            raise InputError(
                f"group_by (--group-by) {group_by}: needs an index (--index), whose documents have the field; the fields of a run's or a"
                " model's documents are not known"
            )
        if index is not None:
            return cls(index, groups=None if group_by is None else GroupedDocuments(index, group_by))
        run = next((each for each in given if is_run(each)), None)
        return None if run is None else cls(None, RunRanker(Path(str(run))))

    def of_collection(self, benchmark: Benchmark, collection: Collection) -> tuple[Benchmark, Collection]:
        """A collection with these documents instead of its own; the index also decides whether titles are part of the texts.

        Raises:
            InputError: None of the judged documents is among them, or the run cannot be read.
        """
        judged = NamedDocuments(document for grades in collection.qrels.values() for document in grades)
        if self.index is None:
            found = [] if self.run is None else list(self.run.read(benchmark).values())
            named = NamedDocuments(document for documents in (*found, [each.id for each in judged]) for document in documents)
            return benchmark, replace(collection, documents=named)
        benchmark = replace(benchmark, policy=replace(benchmark.policy, use_title=self.index.manifest.policy.use_title))
        if self.groups is not None:
            values = {value.id for value in self.groups}
            example = min(values)
            missing = [each.id for each in judged if each.id not in values]
            where = f"values of the field {self.groups.field!r}; one of its values is {example!r}"
            documents: DocumentSource = self.groups
        else:
            ids = [each.id for each in judged]
            missing = [each for each, place in zip(ids, self.index.locate(ids), strict=True) if place is None]
            where = "in the index"
            if missing and (field := _field_with(self.index, missing[0])) is not None:
                where += f"; they are values of the field {field!r}: add --group-by {field} (group_by)"
            documents = self.index.documents if self.index.manifest.policy.store_text else NamedDocuments(self.index.ids)
        if missing:
            counted = f"{len(missing):,} of the {len(judged):,} judged documents of {benchmark.key}"
            said = f"{self.index.path}: {counted}, such as {missing[0]!r}, are not {where}"
            if len(missing) == len(judged):  # other ids than those of the judgements
                raise InputError(said)
            logger.warning("%s; they count as not found", said)
        return benchmark, replace(collection, documents=documents, missing=tuple(missing))


def _field_with(index: Index, value: str) -> str | None:
    """A field of an index that has a value."""
    return next((name for name in index.fields if index.count(Filter((Condition(name, "=", (value,)),)))), None)


def _indexes_of(given: object) -> list[Index]:
    """The indexes of a system, opened without their models."""
    if isinstance(given, (str, Path)):
        known = str(given) != BM25.source and format_version(Path(given)) is not None
        return [open_index(given)] if known else []
    return _indexes(given) if isinstance(given, (VectorRetriever, WordRetriever, FusedRetriever, RerankedRetriever)) else []


def _documents_truncated(retriever: Retriever) -> int | None:
    """Documents that a model truncated for the indexes of a retriever, of the one that truncates most; None if it is not known."""
    indexes = _indexes(retriever)
    scored_by_text = isinstance(retriever, RerankedRetriever) and not isinstance(retriever.scorer, IndexScorer)
    return max(map(index_truncated, indexes)) if indexes and not scored_by_text else None


def index_truncated(index: Index) -> int:
    """Number of documents of an index that the model truncated when they were encoded; deleted ones do not count."""
    return sum(int((segment.documents.tokens.whole()[segment.kept] >> 1 & 1).sum()) for segment in index.segments)


def _hits(run: Run) -> Hits:
    return Hits(
        [list(scores) for scores in run.values()], [np.fromiter(scores.values(), np.float32, len(scores)) for scores in run.values()]
    )


@dataclass
class _Part:
    """A ranker as a retriever of one collection, which keeps its last ranking."""

    name: str
    ranker: Ranker
    benchmark: Benchmark
    collection: Collection
    ranking: Ranking | None = None

    def search(
        self, queries: Sequence[Query], k: int, *, filter: FilterLike = None, effort: Effort = None, target_recall: float | None = None
    ) -> SearchResult:
        del queries, filter, effort, target_recall
        self.ranking = self.ranker(self.benchmark, self.collection, k)
        return SearchResult(self.ranking.run)

    def explain(self, query: str, documents: Sequence[str]) -> Explanations:
        del query, documents
        return {}


@dataclass(frozen=True)
class FusedRanker:
    """Fuses the rankings of several systems.

    Attributes:
        parts: At least two.
        fusion: Method, weights and normalization.
        candidates: Documents that each contributes; the run holds no more.
    """

    parts: Sequence[Contender]
    fusion: Fusion
    candidates: int = CANDIDATES

    def check(self, benchmark: Benchmark, collection: Collection) -> None:
        """See `Ranker`."""
        for part in self.parts:
            part.ranker.check(benchmark, collection)

    def __call__(self, benchmark: Benchmark, collection: Collection, k: int) -> Ranking:
        """See `Ranker`."""
        parts = [_Part(part.shown, part.ranker, benchmark, collection) for part in self.parts]
        found = FusedRetriever(parts, self.fusion, self.candidates).search(collection.queries, min(k, self.candidates))
        settings = _fusion_settings(self.fusion, len(parts), self.candidates)
        used = [part.ranking for part in parts if part.ranking is not None]
        return _combined("fusion", self.candidates, settings, found, used, [part.truncated.documents for part in used])


@dataclass(frozen=True)
class RerankedRanker:
    """Re-ranks the candidates of another system.

    Attributes:
        first: Finds the candidates.
        name: Name of the model or index that scores them.
        scorer: Scores them; that of texts gets the texts of the collection.
        candidates: Candidates per query; the run holds no others.
    """

    first: Contender
    name: str
    scorer: CandidateScorer
    candidates: int = CANDIDATES

    def check(self, benchmark: Benchmark, collection: Collection) -> None:
        """See `Ranker`; an index that scores the candidates must have the documents too."""
        self.first.ranker.check(benchmark, collection)
        if isinstance(self.scorer, TextScorer):
            _check_texts(self.name, benchmark, collection)
        for index in _scored_by(self.scorer):
            _check_index(index, benchmark, collection)

    def __call__(self, benchmark: Benchmark, collection: Collection, k: int) -> Ranking:
        """See `Ranker`."""
        first = _Part(self.first.shown, self.first.ranker, benchmark, collection)
        scorer = _CollectionScorer(self.scorer, benchmark, collection) if isinstance(self.scorer, TextScorer) else self.scorer
        found = RerankedRetriever(first, scorer, self.name, self.candidates).search(collection.queries, min(k, self.candidates))
        used = [] if first.ranking is None else [first.ranking]
        settings: dict[str, Parameter] = {"candidates": self.candidates, "first": ", ".join(index_name(each.index) for each in used)}
        # How many documents a model truncates whose vectors are not stored depends on the candidates, and is not counted.
        stored: list[int | None] = [index_truncated(index) for index in _scored_by(self.scorer)]
        truncated = [*(each.truncated.documents for each in used), *(stored or [None])]
        return _combined("re-ranking", self.candidates, settings, found, used, truncated)


@dataclass(frozen=True)
class _CollectionScorer:
    """Scores candidates of a collection; the texts of a batch's candidates are read from it in one pass."""

    scorer: TextScorer
    benchmark: Benchmark
    collection: Collection

    def __call__(self, queries: Sequence[str], candidates: Sequence[Sequence[str]]) -> Sequence[NDArray[np.float32]]:
        wanted = {document for documents in candidates for document in documents}
        titles = self.benchmark.policy.use_title
        texts = {each.id: each.content(use_title=titles) for each in self.collection.documents if each.id in wanted}
        return replace(self.scorer, text_of=texts.__getitem__)(queries, candidates)

    def explain(self, query: str, documents: Sequence[str]) -> Mapping[str, Explained]:
        del query, documents
        return {}


@dataclass(frozen=True)
class GroupedRanker:
    """Ranks the values of a field, each by its best passage.

    Attributes:
        ranker: Ranks the passages.
        groups: The values.
    """

    ranker: Ranker
    groups: GroupedDocuments

    def check(self, benchmark: Benchmark, collection: Collection) -> None:
        """See `Ranker`."""
        self.ranker.check(benchmark, self._passages(collection))

    def __call__(self, benchmark: Benchmark, collection: Collection, k: int) -> Ranking:
        """See `Ranker`."""
        rankings: list[Ranking] = []

        def search(passages: int) -> SearchResult:
            rankings.append(self.ranker(benchmark, self._passages(collection), passages))
            return SearchResult(rankings[-1].run)

        _, groups = search_groups(search, depth(k, benchmark.policy), self.groups.values_of)
        run = {query: {each.key: each.score for each in found} for query, found in groups.items()}
        steps = {step for each in rankings for step in each.seconds}
        seconds = {step: sum(each.seconds.get(step, 0.0) for each in rankings) for step in steps}
        return replace(rankings[-1], run=cut(run, k, benchmark.policy), seconds=seconds)

    def _passages(self, collection: Collection) -> Collection:
        return replace(collection, documents=self.groups.index.documents)


def _combined(
    kind: str,
    candidates: int,
    settings: Mapping[str, Parameter],
    found: SearchResult,
    used: Sequence[Ranking],
    documents: Sequence[int | None],
) -> Ranking:
    """The ranking that was made of others; a text is counted as truncated by the part that truncates most, if all parts know."""
    seconds = dict(found.seconds)
    for part in used:
        for step, taken in part.seconds.items():
            seconds[step] = seconds.get(step, 0.0) + taken
    return Ranking(
        run=found.run,
        index=IndexUsed(kind, settings),
        truncated=Truncated(documents=_most(documents), queries=_most([part.truncated.queries for part in used])),
        seconds=seconds,
        cached=sum(part.cached for part in used),
        depth=candidates,
    )


def _most(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return max(known) if len(known) == len(counts) else None


BASELINES: Mapping[str, Callable[[bool], Ranker]] = {"bm25": WordRanker}
"""Baseline name -> ranker, with or without progress bars. Each baseline can also be evaluated as the system itself: ``model="bm25"``."""


@dataclass(frozen=True)
class Contender:
    """A system with its ranker.

    Attributes:
        system: Record of the system.
        ranker: Ranks the collections.
        model: A ColBERT model that explains the worst queries, or None.
        made_of: What its rankings depend on beside the record of the system and the data, as JSON.
        folder: Folder of an index, which tells it from others of the same model; empty otherwise.
    """

    system: System
    ranker: Ranker
    model: ColBERT | None = None
    made_of: Mapping[str, object] = field(default_factory=dict)
    folder: str = ""

    @property
    def path(self) -> str:
        """What its short name in a fusion or a re-ranking is made of."""
        return self.folder or self.system.source

    @property
    def shown(self) -> str:
        """Name in a fusion or a re-ranking; that of a combination is made of such names already."""
        return self.path if self.system.kind in ("fusion", "re-ranking") else short_names([self.path])[0]


@dataclass
class Contenders:
    """Opens the systems of an evaluation: models, BM25, runs, indexes and retrievers, their fusions and re-rankings.

    Attributes:
        store: Store for the vectors of models.
        engine: Index engine of models, see `ModelRanker`.
        effort: Search effort of models and indexes.
        library: Library that loads and runs models.
        dtype: Dtype of models.
        device: Device of models.
        batch_tokens: Tokens that a model encodes at once.
        options: Lengths, prompts and width of models.
        progress: Show progress bars.
        encodes: Whether one of the opened systems is a model, which encodes the collection.
        searches: Whether one of them searches vectors, so that it has an effort.
        opened: The open indexes with their models, each once.
    """

    store: EmbeddingStore
    engine: str = EXACT
    effort: str | Mapping[str, Setting] = "balanced"
    library: Library = "quiver"
    dtype: Dtype | None = None
    device: str | None = None
    batch_tokens: int | None = None
    options: ModelOptions = FOLDERS_SETTINGS
    progress: bool = False
    encodes: bool = field(default=False, init=False)
    searches: bool = field(default=False, init=False)
    opened: OpenIndexes = field(init=False)

    def __post_init__(self) -> None:
        self.opened = OpenIndexes(device=self.device, progress=self.progress)

    def model(self, model: str | Path | DenseModel | TokenModel) -> Contender:
        """A loaded model, its folder or hub id, or ``bm25``.

        Raises:
            InputError: It cannot be loaded, or the engine does not suit it.
        """
        if isinstance(model, (str, Path)) and str(model) == BM25.source:
            return Contender(BM25, WordRanker(self.progress))
        loaded = self._load(str(model)) if isinstance(model, (str, Path)) else model
        self.encodes = self.searches = True
        check_engine(self.engine, loaded.card)
        ranker = ModelRanker(loaded, self.store, self.engine, self.effort, self.progress)
        return Contender(System.of(loaded.card), ranker, loaded if isinstance(loaded, ColBERT) else None)

    def run(self, path: Path) -> Contender:
        """A TREC run, or a folder of runs.

        Raises:
            InputError: There is no such file or folder, or it holds something else.
        """
        if not path.exists():
            raise InputError(f"{path}: no such file; pass a TREC run, or a folder with COLLECTION.SPLIT.trec for each collection")
        if format_version(path) is not None:
            raise InputError(f"{path}: an index; pass --index (index=) instead of --run")
        files = sorted(path.glob("*.trec")) if path.is_dir() else [path]
        made_of = {file.name: file_sha256(file) for file in files}
        system = System(source=str(path), kind="run", library="other", fingerprint=_sha256(made_of))
        return Contender(system, RunRanker(path), made_of=made_of)

    def index(self, folder: Path) -> Contender:
        """An index with the model that built it.

        Raises:
            InputError: The index or its model cannot be opened.
        """
        return replace(self.retriever(self.opened.vectors(folder)), folder=str(folder))

    def retriever(self, retriever: Retriever) -> Contender:
        """A retriever, such as `quiver.retrieval.search.retrievers.open_retriever` gives."""
        ranker = RetrieverRanker(retriever, self.effort)
        self.searches |= _has_effort(retriever)
        if not isinstance(retriever, VectorRetriever):
            made_of, kind = _made_of(retriever), _kind(retriever)
            return Contender(System(_shown(retriever), kind, fingerprint=_sha256(made_of) if made_of else None), ranker, made_of=made_of)
        model = retriever.model.model if isinstance(retriever.model, SharedModel) else retriever.model
        return Contender(System.of(retriever.model.card), ranker, model if isinstance(model, ColBERT) else None, _identity(retriever.index))

    def of(self, given: str | Path | DenseModel | TokenModel | Retriever) -> Contender:
        """What is given or named: a retriever, a model, BM25, an index folder, or a file with a run."""
        if not isinstance(given, (str, Path)):
            return self.retriever(given) if _is_retriever(given) else self.model(given)
        if str(given) == BM25.source:
            return self.model(given)
        if format_version(Path(given)) is not None:
            return self.index(Path(given))
        return self.run(Path(given)) if is_run(given) else self.model(given)

    def fused(self, parts: Sequence[Contender], fusion: Fusion, candidates: int) -> Contender:
        """The fusion of several systems.

        Raises:
            InputError: The number of weights is wrong.
        """
        fusion.weights_of(len(parts))
        short = short_names([part.path for part in parts])
        names = [part.path if part.system.kind in ("fusion", "re-ranking") else name for part, name in zip(parts, short, strict=True)]
        made_of = {"parts": list(map(_description, parts)), "fusion": asdict(fusion), "candidates": candidates}
        system = System(source=" + ".join(names), kind="fusion", fingerprint=_sha256(made_of))
        return Contender(system, FusedRanker(parts, fusion, candidates), made_of=made_of)

    def reranked(self, first: Contender, given: str | Path | TokenModel, candidates: int) -> Contender:
        """The re-ranking of a system's candidates by a ColBERT model or an index of one.

        Raises:
            InputError: It is neither.
        """
        scorer = self.opened.scorer(given)
        (name,) = short_names([str(given) if isinstance(given, str | Path) else given.card.source])
        made_of = {"first": _description(first), "second": _scorer_made_of(scorer), "candidates": candidates}
        system = System(source=f"{first.shown} > {name}", kind="re-ranking", fingerprint=_sha256(made_of))
        return Contender(system, RerankedRanker(first, name, scorer, candidates), made_of=made_of)

    def grouped(self, first: Contender, groups: GroupedDocuments) -> Contender:
        """The values of a field, ranked by the passages that a system finds."""
        made_of = {"first": _description(first), "field": groups.field, **_identity(groups.index)}
        return replace(
            first,
            system=replace(first.system, group_by=groups.field),
            ranker=GroupedRanker(first.ranker, groups),
            model=None,
            made_of=made_of,
        )

    def check_options(self) -> None:
        """Refuse options of models and searches where no model encodes the collection and no vectors are searched.

        Raises:
            InputError: There are such options.
        """
        if not self.searches and self.effort != "balanced":
            raise InputError("BM25 and runs have no search effort; leave out the effort (--effort)")
        chosen = (self.engine, self.library, self.dtype, self.batch_tokens, self.options)
        if not self.encodes and chosen != (EXACT, "quiver", None, None, FOLDERS_SETTINGS):
            raise InputError("no model encodes the collection, so leave out engine, library, dtype, batch size, lengths, prompts and width")

    def _load(self, source: str) -> DenseModel | TokenModel:
        if self.library == "quiver":
            return load_model(source, dtype=self.dtype, device=self.device, batch_tokens=self.batch_tokens, options=self.options)
        from quiver.eval.baselines import load_baseline  # imports this module

        return load_baseline(self.library, source)


def _is_retriever(given: DenseModel | TokenModel | Retriever) -> TypeIs[Retriever]:
    return not hasattr(given, "encode_texts")


def is_run(given: object) -> bool:
    """Whether what is given names a TREC run, or a folder of runs."""
    if not isinstance(given, (str, Path)) or str(given) == BM25.source:
        return False
    return Path(given).is_file() or any(Path(given).glob("*.trec"))


def _has_effort(retriever: Retriever) -> bool:
    if isinstance(retriever, VectorRetriever):
        return retriever.index.kind != WORDS
    if isinstance(retriever, FusedRetriever):
        return any(map(_has_effort, retriever.parts))
    if isinstance(retriever, RerankedRetriever):
        return _has_effort(retriever.first)
    return not isinstance(retriever, WordRetriever)


def _kind(retriever: Retriever) -> Literal["fusion", "re-ranking", "retriever"]:
    if isinstance(retriever, FusedRetriever):
        return "fusion"
    return "re-ranking" if isinstance(retriever, RerankedRetriever) else "retriever"


def _shown(retriever: Retriever) -> str:
    return f"{_shown(retriever.first)} > {retriever.name}" if isinstance(retriever, RerankedRetriever) else retriever.name


def _made_of(retriever: Retriever) -> dict[str, object]:
    """What the rankings of a retriever depend on, as JSON; empty if it is of an unknown kind."""
    if isinstance(retriever, (VectorRetriever, WordRetriever)):
        return {"name": retriever.name, **_identity(_indexes(retriever)[0])}
    if isinstance(retriever, FusedRetriever):
        parts = list(map(_made_of, retriever.parts))
        return {"parts": parts, "fusion": asdict(retriever.fusion), "candidates": retriever.candidates}
    if isinstance(retriever, RerankedRetriever):
        second = _scorer_made_of(retriever.scorer)
        return {"first": _made_of(retriever.first), "second": second, "candidates": retriever.candidates}
    return {}


def _scorer_made_of(scorer: CandidateScorer) -> dict[str, object]:
    if isinstance(scorer, IndexScorer):
        return {str(scorer.index.path): _identity(scorer.index)}
    return {"model": scorer.model.card.fingerprint} if isinstance(scorer, TextScorer) else {}


def _identity(index: Index) -> dict[str, object]:
    manifest = index.manifest
    return {"engine": index.kind, "model": manifest.model.fingerprint, "generation": manifest.generation, "created": manifest.created}


def _description(part: Contender) -> list[object]:
    return [part.system.source, part.system.fingerprint, part.made_of]


def _sha256(made_of: object) -> str:
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
