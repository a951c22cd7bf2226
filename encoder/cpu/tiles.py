"""Operations on tiles, from which the kernels are made: products, norms, activations, RoPE, and attention's scores and weights.

A tile is a matrix with LANES columns, sized for a core's registers and first-level cache. In blocks a lane is a token: hidden states of
some tokens are (D, LANES). Weights are read in their plain layout, one row per output. In attention a lane is a query: scores are (keys,
LANES), queries and weighted values ("mixtures") (K, LANES). bfloat16 heads are multiplied in pairs, neighbouring values of a query and a
key, neighbouring keys of a weight and a value; their tiles have half the rows. ``kind`` is `FLOAT32`, `BFLOAT16` or `INT8`.

Shapes: LANES tokens or queries, n keys, D and O widths of input and output, R rotary width, K head width (a multiple of 16, for bfloat16
32), C rows of a tile of queries (K, for bfloat16 K / 2).
Source: FlashAttention, arXiv:2205.14135, algorithm 1 (the running maximum and sum); that a maximum may lag by a factor of 256 is an idea of
FlashAttention-4; the layout is our own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from quiver.encoder.cpu.codegen import (
    AMX_ROWS,
    FLOAT,
    INT,
    INTS,
    LANES,
    LONG,
    ROWS,
    VECTOR,
    VECTORS,
    WIDTH,
    Code,
    amx_product,
    emitted,
    every,
    is_bfloat16,
    is_int8,
    long,
    row_places,
    uses_amx,
)
from quiver.encoder.cpu.linear import HADAMARD_SIZES
from quiver.encoder.cpu.support import SMALLEST_SPAN, WIDTH_MULTIPLE


@emitted
def product(code: Code, kind: Any, matrix: Any, first: Any, count: Any, width: Any, tile: Any, out: Any) -> None:
    """Compute outputs (O, LANES), a multiple of 16 from ``first`` on, of a narrowed tile (D, LANES); ``matrix`` is a `PlainMatrix`."""
    b = code.builder
    addresses = b.inttoptr(matrix, LONG.as_pointer())
    weights, biases, scales, ones = (code.numbers(b.load(b.gep(addresses, [long(i)]))) for i in range(4))
    tile, out = code.numbers(tile), code.numbers(out)
    fourfold = is_int8(kind)
    columns = b.udiv(width, long(4 if fourfold else 2 if is_bfloat16(kind) else 1))

    def by_rows() -> None:
        with code.loop(b.udiv(count, long(ROWS))) as part:
            begin = code.place((part.index, long(ROWS)))
            rows = [code.place(begin, first, long(row)) for row in range(ROWS)]
            starts = [code.at(weights, code.place((row, columns))) for row in rows]
            target = code.at(out, code.place((begin, long(LANES))))
            if fourfold:
                finish = _dequantised(code, tile, columns, rows, (biases, scales, ones))
                nothing = [code.ints(0)] * len(row_places())
                code.product(starts, columns, long(1), tile, nothing, target, multiply=code.add_quads, finish=finish)
            else:
                shifts = [bias for row in rows for bias in [code.spread(b.load(code.at(biases, row)))] * VECTORS]
                code.product(starts, columns, long(1), tile, shifts, target, multiply=code.add_pairs if is_bfloat16(kind) else code.fma)

    def by_amx() -> None:
        if not fourfold:
            with code.loop(count) as row:
                bias = code.spread(b.load(code.at(biases, code.place(first, row.index))))
                for place in code.lanes(row.index):
                    code.store(bias, out, place)
        rows = b.ptrtoint(code.at(weights, code.place((first, columns))), LONG)
        lanes, sums = b.ptrtoint(tile, LONG), b.ptrtoint(out, LONG)
        amx_product(code, kind, rows, columns, (count, columns), lanes, sums, add=not fourfold)
        if fourfold:
            with code.loop(count) as row:
                finish = _dequantised(code, tile, columns, [code.place(first, row.index)], (biases, scales, ones))
                for vector, place in enumerate(code.lanes(row.index)):
                    code.store(finish(vector, b.bitcast(code.load(out, place), INTS)), out, place)

    if not uses_amx(kind):
        by_rows()
        return
    if not fourfold:  # widths of bfloat16 matrices are multiples already
        by_amx()
        return
    with b.if_else(b.icmp_signed("==", b.and_(columns, long(AMX_ROWS - 1)), long(0))) as (whole, odd):
        with whole:
            by_amx()
        with odd:
            by_rows()


def _dequantised(code: Code, tile: Any, columns: Any, rows: list[Any], numbers: tuple[Any, Any, Any]) -> Callable[[int, Any], Any]:
    """Return the function that turns integer sums into outputs, by a row's bias, scale and sum and a token's minimum and step."""
    b = code.builder

    def finish(place: int, total: Any) -> Any:
        row, vector = divmod(place, VECTORS)
        bias, scale, one = (code.spread(b.load(code.at(base, rows[row]))) for base in numbers)
        least, step = (code.load(tile, code.lanes(code.place(columns, long(i)))[vector]) for i in range(2))
        return code.fma(b.fmul(b.sitofp(total, VECTOR), scale), step, code.fma(least, one, bias))

    return finish


@emitted
def narrow(code: Code, kind: Any, tile: Any, width: Any, levels: Any) -> None:
    """Convert a tile (D, LANES) in place to the dtype that `product` multiplies: pairs, (D / 2, LANES), or quads, (D / 4, LANES).

    Behind quads, which are of rotated features, stand each token's minimum and its step, the range over ``levels``, (2, LANES). They are
    NaN if a token holds NaN or infinity, or if a rotated sum overflows.
    """
    if is_bfloat16(kind):
        tile = code.numbers(tile)
        with code.loop(code.builder.udiv(width, long(2))) as pair:
            first = code.place((pair.index, long(2)))
            rows = code.lanes(first), code.lanes(code.place(first, long(1)))
            for target, *places in zip(code.lanes(pair.index), *rows, strict=True):
                code.store(code.paired(*(code.load(tile, place) for place in places)), tile, target)
    elif is_int8(kind):
        tile = code.numbers(tile)
        emit_hadamard(code, tile, width)
        _quantise(code, tile, width, levels)


def emit_hadamard(code: Code, tile: Any, width: Any) -> None:
    """Rotate a tile (D, LANES) in place; bit-identical to `quiver.encoder.cpu.linear.hadamard`."""
    b = code.builder
    large, small = (size for size in HADAMARD_SIZES if size >= WIDTH_MULTIPLE)  # the smaller one divides every width
    whole = b.icmp_signed("==", b.and_(width, long(large - 1)), long(0))
    with b.if_else(whole) as (in_large, in_small):
        for branch, size in ((in_large, large), (in_small, small)):
            with branch, code.loop(b.udiv(width, long(size))) as part:
                first = code.place((part.index, long(size)))
                # A block stays in the first-level cache between the passes over it.
                for distance in (each for each in reversed(HADAMARD_SIZES) if each < size):
                    with code.loop(long(size // (4 * distance))) as group, code.loop(long(distance)) as row:
                        _hadamard_four(code, tile, code.place(first, (group.index, long(4 * distance)), row.index), distance)


def _hadamard_four(code: Code, tile: Any, first: Any, distance: int) -> None:
    """One step of `emit_hadamard`: combine four rows of a tile, ``distance`` rows apart."""
    b = code.builder
    for places in zip(*(code.lanes(code.place(first, long(i * distance))) for i in range(4)), strict=True):
        w, x, y, z = (code.load(tile, place) for place in places)
        outer, inner = (b.fadd(w, x), b.fsub(w, x)), (b.fadd(y, z), b.fsub(y, z))
        rotated = b.fadd(outer[0], inner[1]), b.fsub(outer[0], inner[1]), b.fadd(outer[1], inner[0]), b.fsub(inner[0], outer[1])
        for value, place in zip(rotated, places, strict=True):
            code.store(value, tile, place)


def _quantise(code: Code, tile: Any, width: Any, levels: Any) -> None:
    """Quantise rotated features to int8; see `narrow`."""
    b = code.builder
    nothing = every(0.0)
    least, most, odd = (code.variables([start] * VECTORS) for start in (every(math.inf), every(-math.inf), nothing))
    with code.loop(width) as row:
        for place, low, high, other in zip(code.lanes(row.index), least, most, odd, strict=True):
            x = code.load(tile, place)
            for predicate, best in (("<", low), (">", high)):
                known = b.load(best)
                b.store(b.select(b.fcmp_ordered(predicate, x, known), x, known), best)
            b.store(code.fma(x, nothing, b.load(other)), other)
    grid = code.spread(b.sitofp(levels, FLOAT))
    shifts, steps, shares = [], [], []
    for low, high, other in zip(least, most, odd, strict=True):
        shifts.append(b.fadd(b.load(low), b.load(other)))
        span = b.fsub(b.load(high), b.load(low))
        span = b.select(b.fcmp_ordered(">", span, every(SMALLEST_SPAN)), span, every(SMALLEST_SPAN))
        steps.append(b.fdiv(span, grid))
        shares.append(b.fdiv(grid, span))
    columns = b.udiv(width, long(4))
    with code.loop(columns) as quad:
        rows = [code.lanes(code.place((quad.index, long(4)), long(i))) for i in range(4)]
        for target, *places, shift, share in zip(code.lanes(quad.index), *rows, shifts, shares, strict=True):
            four = None
            for i, place in enumerate(places):
                # A number of this size has no fractional bits; its last eight bits are the integer.
                rounded = code.fma(b.fsub(code.load(tile, place), shift), share, every(2.0**23))
                integer = b.shl(b.and_(b.bitcast(rounded, INTS), code.ints(0xFF)), code.ints(8 * i))
                four = integer if four is None else b.or_(four, integer)
            code.store(b.bitcast(four, VECTOR), tile, target)
    for i, values in enumerate((shifts, steps)):
        for place, value in zip(code.lanes(code.place(columns, long(i))), values, strict=True):
            code.store(value, tile, place)


@emitted
def gather(code: Code, rows: Any, stride: Any, count: Any, width: Any, out: Any) -> None:
    """Transpose up to LANES rows to a tile (width, LANES); the last row fills the remaining lanes."""
    rows, out = code.numbers(rows), code.numbers(out)
    code.to_lanes(rows, stride, count, width, lambda vector, place: code.store(vector, out, place))


@emitted
def join(code: Code, rows: Any, stride: Any, count: Any, width: Any, out: Any) -> None:
    """Add up to LANES rows to a tile (width, LANES)."""
    rows, out = code.numbers(rows), code.numbers(out)
    code.to_lanes(
        rows, stride, count, width, lambda vector, place: code.store(code.builder.fadd(code.load(out, place), vector), out, place)
    )


@emitted
def normalise(code: Code, tile: Any, width: Any, weights: Any, biases: Any, centred: Any, eps: Any, out: Any) -> None:
    """Normalize a tile (D, LANES): LayerNorm if ``centred`` is 1, RMSNorm if it is 0."""
    b = code.builder
    tile, weights, biases, out = (code.numbers(address) for address in (tile, weights, biases, out))
    over = b.fdiv(every(1.0), code.spread(b.uitofp(width, FLOAT)))
    shown = code.spread(b.uitofp(centred, FLOAT))
    sums = code.variables([every(0.0)] * VECTORS)
    with code.loop(width) as row:
        for place, total in zip(code.lanes(row.index), sums, strict=True):
            b.store(b.fadd(b.load(total), code.load(tile, place)), total)
    means = [b.fmul(b.fmul(b.load(total), over), shown) for total in sums]
    squares = code.variables([every(0.0)] * VECTORS)
    with code.loop(width) as row:
        for place, mean, total in zip(code.lanes(row.index), means, squares, strict=True):
            distance = b.fsub(code.load(tile, place), mean)
            b.store(code.fma(distance, distance, b.load(total)), total)
    least = code.spread(b.fptrunc(eps, FLOAT))
    shares = []
    for total in squares:
        root = code.call(f"llvm.sqrt.v{WIDTH}f32", every(0.0).type, code.fma(b.load(total), over, least))
        shares.append(b.fdiv(every(1.0), root))
    with code.loop(width) as row:
        weight, bias = (code.spread(b.load(code.at(base, row.index))) for base in (weights, biases))
        for place, mean, share in zip(code.lanes(row.index), means, shares, strict=True):
            code.store(code.fma(b.fmul(b.fsub(code.load(tile, place), mean), share), weight, bias), out, place)


@emitted
def rotate(code: Code, tile: Any, half: Any, cosines: Any, sines: Any) -> None:
    """Apply RoPE to a head (K, LANES) in place: row i is rotated with row i + R/2; cosines and sines are tiles (R/2, LANES)."""
    b = code.builder
    tile, cosines, sines = (code.numbers(address) for address in (tile, cosines, sines))
    with code.loop(half) as row:
        partner = code.lanes(code.place(row.index, half))
        for place, other in zip(code.lanes(row.index), partner, strict=True):
            first, second, cosine, sine = code.load(tile, place), code.load(tile, other), code.load(cosines, place), code.load(sines, place)
            code.store(b.fsub(b.fmul(first, cosine), b.fmul(second, sine)), tile, place)
            code.store(b.fadd(b.fmul(second, cosine), b.fmul(first, sine)), tile, other)


def _logistic(code: Code, x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    b = code.builder
    power = b.fmul(x, every(-1 / math.log(2)))
    power = b.select(b.fcmp_ordered(">", power, every(126.0)), every(126.0), power)
    return b.fdiv(every(1.0), b.fadd(every(1.0), code.power_of_two(power)))


@cache
def _scaled_erfc() -> list[float]:
    """Coefficients of erfc(z) exp(z * z) as a polynomial in 1 / (1 + z / 2), z >= 0, of even error."""
    t = (np.cos(np.pi * (np.arange(1000) + 0.5) / 1000) + 1) / 2
    t = t[t > 1 / 6]  # erfc is zero beyond z = 10
    z = 2 / t - 2
    values = [math.erfc(x) * math.exp(x * x) for x in z]
    return [float(c) for c in np.polynomial.polynomial.polyfit(t, values, 9)]


def _gelu(code: Code, x: Any) -> Any:
    """Exact GELU to 2e-7: ``x / 2 * erfc(-x / sqrt(2))``."""
    b = code.builder
    below = b.fcmp_ordered("<", x, every(0.0))
    negated = b.fsub(every(-0.0), x)
    size = b.select(below, negated, x)
    z = b.fmul(size, every(math.sqrt(0.5)))
    t = b.fdiv(every(1.0), code.fma(z, every(0.5), every(1.0)))
    *rest, last = _scaled_erfc()
    polynomial = every(last)
    for coefficient in reversed(rest):
        polynomial = code.fma(polynomial, t, every(coefficient))
    tail = b.fmul(polynomial, code.power_of_two(b.fmul(b.fmul(x, x), every(-0.5 / math.log(2)))))  # erfc(|x| / sqrt(2))
    return b.fmul(b.fmul(x, every(0.5)), b.select(below, tail, b.fsub(every(2.0), tail)))


def _gelu_tanh(code: Code, x: Any) -> Any:
    b = code.builder
    inner = b.fmul(x, code.fma(b.fmul(x, x), every(0.044715), every(1.0)))
    return b.fmul(x, _logistic(code, b.fmul(inner, every(2 * math.sqrt(2 / math.pi)))))


_FUNCTIONS: dict[str, Callable[[Code, Any], Any]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda code, x: code.builder.fmul(x, _logistic(code, x)),
    "relu": lambda code, x: code.builder.select(code.builder.fcmp_ordered("<", x, every(0.0)), every(0.0), x),
}
ACTIVATIONS = dict(zip(_FUNCTIONS, range(len(_FUNCTIONS)), strict=True))
"""Index of each activation of `quiver.encoder.layers`."""


@emitted
def activate(code: Code, kind: Any, tile: Any, count: Any, out: Any) -> None:
    """Apply an activation to a tile (O, LANES)."""
    tile, out = code.numbers(tile), code.numbers(out)
    for name, number in ACTIVATIONS.items():
        with code.builder.if_then(code.builder.icmp_signed("==", kind, long(number))), code.loop(count) as row:
            for place in code.lanes(row.index):
                code.store(_FUNCTIONS[name](code, code.load(tile, place)), out, place)


@emitted
def gate(code: Code, kind: Any, tile: Any, gates: Any, count: Any, out: Any) -> None:
    """Multiply an activation of a tile (O, LANES) by another tile."""
    tile, gates, out = code.numbers(tile), code.numbers(gates), code.numbers(out)
    for name, number in ACTIVATIONS.items():
        with code.builder.if_then(code.builder.icmp_signed("==", kind, long(number))), code.loop(count) as row:
            for place in code.lanes(row.index):
                activated = _FUNCTIONS[name](code, code.load(tile, place))
                code.store(code.builder.fmul(activated, code.load(gates, place)), out, place)


MASKED = -3e38
"""Score of a masked key."""

SLACK = 8.0
"""How far a score may exceed the running maximum before that is raised: the power of two, at most 256, loses no bits of a sum, and most
panels of keys need no rescaling.
"""


@emitted
def scores(code: Code, kind: Any, queries: Any, keys: Any, stride: Any, count: Any, columns: Any, out: Any) -> None:
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
        code.product(starts, columns, long(1), queries, [every(0.0)] * len(row_places()), target, multiply=multiply)


@emitted
def mixture(code: Code, kind: Any, values: Any, stride: Any, count: Any, width: Any, weights: Any, out: Any) -> None:
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
        code.product(starts, count, step, weights, [code.load(target, place) for place in row_places()], target, multiply=multiply)


@emitted
def pair_values(code: Code, values: Any, stride: Any, count: Any, columns: Any, room: Any, out: Any) -> None:
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


@partial(emitted, returns=types.int64)
def raise_maxima(code: Code, kind: Any, scores: Any, count: Any, tops: Any, change: Any, factor: Any) -> Any:
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
            b.store(_larger_score(code, code.load(scores, place), b.load(best)), best)
    raised = []
    for place, old, even, odd in zip(code.lanes(long(0)), before, maxima[:VECTORS], maxima[VECTORS:], strict=True):
        best = _larger_score(code, b.load(even), b.load(odd))
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


def _larger_score(code: Code, score: Any, known: Any) -> Any:
    """Return the larger number; the second if one is NaN."""
    return code.builder.select(code.builder.fcmp_ordered(">", score, known), score, known)


@emitted
def exponents(code: Code, kind: Any, scores: Any, count: Any, tops: Any, sums: Any, factor: Any) -> None:
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


@emitted
def rescale(code: Code, mixtures: Any, width: Any, sums: Any, change: Any) -> None:
    """Rescale mixtures (K, LANES) and sums (LANES,) of queries whose maxima were raised."""
    b = code.builder
    mixtures, sums, change = (code.numbers(address) for address in (mixtures, sums, change))
    factors = [code.power_of_two(code.load(change, place)) for place in code.lanes(long(0))]
    for base, rows in ((sums, long(1)), (mixtures, width)):
        with code.loop(rows) as row:
            for place, factor in zip(code.lanes(row.index), factors, strict=True):
                code.store(b.fmul(code.load(base, place), factor), base, place)


@emitted
def mask_window(code: Code, scores: Any, count: Any, start: Any, half: Any) -> None:
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


@emitted
def pack(code: Code, kind: Any, queries: Any, stride: Any, count: Any, columns: Any, factor: Any, out: Any) -> None:
    """Transpose up to LANES queries to a tile (C, LANES), multiplied by ``factor`` unless bfloat16; the last fills the remaining lanes."""
    queries, out, factor = code.numbers(queries), code.numbers(out), code.spread(code.builder.fptrunc(factor, FLOAT))

    def put(vector: Any, place: Any) -> None:
        code.store(vector if is_bfloat16(kind) else code.builder.fmul(vector, factor), out, place)

    code.to_lanes(queries, stride, count, columns, put)


@emitted
def unpack(code: Code, kind: Any, mixtures: Any, columns: Any, tops: Any, count: Any, stride: Any, out: Any) -> None:
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


def _paired(code: Code, load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that gives vectors of bfloat16 pairs by offset, made of two rows of a tile."""

    def pair(place: Any) -> Any:
        first = code.place(place, (code.builder.udiv(place, long(LANES)), long(LANES)))
        return code.paired(load(first), load(code.place(first, long(LANES))))

    return pair


