"""One system against others, query by query: what differs, how surely, and where.

The comparison is read from folders of results alone, so that nothing is searched again. Data sets are what averages count: a
collection, or a group of them such as CQADupStack where both systems have all its parts. Each measure is a family of its own in
Holm's correction, over all systems and data sets; the headline is the test, the other measures explain it. Measures that one of the
two lacks, for fewer documents were kept than they look at, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json
from quiver.eval.averages import grouped, is_whole
from quiver.eval.metrics import DEFAULT
from quiver.eval.report.systems import differently_scored, label_systems
from quiver.eval.results import CollectionResult, FileReference, Results
from quiver.eval.results_folder import FILE, read_results
from quiver.eval.significance import CHANGED, PairedComparison, compare_parts, holm

ALPHA = 0.05
"""A difference is significant where its corrected p is below this."""

QueryScores: TypeAlias = Mapping[str, Mapping[str, float]]
"""Query id -> measure -> score."""


@dataclass(frozen=True)
class Measured:
    """One measure of a pair of systems.

    Attributes:
        paired: The comparison; ``first`` is the baseline.
        corrected: Its p, corrected by Holm for being one of ``family``.
        family: Comparisons of this measure that the correction is over.
    """

    paired: PairedComparison
    corrected: float
    family: int

    @property
    def verdict(self) -> str:
        """``better``, ``worse`` or ``not significant``, of the system against the baseline."""
        if self.corrected >= ALPHA:
            return "not significant"
        return "better" if self.paired.difference > 0 else "worse"


@dataclass(frozen=True)
class Pairing:
    """A system and the baseline on one data set, or on the average of several.

    Attributes:
        system: Label of the system.
        baseline: Label of what it is compared with.
        data_set: A collection with its split, the name of a group, or ``average of N data sets``.
        parts: The collections in it, with their splits.
        queries: Judged queries, all of which count.
        measures: Measure -> what it says, for those that both were scored by on all of it.
    """

    system: str
    baseline: str
    data_set: str
    parts: tuple[str, ...]
    queries: int
    measures: Mapping[str, Measured]


@dataclass(frozen=True)
class Unpaired:
    """A collection that only one of a pair was evaluated on.

    Attributes:
        collection: With its split.
        has: Label of the one that was.
        lacks: Label of the other.
    """

    collection: str
    has: str
    lacks: str


@dataclass(frozen=True)
class Comparison:
    """Systems against a baseline; ``dataclasses.asdict`` makes JSON of it.

    Attributes:
        baseline: Label of what the others are compared with.
        systems: Labels of the others.
        pairings: Every system on every data set that it shares with the baseline.
        averages: Every system on the average of those, where they are several and no group lacks a part; corrected over the systems.
        unpaired: What could not be compared.
        query_texts: Collection with split -> query id -> text, for the queries that ``measures`` names.
    """

    baseline: str
    systems: tuple[str, ...]
    pairings: tuple[Pairing, ...]
    averages: tuple[Pairing, ...]
    unpaired: tuple[Unpaired, ...]
    query_texts: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class _Side:
    """One side of a pair: a folder's system, or a baseline that was scored beside it."""

    label: str
    folder: Path
    collections: Mapping[str, CollectionResult]
    per_query: Mapping[str, FileReference | None]
    measures: Mapping[str, Collection[str]]

    def scores(self, key: str, measures: Sequence[str]) -> QueryScores:
        return _read_scores(self.path(self.per_query[key], key), self.collections[key].queries, measures)

    def texts(self, key: str) -> Mapping[str, str]:
        return read_json(self.path(self.collections[key].query_texts, key))

    def path(self, reference: FileReference | None, key: str) -> Path:
        if reference is None:
            raise InputError(f"{self.folder}: {FILE} names no file by query for {key}; run quiver evaluate again")
        return self.folder / reference.file


_DataSets: TypeAlias = Mapping[str, Sequence[str]]
"""Data set -> the keys of its collections."""

_Compared: TypeAlias = tuple[_Side, _Side, str, Sequence[str], Mapping[str, PairedComparison]]
"""Baseline, system, data set, its collections, and what each measure says before it is corrected."""


def compare_results(baseline: str | Path, *systems: str | Path) -> Comparison:
    """Compare what systems scored with what a baseline scored on the same queries.

    Args:
        baseline: A folder of results; or the name of a baseline that the folders hold beside their systems, such as ``bm25``: then
            each system is compared with that of its own folder. (A folder of such a name is ``./bm25``.)
        systems: Folders of results.

    Raises:
        InputError: No system is given, a folder is not a complete folder of results, the data or the way of scoring differs under one
            name, or there is no collection to compare.
    """
    if not systems:
        raise InputError("there is nothing to compare: name a baseline and at least one folder of results")
    pairs = _pairs(baseline, systems)
    compared: list[_Compared] = []
    averaged: list[_Compared] = []
    unpaired: list[Unpaired] = []
    for first, second in pairs:
        unpaired += _unpaired(first, second)
        keys = [key for key in first.collections if key in second.collections]
        for key in keys:
            _check_same(first, second, key)
        shared = {key: [name for name in DEFAULT if name in first.measures[key] and name in second.measures[key]] for key in keys}
        scores = {key: (first.scores(key, shared[key]), second.scores(key, shared[key])) for key in keys}
        for key in keys:
            if scores[key][0].keys() != scores[key][1].keys():
                raise InputError(f"{second.folder}: other queries of {key} were scored than in {first.folder}; evaluate both again")
        data_sets, whole = _data_sets([_grouped(first.collections[key], second.collections[key]) for key in keys])
        compared += [(first, second, name, parts, _compare(scores, shared, {name: parts}, CHANGED)) for name, parts in data_sets.items()]
        if whole and len(data_sets) > 1:
            averaged.append((first, second, f"average of {len(data_sets)} data sets", keys, _compare(scores, shared, data_sets, 0)))
    if not compared:
        raise InputError(f"there is nothing to compare: no collection was scored for {baseline} and for another system")
    pairings = _corrected(compared)
    return Comparison(
        baseline=pairs[0][0].label,
        systems=tuple(second.label for _, second in pairs),
        pairings=pairings,
        averages=_corrected(averaged),
        unpaired=tuple(unpaired),
        query_texts=_texts(pairings, [second for _, second in pairs]),
    )


