"""Candidates from inverted lists of product codes: which documents of a segment may be among the best.

The lists are FAISS's, in memory, made from the records when a segment is first searched. No file of FAISS's is written or read for them.

A scan of everything (the engine ``pq-dense``) is one list that holds all documents. FAISS's flat index of the same codes finds the same
at the same speed (100,000 documents of width 128 and 384), but takes no selector, which a filter needs; a list takes one.

Shapes: Q queries, P documents, K lists, d width.
Source: FAISS, arXiv:2401.08281 (fast scan of 4-bit codes in inverted lists).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from retrieval.indexes.dense.coarse import CoarseCoding
from retrieval.indexes.engines import Bitmap
from retrieval.indexes.threads import one_thread

# FAISS's type stubs know nothing of what its Python layer adds.
_faiss: Any = faiss

# Codes that FAISS scans side by side: a list takes a multiple of these.
_SIDE_BY_SIDE = 32


class InvertedLists:
    """The documents of one segment in the lists of their centroids.

    Args:
        coding: Of the codec.
        records: As it encodes them, (P, width); the numbers of their lists are below K.
    """

    def __init__(self, coding: CoarseCoding, records: NDArray[np.uint8]) -> None:
        self._coding = coding
        self._count = len(records)
        K, width = coding.centroids.shape  # noqa: N806
        # It is told which lists to look at, so that its own index of centroids stays empty.
        plain = _faiss.IndexIVFPQ(_faiss.IndexFlatIP(width), width, K, len(coding.products), 4, _faiss.METRIC_INNER_PRODUCT)
        _faiss.copy_array_to_vector(coding.products.ravel(), plain.pq.centroids)
        plain.is_trained = True
        numbers = coding.numbers(records)
        order = np.argsort(numbers, kind="stable")
        filled, sizes = np.unique(numbers, return_counts=True)
        ends = np.cumsum(sizes)
        for place, size, end in zip(filled.tolist(), sizes.tolist(), ends.tolist(), strict=True):
            rows = order[end - size : end]
            codes = np.ascontiguousarray(records[rows, : coding.code_width])
            plain.invlists.add_entries(place, size, _faiss.swig_ptr(rows), _faiss.swig_ptr(codes))
        plain.ntotal = self._count
        self._index = _faiss.IndexIVFPQFastScan(plain)
        plain.reset()  # the lists were copied

    @staticmethod
    def nbytes(coding: CoarseCoding, documents: int) -> int:
        """What the lists of so many documents take in memory, about: codes, rows of 8 bytes, and half a block a list unused."""
        each = len(coding.products) // 2 + 8
        return each * documents + len(coding.centroids) * (_SIDE_BY_SIDE // 2) * each

    def find(self, queries: NDArray[np.float32], count: int, *, nprobe: int, allowed: Bitmap | None) -> list[NDArray[np.int64]]:
        """The documents that the codes put first for each query.

        Args:
            queries: (Q, d).
            count: Documents a query, at most.
            nprobe: Lists that are searched for each.
            allowed: The rows that may be found, (P,); None for all.

        Returns:
            Rows in no order, each at most once: fewer than ``count`` where the lists hold fewer.
        """
        settings: dict[str, Any] = {}
        if allowed is not None:
            packed = np.packbits(allowed, bitorder="little")
            settings["sel"] = _faiss.IDSelectorBitmap(self._count, _faiss.swig_ptr(packed))
        matrix = self._coding.fill(queries)
        lists, closeness = self._probe(matrix, min(nprobe, len(self._coding.centroids)))
        similarities, rows = np.empty((len(matrix), count), np.float32), np.empty((len(matrix), count), np.int64)
        pointers = [_faiss.swig_ptr(array) for array in (matrix, lists, closeness, similarities, rows)]
        parameters = _faiss.SearchParametersIVF(nprobe=lists.shape[1], **settings)
        # Several threads make one query slower; many queries are theirs to share.
        with one_thread() if len(matrix) == 1 else nullcontext():
            # FAISS's own wrapper of this call takes no parameters; versions before 1.13 take no nprobe from them.
            self._index.search_preassigned_c(len(matrix), pointers[0], count, *pointers[1:], False, parameters)
        return [found[found >= 0] for found in rows]  # -1 fills up what was not found

    def _probe(self, queries: NDArray[np.float32], nprobe: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The lists whose centroids have the greatest inner products, best first, and these, (Q, nprobe)."""
        lists, closeness = np.zeros((len(queries), nprobe), np.int64), np.zeros((len(queries), nprobe), np.float32)
        if len(self._coding.centroids) == 1:
            return lists, closeness  # how close the one is changes all scores alike
        for number, query in enumerate(queries):  # one at a time: what a query finds does not depend on its company
            products = self._coding.centroids @ query
            best = np.argpartition(-products, nprobe - 1)[:nprobe]
            best = best[np.argsort(-products[best], kind="stable")]
            lists[number], closeness[number] = best, products[best]
        return lists, closeness
