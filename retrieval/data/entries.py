"""Entries of files and the types of their fields: documents made of rows, checked ids, and `ColumnTypes`, which infers the types.

Every error about an entry begins with its position, ``file:line``.

A field has one type, decided by all of its values, or declared: a boolean, an integer (64 bits), a number, a date, a timestamp or a string,
or a list of one of these (``string[]``). A field with values of several types holds the widest of them: integers are numbers, unless a
float has another value than one of them; a single value among lists is a list of one; and any other mix is strings. Text is a date or a
timestamp only if all values are in the form of ISO 8601 (``2021-06-01``, ``2021-06-01T08:30:00``).

The cells of CSV and TSV are text: a column is of booleans, integers, numbers, amounts of one currency or dates if every cell that is not
missing is one; otherwise of strings, which stay as they are. Nothing is lost: leading zeros, plus signs, hexadecimal digits, percent signs,
infinity, and integers that 64 bits do not hold make strings. The rules are pandas' and pyarrow's where these agree. Neither reader is used,
because both lose some of these, and pyarrow decides by the first block of a file.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

from quiver.encoder.errors import InputError
from quiver.encoder.files import check_utf8, warn_once
from quiver.retrieval.records import Document, Metadata, Query, Value

STRING: Final = "string"
"""Type of a column whose cells are not all of another type."""

_BOOLEAN, _INTEGER, _NUMBER, _AMOUNT, _DATE, _TIMESTAMP = "boolean", "integer", "number", "amount", "date", "timestamp"
_WITH_ZONE = "timestamp with zone"  # not comparable with timestamps without one
FIELD_TYPES = (STRING, _INTEGER, _NUMBER, _BOOLEAN, _DATE, _TIMESTAMP)
"""Types of a field's values."""

LIST: Final = "[]"
"""What follows the type of the elements in the type of a field of lists."""

OnTypeError: TypeAlias = Literal["error", "null"]
"""What becomes of a value that does not fit the type of its field: an error, or no value for filters, which are counted."""

Typed: TypeAlias = str | int | float | bool | datetime.date | datetime.datetime
"""A value as a column of its type holds it."""

