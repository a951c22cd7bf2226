"""What the trainer iterates over: this process's part of each batch, collated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

from torch import Tensor

from retrieval.training.data import TrainingRows
from retrieval.training.loop.batches import BatchOrder, read_rows
from retrieval.training.loop.processes import Processes

EXAMPLES = "examples"
"""Key of a batch under which its rows themselves stand, for the record of a batch that cannot be trained on."""


class Collate(Protocol):
    """Rows to the tensors that a loss reads."""

    def __call__(self, rows: list[dict[str, Any]], /) -> dict[str, Tensor]:
        """One batch."""


class Feed:
    """A sequence of batches that can be walked once; it stands where a ``DataLoader`` would.

    One walk is the whole rest of a run: the trainer takes it for a single epoch, so where a batch lies in the data is decided in
    `BatchOrder` alone and is the same after a resumption.

    Args:
        order: All batches of the run.
        rows: What they number.
        collate: Makes tensors.
        processes: Rows of a batch are dealt out in equal parts by rank.
        start: Number of the first batch.
        count: How many there are.
    """

    def __init__(self, order: BatchOrder, rows: TrainingRows, collate: Collate, processes: Processes, *, start: int, count: int) -> None:
        self._order = order
        self._rows = rows
        self._collate = collate
        self._processes = processes
        self._start = start
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in islice(self._order.batches(self._start), self._count):
            part = len(batch.rows) // self._processes.size
            first = part * self._processes.rank
            numbers = batch.rows[first : first + part]
            rows = read_rows(self._rows, numbers)
            examples = [{"row": number, "epoch": batch.epoch, **row} for number, row in zip(numbers, rows, strict=True)]
            yield {**self._collate(rows), EXAMPLES: examples}
