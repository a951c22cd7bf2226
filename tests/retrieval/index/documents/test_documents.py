"""Arrow files of documents against Python's own lists, sorting and dicts, against pyarrow, and against writing at once."""

from __future__ import annotations

import datetime
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.entries import ColumnTypes, typed_value
from quiver.retrieval.index import add_documents, build_index, compact_index, open_index
from quiver.retrieval.index.columns import ARROW_TYPES, arrow_type, open_columns, with_words, write_columns
from quiver.retrieval.index.documents import DocumentTable, DocumentTableWriter, IdTable, fit_field, merge_documents, shared_ids
from quiver.retrieval.index.files import REAL, DamagedIndexError, Files, file_digests
from quiver.retrieval.records import Document, TextTokens

MORNING = datetime.datetime(2021, 6, 1, 8, 30)  # noqa: DTZ001 - timestamps of columns have no zone
VALUES: Mapping[str, Sequence[Any]] = {
    "string": ["a", "b", "é", "", "𝄞 漢", "x" * 700, "2021-6-1"],
    "integer": [0, -5, 2**62 + 1, -(2**63)],
    "number": [1.5, -0.0, 2, 1e300, 2**70],
    "boolean": [True, False],
    "date": ["2021-06-01", "0001-01-01", "9999-12-31"],
    "timestamp": ["2021-06-01T08:30:00", "2021-06-01 08:30", "2021-06-01T08:30:00.250000"],
    "string[]": [["a", "b", "a"], [], "c"],
    "integer[]": [[1, 2], 3, []],
    "date[]": [["2021-06-01"], "2022-01-31"],
}


def some_documents(seed: int, types: Mapping[str, Sequence[Any]] = VALUES) -> list[Document]:
    draw = random.Random(seed)
    ids = [f"{draw.choice(['doc-0000', '', 'é', 'é𝄞'])}{number}{chr(0) * draw.randrange(2)}" for number in range(draw.randrange(1, 40))]
    return [
        Document(
            key,
            f"text {key}" * draw.randrange(9),
            "t" * draw.randrange(2),
            {name: draw.choice(values) for name, values in types.items() if draw.random() < 0.7} or None,
        )
        for key in draw.sample(ids, len(ids))
    ]


def tokens_of(documents: Sequence[Document]) -> TextTokens:
    lengths = np.array([len(document.text) for document in documents], np.int32)
    return TextTokens(lengths, lengths % 2 == 0, lengths % 5 == 0)


def types_of(documents: Sequence[Document]) -> dict[str, str]:
    types = ColumnTypes()
    for document in documents:
        types.add_fields(document.metadata or {})
    return types.types()


def write(folder: Path, documents: Sequence[Document], types: Mapping[str, str], *, texts: bool = True, chunk: int = 7) -> DocumentTable:
    folder.mkdir()
    writer = DocumentTableWriter(folder, REAL, texts=texts, types=types)
    for start in range(0, len(documents), chunk):
        writer.add(documents[start : start + chunk], tokens_of(documents[start : start + chunk]))
    assert set(writer.close()) == {path.name for path in folder.iterdir()}
    return DocumentTable.open(Files(folder), len(documents), texts=texts, types=types)


@pytest.mark.parametrize("seed", range(20))
def test_documents_come_back_as_given_and_columns_hold_them_by_type(tmp_path: Path, seed: int) -> None:
    documents = some_documents(seed)
    types = types_of(documents)
    table = write(tmp_path / "s", documents, types)
    assert table.texts is not None
    assert [table.texts[row] for row in range(len(documents))] == documents
    for document, mine in zip(documents, (table.texts[row] for row in range(len(documents))), strict=True):
        assert {name: type(value) for name, value in (document.metadata or {}).items()} == {
            name: type(value) for name, value in (mine.metadata or {}).items()
        }
    for name, kind in types.items():
        given = [(document.metadata or {}).get(name) for document in documents]
        expected = [None if value is None else fit_field(value, kind) for value in given]
        column = table.column(name)
        assert column is not None
        assert column.to_pylist() == expected == [table.fields[name].at(row) for row in range(len(documents))]
    assert table.ids.token_counts(np.ones(len(documents), bool)) == tokens_of(documents).total()


