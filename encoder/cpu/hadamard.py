"""Features rotated so that none stands out, before they are brought to few bits.

Some features of a transformer are many times as large as all others; a token's step between two integers follows the largest of its
numbers, and what is small is lost. Multiplied with a Hadamard matrix, whose entries are 1 and -1 and whose rows are orthogonal, a number is
a sum of many features, and what stood out is spread over all of them. A weight whose inputs are rotated alike makes the same outputs, and
its own numbers lie closer together, too.

The matrix is the Kronecker power of one of order four whose rows have one sum. So what all features have in common stays so, and a token's
shift takes it away; Sylvester's matrix makes one large number of it, of which a GELU's outputs would suffer. It is symmetric and not scaled
here: rotating twice multiplies with its order.

This stands among the compiled loops because they contain it: their kept code is told apart by this folder (`quiver.encoder.cpu.compiling`).

Shapes: D features.
Source: QuaRot, arXiv:2404.00456, section 3 (rotated activations and weights); Hadamard matrices with constant row sums are called regular.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIZES = (64, 16, 4, 1)
"""Orders of the matrix, powers of four: how many neighbouring features may be rotated together."""


def block(width: int) -> int:
    """How many of ``width`` features are rotated together: the first of `SIZES` that divides it."""
    return next(size for size in SIZES if width % size == 0)


def hadamard(x: Tensor) -> Tensor:
    """Features (..., D) rotated block by block, in the dtype of ``x``.

    Sums have one order, that of the loops: a token's do not depend on how many tokens there are.

    Example:
        >>> hadamard(torch.tensor([[8.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])).tolist()
        [[8.0, 8.0, 8.0, -8.0], [2.0, 2.0, 2.0, 2.0]]
    """
    shape, distance = x.shape, 1
    while distance < block(shape[-1]):
        first, second, third, fourth = x.reshape(-1, 4, distance).unbind(1)
        outer, inner = (first + second, first - second), (third + fourth, third - fourth)
        x = torch.stack((outer[0] + inner[1], outer[0] - inner[1], outer[1] + inner[0], inner[0] - outer[1]), dim=1)
        distance *= 4
    return x.reshape(shape)
