"""Tile operations of the attention kernels, sized for a core's registers and first-level cache.

Lanes of a tile are queries: scores are (keys, LANES), queries and weighted values ("mixtures") (K, LANES). bfloat16 heads are multiplied in
pairs: neighbouring values of a query and a key, neighbouring keys of a weight and a value. Their tiles have half the rows; scores, results
and sums are float32. The argument ``kind`` is `FLOAT32` or `BFLOAT16`.

Shapes: LANES queries, n keys, K head width (a multiple of 16, for bfloat16 32), C rows of a tile of queries (K, for bfloat16 K / 2).
Source: FlashAttention, arXiv:2205.14135, algorithm 1 (the running maximum and sum); that a maximum may lag by a factor of 256 is an idea of
FlashAttention-4; the layout is our own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from quiver.encoder.cpu.codegen import (
    AMX_ROWS,
    FLOAT,
    INT,
    INTS,
    LANES,
    LONG,
    ROW_PLACES,
    ROWS,
    VECTORS,
    WIDTH,
    Code,
    amx_product,
    emitted,
    every,
    is_bfloat16,
    long,
    uses_amx,
)

MASKED = -3e38
"""Score of a masked key."""

SLACK = 8.0
"""How far a score may exceed the running maximum before that is raised: the power of two, at most 256, loses no bits of a sum, and most
panels of keys need no rescaling.
"""


def _scores(code: Code, kind: Any, queries: Any, keys: Any, stride: Any, count: Any, columns: Any, out: Any) -> None:
    """Compute scores (n, LANES) of n keys with a tile of queries (C, LANES); writes up to the next multiple of 16 rows."""
    if uses_amx(kind):
        rows = code.builder.and_(code.place(count, long(AMX_ROWS - 1)), long(-AMX_ROWS))
        amx_product(code, kind, keys, stride, (rows, columns), queries, out, add=False)
        return
    queries, keys, out = (code.numbers(address) for address in (queries, keys, out))
    multiply = code.add_pairs if is_bfloat16(kind) else code.fma
    tiles = code.builder.udiv(code.place(count, long(ROWS - 1)), long(ROWS))
    with code.loop(tiles) as tile:
        first = code.place((tile.index, long(ROWS)))
        rows = [code.no_further(code.place(first, long(row)), count) for row in range(ROWS)]
        starts = [code.at(keys, code.place((row, stride))) for row in rows]
        target = code.at(out, code.place((first, long(LANES))))
        code.product(starts, columns, long(1), queries, [every(0.0)] * len(ROW_PLACES), target, multiply=multiply)


def _mixture(code: Code, kind: Any, values: Any, stride: Any, count: Any, width: Any, weights: Any, out: Any) -> None:
    """Add n values with weights (n, LANES) to a tile (K, LANES). For bfloat16 the count is n / 2 and values are columns, (K, n / 2)."""
    if uses_amx(kind):
        columns = code.builder.and_(code.place(count, long(AMX_ROWS - 1)), long(-AMX_ROWS))
        amx_product(code, kind, values, stride, (width, columns), weights, out, add=True)
        return
    values, weights, out = (code.numbers(address) for address in (values, weights, out))
    multiply = code.add_pairs if is_bfloat16(kind) else code.fma
    with code.loop(code.builder.udiv(width, long(ROWS))) as tile:
        first = code.place((tile.index, long(ROWS)))
        rows = [code.place(first, long(row)) for row in range(ROWS)]
        starts = [code.at(values, code.place((row, stride)) if is_bfloat16(kind) else row) for row in rows]
        target = code.at(out, code.place((first, long(LANES))))
        step = long(1) if is_bfloat16(kind) else stride
        code.product(starts, count, step, weights, [code.load(target, place) for place in ROW_PLACES], target, multiply=multiply)


def _pair_values(code: Code, values: Any, stride: Any, count: Any, columns: Any, room: Any, out: Any) -> None:
    """Transpose n bfloat16 values to columns of pairs of neighbouring keys, (K, n / 2), with ``room`` pairs per row, a multiple of 16.

    Zeros follow up to the next multiple of 16 pairs: other values must not be read, even with weight 0.
    """
    b = code.builder
    values, out = code.numbers(values), code.numbers(out)
    group_keys = 2 * max(WIDTH, AMX_ROWS)

    def neighbours(key: Any, column: Any) -> list[Any]:
        both = []
        for each in (key, code.place(key, long(1))):
            place = code.place((code.no_further(each, count), stride), column)
            both.append(b.select(b.icmp_signed("<", each, count), code.load(values, place), every(0.0)))
        return code.woven(*both)

    groups = b.mul(b.udiv(code.place(count, long(group_keys - 1)), long(group_keys)), long(group_keys // (2 * WIDTH)))
    with code.loop(groups) as group, code.loop(b.udiv(columns, long(WIDTH))) as part:
        first, column = code.place((group.index, long(WIDTH))), code.place((part.index, long(WIDTH)))
        woven = [neighbours(code.place((first, long(2)), long(2 * pair)), column) for pair in range(WIDTH)]
        for i, rows in enumerate(zip(*woven, strict=True)):
            for row, vector in enumerate(code.transposed(rows)):
                feature = code.place((column, long(2)), long(i * WIDTH + row))
                code.store(vector, out, code.place((feature, room), first))


def _raise_maxima(code: Code, kind: Any, scores: Any, count: Any, tops: Any, change: Any, factor: Any) -> Any:
    """Raise the running maxima (LANES,) to the maxima of n scores that exceed them by more than SLACK.

    The old maximum minus the new one goes to ``change``; returns 0 if nothing was raised. bfloat16 scores and maxima must still be
    multiplied by ``factor`` to be binary logarithms; changes are binary logarithms.
    """
    b = code.builder
    slack = every(SLACK)
    if is_bfloat16(kind):
        factor = code.spread(b.fptrunc(factor, FLOAT))
        slack = b.fdiv(slack, factor)
    scores, tops, change = (code.numbers(address) for address in (scores, tops, change))
    before = [code.load(tops, place) for place in code.lanes(long(0))]
    # Two keys at a time, because a chain of maxima has a latency of four cycles each.
    maxima = code.variables([every(MASKED)] * (2 * VECTORS))
    with code.loop(b.udiv(code.place(count, long(1)), long(2))) as pair:
        first = code.place((pair.index, long(2)))
        second = code.no_further(code.place(first, long(1)), count)
        for place, best in zip(code.lanes(first) + code.lanes(second), maxima, strict=True):
            b.store(_larger(code, code.load(scores, place), b.load(best)), best)
    raised = []
    for place, old, even, odd in zip(code.lanes(long(0)), before, maxima[:VECTORS], maxima[VECTORS:], strict=True):
        best = _larger(code, b.load(even), b.load(odd))
        above = b.fcmp_ordered(">", best, b.fadd(old, slack))
        new = b.select(above, best, old)
        code.store(new, tops, place)
        lowered = b.fsub(old, new)
        code.store(b.fmul(lowered, factor) if is_bfloat16(kind) else lowered, change, place)
        raised.append(b.zext(b.bitcast(above, ir.IntType(WIDTH)), LONG))
    total = raised[0]
    for each in raised[1:]:
        total = b.or_(total, each)
    return total


def _larger(code: Code, score: Any, known: Any) -> Any:
    """Return the larger number; the second if one is NaN."""
    return code.builder.select(code.builder.fcmp_ordered(">", score, known), score, known)


def _exponents(code: Code, kind: Any, scores: Any, count: Any, tops: Any, sums: Any, factor: Any) -> None:
    """Turn scores (n, LANES) into powers of two relative to the maxima (LANES,), and add them to the sums (LANES,).

    bfloat16 results are pairs of neighbouring keys, (n / 2, LANES), and their scores become binary logarithms by ``factor``; zeros pad an
    odd number of keys and, for AMX, follow up to the next multiple of 16 pairs.
    """
    b = code.builder
    scores, tops, sums = (code.numbers(address) for address in (scores, tops, sums))
    tops = [code.load(tops, place) for place in code.lanes(long(0))]
    totals = code.variables([code.load(sums, place) for place in code.lanes(long(0))])
    if is_bfloat16(kind):
        factor = code.spread(b.fptrunc(factor, FLOAT))
        # A query that has seen nothing has only MASKED scores; relative to 0 their powers are 0.
        blind = [b.fcmp_ordered("<=", top, every(MASKED)) for top in tops]
        tops = [b.select(none, every(0.0), b.fmul(top, factor)) for none, top in zip(blind, tops, strict=True)]

    def power(place: Any, top: Any) -> Any:
        score = code.load(scores, place)
        if not is_bfloat16(kind):
            return code.power_of_two(b.fsub(score, top))
        return code.coarse_power_of_two(code.fma(score, factor, b.fsub(every(-0.0), top)))

    if is_bfloat16(kind):
        ones = code.paired(every(1.0), every(1.0))
        with code.loop(b.udiv(code.place(count, long(1)), long(2))) as pair:
            first = code.place((pair.index, long(2)))
            second = code.place(first, long(1))
            is_there = b.icmp_signed("<", second, count)
            rows = code.lanes(first), code.lanes(code.no_further(second, count)), code.lanes(pair.index)
            for place, other, target, top, total in zip(*rows, tops, totals, strict=True):
                powers = code.paired(power(place, top), b.select(is_there, power(other, top), every(0.0)))
                code.store(powers, scores, target)
                b.store(code.add_pairs(powers, ones, b.load(total)), total)  # of the rounded weights, as the values meet them
        if uses_amx(kind):
            pairs = b.udiv(code.place(count, long(1)), long(2))
            missing = b.and_(b.sub(long(0), pairs), long(AMX_ROWS - 1))
            with code.loop(missing) as row:
                for place in code.lanes(code.place(pairs, row.index)):
                    code.store(every(0.0), scores, place)
    else:
        with code.loop(count) as key:
            for place, top, total in zip(code.lanes(key.index), tops, totals, strict=True):
                found = power(place, top)
                code.store(found, scores, place)
                b.store(b.fadd(b.load(total), found), total)
    for place, total in zip(code.lanes(long(0)), totals, strict=True):
        code.store(b.load(total), sums, place)


def _rescale(code: Code, mixtures: Any, width: Any, sums: Any, change: Any) -> None:
    """Rescale mixtures (K, LANES) and sums (LANES,) of queries whose maxima were raised."""
    b = code.builder
    mixtures, sums, change = (code.numbers(address) for address in (mixtures, sums, change))
    factors = [code.power_of_two(code.load(change, place)) for place in code.lanes(long(0))]
    for base, rows in ((sums, long(1)), (mixtures, width)):
        with code.loop(rows) as row:
            for place, factor in zip(code.lanes(row.index), factors, strict=True):
                code.store(b.fmul(code.load(base, place), factor), base, place)


def _mask_window(code: Code, scores: Any, count: Any, start: Any, half: Any) -> None:
    """Mask scores of keys more than ``half`` away; ``start`` is the position of the first key minus that of the first query."""
    b = code.builder
    scores = code.numbers(scores)
    reach, twice = (code.spread(b.trunc(value, INT)) for value in (half, code.place(half, half)))
    lanes = [ir.Constant(INTS, list(range(vector * WIDTH, (vector + 1) * WIDTH))) for vector in range(VECTORS)]
    with code.loop(count) as key:
        at = code.spread(b.trunc(code.place(key.index, start), INT))
        for place, lane in zip(code.lanes(key.index), lanes, strict=True):
            seen = b.icmp_unsigned("<=", b.add(b.sub(at, lane), reach), twice)
            code.store(b.select(seen, code.load(scores, place), every(MASKED)), scores, place)


def _pack(code: Code, kind: Any, queries: Any, stride: Any, count: Any, columns: Any, factor: Any, out: Any) -> None:
    """Transpose up to LANES queries to a tile (C, LANES), multiplied by ``factor`` unless bfloat16; the last fills the remaining lanes."""
    queries, out, factor = code.numbers(queries), code.numbers(out), code.spread(code.builder.fptrunc(factor, FLOAT))

    def put(vector: Any, place: Any) -> None:
        code.store(vector if is_bfloat16(kind) else code.builder.fmul(vector, factor), out, place)

    code.to_lanes(queries, stride, count, columns, put)


def _unpack(code: Code, kind: Any, mixtures: Any, columns: Any, tops: Any, count: Any, stride: Any, out: Any) -> None:
    """Divide a tile (K, LANES) by its sums, which follow its maxima, and store it as rows; zeros for queries that have seen nothing."""
    b = code.builder
    mixtures, tops, out = (code.numbers(address) for address in (mixtures, tops, out))
    sums = code.at(tops, long(LANES))
    for place in code.lanes(long(0)):  # the sums are replaced by their reciprocals
        blind = b.fcmp_ordered("<=", code.load(tops, place), every(MASKED))
        code.store(b.select(blind, every(0.0), b.fdiv(every(1.0), code.load(sums, place))), sums, place)

    def share(place: Any) -> Any:
        return b.fmul(code.load(mixtures, place), code.load(sums, b.urem(place, long(LANES))))

    code.to_rows(_paired(code, share) if is_bfloat16(kind) else share, count, columns, out, stride)


def _paired(code: Code, next_index: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that gives vectors of bfloat16 pairs by offset, made of two rows of a tile."""

    def pair(place: Any) -> Any:
        first = code.place(place, (code.builder.udiv(place, long(LANES)), long(LANES)))
        return code.paired(next_index(first), next_index(code.place(first, long(LANES))))

    return pair


