"""The attention backend ``compiled``: softmax attention over packed heads on a CPU and its gradients, float32 or bfloat16.

It attends to whole sequences or a window, without mask, copy or padding. Importing this module loads numba.

A task is a few blocks of LANES tokens of one head: queries, or keys for the gradients of keys and values. The tokens of the other side pass
them in panels; when a larger maximum appears, the partial results of a block are rescaled. In a local layer a block meets only the keys of
its window. For the gradients, scores are recomputed twice, with queries in lanes and with keys in lanes: a sum for a token is kept where
that token has a lane, so no two tasks write to one address and every sum has a fixed order.

Shapes: N tokens, H heads, K head width, B sequences, L lanes of all sequences.
Source: FlashAttention, arXiv:2205.14135; FlashAttention-2, arXiv:2307.08691, section 3.1.2 (one number per query, and the product of output
and gradient instead of a sum over keys); ModernBERT, arXiv:2412.13663, section 2.1.2. The second pass is our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from quiver.encoder.cpu.codegen import BFLOAT16, FLOAT32, LANES, amx_begin, amx_end
from quiver.encoder.cpu.jit import CompiledCallback, jit
from quiver.encoder.cpu.support import run_on_threads, thread_scratch
from quiver.encoder.cpu.tiles import (
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
    raise_maxima,
    rescale,
    row_gradients,
    scores,
    store_rows,
    totals,
    unpack,
)
from quiver.encoder.packing import PackedBatch, empty_qkv

# Tokens per panel: their scores, (64, LANES), fit the first-level cache beside a block.
PANEL = 64
# Blocks per task. Whole sequences: panels are read from beyond the second-level cache once for all blocks. Windows: neighbouring blocks
# share most panels.
GLOBAL_BLOCKS, LOCAL_BLOCKS = 8, 4
# Half width of a window that covers every distance.
NO_WINDOW = 1 << 30

# Layout of the arguments.
TAKEN, MET, SEQUENCES, HEADS, WIDTH, HALF, SCRATCH, SCRATCH_BYTES, LANE_TOKENS = range(9)
# Each: address, stride of a token, stride of a head.
QUERIES, KEYS, VALUES, OUTPUT, UPSTREAM, OF_QUERIES, OF_KEYS, OF_VALUES = range(9, 33, 3)
# Addresses of two numbers per query and head, (H, L); 0 if not needed.
TOPS, SUMS = 33, 34
TABLE = 35
# Columns of the table of sequences behind the arguments: first token, tokens in lanes, tokens of the other side, tasks of a head up to the
# end of the sequence, lane of its first query.
START, LENGTH, SEEN, TASKS_END, FIRST_LANE = range(5)
COLUMNS = 5

FLOAT_BYTES = 4
ROW = LANES * FLOAT_BYTES
PANEL_BYTES = (PANEL + 1) * ROW
"""Scores of a panel, and a row beside them."""

Heads = tuple[int, int, int]
"""Address of a tensor (N, H, K) of float32 or bfloat16, contiguous within a head; strides of token and head in 32-bit units."""


def sequences(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], key_lengths: NDArray[np.int64], *, local: bool, keys: bool = False
) -> NDArray[np.int64]:
    """Build the table of a batch's sequences, (B, 5), which all layers of one kind share.

    ``key_lengths`` counts the leading tokens that can be attended to, ``local`` says whether there is a window, ``keys`` whether keys are
    in lanes, for their gradients, instead of queries.
    """
    lanes, others = (key_lengths, lengths) if keys else (lengths, key_lengths)
    tasks = -(-lanes // (LANES * (LOCAL_BLOCKS if local else GLOBAL_BLOCKS)))
    blocks = -(-lengths // LANES)
    return np.stack([starts, lanes, others, np.cumsum(tasks), (np.cumsum(blocks) - blocks) * LANES], axis=1)


def lane_tokens(table: NDArray[np.int64]) -> int:
    """Return L, the number of lanes for all queries of a table; each sequence takes whole blocks."""
    return int(table[-1, FIRST_LANE] + -(-max(table[-1, LENGTH], table[-1, SEEN]) // LANES) * LANES)


def log2_sum_exp(sums: Tensor) -> Tensor:
    """Return the binary logarithm of each query's sum of weights, (H, L), of the two numbers per query of `attend`, (2, H, L)."""
    tops, weights = sums
    return torch.where(tops <= MASKED, -MASKED, tops + weights.log2())


