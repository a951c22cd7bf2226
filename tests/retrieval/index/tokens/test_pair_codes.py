"""Codebooks against the scalar quantiser that they are better than, and against the condition that defines them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.tokens.settings import TokenSettings
from quiver.retrieval.index.tokens.token_quantizer import SIZES, Bits, learn_pairs

SCALAR = {2: 0.11748, 3: 0.03455, 4: 0.00950}
"""Squared error of Lloyd and Max's quantisers for the normal distribution (J. Max, 1960, Table I)."""


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def nearest(points: NDArray[np.float32], codebook: NDArray[np.float32]) -> NDArray[np.int64]:
    found: NDArray[np.int64] = ((points[:, None] - codebook) ** 2).sum(axis=2).argmin(axis=1)
    return found


@pytest.mark.parametrize("bits", SIZES)
def test_pairs_leave_less_than_a_coordinate_at_a_time_could(bits: Bits) -> None:
    codebook = learn_pairs(normal(4096, 64), bits, seed=0)
    assert codebook.shape == (round(4**bits), 2)
    assert codebook.dtype == np.float32
    points = normal(40_000, 2, seed=9)
    chosen = nearest(points, codebook)
    error = ((points - codebook[chosen]) ** 2).mean()
    if bits in SCALAR:
        # Even the best quantiser of a plane is no better than the rate-distortion function.
        assert 4**-bits < error < {2: 0.94, 3: 0.93, 4: 0.94}[int(bits)] * SCALAR[int(bits)]
    else:
        assert error < 0.55 * SCALAR[3]
    # A codeword is the mean of what it stands for.
    counts = np.bincount(chosen, minlength=len(codebook))
    means = np.stack([np.bincount(chosen, points[:, axis], len(codebook)) for axis in (0, 1)], axis=1) / np.maximum(counts, 1)[:, None]
    spacing = np.sqrt(error)
    assert np.abs(means - codebook)[counts > 300].max(initial=0) < spacing


@pytest.mark.parametrize("count", [0, 1, 5])
def test_few_residuals_or_none_do(count: int) -> None:
    codebook = learn_pairs(np.concatenate([normal(count, 16), np.zeros((2, 16), np.float32)]), 4, seed=0)
    assert np.isfinite(codebook).all()
    points = normal(20_000, 2, seed=9)
    assert ((points - codebook[nearest(points, codebook)]) ** 2).mean() < SCALAR[4]


@pytest.mark.parametrize("bits", [1, 5, 0, "four", None, True, 2.5])
def test_other_numbers_of_bits_are_refused(bits: object) -> None:
    with pytest.raises(InputError, match=r"ivf-tokens: bits: must be (2, 3, 3\.5 or 4|a number), got"):
        TokenSettings.parse({"bits": bits})
