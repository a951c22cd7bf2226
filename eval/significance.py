"""Confidence intervals of means over queries, and significance tests of the difference between two systems.

The unit is the query. Both systems answer the same queries, so a comparison is paired. It makes no assumption about the distribution of
scores, only that the queries are a sample of those that users ask. A result says nothing about other collections or about another
training run of the same recipe.

A collection may have parts (the forums of CQADupStack), and an average is over collections. The score is then the unweighted mean of the
parts' means: queries are resampled, and signs flipped, within their part, and all parts have the same weight whatever their number of
queries. Parts and weights are fixed, not sampled.

Every number is a function of the scores and the seed. It depends neither on the order of the queries nor on which system comes first.
Memory is a few times the number of resamples or permutations (2 MB at the defaults), independent of the number of queries.

Sources: Smucker, Allan and Carterette 2007, doi 10.1145/1321440.1321528 (the randomisation test on means over queries, and the case
against Wilcoxon's and the sign test); Efron 1979, doi 10.1214/aos/1176344552 (the bootstrap; the percentile interval is in Efron 1981,
doi 10.2307/3314608); Holm 1979, Scandinavian Journal of Statistics 6(2), 65-70; Phipson and Smyth 2010, doi 10.2202/1544-6115.1585
(a sampled p is (b + 1) / (m + 1)).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quiver.eval.results import Interval

LEVEL = 0.95
"""Confidence level of an interval."""

RESAMPLES = 10_000
"""Number of bootstrap resamples of the queries for an interval."""

PERMUTATIONS = 100_000
"""Maximum number of sign assignments for a p value; 1 / (PERMUTATIONS + 1) is the smallest p that a random sample can give."""

TIE = 1e-12
"""Scores that differ by at most this are a tie. Rounding is below 1e-14; the smallest step of a measure is that of MAP, about 1e-9."""

CHANGED = 10
"""Number of queries with the largest changes that a comparison lists in each direction."""


def bootstrap_interval(values: ArrayLike, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Percentile bootstrap interval of a mean over queries.

    Args:
        values: One score per query.
        level: Confidence level, 0 < level < 1.
        resamples: Number of samples drawn with replacement.
        seed: Random seed of the draws.

    Raises:
        ValueError: ``values`` is empty or holds a value that is not finite, or an option is out of range.

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
    """Percentile bootstrap interval of a weighted mean of the parts' means; queries are resampled within their part.

    Args:
        parts: Scores of each part.
        weights: Weights of the parts, with sum 1; None gives all parts the same weight.
        level: Confidence level, 0 < level < 1.
        resamples: Number of samples drawn with replacement.
        seed: Random seed of the draws.

    Raises:
        ValueError: There are no parts, a part is empty, a value is not finite, or an option is out of range.

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
    # Sort, and make the mean >= 0: the draws then select the same values for any order of the queries, and exchanging the two systems
    # gives the mirrored interval.
    side = -1.0 if centre < 0 else 1.0
    rng = np.random.default_rng(seed)
    deviations = np.zeros(resamples)
    for share, values in zip(shares, checked, strict=True):
        # Resample deviations from the mean: equal scores then give an interval of width 0, free of rounding errors.
        ordered = np.sort(side * (values - math.fsum(values) / len(values)))
        deviations += share / len(values) * _resampled_sums(ordered, resamples, rng)
    low, high = sorted((side * np.quantile(deviations, [(1 - level) / 2, (1 + level) / 2])).tolist())
    return Interval(centre + low, centre + high, level, resamples)