def _totals(code: Code, first: Any, second: Any, width: Any, out: Any) -> None:
    """Sum the products of two tiles (K, LANES) to (LANES,)."""
    first, second, out = (code.numbers(address) for address in (first, second, out))
    sums = code.variables([every(0.0)] * VECTORS)
    with code.loop(width) as row:
        for place, total in zip(code.lanes(row.index), sums, strict=True):
            code.builder.store(code.fma(code.load(first, place), code.load(second, place), code.builder.load(total)), total)
    for place, total in zip(code.lanes(long(0)), sums, strict=True):
        code.store(code.builder.load(total), out, place)


def _lane_gradients(code: Code, scores: Any, gradients: Any, count: Any, tops: Any, sums: Any) -> None:
    """Turn gradients of weights (n, LANES) into gradients of scores; queries are in lanes, as are ``tops`` and ``sums`` (LANES,)."""
    scores, gradients, tops, sums = (code.numbers(address) for address in (scores, gradients, tops, sums))
    queries = [(code.load(tops, place), code.load(sums, place)) for place in code.lanes(long(0))]
    with code.loop(count) as key:
        for place, query in zip(code.lanes(key.index), queries, strict=True):
            _weigh(code, scores, gradients, place, *query)


def _row_gradients(code: Code, scores: Any, gradients: Any, count: Any, tops: Any, sums: Any) -> None:
    """The same with queries in rows, as ``tops`` and ``sums`` (n,); the scores are overwritten by weights."""
    scores, gradients, tops, sums = (code.numbers(address) for address in (scores, gradients, tops, sums))
    with code.loop(count) as row:
        query = [code.spread(code.builder.load(code.at(base, row.index))) for base in (tops, sums)]
        for place in code.lanes(row.index):
            code.store(_weigh(code, scores, gradients, place, *query), scores, place)


