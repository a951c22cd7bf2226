"""How sure a mean over queries is, and whether two systems differ by more than the luck of which queries were asked.

The unit is the query: two systems answer the same ones, so a comparison is paired and needs no assumption on how scores are
distributed, only that the queries are a sample of those people ask. A result says nothing about other collections, nor about
another training run of the same recipe.

A collection may come in parts (the forums of CQADupStack), and an average is over collections: there the score is the unweighted
mean of means, queries are drawn and flipped inside their part, and one part weighs as much as another however many queries it has.
Parts and their weights are fixed, not sampled.

Every number is a function of the scores and the seed: the order of the queries does not matter, nor which system comes first.
Memory is a few times the number of resamples or permutations, 2 MB at the defaults, however many queries there are.

This module knows nothing of files, collections or reports.

Sources: Smucker, Allan and Carterette 2007, doi 10.1145/1321440.1321528 (the randomisation test on means over queries, and why not
Wilcoxon's or the sign test); Efron 1979, doi 10.1214/aos/1176344552 (the bootstrap; the percentile interval is in Efron 1981,
doi 10.2307/3314608); Holm 1979, Scandinavian Journal of Statistics 6(2), 65-70; Phipson and Smyth 2010, doi 10.2202/1544-6115.1585
(why a sampled p is (b + 1) / (m + 1)).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quiver.eval.results import Interval

LEVEL = 0.95
"""Confidence of an interval."""

RESAMPLES = 10_000
"""Samples of the queries, with replacement, behind an interval."""

PERMUTATIONS = 100_000
"""Assignments of signs behind a p: no smaller p than 1 in this many comes out of a sample."""

TIE = 1e-12
"""Scores no further apart than this are a tie. Rounding is below 1e-14; the smallest step of a measure is MAP's, some 1e-9."""

CHANGED = 10
"""Queries that a comparison names in each direction."""


