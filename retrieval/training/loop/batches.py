"""Which rows make which batch: decided by the seed alone, so that a run that is resumed, or spread over processes, sees the same.

The order of an epoch is torch's random permutation under the seed ``training.seed`` + epoch, from 0: what the samplers of
accelerate and sentence-transformers draw. Short batches at the end of an epoch are dropped, as they would have fewer negatives.

Shapes: B rows of a batch, over all processes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from encoder.errors import InputError
from retrieval.text_keys import text_keys
from retrieval.training.data import TrainingRows

logger = logging.getLogger(__name__)

_BLOCK = 512
"""Rows that are read at once to see which texts they share."""

_LEFT_OUT = 0.01
"""Share of the rows that an epoch may leave out without a word."""


@dataclass(frozen=True)
class Batch:
    """Rows of one batch.

    Attributes:
        epoch: From 0.
        rows: B row numbers.
    """

    epoch: int
    rows: list[int]


class BatchOrder:
    """The batches of a run, one epoch after the other, without end.

    Args:
        rows: What is trained on.
        size: B.
        seed: Of the order.
        no_duplicates: No two rows of a batch share a text; a row that would is put off to a later batch of the epoch, as
            sentence-transformers' sampler does it.

    Raises:
        InputError: There are fewer rows than one batch takes.
    """

    def __init__(self, rows: TrainingRows, *, size: int, seed: int, no_duplicates: bool) -> None:
        if len(rows) < size:
            raise InputError(f"data.train: {len(rows)} rows are fewer than one batch of {size}; lower training.batch_size")
        self._rows = rows
        self._size = size
        self._seed = seed
        self._no_duplicates = no_duplicates

    @property
    def per_epoch(self) -> int:
        """Full batches that an epoch has; without duplicates it may have fewer."""
        return len(self._rows) // self._size

    def batches(self, start: int) -> Iterator[Batch]:
        """The batches from number ``start`` on.

        The rows are in a batch's epoch when it is given out (`TrainingRows.set_epoch`), and stay in it until the next is asked for.

        Raises:
            InputError: An epoch has no full batch without a repeated text.
        """
        if self._no_duplicates:  # how many batches an epoch has is known when it is over
            return islice(self._apart(), start, None)
        return islice(self._plain(start // self.per_epoch), start % self.per_epoch, None)

    def _permutation(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self._seed + epoch)
        order: list[int] = torch.randperm(len(self._rows), generator=generator).tolist()
        return order

    def _plain(self, epoch: int) -> Iterator[Batch]:
        while True:
            order = self._permutation(epoch)
            self._rows.set_epoch(epoch)
            for first in range(0, self.per_epoch * self._size, self._size):
                yield Batch(epoch, order[first : first + self._size])
            epoch += 1

    def _apart(self) -> Iterator[Batch]:
        epoch = 0
        while True:
            self._rows.set_epoch(epoch)
            full = 0
            for rows in _without_shared_texts(_rows_with_keys(self._rows, self._permutation(epoch)), self._size):
                yield Batch(epoch, rows)
                full += 1
            self._tell(epoch, full)
            epoch += 1

    def _tell(self, epoch: int, full: int) -> None:
        remedy = "lower training.batch_size, remove repeated rows, or set training.no_duplicates to false"
        if full == 0:
            raise InputError(f"data.train: {len(self._rows)} rows do not fill one batch of {self._size} without a repeated text; {remedy}")
        left_out = (self.per_epoch - full) * self._size
        if left_out > _LEFT_OUT * len(self._rows):
            logger.warning("epoch %d left out %d of %d rows, for they repeat texts; %s", epoch + 1, left_out, len(self._rows), remedy)


@dataclass
class _Row:
    """A row's number, and a key of each of its texts."""

    number: int
    keys: frozenset[bytes]


@dataclass
class _Chosen:
    """A batch that is being filled."""

    rows: list[int] = field(default_factory=list)
    keys: set[bytes] = field(default_factory=set)

    def takes(self, row: _Row) -> bool:
        """Take a row, unless it shares a text with one that was taken."""
        if not self.keys.isdisjoint(row.keys):
            return False
        self.rows.append(row.number)
        self.keys |= row.keys
        return True


def _without_shared_texts(rows: Iterator[_Row], size: int) -> Iterator[list[int]]:
    """Full batches of rows that share no text: each takes the first rows that it can, those put off before the others."""
    put_off: list[_Row] = []
    while True:
        batch = _Chosen()
        still: list[_Row] = []
        for place, row in enumerate(put_off):
            if len(batch.rows) == size:
                still.extend(put_off[place:])
                break
            if not batch.takes(row):
                still.append(row)
        while len(batch.rows) < size:
            row_or_none = next(rows, None)
            if row_or_none is None:
                return
            if not batch.takes(row_or_none):
                still.append(row_or_none)
        put_off = still
        yield batch.rows


def _rows_with_keys(rows: TrainingRows, order: Sequence[int]) -> Iterator[_Row]:
    for first in range(0, len(order), _BLOCK):
        numbers = list(order[first : first + _BLOCK])
        columns = read_columns(rows, numbers)
        keys = [text_keys(texts).tolist() for name, texts in columns.items() if name != "scores"]
        for number, row in zip(numbers, zip(*keys, strict=True), strict=True):
            yield _Row(number, frozenset(row))


def read_columns(rows: TrainingRows, numbers: Sequence[int]) -> dict[str, list[Any]]:
    """Some rows, as columns of equal length."""
    columns: dict[str, list[Any]] = rows.dataset[list(numbers)]
    return columns


def read_rows(rows: TrainingRows, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Some rows, as the collator takes them."""
    columns = read_columns(rows, numbers)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
