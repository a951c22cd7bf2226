"""Documents of a segment by row: ids, metadata, filters, token counts and, if stored, texts.

For every metadata field a segment stores the distinct values in ascending order and the rows of each value. A comparison selects a run of
values, whose rows are adjacent in the file: a filter reads only what it finds. A field with values of several types has one column per
type; a list has one entry per element. The bytes do not depend on the order in which the documents were added or merged.

A condition is ``FIELD OPERATOR VALUE`` with one of the operators ``=`` (or ``==``), ``!=``, ``<``, ``<=``, ``>``, ``>=``; or ``FIELD in
VALUE, VALUE, ...``. Spaces between the parts are ignored. A field or value that contains spaces or one of ``" = ! < > , ( ) & |``, or
begins with ``'``, is written in double quotes with the escapes of JSON. ``and`` and ``or`` do not exist: conditions are separate strings,
and all of them must hold.

An unquoted value that reads as a number or as ``true`` or ``false`` is compared with numbers and booleans as such, and with strings
as written; a quoted value is only compared with strings. A value with an unquoted ``*`` behind it, after ``=``, ``!=`` or ``in``, is the
beginning of strings. If a field is a list, a document has every value in it. Text that is no date with the year first is not asked
whether it is greater than a number or a date, unless this is quoted.

A date with the year first is a period, in whatever form a field writes it (`quiver.retrieval.index.dates`): ``<=`` holds up to its end,
``>`` after it, and ``=`` for all that lies in it, but in double quotes for the text itself.

Shapes: P documents of a segment.
"""

from __future__ import annotations

import heapq
import json
import logging
import math
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError, check_utf8
from quiver.retrieval.data.files import type_of
from quiver.retrieval.index.dates import Date, Span
from quiver.retrieval.index.files import (
    CheckedArray,
    DamagedIndexError,
    Disk,
    Files,
    as_checked,
    missing_file,
    write_array,
    write_file,
)
from quiver.retrieval.index.strings import LOOK, IdTable, StringColumn, Texts, TextWriter, is_ids, write_ids
from quiver.retrieval.records import Document, Metadata, TextTokens, TokenCounts, Value

logger = logging.getLogger(__name__)

