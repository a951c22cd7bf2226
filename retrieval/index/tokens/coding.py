"""A token vector in 20 bytes and up: its centroid, a product code, and 2, 3, 3.5 or 4 bits for each coordinate of what is left.

    coarse    product code, d / 8 bytes    number of the centroid, 2 bytes, or 4 where there are more than 65,536
    fine      d * bits / 8 bytes           scale, 2 bytes, half precision

    vector = centroid + product + scale * codewords of pairs

The coarse part is what the inverted lists hold, and costs nothing more here: coding what it leaves instead of the residual of the
centroid makes the error 2.7 times smaller at the same number of bytes (measured on the tokens of all-MiniLM-L6-v2). Two neighbouring
coordinates have a code together (`quiver.retrieval.index.tokens.pair_codes`), times a scale that each token has for itself: with the codes
given, the one of least squared error.

Shapes: n vectors, K centroids, d width, a multiple of 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.clustering import Clustering
from quiver.retrieval.index.fast_scan import product_quantizer
from quiver.retrieval.index.kernels import reference
from quiver.retrieval.index.kernels.choice import kernels
from quiver.retrieval.index.kernels.packing import LANES, cells, lanes, pack, width_of
from quiver.retrieval.index.tokens.pair_codes import Bits

TOO_LONG = "a token vector is too long for an index that keeps bits; use the engine exact-tokens"
"""What is wrong with vectors whose numbers half precision cannot hold."""

# Rounds of codes and scale; a third changes the error by less than a thousandth.
_ROUNDS = 2


@dataclass(frozen=True)
class Coding:
    """How vectors become bytes.

    Attributes:
        clustering: Centroids, and which of them a vector is assigned to.
        products: Codebooks of the product code, (d / 4, 16, 4).
        pairs: Codebook of the pairs of the fine part, (4^bits, 2).
    """

    clustering: Clustering
    products: NDArray[np.float32]
    pairs: NDArray[np.float32]

    @property
    def dim(self) -> int:
        """Vector width d."""
        return int(self.clustering.centroids.shape[1])

    @property
    def bits(self) -> Bits:
        """Bits a coordinate of the fine part."""
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
        """Vectors to bytes; those of a vector do not depend on what it is encoded with.

        Args:
            vectors: (n, d) float32.
            token_ids: Which token of the vocabulary each is of, (n,), if known.

        Returns:
            Coarse parts, (n, coarse_width), and fine parts, (n, fine_width).

        Raises:
            InputError: A vector is so long that half precision cannot hold its scale.
        """
        numbers = self.clustering.assign(vectors, token_ids)
        residuals = vectors - self.clustering.centroids[numbers]
        product = self._quantizer.compute_codes(residuals)
        residuals -= reference.product(product, self.products)
        codes, scales = kernels().quantise(residuals, self.pairs, self._cells, _ROUNDS)
        with np.errstate(over="ignore"):  # what does not fit is infinite, and refused
            halves = scales.astype("<f2")
        if not np.isfinite(halves).all():
            raise InputError(TOO_LONG)
        return (
            np.concatenate([product, _bytes(numbers.astype(self.number_type))], axis=1),
            np.concatenate([pack(codes, width_of(self.pairs)), _bytes(halves)], axis=1),
        )

    def decode(self, coarse: NDArray[np.uint8], fine: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Bytes to vectors, (n, d)."""
        return reference.decode(coarse, fine, self.clustering.centroids, self.products, self.pairs)

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
