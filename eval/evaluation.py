"""Evaluation of one system on one or more collections: collection -> index -> run -> scores -> results.

The module reads from top to bottom as an evaluation proceeds: `evaluate` checks its arguments, reads every collection once, loads the
model, and scores one collection after the other (`_Evaluation`): a ranker makes a run, the run is scored with its baselines, and the
queries with the lowest scores are kept with their documents. Models and BM25 use the same code path and differ only in the ranker. All
errors in the arguments are reported before the first text is encoded, and an interrupted evaluation can be resumed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeAlias, TypeVar

import numpy as np

from quiver.encoder.errors import InputError
from quiver.encoder.files import check_utf8, expand_home, file_sha256, write_json
from quiver.encoder.progress import progress_bar
from quiver.eval.datasets.benchmarks import Benchmark, Policy, find, resolve
from quiver.eval.datasets.catalogue import Metadata
from quiver.eval.metrics import MEASURES, Interval, Scores, bootstrap_interval, judged_at, score
from quiver.eval.rankers import (
    BASELINES,
    Contenders,
    Ranker,
    Ranking,
    SystemDocuments,
    check_ranker,
    is_run,
    rank,
)
from quiver.eval.results import (
    HEADLINE,
    SCHEMA,
    SNIPPET,
    Baseline,
    CollectionResult,
    DataChecksum,
    FailedCollection,
    FileReference,
    Library,
    Results,
    ShownDocument,
    Stage,
    System,
    TokenMatch,
    WorstQuery,
    provenance,
    refuse_existing,
    results_folder,
    write_results,
)
from quiver.retrieval.data.corpus import NO_NAMES, UNFIT, Collection, DuplicateJudgements, NamedDocuments, fits_run, ranked, write_run
from quiver.retrieval.data.embedding_store import open_embedding_store
from quiver.retrieval.index.engines import Setting, check_preset
from quiver.retrieval.index.files import format_version
from quiver.retrieval.index.index import IndexReader, open_index
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.options import FOLDERS_SETTINGS, ModelOptions
from quiver.retrieval.records import IN_PROCESS, DenseModel, Document, Dtype, Executor, Run, TokenModel
from quiver.retrieval.search.explain import token_matches
from quiver.retrieval.search.retrievers import CANDIDATES, Retriever
from quiver.retrieval.search.search import Fusion

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item", Benchmark, "_Checked")
_Result = TypeVar("_Result")

QUERIES = 10
"""Number of worst queries in a result."""


SHOWN = 3
"""Number of retrieved documents, and of relevant documents, shown per worst query."""


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
    made_of: Mapping[str, object]


def evaluate(  # noqa: PLR0913 - the public entry: one option for each choice that a report states
    model: str | Path | DenseModel | TokenModel | Retriever | IndexReader | None = None,
    data: str | Path | Benchmark | Sequence[str | Path | Benchmark] = (),
    *,
    documents: Mapping[str, str] | Iterable[Document] | Iterable[Mapping[str, object]] | None = None,
    queries: str | Path | Mapping[str, str] | Iterable[Mapping[str, object]] | None = None,
    qrels: str | Path | Mapping[str, Mapping[str, int] | Iterable[str]] | Iterable[Mapping[str, object]] | None = None,
    rename: Mapping[str, str] = NO_NAMES,
    duplicate_judgements: DuplicateJudgements = "error",
    collection_name: str | Sequence[str] = (),
    index: str | Path | IndexReader | None = None,
    run: str | Path | None = None,
    fuse: _System | Sequence[_System] = (),
    fusion: Fusion | None = None,
    rerank: str | Path | TokenModel | IndexReader | None = None,
    candidates: int | None = None,
    group_by: str | None = None,
    name: str = "",
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
        model: A loaded model, its folder or Hugging Face Hub id, ``"bm25"`` (for a folder of that name pass ``"./bm25"``), or a retriever,
            see `quiver.retrieval.search.retrievers`; or an opened index. None to score ``index``, ``run`` or only what ``fuse`` names.
        index: Folder of an index of the collection's documents, searched with its own model.
        run: TREC run of the collection; or a folder with one run ``COLLECTION.SPLIT.trec`` per collection.
        fuse: Systems to fuse with: ``"bm25"``, an index, a run, a model or a retriever.
        fusion: Method, weights and normalization; None for reciprocal ranks.
        rerank: ColBERT model, or index of one, each opened or by its name, that re-ranks the candidates.
        candidates: Documents that each system contributes to a fusion or a re-ranking; None for 100. The run holds no more, and measures
            with a deeper cut are left out.
        group_by: Field of an index, such as ``"file"``, whose values are ranked, each by its best passage; the judgements name values.
        name: Name of the system in reports; empty for one made from its parts.
        data: BEIR folders, or registered names such as ``"beir/scifact"`` or ``"beir"``. Pass a ``Benchmark`` to set the policy or split
            of one collection. A folder needs no corpus if an index or a run is scored: the documents are those that it names.
        documents: Documents in memory, beside ``queries`` and ``qrels`` in memory: a data frame, documents, mappings, or ``{id: text}``.
            An index or a run needs none.
        queries: File of queries, see `quiver.retrieval.data.corpus.read_queries`, instead of those of the folder; without ``data``,
            ``queries`` and ``qrels`` are a collection by themselves. Both can be in memory instead: data
            frames, data sets or lists of mappings with the fields of such files; or ``{id: text}`` and
            ``{query id: {document id: grade}}``, or the ids of the relevant documents in place of the inner mapping.
        qrels: File of judgements, see `quiver.retrieval.data.corpus.read_qrels`, instead of a split of the folder.
        rename: Field of the files of queries and judgements -> name that it is read by, such as ``query`` or ``document``.
        duplicate_judgements: What several judgements of one document for a query give, such as the clicks of a log. Equal ones are one.
            For different grades: ``error``, ``max`` for the highest, or ``sum`` for the sum of the grades of all, equal ones too.
        collection_name: Name in reports and files of each item of ``data``, or of the collection of ``queries`` and ``qrels``. Default:
            that of the published collection, folder or file.
        split: Split of the judgements. None: each collection's published split, or ``test`` for a folder that is not a registered
            collection.
        out: Folder for ``results.json``, the TREC runs and the scores per query; None writes nothing.
        k: Documents kept per query. Measures with a deeper cut are left out, except nDCG@10. MAP is computed over these documents, and
            left out where fewer candidates were fused or re-ranked.
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
        progress: Show progress bars.
        command: Command line to record in the results.
        overwrite: Replace existing results in ``out``.

    Returns:
        The results, equal to those that ``read_results(out)`` returns. Of several collections, those that cannot be evaluated are logged
        and listed in ``failed``, and do not stop the others; the same call again evaluates only them.

    Raises:
        InputError: The data, a baseline, the index, the model or the output folder cannot be used; of several collections, none can be
            evaluated. All collections are read and checked once before anything is encoded or written.

    Example:
        >>> from quiver import build_index, evaluate
        >>> rows = [{"id": "owl", "text": "Owls have wings.", "year": 2012}, {"id": "trout", "text": "Trout have fins.", "year": 2008}]
        >>> index = build_index(rows, "bm25", "animals", overwrite=True)
        >>> queries, qrels = {"q1": "which animal has wings"}, {"q1": {"owl": 1}}
        >>> results = evaluate(index, queries=queries, qrels=qrels, baselines=())
        >>> results.headline  # nDCG@10
        1.0
    """
    if k < 1:
        raise InputError(f"k must be >= 1, got {k}")
    fuse = list(fuse) if isinstance(fuse, Iterable) and not isinstance(fuse, str) else [fuse]
    model, index = _split_opened(model, index)
    first = [each for each in (model, index, run) if each is not None]
    if len(first) > 1:
        raise InputError("pass only one of a model, an index and a run; to combine them, fuse them")
    if len(first) + len(fuse) < (1 if first else 2):
        raise InputError("nothing to evaluate: pass a model, an index, a run, or two systems to fuse")
    _check_combination(len(first) + len(fuse), fusion, rerank, candidates)
    require_baselines(["bm25", *baselines] if "bm25" in [each for each in (model, *fuse) if isinstance(each, str)] else baselines)
    _check_model(
        model,
        index,
        run,
        fuse,
        library,
        engine,
        chosen=(dtype, device, batch_tokens, model_options) != (None, None, None, FOLDERS_SETTINGS),
    )
    check_utf8(name, "the name")
    if out is not None:
        refuse_existing(Path(out), overwrite=overwrite)
    given = [data] if isinstance(data, (str, Path, Benchmark)) else list(data)
    if any(each is not None for each in (documents, queries, qrels)) or rename:
        given = [_benchmark_of_questions(given, queries, qrels, split, rename, documents)]
    attempts = _Attempts()
    benchmarks = _find_benchmarks(given, _check_names(collection_name), split, in_domain, attempts, offline=offline, progress=progress)
    _check_runs((run, *fuse), attempts.collections)
    named = SystemDocuments.of([*first, *fuse], group_by)
    check = partial(_read_and_check, named=named, duplicates=duplicate_judgements, written=out is not None, progress=progress)
    checked = attempts.each(check, benchmarks)
    groups = None if named is None else named.groups
    check_preset(effort)
    with open_embedding_store(None if cache is None else Path(cache), executor) as store:
        contenders = Contenders(store, engine, effort, library, dtype, device, batch_tokens, model_options, progress)
        parts = [
            *([contenders.of(model)] if model is not None else []),
            *([contenders.index(Path(index))] if index is not None else []),
            *([contenders.run(Path(run))] if run is not None else []),
            *map(contenders.of, fuse),
        ]
        contender = parts[0] if len(parts) == 1 else contenders.fused(parts, fusion or Fusion(), candidates or CANDIDATES)
        if rerank is not None:
            contender = contenders.reranked(contender, rerank, candidates or CANDIDATES)
        if groups is not None:
            contender = contenders.grouped(contender, groups)
        contenders.check_options()
        system = replace(contender.system, name=name)
        checked = attempts.each(partial(_check_ranker, contender.ranker), checked)
        others = tuple(base for base in baselines if base != system.kind)
        settings = _Settings(k, engine, effort, others, tuple(in_domain), contender.made_of)
        with _open_stage(out, system, settings, overwrite=overwrite) as stage:
            rankers = {name: BASELINES[name](progress=progress) for name in others}
            evaluation = _Evaluation(system, contender.ranker, rankers, _make_explain(contender.model), settings, stage)
            scored = tuple(attempts.each(evaluation.score, checked))
            results = Results(system, scored, provenance(command), tuple(attempts.failed))
            if stage is not None:
                stage.unfinished = bool(attempts.failed)
                write_results(results, stage.folder)
    return results


