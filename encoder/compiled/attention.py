"""Softmax attention over packed float32 heads on a CPU: whole sequences or a window, no mask and no copy.

A task is a few blocks of LANES queries of one head. Panels of keys go past them one after the other, and what the blocks have gathered
is brought to a larger maximum when a much larger one appears. In a local layer a block meets the keys of its window only. Which thread
does which task has no influence on what comes out.

Shapes: N tokens, H heads, K head width, B sequences.
Source: FlashAttention, arXiv:2205.14135; ModernBERT, arXiv:2412.13663, section 2.1.2 (alternating attention).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from encoder.compiled import team
from encoder.compiled.compiling import callback, compiled
from encoder.compiled.tiles import HIDDEN, clear, exponents, mixture, pack, prefetch, raise_tops, rescale, scores, take, unpack, veil
from encoder.compiled.vectors import LANES, ROWS

# Keys of a panel: their scores, (64, LANES), fit the first cache beside the queries.
PANEL = 64
# Blocks of a task. Whole sequences: keys come from farther away than the second cache only once for all of them. Windows: neighbours
# share most of their keys.
GLOBAL_BLOCKS, LOCAL_BLOCKS = 8, 4
# A window that every distance fits.
EVERYTHING = 1 << 30

# Places of what a call consists of.
TAKEN, MET, SEQUENCES, HEADS, WIDTH, HALF, SCRATCH, SCRATCH_BYTES = range(8)
QUERIES, KEYS, VALUES, OUTPUT = range(8, 20, 3)  # each: address, stride of a token, stride of a head
TABLE = 20
# What a sequence consists of in the table behind it.
START, LENGTH, SEEN, TASKS_END = range(4)

_FLOAT = 4  # bytes


def sequences(starts: NDArray[np.int64], lengths: NDArray[np.int64], key_lengths: NDArray[np.int64], *, local: bool) -> NDArray[np.int64]:
    """The table of a batch's sequences, which all layers of one kind share.

    Args:
        starts: First token of each sequence, (B,).
        lengths: Tokens of each, (B,).
        key_lengths: Leading tokens of each that may be attended to, (B,).
        local: For layers with a window.

    Returns:
        (B, 4); the last column counts the tasks of a head up to each sequence.
    """
    blocks = -(-lengths // LANES)
    tasks = -(-blocks // (LOCAL_BLOCKS if local else GLOBAL_BLOCKS))
    return np.stack([starts, lengths, key_lengths, np.cumsum(tasks)], axis=1)


@compiled
def _attend_blocks(call: NDArray[np.int64], sequence: NDArray[np.int64], head: int, first: int, last: int, scratch: int) -> None:
    """Queries first..last of one head of a sequence."""
    start, width, half = sequence[START], call[WIDTH], call[HALF]
    query_stride, key_stride, value_stride = call[QUERIES + 1], call[KEYS + 1], call[VALUES + 1]
    queries = call[QUERIES] + ((start + first) * query_stride + head * call[QUERIES + 2]) * _FLOAT
    keys = call[KEYS] + (start * key_stride + head * call[KEYS + 2]) * _FLOAT
    values = call[VALUES] + (start * value_stride + head * call[VALUES + 2]) * _FLOAT
    row = LANES * _FLOAT
    change = scratch
    weights = change + row
    # Of each block: its queries, what it has gathered, what its queries count from, sums.
    own = weights + (PANEL + ROWS) * row
    block_bytes = (2 * width + 2) * row
    blocks = (last - first + LANES - 1) // LANES
    for block in range(blocks):
        tile = own + block * block_bytes
        begin = block * LANES
        pack(queries + begin * query_stride * _FLOAT, query_stride, last - first - begin, width, np.log2(np.e) / np.sqrt(width), tile)
        clear(tile + width * row, width, 0.0)
        clear(tile + 2 * width * row, 1, HIDDEN)
        clear(tile + (2 * width + 1) * row, 1, 0.0)
    panel, end = max(0, first - half), min(sequence[SEEN], last + half)
    while panel < end:
        beyond = min(panel + PANEL, end)
        for block in range(blocks):
            begin = first + block * LANES
            low, high = max(panel, begin - half), min(beyond, begin + LANES + half)
            if low >= high:
                continue
            tile = own + block * block_bytes
            mixtures, tops = tile + width * row, tile + 2 * width * row
            sums = tops + row
            # The next panel comes in while this one is worked on, a part of it with each block.
            ahead = min(end, beyond + PANEL * block // blocks)
            more = min(end, beyond + PANEL * (block + 1) // blocks) - ahead
            prefetch(keys + ahead * key_stride * _FLOAT, key_stride, more, width)
            scores(tile, keys + low * key_stride * _FLOAT, key_stride, high - low, width, weights)
            if low < begin + LANES - 1 - half or high - 1 > begin + half:
                veil(weights, high - low, low - begin, half)
            if raise_tops(weights, high - low, tops, change) != 0:
                rescale(mixtures, width, sums, change)
            exponents(weights, high - low, tops, sums)
            prefetch(values + ahead * value_stride * _FLOAT, value_stride, more, width)
            mixture(values + low * value_stride * _FLOAT, value_stride, high - low, width, weights, mixtures)
        panel = beyond
    stride = call[OUTPUT + 1]
    output = call[OUTPUT] + ((start + first) * stride + head * call[OUTPUT + 2]) * _FLOAT
    for block in range(blocks):
        mixtures = own + block * block_bytes + width * row
        tops, begin = mixtures + width * row, block * LANES
        unpack(mixtures, width, tops + row, tops, last - first - begin, stride, output + begin * stride * _FLOAT)


@compiled
def _work(call: NDArray[np.int64], table: NDArray[np.int64]) -> None:
    """Tasks until none is left; what every thread runs."""
    heads = call[HEADS]
    scratch = call[SCRATCH] + take(call.ctypes.data + MET * 8) * call[SCRATCH_BYTES]
    place, before = 0, 0
    total = table[-1, TASKS_END] * heads
    while True:
        task = take(call.ctypes.data + TAKEN * 8)
        if task >= total:
            return
        while task >= table[place, TASKS_END] * heads:
            before = table[place, TASKS_END]
            place += 1
        length, tasks = table[place, LENGTH], table[place, TASKS_END] - before
        blocks = (length + LANES - 1) // LANES
        head, part = divmod(task - before * heads, tasks)
        first = part * blocks // tasks * LANES
        last = min((part + 1) * blocks // tasks * LANES, length)
        _attend_blocks(call, table[place], head, first, last, scratch)


def _entry(pointer: Any) -> None:
    """`_work` on what the pointer points to."""
    call = numba.carray(pointer, TABLE, np.int64)
    whole = numba.carray(pointer, TABLE + 4 * call[SEQUENCES], np.int64)
    _work(call, whole[TABLE:].reshape((call[SEQUENCES], 4)))


_ENTRY = callback(_entry)


def attend(heads: NDArray[np.int64], table: NDArray[np.int64], shape: tuple[int, int], window: int | None) -> None:
    """Attention of every sequence of a table with itself, on torch's threads.

    Args:
        heads: Address, stride of a token and stride of a head, in numbers, of queries, keys, values and output, (4, 3); float32, the
            numbers of a head side by side.
        table: What `sequences` gave.
        shape: H and K, a multiple of 16.
        window: A token sees |i - j| <= window // 2; None for the whole sequence.
    """
    count, width = shape
    call = np.zeros(TABLE + table.size, np.int64)
    call[[SEQUENCES, HEADS, WIDTH]] = len(table), count, width
    call[HALF] = EVERYTHING if window is None else window // 2
    rows = 1 + PANEL + ROWS + max(GLOBAL_BLOCKS, LOCAL_BLOCKS) * (2 * width + 2)
    scratch = team.scratch(torch.get_num_threads(), rows * LANES * _FLOAT)
    call[[SCRATCH, SCRATCH_BYTES]] = scratch.data_ptr(), scratch.shape[1]
    for place, numbers in zip((QUERIES, KEYS, VALUES, OUTPUT), heads, strict=True):
        call[place : place + 3] = numbers
    call[TABLE:] = table.ravel()
    team.run(_ENTRY.address, call.ctypes.data, len(scratch))
