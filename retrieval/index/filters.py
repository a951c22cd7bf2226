"""Filters: SQL WHERE expressions over the typed Arrow columns of documents.

An expression has comparisons, AND, OR, NOT, IN, BETWEEN, LIKE, IS [NOT] NULL, boolean fields and ``array_contains(list, value)``. It is
parsed by sqlglot, checked against the types of the fields, and evaluated by pyarrow with SQL's three-valued logic: a comparison with a
missing value is unknown, NOT of unknown is unknown, and a document matches where the whole expression is true. Strings of a dictionary are
compared once.

Shapes: P documents, E entries of a column: P, or the elements of all lists.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from fractions import Fraction
from functools import cached_property, lru_cache, partial, reduce
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import check_utf8
from quiver.retrieval.index.columns import binary_column, number_column, numbers_of, truths_of
from quiver.retrieval.index.engines import did_you_mean
from quiver.retrieval.records import Value

if TYPE_CHECKING:
    from sqlglot import exp

Mask: TypeAlias = NDArray[np.bool_]
Kind: TypeAlias = Literal["string", "integer", "number", "boolean", "date", "timestamp"]

_EXAMPLE = "a SQL condition such as year >= 2010 AND lang IN ('en', 'de')"
_MISTAKES = {
    r"(?i)\bin\s+[^\s(]": "the list of IN stands in parentheses: lang IN ('en', 'de')",
    r"\*": "the beginning of a text is LIKE with a percent sign: file LIKE 'guides/%'",
    r"[=<>]\s*-?\d+,\d+\s*$": "a decimal has a point: price < 50.5",
    r"[&|]": "write AND, OR and NOT",
    "": "a text stands in single quotes, a field with spaces or signs in double quotes",
}
_SHOWN = 80  # characters of a malformed filter that an error repeats
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_INT64 = np.iinfo(np.int64)
_WORDS = {"and", "or", "not", "in", "between", "like", "ilike", "escape", "is", "null", "true", "false"}  # the others name fields


def kind_of(type: pa.DataType) -> Kind:  # noqa: A002
    """The kind of a column's values, or of the elements of its lists."""
    if pa.types.is_list(type) or pa.types.is_dictionary(type):
        return kind_of(type.value_type)
    kinds: Mapping[pa.DataType, Kind] = {pa.bool_(): "boolean", pa.int64(): "integer", pa.float64(): "number", pa.date32(): "date"}
    return "timestamp" if pa.types.is_timestamp(type) else kinds.get(type, "string")


class Entries:
    """The values of one column, those of lists one after the other, (E,); the row of each, (E,), of a list; rows that are null, (P,)."""

    def __init__(self, array: pa.Array) -> None:
        self.kind, self.missing = kind_of(array.type), ~truths_of(array.is_valid())
        self.rows: NDArray[np.uint32] | None = None
        if pa.types.is_list(array.type):
            self.rows = numbers_of(pc.list_parent_indices(array)).astype(np.uint32)
            array = array.flatten()
        self.values = array.cast(pa.string()) if pa.types.is_null(array.type) else array

    def test(self, of_values: Callable[[pa.Array], pa.Array]) -> pa.Array:
        """The results of a test, which is made once for each word of a dictionary; null for nulls, (E,)."""
        if not pa.types.is_dictionary(self.values.type):
            return of_values(self.values)
        of_words = of_values(self.values.dictionary)
        matches = np.flatnonzero(truths_of(of_words)).astype(np.int32)
        # For a single word, comparing its number is much faster.
        return pc.equal(self.values.indices, number_column(matches)[0]) if len(matches) == 1 else of_words.take(self.values.indices)

    @cached_property
    def counted(self) -> tuple[pa.Array, NDArray[Any], NDArray[Any]]:
        """The distinct values; and without nulls and repetitions in a list the number of the value, and the row, of each entry."""
        # 0.0 makes one value of -0.0 and 0.0.
        values = pc.add(self.values, number_column(np.zeros(1))[0]) if self.kind == "number" else self.values
        encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
        there = np.flatnonzero(truths_of(encoded.indices.is_valid())).astype(np.uint32)
        codes = numbers_of(encoded.indices)[there]
        if self.rows is None:
            return encoded.dictionary, codes, there
        pairs = np.unique(self.rows[there].astype(np.int64) << 32 | codes)
        return encoded.dictionary, pairs & 0xFFFFFFFF, (pairs >> 32).astype(np.uint32)


