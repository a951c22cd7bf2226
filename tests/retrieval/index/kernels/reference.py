"""NumPy reference of the compiled loops; the tests compare both.

Codes, scales, clusters and decoded vectors are equal to the last bit. Similarities are summed in another order, so that scores differ in
their last bits, and an assignment may differ where two centroids are equally near. The contracts are the
docstrings of `quiver.retrieval.index.kernels.compiled`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.kernels.packing import CELLS, LANES, SPAN, centroid_numbers, code_digits, fine_part, product

Floats, Doubles, Ints, Bytes = NDArray[np.float32], NDArray[np.float64], NDArray[np.int64], NDArray[np.uint8]
# Products of vectors and centroids that are held at a time.
_PRODUCTS = 1 << 22
# Steps of estimates on either side of zero: what a number of 16 bits holds, and room for rounding.
_STEPS = 32_000
# Below it all similarities are taken for zero: as many steps of them would not fit into float32.
_LEAST = 1e-30


def quantise(residuals: Floats, pairs: Floats, cells: Bytes, rounds: int) -> tuple[Bytes, Floats]:
    """Codes and scales: alternate between the nearest codewords and the least-squares scale."""
    d = residuals.shape[1]
    columns = [residuals[:, j].astype(np.float64) for j in range(d)]
    square = np.zeros(len(residuals))
    for column in columns:  # in order, as the compiled loop adds
        square += column * column
    scales = np.sqrt(square / d).astype(np.float32)
    codes = np.zeros((len(residuals), d // 2), np.uint8)
    for _ in range(rounds):
        values = np.divide(residuals, scales[:, None], out=np.zeros_like(residuals), where=scales[:, None] > 0)
        places = np.clip((values + np.float32(SPAN)) * np.float32(CELLS / (2 * SPAN)), 0, CELLS - 1).astype(np.int64)
        codes = cells[places[:, ::2], places[:, 1::2]]
        dot, norm = np.zeros(len(residuals)), np.zeros(len(residuals))
        for j, column in enumerate(columns):
            level = pairs[codes[:, j // 2], j % 2].astype(np.float64)
            dot += column * level
            norm += level * level
        scales = np.divide(dot, norm, out=np.zeros_like(dot), where=norm > 0).astype(np.float32)
    return codes, scales


def nearest(vectors: Floats, first: Ints, last: Ints, lanes: Floats, half_squares: Floats) -> Ints:
    """Number of the nearest centroid in each vector's range."""
    found = np.empty(len(vectors), np.int64)
    if not len(vectors):
        return found
    centroids = lanes.transpose(0, 2, 1).reshape(-1, vectors.shape[1])
    heads = np.flatnonzero(np.append(True, (first[1:] != first[:-1]) | (last[1:] != last[:-1])))
    for head, end in zip(heads.tolist(), [*heads[1:].tolist(), len(vectors)], strict=True):
        low, high = int(first[head]), int(last[head])
        step = max(1, _PRODUCTS // (high - low))
        for begin in range(head, end, step):
            products = vectors[begin : min(begin + step, end)] @ centroids[low:high].T
            found[begin : begin + len(products)] = low + (products - half_squares[low:high]).argmax(axis=1)
    return found


def probe(query: Floats, lanes: Floats, centroids: int, count: int) -> tuple[Ints, Floats, Floats]:
    """All inner products, and those of the best centroids."""
    products = query @ lanes.transpose(1, 0, 2).reshape(query.shape[1], -1)[:, :centroids]
    found = np.argpartition(-products, count - 1, axis=1)[:, :count].astype(np.int64)
    padded = np.zeros((-(-len(query) // LANES) * LANES, centroids), np.float32)
    padded[: len(query)] = products
    similarities = np.ascontiguousarray(padded.reshape(-1, LANES, centroids).transpose(0, 2, 1))
    return found, np.take_along_axis(products, found, axis=1), similarities


def estimate(coarse: Bytes, begins: Ints, ends: Ints, similarities: Floats, table: Floats) -> Floats:
    """MaxSim over rounded tables."""
    books = table.shape[1]
    bound = float(np.abs(similarities).max(initial=0)) + sum(np.abs(table).max(axis=(0, 2, 3), initial=0).astype(np.float64).tolist())
    if not np.isfinite(bound):
        return np.where(ends > begins, np.nan, -np.inf).astype(np.float32)
    steps = np.float32(_STEPS / bound if bound > _LEAST else 1)
    similarities, table = np.rint(similarities * steps), np.rint(table * steps)  # whole numbers: their sums are exact
    scores = np.full(len(begins), -np.inf, np.float32)
    for document, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if begin < end:
            scores[document] = np.nan
            numbers = centroid_numbers(coarse[begin:end], 4 * books)
            if numbers.max() < similarities.shape[1]:
                digits = code_digits(coarse[begin:end, : books // 2])
                met = similarities[:, numbers] + table[:, np.arange(books), digits].sum(axis=2)  # (L, tokens, 16)
                scores[document] = met.max(axis=1).sum() / steps
    return scores


def score(
    coarse: Bytes, fine: Bytes, begins: Ints, ends: Ints, similarities: Floats, products: Floats, pairs: Floats, query: Floats
) -> Floats:
    """MaxSim over decoded tokens."""
    d, centroids = query.shape[1], similarities.shape[1]
    columns = query.transpose(1, 0, 2).reshape(d, -1)  # (d, 16 L)
    means = similarities.transpose(1, 0, 2).reshape(centroids, -1)  # (K, 16 L)
    scores = np.full(len(begins), -np.inf, np.float32)
    for document, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if begin < end:
            scores[document] = np.nan
            numbers = centroid_numbers(coarse[begin:end], d)
            if numbers.max() < centroids:
                rest = product(coarse[begin:end, : d // 8], products) + fine_part(fine[begin:end], pairs)
                scores[document] = (means[numbers] + rest @ columns).max(axis=0).sum()
    return scores


def inner_products(codes: NDArray[Any], scales: Floats, rows: Ints, weights: Doubles, offset: float) -> Doubles:
    """Inner products with decoded rows."""
    products: NDArray[np.float64] = (codes[rows].astype(np.float64) @ weights) * scales[rows] + offset
    return products


def best(scores: Floats, rows: Ints, ranks: NDArray[np.uint32], k: int) -> Ints:
    """Sort by score, then by rank, both descending."""
    return np.lexsort((ranks[rows], np.nan_to_num(scores, nan=-np.inf, posinf=np.inf, neginf=-np.inf)))[::-1][:k]


def nearest_of(
    codes: NDArray[Any], scales: Floats, rows: Ints, weights: Doubles, offset: float, ranks: NDArray[np.uint32], k: int
) -> tuple[Ints, Floats, float]:
    """Score, sort, cut."""
    scores = inner_products(codes, scales, rows, weights, offset).astype(np.float32)
    order = best(scores, rows, ranks, k)
    return rows[order], scores[order], float(np.fmin.reduce(scores, initial=np.inf))


def aggregate(similarities: Floats, rows: Ints, below: float) -> tuple[Ints, Floats]:
    """Sum the best known similarity of each query token, or its floor."""
    valid = (rows >= 0).sum(axis=1)
    tokens = np.flatnonzero(valid)
    if not len(tokens):
        return np.empty(0, np.int64), np.empty(0, np.float32)
    floors = similarities[tokens, valid[tokens] - 1].astype(np.float64)
    floors -= below * (similarities[tokens, 0].astype(np.float64) - floors)
    _, first, same = np.unique(rows[tokens], return_index=True, return_inverse=True)
    order = np.argsort(first)
    documents = np.argsort(order)[same].reshape(len(tokens), -1)
    found = rows[tokens].ravel()[first[order]]
    totals = np.zeros(len(found))
    for place, token in enumerate(tokens):
        met, best = np.unique(documents[place, : valid[token]], return_index=True)
        totals[met] += similarities[token, best].astype(np.float64) - floors[place]
    kept = found >= 0
    return found[kept], (totals[kept] + floors.sum()).astype(np.float32)


def ward(distances: Doubles, clusters: int) -> Ints:
    """Merge the closest pair and update its distances, n - clusters times."""
    n = len(distances)
    sizes, labels = np.ones(n), np.arange(n)
    np.fill_diagonal(distances, np.inf)
    for _ in range(n - clusters):
        a, b = divmod(int(distances.argmin()), n)
        others = np.isfinite(distances[a]) & np.isfinite(distances[b])
        size = sizes[others]
        merged = (sizes[a] + size) * distances[a, others] + (sizes[b] + size) * distances[b, others] - size * distances[a, b]
        distances[a, others] = distances[others, a] = merged / (sizes[a] + sizes[b] + size)
        sizes[a] += sizes[b]
        distances[b, :] = distances[:, b] = np.inf
        labels[labels == b] = a
    return labels
