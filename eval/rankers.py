"""What an evaluation scores: models, BM25, TREC runs, indexes and retrievers, their fusions and re-rankings.

Each is a retriever over a collection: a model searches an in-memory index of its documents, BM25 streams them, and a run is read from its
file. `Contenders` opens systems and describes them; `rank` makes the run of one collection and says how it was made.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from quiver.encoder.errors import InputError
from quiver.encoder.files import file_sha256
from quiver.encoder.progress import progress_bar
from quiver.eval.datasets.benchmarks import Benchmark, Policy, cut, depth
from quiver.eval.results import IndexUsed, Library, Parameter, System, Truncated, index_name
from quiver.retrieval.data.corpus import Collection, DocumentSource, NamedDocuments, read_run
from quiver.retrieval.data.embedding_store import EmbeddingStore, StoredVectors
from quiver.retrieval.index.engines import EXACT, WORDS, Setting, check_engine
from quiver.retrieval.index.files import format_version
from quiver.retrieval.index.filters import FilterLike
from quiver.retrieval.index.index import Effort, IndexReader, open_index
from quiver.retrieval.index.memory import index_vectors
from quiver.retrieval.index.words import BlockLimits, rank_streamed
from quiver.retrieval.models.batches import device_of
from quiver.retrieval.models.bm25 import PARAMETERS
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.models.options import FOLDERS_SETTINGS, ModelOptions
from quiver.retrieval.records import DenseModel, Document, Dtype, Hits, Query, TokenCounts, TokenModel, short_names
from quiver.retrieval.search.groups import field_of, search_groups
from quiver.retrieval.search.retrievers import (
    Explanations,
    FusedRetriever,
    IndexSearcher,
    OpenIndexes,
    RerankedRetriever,
    Retriever,
    RunRetriever,
    Scorer,
    SharedModel,
    candidates_of,
    identity_of,
    indexes_of,
    search_slices,
    search_with,
    sum_seconds,
)
from quiver.retrieval.search.search import Fusion

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


Ranker: TypeAlias = Callable[[Benchmark, Collection], Retriever]
"""A system that has still to be opened for a collection: the retriever of its documents. Nothing is encoded before the first search."""


def check_ranker(ranker: Ranker, benchmark: Benchmark, collection: Collection) -> None:
    """Check before anything is encoded that a system can rank a collection."""
    if isinstance(collection.documents, GroupedDocuments):
        collection = replace(collection, documents=collection.documents.index.documents)
    for leaf in _leaves(ranker(benchmark, collection)):
        encodes = isinstance(leaf, ModelSearcher | StreamedWords) or (isinstance(leaf, Scorer) and not leaf.indexes)
        if encodes and isinstance(collection.documents, NamedDocuments):
            raise InputError(
                f"{benchmark.key}: {leaf.name} ranks texts, and only the ids of the documents are known; pass a folder with"
                " corpus.jsonl (--data), an index that stores texts (--index), or documents= in Python"
            )
        if isinstance(leaf, RunRetriever):
            _check_run(leaf, benchmark, collection)
        for index in indexes_of(leaf):
            _check_index(index, benchmark, collection)


def rank(ranker: Ranker, benchmark: Benchmark, collection: Collection, k: int, effort: Effort = None) -> Ranking:
    """The first k documents of every query, after applying the benchmark's policy; of values of a field, each by its best passage."""
    groups, policy = collection.documents if isinstance(collection.documents, GroupedDocuments) else None, benchmark.policy
    queries, wanted = collection.queries, depth(k, policy)
    retriever = ranker(benchmark, collection if groups is None else replace(collection, documents=groups.index.documents))
    candidates = candidates_of(retriever)
    searched = list[Hits]()

    def search(most: int) -> Hits:
        searched.append(search_with(retriever, queries, most if candidates is None else min(most, candidates), effort=effort))
        return searched[-1]

    if groups is None:
        hits = search(wanted)
    else:
        found = search_groups(search, wanted, groups.values_of)
        ids = [[group.key for group in own] for own in found.groups or []]
        hits = replace(found, ids=ids, groups=None, seconds=sum_seconds([each.seconds for each in searched]))

    def count_truncated(leaf: Retriever | Scorer) -> int | None:
        if isinstance(leaf, ModelSearcher):
            return leaf.documents.counts.truncated
        return 0 if isinstance(leaf, StreamedWords) else _most(map(index_truncated, indexes_of(leaf)))

    leaves = list(_leaves(retriever))
    return Ranking(
        run=cut(hits.to_run([query.id for query in queries]), k, policy),
        index=_index_used(retriever, hits, wanted, collection, OVERLAPS),
        truncated=Truncated(documents=_most(map(count_truncated, leaves)), queries=_queries_truncated(hits)),
        seconds={_STAGES.get(stage, stage): taken for stage, taken in hits.seconds.items()},
        cached=sum(leaf.documents.reused for leaf in leaves if isinstance(leaf, ModelSearcher)),
        depth=candidates,
    )


