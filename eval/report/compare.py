"""What reports on retrieval results compare: rows of scores, whether they are comparable, and pairs of systems.

A paired comparison of a system with a baseline says how they differ, whether that is significant, and which queries changed most. It is
computed from folders of results, without searching again. A data set is a collection, or a group of collections such as CQADupStack if both
systems have all its parts. Holm's correction is applied to each measure separately, over all systems and data sets; nDCG@10 is the test,
the other measures explain it. A measure that one of the two systems lacks is left out.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TypeAlias

from quiver.encoder.errors import InputError
from quiver.encoder.files import check_utf8, read_json
from quiver.eval.metrics import (
    CHANGED,
    DEFAULT,
    PERMUTATIONS,
    Average,
    Change,
    Interval,
    PairedComparison,
    average,
    compare_pairs,
    data_sets,
    grouped,
    holm,
    is_whole,
    paired_tests,
)
from quiver.eval.report.charts import Key
from quiver.eval.report.formats import Block, Cell, Column, Paragraph, Report, Section, Span, check_format, shorten, table, write
from quiver.eval.results import (
    FILE,
    HEADLINE,
    Baseline,
    CollectionResult,
    FailedCollection,
    FileReference,
    Named,
    Results,
    System,
    evaluate_again,
    index_name,
    label_systems,
    read_results,
    with_common_names,
)

logger = logging.getLogger(__name__)

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
    """Which systems the scores of a report are significantly better than; see `significance`.

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


ALPHA = 0.05
"""A difference is significant if its corrected p is below this value."""

QueryScores: TypeAlias = Mapping[str, Mapping[str, float]]
"""Query id -> measure -> score."""


@dataclass(frozen=True)
class Measured:
    """One measure of a pair of systems."""

    paired: PairedComparison
    corrected: float
    family: int

    @property
    def verdict(self) -> str:
        """``better``, ``worse`` or ``not significant``: the system against the baseline."""
        if self.corrected >= ALPHA:
            return "not significant"
        return "better" if self.paired.difference > 0 else "worse"


@dataclass(frozen=True)
class Pairing:
    """A system and the baseline on one data set, or on the average of several."""

    system: str
    baseline: str
    data_set: str
    parts: tuple[str, ...]
    queries: int
    measures: Mapping[str, Measured]


@dataclass(frozen=True)
class Unpaired:
    """A collection on which only one of a pair was evaluated."""

    collection: str
    has: str
    lacks: str


@dataclass(frozen=True)
class Comparison:
    """Systems compared with a baseline; `dataclasses.asdict` turns it into JSON."""

    baseline: str
    systems: tuple[str, ...]
    pairings: tuple[Pairing, ...]
    averages: tuple[Pairing, ...]
    unpaired: tuple[Unpaired, ...]
    query_texts: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class _Side:
    """One side of a pair: the system of a folder, or a baseline that was scored with it."""

    label: str
    folder: Path
    collections: Mapping[str, CollectionResult]
    scored: Mapping[str, CollectionResult | Baseline]

    def scores(self, key: str, measures: Sequence[str]) -> QueryScores:
        return _read_query_scores(self.folder, self.path(self.scored[key].per_query, key), self.collections[key].queries, measures)

    def texts(self, key: str) -> Mapping[str, str]:
        return read_json(self.path(self.collections[key].query_texts, key))

    def path(self, reference: FileReference | None, key: str) -> Path:
        if reference is None:
            raise InputError(
                f"{self.folder}: {FILE} names no file with scores per query for {key}; type: {evaluate_again(self.folder, overwrite=True)}"
            )
        return self.folder / reference.file


_DataSets: TypeAlias = Mapping[str, Sequence[str]]
"""Data set -> the keys of its collections."""

_Compared: TypeAlias = tuple[_Side, _Side, str, Sequence[str], Mapping[str, PairedComparison]]
"""Baseline, system, data set, its collections, and the comparison by measure before correction."""