@pytest.mark.parametrize("seed", range(20))
def test_ids_are_found_and_ordered_as_python_orders_them(tmp_path: Path, seed: int) -> None:
    ids = [document.id for document in some_documents(seed)]
    for table in (write(tmp_path / "s", [Document(key, "") for key in ids], {}).ids, IdTable.of(ids)):
        many = [*ids, "no such id", *ids[:3], *(["zzz", "\ud800"] * 20)]
        assert table.rows_of(many).tolist() == [*range(len(ids)), -1, *range(len(ids[:3])), *[-1] * 40]
        assert [table.rows_of([key])[0] for key in many] == table.rows_of(many).tolist()
        assert [ids[row] for row in np.argsort(table.ranks)] == sorted(ids)
        assert list(table.strings) == ids == table.strings.take(np.arange(len(ids)))
    chosen = np.array([number % 2 == 0 for number in range(len(ids))])
    everything = np.ones(len(ids), bool)
    assert shared_ids((table, chosen), (IdTable.of([*ids[:5], "other"]), np.ones(min(5, len(ids)) + 1, bool))) == sum(chosen[:5])
    assert shared_ids((table, everything), (table, everything)) == len(ids)


@pytest.mark.parametrize("texts", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_merged_documents_are_byte_for_byte_those_that_a_writer_writes(tmp_path: Path, seed: int, texts: bool) -> None:
    documents, draw = some_documents(seed), np.random.default_rng(seed)
    types = types_of(documents)
    parts, kept = [], []
    for number in range(3):
        mine = documents[number::3]
        keep = draw.random(len(mine)) < 0.7
        if mine:
            parts.append((write(tmp_path / f"part{number}", mine, types, texts=texts, chunk=3), keep))
            kept += [document for document, wanted in zip(mine, keep, strict=True) if wanted]
    if not kept:
        return
    (tmp_path / "merged").mkdir()
    holds = merge_documents(parts, tmp_path / "merged", REAL)
    write(tmp_path / "whole", kept, types, texts=texts)
    merged, whole = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("merged", "whole"))
    assert merged == whole
    assert set(holds) == set(merged)


def some_columns(seed: int) -> dict[str, pa.Array]:
    draw, rows = random.Random(seed), 500
    columns = {}
    for kind in (*ARROW_TYPES, "string[]", "number[]"):
        pools = {"row": [1, 7, 2**31], "number[]": [[1.5], [], [2.0, -1.0]]}
        pool = pools.get(kind) or [fit_field(value, kind) for value in VALUES[kind]][:4]
        nulls = draw.choice([0, 0.3])
        columns[kind] = pa.array([None if draw.random() < nulls else draw.choice(pool) for _ in range(rows)], arrow_type(kind))
    columns["distinct"] = pa.array([f"word {number}" for number in range(rows)])
    return {name: with_words(column) for name, column in columns.items()}


@pytest.mark.parametrize("seed", range(6))
def test_columns_are_read_as_pyarrow_reads_the_file(tmp_path: Path, seed: int) -> None:
    columns = some_columns(seed)
    write_columns(tmp_path, "c", columns, REAL, "columns")
    by_arrow = pa.ipc.open_file(str(tmp_path / "c.arrow")).read_all()
    assert pa.types.is_dictionary(by_arrow["string"].type)
    assert not pa.types.is_dictionary(by_arrow["distinct"].type)
    [mine] = open_columns(Files(tmp_path), "c")
    keep = np.random.default_rng(seed).random(500) < 0.5
    for name, column in columns.items():
        wanted = by_arrow[name].to_pylist()
        assert mine[name].array.to_pylist() == wanted == column.to_pylist() == [mine[name].at(row) for row in range(500)]
        assert mine[name].select(keep).to_pylist() == [value for value, kept in zip(wanted, keep, strict=True) if kept]
        assert not mine[name].lost().any()


@pytest.mark.parametrize("seed", range(30))
def test_values_beside_a_damaged_block_are_read(tmp_path: Path, seed: int) -> None:
    """Every value that is not lost is right, of whatever type, and a damaged block is noticed where it is read."""
    draw = random.Random(seed)
    words = pa.array([draw.choice(["a", "bc", "def"]) * draw.randrange(9) + str(row) for row in range(9000)])
    tags = pa.array([[draw.randrange(9) for _ in range(draw.randrange(4))] for _ in range(9000)], pa.list_(pa.int64()))
    columns = {"word": words, "day": pa.array([datetime.date(2021, 1, 1 + row % 28) for row in range(9000)]), "tags": tags}
    write_columns(tmp_path, "c", columns, REAL, "columns")
    digests = {path.name: file_digests(path) for path in tmp_path.iterdir()}
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    path = tmp_path / "c.arrow"
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    [around] = open_columns(Files(tmp_path, digests, sizes=sizes, around_damage=True), "c")
    lost = 0
    for name, column in columns.items():
        broken = around[name].lost()
        lost += int(broken.sum())
        right = column.to_pylist()
        assert [around[name].at(row) for row in np.flatnonzero(~broken).tolist()] == [right[row] for row in np.flatnonzero(~broken)]
        assert around[name].select(~broken).to_pylist() == [right[row] for row in np.flatnonzero(~broken)]
    assert lost < 3 * 9000
    [checked] = open_columns(Files(tmp_path, digests, sizes=sizes), "c")
    noticed = 0
    for name, column in columns.items():
        try:
            assert checked[name].array.to_pylist() == column.to_pylist()
        except DamagedIndexError:
            noticed += 1
    assert (noticed > 0) == (lost > 0)