class Columns:
    """The columns of P documents by field, read on first use.

    Args:
        count: Number of documents P.
        read: Function from a field to its column, or None if no document has the field; ``id`` is that of the documents, unless a field is.
        rows_of: Function from ids to rows, -1 for an unknown one.
    """

    def __init__(self, count: int, read: Callable[[str], pa.Array | None], rows_of: Callable[[Sequence[str]], NDArray[np.int64]]) -> None:
        self._count, self._read, self._rows_of = count, read, rows_of
        self._entries: dict[str, Entries | None] = {}

    @classmethod
    def of(cls, table: pa.Table) -> Columns:
        """The columns of a table of one chunk in memory."""
        ids = {key: row for row, key in enumerate(table["id"].to_pylist() if "id" in table.column_names else ())}
        return cls(
            len(table),
            lambda field: table[field].chunk(0) if field in table.column_names else None,
            lambda wanted: np.array([ids.get(key, -1) for key in wanted], np.int64),
        )

    def __len__(self) -> int:
        return self._count

    def entries(self, field: str) -> Entries | None:
        """The entries of a field; None if no document has it."""
        if field not in self._entries:
            column = self._read(field)
            self._entries[field] = None if column is None else Entries(column)
        return self._entries[field]

    def missing(self, field: str) -> Mask:
        """Rows that have no value of a field, (P,)."""
        entries = self.entries(field)
        return np.ones(len(self), bool) if entries is None else entries.missing

    def test(self, field: str, of_values: Callable[[pa.Array], pa.Array]) -> pa.Array:
        """A test of the values of a field, null where they are null, (P,)."""
        entries = self.entries(field)
        return _evaluate_unknown(self) if entries is None else entries.test(of_values)

    def having(self, ids: Sequence[str]) -> Mask:
        """Rows of the documents with given ids, (P,)."""
        found, rows = np.zeros(len(self), bool), self._rows_of(ids)
        found[rows[rows >= 0]] = True
        return found


_Evaluate: TypeAlias = Callable[[Columns], pa.Array]
"""Function to truth values, (P,), null where the expression is unknown."""


def _true_rows(truths: pa.Array) -> Mask:
    return truths_of(truths) & truths_of(truths.is_valid()) if truths.null_count else truths_of(truths)


def _evaluate_unknown(columns: Columns) -> pa.Array:
    return pa.nulls(len(columns), pa.bool_())


