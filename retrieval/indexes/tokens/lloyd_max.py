"""Lloyd-Max quantisers of the standard normal distribution: the levels of least squared error for 2, 3 and 4 bits.

The coordinates of a residual, divided by its length over sqrt(d), are close to normal, so one table serves every model and nothing is
trained. A level never is zero and has the sign of what it stands for.

Source: S. P. Lloyd, Least squares quantization in PCM, 1957/1982; J. Max, Quantizing for minimum distortion, 1960. The levels here are
the fixed point of Lloyd's two conditions to six decimals; the squared errors are 0.11748, 0.03455 and 0.00950.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError

Bits: TypeAlias = Literal[2, 3, 4]
"""Bits a coordinate."""

_POSITIVE: dict[Bits, tuple[float, ...]] = {
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
}


def check_bits(bits: object) -> Bits:
    """Refuse a number of bits that there is no quantiser for.

    Raises:
        InputError: Not 2, 3 or 4.
    """
    for known in _POSITIVE:
        if bits == known:
            return known
    raise InputError(f"bits must be 2, 3 or 4, got {bits!r}")


def levels(bits: Bits) -> NDArray[np.float32]:
    """The levels in ascending order, (2^bits,); code c stands for level c.

    Example:
        >>> levels(2).round(2).tolist() == np.array([-1.51, -0.45, 0.45, 1.51], np.float32).tolist()
        True
    """
    positive = np.array(_POSITIVE[bits], np.float32)
    return np.concatenate([-positive[::-1], positive])


def thresholds(bits: Bits) -> NDArray[np.float32]:
    """The values between neighbouring levels, (2^bits - 1,): the code of a value is the number of thresholds below it.

    Example:
        >>> thresholds(2).round(2).tolist() == np.array([-0.98, 0, 0.98], np.float32).tolist()
        True
    """
    values = levels(bits)
    middles: NDArray[np.float32] = (values[1:] + values[:-1]) / np.float32(2)
    return middles
