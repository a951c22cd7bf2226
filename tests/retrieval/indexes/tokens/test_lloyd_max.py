"""The tables against the two conditions that define them."""

from __future__ import annotations

from math import erf, exp, inf, pi, sqrt

import numpy as np
import pytest

from encoder.errors import InputError
from retrieval.indexes.tokens.lloyd_max import Bits, check_bits, levels, thresholds


def below(value: float) -> float:
    return (1 + erf(value / sqrt(2))) / 2


def density(value: float) -> float:
    return 0.0 if abs(value) == inf else exp(-value * value / 2) / sqrt(2 * pi)


@pytest.mark.parametrize(("bits", "error"), [(2, 0.11748), (3, 0.03455), (4, 0.00950)])
def test_a_level_is_the_mean_of_what_it_stands_for(bits: Bits, error: float) -> None:
    edges = [-inf, *thresholds(bits).tolist(), inf]
    squares = 0.0
    for low, high, level in zip(edges[:-1], edges[1:], levels(bits).tolist(), strict=True):
        mass = below(high) - below(low)
        assert level == pytest.approx((density(low) - density(high)) / mass, abs=2e-5)
        squares += mass * level * level
    assert 1 - squares == pytest.approx(error, abs=2e-5)  # the level being a mean, the error is what it does not explain
    assert len(levels(bits)) == 2**bits
    assert (levels(bits) == -levels(bits)[::-1]).all()


@pytest.mark.parametrize("bits", [1, 5, 0, "4", None, True, 2.5])
def test_other_numbers_of_bits_are_refused(bits: object) -> None:
    with pytest.raises(InputError, match="bits must be 2, 3 or 4"):
        check_bits(bits)


def test_the_code_is_the_number_of_thresholds_below() -> None:
    values = np.array([-9, -0.1, 0, 0.1, 9], np.float32)
    assert np.searchsorted(thresholds(2), values).tolist() == [0, 1, 1, 2, 3]
