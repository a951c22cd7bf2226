"""Centroids of vectors, and which of them each vector is next to.

Comparing every vector with every centroid takes days once there are many of both, so they are put into groups first, and k-means runs
inside each group:

    tokens      a group for every token of the vocabulary that is frequent enough; where the model says which token a vector is of
    two-level   a group for every cell of a coarse k-means, a few hundred of them
    flat        one group: k-means over everything, for small collections

The number of centroids of a group grows with the 3/4th power of its size: a frequent token needs more of them, though not in proportion.
A vector is assigned to the nearest centroid of its group; one of a token that has no group, to the nearest of all.

Shapes: n vectors, K centroids, G groups, d width.
Source: token-aware clustering, TACHIOM, arXiv:2604.28142.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import faiss
import numpy as np
from numpy.typing import NDArray

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