_INT64 = 1 << 63
_MAX_INTEGER = 2**53  # beyond it, floats skip integers
_ISO_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_ISO_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6})?)?(Z|[+-][0-9]{2}:?[0-9]{2})?")
_SIGNED = re.compile(r"[+-]?[0-9]{1,20}")
_PREFERRED = (_BOOLEAN, _INTEGER, _NUMBER)  # before amounts and dates, where several types fit all cells
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_DIGITS = re.compile(r"-?(?:0|[1-9][0-9]*)")
_REAL = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_DECIMAL_COMMA = re.compile(r"-?(?:0|[1-9][0-9]*|[1-9][0-9]{0,2}(?:\.[0-9]{3})+)(?:,[0-9]+)?")
_DECIMAL_POINT = re.compile(r"-?(?:0|[1-9][0-9]*|[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?:\.[0-9]+)?")
_CURRENCIES = "$€£¥"
_TIME = r"(?:(?P<clock>[ T])(?P<hour>[0-9]{1,2})(?P<rest>:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?(?:Z|[+-][0-9]{2}:?[0-9]{2})?))?"
_DAY_FIRST = re.compile(r"(?P<day>[0-9]{1,2})(?P<sign>[./-])(?P<month>[0-9]{1,2})(?P=sign)(?P<year>[12][0-9]{3})" + _TIME)
_YEAR_FIRST = re.compile(r"(?P<year>[12][0-9]{3})(?P<sign>[/-])(?P<month>[0-9]{1,2})(?P=sign)(?P<day>[0-9]{1,2})" + _TIME)
# What pandas and pyarrow read as a missing value; in a column of strings only a blank cell is one, so that Namibia's code NA is kept.
_MISSING = frozenset(
    {
        *("", "NA", "N/A", "n/a", "NaN", "nan", "-NaN", "-nan", "NULL", "null", "None", "<NA>"),
        *("#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "1.#IND", "1.#QNAN"),
    }
)
_MANY = 100  # cells of one type after which a cell that makes the column one of strings is worth a message

Identified = TypeVar("Identified", Document, Query)


class ColumnTypes:
    """Infers the type of each column from its cells, which are given row by row; memory does not grow with them.

    Example:
        >>> columns = ColumnTypes()
        >>> for price, code in (("1e-05", "02139"), ("", "90210"), ("7", "NA")):
        ...     _ = columns.add("price", price), columns.add("code", code)
        >>> columns.types()
        {'price': 'number', 'code': 'string'}
        >>> [read_cell(cell, "number") for cell in ("1e-05", "", "7")]
        [1e-05, None, 7.0]
    """

    def __init__(self) -> None:
        self._possible: dict[str, frozenset[str]] = {}  # types that fit all values so far; none: strings
        self._counts: dict[str, int] = {}
        self._lists: set[str] = set()
        self._mixed: set[str] = set()

    def add(self, column: str, cell: str, *, comma: bool = False, position: object = None) -> bool:
        """Take a cell into account; return whether the next cells can change the type of the column.

        With ``comma``, a comma begins decimals and dates may have the day first, as in files whose cells semicolons separate.
        ``position`` says in messages where the cell is.
        """
        before = self._possible.get(column)
        if before is not None and not before:
            return False
        stripped = cell.strip()
        if stripped in _MISSING:
            return True
        fitting = _types_of(stripped, comma)
        left = fitting if before is None else before & fitting
        self._possible[column] = left
        count = self._counts[column] = self._counts.get(column, 0) + 1
        if before and not left and count > _MANY and position is not None:
            warn_once(
                f"{position}: the column '{column}' holds strings because of {cell[:40]!r}; the {count - 1:,} values before it are"
                f" {_chosen_type(before).partition(' ')[0]}s"
            )
        return bool(left)

    def add_fields(self, fields: Metadata) -> None:
        """Take the typed values of a document into account, those of lists one by one.

        Example:
            >>> types = ColumnTypes()
            >>> for fields in ({"n": 1, "at": "2021-06-01", "tags": "a"}, {"n": 2.5, "tags": ["b"]}, {"mixed": True}, {"mixed": "x"}):
            ...     types.add_fields(fields)
            >>> types.types()
            {'n': 'number', 'at': 'date', 'tags': 'string[]', 'mixed': 'string'}
        """
        for field, value in fields.items():
            if not isinstance(value, str | int | float):
                self._lists.add(field)
                for each in value:
                    self._narrow(field, each)
                self._possible.setdefault(field, frozenset((STRING,)))
            else:
                self._narrow(field, value)

    def _narrow(self, field: str, value: Value) -> None:
        before, is_text = self._possible.get(field), isinstance(value, str)
        if before is None or before == {STRING}:
            self._possible[field] = _types_of_value(value)
        elif before or not is_text:
            left = self._possible[field] = before & _types_of_value(value)
            if not left and not (is_text and before <= {_DATE, _TIMESTAMP, _WITH_ZONE}) and field not in self._mixed:
                self._mixed.add(field)
                warn_once(
                    f"field '{field}' has values of several types, such as {_chosen_type(before)} and {str(value)[:40]!r}, and is of"
                    f" strings; with a type that is declared (--type {field}=..., types=) those that do not fit are named"
                )

    def types(self) -> dict[str, str]:
        """Column -> type, for `read_cell` and `typed_value`, of the columns that have values; all others are of strings."""
        return {
            column: (_TIMESTAMP if _WITH_ZONE in possible else _chosen_type(possible)) + (LIST if column in self._lists else "")
            for column, possible in self._possible.items()
        }


def _chosen_type(possible: Iterable[str]) -> str:
    """One of the types that fit all cells of a column."""
    return next((each for each in _PREFERRED if each in possible), next(iter(possible), STRING))


def _types_of_value(value: Value) -> frozenset[str]:
    """The types that a value fits; none if it can only be a string."""
    if isinstance(value, str):
        return _types_of_text(value) if len(value) <= 32 and value[:4].isdigit() else frozenset()
    if isinstance(value, bool):
        return frozenset((_BOOLEAN,))
    found = {_NUMBER} if isinstance(value, float) or _is_exact(value) else set()
    return frozenset(found | {_INTEGER} if isinstance(value, int) and -_INT64 <= value < _INT64 else found)


@lru_cache(maxsize=1 << 16)
def _types_of_text(text: str) -> frozenset[str]:
    with suppress(ValueError):
        if _ISO_DATE.fullmatch(text) and typed_value(text, _DATE):
            return frozenset((_DATE,))
        if (time := _ISO_TIME.fullmatch(text)) and typed_value(text, _TIMESTAMP):
            return frozenset((_WITH_ZONE if time[1] else _TIMESTAMP,))
    return frozenset()


def typed_value(value: Value, kind: str) -> Typed:
    """A value as a column of a type holds it; text is read, and timestamps with a zone are those of UTC. ValueError: it does not fit.

    Example:
        >>> typed_value(2012, "number"), typed_value("7", "integer"), typed_value("2021-06-01", "date"), typed_value(7, "string")
        (2012.0, 7, datetime.date(2021, 6, 1), '7')
    """
    if kind == STRING:
        return value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, str):
        return _typed_text(value, kind)
    if kind == _BOOLEAN and isinstance(value, bool):
        return value
    if not isinstance(value, bool):
        if kind == _NUMBER and (_is_exact(value) if isinstance(value, int) else math.isfinite(value)):
            return float(value)
        if kind == _INTEGER and -_INT64 <= value < _INT64 and value == int(value):
            return int(value)
    raise ValueError(f"not a {kind}")


