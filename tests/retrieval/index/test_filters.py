"""Filters: SQL expressions on typed columns, against pandas (whose nullable types have three-valued logic) and by hand."""

from __future__ import annotations

import datetime
import random
import re
from operator import eq, ge, gt, le, lt, ne
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index.filters import Columns, Facet, Filter, as_filter, count_values

WORDS = ["", "a", "ab", "abc", "b_c", "50%", "it's", "Ünï", "z\nz", "back\\slash", "日本"]
DAY = datetime.date(2020, 2, 28)
NOON = datetime.datetime.combine(DAY, datetime.time(12))
TYPES = {
    "word": pa.string(),
    "coded": pa.dictionary(pa.int32(), pa.string()),
    "year": pa.int64(),
    "odd name.x": pa.int64(),
    "price": pa.float64(),
    "open": pa.bool_(),
    "day": pa.date32(),
    "time": pa.timestamp("us"),
    "tags": pa.list_(pa.string()),
    "codes": pa.list_(pa.int64()),
    "days": pa.list_(pa.date32()),
}


def make_value(draw: random.Random, field: str) -> Any:
    """A value of a field's kind."""
    if field in ("word", "coded", "tags"):
        return draw.choice(WORDS)
    if field in ("year", "odd name.x", "codes"):
        return draw.choice([draw.randint(-4, 4), 2**53 + 1, -(2**63), 2**63 - 1])
    if field == "price":
        return draw.choice([draw.randint(-4, 4) / 2, -0.0, 1e300])
    if field == "open":
        return draw.random() < 0.5
    if field in ("day", "days"):
        return DAY + datetime.timedelta(draw.randint(-2, 2))
    return NOON + datetime.timedelta(hours=12 * draw.randint(-3, 3), microseconds=draw.randint(0, 1))


def make_table(draw: random.Random, rows: int) -> pa.Table:
    """A table with every type, nulls and lists."""
    columns = {}
    for field, type_ in TYPES.items():
        values: list[Any] = []
        for _ in range(rows):
            if draw.random() < 0.2:
                values.append(None)
            elif pa.types.is_list(type_):
                values.append([None if draw.random() < 0.1 else make_value(draw, field) for _ in range(draw.randint(0, 3))])
            else:
                values.append(make_value(draw, field))
        columns[field] = pa.array(values, type_)
    # A slice has offsets in all buffers.
    return pa.table(columns).slice(3)


def to_pandas(table: pa.Table) -> dict[str, pd.Series]:
    """The columns in pandas' nullable types."""
    nullable = {"year": "Int64", "odd name.x": "Int64", "price": "Float64", "open": "boolean"}
    return {
        field: pd.Series(table[field].to_pylist(), dtype=nullable.get(field, "datetime64[us]" if field in ("day", "time") else object))
        for field in table.column_names
    }


def unknown_where_null(column: pd.Series, truth: Any) -> pd.Series:
    """Truth values that are unknown where a column is null."""
    return pd.Series(np.asarray(truth, bool), dtype="boolean").mask(column.isna().to_numpy())


def literal(value: Any, draw: random.Random) -> str:
    """A value as SQL."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, datetime.datetime):
        return draw.choice(["TIMESTAMP ", ""]) + f"'{value.isoformat(draw.choice(['T', ' ']))}'"
    return draw.choice(["DATE ", ""]) + f"'{value}'" if isinstance(value, datetime.date) else str(value)


def quoted(field: str) -> str:
    """A field's name in SQL."""
    return f'"{field}"' if " " in field else field


