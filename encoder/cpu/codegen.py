"""Code for compiled loops in LLVM's vector types, which no compiler finds by itself.

A tile is a matrix with LANES columns, one for each of some tokens. What belongs to one token stays in one lane: maxima, sums, norms and
rescaling need no operation across lanes. A product keeps ROWS rows of its result in registers while one number of the other factor after
the other meets the whole row of lanes; from the first cache it reaches 98 % of the processor's multiplications (two cores of a Xeon of
2023, 173 of 175 GFLOP/s each).

Where a product multiplies bfloat16, one number is a pair of them, whose products are summed up: twice the rate on processors that do this
in one instruction. A pair fills the 32 bits of a float32 number and is moved as one. So do four integers of 8 bits, whose products are
summed up in 32 bits: four times the rate in one instruction, twice the rate in the three that every processor with AVX2 has for it.
Processors with AMX multiply both 16 rows by 16 lanes at a time, in registers of their own.

Addresses are 64-bit integers, strides count 32 bits. Everything is emitted where it is called, and checks nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import initialize_native_asmparser  # type: ignore[import-untyped]
from numba.core import cgutils, config, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from quiver.encoder.cpu.support import has_amx

# Numba starts what makes code without what reads assembly, which it needs for its own kept code too.
initialize_native_asmparser()

# numba's own types know nothing of its helpers for code.
_cgutils: Any = cgutils


def _features() -> list[str]:
    """What the processor has that numba compiles for; numba keeps code by the same words, so what follows from them cannot be mixed up."""
    features: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return features.split(",")


def unsupported_reason() -> str | None:
    """Why loops made of this code should not run here; None where they should."""
    if config.DISABLE_JIT:
        return "numba is told not to compile (NUMBA_DISABLE_JIT)"
    if "+fma" not in _features():
        return "numba is told to compile for a processor without fused multiplications"
    return None


def int8_levels() -> int:
    """How large the integers without a sign may be where code multiplies four of 8 bits; 0 where it does not.

    Without an instruction for four, two products at a time are summed up in 16 bits, which holds those of 7 bits.
    """
    if _int8_instruction() is not None:
        return 255
    return 127 if ("+avx2" if WIDTH == 8 else "+avx512bw") in _features() else 0


def _int8_instruction() -> str | None:
    """The processor's instruction for them."""
    if WIDTH == 16:
        return "vpdpbusd" if "+avx512vnni" in _features() else None
    return "{vex} vpdpbusd" if "+avxvnni" in _features() else None


def bfloat16_is_native() -> bool:
    """Whether code multiplies pairs of bfloat16 in one instruction; elsewhere it does with several, whose last places may differ."""
    return "+avx512bf16" in _features()


def amx_is_native() -> bool:
    """Whether code multiplies pairs and fours by AMX (`quiver.encoder.cpu.codegen`)."""
    return WIDTH == 16 and {"+amx-bf16", "+amx-int8"} <= set(_features()) and has_amx()


def _registers() -> tuple[int, int, int]:
    """Numbers in a vector, vectors in a row, rows of a product: what the processor's registers hold beside two factors."""
    return (16, 3, 8) if "+avx512f" in _features() else (8, 3, 4)  # 32 registers, or 16


WIDTH, VECTORS, ROWS = _registers()
LANES = WIDTH * VECTORS

# Steps of a product between two questions whether it is done, which take turns from multiplications. A pass of ModernBERT-base over 8,192
# tokens takes 2.4 % less time with eight on two cores of a Xeon of 2023, but compiling half as long again; with four that is a quarter.
# An EPYC of 2022 has turns to spare.
STEPS = 4

_LEAST = -125.0  # powers of two below 2 to this are 0

FLOAT, BYTE, INT, LONG = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
VECTOR, INTS = ir.VectorType(FLOAT, WIDTH), ir.VectorType(INT, WIDTH)
HALVES = ir.VectorType(ir.IntType(16), WIDTH)

FLOAT32, BFLOAT16, INT8 = np.float32(0), np.uint16(0), np.uint8(0)
"""What a function multiplies, as an argument of one of these types: float32 numbers, pairs of bfloat16, or four integers of 8 bits."""


def long(value: int) -> Any:
    """An integer known beforehand."""
    return ir.Constant(LONG, value)


ROW_PLACES = [long(row * LANES + vector * WIDTH) for row in range(ROWS) for vector in range(VECTORS)]
"""Where the vectors of a product's rows lie."""


