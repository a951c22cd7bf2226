"""Averages over collections, by the rules of the benchmarks: a group counts once, and a mean that lacks a member is no mean.

A group is whole where as many different collections of one split are there as it has parts: parts of different splits are never
averaged, and one that comes twice counts once.

Source: BEIR, arXiv:2104.08663, where CQADupStack is the unweighted mean of its twelve forums and one of the data sets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One collection, as far as averages are concerned.

    Attributes:
        name: The collection.
        split: Its split.
        group: The data set that it is a part of; None where it stands for itself.
        group_size: How many parts the group has.
        value: Its score; None where it was not scored.
    """

    name: str
    split: str
    group: str | None = None
    group_size: int = 1
    value: float | None = None

    @property
    def key(self) -> str:
        """The collection with its split: ``scifact.test``."""
        return f"{self.name}.{self.split}"


@dataclass(frozen=True)
class Average:
    """A mean over data sets.

    Attributes:
        value: The mean; None where a member is missing.
        known: Members that have a score.
        members: Members in all.
    """

    value: float | None
    known: int
    members: int


def grouped(parts: Iterable[Part]) -> dict[str, list[Part]]:
    """Data set -> its parts, each once, in the order of their first.

    A group's name is that of the data set where its parts are of one split; where they are of several, each split is a data set of its
    own and its name is in the name.

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
            # A collection and a group may share a name: they are two data sets all the same.
            found.setdefault(name if name not in unique else f"{name} (group)", []).append(part)
    return found


def is_whole(parts: Sequence[Part]) -> bool:
    """Whether a data set of `grouped` has all its parts."""
    return {part.group_size for part in parts} == {len(parts)}


def data_sets(parts: Iterable[Part]) -> dict[str, float | None]:
    """The score of every data set, in the order of their first parts; None where one lacks a part, or a part its score.

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
    """The unweighted mean over named data sets, blank where one of them is missing.

    Args:
        scores: Data set -> score.
        members: The data sets the mean is over.

    Example:
        >>> average({"a": 0.5, "b": None}, ["a", "b"])
        Average(value=None, known=1, members=2)
    """
    known = [score for score in (scores.get(name) for name in members) if score is not None]
    complete = bool(members) and len(known) == len(members)
    return Average(math.fsum(known) / len(known) if complete else None, len(known), len(members))