def _pairs(baseline: str | Path, folders: Sequence[str | Path]) -> list[tuple[_Side, _Side]]:
    results = [read_results(folder) for folder in folders]
    scored = {each.name for result in results for collection in result.collections for each in collection.baselines}
    if baseline in scored:
        systems = _sides(folders, results)
        return [(_beside(str(baseline), system), system) for system in systems]
    if not Path(baseline).exists():
        known = f"; they hold {', '.join(sorted(scored))}" if scored else ""
        raise InputError(f"{baseline}: no such folder, and none of the others holds a baseline of that name{known}")
    first, *rest = _sides([baseline, *folders], [read_results(baseline), *results])
    return [(first, system) for system in rest]


def _sides(folders: Sequence[str | Path], results: Sequence[Results]) -> list[_Side]:
    labels = [label for label, _ in label_systems(results)]
    # One system twice, say with two depths of the index: only the folders tell the two apart.
    labels = [label if labels.count(label) == 1 else f"{label} in {folder}" for label, folder in zip(labels, folders, strict=True)]
    sides = []
    for label, folder, result in zip(labels, folders, results, strict=True):
        collections = {collection.key: collection for collection in result.collections}
        references = {key: collection.per_query for key, collection in collections.items()}
        sides.append(_Side(label, Path(folder), collections, references, {key: each.measures for key, each in collections.items()}))
    return sides


def _beside(name: str, system: _Side) -> _Side:
    """The baseline of that name that was scored beside a system."""
    found = {key: baseline for key, collection in system.collections.items() for baseline in collection.baselines if baseline.name == name}
    return _Side(
        name,
        system.folder,
        {key: system.collections[key] for key in found},
        {key: baseline.per_query for key, baseline in found.items()},
        {key: baseline.measures for key, baseline in found.items()},
    )


def _unpaired(first: _Side, second: _Side) -> Iterator[Unpaired]:
    for has, lacks in ((first, second), (second, first)):
        yield from (Unpaired(key, has.label, lacks.label) for key in has.collections if key not in lacks.collections)


def _check_same(first: _Side, second: _Side, key: str) -> None:
    one, other = first.collections[key], second.collections[key]
    if one.data_sha256 != other.data_sha256:
        raise InputError(f"{key} is other data in {second.folder} than in {first.folder}; evaluate both on the same collection")
    for name, a, b in differently_scored(one, other):
        raise InputError(f"{key} was scored with {name} {a} in {first.folder} and {b} in {second.folder}; evaluate both alike")


def _read_scores(path: Path, queries: int, measures: Sequence[str]) -> QueryScores:
    scores = read_json(path)
    if len(scores) != queries:
        raise InputError(f"{path}: holds the scores of {len(scores)} queries, {FILE} says {queries}; run quiver evaluate again")
    for query, values in scores.items():
        for name in measures:
            value = values.get(name) if isinstance(values, dict) else None
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise InputError(f"{path}: query {query!r} has no number for {name}; run quiver evaluate again")
    return scores


def _grouped(one: CollectionResult, other: CollectionResult) -> CollectionResult:
    """The one that knows its group: the data may have been a local folder to the other."""
    return one if other.group is None else other


def _data_sets(collections: Sequence[CollectionResult]) -> tuple[_DataSets, bool]:
    """Data set -> its collections, and whether every group is whole; the parts of one that is not stand for themselves."""
    found: dict[str, list[str]] = {}
    whole = True
    for name, parts in grouped(collection.part() for collection in collections).items():
        if is_whole(parts):
            found[name] = [part.key for part in parts]
        else:
            found |= {part.key: [part.key] for part in parts}
            whole = False
    return found, whole


def _compare(
    scores: Mapping[str, tuple[QueryScores, QueryScores]], shared: Mapping[str, Sequence[str]], data_sets: _DataSets, changed: int
) -> dict[str, PairedComparison]:
    """Every measure that all parts have over the mean of the data sets, each of which is the mean of its parts."""
    shares = {key: 1 / len(data_sets) / len(parts) for parts in data_sets.values() for key in parts}
    compared = {}
    for measure in DEFAULT:
        if not all(measure in shared[key] for key in shares):
            continue
        one, other = ({key: {query: values[measure] for query, values in scores[key][side].items()} for key in shares} for side in (0, 1))
        compared[measure] = compare_parts(one, other, weights=list(shares.values()), changed=changed)
    return compared


def _corrected(compared: Sequence[_Compared]) -> tuple[Pairing, ...]:
    # A measure's family are the comparisons that have it.
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


def _texts(pairings: Iterable[Pairing], systems: Iterable[_Side]) -> dict[str, dict[str, str]]:
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
