"""Filters: SQL WHERE expressions over the typed Arrow columns of documents.

An expression has comparisons, AND, OR, NOT, IN, BETWEEN, LIKE, IS [NOT] NULL, boolean fields and ``array_contains(list, value)``. It is
parsed by sqlglot, checked against the types of the fields, and evaluated with SQL's three-valued logic: a comparison with a missing value
is unknown, NOT of unknown is unknown, and a document matches where the whole expression is true.

Strings are compared once per distinct value where a column has a dictionary, lists once per element; each element's row is computed once.

Shapes: P documents, E entries of a column: P, or the elements of all lists.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from fractions import Fraction
from functools import cached_property, lru_cache, reduce
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from quiver.encoder.errors import InputError, check_utf8
from quiver.retrieval.index.columns import binary_column, bits_of, number_column, numbers_of
from quiver.retrieval.index.engines import did_you_mean
from quiver.retrieval.records import Value

if TYPE_CHECKING:
    from sqlglot import exp

Mask: TypeAlias = NDArray[np.bool_]
Kind: TypeAlias = Literal["string", "integer", "number", "boolean", "date", "timestamp"]

_EXAMPLE = "a SQL condition such as year >= 2010 AND lang IN ('en', 'de')"
_SUPPORTED = "a filter has comparisons, AND, OR, NOT, IN, BETWEEN, LIKE, IS NULL and array_contains(list, value)"
_SHOWN = 80  # characters of a malformed filter that an error repeats
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_INT64 = np.iinfo(np.int64)
_WORDS = {"and", "or", "not", "in", "between", "like", "ilike", "escape", "is", "null", "true", "false"}  # the others name fields


def is_list(type: pa.DataType) -> bool:  # noqa: A002
    """Whether a column holds lists."""
    return bool(pa.types.is_list(type) or pa.types.is_large_list(type))


def kind_of(type: pa.DataType) -> Kind:  # noqa: A002
    """The kind of a column's values; that of the elements for a list.

    Example:
        >>> kind_of(pa.list_(pa.int64())), kind_of(pa.dictionary(pa.int32(), pa.string()))
        ('integer', 'string')
    """
    if is_list(type) or pa.types.is_dictionary(type):
        return kind_of(type.value_type)
    kinds: list[tuple[Callable[[pa.DataType], bool], Kind]] = [
        (pa.types.is_boolean, "boolean"),
        (pa.types.is_integer, "integer"),
        (pa.types.is_floating, "number"),
        (pa.types.is_date32, "date"),
        (pa.types.is_timestamp, "timestamp"),
    ]
    return next((kind for test, kind in kinds if test(type)), "string")


def type_name(type: pa.DataType) -> str:  # noqa: A002
    """The name of a type for people, such as ``integer`` or ``list of strings``."""
    return f"list of {kind_of(type)}s" if is_list(type) else kind_of(type)


class Vector:
    """The entries of one column, ready for comparisons; entries that are null have any value.

    Args:
        array: The column, in one piece.

    Attributes:
        kind: Kind of the entries.
        words: The strings: those of a dictionary, else one per entry; None for other kinds.
        data: Numbers, days, units of time or truth values, or the number of each entry's word, (E,); None for strings without a dictionary.
        valid: Entries that are not null, (E,); None if none is null.
        rows: The row of each element of a list, (E,); None for a column without lists.
        present: Rows that are not null, (P,); None if none is null.
    """

    def __init__(self, array: pa.Array) -> None:
        self.kind = kind_of(array.type)
        self.present = _valid_entries(array)
        self.rows: NDArray[np.uint32] | None = None
        if is_list(array.type):
            self.rows = numbers_of(pc.list_parent_indices(array)).astype(np.uint32)
            array = array.flatten()
        self.valid = _valid_entries(array)
        self.type = array.type
        self.words: pa.Array | None = None
        self.data: NDArray[Any] | None = None
        if pa.types.is_dictionary(array.type):
            self.words, self.data = array.dictionary, numbers_of(array.indices)
        elif self.kind == "string":
            self.words = array.cast(pa.string()) if pa.types.is_null(array.type) else array
        else:
            self.data = bits_of(array.buffers()[1], array) if self.kind == "boolean" else numbers_of(array)

    @cached_property
    def codes(self) -> tuple[pa.Array | NDArray[Any], NDArray[Any]]:
        """The distinct values, and the number of each entry's value, (E,)."""
        if self.words is None:
            distinct, codes = np.unique(cast("NDArray[Any]", self.data), return_inverse=True)
            return distinct, codes
        if self.data is not None:
            return self.words, self.data
        encoded = self.words.dictionary_encode()
        codes = numbers_of(encoded.indices)
        return encoded.dictionary, codes if self.valid is None else np.where(self.valid, codes, 0)

    @cached_property
    def counted(self) -> Mask | None:
        """Entries that are neither null nor repeat an earlier element of their list, (E,); None for all."""
        if self.rows is None:
            return self.valid
        codes = self.codes[1].astype(np.int64)
        if self.valid is not None:
            codes[~self.valid] = -1
        keys = codes << 32 | self.rows
        order = np.argsort(keys, kind="stable")
        first = np.ones(len(keys), bool)
        first[order[1:]] = keys[order[1:]] != keys[order[:-1]]
        return first if self.valid is None else first & self.valid

    def to_values(self, numbers: NDArray[np.int64]) -> list[Value]:
        """Distinct values by number, as metadata has them: dates and times as ISO text."""
        values = self.codes[0]
        if not isinstance(values, np.ndarray):
            return cast("list[Value]", values.take(number_column(numbers)).to_pylist())
        if self.kind in ("date", "timestamp"):
            return [each.isoformat() for each in number_column(values[numbers]).view(self.type).to_pylist()]
        return cast("list[Value]", values[numbers].tolist())