class Expressions:
    """Random expressions, each as SQL and as what pandas finds.

    Args:
        draw: Random numbers.
        frame: The columns.
    """

    def __init__(self, draw: random.Random, frame: dict[str, pd.Series]) -> None:
        self.draw, self.frame = draw, frame

    def expression(self, depth: int) -> tuple[str, pd.Series]:
        """An expression and where it is true, false or unknown."""
        kind = self.draw.random()
        if depth == 0 or kind < 0.2:
            return self.predicate()
        one = self.expression(depth - 1)
        if kind < 0.4:
            return f"NOT ({one[0]})", ~one[1]
        other = self.expression(depth - 1)
        return (f"({one[0]}) AND {other[0]}", one[1] & other[1]) if kind < 0.7 else (f"({one[0]} OR {other[0]})", one[1] | other[1])

    def predicate(self) -> tuple[str, pd.Series]:
        """A predicate on one field."""
        field = self.draw.choice(list(TYPES))
        if pa.types.is_list(TYPES[field]):
            return self.contains(field)
        forms = [self.compare, self.member, self.between, self.null]
        forms += [self.like] * (field in ("word", "coded")) + [self.boolean] * (field == "open")
        return self.draw.choice(forms)(field)

    def compare(self, field: str) -> tuple[str, pd.Series]:
        column, value = self.frame[field], make_value(self.draw, field)
        operator = self.draw.choice(["=", "==", "!=", "<>", "<", "<=", ">", ">="])
        if field == "open":
            operator = self.draw.choice(["=", "!="])
        other, text = (pd.Timestamp(value) if isinstance(value, datetime.date) else value), literal(value, self.draw)
        if field in ("year", "odd name.x") and self.draw.random() < 0.3:
            other = value = self.draw.choice([-1.5, 0.5, 2.0])
            text = str(value)
        test = {"=": eq, "==": eq, "!=": ne, "<>": ne, "<": lt, "<=": le, ">": gt, ">=": ge}[operator]
        truth = unknown_where_null(column, [not pd.isna(each) and test(each, other) for each in column.tolist()])
        if self.draw.random() < 0.3:
            mirrored = operator.translate(str.maketrans("<>", "><")) if operator != "<>" else operator
            return f"{text} {mirrored} {quoted(field)}", truth
        return f"{quoted(field)} {operator} {text}", truth

    def member(self, field: str) -> tuple[str, pd.Series]:
        column, values = self.frame[field], [make_value(self.draw, field) for _ in range(self.draw.randint(1, 3))]
        wanted = [pd.Timestamp(each) if isinstance(each, datetime.date) else each for each in values]
        truth = unknown_where_null(column, [not pd.isna(each) and each in wanted for each in column.tolist()])
        texts = [literal(each, self.draw) for each in values]
        if self.draw.random() < 0.2:
            texts.append("NULL")
            truth = truth.where(truth.fillna(False).astype(bool))
        negated = self.draw.random() < 0.3
        return f"{quoted(field)} {'NOT ' * negated}IN ({', '.join(texts)})", ~truth if negated else truth

    def between(self, field: str) -> tuple[str, pd.Series]:
        if field == "open":
            return self.boolean(field)
        low, high = make_value(self.draw, field), make_value(self.draw, field)
        ends = [pd.Timestamp(each) if isinstance(each, datetime.date) else each for each in (low, high)]
        column = self.frame[field]
        truth = unknown_where_null(column, [not pd.isna(each) and ends[0] <= each <= ends[1] for each in column.tolist()])
        negated = self.draw.random() < 0.3
        text = f"{quoted(field)} {'NOT ' * negated}BETWEEN {literal(low, self.draw)} AND {literal(high, self.draw)}"
        return text, ~truth if negated else truth

    def null(self, field: str) -> tuple[str, pd.Series]:
        truth, negated = self.frame[field].isna().astype("boolean").reset_index(drop=True), self.draw.random() < 0.5
        return f"{quoted(field)} IS {'NOT ' * negated}NULL", ~truth if negated else truth

    def boolean(self, field: str) -> tuple[str, pd.Series]:
        column, kind = self.frame[field], self.draw.choice(["", " IS TRUE", " IS FALSE", " IS NOT TRUE"])
        truths = {"": column, " IS TRUE": column.fillna(False), " IS FALSE": ~column.fillna(True), " IS NOT TRUE": ~column.fillna(False)}
        return field + kind, truths[kind]

    def like(self, field: str) -> tuple[str, pd.Series]:
        word, escape = self.draw.choice(WORDS), ""
        start = word[: self.draw.randint(0, len(word))]
        pattern, regular = self.draw.choice([
            (f"{start}%", re.escape(start) if not set(start) & set("%_") else None),
            (f"%{word}%", None),
            (f"%{start}", None),
            (f"_{word[1:]}", None),
        ])  # fmt: skip
        if self.draw.random() < 0.3:
            pattern, escape = re.sub(r"([%_!])", r"!\1", word) + "%", " ESCAPE '!'"
            regular = re.escape(word) + ".*"
        else:
            regular = "".join({"%": ".*", "_": "."}.get(each, re.escape(each)) for each in pattern)
        ignore, negated = self.draw.random() < 0.2, self.draw.random() < 0.3
        column = self.frame[field]
        expected = [isinstance(each, str) and bool(re.fullmatch(regular, each, re.S | re.I * ignore)) for each in column.tolist()]
        truth = unknown_where_null(column, expected)
        text = f"{field} {'NOT ' * negated}{'I' * ignore}LIKE {literal(pattern, self.draw)}{escape}"
        return text, ~truth if negated else truth

    def contains(self, field: str) -> tuple[str, pd.Series]:
        if self.draw.random() < 0.2:
            return self.null(field)
        column, value = self.frame[field], make_value(self.draw, field)
        truth = unknown_where_null(column, [isinstance(each, list) and value in each for each in column.tolist()])
        return f"{self.draw.choice(['array_contains', 'ARRAY_CONTAINS', 'list_contains'])}({field}, {literal(value, self.draw)})", truth


