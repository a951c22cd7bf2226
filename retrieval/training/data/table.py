"""Training data as Arrow IPC files, written in batches as it is read, memory-mapped for training, and read as rows with drawn negatives.

    texts.arrow    text: string                                                          every text once per occurrence
    rows.arrow     query: int64, documents: list<int64>, scores: list<float64>           text numbers and teacher scores of each row
    order.arrow    row: int64                                                            the rows of the run, in their order

Any Arrow reader opens these files. Memory does not grow with the number of texts or rows, and a text is found in constant time.

Shapes: R rows, T texts, B numbers of a call, n documents per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Item = TypeVar("Item")

SCORES = "scores"  # column of the teacher scores in a training row
BLOCK = 4096  # rows or texts handled together

# Bytes of text after which a batch is written, so that megabyte documents do not pile up in memory.
_BATCH_BYTES = 16 << 20
_DIGEST = 32
TEXTS = pa.schema({"text": pa.string()})
_ROWS = pa.schema({"query": pa.int64(), "documents": pa.list_(pa.int64()), "scores": pa.list_(pa.float64())})


def blocks(items: Iterable[Item], size: int = BLOCK) -> Iterator[list[Item]]:
    """Split items into lists of ``size``; the last one may be shorter, none is empty."""
    stream = iter(items)
    while block := list(islice(stream, size)):
        yield block


class ArrowWriter:
    """Writes rows to a new Arrow IPC file, in batches of `BLOCK` rows or fewer large ones."""

    def __init__(self, path: Path, schema: pa.Schema = TEXTS) -> None:
        self._schema = schema
        self._file = path.open("xb")
        self._writer = pa.ipc.new_file(self._file, schema)
        self._pending: list[Any] = []
        self._bytes = 0
        self._written = 0

    def __len__(self) -> int:
        return self._written + len(self._pending)

    def add(self, row: bytes | tuple[object, ...], size: int = 0) -> int:
        """Append a row, a text in UTF-8 or the values of several columns, and return its number; ``size`` is that of a text in bytes."""
        pending = self._pending
        pending.append(row)
        self._bytes += size
        count = len(pending)
        number = self._written + count - 1
        if count >= BLOCK or self._bytes >= _BATCH_BYTES:
            self._write_batch()
        return number

    def close(self) -> None:
        """Finish the file."""
        if not self._file.closed:
            self._write_batch()
            self._writer.close()
            self._file.close()

    def _write_batch(self) -> None:
        if self._pending:
            values = [self._pending] if len(self._schema) == 1 else zip(*self._pending, strict=True)
            columns = [pa.array(column, field.type) for column, field in zip(values, self._schema, strict=True)]
            self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._written += len(self._pending)
        self._pending, self._bytes = [], 0


def _read_batches(path: Path) -> list[pa.RecordBatch]:
    """Memory-map the batches of an Arrow IPC file."""
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def _offsets(column: pa.Array) -> memoryview:
    """Offsets of texts or lists, as a memory view: its items are Python integers, which slice faster than NumPy's."""
    return memoryview(column.buffers()[1]).cast("B").cast("i")


