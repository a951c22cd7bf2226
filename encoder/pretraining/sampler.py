"""The order in which pieces of the corpus are read: a shuffle of all of them, pass after pass.

Source: the release of ModernBERT samples with NumPy's PCG64DXSM (its text_data.py), since torch's randperm of 32-bit numbers repeats
itself in large corpora (arXiv:2412.13663, section 2.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from encoder.pretraining.packing import Piece


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


class PieceSampler:
    """An endless stream of pieces.

    Args:
        offsets: Of each piece in the corpus.
        lengths: Of each piece.
        times: How often a pass holds each piece; the fraction of it is a chance, drawn anew in each pass.
        seed: Numbers that the order depends on; the pass is put behind them.
        serial: Number of the first piece in the stream of the run.
    """

    def __init__(
        self,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        times: NDArray[np.float64],
        *,
        seed: Sequence[int],
        serial: int = 0,
    ) -> None:
        self._offsets, self._lengths, self._times, self._seed = offsets, lengths, times, tuple(seed)
        self.passes = 0
        """Passes that are done."""
        self.serial = serial
        """Number of the next piece in the stream of the run."""
        self._place = 0
        self._order = self._shuffled()

    def take(self) -> Piece:
        """The next piece."""
        while self._place == len(self._order):
            self.passes += 1
            self._place = 0
            self._order = self._shuffled()
        index = self._order[self._place]
        self._place += 1
        self.serial += 1
        return Piece(int(self._offsets[index]), int(self._lengths[index]), self.serial - 1)

    def _shuffled(self) -> NDArray[Any]:
        generator = np.random.Generator(np.random.PCG64DXSM([*self._seed, self.passes]))
        whole = np.floor(self._times)
        extra = generator.random(len(self._times)) < self._times - whole
        # A corpus of trillions has billions of pieces: four bytes a number, where four will do.
        numbers = np.arange(len(self._times), dtype=np.uint32 if len(self._times) < 1 << 32 else np.int64)
        return generator.permutation(np.repeat(numbers, whole.astype(np.int64) + extra))

    def state(self) -> dict[str, Any]:
        """Where the stream stands; the order follows from the seed."""
        return {"passes": self.passes, "place": self._place, "serial": self.serial}

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        self.passes, self._place, self.serial = state["passes"], state["place"], state["serial"]
        self._order = self._shuffled()
