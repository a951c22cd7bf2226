"""Averages over collections, by the rules of the benchmarks: a group counts once, and a mean that lacks a member is no mean.

Source: BEIR, arXiv:2104.08663, where CQADupStack is the unweighted mean of its twelve forums and one of the data sets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One scored collection, as far as averages are concerned.

    Attributes:
        name: The collection with its split.
        group: The data set that it is a part of; None where it stands for itself.
        group_size: How many parts the group has.
        value: Its score.
    """

    name: str
    group: str | None
    group_size: int
    value: float


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


def data_sets(parts: Sequence[Part]) -> dict[str, float | None]:
    """The score of every data set, in the order of their first parts; None for a group that lacks a part.

    Example:
        >>> data_sets([Part("a.test", None, 1, 0.5), Part("x.test", "g", 2, 0.1), Part("y.test", "g", 2, 0.3)])
        {'a.test': 0.5, 'g': 0.2}
    """
    grouped: dict[str, list[Part]] = {}
    for part in parts:
        grouped.setdefault(part.group or part.name, []).append(part)
    return {
        name: math.fsum(part.value for part in members) / len(members) if len(members) == members[0].group_size else None
        for name, members in grouped.items()
    }


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