def _valid_entries(array: pa.Array) -> Mask | None:
    if not array.null_count:
        return None
    return np.zeros(len(array), bool) if pa.types.is_null(array.type) else bits_of(array.buffers()[0], array)


class Columns:
    """The columns of P documents by field, read on first use.

    Args:
        count: Number of documents P.
        read: Function from a field to its column, or None if no document has the field; ``id`` is that of the documents, unless a field is.
        rows_of: Function from ids to rows, -1 for an unknown one; None to compare them with the column ``id``.

    Example:
        >>> table = pa.table({"year": [2008, None, 2012], "tags": [["a"], ["b", "a"], None]})
        >>> columns = Columns.of(table)
        >>> Filter.parse("year < 2010 OR array_contains(tags, 'b')").rows(columns, table.schema).tolist()
        [True, True, False]
    """

    def __init__(
        self,
        count: int,
        read: Callable[[str], pa.Array | pa.ChunkedArray | None],
        rows_of: Callable[[Sequence[str]], NDArray[np.int64]] | None = None,
    ) -> None:
        self._count, self._read, self._rows_of = count, read, rows_of
        self._vectors: dict[str, Vector | None] = {}

    @classmethod
    def of(cls, table: pa.Table) -> Columns:
        """The columns of a table in memory."""
        return cls(len(table), lambda field: table[field] if field in table.column_names else None)

    def __len__(self) -> int:
        return self._count

    def vector(self, field: str) -> Vector | None:
        """The entries of a field; None if no document has it."""
        if field not in self._vectors:
            column = self._read(field)
            if isinstance(column, pa.ChunkedArray):
                column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
            self._vectors[field] = None if column is None else Vector(column)
        return self._vectors[field]

    def having(self, ids: Sequence[str]) -> Mask:
        """Rows of the documents with given ids, (P,)."""
        if self._rows_of is None:
            vector = self.vector("id")
            return np.zeros(len(self), bool) if vector is None else _equals_any(vector, ids)
        found, rows = np.zeros(len(self), bool), self._rows_of(ids)
        found[rows[rows >= 0]] = True
        return found


