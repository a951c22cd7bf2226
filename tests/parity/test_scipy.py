"""The sign-flip test and the interval are scipy's paired permutation test and percentile bootstrap."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.eval.metrics import bootstrap_interval
from tests.eval.paired import sign_flip

pytestmark = pytest.mark.parity


def _differences(first: NDArray[np.float64], second: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    return np.mean(second, axis=axis) - np.mean(first, axis=axis)


def test_the_enumerated_p_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    p_values = []
    for _ in range(20):
        # Steps of an eighth: differences tie, some are zero, and sums are exact (scipy allows for less rounding than we do).
        first, second = rng.integers(0, 9, (2, 9)) / 8
        theirs = stats.permutation_test(
            (first, second), _differences, permutation_type="samples", vectorized=True, n_resamples=np.inf, alternative="two-sided"
        )
        p_values.append(sign_flip(second - first))
        assert p_values[-1] == pytest.approx(min(1.0, theirs.pvalue), abs=1e-12)
    assert min(p_values) < 0.1 < 0.9 < max(p_values)


def test_the_sampled_p_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(1)
    first = rng.random(60)
    second = first + rng.normal(0.03, 0.1, 60)
    theirs = stats.permutation_test(
        (first, second), _differences, permutation_type="samples", vectorized=True, n_resamples=20_000, rng=np.random.default_rng(2)
    ).pvalue
    assert 0.005 < theirs < 0.5
    assert sign_flip(second - first) == pytest.approx(theirs, abs=5 * (theirs / 20_000) ** 0.5)


def test_the_interval_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(3).beta(0.4, 0.6, 80)
    ours = bootstrap_interval(values)
    theirs = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=10_000, rng=np.random.default_rng(4), vectorized=True
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.05 * (theirs.high - theirs.low))
