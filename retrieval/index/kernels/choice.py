"""The inner loops of searching and encoding: their contracts, and the module that implements them."""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Kernels(Protocol):
    """Functions of `quiver.retrieval.index.kernels.compiled`.

    Shapes: n vectors, T tokens, K centroids, m documents, d width, L lanes of 16 query tokens or centroids, k hits.
    """

    def quantise(
        self, residuals: NDArray[np.float32], pairs: NDArray[np.float32], cells: NDArray[np.uint8], rounds: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Codes and scales that reproduce residuals as scale times codewords of two coordinates.

        The first codes are those of the residual over its root mean square; the scale is then the one of least squared error for the
        codes. Each further round takes the codes of the residual over that scale.

        Args:
            residuals: (n, d) float32, d even.
            pairs: Codebook of pairs, (2^width, 2).
            cells: Codewords by place, as `quiver.retrieval.index.kernels.packing.cells` gives them.
            rounds: At least 1.

        Returns:
            Codes, (n, d / 2), and scales >= 0, (n,) float32; the scale of a residual of zeros is zero.
        """

    def nearest(
        self,
        vectors: NDArray[np.float32],
        first: NDArray[np.int64],
        last: NDArray[np.int64],
        lanes: NDArray[np.float32],
        half_squares: NDArray[np.float32],
    ) -> NDArray[np.int64]:
        """The nearest of a range of centroids, for each vector a range of its own.

        Args:
            vectors: (n, d) float32; fast where neighbours have the same range.
            first: First centroid that may be chosen, (n,).
            last: One past the last, (n,), greater than ``first``.
            lanes: The centroids, (L, d, 16), as `quiver.retrieval.index.kernels.packing.lanes` arranges them.
            half_squares: Half the squared length of each centroid, (K,).

        Returns:
            Numbers of centroids, (n,); of several equally near the first.
        """

    def probe(
        self, query: NDArray[np.float32], lanes: NDArray[np.float32], centroids: int, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """Inner products with all centroids, and the centroids with the greatest.

        Args:
            query: (n, d) float32.
            lanes: The centroids, (L, d, 16), as `quiver.retrieval.index.kernels.packing.lanes` arranges them.
            centroids: Their number K; what lies behind is padding.
            count: Centroids for each vector, 1 to K.

        Returns:
            Numbers of the greatest, (n, count), in no order; their inner products, (n, count); and those with all centroids,
            (n / 16, K, 16), zeros where there is no vector.
        """

    def estimate(
        self,
        coarse: NDArray[np.uint8],
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        similarities: NDArray[np.float32],
        table: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """MaxSim of a query with what the coarse parts of documents stand for, from tables of similarities in steps of 16 bits.

        No similarity is greater than the greatest with a centroid and the greatest with a codeword of each book together: 32,000 steps.

        Args:
            coarse: Product code and centroid of each token, (T, d / 8 + 2 or 4).
            begins: First token of each document, (m,).
            ends: One past its last, (m,).
            similarities: Of the query's tokens with all centroids, (L, K, 16), as `probe` gives them.
            table: Of the query's tokens with the product codes, (L, d / 4, 16, 16): 16 codewords, 16 tokens.

        Returns:
            (m,); minus infinity for a document without a token, NaN for one with a centroid that does not exist, and NaN for all where a
            table is not finite.
        """

    def score(
        self,
        coarse: NDArray[np.uint8],
        fine: NDArray[np.uint8],
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        similarities: NDArray[np.float32],
        products: NDArray[np.float32],
        pairs: NDArray[np.float32],
        query: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """MaxSim of a query with documents, whose tokens are decoded on the way, but for the centroids.

        Args:
            coarse: Product code and centroid of each token, (T, d / 8 + 2 or 4).
            fine: Codes and scale of each token, (T, d / 2 * width / 8 + 2).
            begins: First token of each document, (m,).
            ends: One past its last, (m,).
            similarities: Of the query's tokens with all centroids, (L, K, 16), as `probe` gives them.
            products: Codebooks of the product codes, (d / 4, 16, 4).
            pairs: Codebook of pairs, (2^width, 2).
            query: (L, d, 16), as `quiver.retrieval.index.kernels.packing.lanes` arranges it; lanes of zeros add nothing.

        Returns:
            (m,); minus infinity for a document without a token, and no number for one with a centroid that does not exist.
        """

    def inner_products(
        self,
        codes: NDArray[np.signedinteger[Any]],
        scales: NDArray[np.float32],
        rows: NDArray[np.int64],
        weights: NDArray[np.float64],
        offset: float,
    ) -> NDArray[np.float64]:
        """Inner products of one query with some of the vectors that are stored as codes and a scale each.

        Args:
            codes: (P, d) int8 or int16.
            scales: (P,).
            rows: Which of them, (n,).
            weights: The query, (d,) float64.
            offset: Is added to every product.

        Returns:
            (n,) float64. Compiled, that of a row does not depend on the rows beside it.
        """

    def nearest_of(
        self,
        codes: NDArray[np.signedinteger[Any]],
        scales: NDArray[np.float32],
        rows: NDArray[np.int64],
        weights: NDArray[np.float64],
        offset: float,
        ranks: NDArray[np.uint32],
        k: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], float]:
        """The best of some vectors that are stored as codes, by `inner_products` rounded to float32, in the order of `best`.

        Args:
            codes: As `inner_products` takes them, and so are the four that follow.
            scales: (P,).
            rows: (n,), each once.
            weights: (d,).
            offset: Is added to every product.
            ranks: As `best` takes them, (P,).
            k: Hits wanted.

        Returns:
            Rows and scores, (k,) or fewer, and the least score of all n, NaN not counted; infinity where there is none.
        """

    def aggregate(
        self, similarities: NDArray[np.float32], rows: NDArray[np.int64], below: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Documents that some tokens of a query have met, with estimates of their scores.

        What a document's best similarity with a query token is, is known where that token met the document. Where it did not, it is at most
        the least similarity that the token met; what stands in for it is somewhat below that.

        Args:
            similarities: Of the tokens met, (n, k) float32, descending in each row.
            rows: The documents they are of, (n, k) int64; -1, at the end of a row, where fewer than k were met.
            below: How far below, as a part of the range of the similarities that the token met.

        Returns:
            Documents, (m,), each once, in the order in which they were met, and their scores, (m,).

        Source:
            XTR, arXiv:2304.01982, section 3.2 (missing similarity imputation).
        """

    def ward(self, distances: NDArray[np.float64], clusters: int) -> NDArray[np.int64]:
        """Merge points until so many clusters are left, each time the two whose union has the least variance.

        Args:
            distances: Squared distances of all pairs, (n, n); used up.
            clusters: 1 to n.

        Returns:
            For each point the first point of its cluster, (n,).

        Source:
            J. H. Ward, Hierarchical grouping to optimize an objective function, 1963, in the recurrence of Lance and Williams.
        """


@cache
def kernels() -> Kernels:
    """The compiled loops. Importing numba takes half a second, so it is imported when they are first needed.

    Where compiled code cannot be kept on disk, numba compiles it again in every process (`quiver.encoder.cpu.jit.can_cache` logs a
    warning that names the remedy).
    """
    from quiver.retrieval.index.kernels import compiled

    return compiled