class _Truth(NamedTuple):
    """Where an expression is true, and where it is unknown if it is anywhere, (P,)."""

    true: Mask
    unknown: Mask | None


_Evaluate: TypeAlias = Callable[[Columns], _Truth]


def _negate(truth: _Truth) -> _Truth:
    return _Truth(~truth.true if truth.unknown is None else ~(truth.true | truth.unknown), truth.unknown)


def _conjoin(one: _Truth, other: _Truth) -> _Truth:
    return _negate(_disjoin(_negate(one), _negate(other)))


def _disjoin(one: _Truth, other: _Truth) -> _Truth:
    true = one.true | other.true
    unknown = [each.unknown for each in (one, other) if each.unknown is not None]
    return _Truth(true, reduce(np.logical_or, unknown) & ~true if unknown else None)


def _unknown_everywhere(columns: Columns) -> _Truth:
    return _Truth(np.zeros(len(columns), bool), np.ones(len(columns), bool))


@dataclass(frozen=True)
class Filter:
    """Documents that a search may return: those for which all conditions are true, and whose id is among the given ids, if any.

    Attributes:
        conditions: SQL expressions; may be empty.
        ids: None for all documents; unknown ids are ignored.
    """

    conditions: tuple[str, ...] = ()
    ids: frozenset[str] | None = None

    @classmethod
    def parse(cls, conditions: str | Sequence[str], *, ids: Sequence[str] | None = None) -> Filter:
        """Parse a filter from one SQL expression, or several that must all be true.

        Raises:
            InputError: One is malformed.

        Example:
            >>> from quiver.retrieval.index.filters import Filter
            >>> Filter.parse("year >= 2019 AND NOT lang = 'en'").fields
            ('year', 'lang')
        """
        texts = (conditions,) if isinstance(conditions, str) else tuple(conditions)
        for text in texts:
            _parse(text)
        return cls(texts, None if ids is None else frozenset(ids))

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields that the conditions test, each once."""
        from sqlglot import exp

        columns = (column for text in self.conditions for column in _parse(text).find_all(exp.Column, bfs=False))
        return tuple(dict.fromkeys(map(_field_name, columns)))

    def check(self, schema: pa.Schema) -> None:
        """Check that the fields exist and are compared with values of their types.

        Raises:
            InputError: A field is unknown, or compared with a value of another type.
        """
        for text in self.conditions:
            _bind(text, schema)

    def rows(self, columns: Columns, schema: pa.Schema) -> Mask:
        """Rows that match, (P,).

        Args:
            columns: The columns of the documents.
            schema: Types of the fields; a field that ``columns`` does not have is null in all documents.

        Raises:
            InputError: As `check`.
        """
        found = np.ones(len(columns), bool) if self.ids is None else columns.having(list(self.ids))
        return reduce(np.logical_and, (_bind(text, schema)(columns).true for text in self.conditions), found)


FilterLike: TypeAlias = Filter | str | Sequence[str] | None
"""The filter of a search: a SQL expression such as ``"year >= 2015"``, several that must all be true, or a `Filter`; None for all."""


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
        raise InputError(f"filter must be a Filter, a condition such as 'year >= 2015' or a list of conditions, got {filter!r}")
    return Filter.parse(filter)


@lru_cache(maxsize=256)
def _parse(text: str) -> exp.Expression:
    """Read an expression; words that mean nothing in a filter name fields, such as ``order`` and ``end``."""
    from sqlglot import TokenType, exp
    from sqlglot.dialects.duckdb import DuckDB
    from sqlglot.errors import SqlglotError

    check_utf8(text, f"filter {text!r}")
    dialect = DuckDB()
    try:
        tokens = dialect.tokenize(text)
        for number, token in enumerate(tokens):
            written, after = text[token.start : token.end + 1], tokens[number + 1 : number + 2]
            is_type = written.lower() in ("date", "timestamp") and after and after[0].token_type == TokenType.STRING
            if re.fullmatch(r"[^\W\d]\w*", written) and written.lower() not in _WORDS and not is_type:
                token.token_type, token.text = TokenType.VAR, written
        tree = dialect.parser().parse_into(exp.Condition, tokens, text)[0]
    except RecursionError:
        raise InputError(f"filter {_shorten(text)!r}: the condition is nested too deeply") from None
    except (SqlglotError, ValueError) as error:
        raise _malformed(text, error) from error
    if tree is None:
        raise InputError(f"filter: the condition is empty; expected {_EXAMPLE}")
    return cast("exp.Expression", tree)


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _malformed(text: str, error: Exception) -> InputError:
    mistakes = {
        r"(?i)\bin\s+[^\s(]": "the list of IN stands in parentheses: lang IN ('en', 'de')",
        r"\*": "the beginning of a text is LIKE with a percent sign: file LIKE 'guides/%'",
        r"[=<>]\s*-?\d+,\d+\s*$": "a decimal has a point: price < 50.5",
        r"[&|]": "write AND, OR and NOT",
        "": "a text stands in single quotes, a field with spaces or signs in double quotes",
    }
    advice = next(advice for pattern, advice in mistakes.items() if re.search(pattern, text))
    where = next((f" at {each['highlight']!r}" for each in getattr(error, "errors", []) if each.get("highlight")), "")
    return InputError(f"filter {_shorten(text)!r}: not a SQL condition{where}; expected {_EXAMPLE}; {advice}")


@lru_cache(maxsize=256)
def _bind(text: str, schema: pa.Schema) -> _Evaluate:
    """Check an expression against the types of fields, and compile it."""
    try:
        return _Binder(text, schema).compile(_parse(text))
    except RecursionError:
        raise InputError(f"filter {_shorten(text)!r}: the condition is nested too deeply") from None


def _field_name(column: exp.Column) -> str:
    return ".".join(part.name for part in column.parts)


def _quote_field(name: str) -> str:
    is_plain = re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) and name.lower() not in _WORDS
    return name if is_plain else '"' + name.replace('"', '""') + '"'


_ADVICE: dict[Kind, tuple[str, str]] = {
    "string": ("a string", "a text stands in single quotes: {field} = '{value}'"),
    "integer": ("an integer", "a number has no quotes: {field} >= 2010"),
    "number": ("a number", "a number has no quotes: {field} >= 9.5"),
    "boolean": ("a boolean", "write {field} or NOT {field}"),
    "date": ("a date", "compare it with a date: {field} >= '2021-06-01'"),
    "timestamp": ("a timestamp", "compare it with a time: {field} >= '2021-06-01 08:30:00'"),
}
"""Kind -> with its article, and what to type for a value of it."""


class _Binder:
    """Compiles the expressions of one filter against a schema."""

    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text = text
        self._types = {"id": pa.string(), **{field.name: field.type for field in schema}}
        self._has_own_id = "id" in schema.names  # beside the ids of the documents
        self._fields = ", ".join(f"{field.name} ({type_name(field.type)})" for field in schema)

    def compile(self, node: exp.Expression) -> _Evaluate:
        from sqlglot import exp

        if isinstance(node, exp.And | exp.Or):
            parts = [self.compile(cast("exp.Expression", part)) for part in node.flatten()]
            join = _conjoin if isinstance(node, exp.And) else _disjoin
            return lambda columns: reduce(join, (part(columns) for part in parts))
        if isinstance(node, exp.Not | exp.Paren):
            inner = self.compile(node.this)
            return inner if isinstance(node, exp.Paren) else lambda columns: _negate(inner(columns))
        if isinstance(node, exp.Between):
            low, high = self._compare(node.this, ">=", node.args["low"]), self._compare(node.this, "<=", node.args["high"])
            return lambda columns: _conjoin(low(columns), high(columns))
        predicates: dict[tuple[type[exp.Expression], ...], Callable[[Any], _Evaluate]] = {
            (exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE): self._comparison,
            (exp.In,): self._membership,
            (exp.Is,): self._is,
            (exp.Like, exp.ILike, exp.Escape): self._like,
            (exp.ArrayContains,): self._array_contains,
            (exp.Column,): self._is_true,
        }
        compiled = next((compiled for types, compiled in predicates.items() if isinstance(node, types)), None)
        if compiled is None:
            raise self._refuse(f"{_sql(node)} is not supported; {_SUPPORTED}")
        return compiled(node)

    def _comparison(self, node: exp.Binary) -> _Evaluate:
        from sqlglot import exp

        operator, mirrored = {exp.LT: "<>", exp.LTE: ("<=", ">="), exp.GT: "><", exp.GTE: (">=", "<=")}.get(type(node), "==")
        is_mirrored = isinstance(node.expression, exp.Column) and not isinstance(node.this, exp.Column)
        field, value = (node.expression, node.this) if is_mirrored else (node.this, node.expression)
        test = self._compare(field, mirrored if is_mirrored else operator, value)
        return (lambda columns: _negate(test(columns))) if isinstance(node, exp.NEQ) else test

    def _refuse(self, reason: str) -> InputError:
        return InputError(f"filter {_shorten(self._text)!r}: {reason}")

    def _find_field(self, node: exp.Expression) -> tuple[str, pa.DataType]:
        from sqlglot import exp

        if not isinstance(node, exp.Column):
            written = _sql(node).replace(" ", "")
            quoted = f'; a field with signs stands in double quotes: "{written}"' if written in self._types else ""
            words = "; write AND, OR and NOT" if re.search(r"[&|]", written) else ""
            raise self._refuse(f"{_sql(node)} is no field; compare a field with a value, such as year >= 2010{quoted}{words}")
        name = _field_name(node)
        if name not in self._types:
            known = f"there are {self._fields}" if self._fields else "they have none"
            title = "; titles are a field if the build names theirs (--title title)" if name == "title" else ""
            raise self._refuse(f"no document has the field '{name}' to filter by{did_you_mean(name, self._types)}; {known}{title}")
        return name, self._types[name]

    def _find_scalar(self, node: exp.Expression, value: exp.Expression | None) -> tuple[str, Kind]:
        from sqlglot import exp

        name, type_ = self._find_field(node)
        if is_list(type_):
            example = f"'{_field_name(value)}'" if isinstance(value, exp.Column) else "'value'" if value is None else _sql(value)
            raise self._refuse(f"{name} is a {type_name(type_)}; write array_contains({_quote_field(name)}, {example})")
        return name, kind_of(type_)

    def _read_value(self, name: str, kind: Kind, node: exp.Expression) -> Any:
        """The value that a field is compared with, of the field's kind; None for NULL."""
        value = self._read_literal(name, node)
        if kind in ("date", "timestamp") and isinstance(value, str):
            return self._read_moment(name, kind, value)
        types = {"string": str, "boolean": bool, "integer": int | float, "number": int | float, "date": date, "timestamp": date}
        if value is None or (isinstance(value, types[kind]) and isinstance(value, bool) == (kind == "boolean")):
            return value
        named, advice = _ADVICE[kind]
        raise self._refuse(f"{name} is {named} and {_sql(node)} is not; {advice.format(field=_quote_field(name), value=node.name)}")

    def _read_literal(self, name: str, node: exp.Expression) -> Any:
        from sqlglot import exp

        if isinstance(node, exp.Paren):
            return self._read_literal(name, node.this)
        if isinstance(node, exp.Neg) and isinstance(node.this, exp.Literal) and not node.this.is_string:
            return -self._read_literal(name, node.this)
        if isinstance(node, exp.Literal):
            return node.name if node.is_string else int(node.name) if node.name.isdigit() else float(node.name)
        if isinstance(node, exp.Boolean | exp.Null):
            return bool(node.this) if isinstance(node, exp.Boolean) else None
        if isinstance(node, exp.Cast) and isinstance(node.this, exp.Literal) and node.this.is_string:
            return self._read_moment(name, "date" if node.to.this == exp.DataType.Type.DATE else "timestamp", node.this.name)
        if isinstance(node, exp.Column):
            other = _field_name(node)
            known = "two fields cannot be compared" if other in self._types else f"no document has the field '{other}'"
            raise self._refuse(f"{known}; a text stands in single quotes: {_quote_field(name)} = '{other}'")
        hint = "; a date stands in single quotes: created >= '2021-06-01'" if isinstance(node, exp.Sub) else ""
        raise self._refuse(f"{_sql(node)} is not a value{hint}")

    def _read_moment(self, name: str, kind: Kind, text: str) -> datetime:
        try:
            moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
        except ValueError:
            example = "'2021-06-01'" if kind == "date" else "'2021-06-01' or '2021-06-01 08:30:00'"
            year = f"; for a whole year write {name} BETWEEN '2021-01-01' AND '2021-12-31'" if re.fullmatch(r"\d{4}(-\d\d)?", text) else ""
            raise self._refuse(f"{name}: '{_shorten(text)}' is not a {kind} such as {example}{year}") from None
        return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)

    def _compare(self, field: exp.Expression, operator: str, value: exp.Expression) -> _Evaluate:
        name, kind = self._find_scalar(field, value)
        wanted = self._read_value(name, kind, value)
        if wanted is None:
            return _unknown_everywhere
        return (
            self._equal(name, [wanted]) if operator == "=" else _over_rows(name, lambda vector: _compare_entries(vector, operator, wanted))
        )

    def _equal(self, name: str, wanted: Sequence[Any]) -> _Evaluate:
        """Whether the value of a field is one of several."""
        if name == "id" and not self._has_own_id:
            return lambda columns: _Truth(columns.having(wanted), None)
        return _over_rows(name, lambda vector: _equals_any(vector, wanted))

    def _membership(self, node: exp.In) -> _Evaluate:
        if not node.expressions:
            raise self._refuse(f"{_sql(node)} is not supported; IN takes a list of values: lang IN ('en', 'de')")
        name, kind = self._find_scalar(node.this, node.expressions[0])
        wanted = [self._read_value(name, kind, each) for each in node.expressions]
        found = self._equal(name, [each for each in wanted if each is not None])
        return found if None not in wanted else lambda columns: _disjoin(found(columns), _unknown_everywhere(columns))

    def _is(self, node: exp.Is) -> _Evaluate:
        from sqlglot import exp

        name, _ = self._find_field(node.this)
        if isinstance(node.expression, exp.Null):
            return lambda columns: _Truth(_missing(columns, name), None)
        if not isinstance(node.expression, exp.Boolean):
            raise self._refuse(f"IS takes NULL, TRUE or FALSE; write {_quote_field(name)} = {_sql(node.expression)}")
        test = self._compare(node.this, "=", node.expression)
        return lambda columns: _Truth(test(columns).true, None)

    def _is_true(self, node: exp.Column) -> _Evaluate:
        name, kind = self._find_scalar(node, None)
        if kind != "boolean":
            shell = "; in a shell put the filter in quotes, because > writes to a file" if self._text.strip() == name else ""
            raise self._refuse(f"{name} is {_ADVICE[kind][0]}, not a condition; compare it with a value{shell}")
        return self._equal(name, [True])

    def _like(self, node: exp.Expression) -> _Evaluate:
        from sqlglot import exp

        like = node.this if isinstance(node, exp.Escape) else node
        name, kind = self._find_scalar(like.this, like.expression)
        if kind != "string":
            raise self._refuse(f"{name} is {_ADVICE[kind][0]}, and LIKE is for strings; compare with >=, < or BETWEEN")
        pattern, escape = self._read_literal(name, like.expression), self._read_literal(name, node.expression) if node is not like else ""
        if not isinstance(pattern, str) or not isinstance(escape, str) or len(escape) > 1:
            raise self._refuse("LIKE takes a pattern in single quotes, such as 'guides/%', and ESCAPE one character")
        of_words = _like_test(pattern, escape, ignore_case=isinstance(like, exp.ILike))
        test = _over_rows(name, lambda vector: _test_words(vector, of_words))
        return (lambda columns: _negate(test(columns))) if like.args.get("negate") else test

    def _array_contains(self, node: exp.ArrayContains) -> _Evaluate:
        name, type_ = self._find_field(node.this)
        if not is_list(type_):
            raise self._refuse(f"{name} is {_ADVICE[kind_of(type_)][0]}, not a list; write {_quote_field(name)} = {_sql(node.expression)}")
        wanted = self._read_value(name, kind_of(type_), node.expression)
        if wanted is None:
            return _unknown_everywhere

        def evaluate(columns: Columns) -> _Truth:
            found, missing = np.zeros(len(columns), bool), _missing(columns, name)
            vector = columns.vector(name)
            if vector is not None and vector.rows is not None:
                matches = _equals_any(vector, [wanted])
                found[vector.rows[matches if vector.valid is None else matches & vector.valid]] = True
            return _Truth(found, missing if missing.any() else None)

        return evaluate


