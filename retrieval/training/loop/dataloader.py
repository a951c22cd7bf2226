"""Batches in a reproducible order: it depends on the seed alone, so a resumed run and a run on several processes read the same batches.

The order of an epoch is torch's random permutation with the seed ``training.seed`` + epoch, epochs counted from 0, as in the samplers of
accelerate and sentence-transformers. An incomplete batch at the end of an epoch is dropped, because it would have fewer negatives.

Shapes: B rows of a batch, over all processes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from quiver.encoder.errors import InputError
from quiver.encoder.training.processes import Processes
from quiver.encoder.training.trainer import TrainingBatch
from quiver.retrieval.data.embedding_store import text_keys
from quiver.retrieval.training.data import TrainingRows

if TYPE_CHECKING:  # it imports the libraries of the extra
    from quiver.retrieval.training.student.collator import TextCounts

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

_BLOCK = 512
"""Rows that are read at once to see which texts they share."""

_LEFT_OUT = 0.01
"""Share of the rows that an epoch may leave out without a word."""

_REMEDY = "lower training.batch_size, remove repeated rows, or set training.no_duplicates to false"


@dataclass(frozen=True)
class Batch:
    """Rows of one batch.

    Attributes:
        epoch: From 0.
        number: Its place in the epoch, from 1.
        rows: B row numbers.
        last: It is the last of its epoch.
    """

    epoch: int
    number: int
    rows: list[int]
    last: bool

    @property
    def then(self) -> tuple[int, int]:
        """Where the batch behind it lies: its epoch, and how many batches of that come before it."""
        return (self.epoch + 1, 0) if self.last else (self.epoch, self.number)


class BatchOrder:
    """The batches of a run, one epoch after the other, without end.

    Args:
        rows: What is trained on.
        size: B.
        seed: Of the order.
        no_duplicates: No two rows of a batch share a text; a row that would is put off to a later batch of the epoch, as
            sentence-transformers' sampler does it.
        warn: Log a warning where an epoch leaves out many rows.

    Raises:
        InputError: There are fewer rows than one batch takes.
    """

    def __init__(self, rows: TrainingRows, *, size: int, seed: int, no_duplicates: bool, warn: bool = True) -> None:
        if len(rows) < size:
            raise InputError(f"data.train: {len(rows)} rows are fewer than one batch of {size}; lower training.batch_size")
        self._rows = rows
        self._size = size
        self._seed = seed
        self._no_duplicates = no_duplicates
        self._warn = warn

    @property
    def per_epoch(self) -> int:
        """Full batches that an epoch has; without duplicates it may have fewer."""
        return len(self._rows) // self._size

    def batches(self, epoch: int = 0, done: int = 0) -> Iterator[Batch]:
        """The batches from one on (see `Batch.then`).

        The rows are in a batch's epoch when it is given out (`TrainingRows.set_epoch`), and stay in it until the next is asked for.

        Args:
            epoch: That the first of them is in.
            done: Batches of that epoch before it; without duplicates their rows are read again, and those of no earlier epoch.

        Raises:
            InputError: An epoch has no full batch without a repeated text.
        """
        while True:
            self._rows.set_epoch(epoch)
            full = 0
            for full, (rows, last) in enumerate(_with_last(self._epoch(epoch)), start=1):
                if last:
                    self._tell(epoch, full)
                if full > done:
                    yield Batch(epoch, full, rows, last)
            if not full:
                raise InputError(
                    f"data.train: {len(self._rows)} rows do not fill one batch of {self._size} without a repeated text; {_REMEDY}"
                )
            epoch, done = epoch + 1, 0

    def _epoch(self, epoch: int) -> Iterator[list[int]]:
        order = self._permutation(epoch)
        if self._no_duplicates:
            return _without_shared_texts(_rows_with_keys(self._rows, order), self._size)
        return (order[first : first + self._size] for first in range(0, self.per_epoch * self._size, self._size))

    def _permutation(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self._seed + epoch)
        order: list[int] = torch.randperm(len(self._rows), generator=generator).tolist()
        return order

    def _tell(self, epoch: int, full: int) -> None:
        left_out = (self.per_epoch - full) * self._size
        if self._warn and left_out > _LEFT_OUT * len(self._rows):
            logger.warning("epoch %d leaves out %d of %d rows, for they repeat texts; %s", epoch + 1, left_out, len(self._rows), _REMEDY)


def _with_last(items: Iterator[Item]) -> Iterator[tuple[Item, bool]]:
    """Each item, and whether it is the last."""
    for held in items:
        for item in items:
            yield held, False
            held = item
        yield held, True


@dataclass(frozen=True)
class _Row:
    """A row's number, and a key of each of its texts."""

    number: int
    keys: frozenset[bytes]


