"""What a call of attention consists of, and who does which part of it.

A task is a few blocks of LANES tokens of one head: queries, or for the gradients of keys and values keys. The tokens of the other side
go past them in panels. Which thread does which task has no influence on what comes out.

Shapes: N tokens, H heads, K head width, B sequences, L lanes of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quiver.encoder.cpu.attention_tiles import (
    MASKED,
    clear,
    copy,
    copy_rows,
    exponents,
    keys_at_once,
    lane_gradients,
    mask_window,
    mixture,
    next_index,
    numbers_of,
    pack,
    pair_values,
    prefetch,
    raise_maxima,
    rescale,
    row_gradients,
    scores,
    store_rows,
    totals,
    unpack,
)
from quiver.encoder.cpu.codegen import BFLOAT16, FLOAT32, LANES, amx_begin, amx_end
from quiver.encoder.cpu.jit import Callback, jit
from quiver.encoder.cpu.support import run_on_threads as team_run
from quiver.encoder.cpu.support import thread_scratch as team_scratch

# Tokens of a panel: their scores, (64, LANES), fit the first cache beside a block.
PANEL = 64
# Blocks of a task. Whole sequences: panels come from farther away than the second cache only once for all of them. Windows: neighbours
# share most of their panels.
GLOBAL_BLOCKS, LOCAL_BLOCKS = 8, 4
# A window that every distance fits.
NO_WINDOW = 1 << 30

# Places of what a call consists of.
TAKEN, MET, SEQUENCES, HEADS, WIDTH, HALF, SCRATCH, SCRATCH_BYTES, LANE_TOKENS = range(9)
# Each: address, stride of a token, stride of a head.
QUERIES, KEYS, VALUES, OUTPUT, UPSTREAM, OF_QUERIES, OF_KEYS, OF_VALUES = range(9, 33, 3)
# Addresses of two numbers for each query of each head, (H, L); 0 where nobody wants them.
TOPS, SUMS = 33, 34
TABLE = 35
# What a sequence consists of in the table behind it: its first token, tokens that have lanes, tokens of the other side, tasks of a head
# up to its end, the lane of its first query.
START, LENGTH, SEEN, TASKS_END, FIRST_LANE = range(5)
COLUMNS = 5

FLOAT_BYTES = 4
ROW = LANES * FLOAT_BYTES
PANEL_BYTES = (PANEL + 1) * ROW
"""Scores of a panel, and a row beside them."""

Heads = tuple[int, int, int]
"""Address of a tensor (N, H, K) of float32 or bfloat16, the numbers of a head side by side; stride of a token and of a head, in units of 32
bits."""


def sequences(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], key_lengths: NDArray[np.int64], *, local: bool, keys: bool = False
) -> NDArray[np.int64]:
    """The table of a batch's sequences, which all layers of one kind share.

    Args:
        starts: First token of each sequence, (B,).
        lengths: Tokens of each, (B,).
        key_lengths: Leading tokens of each that may be attended to, (B,).
        local: For layers with a window.
        keys: For the gradients of keys and values, which have the lanes there; elsewhere queries have.

    Returns:
        (B, 5).
    """
    lanes, others = (key_lengths, lengths) if keys else (lengths, key_lengths)
    tasks = -(-lanes // (LANES * (LOCAL_BLOCKS if local else GLOBAL_BLOCKS)))
    blocks = -(-lengths // LANES)
    return np.stack([starts, lanes, others, np.cumsum(tasks), (np.cumsum(blocks) - blocks) * LANES], axis=1)


def lane_tokens(table: NDArray[np.int64]) -> int:
    """L: lanes of all queries of a table, whole blocks of every sequence."""
    return int(table[-1, FIRST_LANE] + -(-max(table[-1, LENGTH], table[-1, SEEN]) // LANES) * LANES)


def log2_sum_exp(sums: Tensor) -> Tensor:
    """What a query's weights are counted from so that they sum to 1, in units of a binary logarithm.

    Args:
        sums: The two numbers of each query that `quiver.encoder.cpu.attention_kernels.attend` gave, (2, H, L).

    Returns:
        (H, L); so large where a query has seen nothing that no weight comes of it.
    """
    tops, weights = sums
    return torch.where(tops <= MASKED, -MASKED, tops + weights.log2())


@jit
def scratch_of_thread(call: NDArray[np.int64]) -> int:
    """Where the thread that asks has room."""
    address: int = call[SCRATCH] + next_index(call.ctypes.data + MET * 8) * call[SCRATCH_BYTES]
    return address


@jit
def next_task(call: NDArray[np.int64], table: NDArray[np.int64], seat: NDArray[np.int64]) -> bool:
    """Whether there is another task, and what it is.

    ``seat`` is the thread's own and begins with zeros: place of the sequence, head, first token, the one behind the last, and how many
    tasks of a head there are before the sequence.
    """
    task = next_index(call.ctypes.data + TAKEN * 8)
    if task >= table[-1, TASKS_END] * call[HEADS]:
        return False
    while task >= table[seat[0], TASKS_END] * call[HEADS]:
        seat[4] = table[seat[0], TASKS_END]
        seat[0] += 1
    length, tasks = table[seat[0], LENGTH], table[seat[0], TASKS_END] - seat[4]
    blocks = (length + LANES - 1) // LANES
    head, part = divmod(task - seat[4] * call[HEADS], tasks)
    seat[1] = head
    seat[2] = part * blocks // tasks * LANES
    seat[3] = min((part + 1) * blocks // tasks * LANES, length)
    return True


@jit
def sequence_table(call: NDArray[np.int64]) -> NDArray[np.int64]:
    """The table behind a call."""
    return call[TABLE:].reshape((call[SEQUENCES], COLUMNS))


@jit
def head_address(call: NDArray[np.int64], heads: int, token: int, head: int) -> int:
    """Where a head of a token lies."""
    address: int = call[heads] + (token * call[heads + 1] + head * call[heads + 2]) * FLOAT_BYTES
    return address


@jit
def visible_range(panel: int, end: int, begin: int, half: int) -> tuple[int, int]:
    """Which tokens of a panel that ends before ``end`` a block meets, itself beginning at ``begin``: the first, and one behind the last."""
    return max(panel, begin - half), min(panel + PANEL, end, begin + LANES + half)


@jit
def prefetch_panel(rows: int, stride: int, columns: int, panel: int, end: int, block: int, blocks: int) -> None:
    """Have the next panel come in while this one is worked on, a part of it with each block; ``rows`` is where the sequence begins."""
    beyond = min(panel + PANEL, end)
    first = min(end, beyond + PANEL * block // blocks)
    last = min(end, beyond + PANEL * (block + 1) // blocks)
    prefetch(rows + first * stride * FLOAT_BYTES, stride, last - first, columns)


@jit
def mask_scores(weights: int, low: int, high: int, begin: int, half: int) -> None:
    """Hide the scores that tokens low..high have with those of the block that begins at ``begin`` where they are beyond the window."""
    if low < begin + LANES - 1 - half or high - 1 > begin + half:
        mask_window(weights, high - low, low - begin, half)


@jit
def argument_count(call: NDArray[np.int64]) -> int:
    """Numbers of a call and its table."""
    length: int = TABLE + COLUMNS * call[SEQUENCES]
    return length


class AttentionArguments:
    """What one layer's attention is told.

    Args:
        table: What `sequences` gave.
        shape: H and K, a multiple of 16, of pairs 32.
        window: A token sees |i - j| <= window // 2; None for the whole sequence.
        rows: Rows (LANES,) that a block keeps.
        panels: Panels of scores that a thread keeps.
        spare: Bytes that it keeps besides.
    """

    def __init__(
        self, table: NDArray[np.int64], shape: tuple[int, int], window: int | None, *, rows: int, panels: int, spare: int = 0
    ) -> None:
        self.numbers = np.zeros(TABLE + table.size, np.int64)
        self.numbers[[SEQUENCES, HEADS, WIDTH]] = len(table), *shape
        self.numbers[HALF] = NO_WINDOW if window is None else window // 2
        self.numbers[TABLE:] = table.ravel()
        size_of_thread = spare + panels * PANEL_BYTES + max(GLOBAL_BLOCKS, LOCAL_BLOCKS) * rows * ROW
        self.scratch = team_scratch(torch.get_num_threads(), size_of_thread)
        self.numbers[[SCRATCH, SCRATCH_BYTES]] = self.scratch.data_ptr(), self.scratch.shape[1]

    def put(self, first: int, *values: int) -> None:
        """Numbers or addresses from a place on."""
        self.numbers[first : first + len(values)] = values

    def run(self, entry: int) -> None:
        """Run a compiled function of this call on torch's threads."""
        self.numbers[[TAKEN, MET]] = 0
        team_run(entry, self.numbers.ctypes.data, len(self.scratch))


