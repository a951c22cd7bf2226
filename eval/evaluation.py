"""Evaluation of one system on one or more collections: collection -> index -> run -> scores -> results.

The module reads from top to bottom as an evaluation proceeds: `evaluate` checks its arguments, reads every collection once, loads the
model, and scores one collection after the other (`_Evaluation`): a ranker makes a run, the run is scored with its baselines, and the
queries with the lowest scores are kept with their documents. Models and BM25 use the same code path and differ only in the ranker. All
errors in the arguments are reported before the first text is encoded, and an interrupted evaluation can be resumed.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Protocol

import numpy as np

from quiver.encoder.errors import InputError
from quiver.encoder.files import file_sha256, write_json
from quiver.eval.datasets.benchmarks import Benchmark, Policy, cut, depth, resolve
from quiver.eval.metrics import MEASURES, Interval, Scores, bootstrap_interval, judged_at, score
from quiver.eval.results import (
    HEADLINE,
    SCHEMA,
    SNIPPET,
    Baseline,
    CollectionResult,
    DataChecksum,
    FileReference,
    IndexUsed,
    Library,
    Results,
    ShownDocument,
    Stage,
    System,
    TokenMatch,
    Truncated,
    WorstQuery,
    provenance,
    refuse_existing,
    results_folder,
    write_results,
)
from quiver.retrieval.data.corpus import Collection, ranked, write_run
from quiver.retrieval.data.embedding_store import EmbeddingStore, StoredVectors, open_embedding_store
from quiver.retrieval.index.engines import EXACT, Setting, check_engine, check_k, check_preset
from quiver.retrieval.index.index import Index
from quiver.retrieval.index.memory import index_vectors
from quiver.retrieval.index.on_device import device_of
from quiver.retrieval.models.bm25 import PARAMETERS
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import FOLDERS_SETTINGS, ModelOptions, load_model
from quiver.retrieval.records import IN_PROCESS, DenseModel, Dtype, Executor, Hits, ModelCard, Run, TokenModel
from quiver.retrieval.search.bm25 import BlockLimits, rank_streamed
from quiver.retrieval.search.explain import token_matches

logger = logging.getLogger(__name__)

OVERLAPS = (10, 100)
"""Depths of the overlap of an index with exact search; depths beyond ``k`` are left out."""


TIE = 1e-6
"""Relative tolerance for equal scores: float32 sums in another order differ by about this much."""


QUERIES = 10
"""Number of worst queries in a result."""


SHOWN = 3
"""Number of retrieved documents, and of relevant documents, shown per worst query."""


BM25 = System(source="bm25", kind="bm25", library="bm25s")
"""System record of ``model="bm25"``."""


MODULES: Mapping[str, str] = {"bm25": "bm25s"}
"""Baseline name -> module that it imports, from the extra ``eval``."""


Explain = Callable[[str, str], Sequence[TokenMatch]]
"""Maps the texts of a query and a document to the best match of each query token."""


@dataclass(frozen=True)
class _Settings:
    """Settings of an evaluation that apply to all collections; the fields are arguments of ``evaluate``."""

    k: int
    engine: str
    effort: str | Mapping[str, Setting]
    baselines: Sequence[str]
    in_domain: Sequence[str]


def evaluate(  # noqa: PLR0913 - the public entry: one option for each choice that a report states
    model: str | Path | DenseModel | TokenModel,
    data: str | Path | Benchmark | Sequence[str | Path | Benchmark],
    *,
    split: str | None = None,
    out: str | Path | None = None,
    k: int = 1000,
    engine: str = "exact",
    effort: str | Mapping[str, Setting] = "balanced",
    baselines: Sequence[str] = ("bm25",),
    in_domain: Sequence[str] = (),
    library: Library = "quiver",
    dtype: Dtype | None = None,
    device: str | None = None,
    batch_tokens: int | None = None,
    model_options: ModelOptions = FOLDERS_SETTINGS,
    cache: str | Path | None = None,
    executor: Executor = IN_PROCESS,
    offline: bool = False,
    progress: bool = False,
    command: str | None = None,
    overwrite: bool = False,
) -> Results:
    """Score a system on collections, by default with exact search over every document.

    An interrupted evaluation can be resumed with the same call: finished collections are kept, and with ``cache`` no text is encoded
    twice.

    Args:
        model: A loaded model, its folder or Hugging Face Hub id, or ``"bm25"`` (for a folder of that name pass ``"./bm25"``).
        data: BEIR folders, or registered names such as ``"beir/scifact"`` or ``"beir"``. Pass a ``Benchmark`` to set the policy or split
            of one collection.
        split: Split of the judgements. None: each collection's published split, or ``test`` for a folder that is not a registered
            collection.
        out: Folder for ``results.json``, the TREC runs and the scores per query; None writes nothing.
        k: Documents kept per query. Measures with a deeper cut are left out, except nDCG@10. MAP is computed over these documents.
        engine: Index engine with settings, such as ``ivf-dense:nlist=64`` or ``faiss-dense:factory=HNSW32,Flat``; see
            `quiver.retrieval.index.engines.parse_engine`. For an approximate engine, the overlap with exact search is measured and
            reported beside the score.
        effort: Search effort: ``exact``, ``balanced`` or ``fast``, or search parameters of the engine by name.
        baselines: Baselines to score beside the system; names in ``quiver.eval.evaluation.BASELINES``.
        in_domain: Names of collections or groups whose training data the model was trained on.
        library: Library that loads and runs the model, if ``model`` is a folder or hub id.
        dtype: Dtype of such a model of Quiver's own: ``float32``, ``bfloat16``, ``float16`` or, on a CPU, ``int8``. None: bfloat16 on a GPU
            (float16 on a GPU without it), float32 on a CPU.
        device: Its device: ``cpu``, ``cuda`` or ``cuda:1``. None: a GPU if available.
        batch_tokens: Tokens that it encodes at once. None: 4,096 on a CPU, and by free memory on a GPU, up to 65,536.
        model_options: Lengths, prompts and vector width instead of those of its folder; for Quiver's own models.
        cache: Folder that keeps vectors by model and text; None keeps them during this call only.
        executor: Executor that encodes the documents; remote workers can run Quiver's own models only.
        offline: Never download a collection; a missing one raises an error that names the download command.
        progress: Show a progress bar while encoding.
        command: Command line to record in the results.
        overwrite: Replace existing results in ``out``.

    Returns:
        The results, equal to those that ``read_results(out)`` returns.

    Raises:
        InputError: The data, a baseline, the index, the model or the output folder cannot be used. All collections are read and checked
            once before anything is encoded or written.

    Example:
        >>> results = evaluate(tiny_model("dense"), tiny_collection(), baselines=())
        >>> results.headline  # each query is the text of its document
        1.0
    """
    if k < 1:
        raise InputError(f"k must be >= 1, got {k}")
    require_baselines(["bm25", *baselines] if model == "bm25" else baselines)
    _check_model(model, library, engine, chosen=(dtype, device, batch_tokens, model_options) != (None, None, None, FOLDERS_SETTINGS))
    if out is not None:
        refuse_existing(Path(out), overwrite=overwrite)
    benchmarks = _benchmarks(data, split, in_domain, offline=offline, progress=progress)
    checked = [_check(benchmark, written=out is not None) for benchmark in benchmarks]
    loaded = _load(model, library, dtype, device, batch_tokens, model_options)
    system = BM25 if loaded is None else System.of(loaded.card)
    if loaded is not None:
        check_engine(engine, loaded.card)
        check_preset(effort)
    settings = _Settings(k, engine, effort, tuple(name for name in baselines if name != system.kind), tuple(in_domain))
    with _stage(out, system, settings, overwrite=overwrite) as stage, _ranker(loaded, settings, cache, executor, progress) as rank:
        evaluation = _Evaluation(system, rank, _explanation(loaded), settings, stage)
        scored = tuple(map(evaluation.score, checked))
        results = Results(system, scored, provenance(command))
        if stage is not None:
            write_results(results, stage.folder)
    return results


def require_baselines(names: Sequence[str]) -> None:
    """Check before anything is encoded that all baselines can be scored.

    Raises:
        InputError: A baseline is unknown, or the module it needs is not installed.
    """
    if unknown := [name for name in names if name not in BASELINES]:
        raise InputError(f"unknown baseline {unknown[0]!r}; known: {', '.join(BASELINES)}")
    if missing := [name for name in names if importlib.util.find_spec(MODULES[name]) is None]:
        raise InputError(
            f"baseline {missing[0]} needs {MODULES[missing[0]]}: run pip install 'quiver-retrieval[eval]', or omit the baseline"
        )


def _check_model(model: str | Path | DenseModel | TokenModel, library: Library, engine: str, *, chosen: bool) -> None:
    """Reject settings that the given model does not support, before anything is read; ``chosen``: one for loading a model was."""
    if model == "bm25" and (library != "quiver" or chosen or engine != "exact"):
        raise InputError("bm25 has no engine, dtype, device, batch size, library, length, prompt or width; leave out those options")
    if library != "quiver" and chosen:
        raise InputError(f"dtype, device and batch size are only available for library quiver, got {library}; leave them out")
    if not isinstance(model, (str, Path)) and (library != "quiver" or chosen):
        raise InputError("library, dtype, device, batch size and settings apply to a folder or hub id; the given model is loaded already")


def _benchmarks(
    data: str | Path | Benchmark | Sequence[str | Path | Benchmark],
    split: str | None,
    in_domain: Sequence[str],
    *,
    offline: bool,
    progress: bool,
) -> list[Benchmark]:
    given = [data] if isinstance(data, (str, Path, Benchmark)) else data
    benchmarks: list[Benchmark] = []
    for each in given:
        benchmarks += [each] if isinstance(each, Benchmark) else resolve(each, split, offline=offline, progress=progress)
    if not benchmarks:
        raise InputError("no collection was given; pass at least one BEIR folder or a name from quiver collections list")
    keys = Counter(benchmark.key for benchmark in benchmarks)
    if twice := [key for key, count in keys.items() if count > 1]:
        raise InputError(f"two collections are called {twice[0]}, and their files would overwrite each other; rename a folder")
    names = {name for benchmark in benchmarks for name in (benchmark.name, benchmark.metadata.group)}
    if unknown := [name for name in in_domain if name not in names]:
        raise InputError(f"in_domain: unknown collection or group {unknown[0]!r}; known: {', '.join(sorted(filter(None, names)))}")
    return benchmarks


@dataclass(frozen=True)
class _Checked:
    """A collection that has been read completely once; its documents are read from their files again when needed.

    Attributes:
        benchmark: Benchmark of the collection.
        collection: The collection.
        sha256: Checksum of documents, queries and judgements.
        seconds: Time for reading and checking.
    """

    benchmark: Benchmark
    collection: Collection
    sha256: str
    seconds: float


def _check(benchmark: Benchmark, *, written: bool) -> _Checked:
    """Read a collection completely, so that errors in its files are reported before hours of encoding."""
    started = time.perf_counter()
    collection = benchmark.load()
    queries, shared = collection.qrels.keys(), 0
    if written and (spaced := next((key for key in queries if key.split() != [key]), None)):
        raise _spaced(benchmark, spaced)
    checksum = DataChecksum()
    for document in collection.documents:
        if written and document.id.split() != [document.id]:
            raise _spaced(benchmark, document.id)
        shared += document.id in queries
        checksum.add_document(document)
    if shared and not benchmark.policy.exclude_self:
        logger.warning("%s: %d query ids are document ids too; a query may retrieve itself (exclude_self is off)", benchmark.name, shared)
    sha256 = checksum.hexdigest(collection.queries, collection.qrels)
    return _Checked(benchmark, collection, sha256, time.perf_counter() - started)


def _spaced(benchmark: Benchmark, key: str) -> InputError:
    return InputError(f"{benchmark.name}: the id {key!r} contains white space, which a TREC run cannot hold; rename it")


def _load(
    model: str | Path | DenseModel | TokenModel,
    library: Library,
    dtype: Dtype | None,
    device: str | None,
    batch_tokens: int | None,
    options: ModelOptions,
) -> DenseModel | TokenModel | None:
    """Load the model to score; None stands for BM25."""
    if not isinstance(model, (str, Path)):
        return model
    if model == "bm25":
        return None
    if library == "quiver":
        return load_model(str(model), dtype=dtype, device=device, batch_tokens=batch_tokens, options=options)
    from quiver.eval.baselines import load_baseline  # imports this module

    return load_baseline(library, model)


@contextmanager
def _ranker(
    model: DenseModel | TokenModel | None, settings: _Settings, cache: str | Path | None, executor: Executor, progress: bool
) -> Iterator[Ranker]:
    if model is None:
        yield rank_with_bm25
        return
    with open_embedding_store(None if cache is None else Path(cache), executor) as store:
        yield ModelRanker(model, store, settings.engine, settings.effort, progress)


@contextmanager
def _stage(out: str | Path | None, system: System, settings: _Settings, *, overwrite: bool) -> Iterator[Stage | None]:
    if out is None:
        yield None
        return
    # Versions are part of the plan: scores may differ between versions, and results.json states only one.
    plan = {"schema": SCHEMA, "system": asdict(system), "settings": asdict(settings), "versions": dict(provenance(None).versions)}
    with results_folder(Path(out), plan, overwrite=overwrite) as stage:
        yield stage


@dataclass(frozen=True)
class _Evaluation:
    """Scores one collection after the other with the same system and settings; ``stage`` receives the files, if any are written."""

    system: System
    rank: Ranker
    explain: Explain | None
    settings: _Settings
    stage: Stage | None

    def score(self, checked: _Checked) -> CollectionResult:
        """Score one collection, or return its result if an interrupted evaluation has finished it."""
        key = checked.benchmark.key
        done = self.stage.finished(key, _conditions(checked)) if self.stage is not None else None
        if done is None:
            started = time.perf_counter()
            result = self._score(checked)
            other = max(0.0, time.perf_counter() - started - sum(result.seconds.values()))
            done = replace(result, seconds={**result.seconds, "check": checked.seconds, "other": other})
            if self.stage is not None:
                self.stage.keep(done)
        logger.info("%s: %s %.4f over %d queries", key, HEADLINE, done.measures[HEADLINE], done.queries)
        return done

    def _score(self, checked: _Checked) -> CollectionResult:
        benchmark, collection = checked.benchmark, checked.collection
        key, policy, metadata = benchmark.key, benchmark.policy, benchmark.metadata
        ranking = self.rank(collection, policy, self.settings.k)
        scores = self._scores(collection, ranking)
        baselines = tuple(self._baseline(name, benchmark, collection) for name in self.settings.baselines)
        # Count the baselines' time under their own names, so that it is not part of "other".
        seconds = {**ranking.seconds, **{name: taken for name, (_, taken) in zip(self.settings.baselines, baselines, strict=True)}}
        return CollectionResult(
            name=benchmark.name,
            split=benchmark.split,
            group=metadata.group,
            group_size=metadata.group_size,
            in_domain=not {benchmark.name, metadata.group}.isdisjoint(self.settings.in_domain),
            licence=metadata.licence,
            revision=metadata.revision,
            documents=len(collection.documents),
            queries=len(collection.qrels),
            judgements=sum(map(len, collection.qrels.values())),
            use_title=policy.use_title,
            exclude_self=policy.exclude_self,
            k=self.settings.k,
            measures=scores.means,
            interval=_interval(scores),
            judged=judged_at(collection.qrels, ranking.run),
            unanswered=sum(not ranking.run.get(query) for query in collection.qrels),
            truncated=ranking.truncated,
            empty_texts=collection.empty_texts,
            index=ranking.index,
            cached=ranking.cached,
            seconds=seconds,
            run=self._write_run(ranking.run, key, self.system.source),
            per_query=self._write("per_query", key, scores.per_query),
            query_texts=self._write("queries", key, {query.id: query.text for query in collection.queries}),
            data_sha256=checked.sha256,
            worst=worst_queries(collection, policy, ranking.run, scores, explain=self.explain),
            baselines=tuple(baseline for baseline, _ in baselines),
        )

    def _scores(self, collection: Collection, ranking: Ranking) -> Scores:
        # Skip measures with a cut above k: recall@1000 of 100 documents would be recall@100 under another name.
        names = [name for name, measure in MEASURES.items() if name == HEADLINE or measure.cut is None or measure.cut <= self.settings.k]
        return score(collection.qrels, ranking.run, names)

    def _baseline(self, name: str, benchmark: Benchmark, collection: Collection) -> tuple[Baseline, float]:
        """Scores of a baseline, and the seconds it took."""
        started = time.perf_counter()
        ranking: Ranking = BASELINES[name](collection, benchmark.policy, self.settings.k)
        scores = self._scores(collection, ranking)
        key = f"{benchmark.key}.{name}"
        baseline = Baseline(
            name=name,
            parameters=ranking.index.parameters,
            measures=scores.means,
            interval=_interval(scores),
            run=self._write_run(ranking.run, key, name),
            per_query=self._write("per_query", key, scores.per_query),
        )
        return baseline, time.perf_counter() - started

    def _write_run(self, run: Run, key: str, source: str) -> FileReference | None:
        # The format allows one word as tag: use the last part of the model's folder or hub id.
        tag = "_".join(PurePath(source).name.split()) or "quiver"
        return self._file(Path("runs") / f"{key}.trec", lambda path: write_run(run, path, tag=tag))

    def _write(self, kind: str, key: str, content: object) -> FileReference | None:
        return self._file(Path(kind) / f"{key}.json", lambda path: write_json(path, content))

    def _file(self, name: Path, write: Callable[[Path], None]) -> FileReference | None:
        if self.stage is None:
            return None
        path = self.stage.folder / name
        path.parent.mkdir(exist_ok=True)
        write(path)
        return FileReference(name.as_posix(), file_sha256(path))


def _conditions(checked: _Checked) -> dict[str, object]:
    """Values that the finished result of this collection must have to be reused: data checksum, policy and metadata."""
    benchmark = checked.benchmark
    return {"data_sha256": checked.sha256, **asdict(benchmark.policy)} | {
        name: value for name, value in asdict(benchmark.metadata).items() if name in ("group", "group_size", "licence", "revision")
    }


def _interval(scores: Scores) -> Interval:
    return bootstrap_interval(np.array([values[HEADLINE] for values in scores.per_query.values()]))


def _explanation(model: object) -> Explain | None:
    if not isinstance(model, ColBERT):
        return None

    def explain(colbert: ColBERT, query: str, document: str) -> list[TokenMatch]:
        matches = token_matches(colbert, query, document)
        return [TokenMatch(match.query.name, match.document.name, match.similarity) for match in matches]

    return partial(explain, model)


@dataclass(frozen=True)
class Ranking:
    """Run of one collection, cut by its policy, with its index, truncation and timing; see the fields of ``CollectionResult``."""

    run: dict[str, dict[str, float]]
    index: IndexUsed
    truncated: Truncated
    seconds: Mapping[str, float]
    cached: int = 0


class Ranker(Protocol):
    """Ranks the documents of a collection for its queries."""

    def __call__(self, collection: Collection, policy: Policy, k: int) -> Ranking:
        """The first k documents of every query, after applying the policy."""


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
        progress: Show a progress bar while encoding.
    """

    model: DenseModel | TokenModel
    store: EmbeddingStore
    engine: str = EXACT
    effort: str | Mapping[str, Setting] = "balanced"
    progress: bool = False

    def __call__(self, collection: Collection, policy: Policy, k: int) -> Ranking:
        """The first k documents of every query, after applying the policy.

        Raises:
            InputError: The index cannot be built for this model or collection.
        """
        watch, card = Stopwatch(), self.model.card
        # Queries first: they take seconds, and a faulty model fails on them already.
        queries = self._encode([query.text for query in collection.queries], "query", len(collection.queries))
        vectors = query_vectors(queries)
        watch.lap("encode_queries")
        ids: list[str] = []
        documents = self._encode(_contents(collection, policy, ids), "document", len(collection.documents))
        watch.lap("encode_documents")
        index = index_vectors(ids, documents.rows, card, lengths=documents.lengths, engine=self.engine, device=device_of(self.model))
        watch.lap("index")
        wanted = depth(k, policy)
        hits = _searched(index, vectors, wanted, card, self.effort)
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
        exact = index_vectors(ids, documents.rows, model.card, lengths=lengths, device=device_of(model)).search(queries, max(cuts))
        return {_name(cut): overlap(exact, hits, cut) for cut in cuts}