def test_filters_equal_pandas_on_random_expressions() -> None:
    draw = random.Random(7)
    found = 0
    for round_ in range(25):
        table = make_table(draw, draw.choice([3, 4, 40, 203]))
        expressions, columns = Expressions(draw, to_pandas(table)), Columns.of(table)
        for _ in range(20):
            text, truth = expressions.expression(draw.randint(0, 4))
            rows = Filter.parse(text).rows(columns, table.schema)
            np.testing.assert_array_equal(rows, truth.fillna(False).to_numpy(bool), err_msg=f"round {round_}: {text}")
            found += int(rows.sum())
    assert found > 5000


def test_facets_equal_pandas() -> None:
    draw = random.Random(8)
    table = make_table(draw, 300)
    chosen = np.array([draw.random() < 0.6 for _ in range(len(table))])
    for field, type_ in TYPES.items():
        column = pd.Series(table[field].to_pylist(), dtype=object)[chosen]
        lists = column.dropna().map(lambda each: list(dict.fromkeys(each))).explode() if pa.types.is_list(type_) else column
        expected = {(each.isoformat() if isinstance(each, datetime.date) else each): n for each, n in lists.value_counts().items()}
        ordered = sorted(expected.items(), key=lambda each: (-each[1], str(each[0])))
        # A field in two segments, too.
        halves = [(Columns.of(part), rows) for part, rows in ((table.slice(0, 100), chosen[:100]), (table.slice(100), chosen[100:]))]
        for parts in ([(Columns.of(table), chosen)], halves):
            facet = count_values(field, parts, most=3)
            assert (facet.values, facet.distinct) == (ordered[:3], len(expected)), field
            if "string" not in str(type_) and field != "open":
                assert facet.range == (min(expected), max(expected))
            else:
                assert facet.range is None


TABLE = pa.table(
    {
        "year": [2008, None, 2012],
        "lang": pa.array(["en", "de", None]).dictionary_encode(),
        "created": pa.array([DAY, None, DAY + datetime.timedelta(1)]),
        "seen": pa.array([NOON.replace(hour=0), None, NOON.replace(hour=9)], pa.timestamp("us")),
        "tags": [["x", "y"], [], None],
        "order": [1, 2, 3],
        "author.name": ["Ann", "Bob", "Cid"],
        "empty": pa.nulls(3),
        "id": ["d1", "d2", "d3"],
        "a-b": [1, 2, 3],
    }
)


def rows_of(condition: str | list[str], **keys: Any) -> list[int]:
    return list(np.flatnonzero(Filter.parse(condition, **keys).rows(Columns.of(TABLE), TABLE.schema)))


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("year >= 2010 OR lang = 'de'", [1, 2]),
        ("NOT year >= 2010", [0]),  # a missing year is unknown, and so is its negation
        ("year != 2008", [2]),
        ("year < 9223372036854775808 AND year > -1e400", [0, 2]),
        ("year = 2008.0", [0]),
        ("created = '2020-02-28'", [0]),
        ("created > TIMESTAMP '2020-02-28 12:00:00'", [2]),
        ("seen >= '2020-02-28' AND seen < DATE '2020-02-29'", [0, 2]),
        ("seen = '2020-02-28T10:00:00+01:00'", [2]),
        ("array_contains(tags, 'y')", [0]),
        ("NOT array_contains(tags, 'y')", [1]),
        ("tags IS NULL", [2]),
        ('order IN (1, 3) AND end IS NULL OR "order" = 2', [0, 1]),
        ("author.name LIKE 'B%' OR \"author.name\" = 'Cid'", [1, 2]),
        ("id IN ('d1', 'd3', 'no')", [0, 2]),
        ("NOT id = 'd1'", [1, 2]),
        ("id > 'd2'", [2]),
        ("empty = 'x' OR empty IS NULL", [0, 1, 2]),
        ("year NOT IN (2008, NULL)", []),
        (["year > 2000", "lang IS NULL"], [2]),
    ],
)
def test_sql_means_what_it_says(condition: str | list[str], expected: list[int]) -> None:
    table = TABLE.append_column("end", pa.array([None, 1, 2]))
    assert np.flatnonzero(Filter.parse(condition).rows(Columns.of(table), table.schema)).tolist() == expected


def test_ids_and_conditions_must_both_hold() -> None:
    assert rows_of("year > 2000", ids=["d3", "unknown"]) == [2]
    assert rows_of([], ids=["d2"]) == [1]


