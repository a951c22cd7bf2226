"""The order in which pieces of the corpus are read: a shuffle of all of them, pass after pass, in bounded memory.

A pass is cut into windows of `WINDOW` pieces. What falls into which is drawn by blocks of about `BLOCK` neighbouring pieces, and the pieces
of a window are shuffled among each other. A corpus of one window is so shuffled whole; one of trillions of tokens has thousands of
windows, each thousands of blocks from all over it. In memory are 20 bytes a piece of one window (twice as much while it is drawn), and
32 a block and 16 for each time that a pass reads it: a quarter of a gigabyte for three billion pieces, which are two trillion tokens.
Where documents end is read from the memory map, not held.

Source: the release of ModernBERT samples with NumPy's PCG64DXSM (its text_data.py), since torch's randperm of 32-bit numbers repeats
itself in large corpora (arXiv:2412.13663, section 2.2.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.pretraining.packing import Piece

BLOCK = 1 << 10
"""Neighbouring pieces that come into a window together; more only where one document has more."""

WINDOW = 1 << 22
"""Pieces that are shuffled among each other, at least where a pass has so many."""

_DOCUMENTS = 1 << 20
"""Documents whose ends are read at a time while blocks are made."""


@dataclass(frozen=True)
class Share:
    """Documents of a source, and how often a pass holds each of their pieces.

    Attributes:
        first: Number of the first document.
        last: Number behind the last.
        times: The fraction of it is a chance, drawn anew in each pass.
    """

    first: int
    last: int
    times: float


def cut(ends: NDArray[np.int64], room: int, *, begin: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split documents into pieces: as many full ones as there are, and the rest.

    Args:
        ends: Where each document ends among the tokens of the corpus, rising; the first begins at ``begin``.
        room: Tokens of a piece, at most.
        begin: Where the first document begins.

    Returns:
        Offset and length of each piece, in the order of the corpus.

    Example:
        >>> [array.tolist() for array in cut(np.array([5, 7]), 2)]
        [[0, 2, 4, 5], [2, 2, 1, 2]]
    """
    begins = np.concatenate([[begin], ends[:-1]]).astype(np.int64)
    counts = -(-(ends - begins) // room)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = np.repeat(begins, counts) + (np.arange(len(first)) - first) * room
    return offsets, np.minimum(room, np.repeat(ends, counts) - offsets)


@dataclass(frozen=True)
class _Blocks:
    """Runs of documents, in the order of the corpus: first document, the one behind the last, pieces, and how often a pass holds them."""

    firsts: NDArray[np.int64]
    lasts: NDArray[np.int64]
    counts: NDArray[np.int64]
    times: NDArray[np.float64]


def _blocks(ends: NDArray[np.int64], shares: Sequence[Share], room: int, size: int) -> _Blocks:
    parts = []
    for share in shares:
        for first in range(share.first, share.last, _DOCUMENTS):
            last = min(first + _DOCUMENTS, share.last)
            lengths = np.diff(np.asarray(ends[first:last]), prepend=ends[first - 1] if first else 0)
            pieces = -(-lengths // room)
            places = np.flatnonzero(np.diff((np.cumsum(pieces) - pieces) // size, prepend=-1))  # where another block begins
            counts, times = np.add.reduceat(pieces, places), np.full(len(places), share.times)
            parts.append((first + places, np.append(first + places[1:], last), counts, times))
    return _Blocks(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class PieceSampler:
    """An endless stream of pieces.

    Args:
        ends: Where each document of the corpus ends; a memory map will do.
        shares: What is read of it, in the order of the corpus; at least one document.
        room: Tokens of a piece, at most.
        seed: Numbers that the order depends on; pass and window are put behind them.
        block: Pieces of a block.
        window: Pieces of a window.
    """

    def __init__(
        self,
        ends: NDArray[np.int64],
        shares: Sequence[Share],
        *,
        room: int,
        seed: Sequence[int],
        block: int = BLOCK,
        window: int = WINDOW,
    ) -> None:
        self._ends, self._room, self._seed, self._size = ends, room, tuple(seed), window
        self._blocks = _blocks(ends, shares, room, block)
        self.passes = 0
        """Passes that are done."""
        self.serial = 0
        """Number of the next piece in the stream of the run."""
        self._begin_pass()
        self._window = self._place = 0
        self._read_window()

    def take(self) -> Piece:
        """The next piece."""
        while self._place == len(self._order):
            self._window += 1
            if self._window > len(self._starts):
                self.passes += 1
                self._window = 0
                self._begin_pass()
            self._place = 0
            self._read_window()
        index = self._order[self._place]
        self._place += 1
        self.serial += 1
        return Piece(int(self._offsets[index]), int(self._lengths[index]), self.serial - 1)

    def state(self) -> dict[str, Any]:
        """Where the stream stands; the order follows from the seed."""
        return {"passes": self.passes, "window": self._window, "place": self._place, "serial": self.serial}

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        self.passes, self.serial = state["passes"], state["serial"]
        self._begin_pass()
        self._window, self._place = state["window"], state["place"]
        self._read_window()

    def _begin_pass(self) -> None:
        """Draw in which window each turn of a block is; a block that is read 2.5 times has three, the last of which counts a half."""
        blocks = self._blocks
        turns = np.ceil(blocks.times).astype(np.int64)
        self._turns = np.repeat(np.arange(len(turns)), turns)
        self._weights = np.ones(len(self._turns))
        self._weights[np.cumsum(turns) - 1] -= turns - blocks.times
        drawn = self._generator(0, 1).permutation(len(self._turns))
        self._turns, self._weights = self._turns[drawn], self._weights[drawn]
        pieces = np.cumsum(blocks.counts[self._turns] * self._weights)
        # The last window takes the rest, so that none is small; one block that is larger than a window leaves none empty.
        starts = np.searchsorted(pieces, self._size * np.arange(1, max(1, int(pieces[-1]) // self._size)), side="right")
        self._starts = np.unique(starts[starts > 0])

    def _read_window(self) -> None:
        """Find the pieces of a window and shuffle them."""
        turns = np.split(self._turns, self._starts)[self._window]
        weights = np.split(self._weights, self._starts)[self._window]
        chosen, place = np.unique(turns, return_inverse=True)  # in the order of the corpus
        times = np.repeat(np.bincount(place, weights), self._blocks.counts[chosen])
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
