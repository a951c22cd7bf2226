"""Averages of scores over data sets, by the rules of the benchmarks.

A group of collections counts as one data set, and an average is None if the score of one of its data sets is missing.

A group is complete if it has as many different collections of one split as its ``group_size`` says. Collections of different splits are
never averaged, and a collection that is given twice counts once.

Source: BEIR, arXiv:2104.08663. There CQADupStack is one data set, scored by the unweighted mean of its twelve forums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One collection and its score, as input to an average.

    Attributes:
        name: Name of the collection.
        split: Split of the judgements.
        group: Data set that the collection is a part of; None if it is a data set of its own.
        group_size: Number of collections in the group.
        value: Score of the collection; None if it was not scored.
    """

    name: str
    split: str
    group: str | None = None
    group_size: int = 1
    value: float | None = None

    @property
    def key(self) -> str:
        """Collection and split: ``scifact.test``."""
        return f"{self.name}.{self.split}"


@dataclass(frozen=True)
class Average:
    """An average over data sets.

    Attributes:
        value: The average; None if the score of a data set is missing.
        known: Number of data sets with a score.
        members: Number of data sets in the average.
    """

    value: float | None
    known: int
    members: int


def grouped(parts: Iterable[Part]) -> dict[str, list[Part]]:
    """Group collections into data sets: data set name -> its parts, each part once, in the order of the first parts.

    A group gives one data set with the group's name if all its parts are of the same split. Otherwise each split gives a data set of its
    own, named ``group.split``.

    Example:
        >>> android, english = Part("android", "test", "forums", 2), Part("english", "dev", "forums", 2)
        >>> list(grouped([android])), list(grouped([android, english]))
        (['forums'], ['forums.test', 'forums.dev'])
    """
    unique: dict[str, Part] = {}
    for part in parts:
        unique.setdefault(part.key, part)
    splits: dict[str, set[str]] = {}
    for part in unique.values():
        if part.group is not None:
            splits.setdefault(part.group, set()).add(part.split)
    found: dict[str, list[Part]] = {}
    for part in unique.values():
        if part.group is None:
            found[part.key] = [part]
        else:
            name = part.group if len(splits[part.group]) == 1 else f"{part.group}.{part.split}"
            # A collection and a group may share a name. They are still two data sets.
            found.setdefault(name if name not in unique else f"{name} (group)", []).append(part)
    return found


def is_whole(parts: Sequence[Part]) -> bool:
    """Whether a data set returned by `grouped` has all its parts."""
    return {part.group_size for part in parts} == {len(parts)}


def data_sets(parts: Iterable[Part]) -> dict[str, float | None]:
    """Score of each data set, in the order of the first parts; None if a part of the data set or its score is missing.

    Example:
        >>> parts = [Part("a", "test", value=0.5), Part("x", "test", "g", 2, 0.1), Part("y", "test", "g", 2, 0.3)]
        >>> data_sets(parts)
        {'a.test': 0.5, 'g': 0.2}
        >>> data_sets(parts[:2])
        {'a.test': 0.5, 'g': None}
    """
    scores: dict[str, float | None] = {}
    for name, members in grouped(parts).items():
        values = [part.value for part in members if part.value is not None]
        scores[name] = math.fsum(values) / len(values) if is_whole(members) and len(values) == len(members) else None
    return scores


def average(scores: Mapping[str, float | None], members: Sequence[str]) -> Average:
    """Unweighted mean over the named data sets; its value is None if the score of one of them is missing.

    Args:
        scores: Data set -> score.
        members: Names of the data sets to average.

    Example:
        >>> average({"a": 0.5, "b": None}, ["a", "b"])
        Average(value=None, known=1, members=2)
    """
    known = [score for score in (scores.get(name) for name in members) if score is not None]
    complete = bool(members) and len(known) == len(members)
    return Average(math.fsum(known) / len(known) if complete else None, len(known), len(members))