def _sql(node: exp.Expression) -> str:
    return str(node.sql(dialect="duckdb"))


def _like_test(pattern: str, escape: str, *, ignore_case: bool) -> Callable[[pa.Array], pa.Array]:
    """The test of a pattern; an escape character, if any, makes the next one literal."""
    parts = re.findall(rf"(?s){re.escape(escape)}(.)|(.)", pattern) if escape else [("", each) for each in pattern]
    wild = [{"%": ".*", "_": "."}.get(plain, "") for _, plain in parts]
    if wild[-1:] == [".*"] and not any(wild[:-1]):
        start = "".join(escaped or plain for escaped, plain in parts[:-1])
        return lambda words: pc.starts_with(words, start, ignore_case=ignore_case)
    regular = "".join(part or re.escape(escaped or plain) for part, (escaped, plain) in zip(wild, parts, strict=True))
    return lambda words: pc.match_substring_regex(words, f"(?s)^{regular}$", ignore_case=ignore_case)


def _missing(columns: Columns, name: str) -> Mask:
    """Rows that have no value of a field, (P,)."""
    vector = columns.vector(name)
    if vector is None:
        return np.ones(len(columns), bool)
    return np.zeros(len(columns), bool) if vector.present is None else ~vector.present


def _over_rows(name: str, test: Callable[[Vector], Mask]) -> _Evaluate:
    """A test of the values of a field, unknown where they are null."""

    def evaluate(columns: Columns) -> _Truth:
        vector = columns.vector(name)
        if vector is None:
            return _unknown_everywhere(columns)
        true = test(vector)
        return _Truth(true, None) if vector.valid is None else _Truth(true & vector.valid, ~vector.valid)

    return evaluate