def test_a_damaged_layout_is_read_from_the_arrow_file(tmp_path: Path) -> None:
    write_columns(tmp_path, "c", {"word": pa.array(["a", "b"])}, REAL, "columns")
    digests = {path.name: file_digests(path) for path in tmp_path.iterdir()}
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    (tmp_path / "c.json").write_bytes(b"[" * sizes["c.json"])
    with pytest.raises(DamagedIndexError, match=r"c\.json: bytes 0 to"):
        open_columns(Files(tmp_path, digests, sizes=sizes), "c")
    [around] = open_columns(Files(tmp_path, digests, sizes=sizes, around_damage=True), "c")
    assert around["word"].array.to_pylist() == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "kind", "fitted"),
    [
        ("7", "integer", 7),
        ("007", "integer", 7),
        (2012.0, "integer", 2012),
        ("9.5", "number", 9.5),
        (True, "string", "true"),
        (7, "string", "7"),
        ("true", "boolean", True),
        ("2021-06-01T10:30:00+02:00", "timestamp", MORNING),
        ("2021-06-01T08:30Z", "timestamp", MORNING),
    ],
)
def test_values_are_read_by_a_declared_type(value: Any, kind: str, fitted: Any) -> None:
    assert typed_value(value, kind) == fitted
    assert fit_field(value, f"{kind}[]") == [fitted]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *((2.5, "integer"), ("2.5", "integer"), (2**63, "integer"), ("x", "number"), ("1_0", "number"), (True, "number"), (1, "boolean")),
        *(
            ("2021-6-1", "date"),
            ("2021-02-31", "date"),
            (20210601, "date"),
            ("2021-06-01", "timestamp"),
            (["a"], "string"),
            (["x"], "date[]"),
        ),
    ],
)
def test_values_of_another_type_are_refused(value: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=r"not a|a list in a field|out of range"):
        fit_field(value, kind)


ROWS = [{"id": "a", "text": "owl", "n": 1, "at": "2021-06-01", "tags": "x"}, {"id": "b", "text": "emu", "n": 2, "tags": ["y", "z"]}]


def test_types_are_inferred_declared_and_kept_by_additions(tmp_path: Path) -> None:
    index = build_index(ROWS, "bm25", tmp_path / "i", types={"n": "number"})
    assert dict(index.fields) == {"at": "date", "n": "number", "tags": "string[]"}
    more = [{"id": "c", "text": "kiwi", "n": 2.5, "tags": "x", "at": "2022-01-01", "new": True}]
    index = add_documents(tmp_path / "i", more, "bm25")
    assert dict(index.fields) == {"at": "date", "n": "number", "new": "boolean", "tags": "string[]"}
    for each in (index, compact_index(tmp_path / "i"), open_index(tmp_path / "i")):
        assert [each.count(f) for f in ("n >= 2", "at < '2022-01-01'", "array_contains(tags, 'x')", "new", "n IS NULL")] == [2, 1, 2, 1, 0]
        assert each.document("a").metadata == {"n": 1, "at": "2021-06-01", "tags": "x"}


@pytest.mark.parametrize(
    ("values", "kind"),
    [([2**62 + 1, -(2**63)], "integer"), ([2**53, 0.5], "number"), ([2**53 + 1, 0.5], "string"), ([10**400, 7], "string")],
)
def test_integers_that_floats_do_not_hold_are_counted_exactly(values: list[Any], kind: str) -> None:
    index = build_index([{"id": str(number), "text": "owl", "n": value} for number, value in enumerate(values)], "bm25")
    assert index.fields["n"] == kind
    assert {str(value) for value, _ in index.facets(["n"])["n"].values} == {str(typed_value(value, kind)) for value in values}
    with pytest.raises(InputError, match="document 'a': the field 'n' is of type number, got 9007199254740993"):
        build_index([{"id": "a", "text": "owl", "n": 2**53 + 1}], "bm25", types={"n": "number"})


def test_values_that_do_not_fit_are_counted_and_the_first_is_named(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"id": key, "text": "owl", "n": value} for key, value in (("a", 1), ("b", "x"), ("c", "y"))]
    build_index(rows[:2], "bm25", types={"n": "integer"}, on_type_error="null")
    build_index(rows, "bm25", types={"n": "integer"}, on_type_error="null")
    assert "field 'n': 1 value does not fit the type integer (document 'b'); no filter finds it" in caplog.text
    assert "field 'n': 2 values do not fit the type integer (the first: document 'b'); no filter finds them" in caplog.text


