"""Loops that numba compiles well as they are written; see `quiver.retrieval.index.kernels.jit`.

Shapes: n vectors, points or query tokens, d width, k tokens met.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.cpu.jit import jit
from quiver.retrieval.index.kernels.packing import CELLS, SPAN

# Bytes that come from memory together.
_CACHE_LINE = 64


@jit
def quantise(
    residuals: NDArray[np.float32], pairs: NDArray[np.float32], cells: NDArray[np.uint8], rounds: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes and scales of residuals; see ``reference``."""
    n, d = residuals.shape
    codes = np.empty((n, d // 2), np.uint8)
    scales = np.empty(n, np.float32)
    for i in range(n):
        row, code = residuals[i], codes[i]
        square = 0.0
        for j in range(d):
            square += np.float64(row[j]) * np.float64(row[j])
        scale = np.float32(np.sqrt(square / d))
        for _ in range(rounds):
            dot, norm = 0.0, 0.0
            for j in range(0, d, 2):
                found = cells[_cell(row[j], scale), _cell(row[j + 1], scale)]
                code[j // 2] = found
                for part in range(2):
                    level = np.float64(pairs[found, part])
                    dot += np.float64(row[j + part]) * level
                    norm += level * level
            scale = np.float32(dot / norm) if norm > 0 else np.float32(0)
        scales[i] = scale
    return codes, scales


@jit
def _cell(value: float, scale: float) -> int:
    """The cell of a value over a scale."""
    place = (value / scale if scale > 0 else np.float32(0)) + np.float32(SPAN)
    place *= np.float32(CELLS / (2 * SPAN))
    return int(min(max(place, np.float32(0)), np.float32(CELLS - 1)))


@partial(jit, reordered=True)
def inner_products(
    codes: NDArray[np.signedinteger[Any]], scales: NDArray[np.float32], rows: NDArray[np.int64], weights: NDArray[np.float64], offset: float
) -> NDArray[np.float64]:
    """Inner products of one query with coded vectors; see ``reference``."""
    width, line = codes.shape[1], max(1, _CACHE_LINE // codes.itemsize)
    found = np.empty(len(rows), np.float64)
    # Read before they are needed, all rows come from memory side by side; one after the other they take twice the time.
    touched = 0.0
    for i in range(len(rows)):
        code = codes[rows[i]]
        for j in range(0, width, line):
            touched += np.float64(code[j])
        touched += np.float64(scales[rows[i]])
    found[:] = touched  # otherwise the compiler leaves it out
    for i in range(len(rows)):
        code, total = codes[rows[i]], 0.0
        for j in range(width):
            total += np.float64(code[j]) * weights[j]
        found[i] = total * np.float64(scales[rows[i]]) + offset
    return found


@jit
def best(scores: NDArray[np.float32], rows: NDArray[np.int64], ranks: NDArray[np.uint32], k: int) -> NDArray[np.int64]:
    """Places of the greatest scores, best first; see ``reference``."""
    size = min(k, len(scores))
    # The worst of the best is on top. Their scores lie beside them: looked up in one function and passed to no other, a comparison is
    # some instructions; a function of three arrays for it makes this six times slower.
    heap, top = np.empty(size, np.int64), np.empty(size, np.float32)
    least = np.float32(-np.inf)
    for place in range(size):
        score = scores[place]
        heap[place], top[place] = place, score if score == score else least
    for at in range(size // 2 - 1, -1, -1):
        _sink(heap, top, rows, ranks, at, size, heap[at], top[at])
    if size:
        for place in range(size, len(scores)):
            score = scores[place]
            if score != score:
                score = least
            if score > top[0] or (score == top[0] and ranks[rows[place]] > ranks[rows[heap[0]]]):
                _sink(heap, top, rows, ranks, 0, size, place, score)
    for last in range(size - 1, 0, -1):
        worst, score = heap[0], top[0]
        _sink(heap, top, rows, ranks, 0, last, heap[last], top[last])
        heap[last], top[last] = worst, score
    return heap


@jit
def nearest_of(
    codes: NDArray[np.signedinteger[Any]],
    scales: NDArray[np.float32],
    rows: NDArray[np.int64],
    weights: NDArray[np.float64],
    offset: float,
    ranks: NDArray[np.uint32],
    k: int,
) -> tuple[NDArray[np.int64], NDArray[np.float32], float]:
    """The best of some vectors; see ``reference``."""
    scores = inner_products(codes, scales, rows, weights, offset).astype(np.float32)
    order, least = best(scores, rows, ranks, k), np.inf
    for score in scores:
        if score < least:
            least = score
    return rows[order], scores[order], least


@jit
def _sink(
    heap: NDArray[np.int64],
    top: NDArray[np.float32],
    rows: NDArray[np.int64],
    ranks: NDArray[np.uint32],
    at: int,
    size: int,
    place: int,
    score: float,
) -> None:
    """Put a place into a heap, instead of what is at ``at``, and let it down to where it belongs."""
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size:
            left, right = top[child], top[child + 1]
            if right < left or (right == left and ranks[rows[heap[child + 1]]] < ranks[rows[heap[child]]]):
                child += 1
        if top[child] > score or (top[child] == score and ranks[rows[heap[child]]] > ranks[rows[place]]):
            break
        heap[at], top[at] = heap[child], top[child]
        at = child
    heap[at], top[at] = place, score


@jit
def aggregate(similarities: NDArray[np.float32], rows: NDArray[np.int64], below: float) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Documents met by the tokens of a query, with estimates of their scores; see ``reference``."""
    n, k = rows.shape
    capacity = 64
    while capacity < 2 * n * k:
        capacity *= 2
    slots = np.full(capacity, -1, np.int64)  # an open hash table: slot -> place of the document among those found
    found, seen = np.empty(n * k, np.int64), np.empty(n * k, np.int64)
    totals = np.empty(n * k, np.float64)
    count, missing = 0, 0.0
    for token in range(n):
        valid = 0
        while valid < k and rows[token, valid] >= 0:
            valid += 1
        if not valid:
            continue
        least = np.float64(similarities[token, valid - 1])
        floor = least - below * (np.float64(similarities[token, 0]) - least)
        missing += floor
        for place in range(valid):
            row = rows[token, place]
            slot = ((row * 0x9E3779B1) >> 7) & (capacity - 1)
            while slots[slot] >= 0 and found[slots[slot]] != row:
                slot = (slot + 1) & (capacity - 1)
            if slots[slot] < 0:
                slots[slot], found[count], seen[count], totals[count] = count, row, -1, 0.0
                count += 1
            document = slots[slot]
            if seen[document] != token:  # the first is the best: they come in descending order
                seen[document] = token
                totals[document] += np.float64(similarities[token, place]) - floor
    return found[:count].copy(), (totals[:count] + missing).astype(np.float32)


@jit
def ward(distances: NDArray[np.float64], clusters: int) -> NDArray[np.int64]:
    """Merge points until so many clusters are left; see ``reference``."""
    n = len(distances)
    sizes, labels, alive = np.ones(n), np.arange(n), np.ones(n, np.bool_)
    nearest_to = np.zeros(n, np.int64)
    for i in range(n):
        distances[i, i] = np.inf
        nearest_to[i] = np.argmin(distances[i])
    for _ in range(n - clusters):
        a = -1
        for i in range(n):
            if alive[i] and (a < 0 or distances[i, nearest_to[i]] < distances[a, nearest_to[a]]):
                a = i
        b = nearest_to[a]
        a, b = min(a, b), max(a, b)
        between = distances[a, b]
        for i in range(n):
            if alive[i] and i != a and i != b:
                merged = (sizes[a] + sizes[i]) * distances[a, i] + (sizes[b] + sizes[i]) * distances[b, i] - sizes[i] * between
                distances[a, i] = distances[i, a] = merged / (sizes[a] + sizes[b] + sizes[i])
        sizes[a] += sizes[b]
        alive[b] = False
        distances[b, :] = np.inf
        distances[:, b] = np.inf
        for i in range(n):
            if labels[i] == b:
                labels[i] = a
            if alive[i] and (i == a or nearest_to[i] == a or nearest_to[i] == b):
                nearest_to[i] = np.argmin(distances[i])
    return labels