def _weigh(code: Code, scores: Any, gradients: Any, place: Any, top: Any, total: Any) -> Any:
    """Return a vector of weights; their gradients become those of scores: the weight times its gradient minus the mean."""
    weight = code.power_of_two(code.builder.fsub(code.load(scores, place), top))
    code.store(code.builder.fmul(weight, code.builder.fsub(code.load(gradients, place), total)), gradients, place)
    return weight


def _store_rows(code: Code, tile: Any, width: Any, count: Any, factor: Any, stride: Any, out: Any) -> None:
    """Store a tile (K, LANES) times a factor as rows."""
    tile, out, factor = code.numbers(tile), code.numbers(out), code.spread(code.builder.fptrunc(factor, FLOAT))
    code.to_rows(lambda place: code.builder.fmul(code.load(tile, place), factor), count, width, out, stride)


def _store_heads(code: Code, kind: Any, tile: Any, columns: Any, count: Any, stride: Any, out: Any) -> None:
    """Store a tile (K, LANES) as rows of C 32-bit units, bfloat16 if ``kind`` says so."""
    tile, out = code.numbers(tile), code.numbers(out)

    def next_index(place: Any) -> Any:
        return code.load(tile, place)

    code.to_rows(_paired(code, next_index) if is_bfloat16(kind) else next_index, count, columns, out, stride)


