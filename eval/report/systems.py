"""What every report is made of: systems with labels, rows over systems and baselines, and the checks that they fit in one table."""

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
"""Measure -> how the literature spells it, in the order of a table's columns."""

SCORING = ("k", "use_title", "exclude_self")
"""Fields of a collection's result that have to be equal for two scores to be comparable."""

FINGERPRINT_WIDTH = 12
"""Digits of a fingerprint that a label shows."""


@dataclass(frozen=True)
class Score:
    """What a row has on one collection.

    Attributes:
        measures: Measure -> fraction.
        interval: Of its nDCG@10.
        judged: Share of the first ten documents that were judged; None for a baseline.
        in_domain: The system was trained on the collection's training data; never for a baseline.
    """

    measures: Mapping[str, float]
    interval: Interval
    judged: float | None = None
    in_domain: bool = False


@dataclass(frozen=True)
class Row:
    """One row of the tables of measures.

    Attributes:
        label: The system or the baseline.
        scores: Collection with split -> what it scored there.
    """

    label: str
    scores: Mapping[str, Score]


Named: TypeAlias = Sequence[tuple[str, Results]]
"""Results with the label of their system."""


def check_data(results: Sequence[Results]) -> None:
    """Check that results can stand in one table.

    Raises:
        InputError: There are none, a system has two results for one collection with the same index, or two results under one name
            were made on different data or scored differently, see ``SCORING``.
    """
    if not results:
        raise InputError("there is nothing to report: no folder of results was given")
    firsts: dict[str, tuple[str, CollectionResult]] = {}
    seen: set[tuple[System, str, str]] = set()
    for result in results:
        for collection in result.collections:
            source, key = result.system.source, collection.key
            other, first = firsts.setdefault(key, (source, collection))
            if first.data_sha256 != collection.data_sha256:
                raise InputError(f"{key} is other data for {source} than for a system before it; rename one of the folders")
            for name, one, two in differently_scored(first, collection):
                raise InputError(f"{key} was scored with {name} {one} for {other} and {two} for {source}; evaluate both alike")
            made = (result.system, key, index_name(collection.index))
            if made in seen:
                raise InputError(f"{source} has two results for {key}; give one of them")
            seen.add(made)


def differently_scored(one: CollectionResult, other: CollectionResult) -> Iterator[tuple[str, object, object]]:
    """Fields of ``SCORING`` in which two results for one collection differ, with both values."""
    for name in SCORING:
        if getattr(one, name) != getattr(other, name):
            yield name, getattr(one, name), getattr(other, name)


def collections(results: Sequence[Results]) -> dict[str, CollectionResult]:
    """Collection with split -> what is known of it, in the order in which the results name them.

    Of two results for the same data, the one that knows its revision says what group it belongs to.
    """
    found: dict[str, CollectionResult] = {}
    for result in results:
        for collection in result.collections:
            known = found.setdefault(collection.key, collection)
            if known.revision is None and collection.revision is not None:
                found[collection.key] = collection
    return found


def label_systems(results: Sequence[Results]) -> list[tuple[str, Results]]:
    """Results with the shortest names that tell their systems apart.

    A name is the end of the source (a hub id whole), or the source where two ends are equal, with the fields that differ where two
    sources are, and with its kind where it would be taken for a baseline. Results of one system have one label, unless they searched
    one collection with two indexes: then each names its own.
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
    """An index with its settings, in one line."""
    settings = ", ".join(f"{name} {value}" for name, value in index.parameters.items())
    return f"{index.kind} ({settings})" if settings else index.kind


def rows(named: Named) -> list[Row]:
    """Baselines first, then systems; a baseline that was evaluated as a system too has one row.

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
    return [Row(label, scores) for label, scores in found.items()]


def _add(found: dict[str, dict[str, Score]], label: str, key: str, score: Score) -> None:
    scores = found.setdefault(label, {})
    known = scores.setdefault(key, score)
    if known.measures.keys() != score.measures.keys() or not all(
        math.isclose(known.measures[name], score.measures[name], abs_tol=1e-9) for name in known.measures
    ):
        raise InputError(f"{label} has different scores on {key} in two results; evaluate both with the same k, policy and versions")
    if known.judged is None:
        scores[key] = score


def row_data_sets(row: Row, facts: Mapping[str, CollectionResult], *, measure: str = HEADLINE) -> dict[str, float | None]:
    """Every data set of the table -> the row's score; a group of collections is one, and None where the row lacks a part of it.

    Args:
        row: A row.
        facts: What `collections` says.
        measure: Of it.
    """
    values = {key: score.measures.get(measure) for key, score in row.scores.items()}
    return data_sets(collection.part(values.get(key)) for key, collection in facts.items())


def members(facts: Iterable[CollectionResult]) -> dict[str, list[str]]:
    """The data sets of a table, in order, with the keys of their collections: a group is one, by split, see `eval.averages.grouped`."""
    return {name: [part.key for part in parts] for name, parts in grouped(collection.part() for collection in facts).items()}


def row_average(row: Row, facts: Mapping[str, CollectionResult], *, measure: str = HEADLINE) -> Average:
    """The row's mean over all data sets of the table; blank where one of them is missing.

    Args:
        row: A row.
        facts: What `collections` says.
        measure: Of it.
    """
    scores = row_data_sets(row, facts, measure=measure)
    return average(scores, list(scores))


def points(fraction: float | None) -> str:
    """A fraction in points, hundredths of it, with two digits; nothing where there is none.

    Example:
        >>> points(0.65704)
        '65.70'
    """
    return "" if fraction is None else f"{100 * fraction:.2f}"
