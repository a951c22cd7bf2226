"""Results in the shape of mteb's result files, so that tools that read those can read ours.

mteb did not make them: ``mteb_version`` is null, and ``dataset_revision`` says which data were scored by us.

Source: ``mteb.results.TaskResult`` of mteb 2.26.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from quiver.encoder.errors import InputError
from quiver.eval.averages import grouped, is_whole
from quiver.eval.report.tasks import AGGREGATES, Task, task_of
from quiver.eval.results import HEADLINE, CollectionResult, Results

NAMES: Mapping[str, str] = {
    "ndcg@10": "ndcg_at_10",
    "mrr@10": "mrr_at_10",
    "recall@10": "recall_at_10",
    "recall@100": "recall_at_100",
    "recall@1000": "recall_at_1000",
    "p@10": "precision_at_10",
}
"""Our measure -> mteb's. MAP is apart: mteb's is over 1,000 documents, and ours over those kept."""

MAP_DEPTH = 1000
"""Documents that mteb's ``map_at_1000`` is over."""


def without_task(results: Results) -> list[str]:
    """The collections that `task_results` leaves out, see `quiver.eval.report.tasks.task_of`; a caller says so."""
    return [collection.key for collection in results.collections if task_of(collection) is None]


def task_results(results: Results) -> Mapping[str, dict[str, object]]:
    """File name -> content, one file a task; a task with several subsets, such as MLDR's languages, is one file.

    Args:
        results: One system. Collections that are none of mteb's are left out, see `without_task`.

    Raises:
        InputError: mteb knows none of the collections, or none as they were scored.
    """
    known = [(collection, task) for collection in results.collections if (task := task_of(collection)) is not None]
    if not known:
        without = ", ".join(map(repr, without_task(results))) or "there are no collections"
        raise InputError(f"mteb has no task for any of these, or scores them otherwise: {without}")
    by_task: dict[str, list[tuple[CollectionResult, Task]]] = {}
    for collection, task in known:
        by_task.setdefault(task.name, []).append((collection, task))
    files = {f"{name}.json": _file(name, members, results) for name, members in by_task.items()}
    for group, name in AGGREGATES.items():
        tasks = {collection.key: (collection, task) for collection, task in known if collection.group == group}
        wholes = [parts for parts in grouped(collection.part() for collection, _ in tasks.values()).values() if is_whole(parts)]
        if wholes:
            files[f"{name}.json"] = _aggregate(name, [[tasks[part.key] for part in parts] for parts in wholes], results)
    return files


def _file(name: str, members: Sequence[tuple[CollectionResult, Task]], results: Results) -> dict[str, object]:
    scores: dict[str, list[dict[str, object]]] = {}
    for collection, task in members:
        scores.setdefault(collection.split, []).append(_scores(_measures(collection), task))
    return _content(name, scores, [collection for collection, _ in members], results)


def _aggregate(name: str, wholes: Sequence[Sequence[tuple[CollectionResult, Task]]], results: Results) -> dict[str, object]:
    """The means over a group, for each split in which it is whole."""
    scores = {}
    for parts in wholes:
        first, task = parts[0]
        measures = [_measures(collection) for collection, _ in parts]
        shared = [key for key in measures[0] if all(key in each for each in measures)]
        means = {key: math.fsum(each[key] for each in measures) / len(measures) for key in shared}
        scores[first.split] = [_scores(means, task)]
    return _content(name, scores, [collection for parts in wholes for collection, _ in parts], results)


def _content(name: str, scores: Mapping[str, object], members: Sequence[CollectionResult], results: Results) -> dict[str, object]:
    return {
        "dataset_revision": ", ".join(dict.fromkeys(_revision(collection) for collection in members)),
        "task_name": name,
        "mteb_version": None,
        "scores": scores,
        "evaluation_time": math.fsum(seconds for collection in members for seconds in collection.seconds.values()),
        "kg_co2_emissions": None,
        "date": results.provenance.date,
    }


def _scores(measures: Mapping[str, float], task: Task) -> dict[str, object]:
    return {**measures, "main_score": measures[NAMES[HEADLINE]], "hf_subset": task.subset, "languages": list(task.languages)}


def _measures(collection: CollectionResult) -> dict[str, float]:
    found = {theirs: collection.measures[ours] for ours, theirs in NAMES.items() if ours in collection.measures}
    if collection.k == MAP_DEPTH and "map" in collection.measures:
        found["map_at_1000"] = collection.measures["map"]
    return found


def _revision(collection: CollectionResult) -> str:
    """What was scored; a local folder has no revision, but a checksum of its texts and judgements."""
    return collection.revision or f"sha256:{collection.data_sha256}"
