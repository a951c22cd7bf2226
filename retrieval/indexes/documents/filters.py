"""Filters: which documents may be found, by their metadata and their ids.

As text a condition is ``field=value``, ``!=``, ``<``, ``<=``, ``>``, ``>=`` or ``field in a,b,c``; the field ends at the first operator
or the first word ``in``. A word that reads as a number is compared with numbers as a number and with strings as it stands; in quotes it
is a string alone. A document has the value of a field if it is one of its values, where the field is a list.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from retrieval.indexes.documents.metadata import Column, MetadataTable, typed
from retrieval.indexes.documents.strings import LOOK, PackedStrings
from retrieval.indexes.errors import DamagedIndexError
from retrieval.records import Value

Operator: TypeAlias = Literal["=", "!=", "<", "<=", ">", ">="]

# Nothing here repeats a class of characters next to one that it overlaps with, so a text is read in time linear in its length.
_OPERATOR = re.compile(r"!=|<=|>=|=|<|>")
_MEMBERSHIP = re.compile(r"\sin\s")
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[^",]+|,', re.DOTALL)  # an open string goes on to the end
_OPERATORS: dict[str, Operator] = {"=": "=", "!=": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}


@dataclass(frozen=True)
class Condition:
    """A comparison of a field.

    Attributes:
        field: Name of the field.
        operator: ``=`` is true of a document that has one of the values, ``!=`` of every other one, also one without the field; the
            others are true of a document that has a value of the right side's type in that relation to one of them.
        values: The right side, one value at least.
    """

    field: str
    operator: Operator
    values: tuple[Value, ...]

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition.

        Raises:
            InputError: It is none.

        Example:
            >>> Condition.parse("year >= 2019")
            Condition(field='year', operator='>=', values=(2019, '2019'))
            >>> Condition.parse('lang in en, "de"')
            Condition(field='lang', operator='=', values=('en', 'de'))
        """
        told = text.strip()
        comparison = _OPERATOR.search(told)
        membership = _MEMBERSHIP.search(told, 0, len(told) if comparison is None else comparison.start())
        found = membership or comparison
        field, value = (told[: found.start()].rstrip(), told[found.end() :].lstrip()) if found else ("", "")
        if found is None or not field or "!" in field or not value:
            raise InputError(f"filter {text!r}: expected field=value, !=, <, <=, >, >= or field in a,b,c")
        if found is membership:
            return cls(field, "=", tuple(each for word in _split(text, value) for each in _read(word)))
        return cls(field, _OPERATORS[found[0]], _read(value))


@dataclass(frozen=True)
class Filter:
    """Which documents may be found: those of which all conditions are true, and whose id is among the ids if some are given.

    Attributes:
        conditions: May be none.
        ids: None for all documents; ids that the index does not have are passed over.
    """

    conditions: tuple[Condition, ...] = ()
    ids: frozenset[str] | None = None

    @classmethod
    def parse(cls, conditions: Sequence[str], *, ids: Sequence[str] | None = None) -> Filter:
        """A filter from conditions as text.

        Raises:
            InputError: One is malformed.
        """
        return cls(tuple(map(Condition.parse, conditions)), None if ids is None else frozenset(ids))


def matching_rows(condition: Condition, table: MetadataTable, count: int) -> NDArray[np.bool_]:
    """The rows of a segment of which a condition is true, (count,).

    Raises:
        DamagedIndexError: A column is not what was written.
    """
    found = np.zeros(count, bool)
    for column in table.columns:
        if column.field == condition.field:
            for value in condition.values:
                rows = column.rows_between(*_span(column, condition.operator, value))
                if len(rows) and int(rows.max()) >= count:
                    raise DamagedIndexError(f"the column of {column.field!r} names a row that there is not; {LOOK}")
                found[rows] = True
    return ~found if condition.operator == "!=" else found


def _span(column: Column, operator: Operator, value: Value) -> tuple[int, int]:
    """The numbers of a column's values that stand in a relation to a value, from the first to behind the last."""
    size = len(column.values)
    bounds = _bounds(column, value)
    if bounds is None:
        return 0, 0
    below, above = bounds
    spans = {"=": (below, above), "!=": (below, above), "<": (0, below), "<=": (0, above), ">": (above, size), ">=": (below, size)}
    return spans[operator]


def _bounds(column: Column, value: Value) -> tuple[int, int] | None:
    """How many of a column's values are less than a value, and how many are not greater; None where they cannot be compared."""
    kind, stored = typed(value)
    if column.type == "string" or kind == "string":
        if not isinstance(column.values, PackedStrings) or not isinstance(stored, str):
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


def _bisect(values: PackedStrings, wanted: bytes) -> tuple[int, int]:
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values.bytes_of(middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low, low + (low < len(values) and values.bytes_of(low) == wanted)


def _read(word: str) -> tuple[Value, ...]:
    """What a word may be: a number or a truth value if it reads as one, and a string; in quotes a string alone."""
    if word.startswith('"'):
        try:
            quoted = json.loads(word)
        except ValueError as error:
            raise InputError(f"filter: {word} is not a string in quotes ({error})") from error
        if isinstance(quoted, str):
            return (quoted,)
    if word in ("true", "false"):
        return word == "true", word
    for number in (int, float):
        try:
            value = number(word)
        except ValueError:
            continue
        # An integer is not asked: beyond 300 digits it cannot be turned into the float that isfinite looks at.
        return (value, word) if isinstance(value, int) or math.isfinite(value) else (word,)
    return (word,)


def _split(text: str, values: str) -> list[str]:
    """Words between commas; a comma in quotes belongs to its word."""
    words: list[list[str]] = [[]]
    for token in _TOKENS.findall(values):
        if token == ",":
            words.append([])
        elif token.strip():
            words[-1].append(token.strip())
    found = [tokens[0] for tokens in words if tokens]
    if not found or any(len(tokens) > 1 for tokens in words):
        raise InputError(f"filter {text!r}: expected values between commas behind 'in'")
    return found
