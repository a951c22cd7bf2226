"""Metadata of a segment: for every field the values in ascending order, and for every value the rows that have it.

A comparison with a value is then a run of values, and its rows lie side by side in the file: what a filter reads is what it finds. A
field whose documents have values of several types has a column for each; a list has an entry for each of its values. The files hold
the same bytes however the documents came together, one by one or from other segments.
"""

from __future__ import annotations

import json
import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.disk import Disk, write_array, write_file
from quiver.retrieval.index.documents.strings import PackedStrings
from quiver.retrieval.index.errors import DamagedIndexError
from quiver.retrieval.index.mapped import CheckedArray, Files, as_checked
from quiver.retrieval.records import Metadata, Value

logger = logging.getLogger(__name__)

Type: TypeAlias = Literal["boolean", "integer", "number", "string"]
Values: TypeAlias = PackedStrings | NDArray[Any]

_STEM = "metadata"
_LIST = f"{_STEM}.json"
_DTYPES: dict[str, type[np.generic]] = {"boolean": np.bool_, "integer": np.int64, "number": np.float64}
# Longer strings are texts, which nobody compares with a value.
_LONGEST = 512
_INT64 = 1 << 63


class Column:
    """The values of one field that have one type.

    Args:
        field: Name of the field.
        type: Type of the values.
        values: The n distinct values in ascending order.
        ends: Where the rows of each value end, (n,) int64.
        rows: Rows in the order of the values, ascending for each, uint32.
    """

    def __init__(
        self,
        field: str,
        type: Type,  # noqa: A002
        values: PackedStrings | NDArray[Any] | CheckedArray,
        ends: NDArray[np.int64] | CheckedArray,
        rows: NDArray[np.uint32] | CheckedArray,
    ) -> None:
        self.field = field
        self.type: Type = type
        self._values = values if isinstance(values, PackedStrings) else as_checked(values)
        self._ends = as_checked(ends)
        self._rows = as_checked(rows)

    @property
    def values(self) -> Values:
        """The n distinct values in ascending order."""
        return self._values if isinstance(self._values, PackedStrings) else self._values.whole()

    @property
    def ends(self) -> NDArray[np.int64]:
        """Where the rows of each value end, (n,)."""
        return self._ends.whole()

    @property
    def rows(self) -> NDArray[np.uint32]:
        """Rows in the order of the values, ascending for each."""
        return self._rows.whole()

    def rows_between(self, first: int, last: int) -> NDArray[np.uint32]:
        """Rows that have one of the values ``first`` to ``last - 1``; a row may be there twice."""
        if first >= last:
            return self._rows[:0]
        return self._rows[(self._ends.item(first - 1) if first else 0) : self._ends.item(last - 1)]


