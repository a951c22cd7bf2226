"""Candidates: which documents a query's tokens meet in inverted lists of coded tokens.

Every token is in the list of its centroid, as the number of its document and a product code of its residual. One search finds the k'
nearest tokens of each query token in the lists of the ``nprobe`` best centroids; what a document scored where it was met, and at most
scored where it was not, is a first guess at its score.

The lists are made in memory from the tokens' codes when a segment is first searched: about a second for ten million tokens.

Shapes: n tokens of a query, T tokens of a segment, P documents, K centroids, d width.
Source: FAISS, arXiv:2401.08281 (IVF-PQ with 4-bit codes and fast scan); XTR, arXiv:2304.01982 (imputation).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.clustering import Clustering
from quiver.retrieval.index.engines import Bitmap
from quiver.retrieval.index.fast_scan import FastScanLists
from quiver.retrieval.index.kernels.choice import kernels
from quiver.retrieval.index.threads import one_thread

CODED_DIMENSIONS = 4
"""Coordinates that one 4-bit code of a product quantizer stands for."""

# What a document that was not met is taken to score lies so much of the similarities' range below the least of them, which is its bound:
# half as many candidates then hold as many of the best documents (measured; from 0.1 to 0.2 it makes no difference).
_BELOW = 0.15


class CandidateLists:
    """The tokens of one segment in the lists of their centroids.

    Args:
        clustering: The centroids.
        products: Codebooks of the product quantizer, (d / 4, 16, 4).
        codes: Product codes, (T, d / 8) uint8.
        centroids: Centroid of each token, (T,).
        lengths: Tokens of each document, (P,).
    """

    def __init__(
        self,
        clustering: Clustering,
        products: NDArray[np.float32],
        codes: NDArray[np.uint8],
        centroids: NDArray[np.integer[Any]],
        lengths: NDArray[np.integer[Any]],
    ) -> None:
        documents = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
        self._lists = FastScanLists(products, codes, centroids, documents, lists=len(clustering.centroids))

    @staticmethod
    def size(tokens: int, dim: int, centroids: int) -> int:
        """Bytes of lists in memory, before they are made."""
        return FastScanLists.nbytes(tokens, codebooks=dim // CODED_DIMENSIONS, lists=centroids)

    def search(
        self,
        query: NDArray[np.float32],
        lists: NDArray[np.int64],
        closeness: NDArray[np.float32],
        *,
        tokens_k: int,
        allowed: Bitmap | None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Documents that the tokens of a query meet.

        Args:
            query: (n, d) float32, contiguous.
            lists: Centroids whose lists are looked at for each token, (n, nprobe).
            closeness: Inner products of the tokens with these centroids, (n, nprobe).
            tokens_k: Tokens that each token meets, k'.
            allowed: Documents that may be met, (P,); None for all.

        Returns:
            Documents, each once, and guesses at their scores.
        """
        with one_thread():
            similarities, documents = self._lists.search(query, tokens_k, lists=lists, closeness=closeness, allowed=allowed)
        return kernels().aggregate(similarities, documents, _BELOW)