@emitted
def totals(code: Code, first: Any, second: Any, width: Any, out: Any) -> None:
    """Sum the products of two tiles (K, LANES) to (LANES,)."""
    first, second, out = (code.numbers(address) for address in (first, second, out))
    sums = code.variables([every(0.0)] * VECTORS)
    with code.loop(width) as row:
        for place, total in zip(code.lanes(row.index), sums, strict=True):
            code.builder.store(code.fma(code.load(first, place), code.load(second, place), code.builder.load(total)), total)
    for place, total in zip(code.lanes(long(0)), sums, strict=True):
        code.store(code.builder.load(total), out, place)


@emitted
def lane_gradients(code: Code, scores: Any, gradients: Any, count: Any, tops: Any, sums: Any) -> None:
    """Turn gradients of weights (n, LANES) into gradients of scores; queries are in lanes, as are ``tops`` and ``sums`` (LANES,)."""
    scores, gradients, tops, sums = (code.numbers(address) for address in (scores, gradients, tops, sums))
    queries = [(code.load(tops, place), code.load(sums, place)) for place in code.lanes(long(0))]
    with code.loop(count) as key:
        for place, query in zip(code.lanes(key.index), queries, strict=True):
            _weigh_gradients(code, scores, gradients, place, *query)


@emitted
def row_gradients(code: Code, scores: Any, gradients: Any, count: Any, tops: Any, sums: Any) -> None:
    """The same with queries in rows, as ``tops`` and ``sums`` (n,); the scores are overwritten by weights."""
    scores, gradients, tops, sums = (code.numbers(address) for address in (scores, gradients, tops, sums))
    with code.loop(count) as row:
        query = [code.spread(code.builder.load(code.at(base, row.index))) for base in (tops, sums)]
        for place in code.lanes(row.index):
            code.store(_weigh_gradients(code, scores, gradients, place, *query), scores, place)


