"""Kernels of a block around attention: hidden states to heads, and attention output to the next hidden states.

A task is a few panels of LANES tokens, whose states stay in a core's second-level cache from start to end; only heads and hidden states are
written to memory. Rows of a matrix are read once for all panels of a task. Every sum has a fixed order, which depends neither on the
neighbours of a token nor on the thread. ``kind`` names the dtype of the matrices: `FLOAT32`, `BFLOAT16` or `INT8`; everything but their
products, and bfloat16 heads, is float32.

Shapes: N tokens, D model width, I MLP width, H heads, K head width, R rotary width.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from quiver.encoder.cpu.codegen import BFLOAT16, FLOAT32, INT8, LANES, amx_begin, amx_end
from quiver.encoder.cpu.jit import CompiledCallback, jit
from quiver.encoder.cpu.support import run_on_threads, thread_scratch
from quiver.encoder.cpu.tiles import (
    activate,
    copy,
    gate,
    gather,
    join,
    narrow,
    next_index,
    normalise,
    numbers_of,
    product,
    rotate,
    store_heads,
    store_rows,
)

# Bytes of the second-level cache for the panels of a task; the rest is for rows of weights. With a cache of 512 KB, half and twice as much
# are no faster.
CACHE_BYTES = 1_200_000
MAX_PANELS = 8
# Rows of a matrix that all panels multiply before the next rows are read; whole vectors, so that they can be transposed to tokens.
TILE = 48

# Layout of the arguments.
TAKEN, MET, TOKENS, TASKS, SCRATCH, SCRATCH_BYTES, HIDDEN, WIDTH, INNER, HEADS = range(10)
# Strides of heads count 32-bit units.
COSINES, SINES, HALF, Q, K, V, TOKEN_STRIDE, HEAD_STRIDE = range(10, 18)
MIXED, ACTIVATION, GATED, POST = range(18, 22)
# Norms: weight, bias, whether the mean is subtracted, epsilon (a double).
ATTENTION_NORM, MLP_NORM = 22, 26
# Matrices: weight, bias and, for int8, scales and the product with rotated features that are all 1. Queries, keys and values have one each.
MATRIX = 4
QKV, OUT, UP, DOWN = 30, 42, 46, 50
# Number of tasks of one panel, the last of all tasks; largest integer that activations are quantised to.
SINGLES, LEVELS = 54, 55
SIZE = 56

_FLOAT = 4  # bytes
_ROW = LANES * _FLOAT


@jit
def _normalise_tile(call: NDArray[np.int64], norm: int, tile: int, out: int) -> None:
    """Normalize a tile (D, LANES); copies it if there is no norm."""
    if call[norm] != 0:
        normalise(tile, call[WIDTH], call[norm], call[norm + 1], call[norm + 2], call.view(np.float64)[norm + 3], out)
    elif out != tile:
        copy(tile, call[WIDTH], out)


@jit
def _address_of(call: NDArray[np.int64], place: int) -> int:
    """Return the address of an argument."""
    return int(call.ctypes.data + place * 8)


@jit
def _project_panels(call: NDArray[np.int64], kind: Any, first: int, last: int, scratch: int) -> None:
    """Compute the heads of tokens first..last."""
    width, heads, half, tokens = call[WIDTH], call[HEADS], call[HALF], call[TOKENS]
    head_width = width // heads
    rotary = scratch + head_width * _ROW
    states = rotary + (last - first) * 2 * half * _ROW
    for panel in range(last - first):
        begin = (first + panel) * LANES
        count, state = tokens - begin, states + panel * width * _ROW
        gather(call[HIDDEN] + begin * width * _FLOAT, width, count, width, state)
        _normalise_tile(call, ATTENTION_NORM, state, state)
        narrow(kind, state, width, call[LEVELS])
        if half > 0:
            angles = rotary + panel * 2 * half * _ROW
            gather(call[COSINES] + begin * half * _FLOAT, half, count, half, angles)
            gather(call[SINES] + begin * half * _FLOAT, half, count, half, angles + half * _ROW)
    for part in range(3):
        for head in range(heads):
            for panel in range(last - first):
                begin = (first + panel) * LANES
                state = states + panel * width * _ROW
                product(kind, _address_of(call, QKV + part * MATRIX), head * head_width, head_width, width, state, scratch)
                if part < 2 and half > 0:
                    angles = rotary + panel * 2 * half * _ROW
                    rotate(scratch, half, angles, angles + half * _ROW)
                place = call[Q + part] + (begin * call[TOKEN_STRIDE] + head * call[HEAD_STRIDE]) * _FLOAT
                store_heads(kind, scratch, head_width // numbers_of(kind), tokens - begin, call[TOKEN_STRIDE], place)


@jit
def _multiply_panels(
    kind: Any, matrix: int, shape: tuple[int, int, int], source: int, target: int, source_step: int, target_step: int
) -> None:
    """Multiply panels by a matrix (outputs, width); ``shape`` is panels, outputs, width."""
    panels, outputs, width = shape
    for row in range(0, outputs, TILE):
        for panel in range(panels):
            tile, out = source + panel * source_step * _ROW, target + (panel * target_step + row) * _ROW
            product(kind, matrix, row, min(TILE, outputs - row), width, tile, out)


@jit
def _activate_panels(call: NDArray[np.int64], kind: Any, panels: int, block: int, states: int, inner: int) -> None:
    """Compute the first matrix of the MLP and its activation."""
    width, size, step = call[WIDTH], call[INNER], max(call[WIDTH], call[INNER])
    for row in range(0, size, TILE):
        count = min(TILE, size - row)
        for panel in range(panels):
            state, out = states + panel * width * _ROW, inner + (panel * step + row) * _ROW
            product(kind, _address_of(call, UP), row, count, width, state, block)
            if call[GATED]:
                gates = block + TILE * _ROW
                product(kind, _address_of(call, UP), size + row, count, width, state, gates)
                gate(call[ACTIVATION], block, gates, count, out)
            else:
                activate(call[ACTIVATION], block, count, out)
    for panel in range(panels):
        narrow(kind, inner + panel * step * _ROW, size, call[LEVELS])


@jit
def _update_panels(call: NDArray[np.int64], kind: Any, first: int, last: int, scratch: int) -> None:
    """Compute the hidden states of tokens first..last."""
    width, tokens, post = call[WIDTH], call[TOKENS], call[POST]
    step = max(width, call[INNER])
    panels = last - first
    states = scratch + 2 * TILE * _ROW
    inner = states + panels * width * _ROW
    columns = width // numbers_of(kind)
    for panel in range(panels):
        begin = (first + panel) * LANES
        state = states + panel * width * _ROW
        gather(call[MIXED] + begin * columns * _FLOAT, columns, tokens - begin, columns, state)
        if columns == width:
            narrow(kind, state, width, call[LEVELS])
    _multiply_panels(kind, _address_of(call, OUT), (panels, width, width), states, inner, width, step)
    for panel in range(panels):
        begin = (first + panel) * LANES
        sums, state = inner + panel * step * _ROW, states + panel * width * _ROW
        join(call[HIDDEN] + begin * width * _FLOAT, width, tokens - begin, width, sums)
        if post:
            _normalise_tile(call, ATTENTION_NORM, sums, sums)
            copy(sums, width, state)
        else:
            _normalise_tile(call, MLP_NORM, sums, state)
        narrow(kind, state, width, call[LEVELS])
        store_rows(sums, width, tokens - begin, 1.0, width, call[HIDDEN] + begin * width * _FLOAT)
    _activate_panels(call, kind, panels, scratch, states, inner)
    _multiply_panels(kind, _address_of(call, DOWN), (panels, width, call[INNER]), inner, states, step, width)
    for panel in range(panels):
        begin = (first + panel) * LANES
        sums = states + panel * width * _ROW
        join(call[HIDDEN] + begin * width * _FLOAT, width, tokens - begin, width, sums)
        if post:
            _normalise_tile(call, MLP_NORM, sums, sums)
        store_rows(sums, width, tokens - begin, 1.0, width, call[HIDDEN] + begin * width * _FLOAT)


@jit
def _run_tasks(call: NDArray[np.int64], kind: Any) -> None:
    """Run tasks until none is left; every thread runs this. The last tasks are single panels, so that no thread waits long for another."""
    tasks = call[TASKS]
    large, rest = tasks - call[SINGLES], (call[TOKENS] + LANES - 1) // LANES - call[SINGLES]
    scratch = call[SCRATCH] + next_index(call.ctypes.data + MET * 8) * call[SCRATCH_BYTES]
    amx_begin(kind, scratch)
    while True:
        task = next_index(call.ctypes.data + TAKEN * 8)
        if task >= tasks:
            break
        if task < large:
            first, last = task * rest // large, (task + 1) * rest // large
        else:
            first, last = rest + task - large, rest + task - large + 1
        if call[MIXED] == 0:
            _project_panels(call, kind, first, last, scratch)
        else:
            _update_panels(call, kind, first, last, scratch)
    amx_end(kind)


def _run_float32_blocks(pointer: Any) -> None:
    """C entry of `_run_tasks` for float32 matrices."""
    _run_tasks(numba.carray(pointer, SIZE, np.int64), FLOAT32)


def _run_bfloat16_blocks(pointer: Any) -> None:
    """C entry for bfloat16 matrices."""
    _run_tasks(numba.carray(pointer, SIZE, np.int64), BFLOAT16)


def _run_int8_blocks(pointer: Any) -> None:
    """C entry for int8 matrices."""
    _run_tasks(numba.carray(pointer, SIZE, np.int64), INT8)


_ENTRIES = {
    torch.float32: CompiledCallback(_run_float32_blocks),
    torch.bfloat16: CompiledCallback(_run_bfloat16_blocks),
    torch.int8: CompiledCallback(_run_int8_blocks),
}


class BlockArguments:
    """Arguments of the kernels in the layout above, for N tokens, D, I, H and the dtype of the matrices (float32, bfloat16 or int8)."""

    def __init__(self, tokens: int, width: int, inner: int, heads: int, threads: int, matrices: torch.dtype) -> None:
        self._entry = _ENTRIES[matrices]
        self.numbers = np.zeros(SIZE, np.int64)
        self.numbers[[TOKENS, WIDTH, INNER, HEADS]] = tokens, width, inner, heads
        panels = -(-tokens // LANES)
        most = min(max(CACHE_BYTES // ((width + max(width, inner)) * _ROW), 1), MAX_PANELS)
        singles = threads * most if panels > threads * most else 0
        large = -(-(panels - singles) // most) if singles else min(threads, panels)
        self.numbers[[TASKS, SINGLES]] = large + singles, singles
        rows = max(2 * TILE, width // heads) + -(-(panels - singles) // large) * (width + max(inner, 2 * width))
        self.scratch = thread_scratch(threads, rows * _ROW)
        self.numbers[[SCRATCH, SCRATCH_BYTES]] = self.scratch.data_ptr(), self.scratch.shape[1]

    def put(self, place: int, *values: int) -> None:
        """Set arguments, from an index on."""
        self.numbers[place : place + len(values)] = values

    def run(self) -> None:
        """Compute heads from hidden states or, if MIXED is set, hidden states from the attention output."""
        self.numbers[[TAKEN, MET]] = 0
        run_on_threads(self._entry.address, self.numbers.ctypes.data, len(self.scratch))
