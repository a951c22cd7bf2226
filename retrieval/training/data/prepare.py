"""Prepare training rows once per run folder: select rows of a recipe's sources, write them as Arrow files, and read them for training.

``work/<key>`` holds the table, sealed by ``rows.json`` (`quiver.encoder.work_folder`). The key is a hash of the recipe's data section and
of the path, size and modification time of every file that it reads. Rows are streamed: memory grows by 40 bytes per id and 12 per row.

    texts.arrow    text: string                                                          every text once per occurrence
    rows.arrow     query: int64, documents: list<int64>, scores: list<float64>           text numbers and teacher scores of each row
    order.arrow    row: int64                                                            the rows of the run, in their order

Shapes: R rows, T texts, B numbers of a call, n documents per row.
"""

from __future__ import annotations

import gc
import json
import logging
import platform
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from quiver.encoder.environment import is_main_process
from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home, read_json
from quiver.encoder.progress import Advance, progress_bar
from quiver.encoder.work_folder import SealedFolder, SealedFolders
from quiver.retrieval.data.corpus import describe_missing, find_split, load_collection
from quiver.retrieval.data.docstrings import Pair, mine, split_pairs
from quiver.retrieval.data.embedding_store import KEY, KeyTable, text_keys
from quiver.retrieval.data.tables import find_jsonl
from quiver.retrieval.training.data.sources import (
    Example,
    TextEntry,
    count_rows,
    encode_text,
    read_examples,
    read_text_entries,
    source_files,
)
from quiver.retrieval.training.recipe import STDLIB_DOCSTRINGS, DataSection

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Value = TypeVar("Value")

RECORD = "rows.json"  # the seal of a table
SCORES = "scores"  # column of the teacher scores in a training row
BLOCK = 4096  # rows or texts handled together
SAMPLE_BLOCK = 1024  # rows that are read at a time
_BATCH_BYTES = 16 << 20  # bytes of text after which a batch is written, so that megabyte documents do not pile up in memory
_DIGEST = 32
_SCHEMA = "quiver-rows/6"
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
        rows = [self._draw_row(number) for number in self._table.order[list(numbers)].tolist()]
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

    def _draw_row(self, number: int) -> Row:
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


