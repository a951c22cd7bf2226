"""Metadata, filters and texts of segments against going through the documents one by one."""

from __future__ import annotations

import itertools
import operator
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.documents import (
    Condition,
    DocumentTable,
    DocumentTableWriter,
    Filter,
    Prefix,
    count_values,
    describe,
    merge_documents,
    typed,
)
from quiver.retrieval.index.files import REAL, DamagedIndexError, Files
from quiver.retrieval.index.strings import StringColumn
from quiver.retrieval.records import Document, TextTokens, TokenCounts

VALUES: list[Any] = [
    1,
    2,
    3,
    -5,
    2**62,
    2**62 + 1,
    2**70,
    1.5,
    2.0,
    -0.0,
    True,
    False,
    "a",
    "b",
    "é",
    "2",
    "",
    [1, "x"],
    ["x", "y", "x"],
    [],
]
ASKED: list[Any] = [1, 2, 2.0, 1.5, 0.0, 2**62, 2**62 + 1, 2.0**62, 2.0**70, -1e30, 10**30, True, False, "a", "2", "é", "", "zz"]
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def some_documents(seed: int) -> list[Document]:
    rng = random.Random(seed)
    fields = ["f", "g", "h i"]
    return [
        Document(
            f"id{number}",
            f"text {number}",
            "t" * (number % 2),
            {name: rng.choice(VALUES) for name in rng.sample(fields, rng.randrange(4))} or None,
        )
        for number in range(rng.randrange(1, 40))
    ]


def tokens_of(documents: Sequence[Document]) -> TextTokens:
    numbers = np.array([int(document.id[2:]) for document in documents])
    return TextTokens((numbers * 3).astype(np.int32), numbers % 2 == 0, numbers % 5 == 0)


def write(folder: Path, documents: Sequence[Document], *, texts: bool = True) -> DocumentTable:
    folder.mkdir()
    writer = DocumentTableWriter(folder, REAL, texts=texts)
    for start in range(0, len(documents), 7):
        writer.add(documents[start : start + 7], tokens_of(documents[start : start + 7]))
    assert set(writer.close()) == {path.name for path in folder.iterdir()}
    return DocumentTable.open(Files(folder), len(documents), texts=texts)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_true(document: Document, condition: Condition) -> bool:
    """The definition, a value at a time."""
    if condition.operator == "!=":
        return not is_true(document, Condition(condition.field, "=", condition.values))
    found = (document.metadata or {}).get(condition.field, [])
    found = found if isinstance(found, list) else [found]
    for mine, asked in itertools.product(found, condition.values):
        comparable = (is_number(mine) and is_number(asked)) or (type(mine) is type(asked) and not is_number(mine))
        mine = float(mine) if type(mine) is int and abs(mine) >= 2**63 else mine
        if comparable and COMPARE[condition.operator](mine, asked):
            return True
    return False


@pytest.mark.parametrize("seed", range(12))
def test_conditions_find_the_documents_that_match(tmp_path: Path, seed: int) -> None:
    documents = some_documents(seed)
    table = write(tmp_path / "s", documents)
    compared = 0
    for field, comparison, value in itertools.product(["f", "g", "h i", "none"], [*COMPARE, "!="], ASKED):
        condition = Condition(field, comparison, (value,))  # type: ignore[arg-type]
        assert table.matching(condition).tolist() == [is_true(document, condition) for document in documents], condition
        compared += 1
    strings = sorted({value for value in ASKED if isinstance(value, str)})
    for field, comparison, text in itertools.product(["f", "h i"], ["=", "!="], {text[:size] for text in strings for size in (1, 2, 9)}):
        condition = Condition(field, comparison, (Prefix(text),))  # type: ignore[arg-type]
        found = [(document.metadata or {}).get(field, []) for document in documents]
        begins = [any(isinstance(each, str) and each.startswith(text) for each in (v if isinstance(v, list) else [v])) for v in found]
        assert table.matching(condition).tolist() == [each == (comparison == "=") for each in begins], condition
    several = Condition("f", "=", (1, "x", True))
    assert table.matching(several).tolist() == [is_true(document, several) for document in documents]
    assert compared == 4 * 6 * 18


