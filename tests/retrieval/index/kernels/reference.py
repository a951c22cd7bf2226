"""What the compiled loops compute, in NumPy: the oracle that they are tested against.

Codes, scales, clusters and decoded vectors are equal to the last bit. Similarities are summed in another order, so that scores differ in
their last bits, and an assignment may differ where two centroids are equally near. The contracts are those of
`quiver.retrieval.index.kernels.choice.Kernels`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.kernels.packing import CELLS, LANES, SPAN, centroid_numbers, code_digits, fine_part, product

# Products of vectors and centroids that are held at a time.
_PRODUCTS = 1 << 22
# Steps of estimates on either side of zero: what a number of 16 bits holds, and room for rounding.
_STEPS = 32_000
# Below it all similarities are taken for zero: as many steps of them would not fit into float32.
_LEAST = 1e-30


def quantise(
    residuals: NDArray[np.float32], pairs: NDArray[np.float32], cells: NDArray[np.uint8], rounds: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantize residuals: codes of coordinate pairs and one scale per vector, such that scale times codewords approximates them.

    The first codes are those of the residual divided by its root mean square; the scale then minimizes the squared error for the
    codes. Each further round recomputes the codes with that scale.

    Args:
        residuals: (n, d) float32, d even.
        pairs: Codebook of pairs, (2^width, 2).
        cells: Nearest codeword of each grid cell, see `quiver.retrieval.index.kernels.packing.cells`.
        rounds: Number of rounds, at least 1.

    Returns:
        Codes, (n, d / 2), and scales >= 0, (n,) float32; the scale of a residual of zeros is zero.
    """
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


def nearest(
    vectors: NDArray[np.float32],
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    lanes: NDArray[np.float32],
    half_squares: NDArray[np.float32],
) -> NDArray[np.int64]:
    """Find the nearest centroid of each vector within its own range of centroids.

    Args:
        vectors: (n, d) float32; faster if neighbouring vectors have the same range.
        first: First centroid that may be chosen, (n,).
        last: One past the last, (n,), greater than ``first``.
        lanes: The centroids, (L, d, 16), as `quiver.retrieval.index.kernels.packing.lanes` arranges them.
        half_squares: Half the squared length of each centroid, (K,).

    Returns:
        Numbers of centroids, (n,); ties go to the first.
    """
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


