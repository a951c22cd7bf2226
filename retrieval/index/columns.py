"""Columns of a segment in Arrow IPC files, memory-mapped; each block is verified when its bytes are first read.

``STEM.arrow`` is a file that any Arrow reader opens. ``STEM.json`` beside it says where its buffers are: columns are read without parsing
the file, one value at a time without reading the others, and intact values are found beside damaged blocks. One of the two files is enough
to read the columns. The order of UTF-8 bytes is that of code points, as in Python and ``strcmp``, by which trec_eval sorts.

Shapes: n values of a column.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from quiver.retrieval.data.entries import LIST
from quiver.retrieval.index.files import CheckedArray, DamagedIndexError, Disk, Files, write_file

LOOK = "the index is damaged, run quiver index check to find the file"
"""Advice for errors about damaged memory-mapped files."""

ROW = "row"
"""Type of a column of row numbers, uint32."""

ARROW_TYPES: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    ROW: pa.uint32(),
}
"""Type of a field, see `quiver.retrieval.data.entries`, -> that of its column; lists have the type of their elements and ``[]``."""

_KINDS = {kind: name for name, kind in ARROW_TYPES.items()} | {pa.large_string(): "string"}
_DTYPES = {"string": np.int32, "integer": np.int64, "number": np.float64, "date": np.int32, "timestamp": np.int64, ROW: np.uint32}
_ARROW_OF = {"b1": pa.bool_(), "i4": pa.int32(), "i8": pa.int64(), "u4": pa.uint32(), "f8": pa.float64()}  # by code of the dtype
_MICROSECOND = datetime.timedelta(microseconds=1)
_EPOCH = datetime.datetime(1970, 1, 1)  # noqa: DTZ001 - timestamps of columns have no zone
_INT32 = 1 << 31
# Up to this many elements, reading them one by one is faster than as an array; hits of a search are that few.
_FEW = 20
_REPEATED = 4  # how often strings must occur on average to be stored once
_NOTHING = CheckedArray(np.zeros(0, np.uint8))


class StringColumn:
    """Strings of an Arrow column, in memory or mapped.

    Args:
        content: The UTF-8 bytes of all strings.
        offsets: Start of each string, and the number of bytes, (n + 1,) int32 or int64, ascending.
    """

    def __init__(self, content: CheckedArray, offsets: CheckedArray) -> None:
        self._content, self._offsets = content, offsets

    @classmethod
    def pack(cls, strings: Iterable[str]) -> StringColumn:
        """Create a column from strings in memory."""
        encoded = [string.encode("utf-8", "surrogatepass") for string in strings]
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=offsets[1:])
        return cls(CheckedArray(np.frombuffer(b"".join(encoded), np.uint8)), CheckedArray(offsets))

    @property
    def array(self) -> pa.Array:
        """All strings, verified."""
        offsets = self._offsets.whole()
        kind = pa.string() if offsets.itemsize == 4 else pa.large_string()
        return pa.Array.from_buffers(kind, len(self), [None, pa.py_buffer(offsets), pa.py_buffer(self._content.whole())], 0)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"the string number must be below {len(self)}, got {index}")
        return _decode([self.bytes_of(index)])[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), 65_536):
            yield from self.take(np.arange(start, min(start + 65_536, len(self))))

    def bytes_of(self, index: int) -> bytes:
        """The UTF-8 bytes of one string, 0 <= index < n."""
        content: bytes = self._content[self._offsets.item(index) : self._offsets.item(index + 1)].tobytes()
        return content

    def take(self, indices: NDArray[np.intp]) -> list[str]:
        """The strings with given numbers, in the order given."""
        if len(indices) <= _FEW:
            spans = [self._offsets.span(index, index + 2) for index in indices.tolist()]
            return _decode([self._content.span(begin, end) for begin, end in spans])
        begins, ends = self._offsets[indices], self._offsets[indices + 1]
        content = self._content.spans(begins, ends).data
        return _decode([content[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)])

    def lost(self) -> NDArray[np.bool_]:
        """Strings that have lost a byte or one of their offsets with a damaged block, (n,)."""
        return _find_lost_spans(self._offsets, self._content.damaged())


def _find_lost_spans(offsets: CheckedArray, lost: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Spans that have lost an element, or the offset of their beginning or end, (n,)."""
    damaged = offsets.damaged()
    before, places = np.append(0, np.cumsum(lost)), np.where(damaged, 0, offsets.whole())
    found: NDArray[np.bool_] = damaged[:-1] | damaged[1:] | (before[places[1:]] > before[places[:-1]])
    return found