def _copy(code: Code, tile: Any, rows: Any, out: Any) -> None:
    """Copy a tile (rows, LANES)."""
    tile, out = code.numbers(tile), code.numbers(out)
    with code.loop(rows) as row:
        for place in code.lanes(row.index):
            code.store(code.load(tile, place), out, place)


def _copy_rows(code: Code, rows: Any, stride: Any, count: Any, columns: Any, out: Any) -> None:
    """Copy rows to contiguous memory."""
    rows, out = code.numbers(rows), code.numbers(out)
    with code.loop(count) as row, code.loop(code.builder.udiv(columns, long(WIDTH))) as part:
        column = code.place((part.index, long(WIDTH)))
        code.store(code.load(rows, code.place((row.index, stride), column)), out, code.place((row.index, columns), column))


def _clear(code: Code, out: Any, rows: Any, value: Any) -> None:
    """Fill a tile (rows, LANES) with a number."""
    out, filled = code.numbers(out), code.spread(code.builder.fptrunc(value, FLOAT))
    with code.loop(rows) as row:
        for place in code.lanes(row.index):
            code.store(filled, out, place)


def _prefetch(code: Code, base: Any, stride: Any, rows: Any, columns: Any) -> None:
    """Prefetch rows that are read next; columns count 32-bit units."""
    b, byte = code.builder, ir.IntType(8).as_pointer()
    base = code.numbers(base)
    reads, nearest, data = (ir.Constant(INT, value) for value in (0, 3, 1))
    with code.loop(rows) as row, code.loop(b.udiv(columns, long(16))) as line:
        place = code.place((row.index, stride), (line.index, long(16)))
        code.call("llvm.prefetch.p0", ir.VoidType(), b.bitcast(code.at(base, place), byte), reads, nearest, data)