def _typed_text(text: str, kind: str) -> Typed:
    if kind == _DATE and _ISO_DATE.fullmatch(text):
        return datetime.date.fromisoformat(text)
    if kind == _TIMESTAMP and (time := _ISO_TIME.fullmatch(text)):
        zone = time[1] or ""
        seconds, point, fraction = text.removesuffix(zone).partition(".")
        plain = datetime.datetime.fromisoformat(seconds + point + fraction.ljust(6 if point else 0, "0"))
        if zone not in ("", "Z"):
            offset = datetime.timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
            with suppress(OverflowError):
                return plain + offset if zone[0] == "-" else plain - offset
        else:
            return plain
    if kind == _BOOLEAN and text in _BOOLEANS:
        return _BOOLEANS[text]
    if (kind == _INTEGER and _SIGNED.fullmatch(text)) or (kind == _NUMBER and _REAL.fullmatch(text.removeprefix("+"))):
        return typed_value((int if kind == _INTEGER else float)(text), kind)
    raise ValueError(f"not a {kind}")


def parse_types(declared: Mapping[str, str]) -> dict[str, str]:
    """Check declared types: field -> type.

    Raises:
        InputError: A type is unknown.

    Example:
        >>> parse_types({"created": "date", "tags": "string[]"})
        {'created': 'date', 'tags': 'string[]'}
    """
    if not isinstance(declared, Mapping):
        raise InputError(f"types must be a mapping from field to type, such as {{'created': 'date'}}, got {declared!r}")
    for field, kind in declared.items():
        if str(kind).removesuffix(LIST) not in FIELD_TYPES:
            raise InputError(f"--type {field}={kind}: a type is {', '.join(FIELD_TYPES)}, or a list of one such as string[]")
    return dict(declared)


@lru_cache(maxsize=1 << 16)  # the cells of a column often repeat
def _types_of(cell: str, comma: bool) -> frozenset[str]:
    """The types that a cell fits; none if it can only be a string."""
    if cell in _BOOLEANS:
        return frozenset((_BOOLEAN,))
    found = set[str]()
    sign, bare = _split_sign(cell)
    # An integer is a string if a column of its type would not hold its value.
    digits = _DIGITS.fullmatch(bare)
    exact = not digits or (len(bare) <= 20 and _is_exact(int(bare)))
    if digits and not sign and len(cell) <= 20 and -_INT64 <= int(cell) < _INT64:
        found.add(_INTEGER)
    if _REAL.fullmatch(cell) and exact and math.isfinite(float(cell)):
        found.add(_NUMBER)
    if (sign or comma) and exact and (_DECIMAL_COMMA if comma else _DECIMAL_POINT).fullmatch(bare):
        found.add(f"{_AMOUNT} {sign}")
    if _iso_date(cell, day_first=comma) is not None:
        found.add(_DATE)
    return frozenset(found)