def _decode(strings: Sequence[bytes | memoryview]) -> list[str]:
    try:
        return [str(string, "utf-8") for string in strings]
    except UnicodeDecodeError as error:
        raise DamagedIndexError(f"a string in the index is not UTF-8 ({error.reason}); {LOOK}") from error


class Column:
    """One column of one batch of an Arrow file.

    Args:
        content: The bytes of the file.
        layout: As `_describe_layout` makes it.

    Attributes:
        kind: Its type.
        elements: Of a list: the column of its elements.
        words: Of strings of which many are equal: the different ones.
        numbers: The values, but of lists and other strings: dates and timestamps as days and microseconds since 1970, booleans as bits,
            words by their numbers.
    """

    def __init__(self, content: CheckedArray, layout: Mapping[str, Any]) -> None:
        self.kind, self._length, self._nulls = str(layout["kind"]), int(layout["rows"]), int(layout["nulls"])
        self._is_whole, self._is_verified = content.is_whole, content.is_verified
        self._valid, *rest = [content.part(start, np.uint8, size) if size else _NOTHING for start, size in layout["buffers"]]
        self.elements = Column(content, layout["elements"]) if "elements" in layout else None
        self.words = Column(content, layout["words"]) if "words" in layout else None
        ends = self._length + 1 if self._length else 0
        if self.elements is not None:
            self._offsets = rest[0].part(0, np.int32, ends)
        elif not self._length:
            self.strings, self.numbers = StringColumn.pack(()), _NOTHING
        elif self.kind == "string" and self.words is None:
            self.strings = StringColumn(rest[1], rest[0].part(0, np.int64 if rest[0].nbytes >= 8 * ends else np.int32, ends))
        else:
            self.numbers = rest[0] if self.kind == "boolean" else rest[0].part(0, _DTYPES[self.kind], self._length)

    def __len__(self) -> int:
        return self._length

    @cached_property
    def array(self) -> pa.Array:
        """The values, verified."""
        try:
            found = self._make_array() if self._length else to_column([], self.kind)
            if not self._is_verified:
                found.validate(full=True)
        except pa.ArrowException as error:
            raise DamagedIndexError(f"a column of the index is not what was written ({' '.join(str(error).split())}); {LOOK}") from error
        return found

    def _make_array(self) -> pa.Array:
        buffers = [pa.py_buffer(self._valid.whole()) if self._nulls else None]
        if self.elements is not None:
            child, buffers = self.elements.array, [*buffers, pa.py_buffer(self._offsets.whole())]
            return pa.Array.from_buffers(pa.list_(child.type), self._length, buffers, self._nulls, children=[child])
        if self.kind == "string" and self.words is None:
            text = self.strings.array
            return pa.Array.from_buffers(text.type, self._length, [*buffers, *text.buffers()[1:]], self._nulls)
        buffers.append(pa.py_buffer(self.numbers.whole()))
        if self.words is not None:
            codes = pa.Array.from_buffers(pa.int32(), self._length, buffers, self._nulls)
            return pa.DictionaryArray.from_arrays(codes, self.words.array, safe=not self._is_verified)
        return pa.Array.from_buffers(ARROW_TYPES[self.kind], self._length, buffers, self._nulls)

    def select(self, keep: NDArray[np.bool_]) -> pa.Array:
        """The values of chosen rows, (n,), which are read around damage."""
        if self._is_whole:
            return self.array if keep.all() else self.array.filter(number_column(keep))
        return to_column([self.at(row) for row in np.flatnonzero(keep).tolist()], self.kind)

    def at(self, row: int) -> Any:
        """One value, reading no others: dates and timestamps as Python's; None for a null."""
        if self._nulls and not self._valid.item(row >> 3) >> (row & 7) & 1:
            return None
        if self.elements is not None:
            return [self.elements.at(place) for place in range(self._offsets.item(row), self._offsets.item(row + 1))]
        if self.kind == "string":
            return self.strings[row] if self.words is None else self.words.at(self.numbers.item(row))
        if self.kind == "boolean":
            return bool(self.numbers.item(row >> 3) >> (row & 7) & 1)
        value = self.numbers.item(row)
        if self.kind == "date":
            return _EPOCH.date() + datetime.timedelta(days=value)
        return _EPOCH + datetime.timedelta(microseconds=value) if self.kind == "timestamp" else value

    def lost(self) -> NDArray[np.bool_]:
        """Values that have a byte in a damaged block of their file, (n,)."""
        if not self._length:
            return np.zeros(0, bool)
        lost = _lost_bits(self._valid, self._length) if self._nulls else np.zeros(self._length, bool)
        if self.elements is not None:
            return lost | _find_lost_spans(self._offsets, self.elements.lost())
        if self.words is not None:
            damaged = self.numbers.damaged()
            return lost | damaged | self.words.lost()[np.where(damaged, 0, self.numbers.whole())]
        if self.kind == "string":
            return lost | self.strings.lost()
        return lost | (_lost_bits(self.numbers, self._length) if self.kind == "boolean" else self.numbers.damaged())


