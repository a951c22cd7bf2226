"""Candidates from inverted lists of product codes: which documents of a segment may be among the best.

The lists are made in memory from the records when a segment is first searched.

A scan of everything (the engine ``pq-dense``) is one list that holds all documents. FAISS's flat index of the same codes finds the same
at the same speed (100,000 documents of width 128 and 384), but takes no selector, which a filter needs; a list takes one.

Shapes: Q queries, P documents, K lists, d width.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.dense.coarse import CoarseCoding
from quiver.retrieval.index.engines import Bitmap
from quiver.retrieval.index.fast_scan import FastScanLists
from quiver.retrieval.index.threads import one_thread


class InvertedLists:
    """The documents of one segment in the lists of their centroids.

    Args:
        coding: Of the codec.
        records: As it encodes them, (P, width); the numbers of their lists are below K.
    """

    def __init__(self, coding: CoarseCoding, records: NDArray[np.uint8]) -> None:
        self._coding = coding
        rows = np.arange(len(records), dtype=np.int64)
        codes, numbers = records[:, : coding.code_width], coding.numbers(records)
        self._lists = FastScanLists(coding.products, codes, numbers, rows, lists=len(coding.centroids))

    @staticmethod
    def nbytes(coding: CoarseCoding, documents: int) -> int:
        """What the lists of so many documents take in memory, about."""
        return FastScanLists.nbytes(documents, codebooks=len(coding.products), lists=len(coding.centroids))

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
        matrix = self._coding.fill(queries)
        lists, closeness = self._probe(matrix, min(nprobe, len(self._coding.centroids)))
        # Several threads make one query slower; many queries are theirs to share.
        with one_thread() if len(matrix) == 1 else nullcontext():
            _, rows = self._lists.search(matrix, count, lists=lists, closeness=closeness, allowed=allowed)
        return [found if found[-1] >= 0 else found[found >= 0] for found in rows]  # -1 fills up what was not found

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
