"""Intervals and tests: worked out by hand, invariant where they must be, and right on simulated data."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import combinations, product

import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.eval.metrics import BATCH, RESAMPLES, Interval, bootstrap_interval, compare_pairs, holm, paired_tests, sign_flips
from tests.eval.paired import compare_parts, compare_queries, sign_flip


def _by_enumeration(differences: list[float]) -> float:
    """All assignments of signs, in exact arithmetic on integers."""
    whole = [round(1000 * difference) for difference in differences]
    sums = [sum(sign * value for sign, value in zip(signs, whole, strict=True)) for signs in product((1, -1), repeat=len(whole))]
    return sum(abs(total) >= abs(sum(whole)) for total in sums) / len(sums)


# ---- the sign-flip test ----


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        # +-1 +-2 +-3: the sums are 6, 4, 2, 0, 0, -2, -4, -6.
        ([0.1, 0.2, 0.3], 2 / 8),
        ([-0.1, 0.2, 0.3], 4 / 8),
        ([0.1, 0.2, -0.3], 1.0),
        ([0.1, 0.1, 0.1], 2 / 8),  # sums that tie with the observed one only up to rounding count as reaching it
        ([0.1, 0.2, -0.1], 6 / 8),  # +-1 +-2 +-1: 4, 2, 2, 0, 0, -2, -2, -4, of which 2 is observed
        ([0.5], 1.0),
        ([0.0, 0.0, 0.0], 1.0),
    ],
)
def test_sign_flip_by_hand(differences: list[float], expected: float) -> None:
    assert sign_flip(differences) == expected == _by_enumeration(differences)


def test_sign_flip_enumerates_up_to_the_number_of_permutations() -> None:
    rng = random.Random(0)
    for _ in range(50):
        differences = [rng.randint(-20, 20) / 1000 for _ in range(rng.randint(1, 10))]
        assert sign_flip(differences) == _by_enumeration(differences)
    ten = [0.1] * 10
    assert sign_flip(ten, permutations=1024) == 2 / 1024
    sampled = sign_flip(ten, permutations=1000)
    assert sampled * 1001 == pytest.approx(round(sampled * 1001), abs=1e-9)
    assert sampled != 2 / 1024


def test_p_depends_on_neither_order_nor_side() -> None:
    rng = np.random.default_rng(1)
    for differences in (rng.normal(0.05, 0.3, 300), np.round(rng.normal(0.2, 0.3, 12), 1)):
        p = sign_flip(differences)
        assert 0 < p < 1
        assert sign_flip(-differences) == p
        assert sign_flip(rng.permutation(differences)) == p
        assert sign_flip(differences * 8) == p


def test_tests_made_together_are_those_of_a_plain_loop() -> None:
    def plain(differences: NDArray[np.float64], permutations: int) -> float:
        sizes = np.sort(np.abs(differences[differences != 0]))
        rng = np.random.default_rng(0)
        bits = [np.unpackbits(rng.integers(256, size=permutations, dtype=np.uint8)[:, None], axis=1) for _ in range(0, len(sizes), 8)]
        sums = (1.0 - 2.0 * np.hstack(bits)[:, : len(sizes)]) @ sizes
        return (np.count_nonzero(np.abs(sums) >= abs(differences.sum()) - 1e-9) + 1) / (permutations + 1)

    rng = np.random.default_rng(4)
    # Of different lengths, some with ties and zeros; more tests than share one draw, and more sums than are made at a time.
    tests = [np.round(rng.normal(0.02, 0.3, rng.integers(20, 400)), rng.integers(1, 9)) for _ in range(2 * BATCH + 3)]
    together = sign_flips(tests, permutations=2999)
    assert together == [plain(differences, 2999) for differences in tests]
    assert together == [sign_flip(differences, permutations=2999) for differences in tests]
    assert len(set(together)) > BATCH


# ---- the interval ----


def test_the_interval_of_two_values_by_hand() -> None:
    # The mean of two draws of 0 and 1 is 0, 1/2, 1/2 or 1: a quarter of the means lie at either end.
    assert bootstrap_interval([1.0, 0.0]) == Interval(0.0, 1.0, 0.95, 10_000)
    assert bootstrap_interval([0.0, 1.0], level=0.4) == Interval(0.5, 0.5, 0.4, 10_000)


def test_intervals_made_together_are_those_of_a_plain_loop() -> None:
    def plain(parts: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
        centre = sum(weight * np.mean(part) for weight, part in zip(weights, parts, strict=True))
        side, rng, total = math.copysign(1, centre), np.random.default_rng(0), np.zeros(RESAMPLES)
        for weight, part in zip(weights, parts, strict=True):
            values = np.sort(side * np.array(part))
            total += weight * np.mean([values[rng.integers(len(part), size=RESAMPLES)] for _ in part], axis=0)
        return sorted(side * np.quantile(total, [0.025, 0.975]))

    rng, weights = np.random.default_rng(6), [0.25, 0.75]
    queries = {"a": [f"q{number}" for number in range(30)], "b": [f"q{number}" for number in range(50)]}
    systems = [{part: {query: rng.random() for query in each} for part, each in queries.items()} for _ in range(4)]
    pairs = list(combinations(systems, 2))
    together = compare_pairs(pairs, weights=weights)
    for (first, second), found in zip(pairs, together, strict=True):
        differences = [[second[part][query] - first[part][query] for query in each] for part, each in queries.items()]
        assert [found.interval.low, found.interval.high] == pytest.approx(plain(differences, weights), abs=1e-12)
        assert found == compare_parts(first, second, weights=weights)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap_interval([]), "at least one"),
        (lambda: bootstrap_interval([[0.1]]), "one number per query"),
        (lambda: bootstrap_interval([0.1, math.nan]), "finite"),
        (lambda: bootstrap_interval([0.1], level=95), "level must be between 0 and 1, got 95"),
        (lambda: bootstrap_interval([0.1], resamples=0), "resamples must be >= 1"),
        (lambda: sign_flip([]), "at least one"),
        (lambda: sign_flip([math.inf]), "finite"),
        (lambda: sign_flip([0.1], permutations=0), "permutations must be >= 1"),
        (lambda: holm([0.1, 1.1]), "p must be between 0 and 1, got 1.1"),
        (lambda: holm([math.nan]), "got nan"),
        (lambda: compare_queries({"a": 1.0}, {"b": 1.0}), "same queries"),
        (lambda: compare_queries({}, {}), "no queries"),
        (lambda: compare_parts({"x": {"a": 1.0}}, {"y": {"a": 1.0}}), "same queries"),
        (lambda: paired_tests([([[1.0, 2.0]], [[1.0]])]), "same queries"),
        (lambda: compare_parts({}, {}), "no part"),
        (lambda: compare_queries({"a": math.nan}, {"a": 1.0}), "finite"),
    ],
)
def test_misuse(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# ---- Holm ----


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        ([0.02], [0.02]),
        ([0.01, 0.02, 0.03], [0.03, 0.04, 0.04]),  # 3 x 0.01, 2 x 0.02, and 0.03 is raised to what came before
        ([0.03, 0.01, 0.02], [0.04, 0.03, 0.04]),
        ([0.5, 0.4], [0.8, 0.8]),
        ([0.9, 0.6], [1.0, 1.0]),
        ([0.01, 0.01], [0.02, 0.02]),
    ],
)
def test_holm_by_hand(given: list[float], expected: list[float]) -> None:
    assert holm(given) == pytest.approx(expected, abs=1e-15)


# ---- comparisons ----


def test_a_comparison_by_hand() -> None:
    first = {"q1": 0.5, "q2": 0.25, "q3": 1.0, "q4": 0.0, "q5": 0.5}
    second = {"q5": 0.5 + 1e-13, "q4": 0.5, "q3": 0.75, "q2": 0.75, "q1": 0.5}
    result = compare_queries(first, second)
    assert (result.first, result.second) == (0.45, pytest.approx(0.6))
    assert result.difference == pytest.approx((0.5 + 0.5 - 0.25) / 5, abs=1e-12)
    assert (result.wins, result.ties, result.losses) == (2, 2, 1)
    # The 1e-13 of q5 is rounding and no difference.
    assert result.p == _by_enumeration([0.5, 0.5, -0.25])
    assert [(change.query, change.difference) for change in result.gained] == [("q2", 0.5), ("q4", 0.5)]
    assert [(change.query, change.difference) for change in result.lost] == [("q3", -0.25)]
    assert result.interval.low < result.difference < result.interval.high


def test_the_most_changed_queries() -> None:
    first = {f"q{number:02d}": 0.5 for number in range(30)}
    second = {query: 0.5 + (number - 12) / 100 for number, query in enumerate(first)} | {"q28": 0.67}
    result = compare_queries(first, second, changed=3)
    assert [change.query for change in result.gained] == ["q28", "q29", "q27"]  # q28 and q29 gain alike: by id
    assert [change.query for change in result.lost] == ["q00", "q01", "q02"]
    assert (result.wins, result.ties, result.losses) == (17, 1, 12)
    assert len(compare_queries(first, second).gained) == 10
    # 1.1 - 1.0 is more than 0.2 - 0.1 by rounding alone: the ids decide.
    tied = compare_queries({"a": 0.1, "b": 1.0}, {"a": 0.2, "b": 1.1})
    assert [change.query for change in tied.gained] == ["a", "b"]


def test_parts_weigh_alike_in_a_comparison() -> None:
    first = {"small": {"a": 0.0}, "large": {str(number): 0.0 for number in range(4)}}
    second = {"small": {"a": 0.25}, "large": {"0": 0.75, "1": 0.0, "2": 0.25, "3": 0.0}}
    result = compare_parts(first, second)
    assert result.difference == 0.25
    # In the mean of means they move 0.25 / 2, 0.75 / 8 and 0.25 / 8; only all three together reach their sum.
    assert result.p == 2 / 8
    assert [(change.part, change.query) for change in result.gained] == [("large", "0"), ("large", "2"), ("small", "a")]
    weighted = compare_parts(first, second, weights=[0.25, 0.75])
    assert weighted.difference == 0.25
    assert compare_parts(first, second, weights=[0.8, 0.2]).difference == pytest.approx(0.25)
