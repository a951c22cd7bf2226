"""Tile operations of the block kernels: products with weights, norms, activations, RoPE.

Lanes of a tile are tokens: hidden states of some tokens are (D, LANES). Weights are read in their plain layout, one row per output, so
nothing is packed beforehand and nothing can be stale.

Shapes: LANES tokens, D and O widths of input and output, R rotary width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from quiver.encoder.cpu.codegen import (
    AMX_ROWS,
    FLOAT,
    INTS,
    LANES,
    LONG,
    ROW_PLACES,
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
    uses_amx,
)
from quiver.encoder.cpu.linear import HADAMARD_SIZES
from quiver.encoder.cpu.support import SMALLEST_SPAN, WIDTH_MULTIPLE


def _product(code: Code, kind: Any, matrix: Any, first: Any, count: Any, width: Any, tile: Any, out: Any) -> None:
    """Compute outputs (O, LANES), a multiple of 16 from ``first`` on, of a tile (D, LANES) prepared by `narrow`.

    ``matrix`` points to the addresses of weights, biases and, for int8, scales and products with rotated features that are all 1, without
    bias.
    """
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
                nothing = [code.ints(0)] * len(ROW_PLACES)
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
    """Return the function that turns integer sums into outputs, by the bias, scale and sum of a row and the minimum and step of a token."""
    b = code.builder

    def finish(place: int, total: Any) -> Any:
        row, vector = divmod(place, VECTORS)
        bias, scale, one = (code.spread(b.load(code.at(base, rows[row]))) for base in numbers)
        least, step = (code.load(tile, code.lanes(code.place(columns, long(i)))[vector]) for i in range(2))
        return code.fma(b.fmul(b.sitofp(total, VECTOR), scale), step, code.fma(least, one, bias))

    return finish


def _narrow(code: Code, kind: Any, tile: Any, width: Any, levels: Any) -> None:
    """Convert a tile (D, LANES) in place to the dtype that `product` multiplies.

    The result holds pairs of bfloat16, (D / 2, LANES), or quads of int8 of rotated features, (D / 4, LANES). Behind the integers stand each
    token's minimum and its step, which is the range over ``levels``, (2, LANES). They are NaN if a token holds NaN or infinity, or if a
    rotated sum overflows.
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
        _hadamard(code, tile, width)
        _quantise(code, tile, width, levels)


def _hadamard(code: Code, tile: Any, width: Any) -> None:
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
    """One step of `_hadamard`: combine four rows of a tile, ``distance`` rows apart."""
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


def _gather(code: Code, rows: Any, stride: Any, count: Any, width: Any, out: Any) -> None:
    """Transpose up to LANES rows to a tile (width, LANES); the last row fills the remaining lanes."""
    rows, out = code.numbers(rows), code.numbers(out)
    code.to_lanes(rows, stride, count, width, lambda vector, place: code.store(vector, out, place))


def _join(code: Code, rows: Any, stride: Any, count: Any, width: Any, out: Any) -> None:
    """Add up to LANES rows to a tile (width, LANES)."""
    rows, out = code.numbers(rows), code.numbers(out)
    code.to_lanes(
        rows, stride, count, width, lambda vector, place: code.store(code.builder.fadd(code.load(out, place), vector), out, place)
    )


def _normalise(code: Code, tile: Any, width: Any, weights: Any, biases: Any, centred: Any, eps: Any, out: Any) -> None:
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


def _rotate(code: Code, tile: Any, half: Any, cosines: Any, sines: Any) -> None:
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


def _scaled_erfc() -> list[float]:
    """Coefficients of erfc(z) exp(z * z) as a polynomial in 1 / (1 + z / 2), z >= 0, of even error."""
    t = (np.cos(np.pi * (np.arange(1000) + 0.5) / 1000) + 1) / 2
    t = t[t > 1 / 6]  # erfc is zero beyond z = 10
    z = 2 / t - 2
    values = [math.erfc(x) * math.exp(x * x) for x in z]
    return [float(c) for c in np.polynomial.polynomial.polyfit(t, values, 9)]


_ERFC = _scaled_erfc()


Activated = tuple[Any, Any]
"""Value and derivative of an activation."""


def _gelu(code: Code, x: Any) -> Activated:
    """Exact GELU to 2e-7: ``x / 2 * erfc(-x / sqrt(2))``."""
    b = code.builder
    below = b.fcmp_ordered("<", x, every(0.0))
    negated = b.fsub(every(-0.0), x)
    size = b.select(below, negated, x)
    z = b.fmul(size, every(math.sqrt(0.5)))
    t = b.fdiv(every(1.0), code.fma(z, every(0.5), every(1.0)))
    polynomial = every(_ERFC[-1])
    for coefficient in _ERFC[-2::-1]:
        polynomial = code.fma(polynomial, t, every(coefficient))
    bell = code.power_of_two(b.fmul(b.fmul(x, x), every(-0.5 / math.log(2))))
    tail = b.fmul(polynomial, bell)  # erfc(|x| / sqrt(2))
    share = b.select(below, tail, b.fsub(every(2.0), tail))
    slope = code.fma(b.fmul(x, every(1 / math.sqrt(2 * math.pi))), bell, b.fmul(share, every(0.5)))
    return b.fmul(b.fmul(x, every(0.5)), share), slope


