"""Pieces of attention that fit a core's registers and first cache, in LLVM's vector types, which no compiler finds by itself.

A tile is a matrix with LANES columns, one for each query of a block: scores (keys by queries), queries and mixtures (K by queries). What
belongs to one query stands in one lane from the scores to the mixture: maxima, sums and rescaling need no operation across lanes. A product
keeps ROWS rows of its result in registers while one number of the other factor after the other meets the whole row of lanes. It reaches
98 % of the processor's multiplications from the first cache (two cores of a Xeon of 2023, 173 of 175 GFLOP/s each).

Addresses are 64-bit integers, strides count float32 numbers. Every function is emitted where it is called; none checks anything.

Shapes: LANES queries, n keys, K head width (a multiple of LARGEST).
Source: FlashAttention, arXiv:2205.14135, algorithm 1 (the running maximum and sum); the layout is ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.extending import intrinsic

__all__ = [
    "HIDDEN",
    "LANES",
    "LARGEST",
    "ROWS",
    "clear",
    "exponents",
    "maxima",
    "mixture",
    "pack",
    "prefetch",
    "rescale",
    "scores",
    "take",
    "unpack",
    "veil",
]

# numba's own types know nothing of its helpers for code.
_cgutils: Any = cgutils


def _registers() -> tuple[int, int, int]:
    """Numbers in a vector, vectors in a row, rows of a product: what the processor's registers hold beside two factors."""
    if config.CPU_NAME is None:
        features = llvm.get_host_cpu_features()
        if features.get("avx512f"):
            return 16, 3, 8
        if features.get("neon"):
            return 4, 4, 4
    return 8, 2, 4  # sixteen registers, as AVX2 has them; right on every processor


WIDTH, VECTORS, ROWS = _registers()
LANES = WIDTH * VECTORS
LARGEST = 16
"""A head is as wide as a multiple of this, whatever the registers are."""

HIDDEN = -1e30
"""A score that nothing may come of, in units of a binary logarithm."""
_LEAST = -125.0  # powers of two below 2 to this are 0

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR, _INTS = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(_INT, WIDTH)


def _long(value: int) -> Any:
    return ir.Constant(_LONG, value)


def _all(value: float) -> Any:
    return ir.Constant(_VECTOR, [float(np.float32(value))] * WIDTH)