def compare_results(baseline: str | Path, *systems: str | Path) -> Comparison:
    """Compare the scores of systems with those of a baseline on the same queries.

    Args:
        baseline: A folder of results; or the name of a baseline in the results, such as ``bm25``: then each system is compared with
            the baseline of its own folder. Write ``./bm25`` for a folder of that name.
        systems: Folders of results.

    Raises:
        InputError: No system is given, a folder holds no complete results, two results for a collection have different data or scoring,
            or the systems share no collection with the baseline.
    """
    if not systems:
        raise InputError("nothing to compare: name a baseline and at least one folder of results")
    pairs = _pairs(baseline, systems)
    compared: list[_Compared] = []
    averaged: list[_Compared] = []
    unpaired: list[Unpaired] = []
    for first, second in pairs:
        unpaired += _list_unpaired(first, second)
        keys = [key for key in first.collections if key in second.collections]
        for key in keys:
            _check_same(first, second, key)
        sides = {key: (first.scored[key].measures, second.scored[key].measures) for key in keys}
        shared = {key: [name for name in DEFAULT if all(name in measures for measures in sides[key])] for key in keys}
        scores = {key: (first.scores(key, shared[key]), second.scores(key, shared[key])) for key in keys}
        for key in keys:
            if scores[key][0].keys() != scores[key][1].keys():
                raise InputError(f"{second.folder} and {first.folder} hold scores of different queries of {key}; evaluate both again")
        data_sets, whole = _split_data_sets([_pick_grouped(first.collections[key], second.collections[key]) for key in keys])
        compared += [
            (first, second, name, parts, _compare_by_measure(scores, shared, {name: parts}, CHANGED)) for name, parts in data_sets.items()
        ]
        if whole and len(data_sets) > 1:
            averaged.append(
                (first, second, f"average of {len(data_sets)} data sets", keys, _compare_by_measure(scores, shared, data_sets, 0))
            )
    if not compared:
        scored = dict.fromkeys(f"{side.label} on {', '.join(side.collections)}" for pair in pairs for side in pair)
        raise InputError(f"nothing to compare: no collection was scored for {baseline} and for another system: {'; '.join(scored)}")
    pairings = _correct_families(compared)
    return Comparison(
        baseline=pairs[0][0].label,
        systems=tuple(second.label for _, second in pairs),
        pairings=pairings,
        averages=_correct_families(averaged),
        unpaired=tuple(unpaired),
        query_texts=_read_texts(pairings, [second for _, second in pairs]),
    )


def _pairs(baseline: str | Path, folders: Sequence[str | Path]) -> list[tuple[_Side, _Side]]:
    results = with_common_names([read_results(folder) for folder in folders])
    scored = {each.name for result in results for collection in result.collections for each in collection.baselines}
    if baseline in scored:
        systems = _sides(folders, results)
        return [(_find_baseline(str(baseline), system), system) for system in systems]
    if not Path(baseline).exists():
        known = f"; they hold {', '.join(sorted(scored))}" if scored else ""
        raise InputError(f"{baseline}: there is no such folder, and the results hold no baseline of that name{known}")
    first, *rest = _sides([baseline, *folders], with_common_names([read_results(baseline), *results]))
    return [(first, system) for system in rest]


def _sides(folders: Sequence[str | Path], results: Sequence[Results]) -> list[_Side]:
    labels = [label for label, _ in label_systems(results)]
    # The same system twice, such as with two index settings: the folder distinguishes them.
    labels = [label if labels.count(label) == 1 else f"{label} in {folder}" for label, folder in zip(labels, folders, strict=True)]
    return _label_sides(labels, folders, results)


def _label_sides(labels: Sequence[str], folders: Sequence[str | Path], results: Sequence[Results]) -> list[_Side]:
    given = zip(labels, folders, ({each.key: each for each in result.collections} for result in results), strict=True)
    return [_Side(label, Path(folder), collections, collections) for label, folder, collections in given]


def _find_baseline(name: str, system: _Side) -> _Side:
    """The baseline of that name in the results of a system."""
    found = {key: baseline for key, collection in system.collections.items() for baseline in collection.baselines if baseline.name == name}
    return _Side(name, system.folder, {key: system.collections[key] for key in found}, found)


def _list_unpaired(first: _Side, second: _Side) -> Iterator[Unpaired]:
    for has, lacks in ((first, second), (second, first)):
        yield from (Unpaired(key, has.label, lacks.label) for key in has.collections if key not in lacks.collections)