def _numbers_of(_code: Code, kind: Any) -> Any:
    """Return the number of values per 32-bit unit."""
    return long(2 if is_bfloat16(kind) else 1)


def _keys_at_once(_code: Code, kind: Any) -> Any:
    """Return how many keys are processed together: one, a pair, or an AMX step."""
    return long(2 * AMX_ROWS if uses_amx(kind) else 2 if is_bfloat16(kind) else 1)


def _next_index(code: Code, address: Any) -> Any:
    """Atomically return the integer at an address and increment it."""
    return code.builder.atomic_rmw("add", code.builder.inttoptr(address, LONG.as_pointer()), long(1), "monotonic")


scores, mixture, exponents, rescale = (emitted(emit) for emit in (_scores, _mixture, _exponents, _rescale))
mask_window, pack, unpack, clear, prefetch, pair_values = (
    emitted(emit) for emit in (_mask_window, _pack, _unpack, _clear, _prefetch, _pair_values)
)
totals, lane_gradients, row_gradients, store_rows = (emitted(emit) for emit in (_totals, _lane_gradients, _row_gradients, _store_rows))
copy, copy_rows, store_heads = (emitted(emit) for emit in (_copy, _copy_rows, _store_heads))
raise_maxima, next_index = (emitted(emit, types.int64) for emit in (_raise_maxima, _next_index))
numbers_of, keys_at_once = (emitted(emit, types.int64) for emit in (_numbers_of, _keys_at_once))