class RowSample:
    """Selects the rows of a run from a stream of unknown length: the first ones, or a random sample.

    To shuffle, each row gets a random rank, and the rows of lowest rank are used in the order of their ranks. A row whose rank is not among
    the lowest so far need not be written: of N rows with a limit of k, about k (1 + ln(N / k)) are. Only ranks are kept in memory.
    """

    def __init__(self, *, shuffle: bool, limit: int | None, seed: int) -> None:
        self._random = np.random.default_rng(seed) if shuffle else None
        self._limit = limit
        self._ranks = array("d")
        self._below = 1.0
        self._narrowed = 0

    @property
    def next_rows(self) -> int:
        """Number of rows to read next: never more than needed, since a row that is not used may be malformed; 0 at the limit."""
        first_rows = self._limit is not None and self._random is None
        return min(SAMPLE_BLOCK, (self._limit or 0) - len(self._ranks)) if first_rows else SAMPLE_BLOCK

    def wanted(self, block: Sequence[Example]) -> list[Example]:
        """Return the rows of a block that may be in the sample, with their ranks."""
        if self._random is None:
            return list(block)
        ranks = self._random.random(len(block)).tolist()
        return [example._replace(rank=rank) for example, rank in zip(block, ranks, strict=True) if rank < self._below]

    def add(self, example: Example) -> None:
        """Record that a wanted row was written; the first has the number 0."""
        self._ranks.append(example.rank)
        count = len(self._ranks)
        if self._limit is not None and count >= self._narrowed + max(SAMPLE_BLOCK, self._limit // 4) and count > self._limit:
            self._below = float(np.partition(np.array(self._ranks), self._limit - 1)[self._limit - 1])
            self._narrowed = count

    def order(self) -> NDArray[np.int64]:
        """Return the numbers of the selected rows among those written, in their order."""
        order = np.argsort(np.array(self._ranks), kind="stable")  # without shuffling, all ranks are equal and rows keep their order
        return order[: self._limit].astype(np.int64)


class RowFilter:
    """Selects the documents of a row, and skips or refuses rows that cannot be used."""

    def __init__(self, section: DataSection) -> None:
        self.documents = section.documents_per_row
        self.skipped = 0
        self.copies = 0
        self.not_relevant = 0
        self.short = 0
        self.cut = 0
        self._section = section
        self._lengths = array("i")  # documents of each row that was written, those that are not used included
        self._located: dict[int, tuple[str, int]] = {}  # number of documents -> first row with so many, and those excluded from it

    def usable(self, examples: Iterable[Example]) -> Iterator[Example]:
        """Yield the relevant examples without a flaw."""
        for example in examples:
            if example.not_relevant:
                self.not_relevant += 1
            elif example.flaw:
                self.refuse_or_skip(example.location, example.flaw)
            else:
                yield example

    def select(self, example: Example, contents: Sequence[str | bytes]) -> list[int]:
        """Return the positions of the documents to train on; an empty list if the row is skipped.

        Blank negatives and copies of another document of the row are excluded. Of the others the first ``documents_per_row`` are used, or
        all if negatives are drawn at random, or if the number is not yet known.
        """
        first = {content: position for position, content in reversed(list(enumerate(contents))) if content}
        positions = sorted(first.values())
        excluded = len(contents) - len(positions) + example.excluded
        self.copies += excluded
        if self.documents is not None and not self._enough(len(positions), self.documents):
            if self._section.short == "error":
                raise self._too_short(example.location, len(positions), self.documents, excluded)
            self.skipped += 1
            return []
        self._lengths.append(len(positions))
        self._located.setdefault(len(positions), (example.location, excluded))
        return positions if self._section.negatives == "random" else positions[: self.documents]

    def finish(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Set the number of documents, and count the short rows and the longer ones."""
        if not len(order):
            return order
        lengths = np.array(self._lengths)[order]
        wanted = self.documents = int(lengths.max()) if self.documents is None else self.documents
        enough = np.array([self._enough(length, wanted) for length in lengths.tolist()])
        if not enough.all() and self._section.short == "error":
            documents, (location, excluded) = next(item for item in self._located.items() if item[0] < wanted)
            raise self._too_short(location, documents, wanted, excluded)
        self.skipped += int((~enough).sum())
        order, lengths = order[enough], lengths[enough]
        self.short, self.cut = int((lengths < wanted).sum()), int((lengths > wanted).sum())
        return order

    def _enough(self, documents: int, wanted: int) -> bool:
        """Whether a row with so many documents can be used."""
        return documents >= wanted or self._section.short == "fewer" or (self._section.short == "repeat" and documents > 1)

    def refuse_or_skip(self, location: str, flaw: str) -> None:
        """Count a row that cannot be used."""
        if self._section.short != "skip":
            raise InputError(f"{location}: {flaw}; fix the row, lower data.documents_per_row, or skip such rows with data.short_rows: skip")
        self.skipped += 1

    def _too_short(self, location: str, documents: int, wanted: int, excluded: int) -> InputError:
        why = f" (and {excluded} blank or repeated ones)" if excluded else ""
        others = "repeat" if self._section.score_fields else "fewer or repeat"
        return InputError(
            f"{location}: the row has {documents} documents{why}, {wanted} are needed; fix the row, lower data.documents_per_row, or skip "
            f"such rows with data.short_rows: skip (or use them: {others})"
        )


class NumberedRow(NamedTuple):
    """An example to train on, with the numbers of its texts in the table."""

    example: Example
    query: int
    documents: Sequence[int]
    scores: Sequence[float]


class TextNumbering:
    """Writes the texts of examples that hold their texts."""

    def __init__(self, writer: TableWriter) -> None:
        self._writer = writer

    def number(self, block: Iterable[Example], rows: RowFilter) -> Iterator[NumberedRow]:
        """Write the texts of the usable examples."""
        add, encode = self._writer.add_text, encode_text
        for example in block:
            # Encoders strip white space at the ends of a text.
            if positions := rows.select(example, [text.strip() for text in example.documents]):
                where, texts = example.location, example.documents
                query = add(encode(where, example.query))
                documents = [add(encode(where, texts[position])) for position in positions]
                yield NumberedRow(example, query, documents, _take_values(example.scores, positions))


class TextsById:
    """The texts of a source by id, written into a table."""

    def __init__(self, entries: Iterable[TextEntry], writer: TableWriter, *, source: str, advance: Advance) -> None:
        self.source, self.blank = source, set[int]()
        self._first, self._table = len(writer.texts), KeyTable()
        digests = bytearray()
        for block in blocks(entries):
            for entry in block:
                number = writer.add_text(encode_text(entry.location, entry.text))
                if not entry.text.strip():
                    self.blank.add(number)
                advance(1)
            digests += text_keys([entry.id for entry in block]).tobytes()
        keys = np.frombuffer(digests, KEY) if digests else np.empty(0, KEY)
        self._table.add(keys, np.arange(len(keys)))
        if len(np.unique(keys)) == len(keys):
            return
        first = self._table.find(keys)
        for number in np.flatnonzero(first != np.arange(len(keys))).tolist():
            one, other = writer.digests([self._first + first[number], self._first + number])
            if one != other:
                raise InputError(f"{source}: rows {first[number] + 1} and {number + 1} have the same id and different texts")

    def numbers(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the numbers of the texts with these ids, (B,) for B ids; -1 for an unknown id."""
        positions = self._table.find(text_keys(ids))
        return np.where(positions < 0, -1, positions + self._first)


class IdNumbering:
    """Looks up the texts of examples that hold ids, in the texts of queries and of documents that the table holds."""

    def __init__(self, queries: TextsById, documents: TextsById, writer: TableWriter) -> None:
        self._queries, self._documents, self._writer = queries, documents, writer
        self._first_missing = ""
        self._missing_ids = self._missing_rows = 0

    @classmethod
    def of_section(cls, section: DataSection, writer: TableWriter, advance: Advance) -> IdNumbering:
        """Write the texts of a section with ``format: ids``."""
        if section.queries is None or section.documents is None:
            raise InputError("rows of ids need the sources of their texts: data.queries and data.documents")
        queries, documents = (
            TextsById(read_text_entries(section, sources, field), writer, source=", ".join(sources), advance=advance)
            for sources, field in ((section.queries, section.query_id_field), (section.documents, section.document_id_field))
        )
        return cls(queries, documents, writer)

    def number(self, block: Iterable[Example], rows: RowFilter) -> Iterator[NumberedRow]:
        """Look up the texts of the examples, and yield the usable ones."""
        found = list(self.look_up(list(block)))
        digests = iter(self._writer.digests([number for _, _, numbers in found for number in numbers]))
        for example, query, numbers in found:
            own = zip(numbers, islice(digests, len(numbers)), strict=True)
            contents = [b"" if number in self._documents.blank else digest for number, digest in own]
            if flaw := self.flaw(example, query, numbers[0]):
                rows.refuse_or_skip(example.location, flaw)
            elif positions := rows.select(example, contents):
                yield NumberedRow(example, query, _take_values(numbers, positions), _take_values(example.scores, positions))

    def look_up(self, block: Sequence[Example]) -> Iterator[tuple[Example, int, list[int]]]:
        """Yield examples with the numbers of their query and documents; examples that lack a text are counted for `close`."""
        if not block:
            return
        queries = self._queries.numbers([example.query for example in block])
        documents = self._documents.numbers([key for example in block for key in example.documents])
        ends = np.cumsum([len(example.documents) for example in block])
        for example, query, numbers in zip(block, queries.tolist(), np.split(documents, ends[:-1]), strict=True):
            absent = np.flatnonzero(numbers < 0)
            if query >= 0 and not len(absent):
                yield example, query, numbers.tolist()
                continue
            what, texts = ("query", self._queries) if query < 0 else ("document", self._documents)
            key = example.query if query < 0 else example.documents[absent[0]]
            self._first_missing = self._first_missing or f"{example.location}: {what} '{key}' is not in {texts.source}"
            self._missing_ids += (query < 0) + len(absent)
            self._missing_rows += 1

    def flaw(self, example: Example, query: int, positive: int) -> str:
        """Return why an example cannot be used: a blank query or positive; otherwise an empty string."""
        for number, texts, key in ((query, self._queries, example.query), (positive, self._documents, example.documents[0])):
            if number in texts.blank:
                return f"the text of '{key}' in {texts.source} is blank"
        return ""

    def close(self) -> None:
        """Check that no text was missing."""
        if self._missing_rows:
            raise InputError(f"{self._first_missing}; in all {self._missing_ids:,} ids of {self._missing_rows:,} rows have no text")


def _take_values(values: Sequence[Value], positions: Sequence[int]) -> list[Value]:
    """Values at positions; empty if there are no values."""
    return [values[position] for position in positions] if values else []


def build_table(section: DataSection, folder: Path, *, seed: int, advance: Advance) -> RowCounts:
    """Write the table of a data section."""
    with TableWriter(folder) as writer:
        if section.format == "beir":
            return _write_rows(section, *_open_beir(section, writer, advance), writer, seed=seed)
        by_ids = section.format == "ids"
        numbering = IdNumbering.of_section(section, writer, advance) if by_ids else TextNumbering(writer)
        return _write_rows(section, read_examples(section, advance), numbering, writer, seed=seed)


def build_pairs(section: DataSection, pairs: Iterable[Pair], folder: Path, *, seed: int) -> RowCounts:
    """Write the table of mined docstring pairs."""
    with TableWriter(folder) as writer:
        examples = (Example(pair.id, pair.query, [pair.code], []) for pair in pairs)
        return _write_rows(section, examples, TextNumbering(writer), writer, seed=seed)


def _write_rows(
    section: DataSection, examples: Iterator[Example], numbering: TextNumbering | IdNumbering, writer: TableWriter, *, seed: int
) -> RowCounts:
    rows = RowFilter(section)
    sample = RowSample(shuffle=section.shuffle, limit=section.limit, seed=seed)
    while block := list(islice(examples, sample.next_rows)):
        for row in numbering.number(rows.usable(sample.wanted(block)), rows):
            writer.add_row(row.query, row.documents, row.scores)
            sample.add(row.example)
    if isinstance(numbering, IdNumbering):
        numbering.close()
    order = rows.finish(sample.order())
    if not len(order) or rows.documents is None:
        counts = [f"{rows.skipped:,} skipped"] * bool(rows.skipped) + [f"{rows.not_relevant:,} not relevant"] * bool(rows.not_relevant)
        why = f" ({', '.join(counts)})" if counts else ""
        raise InputError(f"data.train: no rows in {', '.join(section.train)}{why}")
    found = writer.finish(order)
    return RowCounts(rows.documents, len(order), rows.skipped, rows.copies, rows.not_relevant, rows.short, rows.cut, found)


def _open_beir(section: DataSection, writer: TableWriter, advance: Advance) -> tuple[Iterator[Example], IdNumbering]:
    """One example per relevant document of BEIR folders, in the order of the judgements; documents that a corpus lacks are left out."""
    collections = {folder: load_collection(expand_home(folder), section.split, duplicates="max") for folder in section.train}
    for folder, collection in collections.items():
        if collection.missing:
            logger.warning("%s (%s): %s; not trained on", folder, section.split, describe_missing(collection))

    def examples() -> Iterator[Example]:
        for folder, collection in collections.items():
            missing = frozenset(collection.missing)
            for query, judged in collection.qrels.items():
                advance(1)
                for document, grade in judged.items():
                    if grade > 0 and document not in missing:
                        yield Example(f"{folder} ({section.split})", f"{folder}/{query}", [f"{folder}/{document}"], [])

    # With the folder's name, since two collections may use the same ids.
    queries = (TextEntry(folder, f"{folder}/{one.id}", one.text) for folder, each in collections.items() for one in each.queries)
    documents = (TextEntry(folder, f"{folder}/{one.id}", one.content()) for folder, each in collections.items() for one in each.documents)
    by_id = (TextsById(texts, writer, source=", ".join(section.train), advance=advance) for texts in (queries, documents))
    return examples(), IdNumbering(next(by_id), next(by_id), writer)


def prepare_rows(
    data: DataSection, work: Path, *, seed: int, progress: bool = False, mine_pairs: Callable[..., Sequence[Pair]] = mine
) -> TrainingRows:
    """Prepare the rows of a recipe under ``work``, or open them; of several processes one prepares and the others wait for it."""
    seeded = data.shuffle or data.negatives == "random"
    key = _key([data.model_dump(), seed if seeded else None, source_stamps(data)])

    def build(folder: Path) -> RowCounts:
        if STDLIB_DOCSTRINGS in data.train:
            return build_pairs(data, split_pairs(mine_pairs(progress=progress)).train, folder, seed=seed)
        with progress_bar("reading rows", count_rows(_sources(data)) if progress else None, enabled=progress) as advance:
            return build_table(data, folder, seed=seed, advance=advance)

    rows = _make_rows(work, key, build, data, seed=seed)
    counts, wanted = rows.counts, rows.documents_per_row
    if counts.rows_short and is_main_process():
        level = logging.WARNING if data.short_rows is None else logging.INFO  # a warning where the recipe does not say what to do with them
        text = "%d of %d rows have fewer than %d documents; data.short_rows: %s"
        logger.log(level, text, counts.rows_short, counts.rows, wanted, data.short)
    if counts.rows_cut and is_main_process():
        logger.info("%d of %d rows have more than %d documents; data.negatives: %s", counts.rows_cut, counts.rows, wanted, data.negatives)
    if (counts.skipped or counts.not_relevant) and is_main_process():
        logger.info("%d rows were skipped, %d left out by their label", counts.skipped, counts.not_relevant)
    return rows


def rows_of_pairs(pairs: Sequence[Pair], work: Path) -> TrainingRows:
    """Prepare mined docstring pairs as training rows, query and function, in their order."""
    key = _key([[pair.query, pair.code] for pair in pairs])
    section = DataSection(train=(STDLIB_DOCSTRINGS,))
    return _make_rows(work, key, lambda folder: build_pairs(section, pairs, folder, seed=0), section, seed=0)


def discard_rows(work: Path) -> None:
    """Delete the rows that `prepare_rows` has written to a folder, and the folder if it is empty then."""
    if not work.is_dir():
        return
    for path in work.iterdir():
        if (path / RECORD).is_file() and str(read_json(path / RECORD).get("schema")).startswith("quiver-rows/"):
            shutil.rmtree(path)
            (work / f".{path.name}.lock").unlink(missing_ok=True)
    if not any(work.iterdir()):
        work.rmdir()


def _make_rows(work: Path, key: str, build: Callable[[Path], RowCounts], data: DataSection, *, seed: int) -> TrainingRows:
    """Open the table of a key; build it if it is missing or damaged, while other processes wait."""

    def write(part: SealedFolder) -> None:
        gc.freeze()  # otherwise collections traverse all loaded modules while rows are read, which takes a quarter of the time
        try:
            counts = build(part.folder)
        finally:
            gc.unfreeze()
        part.about["counts"] = counts._asdict()
        logger.info("%s: prepared %d rows, skipped %d", work / key, counts.rows, counts.skipped)

    sealed = SealedFolders(work, _SCHEMA, RECORD).make(key, write, doing="preparing rows there", redo="preparing the rows again")
    repeats = data.short == "repeat"
    drawn = seed if data.negatives == "random" or repeats else None
    counts = RowCounts(**sealed.about["counts"])
    return TrainingRows(Table(sealed.folder), counts, scored=bool(data.score_fields), seed=drawn, repeats=repeats)


def _sources(data: DataSection) -> list[str]:
    """Sources of rows and texts by id; empty for docstrings and BEIR folders."""
    if STDLIB_DOCSTRINGS in data.train or data.format == "beir":
        return []
    return [*data.train, *(data.queries or ()), *(data.documents or ())]


def source_stamps(data: DataSection) -> list[object]:
    """Path, size and modification time of each source file; for docstrings the version of Python. An InputError for one that is missing."""
    if STDLIB_DOCSTRINGS in data.train:
        return [platform.python_version()]
    if data.format == "beir":
        folders = [expand_home(folder) for folder in data.train]
        files = [
            file
            for folder in folders
            for file in (find_jsonl(folder, "corpus"), find_jsonl(folder, "queries"), find_split(folder, data.split))
        ]
    else:
        files = [file for source in _sources(data) for file in source_files(source)]
    try:
        return [[str(file.resolve()), (found := file.stat()).st_size, found.st_mtime_ns] for file in files]
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _key(value: object) -> str:
    return sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()[:32]