def _searched(index: Index, queries: Any, k: int, card: ModelCard, effort: str | Mapping[str, Setting]) -> Hits:
    try:
        hits: Hits = index.search(queries, k, effort=effort)
        return hits
    except ValueError as error:  # the shapes are known to be right, so the cause is in the model's vectors
        raise InputError(f"{card.source}: its vectors cannot be searched: {error}") from error


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
    collection: Collection, *, k: int = 1000, use_title: bool = True, exclude_self: bool = False, limits: BlockLimits | None = None
) -> dict[str, dict[str, float]]:
    """Rank the collection's documents for its queries with BM25; the corpus is processed in blocks, so a large one needs little memory.

    Args:
        collection: Documents and queries.
        k: Documents per query, at most; k may exceed the size of the collection.
        use_title: Include titles in the text of the documents.
        exclude_self: Drop the document with the query's own id before the run is cut.
        limits: Size of the blocks in which the corpus is read.

    Returns:
        A run with every query in it. It holds only documents that share a word with the query.
    """
    k = check_k(k)
    policy = Policy(exclude_self=exclude_self, use_title=use_title)
    hits = rank_streamed(
        lambda: ((document.id, document.content(use_title=use_title)) for document in collection.documents),
        [query.text for query in collection.queries],
        depth(k, policy),
        limits=limits,
    )
    return cut(hits.to_run([query.id for query in collection.queries]), k, policy)


