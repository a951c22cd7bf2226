"""How codes and vectors are laid out in memory: codes without gaps, vectors in lanes of 16.

Shapes: n tokens, d width, K vectors, L = K / 16 rounded up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LANES = 16
"""Query tokens or centroids that the compiled loops process side by side."""


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Codes without gaps: code j takes the bits ``j * bits`` and up, the lowest bit of a byte first.

    Args:
        codes: (n, d), each below 2^bits; d a multiple of 8.
        bits: 2, 3 or 4.

    Returns:
        (n, d * bits / 8).

    Example:
        >>> pack(np.array([[1, 2, 3, 0, 0, 0, 0, 3]], np.uint8), 2).tolist()
        [[57, 192]]
    """
    n, d = codes.shape
    words = np.zeros((n, d // 8), "<u4")  # eight codes take 2, 3 or 4 bytes
    for place in range(8):
        words |= codes[:, place::8].astype("<u4") << np.uint32(place * bits)
    return words.view(np.uint8).reshape(n, d // 8, 4)[:, :, :bits].reshape(n, d * bits // 8)


def unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """What `pack` was given."""
    n, size = packed.shape
    padded = np.zeros((n, size // bits, 4), np.uint8)
    padded[:, :, :bits] = packed.reshape(n, size // bits, bits)
    words = padded.view("<u4")[:, :, 0]
    mask = np.uint32((1 << bits) - 1)
    codes = np.empty((n, size // bits, 8), np.uint8)
    for place in range(8):
        codes[:, :, place] = (words >> np.uint32(place * bits)) & mask
    return codes.reshape(n, 8 * (size // bits))


def pairs(levels: NDArray[np.float32]) -> NDArray[np.float32]:
    """The levels of every two neighbouring codes, the first in the low bits, (len(levels)^2, 2).

    Example:
        >>> pairs(np.array([-1, 1], np.float32)).tolist()
        [[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]]
    """
    return np.stack([np.tile(levels, len(levels)), np.repeat(levels, len(levels))], axis=1)


def bits_of(pairs: NDArray[np.float32]) -> int:
    """Bits of a code, from the table that `pairs` made."""
    return (len(pairs).bit_length() - 1) // 2


def lanes(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors side by side, 16 at a time, the last ones filled up with zeros.

    Args:
        vectors: (K, d).

    Returns:
        (L, d, 16) float32, contiguous.
    """
    count, d = vectors.shape
    padded = np.zeros((-(-count // LANES) * LANES, d), np.float32)
    padded[:count] = vectors
    return np.ascontiguousarray(padded.reshape(-1, LANES, d).transpose(0, 2, 1))