def _lost_bits(bits: CheckedArray, length: int) -> NDArray[np.bool_]:
    return np.repeat(bits.damaged(), 8)[:length]


# pa.array, pa.scalar and to_numpy import pandas where it is installed, for about a second; the functions below use the buffers of arrays.


def to_column(values: Sequence[Any], kind: str) -> pa.Array:
    """The column of values of one type, with None for nulls; raises OverflowError for an integer of more than 64 bits.

    Example:
        >>> to_column(["a", None], "string").to_pylist(), to_column([[1, 2], [], None], "integer[]").to_pylist()
        (['a', None], [[1, 2], [], None])
    """
    count = len(values)
    nulls = sum(value is None for value in values)
    valid = _pack_bits(np.fromiter((value is not None for value in values), bool, count)) if nulls else None
    if kind.endswith(LIST):
        elements = to_column([each for value in values if value for each in value], kind.removesuffix(LIST))
        ends = np.cumsum([0, *(len(value) if value else 0 for value in values)], dtype=np.int64)
        buffers = [valid, pa.py_buffer(ends.astype(np.int32))]
        return pa.Array.from_buffers(pa.list_(elements.type), count, buffers, nulls, children=[elements])
    if kind == "string":
        encoded = [value.encode() if value else b"" for value in values]
        return binary_column(encoded, pa.string(), valid, nulls)
    filled: Sequence[Any] = [0 if value is None else value for value in values] if nulls else values
    if kind == "boolean":
        return pa.Array.from_buffers(pa.bool_(), count, [valid, _pack_bits(np.fromiter(filled, bool, count))], nulls)
    if kind == "date":
        filled = [value.toordinal() - _EPOCH.toordinal() if value else 0 for value in filled]
    elif kind == "timestamp":
        filled = [(value - _EPOCH) // _MICROSECOND if value else 0 for value in filled]
    numbers = np.fromiter(filled, _DTYPES[kind], count)
    return pa.Array.from_buffers(ARROW_TYPES[kind], count, [valid, pa.py_buffer(numbers)], nulls)


def binary_column(encoded: Sequence[bytes], kind: pa.DataType, valid: pa.Buffer | None = None, nulls: int = 0) -> pa.Array:
    """The column of the bytes of strings, empty for nulls; more than 2 GiB of them make a `pa.large_string`."""
    ends = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=ends[1:])
    if kind == pa.string() and ends[-1] >= _INT32:
        kind = pa.large_string()
    places = ends.astype(np.int32) if kind in (pa.string(), pa.binary()) else ends
    return pa.Array.from_buffers(kind, len(encoded), [valid, pa.py_buffer(places), pa.py_buffer(b"".join(encoded))], nulls)