@jit
def scratch_of_thread(call: NDArray[np.int64]) -> int:
    """Return the scratch memory of the calling thread."""
    address: int = call[SCRATCH] + next_index(call.ctypes.data + MET * 8) * call[SCRATCH_BYTES]
    return address


@jit
def next_task(call: NDArray[np.int64], table: NDArray[np.int64], seat: NDArray[np.int64]) -> bool:
    """Take the next task; returns whether there is one.

    ``seat`` belongs to the thread and starts with zeros: index of the sequence, head, first token, end token, tasks of a head before it.
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
    """Return the table behind the arguments."""
    return call[TABLE:].reshape((call[SEQUENCES], COLUMNS))


@jit
def head_address(call: NDArray[np.int64], heads: int, token: int, head: int) -> int:
    """Return the address of a head of a token."""
    address: int = call[heads] + (token * call[heads + 1] + head * call[heads + 2]) * FLOAT_BYTES
    return address


@jit
def visible_range(panel: int, end: int, begin: int, half: int) -> tuple[int, int]:
    """Return the token range (start, end) of a panel that lies within the window of the block at ``begin``."""
    return max(panel, begin - half), min(panel + PANEL, end, begin + LANES + half)


@jit
def mask_scores(weights: int, low: int, high: int, begin: int, half: int) -> None:
    """Mask the scores between tokens low..high and the block at ``begin`` that lie beyond the window."""
    if low < begin + LANES - 1 - half or high - 1 > begin + half:
        mask_window(weights, high - low, low - begin, half)


@jit
def argument_count(call: NDArray[np.int64]) -> int:
    """Return the length of the arguments and their table."""
    length: int = TABLE + COLUMNS * call[SEQUENCES]
    return length


class AttentionArguments:
    """Arguments of attention in one layer: the result of `sequences`, (H, K), and the window.

    K is a multiple of 16, or 32 for bfloat16. A block needs ``rows`` scratch rows of LANES values, a thread ``panels`` panels of scores and
    ``spare`` further bytes.
    """

    def __init__(
        self, table: NDArray[np.int64], shape: tuple[int, int], window: int | None, *, rows: int, panels: int, spare: int = 0
    ) -> None:
        self.numbers = np.zeros(TABLE + table.size, np.int64)
        self.numbers[[SEQUENCES, HEADS, WIDTH]] = len(table), *shape
        self.numbers[HALF] = NO_WINDOW if window is None else window // 2
        self.numbers[TABLE:] = table.ravel()
        size_of_thread = spare + panels * PANEL_BYTES + max(GLOBAL_BLOCKS, LOCAL_BLOCKS) * rows * ROW
        self.scratch = thread_scratch(torch.get_num_threads(), size_of_thread)
        self.numbers[[SCRATCH, SCRATCH_BYTES]] = self.scratch.data_ptr(), self.scratch.shape[1]

    def put(self, first: int, *values: int) -> None:
        """Set arguments, from an index on."""
        self.numbers[first : first + len(values)] = values

    def run(self, entry: int) -> None:
        """Run a compiled function with these arguments on PyTorch's threads."""
        self.numbers[[TAKEN, MET]] = 0
        run_on_threads(entry, self.numbers.ctypes.data, len(self.scratch))


@jit
def logarithm(width: int) -> float:
    """Return the scale of scores, 1 / sqrt(K), in binary logarithms."""
    factor: float = np.log2(np.e) / np.sqrt(width)
    return factor


@jit
def _begin_block(kind: Any, queries: int, stride: int, count: int, width: int, tile: int) -> None:
    """Initialise a block: load its queries; clear its results, maxima and sums."""
    columns = width // numbers_of(kind)
    pack(kind, queries, stride, count, columns, logarithm(width), tile)
    mixtures = tile + columns * ROW
    clear(mixtures, width, 0.0)
    clear(mixtures + width * ROW, 1, MASKED)
    clear(mixtures + (width + 1) * ROW, 1, 0.0)