def _check_same(first: _Side, second: _Side, key: str) -> None:
    one, other = first.collections[key], second.collections[key]
    if one.data_sha256 != other.data_sha256:
        raise InputError(f"{key} is different data in {second.folder} and in {first.folder}; evaluate both on the same collection")
    known = one.documents and other.documents and not (one.named_by or other.named_by)
    if known and one.documents != other.documents:
        counts = f"{first.label} {one.documents:,} and {second.label} {other.documents:,}"
        logger.warning("%s: the systems searched different documents: %s; a difference may be one of the documents", key, counts)
    for name, a, b in differently_scored(one, other):
        raise InputError(
            f"{key} was scored with {name}={a} in {first.folder} and {name}={b} in {second.folder}; evaluate both with the same setting"
        )


def _read_query_scores(folder: Path, path: Path, queries: int, measures: Sequence[str]) -> QueryScores:
    again = evaluate_again(folder, overwrite=True)
    scores = read_json(path)
    if len(scores) != queries:
        raise InputError(f"{path}: holds scores of {len(scores)} queries, but {FILE} says {queries}; type: {again}")
    for query, values in scores.items():
        for name in measures:
            value = values.get(name) if isinstance(values, dict) else None
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise InputError(f"{path}: the {name} of query {query!r} is missing or not a number; type: {again}")
    return scores


def _pick_grouped(one: CollectionResult, other: CollectionResult) -> CollectionResult:
    """The collection that knows its group; the other may have been read from a local folder."""
    return one if other.group is None else other


def _split_data_sets(collections: Sequence[CollectionResult]) -> tuple[_DataSets, bool]:
    """Data set -> its collections, and whether every group is whole; the parts of an incomplete group are data sets of their own."""
    found: dict[str, list[str]] = {}
    whole = True
    for name, parts in grouped(collection.part() for collection in collections).items():
        if is_whole(parts):
            found[name] = [part.key for part in parts]
        else:
            found |= {part.key: [part.key] for part in parts}
            whole = False
    return found, whole


def _compare_by_measure(
    scores: Mapping[str, tuple[QueryScores, QueryScores]], shared: Mapping[str, Sequence[str]], data_sets: _DataSets, changed: int
) -> dict[str, PairedComparison]:
    """Compare the means over data sets, each the mean of its parts, by every measure that all parts have."""
    shares = _weigh_collections(data_sets)
    measures = [name for name in DEFAULT if all(name in shared[key] for key in shares)]
    if not measures:
        return {}
    one, other = (
        [{key: {query: values[name] for query, values in scores[key][side].items()} for key in shares} for name in measures]
        for side in (0, 1)
    )
    pairs = list(zip(one, other, strict=True))
    return dict(zip(measures, compare_pairs(pairs, weights=list(shares.values()), changed=changed), strict=True))


def _weigh_collections(data_sets: _DataSets) -> dict[str, float]:
    """Weight of every collection in the mean over data sets, each the mean of its parts."""
    return {key: 1 / len(data_sets) / len(parts) for parts in data_sets.values() for key in parts}