class TextColumn(Sequence[str]):
    """Texts of an Arrow file, memory-mapped. A pickled or copied column holds only the path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        columns = [batch.column(0) for batch in _read_batches(path)]
        self._first = np.cumsum([0, *map(len, columns)], dtype=np.int64)  # number of the first text of each batch, and of all texts
        self._offsets = [_offsets(column) for column in columns]
        self._bytes = [memoryview(column.buffers()[2] or b"") for column in columns]

    def __len__(self) -> int:
        return int(self._first[-1])

    @overload
    def __getitem__(self, number: int) -> str: ...

    @overload
    def __getitem__(self, number: slice) -> list[str]: ...

    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return self.take(range(*number.indices(len(self))))
        return self.take([number])[0]

    def __iter__(self) -> Iterator[str]:
        for numbers in blocks(range(len(self))):
            yield from self.take(numbers)

    def take(self, numbers: NDArray[np.int64] | Sequence[int]) -> list[str]:
        """Return the texts with these numbers, in their order."""
        wanted = np.asarray(numbers, np.int64)
        if len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < len(self):
            raise IndexError(f"text numbers must be 0 to {len(self) - 1}")
        batches = np.searchsorted(self._first, wanted, side="right") - 1
        texts = []
        for batch, row in zip(batches.tolist(), (wanted - self._first[batches]).tolist(), strict=True):
            offsets = self._offsets[batch]
            texts.append(str(self._bytes[batch][offsets[row] : offsets[row + 1]], "utf-8"))
        return texts

    def __reduce__(self) -> tuple[type[TextColumn], tuple[Path]]:
        return TextColumn, (self._path,)


class Row(NamedTuple):
    """A training row: text numbers of its query and documents, and the documents' teacher scores (empty without a teacher)."""

    query: int
    documents: NDArray[np.int64]
    scores: NDArray[np.float64]


class TableWriter:
    """Writes the texts and rows of a table into an empty folder; use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.texts = ArrowWriter(folder / "texts.arrow")
        self._rows = ArrowWriter(folder / "rows.arrow", _ROWS)
        self._digests = (folder / "digests.tmp").open("xb")
        self._stack = ExitStack()
        for file in (self.texts, self._rows, self._digests):
            self._stack.callback(file.close)

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def add_text(self, text: bytes) -> int:
        """Append a text in UTF-8 and return its number."""
        self._digests.write(sha256(text).digest())
        return self.texts.add(text, len(text))

    def add_row(self, query: int, documents: Sequence[int], scores: Sequence[float]) -> None:
        """Append a row with text numbers of its query and documents, and a score for each document or none."""
        self._rows.add((query, documents, scores))

    def digests(self, texts: NDArray[np.int64] | Sequence[int]) -> list[bytes]:
        """Return the sha256 of texts by their numbers."""
        if not self._digests.closed:
            self._digests.flush()
        wanted = np.asarray(texts, np.int64)
        if not len(wanted):
            return []
        found = np.memmap(self.folder / "digests.tmp", np.uint8, "r").reshape(-1, _DIGEST)[wanted].tobytes()
        return [found[start : start + _DIGEST] for start in range(0, len(found), _DIGEST)]

    def finish(self, order: NDArray[np.int64]) -> str:
        """Close the files, write the order of the rows, and return a sha256 over the rows in this order.

        It covers for each row the number of its documents (8 bytes), the sha256 of each text (the query's first) and the scores (8 bytes
        each), little-endian.
        """
        self._stack.close()
        with (self.folder / "order.arrow").open("xb") as file, pa.ipc.new_file(file, schema := pa.schema({"row": pa.int64()})) as writer:
            writer.write_batch(pa.record_batch([pa.array(order, pa.int64())], schema=schema))
        table = Table(self.folder)
        total = sha256()
        for numbers in blocks(order.tolist()):
            rows = [table[number] for number in numbers]
            digests = b"".join(self.digests([text for row in rows for text in (row.query, *row.documents.tolist())]))
            start = 0
            for row in rows:
                end = start + _DIGEST * (1 + len(row.documents))
                total.update(len(row.documents).to_bytes(8, "little") + digests[start:end] + row.scores.tobytes())
                start = end
        (self.folder / "digests.tmp").unlink()
        return total.hexdigest()


class Table:
    """Texts and rows that a `TableWriter` has written, memory-mapped. A pickled or copied table holds only the path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.texts = TextColumn(folder / "texts.arrow")
        order = [batch.column(0).to_numpy() for batch in _read_batches(folder / "order.arrow")]
        self.order: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *order])
        self._batches = [
            (queries.to_numpy(), _offsets(documents), documents.values.to_numpy(), _offsets(scores), scores.values.to_numpy())
            for queries, documents, scores in (batch.columns for batch in _read_batches(folder / "rows.arrow"))
        ]

    def __getitem__(self, number: int) -> Row:
        batch, row = divmod(number, BLOCK)  # all batches but the last have BLOCK rows
        queries, ends, documents, score_ends, scores = self._batches[batch]
        return Row(int(queries[row]), documents[ends[row] : ends[row + 1]], scores[score_ends[row] : score_ends[row + 1]])

    def __reduce__(self) -> tuple[type[Table], tuple[Path]]:
        return Table, (self._folder,)


