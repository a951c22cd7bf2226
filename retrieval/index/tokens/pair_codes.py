"""Codes of two neighbouring coordinates at once: 4, 6, 7 or 8 bits for a pair, which is 2, 3, 3.5 or 4 for each.

A pair of a residual, divided by the residual's root mean square, is close to a point of the normal distribution of the plane, so one
codebook serves all pairs; it is learned from the residuals that there are. Beside the scalar quantiser of Lloyd and Max with as many
bits the squared error is 15 % smaller at 3 bits (0.0316 of the residual's square instead of 0.0370) and 18 % at 4 (0.0085 instead of
0.0103; measured on the tokens of a ColBERT made of all-MiniLM-L6-v2), and decoding is the same: a look into a table.

Source: Y. Linde, A. Buzo, R. Gray, An algorithm for vector quantizer design, 1980; product quantisation, Jegou et al. 2011.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.fast_scan import train_codebook

Bits: TypeAlias = float
"""Bits a coordinate: 2, 3, 3.5 or 4."""

SIZES: tuple[Bits, ...] = (2, 3, 3.5, 4)
"""All of them."""

# Points that a codebook is learned from: 256 a codeword of the largest.
_POINTS = 65_536


def check_bits(bits: object) -> Bits:
    """Refuse a number of bits that there is no code for.

    Raises:
        InputError: Not 2, 3, 3.5 or 4.
    """
    for known in SIZES:
        if bits == known:
            return known
    raise InputError(f"bits must be 2, 3, 3.5 or 4, got {bits!r}")


def multiple(bits: Bits) -> int:
    """What the width of a vector must be a multiple of, for its codes to end with a byte."""
    return 16 if bits == 3.5 else 8


def learn_pairs(residuals: NDArray[np.float32], bits: Bits, *, seed: int) -> NDArray[np.float32]:
    """A codebook of pairs, (4^bits, 2).

    Args:
        residuals: What is to be coded, (n, d). Where they are few, points of the normal distribution stand in for those that are missing.
        bits: Bits a coordinate.
        seed: Equal input and seed give equal codebooks.
    """
    rng = np.random.default_rng(seed)
    sizes = np.sqrt(np.square(residuals, dtype=np.float64).mean(axis=1, keepdims=True))
    seen = sizes[:, 0] > 0
    points = (residuals[seen] / sizes[seen]).astype(np.float32).reshape(-1, 2)
    if len(points) > _POINTS:
        points = points[rng.choice(len(points), _POINTS, replace=False)]
    drawn = rng.standard_normal((_POINTS - len(points), 2), dtype=np.float32)
    return train_codebook(np.concatenate([points, drawn]), bits=round(2 * bits))
