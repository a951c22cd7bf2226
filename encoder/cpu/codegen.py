"""LLVM vector code for the kernels, which no compiler generates by itself, and products by AMX.

A tile is a matrix with LANES columns, one per token. Values of one token stay in one lane: maxima, sums, norms and rescaling need no
operation across lanes. A product keeps ROWS rows of its result in registers while each value of the other factor is multiplied with a row
of lanes; from the first-level cache it reaches 98 % of the CPU's peak (two cores of a Xeon of 2023, 173 of 175 GFLOP/s each).

A bfloat16 unit is a pair, whose products one instruction sums, an int8 unit four values, whose products are summed in 32 bits; each fills
the 32 bits of a float32 and is moved as one. AMX, the matrix unit of Intel CPUs from 2023 on, multiplies 16 rows by 16 lanes at a time.

Addresses are 64-bit integers, strides count 32-bit units. Everything is emitted inline, and nothing is checked. What the
code contains is computed when it is generated: a process that finds the kernels compiled on disk calls nothing here.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18, and volume 2 (LDTILECFG, TDPBF16PS, TDPBSUD).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import initialize_native_asmparser  # type: ignore[import-untyped]
from numba.core import cgutils

from quiver.encoder.cpu.jit import intrinsic_of
from quiver.encoder.cpu.support import amx_is_native, int8_instruction, vector_width

# numba initialises the code generator without the assembly parser, which inline assembly in its cache needs.
initialize_native_asmparser()

# numba's types do not cover its code helpers.
_cgutils: Any = cgutils


# Floats per vector, vectors per row and rows per product: what fits the CPU's 32 or 16 registers beside two factors.
VECTORS = 3
WIDTH, ROWS = (16, 8) if vector_width() == 16 else (8, 4)
LANES = WIDTH * VECTORS

# Steps of a product between loop checks, which compete with multiplications. ModernBERT-base over 8,192 tokens takes 2.4 % less time with
# eight on two cores of a Xeon of 2023, but half as long again to compile; with four, a quarter. On an EPYC of 2022 the checks cost nothing.
STEPS = 4

_LEAST = -125.0  # smaller powers of two are 0

FLOAT, BYTE, INT, LONG = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
VECTOR, INTS = ir.VectorType(FLOAT, WIDTH), ir.VectorType(INT, WIDTH)

FLOAT32, BFLOAT16, INT8 = np.float32(0), np.uint16(0), np.uint8(0)
"""What a function multiplies, as an argument of one of these types: float32, pairs of bfloat16, or quads of int8."""


def long(value: int) -> Any:
    """A constant integer."""
    return ir.Constant(LONG, value)


@cache
def row_places() -> tuple[Any, ...]:
    """Offsets of the vectors of a product's rows."""
    return tuple(long(row * LANES + vector * WIDTH) for row in range(ROWS) for vector in range(VECTORS))


def is_bfloat16(kind: Any) -> bool:
    """Return whether an argument is `BFLOAT16`; known when the code is generated."""
    return bool(kind.type == ir.IntType(16))


def is_int8(kind: Any) -> bool:
    """Return whether an argument is `INT8`."""
    return bool(kind.type == BYTE)


def uses_amx(kind: Any) -> bool:
    """Return whether AMX multiplies the dtype of an argument."""
    return (is_bfloat16(kind) or is_int8(kind)) and amx_is_native()


def every(value: float) -> Any:
    """A vector with a constant in all lanes."""
    return ir.Constant(VECTOR, [float(np.float32(value))] * WIDTH)


