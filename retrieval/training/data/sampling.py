"""Which rows of a stream are trained on, and in which order: the first ones, or a random choice without knowing how many will come."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.training.data.fields import Example

BLOCK = 1024
"""Rows that are read at a time."""


class Sample:
    """A choice of rows.

    Where rows are shuffled, each gets a random rank; those of lowest rank are taken, in the order of their ranks, which gives every row the
    same chance. A row whose rank is not among the lowest so far need not be written: of N rows with a limit of k about k (1 + ln(N / k))
    are. What is kept in memory of one is its rank.

    Example:
        >>> sample = Sample(shuffle=True, limit=2, seed=0)
        >>> rows = sample.wanted([Example(name, "", [], []) for name in "abc"])
        >>> for row in rows:
        ...     sample.add(row)
        >>> [rows[number].place for number in sample.order()]
        ['c', 'b']
    """

    def __init__(self, *, shuffle: bool, limit: int | None, seed: int) -> None:
        """Take at most ``limit`` rows; the first, unless they are shuffled."""
        self._draw = np.random.default_rng(seed) if shuffle else None
        self._limit = limit
        self._ranks = array("d")
        self._below = 1.0
        self._narrowed = 0

    @property
    def next_rows(self) -> int:
        """How many rows to read next: not one more than needed, for it may be broken; none when there are enough."""
        enough = self._limit is not None and self._draw is None
        return min(BLOCK, (self._limit or 0) - len(self._ranks)) if enough else BLOCK

    def wanted(self, block: Sequence[Example]) -> list[Example]:
        """Those of the next rows that may be among the chosen, with their ranks."""
        if self._draw is None:
            return list(block)
        ranks = self._draw.random(len(block)).tolist()
        return [example._replace(rank=rank) for example, rank in zip(block, ranks, strict=True) if rank < self._below]

    def add(self, example: Example) -> None:
        """Take notice that a wanted row was written; the first has the number 0."""
        self._ranks.append(example.rank)
        if self._limit is not None and len(self._ranks) >= self._narrowed + max(BLOCK, self._limit // 4) and len(self._ranks) > self._limit:
            self._below = float(np.partition(np.array(self._ranks), self._limit - 1)[self._limit - 1])
            self._narrowed = len(self._ranks)

    def order(self) -> NDArray[np.int64]:
        """Numbers of the chosen rows among those that were written, in their order."""
        order = np.argsort(np.array(self._ranks), kind="stable")  # equal ranks, where nothing is shuffled, stay in their order
        return order[: self._limit].astype(np.int64)
