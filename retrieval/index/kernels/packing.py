"""Memory layout of codes and vectors: bit-packed codes, vectors in lanes of 16.

Shapes: n tokens, d width, K vectors, L = K / 16 rounded up.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LANES = 16
"""Number of query tokens or centroids that the compiled loops process side by side."""

SPAN = 4.0
"""Coordinates are clipped to plus or minus this value before their codeword is looked up."""

CELLS = 256
"""Number of cells per axis in which codewords are looked up."""


def pack(codes: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Pack codes without gaps: code j takes the bits from ``j * width`` on, the lowest bit of a byte first.

    Args:
        codes: (n, m), each below 2^width; m * width must be a multiple of 8.
        width: Bits per code, 1 to 8.

    Returns:
        (n, m * width / 8).

    Example:
        >>> pack(np.array([[1, 2, 3, 0, 0, 0, 0, 3]], np.uint8), 2).tolist()
        [[57, 192]]
    """
    n, m = codes.shape
    count, size = _group(width)
    words = np.zeros((n, m // count), "<u8")
    for place in range(count):
        words |= codes[:, place::count].astype("<u8") << np.uint64(place * width)
    return words.view(np.uint8).reshape(n, m // count, 8)[:, :, :size].reshape(n, m // count * size)


def unpack(packed: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Unpack codes; the inverse of `pack`."""
    count, size = _group(width)
    n, groups = len(packed), packed.shape[1] // size
    padded = np.zeros((n, groups, 8), np.uint8)
    padded[:, :, :size] = packed.reshape(n, groups, size)
    words = padded.view("<u8")[:, :, 0]
    mask = np.uint64((1 << width) - 1)
    codes = np.empty((n, groups, count), np.uint8)
    for place in range(count):
        codes[:, :, place] = (words >> np.uint64(place * width)) & mask
    return codes.reshape(n, groups * count)


def _group(width: int) -> tuple[int, int]:
    """The least number of codes that fill whole bytes, and the number of these bytes."""
    count = 8 // math.gcd(width, 8)
    return count, count * width // 8


def width_of(pairs: NDArray[np.float32]) -> int:
    """Bits per code of a codebook of pairs, (2^width, 2)."""
    return len(pairs).bit_length() - 1


def cells(pairs: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The nearest codeword to the centre of each cell of the plane, (`CELLS`, `CELLS`)."""
    middles = ((np.arange(CELLS) + 0.5) * (2 * SPAN / CELLS) - SPAN).astype(np.float32)
    points = np.stack(np.meshgrid(middles, middles, indexing="ij"), axis=2).reshape(-1, 2)
    nearest: NDArray[np.uint8] = (points @ pairs.T - (pairs**2).sum(axis=1) / 2).argmax(axis=1).astype(np.uint8)
    return nearest.reshape(CELLS, CELLS)


def lanes(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Arrange vectors in groups of 16 that are interleaved by coordinate; the last group is padded with zeros.

    Args:
        vectors: (K, d).

    Returns:
        (L, d, 16) float32, contiguous.
    """
    count, d = vectors.shape
    padded = np.zeros((-(-count // LANES) * LANES, d), np.float32)
    padded[:count] = vectors
    return np.ascontiguousarray(padded.reshape(-1, LANES, d).transpose(0, 2, 1))


def decode(
    coarse: NDArray[np.uint8],
    fine: NDArray[np.uint8],
    centroids: NDArray[np.float32],
    products: NDArray[np.float32],
    pairs: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Decode tokens, (T, d): centroid + product codewords + scale * codewords. For the arguments, see `compiled.score`."""
    d = centroids.shape[1]
    vectors: NDArray[np.float32] = centroids[centroid_numbers(coarse, d)] + product(coarse[:, : d // 8], products)
    return vectors + fine_part(fine, pairs)


def fine_part(fine: NDArray[np.uint8], pairs: NDArray[np.float32]) -> NDArray[np.float32]:
    """The fine part of decoded tokens, scale * codewords, (T, d)."""
    scales = np.ascontiguousarray(fine[:, -2:]).view("<f2").astype(np.float32)  # (T, 1)
    found = pairs[unpack(fine[:, :-2], width_of(pairs))]  # (T, d / 2, 2)
    vectors: NDArray[np.float32] = scales * found.reshape(len(fine), 2 * found.shape[1])
    return vectors


def centroid_numbers(coarse: NDArray[np.uint8], d: int) -> NDArray[np.int64]:
    """Centroid number of each token, (T,)."""
    numbers = np.zeros(len(coarse), np.int64)
    for place, column in enumerate(coarse[:, d // 8 :].T.astype(np.int64)):
        numbers |= column << (8 * place)
    return numbers


def product(codes: NDArray[np.uint8], products: NDArray[np.float32]) -> NDArray[np.float32]:
    """Decode product codes, (T, d)."""
    return products[np.arange(len(products)), code_digits(codes)].reshape(len(codes), 8 * codes.shape[1])


def code_digits(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Split bytes into two 4-bit codes, the low bits first, (T, d / 4)."""
    return np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), 2 * codes.shape[1])