@pytest.mark.parametrize("types", [["n"], "n", {"n": 3}, {"n": "int"}])
def test_types_of_another_form_are_one_line(types: Any) -> None:
    with pytest.raises(InputError, match=r"types must be a mapping from field to type|--type n=.*: a type is string, integer"):
        build_index(ROWS, "bm25", types=types)


@pytest.mark.parametrize(
    ("field", "kind", "filter"),
    [("n", "string", "n = '1'"), ("at", "string", "at = '2021-06-01'"), ("n", "integer[]", "array_contains(n, 1)")],
)
def test_a_field_gets_a_wider_type(tmp_path: Path, field: str, kind: str, filter: str) -> None:
    build_index(ROWS, "bm25", tmp_path / "i")
    index = add_documents(
        tmp_path / "i", [{"id": "c", "text": "kiwi", field: "soon" if kind == "string" else [3, 4]}], "bm25", types={field: kind}
    )
    assert [each.count(filter) for each in (index, compact_index(tmp_path / "i"))] == [1, 1]


@pytest.mark.parametrize(("types", "extra"), [({"n": "date"}, {}), ({}, {"at": "soon"}), ({}, {"n": "x"}), ({}, {"at": ["2021-06-01"]})])
def test_a_value_that_does_not_fit_is_named_and_nothing_is_changed(tmp_path: Path, types: dict[str, str], extra: dict[str, Any]) -> None:
    if types:
        with pytest.raises(
            InputError, match=r"document 'a': the field 'n' is of type date, got 1; .*--type n=string.*--on-type-error null"
        ):
            build_index(ROWS, "bm25", tmp_path / "i", types=types)
        assert not (tmp_path / "i").exists()
        assert build_index(ROWS, "bm25", tmp_path / "i", types=types, on_type_error="null").count("n IS NULL") == 2
        return
    before = build_index(ROWS, "bm25", tmp_path / "i")
    row = {"id": "c", "text": "kiwi", **extra}
    with pytest.raises(InputError, match=f"document 'c': the field '{next(iter(extra))}' is of type"):
        add_documents(tmp_path / "i", [row], "bm25")
    assert open_index(tmp_path / "i").manifest == before.manifest
    index = add_documents(tmp_path / "i", [row], "bm25", on_type_error="null")
    assert index.count(f"{next(iter(extra))} IS NULL AND id = 'c'") == 1
    assert index.document("c").metadata == extra


def test_types_that_the_stored_values_do_not_fit_are_refused(tmp_path: Path) -> None:
    build_index(ROWS, "bm25", tmp_path / "i")
    with pytest.raises(InputError, match="the field 'n' is of type integer and cannot become date; build the index again"):
        add_documents(tmp_path / "i", [{"id": "c", "text": "kiwi"}], "bm25", types={"n": "date"})
    with pytest.raises(InputError, match=r"--type n=day: a type is string, integer, number, boolean, date, timestamp, or a list"):
        build_index(ROWS, "bm25", types={"n": "day"})
    with pytest.raises(InputError, match="no document has the field 'm' to filter by; the documents have at, n, tags"):
        build_index(ROWS, "bm25", types={"m": "date"})


def test_tables_are_written_and_read_without_pandas() -> None:
    pytest.importorskip("pandas")
    code = """
import sys
from quiver import build_index
rows = [{"id": str(n), "text": "bird", "n": n, "at": f"2021-01-0{n}", "tags": ["a"] * n, "open": n > 1} for n in range(1, 4)]
index = build_index(rows, "bm25")
assert [hit.id for hit in index.search("bird", filter="n > 1 AND at < '2021-01-03' AND array_contains(tags, 'a') AND open")] == ["2"]
assert index.facets(["at"])["at"].distinct == 3
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fields_that_become_strings_have_their_values_as_they_were_given(tmp_path: Path) -> None:
    build_index([Document("a", "bird", metadata={"at": "2021-01-01T10:00:00", "n": 2.0, "b": True})], "bm25", tmp_path / "index")
    more = [Document("b", "bird", metadata={"at": "soon", "n": "x", "b": "x"})]
    add_documents(tmp_path / "index", more, "bm25", types=dict.fromkeys(("at", "n", "b"), "string"))
    for _ in range(2):
        assert open_index(tmp_path / "index").count("at = '2021-01-01T10:00:00' AND n = '2.0' AND b = 'true'") == 1
        compact_index(tmp_path / "index")
    with pytest.raises(InputError, match=r"on_type_error: pass 'error' or 'null', got 'nul'"):
        build_index(more, "bm25", on_type_error="nul")  # type: ignore[arg-type]
