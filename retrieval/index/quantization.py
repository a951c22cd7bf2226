"""K-means with inverted lists, and 4-bit product quantization: what the dense and the token engines share.

Shapes: n vectors, K centroids, M product codes of a vector, d width.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeAlias

import faiss
import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.engines import Bitmap
from quiver.retrieval.index.kernels.choice import kernels
from quiver.retrieval.index.kernels.packing import lanes

logger = logging.getLogger(__name__)

# FAISS's type stubs know nothing of what its Python layer adds.
_faiss: Any = faiss

Grouping: TypeAlias = Literal["tokens", "two-level", "flat"]
"""How vectors are put into groups."""

# Vectors that k-means learns a centroid from, at most; more were not measurably better.
_VECTORS_A_CENTROID = 64
_ITERATIONS = 6
# A token that occurs less often in the sample has no centroid of its own.
_RARE = 8
_DAMPING = 0.75


@dataclass(frozen=True)
class Clustering:
    """Centroids in groups.

    Attributes:
        centroids: (K, d) float32, each a value of half precision: what is saved is what was computed with.
        groups: First centroid of each group, and K, (G + 1,).
        tokens: For ``tokens``, the vocabulary's number of each group, ascending, (G,); otherwise None.
        heads: For ``two-level``, the centre of each group, (G, d); otherwise None.
    """

    centroids: NDArray[np.float32]
    groups: NDArray[np.int64]
    tokens: NDArray[np.uint32] | None = None
    heads: NDArray[np.float32] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every group is a range of the centroids, one behind the other, with its token or its centre where there are any."""
        edges, named = self.groups.tolist(), [each for each in (self.tokens, self.heads) if each is not None]
        whole = len(edges) > 1 and (edges[0], edges[-1]) == (0, len(self.centroids)) and bool((np.diff(self.groups) > 0).all())
        # Where no token is frequent enough there is one group, which is nobody's.
        return whole and all(len(each) == len(edges) - 1 or (each is self.tokens and not len(each)) for each in named)

    def assign(self, vectors: NDArray[np.float32], token_ids: NDArray[np.uint32] | None) -> NDArray[np.int64]:
        """The centroid of each vector: the nearest of its group.

        Args:
            vectors: (n, d).
            token_ids: Which token each is of, (n,). Where they are None but the groups are those of tokens, all centroids are compared.
        """
        groups = self._groups(vectors, token_ids)
        first, last = np.zeros(len(vectors), np.int64), np.full(len(vectors), len(self.centroids), np.int64)
        known = groups >= 0
        first[known], last[known] = self.groups[groups[known]], self.groups[groups[known] + 1]
        return _nearest(vectors, first, last, self._lanes, self._half_squares)

    def probe(self, query: NDArray[np.float32], count: int) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """The centroids with the greatest inner products, for each vector of a query; all centroids are compared.

        Args:
            query: (n, d) float32, contiguous.
            count: Centroids a vector; at most K.

        Returns:
            Numbers, (n, count), in no order; their inner products, (n, count) float32; and the inner products with all centroids,
            16 vectors side by side, (n / 16, K, 16) float32.
        """
        return kernels().probe(query, self._lanes, len(self.centroids), min(count, len(self.centroids)))

    def _groups(self, vectors: NDArray[np.float32], token_ids: NDArray[np.uint32] | None) -> NDArray[np.int64]:
        """The group of each vector; -1 where it has none."""
        if self.heads is not None:
            first = np.zeros(len(vectors), np.int64)
            return _nearest(vectors, first, first + len(self.heads), lanes(self.heads), _half_squares(self.heads))
        if self.tokens is None:
            return np.zeros(len(vectors), np.int64)
        if token_ids is None or not len(self.tokens):
            return np.full(len(vectors), -1, np.int64)
        places = np.searchsorted(self.tokens, token_ids).clip(max=len(self.tokens) - 1)
        found: NDArray[np.int64] = np.where(self.tokens[places] == token_ids, places, -1)
        return found

    @cached_property
    def _lanes(self) -> NDArray[np.float32]:
        return lanes(self.centroids)

    @cached_property
    def _half_squares(self) -> NDArray[np.float32]:
        return _half_squares(self.centroids)


