"""The rows a run trains on: a `datasets.Dataset` whose texts are looked up, and whose negatives are drawn, when a row is asked for.

Shapes: n documents a row, B rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.training.data.table import Row, Table

if TYPE_CHECKING:
    from datasets import Dataset

SCORES = "scores"
"""Column of the teacher's scores."""

VIEW = "view.arrow"
"""File with the data set's own table."""


@dataclass(frozen=True)
class TrainingRows:
    """What a run trains on.

    Attributes:
        dataset: Map-style, its table memory-mapped. A row is ``{"query": str, "document_1": str, ..., "document_n": str}`` and, where
            ``scored``, ``"scores": list[float]`` of length n. Its own table holds row numbers; a transform puts the texts there.
        documents_per_row: n, the positive and its hard negatives.
        scored: The rows have a teacher's scores.
        sha256: Of all rows' texts and scores in their order, those of negatives that may be drawn included: equal sums, equal data.
        skipped: Rows that were looked at and left out, for having fewer than n documents or no query.
        copies: Documents that were left out of their rows for being blank, or the same as the positive or another negative.
        reader: What looks texts up; shared by all copies of ``dataset`` in a process.
    """

    dataset: Dataset
    documents_per_row: int
    scored: bool
    sha256: str
    skipped: int
    copies: int
    reader: RowReader = field(repr=False)

    def __len__(self) -> int:
        return len(self.dataset)

    def texts(self) -> Iterator[str]:
        """The texts of all rows in their order, the query before its documents; where negatives are drawn, all that may be."""
        table = self.reader.table
        for number in table.order.tolist():
            row = table[number]
            yield table.texts[row.query]
            yield from table.texts.take(row.documents)

    def set_epoch(self, epoch: int) -> None:
        """Draw the negatives of this epoch from now on; where they are not drawn, nothing changes.

        Args:
            epoch: From 0, which is also where the rows begin.
        """
        self.reader.epoch = epoch


class RowReader:
    """Row numbers to rows: the transform of a data set.

    A copy is the same object: libraries copy data sets as they please, and all copies have to be in the same epoch.
    """

    def __init__(self, table: Table, documents: int, *, seed: int | None) -> None:
        """Read a table.

        Args:
            table: Where the rows lie.
            documents: Documents n that a row gets; no row of the table has fewer.
            seed: Of the draw; None where the rows have n documents and nothing is drawn.
        """
        self.table = table
        self.epoch = 0
        self._documents = documents
        self._names = column_names(documents)
        self._seed = seed

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """The rows of a batch.

        Args:
            batch: Row numbers under ``query``; of the other columns only the names count, since a library may have dropped some.

        Returns:
            The same columns, each of length B.
        """
        rows = [self._drawn(number) for number in batch["query"]]
        texts = self.table.texts.take(np.concatenate([[row.query, *row.documents] for row in rows]))  # one look-up for all
        width = 1 + self._documents
        columns: dict[str, list[Any]] = {name: texts[place::width] for place, name in enumerate(self._names) if name in batch}
        if SCORES in batch:
            columns[SCORES] = [row.scores.tolist() for row in rows]
        return columns

    def __deepcopy__(self, memo: object) -> RowReader:
        return self

    def _drawn(self, number: int) -> Row:
        """A row with n documents: the positive, and negatives in the order that they have in the row."""
        row = self.table[number]
        if self._seed is None or len(row.documents) == self._documents:
            return row
        draw = np.random.default_rng([self._seed, self.epoch, number])
        negatives = draw.choice(len(row.documents) - 1, self._documents - 1, replace=False, shuffle=False)
        taken = np.concatenate([[0], 1 + np.sort(negatives)])
        return Row(row.query, row.documents[taken], row.scores[taken] if len(row.scores) else row.scores)


def column_names(documents: int) -> list[str]:
    """Names of the text columns for n documents a row.

    Example:
        >>> column_names(2)
        ['query', 'document_1', 'document_2']
    """
    return ["query", *(f"document_{place}" for place in range(1, documents + 1))]


def write_view(folder: Path, order: NDArray[np.int64], documents: int, *, scored: bool) -> None:
    """Write the table of a data set: row numbers under ``query``, and of every other column its name alone.

    A column of Arrow's null type takes no room, and the data set has its right columns for whoever asks for their names.
    """
    arrow = importlib.import_module("pyarrow")
    query, *names = [*column_names(documents), *([SCORES] if scored else [])]
    table = arrow.table({query: arrow.array(order, arrow.int64()), **{name: arrow.nulls(len(order)) for name in names}})
    with arrow.OSFile(str(folder / VIEW), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def open_view(folder: Path, reader: RowReader) -> Dataset:
    """The data set of a table that is complete."""
    datasets = importlib.import_module("datasets")
    return datasets.Dataset.from_file(str(folder / VIEW)).with_transform(reader)