def _weigh_gradients(code: Code, scores: Any, gradients: Any, place: Any, top: Any, total: Any) -> Any:
    """Return a vector of weights; their gradients become those of scores: the weight times its gradient minus the mean."""
    weight = code.power_of_two(code.builder.fsub(code.load(scores, place), top))
    code.store(code.builder.fmul(weight, code.builder.fsub(code.load(gradients, place), total)), gradients, place)
    return weight


@emitted
def store_rows(code: Code, tile: Any, width: Any, count: Any, factor: Any, stride: Any, out: Any) -> None:
    """Store a tile (K, LANES) times a factor as rows."""
    tile, out, factor = code.numbers(tile), code.numbers(out), code.spread(code.builder.fptrunc(factor, FLOAT))
    code.to_rows(lambda place: code.builder.fmul(code.load(tile, place), factor), count, width, out, stride)


@emitted
def store_heads(code: Code, kind: Any, tile: Any, columns: Any, count: Any, stride: Any, out: Any) -> None:
    """Store a tile (K, LANES) as rows of C 32-bit units, bfloat16 if ``kind`` says so."""
    tile, out = code.numbers(tile), code.numbers(out)

    def load(place: Any) -> Any:
        return code.load(tile, place)

    code.to_rows(_paired(code, load) if is_bfloat16(kind) else load, count, columns, out, stride)


