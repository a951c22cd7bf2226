"""Inner loops of search and encoding, compiled by numba; import them from `quiver.retrieval.index.kernels`.

Sums have the same terms in the same order for any batch: codes, assignments and scores of a document do not depend on the documents that
are processed with it. The tests compare every function with a NumPy reference.

``_products`` and ``_roofs`` use LLVM's vector types because the compiler does not keep an array of sums in registers. A processor with AVX2
holds twelve vectors of eight sums in addition to the operands; such products run twice as fast as OpenBLAS's on these narrow shapes.

Shapes: n vectors, T tokens, K centroids, m documents, P rows, d width, L groups of 16 query tokens or centroids, k hits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from quiver.encoder.cpu.jit import jit
from quiver.retrieval.index.kernels.packing import CELLS, SPAN

# Size of a cache line in bytes.
_CACHE_LINE = 64

__all__ = ["aggregate", "best", "estimate", "inner_products", "nearest", "nearest_of", "probe", "quantise", "score", "ward"]

# numba's type stubs lack its code generation helpers.
_cgutils: Any = cgutils

LANES = 16
# Number of vectors that are multiplied with 16 lanes at a time.
_ROWS = 6
# Number of 16-bit lanes that `estimate` adds at a time, the number of steps of its tables, and the least bound that is scaled.
_WIDE = 2 * LANES
_STEPS = 32_000
_LEAST = 1e-30


@jit
def quantise(
    residuals: NDArray[np.float32], pairs: NDArray[np.float32], cells: NDArray[np.uint8], rounds: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantize residuals to codes and scales: a residual is its scale times codewords of two coordinates each.

    The first codes are those of the residual divided by its root mean square; the scale is then the one of least squared error for the
    codes. Each further round computes the codes of the residual divided by that scale.

    Args:
        residuals: (n, d) float32, d even.
        pairs: Codebook of pairs, (2^width, 2).
        cells: Nearest codeword of each cell, from `quiver.retrieval.index.kernels.packing.cells`.
        rounds: At least 1.

    Returns:
        Codes, (n, d / 2), and scales >= 0, (n,) float32; the scale of a zero residual is zero.
    """
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
    """The cell of a value divided by a scale."""
    place = (value / scale if scale > 0 else np.float32(0)) + np.float32(SPAN)
    place *= np.float32(CELLS / (2 * SPAN))
    return int(min(max(place, np.float32(0)), np.float32(CELLS - 1)))