@pytest.mark.parametrize("texts", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_merged_documents_are_byte_for_byte_those_that_a_writer_writes(tmp_path: Path, seed: int, texts: bool) -> None:
    documents, rng = some_documents(seed), np.random.default_rng(seed)
    parts: list[tuple[DocumentTable, NDArray[np.bool_]]] = []
    kept: list[Document] = []
    for number in range(3):
        mine = documents[number::3]
        keep = rng.random(len(mine)) < 0.7
        parts.append((write(tmp_path / f"part{number}", mine, texts=texts), keep))
        kept += [document for document, wanted in zip(mine, keep, strict=True) if wanted]
    (tmp_path / "merged").mkdir()
    holds = merge_documents(parts, tmp_path / "merged", REAL)
    whole = write(tmp_path / "whole", kept, texts=texts)
    bytes_of = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("merged", "whole")]
    assert bytes_of[0] == bytes_of[1]
    assert set(holds) == set(bytes_of[0])
    opened = DocumentTable.open(Files(tmp_path / "merged"), len(kept), texts=texts)
    assert opened.token_counts(np.ones(len(kept), bool)) == tokens_of(kept).total() == whole.token_counts(np.ones(len(kept), bool))
    if texts:
        assert opened.texts is not None
        assert [opened.texts[row] for row in range(len(kept))] == kept


def test_ids_tokens_and_fields_of_a_table(tmp_path: Path) -> None:
    documents = [Document("id1", "x", "", {"a": 1, "b": ["u", 2.5]}), Document("id10", "y", "", {"a": True})]
    table = write(tmp_path / "s", documents)
    assert table.having(["id10", "id2"]).tolist() == [False, True]
    assert table.token_counts(np.array([False, True])) == TokenCounts(1, 30, 1, 1)
    assert describe([table.metadata, write(tmp_path / "t", [Document("id3", "z", "", {"c": "v"})]).metadata]) == {
        "a": ("boolean", "integer"),
        "b": ("number", "string"),
        "c": ("string",),
    }


def test_long_values_are_left_out_and_a_chosen_field_alone_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "s").mkdir()
    writer = DocumentTableWriter(tmp_path / "s", REAL, texts=False, fields=["a"])
    documents = [Document("id0", "", "", {"a": "x" * 513, "b": 1}), Document("id1", "", "", {"a": "x" * 512})]
    writer.add(documents, tokens_of(documents))
    writer.close()
    table = DocumentTable.open(Files(tmp_path / "s"), 2, texts=False)
    assert table.matching(Condition("a", ">=", ("x",))).tolist() == [False, True]
    assert list(describe([table.metadata])) == ["a"]
    assert "1 metadata values of more than 512 characters" in caplog.text


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("year>=2019", Condition("year", ">=", (2019, "2019"))),
        (" year <  20.5 ", Condition("year", "<", (20.5, "20.5"))),
        ("lang!=en", Condition("lang", "!=", ("en",))),
        ('"two words" = "a = b"', Condition("two words", "=", ("a = b",))),
        ("n==5", Condition("n", "=", (5, "5"))),
        ("author.name=O'Brien", Condition("author.name", "=", ("O'Brien",))),
        ("state=or", Condition("state", "=", ("or",))),
        ('tags = "2019"', Condition("tags", "=", ("2019",))),
        ('x="a \\"quoted\\" word"', Condition("x", "=", ('a "quoted" word',))),
        ("ok=true", Condition("ok", "=", (True, "true"))),
        ("ok=False", Condition("ok", "=", (False, "False"))),
        ("x=nan", Condition("x", "=", ("nan",))),
        ('url="http://x?y=1&z<=2"', Condition("url", "=", ("http://x?y=1&z<=2",))),
        ("when>=2019-01-01T00:00:00", Condition("when", ">=", ("2019-01-01T00:00:00",))),
        ('lang in en, "de", 3', Condition("lang", "=", ("en", "de", 3, "3"))),
        ('x in "a,b","c d"', Condition("x", "=", ("a,b", "c d"))),
        ("in in in", Condition("in", "=", ("in",))),
        ("file=guides/*", Condition("file", "=", (Prefix("guides/"),))),
        ("file in a*, 2*, b", Condition("file", "=", (Prefix("a"), Prefix("2"), "b"))),
        ('x != "a*"', Condition("x", "!=", ("a*",))),
        ('x in "a b/"*, "c"', Condition("x", "=", (Prefix("a b/"), "c"))),
        ("x=*", Condition("x", "=", ("*",))),
        ("x<a*", Condition("x", "<", ("a*",))),
    ],
)
def test_conditions_are_read(text: str, condition: Condition) -> None:
    assert Condition.parse(text) == condition