def is_bfloat16(kind: Any) -> bool:
    """Whether an argument says `BFLOAT16`; it is known while code is made."""
    return bool(kind.type == ir.IntType(16))


def is_int8(kind: Any) -> bool:
    """Whether an argument says `INT8`."""
    return bool(kind.type == BYTE)


def uses_amx(kind: Any) -> bool:
    """Whether AMX multiplies what an argument says."""
    return (is_bfloat16(kind) or is_int8(kind)) and amx_is_native()


def every(value: float) -> Any:
    """A number known beforehand in all lanes of a vector."""
    return ir.Constant(VECTOR, [float(np.float32(value))] * WIDTH)


class Code:
    """Code in the making: an LLVM builder with vectors of WIDTH numbers."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def numbers(self, address: Any) -> Any:
        """What lies at an address, as numbers."""
        return self.builder.inttoptr(address, FLOAT.as_pointer())

    def halves(self, address: Any) -> Any:
        """What lies at an address, as bfloat16 numbers."""
        return self.builder.inttoptr(address, HALVES.element.as_pointer())

    def place(self, *factors: Any) -> Any:
        """Sum of pairs' products: (row, stride), ..., and of single numbers."""
        terms = [self.builder.mul(*factor) if isinstance(factor, tuple) else factor for factor in factors]
        total = terms[0]
        for term in terms[1:]:
            total = self.builder.add(total, term)
        return total

    def at(self, base: Any, place: Any) -> Any:
        """Where a number lies."""
        return self.builder.gep(base, [place])

    def _vector_at(self, base: Any, place: Any) -> Any:
        return self.builder.bitcast(self.at(base, place), VECTOR.as_pointer())

    def load(self, base: Any, place: Any) -> Any:
        """A vector."""
        return self.builder.load(self._vector_at(base, place), align=4)

    def store(self, value: Any, base: Any, place: Any) -> None:
        """Write a vector."""
        self.builder.store(value, self._vector_at(base, place), align=4)

    def spread(self, value: Any) -> Any:
        """One number in all lanes of a vector."""
        unset = ir.Constant(ir.VectorType(value.type, WIDTH), ir.Undefined)
        first = self.builder.insert_element(unset, value, ir.Constant(INT, 0))
        return self.builder.shuffle_vector(first, unset, ir.Constant(INTS, [0] * WIDTH))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Product and sum, ``a * b + c``, rounded once."""
        return self.call(f"llvm.fma.v{WIDTH}f32", VECTOR, a, b, c)

    def add_pairs(self, a: Any, b: Any, c: Any) -> Any:
        """Products of pairs of bfloat16 and a sum, ``a[0] * b[0] + a[1] * b[1] + c``."""
        a, b = (self.builder.bitcast(each, INTS) for each in (a, b))
        if bfloat16_is_native():
            # By its name: LLVM's function for it has had other types in every few versions.
            return self._instruction("vdpbf16ps $3, $2, $0", "=v,0,v,v", VECTOR, c, a, b)
        for part in (self._low_halves, self._high_halves):
            c = self.fma(part(a), part(b), c)
        return c

    def add_quads(self, a: Any, b: Any, c: Any) -> Any:
        """Products of four integers of 8 bits and a sum of 32 bits, ``a[0] * b[0] + ... + a[3] * b[3] + c``; those of b have no sign."""
        a, b = (self.builder.bitcast(each, INTS) for each in (a, b))
        if instruction := _int8_instruction():
            return self._instruction(f"{instruction} $2, $3, $0", "=v,0,v,v", INTS, c, a, b)
        pairs = self._instruction("vpmaddubsw $1, $2, $0", "=v,v,v", INTS, a, b)
        ones = ir.Constant(INTS, [0x00010001] * WIDTH)
        return self.builder.add(c, self._instruction("vpmaddwd $1, $2, $0", "=v,v,v", INTS, ones, pairs))

    def paired(self, first: Any, second: Any) -> Any:
        """Pairs of bfloat16 of two vectors, rounded to even."""
        if bfloat16_is_native():
            both = self._instruction("vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", INTS, first, second)
            return self._woven(both, both, [each for i in range(WIDTH) for each in (i, WIDTH + i)])
        low, high = (self._rounded(each) for each in (first, second))
        return self.builder.bitcast(self.builder.or_(self.builder.lshr(low, self.ints(16)), high), VECTOR)

    def woven(self, first: Any, second: Any) -> list[Any]:
        """Pairs of one bfloat16 of each of two vectors of pairs, in two vectors."""
        halves = 2 * WIDTH
        return [self._woven(first, second, [x for i in range(start, start + WIDTH) for x in (i, halves + i)]) for start in (0, WIDTH)]

    def _woven(self, first: Any, second: Any, order: list[int]) -> Any:
        narrow = ir.VectorType(ir.IntType(16), 2 * WIDTH)
        places = ir.Constant(ir.VectorType(INT, len(order)), order)
        first, second = (self.builder.bitcast(each, narrow) for each in (first, second))
        return self.builder.bitcast(self.builder.shuffle_vector(first, second, places), VECTOR)

    def load_halves(self, base: Any, place: Any) -> Any:
        """A vector of bfloat16 numbers; the place counts them."""
        address = self.builder.bitcast(self.at(base, place), HALVES.as_pointer())
        wide = self.builder.zext(self.builder.load(address, align=2), INTS)
        return self._low_halves(wide)

    def store_halves(self, value: Any, base: Any, place: Any) -> None:
        """Write a vector as bfloat16 numbers, rounded to even; the place counts them."""
        address = self.builder.bitcast(self.at(base, place), HALVES.as_pointer())
        if bfloat16_is_native():
            narrow = self._instruction("vcvtneps2bf16 $1, $0", "=v,v", HALVES, value)
        else:
            narrow = self.builder.trunc(self.builder.lshr(self._rounded(value), self.ints(16)), HALVES)
        self.builder.store(narrow, address, align=2)

    def ints(self, value: int) -> Any:
        """An integer known beforehand in all lanes of a vector."""
        return ir.Constant(INTS, [value] * WIDTH)

    def _low_halves(self, pairs: Any) -> Any:
        return self.builder.bitcast(self.builder.shl(pairs, self.ints(16)), VECTOR)

    def _high_halves(self, pairs: Any) -> Any:
        return self.builder.bitcast(self.builder.and_(pairs, self.ints(0xFFFF0000)), VECTOR)

    def _rounded(self, x: Any) -> Any:
        """The bits of numbers rounded to bfloat16; what is not a number stays so."""
        b = self.builder
        bits = b.bitcast(x, INTS)
        odd = b.and_(b.lshr(bits, self.ints(16)), self.ints(1))
        rounded = b.and_(b.add(bits, b.add(odd, self.ints(0x7FFF))), self.ints(0xFFFF0000))
        return b.select(b.fcmp_unordered("uno", x, x), self.ints(0x7FC00000), rounded)

    def _instruction(self, text: str, constraints: str, returns: Any, *arguments: Any) -> Any:
        """One of the processor's own instructions, in AT&T's notation."""
        kind = ir.FunctionType(returns, [argument.type for argument in arguments])
        return self.builder.asm(kind, text, constraints, arguments, side_effect=False)

    def call(self, name: str, returns: Any, *arguments: Any) -> Any:
        """One of LLVM's own functions."""
        kind = ir.FunctionType(returns, [argument.type for argument in arguments])
        return self.builder.call(_cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def variables(self, values: Sequence[Any]) -> list[Any]:
        """What changes in a loop; the compiler keeps it in registers."""
        made = [_cgutils.alloca_once(self.builder, value.type) for value in values]
        for variable, value in zip(made, values, strict=True):
            self.builder.store(value, variable)
        return made

    def loop(self, count: Any) -> Any:
        """For ``index`` of the result from 0 on."""
        return _cgutils.for_range(self.builder, count)

    def lanes(self, row: Any) -> list[Any]:
        """Places of the vectors of a tile's row."""
        return [self.place((row, long(LANES)), long(vector * WIDTH)) for vector in range(VECTORS)]

    def no_further(self, row: Any, rows: Any) -> Any:
        """The row, or the last one where it lies beyond."""
        last = self.builder.sub(rows, long(1))
        return self.builder.select(self.builder.icmp_signed("<", row, last), row, last)

    def power_of_two(self, x: Any) -> Any:
        """2 ** x to 2e-7 of itself, x <= 127; exactly 0 below 2 ** -125, so that no later product is slowed down by subnormal numbers."""
        # Unordered: what is not a number stays so.
        visible = self.builder.fcmp_unordered(">", x, every(_LEAST))
        return self.builder.select(visible, self._power_of_two(x, _POWER), every(0.0))

    def coarse_power_of_two(self, x: Any) -> Any:
        """2 ** x to 1e-4 of itself, a twentieth of what rounding to bfloat16 changes; exactly 0 below 2 ** -126.5."""
        b = self.builder
        # Its exponent's bits are none there. What is not a number stays so.
        x = b.select(b.fcmp_ordered(">", every(-127.0), x), every(-127.0), x)
        return self._power_of_two(x, _COARSE_POWER)

    def _power_of_two(self, x: Any, coefficients: Sequence[float]) -> Any:
        b = self.builder
        # A number as large as this has no places behind the point; those before it end in n + 127, the exponent's bits of 2 ** n.
        shift = every(1.5 * 2**23 + 127)
        rounded = b.fadd(x, shift)
        rest = b.fsub(x, b.fsub(rounded, shift))
        power = every(coefficients[-1])
        for coefficient in coefficients[-2::-1]:
            power = self.fma(power, rest, every(coefficient))
        scale = b.bitcast(b.shl(b.bitcast(rounded, INTS), self.ints(23)), VECTOR)
        return b.fmul(power, scale)

    def transposed(self, rows: Sequence[Any]) -> list[Any]:
        """WIDTH vectors as the columns of what they were the rows of, by perfect shuffles."""
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
        """ROWS rows of a tile: ``out[r] = starts[r] + sum over i of numbers[r][i * step] * tile[i]``, each sum in the order of i.

        ``multiply`` is `fma`, `add_pairs` or `add_quads`, as the numbers are; ``finish`` makes what is written of a vector's place among
        `ROW_PLACES` and its sum.
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
        for i, (place, total) in enumerate(zip(ROW_PLACES, sums, strict=True)):
            result = self.builder.load(total)
            self.store(result if finish is None else finish(i, result), out, place)

    def to_lanes(self, rows: Any, stride: Any, count: Any, width: Any, give: Callable[[Any, Any], None]) -> None:
        """Rows of numbers, up to LANES of them, turned to lanes: each vector and its place in a tile (width, LANES) are given.

        The last row stands in the lanes that are left.
        """
        with self.loop(long(VECTORS)) as group:
            lane = self.place((group.index, long(WIDTH)))
            starts = [self.place((self.no_further(self.place(lane, long(row)), count), stride)) for row in range(WIDTH)]
            with self.loop(self.builder.udiv(width, long(WIDTH))) as part:
                column = self.place((part.index, long(WIDTH)))
                for i, vector in enumerate(self.transposed([self.load(rows, self.place(start, column)) for start in starts])):
                    give(vector, self.place((self.place(column, long(i)), long(LANES)), lane))

    def to_rows(self, take: Callable[[Any], Any], count: Any, width: Any, out: Any, stride: Any) -> None:
        """A tile (width, LANES), whose vectors are taken by their places, to the first of LANES rows of numbers."""
        with self.loop(long(VECTORS)) as group:
            lane = self.place((group.index, long(WIDTH)))
            with self.loop(self.builder.udiv(width, long(WIDTH))) as part:
                column = self.place((part.index, long(WIDTH)))
                places = [self.place((self.place(column, long(i)), long(LANES)), lane) for i in range(WIDTH)]
                for i, vector in enumerate(self.transposed([take(place) for place in places])):
                    row = self.place(lane, long(i))
                    with self.builder.if_then(self.builder.icmp_signed("<", row, count)):
                        self.store(vector, out, self.place((row, stride), column))


def _power_of_two(degree: int) -> list[float]:
    """Coefficients for 2 ** x between -1/2 and 1/2, of least relative error."""
    x = np.cos(np.pi * (np.arange(2000) + 0.5) / 2000) / 2
    return [float(c) for c in np.polynomial.polynomial.polyfit(x, 2.0**x, degree, w=2.0**-x)]


_POWER, _COARSE_POWER = _power_of_two(5), _power_of_two(3)

Emitter = Callable[..., Any]


def emitted(emit: Emitter, returns: Any = types.void) -> Any:
    """A function for compiled code from what emits it; all its arguments are numbers."""

    def typed(_context: Any, *arguments: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            result = emit(Code(builder), *values)
            return context.get_dummy_value() if result is None else result

        return returns(*arguments), generate

    typed.__name__ = emit.__name__
    typed.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]  # numba counts arguments by it
    return intrinsic(typed)


AMX_ROWS = 16
"""Rows of a register, lanes of one, and steps of a product that it holds."""
AMX_CONFIG_BYTES = 64
"""Room that `amx_begin` needs."""

# Registers' worth of steps before other rows are begun: what the rows meet stays in the first cache that long. On a core of a Xeon of 2024
# products of ModernBERT-base reach 1,340 GFLOP/s with 8, 1,250 with 12 and 1,000 with 24; oneDNN's 950.
AMX_DEPTH = 8

_AMX_COLUMNS = LANES // AMX_ROWS
_SUMS, _FACTORS = range(_AMX_COLUMNS), range(_AMX_COLUMNS, 2 * _AMX_COLUMNS)
_FIRST, _SECOND = 2 * _AMX_COLUMNS, 2 * _AMX_COLUMNS + 1  # rows take turns
_LINE = 64


def _amx_instruction(code: Code, name: str, *arguments: Any) -> None:
    code.call(f"llvm.x86.{name}", ir.VoidType(), *arguments)


def _register(number: int) -> Any:
    return ir.Constant(BYTE, number)


def _pointer(code: Code, address: Any) -> Any:
    return code.builder.inttoptr(address, BYTE.as_pointer())


def _amx_begin(code: Code, kind: Any, address: Any) -> None:
    """Set the thread's registers up, if AMX multiplies numbers of this kind; at the address is room for `AMX_CONFIG_BYTES`."""
    if not uses_amx(kind):
        return
    # The palette, bytes of a row of each register, rows of each.
    setting = bytearray([1, *[0] * 15, *[_LINE, 0] * 8, *[0] * 16, *[AMX_ROWS] * 8, *[0] * 8])
    value = ir.Constant(ir.ArrayType(BYTE, AMX_CONFIG_BYTES), setting)
    code.builder.store(value, code.builder.inttoptr(address, value.type.as_pointer()), align=1)
    _amx_instruction(code, "ldtilecfg", _pointer(code, address))


def _amx_end(code: Code, kind: Any) -> None:
    """Give the registers back, which others set up in their own way."""
    if uses_amx(kind):
        _amx_instruction(code, "tilerelease")


def amx_product(code: Code, kind: Any, rows: Any, stride: Any, shape: tuple[Any, Any], tile: Any, out: Any, *, add: bool) -> None:
    """Rows of a tile: ``out[r] = sum over i of rows[r * stride + i] * tile[i]``, or more by that where it is to ``add``.

    Rows, tile and ``out`` are addresses; ``shape`` counts rows and 32-bit columns, both multiples of `AMX_ROWS`. Terms are added in the
    order of i, `AMX_ROWS` at a time: their products are summed first, then added. The sum is stored to ``out`` after every `AMX_DEPTH`
    registers.
    """
    b = code.builder
    count, columns = shape
    steps, row_bytes, lane_bytes = b.udiv(columns, long(AMX_ROWS)), b.mul(stride, long(4)), long(LANES * 4)
    multiply = "tdpbf16ps" if is_bfloat16(kind) else "tdpbsud"

    def move(name: str, register: int, address: Any, step: Any) -> None:
        _amx_instruction(code, name, _register(register), _pointer(code, address), step)

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
                        _amx_instruction(code, "tilezero", _register(register))
                with further:
                    for register, place in zip(_SUMS, places, strict=True):
                        move("tileloadd64", register, place, lane_bytes)
            numbers = code.place(rows, (block.index, b.mul(row_bytes, long(AMX_ROWS))), (first, long(_LINE)))
            lanes = code.place(tile, (first, long(AMX_ROWS * LANES * 4)))

            def add_up(step: Any, register: int, numbers: Any = numbers, lanes: Any = lanes) -> None:
                move("tileloadd64", register, code.place(numbers, (step, long(_LINE))), row_bytes)
                amx_begin = code.place(lanes, (step, long(AMX_ROWS * LANES * 4)))
                for total, factor in zip(_SUMS, _FACTORS, strict=True):
                    move("tileloadd64", factor, code.place(amx_begin, long(_LINE * total)), lane_bytes)
                    _amx_instruction(code, multiply, _register(total), _register(register), _register(factor))

            with code.loop(b.udiv(depth, long(2))) as pair:
                for i, register in enumerate((_FIRST, _SECOND)):
                    add_up(code.place((pair.index, long(2)), long(i)), register)
            with b.if_then(b.trunc(depth, ir.IntType(1))):
                add_up(b.sub(depth, long(1)), _FIRST)
            for register, place in zip(_SUMS, places, strict=True):
                move("tilestored64", register, place, lane_bytes)


amx_begin, amx_end = emitted(_amx_begin), emitted(_amx_end)
