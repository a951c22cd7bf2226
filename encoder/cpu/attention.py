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

from quiver.encoder.cpu import amx
from quiver.encoder.cpu import attention_call as names
from quiver.encoder.cpu.attention_call import (
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
from quiver.encoder.cpu.compiling import Callback, compiled
from quiver.encoder.cpu.tiles import (
    HIDDEN,
    clear,
    copy,
    copy_rows,
    exponents,
    keys_at_once,
    mixture,
    numbers_of,
    pack,
    pair_values,
    raise_tops,
    rescale,
    scores,
    unpack,
)
from quiver.encoder.cpu.vectors import FLOATS, LANES, PAIRS


@compiled
def logarithm(width: int) -> float:
    """What makes a score of a product of K numbers: 1 / sqrt(K), in units of a binary logarithm."""
    factor: float = np.log2(np.e) / np.sqrt(width)
    return factor


@compiled
def _begin_block(kind: Any, queries: int, stride: int, count: int, width: int, tile: int) -> None:
    """What a block begins with: its queries, nothing gathered, nothing to count from, no sums."""
    columns = width // numbers_of(kind)
    pack(kind, queries, stride, count, columns, logarithm(width), tile)
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
    # Keys and values of a panel as pairs of bfloat16, which are met many times and by AMX up to the end of the panel.
    kept_keys = scratch + PANEL_BYTES
    kept_values = kept_keys + (numbers - 1) * PANEL * columns * FLOAT_BYTES
    # Of each block: its queries, what it has gathered, what its queries count from, sums.
    own = kept_values + (numbers - 1) * PANEL * columns * FLOAT_BYTES
    block_bytes = (columns + width + 2) * ROW
    blocks = (last - first + LANES - 1) // LANES
    for block in range(blocks):
        begin = block * LANES
        address = queries + begin * query_stride * FLOAT_BYTES
        _begin_block(kind, address, query_stride, last - first - begin, width, own + block * block_bytes)
    panel, end = max(0, first - half), min(sequence[SEEN], last + half)
    while panel < end:
        if numbers == 2:
            seen = min(PANEL, end - panel)
            copy_rows(keys + panel * key_stride * FLOAT_BYTES, key_stride, seen, columns, kept_keys)
            pair_values(values + panel * value_stride * FLOAT_BYTES, value_stride, seen, columns, PANEL // 2, kept_values)
        for block in range(blocks):
            begin = first + block * LANES
            low, high = meeting(panel, end, begin, half)
            if low >= high:
                continue
            # Pairs are met whole, by AMX 16 pairs at once. Values of keys that are too many are added 0 times; an infinite one, of
            # the same text, makes that NaN.
            low -= (low - panel) % keys_at_once(kind)
            count = high - low
            call_in(keys, key_stride, columns, panel, end, block, blocks)
            met = keys + low * key_stride * FLOAT_BYTES, key_stride
            if numbers == 2:
                met = kept_keys + (low - panel) * columns * FLOAT_BYTES, columns
            tile = own + block * block_bytes
            scores(kind, tile, met[0], met[1], count, columns, weights)
            hide(weights, low, high, begin, half)
            _weigh(kind, weights, count, tile + columns * ROW, width, change)
            call_in(values, value_stride, columns, panel, end, block, blocks)
            met = values + low * value_stride * FLOAT_BYTES, value_stride
            if numbers == 2:
                met, count = (kept_values + (low - panel) // 2 * FLOAT_BYTES, PANEL // 2), (count + 1) // 2
            mixture(kind, met[0], met[1], count, width, weights, tile + columns * ROW)
        panel += PANEL
    _write_blocks(call, sequence, seat, own, kind)


@compiled
def _weigh(kind: Any, weights: int, count: int, mixtures: int, width: int, change: int) -> None:
    """A block's scores of some keys to their weights; behind its mixtures stand what its queries count from and their sums."""
    factor, tops = logarithm(width), mixtures + width * ROW
    sums = tops + ROW
    if raise_tops(kind, weights, count, tops, change, factor) != 0:
        rescale(mixtures, width, sums, change)
    exponents(kind, weights, count, tops, sums, factor)


@compiled
def _write_blocks(call: NDArray[np.int64], sequence: NDArray[np.int64], seat: NDArray[np.int64], own: int, kind: Any) -> None:
    """What blocks have gathered to the output."""
    head, first, last = seat[1], seat[2], seat[3]
    width, start = call[WIDTH], sequence[START]
    columns = width // numbers_of(kind)
    stride, output = call[OUTPUT + 1], place(call, OUTPUT, start + first, head)
    lane = (head * call[LANE_TOKENS] + sequence[FIRST_LANE] + first) * FLOAT_BYTES
    for block in range((last - first + LANES - 1) // LANES):
        mixtures = own + (block * (columns + width + 2) + columns) * ROW
        tops, begin = mixtures + width * ROW, block * LANES
        if call[TOPS] != 0:
            copy(tops, 1, call[TOPS] + lane + block * ROW)
            copy(tops + ROW, 1, call[SUMS] + lane + block * ROW)
        unpack(kind, mixtures, columns, tops, last - first - begin, stride, output + begin * stride * FLOAT_BYTES)


@compiled
def _work(call: NDArray[np.int64], kind: Any) -> None:
    """Tasks until none is left; what every thread runs."""
    scratch, table, seat = scratch_of_thread(call), whole(call), np.zeros(5, np.int64)
    amx.begin(kind, scratch)
    while next_task(call, table, seat):
        _attend_blocks(call, table[seat[0]], seat, scratch, kind)
    amx.end(kind)


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
        table: What `quiver.encoder.cpu.attention_call.sequences` gave.
        shape: H and K, a multiple of 16, of pairs 32.
        window: A token sees |i - j| <= window // 2; None for the whole sequence.
        paired: Whether heads are pairs of bfloat16.
        sums: Room for two float32 numbers of each query, (2, H, L): its largest score, in units of a binary logarithm and to a few places
            of it, and the sum of its weights counted from that. `quiver.encoder.cpu.attention_gradients` makes gradients of them. Those of
            pairs are in other units: nobody has asked for them.
    """
    spare = PANEL * shape[1] * FLOAT_BYTES if paired else 0
    call = names.Call(table, shape, window, rows=2 * shape[1] + 2, panels=1, spare=spare)
    for each, numbers in zip((QUERIES, KEYS, VALUES, OUTPUT), heads, strict=True):
        call.put(each, *numbers)
    if sums is not None:
        call.put(TOPS, sums[0].data_ptr(), sums[1].data_ptr())
        call.put(LANE_TOKENS, sums.shape[-1])
    call.run((_PAIR_ENTRY if paired else _FLOAT_ENTRY).address)