Type: TypeAlias = Literal["boolean", "integer", "number", "string"]
Values: TypeAlias = StringColumn | NDArray[Any]

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
        ends: End of the rows of each value, (n,) int64.
        rows: Rows in the order of the values, ascending for each, uint32.
    """

    def __init__(
        self,
        field: str,
        type: Type,  # noqa: A002
        values: StringColumn | NDArray[Any] | CheckedArray,
        ends: NDArray[np.int64] | CheckedArray,
        rows: NDArray[np.uint32] | CheckedArray,
    ) -> None:
        self.field = field
        self.type: Type = type
        self._values = values if isinstance(values, StringColumn) else as_checked(values)
        self._ends = as_checked(ends)
        self._rows = as_checked(rows)

    @property
    def values(self) -> Values:
        """The n distinct values in ascending order."""
        return self._values if isinstance(self._values, StringColumn) else self._values.whole()

    @property
    def ends(self) -> NDArray[np.int64]:
        """End of the rows of each value, (n,)."""
        return self._ends.whole()

    @property
    def rows(self) -> NDArray[np.uint32]:
        """Rows in the order of the values, ascending for each."""
        return self._rows.whole()

    def rows_between(self, first: int, last: int) -> NDArray[np.uint32]:
        """Rows that have one of the values ``first`` to ``last - 1``; a row may occur twice."""
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
        """Map the files that a writer wrote.

        Raises:
            FileNotFoundError: A file is missing.
            DamagedIndexError: The files are inconsistent.
        """
        try:
            listed = json.loads(files.read(_LIST))
            return cls([_open_column(files, number, **fields) for number, fields in enumerate(listed)])
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, DamagedIndexError):
                raise
            raise DamagedIndexError(f"{files.folder / _LIST}: not the list of the metadata ({error}); run quiver index repair") from error


def is_metadata(name: str) -> bool:
    """Whether a file of a segment holds metadata."""
    return name.startswith(_STEM)


SOURCES = frozenset({"file", "document"})
"""Fields of passages that say what they were cut from; an index always keeps them, for groups and refreshes."""


class MetadataWriter:
    """Collects the metadata of documents, in the order of their rows.

    Args:
        fields: The fields to keep beside `SOURCES`; None for all.
    """

    def __init__(self, fields: Sequence[str] | None = None) -> None:
        self._fields = None if fields is None else SOURCES.union(fields)
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
        if not is_value(value):
            self._left_out += 1
            return
        kind, stored = typed(value)
        collected = self._columns.setdefault((field, kind), _Collected({}, array("I"), array("I")))
        collected.codes.append(collected.numbers.setdefault(stored, len(collected.numbers)))
        collected.rows.append(self._row)

    def save(self, folder: Path, disk: Disk) -> dict[str, str]:
        """Write the columns; return what each file holds, by name."""
        if self._left_out:
            logger.warning("%d metadata values of more than %d characters cannot be filtered by", self._left_out, _LONGEST)
        return write_columns(folder, self.columns(), disk)

    def columns(self) -> list[Column]:
        """The columns of the documents added so far."""
        columns = []
        for (field, kind), collected in self._columns.items():
            values: Values
            if kind == "string":
                values = StringColumn.pack(str(value) for value in collected.numbers)
            else:
                values = np.array(list(collected.numbers), _DTYPES[kind])
            codes, rows = np.array(collected.codes, np.int64), np.array(collected.rows, np.uint32)
            columns.append(_to_column(field, kind, values, codes, rows))
        return columns


def is_value(value: Value) -> bool:
    """Whether a column holds a value: longer strings are texts."""
    return not isinstance(value, str) or len(value) <= _LONGEST


@dataclass(frozen=True)
class _Collected:
    numbers: dict[Value, int]
    codes: array[int]
    rows: array[int]


def typed(value: Value) -> tuple[Type, Value]:
    """The type of a value and the value as its column holds it; an integer beyond 64 bits becomes a float, possibly infinite."""
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
    """Write columns; return what each file holds, by name."""
    holds = {_LIST: "the fields of the metadata, their types and sizes"}
    listed = []
    for number, column in enumerate(sorted(columns, key=lambda each: (each.field, each.type))):
        stem, what = f"{_STEM}-{number:04d}", f"of the metadata's field {column.field!r} ({column.type})"
        if isinstance(column.values, StringColumn):
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
    """Merge the columns of several segments, keeping chosen rows in order."""
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
    packed = [part for part in values if isinstance(part, StringColumn)]
    return StringColumn.concatenate(packed) if packed else np.concatenate([np.asarray(part) for part in values])


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
    kept: Values = distinct.select(used) if isinstance(distinct, StringColumn) else distinct[used]
    return Column(field, kind, kept, np.cumsum(counts), (entries & 0xFFFFFFFF).astype(np.uint32))


def _distinct(values: Values) -> tuple[Values, NDArray[np.int64]]:
    """The distinct values in ascending order, and the place of each value among them."""
    if not isinstance(values, StringColumn):
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
    opened: StringColumn | CheckedArray
    if type == "string":
        opened = StringColumn.open(files, f"{stem}.values", values)
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


@dataclass(frozen=True)
class Facet:
    """How many documents have each value of a field.

    Attributes:
        values: The most frequent values with their numbers of documents, in descending order of the numbers, then in ascending order of the
            values as text. A document with a list of values counts once for each.
        distinct: Number of distinct values that at least one of the documents has.
    """

    values: list[tuple[Value, int]]
    distinct: int


def count_values(field: str, tables: Sequence[tuple[MetadataTable, NDArray[np.bool_] | None]], *, most: int) -> Facet:
    """Count the documents that have each value of a field.

    Every column stores its rows by value: chosen rows are counted by one running sum over them, and only the values that stay are read.

    Args:
        field: Name of the field.
        tables: Columns of each segment, with the bitmap of the rows that count, (P,); None for all.
        most: Maximum number of values to return.

    Raises:
        DamagedIndexError: A column is damaged.
    """
    counted: dict[Type, list[tuple[Values, NDArray[np.int64]]]] = {}
    for table, chosen in tables:
        for column in table.columns:
            if column.field == field:
                counts = _value_counts(column, chosen)
                present = np.flatnonzero(counts)
                if len(present):
                    values = column.values
                    kept: Values = values.select(present) if isinstance(values, StringColumn) else values[present]
                    counted.setdefault(column.type, []).append((kept, counts[present]))
    found: list[tuple[Value, int]] = []
    distinct = 0
    for parts in counted.values():
        values, counts = parts[0] if len(parts) == 1 else _summed(parts)
        distinct += len(counts)
        least = np.partition(counts, -most)[-most] if len(counts) > most else 1
        ties = np.flatnonzero(counts == least)
        if len(ties) > most:  # a field of unique values has a tie per document; strings are in their order already
            texts = range(most) if isinstance(values, StringColumn) else list(map(str, values[ties].tolist()))
            ties = ties[heapq.nsmallest(most, range(len(texts)), key=texts.__getitem__)]
        best = np.concatenate([np.flatnonzero(counts > least), ties])
        names = values.take(best) if isinstance(values, StringColumn) else values[best].tolist()
        found += zip(names, counts[best].tolist(), strict=True)
    found.sort(key=lambda each: (-each[1], str(each[0])))
    return Facet(found[:most], distinct)


def value_range(field: str, tables: Sequence[tuple[MetadataTable, NDArray[np.bool_] | None]]) -> tuple[int | float, int | float] | None:
    """Least and greatest number that chosen documents have in a field; None if none has one. Arguments as of `count_values`."""
    ends: list[int | float] = []
    for table, chosen in tables:
        for column in table.columns:
            if column.field == field and column.type in ("integer", "number"):
                present = np.flatnonzero(_value_counts(column, chosen))
                ends += [column.values[place].item() for place in present[[0, -1]]] if len(present) else []
    return (min(ends), max(ends)) if ends else None


def _value_counts(column: Column, chosen: NDArray[np.bool_] | None) -> NDArray[np.int64]:
    """Number of chosen rows of each value, (n,)."""
    if chosen is None:
        return np.diff(column.ends, prepend=0)
    rows = column.rows
    if len(rows) and int(rows.max()) >= len(chosen):
        raise DamagedIndexError(f"the column of {column.field!r} refers to a row that does not exist; {LOOK}")
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(chosen[rows], dtype=np.int64)])
    return np.diff(sums[column.ends], prepend=0)


def _summed(parts: Sequence[tuple[Values, NDArray[np.int64]]]) -> tuple[Values, NDArray[np.int64]]:
    """Add the counts of the same values in several segments."""
    distinct, place = _distinct(_concatenated([values for values, _ in parts]))
    counts = np.zeros(len(distinct), np.int64)
    np.add.at(counts, place, np.concatenate([counts for _, counts in parts]))
    return distinct, counts


Operator: TypeAlias = Literal["=", "!=", "<", "<=", ">", ">="]

GRAMMAR = "field=value, field=beginning*, !=, <, <=, >, >= or 'field in a,b'"
"""A condition in short."""

_QUOTING = 'put a field or value that has spaces or any of " = ! < > , ( ) & | in double quotes, such as city="New York"'
_BARE = "in a shell put the condition in single quotes, such as 'year>=2020', because > writes to a file there"
_ALONE = "give each condition by itself, all of them must hold; for alternatives of one field write 'field in a,b'"
_DECIMAL = "write a decimal with a point, such as price<50.5, and several values as 'field in a,b'"
# A text without white space at its end is split in time linear in its length: reading stops at the first character that fits nowhere.
_TOKENS = re.compile(
    r"""\s*(?:(?P<quoted>"(?:[^"\\]|\\.)*"\*?)"""
    r"""|(?P<operator>==|[!<>]=|[=<>])|(?P<comma>,)|(?P<bare>[^\s"=!<>,()&|'][^\s"=!<>,()&|]*)|(?P<other>\S))""",
    re.DOTALL,
)
_WORDS = frozenset({"quoted", "bare"})
_COMBINING = frozenset({"and", "or"})
# Characters of a malformed condition that an error repeats.
_SHOWN = 80
_OPERATORS: dict[str, Operator] = {"=": "=", "==": "=", "!=": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}


