"""Products by AMX, the matrix unit of Intel's processors from 2023 on: 16 rows by 16 lanes at a time, in registers of their own.

A register has 16 rows of 64 bytes. One of rows, 16 steps of each, meets one of a tile's lanes, 16 steps of 16 lanes: what `Code.product`
multiplies lies in just that order, so nothing is laid out for it.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18, and volume 2 (LDTILECFG, TDPBF16PS, TDPBSUD).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from quiver.encoder.cpu.vectors import BYTE, LANES, Code, emitted, is_paired, is_tiled, long

__all__ = ["ROWS", "SETTING_BYTES", "begin", "end", "product"]

ROWS = 16
"""Rows of a register, lanes of one, and steps of a product that it holds."""
SETTING_BYTES = 64
"""Room that `begin` needs."""

# Registers' worth of steps before other rows are begun: what the rows meet stays in the first cache that long. On a core of a Xeon of 2024
# products of ModernBERT-base reach 1,340 GFLOP/s with 8, 1,250 with 12 and 1,000 with 24; oneDNN's 950.
DEPTH = 8

_COLUMNS = LANES // ROWS
_SUMS, _FACTORS = range(_COLUMNS), range(_COLUMNS, 2 * _COLUMNS)
_FIRST, _SECOND = 2 * _COLUMNS, 2 * _COLUMNS + 1  # rows take turns
_LINE = 64


def _run(code: Code, name: str, *arguments: Any) -> None:
    code.call(f"llvm.x86.{name}", ir.VoidType(), *arguments)


def _register(number: int) -> Any:
    return ir.Constant(BYTE, number)


def _pointer(code: Code, address: Any) -> Any:
    return code.builder.inttoptr(address, BYTE.as_pointer())


def _begin(code: Code, kind: Any, address: Any) -> None:
    """Set the thread's registers up, if AMX multiplies numbers of this kind; at the address is room for `SETTING_BYTES`."""
    if not is_tiled(kind):
        return
    # The palette, bytes of a row of each register, rows of each.
    setting = bytearray([1, *[0] * 15, *[_LINE, 0] * 8, *[0] * 16, *[ROWS] * 8, *[0] * 8])
    value = ir.Constant(ir.ArrayType(BYTE, SETTING_BYTES), setting)
    code.builder.store(value, code.builder.inttoptr(address, value.type.as_pointer()), align=1)
    _run(code, "ldtilecfg", _pointer(code, address))


def _end(code: Code, kind: Any) -> None:
    """Give the registers back, which others set up in their own way."""
    if is_tiled(kind):
        _run(code, "tilerelease")


def product(code: Code, kind: Any, rows: Any, stride: Any, shape: tuple[Any, Any], tile: Any, out: Any, *, add: bool) -> None:
    """Rows of a tile: ``out[r] = sum over i of rows[r * stride + i] * tile[i]``, or more by that where it is to ``add``.

    Rows, tile and ``out`` are addresses; ``shape`` counts rows and their numbers of 32 bits, both multiples of `ROWS`. A sum takes its
    terms in the order of i, `ROWS` of them at a time, whose products are summed up before they are added; it is kept in ``out`` after every
    `DEPTH` registers.
    """
    b = code.builder
    count, columns = shape
    steps, row_bytes, lane_bytes = b.udiv(columns, long(ROWS)), b.mul(stride, long(4)), long(LANES * 4)
    multiply = "tdpbf16ps" if is_paired(kind) else "tdpbsud"

    def move(name: str, register: int, address: Any, step: Any) -> None:
        _run(code, name, _register(register), _pointer(code, address), step)

    with code.loop(b.udiv(code.place(steps, long(DEPTH - 1)), long(DEPTH))) as part:
        first = code.place((part.index, long(DEPTH)))
        rest = b.sub(steps, first)
        depth = b.select(b.icmp_signed("<", rest, long(DEPTH)), rest, long(DEPTH))
        with code.loop(b.udiv(count, long(ROWS))) as block:
            target = code.place(out, (block.index, long(ROWS * LANES * 4)))
            places = [code.place(target, long(_LINE * i)) for i in _SUMS]
            with b.if_else(b.icmp_signed("==", part.index, long(-1 if add else 0))) as (anew, further):
                with anew:
                    for register in _SUMS:
                        _run(code, "tilezero", _register(register))
                with further:
                    for register, place in zip(_SUMS, places, strict=True):
                        move("tileloadd64", register, place, lane_bytes)
            numbers = code.place(rows, (block.index, b.mul(row_bytes, long(ROWS))), (first, long(_LINE)))
            lanes = code.place(tile, (first, long(ROWS * LANES * 4)))

            def add_up(step: Any, register: int, numbers: Any = numbers, lanes: Any = lanes) -> None:
                move("tileloadd64", register, code.place(numbers, (step, long(_LINE))), row_bytes)
                begin = code.place(lanes, (step, long(ROWS * LANES * 4)))
                for total, factor in zip(_SUMS, _FACTORS, strict=True):
                    move("tileloadd64", factor, code.place(begin, long(_LINE * total)), lane_bytes)
                    _run(code, multiply, _register(total), _register(register), _register(factor))

            with code.loop(b.udiv(depth, long(2))) as pair:
                for i, register in enumerate((_FIRST, _SECOND)):
                    add_up(code.place((pair.index, long(2)), long(i)), register)
            with b.if_then(b.trunc(depth, ir.IntType(1))):
                add_up(b.sub(depth, long(1)), _FIRST)
            for register, place in zip(_SUMS, places, strict=True):
                move("tilestored64", register, place, lane_bytes)


begin, end = emitted(_begin), emitted(_end)