@emitted
def copy(code: Code, tile: Any, rows: Any, out: Any) -> None:
    """Copy a tile (rows, LANES)."""
    tile, out = code.numbers(tile), code.numbers(out)
    with code.loop(rows) as row:
        for place in code.lanes(row.index):
            code.store(code.load(tile, place), out, place)


@emitted
def copy_rows(code: Code, rows: Any, stride: Any, count: Any, columns: Any, out: Any) -> None:
    """Copy rows to contiguous memory."""
    rows, out = code.numbers(rows), code.numbers(out)
    with code.loop(count) as row, code.loop(code.builder.udiv(columns, long(WIDTH))) as part:
        column = code.place((part.index, long(WIDTH)))
        code.store(code.load(rows, code.place((row.index, stride), column)), out, code.place((row.index, columns), column))


@emitted
def clear(code: Code, out: Any, rows: Any, value: Any) -> None:
    """Fill a tile (rows, LANES) with a number."""
    out, filled = code.numbers(out), code.spread(code.builder.fptrunc(value, FLOAT))
    with code.loop(rows) as row:
        for place in code.lanes(row.index):
            code.store(filled, out, place)


@partial(emitted, returns=types.int64)
def numbers_of(_code: Code, kind: Any) -> Any:
    """Return the number of values per 32-bit unit."""
    return long(2 if is_bfloat16(kind) else 1)


@partial(emitted, returns=types.int64)
def keys_at_once(_code: Code, kind: Any) -> Any:
    """Return how many keys are processed together: one, a pair, or an AMX step."""
    return long(2 * AMX_ROWS if uses_amx(kind) else 2 if is_bfloat16(kind) else 1)


@partial(emitted, returns=types.int64)
def next_index(code: Code, address: Any) -> Any:
    """Atomically return the integer at an address and increment it."""
    return code.builder.atomic_rmw("add", code.builder.inttoptr(address, LONG.as_pointer()), long(1), "monotonic")