@dataclass(frozen=True)
class Filter:
    """Documents that a search may return: those for which all SQL conditions are true, and whose id is among ``ids`` unless these are None.

    Unknown ids are ignored.
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
        nodes = (node for text in self.conditions for node in _parse(text).dfs())
        return tuple(dict.fromkeys(_field_name(cast("exp.Column", node)) for node in nodes if node.key == "column"))

    def check(self, schema: pa.Schema) -> None:
        """Check that the fields exist and are compared with values of their types; raises InputError."""
        for text in self.conditions:
            _bind(text, schema)

    def rows(self, columns: Columns, schema: pa.Schema) -> Mask:
        """Rows that match, (P,); a field of the schema that ``columns`` does not have is null in all documents. Raises as `check`."""
        found = np.ones(len(columns), bool) if self.ids is None else columns.having(list(self.ids))
        return reduce(np.logical_and, (_true_rows(_bind(text, schema)(columns)) for text in self.conditions), found)


FilterLike: TypeAlias = Filter | str | Sequence[str] | None
"""The filter of a search: a SQL expression such as ``"year >= 2015"``, several that must all be true, or a `Filter`; None for all."""


def as_filter(filter: FilterLike) -> Filter | None:
    """Convert the argument ``filter`` of a search; raises InputError if a condition is malformed, or it is something else."""
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
        advice = next(advice for pattern, advice in _MISTAKES.items() if re.search(pattern, text))
        where = next((f" at {each['highlight']!r}" for each in getattr(error, "errors", []) if each.get("highlight")), "")
        raise InputError(f"filter {_shorten(text)!r}: not a SQL condition{where}; expected {_EXAMPLE}; {advice}") from error
    if tree is None:
        raise InputError(f"filter: the condition is empty; expected {_EXAMPLE}")
    return cast("exp.Expression", tree)


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


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


def _to_sql(node: exp.Expression) -> str:
    return str(node.sql(dialect="duckdb"))


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
        self._fields = ", ".join(f"{field.name} ({_name_type(field.type)})" for field in schema)

    def compile(self, node: exp.Expression) -> _Evaluate:
        predicates: Mapping[str, Callable[[Any], _Evaluate]] = {
            "paren": lambda node: self.compile(node.this),
            "not": lambda node: self._negate(self.compile(node.this)),
            **dict.fromkeys(("and", "or"), self._compile_junction),
            **dict.fromkeys(("eq", "neq", "lt", "lte", "gt", "gte"), self._compile_comparison),
            "between": self._compile_between,
            "in": self._compile_membership,
            "is": self._compile_is,
            **dict.fromkeys(("like", "ilike", "escape"), self._compile_like),
            "arraycontains": self._compile_array_contains,
            "column": self._compile_boolean_field,
        }
        if node.key not in predicates:
            supported = "comparisons, AND, OR, NOT, IN, BETWEEN, LIKE, IS NULL and array_contains(list, value)"
            raise self._refuse(f"{_to_sql(node)} is not supported; a filter has {supported}")
        return predicates[node.key](node)

    @staticmethod
    def _negate(test: _Evaluate) -> _Evaluate:
        return lambda columns: pc.invert(test(columns))

    def _compile_junction(self, node: exp.Connector) -> _Evaluate:
        parts = [self.compile(cast("exp.Expression", part)) for part in node.flatten()]
        join = pc.and_kleene if node.key == "and" else pc.or_kleene
        return lambda columns: reduce(join, (part(columns) for part in parts))

    def _compile_comparison(self, node: exp.Binary) -> _Evaluate:
        operator, mirrored = {"lt": "<>", "lte": ("<=", ">="), "gt": "><", "gte": (">=", "<=")}.get(node.key, "==")
        is_mirrored = node.expression.key == "column" != node.this.key
        field, value = (node.expression, node.this) if is_mirrored else (node.this, node.expression)
        test = self._compare(field, mirrored if is_mirrored else operator, value)
        return self._negate(test) if node.key == "neq" else test

    def _compile_between(self, node: exp.Between) -> _Evaluate:
        low, high = self._compare(node.this, ">=", node.args["low"]), self._compare(node.this, "<=", node.args["high"])
        return lambda columns: pc.and_kleene(low(columns), high(columns))

    def _refuse(self, reason: str) -> InputError:
        return InputError(f"filter {_shorten(self._text)!r}: {reason}")

    def _find_field(self, node: exp.Expression) -> tuple[str, pa.DataType]:
        if node.key != "column":
            written = _to_sql(node).replace(" ", "")
            quoted = f'; a field with signs stands in double quotes: "{written}"' if written in self._types else ""
            words = "; write AND, OR and NOT" if re.search(r"[&|]", written) else ""
            raise self._refuse(f"{_to_sql(node)} is no field; compare a field with a value, such as year >= 2010{quoted}{words}")
        name = _field_name(cast("exp.Column", node))
        if name not in self._types:
            known = f"there are {self._fields}" if self._fields else "they have none"
            title = "; titles are a field if the build names theirs (--title title)" if name == "title" else ""
            raise self._refuse(f"no document has the field '{name}' to filter by{did_you_mean(name, self._types)}; {known}{title}")
        return name, self._types[name]

    def _find_scalar(self, node: exp.Expression, value: exp.Expression | None) -> tuple[str, Kind]:
        name, type_ = self._find_field(node)
        if pa.types.is_list(type_):
            example = "'value'" if value is None else f"'{value.sql()}'" if value.key == "column" else _to_sql(value)
            raise self._refuse(f"{name} is a {_name_type(type_)}; write array_contains({_quote_field(name)}, {example})")
        return name, kind_of(type_)

    def _read_value(self, name: str, kind: Kind, node: exp.Expression) -> Any:
        """The value that a field is compared with, in the numbers of the field: days since 1970, microseconds; None for NULL."""
        value = self._read_literal(name, node)
        if kind in ("date", "timestamp") and isinstance(value, str):
            value = self._read_moment(name, kind, value)
        types = {"string": str, "boolean": bool, "integer": int | float, "number": int | float, "date": date, "timestamp": date}
        if value is not None and not (isinstance(value, types[kind]) and isinstance(value, bool) == (kind == "boolean")):
            named, advice = _ADVICE[kind]
            raise self._refuse(f"{name} is {named} and {_to_sql(node)} is not; {advice.format(field=_quote_field(name), value=node.name)}")
        if isinstance(value, datetime):
            microseconds = (value - _EPOCH) // timedelta(microseconds=1)
            return Fraction(microseconds, 86_400_000_000) if kind == "date" else microseconds
        return float(value) if kind == "number" and isinstance(value, int) else value

    def _read_literal(self, name: str, node: exp.Expression) -> Any:
        if node.key == "paren":
            return self._read_literal(name, node.this)
        if node.key == "neg" and node.this.is_number:
            return -self._read_literal(name, node.this)
        if node.key == "literal":
            # An integer of 300 digits is beyond all columns, and not beyond all floats.
            return node.name if node.is_string else int(node.name) if node.name.isdigit() and len(node.name) <= 300 else float(node.name)
        if node.key in ("boolean", "null"):
            return bool(node.this) if node.key == "boolean" else None
        if node.key == "cast" and node.this.is_string:
            return self._read_moment(name, "date" if node.args["to"].this.name == "DATE" else "timestamp", node.this.name)
        if node.key == "column":
            other = _field_name(cast("exp.Column", node))
            known = "two fields cannot be compared" if other in self._types else f"no document has the field '{other}'"
            raise self._refuse(f"{known}; a text stands in single quotes: {_quote_field(name)} = '{other}'")
        hint = "; a date stands in single quotes: created >= '2021-06-01'" if node.key == "sub" else ""
        raise self._refuse(f"{_to_sql(node)} is not a value{hint}")

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
            return _evaluate_unknown
        if operator == "=":
            return self._compile_equal(name, kind, [wanted])
        return lambda columns: columns.test(name, lambda values: _compare_values(values, kind, operator, wanted))

    def _compile_equal(self, name: str, kind: Kind, wanted: Sequence[Any]) -> _Evaluate:
        """Whether the value of a field is one of several."""
        if name == "id" and not self._has_own_id:
            return lambda columns: number_column(columns.having(wanted))
        return lambda columns: columns.test(name, lambda values: _equals_any(values, kind, wanted))

    def _compile_membership(self, node: exp.In) -> _Evaluate:
        if not node.expressions:
            raise self._refuse(f"{_to_sql(node)} is not supported; IN takes a list of values: lang IN ('en', 'de')")
        name, kind = self._find_scalar(node.this, node.expressions[0])
        wanted = [self._read_value(name, kind, each) for each in node.expressions]
        found = self._compile_equal(name, kind, [each for each in wanted if each is not None])
        return found if None not in wanted else lambda columns: pc.or_kleene(found(columns), _evaluate_unknown(columns))

    def _compile_is(self, node: exp.Is) -> _Evaluate:
        name, _ = self._find_field(node.this)
        if node.expression.key == "null":
            return lambda columns: number_column(columns.missing(name))
        if node.expression.key != "boolean":
            raise self._refuse(f"IS takes NULL, TRUE or FALSE; write {_quote_field(name)} = {_to_sql(node.expression)}")
        test = self._compare(node.this, "=", node.expression)
        return lambda columns: number_column(_true_rows(test(columns)))

    def _compile_boolean_field(self, node: exp.Column) -> _Evaluate:
        name, kind = self._find_scalar(node, None)
        if kind != "boolean":
            shell = "; in a shell put the filter in quotes, because > writes to a file" if self._text.strip() == name else ""
            raise self._refuse(f"{name} is {_ADVICE[kind][0]}, not a condition; compare it with a value{shell}")
        return lambda columns: columns.test(name, lambda values: values)

    def _compile_like(self, node: exp.Expression) -> _Evaluate:
        like = node.this if node.key == "escape" else node
        name, kind = self._find_scalar(like.this, like.expression)
        if kind != "string":
            raise self._refuse(f"{name} is {_ADVICE[kind][0]}, and LIKE is for strings; compare with >=, < or BETWEEN")
        pattern, escape = self._read_literal(name, like.expression), self._read_literal(name, node.expression) if node is not like else ""
        if not isinstance(pattern, str) or not isinstance(escape, str) or len(escape) > 1:
            raise self._refuse("LIKE takes a pattern in single quotes, such as 'guides/%', and ESCAPE one character")
        # An escape character makes the next one literal.
        parts = re.findall(rf"(?s){re.escape(escape)}(.)|(.)", pattern) if escape else [("", each) for each in pattern]
        wild = [{"%": ".*", "_": "."}.get(plain, "") for _, plain in parts]
        literal = [escaped or plain for escaped, plain in parts]
        before, after = wild[:1] == [".*"], wild[-1:] == [".*"]
        between = slice(before, len(wild) - after)
        if (before or after) and not any(wild[between]):
            test = pc.starts_with if not before else pc.match_substring if after else pc.ends_with
            of_values = partial(test, pattern="".join(literal[between]), ignore_case=like.key == "ilike")
        else:
            regular = "(?s)^" + "".join(sign or re.escape(each) for sign, each in zip(wild, literal, strict=True)) + "$"
            of_values = partial(pc.match_substring_regex, pattern=regular, ignore_case=like.key == "ilike")
        if like.args.get("negate"):
            return lambda columns: pc.invert(columns.test(name, of_values))
        return lambda columns: columns.test(name, of_values)

    def _compile_array_contains(self, node: exp.ArrayContains) -> _Evaluate:
        name, type_ = self._find_field(node.this)
        kind = kind_of(type_)
        if not pa.types.is_list(type_):
            raise self._refuse(f"{name} is {_ADVICE[kind][0]}, not a list; write {_quote_field(name)} = {_to_sql(node.expression)}")
        wanted = self._read_value(name, kind, node.expression)
        if wanted is None:
            return _evaluate_unknown

        def evaluate(columns: Columns) -> pa.Array:
            found, missing = np.zeros(len(columns), bool), columns.missing(name)
            entries = columns.entries(name)
            if entries is not None and entries.rows is not None:
                matches = _true_rows(entries.test(lambda values: _equals_any(values, kind, [wanted])))
                found[entries.rows.compress(matches)] = True
            return pc.if_else(number_column(missing), pa.nulls(1, pa.bool_())[0], number_column(found))

        return evaluate


def _name_type(type: pa.DataType) -> str:  # noqa: A002
    return f"list of {kind_of(type)}s" if pa.types.is_list(type) else kind_of(type)


def _to_values(values: Sequence[Any], kind: Kind, like: pa.Array) -> pa.Array:
    """Literals as a column of the type of another one."""
    if kind == "string":
        return binary_column([value.encode() for value in values], like.type)
    dtype = {"boolean": bool, "number": np.float64, "date": np.int32}.get(kind, np.int64)
    return number_column(np.array(values, dtype)).view(like.type)


_TESTS = {"<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}


def _compare_values(values: pa.Array, kind: Kind, operator: str, wanted: Any) -> pa.Array:
    """The order of the values of a column and a literal, (E,)."""
    if kind in ("integer", "date", "timestamp"):  # compared as integers: as floats, large ones are not exact
        if wanted > _INT64.max:
            operator, wanted = "<=" if operator.startswith("<") else ">", _INT64.max
        elif wanted < _INT64.min:
            operator, wanted = ">=" if operator.startswith(">") else "<", _INT64.min
        wanted = math.ceil(wanted) if operator in ("<", ">=") else math.floor(wanted)
    return _TESTS[operator](values, _to_values([wanted], kind, values)[0])


def _equals_any(values: pa.Array, kind: Kind, wanted: Sequence[Any]) -> pa.Array:
    """Whether each value is one of several literals, (E,)."""
    if kind in ("integer", "date", "timestamp"):
        wanted = [int(each) for each in wanted if _INT64.min <= each <= _INT64.max and each == math.floor(each)]
    literals = _to_values(wanted, kind, values)
    # Comparing all values with one literal after the other is faster than a hash table, of numbers for more literals than of strings.
    if kind in ("string", "boolean"):
        if 0 < len(literals) <= 16:
            return reduce(pc.or_kleene, (pc.equal(values, each) for each in literals))
    elif len(literals) <= 64:
        numbers = numbers_of(values)
        found = reduce(np.logical_or, (numbers == each for each in numbers_of(literals)), np.zeros(len(numbers), bool))
        return pc.if_else(values.is_valid(), number_column(found), pa.nulls(1, pa.bool_())[0])
    elif kind == "number":  # -0.0 equals 0.0
        literals = pa.concat_arrays([literals, pc.negate(literals.filter(pc.equal(literals, number_column(np.zeros(1))[0])))])
    return pc.if_else(values.is_valid(), pc.is_in(values, value_set=literals), pa.nulls(1, pa.bool_())[0])


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
    """Count the documents that have each value of a field, of the columns of each segment and the rows that count, (P,); None for all.

    Example:
        >>> count_values("year", [(Columns.of(pa.table({"year": [2008, 2012, 2012, None]})), None)], most=1)
        Facet(values=[(2012, 2)], distinct=2, range=(2008, 2012))
    """
    total: dict[Any, int] = {}
    ends: list[Any] = []
    distinct = 0
    found = [(entries, chosen) for columns, chosen in parts if (entries := columns.entries(field)) is not None]
    for entries, chosen in found:
        values, codes, rows = entries.counted
        counts = np.bincount(codes if chosen is None else codes[chosen[rows]], minlength=len(values))
        present = np.flatnonzero(counts)
        distinct += len(present)
        if entries.kind not in ("string", "boolean") and len(present):
            ends += pc.min_max(values.take(number_column(present))).as_py().values()
        if len(found) == 1 and len(present) > most:  # the rarer values need not be read
            present = np.flatnonzero(counts >= max(1, np.partition(counts, -most)[-most]))
        for value, number in zip(values.take(number_column(present)).to_pylist(), counts[present].tolist(), strict=True):
            total[value] = total.get(value, 0) + number
    best = heapq.nsmallest(most, ((to_metadata(value), number) for value, number in total.items()), lambda each: (-each[1], str(each[0])))
    range_ = (to_metadata(min(ends)), to_metadata(max(ends))) if ends else None
    return Facet(best, distinct if len(found) == 1 else len(total), range_)


def to_metadata(value: Any) -> Value:
    """A value as metadata have it: dates and times as ISO text."""
    return cast("Value", value.isoformat() if isinstance(value, date) else value)
