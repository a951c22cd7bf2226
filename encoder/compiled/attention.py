"""Softmax attention over packed float32 heads on a CPU: whole sequences or a window, no mask and no copy.

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
from encoder.compiled.compiling import callback, compiled
from encoder.compiled.tiles import HIDDEN, clear, copy, exponents, mixture, pack, raise_tops, rescale, scores, unpack
from encoder.compiled.vectors import LANES


@compiled
def _attend_blocks(call: NDArray[np.int64], sequence: NDArray[np.int64], head: int, first: int, last: int, scratch: int) -> None:
    """Queries first..last of one head of a sequence."""
    start, width, half = sequence[START], call[WIDTH], call[HALF]
    query_stride, key_stride, value_stride = call[QUERIES + 1], call[KEYS + 1], call[VALUES + 1]
    queries = place(call, QUERIES, start + first, head)
    keys, values = place(call, KEYS, start, head), place(call, VALUES, start, head)
    change = scratch
    weights = change + ROW
    # Of each block: its queries, what it has gathered, what its queries count from, sums.
    own = scratch + PANEL_BYTES
    block_bytes = (2 * width + 2) * ROW
    blocks = (last - first + LANES - 1) // LANES
    for block in range(blocks):
        tile = own + block * block_bytes
        begin = block * LANES
        pack(queries + begin * query_stride * FLOAT_BYTES, query_stride, last - first - begin, width, np.log2(np.e) / np.sqrt(width), tile)
        clear(tile + width * ROW, width, 0.0)
        clear(tile + 2 * width * ROW, 1, HIDDEN)
        clear(tile + (2 * width + 1) * ROW, 1, 0.0)
    panel, end = max(0, first - half), min(sequence[SEEN], last + half)
    while panel < end:
        for block in range(blocks):
            begin = first + block * LANES
            low, high = meeting(panel, end, begin, half)
            if low >= high:
                continue
            tile = own + block * block_bytes
            mixtures, tops = tile + width * ROW, tile + 2 * width * ROW
            sums = tops + ROW
            call_in(keys, key_stride, width, panel, end, block, blocks)
            scores(tile, keys + low * key_stride * FLOAT_BYTES, key_stride, high - low, width, weights)
            hide(weights, low, high, begin, half)
            if raise_tops(weights, high - low, tops, change) != 0:
                rescale(mixtures, width, sums, change)
            exponents(weights, high - low, tops, sums)
            call_in(values, value_stride, width, panel, end, block, blocks)
            mixture(values + low * value_stride * FLOAT_BYTES, value_stride, high - low, width, weights, mixtures)
        panel += PANEL
    stride, output = call[OUTPUT + 1], place(call, OUTPUT, start + first, head)
    lane = (head * call[LANE_TOKENS] + sequence[FIRST_LANE] + first) * FLOAT_BYTES
    for block in range(blocks):
        mixtures = own + block * block_bytes + width * ROW
        tops, begin = mixtures + width * ROW, block * LANES
        if call[TOPS] != 0:
            copy(tops, 1, call[TOPS] + lane + block * ROW)
            copy(tops + ROW, 1, call[SUMS] + lane + block * ROW)
        unpack(mixtures, width, tops + ROW, tops, last - first - begin, stride, output + begin * stride * FLOAT_BYTES)


@compiled
def _work(call: NDArray[np.int64]) -> None:
    """Tasks until none is left; what every thread runs."""
    scratch, table, seat = scratch_of_thread(call), whole(call), np.zeros(5, np.int64)
    while next_task(call, table, seat):
        _attend_blocks(call, table[seat[0]], seat[1], seat[2], seat[3], scratch)


def _entry(pointer: Any) -> None:
    """`_work` on what the pointer points to."""
    _work(numba.carray(pointer, size(numba.carray(pointer, names.TABLE, np.int64)), np.int64))


_ENTRY = callback(_entry)


def attend(
    heads: Sequence[names.Heads], table: NDArray[np.int64], shape: tuple[int, int], window: int | None, sums: Tensor | None = None
) -> None:
    """Attention of every sequence of a table with itself, on torch's threads.

    Args:
        heads: Queries, keys, values and output.
        table: What `encoder.compiled.attention_call.sequences` gave.
        shape: H and K, a multiple of 16.
        window: A token sees |i - j| <= window // 2; None for the whole sequence.
        sums: Room for two numbers of each query, (2, H, L): its largest score, in units of a binary logarithm and to a few places of it,
            and the sum of its weights counted from that. `encoder.compiled.attention_gradients` makes gradients of them.
    """
    call = names.Call(table, shape, window, rows=2 * shape[1] + 2, panels=1)
    for each, numbers in zip((QUERIES, KEYS, VALUES, OUTPUT), heads, strict=True):
        call.put(each, *numbers)
    if sums is not None:
        call.put(TOPS, sums[0].data_ptr(), sums[1].data_ptr())
        call.put(LANE_TOKENS, sums.shape[-1])
    call.run(_ENTRY.address)