def _test_words(vector: Vector, test: Callable[[pa.Array], pa.Array]) -> Mask:
    """A test of strings, evaluated once for each one of a dictionary, (E,)."""
    found = test(vector.words)
    words = bits_of(found.buffers()[1], found)
    if vector.data is None:
        return words
    matches = np.flatnonzero(words)
    if len(matches) <= 1:
        return vector.data == matches[0] if len(matches) else np.zeros(len(vector.data), bool)
    return words.take(vector.data, mode="clip")


_TESTS: dict[str, tuple[Callable[[Any, Any], pa.Array], Callable[[Any, Any], Mask]]] = {
    "<": (pc.less, np.less),
    "<=": (pc.less_equal, np.less_equal),
    ">": (pc.greater, np.greater),
    ">=": (pc.greater_equal, np.greater_equal),
}


def _strings(values: Sequence[str], kind: pa.DataType) -> pa.Array:
    return binary_column([value.encode() for value in values], kind)


def _compare_entries(vector: Vector, operator: str, value: Any) -> Mask:
    """The order of the entries of a column and a value, (E,)."""
    of_words, of_numbers = _TESTS[operator]
    if vector.words is not None:
        return _test_words(vector, lambda words: of_words(words, _strings([value], words.type)[0]))
    data, value = cast("NDArray[Any]", vector.data), _in_units(vector, value)
    if vector.kind in ("number", "boolean"):
        return of_numbers(data, value)
    # Integers are compared as such: as float64, large ones are not exact.
    if not _INT64.min <= value <= _INT64.max:
        return np.full(len(data), (value > 0) == operator.startswith("<"))
    return of_numbers(data, math.ceil(value) if operator in ("<", ">=") else math.floor(value))