def probe(
    query: NDArray[np.float32], lanes: NDArray[np.float32], centroids: int, count: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """Compute inner products with all centroids, and find the centroids with the greatest.

    Args:
        query: (n, d) float32.
        lanes: The centroids, (L, d, 16), as `quiver.retrieval.index.kernels.packing.lanes` arranges them.
        centroids: Number K of centroids; later lanes are padding.
        count: Number of centroids to find per vector, 1 to K.

    Returns:
        Numbers of the nearest centroids, (n, count), unordered; their inner products, (n, count); and those with all centroids,
        (n / 16, K, 16), zeros in padding lanes.
    """
    products = query @ lanes.transpose(1, 0, 2).reshape(query.shape[1], -1)[:, :centroids]
    found = np.argpartition(-products, count - 1, axis=1)[:, :count].astype(np.int64)
    padded = np.zeros((-(-len(query) // LANES) * LANES, centroids), np.float32)
    padded[: len(query)] = products
    similarities = np.ascontiguousarray(padded.reshape(-1, LANES, centroids).transpose(0, 2, 1))
    return found, np.take_along_axis(products, found, axis=1), similarities


def estimate(
    coarse: NDArray[np.uint8],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    similarities: NDArray[np.float32],
    table: NDArray[np.float32],
) -> NDArray[np.float32]:
    """MaxSim of a query with the vectors that the coarse parts encode, from tables of similarities quantized to 16 bits.

    The range of 32,000 steps covers the greatest similarity with a centroid plus the greatest with a codeword of each codebook.

    Args:
        coarse: Product code and centroid of each token, (T, d / 8 + 2 or 4).
        begins: First token of each document, (m,).
        ends: One past its last token, (m,).
        similarities: Inner products of the query's tokens with all centroids, (L, K, 16), as `probe` returns them.
        table: Inner products of the query's tokens with the product codewords, (L, d / 4, 16, 16): 16 codewords, 16 tokens.

    Returns:
        (m,); minus infinity for a document without a token, and no number for one with a centroid that does not exist, or for any where a
        table is not finite.
    """
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
    coarse: NDArray[np.uint8],
    fine: NDArray[np.uint8],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    similarities: NDArray[np.float32],
    products: NDArray[np.float32],
    pairs: NDArray[np.float32],
    query: NDArray[np.float32],
) -> NDArray[np.float32]:
    """MaxSim of a query with documents, decoding product and fine codes on the fly; centroids enter by their similarities.

    Args:
        coarse: Product code and centroid of each token, (T, d / 8 + 2 or 4).
        fine: Codes and scale of each token, (T, d / 2 * width / 8 + 2).
        begins: First token of each document, (m,).
        ends: One past its last token, (m,).
        similarities: Inner products of the query's tokens with all centroids, (L, K, 16), as `probe` returns them.
        products: Codebooks of the product codes, (d / 4, 16, 4).
        pairs: Codebook of pairs, (2^width, 2).
        query: (L, d, 16), as `quiver.retrieval.index.kernels.packing.lanes` arranges it; lanes of zeros add nothing.

    Returns:
        (m,); minus infinity for a document without tokens, and NaN for one that refers to an unknown centroid.
    """
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


def inner_products(
    codes: NDArray[np.signedinteger[Any]], scales: NDArray[np.float32], rows: NDArray[np.int64], weights: NDArray[np.float64], offset: float
) -> NDArray[np.float64]:
    """Inner products of one query with chosen vectors, each stored as codes and a scale.

    Args:
        codes: (P, d) int8 or int16.
        scales: (P,).
        rows: Row numbers of the vectors, (n,).
        weights: The query, (d,) float64.
        offset: Added to every product.

    Returns:
        (n,) float64; the result of a row does not depend on the other rows.
    """
    products: NDArray[np.float64] = (codes[rows].astype(np.float64) @ weights) * scales[rows] + offset
    return products


def best(scores: NDArray[np.float32], rows: NDArray[np.int64], ranks: NDArray[np.uint32], k: int) -> NDArray[np.int64]:
    """Places of the greatest scores, best first, of equal ones that with the greater rank.

    Args:
        scores: (n,); NaN, of a damaged index, counts as the least that there is.
        rows: The rows they are of, (n,), each once.
        ranks: Of all rows, (P,), no two equal.
        k: Places wanted; there are n at most.
    """
    return np.lexsort((ranks[rows], np.nan_to_num(scores, nan=-np.inf, posinf=np.inf, neginf=-np.inf)))[::-1][:k]


def nearest_of(
    codes: NDArray[np.signedinteger[Any]],
    scales: NDArray[np.float32],
    rows: NDArray[np.int64],
    weights: NDArray[np.float64],
    offset: float,
    ranks: NDArray[np.uint32],
    k: int,
) -> tuple[NDArray[np.int64], NDArray[np.float32], float]:
    """The k best of chosen coded vectors, by `inner_products` rounded to float32; ties go to the greater rank.

    Args:
        codes: See `inner_products`, also for the next four arguments.
        scales: (P,).
        rows: (n,), without repetitions.
        weights: (d,).
        offset: Added to every product.
        ranks: Rank of each row's document id, (P,).
        k: Number of hits.

    Returns:
        Rows and scores, (k,) or fewer, and the lowest score of all n without NaN; infinity if there is none.
    """
    scores = inner_products(codes, scales, rows, weights, offset).astype(np.float32)
    order = best(scores, rows, ranks, k)
    return rows[order], scores[order], float(np.fmin.reduce(scores, initial=np.inf))


def aggregate(similarities: NDArray[np.float32], rows: NDArray[np.int64], below: float) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Aggregate the document tokens found for each query token into documents with estimated scores.

    What a document's best similarity with a query token is, is known where that token met the document. Where it did not, it is at most
    the least similarity that the token met; what stands in for it is somewhat below that.

    Args:
        similarities: Similarities of the found tokens, (n, k) float32, descending in each row.
        rows: Their documents, (n, k) int64; -1 at the end of a row if fewer than k were found.
        below: Distance of the imputed value below the lowest similarity, as a share of the token's range of similarities.

    Returns:
        Documents, (m,), each once, in the order in which they were found, and their scores, (m,).

    Source:
        XTR, arXiv:2304.01982, section 3.2 (missing similarity imputation).
    """
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


def ward(distances: NDArray[np.float64], clusters: int) -> NDArray[np.int64]:
    """Cluster points hierarchically by Ward's method: repeatedly merge the two clusters whose union has the least variance.

    Args:
        distances: Squared distances of all pairs, (n, n); overwritten.
        clusters: Number of clusters to stop at, 1 to n.

    Returns:
        For each point the first point of its cluster, (n,).

    Source:
        J. H. Ward, Hierarchical grouping to optimize an objective function, 1963, in the recurrence of Lance and Williams.
    """
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