def _leaves(retriever: Retriever) -> Iterator[Retriever | Scorer]:
    """The retrievers and scorers that a retriever combines."""
    if isinstance(retriever, FusedRetriever):
        for part in retriever.parts:
            yield from _leaves(part)
    elif isinstance(retriever, RerankedRetriever):
        yield from _leaves(retriever.first)
        yield retriever.scorer
    else:
        yield retriever


def _most(counts: Iterator[int | None]) -> int | None:
    """The largest count; a text is counted as truncated by the part that truncates most, if all parts know."""
    given = list(counts)
    known = [count for count in given if count is not None]
    return max(known) if known and len(known) == len(given) else None


def _queries_truncated(hits: Hits) -> int | None:
    if hits.lists:
        return _most(map(_queries_truncated, hits.lists.values()))
    if hits.candidates is not None:
        return _queries_truncated(hits.candidates)
    return hits.counts.truncated if hits.counts.texts else None


def index_truncated(index: IndexReader) -> int:
    """Number of documents of an index that the model truncated when they were encoded; deleted ones do not count."""
    return sum(segment.documents.ids.token_counts(segment.kept).truncated for segment in index.segments)


def _index_used(retriever: Retriever, hits: Hits, wanted: int, collection: Collection, cuts: Sequence[int]) -> IndexUsed:
    """What made hits; where it is an approximate index, with its overlap with exact search at these cuts."""
    queries = collection.queries
    milliseconds = 1000 * hits.seconds.get("search", 0.0) / len(queries)
    if isinstance(retriever, IndexSearcher) and retriever.index.kind == WORDS:
        return IndexUsed("bm25", retriever.index.parameters, None, retriever.index.nbytes, milliseconds)
    if isinstance(retriever, ModelSearcher | IndexSearcher):
        index, cuts = retriever.index, [cut for cut in cuts if cut <= wanted]
        if index.kind.startswith("exact-"):
            return IndexUsed(EXACT, index.parameters, {f"overlap@{cut}": 1.0 for cut in cuts}, index.nbytes, milliseconds)
        recall = {}
        if cuts:
            most = max(cuts)
            exact = (
                retriever.search_exactly(most) if isinstance(retriever, ModelSearcher) else retriever.search(queries, most, effort=EXACT)
            )
            recall = {f"overlap@{cut}": overlap(exact, hits, cut) for cut in cuts}
        # The work of an approximate search also depends on the number of requested documents.
        parameters = {**index.parameters, **next(iter(hits.efforts.values()), {}), "k": wanted}
        return IndexUsed(index.kind, parameters, recall, index.nbytes, milliseconds)
    if isinstance(retriever, RunRetriever):
        settings: dict[str, Parameter] = {"depth": max((len(retriever.run.get(query.id, {})) for query in queries), default=0)}
        named = isinstance(collection.documents, NamedDocuments)
        return IndexUsed("run", settings | ({"documents": "named by the run and the judgements"} if named else {}))
    if isinstance(retriever, RerankedRetriever):
        first = _index_used(retriever.first, hits.candidates or hits, retriever.candidates, collection, ())
        return IndexUsed("re-ranking", {"candidates": retriever.candidates, "first": index_name(first)})
    if isinstance(retriever, FusedRetriever | StreamedWords):
        described: Mapping[str, Any] = retriever.describe()
        return IndexUsed(described["kind"], {name: value for name, value in described.items() if name not in ("kind", "parts")})
    return IndexUsed("retriever", {"name": retriever.name})


