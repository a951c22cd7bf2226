"""What the trainer iterates over: this process's part of each batch, collated, the next one while the last is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from quiver.encoder.training.processes import Processes
from quiver.retrieval.training.data import TrainingRows
from quiver.retrieval.training.loop.batches import Batch, BatchOrder, read_rows

if TYPE_CHECKING:  # it needs the libraries of the extra
    from quiver.retrieval.training.student.collator import TextCounts

FED = "fed"
"""Key of a batch's tensors under which stands what they were made of, a `Fed`."""


@dataclass(frozen=True)
class Fed:
    """What a batch's tensors were made of.

    Attributes:
        batch: Over all processes.
        examples: This process's rows themselves, for the record of a batch that cannot be trained on.
        texts: Texts of these rows.
        truncated: Texts that were cut.
        tokens: Tokens of the texts.
    """

    batch: Batch
    examples: list[dict[str, Any]]
    texts: int
    truncated: int
    tokens: int


class Collate(Protocol):
    """Rows to the tensors that a loss reads."""

    counts: TextCounts
    """Of all batches so far."""

    def __call__(self, rows: list[dict[str, Any]], /) -> dict[str, Tensor]:
        """One batch."""


class Feed:
    """A sequence of batches that can be walked once; it stands where a ``DataLoader`` would.

    One walk is the whole rest of a run: the trainer takes it for a single epoch, so where a batch lies in the data is decided in
    `BatchOrder` alone and is the same after a resumption.

    While a batch is trained on, a thread makes the next one: rows are read and texts are cut while a GPU computes. It draws no
    random numbers, and it alone reads rows, so that nothing depends on which of the two is faster.

    Args:
        order: All batches of the run.
        rows: What they number.
        collate: Makes tensors.
        processes: Rows of a batch are dealt out in equal parts by rank.
        start: Where the first batch lies: its epoch, and how many batches of that come before it.
        count: How many there are.
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

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = (self._made(batch) for batch in islice(self._order.batches(*self._start), self._count))
        with ThreadPoolExecutor(1, thread_name_prefix="feed") as ahead:
            coming = ahead.submit(next, batches, None)
            while (made := coming.result()) is not None:
                coming = ahead.submit(next, batches, None)
                yield made

    def _made(self, batch: Batch) -> dict[str, Any]:
        part = len(batch.rows) // self._processes.size
        first = part * self._processes.rank
        numbers = batch.rows[first : first + part]
        rows = read_rows(self._rows, numbers)
        examples = [{"row": number, "epoch": batch.epoch, **row} for number, row in zip(numbers, rows, strict=True)]
        before = replace(self._collate.counts)
        tensors = self._collate(rows)
        now = self._collate.counts
        fed = Fed(batch, examples, now.texts - before.texts, now.truncated - before.truncated, now.tokens - before.tokens)
        return {**tensors, FED: fed}