class _Code:
    """Code in the making: an LLVM builder with vectors of WIDTH numbers."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def numbers(self, address: Any) -> Any:
        return self.builder.inttoptr(address, _FLOAT.as_pointer())

    def place(self, *factors: Any) -> Any:
        """Sum of pairs' products: (row, stride), ..., and of single numbers."""
        terms = [self.builder.mul(*factor) if isinstance(factor, tuple) else factor for factor in factors]
        total = terms[0]
        for term in terms[1:]:
            total = self.builder.add(total, term)
        return total

    def at(self, base: Any, place: Any) -> Any:
        return self.builder.gep(base, [place])

    def _vector_at(self, base: Any, place: Any) -> Any:
        return self.builder.bitcast(self.at(base, place), _VECTOR.as_pointer())

    def load(self, base: Any, place: Any) -> Any:
        return self.builder.load(self._vector_at(base, place), align=4)

    def store(self, value: Any, base: Any, place: Any) -> None:
        self.builder.store(value, self._vector_at(base, place), align=4)

    def spread(self, value: Any) -> Any:
        """One number in all lanes of a vector."""
        unset = ir.Constant(ir.VectorType(value.type, WIDTH), ir.Undefined)
        first = self.builder.insert_element(unset, value, ir.Constant(_INT, 0))
        return self.builder.shuffle_vector(first, unset, ir.Constant(_INTS, [0] * WIDTH))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        return self.builder.call(_cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.fma.v{WIDTH}f32"), (a, b, c))

    def variables(self, values: Sequence[Any]) -> list[Any]:
        """What changes in a loop; the compiler keeps it in registers."""
        made = [_cgutils.alloca_once(self.builder, value.type) for value in values]
        for variable, value in zip(made, values, strict=True):
            self.builder.store(value, variable)
        return made

    def loop(self, count: Any) -> Any:
        return _cgutils.for_range(self.builder, count)

    def lanes(self, row: Any) -> list[Any]:
        """Places of the vectors of a tile's row."""
        return [self.place((row, _long(LANES)), _long(vector * WIDTH)) for vector in range(VECTORS)]

    def no_further(self, row: Any, rows: Any) -> Any:
        """The row, or the last one where it lies beyond."""
        last = self.builder.sub(rows, _long(1))
        return self.builder.select(self.builder.icmp_signed("<", row, last), row, last)

    def power_of_two(self, x: Any) -> Any:
        """2 ** x to 2e-7 of itself, x <= 127; exactly 0 below 2 ** -125, so that no later product is slowed down by subnormal numbers."""
        b = self.builder
        shift = _all(1.5 * 2**23)  # a number as large as this has no places behind the point
        rounded = b.fadd(x, shift)
        rest = b.fsub(x, b.fsub(rounded, shift))
        power = _all(_POWER[-1])
        for coefficient in _POWER[-2::-1]:
            power = self.fma(power, rest, _all(coefficient))
        exponent = b.shl(b.bitcast(rounded, _INTS), ir.Constant(_INTS, [23] * WIDTH))
        power = b.bitcast(b.add(b.bitcast(power, _INTS), exponent), _VECTOR)
        # Unordered: what is not a number stays so.
        return b.select(b.fcmp_unordered(">", x, _all(_LEAST)), power, _all(0.0))

    def transposed(self, rows: Sequence[Any]) -> list[Any]:
        """WIDTH vectors as the columns of what they were the rows of, by perfect shuffles."""
        half = WIDTH // 2
        low = ir.Constant(_INTS, [x for i in range(half) for x in (i, WIDTH + i)])
        high = ir.Constant(_INTS, [x for i in range(half, WIDTH) for x in (i, WIDTH + i)])
        found = list(rows)
        for _ in range(WIDTH.bit_length() - 1):
            pairs = [(found[i], found[i + half]) for i in range(half)]
            found = [self.builder.shuffle_vector(*pair, order) for pair in pairs for order in (low, high)]
        return found

    def product(self, numbers: Sequence[Any], count: Any, step: Any, tile: Any, out: Any, *, adds: bool) -> None:
        """ROWS rows of a tile: ``out[r] (+)= sum over i of numbers[r][i * step] * tile[i]``, each sum in the order of i."""
        places = [_long(row * LANES + vector * WIDTH) for row in range(ROWS) for vector in range(VECTORS)]
        sums = self.variables([self.load(out, place) if adds else _all(0.0) for place in places])
        with self.loop(count) as loop:
            vectors = [self.load(tile, place) for place in self.lanes(loop.index)]
            at = self.place((loop.index, step))
            for row in range(ROWS):
                number = self.spread(self.builder.load(self.at(numbers[row], at)))
                for vector, total in zip(vectors, sums[row * VECTORS :], strict=False):
                    self.builder.store(self.fma(number, vector, self.builder.load(total)), total)
        for place, total in zip(places, sums, strict=True):
            self.store(self.builder.load(total), out, place)


def _power_of_two() -> list[float]:
    """Coefficients of the fifth degree for 2 ** x between -1/2 and 1/2, of least relative error."""
    x = np.cos(np.pi * (np.arange(2000) + 0.5) / 2000) / 2
    return [float(c) for c in np.polynomial.polynomial.polyfit(x, 2.0**x, 5, w=2.0**-x)]


_POWER = _power_of_two()

Emitter = Callable[..., Any]


def _emitted(emit: Emitter, returns: Any = types.void) -> Any:
    """A function for compiled code, all of whose arguments are numbers, from what emits it, given the code and the arguments."""

    def typed(_context: Any, *arguments: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            result = emit(_Code(builder), *values)
            return context.get_dummy_value() if result is None else result

        return returns(*arguments), generate

    typed.__name__ = emit.__name__
    typed.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]  # numba counts arguments by it
    return intrinsic(typed)


def _scores(code: _Code, queries: Any, keys: Any, stride: Any, count: Any, width: Any, out: Any) -> None:
    """(n, LANES) products of n keys with the queries of a tile (K, LANES); up to the next multiple of ROWS the last is repeated."""
    queries, keys, out = (code.numbers(address) for address in (queries, keys, out))
    tiles = code.builder.udiv(code.place(count, _long(ROWS - 1)), _long(ROWS))
    with code.loop(tiles) as tile:
        first = code.place((tile.index, _long(ROWS)))
        rows = [code.no_further(code.place(first, _long(row)), count) for row in range(ROWS)]
        starts = [code.at(keys, code.place((row, stride))) for row in rows]
        code.product(starts, width, _long(1), queries, code.at(out, code.place((first, _long(LANES)))), adds=False)


def _mixture(code: _Code, values: Any, stride: Any, count: Any, width: Any, weights: Any, out: Any) -> None:
    """Add n values with weights (n, LANES) to a tile (K, LANES)."""
    values, weights, out = (code.numbers(address) for address in (values, weights, out))
    with code.loop(code.builder.udiv(width, _long(ROWS))) as tile:
        first = code.place((tile.index, _long(ROWS)))
        starts = [code.at(values, code.place(first, _long(row))) for row in range(ROWS)]
        code.product(starts, count, stride, weights, code.at(out, code.place((first, _long(LANES)))), adds=True)


def _maxima(code: _Code, scores: Any, count: Any, highest: Any, change: Any) -> Any:
    """Raise the queries' maxima (LANES,) to those of n scores; what they were less what they are, and whether any was raised."""
    b = code.builder
    scores, highest, change = (code.numbers(address) for address in (scores, highest, change))
    before = [code.load(highest, place) for place in code.lanes(_long(0))]
    after = code.variables(before)
    with code.loop(count) as key:
        for place, best in zip(code.lanes(key.index), after, strict=True):
            score, known = code.load(scores, place), b.load(best)
            b.store(b.select(b.fcmp_ordered(">", score, known), score, known), best)
    raised = []
    for place, old, best in zip(code.lanes(_long(0)), before, after, strict=True):
        new = b.load(best)
        code.store(new, highest, place)
        code.store(b.fsub(old, new), change, place)
        raised.append(b.zext(b.bitcast(b.fcmp_ordered(">", new, old), ir.IntType(WIDTH)), _LONG))
    total = raised[0]
    for each in raised[1:]:
        total = b.or_(total, each)
    return total


def _exponents(code: _Code, scores: Any, count: Any, highest: Any, sums: Any) -> None:
    """Scores (n, LANES) to powers of two below the queries' maxima; the queries' sums (LANES,) grow by them."""
    b = code.builder
    scores, highest, sums = (code.numbers(address) for address in (scores, highest, sums))
    tops = [code.load(highest, place) for place in code.lanes(_long(0))]
    totals = code.variables([code.load(sums, place) for place in code.lanes(_long(0))])
    with code.loop(count) as key:
        for place, top, total in zip(code.lanes(key.index), tops, totals, strict=True):
            power = code.power_of_two(b.fsub(code.load(scores, place), top))
            code.store(power, scores, place)
            b.store(b.fadd(b.load(total), power), total)
    for place, total in zip(code.lanes(_long(0)), totals, strict=True):
        code.store(b.load(total), sums, place)


def _rescale(code: _Code, mixtures: Any, width: Any, sums: Any, change: Any) -> None:
    """Mixtures (K, LANES) and sums (LANES,) of queries whose maxima have changed."""
    b = code.builder
    mixtures, sums, change = (code.numbers(address) for address in (mixtures, sums, change))
    factors = [code.power_of_two(code.load(change, place)) for place in code.lanes(_long(0))]
    for base, rows in ((sums, _long(1)), (mixtures, width)):
        with code.loop(rows) as row:
            for place, factor in zip(code.lanes(row.index), factors, strict=True):
                code.store(b.fmul(code.load(base, place), factor), base, place)


def _veil(code: _Code, scores: Any, count: Any, start: Any, half: Any) -> None:
    """Hide scores of keys more than ``half`` away; ``start`` is the first key's place less the first query's."""
    b = code.builder
    scores = code.numbers(scores)
    reach, twice = (code.spread(b.trunc(value, _INT)) for value in (half, code.place(half, half)))
    lanes = [ir.Constant(_INTS, list(range(vector * WIDTH, (vector + 1) * WIDTH))) for vector in range(VECTORS)]
    with code.loop(count) as key:
        at = code.spread(b.trunc(code.place(key.index, start), _INT))
        for place, lane in zip(code.lanes(key.index), lanes, strict=True):
            seen = b.icmp_unsigned("<=", b.add(b.sub(at, lane), reach), twice)
            code.store(b.select(seen, code.load(scores, place), _all(HIDDEN)), scores, place)


def _pack(code: _Code, queries: Any, stride: Any, count: Any, width: Any, factor: Any, out: Any) -> None:
    """Up to LANES queries to a tile (K, LANES), times a factor; the last stands in the lanes that are left."""
    b = code.builder
    queries, out, factor = code.numbers(queries), code.numbers(out), code.spread(b.fptrunc(factor, _FLOAT))
    with code.loop(_long(VECTORS)) as group:
        lane = code.place((group.index, _long(WIDTH)))
        starts = [code.place((code.no_further(code.place(lane, _long(row)), count), stride)) for row in range(WIDTH)]
        with code.loop(b.udiv(width, _long(WIDTH))) as part:
            column = code.place((part.index, _long(WIDTH)))
            for i, vector in enumerate(code.transposed([code.load(queries, code.place(start, column)) for start in starts])):
                code.store(b.fmul(vector, factor), out, code.place((code.place(column, _long(i)), _long(LANES)), lane))


def _unpack(code: _Code, mixtures: Any, width: Any, sums: Any, highest: Any, count: Any, stride: Any, out: Any) -> None:
    """A tile (K, LANES) over its sums (LANES,) to the first of LANES rows; zeros for queries that have seen nothing."""
    b = code.builder
    mixtures, sums, highest, out = (code.numbers(address) for address in (mixtures, sums, highest, out))
    with code.loop(_long(VECTORS)) as group:
        lane = code.place((group.index, _long(WIDTH)))
        blind = b.fcmp_ordered("<=", code.load(highest, lane), _all(HIDDEN))
        share = b.select(blind, _all(0.0), b.fdiv(_all(1.0), code.load(sums, lane)))
        with code.loop(b.udiv(width, _long(WIDTH))) as part:
            column = code.place((part.index, _long(WIDTH)))
            places = [code.place((code.place(column, _long(i)), _long(LANES)), lane) for i in range(WIDTH)]
            for i, vector in enumerate(code.transposed([b.fmul(code.load(mixtures, place), share) for place in places])):
                row = code.place(lane, _long(i))
                with b.if_then(b.icmp_signed("<", row, count)):
                    code.store(vector, out, code.place((row, stride), column))


def _clear(code: _Code, out: Any, rows: Any, value: Any) -> None:
    """Fill a tile (rows, LANES) with a number."""
    out, filled = code.numbers(out), code.spread(code.builder.fptrunc(value, _FLOAT))
    with code.loop(rows) as row:
        for place in code.lanes(row.index):
            code.store(filled, out, place)


def _prefetch(code: _Code, base: Any, stride: Any, rows: Any, width: Any) -> None:
    """Ask for rows of K numbers that will be read next."""
    b, byte = code.builder, ir.IntType(8).as_pointer()
    base = code.numbers(base)
    kind = ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT])
    ask = _cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    reads, nearest, data = (ir.Constant(_INT, value) for value in (0, 3, 1))
    with code.loop(rows) as row, code.loop(b.udiv(width, _long(16))) as line:
        place = code.place((row.index, stride), (line.index, _long(16)))
        b.call(ask, [b.bitcast(code.at(base, place), byte), reads, nearest, data])


def _take(code: _Code, address: Any) -> Any:
    """The integer at an address, which no other thread is given: it is one more afterwards."""
    return code.builder.atomic_rmw("add", code.builder.inttoptr(address, _LONG.as_pointer()), _long(1), "monotonic")


scores, mixture, exponents, rescale = (_emitted(emit) for emit in (_scores, _mixture, _exponents, _rescale))
veil, pack, unpack, clear, prefetch = (_emitted(emit) for emit in (_veil, _pack, _unpack, _clear, _prefetch))
maxima, take = (_emitted(emit, types.int64) for emit in (_maxima, _take))
