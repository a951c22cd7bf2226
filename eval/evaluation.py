"""One system on one or more collections: collection -> index -> run -> scores -> results.

The walk is the same for a model and for BM25; what differs is how a collection is ranked (``quiver.eval.ranking``). Everything the caller
can get wrong is found before the first text is encoded, and what is finished when a run is stopped is not done again.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePath

import numpy as np

from quiver.encoder.config import Precision
from quiver.encoder.errors import InputError
from quiver.encoder.files import file_sha256, write_json
from quiver.eval.baselines import load_baseline
from quiver.eval.benchmark import Benchmark, resolve
from quiver.eval.metrics import MEASURES, Scores, judged_at, score
from quiver.eval.provenance import DataChecksum, provenance
from quiver.eval.ranking import BASELINES, ModelRanker, Ranker, Ranking, rank_with_bm25
from quiver.eval.results import (
    HEADLINE,
    Baseline,
    CollectionResult,
    FileReference,
    Interval,
    Library,
    Results,
    System,
    TokenMatch,
)
from quiver.eval.results_folder import SCHEMA, Stage, refuse_existing, results_folder, write_results
from quiver.eval.significance import bootstrap_interval
from quiver.eval.worst import Explain, worst_queries
from quiver.retrieval.data.corpus import Collection
from quiver.retrieval.data.embedding_store import open_embedding_store
from quiver.retrieval.data.run import write_run
from quiver.retrieval.index.engine_table import check_engine
from quiver.retrieval.index.engines import Setting, check_preset
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.protocols import IN_PROCESS, DenseModel, Executor, TokenModel
from quiver.retrieval.records import Run
from quiver.retrieval.search.explain import token_matches

logger = logging.getLogger(__name__)

BM25 = System(source="bm25", kind="bm25", library="bm25s")
"""The system that ``model="bm25"`` is."""

MODULES: Mapping[str, str] = {"bm25": "bm25s"}
"""Baseline name -> the module of the extra ``eval`` that it imports."""


def require_baselines(names: Sequence[str]) -> None:
    """Say before anything is encoded that a baseline cannot be scored.

    Raises:
        InputError: There is no such baseline, or the module it needs is not installed.
    """
    if unknown := [name for name in names if name not in BASELINES]:
        raise InputError(f"unknown baseline {unknown[0]!r}; there are {', '.join(BASELINES)}")
    if missing := [name for name in names if importlib.util.find_spec(MODULES[name]) is None]:
        raise InputError(f"{missing[0]} needs {MODULES[missing[0]]}: pip install 'quiver-retrieval[eval]', or score without it")


@dataclass(frozen=True)
class _Choices:
    """How collections are scored, beyond what each one's own policy says; the fields are arguments of ``evaluate``."""

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
    precision: Precision = "float",
    cache: str | Path | None = None,
    executor: Executor = IN_PROCESS,
    offline: bool = False,
    progress: bool = False,
    command: str | None = None,
    overwrite: bool = False,
) -> Results:
    """Score a system on collections, by default with exact search over every document.

    Stopped half-way, the same call goes on: collections that were finished are taken over, and with ``cache`` no text is encoded twice.

    Args:
        model: A loaded model, the folder or hub id of one, or ``"bm25"`` (a folder of that name is ``"./bm25"``).
        data: BEIR folders, or names of the registry such as ``"beir/scifact"`` or ``"beir"``; a ``Benchmark`` where the policy or the split
            of one is not the usual.
        split: Which judgements; None is each collection's published split, ``test`` for a folder that is none of the registry's.
        out: Folder for ``results.json``, the TREC runs and the scores of every query; None writes nothing.
        k: Documents kept for a query; measures that look further down are left out, but for nDCG@10. MAP is over these documents.
        engine: Index engine with settings, such as ``ivf-dense:nlist=64`` or ``faiss-dense:factory=HNSW32,Flat``; see
            `quiver.retrieval.index.engine_table.parse_engine`. The overlap of an approximate engine with exact search is measured and
            reported beside the score.
        effort: Search effort: ``exact``, ``balanced`` or ``fast``, or search parameters of the engine by name.
        baselines: Names in ``quiver.eval.ranking.BASELINES`` to score beside the system.
        in_domain: Names of collections, or of their groups, whose training data the model has seen.
        library: What opens and runs the model, where ``model`` is a folder or hub id.
        precision: ``int8`` quantises the matrices of such a model, on a CPU; of Quiver's own models only.
        cache: Folder that keeps vectors by model and text; None keeps them for this call alone.
        executor: Who encodes documents; workers run Quiver's own models only.
        offline: Never fetch a collection; one that is not there is an error that says how to get it.
        progress: Show how far the encoding is.
        command: The command line to record.
        overwrite: Replace the results that ``out`` holds.

    Returns:
        The results, equal to what ``read_results(out)`` gives.

    Raises:
        InputError: The data, a baseline, the index, the model or the output folder cannot be used. Bad data is found before anything is
            encoded or written; of several collections all are read once to see that they are sound.
    """
    if k < 1:
        raise InputError(f"k must be >= 1, got {k}")
    require_baselines(["bm25", *baselines] if model == "bm25" else baselines)
    _check_model(model, library, precision, engine)
    if out is not None:
        refuse_existing(Path(out), overwrite=overwrite)
    benchmarks = _benchmarks(data, split, in_domain, offline=offline, progress=progress)
    checked = [_check(benchmark, written=out is not None) for benchmark in benchmarks]
    loaded = _load(model, library, precision)
    system = BM25 if loaded is None else System.of(loaded.card)
    if loaded is not None:
        check_engine(engine, loaded.card)
        check_preset(effort)
    choices = _Choices(k, engine, effort, tuple(name for name in baselines if name != system.kind), tuple(in_domain))
    with _stage(out, system, choices, overwrite=overwrite) as stage, _ranker(loaded, choices, cache, executor, progress) as rank:
        walk = _Walk(system, rank, _explanation(loaded), choices, stage)
        scored = tuple(map(walk.score, checked))
        results = Results(system, scored, provenance(command))
        if stage is not None:
            write_results(results, stage.folder)
    return results


