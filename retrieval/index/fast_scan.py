"""Product codes of four bits in inverted lists, which FAISS scans: what the candidates of every compressed engine come from.

The lists are made in memory from codes that lie in files of our own; no file of FAISS's is written or read for them. Which lists a vector
is in, and which of them a query looks at, is told by whoever uses them: the index of centroids that FAISS would have stays empty.

Shapes: n vectors, Q queries, K lists, M codebooks, D width of a coded vector, D / M coordinates a code, k hits.
Source: product quantisation, Jegou et al., TPAMI 2011; with 4-bit codes and fast scan in lists, FAISS, arXiv:2401.08281.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.engines import Bitmap

# FAISS's type stubs know nothing of what its Python layer adds.
_faiss: Any = faiss

CODEWORDS = 16
"""Codewords of a codebook: what four bits can name."""

# What a list takes that is empty, measured with FAISS 1.15.
_LIST = 300
# Vectors whose lists are packed at once, about: what is needed beside the lists while they are made.
_PART = 1 << 16


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
        self._index = _faiss.IndexIVFPQFastScan(_plain_lists(products, lists))
        order = np.argsort(numbers, kind="stable")  # a radix sort where there are at most 65,536 lists
        sizes = np.bincount(numbers, minlength=lists)
        filled = np.flatnonzero(sizes)
        ends = np.cumsum(sizes[filled])
        first = start = 0
        while start < len(order):
            # The lists [first, last) of those that are filled: _PART vectors at most, or one list.
            last = max(first + 1, int(np.searchsorted(ends, start + _PART, side="right")))
            stop = int(ends[last - 1])
            some = filled[first:last]
            self._fill(some, sizes[some], _plain_lists(products, len(some)), codes, labels, order[start:stop])
            first, start = last, stop
        self._index.ntotal = len(order)

    def _fill(
        self,
        lists: NDArray[np.int64],
        sizes: NDArray[np.int64],
        plain: Any,
        codes: NDArray[np.uint8],
        labels: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> None:
        """Fill some lists, which are empty, with vectors: the first ``sizes[0]`` of ``rows`` go into ``lists[0]``, and so on.

        FAISS packs codes for its scan only where it copies a whole index of unpacked codes, and its Python layer keeps that index as long
        as the copy. So a plain index is made of these lists alone, and what FAISS packs is copied; both are freed at the end.
        """
        ends = np.cumsum(sizes).tolist()
        for place, (size, end) in enumerate(zip(sizes.tolist(), ends, strict=True)):
            _append(plain.invlists, place, labels[rows[end - size : end]], np.ascontiguousarray(codes[rows[end - size : end]]))
        index = _faiss.IndexIVFPQFastScan(plain)
        packed, kept = index.invlists, self._index.invlists
        for place, (number, size) in enumerate(zip(lists.tolist(), sizes.tolist(), strict=True)):
            kept.add_entries(number, size, packed.get_ids(place), packed.get_codes(place))

    @staticmethod
    def nbytes(vectors: int, *, codebooks: int, lists: int) -> int:
        """What the lists of so many vectors take in memory, about: codes, and labels of 8 bytes.

        FAISS rounds the codes of a list up to a power of two, which of many lists takes 1 / ln 2 times as much on average. Of a single one
        the pages at the end are never touched.
        """
        code = -(-codebooks // 2)
        return round((code / math.log(2) if lists > 1 else code) * vectors) + 8 * vectors + _LIST * lists

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


def _plain_lists(products: NDArray[np.float32], lists: int) -> Any:
    """FAISS's index of unpacked codes with given codebooks, (M, 16, D / M), whose lists are empty."""
    width = products.shape[0] * products.shape[2]
    plain = _faiss.IndexIVFPQ(_faiss.IndexFlatIP(width), width, lists, len(products), 4, _faiss.METRIC_INNER_PRODUCT)
    _faiss.copy_array_to_vector(products.ravel(), plain.pq.centroids)
    plain.is_trained = True
    return plain


def _append(lists: Any, number: int, labels: NDArray[np.int64], codes: NDArray[np.uint8]) -> None:
    lists.add_entries(number, len(labels), _faiss.swig_ptr(labels), _faiss.swig_ptr(codes))


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
