"""Softmax attention over packed heads on a CPU, float32 or bfloat16: whole sequences or a window, no mask and no copy.

Panels of keys go past blocks of queries one after the other, and what the blocks have gathered is brought to a larger maximum when a much
larger one appears. In a local layer a block meets the keys of its window only.

Shapes: N tokens, H heads, K head width, B sequences, L lanes of all sequences.
Source: FlashAttention, arXiv:2205.14135; ModernBERT, arXiv:2412.13663, section 2.1.2 (alternating attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from encoder.compiled import attention_call as names
from encoder.compiled.attention_call import (
    FIRST_LANE,
    FLOAT_BYTES,
    HALF,
    KEYS,
    LANE_TOKENS,
    OUTPUT,
    PANEL,
    PANEL_BYTES,
    QUERIES,
    ROW,
    SEEN,
    START,
    SUMS,
    TOPS,
    VALUES,
    WIDTH,
    call_in,
    hide,
    meeting,
    next_task,
    place,
    scratch_of_thread,
    size,
    whole,
)
from encoder.compiled.compiling import Callback, compiled
from encoder.compiled.tiles import (
    HIDDEN,
    clear,
    copy,
    exponents,
    mixture,
    numbers_of,
    pack,
    pair_values,
    raise_tops,
    rescale,
    scores,
    unpack,
)
from encoder.compiled.vectors import FLOATS, LANES, PAIRS


@compiled
def _begin_block(kind: Any, queries: int, stride: int, count: int, width: int, tile: int) -> None:
    """What a block begins with: its queries, nothing gathered, nothing to count from, no sums."""
    columns = width // numbers_of(kind)
    pack(kind, queries, stride, count, columns, np.log2(np.e) / np.sqrt(width), tile)
    mixtures = tile + columns * ROW
    clear(mixtures, width, 0.0)
    clear(mixtures + width * ROW, 1, HIDDEN)
    clear(mixtures + (width + 1) * ROW, 1, 0.0)


@compiled
def _attend_blocks(call: NDArray[np.int64], sequence: NDArray[np.int64], seat: NDArray[np.int64], scratch: int, kind: Any) -> None:
    """Queries of one head of a sequence, which the thread's seat names."""
    head, first, last = seat[1], seat[2], seat[3]
    start, width, half, numbers = sequence[START], call[WIDTH], call[HALF], numbers_of(kind)
    columns = width // numbers
    query_stride, key_stride, value_stride = call[QUERIES + 1], call[KEYS + 1], call[VALUES + 1]
    queries = place(call, QUERIES, start + first, head)
    keys, values = place(call, KEYS, start, head), place(call, VALUES, start, head)
    change = scratch
    weights = change + ROW
    paired_values = scratch + PANEL_BYTES
    # Of each block: its queries, what it has gathered, what its queries count from, sums.
    own = paired_values + (numbers - 1) * PANEL // 2 * width * FLOAT_BYTES
    block_bytes = (columns + width + 2) * ROW
    blocks = (last - first + LANES - 1) // LANES
    for block in range(blocks):
        begin = block * LANES
        address = queries + begin * query_stride * FLOAT_BYTES
        _begin_block(kind, address, query_stride, last - first - begin, width, own + block * block_bytes)
    panel, end = max(0, first - half), min(sequence[SEEN], last + half)
    while panel < end:
        if numbers == 2:
            pair_values(values + panel * value_stride * FLOAT_BYTES, value_stride, min(PANEL, end - panel), columns, paired_values)
        for block in range(blocks):
            begin = first + block * LANES
            low, high = meeting(panel, end, begin, half)
            if low >= high:
                continue
            # A pair is met whole. The key that is one too many is hidden, so its value is added 0 times; an infinite one makes that NaN.
            low -= (low - panel) % numbers
            tile = own + block * block_bytes
            mixtures = tile + columns * ROW
            tops = mixtures + width * ROW
            sums = tops + ROW
            call_in(keys, key_stride, columns, panel, end, block, blocks)
            scores(kind, tile, keys + low * key_stride * FLOAT_BYTES, key_stride, high - low, columns, weights)
            hide(weights, low, high, begin, half)
            if raise_tops(weights, high - low, tops, change) != 0:
                rescale(mixtures, width, sums, change)
            exponents(kind, weights, high - low, tops, sums)
            call_in(values, value_stride, columns, panel, end, block, blocks)
            met, stride, count = values + low * value_stride * FLOAT_BYTES, value_stride, high - low
            if numbers == 2:
                met, stride, count = paired_values + (low - panel) // 2 * width * FLOAT_BYTES, width, (count + 1) // 2
            mixture(kind, met, stride, count, width, weights, mixtures)
        panel += PANEL
    stride, output = call[OUTPUT + 1], place(call, OUTPUT, start + first, head)
    lane = (head * call[LANE_TOKENS] + sequence[FIRST_LANE] + first) * FLOAT_BYTES
    for block in range(blocks):
        mixtures = own + block * block_bytes + columns * ROW
        tops, begin = mixtures + width * ROW, block * LANES
        if call[TOPS] != 0:
            copy(tops, 1, call[TOPS] + lane + block * ROW)
            copy(tops + ROW, 1, call[SUMS] + lane + block * ROW)
        unpack(kind, mixtures, columns, tops, last - first - begin, stride, output + begin * stride * FLOAT_BYTES)


@compiled
def _work(call: NDArray[np.int64], kind: Any) -> None:
    """Tasks until none is left; what every thread runs."""
    scratch, table, seat = scratch_of_thread(call), whole(call), np.zeros(5, np.int64)
    while next_task(call, table, seat):
        _attend_blocks(call, table[seat[0]], seat, scratch, kind)


def _floats(pointer: Any) -> None:
    """`_work` on what the pointer points to."""
    _work(numba.carray(pointer, size(numba.carray(pointer, names.TABLE, np.int64)), np.int64), FLOATS)


def _pairs(pointer: Any) -> None:
    """The same for pairs of bfloat16."""
    _work(numba.carray(pointer, size(numba.carray(pointer, names.TABLE, np.int64)), np.int64), PAIRS)


_FLOAT_ENTRY, _PAIR_ENTRY = Callback(_floats), Callback(_pairs)


def attend(
    heads: Sequence[names.Heads],
    table: NDArray[np.int64],
    shape: tuple[int, int],
    window: int | None,
    *,
    paired: bool = False,
    sums: Tensor | None = None,
) -> None:
    """Attention of every sequence of a table with itself, on torch's threads.

    Args:
        heads: Queries, keys, values and output.
        table: What `encoder.compiled.attention_call.sequences` gave.
        shape: H and K, a multiple of 16, of pairs 32.
        window: A token sees |i - j| <= window // 2; None for the whole sequence.
        paired: Whether heads are pairs of bfloat16.
        sums: Room for two float32 numbers of each query, (2, H, L): its largest score, in units of a binary logarithm and to a few places
            of it, and the sum of its weights counted from that. `encoder.compiled.attention_gradients` makes gradients of them.
    """
    spare = PANEL // 2 * shape[1] * FLOAT_BYTES if paired else 0
    call = names.Call(table, shape, window, rows=2 * shape[1] + 2, panels=1, spare=spare)
    for each, numbers in zip((QUERIES, KEYS, VALUES, OUTPUT), heads, strict=True):
        call.put(each, *numbers)
    if sums is not None:
        call.put(TOPS, sums[0].data_ptr(), sums[1].data_ptr())
        call.put(LANE_TOKENS, sums.shape[-1])
    call.run((_PAIR_ENTRY if paired else _FLOAT_ENTRY).address)