@dataclass(frozen=True)
class _Walk:
    """What stays the same from one collection to the next; ``stage`` is where its files go, if anywhere."""

    system: System
    rank: Ranker
    explain: Explain | None
    choices: _Choices
    stage: Stage | None

    def score(self, checked: _Checked) -> CollectionResult:
        """One collection; taken over where an evaluation that was stopped has finished it."""
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
        key, policy, facts = benchmark.key, benchmark.policy, benchmark.facts
        ranking = self.rank(collection, policy, self.choices.k)
        scores = self._scores(collection, ranking)
        baselines = tuple(self._baseline(name, benchmark, collection) for name in self.choices.baselines)
        # A baseline's time is nobody's overhead: it is a system that was ranked too.
        seconds = {**ranking.seconds, **{name: taken for name, (_, taken) in zip(self.choices.baselines, baselines, strict=True)}}
        return CollectionResult(
            name=benchmark.name,
            split=benchmark.split,
            group=facts.group,
            group_size=facts.group_size,
            in_domain=not {benchmark.name, facts.group}.isdisjoint(self.choices.in_domain),
            licence=facts.licence,
            revision=facts.revision,
            documents=len(collection.documents),
            queries=len(collection.qrels),
            judgements=sum(map(len, collection.qrels.values())),
            use_title=policy.use_title,
            exclude_self=policy.exclude_self,
            k=self.choices.k,
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
        # Recall@1000 of the first 100 documents would be recall@100 under another name.
        names = [name for name, measure in MEASURES.items() if name == HEADLINE or measure.cut is None or measure.cut <= self.choices.k]
        return score(collection.qrels, ranking.run, names)

    def _baseline(self, name: str, benchmark: Benchmark, collection: Collection) -> tuple[Baseline, float]:
        """What a baseline scored, and the seconds it took."""
        started = time.perf_counter()
        ranking: Ranking = BASELINES[name](collection, benchmark.policy, self.choices.k)
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
        # The tag is one word by the format: the last part of the model's folder or hub id.
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


def _interval(scores: Scores) -> Interval:
    return bootstrap_interval(np.array([values[HEADLINE] for values in scores.per_query.values()]))


def _explanation(model: object) -> Explain | None:
    if not isinstance(model, ColBERT):
        return None

    def explain(colbert: ColBERT, query: str, document: str) -> list[TokenMatch]:
        matches = token_matches(colbert, query, document)
        return [TokenMatch(match.query.name, match.document.name, match.similarity) for match in matches]

    return partial(explain, model)


def _check_model(model: str | Path | DenseModel | TokenModel, library: Library, precision: Precision, engine: str) -> None:
    """Refuse choices that this model cannot follow, before anything is read."""
    if model == "bm25" and (library, precision, engine) != ("quiver", "float", "exact"):
        raise InputError("bm25 has no engine, precision or library; leave out those options")
    if library != "quiver" and precision != "float":
        raise InputError(f"{precision} is of Quiver's own models; leave it away with the library {library}")
    if not isinstance(model, (str, Path)) and (library, precision) != ("quiver", "float"):
        raise InputError("the model is loaded already: library and precision are choices of how to load one")


def _load(model: str | Path | DenseModel | TokenModel, library: Library, precision: Precision) -> DenseModel | TokenModel | None:
    """The model to score; None is BM25, which has none."""
    if not isinstance(model, (str, Path)):
        return model
    if model == "bm25":
        return None
    return load_model(str(model), precision=precision) if library == "quiver" else load_baseline(library, model)


@contextmanager
def _ranker(
    model: DenseModel | TokenModel | None, choices: _Choices, cache: str | Path | None, executor: Executor, progress: bool
) -> Iterator[Ranker]:
    if model is None:
        yield rank_with_bm25
        return
    with open_embedding_store(None if cache is None else Path(cache), executor) as store:
        yield ModelRanker(model, store, choices.engine, choices.effort, progress)


@contextmanager
def _stage(out: str | Path | None, system: System, choices: _Choices, *, overwrite: bool) -> Iterator[Stage | None]:
    if out is None:
        yield None
        return
    # Versions are part of the plan: numbers may differ from one to the next, and a folder of results states one.
    plan = {"schema": SCHEMA, "system": asdict(system), "choices": asdict(choices), "versions": dict(provenance(None).versions)}
    with results_folder(Path(out), plan, overwrite=overwrite) as stage:
        yield stage


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
        raise InputError("no collection was given; name at least one BEIR folder, or one of quiver collections list")
    keys = Counter(benchmark.key for benchmark in benchmarks)
    if twice := [key for key, count in keys.items() if count > 1]:
        raise InputError(f"two collections are called {twice[0]}, and their files would overwrite each other; rename a folder")
    names = {name for benchmark in benchmarks for name in (benchmark.name, benchmark.facts.group)}
    if unknown := [name for name in in_domain if name not in names]:
        raise InputError(f"in domain: no collection or group is called {unknown[0]!r}; there are {', '.join(sorted(filter(None, names)))}")
    return benchmarks


@dataclass(frozen=True)
class _Checked:
    """A collection that has been read from end to end; its documents are still in their files.

    Attributes:
        benchmark: Where it comes from.
        collection: What was read.
        sha256: Checksum over its data.
        seconds: What reading took.
    """

    benchmark: Benchmark
    collection: Collection
    sha256: str
    seconds: float


def _check(benchmark: Benchmark, *, written: bool) -> _Checked:
    """Read a collection: that it is broken is known before hours of encoding, not after."""
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
        logger.warning("%s: %d query ids are document ids too; a query may find itself (exclude_self is off)", benchmark.name, shared)
    sha256 = checksum.hexdigest(collection.queries, collection.qrels)
    return _Checked(benchmark, collection, sha256, time.perf_counter() - started)


def _conditions(checked: _Checked) -> dict[str, object]:
    """What a finished result of this collection must say for it to be taken over: the data, and how they are scored."""
    benchmark = checked.benchmark
    return {"data_sha256": checked.sha256, **asdict(benchmark.policy)} | {
        name: value for name, value in asdict(benchmark.facts).items() if name in ("group", "group_size", "licence", "revision")
    }


def _spaced(benchmark: Benchmark, key: str) -> InputError:
    return InputError(f"{benchmark.name}: the id {key!r} contains white space, which a TREC run cannot hold; rename it")