@dataclass
class _Chosen:
    """A batch that is being filled."""

    rows: list[int] = field(default_factory=list)
    keys: set[bytes] = field(default_factory=set)

    def take(self, row: _Row) -> bytes | None:
        """Take a row, unless it shares a text with one that was taken; the key of that text, or None where it is taken."""
        if shared := self.keys & row.keys:
            return min(shared)
        self.rows.append(row.number)
        self.keys |= row.keys
        return None


class _PutOff:
    """Rows that were put off, in the order in which they were come upon.

    They lie in heaps by a text that was in their way. While that text is in a batch none of its heap is looked at: a text that
    thousands of rows have does not cost thousands of looks a batch.
    """

    def __init__(self) -> None:
        self._heaps: dict[bytes, list[tuple[int, _Row]]] = {}

    def add(self, key: bytes, place: int, row: _Row) -> None:
        heappush(self._heaps.setdefault(key, []), (place, row))

    def fill(self, batch: _Chosen, size: int) -> None:
        """Let a batch that is empty take the first rows that it can."""
        heads = sorted((heap[0][0], key) for key, heap in self._heaps.items())
        while heads and len(batch.rows) < size:
            _, key = heappop(heads)
            if key in batch.keys:
                continue
            heap = self._heaps[key]
            place, row = heappop(heap)
            if not heap:
                del self._heaps[key]
            shared = batch.take(row)
            if shared is not None:  # its heap is not looked at any more, and the next row of this one may fit
                self.add(shared, place, row)
                if heap:
                    heappush(heads, (heap[0][0], key))


def _without_shared_texts(rows: Iterator[_Row], size: int) -> Iterator[list[int]]:
    """Full batches of rows that share no text: each takes the first rows that it can, those put off before the others."""
    put_off, places = _PutOff(), count()
    while True:
        batch = _Chosen()
        put_off.fill(batch, size)
        while len(batch.rows) < size:
            row = next(rows, None)
            if row is None:
                return
            shared = batch.take(row)
            if shared is not None:
                put_off.add(shared, next(places), row)
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
    return rows.columns(numbers)


def read_rows(rows: TrainingRows, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Some rows, as the collator takes them."""
    columns = read_columns(rows, numbers)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


class Collate(Protocol):
    """Turns rows into the tensors that a loss reads."""

    counts: TextCounts
    """Totals of all batches so far."""

    def __call__(self, rows: list[dict[str, Any]], /) -> dict[str, Tensor]:
        """One batch."""


class DataLoader:
    """The remaining batches of a run, this process's rows of each, as one iteration.

    While the model trains on a batch, a thread makes the next one. It draws no random numbers, and only this thread reads rows, so nothing
    depends on which of the two is faster.

    Args:
        order: All batches of the run.
        rows: The data.
        collate: Makes tensors.
        processes: Each process gets an equal part of the rows of a batch, by rank.
        start: Position of the first batch: its epoch, and the number of batches before it in that epoch.
        count: Number of batches.
    """

    def __init__(
        self, order: BatchOrder, rows: TrainingRows, collate: Collate, processes: Processes, *, start: tuple[int, int], count: int
    ) -> None:
        self._order = order
        self._rows = rows
        self._collate = collate
        self._processes = processes
        self._start = start
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[TrainingBatch]:
        batches = (self._made(batch) for batch in islice(self._order.batches(*self._start), self._count))
        with ThreadPoolExecutor(1, thread_name_prefix="dataloader") as ahead:
            coming = ahead.submit(next, batches, None)
            while (made := coming.result()) is not None:
                coming = ahead.submit(next, batches, None)
                yield made

    def _made(self, batch: Batch) -> TrainingBatch:
        part = len(batch.rows) // self._processes.size
        first = part * self._processes.rank
        numbers = batch.rows[first : first + part]
        rows = read_rows(self._rows, numbers)
        examples = [{"row": number, "epoch": batch.epoch, **row} for number, row in zip(numbers, rows, strict=True)]
        before = replace(self._collate.counts)
        inputs = self._collate(rows)
        now = self._collate.counts
        return TrainingBatch(
            inputs,
            examples,
            texts=now.texts - before.texts,
            truncated=now.truncated - before.truncated,
            tokens=now.tokens - before.tokens,
            next_position=batch.then,
            ends_epoch=batch.last,
        )