def significance(
    folders: Sequence[str | Path], results: Sequence[Results], *, averages: Mapping[str, Sequence[str]] | None = None
) -> Significance:
    """Test every pair of rows of a report on every data set: which systems is a score significantly better than?

    The tests and Holm's correction are those of `compare_results`. A family is one measure over all pairs of rows and all data sets; the
    averages are a family of their own, in which averages of the same data sets are one test, and so are the parts of groups. A data set is
    tested by a measure only if every row of the report has scores per query for it.
    """
    homes = _find_homes(folders, results)
    collections = collections_by_key(results)
    tested = [key for key in collections if all(key in found for found in homes.values())]
    if len(homes) < 2 or not tested:
        return NOT_TESTED
    shared = {key: [name for name in DEFAULT if all(name in found[key].scored[key].measures for found in homes.values())] for key in tested}
    scores = {label: {key: found[key].scores(key, shared[key]) for key in tested} for label, found in homes.items()}
    first = next(iter(homes))
    for label, key in ((label, key) for label in homes for key in tested):
        if scores[label][key].keys() != scores[first][key].keys():
            raise InputError(
                f"{homes[label][key].folder} and {homes[first][key].folder} hold scores of different queries of {key}; evaluate both again"
            )
    sets = grouped(collection.part() for collection in collections.values())
    keys = {name: [part.key for part in parts] for name, parts in sets.items()}
    whole = {name: keys[name] for name, parts in sets.items() if is_whole(parts) and all(key in tested for key in keys[name])}
    parts = [key for name in sets if name not in collections for key in keys[name] if key in tested]
    families = [{name: {name: whole[name]} for name in whole}, {key: {key: [key]} for key in parts}]
    names: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)  # data sets -> names of their average
    for name, members in ({AVERAGE: list(sets)} if averages is None else averages).items():
        if len(members) > 1 and all(each in whole for each in members):
            names[tuple(members)].append(name)
    same = {each[0]: each for each in names.values()}
    averaged = {each[0]: {member: whole[member] for member in members} for members, each in names.items()}
    better: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    # No report shows averages of the other measures, and these tests take the most time.
    for family, measures in [*((each, DEFAULT) for each in families), (averaged, [HEADLINE])]:
        for name, measure, winner, loser in _find_significant(family, measures, scores, shared):
            for each in same.get(name, [name]):
                better[each, measure, winner].append(loser)
    rule = _superscript_rule(math.comb(len(homes), 2), len(whole), parts=len(parts), averaged=len(averaged))
    return Significance(dict(better), rule if better else f"{rule} No difference was significant.")


def _find_homes(folders: Sequence[str | Path], results: Sequence[Results]) -> dict[str, dict[str, _Side]]:
    """Label of each row of a report -> collection -> the side with its scores per query; a system's come before a baseline's."""
    named = label_systems(results)
    homes: dict[str, dict[str, _Side]] = {row.label: {} for row in rows(named)}
    systems = _label_sides([label for label, _ in named], folders, [result for _, result in named])
    baselines = {baseline.name: None for _, result in named for collection in result.collections for baseline in collection.baselines}
    for side in [*(_find_baseline(name, system) for system in systems for name in baselines), *systems]:
        for key, scored in side.scored.items():
            if scored.per_query is not None:
                homes[side.label][key] = side
    return homes


def _superscript_rule(pairs: int, whole: int, *, parts: int, averaged: int) -> str:
    families = [
        *([counted(whole, "data set")] if whole else []),
        *(["the average" if averaged == 1 else counted(averaged, "average")] if averaged else []),
        *([counted(parts, "part") + " of groups"] if parts else []),
    ]
    return (
        f"A superscript names the systems that a score is significantly better than (corrected p < {ALPHA:g}): two-sided paired"
        f" sign-flip test on the scores per query, Holm's correction over {counted(pairs, 'pair')} of systems on"
        f" {', and apart on '.join(families)}, for each measure separately. Where a system has no scores per query, nothing was tested."
    )


def _find_significant(
    family: Mapping[str, _DataSets],
    measures: Sequence[str],
    scores: Mapping[str, Mapping[str, QueryScores]],
    shared: Mapping[str, Sequence[str]],
) -> Iterator[tuple[str, str, str, str]]:
    """Yield a data set, a measure, the better system and the worse one, for every significant difference of a family."""
    tests: dict[str, list[tuple[str, str, str, float, float]]] = {measure: [] for measure in measures}
    for name, collections in family.items():
        shares = _weigh_collections(collections)
        known = [measure for measure in measures if all(measure in shared[key] for key in shares)]
        order = next(iter(scores.values()))
        values = {
            (label, measure): [[of[key][query][measure] for query in order[key]] for key in shares]
            for label, of in scores.items()
            for measure in known
        }
        # All pairs and measures at once, since they share the random signs of the test.
        pairs = [(measure, *both) for measure in known for both in combinations(scores, 2)]
        results = paired_tests([(values[one, of], values[two, of]) for of, one, two in pairs], weights=list(shares.values()))
        for (measure, one, two), (difference, p) in zip(pairs, results, strict=True):
            tests[measure].append((name, one, two, difference, p))
    for measure, found in tests.items():
        for (name, first, second, difference, _), p in zip(found, holm([p for *_, p in found]), strict=True):
            if p < ALPHA:
                yield (name, measure, second, first) if difference > 0 else (name, measure, first, second)