def number_column(numbers: NDArray[Any]) -> pa.Array:
    """The column of numbers or truth values."""
    content = _pack_bits(numbers) if numbers.dtype == bool else pa.py_buffer(np.ascontiguousarray(numbers))
    return pa.Array.from_buffers(_ARROW_OF[numbers.dtype.str[1:]], len(numbers), [None, content])


def numbers_of(array: pa.Array) -> NDArray[Any]:
    """The numbers of a column without a copy: dates and timestamps as units of time."""
    dtype = np.dtype(f"i{array.type.bit_width // 8}" if pa.types.is_temporal(array.type) else array.type.to_pandas_dtype())
    offset = array.offset * dtype.itemsize
    return np.frombuffer(array.buffers()[1], dtype, offset=offset, count=len(array)) if len(array) else np.zeros(0, dtype)


def truths_of(array: pa.Array) -> NDArray[np.bool_]:
    """Truth values without nulls."""
    first, inside = divmod(array.offset, 8)
    if not len(array):
        return np.zeros(0, bool)
    bits = np.frombuffer(array.buffers()[1], np.uint8, offset=first, count=(inside + len(array) + 7) // 8)
    return np.unpackbits(bits, bitorder="little")[inside:][: len(array)].view(bool)


def lengths_of(array: pa.Array) -> NDArray[Any]:
    """The number of bytes of each string, of which nulls have none."""
    dtype = np.dtype(np.int64 if pa.types.is_large_string(array.type) else np.int32)
    if not len(array):
        return np.zeros(0, dtype)
    return np.diff(np.frombuffer(array.buffers()[1], dtype, offset=array.offset * dtype.itemsize, count=len(array) + 1))


def _pack_bits(truths: NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(truths, bitorder="little"))


def arrow_type(kind: str) -> pa.DataType:
    """The Arrow type of a column."""
    return pa.list_(ARROW_TYPES[kind.removesuffix(LIST)]) if kind.endswith(LIST) else ARROW_TYPES[kind]


def concat_columns(parts: Sequence[pa.Array]) -> pa.Array:
    """Concatenate at least one column of one type; strings of more than 2 GiB get offsets of 64 bits."""
    if pa.types.is_string(parts[0].type) or pa.types.is_large_string(parts[0].type):
        is_large = sum(part.nbytes for part in parts) >= _INT32
        kind = pa.large_string() if is_large else pa.string()
        return pa.concat_arrays([part if part.type == kind else part.cast(kind) for part in parts])
    return pa.concat_arrays(parts)


class ColumnWriter:
    """Writes ``STEM.arrow`` batch by batch, and at the end ``STEM.json``."""

    def __init__(self, folder: Path, stem: str, disk: Disk) -> None:
        self._folder, self._stem, self._disk = folder, stem, disk
        self._file = disk.create(folder / f"{stem}.arrow")
        self._writer: Any = None

    def write(self, columns: Mapping[str, pa.Array]) -> None:
        """Append a batch; all have the same columns."""
        batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
        try:
            if self._writer is None:
                self._writer = pa.ipc.new_file(self._file, batch.schema)
            self._writer.write_batch(batch)
        except OSError:
            self._file.close()
            raise

    def close(self, holds: str) -> dict[str, str]:
        """Finish both files; return what each holds, by name."""
        try:
            self._writer.close()
        finally:
            self._file.close()
        content = Files.written(self._folder, self._disk).map(f"{self._stem}.arrow", np.uint8, (-1,)).whole()
        write_file(self._folder / f"{self._stem}.json", json.dumps(_find_layout(content)).encode(), self._disk)
        return {f"{self._stem}.arrow": f"{holds}, an Arrow IPC file", f"{self._stem}.json": f"where the buffers of {self._stem}.arrow are"}


def write_columns(folder: Path, stem: str, columns: Mapping[str, pa.Array], disk: Disk, holds: str) -> dict[str, str]:
    """Write columns as one batch; see `ColumnWriter`."""
    writer = ColumnWriter(folder, stem, disk)
    writer.write(columns)
    return writer.close(holds)


def _find_layout(content: NDArray[np.uint8]) -> list[dict[str, Any]]:
    """The layouts of the columns of each batch of an Arrow file by name."""
    opened, begin = pa.ipc.open_file(pa.py_buffer(content)), content.ctypes.data
    batches = (opened.get_batch(number) for number in range(opened.num_record_batches))
    return [
        {name: _describe_layout(column, begin) for name, column in zip(batch.schema.names, batch.columns, strict=True)} for batch in batches
    ]


def _describe_layout(array: pa.Array, begin: int) -> dict[str, Any]:
    """The layout of an array whose buffers lie behind an address.

    It is ``kind`` (a key of `ARROW_TYPES`, with ``[]`` behind it for lists), numbers of ``rows`` and ``nulls``, place and size of its
    ``buffers`` as Arrow orders them; the layout of the ``elements`` of a list, and of the ``words`` of strings of which many are equal.
    """
    is_list, has_words = pa.types.is_list(array.type), pa.types.is_dictionary(array.type)
    value = array.type.value_type if is_list else array.type
    buffers = array.buffers()[: 2 if is_list or has_words else None]
    described: dict[str, Any] = {
        "kind": _KINDS[value.value_type if pa.types.is_dictionary(value) else value] + (LIST if is_list else ""),
        "rows": len(array),
        "nulls": array.null_count,
        "buffers": [[0, 0] if each is None or not each.size else [each.address - begin, each.size] for each in buffers],
    }
    if is_list:
        described["elements"] = _describe_layout(array.values, begin)
    if has_words:
        described["words"] = _describe_layout(array.dictionary, begin)
    return described


def with_words(array: pa.Array) -> pa.Array:
    """Strings, or lists of strings, with each different one stored once, if many are equal: filters then compare it once."""
    values = array.values if pa.types.is_list(array.type) else array
    if values.type not in (pa.string(), pa.large_string()):
        return array
    coded = values.dictionary_encode()
    if _REPEATED * len(coded.dictionary) > len(values):
        return array
    if values is array:
        return coded
    return pa.ListArray.from_arrays(array.offsets, coded, mask=array.is_null() if array.null_count else None)


class ColumnBatches:
    """The columns of each batch of the files that a `ColumnWriter` wrote, by name; made of their layouts when they are first read.

    Raises:
        FileNotFoundError: A file is missing.
        DamagedIndexError: The files do not fit each other; also when a batch is read.
    """

    def __init__(self, files: Files, stem: str) -> None:
        self._content, self._path = files.map(f"{stem}.arrow", np.uint8, (-1,)), files.folder / stem
        described = files.map(f"{stem}.json", np.uint8, (-1,))
        with self._name_misfits():
            self._layouts = json.loads(described.whole().tobytes()) if described.is_whole else _find_layout(self._content.whole())
        self._made: dict[int, dict[str, Column]] = {}

    def __len__(self) -> int:
        return len(self._layouts)

    def rows(self, column: str) -> list[int]:
        """The number of rows of each batch."""
        with self._name_misfits():
            return [int(columns[column]["rows"]) for columns in self._layouts]

    def __getitem__(self, number: int) -> Mapping[str, Column]:
        if number not in self._made:
            with self._name_misfits():
                self._made[number] = {name: Column(self._content, layout) for name, layout in self._layouts[number].items()}
        return self._made[number]

    @contextmanager
    def _name_misfits(self) -> Iterator[None]:
        try:
            yield
        except DamagedIndexError:
            raise
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, pa.ArrowException) as error:
            message = f"{self._path}.json: does not fit {self._path.name}.arrow ({error}); run quiver index repair"
            raise DamagedIndexError(message) from error


def open_columns(files: Files, stem: str) -> list[Mapping[str, Column]]:
    """The columns of each batch by name; see `ColumnBatches`."""
    batches = ColumnBatches(files, stem)
    return [batches[number] for number in range(len(batches))]