@dataclass(frozen=True)
class ModelSearcher:
    """A model over a collection: it searches an in-memory index of the documents, which is built at the first search."""

    model: DenseModel | TokenModel
    store: EmbeddingStore
    policy: Policy
    collection: Collection
    engine: str = EXACT
    name: str = "model"
    progress: bool = False

    def search(self, queries: Sequence[Query], k: int, *, filter: FilterLike = None, effort: Any = None) -> Hits:
        """See `Retriever`; for the queries of the collection."""
        if queries is not self.collection.queries:
            raise InputError(f"{self.name}: the queries are not those of the collection")
        # Queries first: they take seconds, and a faulty model fails on them already.
        seconds = {"encode_queries": _clock(lambda: self.queries), "encode_documents": _clock(lambda: self.documents)}
        seconds["index"] = _clock(lambda: self.index)
        begun = time.perf_counter()
        params = self.index.search_params("balanced" if effort is None else effort, k)
        hits = self._search(self.index, k, params, filter)
        seconds["search"] = time.perf_counter() - begun
        return replace(hits, counts=self.queries.counts, efforts={self.name: params}, seconds=seconds)

    def search_exactly(self, k: int) -> Hits:
        """Search all vectors, of which the index may have compressed ones."""
        return self._search(self._build_index(EXACT), k, "balanced", None)

    def explain(self, query: str, documents: Sequence[str]) -> Explanations:
        """Explain nothing: the index has no texts."""
        del query, documents
        return {}

    def describe(self) -> Mapping[str, object]:
        """See `Retriever`."""
        return {"kind": "model", "fingerprint": self.model.card.fingerprint, "engine": self.engine}

    @cached_property
    def queries(self) -> StoredVectors:
        """The encoded queries."""
        texts = [query.text for query in self.collection.queries]
        return self.store.encode(self.model, texts, "query", total=len(texts), progress=self.progress)

    @cached_property
    def _ids(self) -> list[str]:
        return []

    @cached_property
    def documents(self) -> StoredVectors:
        """The encoded documents. Their ids are collected meanwhile, so that the corpus is read once."""
        self._ids.clear()

        def read_texts() -> Iterator[str]:
            for document in self.collection.documents:
                self._ids.append(document.id)
                yield document.content(use_title=self.policy.use_title)

        return self.store.encode(self.model, read_texts(), "document", total=len(self.collection.documents), progress=self.progress)

    @cached_property
    def index(self) -> IndexReader:
        """The index of the documents."""
        return self._build_index(self.engine)

    def _build_index(self, engine: str) -> IndexReader:
        model, documents = self.model, self.documents
        return index_vectors(self._ids, documents.rows, model.card, lengths=documents.lengths, engine=engine, device=device_of(model))

    def _search(self, index: IndexReader, k: int, effort: Effort, filter: FilterLike) -> Hits:
        vectors = self.queries.as_queries()
        try:
            return search_slices(
                lambda part: index.search(vectors[part], k, filter=filter, effort=effort), len(vectors), progress=self.progress
            )
        except ValueError as error:  # the shapes are known to be right, so the cause is in the model's vectors
            raise InputError(f"{self.model.card.source}: its vectors cannot be searched: {error}") from error