def _correct_families(compared: Sequence[_Compared]) -> tuple[Pairing, ...]:
    # The family of a measure is all comparisons that have it.
    by_measure = {name: holm([measures[name].p for *_, measures in compared if name in measures]) for name in DEFAULT}
    corrected = {name: iter(values) for name, values in by_measure.items()}
    return tuple(
        Pairing(
            system=second.label,
            baseline=first.label,
            data_set=data_set,
            parts=tuple(parts),
            queries=sum(second.collections[key].queries for key in parts),
            measures={name: Measured(paired, next(corrected[name]), len(by_measure[name])) for name, paired in measures.items()},
        )
        for first, second, data_set, parts, measures in compared
    )


def _read_texts(pairings: Iterable[Pairing], systems: Iterable[_Side]) -> dict[str, dict[str, str]]:
    named: dict[str, set[str]] = {}
    for pairing in pairings:
        for measured in pairing.measures.values():
            for change in (*measured.paired.gained, *measured.paired.lost):
                named.setdefault(change.part, set()).add(change.query)
    homes = {key: side for side in systems for key in side.collections}
    texts = {}
    for key in sorted(named):
        known = homes[key].texts(key)
        texts[key] = {query: known[query] for query in sorted(named[key]) if query in known}
    return texts


def check_comparison_target(out: str | Path) -> None:
    """Check before the comparison that its report can be written."""
    check_format(Path(out))


def write_comparison(comparison: Comparison, out: str | Path, *, title: str = "") -> None:
    """Write the report of a comparison, replacing an existing one."""
    path = Path(out)
    report = comparison_report(comparison, latex=check_format(path) == ".tex")
    write(replace(report, title=check_utf8(title, "the title") or report.title), path)


def comparison_report(comparison: Comparison, *, latex: bool = False) -> Report:
    """Make the report of a comparison; measures are in points, hundredths of a fraction. Every row has a verdict."""
    pairings = (*comparison.pairings, *comparison.averages)
    method = _describe_method(comparison)
    headline: list[tuple[str, tuple[Block, ...]]] = []
    measured: list[tuple[str, tuple[Block, ...]]] = []
    for number, system in enumerate(comparison.systems, start=1):
        own = [each for each in pairings if each.system == system]
        title = f"of {system}, compared with {comparison.baseline}, in points"
        rows: list[list[str | Cell]] = [[each.data_set, f"{each.queries:,}", *_measure_cells(each.measures[HEADLINE])] for each in own]
        made = table((_COLLECTION, Column("Queries"), *_COLUMNS), rows, name=f"{LABELS[HEADLINE]} {title}", caption=method if latex else "")
        headline.append((system, (replace(made, label=f"comparison-{number}"), *_list_cautions(own))))
        rows = [[each.data_set, LABELS[name], *_measure_cells(measure)] for each in own for name, measure in each.measures.items()]
        made = table((_COLLECTION, Column("Measure", numeric=False), *_COLUMNS), rows, name=f"All measures {title}")
        measured.append((system, (made,)))
    blocks: list[Block] = [*([] if latex else [Paragraph(method)]), Section(LABELS[HEADLINE], tuple(_head_systems(headline)), "headline")]
    if not latex:
        blocks.append(Section("All measures", tuple(_head_systems(measured)), "measures"))
        changed = tuple(section for pairing in comparison.pairings for section in _list_changes(pairing, comparison.query_texts))
        blocks += [Section("Queries that changed most", changed, "changes")] if changed else []
    if comparison.unpaired:
        columns = [Column(title, numeric=False) for title in ("Collection", "Scored for", "Not scored for")]
        missing = table(columns, [[each.collection, each.has, each.lacks] for each in comparison.unpaired], name="Not compared")
        blocks.append(Section("Not compared", (missing,), "unpaired"))
    return Report(f"Compared with {comparison.baseline}", tuple(blocks))


def _head_systems(systems: Sequence[tuple[str, tuple[Block, ...]]]) -> Iterator[Block]:
    """The tables of the systems, with headings if there are several."""
    for system, blocks in systems:
        yield from blocks if len(systems) == 1 else (Section(system, blocks),)


