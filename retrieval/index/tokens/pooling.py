"""Token pooling: like vectors of a document are merged into their mean, so that fewer are kept.

A pool factor of 2 halves an index and costs next to nothing; 3 and 4 cost a few percent. The first vector of a document is that of its
classification token, which summarises the text: it is kept as it is, as PyLate does.

Shapes: n vectors, m documents, d width.
Source: B. Clavié et al., Reducing the footprint of multi-vector retrieval, arXiv:2409.14683 (hierarchical clustering by Ward's method).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.kernels.choice import kernels

_PROTECTED = 1
WINDOW = 1024
"""Vectors that are merged among each other; a longer document is taken in pieces, since all pairs of a piece are held."""


def pool(
    vectors: NDArray[np.float32], lengths: NDArray[np.int64], token_ids: NDArray[np.uint32] | None, *, factor: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.uint32] | None]:
    """Merge the vectors of each document.

    Args:
        vectors: Unit vectors, (n, d), document after document.
        lengths: Vectors of each document, (m,).
        token_ids: Which token each vector is of, (n,), if known.
        factor: Of the vectors of a document, but the first, one in so many is left, and one at least of every `WINDOW` that follow
            each other.

    Returns:
        Vectors of unit length, lengths, and for each vector the token that is nearest to it among those it stands for.
    """
    parts, ids, counts = [], [], []
    ends = np.cumsum(lengths)
    for end, length in zip(ends.tolist(), lengths.tolist(), strict=True):
        document = vectors[end - length : end]
        labels = _clusters(document, factor)
        heads, labels = np.unique(labels, return_inverse=True)
        means = np.zeros((len(heads), vectors.shape[1]))
        np.add.at(means, labels, document.astype(np.float64))
        norms = np.linalg.norm(means, axis=1, keepdims=True)
        # Opposite vectors may cancel out; then the first of them stands for all.
        means = np.where(norms > 0, means / np.where(norms > 0, norms, 1), document[heads])
        single = np.bincount(labels, minlength=len(heads)) == 1
        merged = np.where(single[:, None], document[heads], means).astype(np.float32)
        parts.append(merged)
        counts.append(len(heads))
        if token_ids is not None:
            closeness = np.einsum("nd,nd->n", document, merged[labels])
            order = np.lexsort((-closeness, labels))
            ids.append(token_ids[end - length : end][order[np.searchsorted(labels[order], np.arange(len(heads)))]])
    pooled = np.concatenate([np.empty((0, vectors.shape[1]), np.float32), *parts])
    kept = None if token_ids is None else np.concatenate([np.empty(0, np.uint32), *ids])
    return pooled, np.array(counts, np.int64), kept


def _clusters(document: NDArray[np.float32], factor: int) -> NDArray[np.int64]:
    """For each vector the first of its cluster."""
    labels = np.arange(len(document))
    for begin in range(_PROTECTED, len(document), WINDOW):
        free = document[begin : begin + WINDOW].astype(np.float64)
        count = max(1, len(free) // factor)
        if len(free) > count:
            squares = (free * free).sum(axis=1)
            distances = np.maximum(squares[:, None] + squares - 2 * free @ free.T, 0)
            labels[begin : begin + WINDOW] = begin + kernels().ward(distances, count)
    return labels