def _is_exact(value: int) -> bool:
    """Whether a float has the value of an integer: beyond 2**53 not each has."""
    return abs(value) <= sys.float_info.max and int(float(value)) == value


def read_cell(cell: str, kind: str, *, comma: bool = False) -> str | int | float | bool | None:
    """The value of a cell in a column of a type that `ColumnTypes.types` says.

    Example:
        >>> read_cell("02139", "string"), read_cell("NA", "string"), read_cell("NA", "integer"), read_cell(" 7", "integer")
        ('02139', 'NA', None, 7)
        >>> [read_cell(cell, "amount €", comma=True) for cell in ("0,5", "1.250", "-1.250,50 €")], read_cell("$1,299.50", "amount $")
        ([0.5, 1250.0, -1250.5], 1299.5)
        >>> [read_cell(cell, "date") for cell in ("2017/2/9 8:30", "2017-02-19", "2017-02-31", "9/2/2017", "2017/2/9 8:30 PM")]
        ['2017-02-09 08:30', '2017-02-19', None, None, None]
        >>> [read_cell(cell, "date", comma=True) for cell in ("9.2.2017", "19/02/2017 08:30", "31.02.2017", "2017-02-19")]
        ['2017-02-09', '2017-02-19 08:30', None, '2017-02-19']
    """
    stripped = cell.strip()
    if kind == STRING:
        return cell if stripped else None
    if stripped in _MISSING:
        return None
    if kind == _BOOLEAN:
        return _BOOLEANS[stripped]
    if kind == _DATE:
        return _iso_date(stripped, day_first=comma)
    if kind.startswith(_AMOUNT):
        _, bare = _split_sign(stripped)
        thousands, point = (".", ",") if comma else (",", ".")
        return float(bare.replace(thousands, "").replace(point, "."))
    return int(stripped) if kind == _INTEGER else float(stripped)


def _split_sign(cell: str) -> tuple[str, str]:
    """The sign of a currency before or behind a number, and the number."""
    bare = cell.strip(_CURRENCIES).strip()
    return cell.replace(bare, "", 1).strip(), bare


def _iso_date(cell: str, *, day_first: bool) -> str | None:
    """A date as that of ISO 8601; None if it is no such date."""
    date = _YEAR_FIRST.fullmatch(cell) or (_DAY_FIRST.fullmatch(cell) if day_first else None)
    with suppress(ValueError):  # no such day
        time = f"{date['clock']}{date['hour'].zfill(2)}{date['rest']}" if date and date["hour"] else ""
        return f"{datetime.date(int(date['year']), int(date['month']), int(date['day']))}{time}" if date else None
    return None


class EntryPosition(NamedTuple):
    """Position of an entry: its file and line (in a table: row), from 1."""

    file: Path
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"

    def seen_from(self, other: EntryPosition) -> str:
        """Describe this position for an error that begins with another position: ``on line 3``."""
        if self.file != other.file:
            return f"in {self}"
        return f"{'in row' if self.file.name.removesuffix('.gz').endswith(('.parquet', '.arrow', '.json')) else 'on line'} {self.number}"


Position = TypeVar("Position", EntryPosition, None)


class FieldNames(NamedTuple):
    """Names of the fields of documents or queries in a file; those of the id in order of preference."""

    id: tuple[str, ...] = ("_id", "id")
    text: str = "text"
    title: str = "title"


BEIR_FIELDS = FieldNames()
"""Field names of BEIR files."""


