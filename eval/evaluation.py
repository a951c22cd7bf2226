"""One system on one or more collections: collection -> index -> run -> scores -> results.

The walk is the same for a model and for BM25; what differs is one function that ranks a collection. Everything the caller can
get wrong is found before the first text is encoded.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath

from encoder.errors import InputError
from encoder.files import write_json
from eval.benchmark import Benchmark, Policy, cut, depth, resolve
from eval.bm25 import PARAMETERS, bm25_run
from eval.metrics import Scores, score
from eval.provenance import data_sha256, provenance
from eval.results import (
    HEADLINE,
    Baseline,
    CollectionResult,
    FileReference,
    IndexUsed,
    Results,
    System,
    Truncated,
    WorstQuery,
)
from eval.results_folder import refuse_existing, results_folder, write_results
from retrieval.corpus import Collection
from retrieval.files import file_sha256
from retrieval.indexes.build import build_in_memory
from retrieval.models import load_model
from retrieval.protocols import DenseModel, TokenModel
from retrieval.records import Run
from retrieval.run import ranked, write_run
from retrieval.search import search

logger = logging.getLogger(__name__)

WORST = 10
"""How many of the worst queries a result keeps."""


@dataclass(frozen=True)
class Ranking:
    """A collection's run, already cut by its policy, and how it came about; the fields are those of ``CollectionResult``."""

    run: dict[str, dict[str, float]]
    index: IndexUsed
    truncated: Truncated
    seconds: Mapping[str, float]


Ranker = Callable[[Collection, Policy, int], Ranking]
"""Collection, its policy and k to the first k documents of every query."""


def _rank_with_model(model: DenseModel | TokenModel, progress: bool, collection: Collection, policy: Policy, k: int) -> Ranking:
    started = time.perf_counter()
    built = build_in_memory(model, collection.documents, use_title=policy.use_title, progress=progress)
    encoded = time.perf_counter()
    found = search(built.index, model, collection.queries, depth(k, policy), progress=progress)
    return Ranking(
        run=cut(found.run, k, policy),
        index=IndexUsed("exact", {"similarity": model.card.similarity, "precision": "float32"}),
        truncated=Truncated(documents=built.counts.truncated, queries=found.counts.truncated),
        seconds={"encode_documents": encoded - started, "search": time.perf_counter() - encoded},
    )


def _rank_with_bm25(collection: Collection, policy: Policy, k: int) -> Ranking:
    started = time.perf_counter()
    run = bm25_run(collection, k=k, use_title=policy.use_title, exclude_self=policy.exclude_self)
    return Ranking(run, IndexUsed("bm25", PARAMETERS), Truncated(0, 0), {"search": time.perf_counter() - started})


BASELINES: Mapping[str, Ranker] = {"bm25": _rank_with_bm25}
"""Baseline name -> how it ranks; each is a system of its own as well, ``model="bm25"``."""

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


def evaluate(  # noqa: PLR0913 - the public entry: one option for each choice that a report states
    model: str | Path | DenseModel | TokenModel,
    data: str | Path | Benchmark | Sequence[str | Path | Benchmark],
    *,
    split: str = "test",
    out: str | Path | None = None,
    k: int = 1000,
    baselines: Sequence[str] = ("bm25",),
    progress: bool = False,
    command: str | None = None,
    overwrite: bool = False,
) -> Results:
    """Score a system on collections, with exact search over every document.

    Args:
        model: A loaded model, the folder or hub id of one, or ``"bm25"`` (a folder of that name is ``"./bm25"``).
        data: BEIR folders, one or several; a ``Benchmark`` where the policy or the split of one is not the usual.
        split: Which judgements.
        out: Folder for ``results.json``, the TREC runs and the scores of every query; None writes nothing.
        k: Documents kept for a query: MAP and recall@1000 need 1000, nDCG@10 needs 10.
        baselines: Names in ``BASELINES`` to score beside the system.
        progress: Show how far the encoding is.
        command: The command line to record.
        overwrite: Replace the results that ``out`` holds.

    Returns:
        The results, equal to what ``read_results(out)`` gives.

    Raises:
        InputError: The data, a baseline, the model or the output folder cannot be used. Bad data is found before anything is encoded or
            written; of several collections all are read once to see that they are sound.
    """
    if k < 1:
        raise InputError(f"k must be >= 1, got {k}")
    require_baselines(["bm25", *baselines] if model == "bm25" else baselines)
    if out is not None:
        refuse_existing(Path(out), overwrite=overwrite)
    benchmarks = _benchmarks(data, split)
    collection = _check_data(benchmarks, written=out is not None)
    system, rank = _system(model, progress)
    against = {name: BASELINES[name] for name in baselines if name != system.kind}
    with nullcontext() if out is None else results_folder(Path(out), overwrite=overwrite) as folder:
        walk = _Walk(system, rank, against, k, folder)
        scored = [walk.score(benchmarks[0], collection)]
        scored += [walk.score(benchmark, benchmark.load()) for benchmark in benchmarks[1:]]
        results = Results(system, tuple(scored), provenance(command))
        if folder is not None:
            write_results(results, folder)
    return results