class RowCounts(NamedTuple):
    """What identifies the rows of a run, as recorded beside their table and in run.json."""

    documents_per_row: int  # n: the positive and n - 1 negatives
    rows: int
    skipped: int  # rows that were excluded because they have fewer than n documents or no query
    copies: int  # documents that were excluded from their rows because they are blank or equal to another document of the row
    not_relevant: int  # rows that were excluded because their label says that no document is relevant
    rows_short: int  # rows with fewer than n documents
    rows_cut: int  # rows with more than n documents
    sha256: str  # checksum of all rows' texts and scores in their order, including negatives that may be drawn: equal sums, equal data


class TrainingRows:
    """The rows of a training run, memory-mapped.

    A row is ``{"query": str, "document_1": str, ..., "document_n": str}`` and, if ``scored``, ``"scores": list[float]`` of length n. The
    last documents of a short row are None, unless ``repeats``. A pickled copy holds only the path of the table.
    """

    def __init__(self, table: Table, counts: RowCounts, *, scored: bool, seed: int | None, repeats: bool = False) -> None:
        self.counts = counts
        self.documents_per_row = counts.documents_per_row
        self.scored = scored
        self.epoch = 0
        self._repeats = repeats
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
        return ["query", *(f"document_{position}" for position in range(1, self.documents_per_row + 1)), *([SCORES] if self.scored else [])]

    def columns(self, numbers: Sequence[int]) -> dict[str, list[Any]]:
        """Return rows by number as columns of equal length B."""
        rows = [self._drawn(number) for number in self._table.order[list(numbers)].tolist()]
        if not rows:
            return {name: [] for name in self.column_names}
        texts = iter(self._table.texts.take(np.concatenate([[row.query, *row.documents] for row in rows])))
        width = 1 + self.documents_per_row
        each = [[*islice(texts, 1 + len(row.documents)), *([None] * (width - 1 - len(row.documents)))] for row in rows]
        columns: dict[str, list[Any]] = {name: [row[column] for row in each] for column, name in enumerate(self.column_names[:width])}
        if self.scored:
            columns[SCORES] = [row.scores.tolist() for row in rows]
        return columns

    def texts(self) -> Iterator[str]:
        """Yield the texts of all rows in their order, the query before its documents, including negatives that may be drawn."""
        for number in self._table.order.tolist():
            row = self._table[number]
            yield from self._table.texts.take([row.query, *row.documents])

    def set_epoch(self, epoch: int) -> None:
        """Draw the negatives of an epoch from now on; without random negatives nothing changes."""
        self.epoch = epoch

    def _drawn(self, number: int) -> Row:
        """A row with n documents, or fewer: the positive, and negatives in the order of the table."""
        row = self._table[number]
        have, wanted = len(row.documents) - 1, self.documents_per_row - 1
        if self._seed is None or have == wanted or (have < wanted and not self._repeats):
            return row
        draw = np.random.default_rng([self._seed, self.epoch, number])
        if have > wanted:
            negatives = np.sort(draw.choice(have, wanted, replace=False, shuffle=False))
        else:  # each as often as the others, or once more
            again = draw.choice(have, wanted % have, replace=False, shuffle=False)
            negatives = np.sort(np.concatenate([np.repeat(np.arange(have), wanted // have), again]))
        taken = np.concatenate([[0], 1 + negatives])
        return Row(row.query, row.documents[taken], row.scores[taken] if len(row.scores) else row.scores)
