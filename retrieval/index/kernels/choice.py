"""Interface of the compiled loops of searching and encoding, and the function that loads them."""

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
        """Quantize residuals: codes of coordinate pairs and one scale per vector, such that scale times codewords approximates them.

        The first codes are those of the residual divided by its root mean square; the scale then minimizes the squared error for the
        codes. Each further round recomputes the codes with that scale.

        Args:
            residuals: (n, d) float32, d even.
            pairs: Codebook of pairs, (2^width, 2).
            cells: Nearest codeword of each grid cell, see `quiver.retrieval.index.kernels.packing.cells`.
            rounds: Number of rounds, at least 1.

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
        """Find the nearest centroid of each vector within its own range of centroids.

        Args:
            vectors: (n, d) float32; faster if neighbouring vectors have the same range.
            first: First centroid that may be chosen, (n,).
            last: One past the last, (n,), greater than ``first``.
            lanes: The centroids, (L, d, 16), as `quiver.retrieval.index.kernels.packing.lanes` arranges them.
            half_squares: Half the squared length of each centroid, (K,).

        Returns:
            Numbers of centroids, (n,); ties go to the first.
        """

    def probe(
        self, query: NDArray[np.float32], lanes: NDArray[np.float32], centroids: int, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """Compute inner products with all centroids, and find the centroids with the greatest.

        Args:
            query: (n, d) float32.
            lanes: The centroids, (L, d, 16), as `quiver.retrieval.index.kernels.packing.lanes` arranges them.
            centroids: Number K of centroids; later lanes are padding.
            count: Number of centroids to find per vector, 1 to K.

        Returns:
            Numbers of the nearest centroids, (n, count), unordered; their inner products, (n, count); and those with all centroids,
            (n / 16, K, 16), zeros in padding lanes.
        """

    def estimate(
        self,
        coarse: NDArray[np.uint8],
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        similarities: NDArray[np.float32],
        table: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """MaxSim of a query with the vectors that the coarse parts encode, from tables of similarities quantized to 16 bits.

        The range of 32,000 steps covers the greatest similarity with a centroid plus the greatest with a codeword of each codebook.

        Args:
            coarse: Product code and centroid of each token, (T, d / 8 + 2 or 4).
            begins: First token of each document, (m,).
            ends: One past its last token, (m,).
            similarities: Inner products of the query's tokens with all centroids, (L, K, 16), as `probe` returns them.
            table: Inner products of the query's tokens with the product codewords, (L, d / 4, 16, 16): 16 codewords, 16 tokens.

        Returns:
            (m,); minus infinity for a document without tokens, NaN for one that refers to an unknown centroid, and NaN for all if a
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
        """MaxSim of a query with documents, decoding product and fine codes on the fly; centroids enter by their similarities.

        Args:
            coarse: Product code and centroid of each token, (T, d / 8 + 2 or 4).
            fine: Codes and scale of each token, (T, d / 2 * width / 8 + 2).
            begins: First token of each document, (m,).
            ends: One past its last token, (m,).
            similarities: Inner products of the query's tokens with all centroids, (L, K, 16), as `probe` returns them.
            products: Codebooks of the product codes, (d / 4, 16, 4).
            pairs: Codebook of pairs, (2^width, 2).
            query: (L, d, 16), as `quiver.retrieval.index.kernels.packing.lanes` arranges it; lanes of zeros add nothing.

        Returns:
            (m,); minus infinity for a document without tokens, and NaN for one that refers to an unknown centroid.
        """

    def inner_products(
        self,
        codes: NDArray[np.signedinteger[Any]],
        scales: NDArray[np.float32],
        rows: NDArray[np.int64],
        weights: NDArray[np.float64],
        offset: float,
    ) -> NDArray[np.float64]:
        """Inner products of one query with chosen vectors, each stored as codes and a scale.

        Args:
            codes: (P, d) int8 or int16.
            scales: (P,).
            rows: Row numbers of the vectors, (n,).
            weights: The query, (d,) float64.
            offset: Added to every product.

        Returns:
            (n,) float64; the result of a row does not depend on the other rows.
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
        """The k best of chosen coded vectors, by `inner_products` rounded to float32; ties go to the greater rank.

        Args:
            codes: See `inner_products`, also for the next four arguments.
            scales: (P,).
            rows: (n,), without repetitions.
            weights: (d,).
            offset: Added to every product.
            ranks: Rank of each row's document id, (P,).
            k: Number of hits.

        Returns:
            Rows and scores, (k,) or fewer, and the lowest score of all n without NaN; infinity if there is none.
        """

    def aggregate(
        self, similarities: NDArray[np.float32], rows: NDArray[np.int64], below: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Aggregate the document tokens found for each query token into documents with estimated scores.

        The best similarity of a document with a query token is known if the token found one of its tokens. Otherwise it is at most the
        lowest similarity that the token found; a value somewhat below that is imputed.

        Args:
            similarities: Similarities of the found tokens, (n, k) float32, descending in each row.
            rows: Their documents, (n, k) int64; -1 at the end of a row if fewer than k were found.
            below: Distance of the imputed value below the lowest similarity, as a share of the token's range of similarities.

        Returns:
            Documents, (m,), each once, in the order in which they were found, and their scores, (m,).

        Source:
            XTR, arXiv:2304.01982, section 3.2 (missing similarity imputation).
        """

    def ward(self, distances: NDArray[np.float64], clusters: int) -> NDArray[np.int64]:
        """Cluster points hierarchically by Ward's method: repeatedly merge the two clusters whose union has the least variance.

        Args:
            distances: Squared distances of all pairs, (n, n); overwritten.
            clusters: Number of clusters to stop at, 1 to n.

        Returns:
            For each point the first point of its cluster, (n,).

        Source:
            J. H. Ward, Hierarchical grouping to optimize an objective function, 1963, in the recurrence of Lance and Williams.
        """


@cache
def kernels() -> Kernels:
    """Load the compiled loops. Importing numba takes half a second, so it happens on first use.

    If compiled code cannot be cached on disk, numba compiles it again in every process (`quiver.encoder.cpu.jit.can_cache` logs a
    warning that names the remedy).
    """
    from quiver.retrieval.index.kernels import compiled

    return compiled
