"""Rows of a report: systems with labels, their scores and those of baselines, and the check that results are comparable."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import TypeAlias

from quiver.encoder.errors import InputError
from quiver.eval.averages import Average, average, data_sets, grouped
from quiver.eval.results import HEADLINE, CollectionResult, IndexUsed, Interval, Results, System

LABELS: Mapping[str, str] = {
    "ndcg@10": "nDCG@10",
    "map": "MAP",
    "mrr@10": "MRR@10",
    "recall@10": "Recall@10",
    "recall@100": "Recall@100",
    "recall@1000": "Recall@1000",
    "p@10": "P@10",
}
"""Measure -> its name in the literature, in the order of table columns."""

SCORING = ("k", "use_title", "exclude_self")
"""Fields of a collection's result that must be equal for two scores to be comparable."""

FINGERPRINT_WIDTH = 12
"""Number of fingerprint digits in a label."""


@dataclass(frozen=True)
class Score:
    """Scores of a system or baseline on one collection.

    Attributes:
        measures: Measure -> fraction.
        interval: Bootstrap interval of nDCG@10.
        judged: Share of the first ten documents that were judged; None for a baseline.
        in_domain: Whether the system was trained on the collection's training data; False for a baseline.
    """

    measures: Mapping[str, float]
    interval: Interval
    judged: float | None = None
    in_domain: bool = False


@dataclass(frozen=True)
class ScoredRow:
    """A row of the tables of measures.

    Attributes:
        label: Name of the system or baseline.
        scores: Collection with split -> scores.
    """

    label: str
    scores: Mapping[str, Score]


Named: TypeAlias = Sequence[tuple[str, Results]]
"""(label of the system, results)."""


def check_data(results: Sequence[Results]) -> None:
    """Check that results fit into one table.

    Raises:
        InputError: There are no results, a system has two results for one collection with the same index, or two results for one
            collection were made on different data or scored differently, see `SCORING`.
    """
    if not results:
        raise InputError("there are no results to report; name at least one folder that quiver evaluate wrote")
    firsts: dict[str, tuple[str, CollectionResult]] = {}
    seen: set[tuple[System, str, str]] = set()
    for result in results:
        for collection in result.collections:
            source, key = result.system.source, collection.key
            other, first = firsts.setdefault(key, (source, collection))
            if first.data_sha256 != collection.data_sha256:
                raise InputError(f"{key}: {source} and {other} were evaluated on different data of this name; rename one collection")
            for name, one, two in differently_scored(first, collection):
                raise InputError(
                    f"{key}: {other} was scored with {name}={one}, {source} with {name}={two}; evaluate both with the same setting"
                )
            made = (result.system, key, index_name(collection.index))
            if made in seen:
                raise InputError(f"two of the given folders hold scores of {source} on {key}; pass only one of them")
            seen.add(made)


def differently_scored(one: CollectionResult, other: CollectionResult) -> Iterator[tuple[str, object, object]]:
    """Yield the fields of `SCORING` in which two results for one collection differ, with both values."""
    for name in SCORING:
        if getattr(one, name) != getattr(other, name):
            yield name, getattr(one, name), getattr(other, name)


def collections(results: Sequence[Results]) -> dict[str, CollectionResult]:
    """Collection with split -> its facts, in the order of the results.

    If several results are of the same data, the first one that knows its revision and group counts.
    """
    found: dict[str, CollectionResult] = {}
    for result in results:
        for collection in result.collections:
            known = found.setdefault(collection.key, collection)
            if known.revision is None and collection.revision is not None:
                found[collection.key] = collection
    return found


def label_systems(results: Sequence[Results]) -> list[tuple[str, Results]]:
    """Give every result the shortest label that distinguishes its system from the others.

    A label is the last two parts of the source, or the whole source if two of these are equal. Fields that differ between systems of
    one source are added, and the kind if a system has the name of a baseline. Results of one system share a label, unless they searched
    one collection with two indexes: then the index is added.
    """
    systems = list(dict.fromkeys(result.system for result in results))
    baselines = {each.name for result in results for collection in result.collections for each in collection.baselines}
    ends = {system: "/".join(PurePath(system.source).parts[-2:]) or system.source for system in systems}
    names: dict[System, str] = {}
    for system in systems:
        same_end = [other for other in systems if ends[other] == ends[system]]
        same_source = [other for other in systems if other.source == system.source]
        name = ends[system] if len({other.source for other in same_end}) == 1 else system.source
        mistaken = name in baselines and system.kind != name
        details = ", ".join([*_differing(system, same_source), *[system.kind] * mistaken])
        names[system] = f"{name} ({details})" if details else name
    return [(names[result.system] + _index_suffix(result, results), result) for result in results]


