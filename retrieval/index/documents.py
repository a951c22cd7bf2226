"""Segments of an index: a table of documents in Arrow files and the vectors of an engine, row by row; and the hits of segments.

    ids.arrow       id, tokens (4 times the tokens, + 2 if truncated, + 1 if empty), row (the rows in ascending order of their ids), rank
    fields.arrow    one column per field of the documents' metadata that filters can test, of the type that the index gives it
    texts.arrow     title, text, and all metadata as JSON, exactly as it was given

The bytes do not depend on how the documents were added or merged.

Shapes: P documents of a segment, k hits.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.entries import LIST, STRING, ColumnTypes, OnTypeError, as_id, parse_types, typed_value
from quiver.retrieval.index.columns import (
    LOOK,
    Column,
    ColumnBatches,
    ColumnWriter,
    StringColumn,
    arrow_type,
    binary_column,
    concat_columns,
    lengths_of,
    number_column,
    numbers_of,
    open_columns,
    to_column,
    truths_of,
    with_words,
    write_columns,
)
from quiver.retrieval.index.engines import AnyCodec, AnySegment, Bitmap, Found, in_order
from quiver.retrieval.index.files import DamagedIndexError, Disk, Files, MemoryDisk, missing_file
from quiver.retrieval.index.filters import Columns
from quiver.retrieval.index.store.reading import Policy, total_counts
from quiver.retrieval.records import Document, Hits, TextTokens, TokenCounts, Value

logger = logging.getLogger(__name__)

SOURCES = frozenset({"file", "document"})
"""Fields of passages that say what they were cut from; an index always keeps them, for groups and refreshes."""

DOCUMENT_BYTES = 256
"""Maximum memory per document for writing or merging, in bytes, without its id and fields."""

DESCRIBED_COPIES = 12
"""Maximum memory for ids and fields while writing or merging, as a multiple of the size of their files (`is_described`)."""

_IDS, _FIELDS, _TEXTS = "ids", "fields", "texts"
_BATCH_ROWS, _BATCH_BYTES = 4096, 8 << 20  # of texts
_SEARCHED = 2000  # an id is searched for among the sorted ids in the time in which so many rows are compared with a table of ids
_FEW_IDS = 3  # ids that are found faster one by one, in tables of any size: documents of hits are read one by one

TEXTS_FILE = f"{_TEXTS}.arrow"
"""Name of the file of the texts."""

_PLAIN = {"string": str, "integer": int, "number": float, "boolean": bool}


def keeps_field(fields: Sequence[str] | None, name: str) -> bool:
    """Whether filters can test a field, if only ``fields`` are kept for them; None for all."""
    return fields is None or name in SOURCES or name in fields


def is_described(name: str) -> bool:
    """Whether a file holds ids or fields, so that its size does not follow from the number of documents."""
    return name in (f"{_IDS}.arrow", f"{_FIELDS}.arrow")


class IdTable:
    """The ids of a segment's P documents, of the columns of ``ids.arrow``; ``strings`` has them by row."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = columns
        self.strings = columns["id"].strings

    @classmethod
    def of(cls, ids: Sequence[str]) -> IdTable:
        """Create a table of unique ids in memory."""
        disk, folder = MemoryDisk(), Path("ids")
        _write_ids(folder, to_column(ids, STRING), np.zeros(len(ids), np.uint32), disk)
        return cls(open_columns(Files.written(folder, disk), _IDS)[0])

    @property
    def ranks(self) -> NDArray[np.uint32]:
        """The rank of each id in ascending order, (P,)."""
        return self._columns["rank"].numbers.whole()

    @property
    def array(self) -> pa.Array:
        """The ids by row."""
        return self._columns["id"].array

    def __len__(self) -> int:
        return len(self.strings)

    def rows_of(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """The row of each id, (len(ids),); -1 if the segment has no such document. An integer means the string of its digits, as in files.

        Raises:
            InputError: An id is neither a string nor an integer.
            DamagedIndexError: The table is damaged.
        """
        keys = [(key if type(key) is str else as_id(key)).encode("utf-8", "surrogatepass") for key in ids]
        if len(keys) <= _FEW_IDS or len(keys) * _SEARCHED < len(self):
            return np.array([self._row_of(key) for key in keys], np.int64)
        wanted = binary_column(keys, self.array.type).dictionary_encode()
        numbers = pc.index_in(self.array, value_set=wanted.dictionary)
        there = np.flatnonzero(truths_of(numbers.is_valid()))
        rows = np.full(len(wanted.dictionary), -1)
        rows[numbers_of(numbers)[there]] = there
        found: NDArray[np.int64] = rows[numbers_of(wanted.indices)]
        return found

    def _row_of(self, key: bytes) -> int:
        order = self._columns["row"].numbers
        try:
            place = bisect_left(range(len(self)), key, key=lambda rank: self.strings.bytes_of(order.item(rank)))
            row = int(order.item(place)) if place < len(self) else -1
            return row if row >= 0 and self.strings.bytes_of(row) == key else -1
        except IndexError as error:
            raise DamagedIndexError(f"the table of ids refers to a row that does not exist; {LOOK}") from error

    def token_counts(self, rows: NDArray[np.bool_]) -> TokenCounts:
        """Total token counts of chosen documents, (P,)."""
        packed = numbers_of(self._columns["tokens"].select(rows))
        tokens = int((packed >> 2).sum(dtype=np.int64))
        return TokenCounts(len(packed), tokens, int(np.count_nonzero(packed & 2)), int(np.count_nonzero(packed & 1)))

    def select(self, keep: NDArray[np.bool_]) -> tuple[pa.Array, NDArray[np.uint32]]:
        """Ids and packed token counts of chosen rows."""
        return self._columns["id"].select(keep), numbers_of(self._columns["tokens"].select(keep))

    def lost(self) -> NDArray[np.bool_]:
        """Rows whose id or token count is lost with a damaged block, (P,)."""
        return self._columns["id"].lost() | self._columns["tokens"].lost()


def _write_ids(folder: Path, ids: pa.Array, tokens: NDArray[np.uint32], disk: Disk) -> dict[str, str]:
    rows = numbers_of(pc.sort_indices(ids)).astype(np.uint32)
    ranks = np.empty(len(rows), np.uint32)
    ranks[rows] = np.arange(len(rows), dtype=np.uint32)
    columns = {"id": concat_columns([ids]), "tokens": number_column(tokens), "row": number_column(rows), "rank": number_column(ranks)}
    return write_columns(folder, _IDS, columns, disk, "ids and token counts of the documents, and their order by id")


class Texts:
    """The stored documents by row, in the batches of ``texts.arrow``; they stay on disk."""

    def __init__(self, batches: ColumnBatches, ids: IdTable) -> None:
        self._batches = batches
        self._ends = list(accumulate(batches.rows("text")))
        self._ids = ids

    def __getitem__(self, row: int) -> Document:
        batch, place = self._find(row)
        metadata = batch["metadata"].at(place)
        try:
            fields = None if metadata is None else json.loads(metadata)
        except ValueError as error:
            raise DamagedIndexError(f"the fields of a document are not JSON ({error}); {LOOK}") from error
        return Document(self._ids.strings[row], batch["text"].at(place), batch["title"].at(place), fields)

    def content(self, row: int, *, use_title: bool) -> str:
        """The text of a document as it was encoded, see `Document.content`."""
        batch, place = self._find(row)
        return Document("", batch["text"].at(place), batch["title"].at(place)).content(use_title=use_title)

    def _find(self, row: int) -> tuple[Mapping[str, Column], int]:
        number = bisect_right(self._ends, row)
        return self._batches[number], row - (self._ends[number - 1] if number else 0)

    def batches(self, keep: NDArray[np.bool_]) -> Iterator[dict[str, pa.Array]]:
        """The columns of chosen rows, batch by batch."""
        for number, part in enumerate(np.split(keep, self._ends[:-1])):
            yield {name: column.select(part) for name, column in self._batches[number].items()}

    def lost(self) -> NDArray[np.bool_]:
        """Rows whose text is lost with a damaged block, (P,)."""
        batches = (self._batches[number] for number in range(len(self._batches)))
        return np.concatenate([np.logical_or.reduce([column.lost() for column in columns.values()]) for columns in batches])


def fit_field(value: Value | Sequence[Value], kind: str) -> Any:
    """The value of a field as its column holds it, in a field of lists always a list; raises ValueError if it does not fit."""
    values: Sequence[Value] = [value] if isinstance(value, str | int | float) else value
    if kind.endswith(LIST):
        return [typed_value(each, kind.removesuffix(LIST)) for each in values]
    if not isinstance(value, str | int | float):
        raise ValueError("a list in a field of single values")
    return typed_value(value, kind)


def _to_array(values: list[Any], kind: str) -> pa.Array:
    """The column of a field; a value that does not fit is null, which `FieldCheck` has counted."""
    element = _PLAIN.get(kind.removesuffix(LIST))
    plain = {type(None), list} if kind.endswith(LIST) else {type(None), element}
    if set(map(type, values)) <= plain and (element in plain or {type(one) for each in values if each for one in each} <= {element}):
        with suppress(OverflowError):  # an integer of more than 64 bits
            return to_column(values, kind)
    fitted: list[Any] = [None] * len(values)
    for row, value in enumerate(values):
        if value is not None:
            with suppress(ValueError):
                fitted[row] = fit_field(value, kind)
    return to_column(fitted, kind)


class DocumentTableWriter:
    """Writes the documents of a segment, with their texts if ``texts`` says so; ids and fields are kept in memory."""

    def __init__(self, folder: Path, disk: Disk, *, texts: bool, types: Mapping[str, str]) -> None:
        self._folder, self._disk = folder, disk
        self._texts = _TextWriter(folder, disk) if texts else None
        self._types = dict(sorted(types.items()))
        self._ids: list[pa.Array] = []
        self._tokens: list[NDArray[np.uint32]] = []
        self._fields: dict[str, list[pa.Array]] = {name: [] for name in self._types}

    def add(self, documents: Sequence[Document], tokens: TextTokens) -> None:
        """Append documents, whose ids must be unique in the segment, with their token counts."""
        if not documents:
            return
        self._ids.append(to_column([document.id for document in documents], STRING))
        packed = tokens.tokens.astype(np.uint32) << 2 | tokens.truncated.astype(np.uint32) << 1 | tokens.empty.astype(np.uint32)
        self._tokens.append(packed.astype(np.uint32))
        fields = [document.metadata or {} for document in documents]
        for name, kind in self._types.items():
            self._fields[name].append(_to_array([each.get(name) for each in fields], kind))
        if self._texts is not None:
            given = [json.dumps(dict(each), ensure_ascii=False) if each else None for each in fields]
            text: dict[str, list[Any]] = {
                "title": [each.title for each in documents],
                "text": [each.text for each in documents],
                "metadata": given,
            }
            self._texts.add({name: to_column(values, STRING) for name, values in text.items()})

    def close(self) -> dict[str, str]:
        """Finish the files; return what each holds, by name."""
        holds = _write_ids(self._folder, concat_columns(self._ids), np.concatenate(self._tokens), self._disk)
        holds |= _write_fields(self._folder, self._fields, self._disk)
        return holds | (self._texts.close() if self._texts is not None else {})


def _write_fields(folder: Path, fields: Mapping[str, Sequence[pa.Array]], disk: Disk) -> dict[str, str]:
    """Write the columns of the fields that some document has."""
    columns = {name: with_words(concat_columns(parts)) for name, parts in sorted(fields.items())}
    there = {name: column for name, column in columns.items() if column.null_count < len(column)}
    return write_columns(folder, _FIELDS, there, disk, "the fields of the documents that filters can test")


class _TextWriter:
    """Writes texts in batches whose sizes depend on nothing but the texts."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._writer = ColumnWriter(folder, _TEXTS, disk)
        self._parts: list[dict[str, pa.Array]] = []
        self._rows = self._bytes = 0

    def add(self, columns: Mapping[str, pa.Array]) -> None:
        count = len(columns["text"])
        sizes = [lengths_of(column) for column in columns.values()]
        lengths: NDArray[np.int64] = np.sum(sizes, axis=0, dtype=np.int64)
        start = 0
        while start < count:
            filled = self._bytes + np.cumsum(lengths[start : start + _BATCH_ROWS - self._rows])
            taken = min(int(np.searchsorted(filled, _BATCH_BYTES)) + 1, len(filled))
            self._parts.append({name: column.slice(start, taken) for name, column in columns.items()})
            start, self._rows, self._bytes = start + taken, self._rows + taken, int(filled[taken - 1])
            if self._rows == _BATCH_ROWS or self._bytes >= _BATCH_BYTES:
                self._flush()

    def _flush(self) -> None:
        self._writer.write({name: pa.concat_arrays([part[name] for part in self._parts]) for name in self._parts[0]})
        self._parts, self._rows, self._bytes = [], 0, 0

    def close(self) -> dict[str, str]:
        if self._parts:
            self._flush()
        return self._writer.close("titles and texts of the documents, and their metadata as JSON")


class DocumentTable:
    """The documents of a segment, opened; of files that searches do not need, an error is raised when they are read.

    Args:
        ids: The ids.
        fields: Columns of the fields, in one batch, or the error that prevents reading them; None if there are none.
        texts: Batches of texts, or the error; None if texts are not stored.
        types: Types that the index gives the fields.
    """

    def __init__(
        self,
        ids: IdTable,
        fields: ColumnBatches | DamagedIndexError | None,
        texts: ColumnBatches | DamagedIndexError | None,
        types: Mapping[str, str],
    ) -> None:
        self.ids = ids
        self._fields, self._texts, self._types = fields, texts, types

    @classmethod
    def open(cls, files: Files, count: int, *, texts: bool, types: Mapping[str, str]) -> DocumentTable:
        """Open what a `DocumentTableWriter` wrote; values are read as the types that the index gives their fields.

        Raises:
            FileNotFoundError: A file is missing.
            DamagedIndexError: A file of the ids is inconsistent with the others.
        """
        ids = IdTable(_open_batches(files, _IDS, "id", count)[0])
        return cls(ids, _open_optional(files, _FIELDS), _open_optional(files, _TEXTS, "text", count) if texts else None, types)

    @cached_property
    def texts(self) -> Texts | None:
        """The texts; None if they are not stored. Raises DamagedIndexError if their files are damaged."""
        return None if self._texts is None else Texts(_unless_damaged(self._texts), self.ids)

    @property
    def fields(self) -> Mapping[str, Column]:
        """Columns of the fields by name. Raises DamagedIndexError if their file is damaged."""
        return {} if self._fields is None else _unless_damaged(self._fields)[0]

    @cached_property
    def columns(self) -> Columns:
        """The columns for filters, the ids among them."""
        return Columns(len(self), self.column, self.ids.rows_of)

    def column(self, field: str) -> pa.Array | None:
        """A column as its type in the index; None if no document of the segment has the field."""
        if field == "id" and field not in self._types:
            return self.ids.array
        column = self.fields.get(field)
        if column is None or self._types.get(field, column.kind) == column.kind:
            return None if column is None else column.array
        return _as_type(column.array, self._types[field])

    def lost(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Rows whose id, whose text, and of which a field is lost with damaged files, (P,) each."""
        nothing, everything = np.zeros(len(self), bool), np.ones(len(self), bool)
        try:
            texts = nothing if self._texts is None else Texts(_unless_damaged(self._texts), self.ids).lost()
        except DamagedIndexError:
            texts = everything
        try:
            fields = np.logical_or.reduce([nothing, *(column.lost() for column in self.fields.values())])
        except DamagedIndexError:
            fields = everything
        return self.ids.lost(), texts, fields

    def select(self, field: str, keep: NDArray[np.bool_]) -> pa.Array:
        """The values of chosen rows in a column, as its type in the index."""
        kind, column = self._types[field], self.fields.get(field)
        return pa.nulls(int(np.count_nonzero(keep)), arrow_type(kind)) if column is None else _as_type(column.select(keep), kind)

    def __len__(self) -> int:
        return len(self.ids)


def _as_type(array: pa.Array, kind: str) -> pa.Array:
    """A column as another type that its field has got since it was written."""
    element = arrow_type(kind.removesuffix(LIST))
    values = array.values if pa.types.is_list(array.type) else array
    if values.type == element or (kind.removesuffix(LIST) == STRING and pa.types.is_large_string(values.type)):
        return array if pa.types.is_list(array.type) == kind.endswith(LIST) else _as_lists(array)
    if element == pa.string() and (pa.types.is_timestamp(values.type) or pa.types.is_floating(values.type)):
        # As they are given and shown: Arrow writes 2021-06-01 08:30:00.000000 and 2.
        written = [each if each is None else each.isoformat() if hasattr(each, "isoformat") else str(each) for each in values.to_pylist()]
        values = to_column(written, STRING)
    else:
        values = values.cast(element, safe=False)
    if not pa.types.is_list(array.type):
        return _as_lists(values) if kind.endswith(LIST) else values
    return pa.ListArray.from_arrays(array.offsets, values, mask=array.is_null() if array.null_count else None)


def _as_lists(array: pa.Array) -> pa.Array:
    offsets = np.append(0, np.cumsum(truths_of(array.is_valid()), dtype=np.int32)).astype(np.int32)
    return pa.ListArray.from_arrays(number_column(offsets), array.drop_null(), mask=array.is_null() if array.null_count else None)


def _open_batches(files: Files, stem: str, column: str = "", count: int = 0) -> ColumnBatches:
    """Open columns, and check the number of rows by one of them."""
    batches = ColumnBatches(files, stem)
    if column and (found := sum(batches.rows(column))) != count:
        raise DamagedIndexError(f"{files.folder / stem}.arrow: {found} rows, but {count} were written; run quiver index repair")
    return batches


def _open_optional(files: Files, stem: str, column: str = "", count: int = 0) -> ColumnBatches | DamagedIndexError:
    """Open immediately what searches do not need, so that it stays readable when a writer removes it; return the error if it is damaged."""
    try:
        return _open_batches(files, stem, column, count)
    except FileNotFoundError as error:
        if not files.folder.is_dir():  # a writer has just removed the whole segment
            raise
        return missing_file(Path(error.filename))
    except DamagedIndexError as error:
        return error


def _unless_damaged(batches: ColumnBatches | DamagedIndexError) -> ColumnBatches:
    if isinstance(batches, DamagedIndexError):
        raise DamagedIndexError(str(batches))
    return batches


def merge_documents(parts: Sequence[tuple[DocumentTable, NDArray[np.bool_]]], folder: Path, disk: Disk) -> dict[str, str]:
    """Merge the documents of segments, keeping chosen rows in order; the bytes equal those of a segment written at once.

    All segments have texts, or none. Returns what each file holds, by name.
    """
    holds: dict[str, str] = {}
    if parts[0][0].texts is not None:
        writer = _TextWriter(folder, disk)
        for table, keep in parts:
            if table.texts is None:
                raise ValueError("a segment with texts cannot be merged with one without")
            for columns in table.texts.batches(keep):
                writer.add(columns)
        holds |= writer.close()
    selected = [table.ids.select(keep) for table, keep in parts]
    ids = concat_columns([each.cast(pa.large_string()) for each, _ in selected])
    holds |= _write_ids(folder, ids, np.concatenate([tokens for _, tokens in selected]), disk)
    names = dict.fromkeys(name for table, _ in parts for name in table.fields)
    return holds | _write_fields(folder, {name: [table.select(name, keep) for table, keep in parts] for name in names}, disk)


def rows_by_value(tables: Sequence[DocumentTable], field: str) -> dict[str, list[tuple[int, NDArray[np.int64]]]]:
    """Value of a field, such as the path of a file -> the number of each table that has it with its rows; empty without the field."""
    found: dict[str, list[tuple[int, NDArray[np.int64]]]] = {}
    for number, table in enumerate(tables):
        column = table.column(field)
        if column is None or not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            continue
        encoded = column.dictionary_encode()
        codes = numbers_of(encoded.indices).copy()
        codes[~truths_of(encoded.is_valid())] = -1
        order = np.argsort(codes, kind="stable")
        starts = np.searchsorted(codes[order], np.arange(len(encoded.dictionary) + 1))
        for value, name in enumerate(encoded.dictionary.to_pylist()):
            found.setdefault(name, []).append((number, order[starts[value] : starts[value + 1]]))
    return found


def shared_ids(one: tuple[IdTable, NDArray[np.bool_]], other: tuple[IdTable, NDArray[np.bool_]]) -> int:
    """Number of ids that two tables have in common among chosen rows, (P,) each."""
    mine, theirs = (table.select(keep)[0].cast(pa.large_string()) for table, keep in (one, other))
    return pc.sum(pc.is_in(mine, value_set=theirs)).as_py() or 0


class FieldCheck:
    """Checks that the values of documents fit the types of their fields, and infers the types of other fields.

    Args:
        known: Type of each field that is declared, or that an index has.
        on_type_error: ``error``, or ``null`` to store no value for filters.
        is_index: Whether the types are those of an index, where integers may become numbers.
    """

    def __init__(self, known: Mapping[str, str] | None = None, on_type_error: OnTypeError = "error", *, is_index: bool = False) -> None:
        if on_type_error not in get_args(OnTypeError):
            raise InputError(f"on_type_error: pass 'error' or 'null', got {on_type_error!r}")
        self._known, self._on_type_error, self._is_index = parse_types(known or {}), on_type_error, is_index
        self._there: set[str] = set(self._known) if is_index else set()
        self._inferred = ColumnTypes()
        self._nulls: dict[str, tuple[int, str]] = {}  # field -> number of values that do not fit, id of the first document with one

    def add(self, document: Document) -> None:
        """Check a document; raises InputError for a value that does not fit, and names document, field and type."""
        if not document.metadata:
            return
        if self._known:
            for field in self._known.keys() & document.metadata.keys():
                self._there.add(field)
                self._check(document.id, field, document.metadata[field])
        self._inferred.add_fields({name: value for name, value in document.metadata.items() if name not in self._known})

    def _check(self, key: str, field: str, value: Value | Sequence[Value]) -> None:
        kind = self._known[field]
        if self._fits(value, kind):
            return
        wider = kind.replace("integer", "number")
        if self._is_index and wider != kind and not isinstance(value, str) and self._fits(value, wider):
            self._known[field] = wider
        elif self._on_type_error == "null":
            count, first = self._nulls.get(field, (0, key))
            self._nulls[field] = count + 1, first
        else:
            raise InputError(
                f"document '{key}': the field '{field}' is of type {kind}, got {_shorten(value)}; declare another type (--type"
                f" {field}=string, types=), or store no value for filters (--on-type-error null, on_type_error='null')"
            )

    def types(self) -> dict[str, str]:
        """Type of each field that the documents, or the index, have."""
        found = {name: kind for name, kind in self._known.items() if name in self._there} | self._inferred.types()
        # Paths and ids that look like dates are none.
        return {name: STRING if name in SOURCES and kind in ("date", "timestamp") else kind for name, kind in found.items()}

    def tell_nulls(self) -> None:
        """Warn of the values that did not fit."""
        for field, (count, first) in self._nulls.items():
            values = f"1 value does not fit the type {self._known[field]} (document '{first}'); no filter finds it"
            if count > 1:
                values = f"{count:,} values do not fit the type {self._known[field]} (the first: document '{first}'); no filter finds them"
            logger.warning("field '%s': %s", field, values)

    @staticmethod
    def _fits(value: Value | Sequence[Value], kind: str) -> bool:
        try:
            fit_field(value, kind)
        except ValueError:
            return False
        return True


def widened_types(path: Path, known: Mapping[str, str], declared: Mapping[str, str]) -> dict[str, str]:
    """The types of an index with others that are declared for its fields or for new ones; raises InputError if its values would not fit."""
    for field, kind in parse_types(declared).items():
        old = known.get(field, kind)
        wider = {old, STRING} | ({"number"} if old == "integer" else set())
        if kind not in wider | {each + LIST for each in wider if not each.endswith(LIST)} or (old.endswith(LIST) and kind == STRING):
            raise InputError(f"{path}: the field '{field}' is of type {old} and cannot become {kind}; build the index again to change it")
    return {**known, **declared}


def _shorten(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


class PartHits(Protocol):
    """Hits of one part for one query, best first."""

    @property
    def scores(self) -> NDArray[np.float32]:
        """Scores, (n,) with n <= k."""

    def names(self, kept: Bitmap | None) -> Sequence[str]:
        """Ids of the hits, (n,); with ``kept``, only those where it is true. The merge reads only the ids that it needs."""


@dataclass(frozen=True)
class SegmentHits:
    """Hits of a segment for one query; ids are read from the segment's file on access."""

    strings: StringColumn
    found: Found

    @property
    def scores(self) -> NDArray[np.float32]:
        """Scores, (n,)."""
        return self.found.scores

    def names(self, kept: Bitmap | None) -> Sequence[str]:
        """Ids of all hits, or of those that are kept, (n,)."""
        return self.strings.take(self.found.rows if kept is None else self.found.rows[kept])


@dataclass(frozen=True)
class NamedHits:
    """Hits for one query with ids in memory."""

    ids: Sequence[str]
    scores: NDArray[np.float32]

    def names(self, kept: Bitmap | None) -> Sequence[str]:
        """Ids of all hits, or of those that are kept, (n,)."""
        return self.ids if kept is None else [*compress(self.ids, kept.tolist())]


def merged(found: Sequence[Sequence[PartHits]], k: int) -> Hits:
    """Merge the hits of several parts into at most k of each query; ``found`` has the hits of the parts of each query, in any order.

    Example:
        >>> left, right = NamedHits(["b", "c"], np.float32([2, 1])), NamedHits(["d", "a"], np.float32([1, 1]))
        >>> hits = merged([[left, right]], 3)
        >>> hits.ids, hits.scores[0].tolist()
        ([['b', 'd', 'c']], [2.0, 1.0, 1.0])
    """
    best = [_merge_parts(parts, k) for parts in found]
    return Hits([ids for ids, _ in best], [scores for _, scores in best])


def _merge_parts(parts: Sequence[PartHits], k: int) -> tuple[Sequence[str], NDArray[np.float32]]:
    if len(parts) == 1:
        return parts[0].names(None), parts[0].scores
    scores = np.concatenate([np.zeros(0, np.float32), *(part.scores for part in parts)])
    if not len(scores):
        return [], scores
    lowest = np.partition(scores, len(scores) - k)[len(scores) - k] if len(scores) > k else -np.inf
    names: list[str] = []
    for part in parts:
        names += part.names(part.scores >= lowest)
    kept = scores[scores >= lowest]
    ids = np.array(names, object)
    rows, ordered = in_order(np.arange(len(kept)), kept, k, ids=ids)
    return ids[rows].tolist(), ordered


@dataclass(frozen=True)
class OpenSegment:
    """A segment opened for searching.

    Attributes:
        documents: Ids, texts and metadata by row.
        vectors: The engine's segment.
        alive: Rows that are not deleted; None if none is deleted.
    """

    documents: DocumentTable
    vectors: AnySegment
    alive: Bitmap | None

    @property
    def kept(self) -> Bitmap:
        """The rows that are not deleted, (P,)."""
        return np.ones(len(self.documents), bool) if self.alive is None else self.alive

    def rows_of(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """The row of each id; -1 if the document does not exist or is deleted."""
        rows = self.documents.ids.rows_of(ids)
        return rows if self.alive is None else np.where(self.alive[rows] & (rows >= 0), rows, -1)


@dataclass(frozen=True)
class Contents:
    """Counts of a segment, those of deleted documents included, and a description of each file by name."""

    documents: int
    vectors: int
    tokens: TokenCounts
    holds: Mapping[str, str]


class SegmentFolderWriter:
    """Writes a segment into an empty folder, a chunk of documents at a time, with their texts if ``texts`` says so."""

    def __init__(self, folder: Path, codec: AnyCodec, disk: Disk, *, texts: bool, types: Mapping[str, str]) -> None:
        self._documents = DocumentTableWriter(folder, disk, texts=texts, types=types)
        self._vectors = codec.writer(folder, disk)
        self._folder, self._codec, self._disk = folder, codec, disk
        self._counts = TokenCounts(0, 0, 0, 0)
        self.documents = 0

    def add(
        self,
        documents: Sequence[Document],
        vectors: NDArray[np.float32],
        lengths: NDArray[np.int64] | None,
        token_ids: NDArray[Any] | None,
        tokens: TextTokens,
    ) -> None:
        """Append documents with their vectors, whose similarity is the inner product."""
        self._documents.add(documents, tokens)
        self._vectors.add(vectors, lengths, token_ids)
        self._counts = total_counts([self._counts, tokens.total()])
        self.documents += len(documents)

    def close(self) -> Contents:
        """Finish the files."""
        holds = {**self._documents.close(), **self._vectors.close()}
        # An engine may keep fewer vectors than it was given.
        kept = int(self._codec.open(Files.written(self._folder, self._disk), self.documents).lengths.sum())
        return Contents(self.documents, kept, self._counts, holds)


def open_segment(files: Files, codec: AnyCodec, count: int, policy: Policy, *, alive: Bitmap | None = None) -> OpenSegment:
    """Open a segment of ``count`` documents; ``alive`` has the rows that are not deleted.

    Raises:
        FileNotFoundError: A file is missing.
        InputError: The files are inconsistent.
    """
    documents = DocumentTable.open(files, count, texts=policy.store_text, types=policy.types)
    return OpenSegment(documents, codec.open(files, count), alive)


def merge_segments(parts: Sequence[OpenSegment], codec: AnyCodec, folder: Path, disk: Disk) -> Contents:
    """Merge segments into one in an empty folder, without their deleted documents; nothing is encoded again."""
    kept = [(part, part.kept) for part in parts if part.kept.any()]
    holds = {**merge_documents([(part.documents, keep) for part, keep in kept], folder, disk)}
    holds |= codec.merge([(part.vectors, keep) for part, keep in kept], folder, disk)
    documents = sum(int(np.count_nonzero(keep)) for _, keep in kept)
    vectors = sum(int(part.vectors.lengths[keep].sum()) for part, keep in kept)
    return Contents(documents, vectors, total_counts([part.documents.ids.token_counts(keep) for part, keep in kept]), holds)
