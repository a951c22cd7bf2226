"""A vector in a quarter of a byte a coordinate or less, which finds candidates: its list, and a code of what the list's centroid leaves.

    product code, 4 bits for every ``dsub`` coordinates    number of the list, 2 bytes or 4, none where there is one list

Widths that are no multiple of ``dsub`` are filled up with a coordinate that is zero everywhere.

Shapes: n vectors, K lists, M product codes of a vector, d width, D = M * dsub its width filled up.
Source: product quantisation, Jegou et al., TPAMI 2011; with 4-bit codes and fast scan, FAISS, arXiv:2401.08281.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.clustering import Clustering, kmeans
from quiver.retrieval.index.fast_scan import CODEWORDS, product_quantizer, train_codebooks
from quiver.retrieval.index.threads import one_thread

# FAISS's type stubs know nothing of what its Python layer adds.
_faiss: Any = faiss


VECTORS_A_LIST = 32
"""Vectors that k-means learns a centroid from, at most."""


# Vectors that the codebooks are learned from: FAISS uses 256 for each of the 16 codewords.
_RESIDUALS = 256 * CODEWORDS


@dataclass(frozen=True)
class CoarseCoding:
    """What the records of all vectors share.

    Attributes:
        dim: Vector width d.
        centroids: Of the lists, (K, D).
        products: Codebooks of the product code, (M, 16, dsub).
    """

    dim: int
    centroids: NDArray[np.float32]
    products: NDArray[np.float32]

    @classmethod
    def learn(cls, vectors: NDArray[np.float32], *, lists: int, dsub: int, seed: int) -> CoarseCoding:
        """Lists and codebooks from a sample.

        Args:
            vectors: (n, d), at least one.
            lists: K, at most n are made.
            dsub: Coordinates that one code stands for.
            seed: Equal input and seed give equal codings.
        """
        filled = _filled(vectors, -(-vectors.shape[1] // dsub) * dsub)
        rng = np.random.default_rng(seed)
        with one_thread():  # several of them add in another order in every run
            centroids = kmeans(filled, lists, vectors_a_centroid=VECTORS_A_LIST, seed=seed)
            numbers = _clustering(centroids).assign(filled, None)
            chosen = np.sort(rng.choice(len(filled), min(len(filled), _RESIDUALS), replace=False))
            products = train_codebooks(filled[chosen] - centroids[numbers[chosen]], dsub)
        return cls(vectors.shape[1], centroids, products)

    @property
    def dsub(self) -> int:
        """Coordinates that one code stands for."""
        return int(self.products.shape[2])

    @property
    def code_width(self) -> int:
        """Bytes of a product code."""
        return -(-len(self.products) // 2)

    @property
    def number_type(self) -> np.dtype[Any]:
        """Type of a list's number."""
        return np.dtype("<u2" if len(self.centroids) <= 1 << 16 else "<u4")

    @property
    def width(self) -> int:
        """Bytes of a record."""
        return self.code_width + (self.number_type.itemsize if len(self.centroids) > 1 else 0)

    def encode(self, vectors: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Records of vectors, (n, width); that of one does not depend on what it is encoded with."""
        filled = self.fill(vectors)
        numbers = self._nearest.assign(filled, None)
        codes: NDArray[np.uint8] = self._quantizer.compute_codes(filled - self.centroids[numbers])
        if len(self.centroids) == 1:
            return codes
        stored = numbers.astype(self.number_type)
        return np.concatenate([codes, stored.view(np.uint8).reshape(len(stored), stored.dtype.itemsize)], axis=1)

    def numbers(self, records: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The lists of records, (n,)."""
        if len(self.centroids) == 1:
            return np.zeros(len(records), np.int64)
        stored = np.ascontiguousarray(records[:, self.code_width :]).view(self.number_type)[:, 0]
        return stored.astype(np.int64)

    def fill(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Vectors at the width that codes are made of, (n, D)."""
        return _filled(vectors, self.centroids.shape[1])

    @cached_property
    def _nearest(self) -> Clustering:
        return _clustering(self.centroids)

    @cached_property
    def _quantizer(self) -> Any:
        return product_quantizer(self.products)


def _filled(vectors: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    if vectors.shape[1] == width:
        return np.ascontiguousarray(vectors, np.float32)
    filled = np.zeros((len(vectors), width), np.float32)
    filled[:, : vectors.shape[1]] = vectors
    return filled


def _clustering(centroids: NDArray[np.float32]) -> Clustering:
    """The lists as one group: each vector is assigned to the nearest of all."""
    return Clustering(centroids, np.array([0, len(centroids)]))
