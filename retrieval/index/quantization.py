"""K-means with inverted lists and 4-bit product quantization, shared by the dense and the token engines.

On the CPU, FAISS trains centroids and a kernel assigns vectors to them. Within `quiver.retrieval.index.engines.clustering_on` a GPU does
both by FAISS's algorithm, except where there is too little to compute; float64 and a fixed order of additions make the result repeatable.

Shapes: n vectors, K centroids, M product codes per vector, d width.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeAlias

import faiss
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quiver.retrieval.index import kernels
from quiver.retrieval.index.engines import Bitmap, clustering_device
from quiver.retrieval.index.kernels.packing import lanes

logger = logging.getLogger(__name__)

# FAISS's type stubs lack the functions that its Python layer adds.
_faiss: Any = faiss

Grouping: TypeAlias = Literal["tokens", "two-level", "flat"]
"""How vectors are grouped before clustering: by token, by a coarse k-means, or not at all."""

# Maximum number of training vectors per centroid; more did not measurably improve recall.
_VECTORS_A_CENTROID = 64
_ITERATIONS = 6
# Tokens that occur less often in the sample get no centroid of their own.
_RARE = 8
_DAMPING = 0.75
# Multiplications below which a GPU gains nothing: n K d.
_LEAST_WORK = 1 << 28
# Number of products with centroids in the memory of a device at a time: 256 MiB of float64.
_PRODUCTS = 32 << 20

# FAISS's seed for splitting clusters, and the relative distance of the halves.
_SPLIT_SEED, _SPLIT = 1234, 1 / 1024

CODEWORDS = 16
"""Codewords per codebook of 4-bit codes."""

# Memory of an empty list in bytes, measured with FAISS 1.15.
_LIST = 300
# Approximate number of vectors packed at once; limits the extra memory while the lists are filled.
_PART = 1 << 16


def _worthwhile(work: int) -> torch.device | None:
    """The device of `clustering_on` for so many multiplications; None for the CPU."""
    return clustering_device() if work >= _LEAST_WORK else None


@dataclass(frozen=True)
class Clustering:
    """Centroids in groups."""

    centroids: NDArray[np.float32]  # (K, d) float32, rounded to half precision so that saved and computed values agree
    groups: NDArray[np.int64]  # first centroid of each group, and K, (G + 1,)
    tokens: NDArray[np.uint32] | None = None  # for tokens, the vocabulary id of each group, ascending, (G,); otherwise None
    heads: NDArray[np.float32] | None = None  # for two-level, the centre of each group, (G, d); otherwise None

    @property
    def is_whole(self) -> bool:
        """Whether the groups are adjacent, non-empty ranges that cover all centroids, each with its token or centre if there are any."""
        edges, named = self.groups.tolist(), [each for each in (self.tokens, self.heads) if each is not None]
        whole = len(edges) > 1 and (edges[0], edges[-1]) == (0, len(self.centroids)) and bool((np.diff(self.groups) > 0).all())
        # If no token is frequent enough, there is one group without a token.
        return whole and all(len(each) == len(edges) - 1 or (each is self.tokens and not len(each)) for each in named)

    def assign(self, vectors: NDArray[np.float32], token_ids: NDArray[np.uint32] | None) -> NDArray[np.int64]:
        """Assign each vector to the nearest centroid of its group.

        Args:
            vectors: (n, d).
            token_ids: Vocabulary id of each vector's token, (n,). If None and the groups are tokens, all centroids are compared.
        """
        device = _worthwhile(len(vectors) * self.centroids.size)
        if device is not None and len(self.groups) == 2:
            return nearest_centroids(vectors, self.centroids, device)
        groups = self._groups(vectors, token_ids)
        first, last = np.zeros(len(vectors), np.int64), np.full(len(vectors), len(self.centroids), np.int64)
        known = groups >= 0
        first[known], last[known] = self.groups[groups[known]], self.groups[groups[known] + 1]
        return _nearest(vectors, first, last, self._lanes, self._half_squares)

    def probe(self, query: NDArray[np.float32], count: int) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """Find the centroids with the greatest inner products for each vector of a query; all centroids are compared.

        Args:
            query: (n, d) float32, contiguous.
            count: Centroids per vector; at most K.

        Returns:
            Numbers, (n, count), unordered; their inner products, (n, count) float32; and the inner products with all centroids in groups of
            16 vectors, (n / 16, K, 16) float32.
        """
        return kernels.probe(query, self._lanes, len(self.centroids), min(count, len(self.centroids)))

    def _groups(self, vectors: NDArray[np.float32], token_ids: NDArray[np.uint32] | None) -> NDArray[np.int64]:
        """The group of each vector; -1 if it has none."""
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
    """Train centroids on a sample.

    Args:
        vectors: (n, d), at least one.
        token_ids: Vocabulary id of each vector's token, (n,); required for ``tokens``.
        count: Approximate number K of centroids: every group gets at least one, and no more than it has vectors.
        grouping: How vectors are grouped.
        seed: Random seed; equal input and seed give equal centroids.

    Raises:
        ValueError: ``tokens`` without token ids, or count < 1.
    """
    if count < 1:
        raise ValueError(f"the number of centroids must be >= 1, got {count}")
    if grouping == "tokens":
        if token_ids is None:
            raise ValueError("clustering by tokens needs the token ids")
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
    """Run k-means within each group; return all centroids, group after group, and the first centroid of each group."""
    order = np.argsort(group, kind="stable")
    sizes = np.bincount(group)
    shares = sizes**_DAMPING
    budget = np.clip(np.rint(count * shares / shares.sum()).astype(np.int64), 1, sizes)
    ends = np.cumsum(sizes)
    parts = [_kmeans(vectors[order[end - size : end]], int(number), seed) for end, size, number in zip(ends, sizes, budget, strict=True)]
    return np.concatenate(parts), np.append(0, np.cumsum(budget))


def kmeans(
    vectors: NDArray[np.float32], count: int, *, vectors_a_centroid: int, seed: int, device: torch.device | None = None
) -> NDArray[np.float32]:
    """Compute centroids by k-means, (count, d); at most as many as there are vectors.

    Args:
        vectors: (n, d), at least one.
        count: Number of centroids.
        vectors_a_centroid: Maximum number of training vectors per centroid.
        seed: Random seed; equal input and seed give equal centroids.
        device: Device on which PyTorch computes them; None for FAISS on the CPU, or the device of `clustering_on`.
    """
    count = min(count, len(vectors))
    found: NDArray[np.float32]
    if count == len(vectors):
        found = vectors.copy()
        return found
    if count == 1:
        found = vectors.mean(axis=0, dtype=np.float64, keepdims=True).astype(np.float32)
        return found
    device = device or _worthwhile(min(len(vectors), count * vectors_a_centroid) * count * vectors.shape[1])
    if device is not None:
        return _kmeans_on(vectors, count, vectors_a_centroid=vectors_a_centroid, seed=seed, device=device)
    means = _faiss.Kmeans(
        vectors.shape[1],
        count,
        niter=_ITERATIONS,
        seed=seed,
        min_points_per_centroid=1,  # avoids FAISS's warning
        max_points_per_centroid=vectors_a_centroid,
    )
    means.train(np.ascontiguousarray(vectors))
    found = np.array(means.centroids)
    return found


def _kmeans_on(
    vectors: NDArray[np.float32], count: int, *, vectors_a_centroid: int, seed: int, device: torch.device
) -> NDArray[np.float32]:
    """FAISS's k-means on a device: the same sample, first centroids, iterations and splits of large clusters where one is empty."""
    most = count * vectors_a_centroid
    sample = vectors[_permutation(len(vectors), seed)[:most]] if len(vectors) > most else vectors
    centroids = torch.from_numpy(sample[_permutation(len(sample), seed + 1)[:count]]).to(device)
    points = torch.from_numpy(np.array(sample)).to(device)
    borders = torch.arange(count + 1, device=device)
    for _ in range(_ITERATIONS):
        numbers, order = _nearest_on(points, centroids).sort(stable=True)
        sizes = torch.searchsorted(numbers, borders).diff()
        sums = torch.segment_reduce(points[order], "sum", lengths=sizes, unsafe=True)  # in order, which index_add_ does not keep
        centroids = torch.where((sizes > 0)[:, None], sums / sizes.clamp(min=1)[:, None], centroids)
        held = sizes.cpu().numpy()
        if not held.all():
            centroids = torch.from_numpy(_split(centroids.cpu().numpy(), held.astype(np.float32), len(sample))).to(device)
    return centroids.cpu().numpy()