def _resampled_sums(values: NDArray[np.float64], resamples: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Sums of ``len(values)`` values drawn with replacement, without ever holding a matrix of all draws."""
    sums = np.zeros(resamples)
    for _ in range(len(values)):
        sums += values[rng.integers(len(values), size=resamples)]
    return sums


def sign_flip(differences: ArrayLike, *, permutations: int = PERMUTATIONS, seed: int = 0) -> float:
    """Two-sided p value of the paired randomisation test: the probability that random signs give a sum at least this far from 0.

    Under the null hypothesis the two systems are exchangeable, so each query's difference has either sign with equal probability. If
    there are at most ``permutations`` sign assignments, all are enumerated. Otherwise ``permutations`` random ones are drawn, and the
    observed one is counted as well, so that p is never 0 and the test keeps its level.

    Args:
        differences: One per query, second system minus first; for a weighted mean of means, scaled by the weight of the query's part.
            Zeros do not change a sum and are dropped first, so a few nonzero differences are enumerated even among many zeros.
        permutations: Maximum number of sign assignments.
        seed: Random seed of the draws; unused if all assignments are enumerated.

    Returns:
        p, 0 < p <= 1; 1 if all differences are zero.

    Raises:
        ValueError: ``differences`` is empty or holds a value that is not finite, or ``permutations`` < 1.

    Example:
        Of the eight sums of +-1, +-2 and +-3, two are as far from 0 as 6.

        >>> sign_flip([1.0, 2.0, 3.0]), sign_flip([0.0, 0.0])
        (0.25, 1.0)
    """
    if permutations < 1:
        raise ValueError(f"permutations must be >= 1, got {permutations}")
    given = _finite(differences)
    # The random signs make the sign of a difference irrelevant. With sorted absolute values, p depends neither on the order of the
    # queries nor on which system comes first.
    sizes = np.sort(np.abs(given[given != 0]))
    # Sums that are mathematically equal differ by rounding, and must count as equal.
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
    """P values after Holm's step-down correction for multiple tests, in the given order.

    A corrected p is below alpha exactly if Holm's test at level alpha rejects. The probability of at least one false rejection is at most
    alpha, whatever the dependence between the tests.

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
    for rank, position in enumerate(sorted(range(len(p_values)), key=lambda position: p_values[position])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[position]))
        corrected[position] = highest
    return corrected


@dataclass(frozen=True)
class Change:
    """Scores of two systems on one query.

    Attributes:
        part: Part that the query belongs to; in a report, a collection with its split.
        query: Id of the query.
        first: Score of the first system.
        second: Score of the second system.
    """

    part: str
    query: str
    first: float
    second: float

    @property
    def difference(self) -> float:
        """Second score minus first score."""
        return self.second - self.first


@dataclass(frozen=True)
class PairedComparison:
    """Comparison of two systems by one measure on the same queries.

    Attributes:
        first: Mean score of the first system; with several parts, the mean of their means.
        second: Mean score of the second system, computed in the same way.
        difference: ``second - first``.
        interval: Bootstrap interval of the difference.
        p: p value of the two-sided sign-flip test of difference 0, not corrected for multiple comparisons.
        wins: Number of queries on which the second system scores higher by more than ``TIE``.
        ties: Number of queries on which the scores differ by at most ``TIE``.
        losses: Number of queries on which the first system scores higher by more than ``TIE``.
        gained: Queries with the largest gains of the second system, largest first; ties are ordered by part and id.
        lost: Queries with the largest losses of the second system, in the same order.
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
        second: Query id -> score of the second system.
        changed: Maximum number of queries to list in each direction.
        seed: Random seed of the interval and the test.

    Raises:
        ValueError: The systems have different queries or none, or a score is not finite.

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
    """Compare two systems by the weighted mean of their means over several parts.

    Args:
        first: Part -> query id -> score of the first system.
        second: Part -> query id -> score of the second system.
        weights: Weights of the parts, in the order of ``first``, with sum 1; None gives all parts the same weight.
        changed: Maximum number of queries to list in each direction.
        seed: Random seed of the interval and the test.

    Raises:
        ValueError: The systems have different parts or queries, there are none, or a score is not finite.
    """
    if first.keys() != second.keys() or any(first[part].keys() != second[part].keys() for part in first):
        raise ValueError("two systems can only be compared on the same queries")
    if not all(first.values()):
        raise ValueError("there is nothing to compare: a part has no queries")
    shares = _weights(weights, len(first))
    changes = [[Change(part, query, score, second[part][query]) for query, score in first[part].items()] for part in first]
    # Ties count as zero everywhere: a rounding error is not evidence.
    differences = [np.array([0.0 if abs(c.difference) <= TIE else c.difference for c in part]) for part in changes]
    scaled = np.concatenate([share / len(values) * values for share, values in zip(shares, differences, strict=True)])
    means = [_mean_of_means([scores[part].values() for part in first], shares) for scores in (first, second)]
    # Round, so that mathematically equal gains are ordered by id.
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
        raise ValueError("no parts given")
    if weights is None:
        return [1 / parts] * parts
    if len(weights) != parts or not math.isclose(math.fsum(weights), 1) or min(weights) <= 0:
        raise ValueError(f"weights must be {parts} positive numbers that sum to 1, got {list(weights)}")
    return list(weights)


def _finite(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"values must hold one number per query, at least one; got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError("values must be finite")
    return array