def rank_with_bm25(collection: Collection, policy: Policy, k: int) -> Ranking:
    """The first k documents of every query by BM25, after applying the policy."""
    started = time.perf_counter()
    run = bm25_run(collection, k=k, use_title=policy.use_title, exclude_self=policy.exclude_self)
    return Ranking(run, IndexUsed("bm25", PARAMETERS), Truncated(0, 0), {"search": time.perf_counter() - started})


BASELINES: Mapping[str, Callable[[Collection, Policy, int], Ranking]] = {"bm25": rank_with_bm25}
"""Baseline name -> ranker. Each baseline can also be evaluated as the system itself: ``model="bm25"``."""


@dataclass(frozen=True)
class _Case:
    """A query with the ids of the documents to show."""

    query: str
    found: Sequence[str]
    wanted: Sequence[str]
    relevant: int

    @property
    def explained(self) -> set[str]:
        """The top retrieved and the best relevant document: token matches are computed for these."""
        return {*self.found[:1], *self.wanted[:1]}


def worst_queries(
    collection: Collection, policy: Policy, run: Run, scores: Scores, *, explain: Explain | None = None
) -> tuple[WorstQuery, ...]:
    """The queries with the lowest nDCG@10, lowest first; ties are ordered by id.

    The corpus is read a second time for the texts of the documents shown.

    Args:
        collection: Queries, judgements and documents.
        policy: Decides whether titles are part of the texts.
        run: Scores of the retrieved documents per query.
        scores: Measures per query.
        explain: Computes token matches; for ColBERT models only.
    """
    headline = {query: values[HEADLINE] for query, values in scores.per_query.items()}
    cases = [_case(query, collection.qrels[query], run) for query in sorted(headline, key=lambda query: (headline[query], query))[:QUERIES]]
    wanted = {document for case in cases for document in (*case.found, *case.wanted)}
    contents = {each.id: each.content(use_title=policy.use_title) for each in collection.documents if each.id in wanted}
    texts = {query.id: query.text for query in collection.queries}

    def show(case: _Case, document: str) -> ShownDocument:
        found = run.get(case.query, {})
        order = ranks[case.query]
        explained = explain is not None and document in case.explained
        return ShownDocument(
            id=document,
            text=_snippet(contents[document]),
            grade=collection.qrels[case.query].get(document),
            rank=order.get(document),
            score=found.get(document),
            matches=tuple(explain(texts[case.query], contents[document])) if explain is not None and explained else (),
        )

    ranks: Mapping[str, Mapping[str, int]] = {
        case.query: {document: rank for rank, document in enumerate(ranked(run.get(case.query, {})), start=1)} for case in cases
    }
    return tuple(
        WorstQuery(
            query=case.query,
            text=texts[case.query],
            score=headline[case.query],
            found=tuple(show(case, document) for document in case.found),
            wanted=tuple(show(case, document) for document in case.wanted),
            relevant=case.relevant,
        )
        for case in cases
    )


def _case(query: str, grades: Mapping[str, int], run: Run) -> _Case:
    relevant = sorted((document for document in grades if grades[document] >= 1), key=lambda document: (-grades[document], document))
    return _Case(query, ranked(run.get(query, {}))[:SHOWN], relevant[:SHOWN], len(relevant))


def _snippet(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= SNIPPET else flat[: SNIPPET - 1] + "…"