@dataclass(frozen=True)
class Prefix:
    """The beginning of the strings that a condition asks for, written with a ``*`` behind it."""

    text: str


@dataclass(frozen=True)
class Condition:
    """A comparison of a field.

    Attributes:
        field: Name of the field.
        operator: ``=`` holds for documents that have one of the values, ``!=`` for all others, including those without the
            field; the other operators hold for documents with a value of the same type for which the comparison is true.
        values: The right side, at least one value.
    """

    field: str
    operator: Operator
    values: tuple[Value | Prefix | Date, ...]

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition, in the grammar of this module.

        Raises:
            InputError: It is malformed, or contains half of a surrogate pair; the message shows the grammar.

        Example:
            >>> from quiver.retrieval.index import Condition
            >>> Condition.parse("year >= 2019")
            Condition(field='year', operator='>=', values=(2019, '2019'))
            >>> Condition.parse('lang in en, "de"')
            Condition(field='lang', operator='=', values=('en', 'de'))
            >>> Condition.parse('"first author" == "J. Doe"')
            Condition(field='first author', operator='=', values=('J. Doe',))
            >>> Condition.parse("file = guides/*")
            Condition(field='file', operator='=', values=(Prefix(text='guides/'),))
        """
        tokens = _split(check_utf8(text, f"filter {text!r}"))
        words, between = tokens[::2], tokens[1::2]
        membership = between[:1] == [_Token("bare", "in")]
        expected = ["comma"] * (len(words) - 2) if membership else []
        if (
            len(words) < 2
            or any(word.kind not in _WORDS for word in words)
            or not (membership or between[0].kind == "operator")
            or [token.kind for token in between[1:]] != expected
        ):
            raise _malformed(text, combined=any(token.kind == "bare" and token.text.lower() in _COMBINING for token in tokens[3:]))
        operator: Operator = "=" if membership else _OPERATORS[between[0].text]
        read = _read_or_prefix if operator in ("=", "!=") else _read
        return cls(_string(words[0]), operator, tuple(each for value in words[1:] for each in read(value)))


@dataclass(frozen=True)
class Filter:
    """Documents that a search may return: those for which all conditions hold, and whose id is among the given ids, if any.

    Attributes:
        conditions: Conditions; may be empty.
        ids: None for all documents; unknown ids are ignored.
    """

    conditions: tuple[Condition, ...] = ()
    ids: frozenset[str] | None = None

    @classmethod
    def parse(cls, conditions: str | Sequence[str], *, ids: Sequence[str] | None = None) -> Filter:
        """Parse a filter from one condition as text, or several that must all hold.

        Raises:
            InputError: One is malformed.
        """
        texts = [conditions] if isinstance(conditions, str) else conditions
        return cls(tuple(map(Condition.parse, texts)), None if ids is None else frozenset(ids))


FilterLike: TypeAlias = Filter | str | Sequence[str] | None
"""The filter of a search: a condition such as ``"year>=2015"``, several that must all hold, or a `Filter`; None for all documents."""


def as_filter(filter: FilterLike) -> Filter | None:
    """Convert the argument ``filter`` of a search.

    Raises:
        InputError: A condition is malformed, or ``filter`` is something else.

    Example:
        >>> as_filter("year>=2015") == as_filter(["year>=2015"]) == Filter.parse(["year>=2015"])
        True
    """
    if filter is None or isinstance(filter, Filter):
        return filter
    if not isinstance(filter, Sequence) or not all(isinstance(condition, str) for condition in filter):
        raise InputError(f"filter must be a Filter, a condition such as 'year>=2015' or a list of conditions, got {filter!r}")
    return Filter.parse(filter)


def matching_rows(condition: Condition, table: MetadataTable, count: int) -> NDArray[np.bool_]:
    """Rows of a segment for which a condition holds, (count,).

    Raises:
        DamagedIndexError: A column is damaged.
    """
    found = np.zeros(count, bool)
    for column in table.columns:
        if column.field == condition.field:
            for first, behind in _joined_spans(span for value in condition.values for span in _spans(column, condition.operator, value)):
                rows = column.rows_between(first, behind)
                if len(rows) and int(rows.max()) >= count:
                    raise DamagedIndexError(f"the column of {column.field!r} refers to a row that does not exist; {LOOK}")
                found[rows] = True
    return ~found if condition.operator == "!=" else found


def _joined_spans(spans: Iterable[Span]) -> Iterator[Span]:
    """Spans without overlaps, so that a list of values of which many begin the same strings reads each row once."""
    first = behind = 0
    for low, high in sorted(spans):
        if low > behind:
            yield first, behind
            first = low
        behind = max(behind, high)
    yield first, behind


def _spans(column: Column, operator: Operator, value: Value | Prefix | Date) -> Sequence[Span]:
    """The numbers of a column's values that stand in a relation to a value, from the first to behind the last."""
    if isinstance(value, Date):
        return value.spans(column.values, operator) if isinstance(column.values, StringColumn) else []
    size = len(column.values)
    bounds = _bounds(column, value)
    if bounds is None:
        return []
    below, above = bounds
    spans = {"=": (below, above), "!=": (below, above), "<": (0, below), "<=": (0, above), ">": (above, size), ">=": (below, size)}
    return [spans[operator]]