def bootstrap_interval(values: ArrayLike, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """The percentile bootstrap interval of a mean over queries.

    Args:
        values: One score a query.
        level: Share of the resampled means inside, 0 < level < 1.
        resamples: Samples drawn with replacement.
        seed: Of the draws.

    Raises:
        ValueError: There are no values, one is not finite, or an option is out of range.

    Example:
        >>> bootstrap_interval([0.5, 0.5, 0.5])
        Interval(low=0.5, high=0.5, level=0.95, resamples=10000)
    """
    return stratified_interval([values], level=level, resamples=resamples, seed=seed)


def stratified_interval(
    parts: Sequence[ArrayLike],
    *,
    weights: Sequence[float] | None = None,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The percentile bootstrap interval of a mean of means; queries are drawn inside their part.

    Args:
        parts: The scores of each part.
        weights: Of the parts; they sum to 1. None weighs all alike.
        level: Share of the resampled means inside, 0 < level < 1.
        resamples: Samples drawn with replacement.
        seed: Of the draws.

    Raises:
        ValueError: There are no parts, one is empty, a value is not finite, or an option is out of range.

    Example:
        >>> stratified_interval([[0.0, 0.0, 0.0], [1.0]], weights=[0.25, 0.75])
        Interval(low=0.75, high=0.75, level=0.95, resamples=10000)
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    if resamples < 1:
        raise ValueError(f"resamples must be >= 1, got {resamples}")
    checked = [_finite(values) for values in parts]
    shares = _weights(weights, len(checked))
    centre = math.fsum(share * (math.fsum(values) / len(values)) for share, values in zip(shares, checked, strict=True))
    # Sorted and with a mean >= 0, so that the draws meet the same values whatever the order of the queries, and two systems that
    # change places have the same interval with the other sign.
    side = -1.0 if centre < 0 else 1.0
    rng = np.random.default_rng(seed)
    deviations = np.zeros(resamples)
    for share, values in zip(shares, checked, strict=True):
        # Around the mean, so that equal scores give an interval without width instead of one of rounding errors.
        ordered = np.sort(side * (values - math.fsum(values) / len(values)))
        deviations += share / len(values) * _resampled_sums(ordered, resamples, rng)
    low, high = sorted((side * np.quantile(deviations, [(1 - level) / 2, (1 + level) / 2])).tolist())
    return Interval(centre + low, centre + high, level, resamples)


def _resampled_sums(values: NDArray[np.float64], resamples: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Sums of ``len(values)`` values drawn with replacement; all resamples draw at once, so no matrix of draws is ever held."""
    sums = np.zeros(resamples)
    for _ in range(len(values)):
        sums += values[rng.integers(len(values), size=resamples)]
    return sums


def sign_flip(differences: ArrayLike, *, permutations: int = PERMUTATIONS, seed: int = 0) -> float:
    """The two-sided p of the paired randomisation test: how often a sum at least this far from 0 comes of random signs.

    If it made no difference which system answered, each query's difference would have either sign with equal chance. All
    assignments of signs are enumerated where there are no more than ``permutations``, and otherwise so many are drawn; then the
    observed one counts as one of them, so that p is never 0 and the test keeps its level.

    Args:
        differences: One a query, second system minus first; scaled by the weights of their parts for a mean of means. Zeros cannot
            change a sum and are left out, so that few queries that differ are enumerated even among many that do not.
        permutations: Assignments of signs, at most.
        seed: Of the draws; nothing is drawn where they are enumerated.

    Returns:
        p, 0 < p <= 1; 1 where all differences are zero.

    Raises:
        ValueError: There are no differences, one is not finite, or ``permutations`` < 1.

    Example:
        Of the eight sums of +-1, +-2 and +-3, two are as far from 0 as 6.

        >>> sign_flip([1.0, 2.0, 3.0]), sign_flip([0.0, 0.0])
        (0.25, 1.0)
    """
    if permutations < 1:
        raise ValueError(f"permutations must be >= 1, got {permutations}")
    given = _finite(differences)
    # Random signs make the sign of a difference irrelevant; without it and sorted, p depends on neither the order of the queries nor
    # on which system comes first.
    sizes = np.sort(np.abs(given[given != 0]))
    # Sums that are equal on paper differ by rounding, and have to count as equal.
    reached = abs(math.fsum(given)) - 1e-12 * math.fsum(sizes)
    if len(sizes) < permutations.bit_length():  # 2**len(sizes) <= permutations
        return float(np.mean(np.abs(_enumerated_sums(sizes)) >= reached))
    sums = _random_sums(sizes, permutations, np.random.default_rng(seed))
    return (int(np.count_nonzero(np.abs(sums) >= reached)) + 1) / (permutations + 1)


def _enumerated_sums(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """All 2**n sums of the sizes with either sign."""
    sums = np.zeros(1)
    for size in sizes:
        sums = np.concatenate([sums + size, sums - size])
    return sums


def _random_sums(sizes: NDArray[np.float64], permutations: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Sums of the sizes with random signs, eight sizes at a time: a random byte looks up one of their 256 sums."""
    eights = np.zeros((math.ceil(len(sizes) / 8), 8))
    eights.ravel()[: len(sizes)] = sizes
    signs = 1.0 - 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)  # (256, 8)
    sums = np.zeros(permutations)
    for eight in eights:
        sums += (signs @ eight)[rng.integers(256, size=permutations, dtype=np.uint8)]
    return sums


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p corrected for being one of several, in the order given: below alpha where Holm's step-down test at alpha rejects.

    The chance of one false rejection or more among them is at most alpha, however the tests depend on each other.

    Raises:
        ValueError: A value is not between 0 and 1.

    Example:
        >>> holm([0.04, 0.01, 0.03])
        [0.06, 0.03, 0.06]
    """
    if wrong := [p for p in p_values if not 0 <= p <= 1]:
        raise ValueError(f"p must be between 0 and 1, got {wrong[0]}")
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = highest
    return corrected


@dataclass(frozen=True)
class Change:
    """What two systems scored on one query.

    Attributes:
        part: The part the query belongs to; a collection with its split in a report.
        query: Its id.
        first: What the first system scored.
        second: What the second system scored.
    """

    part: str
    query: str
    first: float
    second: float

    @property
    def difference(self) -> float:
        """Second minus first."""
        return self.second - self.first


@dataclass(frozen=True)
class PairedComparison:
    """One measure of two systems on the same queries.

    Attributes:
        first: Mean of the first system; of its means where there are parts.
        second: The same of the second.
        difference: ``second - first``.
        interval: Bootstrap interval of the difference.
        p: Of the two-sided sign-flip test that the difference is 0, not corrected for other comparisons.
        wins: Queries on which the second system scores higher, by more than ``TIE``.
        ties: Queries on which neither does.
        losses: Queries on which the first system scores higher.
        gained: The queries that gain most by the second system, the greatest gain first and equals by part and id.
        lost: Those that lose most, in the same way.
    """

    first: float
    second: float
    difference: float
    interval: Interval
    p: float
    wins: int
    ties: int
    losses: int
    gained: tuple[Change, ...]
    lost: tuple[Change, ...]


def compare_queries(first: Mapping[str, float], second: Mapping[str, float], *, changed: int = CHANGED, seed: int = 0) -> PairedComparison:
    """Compare two systems by their scores on the queries of one collection.

    Args:
        first: Query id -> score of the first system.
        second: The same of the second.
        changed: Queries to name in each direction, at most.
        seed: Of interval and test.

    Raises:
        ValueError: The queries differ, there are none, or a score is not finite.

    Example:
        >>> result = compare_queries({"q1": 0.5, "q2": 0.5, "q3": 1.0}, {"q1": 0.75, "q2": 1.0, "q3": 1.0})
        >>> result.difference, result.p, (result.wins, result.ties, result.losses)
        (0.25, 0.5, (2, 1, 0))
        >>> [change.query for change in result.gained]
        ['q2', 'q1']
    """
    return compare_parts({"": first}, {"": second}, changed=changed, seed=seed)


def compare_parts(
    first: Mapping[str, Mapping[str, float]],
    second: Mapping[str, Mapping[str, float]],
    *,
    weights: Sequence[float] | None = None,
    changed: int = CHANGED,
    seed: int = 0,
) -> PairedComparison:
    """Compare two systems by the means of several parts.

    Args:
        first: Part -> query id -> score of the first system.
        second: The same of the second.
        weights: Of the parts, in the order of ``first``; they sum to 1. None weighs all alike.
        changed: Queries to name in each direction, at most.
        seed: Of interval and test.

    Raises:
        ValueError: Parts or queries differ, there are none, or a score is not finite.
    """
    if first.keys() != second.keys() or any(first[part].keys() != second[part].keys() for part in first):
        raise ValueError("two systems can only be compared on the same queries")
    if not all(first.values()):
        raise ValueError("there is nothing to compare: a part has no queries")
    shares = _weights(weights, len(first))
    changes = [[Change(part, query, score, second[part][query]) for query, score in first[part].items()] for part in first]
    # Ties count as zero everywhere: rounding is no evidence.
    differences = [np.array([0.0 if abs(c.difference) <= TIE else c.difference for c in part]) for part in changes]
    scaled = np.concatenate([share / len(values) * values for share, values in zip(shares, differences, strict=True)])
    means = [_mean_of_means([scores[part].values() for part in first], shares) for scores in (first, second)]
    # Rounded, so that gains that are equal on paper are ordered by id.
    ordered = sorted(
        (c for part in changes for c in part if abs(c.difference) > TIE), key=lambda c: (-round(abs(c.difference), 12), c.part, c.query)
    )
    gained, lost = [c for c in ordered if c.difference > 0], [c for c in ordered if c.difference < 0]
    return PairedComparison(
        first=means[0],
        second=means[1],
        difference=means[1] - means[0],
        interval=stratified_interval(differences, weights=shares, seed=seed),
        p=sign_flip(scaled, seed=seed),
        wins=len(gained),
        ties=len(scaled) - len(ordered),
        losses=len(lost),
        gained=tuple(gained[:changed]),
        lost=tuple(lost[:changed]),
    )


def _mean_of_means(parts: Iterable[Iterable[float]], weights: Sequence[float]) -> float:
    scores = [list(part) for part in parts]
    return math.fsum(weight * (math.fsum(part) / len(part)) for weight, part in zip(weights, scores, strict=True))


def _weights(weights: Sequence[float] | None, parts: int) -> list[float]:
    if parts == 0:
        raise ValueError("there is nothing to average: no part was given")
    if weights is None:
        return [1 / parts] * parts
    if len(weights) != parts or not math.isclose(math.fsum(weights), 1) or min(weights) <= 0:
        raise ValueError(f"weights must be {parts} positive numbers that sum to 1, got {list(weights)}")
    return list(weights)


def _finite(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"values must be one number a query, at least one, got the shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError("values must be finite")
    return array
