"""Filters: which documents may be found, by their metadata and their ids.

A condition as text is ``FIELD OPERATOR VALUE``, with one of the operators ``=`` (or ``==``), ``!=``, ``<``, ``<=``, ``>``, ``>=``; or
``FIELD in VALUE, VALUE, ...``. Spaces between these parts do not count. A field or value that has spaces or one of ``" = ! < > , ( ) & |``
in it, or begins with ``'``, stands in double quotes, with the escapes of JSON. There is no ``and`` and no ``or``: each condition is a
text of its own, and all of them must be true.

A value without quotes that reads as a number or as ``true`` or ``false`` is compared with numbers or truth values as such, and with strings
as it stands; in quotes it is a string alone. A document has the value of a field if it is one of its values, where the field is a list.
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

from quiver.encoder.errors import InputError
from quiver.retrieval.index.documents.metadata import Column, MetadataTable, typed
from quiver.retrieval.index.documents.strings import LOOK, PackedStrings
from quiver.retrieval.index.errors import DamagedIndexError
from quiver.retrieval.records import Value

Operator: TypeAlias = Literal["=", "!=", "<", "<=", ">", ">="]

GRAMMAR = "field=value, !=, <, <=, >, >= or 'field in a,b'"
"""A condition in short."""

_QUOTING = 'put a field or value that has spaces or any of " = ! < > , ( ) & | in double quotes, such as city="New York"'
_ALONE = "give each condition by itself, all of them must hold; for alternatives of one field write 'field in a,b'"
# A text without white space at its end is split in time linear in its length: reading stops at the first character that fits nowhere.
_TOKENS = re.compile(
    r"""\s*(?:(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<operator>==|[!<>]=|[=<>])|(?P<comma>,)|(?P<bare>[^\s"=!<>,()&|'][^\s"=!<>,()&|]*)|(?P<other>\S))""",
    re.DOTALL,
)
_WORDS = frozenset({"quoted", "bare"})
_COMBINING = frozenset({"and", "or"})
# Characters of a malformed condition that an error repeats.
_SHOWN = 80
_OPERATORS: dict[str, Operator] = {"=": "=", "==": "=", "!=": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}


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
        """Read a condition, in the grammar of this module.

        Raises:
            InputError: It is malformed; says the grammar.

        Example:
            >>> Condition.parse("year >= 2019")
            Condition(field='year', operator='>=', values=(2019, '2019'))
            >>> Condition.parse('lang in en, "de"')
            Condition(field='lang', operator='=', values=('en', 'de'))
            >>> Condition.parse('"first author" == "J. Doe"')
            Condition(field='first author', operator='=', values=('J. Doe',))
        """
        tokens = _split(text)
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
        return cls(_string(words[0]), operator, tuple(each for value in words[1:] for each in _read(value)))


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
    def parse(cls, conditions: str | Sequence[str], *, ids: Sequence[str] | None = None) -> Filter:
        """A filter from a condition as text, or from several that must all hold.

        Raises:
            InputError: One is malformed.
        """
        texts = [conditions] if isinstance(conditions, str) else conditions
        return cls(tuple(map(Condition.parse, texts)), None if ids is None else frozenset(ids))


FilterLike: TypeAlias = Filter | str | Sequence[str] | None
"""The filter of a search: a condition such as ``"year>=2015"``, several that must all hold, or a `Filter`; None for all documents."""


def as_filter(filter: FilterLike) -> Filter | None:
    """The filter of a search.

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
    return InputError(f"filter {shown!r}: expected {GRAMMAR}; {_ALONE if combined else _QUOTING}")


def _string(token: _Token) -> str:
    if token.kind == "bare":
        return token.text
    try:
        return str(json.loads(token.text))
    except ValueError as error:
        raise InputError(f"filter: {token.text} is not a string in double quotes ({error})") from error


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
