"""What a call of attention consists of, and who does which part of it.

A task is a few blocks of LANES tokens of one head: queries, or for the gradients of keys and values keys. The tokens of the other side
go past them in panels. Which thread does which task has no influence on what comes out.

Shapes: N tokens, H heads, K head width, B sequences, L lanes of all sequences.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quiver.encoder.cpu import team
from quiver.encoder.cpu.compiling import compiled
from quiver.encoder.cpu.tiles import HIDDEN, prefetch, take, veil
from quiver.encoder.cpu.vectors import LANES

# Tokens of a panel: their scores, (64, LANES), fit the first cache beside a block.
PANEL = 64
# Blocks of a task. Whole sequences: panels come from farther away than the second cache only once for all of them. Windows: neighbours
# share most of their panels.
GLOBAL_BLOCKS, LOCAL_BLOCKS = 8, 4
# A window that every distance fits.
EVERYTHING = 1 << 30

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


def counted_from(sums: Tensor) -> Tensor:
    """What a query's weights are counted from so that they sum to 1, in units of a binary logarithm.

    Args:
        sums: The two numbers of each query that `quiver.encoder.cpu.attention.attend` gave, (2, H, L).

    Returns:
        (H, L); so large where a query has seen nothing that no weight comes of it.
    """
    tops, weights = sums
    return torch.where(tops <= HIDDEN, -HIDDEN, tops + weights.log2())


@compiled
def scratch_of_thread(call: NDArray[np.int64]) -> int:
    """Where the thread that asks has room."""
    address: int = call[SCRATCH] + take(call.ctypes.data + MET * 8) * call[SCRATCH_BYTES]
    return address


@compiled
def next_task(call: NDArray[np.int64], table: NDArray[np.int64], seat: NDArray[np.int64]) -> bool:
    """Whether there is another task, and what it is.

    ``seat`` is the thread's own and begins with zeros: place of the sequence, head, first token, the one behind the last, and how many
    tasks of a head there are before the sequence.
    """
    task = take(call.ctypes.data + TAKEN * 8)
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


@compiled
def whole(call: NDArray[np.int64]) -> NDArray[np.int64]:
    """The table behind a call."""
    return call[TABLE:].reshape((call[SEQUENCES], COLUMNS))


@compiled
def place(call: NDArray[np.int64], heads: int, token: int, head: int) -> int:
    """Where a head of a token lies."""
    address: int = call[heads] + (token * call[heads + 1] + head * call[heads + 2]) * FLOAT_BYTES
    return address


@compiled
def meeting(panel: int, end: int, begin: int, half: int) -> tuple[int, int]:
    """Which tokens of a panel that ends before ``end`` a block meets, itself beginning at ``begin``: the first, and one behind the last."""
    return max(panel, begin - half), min(panel + PANEL, end, begin + LANES + half)


@compiled
def call_in(rows: int, stride: int, columns: int, panel: int, end: int, block: int, blocks: int) -> None:
    """Have the next panel come in while this one is worked on, a part of it with each block; ``rows`` is where the sequence begins."""
    beyond = min(panel + PANEL, end)
    first = min(end, beyond + PANEL * block // blocks)
    last = min(end, beyond + PANEL * (block + 1) // blocks)
    prefetch(rows + first * stride * FLOAT_BYTES, stride, last - first, columns)


@compiled
def hide(weights: int, low: int, high: int, begin: int, half: int) -> None:
    """Hide the scores that tokens low..high have with those of the block that begins at ``begin`` where they are beyond the window."""
    if low < begin + LANES - 1 - half or high - 1 > begin + half:
        veil(weights, high - low, low - begin, half)


@compiled
def size(call: NDArray[np.int64]) -> int:
    """Numbers of a call and its table."""
    length: int = TABLE + COLUMNS * call[SEQUENCES]
    return length


class Call:
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
        self.numbers[HALF] = EVERYTHING if window is None else window // 2
        self.numbers[TABLE:] = table.ravel()
        size_of_thread = spare + panels * PANEL_BYTES + max(GLOBAL_BLOCKS, LOCAL_BLOCKS) * rows * ROW
        self.scratch = team.scratch(torch.get_num_threads(), size_of_thread)
        self.numbers[[SCRATCH, SCRATCH_BYTES]] = self.scratch.data_ptr(), self.scratch.shape[1]

    def put(self, first: int, *values: int) -> None:
        """Numbers or addresses from a place on."""
        self.numbers[first : first + len(values)] = values

    def run(self, entry: int) -> None:
        """Run a compiled function of this call on torch's threads."""
        self.numbers[[TAKEN, MET]] = 0
        team.run(entry, self.numbers.ctypes.data, len(self.scratch))