def test_a_field_named_id_stands_beside_the_ids_of_documents() -> None:
    table = pa.table({"id": ["order-1", "order-2"]})
    columns = Columns(2, lambda field: table[field].chunk(0), lambda ids: np.array([int(each) for each in ids]))
    assert Filter.parse("id = 'order-2'").rows(columns, table.schema).tolist() == [False, True]
    assert Filter.parse([], ids=["0"]).rows(columns, table.schema).tolist() == [True, False]
    assert Filter.parse("id IN ('1')").rows(columns, pa.schema([])).tolist() == [False, True]


def test_a_field_that_a_segment_does_not_have_is_null() -> None:
    columns = Columns.of(TABLE.drop_columns(["year", "tags"]))
    for condition in ("year = 2008", "NOT year = 2008", "array_contains(tags, 'x')", "NOT array_contains(tags, 'x')", "year IN (1)"):
        assert not Filter.parse(condition).rows(columns, TABLE.schema).any()
    assert Filter.parse("year IS NULL AND tags IS NULL").rows(columns, TABLE.schema).all()


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (
            "yaer = 1",
            r"no document has the field 'yaer' to filter by \(did you mean 'year'\?\); there are year \(integer\), lang \(string\)",
        ),
        ("year = '2008'", r"year is an integer and '2008' is not; a number has no quotes: year"),
        ("lang = 3", r"lang is a string and 3 is not; a text stands in single quotes: lang = '3'"),
        ("lang = en", r"no document has the field 'en'; a text stands in single quotes: lang = 'en'"),
        ('lang = "en"', r"lang = 'en'"),
        ("created > 2021", r"created is a date and 2021 is not; .* created >= '2021-06-01'"),
        ("created >= 2021-06-01", r"a date stands in single quotes"),
        ("created >= '2021'", r"'2021' is not a date such as '2021-06-01'; for a whole year write created BETWEEN"),
        ("tags = x", r"write array_contains\(tags, 'x'\)"),
        ("tags = 'x'", r"tags is a list of strings; write array_contains\(tags, 'x'\)"),
        ("array_contains(lang, 'x')", r"lang is a string, not a list; write lang = 'x'"),
        ("year LIKE '20%'", r"year is an integer, and LIKE is for strings"),
        ("year", r"year is an integer, not a condition; .*in a shell put the filter in quotes"),
        ("lang in en, de", r"the list of IN stands in parentheses: lang IN \('en', 'de'\)"),
        ("lang = guides/*", r"LIKE with a percent sign"),
        ("price=9,50", r"a decimal has a point"),
        ("year = 1; DROP TABLE x", r"not a SQL condition"),
        ("year IN (SELECT 1)", r"not a SQL condition|is not supported"),
        ("year + 1 = 2", r"year \+ 1 is no field"),
        ("a-b = 1", r'a field with signs stands in double quotes: "a-b"'),
        ("year = order", r"two fields cannot be compared"),
        ("lang = 'it", r"not a SQL condition"),
        ("", r"the condition is empty|not a SQL condition"),
        ("(" * 3000 + "year = 1" + ")" * 3000, r"nested too deeply"),
        ("NOT " * 3000 + "year = 1", r"nested too deeply"),
        ("lang = '\ud800'", r"surrogate|UTF-8"),
        ("year = CASE WHEN 1 THEN 2 END", r"not a SQL condition|is not"),
    ],
)
def test_a_wrong_filter_is_one_line_that_says_what_to_type(condition: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Filter.parse(condition).check(TABLE.schema)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_long_lists_and_many_alternatives_are_read() -> None:
    years = [*range(2009, 5000), 2008]
    assert rows_of(f"year IN ({', '.join(map(str, years))})") == [0, 2]
    assert rows_of(" OR ".join(f"year = {year}" for year in years[:1500])) == [2]
    table = pa.table({"price": [-0.0, 0.0, None, 1.5, 3.0], "day": pa.array([0, 1, None, 99, 3], pa.date32())})
    for count in (20, 90):  # lists of different lengths are compared in different ways
        days = ", ".join(f"'{datetime.date(1970, 1, 1) + datetime.timedelta(day)}'" for day in range(count))
        for condition in (f"price IN ({', '.join(map(str, range(count)))})", f"day IN ({days})"):
            assert Filter.parse(condition).rows(Columns.of(table), table.schema).tolist() == [True, True, False, False, True]
            assert Filter.parse(f"NOT {condition}").rows(Columns.of(table), table.schema).tolist() == [False, False, False, True, False]
    assert as_filter(None) is None
    with pytest.raises(InputError, match="filter must be"):
        as_filter([3])  # type: ignore[list-item]


def test_a_facet_counts_a_document_once_per_value() -> None:
    columns = Columns.of(pa.table({"tags": [["a", "a", "b"], ["a"], None]}))
    assert count_values("tags", [(columns, None)], most=5) == Facet([("a", 2), ("b", 1)], 2)
    assert count_values("none", [(columns, None)], most=5) == Facet([], 0)