@jit
def logarithm(width: int) -> float:
    """What makes a score of a product of K numbers: 1 / sqrt(K), in units of a binary logarithm."""
    factor: float = np.log2(np.e) / np.sqrt(width)
    return factor


@jit
def _begin_block(kind: Any, queries: int, stride: int, count: int, width: int, tile: int) -> None:
    """What a block begins with: its queries, nothing gathered, nothing to count from, no sums."""
    columns = width // numbers_of(kind)
    pack(kind, queries, stride, count, columns, logarithm(width), tile)
    mixtures = tile + columns * ROW
    clear(mixtures, width, 0.0)
    clear(mixtures + width * ROW, 1, MASKED)
    clear(mixtures + (width + 1) * ROW, 1, 0.0)


@jit
def _attend_blocks(call: NDArray[np.int64], sequence: NDArray[np.int64], seat: NDArray[np.int64], scratch: int, kind: Any) -> None:
    """Queries of one head of a sequence, which the thread's seat names."""
    head, first, last = seat[1], seat[2], seat[3]
    start, width, half, numbers = sequence[START], call[WIDTH], call[HALF], numbers_of(kind)
    columns = width // numbers
    query_stride, key_stride, value_stride = call[QUERIES + 1], call[KEYS + 1], call[VALUES + 1]
    queries = head_address(call, QUERIES, start + first, head)
    keys, values = head_address(call, KEYS, start, head), head_address(call, VALUES, start, head)
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
            low, high = visible_range(panel, end, begin, half)
            if low >= high:
                continue
            # Pairs are met whole, by AMX 16 pairs at once. Values of keys that are too many are added 0 times; an infinite one, of
            # the same text, makes that NaN.
            low -= (low - panel) % keys_at_once(kind)
            count = high - low
            prefetch_panel(keys, key_stride, columns, panel, end, block, blocks)
            met = keys + low * key_stride * FLOAT_BYTES, key_stride
            if numbers == 2:
                met = kept_keys + (low - panel) * columns * FLOAT_BYTES, columns
            tile = own + block * block_bytes
            scores(kind, tile, met[0], met[1], count, columns, weights)
            mask_scores(weights, low, high, begin, half)
            _weigh(kind, weights, count, tile + columns * ROW, width, change)
            prefetch_panel(values, value_stride, columns, panel, end, block, blocks)
            met = values + low * value_stride * FLOAT_BYTES, value_stride
            if numbers == 2:
                met, count = (kept_values + (low - panel) // 2 * FLOAT_BYTES, PANEL // 2), (count + 1) // 2
            mixture(kind, met[0], met[1], count, width, weights, tile + columns * ROW)
        panel += PANEL
    _write_blocks(call, sequence, seat, own, kind)


@jit
def _weigh(kind: Any, weights: int, count: int, mixtures: int, width: int, change: int) -> None:
    """A block's scores of some keys to their weights; behind its mixtures stand what its queries count from and their sums."""
    factor, tops = logarithm(width), mixtures + width * ROW
    sums = tops + ROW
    if raise_maxima(kind, weights, count, tops, change, factor) != 0:
        rescale(mixtures, width, sums, change)
    exponents(kind, weights, count, tops, sums, factor)


@jit
def _write_blocks(call: NDArray[np.int64], sequence: NDArray[np.int64], seat: NDArray[np.int64], own: int, kind: Any) -> None:
    """What blocks have gathered to the output."""
    head, first, last = seat[1], seat[2], seat[3]
    width, start = call[WIDTH], sequence[START]
    columns = width // numbers_of(kind)
    stride, output = call[OUTPUT + 1], head_address(call, OUTPUT, start + first, head)
    lane = (head * call[LANE_TOKENS] + sequence[FIRST_LANE] + first) * FLOAT_BYTES
    for block in range((last - first + LANES - 1) // LANES):
        mixtures = own + (block * (columns + width + 2) + columns) * ROW
        tops, begin = mixtures + width * ROW, block * LANES
        if call[TOPS] != 0:
            copy(tops, 1, call[TOPS] + lane + block * ROW)
            copy(tops + ROW, 1, call[SUMS] + lane + block * ROW)
        unpack(kind, mixtures, columns, tops, last - first - begin, stride, output + begin * stride * FLOAT_BYTES)


@jit
def _attend_all(call: NDArray[np.int64], kind: Any) -> None:
    """Tasks until none is left; what every thread runs."""
    scratch, table, seat = scratch_of_thread(call), sequence_table(call), np.zeros(5, np.int64)
    amx_begin(kind, scratch)
    while next_task(call, table, seat):
        _attend_blocks(call, table[seat[0]], seat, scratch, kind)
    amx_end(kind)


def _floats(pointer: Any) -> None:
    """`_attend_all` on what the pointer points to."""
    _attend_all(numba.carray(pointer, argument_count(numba.carray(pointer, TABLE, np.int64)), np.int64), FLOAT32)


def _pairs(pointer: Any) -> None:
    """The same for pairs of bfloat16."""
    _attend_all(numba.carray(pointer, argument_count(numba.carray(pointer, TABLE, np.int64)), np.int64), BFLOAT16)


_FLOAT_ENTRY, _PAIR_ENTRY = Callback(_floats), Callback(_pairs)


def attend(
    heads: Sequence[Heads],
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
        table: What `quiver.encoder.cpu.attention_kernels.sequences` gave.
        shape: H and K, a multiple of 16, of pairs 32.
        window: A token sees |i - j| <= window // 2; None for the whole sequence.
        paired: Whether heads are pairs of bfloat16.
        sums: Room for two float32 numbers of each query, (2, H, L): its largest score, in units of a binary logarithm and to a few places
            of it, and the sum of its weights counted from that. `quiver.encoder.cpu.attention_kernels` makes gradients of them. Those of
            pairs are in other units: nobody has asked for them.
    """
    spare = PANEL * shape[1] * FLOAT_BYTES if paired else 0
    call = AttentionArguments(table, shape, window, rows=2 * shape[1] + 2, panels=1, spare=spare)
    for each, numbers in zip((QUERIES, KEYS, VALUES, OUTPUT), heads, strict=True):
        call.put(each, *numbers)
    if sums is not None:
        call.put(TOPS, sums[0].data_ptr(), sums[1].data_ptr())
        call.put(LANE_TOKENS, sums.shape[-1])
    call.run((_PAIR_ENTRY if paired else _FLOAT_ENTRY).address)


@jit
def _query_gradients(call: NDArray[np.int64], sequence: NDArray[np.int64], head: int, first: int, last: int, scratch: int) -> None:
    """Gradients of queries first..last of one head of a sequence; what their keys need of them goes to SUMS."""
    start, width, half = sequence[START], call[WIDTH], call[HALF]
    query_stride, key_stride, value_stride = call[QUERIES + 1], call[KEYS + 1], call[VALUES + 1]
    output_stride, upstream_stride = call[OUTPUT + 1], call[UPSTREAM + 1]
    queries, output = head_address(call, QUERIES, start + first, head), head_address(call, OUTPUT, start + first, head)
    upstream = head_address(call, UPSTREAM, start + first, head)
    keys, values = head_address(call, KEYS, start, head), head_address(call, VALUES, start, head)
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
        pack(FLOAT32, queries + begin * query_stride * FLOAT_BYTES, query_stride, count, width, np.log2(np.e) / np.sqrt(width), tile)
        pack(FLOAT32, upstream + begin * upstream_stride * FLOAT_BYTES, upstream_stride, count, width, 1.0, given)
        pack(FLOAT32, output + begin * output_stride * FLOAT_BYTES, output_stride, count, width, 1.0, gathered)
        totals(given, gathered, width, sums + block * ROW)
        clear(gathered, width, 0.0)
    panel, end = max(0, first - half), min(sequence[SEEN], last + half)
    while panel < end:
        for block in range(blocks):
            begin = first + block * LANES
            low, high = visible_range(panel, end, begin, half)
            if low >= high:
                continue
            tile = own + block * block_bytes
            key, value = keys + low * key_stride * FLOAT_BYTES, values + low * value_stride * FLOAT_BYTES
            prefetch_panel(keys, key_stride, width, panel, end, block, blocks)
            scores(FLOAT32, tile, key, key_stride, high - low, width, weights)
            mask_scores(weights, low, high, begin, half)
            prefetch_panel(values, value_stride, width, panel, end, block, blocks)
            scores(FLOAT32, tile + tile_bytes, value, value_stride, high - low, width, gradients)
            lane_gradients(weights, gradients, high - low, tops + block * ROW, sums + block * ROW)
            mixture(FLOAT32, key, key_stride, high - low, width, gradients, tile + 2 * tile_bytes)
        panel += PANEL
    stride, of_queries = call[OF_QUERIES + 1], head_address(call, OF_QUERIES, start + first, head)
    for block in range(blocks):
        gathered, begin = own + block * block_bytes + 2 * tile_bytes, block * LANES
        store_rows(gathered, width, last - first - begin, 1 / np.sqrt(width), stride, of_queries + begin * stride * FLOAT_BYTES)


@jit
def _key_gradients(call: NDArray[np.int64], sequence: NDArray[np.int64], head: int, first: int, last: int, scratch: int) -> None:
    """Gradients of keys and values first..last of one head of a sequence."""
    start, width, half = sequence[START], call[WIDTH], call[HALF]
    query_stride, key_stride, value_stride, upstream_stride = call[QUERIES + 1], call[KEYS + 1], call[VALUES + 1], call[UPSTREAM + 1]
    queries, upstream = head_address(call, QUERIES, start, head), head_address(call, UPSTREAM, start, head)
    keys, values = head_address(call, KEYS, start + first, head), head_address(call, VALUES, start + first, head)
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
        pack(FLOAT32, keys + begin * key_stride * FLOAT_BYTES, key_stride, count, width, np.log2(np.e) / np.sqrt(width), tile)
        pack(FLOAT32, values + begin * value_stride * FLOAT_BYTES, value_stride, count, width, 1.0, tile + tile_bytes)
        clear(tile + 2 * tile_bytes, 2 * width, 0.0)
    panel, end = max(0, first - half), min(sequence[SEEN], last + half)
    while panel < end:
        for block in range(blocks):
            begin = first + block * LANES
            low, high = visible_range(panel, end, begin, half)
            if low >= high:
                continue
            tile = own + block * block_bytes
            query, given = queries + low * query_stride * FLOAT_BYTES, upstream + low * upstream_stride * FLOAT_BYTES
            prefetch_panel(queries, query_stride, width, panel, end, block, blocks)
            scores(FLOAT32, tile, query, query_stride, high - low, width, weights)
            mask_scores(weights, low, high, begin, half)
            prefetch_panel(upstream, upstream_stride, width, panel, end, block, blocks)
            scores(FLOAT32, tile + tile_bytes, given, upstream_stride, high - low, width, gradients)
            row_gradients(weights, gradients, high - low, tops + low * FLOAT_BYTES, sums + low * FLOAT_BYTES)
            mixture(FLOAT32, query, query_stride, high - low, width, gradients, tile + 2 * tile_bytes)
            mixture(FLOAT32, given, upstream_stride, high - low, width, weights, tile + 3 * tile_bytes)
        panel += PANEL
    key_stride, of_keys = call[OF_KEYS + 1], head_address(call, OF_KEYS, start + first, head)
    value_stride, of_values = call[OF_VALUES + 1], head_address(call, OF_VALUES, start + first, head)
    for block in range(blocks):
        gathered, begin = own + block * block_bytes + 2 * tile_bytes, block * LANES
        count = last - first - begin
        store_rows(gathered, width, count, 1 / np.sqrt(width), key_stride, of_keys + begin * key_stride * FLOAT_BYTES)
        store_rows(gathered + tile_bytes, width, count, 1.0, value_stride, of_values + begin * value_stride * FLOAT_BYTES)


@jit
def _differentiate_all(call: NDArray[np.int64]) -> None:
    """Tasks until none is left; what every thread runs."""
    scratch, table, seat = scratch_of_thread(call), sequence_table(call), np.zeros(5, np.int64)
    while next_task(call, table, seat):
        if call[OF_KEYS] == 0:
            _query_gradients(call, table[seat[0]], seat[1], seat[2], seat[3], scratch)
        else:
            _key_gradients(call, table[seat[0]], seat[1], seat[2], seat[3], scratch)


def _gradient_entry(pointer: Any) -> None:
    """`_differentiate_all` on what the pointer points to."""
    _differentiate_all(numba.carray(pointer, argument_count(numba.carray(pointer, TABLE, np.int64)), np.int64))


_GRADIENT_ENTRY = Callback(_gradient_entry)


def differentiate(
    heads: Sequence[Heads],
    gradients: Sequence[Heads],
    tables: tuple[NDArray[np.int64], NDArray[np.int64]],
    shape: tuple[int, int],
    window: int | None,
    tops: Tensor,
) -> None:
    """Gradients of queries, keys and values, on torch's threads.

    Args:
        heads: Queries, keys, values, output and what the output is given.
        gradients: Where those of queries, keys and values go. A key that nobody may attend to is left as it is.
        tables: What `quiver.encoder.cpu.attention_kernels.sequences` gave, for queries and for keys.
        shape: H and K, a multiple of 16.
        window: A token sees |i - j| <= window // 2; None for the whole sequence.
        tops: What `quiver.encoder.cpu.attention_kernels.counted_from` gave, (H, L).
    """
    sums = torch.empty_like(tops)
    for table, places, tiles in ((tables[0], (OF_QUERIES,), 3), (tables[1], (OF_KEYS, OF_VALUES), 4)):
        call = AttentionArguments(table, shape, window, rows=tiles * shape[1], panels=2)
        for each, numbers in zip((QUERIES, KEYS, VALUES, OUTPUT, UPSTREAM), heads, strict=True):
            call.put(each, *numbers)
        for each, numbers in zip((OF_QUERIES, OF_KEYS, OF_VALUES), gradients, strict=True):
            if each in places:
                call.put(each, *numbers)
        call.put(TOPS, tops.data_ptr(), sums.data_ptr())
        call.put(LANE_TOKENS, tops.shape[-1])
        call.run(_GRADIENT_ENTRY.address)
