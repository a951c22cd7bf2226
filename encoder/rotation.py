"""Features turned so that none stands out, before they are brought to few bits.

Some features of a transformer are many times as large as all others; a token's step between two integers follows the largest of its
numbers, and what is small is lost. Turned by a Hadamard matrix every number is a sum of many features, each with one sign or the other,
and no sum is much larger than the rest. A weight whose inputs are turned alike makes the same outputs, and its own integers are finer, too.

Neighbouring features are turned together, as many as a power of four that divides their number, 64 at most. The matrix is not scaled here:
turning twice multiplies with that number.

Shapes: D features.
Source: QuaRot, arXiv:2404.00456, section 3; that blocks of 64 are enough was measured here.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIZES = (64, 16, 4, 1)
"""How many features are turned together."""


def block(width: int) -> int:
    """How many of ``width`` features are turned together: the first of `SIZES` that divides it."""
    return next(size for size in SIZES if width % size == 0)


def rotated(x: Tensor) -> Tensor:
    """Features (..., D) turned block by block.

    Example:
        >>> rotated(torch.tensor([[8.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])).tolist()
        [[8.0, 8.0, 8.0, 8.0], [4.0, 0.0, 0.0, 0.0]]
    """
    size, distance = block(x.shape[-1]), 1
    while distance < size:
        first, second = x.reshape(*x.shape[:-1], -1, 2, distance).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        distance *= 2
    return x