def _in_units(vector: Vector, value: Any) -> Any:
    """A value in the numbers of a column: days of a date, seconds to nanoseconds of a time."""
    if isinstance(value, datetime):
        seconds = Fraction((value - _EPOCH) // timedelta(microseconds=1), 10**6)
        return seconds / 86400 if vector.kind == "date" else seconds * _UNITS[vector.type.unit]
    if vector.kind != "number":
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _equals_any(vector: Vector, values: Sequence[Any]) -> Mask:
    """Whether each entry is one of several values, (E,)."""
    if vector.words is not None:
        wanted = _strings(values, vector.words.type)
        return _test_words(vector, lambda words: pc.equal(words, wanted[0]) if len(wanted) == 1 else pc.is_in(words, value_set=wanted))
    data, numbers = cast("NDArray[Any]", vector.data), [_in_units(vector, each) for each in values]
    if vector.kind not in ("number", "boolean"):
        numbers = [int(each) for each in numbers if _INT64.min <= each <= _INT64.max and each == math.floor(each)]
    if 0 < len(numbers) <= 16:  # faster than sorting
        return reduce(np.logical_or, (data == each for each in numbers))
    return np.isin(data, np.array(numbers, np.float64 if vector.kind == "number" else np.int64))


@dataclass(frozen=True)
class Facet:
    """How many documents have each value of a field.

    Attributes:
        values: The most frequent values with their numbers of documents, in descending order of the numbers, then in ascending order of the
            values as text. A document with a list of values counts once for each. Dates and times are ISO text.
        distinct: Number of distinct values that at least one of the documents has.
        range: The least and greatest value of numbers, dates and times; None for other fields, and if no document has a value.
    """

    values: list[tuple[Value, int]]
    distinct: int
    range: tuple[Value, Value] | None = None


def count_values(field: str, parts: Sequence[tuple[Columns, Mask | None]], *, most: int) -> Facet:
    """Count the documents that have each value of a field.

    Args:
        field: Name of the field.
        parts: Columns of each segment, with the rows that count, (P,); None for all.
        most: Maximum number of values to return.

    Example:
        >>> count_values("year", [(Columns.of(pa.table({"year": [2008, 2012, 2012, None]})), None)], most=1)
        Facet(values=[(2012, 2)], distinct=2, range=(2008, 2012))
    """
    total: dict[Value, int] = {}
    ends: list[Any] = []
    distinct = 0
    found = [(vector, _count_entries(vector, chosen)) for columns, chosen in parts if (vector := columns.vector(field)) is not None]
    for vector, counts in found:
        present = np.flatnonzero(counts)
        if vector.kind not in ("string", "boolean") and len(present):
            ends += vector.to_values(present[[0, -1]])
        distinct += len(present)
        if len(found) == 1 and len(present) > most:  # the rarer values need not be read
            present = np.flatnonzero(counts >= max(1, np.partition(counts, -most)[-most]))
        for value, number in zip(vector.to_values(present), counts[present].tolist(), strict=True):
            total[value] = total.get(value, 0) + number
    best = sorted(total.items(), key=lambda each: (-each[1], str(each[0])))[:most]
    return Facet(best, distinct if len(found) == 1 else len(total), (min(ends), max(ends)) if ends else None)


def _count_entries(vector: Vector, chosen: Mask | None) -> NDArray[np.int64]:
    """Number of chosen rows of each distinct value."""
    values, codes = vector.codes
    counted = vector.counted
    if chosen is not None:
        chosen = chosen if vector.rows is None else chosen[vector.rows]
        counted = chosen if counted is None else counted & chosen
    return np.bincount(codes if counted is None else codes[counted], minlength=len(values))