def _bounds(column: Column, value: Value | Prefix) -> tuple[int, int] | None:
    """How many of a column's values are less than a value, and how many are not greater; None if they cannot be compared."""
    if isinstance(value, Prefix):
        if not isinstance(column.values, StringColumn):
            return None
        text = value.text.encode("utf-8", "surrogatepass")
        return _bisect(column.values, text)[0], _bisect(column.values, text + b"\xff")[0]  # no byte of UTF-8 is 255
    kind, stored = typed(value)
    if column.type == "string" or kind == "string":
        if not isinstance(column.values, StringColumn) or not isinstance(stored, str):
            return None
        return _bisect(column.values, stored.encode("utf-8", "surrogatepass"))
    if (column.type == "boolean") != (kind == "boolean"):
        return None
    values = np.asarray(column.values)
    number = stored if not isinstance(stored, str) else 0
    if column.type == "integer" and isinstance(number, float):
        # NumPy would compare as float64, in which large integers are not exact.
        limits = np.iinfo(np.int64)
        if not limits.min <= number <= limits.max:
            return (0, 0) if number < 0 else (len(values), len(values))
        return int(np.searchsorted(values, math.ceil(number))), int(np.searchsorted(values, math.floor(number), "right"))
    return int(np.searchsorted(values, number)), int(np.searchsorted(values, number, "right"))


