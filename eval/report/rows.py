"""What every report on retrieval results begins with: the rows of its tables, their scores, and the check that results are comparable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quiver.encoder.errors import InputError
from quiver.eval.metrics import Average, Interval, average, data_sets, grouped
from quiver.eval.report.charts import Key
from quiver.eval.results import HEADLINE, CollectionResult, FailedCollection, Named, Results, System, index_name

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


@dataclass(frozen=True)
class Score:
    """Scores of a system or baseline on one collection."""

    measures: Mapping[str, float]
    interval: Interval
    judged: float | None = None  # share of the first ten documents that were judged; None for a baseline
    in_domain: bool = False


@dataclass(frozen=True)
class ScoredRow:
    """A row of the tables of measures."""

    label: str
    scores: Mapping[str, Score]


AVERAGE = "average"
"""Name of the average over all data sets of a table among the data sets of `Significance`."""


@dataclass(frozen=True)
class Significance:
    """Which systems the scores of a report are significantly better than; see `quiver.eval.report.compare.significance`.

    Attributes:
        better: (data set, collection or `AVERAGE`; measure; label of a row) -> labels of the rows that it is better than.
        method: Test and correction, for captions; empty if nothing could be tested.
    """

    better: Mapping[tuple[str, str, str], Sequence[str]]
    method: str = ""


NOT_TESTED = Significance({})
"""Of a report without scores per query, or with a single row."""


def check_data(results: Sequence[Results]) -> None:
    """Check that results fit into one table."""
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


def collections_by_key(results: Sequence[Results]) -> dict[str, CollectionResult]:
    """Collection with split -> its result, in the order of the results.

    If several results are of the same data, the first one with a known revision and group is used, then one that knows all documents.
    """
    found: dict[str, CollectionResult] = {}
    for result in results:
        for collection in result.collections:
            known = found.setdefault(collection.key, collection)
            if (collection.revision is not None, not collection.named_by) > (known.revision is not None, not known.named_by):
                found[collection.key] = collection
    return found


def rows(named: Named) -> list[ScoredRow]:
    """Rows of baselines, then of systems. A baseline that was also evaluated as a system has one row."""
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
    if known.judged is None:
        scores[key] = score


def row_data_sets(row: ScoredRow, collections: Mapping[str, CollectionResult], *, measure: str = HEADLINE) -> dict[str, float | None]:
    """Data set -> score of a row, for all data sets of a table. A group of collections is one; None if the row lacks a part of it."""
    values = {key: score.measures.get(measure) for key, score in row.scores.items()}
    return data_sets(collection.part(values.get(key)) for key, collection in collections.items())


def members(collections: Iterable[CollectionResult]) -> dict[str, list[str]]:
    """Data set of a table -> keys of its collections, see `quiver.eval.metrics.grouped`."""
    return {name: [part.key for part in parts] for name, parts in grouped(collection.part() for collection in collections).items()}


def row_average(
    row: ScoredRow, collections: Mapping[str, CollectionResult], *, failed: Iterable[FailedCollection] = (), measure: str = HEADLINE
) -> Average:
    """Mean of a row over all data sets of a table; None if one of them is missing."""
    # A group that has scored parts lacks those that failed; others are data sets without a score.
    scores = row_data_sets(row, collections, measure=measure) | {each.key: None for each in failed}
    return average(scores, list(scores))


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is one."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def points(fraction: float | None) -> str:
    """Print a fraction in points, hundredths of it, with two decimals; None is the empty string.

    Example:
        >>> points(0.65704)
        '65.70'
    """
    return "" if fraction is None else f"{100 * fraction:.2f}"


COLOURS = 8
"""Number of colours that tell systems apart; systems beyond them repeat colours, and their letters differ."""


def system_keys(scored: Sequence[ScoredRow], named: Named) -> dict[str, Key]:
    """Letters in the order of the rows. BM25 and nothing else is grey: the first of several, so that colours tell them apart."""
    grey = {label for label, result in named if result.system.kind == "bm25"}
    grey |= {baseline.name for _, result in named for collection in result.collections for baseline in collection.baselines}
    labels = dict.fromkeys([*(row.label for row in scored), *(label for label, _ in named)])  # a system without collections has no row
    first = next((label for label in labels if label in grey), None)
    coloured = [label for label in labels if label != first]
    colours = {label: position % COLOURS + 1 for position, label in enumerate(coloured)}
    return {label: Key(letters(position), colours.get(label, 0), label) for position, label in enumerate(labels)}


def letters(position: int) -> str:
    """The letter of the system at a position, from 0.

    Example:
        >>> [letters(position) for position in (0, 25, 26)]
        ['A', 'Z', 'AA']
    """
    return chr(ord("A") + position) if position < 26 else letters(position // 26 - 1) + chr(ord("A") + position % 26)
