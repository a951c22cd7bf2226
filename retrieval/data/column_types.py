"""Types of the columns of CSV and TSV, whose cells are text: one type per column, decided by all of its cells.

A column is of booleans, integers, numbers, amounts of one currency or dates if every cell that is not missing is one; otherwise of strings,
which stay as they are. Nothing is lost: leading zeros, plus signs, hexadecimal digits, percent signs, infinity, and integers that 64 bits
do not hold make strings.

The rules are pandas' and pyarrow's where these agree. Neither reader is used: both take ``007`` for 7, pandas drops the sign of ``+49``
and takes the text ``NA`` for a missing value, and pyarrow decides by the first block of a file and reads integers of 20 digits as floats.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Final

from quiver.encoder.files import warn_once
from quiver.retrieval.data.corpus import EntryPosition

STRING: Final = "string"
"""Type of a column whose cells are not all of another type."""

_BOOLEAN, _INTEGER, _NUMBER, _AMOUNT, _DATE = "boolean", "integer", "number", "amount", "date"
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
        self._possible: dict[str, frozenset[str]] = {}  # types that fit all cells so far; none: strings
        self._counts: dict[str, int] = {}

    def add(self, column: str, cell: str, *, comma: bool = False, position: EntryPosition | None = None) -> bool:
        """Take a cell into account.

        Args:
            column: Name of the column.
            cell: The cell.
            comma: Whether a comma begins decimals, and dates may have the day first, as in files whose cells semicolons separate.
            position: Where the cell is, for messages.

        Returns:
            Whether the next cells can change the type of the column.
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

    def types(self) -> dict[str, str]:
        """Column -> type, for `read_cell`, of the columns that have values; all others are of strings."""
        return {column: _chosen_type(possible) for column, possible in self._possible.items()}


def _chosen_type(possible: Iterable[str]) -> str:
    """One of the types that fit all cells of a column."""
    return next((each for each in _PREFERRED if each in possible), next(iter(possible), STRING))


@lru_cache(maxsize=1 << 16)  # the cells of a column often repeat
def _types_of(cell: str, comma: bool) -> frozenset[str]:
    """The types that a cell fits; none if it can only be a string."""
    if cell in _BOOLEANS:
        return frozenset((_BOOLEAN,))
    found = set[str]()
    sign, bare = _split_sign(cell)
    # An integer is a string if a column of its type would not hold its value.
    digits = _DIGITS.fullmatch(bare)
    exact = not digits or _is_exact(bare)
    if digits and not sign and len(cell) <= 20 and -(1 << 63) <= int(cell) < 1 << 63:
        found.add(_INTEGER)
    if _REAL.fullmatch(cell) and exact and math.isfinite(float(cell)):
        found.add(_NUMBER)
    if (sign or comma) and exact and (_DECIMAL_COMMA if comma else _DECIMAL_POINT).fullmatch(bare):
        found.add(f"{_AMOUNT} {sign}")
    if _iso_date(cell, day_first=comma) is not None:
        found.add(_DATE)
    return frozenset(found)


def _is_exact(digits: str) -> bool:
    """Whether a float is the value of an integer."""
    return len(digits) <= 20 and int(float(digits)) == int(digits)


def read_cell(cell: str, kind: str, *, comma: bool = False) -> str | int | float | bool | None:
    """The value of a cell in a column of a type.

    Args:
        cell: The cell.
        kind: The type, as `ColumnTypes.types` says it.
        comma: As for `ColumnTypes.add`.

    Example:
        >>> read_cell("02139", "string"), read_cell("NA", "string"), read_cell("NA", "integer"), read_cell(" 7", "integer")
        ('02139', 'NA', None, 7)
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
        return _amount(stripped, comma=comma)
    return int(stripped) if kind == _INTEGER else float(stripped)


def _split_sign(cell: str) -> tuple[str, str]:
    """The sign of a currency before or behind a number, and the number."""
    bare = cell.strip(_CURRENCIES).strip()
    return cell.replace(bare, "", 1).strip(), bare


def _amount(cell: str, *, comma: bool) -> float:
    """A number without the sign of its currency.

    Example:
        >>> [_amount(cell, comma=True) for cell in ("0,5", "1.250", "-1.250,50 €")]
        [0.5, 1250.0, -1250.5]
        >>> _amount("$1,299.50", comma=False)
        1299.5
    """
    _, bare = _split_sign(cell)
    thousands, point = (".", ",") if comma else (",", ".")
    return float(bare.replace(thousands, "").replace(point, "."))


def _iso_date(cell: str, *, day_first: bool) -> str | None:
    """A date as that of ISO 8601; None if it is no such date.

    Example:
        >>> [_iso_date(cell, day_first=False) for cell in ("2017/2/9 8:30", "2017-02-19", "2017-02-31", "9/2/2017", "2017/2/9 8:30 PM")]
        ['2017-02-09 08:30', '2017-02-19', None, None, None]
        >>> [_iso_date(cell, day_first=True) for cell in ("9.2.2017", "19/02/2017 08:30", "31.02.2017", "2017-02-19")]
        ['2017-02-09', '2017-02-19 08:30', None, '2017-02-19']
    """
    date = _YEAR_FIRST.fullmatch(cell) or (_DAY_FIRST.fullmatch(cell) if day_first else None)
    with suppress(ValueError):  # no such day
        time = f"{date['clock']}{date['hour'].zfill(2)}{date['rest']}" if date and date["hour"] else ""
        return f"{datetime.date(int(date['year']), int(date['month']), int(date['day']))}{time}" if date else None
    return None
