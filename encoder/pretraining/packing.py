"""Order and packing of the corpus: pieces of documents are shuffled, pass after pass, and packed into nearly full rows.

Order. A pass is cut into windows of `WINDOW` pieces. Blocks of about `BLOCK` neighboring pieces are drawn into the windows, and the pieces
of a window are shuffled. Memory: 20 bytes per piece of a window (twice as much while it is drawn), 32 per block, and 16 per reading of a
block in a pass; a quarter of a gigabyte for two trillion tokens.

Packing. Greedy best fit over a bounded buffer; no token is dropped. Each piece, in the order of the stream, goes into the row with the
least space that still holds it. A piece that fits into no row is the first in line for the next rows; at the end of a phase for those of
the next.

Sources: ModernBERT, arXiv:2412.13663, section 2.1.3 and appendix A; its release samples with NumPy's PCG64DXSM (text_data.py), because
torch's randperm of 32-bit numbers repeats itself in large corpora.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SPECIAL = 2  # special tokens of a sequence: [CLS] and [SEP]
BLOCK = 1 << 10  # neighboring pieces that are drawn into a window together; more only if one document has more
WINDOW = 1 << 22  # pieces that are shuffled together, at least if a pass has so many
CHUNK = 1 << 20  # documents whose ends are read at a time to form blocks


class Piece(NamedTuple):
    """A part of a document that becomes one sequence."""

    offset: int  # position of its first token in the corpus
    length: int  # number of tokens, without special tokens
    serial: int  # number of the piece in the stream, from 0


@dataclass(frozen=True)
class Share:
    """Documents of a source, and how often a pass reads their pieces."""

    first: int  # number of the first document
    last: int  # number of the last document plus one
    times: float  # readings per pass; the fractional part is the chance of one more, drawn again in each pass


def cut(ends: NDArray[np.int64], room: int, *, begin: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split documents into pieces of ``room`` tokens, the last of a document maybe shorter; offset and length of each piece, in order."""
    begins = np.concatenate([[begin], ends[:-1]]).astype(np.int64)
    counts = -(-(ends - begins) // room)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = np.repeat(begins, counts) + (np.arange(len(first)) - first) * room
    return offsets, np.minimum(room, np.repeat(ends, counts) - offsets)


@dataclass(frozen=True)
class _Blocks:
    """Runs of documents in the order of the corpus: first document, last plus one, number of pieces, readings per pass."""

    firsts: NDArray[np.int64]
    lasts: NDArray[np.int64]
    counts: NDArray[np.int64]
    times: NDArray[np.float64]


def _blocks(ends: NDArray[np.int64], shares: Sequence[Share], room: int, size: int, chunk: int) -> _Blocks:
    parts = []
    for share in shares:
        for first in range(share.first, share.last, chunk):
            last = min(first + chunk, share.last)
            lengths = np.diff(np.asarray(ends[first:last]), prepend=ends[first - 1] if first else 0)
            pieces = -(-lengths // room)
            starts = np.flatnonzero(np.diff((np.cumsum(pieces) - pieces) // size, prepend=-1))  # first document of each block
            counts, times = np.add.reduceat(pieces, starts), np.full(len(starts), share.times)
            parts.append((first + starts, np.append(first + starts[1:], last), counts, times))
    return _Blocks(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class PieceSampler:
    """An endless stream of pieces."""

    def __init__(
        self,
        ends: NDArray[np.int64],
        shares: Sequence[Share],
        *,
        room: int,
        seed: Sequence[int],
        block: int = BLOCK,
        window: int = WINDOW,
        chunk: int = CHUNK,
    ) -> None:
        self._ends, self._room, self._seed, self._size = ends, room, tuple(seed), window
        self._blocks = _blocks(ends, shares, room, block, chunk)
        self.passes = 0
        """Complete passes."""
        self.serial = 0
        """Number of the next piece in the stream of the run."""
        self._begin_pass()
        self._window = self._position = 0
        self._read_window()

    def take(self) -> Piece:
        """Return the next piece."""
        while self._position == len(self._order):
            self._window += 1
            if self._window > len(self._starts):
                self.passes += 1
                self._window = 0
                self._begin_pass()
            self._position = 0
            self._read_window()
        index = self._order[self._position]
        self._position += 1
        self.serial += 1
        return Piece(int(self._offsets[index]), int(self._lengths[index]), self.serial - 1)

    def state(self) -> dict[str, Any]:
        """Position in the stream; the order follows from the seed."""
        return {"passes": self.passes, "window": self._window, "position": self._position, "serial": self.serial}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        self.passes, self.serial = state["passes"], state["serial"]
        self._begin_pass()
        self._window, self._position = state["window"], state["position"]
        self._read_window()

    def _begin_pass(self) -> None:
        """Draw the window of each reading of a block; a block that is read 2.5 times has three readings, the last of weight 0.5."""
        blocks = self._blocks
        turns = np.ceil(blocks.times).astype(np.int64)
        self._turns = np.repeat(np.arange(len(turns)), turns)
        self._weights = np.ones(len(self._turns))
        self._weights[np.cumsum(turns) - 1] -= turns - blocks.times
        drawn = self._generator(0, 1).permutation(len(self._turns))
        self._turns, self._weights = self._turns[drawn], self._weights[drawn]
        pieces = np.cumsum(blocks.counts[self._turns] * self._weights)
        # The last window takes the remainder, so that none is small. A block larger than a window leaves no empty window.
        starts = np.searchsorted(pieces, self._size * np.arange(1, max(1, int(pieces[-1]) // self._size)), side="right")
        self._starts = np.unique(starts[starts > 0])

    def _read_window(self) -> None:
        """Find the pieces of a window and shuffle them."""
        turns = np.split(self._turns, self._starts)[self._window]
        weights = np.split(self._weights, self._starts)[self._window]
        chosen, positions = np.unique(turns, return_inverse=True)  # in the order of the corpus
        times = np.repeat(np.bincount(positions, weights), self._blocks.counts[chosen])
        parts = list(self._pieces(chosen))
        self._offsets, self._lengths = (np.concatenate(column) for column in zip(*parts, strict=True))
        generator = self._generator(self._window)
        whole = np.floor(times)
        extra = generator.random(len(times)) < times - whole
        numbers = np.arange(len(times), dtype=np.uint32)
        self._order = generator.permutation(np.repeat(numbers, whole.astype(np.int64) + extra))

    def _pieces(self, chosen: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        for first, last in zip(self._blocks.firsts[chosen].tolist(), self._blocks.lasts[chosen].tolist(), strict=True):
            yield cut(np.asarray(self._ends[first:last]), self._room, begin=int(self._ends[first - 1]) if first else 0)

    def _generator(self, *numbers: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64DXSM([*self._seed, self.passes, *numbers]))


class SequencePacker:
    """Packs an endless stream of pieces into rows."""

    def __init__(self, take: Callable[[], Piece], *, buffer: float) -> None:
        self.take = take
        self._buffer = buffer
        self._waiting: deque[Piece] = deque()
        self._tokens = 0

    @property
    def waiting(self) -> tuple[Piece, ...]:
        """Pieces that were taken and are in no row yet, in the order of the stream."""
        return tuple(self._waiting)

    def rows(self, count: int, *, room: int) -> list[list[Piece]]:
        """Pack the next rows."""
        self.fill(round(count * room * self._buffer))
        rows: list[list[Piece]] = [[] for _ in range(count)]
        spaces = [(room, row) for row in range(count)]  # sorted
        left: deque[Piece] = deque()
        while self._waiting:
            piece = self._waiting.popleft()
            size = piece.length + SPECIAL
            position = bisect_left(spaces, (size, -1))
            if position == count:
                left.append(piece)
                continue
            space, row = spaces.pop(position)
            rows[row].append(piece)
            insort(spaces, (space - size, row))
            self._tokens -= size
        self._waiting = left
        return rows

    def fill(self, tokens: int) -> None:
        """Take pieces of the stream until this many tokens wait."""
        while self._tokens < tokens:
            piece = self.take()
            self._waiting.append(piece)
            self._tokens += piece.length + SPECIAL

    def state(self) -> dict[str, Any]:
        """The waiting pieces, for `quiver.encoder.training.state`."""
        numbers = np.fromiter(chain.from_iterable(self._waiting), np.int64, 3 * len(self._waiting))
        return {"waiting": torch.from_numpy(numbers.reshape(-1, 3))}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        waiting: Tensor = state["waiting"]
        self._waiting = deque(Piece(*values) for values in waiting.tolist())
        self._tokens = sum(piece.length + SPECIAL for piece in self._waiting)
