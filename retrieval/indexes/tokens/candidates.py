"""Candidates: which documents a query's tokens meet in inverted lists of coded tokens.

Every token is in the list of its centroid, as the number of its document and a product code of its residual. One search finds the k'
nearest tokens of each query token in the lists of the ``nprobe`` best centroids; what a document scored where it was met, and at most
scored where it was not, is its estimate.

The lists are FAISS's, in memory, made from the tokens' codes when a segment is first searched: about a second for ten million tokens.
No file of FAISS's is ever written or read.

Shapes: n tokens of a query, T tokens of a segment, P documents, K centroids, d width.
Source: FAISS, arXiv:2401.08281 (IVF-PQ with 4-bit codes and fast scan); XTR, arXiv:2304.01982 (imputation).
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from retrieval.indexes.clustering import Clustering
from retrieval.indexes.engines import Bitmap
from retrieval.indexes.threads import one_thread
from retrieval.indexes.tokens.kernels import kernels

# FAISS's type stubs know nothing of what its Python layer adds.
_faiss: Any = faiss

CODED_DIMENSIONS = 4
"""Coordinates that one 4-bit code of a product quantizer stands for."""

# What a document that was not met is taken to score lies so much of the similarities' range below the least of them, which is its bound:
# half as many candidates then hold as many of the best documents (measured; from 0.1 to 0.2 it makes no difference).
_BELOW = 0.15
# Codes that FAISS scans side by side: a list takes a multiple of these.
_BLOCK = 32


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
        count, d = clustering.centroids.shape
        # It is told which lists to look at, so that its own index of centroids stays empty.
        plain = _faiss.IndexIVFPQ(_faiss.IndexFlatIP(d), d, count, len(products), 4, _faiss.METRIC_INNER_PRODUCT)
        _faiss.copy_array_to_vector(products.ravel(), plain.pq.centroids)
        plain.is_trained = True
        order = np.argsort(centroids, kind="stable")  # a radix sort where there are at most 65,536 centroids
        documents = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)[order]
        sorted_codes = np.ascontiguousarray(codes[order])
        filled, sizes = np.unique(centroids[order], return_counts=True)
        ends = np.cumsum(sizes)
        for place, size, end in zip(filled.tolist(), sizes.tolist(), ends.tolist(), strict=True):
            ids, part = documents[end - size : end], sorted_codes[end - size : end]
            plain.invlists.add_entries(place, size, _faiss.swig_ptr(ids), _faiss.swig_ptr(part))
        plain.ntotal = len(order)
        self._index = _faiss.IndexIVFPQFastScan(plain)
        plain.reset()  # the lists were copied
        self._documents = len(lengths)

    @staticmethod
    def size(tokens: int, dim: int, centroids: int) -> int:
        """Bytes of lists in memory, before they are made: codes, 8 bytes for each document's number, and half a block a list."""
        return tokens * (dim // 8 + 8) + centroids * (_BLOCK // 2) * (dim // 8)

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
            Documents, each once, and estimates of their scores.
        """
        settings: dict[str, Any] = {}
        if allowed is not None:
            packed = np.packbits(allowed, bitorder="little")
            settings["sel"] = _faiss.IDSelectorBitmap(self._documents, _faiss.swig_ptr(packed))
        k = min(tokens_k, self._index.ntotal)
        similarities, rows = np.empty((len(query), k), np.float32), np.empty((len(query), k), np.int64)
        pointers = [_faiss.swig_ptr(array) for array in (query, lists, closeness, similarities, rows)]
        with one_thread():  # FAISS's own wrapper of this call takes no parameters
            self._index.search_preassigned_c(
                len(query), pointers[0], k, *pointers[1:], False, _faiss.SearchParametersIVF(nprobe=lists.shape[1], **settings)
            )
        return kernels().aggregate(similarities, rows, _BELOW)


def train_products(residuals: NDArray[np.float32]) -> NDArray[np.float32]:
    """Codebooks of a product quantizer with 4-bit codes, (d / 4, 16, 4)."""
    d = residuals.shape[1]
    quantizer = _faiss.ProductQuantizer(d, d // CODED_DIMENSIONS, 4)
    residuals = np.resize(residuals, (max(len(residuals), 16), d))  # fewer than codewords: some of them are repeated
    quantizer.cp.min_points_per_centroid = 1
    quantizer.train(np.ascontiguousarray(residuals))
    found: NDArray[np.float32] = _faiss.vector_to_array(quantizer.centroids).reshape(-1, 16, CODED_DIMENSIONS)
    return found
