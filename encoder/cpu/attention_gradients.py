"""Gradients of `quiver.encoder.cpu.attention`, without a matrix of scores.

Scores are found again from queries, keys and one number that each query has kept. That happens twice, once with queries in lanes and once
with keys: what is gathered for a token is gathered where that token has a lane, so no two tasks write to one place, and sums are taken in
one order whoever works.

Shapes: N tokens, H heads, K head width, B sequences, L lanes of all sequences.
Source: FlashAttention-2, arXiv:2307.08691, section 3.1.2 (one number a query instead of two, and the product of what a query got with its
gradient instead of a sum over keys); the second pass instead of sums that threads share is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quiver.encoder.cpu import attention_call as names
from quiver.encoder.cpu.attention_call import (
    FIRST_LANE,
    FLOAT_BYTES,
    HALF,
    KEYS,
    LANE_TOKENS,
    OF_KEYS,
    OF_QUERIES,
    OF_VALUES,
    OUTPUT,
    PANEL,
    PANEL_BYTES,
    QUERIES,
    ROW,
    SEEN,
    START,
    SUMS,
    TOPS,
    UPSTREAM,
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
    clear,
    lane_gradients,
    mixture,
    pack,
    row_gradients,
    scores,
    spill,
    totals,
)
from quiver.encoder.cpu.vectors import FLOATS, LANES


@compiled
def _give_queries(call: NDArray[np.int64], sequence: NDArray[np.int64], head: int, first: int, last: int, scratch: int) -> None:
    """Gradients of queries first..last of one head of a sequence; what their keys need of them goes to SUMS."""
    start, width, half = sequence[START], call[WIDTH], call[HALF]
    query_stride, key_stride, value_stride = call[QUERIES + 1], call[KEYS + 1], call[VALUES + 1]
    output_stride, upstream_stride = call[OUTPUT + 1], call[UPSTREAM + 1]
    queries, output = place(call, QUERIES, start + first, head), place(call, OUTPUT, start + first, head)
    upstream = place(call, UPSTREAM, start + first, head)
    keys, values = place(call, KEYS, start, head), place(call, VALUES, start, head)
    lane = (head * call[LANE_TOKENS] + sequence[FIRST_LANE] + first) * FLOAT_BYTES
    tops, sums = call[TOPS] + lane, call[SUMS] + lane
    weights, gradients = scratch, scratch + PANEL_BYTES
    # Of each block: its queries, what their outputs are given, what it has gathered.
    own = gradients + PANEL_BYTES
    tile_bytes, block_bytes = width * ROW, 3 * width * ROW
    blocks = (last - first + LANES - 1) // LANES
    for block in range(blocks):
        tile, begin = own + block * block_bytes, block * LANES
        given, gathered, count = tile + tile_bytes, tile + 2 * tile_bytes, last - first - begin
        pack(FLOATS, queries + begin * query_stride * FLOAT_BYTES, query_stride, count, width, np.log2(np.e) / np.sqrt(width), tile)
        pack(FLOATS, upstream + begin * upstream_stride * FLOAT_BYTES, upstream_stride, count, width, 1.0, given)
        pack(FLOATS, output + begin * output_stride * FLOAT_BYTES, output_stride, count, width, 1.0, gathered)
        totals(given, gathered, width, sums + block * ROW)
        clear(gathered, width, 0.0)
    panel, end = max(0, first - half), min(sequence[SEEN], last + half)
    while panel < end:
        for block in range(blocks):
            begin = first + block * LANES
            low, high = meeting(panel, end, begin, half)
            if low >= high:
                continue
            tile = own + block * block_bytes
            key, value = keys + low * key_stride * FLOAT_BYTES, values + low * value_stride * FLOAT_BYTES
            call_in(keys, key_stride, width, panel, end, block, blocks)
            scores(FLOATS, tile, key, key_stride, high - low, width, weights)
            hide(weights, low, high, begin, half)
            call_in(values, value_stride, width, panel, end, block, blocks)
            scores(FLOATS, tile + tile_bytes, value, value_stride, high - low, width, gradients)
            lane_gradients(weights, gradients, high - low, tops + block * ROW, sums + block * ROW)
            mixture(FLOATS, key, key_stride, high - low, width, gradients, tile + 2 * tile_bytes)
        panel += PANEL
    stride, of_queries = call[OF_QUERIES + 1], place(call, OF_QUERIES, start + first, head)
    for block in range(blocks):
        gathered, begin = own + block * block_bytes + 2 * tile_bytes, block * LANES
        spill(gathered, width, last - first - begin, 1 / np.sqrt(width), stride, of_queries + begin * stride * FLOAT_BYTES)


@compiled
def _give_keys(call: NDArray[np.int64], sequence: NDArray[np.int64], head: int, first: int, last: int, scratch: int) -> None:
    """Gradients of keys and values first..last of one head of a sequence."""
    start, width, half = sequence[START], call[WIDTH], call[HALF]
    query_stride, key_stride, value_stride, upstream_stride = call[QUERIES + 1], call[KEYS + 1], call[VALUES + 1], call[UPSTREAM + 1]
    queries, upstream = place(call, QUERIES, start, head), place(call, UPSTREAM, start, head)
    keys, values = place(call, KEYS, start + first, head), place(call, VALUES, start + first, head)
    lane = (head * call[LANE_TOKENS] + sequence[FIRST_LANE]) * FLOAT_BYTES
    tops, sums = call[TOPS] + lane, call[SUMS] + lane
    weights, gradients = scratch, scratch + PANEL_BYTES
    # Of each block: its keys, its values, what it has gathered for either.
    own = gradients + PANEL_BYTES
    tile_bytes, block_bytes = width * ROW, 4 * width * ROW
    blocks = (last - first + LANES - 1) // LANES
    for block in range(blocks):
        tile, begin = own + block * block_bytes, block * LANES
        count = last - first - begin
        pack(FLOATS, keys + begin * key_stride * FLOAT_BYTES, key_stride, count, width, np.log2(np.e) / np.sqrt(width), tile)
        pack(FLOATS, values + begin * value_stride * FLOAT_BYTES, value_stride, count, width, 1.0, tile + tile_bytes)
        clear(tile + 2 * tile_bytes, 2 * width, 0.0)
    panel, end = max(0, first - half), min(sequence[SEEN], last + half)
    while panel < end:
        for block in range(blocks):
            begin = first + block * LANES
            low, high = meeting(panel, end, begin, half)
            if low >= high:
                continue
            tile = own + block * block_bytes
            query, given = queries + low * query_stride * FLOAT_BYTES, upstream + low * upstream_stride * FLOAT_BYTES
            call_in(queries, query_stride, width, panel, end, block, blocks)
            scores(FLOATS, tile, query, query_stride, high - low, width, weights)
            hide(weights, low, high, begin, half)
            call_in(upstream, upstream_stride, width, panel, end, block, blocks)
            scores(FLOATS, tile + tile_bytes, given, upstream_stride, high - low, width, gradients)
            row_gradients(weights, gradients, high - low, tops + low * FLOAT_BYTES, sums + low * FLOAT_BYTES)
            mixture(FLOATS, query, query_stride, high - low, width, gradients, tile + 2 * tile_bytes)
            mixture(FLOATS, given, upstream_stride, high - low, width, weights, tile + 3 * tile_bytes)
        panel += PANEL
    key_stride, of_keys = call[OF_KEYS + 1], place(call, OF_KEYS, start + first, head)
    value_stride, of_values = call[OF_VALUES + 1], place(call, OF_VALUES, start + first, head)
    for block in range(blocks):
        gathered, begin = own + block * block_bytes + 2 * tile_bytes, block * LANES
        count = last - first - begin
        spill(gathered, width, count, 1 / np.sqrt(width), key_stride, of_keys + begin * key_stride * FLOAT_BYTES)
        spill(gathered + tile_bytes, width, count, 1.0, value_stride, of_values + begin * value_stride * FLOAT_BYTES)


@compiled
def _work(call: NDArray[np.int64]) -> None:
    """Tasks until none is left; what every thread runs."""
    scratch, table, seat = scratch_of_thread(call), whole(call), np.zeros(5, np.int64)
    while next_task(call, table, seat):
        if call[OF_KEYS] == 0:
            _give_queries(call, table[seat[0]], seat[1], seat[2], seat[3], scratch)
        else:
            _give_keys(call, table[seat[0]], seat[1], seat[2], seat[3], scratch)


def _entry(pointer: Any) -> None:
    """`_work` on what the pointer points to."""
    _work(numba.carray(pointer, size(numba.carray(pointer, names.TABLE, np.int64)), np.int64))


_ENTRY = Callback(_entry)


def differentiate(
    heads: Sequence[names.Heads],
    gradients: Sequence[names.Heads],
    tables: tuple[NDArray[np.int64], NDArray[np.int64]],
    shape: tuple[int, int],
    window: int | None,
    tops: Tensor,
) -> None:
    """Gradients of queries, keys and values, on torch's threads.

    Args:
        heads: Queries, keys, values, output and what the output is given.
        gradients: Where those of queries, keys and values go. A key that nobody may attend to is left as it is.
        tables: What `quiver.encoder.cpu.attention_call.sequences` gave, for queries and for keys.
        shape: H and K, a multiple of 16.
        window: A token sees |i - j| <= window // 2; None for the whole sequence.
        tops: What `quiver.encoder.cpu.attention_call.counted_from` gave, (H, L).
    """
    sums = torch.empty_like(tops)
    for table, places, tiles in ((tables[0], (OF_QUERIES,), 3), (tables[1], (OF_KEYS, OF_VALUES), 4)):
        call = names.Call(table, shape, window, rows=tiles * shape[1], panels=2)
        for each, numbers in zip((QUERIES, KEYS, VALUES, OUTPUT, UPSTREAM), heads, strict=True):
            call.put(each, *numbers)
        for each, numbers in zip((OF_QUERIES, OF_KEYS, OF_VALUES), gradients, strict=True):
            if each in places:
                call.put(each, *numbers)
        call.put(TOPS, tops.data_ptr(), sums.data_ptr())
        call.put(LANE_TOKENS, tops.shape[-1])
        call.run(_ENTRY.address)