def to_document(position: EntryPosition, row: Mapping[str, object], columns: FieldNames = BEIR_FIELDS) -> Document:
    """Make a document of a row, without metadata. The text may be empty, the id may be an integer.

    Raises:
        InputError: A field is missing or has the wrong type, or the id is blank.
    """
    key = id_of_row(position, row, columns)
    title = row.get(columns.title)
    if title is not None and not isinstance(title, str):
        raise InputError(f"{position}: '{columns.title}' must be a string, got {show_value(title)}")
    return Document(key, text_of_row(position, row, columns), check_utf8(title or "", f"{position}: '{columns.title}'"))


def to_metadata(position: EntryPosition, row: Mapping[str, object], columns: FieldNames = BEIR_FIELDS) -> Metadata | None:
    """Make the metadata of a row: all fields that are not part of the document, see `flat_metadata`; None if there are none.

    The fields of BEIR's object ``metadata`` are treated as fields of the row; the row's own take precedence. A ``metadata`` that is not an
    object is a field of that name.

    Example:
        >>> to_metadata(EntryPosition(Path("c.jsonl"), 1), {"_id": "a", "text": "x", "year": 2019, "metadata": {"tags": ["b", "c"]}})
        {'tags': ['b', 'c'], 'year': 2019}
    """
    inner = row.get("metadata")
    fields = {**inner} if isinstance(inner, Mapping) else {"metadata": inner}
    key = next((name for name in columns.id if name in row), "")  # another one, such as an ``id`` beside ``_id``, is a field
    own = {key, columns.text, columns.title, "metadata"}
    fields |= {name: value for name, value in row.items() if name not in own}
    return flat_metadata(fields, where=str(position))


def checked_document(document: Document) -> Document:
    """Apply the rules for files to a document from Python code: an integer id becomes a string, metadata are flattened.

    Raises:
        InputError: The id is blank or neither a string nor an integer, or a value cannot be metadata.
    """
    key = as_id(document.id)
    if not key.isascii():
        check_utf8(key, f"the id {key!a} of a document")
    if not key.strip():
        raise InputError("the id of a document is blank")
    for name, text in (("title", document.title), ("text", document.text)):
        if isinstance(text, str):
            check_utf8(text, f"document {key!r}: the {name}")
    given: object = document.metadata
    if given is not None and not isinstance(given, Mapping):
        raise InputError(f"document {key!r}: the metadata must be a mapping from field to value, got {show_value(given)}")
    return document._replace(id=key, metadata=flat_metadata(given or {}, where=f"document {key!r}"))


def flat_metadata(fields: Mapping[str, object], *, where: str) -> Metadata | None:
    """Flatten metadata to what an index stores: field -> string, finite number, boolean, or list of these; None if there are none.

    Fields of a nested object are named ``object.field``; those of objects in a list become lists. Null and NaN mean a missing value.
    ``where`` is the position of the document, for errors.

    Raises:
        InputError: A value has another type, a field's name is not a string, or two fields get the same name.

    Example:
        >>> flat_metadata({"venue": {"name": "ACL", "year": 2020}, "authors": [{"name": "A"}, {"name": "B"}], "doi": None}, where="d1")
        {'venue.name': 'ACL', 'venue.year': 2020, 'authors.name': ['A', 'B']}
    """
    found: dict[str, Value | list[Value]] = {}
    lists: dict[str, list[Value]] = {}
    paths: dict[str, tuple[str, ...]] = {}
    left: list[tuple[tuple[Any, ...], object, bool]] = [((name,), value, False) for name, value in reversed(list(fields.items()))]
    while left:
        path, value, listed = left.pop()
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not isinstance(path[-1], str):
            raise InputError(f"{where}: names of metadata fields must be strings, got {path[-1]!r}")
        name = check_utf8(".".join(path), f"{where}: the name {path[-1]!r}")
        if isinstance(value, Mapping):
            left += [((*path, inner), each, listed) for inner, each in reversed(list(value.items()))]
        elif not is_missing(value):
            if paths.setdefault(name, path) != path:
                raise InputError(f"{where}: two metadata fields have the name {name!r}: one with a dot and one in an object; rename one")
            if isinstance(value, list | tuple):
                left += [(path, each, True) for each in reversed(value)]
                found.update({} if value else {name: lists.setdefault(name, [])})
            elif listed:
                found[name] = lists.setdefault(name, [])
                lists[name].append(_value(value, name, where))
            else:
                found[name] = _value(value, name, where)
    return cast(Metadata, found) or None