LONG = """
import sys
from quiver.encoder.errors import InputError
from quiver.retrieval.index.documents import Condition
blanks = " " * 10**5
for text in (blanks + "!", "a" + blanks + "in", "a in " + blanks + '"', "a in x" + blanks + 'y"', 'a in "' + '\\\\"' * 10**5):
    try:
        sys.exit(str(Condition.parse(text)))
    except InputError:
        pass
assert Condition.parse("a in b" + blanks + "," + blanks + "c").values == ("b", "c")
"""


def test_a_long_condition_is_read_in_no_time() -> None:
    """A hundred thousand blanks or quotes would take minutes to hours where the time grows with their square."""
    subprocess.run([sys.executable, "-c", LONG], check=True, timeout=60)


@pytest.mark.parametrize(
    "text",
    [
        *("year", "=3", "x=", "x in ", 'x in a"b', "", "in a", 'x="open', "<5", 'x in a "b"', 'x in "a" b', "a!b=3"),
        *("n=1 or n=2", "year>=2020 or year=2019", "n=1 and n=2", "n=1 OR 2", "n=1|2", "n=1&2", "not n=1", "(n=1)", "n=1 2", "n=1,2"),
        *(
            "n=>1",
            "n===1",
            "n<>1",
            "n=!1",
            "n in a b",
            "n in a,,b",
            "n in a,",
            "n in ,a",
            "n IN a",
            "city=New York",
            "lang='en'",
            'x="\\q"',
            "tags=*python*",
            "file != *.pdf",
            "file in a/*/b, c",
        ),
    ],
)
def test_malformed_conditions_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"filter"):
        Filter.parse([text])


def test_texts_that_were_changed_are_damage(tmp_path: Path) -> None:
    table = write(tmp_path / "s", some_documents(1))
    assert table.texts is not None
    path = tmp_path / "s" / "documents.jsonl"
    path.write_bytes(path.read_bytes().replace(b"{", b"[", 1))
    with pytest.raises(DamagedIndexError, match=r"documents\.jsonl:1: not a document"):
        table.texts[0]
    path.write_bytes(b"x")
    with pytest.raises(DamagedIndexError, match="does not match 1 bytes of strings"):
        DocumentTable.open(Files(tmp_path / "s"), len(table), texts=True).texts  # noqa: B018 - reading it is the test


@pytest.mark.parametrize("kind", [str, int, float])
def test_of_many_values_that_are_equally_frequent_the_first_are_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Any]
) -> None:
    """Two values occur thrice, 3,000 once each: the ties are decided by value as text, and only as many texts are read as are returned."""
    numbers = [*range(3000), 7, 7, 1200, 1200]
    documents = [Document(f"d/{row}", "", metadata={"f": kind(number)}) for row, number in enumerate(numbers)]
    table = write(tmp_path / "s", documents)
    counts = Counter(kind(number) for number in numbers)
    expected = sorted(counts.items(), key=lambda each: (-each[1], str(each[0])))
    read: list[int] = []
    take = StringColumn.take
    monkeypatch.setattr(StringColumn, "take", lambda self, rows: read.append(len(rows)) or take(self, rows))
    for most in (1, 2, 5, 20, 5000):
        read.clear()
        found = count_values("f", [(table.metadata, None)], most=most)
        assert (found.values, found.distinct) == (expected[:most], 3000)
        assert sum(read) <= most + 2 if kind is str else not read


@pytest.mark.parametrize("seed", range(8))
def test_values_are_counted_as_by_going_through_the_documents(tmp_path: Path, seed: int) -> None:
    """Over two segments, of which one has a bitmap of chosen rows: a list counts once for each of its values, types are kept apart."""
    parts = [some_documents(seed), some_documents(seed + 100)]
    tables = [write(tmp_path / str(number), documents) for number, documents in enumerate(parts)]
    chosen = np.random.default_rng(seed).random(len(parts[1])) < 0.6
    counted = [*parts[0], *itertools.compress(parts[1], chosen.tolist())]
    for field in ("f", "g", "h i", "none"):
        expected: dict[tuple[str, Any], int] = {}
        for document in counted:
            value = (document.metadata or {}).get(field, [])
            for each in {typed(one) for one in (value if isinstance(value, list) else [value])}:
                expected[each] = expected.get(each, 0) + 1
        for most in (1, 3, 100):
            found = count_values(field, [(tables[0].metadata, None), (tables[1].metadata, chosen)], most=most)
            assert found.distinct == len(expected)
            # Values of several types can be equal as text, whose order is not said.
            ordered = sorted(((value, count) for (_, value), count in expected.items()), key=lambda each: (-each[1], str(each[0])))
            assert [(str(value), count) for value, count in found.values] == [(str(value), count) for value, count in ordered[:most]]