class _Attempts:
    """Tries each collection. One that fails does not stop the others, unless it is the only one, or all fail."""

    def __init__(self) -> None:
        self.collections = 0
        self.failed: list[FailedCollection] = []

    def fail(self, failed: FailedCollection) -> None:
        """Log and note a collection that failed."""
        logger.warning("%s: not evaluated: %s", failed.key, failed.reason)
        self.failed.append(failed)

    def each(self, step: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        """Results of a step for benchmarks or read collections, without those for which it fails."""
        results = []
        for item in items:
            try:
                results.append(step(item))
            except InputError as error:
                if self.collections == 1:
                    raise
                benchmark = item.benchmark if isinstance(item, _Checked) else item
                self.fail(_describe_failure(benchmark.name, benchmark.split, benchmark.metadata, error))
        if not results:
            raise self.all_failed()
        return results

    def all_failed(self) -> InputError:
        """The error for collections of which none can be evaluated."""
        first, *others = self.failed
        several = f"none of {self.collections} collections can be evaluated; {first.key}: "
        return InputError(f"{several if others else ''}{first.reason}")


def _describe_failure(name: str, split: str, metadata: Metadata, error: InputError) -> FailedCollection:
    return FailedCollection(name, split, metadata.group, metadata.group_size, str(error))


def _check_ranker(ranker: Ranker, checked: _Checked) -> _Checked:
    check_ranker(ranker, checked.benchmark, checked.collection)
    return checked


def _check_names(collection_name: str | Sequence[str]) -> list[str]:
    names = [collection_name] if isinstance(collection_name, str) else list(collection_name)
    for name in names:
        if check_utf8(name, "a name of a collection (--collection-name)") != PurePath(name).name or not name.strip():
            raise InputError(f"a name of a collection (--collection-name) names files, so it must be without slashes, got {name!r}")
    return names


def require_baselines(names: Sequence[str]) -> None:
    """Check before anything is encoded that all baselines can be scored."""
    if unknown := [name for name in names if name not in BASELINES]:
        raise InputError(f"unknown baseline {unknown[0]!r}; known: {', '.join(BASELINES)}")


def _check_model(model: object, index: object, run: object, fuse: Sequence[object], library: Library, engine: str, *, chosen: bool) -> None:
    """Reject settings that the given model does not support, before anything is read; ``chosen``: one for loading a model was."""
    if isinstance(index, str | Path) and format_version(Path(index)) is None:
        open_index(index)  # says what is wrong with the folder
    if fuse or index is not None:  # what the names stand for is known when they are opened
        return
    if (model == "bm25" or run is not None) and (library != "quiver" or chosen or engine != "exact"):
        raise InputError(
            f"{model or 'a run'} has no engine, dtype, device, batch size, library, length, prompt or width; leave out those options"
        )
    if library != "quiver" and chosen:
        raise InputError(f"dtype, device and batch size are only available for library quiver, got {library}; leave them out")
    if not isinstance(model, (str, Path)) and (library != "quiver" or chosen):
        raise InputError("library, dtype, device, batch size and settings apply to a folder or hub id; the given model is loaded already")


def _check_combination(systems: int, fusion: Fusion | None, rerank: object, candidates: int | None) -> None:
    if fusion is not None and systems < 2:
        raise InputError("a fusion needs a second system: pass fuse")
    if candidates is not None and rerank is None and systems < 2:
        raise InputError("candidates are those of a fusion or a re-ranking: pass fuse or rerank, or leave them out")


_System: TypeAlias = "str | Path | DenseModel | TokenModel | Retriever | IndexReader"
_Model: TypeAlias = "_System | None"


def _split_opened(model: _Model, index: str | Path | IndexReader | None) -> tuple[_Model, str | Path | None]:
    """The system, which an opened index is, and the folder of an index."""
    if not isinstance(index, IndexReader):
        if isinstance(model, IndexReader) and index is not None:
            raise InputError("pass only one index, opened or as a folder (index=DIR)")
        return model, index
    if model is not None:
        raise InputError("pass only one of a model, an index and a run; to combine them, fuse them")
    return index, None


def _check_runs(given: Sequence[object], collections: int) -> None:
    """Refuse a single run for several collections."""
    for each in given:
        if collections > 1 and is_run(each) and not Path(str(each)).is_dir():
            raise InputError(
                f"{each}: a run belongs to one collection, but {collections} are given; pass a folder with COLLECTION.SPLIT.trec for each"
            )


def _benchmark_of_questions(
    data: Sequence[str | Path | Benchmark], queries: Any, qrels: Any, split: str | None, rename: Mapping[str, str], documents: Any
) -> Benchmark:
    """The collection of queries and judgements in files or in memory, and of a folder for what is not given."""
    if queries is None and qrels is None and documents is None:
        raise InputError("rename (--rename) names fields of queries (--queries) and judgements (--qrels); pass them too")
    in_memory = [each is not None and not isinstance(each, str | Path) for each in (queries, qrels)]
    if any(in_memory) or documents is not None:
        if data or not all(in_memory):
            raise InputError(
                "queries and qrels in memory, and documents if they are given, go together, and without data; without documents they judge"
                " an index or a run"
            )
        return Benchmark.of_questions(queries, qrels, rename, documents)
    asked, judged = (None if file is None else Path(file) for file in (queries, qrels))
    if judged is not None and split is not None:
        raise InputError(f"{judged}: judgements from a file (--qrels) have no split; leave out the split (--split)")
    for file in (asked, judged):
        if file is not None and not file.exists():
            raise InputError(f"{file}: no such file")
    if not data and asked is not None and judged is not None:
        return Benchmark.of_files(asked, judged, rename)
    if not data:
        raise InputError("queries (--queries) and judgements (--qrels) go together; pass both, or a folder with the other as data (--data)")
    if len(data) > 1 or isinstance(data[0], Benchmark) or not expand_home(data[0]).is_dir():
        raise InputError(
            f"{data[-1]}: beside queries (--queries) and judgements (--qrels), data (--data) is one local collection folder; for "
            "documents in other files, build an index of them and leave out data: quiver evaluate --index DIR --queries FILE --qrels FILE"
        )
    return Benchmark.of_folder(expand_home(data[0]), split, queries=asked, qrels=judged, rename=rename)


def _find_benchmarks(
    given: Sequence[str | Path | Benchmark],
    named: Sequence[str],
    split: str | None,
    in_domain: Sequence[str],
    attempts: _Attempts,
    *,
    offline: bool,
    progress: bool,
) -> list[Benchmark]:
    """The collections that are given, with the names given for them; those that are not there are noted as failed."""
    if named and len(named) != len(given):
        raise InputError(
            f"got {len(named)} names (--collection-name) for {len(given)} collections (--data); pass one for each, in their order"
        )
    alone, benchmarks = len(given) == 1, list[Benchmark]()
    find_each = partial(resolve, split=split, offline=offline, progress=progress)
    for position, each in enumerate(given):
        found = [each] if isinstance(each, Benchmark) else _resolve_members(each, find_each, attempts, split, alone=alone)
        if named and len(found) > 1:
            raise InputError(f"{each} is {len(found)} collections, which have names of their own; leave out --collection-name")
        benchmarks += [replace(one, name=named[position]) for one in found] if named else found
    attempts.collections = len(benchmarks) + len(attempts.failed)
    if not benchmarks and attempts.failed:
        raise attempts.all_failed()
    if not benchmarks:
        raise InputError(
            "no collection was given; pass a BEIR folder or a name from quiver collections list (--data), or files of queries and"
            " judgements (--queries, --qrels)"
        )
    keys = Counter(benchmark.key for benchmark in benchmarks)
    if twice := [key for key, count in keys.items() if count > 1]:
        raise InputError(f"two collections are called {twice[0]}, and their files would overwrite each other; rename a folder")
    names = {name for benchmark in benchmarks for name in (benchmark.name, benchmark.metadata.group)}
    names |= {name for failed in attempts.failed for name in (failed.name, failed.group)}
    if unknown := [name for name in in_domain if name not in names]:
        raise InputError(f"in_domain: unknown collection or group {unknown[0]!r}; known: {', '.join(sorted(filter(None, names)))}")
    return benchmarks


def _resolve_members(
    given: str | Path, find_each: Callable[[str | Path], list[Benchmark]], attempts: _Attempts, split: str | None, *, alone: bool
) -> list[Benchmark]:
    """The collections of a folder or name; of a group the members that are there, the others are noted as failed."""
    try:
        return find_each(given)
    except InputError as error:
        entries = find(str(given))
        if len(entries) < 2:
            if alone:
                raise
            attempts.fail(_describe_failure(str(given), split or "", Metadata(), error))
            return []
        found, missing = list[Benchmark](), list[FailedCollection]()
        for entry in entries:
            try:
                found += find_each(entry.key)
            except InputError as missed:
                missing.append(_describe_failure(entry.name, split or entry.split, entry.metadata, missed))
        if alone and not found:  # the error names all of them, and one command that downloads them
            raise
        for each in missing:
            attempts.fail(each)
        return found


@dataclass(frozen=True)
class _Checked:
    """A collection that has been read completely once; its documents are read from their files again when needed."""

    benchmark: Benchmark
    collection: Collection
    sha256: str
    seconds: float


def _read_and_check(
    benchmark: Benchmark, *, named: SystemDocuments | None, duplicates: DuplicateJudgements, written: bool, progress: bool
) -> _Checked:
    """Read a collection completely, so that errors in its files are reported before hours of encoding."""
    started, checksum = time.perf_counter(), DataChecksum()
    with progress_bar("reading", None, enabled=progress) as advance:
        collection = benchmark.load(needs_corpus=named is None, duplicates=duplicates)
        replaced = named is not None and (named.groups is not None or not collection.has_corpus)
        if named is not None and replaced:
            benchmark, collection = named.of_collection(benchmark, collection)
        queries, shared, empty = collection.qrels.keys(), 0, 0
        if written and (spaced := next((key for key in queries if not fits_run(key)), None)):
            raise _unfit_id(benchmark, spaced)
        for document in collection.documents:
            if written and not fits_run(document.id):
                raise _unfit_id(benchmark, document.id)
            shared += document.id in queries
            empty += not document.text.strip()
            if not replaced:  # otherwise the documents belong to the system, and systems of the same queries and judgements are comparable
                checksum.add_document(document)
            advance(1)
    if replaced:
        collection = replace(collection, empty_texts=0 if isinstance(collection.documents, NamedDocuments) else empty)
    if shared and not benchmark.policy.exclude_self:
        logger.warning("%s: %d query ids are document ids too; a query may retrieve itself (exclude_self is off)", benchmark.name, shared)
    sha256 = checksum.hexdigest(collection.queries, collection.qrels)
    return _Checked(benchmark, collection, sha256, time.perf_counter() - started)


def _unfit_id(benchmark: Benchmark, key: str) -> InputError:
    return InputError(f"{benchmark.name}: the id {key!r} {UNFIT}; rename it")


@contextmanager
def _open_stage(out: str | Path | None, system: System, settings: _Settings, *, overwrite: bool) -> Iterator[Stage | None]:
    if out is None:
        yield None
        return
    # Versions are part of the plan: scores may differ between versions, and results.json states only one.
    plan = {"results": SCHEMA, "system": asdict(system), "settings": asdict(settings), "versions": dict(provenance(None).versions)}
    with results_folder(Path(out), plan, overwrite=overwrite) as stage:
        yield stage


@dataclass(frozen=True)
class _Evaluation:
    """Scores one collection after the other with the same system and settings; ``stage`` receives the files, if any are written."""

    system: System
    ranker: Ranker
    baselines: Mapping[str, Ranker]
    explain: Explain | None
    settings: _Settings
    stage: Stage | None

    def score(self, checked: _Checked) -> CollectionResult:
        """Score one collection, or return its result if an interrupted evaluation has finished it."""
        key = checked.benchmark.key
        done = self.stage.finished(key, _reuse_conditions(checked)) if self.stage is not None else None
        if done is None:
            started = time.perf_counter()
            result = self._score(checked)
            other = max(0.0, time.perf_counter() - started - sum(result.seconds.values()))
            done = replace(result, seconds={**result.seconds, "check": checked.seconds, "other": other})
            if self.stage is not None:
                self.stage.save(done)
        logger.info("%s: %s %.2f over %d queries", key, HEADLINE, 100 * done.measures[HEADLINE], done.queries)
        return done

    def _score(self, checked: _Checked) -> CollectionResult:
        benchmark, collection = checked.benchmark, checked.collection
        key, policy, metadata = benchmark.key, benchmark.policy, benchmark.metadata
        effort = None if self.settings.effort == "balanced" else self.settings.effort
        ranking = rank(self.ranker, benchmark, collection, self.settings.k, effort)
        scores = self._scores(collection, ranking)
        names = self.settings.baselines
        if names and isinstance(collection.documents, NamedDocuments):
            logger.warning("%s: the texts of the documents are not known, so %s is left out", key, " and ".join(names))
            names = ()
        baselines = tuple(self._baseline(name, benchmark, collection) for name in names)
        # Count the baselines' time under their own names, so that it is not part of "other".
        seconds = {**ranking.seconds, **{name: taken for name, (_, taken) in zip(names, baselines, strict=True)}}
        result = CollectionResult(
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
            interval=_headline_interval(scores),
            judged=judged_at(collection.qrels, ranking.run),
            unanswered=sum(not ranking.run.get(query) for query in collection.qrels),
            truncated=ranking.truncated,
            empty_texts=collection.empty_texts,
            index=ranking.index,
            cached=ranking.cached,
            seconds=seconds,
            run=self._write_run(ranking.run, key, self.system.label),
            per_query=self._write("per_query", key, scores.per_query),
            query_texts=self._write("queries", key, {query.id: query.text for query in collection.queries}),
            data_sha256=checked.sha256,
            worst=worst_queries(collection, policy, ranking.run, scores, explain=self.explain),
            baselines=tuple(baseline for baseline, _ in baselines),
            missing=len(collection.missing),
        )
        if result.caution:
            logger.warning("%s: %s", key, result.caution)
        return result

    def _scores(self, collection: Collection, ranking: Ranking) -> Scores:
        # Skip measures with a cut above k: recall@1000 of 100 documents would be recall@100 under another name. MAP is over k documents.
        kept = self.settings.k if ranking.depth is None else min(self.settings.k, ranking.depth)
        names = [name for name, measure in MEASURES.items() if name == HEADLINE or (measure.cut or self.settings.k) <= kept]
        return score(collection.qrels, ranking.run, names)

    def _baseline(self, name: str, benchmark: Benchmark, collection: Collection) -> tuple[Baseline, float]:
        """Scores of a baseline, and the seconds it took."""
        started = time.perf_counter()
        ranking = rank(self.baselines[name], benchmark, collection, self.settings.k)
        scores = self._scores(collection, ranking)
        key = f"{benchmark.key}.{name}"
        baseline = Baseline(
            name=name,
            parameters=ranking.index.parameters,
            measures=scores.means,
            interval=_headline_interval(scores),
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


def _reuse_conditions(checked: _Checked) -> dict[str, object]:
    """Values that the finished result of this collection must have to be reused: data checksum, policy and metadata."""
    benchmark = checked.benchmark
    return {"data_sha256": checked.sha256, **asdict(benchmark.policy)} | {
        name: value for name, value in asdict(benchmark.metadata).items() if name in ("group", "group_size", "licence", "revision")
    }


def _headline_interval(scores: Scores) -> Interval:
    return bootstrap_interval(np.array([values[HEADLINE] for values in scores.per_query.values()]))


def _make_explain(model: object) -> Explain | None:
    if not isinstance(model, ColBERT):
        return None

    def explain(colbert: ColBERT, query: str, document: str) -> list[TokenMatch]:
        matches = token_matches(colbert, query, document)
        return [TokenMatch(match.query.name, match.document.name, match.similarity) for match in matches]

    return partial(explain, model)


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
    """
    headline = {query: values[HEADLINE] for query, values in scores.per_query.items()}
    cases = [
        _case_of(query, collection.qrels[query], run) for query in sorted(headline, key=lambda query: (headline[query], query))[:QUERIES]
    ]
    wanted = {document for case in cases for document in (*case.found, *case.wanted)}
    contents = {each.id: each.content(use_title=policy.use_title) for each in collection.documents if each.id in wanted}
    texts = {query.id: query.text for query in collection.queries}

    def show(case: _Case, document: str) -> ShownDocument:
        found = run.get(case.query, {})
        order = ranks[case.query]
        explained = explain is not None and document in case.explained and document in contents
        return ShownDocument(
            id=document,
            text=_snippet(contents.get(document, "(not among the documents)")),  # judged, and gone from an index
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


def _case_of(query: str, grades: Mapping[str, int], run: Run) -> _Case:
    relevant = sorted((document for document in grades if grades[document] >= 1), key=lambda document: (-grades[document], document))
    return _Case(query, ranked(run.get(query, {}))[:SHOWN], relevant[:SHOWN], len(relevant))


def _snippet(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= SNIPPET else flat[: SNIPPET - 1] + "…"
