"""Codes of token vectors, 20 bytes and up per vector, and token pooling.

    coarse    product code, d / 8 bytes    number of the centroid, 2 bytes, or 4 with more than 65,536 centroids
    fine      d * bits / 8 bytes           scale, 2 bytes, half precision

    vector = centroid + product + scale * codewords of pairs

The coarse part is also what the inverted lists hold. Coding what it leaves, instead of the residual of the centroid, makes the error 2.7
times smaller at the same number of bytes (measured on the tokens of all-MiniLM-L6-v2).

The fine part codes two neighbouring coordinates together: 4, 6, 7 or 8 bits per pair, which is 2, 3, 3.5 or 4 bits per coordinate, times a
scale per vector: the one of least squared error for its codes. A pair of a residual divided by its root mean square is close to a point of
the two-dimensional normal distribution, so that one codebook serves all pairs. The squared error is 15 % (3 bits) to 18 % (4 bits) smaller
than that of the scalar quantizer of Lloyd and Max, at the same cost of decoding.

Token pooling replaces similar vectors of a document by their mean. A pool factor of 2 halves an index at next to no cost in quality; 3 and
4 cost a few percent. The first vector of a document, that of its classification token, is kept as it is, as in PyLate.

Shapes: n vectors, m documents, K centroids, d width, a multiple of 8.
Sources: Y. Linde, A. Buzo, R. Gray, An algorithm for vector quantizer design, 1980; product quantization, Jegou et al. 2011; B. Clavie et
al., Reducing the footprint of multi-vector retrieval, arXiv:2409.14683 (hierarchical clustering by Ward's method).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from quiver.encoder.errors import InputError
from quiver.retrieval.index import kernels
from quiver.retrieval.index.kernels import packing
from quiver.retrieval.index.kernels.packing import LANES, cells, lanes, pack, width_of
from quiver.retrieval.index.quantization import Clustering, product_quantizer, train_codebook

SIZES = (2.0, 3.0, 3.5, 4.0)
"""Possible numbers of bits per coordinate."""

_PROTECTED = 1
WINDOW = 1024
"""Vectors that are merged among each other; a longer document is taken in pieces, since all pairs of a piece are held."""

TOO_LONG = "the norm of a token vector is too large for quantized codes; use the engine exact-tokens"
"""What is wrong with vectors whose numbers half precision cannot hold."""

# Rounds of codes and scale; a third changes the error by less than a thousandth.
_ROUNDS = 2


def _check_bits(bits: float) -> float:
    if bits not in SIZES:
        raise PydanticCustomError("bits", "must be 2, 3, 3.5 or 4, got {shown}", {"shown": f"{bits:g}"})
    return bits


Bits: TypeAlias = Annotated[float, AfterValidator(_check_bits)]
"""Bits per coordinate, one of `SIZES`."""

# Points that a codebook is learned from: 256 a codeword of the largest.
_POINTS = 65_536


def multiple(bits: Bits) -> int:
    """Number that the vector width must be a multiple of, so that the codes of a vector fill whole bytes."""
    return 16 if bits == 3.5 else 8


def learn_pairs(residuals: NDArray[np.float32], bits: Bits, *, seed: int) -> NDArray[np.float32]:
    """Train the codebook of coordinate pairs, (4^bits, 2)."""
    rng = np.random.default_rng(seed)
    sizes = np.sqrt(np.square(residuals, dtype=np.float64).mean(axis=1, keepdims=True))
    seen = sizes[:, 0] > 0
    points = (residuals[seen] / sizes[seen]).astype(np.float32).reshape(-1, 2)
    if len(points) > _POINTS:
        points = points[rng.choice(len(points), _POINTS, replace=False)]
    drawn = rng.standard_normal((_POINTS - len(points), 2), dtype=np.float32)
    return train_codebook(np.concatenate([points, drawn]), bits=round(2 * bits))


def pool(
    vectors: NDArray[np.float32], lengths: NDArray[np.int64], token_ids: NDArray[np.uint32] | None, *, factor: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.uint32] | None]:
    """Pool the token vectors of each document: replace similar vectors by their mean.

    Args:
        vectors: Unit vectors, (n, d), document after document.
        lengths: Number of vectors of each document, (m,).
        token_ids: Vocabulary id of each vector's token, (n,), if known.
        factor: Number of vectors that one pooled vector replaces on average; the first vector of a document is kept, and so is at
            least one of every `WINDOW` successive vectors.

    Returns:
        Vectors of unit length, lengths, and for each vector the vocabulary id of the nearest of the tokens that it replaces.
    """
    parts, ids, counts = [], [], []
    ends = np.cumsum(lengths)
    for end, length in zip(ends.tolist(), lengths.tolist(), strict=True):
        document = vectors[end - length : end]
        labels = _clusters(document, factor)
        heads, labels = np.unique(labels, return_inverse=True)
        means = np.zeros((len(heads), vectors.shape[1]))
        np.add.at(means, labels, document.astype(np.float64))
        norms = np.linalg.norm(means, axis=1, keepdims=True)
        # Opposite vectors may cancel out; then the first of them stands for all.
        means = np.where(norms > 0, means / np.where(norms > 0, norms, 1), document[heads])
        single = np.bincount(labels, minlength=len(heads)) == 1
        merged = np.where(single[:, None], document[heads], means).astype(np.float32)
        parts.append(merged)
        counts.append(len(heads))
        if token_ids is not None:
            closeness = np.einsum("nd,nd->n", document, merged[labels])
            order = np.lexsort((-closeness, labels))
            ids.append(token_ids[end - length : end][order[np.searchsorted(labels[order], np.arange(len(heads)))]])
    pooled = np.concatenate([np.empty((0, vectors.shape[1]), np.float32), *parts])
    kept = None if token_ids is None else np.concatenate([np.empty(0, np.uint32), *ids])
    return pooled, np.array(counts, np.int64), kept


def _clusters(document: NDArray[np.float32], factor: int) -> NDArray[np.int64]:
    """For each vector the first of its cluster."""
    labels = np.arange(len(document))
    for begin in range(_PROTECTED, len(document), WINDOW):
        free = document[begin : begin + WINDOW].astype(np.float64)
        count = max(1, len(free) // factor)
        if len(free) > count:
            squares = (free * free).sum(axis=1)
            distances = np.maximum(squares[:, None] + squares - 2 * free @ free.T, 0)
            labels[begin : begin + WINDOW] = begin + kernels.ward(distances, count)
    return labels


@dataclass(frozen=True)
class Coding:
    """Encoding of token vectors as bytes."""

    clustering: Clustering  # centroids, and the assignment of vectors to them
    products: NDArray[np.float32]  # codebooks of the product code, (d / 4, 16, 4)
    pairs: NDArray[np.float32]  # codebook of the pairs of the fine part, (4^bits, 2)

    @property
    def dim(self) -> int:
        """Vector width d."""
        return int(self.clustering.centroids.shape[1])

    @property
    def bits(self) -> Bits:
        """Bits per coordinate of the fine part."""
        width = width_of(self.pairs)
        return width // 2 if width % 2 == 0 else width / 2

    @property
    def number_type(self) -> np.dtype[Any]:
        """Type of a centroid's number."""
        return np.dtype("<u2" if len(self.clustering.centroids) <= 1 << 16 else "<u4")

    @property
    def coarse_width(self) -> int:
        """Bytes of the coarse part."""
        return self.dim // 8 + self.number_type.itemsize

    @property
    def fine_width(self) -> int:
        """Bytes of the fine part."""
        return self.dim * width_of(self.pairs) // 16 + 2

    def encode(self, vectors: NDArray[np.float32], token_ids: NDArray[np.uint32] | None) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Encode vectors; the codes of a vector do not depend on the other vectors.

        Args:
            vectors: (n, d) float32.
            token_ids: Vocabulary id of each vector's token, (n,), if known.

        Returns:
            Coarse parts, (n, coarse_width), and fine parts, (n, fine_width).

        Raises:
            InputError: The norm of a vector is so large that half precision cannot hold its scale.
        """
        numbers = self.clustering.assign(vectors, token_ids)
        residuals = vectors - self.clustering.centroids[numbers]
        product = self._quantizer.compute_codes(residuals)
        residuals -= packing.product(product, self.products)
        codes, scales = kernels.quantise(residuals, self.pairs, self._cells, _ROUNDS)
        with np.errstate(over="ignore"):  # what does not fit is infinite, and refused
            halves = scales.astype("<f2")
        if not np.isfinite(halves).all():
            raise InputError(TOO_LONG)
        return (
            np.concatenate([product, _bytes(numbers.astype(self.number_type))], axis=1),
            np.concatenate([pack(codes, width_of(self.pairs)), _bytes(halves)], axis=1),
        )

    def decode(self, coarse: NDArray[np.uint8], fine: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Decode vectors, (n, d)."""
        return packing.decode(coarse, fine, self.clustering.centroids, self.products, self.pairs)

    def table(self, query: NDArray[np.float32]) -> NDArray[np.float32]:
        """Inner products of a query's vectors, (n, d), with all codewords, 16 vectors side by side, (n / 16, d / 4, 16, 16)."""
        found = np.einsum("gbjt,bcj->gbct", lanes(query).reshape(-1, *self.products.shape[::2], LANES), self.products)
        return np.ascontiguousarray(found, np.float32)

    def numbers(self, coarse: NDArray[np.uint8]) -> NDArray[np.integer[Any]]:
        """Numbers of the centroids, (n,)."""
        found: NDArray[np.integer[Any]] = np.ascontiguousarray(coarse[:, self.dim // 8 :]).view(self.number_type)[:, 0]
        return found

    @cached_property
    def _cells(self) -> NDArray[np.uint8]:
        return cells(self.pairs)

    @cached_property
    def _quantizer(self) -> Any:
        return product_quantizer(self.products)


def _bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of each of n numbers, (n, size of one)."""
    return values.view(np.uint8).reshape(len(values), values.dtype.itemsize)
