"""Pieces of attention that fit a core's registers and first cache.

A tile's lanes are queries: scores are (keys, LANES), queries and mixtures (K, LANES).

Shapes: LANES queries, n keys, K head width (a multiple of 16).
Source: FlashAttention, arXiv:2205.14135, algorithm 1 (the running maximum and sum); that a maximum may lag behind
by a factor of 256 is FlashAttention-4's idea; the layout is ours.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from encoder.compiled.vectors import FLOAT, INT, INTS, LANES, LONG, ROW_PLACES, ROWS, VECTORS, WIDTH, Code, emitted, every, long

__all__ = [
    "HIDDEN",
    "clear",
    "copy",
    "exponents",
    "lane_gradients",
    "mixture",
    "pack",
    "prefetch",
    "raise_tops",
    "rescale",
    "row_gradients",
    "scores",
    "spill",
    "take",
    "totals",
    "unpack",
    "veil",
]

HIDDEN = -3e38
"""A score that nothing may come of, in units of a binary logarithm."""

SLACK = 8.0
"""A score may be this far above what its query counts from before that is raised: its power of two, 256 at most, loses no place of a sum,
and most panels of keys find nothing to rescale."""


def _scores(code: Code, queries: Any, keys: Any, stride: Any, count: Any, width: Any, out: Any) -> None:
    """(n, LANES) products of n keys with the queries of a tile (K, LANES); up to the next multiple of ROWS the last is repeated."""
    queries, keys, out = (code.numbers(address) for address in (queries, keys, out))
    tiles = code.builder.udiv(code.place(count, long(ROWS - 1)), long(ROWS))
    with code.loop(tiles) as tile:
        first = code.place((tile.index, long(ROWS)))
        rows = [code.no_further(code.place(first, long(row)), count) for row in range(ROWS)]
        starts = [code.at(keys, code.place((row, stride))) for row in rows]
        code.product(starts, width, long(1), queries, [every(0.0)] * len(ROW_PLACES), code.at(out, code.place((first, long(LANES)))))


def _mixture(code: Code, values: Any, stride: Any, count: Any, width: Any, weights: Any, out: Any) -> None:
    """Add n values with weights (n, LANES) to a tile (K, LANES)."""
    values, weights, out = (code.numbers(address) for address in (values, weights, out))
    with code.loop(code.builder.udiv(width, long(ROWS))) as tile:
        first = code.place((tile.index, long(ROWS)))
        starts = [code.at(values, code.place(first, long(row))) for row in range(ROWS)]
        rows = code.at(out, code.place((first, long(LANES))))
        code.product(starts, count, stride, weights, [code.load(rows, place) for place in ROW_PLACES], rows)


def _raise_tops(code: Code, scores: Any, count: Any, tops: Any, change: Any) -> Any:
    """Raise what the queries count from (LANES,) to the maxima of n scores where those are more than SLACK above it.

    What it was less what it is goes to ``change``; the result is 0 where nothing was raised.
    """
    b = code.builder
    scores, tops, change = (code.numbers(address) for address in (scores, tops, change))
    before = [code.load(tops, place) for place in code.lanes(long(0))]
    # Two keys at a time: a chain of maxima waits four cycles for each.
    maxima = code.variables([every(HIDDEN)] * (2 * VECTORS))
    with code.loop(b.udiv(code.place(count, long(1)), long(2))) as pair:
        first = code.place((pair.index, long(2)))
        second = code.no_further(code.place(first, long(1)), count)
        for place, best in zip(code.lanes(first) + code.lanes(second), maxima, strict=True):
            b.store(_larger(code, code.load(scores, place), b.load(best)), best)
    raised = []
    for place, old, even, odd in zip(code.lanes(long(0)), before, maxima[:VECTORS], maxima[VECTORS:], strict=True):
        best = _larger(code, b.load(even), b.load(odd))
        above = b.fcmp_ordered(">", best, b.fadd(old, every(SLACK)))
        new = b.select(above, best, old)
        code.store(new, tops, place)
        code.store(b.fsub(old, new), change, place)
        raised.append(b.zext(b.bitcast(above, ir.IntType(WIDTH)), LONG))
    total = raised[0]
    for each in raised[1:]:
        total = b.or_(total, each)
    return total


def _larger(code: Code, score: Any, known: Any) -> Any:
    """The larger number of two; the second where one is no number."""
    return code.builder.select(code.builder.fcmp_ordered(">", score, known), score, known)


def _exponents(code: Code, scores: Any, count: Any, tops: Any, sums: Any) -> None:
    """Scores (n, LANES) to powers of two, counted from the queries' tops (LANES,); the queries' sums (LANES,) grow by them."""
    b = code.builder
    scores, tops, sums = (code.numbers(address) for address in (scores, tops, sums))
    tops = [code.load(tops, place) for place in code.lanes(long(0))]
    totals = code.variables([code.load(sums, place) for place in code.lanes(long(0))])
    with code.loop(count) as key:
        for place, top, total in zip(code.lanes(key.index), tops, totals, strict=True):
            power = code.power_of_two(b.fsub(code.load(scores, place), top))
            code.store(power, scores, place)
            b.store(b.fadd(b.load(total), power), total)
    for place, total in zip(code.lanes(long(0)), totals, strict=True):
        code.store(b.load(total), sums, place)


def _rescale(code: Code, mixtures: Any, width: Any, sums: Any, change: Any) -> None:
    """Mixtures (K, LANES) and sums (LANES,) of queries whose tops were raised."""
    b = code.builder
    mixtures, sums, change = (code.numbers(address) for address in (mixtures, sums, change))
    factors = [code.power_of_two(code.load(change, place)) for place in code.lanes(long(0))]
    for base, rows in ((sums, long(1)), (mixtures, width)):
        with code.loop(rows) as row:
            for place, factor in zip(code.lanes(row.index), factors, strict=True):
                code.store(b.fmul(code.load(base, place), factor), base, place)


def _veil(code: Code, scores: Any, count: Any, start: Any, half: Any) -> None:
    """Hide scores of keys more than ``half`` away; ``start`` is the first key's place less the first query's."""
    b = code.builder
    scores = code.numbers(scores)
    reach, twice = (code.spread(b.trunc(value, INT)) for value in (half, code.place(half, half)))
    lanes = [ir.Constant(INTS, list(range(vector * WIDTH, (vector + 1) * WIDTH))) for vector in range(VECTORS)]
    with code.loop(count) as key:
        at = code.spread(b.trunc(code.place(key.index, start), INT))
        for place, lane in zip(code.lanes(key.index), lanes, strict=True):
            seen = b.icmp_unsigned("<=", b.add(b.sub(at, lane), reach), twice)
            code.store(b.select(seen, code.load(scores, place), every(HIDDEN)), scores, place)


def _pack(code: Code, queries: Any, stride: Any, count: Any, width: Any, factor: Any, out: Any) -> None:
    """Up to LANES queries to a tile (K, LANES), times a factor; the last stands in the lanes that are left."""
    queries, out, factor = code.numbers(queries), code.numbers(out), code.spread(code.builder.fptrunc(factor, FLOAT))
    code.to_lanes(queries, stride, count, width, lambda vector, place: code.store(code.builder.fmul(vector, factor), out, place))


def _unpack(code: Code, mixtures: Any, width: Any, sums: Any, tops: Any, count: Any, stride: Any, out: Any) -> None:
    """A tile (K, LANES) over its sums (LANES,) to the first of LANES rows; zeros for queries that have seen nothing."""
    b = code.builder
    mixtures, sums, tops, out = (code.numbers(address) for address in (mixtures, sums, tops, out))
    for place in code.lanes(long(0)):  # the sums become what they are divided by
        blind = b.fcmp_ordered("<=", code.load(tops, place), every(HIDDEN))
        code.store(b.select(blind, every(0.0), b.fdiv(every(1.0), code.load(sums, place))), sums, place)
    lane = long(LANES)

    def share(place: Any) -> Any:
        return b.fmul(code.load(mixtures, place), code.load(sums, b.urem(place, lane)))

    code.to_rows(share, count, width, out, stride)


def _totals(code: Code, first: Any, second: Any, width: Any, out: Any) -> None:
    """Sums (LANES,) over the products of two tiles (K, LANES)."""
    first, second, out = (code.numbers(address) for address in (first, second, out))
    sums = code.variables([every(0.0)] * VECTORS)
    with code.loop(width) as row:
        for place, total in zip(code.lanes(row.index), sums, strict=True):
            code.builder.store(code.fma(code.load(first, place), code.load(second, place), code.builder.load(total)), total)
    for place, total in zip(code.lanes(long(0)), sums, strict=True):
        code.store(code.builder.load(total), out, place)


def _lane_gradients(code: Code, scores: Any, gradients: Any, count: Any, tops: Any, sums: Any) -> None:
    """Gradients of weights (n, LANES) to gradients of their scores; queries have the lanes, as have ``tops`` and ``sums`` (LANES,)."""
    scores, gradients, tops, sums = (code.numbers(address) for address in (scores, gradients, tops, sums))
    queries = [(code.load(tops, place), code.load(sums, place)) for place in code.lanes(long(0))]
    with code.loop(count) as key:
        for place, query in zip(code.lanes(key.index), queries, strict=True):
            _weigh(code, scores, gradients, place, *query)


def _row_gradients(code: Code, scores: Any, gradients: Any, count: Any, tops: Any, sums: Any) -> None:
    """The same where queries have the rows, as have ``tops`` and ``sums`` (n,); scores become weights besides."""
    scores, gradients, tops, sums = (code.numbers(address) for address in (scores, gradients, tops, sums))
    with code.loop(count) as row:
        query = [code.spread(code.builder.load(code.at(base, row.index))) for base in (tops, sums)]
        for place in code.lanes(row.index):
            code.store(_weigh(code, scores, gradients, place, *query), scores, place)


def _weigh(code: Code, scores: Any, gradients: Any, place: Any, top: Any, total: Any) -> Any:
    """A vector of weights, whose gradients become those of their scores: the weight times how far its gradient is above the mean."""
    weight = code.power_of_two(code.builder.fsub(code.load(scores, place), top))
    code.store(code.builder.fmul(weight, code.builder.fsub(code.load(gradients, place), total)), gradients, place)
    return weight


def _spill(code: Code, tile: Any, width: Any, count: Any, factor: Any, stride: Any, out: Any) -> None:
    """A tile (K, LANES) times a factor to the first of LANES rows of numbers."""
    tile, out, factor = code.numbers(tile), code.numbers(out), code.spread(code.builder.fptrunc(factor, FLOAT))
    code.to_rows(lambda place: code.builder.fmul(code.load(tile, place), factor), count, width, out, stride)


def _copy(code: Code, tile: Any, rows: Any, out: Any) -> None:
    """A tile (rows, LANES) as it is."""
    tile, out = code.numbers(tile), code.numbers(out)
    with code.loop(rows) as row:
        for place in code.lanes(row.index):
            code.store(code.load(tile, place), out, place)


def _clear(code: Code, out: Any, rows: Any, value: Any) -> None:
    """Fill a tile (rows, LANES) with a number."""
    out, filled = code.numbers(out), code.spread(code.builder.fptrunc(value, FLOAT))
    with code.loop(rows) as row:
        for place in code.lanes(row.index):
            code.store(filled, out, place)


def _prefetch(code: Code, base: Any, stride: Any, rows: Any, width: Any) -> None:
    """Ask for rows of K numbers that will be read next."""
    b, byte = code.builder, ir.IntType(8).as_pointer()
    base = code.numbers(base)
    reads, nearest, data = (ir.Constant(INT, value) for value in (0, 3, 1))
    with code.loop(rows) as row, code.loop(b.udiv(width, long(16))) as line:
        place = code.place((row.index, stride), (line.index, long(16)))
        code.call("llvm.prefetch.p0", ir.VoidType(), b.bitcast(code.at(base, place), byte), reads, nearest, data)


def _take(code: Code, address: Any) -> Any:
    """The integer at an address, which no other thread is given: it is one more afterwards."""
    return code.builder.atomic_rmw("add", code.builder.inttoptr(address, LONG.as_pointer()), long(1), "monotonic")


scores, mixture, exponents, rescale = (emitted(emit) for emit in (_scores, _mixture, _exponents, _rescale))
veil, pack, unpack, clear, prefetch = (emitted(emit) for emit in (_veil, _pack, _unpack, _clear, _prefetch))
totals, lane_gradients, row_gradients, spill, copy = (emitted(emit) for emit in (_totals, _lane_gradients, _row_gradients, _spill, _copy))
raise_tops, take = (emitted(emit, types.int64) for emit in (_raise_tops, _take))
