"""Product codes of four bits in inverted lists, which FAISS scans: what the candidates of every compressed engine come from.

The lists are made in memory from codes that lie in files of our own; no file of FAISS's is written or read for them. Which lists a vector
is in, and which of them a query looks at, is told by whoever uses them: the index of centroids that FAISS would have stays empty.

Shapes: n vectors, Q queries, K lists, M codebooks, D width of a coded vector, D / M coordinates a code, k hits.
Source: product quantisation, Jegou et al., TPAMI 2011; with 4-bit codes and fast scan in lists, FAISS, arXiv:2401.08281.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from retrieval.indexes.engines import Bitmap

# FAISS's type stubs know nothing of what its Python layer adds.
_faiss: Any = faiss

CODEWORDS = 16
"""Codewords of a codebook: what four bits can name."""

# Codes that FAISS scans side by side: a list takes a multiple of these.
_SIDE_BY_SIDE = 32


class FastScanLists:
    """Coded vectors in their lists, each under a label; several threads may search at once.

    Args:
        products: Codebooks, (M, 16, D / M).
        codes: Product codes, (n, M / 2 rounded up) uint8; looked at a list at a time, so that they may be mapped.
        numbers: The list of each vector, (n,), below K.
        labels: What a vector is found as, (n,) int64; below the number of rows that a bitmap of a search has.
        lists: Their number K.
    """

    def __init__(
        self,
        products: NDArray[np.float32],
        codes: NDArray[np.uint8],
        numbers: NDArray[np.integer[Any]],
        labels: NDArray[np.int64],
        *,
        lists: int,
    ) -> None:
        width = products.shape[0] * products.shape[2]
        plain = _faiss.IndexIVFPQ(_faiss.IndexFlatIP(width), width, lists, len(products), 4, _faiss.METRIC_INNER_PRODUCT)
        _faiss.copy_array_to_vector(products.ravel(), plain.pq.centroids)
        plain.is_trained = True
        order = np.argsort(numbers, kind="stable")  # a radix sort where there are at most 65,536 lists
        sizes = np.bincount(numbers, minlength=lists)
        filled = np.flatnonzero(sizes)
        for place, end in zip(filled.tolist(), np.cumsum(sizes)[filled].tolist(), strict=True):
            rows = order[end - sizes[place] : end]
            ids, part = labels[rows], np.ascontiguousarray(codes[rows])
            plain.invlists.add_entries(place, len(rows), _faiss.swig_ptr(ids), _faiss.swig_ptr(part))
        plain.ntotal = len(order)
        self._index = _faiss.IndexIVFPQFastScan(plain)
        plain.reset()  # the lists were copied

    @staticmethod
    def nbytes(vectors: int, *, codebooks: int, lists: int) -> int:
        """What the lists of so many vectors take in memory, about: codes, labels of 8 bytes, and half a block a list unused."""
        code = -(-codebooks // 2)
        return (code + 8) * vectors + lists * (_SIDE_BY_SIDE // 2) * code

    def search(
        self,
        queries: NDArray[np.float32],
        k: int,
        *,
        lists: NDArray[np.int64],
        closeness: NDArray[np.float32],
        allowed: Bitmap | None,
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The nearest of the coded vectors in some lists, on as many threads as FAISS is set to.

        Args:
            queries: (Q, D) float32, contiguous.
            k: Vectors a query, at most.
            lists: The lists that each query looks at, (Q, nprobe).
            closeness: Inner products of the queries with their centroids, (Q, nprobe).
            allowed: The labels that may be found, a truth value each; None for all.

        Returns:
            Similarities, descending, and labels, (Q, k); -1 behind the last where there are fewer.
        """
        if allowed is None:
            parameters = _probing(lists.shape[1])
        else:
            packed = np.packbits(allowed, bitorder="little")  # the selector does not keep it
            selector = _faiss.IDSelectorBitmap(len(allowed), _faiss.swig_ptr(packed))
            parameters = _faiss.SearchParametersIVF(nprobe=lists.shape[1], sel=selector)
        k = min(k, self._index.ntotal)
        similarities, labels = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        pointers = [_faiss.swig_ptr(array) for array in (queries, lists, closeness, similarities, labels)]
        # FAISS's own wrapper of this call takes no parameters; versions before 1.13 take no nprobe from them.
        self._index.search_preassigned_c(len(queries), pointers[0], k, *pointers[1:], False, parameters)
        return similarities, labels


@lru_cache
def _probing(nprobe: int) -> Any:
    """Parameters of a search of so many lists, which FAISS only reads; making them anew would take microseconds of every search."""
    return _faiss.SearchParametersIVF(nprobe=nprobe)


def train_codebooks(residuals: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """Codebooks of a product quantizer with 4-bit codes, (D / width, 16, width).

    Args:
        residuals: What is to be coded, (n, D) with n >= 1.
        width: Coordinates that one code stands for.
    """
    dim = residuals.shape[1]
    quantizer = _faiss.ProductQuantizer(dim, dim // width, 4)
    quantizer.cp.min_points_per_centroid = 1  # otherwise it complains
    # Fewer than codewords: some of them are repeated.
    quantizer.train(np.ascontiguousarray(np.resize(residuals, (max(len(residuals), CODEWORDS), dim))))
    found: NDArray[np.float32] = _faiss.vector_to_array(quantizer.centroids).reshape(-1, CODEWORDS, width)
    return found


def train_codebook(points: NDArray[np.float32], *, bits: int) -> NDArray[np.float32]:
    """Codewords for points of one space, (2^bits, D), by k-means.

    Args:
        points: (n, D), more than codewords.
        bits: Of a code.
    """
    quantizer = _faiss.ProductQuantizer(points.shape[1], 1, bits)
    quantizer.train(np.ascontiguousarray(points))
    found: NDArray[np.float32] = _faiss.vector_to_array(quantizer.centroids).reshape(1 << bits, points.shape[1])
    return found


def product_quantizer(products: NDArray[np.float32]) -> Any:
    """FAISS's quantizer with given codebooks, (M, 16, D / M), to code vectors with."""
    quantizer = _faiss.ProductQuantizer(products.shape[0] * products.shape[2], len(products), 4)
    _faiss.copy_array_to_vector(products.ravel(), quantizer.centroids)
    return quantizer
