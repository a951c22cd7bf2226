"""Pieces of documents to rows of one length, nearly full: greedy best fit over a bounded buffer. Nothing is dropped.

Pieces wait in the order in which they came. Each takes the row with the least room that still holds it; what fits into no row is the first
to be asked for the next rows, so nothing waits for ever. What is left when a run ends has not been read by it; a later phase, whose rows
hold sequences at least as long, begins with what is left of the one before. What waits is bounded by the buffer: of ModernBERT-base's
updates of 4.7 million tokens five, which are some 40,000 pieces and 6 MB.

Source: greedy best-fit packing as in ModernBERT, arXiv:2412.13663, section 2.1.3 and appendix A.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Piece(NamedTuple):
    """A stretch of a document that becomes one sequence."""

    offset: int
    """Of its first token in the corpus."""
    length: int
    """Tokens, special tokens not counted."""
    serial: int
    """Its number in the stream, from 0."""


SPECIAL = 2
"""Tokens that a sequence has beside those of its piece: [CLS] and [SEP]."""


class SequencePacker:
    """Packs an endless stream.

    Args:
        take: Gives the next piece of the stream.
        buffer: Tokens that wait before rows are packed, in multiples of those rows' tokens; >= 1.

    Example:
        >>> pieces = iter(Piece(0, length, serial) for serial, length in enumerate([4, 3, 1, 2, 4, 4, 4, 4]))
        >>> packer = SequencePacker(lambda: next(pieces), buffer=2)
        >>> [[piece.serial for piece in row] for row in packer.rows(2, room=9)]  # 6 + 3 tokens, 5 + 4
        [[0, 2], [1, 3]]
    """

    def __init__(self, take: Callable[[], Piece], *, buffer: float) -> None:
        self.take = take
        self._buffer = buffer
        self._waiting: deque[Piece] = deque()
        self._tokens = 0

    @property
    def waiting(self) -> tuple[Piece, ...]:
        """What was taken and is in no row yet, in the order in which it came."""
        return tuple(self._waiting)

    def rows(self, count: int, *, room: int) -> list[list[Piece]]:
        """The next rows.

        Args:
            count: How many, >= 1.
            room: Tokens of a row, special tokens included; no piece of the stream needs more.
        """
        self._fill(round(count * room * self._buffer))
        rows: list[list[Piece]] = [[] for _ in range(count)]
        spaces = [(room, row) for row in range(count)]  # sorted
        left: deque[Piece] = deque()
        while self._waiting:
            piece = self._waiting.popleft()
            size = piece.length + SPECIAL
            place = bisect_left(spaces, (size, -1))
            if place == count:
                left.append(piece)
                continue
            space, row = spaces.pop(place)
            rows[row].append(piece)
            insort(spaces, (space - size, row))
            self._tokens -= size
        self._waiting = left
        return rows

    def _fill(self, tokens: int) -> None:
        while self._tokens < tokens:
            piece = self.take()
            self._waiting.append(piece)
            self._tokens += piece.length + SPECIAL

    def state(self) -> dict[str, Any]:
        """What waits, for `quiver.encoder.training.state`."""
        numbers = np.fromiter(chain.from_iterable(self._waiting), np.int64, 3 * len(self._waiting))
        return {"waiting": torch.from_numpy(numbers.reshape(-1, 3))}

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        waiting: Tensor = state["waiting"]
        self._waiting = deque(Piece(*values) for values in waiting.tolist())
        self._tokens = sum(piece.length + SPECIAL for piece in self._waiting)