@dataclass(frozen=True)
class _Walk:
    """What stays the same from one collection to the next; ``folder`` is where its files go, if anywhere."""

    system: System
    rank: Ranker
    baselines: Mapping[str, Ranker]
    k: int
    folder: Path | None

    def score(self, benchmark: Benchmark, collection: Collection) -> CollectionResult:
        key, policy = f"{benchmark.name}.{benchmark.split}", benchmark.policy
        ranking = self.rank(collection, policy, self.k)
        scores = score(collection.qrels, ranking.run)
        logger.info("%s: %s %.4f over %d queries", key, HEADLINE, scores.means[HEADLINE], len(collection.qrels))
        return CollectionResult(
            name=benchmark.name,
            split=benchmark.split,
            documents=len(collection.documents),
            queries=len(collection.qrels),
            judgements=sum(map(len, collection.qrels.values())),
            use_title=policy.use_title,
            exclude_self=policy.exclude_self,
            k=self.k,
            measures=scores.means,
            unanswered=sum(not ranking.run.get(query) for query in collection.qrels),
            truncated=ranking.truncated,
            empty_texts=collection.empty_texts,
            index=ranking.index,
            seconds=ranking.seconds,
            run=self._write_run(ranking.run, key, self.system.source),
            per_query=self._write_scores(scores, key),
            data_sha256=data_sha256(collection),
            worst=_worst(collection, ranking.run, scores),
            baselines=tuple(self._baseline(name, collection, policy, key) for name in self.baselines),
        )

    def _baseline(self, name: str, collection: Collection, policy: Policy, key: str) -> Baseline:
        ranking = self.baselines[name](collection, policy, self.k)
        measures = score(collection.qrels, ranking.run).means
        return Baseline(name, ranking.index.parameters, measures, self._write_run(ranking.run, f"{key}.{name}", name))

    def _write_run(self, run: Run, key: str, source: str) -> FileReference | None:
        if self.folder is None:
            return None
        path = self.folder / "runs" / f"{key}.trec"
        path.parent.mkdir(exist_ok=True)
        # The tag is one word by the format: the last part of the model's folder or hub id.
        write_run(run, path, tag="_".join(PurePath(source).name.split()) or "quiver")
        return FileReference(path.relative_to(self.folder).as_posix(), file_sha256(path))

    def _write_scores(self, scores: Scores, key: str) -> FileReference | None:
        if self.folder is None:
            return None
        path = self.folder / "per_query" / f"{key}.json"
        path.parent.mkdir(exist_ok=True)
        write_json(path, scores.per_query)
        return FileReference(path.relative_to(self.folder).as_posix(), file_sha256(path))


def _system(model: str | Path | DenseModel | TokenModel, progress: bool) -> tuple[System, Ranker]:
    if model == "bm25":
        return System(source="bm25", kind="bm25"), _rank_with_bm25
    loaded = load_model(str(model)) if isinstance(model, (str, Path)) else model
    return System.of(loaded.card), partial(_rank_with_model, loaded, progress)


def _benchmarks(data: str | Path | Benchmark | Sequence[str | Path | Benchmark], split: str) -> list[Benchmark]:
    given = [data] if isinstance(data, (str, Path, Benchmark)) else data
    benchmarks = [each if isinstance(each, Benchmark) else resolve(each, split) for each in given]
    if not benchmarks:
        raise InputError("no collection was given; name at least one BEIR folder")
    keys = Counter(f"{benchmark.name}.{benchmark.split}" for benchmark in benchmarks)
    if twice := [key for key, count in keys.items() if count > 1]:
        raise InputError(f"two collections are called {twice[0]}, and their files would overwrite each other; rename a folder")
    return benchmarks


def _check_data(benchmarks: Sequence[Benchmark], *, written: bool) -> Collection:
    """Read every collection once and return the first, the only one that stays in memory until its turn.

    Finding out after hours of encoding that the next collection is broken is dearer than reading it twice.
    """
    for benchmark in reversed(benchmarks):
        collection = benchmark.load()
        documents = {document.id for document in collection.documents}
        if written and (spaced := next((key for key in [*collection.qrels, *documents] if key.split() != [key]), None)):
            raise InputError(f"{benchmark.folder}: the id {spaced!r} contains white space, which a TREC run cannot hold; rename it")
        shared = sum(query in documents for query in collection.qrels)
        if shared and not benchmark.policy.exclude_self:
            logger.warning("%s: %d query ids are document ids too; a query may find itself (exclude_self is off)", benchmark.name, shared)
    return collection


def _worst(collection: Collection, run: Run, scores: Scores) -> tuple[WorstQuery, ...]:
    texts = {query.id: query.text for query in collection.queries}
    headline = {query: values[HEADLINE] for query, values in scores.per_query.items()}
    worst = []
    for query in sorted(headline, key=lambda query: (headline[query], query))[:WORST]:
        grades = collection.qrels[query]
        wanted = sorted((document for document in grades if grades[document] >= 1), key=lambda document: (-grades[document], document))
        first = next(iter(ranked(run.get(query, {}))), None)
        worst.append(WorstQuery(query, texts[query], headline[query], first, tuple(wanted)))
    return tuple(worst)