def cluster(vectors: NDArray[np.float32], token_ids: NDArray[np.uint32] | None, *, count: int, grouping: Grouping, seed: int) -> Clustering:
    """Learn centroids from a sample.

    Args:
        vectors: (n, d), at least one.
        token_ids: Which token each is of, (n,); wanted for ``tokens``.
        count: Centroids K, about: every group has one at least, and none has more than vectors.
        grouping: How vectors are put into groups.
        seed: Equal input and seed give equal centroids.

    Raises:
        ValueError: ``tokens`` without token ids, or count < 1.
    """
    if count < 1:
        raise ValueError(f"count must be >= 1, got {count}")
    if grouping == "tokens":
        if token_ids is None:
            raise ValueError("clustering by tokens needs the tokens' ids")
        return _by_tokens(vectors, token_ids, count=count, seed=seed)
    if grouping == "two-level":
        heads = _kmeans(vectors, max(1, round(count**0.5)), seed)
        first = np.zeros(len(vectors), np.int64)
        group = _nearest(vectors, first, first + len(heads), lanes(heads), _half_squares(heads))
        used, group = np.unique(group, return_inverse=True)
        centroids, groups = _within(vectors, group, count=count, seed=seed)
        return Clustering(centroids, groups, heads=heads[used])
    centroids = _kmeans(vectors, min(count, len(vectors)), seed)
    return Clustering(centroids, np.array([0, len(centroids)]))


def _by_tokens(vectors: NDArray[np.float32], token_ids: NDArray[np.uint32], *, count: int, seed: int) -> Clustering:
    tokens, group, sizes = np.unique(token_ids, return_inverse=True, return_counts=True)
    frequent = sizes >= _RARE
    if not frequent.any():
        centroids = _kmeans(vectors, min(count, len(vectors)), seed)
        return Clustering(centroids, np.array([0, len(centroids)]), tokens=np.empty(0, np.uint32))
    kept = frequent[group]
    centroids, groups = _within(vectors[kept], (np.cumsum(frequent) - 1)[group[kept]], count=count, seed=seed)
    return Clustering(centroids, groups, tokens=tokens[frequent].astype(np.uint32))


def _within(
    vectors: NDArray[np.float32], group: NDArray[np.int64], *, count: int, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """K-means inside each group; all centroids, group after group, and where the groups begin."""
    order = np.argsort(group, kind="stable")
    sizes = np.bincount(group)
    shares = sizes**_DAMPING
    budget = np.clip(np.rint(count * shares / shares.sum()).astype(np.int64), 1, sizes)
    ends = np.cumsum(sizes)
    parts = [_kmeans(vectors[order[end - size : end]], int(number), seed) for end, size, number in zip(ends, sizes, budget, strict=True)]
    return np.concatenate(parts), np.append(0, np.cumsum(budget))


def kmeans(vectors: NDArray[np.float32], count: int, *, vectors_a_centroid: int, seed: int) -> NDArray[np.float32]:
    """Centroids of some vectors, (count, d), at most as many as there are vectors.

    Args:
        vectors: (n, d), at least one.
        count: Centroids wanted.
        vectors_a_centroid: Vectors that a centroid learns from, at most.
        seed: Equal input and seed give equal centroids.
    """
    count = min(count, len(vectors))
    found: NDArray[np.float32]
    if count == len(vectors):
        found = vectors.copy()
        return found
    if count == 1:
        found = vectors.mean(axis=0, dtype=np.float64, keepdims=True).astype(np.float32)
        return found
    means = _faiss.Kmeans(
        vectors.shape[1],
        count,
        niter=_ITERATIONS,
        seed=seed,
        min_points_per_centroid=1,  # otherwise it complains
        max_points_per_centroid=vectors_a_centroid,
    )
    means.train(np.ascontiguousarray(vectors))
    found = np.array(means.centroids)
    return found


def _kmeans(vectors: NDArray[np.float32], count: int, seed: int) -> NDArray[np.float32]:
    """As `kmeans`, of half precision."""
    found = kmeans(vectors, count, vectors_a_centroid=_VECTORS_A_CENTROID, seed=seed)
    with np.errstate(over="ignore"):  # a centroid that is not finite is refused by whoever codes with it
        halves: NDArray[np.float16] = found.astype(np.float16)
    return halves.astype(np.float32)


def _half_squares(centroids: NDArray[np.float32]) -> NDArray[np.float32]:
    halves: NDArray[np.float32] = ((centroids.astype(np.float64) ** 2).sum(axis=1) / 2).astype(np.float32)
    return halves


def _nearest(
    vectors: NDArray[np.float32],
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    packed: NDArray[np.float32],
    half_squares: NDArray[np.float32],
) -> NDArray[np.int64]:
    """As the kernel of the same name, vectors of one range side by side, and those that have no choice left out."""
    found: NDArray[np.int64] = first.copy()
    order = np.lexsort((last, first))
    order = order[last[order] - first[order] > 1]
    if len(order):
        found[order] = kernels().nearest(np.ascontiguousarray(vectors[order]), first[order], last[order], packed, half_squares)
    return found


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