def _bisect(values: StringColumn, wanted: bytes) -> tuple[int, int]:
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values.bytes_of(middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low, low + (low < len(values) and values.bytes_of(low) == wanted)


@dataclass(frozen=True)
class _Token:
    """A part of a condition: ``quoted``, ``bare``, ``operator`` or ``comma``."""

    kind: str
    text: str


def _split(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    for match in _TOKENS.finditer(text.strip()):
        kind = str(match.lastgroup)
        if kind == "other":
            raise _malformed(text, combined=match[kind] in "&|")
        tokens.append(_Token(kind, match[kind]))
    return tokens


def _malformed(text: str, *, combined: bool) -> InputError:
    shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    decimal = re.search(r"[=<>]\s*-?\d+,\d+\s*$", text)
    advice = _ALONE if combined else _BARE if re.fullmatch(r"\w+", text) else _DECIMAL if decimal else _QUOTING
    return InputError(f"filter {shown!r}: expected {GRAMMAR}; {advice}")


def _string(token: _Token) -> str:
    if token.kind == "bare":
        return token.text
    if token.text.endswith("*"):
        raise InputError(f"filter: {token.text}: a beginning is for =, != and in")
    try:
        found = str(json.loads(token.text))
    except ValueError as error:
        raise InputError(f"filter: {token.text} is not a string in double quotes ({error})") from error
    return check_utf8(found, f"filter: {token.text}")


def _read_or_prefix(token: _Token) -> tuple[Value | Prefix | Date, ...]:
    if token.kind == "bare" and "*" in token.text[:-1]:
        kind = type_of(Path(token.text)) if token.text.startswith("*.") else None
        files = f" (files of one type: type={kind})" if kind else ""
        raise InputError(
            f"filter: {token.text}: a * stands for any ending, behind a beginning such as guides/*{files}; put the value in double quotes"
            " if the star is a part of it"
        )
    if len(token.text) > 1 and token.text.endswith("*"):
        return (Prefix(_string(replace(token, text=token.text[:-1]))),)
    date = Date.parse(token.text) if token.kind == "bare" else None
    return _read(token) if date is None else (*_read(token), date)


def _read(token: _Token) -> tuple[Value, ...]:
    """What a value may be: a number or a truth value if it reads as one, and a string; in quotes a string alone."""
    word = _string(token)
    if token.kind == "quoted":
        return (word,)
    if word.lower() in ("true", "false"):
        return word.lower() == "true", word
    for number in (int, float):
        try:
            value = number(word)
        except ValueError:
            continue
        # An integer is not asked: beyond 300 digits it cannot be turned into the float that isfinite looks at.
        return (value, word) if isinstance(value, int) or math.isfinite(value) else (word,)
    return (word,)


Part = TypeVar("Part")


DOCUMENT_BYTES = 256
"""Maximum memory per document for writing or merging, in bytes, without its id and metadata: hash, rank, offsets, and copies of them."""


DESCRIBED_COPIES = 12
"""Maximum memory for ids and metadata while writing or merging, as a multiple of the size of their files (`is_described`)."""


_TOKEN_COUNTS = "documents.tokens"


class DocumentTable:
    """The documents of a segment, opened.

    Args:
        ids: The ids.
        metadata: Metadata columns, or the error that prevents reading them.
        tokens: Packed token counts of each document, (P,), or the error.
        texts: The texts, or the error; None if texts are not stored.

    Attributes:
        ids: The ids.
    """

    def __init__(
        self,
        ids: IdTable,
        metadata: MetadataTable | DamagedIndexError,
        tokens: CheckedArray | DamagedIndexError,
        texts: Texts | DamagedIndexError | None,
    ) -> None:
        self.ids = ids
        self._metadata = metadata
        self._tokens = tokens
        self._texts = texts

    @classmethod
    def open(cls, files: Files, count: int, *, texts: bool) -> DocumentTable:
        """Open what a `DocumentTableWriter` wrote.

        Every search needs ids, but not texts and metadata: if their files are damaged, only operations that read them fail.

        Args:
            files: Files of the segment.
            count: Number of documents P.
            texts: Whether texts are stored.

        Raises:
            FileNotFoundError: A file is missing.
            DamagedIndexError: A file of the ids is inconsistent with the others.
        """
        return cls(
            IdTable.open(files, count),
            _optional(files, lambda: MetadataTable.open(files)),
            _optional(files, lambda: open_tokens(files, count)),
            _optional(files, lambda: Texts(files, count)) if texts else None,
        )

    @property
    def metadata(self) -> MetadataTable:
        """Metadata columns of the documents.

        Raises:
            DamagedIndexError: Their files are damaged.
        """
        return _opened(self._metadata)

    @property
    def tokens(self) -> CheckedArray:
        """Token counts of each document, (P,), in the packed form of ``_write_tokens``."""
        return _opened(self._tokens)

    @property
    def texts(self) -> Texts | None:
        """The texts; None if they are not stored.

        Raises:
            DamagedIndexError: Their files are damaged.
        """
        return None if self._texts is None else _opened(self._texts)

    def __len__(self) -> int:
        return len(self.ids)

    def matching(self, condition: Condition) -> NDArray[np.bool_]:
        """Rows that meet a condition, as a bitmap (P,)."""
        return matching_rows(condition, self.metadata, len(self))

    def token_counts(self, rows: NDArray[np.bool_]) -> TokenCounts:
        """Total token counts of chosen documents.

        Args:
            rows: Bitmap of the documents, (P,).
        """
        packed = self.tokens.whole()[rows]
        tokens = int((packed >> 2).sum(dtype=np.int64))
        return TokenCounts(len(packed), tokens, int(np.count_nonzero(packed & 2)), int(np.count_nonzero(packed & 1)))

    def having(self, ids: Collection[str]) -> NDArray[np.bool_]:
        """Rows whose ids are among the given ones, as a bitmap (P,)."""
        found = np.zeros(len(self), bool)
        rows = self.ids.rows_of(list(ids))
        found[rows[rows >= 0]] = True
        return found


def _optional(files: Files, opened: Callable[[], Part]) -> Part | DamagedIndexError:
    """Open a part of a segment that searches do not need; return the error if it is damaged.

    Files are opened immediately, not on first use, so that they stay readable when a writer removes them.
    """
    try:
        return opened()
    except FileNotFoundError as error:
        if not files.folder.is_dir():  # a writer has just removed the whole segment
            raise
        return missing_file(Path(error.filename))
    except DamagedIndexError as error:
        return error


def _opened(part: Part | DamagedIndexError) -> Part:
    if isinstance(part, DamagedIndexError):
        raise DamagedIndexError(str(part))
    return part


def open_tokens(files: Files, count: int) -> CheckedArray:
    """Packed token counts of each document, (P,) uint32."""
    return files.map(_TOKEN_COUNTS, np.uint32, (count,))


def is_described(name: str) -> bool:
    """Whether a file holds ids or metadata, so that its size does not follow from the number of documents."""
    return is_ids(name) or is_metadata(name)


class DocumentTableWriter:
    """Writes the documents of a segment; ids and distinct metadata values are kept in memory.

    Args:
        folder: Folder of the segment.
        disk: Performs all writes.
        texts: Whether to store texts.
        fields: Metadata fields to store; None for all.
    """

    def __init__(self, folder: Path, disk: Disk, *, texts: bool, fields: Sequence[str] | None = None) -> None:
        self._folder = folder
        self._disk = disk
        self._texts = TextWriter(folder, disk) if texts else None
        self._metadata = MetadataWriter(fields)
        self._ids = bytearray()
        self._offsets = [0]
        self._tokens: list[NDArray[np.uint32]] = []

    def add(self, documents: Sequence[Document], tokens: TextTokens) -> None:
        """Append documents, whose ids must be unique in the segment, with their token counts."""
        for document in documents:
            self._ids += document.id.encode("utf-8")
            self._offsets.append(len(self._ids))
            self._metadata.add(document.metadata)
            if self._texts is not None:
                self._texts.add(document)
        packed = tokens.tokens.astype(np.uint32) << 2 | tokens.truncated.astype(np.uint32) << 1 | tokens.empty.astype(np.uint32)
        self._tokens.append(packed.astype(np.uint32))

    def close(self) -> dict[str, str]:
        """Finish the files; return what each holds, by name."""
        strings = StringColumn(np.frombuffer(self._ids, np.uint8), np.array(self._offsets, np.int64))
        holds = write_ids(self._folder, strings, self._disk) | self._metadata.save(self._folder, self._disk)
        holds |= _write_tokens(self._folder, np.concatenate([np.zeros(0, np.uint32), *self._tokens]), self._disk)
        return holds | (self._texts.close() if self._texts is not None else {})


def merge_documents(parts: Sequence[tuple[DocumentTable, NDArray[np.bool_]]], folder: Path, disk: Disk) -> dict[str, str]:
    """Merge the documents of segments, keeping chosen rows in order; the bytes equal those of a segment written at once.

    Args:
        parts: Documents of segments, each with the rows to keep; either all have texts or none.
        folder: Folder of the new segment.
        disk: Performs all writes.

    Returns:
        What each file holds, by name.
    """
    holds: dict[str, str] = {}
    if parts[0][0].texts is not None:
        writer = TextWriter(folder, disk)
        for table, keep in parts:
            if table.texts is None:
                raise ValueError("a segment with texts cannot be merged with one without")
            for row in np.flatnonzero(keep).tolist():
                writer.add_line(table.texts.line(row))
        holds |= writer.close()
    kept = [table.ids.strings.select(np.flatnonzero(keep)) for table, keep in parts]
    holds |= write_ids(folder, StringColumn.concatenate(kept), disk)
    holds |= _write_tokens(folder, np.concatenate([table.tokens.whole()[keep] for table, keep in parts]), disk)
    return holds | write_columns(folder, merge_columns([(table.metadata, keep) for table, keep in parts]), disk)


def _write_tokens(folder: Path, tokens: NDArray[np.uint32], disk: Disk) -> dict[str, str]:
    write_array(folder / _TOKEN_COUNTS, tokens, disk)
    return {
        _TOKEN_COUNTS: "what tokenising did to each document: 4 times its tokens, + 2 if it was truncated, + 1 if it was empty, (P,) uint32"
    }