@partial(jit, reordered=True)
def inner_products(
    codes: NDArray[np.signedinteger[Any]], scales: NDArray[np.float32], rows: NDArray[np.int64], weights: NDArray[np.float64], offset: float
) -> NDArray[np.float64]:
    """Inner products of one query with vectors that are stored as codes and one scale each.

    The product of a row does not depend on the other rows.

    Args:
        codes: (P, d) int8 or int16.
        scales: (P,).
        rows: Rows to score, (n,).
        weights: The query, (d,) float64.
        offset: Number added to every product.

    Returns:
        (n,) float64.
    """
    width, line = codes.shape[1], max(1, _CACHE_LINE // codes.itemsize)
    found = np.empty(len(rows), np.float64)
    # Reading all rows before they are needed lets the processor fetch them in parallel; fetching them one by one takes twice the time.
    touched = 0.0
    for i in range(len(rows)):
        code = codes[rows[i]]
        for j in range(0, width, line):
            touched += np.float64(code[j])
        touched += np.float64(scales[rows[i]])
    found[:] = touched  # otherwise the compiler removes the loop
    for i in range(len(rows)):
        code, total = codes[rows[i]], 0.0
        for j in range(width):
            total += np.float64(code[j]) * weights[j]
        found[i] = total * np.float64(scales[rows[i]]) + offset
    return found


@jit
def best(scores: NDArray[np.float32], rows: NDArray[np.int64], ranks: NDArray[np.uint32], k: int) -> NDArray[np.int64]:
    """Positions of the greatest scores, best first; among equal scores the greater rank is first.

    Args:
        scores: (n,); NaN, from a damaged index, counts as minus infinity.
        rows: Row of each score, (n,), without duplicates.
        ranks: Rank of every row, (P,), without duplicates.
        k: Number of positions to return; all n if there are fewer.
    """
    size = min(k, len(scores))
    # A heap with the worst of the best hits on top. The scores are kept beside it and compared inline: a comparison function with three
    # array arguments makes this six times slower.
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
    """The k best of some rows by `inner_products` rounded to float32, in the order of `best`; see these for the arguments.

    Returns:
        Rows and scores, (k,) or fewer, and the least score of all n without NaN; infinity if there is none.
    """
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
    """Replace the heap entry at ``at`` and sift it down."""
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
    """Estimate the scores of the documents whose tokens were retrieved for the tokens of a query.

    The best similarity of a document with a query token is known if the token retrieved the document. If not, it is at most the least
    similarity that the token retrieved; a value somewhat below that is used instead.

    Args:
        similarities: Similarities of the retrieved tokens, (n, k) float32, descending in each row.
        rows: Documents of these tokens, (n, k) int64; -1 at the end of a row with fewer than k tokens.
        below: Distance of the substitute from the least similarity, as a fraction of the range of the token's similarities.

    Returns:
        Documents, (m,), without duplicates, in the order in which they were found, and their scores, (m,).

    Source:
        XTR, arXiv:2304.01982, section 3.2 (missing similarity imputation).
    """
    n, k = rows.shape
    capacity = 64
    while capacity < 2 * n * k:
        capacity *= 2
    slots = np.full(capacity, -1, np.int64)  # an open hash table: slot -> position of the document in ``found``
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
            if seen[document] != token:  # the first similarity is the best, because they are in descending order
                seen[document] = token
                totals[document] += np.float64(similarities[token, place]) - floor
    return found[:count].copy(), (totals[:count] + missing).astype(np.float32)


@jit
def ward(distances: NDArray[np.float64], clusters: int) -> NDArray[np.int64]:
    """Ward clustering: repeatedly merge the two clusters whose union has the least variance.

    Args:
        distances: Squared distances of all pairs, (n, n); overwritten.
        clusters: Number of clusters to stop at, 1 to n.

    Returns:
        For each point, the first point of its cluster, (n,).

    Source:
        J. H. Ward, Hierarchical grouping to optimize an objective function, 1963, in the recurrence of Lance and Williams.
    """
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


def _emit_products(_context: Any, rows: Any, lanes: Any, sums: Any, width: Any) -> Any:
    """``sums = rows @ lanes``: (6, d) by (d, 16), all float32 and contiguous; each sum runs over d in order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointers = [
            context.make_array(kind)(context, builder, value).data for kind, value in zip(signature.args[:3], arguments[:3], strict=True)
        ]
        left, right, out = pointers
        size, zero = arguments[3], ir.Constant(ir.IntType(32), 0)
        vector = ir.VectorType(ir.FloatType(), LANES)
        spread = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        unset = ir.Constant(vector, ir.Undefined)
        totals = [_cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * LANES)) for _ in range(_ROWS)]

        def vector_at(base: Any, place: Any) -> Any:
            return builder.bitcast(builder.gep(base, [place]), vector.as_pointer())

        with _cgutils.for_range(builder, size) as loop:
            lane = builder.load(vector_at(right, builder.mul(loop.index, ir.Constant(size.type, LANES))), align=4)
            for row, total in enumerate(totals):
                place = builder.add(builder.mul(size, ir.Constant(size.type, row)), loop.index)
                value = builder.load(builder.gep(left, [place]))
                value = builder.shuffle_vector(builder.insert_element(unset, value, zero), unset, spread)
                product = builder.fmul(value, lane, flags=("contract",))
                builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
        for row, total in enumerate(totals):
            builder.store(builder.load(total), vector_at(out, ir.Constant(size.type, row * LANES)), align=4)
        return context.get_dummy_value()

    return numba.types.void(rows, lanes, sums, width), generate


_products: Any = intrinsic(_emit_products)


def _emit_roofs(_context: Any, entries: Any, numbers: Any, count: Any, means: Any, books: Any, best: Any) -> Any:
    """Raise ``best``, (32,) int16, to the maximum over tokens of the sums of their table rows.

    ``numbers``, (tokens,), point into ``means``, (K, 32) int16; ``entries``, (tokens, d / 4) uint16, into ``books``, (4 d, 32) int16.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrays = [context.make_array(signature.args[place])(context, builder, arguments[place]) for place in (0, 1, 3, 4, 5)]
        places, centroids, first_table, second_table, out = (array.data for array in arrays)
        size = builder.extract_value(arrays[0].shape, 1)  # entries per token, a multiple of two
        vector = ir.VectorType(ir.IntType(16), _WIDE)

        def constant(value: int) -> Any:
            return ir.Constant(size.type, value)

        def row_at(base: Any, row: Any) -> Any:
            return builder.bitcast(builder.gep(base, [builder.mul(row, constant(_WIDE))]), vector.as_pointer())

        roof = _cgutils.alloca_once_value(builder, builder.load(row_at(out, constant(0)), align=2))
        with _cgutils.for_range(builder, arguments[2]) as token:
            number, begin = builder.load(builder.gep(centroids, [token.index])), builder.mul(token.index, size)
            # Two sums, so that an addition does not wait for the one before.
            starts = builder.load(row_at(first_table, number), align=2), ir.Constant(vector, None)
            totals = [_cgutils.alloca_once_value(builder, start) for start in starts]
            with _cgutils.for_range(builder, builder.lshr(size, constant(1))) as pair:
                for half, total in enumerate(totals):
                    place = builder.add(begin, builder.add(builder.mul(pair.index, constant(2)), constant(half)))
                    entry = builder.zext(builder.load(builder.gep(places, [place])), size.type)
                    builder.store(builder.add(builder.load(total), builder.load(row_at(second_table, entry), align=2)), total)
            met, known = builder.add(*(builder.load(total) for total in totals)), builder.load(roof)
            builder.store(builder.select(builder.icmp_signed(">", met, known), met, known), roof)
        builder.store(builder.load(roof), row_at(out, constant(0)), align=2)
        return context.get_dummy_value()

    return numba.types.void(entries, numbers, count, means, books, best), generate


_roofs: Any = intrinsic(_emit_roofs)


@jit
def nearest(
    vectors: NDArray[np.float32],
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    lanes: NDArray[np.float32],
    half_squares: NDArray[np.float32],
) -> NDArray[np.int64]:
    """The nearest centroid of each vector within a range of centroids.

    Args:
        vectors: (n, d) float32; fast if neighbouring vectors have the same range.
        first: First allowed centroid of each vector, (n,).
        last: One past the last allowed centroid, (n,), greater than ``first``.
        lanes: The centroids, (L, d, 16), from `quiver.retrieval.index.kernels.packing.lanes`.
        half_squares: Half the squared length of each centroid, (K,).

    Returns:
        Centroid numbers, (n,); the first of several equally near ones.
    """
    n, d = vectors.shape
    found: NDArray[np.int64] = first.copy()  # the result if all products are NaN
    block, sums = np.zeros((_ROWS, d), np.float32), np.empty((_ROWS, LANES), np.float32)
    best = np.empty(_ROWS, np.float32)
    begin = 0
    while begin < n:
        end = begin + 1
        while end < n and end - begin < _ROWS and first[end] == first[begin] and last[end] == last[begin]:
            end += 1
        block[: end - begin] = vectors[begin:end]
        best[:] = -np.inf
        for group in range(first[begin] // LANES, (last[begin] - 1) // LANES + 1):
            _products(block, lanes[group], sums, d)
            lowest, highest = max(first[begin], group * LANES), min(last[begin], (group + 1) * LANES)
            for row in range(end - begin):
                for centroid in range(lowest, highest):
                    value = sums[row, centroid - group * LANES] - half_squares[centroid]
                    if value > best[row]:
                        best[row] = value
                        found[begin + row] = centroid
        begin = end
    return found


@jit
def probe(
    query: NDArray[np.float32], lanes: NDArray[np.float32], centroids: int, count: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """Inner products of query tokens with all centroids, and the centroids with the greatest products.

    Args:
        query: (n, d) float32.
        lanes: The centroids, (L, d, 16), from `quiver.retrieval.index.kernels.packing.lanes`.
        centroids: Number of centroids K; further lanes are padding.
        count: Number of centroids to return per token, 1 to K.

    Returns:
        Numbers of the best centroids, (n, count), unordered; their inner products, (n, count); and the inner products with all centroids,
        (n / 16, K, 16), zero in padded lanes.
    """
    n, d = query.shape
    similarities = np.zeros(((n + LANES - 1) // LANES, centroids, LANES), np.float32)
    found = np.zeros((n, count), np.int64)
    products = np.full((n, count), -np.inf, np.float32)  # ascending in each row while it is filled
    block, sums = np.zeros((_ROWS, d), np.float32), np.empty((_ROWS, LANES), np.float32)
    for begin in range(0, n, _ROWS):
        rows = min(_ROWS, n - begin)
        block[:rows] = query[begin : begin + rows]
        for group in range(len(lanes)):
            _products(block, lanes[group], sums, d)
            for row in range(rows):
                best, numbers = products[begin + row], found[begin + row]
                column = similarities[(begin + row) // LANES, group * LANES :, (begin + row) % LANES]
                for lane in range(min(LANES, centroids - group * LANES)):
                    value = sums[row, lane]
                    column[lane] = value
                    if value > best[0]:
                        place = 1
                        while place < count and best[place] < value:
                            best[place - 1], numbers[place - 1] = best[place], numbers[place]
                            place += 1
                        best[place - 1], numbers[place - 1] = value, group * LANES + lane
    return found, products, similarities


@jit
def _numbers(coarse: NDArray[np.uint8], codes: int, begin: int, count: int, centroids: int, numbers: NDArray[np.int64]) -> bool:
    """Read the centroid numbers of some tokens; return whether all of them are valid, which only a damaged file violates."""
    known = True
    for row in range(count):
        number = 0
        for place in range(coarse.shape[1] - codes):
            number |= np.int64(coarse[begin + row, codes + place]) << (8 * place)
        if number >= centroids:  # do not read beyond the table
            number, known = 0, False
        numbers[row] = number
    return known


@jit
def _entries(coarse: NDArray[np.uint8], begin: int, count: int, entries: NDArray[np.uint16]) -> None:
    """Row numbers of the product codes of some tokens in a table of the codewords of all books."""
    for row in range(count):
        token, out = coarse[begin + row], entries[row]
        for place in range(len(out) // 2):
            out[2 * place] = 32 * place + (token[place] & np.uint8(15))
            out[2 * place + 1] = 32 * place + 16 + (token[place] >> np.uint8(4))


@jit
def estimate(
    coarse: NDArray[np.uint8],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    similarities: NDArray[np.float32],
    table: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Approximate MaxSim of a query with documents from their coarse codes, using 16-bit tables of similarities.

    A similarity is at most the greatest one with a centroid plus the greatest one with a codeword of each book; that sum is represented by
    32,000 steps. ``table`` has the similarities of the query tokens with the product codewords, (L, d / 4, 16, 16): 16 codewords, 16 query
    tokens; for the other arguments, see `score`.

    Returns:
        (m,); minus infinity for a document without tokens, NaN for a document with an invalid centroid number, and NaN for all documents
        if a table is not finite.
    """
    groups, books, _, _ = table.shape
    bound = np.float64(_highest(similarities.ravel()))
    for book in range(books):
        greatest = np.float32(0)
        for group in range(groups):
            greatest = max(greatest, _highest(table[group, book].ravel()))
        bound += np.float64(greatest)
    scores = np.full(len(begins), -np.inf, np.float32)
    if not np.isfinite(bound):
        scores[ends > begins] = np.nan
        return scores
    steps = np.float32(_STEPS / bound) if bound > _LEAST else np.float32(1)
    means, codewords = _rounded(similarities, steps), _rounded(table.reshape(groups, 16 * books, LANES), steps)
    longest = 0
    for document in range(len(begins)):
        longest = max(longest, ends[document] - begins[document])
    numbers, entries, best = np.empty(longest, np.int64), np.empty((longest, books), np.uint16), np.empty(_WIDE, np.int16)
    for document in range(len(begins)):
        count, total = ends[document] - begins[document], 0
        if not count:
            continue
        known = _numbers(coarse, books // 2, begins[document], count, similarities.shape[1], numbers)
        _entries(coarse, begins[document], count, entries)
        for pair in range(len(means)):
            best[:] = -32_768
            _roofs(entries, numbers, count, means[pair], codewords[pair], best)
            for lane in range(_WIDE):
                total += np.int64(best[lane])
        scores[document] = np.float32(total) / steps if known else np.float32(np.nan)
    return scores


@jit
def _highest(values: NDArray[np.float32]) -> float:
    """The greatest magnitude; 0 for an empty array."""
    highest: float = np.float32(0)
    for value in values:
        highest = max(highest, abs(value))
    return highest


@jit
def _rounded(values: NDArray[np.float32], steps: float) -> NDArray[np.int16]:
    """Round groups of 16 lanes to whole steps and join them in pairs; an odd last group is joined with zeros."""
    groups, rows, _ = values.shape
    rounded = np.zeros(((groups + 1) // 2, rows, _WIDE), np.int16)
    for group in range(groups):
        for row in range(rows):
            for lane in range(LANES):
                rounded[group // 2, row, group % 2 * LANES + lane] = np.int16(np.rint(values[group, row, lane] * steps))
    return rounded


@jit
def _decode(code: NDArray[np.uint8], width: int, pairs: NDArray[np.uint64], out: NDArray[np.uint64]) -> None:
    """Decode the codewords of one token; a 64-bit number holds two coordinates."""
    if width == 8:
        for place in range(len(out)):
            out[place] = pairs[code[place]]
    elif width == 7:
        _decode_sevens(code, pairs, out)
    elif width == 6:
        for group in range(len(out) // 4):
            word = (
                np.uint32(code[3 * group])
                | np.uint32(code[3 * group + 1]) << np.uint32(8)
                | np.uint32(code[3 * group + 2]) << np.uint32(16)
            )
            for part in range(4):
                out[4 * group + part] = pairs[(word >> np.uint32(6 * part)) & np.uint32(63)]
    else:
        for place in range(len(out) // 2):
            out[2 * place] = pairs[code[place] & np.uint8(15)]
            out[2 * place + 1] = pairs[code[place] >> np.uint8(4)]


@jit
def _decode_sevens(code: NDArray[np.uint8], pairs: NDArray[np.uint64], out: NDArray[np.uint64]) -> None:
    """`_decode` for 7-bit codes, eight of which take seven bytes."""
    for group in range(len(out) // 8):
        word = np.uint64(0)
        for byte in range(7):
            word |= np.uint64(code[7 * group + byte]) << np.uint64(8 * byte)
        for part in range(8):
            out[8 * group + part] = pairs[(word >> np.uint64(7 * part)) & np.uint64(127)]


@jit
def _half_precision(bits: int, powers: NDArray[np.float32]) -> float:
    """Convert the bits of a non-negative half-precision number; numba has no such type."""
    exponent, fraction = (bits >> 10) & 31, bits & 1023
    value: float = np.float32(fraction if exponent == 0 else fraction + 1024) * powers[max(exponent, 1)]
    return value


@jit
def _product(code: NDArray[np.uint8], codewords: NDArray[np.uint64], out: NDArray[np.uint64]) -> None:
    """Decode one product code; a 64-bit number holds two coordinates."""
    for place in range(len(out) // 4):
        low, high = code[place] & np.uint8(15), code[place] >> np.uint8(4)
        out[4 * place] = codewords[2 * place, low, 0]
        out[4 * place + 1] = codewords[2 * place, low, 1]
        out[4 * place + 2] = codewords[2 * place + 1, high, 0]
        out[4 * place + 3] = codewords[2 * place + 1, high, 1]


@jit
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
    """MaxSim of a query with documents whose tokens are decoded during the computation.

    Args:
        coarse: Product code and centroid number of each token, (T, d / 8 + 2 or 4).
        fine: Codes and scale of each token, (T, d / 2 * width / 8 + 2).
        begins: First token of each document, (m,).
        ends: One past the last token of each document, (m,).
        similarities: Similarities of the query tokens with all centroids, (L, K, 16), from `probe`.
        products: Codebooks of the product codes, (d / 4, 16, 4).
        pairs: Codebook of pairs, (2^width, 2).
        query: (L, d, 16), from `quiver.retrieval.index.kernels.packing.lanes`; padded lanes add nothing.

    Returns:
        (m,); minus infinity for a document without tokens, NaN for a document with an invalid centroid number.
    """
    groups, d, _ = query.shape
    width = 4 if len(pairs) == 16 else 6 if len(pairs) == 64 else 7 if len(pairs) == 128 else 8
    fine_codes, codes, centroids = d * width // 16, d // 8, similarities.shape[1]
    levels, codewords = pairs.view(np.uint64).ravel(), products.view(np.uint64)
    powers = np.array([np.float32(2.0 ** (exponent - 25)) for exponent in range(32)], np.float32)
    block, sums = np.zeros((_ROWS, d), np.float32), np.empty((_ROWS, LANES), np.float32)
    words, numbers, best = block.view(np.uint64), np.empty(_ROWS, np.int64), np.empty((groups, LANES), np.float32)
    product = np.empty(d, np.float32)
    product_words = product.view(np.uint64)
    scores = np.empty(len(begins), np.float32)
    for document in range(len(begins)):
        best[:] = -np.inf
        known = True
        for begin in range(begins[document], ends[document], _ROWS):
            count = min(_ROWS, ends[document] - begin)
            known &= _numbers(coarse, codes, begin, count, centroids, numbers)
            for row in range(count):
                token, vector = fine[begin + row], block[row]
                _decode(token, width, levels, words[row])
                _product(coarse[begin + row], codewords, product_words)
                scale = _half_precision(np.int64(token[fine_codes]) | np.int64(token[fine_codes + 1]) << 8, powers)
                for j in range(d):
                    vector[j] = product[j] + scale * vector[j]
            for group in range(groups):
                _products(block, query[group], sums, d)
                for row in range(count):
                    mean = similarities[group, numbers[row]]
                    for lane in range(LANES):
                        value = mean[lane] + sums[row, lane]
                        best[group, lane] = value if value > best[group, lane] else best[group, lane]
        scores[document] = best.sum() if known else np.float32(np.nan)
    return scores