class Code:
    """An LLVM builder with vectors of WIDTH floats."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def numbers(self, address: Any) -> Any:
        """Return an address as a pointer to float32."""
        return self.builder.inttoptr(address, FLOAT.as_pointer())

    def place(self, *factors: Any) -> Any:
        """Emit an offset: the sum of products, given as pairs (index, stride), and of single terms."""
        terms = [self.builder.mul(*factor) if isinstance(factor, tuple) else factor for factor in factors]
        total = terms[0]
        for term in terms[1:]:
            total = self.builder.add(total, term)
        return total

    def at(self, base: Any, place: Any) -> Any:
        """Return a pointer to an element."""
        return self.builder.gep(base, [place])

    def _vector_at(self, base: Any, place: Any) -> Any:
        return self.builder.bitcast(self.at(base, place), VECTOR.as_pointer())

    def load(self, base: Any, place: Any) -> Any:
        """Load a vector."""
        return self.builder.load(self._vector_at(base, place), align=4)

    def store(self, value: Any, base: Any, place: Any) -> None:
        """Store a vector."""
        self.builder.store(value, self._vector_at(base, place), align=4)

    def spread(self, value: Any) -> Any:
        """Broadcast a value to all lanes of a vector."""
        unset = ir.Constant(ir.VectorType(value.type, WIDTH), ir.Undefined)
        first = self.builder.insert_element(unset, value, ir.Constant(INT, 0))
        return self.builder.shuffle_vector(first, unset, ir.Constant(INTS, [0] * WIDTH))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Fused multiply-add, ``a * b + c``, rounded once."""
        return self.call(f"llvm.fma.v{WIDTH}f32", VECTOR, a, b, c)

    def add_pairs(self, a: Any, b: Any, c: Any) -> Any:
        """Multiply bfloat16 pairs and add, ``a[0] * b[0] + a[1] * b[1] + c``."""
        a, b = (self.builder.bitcast(each, INTS) for each in (a, b))
        # By assembly: the signature of LLVM's intrinsic has changed between versions.
        return self._instruction("vdpbf16ps $3, $2, $0", "=v,0,v,v", VECTOR, c, a, b)

    def add_quads(self, a: Any, b: Any, c: Any) -> Any:
        """Multiply quads of 8-bit integers and add in 32 bits, ``a[0] * b[0] + ... + a[3] * b[3] + c``; those of b are unsigned."""
        a, b = (self.builder.bitcast(each, INTS) for each in (a, b))
        if instruction := int8_instruction():
            return self._instruction(f"{instruction} $2, $3, $0", "=v,0,v,v", INTS, c, a, b)
        pairs = self._instruction("vpmaddubsw $1, $2, $0", "=v,v,v", INTS, a, b)
        ones = ir.Constant(INTS, [0x00010001] * WIDTH)
        return self.builder.add(c, self._instruction("vpmaddwd $1, $2, $0", "=v,v,v", INTS, ones, pairs))

    def paired(self, first: Any, second: Any) -> Any:
        """Round two vectors to bfloat16 pairs, to nearest even."""
        both = self._instruction("vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", INTS, first, second)
        return self._interleave(both, both, [each for i in range(WIDTH) for each in (i, WIDTH + i)])

    def woven(self, first: Any, second: Any) -> list[Any]:
        """Interleave the bfloat16 values of two vectors of pairs; returns two vectors."""
        halves = 2 * WIDTH
        return [self._interleave(first, second, [x for i in range(start, start + WIDTH) for x in (i, halves + i)]) for start in (0, WIDTH)]

    def _interleave(self, first: Any, second: Any, order: list[int]) -> Any:
        narrow = ir.VectorType(ir.IntType(16), 2 * WIDTH)
        places = ir.Constant(ir.VectorType(INT, len(order)), order)
        first, second = (self.builder.bitcast(each, narrow) for each in (first, second))
        return self.builder.bitcast(self.builder.shuffle_vector(first, second, places), VECTOR)

    def ints(self, value: int) -> Any:
        """A vector with a constant integer in all lanes."""
        return ir.Constant(INTS, [value] * WIDTH)

    def _instruction(self, text: str, constraints: str, returns: Any, *arguments: Any) -> Any:
        """Emit a CPU instruction in AT&T notation."""
        kind = ir.FunctionType(returns, [argument.type for argument in arguments])
        return self.builder.asm(kind, text, constraints, arguments, side_effect=False)

    def call(self, name: str, returns: Any, *arguments: Any) -> Any:
        """Call an LLVM intrinsic."""
        kind = ir.FunctionType(returns, [argument.type for argument in arguments])
        return self.builder.call(_cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def variables(self, values: Sequence[Any]) -> list[Any]:
        """Allocate loop variables; the compiler keeps them in registers."""
        made = [_cgutils.alloca_once(self.builder, value.type) for value in values]
        for variable, value in zip(made, values, strict=True):
            self.builder.store(value, variable)
        return made

    def loop(self, count: Any) -> Any:
        """Emit a loop; its ``index`` runs from 0 to ``count`` - 1."""
        return _cgutils.for_range(self.builder, count)

    def lanes(self, row: Any) -> list[Any]:
        """Return the offsets of the vectors of a tile's row."""
        return [self.place((row, long(LANES)), long(vector * WIDTH)) for vector in range(VECTORS)]

    def no_further(self, row: Any, rows: Any) -> Any:
        """Clamp a row number to the last row."""
        last = self.builder.sub(rows, long(1))
        return self.builder.select(self.builder.icmp_signed("<", row, last), row, last)

    def power_of_two(self, x: Any) -> Any:
        """Compute 2 ** x with relative error 2e-7, x <= 127.

        It is exactly 0 below 2 ** -125, so that subnormal numbers do not slow down later products.
        """
        # Unordered comparison: NaN stays NaN.
        visible = self.builder.fcmp_unordered(">", x, every(_LEAST))
        return self.builder.select(visible, self._power_of_two(x, _power_of_two(5)), every(0.0))

    def coarse_power_of_two(self, x: Any) -> Any:
        """Compute 2 ** x with relative error 1e-4, a twentieth of bfloat16 rounding; exactly 0 below 2 ** -126.5."""
        b = self.builder
        # The exponent bits are zero there. NaN stays NaN.
        x = b.select(b.fcmp_ordered(">", every(-127.0), x), every(-127.0), x)
        return self._power_of_two(x, _power_of_two(3))

    def _power_of_two(self, x: Any, coefficients: Sequence[float]) -> Any:
        b = self.builder
        # A number of this size has no fractional bits; the bits before them end in n + 127, the exponent bits of 2 ** n.
        shift = every(1.5 * 2**23 + 127)
        rounded = b.fadd(x, shift)
        rest = b.fsub(x, b.fsub(rounded, shift))
        power = every(coefficients[-1])
        for coefficient in coefficients[-2::-1]:
            power = self.fma(power, rest, every(coefficient))
        scale = b.bitcast(b.shl(b.bitcast(rounded, INTS), self.ints(23)), VECTOR)
        return b.fmul(power, scale)

    def transposed(self, rows: Sequence[Any]) -> list[Any]:
        """Transpose WIDTH vectors by perfect shuffles."""
        half = WIDTH // 2
        low = ir.Constant(INTS, [x for i in range(half) for x in (i, WIDTH + i)])
        high = ir.Constant(INTS, [x for i in range(half, WIDTH) for x in (i, WIDTH + i)])
        found = list(rows)
        for _ in range(WIDTH.bit_length() - 1):
            pairs = [(found[i], found[i + half]) for i in range(half)]
            found = [self.builder.shuffle_vector(*pair, order) for pair in pairs for order in (low, high)]
        return found

    def product(
        self,
        numbers: Sequence[Any],
        count: Any,
        step: Any,
        tile: Any,
        starts: Sequence[Any],
        out: Any,
        *,
        multiply: Callable[[Any, Any, Any], Any] | None = None,
        finish: Callable[[int, Any], Any] | None = None,
    ) -> None:
        """Compute ROWS rows of a tile: ``out[r] = starts[r] + sum over i of numbers[r][i * step] * tile[i]``, each sum in the order of i.

        ``finish`` maps an index in `row_places` and the sum to the stored value.
        """
        multiply = multiply or self.fma
        sums = self.variables(starts)

        def add(i: Any) -> None:
            vectors = [self.load(tile, place) for place in self.lanes(i)]
            at = self.place((i, step))
            for row in range(ROWS):
                number = self.spread(self.builder.load(self.at(numbers[row], at)))
                for vector, total in zip(vectors, sums[row * VECTORS :], strict=False):
                    self.builder.store(multiply(number, vector, self.builder.load(total)), total)

        steps = self.builder.udiv(count, long(STEPS))
        with self.loop(steps) as loop:
            for i in range(STEPS):
                add(self.place((loop.index, long(STEPS)), long(i)))
        with self.loop(self.builder.urem(count, long(STEPS))) as loop:
            add(self.place((steps, long(STEPS)), loop.index))
        for i, (place, total) in enumerate(zip(row_places(), sums, strict=True)):
            result = self.builder.load(total)
            self.store(result if finish is None else finish(i, result), out, place)

    def to_lanes(self, rows: Any, stride: Any, count: Any, width: Any, give: Callable[[Any, Any], None]) -> None:
        """Transpose up to LANES rows, the last of which fills the rest: passes each vector and its offset in a tile (width, LANES) on."""
        with self.loop(long(VECTORS)) as group:
            lane = self.place((group.index, long(WIDTH)))
            starts = [self.place((self.no_further(self.place(lane, long(row)), count), stride)) for row in range(WIDTH)]
            with self.loop(self.builder.udiv(width, long(WIDTH))) as part:
                column = self.place((part.index, long(WIDTH)))
                for i, vector in enumerate(self.transposed([self.load(rows, self.place(start, column)) for start in starts])):
                    give(vector, self.place((self.place(column, long(i)), long(LANES)), lane))

    def to_rows(self, take: Callable[[Any], Any], count: Any, width: Any, out: Any, stride: Any) -> None:
        """Transpose a tile (width, LANES) to LANES rows and store the first ``count``; ``take`` returns the vector at an offset."""
        with self.loop(long(VECTORS)) as group:
            lane = self.place((group.index, long(WIDTH)))
            with self.loop(self.builder.udiv(width, long(WIDTH))) as part:
                column = self.place((part.index, long(WIDTH)))
                places = [self.place((self.place(column, long(i)), long(LANES)), lane) for i in range(WIDTH)]
                for i, vector in enumerate(self.transposed([take(place) for place in places])):
                    row = self.place(lane, long(i))
                    with self.builder.if_then(self.builder.icmp_signed("<", row, count)):
                        self.store(vector, out, self.place((row, stride), column))


@cache
def _power_of_two(degree: int) -> list[float]:
    """Coefficients of 2 ** x between -1/2 and 1/2 with minimal relative error."""
    x = np.cos(np.pi * (np.arange(2000) + 0.5) / 2000) / 2
    return [float(c) for c in np.polynomial.polynomial.polyfit(x, 2.0**x, degree, w=2.0**-x)]


emitted = partial(intrinsic_of, Code)
"""Decorator: make a function for compiled code from a function that emits it."""


AMX_ROWS = 16
"""Rows of an AMX register, its lanes, and the steps of a product that it holds."""
AMX_CONFIG_BYTES = 64
"""Scratch bytes for `amx_begin`."""

# Registers of steps before the next rows are started: so long their tile stays in the first-level cache. On a core of a Xeon of 2024
# products of ModernBERT-base reach 1,340 GFLOP/s with 8, 1,250 with 12 and 1,000 with 24; oneDNN reaches 950.
AMX_DEPTH = 8

_AMX_COLUMNS = LANES // AMX_ROWS
_SUMS, _FACTORS = range(_AMX_COLUMNS), range(_AMX_COLUMNS, 2 * _AMX_COLUMNS)
_FIRST, _SECOND = 2 * _AMX_COLUMNS, 2 * _AMX_COLUMNS + 1  # rows alternate
_LINE = 64


def _amx_instruction(code: Code, name: str, *arguments: Any) -> None:
    code.call(f"llvm.x86.{name}", ir.VoidType(), *arguments)


def _pointer(code: Code, address: Any) -> Any:
    return code.builder.inttoptr(address, BYTE.as_pointer())


@emitted
def amx_begin(code: Code, kind: Any, address: Any) -> None:
    """Configure the thread's AMX registers if products of this dtype use them; ``address`` points to `AMX_CONFIG_BYTES` of scratch."""
    if not uses_amx(kind):
        return
    # Palette, bytes per row of each register, rows of each.
    setting = bytearray([1, *[0] * 15, *[_LINE, 0] * 8, *[0] * 16, *[AMX_ROWS] * 8, *[0] * 8])
    value = ir.Constant(ir.ArrayType(BYTE, AMX_CONFIG_BYTES), setting)
    code.builder.store(value, code.builder.inttoptr(address, value.type.as_pointer()), align=1)
    _amx_instruction(code, "ldtilecfg", _pointer(code, address))


@emitted
def amx_end(code: Code, kind: Any) -> None:
    """Release the registers, which other libraries configure differently."""
    if uses_amx(kind):
        _amx_instruction(code, "tilerelease")


def amx_product(code: Code, kind: Any, rows: Any, stride: Any, shape: tuple[Any, Any], tile: Any, out: Any, *, add: bool) -> None:
    """Compute rows of a tile: ``out[r] = sum over i of rows[r * stride + i] * tile[i]``; added to ``out`` if ``add``.

    Rows, tile and ``out`` are addresses; ``shape`` counts rows and 32-bit columns, both multiples of `AMX_ROWS`.
    """
    b = code.builder
    count, columns = shape
    steps, row_bytes, lane_bytes = b.udiv(columns, long(AMX_ROWS)), b.mul(stride, long(4)), long(LANES * 4)
    multiply = "tdpbf16ps" if is_bfloat16(kind) else "tdpbsud"

    def move(name: str, register: int, address: Any, step: Any) -> None:
        _amx_instruction(code, name, ir.Constant(BYTE, register), _pointer(code, address), step)

    with code.loop(b.udiv(code.place(steps, long(AMX_DEPTH - 1)), long(AMX_DEPTH))) as part:
        first = code.place((part.index, long(AMX_DEPTH)))
        rest = b.sub(steps, first)
        depth = b.select(b.icmp_signed("<", rest, long(AMX_DEPTH)), rest, long(AMX_DEPTH))
        with code.loop(b.udiv(count, long(AMX_ROWS))) as block:
            target = code.place(out, (block.index, long(AMX_ROWS * LANES * 4)))
            places = [code.place(target, long(_LINE * i)) for i in _SUMS]
            with b.if_else(b.icmp_signed("==", part.index, long(-1 if add else 0))) as (anew, further):
                with anew:
                    for register in _SUMS:
                        _amx_instruction(code, "tilezero", ir.Constant(BYTE, register))
                with further:
                    for register, place in zip(_SUMS, places, strict=True):
                        move("tileloadd64", register, place, lane_bytes)
            numbers = code.place(rows, (block.index, b.mul(row_bytes, long(AMX_ROWS))), (first, long(_LINE)))
            lanes = code.place(tile, (first, long(AMX_ROWS * LANES * 4)))

            def add_up(step: Any, register: int, numbers: Any = numbers, lanes: Any = lanes) -> None:
                move("tileloadd64", register, code.place(numbers, (step, long(_LINE))), row_bytes)
                begin = code.place(lanes, (step, long(AMX_ROWS * LANES * 4)))
                for total, factor in zip(_SUMS, _FACTORS, strict=True):
                    move("tileloadd64", factor, code.place(begin, long(_LINE * total)), lane_bytes)
                    _amx_instruction(code, multiply, ir.Constant(BYTE, total), ir.Constant(BYTE, register), ir.Constant(BYTE, factor))

            with code.loop(b.udiv(depth, long(2))) as pair:
                for i, register in enumerate((_FIRST, _SECOND)):
                    add_up(code.place((pair.index, long(2)), long(i)), register)
            with b.if_then(b.trunc(depth, ir.IntType(1))):
                add_up(b.sub(depth, long(1)), _FIRST)
            for register, place in zip(_SUMS, places, strict=True):
                move("tilestored64", register, place, lane_bytes)