def _clock(step: Callable[[], object]) -> float:
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def overlap(exact: Hits, hits: Hits, k: int) -> float:
    """Share of the first k documents of exact search that another search also returns among its first k, mean over queries.

    A document whose exact score ties with that of the k-th document also counts: the order of tied documents is arbitrary.

    Example:
        >>> overlap(Hits.of([{"a": 2.0, "b": 1.0}]), Hits.of([{"b": 1.0, "c": 0.5}]), 2)
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


@dataclass(frozen=True)
class StreamedWords:
    """BM25 over a collection, which is read in blocks."""

    policy: Policy
    collection: Collection
    progress: bool = False
    limits: BlockLimits | None = None
    name: str = "BM25"

    def search(self, queries: Sequence[Query], k: int, *, filter: FilterLike = None, effort: Any = None) -> Hits:
        """See `Retriever`; the search is always exhaustive."""
        del effort
        if filter is not None:
            raise InputError("BM25 over a collection has no filters; build an index of it")
        begun, documents = time.perf_counter(), self.collection.documents
        with progress_bar("BM25", 2 * len(documents), enabled=self.progress) as advance:
            hits = rank_streamed(
                lambda: ((document.id, document.content(use_title=self.policy.use_title)) for document in documents),
                [query.text for query in queries],
                k,
                limits=self.limits,
                advance=advance,
            )
        return replace(hits, counts=TokenCounts(len(queries), 0, 0, 0), seconds={"search": time.perf_counter() - begun})

    def explain(self, query: str, documents: Sequence[str]) -> Explanations:
        """Explain nothing: the words of the documents are not kept."""
        del query, documents
        return {}

    def describe(self) -> Mapping[str, object]:
        """See `Retriever`."""
        return {"kind": "bm25", **PARAMETERS}


def _open_run(path: Path, benchmark: Benchmark) -> RunRetriever:
    """The run of a collection in a folder of runs, or the only run."""
    file = path / f"{benchmark.key}.trec" if path.is_dir() else path
    return RunRetriever(read_run(file), str(file))


def _check_run(retriever: RunRetriever, benchmark: Benchmark, collection: Collection) -> None:
    path, run = retriever.name, retriever.run
    if run.keys().isdisjoint(collection.qrels):
        raise InputError(f"{path}: none of its {len(run):,} queries is judged in {benchmark.key}; pass its own run")
    found = {document for query in run.keys() & collection.qrels.keys() for document in run[query]}
    for document in collection.documents:
        found.discard(document.id)
    if found:
        several = f", and {len(found) - 1:,} others are not" if len(found) > 1 else ""
        raise InputError(f"{path}: document {min(found)!r} is not in {benchmark.key}{several}; pass the run of this collection")


def _check_index(index: IndexReader, benchmark: Benchmark, collection: Collection) -> None:
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


class GroupedDocuments:
    """The values of a field of an index as documents; each has the text of the first passage with this value."""

    def __init__(self, index: IndexReader, field: str) -> None:
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
    """Documents that the evaluated system names: those of its index, the values of a field of this index, or those of its run."""

    index: IndexReader | None
    run: Path | None = None
    groups: GroupedDocuments | None = None

    @classmethod
    def of(cls, given: Sequence[object], group_by: str | None) -> SystemDocuments | None:
        """The documents of systems, each as `Contenders.of` takes it; None if none of them names documents."""
        index = next((index for each in given for index in _open_indexes_of(each)), None)
        if group_by is not None and index is None:
            raise InputError(
                f"group_by (--group-by) {group_by}: needs an index (--index), whose documents have the field; the fields of a run's or a"
                " model's documents are not known"
            )
        if index is not None:
            return cls(index, groups=None if group_by is None else GroupedDocuments(index, group_by))
        run = next((each for each in given if is_run(each)), None)
        return None if run is None else cls(None, Path(str(run)))

    def of_collection(self, benchmark: Benchmark, collection: Collection) -> tuple[Benchmark, Collection]:
        """A collection with these documents instead of its own; the index also decides whether titles are part of the texts."""
        judged = NamedDocuments(document for grades in collection.qrels.values() for document in grades)
        if self.index is None:
            found = [] if self.run is None else list(_open_run(self.run, benchmark).run.values())
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
            value = "'" + missing[0].replace("'", "''") + "'" if missing else ""
            texts = {name: '"' + name.replace('"', '""') + '"' for name, kind in self.index.fields.items() if kind == "string"}
            field = next((name for name, quoted in texts.items() if missing and self.index.count(f"{quoted} = {value}")), None)
            if field is not None:
                where += f"; they are values of the field {field!r}: add --group-by {field} (group_by)"
            documents = self.index.documents if self.index.manifest.policy.store_text else NamedDocuments(self.index.ids)
        if missing:
            counted = f"{len(missing):,} of the {len(judged):,} judged documents of {benchmark.key}"
            said = f"{self.index.path}: {counted}, such as {missing[0]!r}, are not {where}"
            if len(missing) == len(judged):  # other ids than those of the judgements
                raise InputError(said)
            logger.warning("%s; they count as not found", said)
        return benchmark, replace(collection, documents=documents, missing=tuple(missing))


def _open_indexes_of(given: object) -> Sequence[IndexReader]:
    """The indexes of a system, opened without their models."""
    if isinstance(given, (str, Path)):
        known = str(given) != BM25.source and format_version(Path(given)) is not None
        return [open_index(given)] if known else []
    return [given] if isinstance(given, IndexReader) else indexes_of(given)


def word_ranker(*, progress: bool) -> Ranker:
    """BM25 over the documents of any collection."""
    return lambda benchmark, collection: StreamedWords(benchmark.policy, collection, progress)


BASELINES: Mapping[str, Callable[..., Ranker]] = {"bm25": word_ranker}
"""Baseline name -> ranker, with or without progress bars. Each baseline can also be evaluated as the system itself: ``model="bm25"``."""


@dataclass(frozen=True)
class Contender:
    """A system with its ranker."""

    system: System
    ranker: Ranker
    model: ColBERT | None = None
    made_of: Mapping[str, object] = field(default_factory=dict)  # what its rankings depend on beside system and data, as JSON
    folder: str = ""  # of an index, which tells it from others of the same model

    @property
    def path(self) -> str:
        """What its short name in a fusion or a re-ranking is made of; the name of a combination is made of such names already."""
        return self.folder or self.system.source

    @property
    def combined(self) -> bool:
        """Whether it is a fusion or a re-ranking."""
        return self.system.kind in ("fusion", "re-ranking")

    @property
    def described(self) -> list[object]:
        """What a combination depends on."""
        return [self.system.source, self.system.fingerprint, self.made_of]


@dataclass
class Contenders:
    """Opens the systems of an evaluation: models, BM25, runs, indexes and retrievers, their fusions and re-rankings."""

    store: EmbeddingStore
    engine: str = EXACT
    effort: str | Mapping[str, Setting] = "balanced"
    library: Library = "quiver"
    dtype: Dtype | None = None
    device: str | None = None
    batch_tokens: int | None = None
    options: ModelOptions = FOLDERS_SETTINGS
    progress: bool = False
    encodes: bool = field(default=False, init=False)  # one of the opened systems is a model, which encodes the collection
    searches: bool = field(default=False, init=False)  # one of them searches vectors, so that it has an effort
    opened: OpenIndexes = field(init=False)

    def __post_init__(self) -> None:
        self.opened = OpenIndexes(device=self.device, progress=self.progress)

    def model(self, model: str | Path | DenseModel | TokenModel) -> Contender:
        """A loaded model, its folder or hub id, or ``bm25``."""
        if isinstance(model, (str, Path)) and str(model) == BM25.source:
            return Contender(BM25, word_ranker(progress=self.progress))
        loaded = self._load(str(model)) if isinstance(model, (str, Path)) else model
        self.encodes = self.searches = True
        check_engine(self.engine, loaded.card)

        def ranker(benchmark: Benchmark, collection: Collection) -> Retriever:
            return ModelSearcher(loaded, self.store, benchmark.policy, collection, self.engine, loaded.card.source, self.progress)

        return Contender(System.of(loaded.card), ranker, loaded if isinstance(loaded, ColBERT) else None)

    def run(self, path: Path) -> Contender:
        """A TREC run, or a folder of runs."""
        if not path.exists():
            raise InputError(f"{path}: no such file; pass a TREC run, or a folder with COLLECTION.SPLIT.trec for each collection")
        if format_version(path) is not None:
            raise InputError(f"{path}: an index; pass --index (index=) instead of --run")
        files = sorted(path.glob("*.trec")) if path.is_dir() else [path]
        made_of = {file.name: file_sha256(file) for file in files}
        system = System(source=str(path), kind="run", library="other", fingerprint=_hash_json(made_of))
        return Contender(system, lambda benchmark, _: _open_run(path, benchmark), made_of=made_of)

    def index(self, folder: Path) -> Contender:
        """An index with the model that built it."""
        return replace(self.retriever(self.opened.vectors(folder)), folder=str(folder))

    def retriever(self, retriever: Retriever | IndexReader) -> Contender:
        """A retriever, such as `quiver.retrieval.search.retrievers.open_retriever` gives, or an opened index."""
        folder = ""
        if isinstance(retriever, IndexReader):
            folder = str(retriever.path)
            retriever = IndexSearcher(retriever, retriever.model, short_names([folder])[0])
        opened = retriever
        self.searches |= any(not isinstance(leaf, IndexSearcher) or leaf.index.kind != WORDS for leaf in _leaves(opened))

        if isinstance(retriever, IndexSearcher):
            model = retriever.model.model if isinstance(retriever.model, SharedModel) else retriever.model
            explaining = model if isinstance(model, ColBERT) else None
            return Contender(System.of(retriever.model.card), lambda *_: opened, explaining, identity_of(retriever.index), folder)
        made_of, kind = dict(retriever.describe()), retriever.describe().get("kind")
        system = System(_shown(retriever), kind if kind in ("fusion", "re-ranking") else "retriever", fingerprint=_hash_json(made_of))
        return Contender(system, lambda *_: opened, made_of=made_of)

    def of(self, given: str | Path | DenseModel | TokenModel | Retriever | IndexReader) -> Contender:
        """What is given or named: a retriever, a model, BM25, an index or its folder, or a file with a run."""
        if not isinstance(given, (str, Path)):
            return self.model(given) if _is_model(given) else self.retriever(given)
        if str(given) == BM25.source:
            return self.model(given)
        if format_version(Path(given)) is not None:
            return self.index(Path(given))
        return self.run(Path(given)) if is_run(given) else self.model(given)

    def fused(self, parts: Sequence[Contender], fusion: Fusion, candidates: int) -> Contender:
        """The fusion of several systems."""
        fusion.weights_of(len(parts))
        short = short_names([part.path for part in parts])
        names = [part.path if part.combined else name for part, name in zip(parts, short, strict=True)]
        made_of = {"parts": [part.described for part in parts], "fusion": asdict(fusion), "candidates": candidates}
        system = System(source=" + ".join(names), kind="fusion", fingerprint=_hash_json(made_of))

        def ranker(benchmark: Benchmark, collection: Collection) -> Retriever:
            retrievers = [part.ranker(benchmark, collection) for part in parts]
            return FusedRetriever(retrievers, fusion, candidates, benchmark.policy.exclude_self)

        return Contender(system, ranker, made_of=made_of)

    def reranked(self, first: Contender, given: str | Path | TokenModel | IndexReader, candidates: int) -> Contender:
        """The re-ranking of a system's candidates by a ColBERT model or an index of one."""
        scorer = self.opened.scorer(given)
        made_of = {"first": first.described, "second": scorer.describe(), "candidates": candidates}
        shown = first.path if first.combined else short_names([first.path])[0]
        system = System(source=f"{shown} > {scorer.name}", kind="re-ranking", fingerprint=_hash_json(made_of))

        def ranker(benchmark: Benchmark, collection: Collection) -> Retriever:
            def read_texts(ids: Iterable[str]) -> Callable[[str], str]:
                wanted, titles = set(ids), benchmark.policy.use_title
                return {each.id: each.content(use_title=titles) for each in collection.documents if each.id in wanted}.__getitem__

            scoring = scorer if scorer.indexes else replace(scorer, source=read_texts)
            return RerankedRetriever(first.ranker(benchmark, collection), scoring, candidates, benchmark.policy.exclude_self)

        return Contender(system, ranker, made_of=made_of)

    def grouped(self, first: Contender, groups: GroupedDocuments) -> Contender:
        """The values of a field, ranked by the passages that a system finds."""
        made_of = {"first": first.described, "field": groups.field, **identity_of(groups.index)}
        return replace(first, system=replace(first.system, group_by=groups.field), model=None, made_of=made_of)

    def check_options(self) -> None:
        """Refuse options of models and searches where no model encodes the collection and no vectors are searched."""
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


def _is_model(given: DenseModel | TokenModel | Retriever | IndexReader) -> TypeIs[DenseModel | TokenModel]:
    return hasattr(given, "encode_texts")


def is_run(given: object) -> bool:
    """Whether what is given names a TREC run, or a folder of runs."""
    if not isinstance(given, (str, Path)) or str(given) == BM25.source:
        return False
    return Path(given).is_file() or any(Path(given).glob("*.trec"))


def _shown(retriever: Retriever) -> str:
    return f"{_shown(retriever.first)} > {retriever.name}" if isinstance(retriever, RerankedRetriever) else retriever.name


def _hash_json(made_of: object) -> str:
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
