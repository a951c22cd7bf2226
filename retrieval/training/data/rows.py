"""The rows of a training run. Texts are read, and random negatives drawn, when a row is asked for.

Shapes: n documents per row, B rows of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from quiver.retrieval.training.data.table import Row, Table

SCORES = "scores"
"""Column of the teacher's scores."""


class TrainingRows:
    """The rows of a training run, memory-mapped.

    A row is ``{"query": str, "document_1": str, ..., "document_n": str}`` and, if ``scored``, ``"scores": list[float]`` of length n. A
    pickled copy holds only the path of the table.

    Args:
        table: The table.
        documents_per_row: Documents n per row: the positive and n - 1 negatives. No row of the table has fewer.
        scored: Rows have teacher scores.
        sha256: Checksum of all rows' texts and scores in their order, including negatives that may be drawn: equal sums, equal data.
        skipped: Rows that were excluded because they have fewer than n documents or no query.
        copies: Documents that were excluded from their rows because they are blank or equal to another document of the row.
        seed: Random seed for the negatives; None if rows have exactly n documents and nothing is drawn.

    Attributes:
        epoch: Epoch whose negatives are drawn, from 0.
    """

    def __init__(
        self, table: Table, documents_per_row: int, *, scored: bool, sha256: str, skipped: int, copies: int, seed: int | None
    ) -> None:
        self.documents_per_row = documents_per_row
        self.scored = scored
        self.sha256 = sha256
        self.skipped = skipped
        self.copies = copies
        self.epoch = 0
        self._table = table
        self._seed = seed

    def __len__(self) -> int:
        return len(self._table.order)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: values[0] for name, values in self.columns([number]).items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, such as ``query``, ``document_1``, ``document_2``, ``scores``."""
        return ["query", *(f"document_{place}" for place in range(1, self.documents_per_row + 1)), *([SCORES] if self.scored else [])]

    def columns(self, numbers: Sequence[int]) -> dict[str, list[Any]]:
        """Return rows by number as columns of equal length B."""
        rows = [self._drawn(number) for number in self._table.order[list(numbers)].tolist()]
        if not rows:
            return {name: [] for name in self.column_names}
        texts = self._table.texts.take(np.concatenate([[row.query, *row.documents] for row in rows]))
        width = 1 + self.documents_per_row
        columns: dict[str, list[Any]] = {name: texts[column::width] for column, name in enumerate(self.column_names[:width])}
        if self.scored:
            columns[SCORES] = [row.scores.tolist() for row in rows]
        return columns

    def texts(self) -> Iterator[str]:
        """Yield the texts of all rows in their order, the query before its documents, including negatives that may be drawn."""
        for number in self._table.order.tolist():
            row = self._table[number]
            yield from self._table.texts.take([row.query, *row.documents])

    def set_epoch(self, epoch: int) -> None:
        """Draw the negatives of an epoch from now on; without random negatives nothing changes.

        Args:
            epoch: Epoch, from 0.
        """
        self.epoch = epoch

    def _drawn(self, number: int) -> Row:
        """A row with n documents: the positive, and negatives in the order of the table."""
        row = self._table[number]
        if self._seed is None or len(row.documents) == self.documents_per_row:
            return row
        draw = np.random.default_rng([self._seed, self.epoch, number])
        negatives = draw.choice(len(row.documents) - 1, self.documents_per_row - 1, replace=False, shuffle=False)
        taken = np.concatenate([[0], 1 + np.sort(negatives)])
        return Row(row.query, row.documents[taken], row.scores[taken] if len(row.scores) else row.scores)