@jit
def _attend_blocks(call: NDArray[np.int64], sequence: NDArray[np.int64], seat: NDArray[np.int64], scratch: int, kind: Any) -> None:
    """Attend for the queries of one head of a sequence, which ``seat`` names."""
    head, first, last = seat[1], seat[2], seat[3]
    start, width, half, numbers = sequence[START], call[WIDTH], call[HALF], numbers_of(kind)
    columns = width // numbers
    query_stride, key_stride, value_stride = call[QUERIES + 1], call[KEYS + 1], call[VALUES + 1]
    queries = head_address(call, QUERIES, start + first, head)
    keys, values = head_address(call, KEYS, start, head), head_address(call, VALUES, start, head)
    change = scratch
    weights = change + ROW
    # bfloat16 keys and values of a panel are copied, because they are read many times, by AMX up to the end of the panel.
    kept_keys = scratch + PANEL_BYTES
    kept_values = kept_keys + (numbers - 1) * PANEL * columns * FLOAT_BYTES
    # Each block keeps its queries, weighted values, maxima and sums.
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
            # Pairs are read whole, by AMX 16 pairs at a time. Excess values have weight 0; an infinite one, of the same text, gives NaN.
            low -= (low - panel) % keys_at_once(kind)
            count = high - low
            met = keys + low * key_stride * FLOAT_BYTES, key_stride
            if numbers == 2:
                met = kept_keys + (low - panel) * columns * FLOAT_BYTES, columns
            tile = own + block * block_bytes
            scores(kind, tile, met[0], met[1], count, columns, weights)
            mask_scores(weights, low, high, begin, half)
            _weigh_keys(kind, weights, count, tile + columns * ROW, width, change)
            met = values + low * value_stride * FLOAT_BYTES, value_stride
            if numbers == 2:
                met, count = (kept_values + (low - panel) // 2 * FLOAT_BYTES, PANEL // 2), (count + 1) // 2
            mixture(kind, met[0], met[1], count, width, weights, tile + columns * ROW)
        panel += PANEL
    _write_blocks(call, sequence, seat, own, kind)


@jit
def _weigh_keys(kind: Any, weights: int, count: int, mixtures: int, width: int, change: int) -> None:
    """Turn a block's scores into weights; its maxima and sums stand behind its weighted values."""
    factor, tops = logarithm(width), mixtures + width * ROW
    sums = tops + ROW
    if raise_maxima(kind, weights, count, tops, change, factor) != 0:
        rescale(mixtures, width, sums, change)
    exponents(kind, weights, count, tops, sums, factor)


@jit
def _write_blocks(call: NDArray[np.int64], sequence: NDArray[np.int64], seat: NDArray[np.int64], own: int, kind: Any) -> None:
    """Write the results of blocks to the output."""
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
    """Run tasks until none is left; every thread runs this."""
    scratch, table, seat = scratch_of_thread(call), sequence_table(call), np.zeros(5, np.int64)
    amx_begin(kind, scratch)
    while next_task(call, table, seat):
        _attend_blocks(call, table[seat[0]], seat, scratch, kind)
    amx_end(kind)


def _attend_in_float32(pointer: Any) -> None:
    """C entry of `_attend_all` for float32 heads."""
    _attend_all(numba.carray(pointer, argument_count(numba.carray(pointer, TABLE, np.int64)), np.int64), FLOAT32)


def _attend_in_bfloat16(pointer: Any) -> None:
    """C entry for bfloat16 heads."""
    _attend_all(numba.carray(pointer, argument_count(numba.carray(pointer, TABLE, np.int64)), np.int64), BFLOAT16)


_FLOAT_ENTRY, _PAIR_ENTRY = CompiledCallback(_attend_in_float32), CompiledCallback(_attend_in_bfloat16)


def attend(
    heads: Sequence[Heads],
    table: NDArray[np.int64],
    shape: tuple[int, int],
    window: int | None,
    *,
    paired: bool = False,
    sums: Tensor | None = None,
) -> None:
    """Attention within every sequence of a table, of queries, keys and values to an output, on PyTorch's threads.

    ``paired`` says that heads are bfloat16. ``sums`` receives two float32 numbers per query, (2, H, L), for `differentiate`: its
    approximate maximum in binary logarithms, and the sum of its weights relative to that.
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
    """Compute gradients of queries first..last of one head of a sequence; what their keys need goes to SUMS."""
    start, width, half = sequence[START], call[WIDTH], call[HALF]
    query_stride, key_stride, value_stride = call[QUERIES + 1], call[KEYS + 1], call[VALUES + 1]
    output_stride, upstream_stride = call[OUTPUT + 1], call[UPSTREAM + 1]
    queries, output = head_address(call, QUERIES, start + first, head), head_address(call, OUTPUT, start + first, head)
    upstream = head_address(call, UPSTREAM, start + first, head)
    keys, values = head_address(call, KEYS, start, head), head_address(call, VALUES, start, head)
    lane = (head * call[LANE_TOKENS] + sequence[FIRST_LANE] + first) * FLOAT_BYTES
    tops, sums = call[TOPS] + lane, call[SUMS] + lane
    weights, gradients = scratch, scratch + PANEL_BYTES
    # Each block keeps its queries, the gradients of their outputs, and its sums.
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
            for rows, stride, of_tile, out in ((keys, key_stride, tile, weights), (values, value_stride, tile + tile_bytes, gradients)):
                scores(FLOAT32, of_tile, rows + low * stride * FLOAT_BYTES, stride, high - low, width, out)
            mask_scores(weights, low, high, begin, half)
            lane_gradients(weights, gradients, high - low, tops + block * ROW, sums + block * ROW)
            mixture(FLOAT32, keys + low * key_stride * FLOAT_BYTES, key_stride, high - low, width, gradients, tile + 2 * tile_bytes)
        panel += PANEL
    stride, of_queries = call[OF_QUERIES + 1], head_address(call, OF_QUERIES, start + first, head)
    for block in range(blocks):
        gathered, begin = own + block * block_bytes + 2 * tile_bytes, block * LANES
        store_rows(gathered, width, last - first - begin, 1 / np.sqrt(width), stride, of_queries + begin * stride * FLOAT_BYTES)


@jit
def _key_gradients(call: NDArray[np.int64], sequence: NDArray[np.int64], head: int, first: int, last: int, scratch: int) -> None:
    """Compute gradients of keys and values first..last of one head of a sequence."""
    start, width, half = sequence[START], call[WIDTH], call[HALF]
    query_stride, key_stride, value_stride, upstream_stride = call[QUERIES + 1], call[KEYS + 1], call[VALUES + 1], call[UPSTREAM + 1]
    queries, upstream = head_address(call, QUERIES, start, head), head_address(call, UPSTREAM, start, head)
    keys, values = head_address(call, KEYS, start + first, head), head_address(call, VALUES, start + first, head)
    lane = (head * call[LANE_TOKENS] + sequence[FIRST_LANE]) * FLOAT_BYTES
    tops, sums = call[TOPS] + lane, call[SUMS] + lane
    weights, gradients = scratch, scratch + PANEL_BYTES
    # Each block keeps its keys, its values, and the sums for both.
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
            for rows, stride, of_tile, out in (
                (queries, query_stride, tile, weights),
                (upstream, upstream_stride, tile + tile_bytes, gradients),
            ):
                scores(FLOAT32, of_tile, rows + low * stride * FLOAT_BYTES, stride, high - low, width, out)
            mask_scores(weights, low, high, begin, half)
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
    """Run tasks until none is left; every thread runs this."""
    scratch, table, seat = scratch_of_thread(call), sequence_table(call), np.zeros(5, np.int64)
    while next_task(call, table, seat):
        if call[OF_KEYS] == 0:
            _query_gradients(call, table[seat[0]], seat[1], seat[2], seat[3], scratch)
        else:
            _key_gradients(call, table[seat[0]], seat[1], seat[2], seat[3], scratch)


def _run_gradients(pointer: Any) -> None:
    """C entry of `_differentiate_all`."""
    _differentiate_all(numba.carray(pointer, argument_count(numba.carray(pointer, TABLE, np.int64)), np.int64))


_GRADIENT_ENTRY = CompiledCallback(_run_gradients)


def differentiate(
    heads: Sequence[Heads],
    gradients: Sequence[Heads],
    tables: tuple[NDArray[np.int64], NDArray[np.int64]],
    shape: tuple[int, int],
    window: int | None,
    tops: Tensor,
) -> None:
    """Compute gradients of queries, keys and values, on PyTorch's threads.

    ``heads`` are queries, keys, values, output and the gradient of the output; ``tables`` the results of `sequences` for queries and for
    keys; ``tops`` is the result of `log2_sum_exp`. Gradients of keys that cannot be attended to are not written.
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


UNIT_BYTES = 4
"""Bytes that the kernels move as one unit: a float32, or two bfloat16."""


def attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float
) -> Tensor:
    """Attention by compiled kernels; see `quiver.encoder.attention.attend` for the contract.

    Without gradients bfloat16 heads are multiplied as they are; weights are rounded to bfloat16 before they meet the values, scores and
    sums are float32. With gradients the inputs are converted to float32 and the results rounded.
    """
    del slopes, dropout  # `choose_backend` ensures that there are none
    output: Tensor
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        output = _CompiledAttention.apply(q, k, v, batch, window)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    else:
        output, _ = _attend_with_sums(q, k, v, batch, window, summed=False)
    return output