def _permutation(count: int, seed: int) -> NDArray[np.int32]:
    """FAISS's random permutation."""
    order = np.empty(count, np.int32)
    _faiss.rand_perm(_faiss.swig_ptr(order), count, seed)
    return order


def _split(centroids: NDArray[np.float32], sizes: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """Replace the centroid of each empty cluster by one half of another cluster, chosen with a probability that grows with its size."""
    rng, places = _faiss.RandomGenerator(_SPLIT_SEED), len(sizes)
    shift = np.where(np.arange(centroids.shape[1]) % 2, -_SPLIT, _SPLIT).astype(np.float32)
    for empty in np.flatnonzero(sizes == 0).tolist():
        chosen = 0
        while rng.rand_float() >= (sizes[chosen] - 1) / (count - places):
            chosen = (chosen + 1) % places
        centroids[empty] = centroids[chosen] * (1 + shift)
        centroids[chosen] *= 1 - shift
        sizes[empty] = sizes[chosen] / 2
        sizes[chosen] -= sizes[empty]
    return centroids


def nearest_centroids(vectors: NDArray[np.float32], centroids: NDArray[np.float32], device: torch.device) -> NDArray[np.int64]:
    """Number of the nearest centroid of each vector, (n,), computed in float64 on a device."""
    held, step = torch.from_numpy(np.array(centroids)).to(device), 1 << 16
    parts = [torch.from_numpy(np.array(vectors[start : start + step])).to(device) for start in range(0, len(vectors), step)]
    found: NDArray[np.int64] = torch.cat([_nearest_on(part, held) for part in parts]).cpu().numpy()
    return found


def _nearest_on(points: Tensor, centroids: Tensor) -> Tensor:
    """Number of the nearest centroid of each point, (n,); the least of those equally near."""
    exact = centroids.double()
    half_squares, numbers = (exact**2).sum(dim=1) / 2, torch.arange(len(exact), device=exact.device)
    found = []
    for part in torch.split(points, max(1, _PRODUCTS // len(exact))):
        closeness = part.double() @ exact.T - half_squares  # (n, K)
        best = closeness.amax(dim=1, keepdim=True)
        found.append(torch.where(closeness == best, numbers, len(exact)).amin(dim=1))
    return torch.cat(found)


def _kmeans(vectors: NDArray[np.float32], count: int, seed: int) -> NDArray[np.float32]:
    """`kmeans` with centroids rounded to half precision."""
    found = kmeans(vectors, count, vectors_a_centroid=_VECTORS_A_CENTROID, seed=seed)
    with np.errstate(over="ignore"):  # codecs reject centroids that are not finite
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
    """The kernel of the same name, called with vectors sorted by range and without those that have only one choice."""
    found: NDArray[np.int64] = first.copy()
    order = np.lexsort((last, first))
    order = order[last[order] - first[order] > 1]
    if len(order):
        found[order] = kernels.nearest(np.ascontiguousarray(vectors[order]), first[order], last[order], packed, half_squares)
    return found


class FastScanLists:
    """Inverted lists of product codes with a label per vector. Several threads may search at once.

    Args:
        products: Codebooks, (M, 16, D / M).
        codes: Product codes, (n, M / 2 rounded up) uint8; may be memory-mapped, since they are read one list at a time.
        numbers: Number of the list that holds each vector, (n,), below K.
        labels: Label that a search returns for each vector, (n,) int64; below the length of the bitmaps passed to ``search``.
        lists: Number K of lists.
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
        order = np.argsort(numbers, kind="stable")  # a radix sort for at most 65,536 lists
        sizes = np.bincount(numbers, minlength=lists)
        filled = np.flatnonzero(sizes)
        ends = np.cumsum(sizes[filled])
        first = start = 0
        while start < len(order):
            # The non-empty lists [first, last): at most _PART vectors, or a single list.
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
        """Fill empty lists with vectors: the first ``sizes[0]`` of ``rows`` go into ``lists[0]``, and so on.

        FAISS packs codes for its scan only when it copies a complete index of unpacked codes, and its Python layer keeps that index alive
        as long as the copy. So a plain index of only these lists is packed and its packed lists are copied; then both are freed.
        """
        ends = np.cumsum(sizes).tolist()
        for place, (size, end) in enumerate(zip(sizes.tolist(), ends, strict=True)):
            some = rows[end - size : end]
            names, packed_codes = labels[some], np.ascontiguousarray(codes[some])
            plain.invlists.add_entries(place, size, _faiss.swig_ptr(names), _faiss.swig_ptr(packed_codes))
        index = _faiss.IndexIVFPQFastScan(plain)
        packed, kept = index.invlists, self._index.invlists
        for place, (number, size) in enumerate(zip(lists.tolist(), sizes.tolist(), strict=True)):
            kept.add_entries(number, size, packed.get_ids(place), packed.get_codes(place))

    @staticmethod
    def nbytes(vectors: int, *, codebooks: int, lists: int) -> int:
        """Approximate memory of the lists in bytes: codes, and labels of 8 bytes.

        FAISS rounds the size of a list's codes up to a power of two: on average over many lists, they take 1 / ln 2 times the memory. For a
        single list the unused pages at the end are never touched.
        """
        code = -(-codebooks // 2)
        return round((code / math.log(2) if lists > 1 else code) * vectors) + 8 * vectors + _LIST * lists

    def search(
        self, queries: NDArray[np.float32], k: int, *, lists: NDArray[np.int64], closeness: NDArray[np.float32], allowed: Bitmap | None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Find the nearest coded vectors in given lists, with FAISS's current number of threads.

        Args:
            queries: (Q, D) float32, contiguous.
            k: Maximum number of results per query.
            lists: Lists to search for each query, (Q, nprobe).
            closeness: Inner products of the queries with the centroids of these lists, (Q, nprobe).
            allowed: Labels that may be found, one boolean per label; None for all.

        Returns:
            Similarities, descending, and labels, (Q, k); labels are -1 after the last result.
        """
        if allowed is None:
            parameters = _probing(lists.shape[1])
        else:
            packed = np.packbits(allowed, bitorder="little")  # must outlive the selector, which does not copy it
            selector = _faiss.IDSelectorBitmap(len(allowed), _faiss.swig_ptr(packed))
            parameters = _faiss.SearchParametersIVF(nprobe=lists.shape[1], sel=selector)
        k = min(k, self._index.ntotal)
        similarities, labels = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        pointers = [_faiss.swig_ptr(array) for array in (queries, lists, closeness, similarities, labels)]
        # FAISS's Python wrapper of this call takes no parameters; versions before 1.13 ignore nprobe in them.
        self._index.search_preassigned_c(len(queries), pointers[0], k, *pointers[1:], False, parameters)
        return similarities, labels


def _plain_lists(products: NDArray[np.float32], lists: int) -> Any:
    """FAISS index of unpacked codes with given codebooks, (M, 16, D / M), and empty lists."""
    width = products.shape[0] * products.shape[2]
    plain = _faiss.IndexIVFPQ(_faiss.IndexFlatIP(width), width, lists, len(products), 4, _faiss.METRIC_INNER_PRODUCT)
    _faiss.copy_array_to_vector(products.ravel(), plain.pq.centroids)
    plain.is_trained = True
    return plain


@lru_cache
def _probing(nprobe: int) -> Any:
    """Parameters of a search of nprobe lists, cached because creating them takes microseconds per search; FAISS only reads them."""
    return _faiss.SearchParametersIVF(nprobe=nprobe)


def train_codebooks(residuals: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """Train the codebooks of a product quantizer with 4-bit codes, (D / width, 16, width)."""
    dim = residuals.shape[1]
    quantizer = _faiss.ProductQuantizer(dim, dim // width, 4)
    quantizer.cp.min_points_per_centroid = 1  # avoids FAISS's warning
    # With fewer vectors than codewords, some vectors are repeated.
    quantizer.train(np.ascontiguousarray(np.resize(residuals, (max(len(residuals), CODEWORDS), dim))))
    found: NDArray[np.float32] = _faiss.vector_to_array(quantizer.centroids).reshape(-1, CODEWORDS, width)
    return found


def train_codebook(points: NDArray[np.float32], *, bits: int) -> NDArray[np.float32]:
    """Compute the codewords of one codebook by k-means, (2^bits, D)."""
    quantizer = _faiss.ProductQuantizer(points.shape[1], 1, bits)
    quantizer.train(np.ascontiguousarray(points))
    found: NDArray[np.float32] = _faiss.vector_to_array(quantizer.centroids).reshape(1 << bits, points.shape[1])
    return found


def product_quantizer(products: NDArray[np.float32]) -> Any:
    """FAISS product quantizer with given codebooks, (M, 16, D / M)."""
    quantizer = _faiss.ProductQuantizer(products.shape[0] * products.shape[2], len(products), 4)
    _faiss.copy_array_to_vector(products.ravel(), quantizer.centroids)
    return quantizer