def is_missing(value: object) -> bool:
    """Whether a value is None or NaN."""
    return value is None or (isinstance(value, float | np.floating) and math.isnan(value))


def _value(value: object, name: str, where: str) -> Value:
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, str):
        return check_utf8(plain, f"{where}: metadata field {name!r}")
    if isinstance(plain, int) or (isinstance(plain, float) and math.isfinite(plain)):
        return plain
    kinds = "strings, finite numbers, booleans, or lists or objects of these"
    raise InputError(f"{where}: metadata field {name!r} must hold {kinds}, got {show_value(plain)}")


def check_id(position: EntryPosition, key: str) -> str:
    """Return the id unchanged; raises InputError if it is blank, or contains half of a surrogate pair."""
    if not check_utf8(key, f"{position}: the id").strip():
        raise InputError(f"{position}: the id is blank")
    return key


def key_of(value: object) -> str | None:
    """Return a string or integer id as a string; None for other types. Pandas makes floats of integers in a column with gaps: 7.0 is 7."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, float | np.floating):
        return str(int(value)) if abs(value) < _MAX_INTEGER and value == int(value) else None
    return value if isinstance(value, str) else None


def as_id(value: object) -> str:
    """Return a string or integer id from Python code as a string; raises InputError if it is neither."""
    key = key_of(value)
    if key is None:
        raise InputError(f"the id of a document must be a string or an integer, got {value!r}")
    return key


def unique(
    read: Callable[[], Iterable[tuple[Position, Identified]]], *, hashed: Callable[[str], int] = hash
) -> Iterator[tuple[Position, Identified]]:
    """Yield entries, and check at the end that all ids are unique; raises InputError that names the positions of both entries.

    Only 8-byte hashes are kept, so five million ids take 40 MB (80 MB while they are sorted). Entries of equal hash are read a second time,
    by another call of ``read``, and compared.
    """
    hashes = array("q")
    for position, entry in read():
        hashes.append(hashed(entry.id))
        yield position, entry
    ordered = np.sort(np.frombuffer(hashes, np.int64)) if hashes else np.empty(0, np.int64)
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    seen: dict[str, Position] = {}
    for position, entry in read() if suspects else ():
        if hashed(entry.id) in suspects:
            if (before := seen.get(entry.id)) is not None and position is not None:
                raise InputError(f"{position}: id '{entry.id}' is already used {before.seen_from(position)}; ids must be unique")
            if entry.id in seen:
                raise InputError(f"document id '{entry.id}' occurs twice; ids must be unique")
            seen[entry.id] = position


def id_of_row(position: EntryPosition, row: Mapping[str, object], columns: FieldNames) -> str:
    """The id of a row, checked."""
    value = next((row[name] for name in columns.id if name in row), None)
    key = key_of(value)
    if key is None:
        first, *others = (f"'{name}'" for name in columns.id)
        raise InputError(
            f"{position}: {first}{f' (or {others[0]})' if others else ''} must be a string or an integer, got {show_value(value)}"
        )
    return check_id(position, key)


def text_of_row(position: EntryPosition, row: Mapping[str, object], columns: FieldNames) -> str:
    """The text of a row, checked."""
    text = row.get(columns.text)
    if not isinstance(text, str):
        remedy = "; leave the row out, or give it an empty text" if text is None else ""
        raise InputError(f"{position}: '{columns.text}' must be a string, got {show_value(text)}{remedy}")
    return check_utf8(text, f"{position}: '{columns.text}'")


def show_value(value: object) -> str:
    """A value for an error, in at most 40 characters."""
    if value is None:
        return "nothing"
    known = isinstance(value, str | int | float | list | tuple | Mapping)
    text = json.dumps(value, default=str) if known else f"a {type(value).__name__}, {value}"
    return text if len(text) <= 40 else f"{text[:40]}..."