def _gelu_tanh(code: Code, x: Any) -> Activated:
    b = code.builder
    scale, square = every(2 * math.sqrt(2 / math.pi)), b.fmul(x, x)
    inner = b.fmul(x, code.fma(square, every(0.044715), every(1.0)))
    share = _logistic(code, b.fmul(inner, scale))
    value = b.fmul(x, share)
    steepness = b.fmul(scale, code.fma(square, every(3 * 0.044715), every(1.0)))
    return value, code.fma(b.fmul(value, b.fsub(every(1.0), share)), steepness, share)


def _silu(code: Code, x: Any) -> Activated:
    b = code.builder
    share = _logistic(code, x)
    value = b.fmul(x, share)
    return value, code.fma(value, b.fsub(every(1.0), share), share)


def _relu(code: Code, x: Any) -> Activated:
    b = code.builder
    slope = b.select(b.fcmp_ordered("<=", x, every(0.0)), every(0.0), every(1.0))
    return b.select(b.fcmp_ordered("<", x, every(0.0)), every(0.0), x), slope


_FUNCTIONS: dict[str, Callable[[Code, Any], Activated]] = {"gelu": _gelu, "gelu_tanh": _gelu_tanh, "silu": _silu, "relu": _relu}
ACTIVATIONS = {name: number for number, name in enumerate(_FUNCTIONS)}
"""Index of each activation of `quiver.encoder.ops`."""


def _activate(code: Code, kind: Any, tile: Any, count: Any, out: Any) -> None:
    """Apply an activation to a tile (O, LANES)."""
    tile, out = code.numbers(tile), code.numbers(out)
    for name, number in ACTIVATIONS.items():
        with code.builder.if_then(code.builder.icmp_signed("==", kind, long(number))), code.loop(count) as row:
            for place in code.lanes(row.index):
                code.store(_FUNCTIONS[name](code, code.load(tile, place))[0], out, place)


def _gate(code: Code, kind: Any, tile: Any, gates: Any, count: Any, out: Any) -> None:
    """Multiply an activation of a tile (O, LANES) by another tile."""
    tile, gates, out = code.numbers(tile), code.numbers(gates), code.numbers(out)
    for name, number in ACTIVATIONS.items():
        with code.builder.if_then(code.builder.icmp_signed("==", kind, long(number))), code.loop(count) as row:
            for place in code.lanes(row.index):
                activated, _ = _FUNCTIONS[name](code, code.load(tile, place))
                code.store(code.builder.fmul(activated, code.load(gates, place)), out, place)


def _activation_gradients(code: Code, kind: Any, gated: Any, inner: Any, width: Any, gradient: Any, of_inner: Any) -> None:
    """Backpropagate one token through an activation or gate.

    Its input is (I,) or, gated, (2 I,), and the gradient of that goes to ``of_inner``; the gradient of its output, (I,), is overwritten by
    the output.
    """
    b = code.builder
    inner, gradient, of_inner = (code.numbers(address) for address in (inner, gradient, of_inner))
    for name, number in ACTIVATIONS.items():
        for other in (0, 1):
            chosen = b.and_(b.icmp_signed("==", kind, long(number)), b.icmp_signed("==", gated, long(other)))
            with b.if_then(chosen), code.loop(b.udiv(width, long(WIDTH))) as vector:
                first = code.place((vector.index, long(WIDTH)))
                activated, slope = _FUNCTIONS[name](code, code.load(inner, first))
                given = code.load(gradient, first)
                if other:
                    second = code.place(first, width)
                    gate = code.load(inner, second)
                    code.store(b.fmul(given, activated), of_inner, second)
                    given, activated = b.fmul(given, gate), b.fmul(activated, gate)
                code.store(b.fmul(given, slope), of_inner, first)
                code.store(activated, gradient, first)


def _rotate_row(code: Code, kind: Any, head: Any, half: Any, cosines: Any, sines: Any) -> None:
    """Apply RoPE to one token's head (K,) in place, bfloat16 if ``kind`` says so; cosines and sines are (R/2,) float32."""
    b = code.builder
    numbers, load, store = (
        (code.halves, code.load_halves, code.store_halves) if is_bfloat16(kind) else (code.numbers, code.load, code.store)
    )
    head, cosines, sines = numbers(head), code.numbers(cosines), code.numbers(sines)
    with code.loop(b.udiv(half, long(WIDTH))) as vector:
        place = code.place((vector.index, long(WIDTH)))
        other = code.place(place, half)
        first, second, cosine, sine = load(head, place), load(head, other), code.load(cosines, place), code.load(sines, place)
        store(b.fsub(b.fmul(first, cosine), b.fmul(second, sine)), head, place)
        store(b.fadd(b.fmul(second, cosine), b.fmul(first, sine)), head, other)


product, narrow, gather, join = (emitted(emit) for emit in (_product, _narrow, _gather, _join))
normalise, rotate, activate, gate = (emitted(emit) for emit in (_normalise, _rotate, _activate, _gate))
activation_gradients, rotate_row = (emitted(emit) for emit in (_activation_gradients, _rotate_row))