def _differing(system: System, others: Sequence[System]) -> list[str]:
    details = []
    for field in fields(System):
        values = {getattr(other, field.name) for other in others}
        if len(values) > 1:
            value = getattr(system, field.name)
            hashed = field.name == "fingerprint" and value is not None
            details.append(value[:FINGERPRINT_WIDTH] if hashed else f"{field.name.replace('_', ' ')} {value}")
    return details


def _index_suffix(result: Results, results: Sequence[Results]) -> str:
    keys = [collection.key for other in results if other.system == result.system for collection in other.collections]
    if len(set(keys)) == len(keys):
        return ""
    return f" [{'; '.join(dict.fromkeys(index_name(collection.index) for collection in result.collections))}]"


def index_name(index: IndexUsed) -> str:
    """An index with its settings in one line."""
    settings = ", ".join(f"{name} {value}" for name, value in index.parameters.items())
    return f"{index.kind} ({settings})" if settings else index.kind


def rows(named: Named) -> list[ScoredRow]:
    """Rows of baselines, then of systems. A baseline that was also evaluated as a system has one row.

    Raises:
        InputError: A system or baseline has two different scores on one collection.
    """
    scored = [(label, collection) for label, result in named for collection in result.collections]
    found: dict[str, dict[str, Score]] = {}
    for _, collection in scored:
        for baseline in collection.baselines:
            _add(found, baseline.name, collection.key, Score(baseline.measures, baseline.interval))
    for label, collection in scored:
        _add(found, label, collection.key, Score(collection.measures, collection.interval, collection.judged, collection.in_domain))
    return [ScoredRow(label, scores) for label, scores in found.items()]


def _add(found: dict[str, dict[str, Score]], label: str, key: str, score: Score) -> None:
    scores = found.setdefault(label, {})
    known = scores.setdefault(key, score)
    if known.measures.keys() != score.measures.keys() or not all(
        math.isclose(known.measures[name], score.measures[name], abs_tol=1e-9) for name in known.measures
    ):
        raise InputError(f"{label} has different scores on {key} in two of the results; evaluate both with the same k, policy and versions")
    if known.judged is None:
        scores[key] = score


def row_data_sets(row: ScoredRow, facts: Mapping[str, CollectionResult], *, measure: str = HEADLINE) -> dict[str, float | None]:
    """Data set -> score of a row, for all data sets of a table. A group of collections is one; None if the row lacks a part of it.

    Args:
        row: A row.
        facts: Return value of `collections`.
        measure: Measure to take.
    """
    values = {key: score.measures.get(measure) for key, score in row.scores.items()}
    return data_sets(collection.part(values.get(key)) for key, collection in facts.items())


def members(facts: Iterable[CollectionResult]) -> dict[str, list[str]]:
    """Data set of a table -> keys of its collections, see `quiver.eval.averages.grouped`."""
    return {name: [part.key for part in parts] for name, parts in grouped(collection.part() for collection in facts).items()}


def row_average(row: ScoredRow, facts: Mapping[str, CollectionResult], *, measure: str = HEADLINE) -> Average:
    """Mean of a row over all data sets of a table; None if one of them is missing.

    Args:
        row: A row.
        facts: Return value of `collections`.
        measure: Measure to take.
    """
    scores = row_data_sets(row, facts, measure=measure)
    return average(scores, list(scores))


def points(fraction: float | None) -> str:
    """Print a fraction in points, hundredths of it, with two decimals; None is the empty string.

    Example:
        >>> points(0.65704)
        '65.70'
    """
    return "" if fraction is None else f"{100 * fraction:.2f}"