class _CompiledAttention(torch.autograd.Function):
    """The kernels with gradients, written in the layout that the product of queries, keys and values needs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
        output, tops = _attend_with_sums(q.float(), k.float(), v.float(), batch, window, summed=True)
        output = output.to(q.dtype)
        ctx.batch, ctx.window = batch, window
        ctx.save_for_backward(q, k, v, output, tops)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, output, tops = ctx.saved_tensors
        batch, window = ctx.batch, ctx.window
        room = found = empty_qkv(q)
        if q.dtype != torch.float32:
            found = q.new_empty((3, *q.shape), dtype=torch.float32).unbind(0)
        if batch.key_lengths is not None:  # the kernels write no gradients for keys that are not attended to
            for each in found[1:]:
                each.zero_()
        read = [_with_contiguous_heads(x.float()) for x in (q, k, v, output, gradient)]
        tables = _sequence_table(batch, window), _sequence_table(batch, window, keys=True)
        differentiate([*map(_head_places, read)], [*map(_head_places, found)], tables, q.shape[1:], window, tops)
        if found is not room:
            for narrow, wide in zip(room, found, strict=True):
                narrow.copy_(wide)
        return *room, None, None


def _attend_with_sums(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, *, summed: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the output, (N, H, K), and the normalizers that the gradients need, if ``summed``."""
    read = [_with_contiguous_heads(x) for x in (q, k, v)]
    output, table = q.new_empty(q.shape), _sequence_table(batch, window)
    sums = q.new_empty(2, q.shape[1], lane_tokens(table)) if summed else None
    paired = q.dtype == torch.bfloat16
    attend([_head_places(x) for x in (*read, output)], table, (q.shape[1], q.shape[2]), window, paired=paired, sums=sums)
    return output, None if sums is None else log2_sum_exp(sums)


def _with_contiguous_heads(x: Tensor) -> Tensor:
    """Return the tensor with contiguous heads that start at a unit; a copy if necessary."""
    places = (x.data_ptr(), *(stride * x.itemsize for stride in x.stride()[:2]))
    in_place = x.stride(-1) == 1 and not any(place % UNIT_BYTES for place in places)
    return x if in_place else x.clone(memory_format=torch.contiguous_format)


def _head_places(x: Tensor) -> tuple[int, int, int]:
    numbers = UNIT_BYTES // x.itemsize
    return x.data_ptr(), x.stride(0) // numbers, x.stride(1) // numbers


def _sequence_table(batch: PackedBatch, window: int | None, *, keys: bool = False) -> Any:
    """Return the table of sequences, built once for all layers of a kind."""
    memo = ("sequences", window is not None, keys)
    if memo not in batch.memo:
        lengths = np.asarray(batch.lengths, np.int64)
        seen = np.asarray(batch.key_lengths or batch.lengths, np.int64)
        starts = np.cumsum(lengths) - lengths
        batch.memo[memo] = sequences(starts, lengths, seen, local=window is not None, keys=keys)
    return batch.memo[memo]