_COLLECTION = Column("Collection", numeric=False)

_COLUMNS = (
    Column("Baseline"),
    Column("System"),
    Column("Difference"),
    Column("Interval"),
    Column("Verdict", numeric=False),
    Column("p"),
    Column("p corrected"),
    Column("Better / equal / worse"),
)


def _describe_method(comparison: Comparison) -> str:
    interval = comparison.pairings[0].measures[HEADLINE].paired.interval
    family = comparison.pairings[0].measures[HEADLINE].family
    some_lack = any(measured.family < family for pairing in comparison.pairings for measured in pairing.measures.values())
    return " ".join(
        [
            f"Differences are system minus {comparison.baseline}, in points, over the same judged queries.",
            f"The interval holds {100 * interval.level:g}% of {interval.resamples:,} bootstrap resamples of the queries (percentiles).",
            f"p is that of a two-sided paired sign-flip test over all assignments of signs, or over {PERMUTATIONS:,} random ones"
            " if there are more.",
            f"Holm's correction covers {family} {'comparison' if family == 1 else 'comparisons'} of each measure"
            f"{', fewer if some systems lack the measure' if some_lack else ''}, but not the number of"
            f" measures: {LABELS[HEADLINE]} is the test, the others explain it.",
            f"A system is called better or worse if the corrected p is below {ALPHA:g}.",
            "A group of collections is the mean of its parts, and an average is the mean of the data sets above it: queries are drawn and"
            " signs are flipped within each collection.",
        ]
    )


def _measure_cells(measured: Measured) -> list[str | Cell]:
    paired = measured.paired
    return [
        points(paired.first),
        points(paired.second),
        _sign_points(paired.difference),
        Cell(f"{_sign_points(paired.interval.low)} to {_sign_points(paired.interval.high)}", paired.interval.low),
        measured.verdict,
        Cell(_format_p(paired.p), paired.p),
        Cell(_format_p(measured.corrected), measured.corrected),
        Cell(f"{paired.wins:,} / {paired.ties:,} / {paired.losses:,}", float(paired.wins)),
    ]


def _list_cautions(pairings: Iterable[Pairing]) -> Iterator[Paragraph]:
    """One for all pairings of a system that are not significant."""
    unclear = [(each, each.measures[HEADLINE]) for each in pairings if each.measures[HEADLINE].corrected >= ALPHA]
    if unclear:
        sets = [
            f"{each.data_set} ({_sign_points(measured.paired.difference)} points over {each.queries:,} queries, corrected p"
            f" {_format_p(measured.corrected)})"
            for each, measured in unclear
        ]
        first, _ = unclear[0]
        text = f" the difference between {first.system} and {first.baseline} is not significant on {', '.join(sets)}: neither can be called"
        yield Paragraph((Span("Caution:", "strong"), f"{text} better there."))


def _list_changes(pairing: Pairing, texts: Mapping[str, Mapping[str, str]]) -> Iterator[Section]:
    paired = pairing.measures[HEADLINE].paired
    # A group has queries of several collections.
    grouped = any(change.part != pairing.data_set for change in (*paired.gained, *paired.lost))
    names = ("Collection", "Query", "Text")[not grouped :]
    columns = (
        *(Column(name, numeric=False, wide=name == "Text") for name in names),
        Column("Baseline"),
        Column("System"),
        Column("Difference"),
    )
    for verb, changes in (("gain", paired.gained), ("lose", paired.lost)):
        if changes:
            title = f"Queries of {pairing.data_set} that {verb} most with {pairing.system}"
            rows = [_change_cells(change, texts)[not grouped :] for change in changes]
            yield Section(title, (table(columns, rows, name=title),))


def _change_cells(change: Change, texts: Mapping[str, Mapping[str, str]]) -> list[str]:
    text = shorten(texts.get(change.part, {}).get(change.query, ""))
    return [change.part, change.query, text, points(change.first), points(change.second), _sign_points(change.difference)]


def _sign_points(fraction: float) -> str:
    """Points with a sign; a value that rounds to zero has none."""
    text = f"{100 * fraction:+.2f}"
    return "0.00" if float(text) == 0 else text


def _format_p(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"