class MetadataTable:
    """The columns of one segment.

    Args:
        columns: In any order.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)

    @classmethod
    def open(cls, files: Files) -> MetadataTable:
        """Map what a writer wrote.

        Raises:
            FileNotFoundError: A file is missing.
            DamagedIndexError: The files do not fit each other.
        """
        try:
            listed = json.loads(files.read(_LIST))
            return cls([_open_column(files, number, **fields) for number, fields in enumerate(listed)])
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, DamagedIndexError):
                raise
            raise DamagedIndexError(f"{files.folder / _LIST}: not the list of the metadata ({error}); quiver index repair") from error


def is_metadata(name: str) -> bool:
    """Whether a file of a segment is one of its metadata."""
    return name.startswith(_STEM)


class MetadataWriter:
    """Collects the metadata of documents, in the order of their rows.

    Args:
        fields: The fields to keep; None for all.
    """

    def __init__(self, fields: Sequence[str] | None = None) -> None:
        self._fields = None if fields is None else frozenset(fields)
        self._columns: dict[tuple[str, Type], _Collected] = {}
        self._row = 0
        self._left_out = 0

    def add(self, metadata: Metadata | None) -> None:
        """Append the metadata of the next document."""
        for field, value in (metadata or {}).items():
            if self._fields is None or field in self._fields:
                for each in [value] if isinstance(value, str | int | float) else value:
                    self._add(field, each)
        self._row += 1

    def _add(self, field: str, value: Value) -> None:
        if isinstance(value, str) and len(value) > _LONGEST:
            self._left_out += 1
            return
        kind, stored = typed(value)
        collected = self._columns.setdefault((field, kind), _Collected({}, array("I"), array("I")))
        collected.codes.append(collected.numbers.setdefault(stored, len(collected.numbers)))
        collected.rows.append(self._row)

    def save(self, folder: Path, disk: Disk) -> dict[str, str]:
        """Write the columns; file name -> what it holds."""
        if self._left_out:
            logger.warning("%d metadata values of more than %d characters cannot be filtered by", self._left_out, _LONGEST)
        return write_columns(folder, self.columns(), disk)

    def columns(self) -> list[Column]:
        """The columns of what was added."""
        columns = []
        for (field, kind), collected in self._columns.items():
            values: Values
            if kind == "string":
                values = PackedStrings.pack(str(value) for value in collected.numbers)
            else:
                values = np.array(list(collected.numbers), _DTYPES[kind])
            codes, rows = np.array(collected.codes, np.int64), np.array(collected.rows, np.uint32)
            columns.append(_to_column(field, kind, values, codes, rows))
        return columns


@dataclass(frozen=True)
class _Collected:
    numbers: dict[Value, int]
    codes: array[int]
    rows: array[int]


def typed(value: Value) -> tuple[Type, Value]:
    """The type of a value and the value as its column holds it; an integer that 64 bits cannot hold is a number, infinite if need be."""
    if isinstance(value, bool):
        return "boolean", value
    if isinstance(value, int):
        return ("integer", value) if -_INT64 <= value < _INT64 else ("number", _nearest_float(value))
    return ("number", value + 0.0) if isinstance(value, float) else ("string", value)


def _nearest_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def write_columns(folder: Path, columns: Sequence[Column], disk: Disk) -> dict[str, str]:
    """Write columns; file name -> what it holds."""
    holds = {_LIST: "the fields of the metadata, their types and sizes"}
    listed = []
    for number, column in enumerate(sorted(columns, key=lambda each: (each.field, each.type))):
        stem, what = f"{_STEM}-{number:04d}", f"of the metadata's field {column.field!r} ({column.type})"
        if isinstance(column.values, PackedStrings):
            holds |= column.values.save(folder / f"{stem}.values", disk, f"distinct values {what}")
        else:
            write_array(folder / f"{stem}.values", column.values, disk)
            holds[f"{stem}.values"] = f"distinct values {what}, ascending"
        write_array(folder / f"{stem}.ends", column.ends, disk)
        write_array(folder / f"{stem}.rows", column.rows, disk)
        holds[f"{stem}.ends"] = f"where the rows of each value end, {what}, int64"
        holds[f"{stem}.rows"] = f"rows in the order of the values {what}, uint32"
        listed.append({"field": column.field, "type": column.type, "values": len(column.values), "entries": len(column.rows)})
    write_file(folder / _LIST, json.dumps(listed, ensure_ascii=False, indent=1).encode(), disk)
    return holds


def merge_columns(parts: Sequence[tuple[MetadataTable, NDArray[np.bool_]]]) -> list[Column]:
    """The columns of several segments as those of one, whose rows are those that are kept, in order."""
    gathered: dict[tuple[str, Type], list[tuple[Column, NDArray[np.int64]]]] = {}
    first = 0
    for table, keep in parts:
        renumbered = np.where(keep, first + np.cumsum(keep) - 1, -1)
        first += int(np.count_nonzero(keep))
        for column in table.columns:
            gathered.setdefault((column.field, column.type), []).append((column, renumbered))
    merged = []
    for (field, kind), columns in gathered.items():
        codes, rows, begin = [], [], 0
        for column, renumbered in columns:
            code = np.repeat(np.arange(len(column.values)), np.diff(column.ends, prepend=0))
            row = renumbered[column.rows]
            codes.append(begin + code[row >= 0])
            rows.append(row[row >= 0].astype(np.uint32))
            begin += len(column.values)
        values = _concatenated([column.values for column, _ in columns])
        column = _to_column(field, kind, values, np.concatenate(codes), np.concatenate(rows))
        if len(column.rows):
            merged.append(column)
    return merged


def _concatenated(values: Sequence[Values]) -> Values:
    packed = [part for part in values if isinstance(part, PackedStrings)]
    if not packed:
        return np.concatenate([np.asarray(part) for part in values])
    offsets = np.cumsum([0, *(len(part.blob) for part in packed)])
    ends = [part.ends + offset for part, offset in zip(packed, offsets, strict=False)]
    return PackedStrings(np.concatenate([part.blob for part in packed]), np.concatenate(ends))


def _to_column(field: str, kind: Type, values: Values, codes: NDArray[np.int64], rows: NDArray[np.uint32]) -> Column:
    """A column from entries, each a value's number and a row, in any order; values that no entry has vanish.

    Args:
        field: Name of the field.
        kind: Type of the values.
        values: Values, which may be there twice.
        codes: The number of each entry's value, (m,).
        rows: The row of each entry, (m,).
    """
    distinct, place = _distinct(values)
    codes = place[codes]
    # One number an entry, so that they can be sorted and those that are there twice dropped at once.
    entries = np.unique(codes * (1 << 32) + rows)
    used, counts = np.unique(entries >> 32, return_counts=True)
    kept: Values = distinct.select(used) if isinstance(distinct, PackedStrings) else distinct[used]
    return Column(field, kind, kept, np.cumsum(counts), (entries & 0xFFFFFFFF).astype(np.uint32))


def _distinct(values: Values) -> tuple[Values, NDArray[np.int64]]:
    """The distinct values in ascending order, and the place of each value among them."""
    if not isinstance(values, PackedStrings):
        distinct, inverse = np.unique(values, return_inverse=True)
        return distinct, inverse.astype(np.int64)
    order = values.order()
    new = np.ones(len(order), bool)
    new[1:] = ~values.equal(order[1:], values, order[:-1])
    place = np.empty(len(order), np.int64)
    place[order] = np.cumsum(new) - 1
    return values.select(order[new]), place


def _open_column(files: Files, number: int, *, field: str, type: Type, values: int, entries: int) -> Column:  # noqa: A002
    stem = f"{_STEM}-{number:04d}"
    opened: PackedStrings | CheckedArray
    if type == "string":
        opened = PackedStrings.open(files, f"{stem}.values", values)
    else:
        opened = files.map(f"{stem}.values", _DTYPES[type], (values,))
    ends = files.map(f"{stem}.ends", np.int64, (values,))
    return Column(field, type, opened, ends, files.map(f"{stem}.rows", np.uint32, (entries,)))


def describe(tables: Sequence[MetadataTable]) -> Mapping[str, tuple[str, ...]]:
    """Field -> the types of its values, over several segments, in order."""
    found: dict[str, set[str]] = {}
    for table in tables:
        for column in table.columns:
            found.setdefault(column.field, set()).add(column.type)
    return {field: tuple(sorted(types)) for field, types in sorted(found.items())}
