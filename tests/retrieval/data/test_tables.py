"""Tables of every format: the documents they give, and errors that name file, line and the fields that exist."""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import re
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import read_documents
from quiver.retrieval.data.source import SourceOptions, open_corpus
from quiver.retrieval.data.tables import GivenDocuments
from quiver.retrieval.index import build_index
from quiver.retrieval.records import Document

ROWS: list[dict[str, Any]] = [
    {"sku": "007", "name": "Lamp", "about": "gives light", "price": 12.5, "year": 2019},
    {"sku": "8", "name": "", "about": 'multi\nline, "quoted" text', "price": 3.0, "year": 2020},
]
OPTIONS = SourceOptions(id="sku", title="name", text=("about",))
EXPECTED = [
    Document("007", "gives light", "Lamp", {"name": "Lamp", "price": 12.5, "year": 2019}),
    Document("8", 'multi\nline, "quoted" text', "", {"price": 3.0, "year": 2020}),
]


def as_csv(rows: list[dict[str, Any]], delimiter: str = ",") -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def write(folder: Path, name: str) -> Path:
    path = folder / name
    kind = name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif kind == "arrow":
        new = pa.ipc.new_file if name == "file.arrow" else pa.ipc.new_stream
        with new(path, pa.Table.from_pylist(ROWS).schema) as sink:
            sink.write_table(pa.Table.from_pylist(ROWS))
    else:
        lines = "".join(json.dumps(row) + "\n" for row in ROWS)
        text = {"csv": as_csv(ROWS), "jsonl": lines, "ndjson": lines, "json": json.dumps(ROWS, indent=2)}[kind]
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    "name", ["a.csv", "a.csv.gz", "a.jsonl", "a.jsonl.gz", "a.ndjson", "a.json", "a.json.gz", "a.parquet", "a.arrow", "file.arrow", "A.CSV"]
)
def test_every_format_gives_the_same_documents_in_every_pass(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name if name != "A.CSV" else "a.csv").rename(tmp_path / name)
    corpus = open_corpus(path, OPTIONS)
    assert list(corpus) == list(corpus) == EXPECTED


def test_tsv_has_no_quoting(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('id\ttext\n1\t"so" he said, "\n2\ta"b\n')
    assert [document.text for document in open_corpus(tmp_path / "a.tsv")] == ['"so" he said, "', 'a"b']


def test_usual_names_are_found_in_any_case_and_the_title_can_be_filtered_by(tmp_path: Path) -> None:
    path = tmp_path / "posts.csv"
    path.write_text("Id,Title,Body,Score\n7,On owls,wings,3\n")
    assert list(open_corpus(path)) == [Document("7", "wings", "On owls", {"Title": "On owls", "Score": 3})]
    chosen = SourceOptions(id="Id", title="Title", text="Body")  # type: ignore[arg-type]
    assert list(open_corpus(path, chosen)) == [Document("7", "wings", "On owls", {"Title": "On owls", "Score": 3})]
    with pytest.raises(InputError, match=r"no field 'id' \(--id\); did you mean 'Id'"):
        list(open_corpus(path, SourceOptions(id="id")))


def test_a_text_of_several_values_is_split(tmp_path: Path) -> None:
    path = tmp_path / "posts.csv"
    path.write_text('id,text,tags\n1,a,"linux, bash"\n2,b,git;\n3,c,\n4,d,007\n')
    found = [document.metadata for document in open_corpus(path, SourceOptions(lists="tags"))]  # type: ignore[arg-type]
    assert found == [{"tags": ["linux", "bash"]}, {"tags": ["git"]}, None, {"tags": ["007"]}]
    with pytest.raises(InputError, match=r"no field 'tag' \(--list\); did you mean 'tags'"):
        list(open_corpus(path, SourceOptions(lists=("tag",))))


def test_a_table_without_header_gets_its_column_names(tmp_path: Path) -> None:
    (tmp_path / "collection.tsv").write_text("0\tfirst passage\n1\tsecond\n")
    options = SourceOptions(columns=["id", "text"])  # type: ignore[arg-type]
    assert (options.columns, SourceOptions(text="a").text) == (("id", "text"), ("a",))  # type: ignore[arg-type]
    assert list(open_corpus(tmp_path / "collection.tsv", options)) == [Document("0", "first passage"), Document("1", "second")]


def test_semicolons_come_with_decimal_commas_and_dates_with_the_day_first(tmp_path: Path) -> None:
    """All cells of a column decide: lists, versions and what is no date stay as they are."""
    cells = (
        "id;text;price;on;size;list;version\n1;3,5;1.299,90;9.2.2017;S,M;7,9;1.250\n2;x;1.250;31/12/2017;7.5;12,15,18;9.9.9999\n3;y;;;;;\n"
    )
    (tmp_path / "a.csv").write_text(cells)
    expected = [
        Document("1", "3,5", "", {"price": 1299.9, "on": "2017-02-09", "size": "S,M", "list": "7,9", "version": "1.250"}),
        Document("2", "x", "", {"price": 1250.0, "on": "2017-12-31", "size": "7.5", "list": "12,15,18", "version": "9.9.9999"}),
        Document("3", "y"),
    ]
    assert list(open_corpus(tmp_path / "a.csv")) == expected
    (tmp_path / "b.csv").write_text("sep=;\n\n" + cells.replace("id;", 'id;"', 1).replace("text;", 'text";', 1))  # as Excel marks it
    assert list(open_corpus(tmp_path / "b.csv")) == expected
    (tmp_path / "c.tsv").write_text(cells.replace(";", "\t"))  # of another custom
    assert next(iter(open_corpus(tmp_path / "c.tsv"))).metadata == {
        "price": "1.299,90", "on": "9.2.2017", "size": "S,M", "list": "7,9", "version": "1.250"
    }  # fmt: skip


def test_fields_of_objects_can_be_id_title_and_text(tmp_path: Path) -> None:
    rows = [{"meta": {"uid": 7, "title": "A", "lang": "ko"}, "sections": [{"head": "1", "body": "x"}, {"head": "2", "body": "y"}]}]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]) + "\n")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    options = SourceOptions(id="meta.uid", title="meta.title", text="sections.body")  # type: ignore[arg-type]
    expected = [Document("7", "x\ny", "A", {"meta.lang": "ko", "meta.title": "A", "sections.head": ["1", "2"]})]
    for source in (tmp_path / "a.jsonl", tmp_path / "a.parquet", rows):
        assert list(open_corpus(source, options)) == expected
    with pytest.raises(InputError, match=r"no field 'sections.title' \(--text\)"):
        list(open_corpus(rows, SourceOptions(text="sections.title")))  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "found"), [("_id", "x7"), ("id", "x7"), ("doc_id", "x7"), ("docid", "x7"), ("sku", "1")])
def test_without_a_named_id_a_known_field_or_the_row_number_is_taken(tmp_path: Path, field: str, found: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({field: "x7", "body": "t"}) + "\n")
    (document,) = open_corpus(tmp_path / "a.jsonl")
    assert (document.id, document.text) == (found, "t")
    assert document.metadata == ({"sku": "x7"} if field == "sku" else None)


def test_several_texts_and_lists_of_texts_are_joined_by_line_feeds(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": ["x", "y"], "b": null, "c": "z"}\n{"a": [], "b": "w", "c": ""}\n')
    documents = list(open_corpus(tmp_path / "a.jsonl", SourceOptions(text=("a", "b", "c"))))
    assert [document.text for document in documents] == ["x\ny\nz", "w"]
    assert [document.metadata for document in documents] == [None, None]


def test_parquet_values_that_json_lacks_become_text_and_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = {
        "text": "t",
        "day": datetime.date(2020, 1, 2),
        "at": datetime.datetime(2020, 1, 2, 3, 4, tzinfo=datetime.timezone.utc),
        "price": Decimal("1.50"),
        "whole": Decimal("7"),
        "image": b"\x00",
        "inner": {"name": "n"},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    (document,) = open_corpus(tmp_path / "a.parquet")
    assert document.metadata == {"day": "2020-01-02", "at": "2020-01-02T03:04:00+00:00", "price": 1.5, "whole": 7, "inner.name": "n"}
    assert "the bytes in image are left out" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        (
            "a.csv",
            "id,body\n1,x\n",
            SourceOptions(text=("bdy",)),
            "a.csv:2: no field 'bdy' (--text); did you mean 'body'? the fields are id, body",
        ),
        (
            "a.csv",
            "id,words\n1,x\n",
            SourceOptions(),
            "a.csv:2: no field 'text'; the fields are id, words; name the field of the text with --text",
        ),
        ("a.csv", "id,text\n1,x\n", SourceOptions(id="key"), "a.csv:2: no field 'key' (--id); the fields are id, text"),
        ("a.csv", "id,text\n1,x\n", SourceOptions(title="titel"), "a.csv: no field 'titel' (--title); the fields are id, text"),
        ("a.csv", 'id,text\n1,"a\nb"\n2,x,y\n', SourceOptions(), "a.csv:4: expected 2 columns (id, text), got 3"),
        ("a.csv", "id,text\n1,x\n1,y\n", SourceOptions(), "a.csv:3: id '1' is already used on line 2; ids must be unique"),
        ("a.json", '[{"id":1,"text":"x"},{"id":1,"text":"y"}]', SourceOptions(), "a.json:2: id '1' is already used in row 1"),
        ("a.csv", 'id,text\n1,"x\n', SourceOptions(), "a.csv:2: malformed CSV (unexpected end of data)"),
        ("a.csv", "id,id\n1,x\n", SourceOptions(), "a.csv:1: the column 'id' is there twice; columns need different names"),
        ("a.csv", "id,text\n,x\n", SourceOptions(), "a.csv:2: the id is blank"),
        ("a.csv", "", SourceOptions(), "a.csv: the file is empty"),
        ("a.csv", b"id,text\n1,\xc3\xa9\n2,\xe9\n", SourceOptions(), "a.csv:3: not UTF-8"),  # damaged, and not Windows-1252
        ("a.csv", b"id,text\n1,\x81\n", SourceOptions(), "a.csv:2: not UTF-8"),
        ("a.csv", b"id,text\n1,\xff\n2,\xc3\xbc\n", SourceOptions(), "a.csv:2: not UTF-8, while other lines are; repair the line"),
        ("a.csv", "id,text\n1,x\n".encode("utf-16")[:-1], SourceOptions(), "not UTF-16"),
        (
            "a.jsonl",
            '{"text": "x"}\n{"id": 3, "text": "y"}\n',
            SourceOptions(),
            "a.jsonl:2: has an id in the field 'id', but the first row has none",
        ),
        ("a.jsonl", '{"text": 3}\n', SourceOptions(), "a.jsonl:1: 'text' must be a string, got 3"),
        ("a.jsonl", '{"a": 3}\n', SourceOptions(text=("a", "a")), "a.jsonl:1: 'a' must be a string or a list of strings"),
        ("a.json", '[{"text": "x"},\n{"text": }]', SourceOptions(), "a.json: malformed JSON (Expecting value: line 2"),
        ("a.json", '[{"text": "x"},\n\n7]', SourceOptions(), "a.json:2: expected a JSON object, got int"),
        ("a.json", '{"a": 1}', SourceOptions(), "a.json: expected an array of objects"),
        ("a.json", '{"text": "x"}\n{"text": "y"}\n', SourceOptions(), "a file with one object per line must be named .jsonl"),
        ("a.parquet", "no parquet", SourceOptions(), "a.parquet: cannot be read as Parquet"),
        ("a.arrow", "no arrow at all", SourceOptions(), "a.arrow: cannot be read as Arrow"),
        ("a.csv.gz", b"no gzip", SourceOptions(), "a.csv.gz: damaged gzip"),
        ("a.ods", "x", SourceOptions(), "a.ods: unsupported type; documents are read from tables (.jsonl"),
    ],
)
def test_errors_name_file_line_and_fields_in_one_line(
    tmp_path: Path, name: str, content: str | bytes, options: SourceOptions, message: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        list(open_corpus(tmp_path / name, options))
    assert "\n" not in str(caught.value)


def test_a_missing_source_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere: no such file or folder"):
        open_corpus(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"in this folder"):
        open_corpus(tmp_path)


cells = st.text(st.characters(exclude_categories=("Cs", "Cc")) | st.sampled_from(' ,;"\n'), max_size=12)


words = cells.filter(lambda cell: cell.strip() and not re.fullmatch(r"[-.$€£¥]*[0-9].*|true|false", cell, re.IGNORECASE | re.DOTALL))
columns_of_one_type = (st.integers(-(2**63), 2**63 - 1), st.booleans(), st.floats(allow_nan=False, allow_infinity=False), words)


@given(rows=st.one_of(st.lists(st.tuples(cells, cells, st.just("") | each), min_size=1, max_size=6) for each in columns_of_one_type))
def test_what_csv_writers_write_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, Any]]) -> None:
    given_rows = [{"text": text, "title": title, "extra": extra} for text, title, extra in rows]
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_text(as_csv(given_rows), encoding="utf-8", newline="")
    found = list(open_corpus(path))
    assert [(document.id, document.text, document.title) for document in found] == [
        (str(number), text, title) for number, (text, title, _) in enumerate(rows, start=1)
    ]
    assert [(document.metadata or {}).get("extra", "") for document in found] == [extra for _, _, extra in rows]


def test_options_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "a.jsonl"
    table.write_text('{"id": "a", "text": "x"}\n')
    with pytest.raises(InputError, match="names of columns are for CSV and TSV files"):
        open_corpus(table, SourceOptions(columns=("id", "text")))
    for options in (SourceOptions(columns=("id", "text")), SourceOptions(include=("*.md",)), SourceOptions(exclude=("*.md",))):
        for source in ("-", "hub://owner/name", "ir:beir"):
            with pytest.raises(InputError, match="it has no files to choose"):
                open_corpus(source, options)


def test_rows_of_markdown_are_cut_at_headings_but_not_by_functions(tmp_path: Path) -> None:
    path = tmp_path / "pages.jsonl"
    path.write_text(json.dumps({"id": "p", "text": "# Owls\n\nhave wings\n\n# Trout\n\nhave fins\n"}) + "\n")
    passages = list(open_corpus(path, SourceOptions(passages="headings")))
    assert [(each.id, each.text.split("\n")[0]) for each in passages] == [("p#1", "# Owls"), ("p#2", "# Trout")]
    assert len(list(open_corpus(path, SourceOptions(passages="tokens:64")))) == 1
    with pytest.raises(InputError, match=r"pages.jsonl: --passages functions is for source files"):
        open_corpus(path, SourceOptions(passages="headings,functions"))


@pytest.mark.parametrize(
    "content",
    [
        '{"meta": {"data": [{"id": "no", "text": "nested"}]}, "data": [{"id": "a", "text": "right"}]}',
        '{"meta": {"data": []}, "note": "\\"data\\": [", "data": [{"id": "a", "text": "right"}]}',
        '{"note": "[{", "d\\u0061ta": [{"id": "a", "text": "right"}], "data2": {"data": [1]}}',
        '{"columns": ["id", "text"], "errors": [], "rows": [{"id": "a", "text": "right"}]}',
        '\ufeff [ {"id": "a", "text": "right", "rows": [{"id": "b"}]} ] \n',
    ],
)
def test_the_array_of_an_object_is_that_of_the_outermost_level(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    (document,) = open_corpus(tmp_path / "a.json")
    assert (document.id, document.text) == ("a", "right")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": [{"text": "x"}], "b": [{"text": "y"}]}', "this one has 'a', 'b': write one of them to a file of its own"),
        ('{"a": [{"text": "x"}], "b" 3}', "malformed JSON (Expecting ':' delimiter"),
        ('{"a": [{"text": "x"}] "b": 3}', "malformed JSON (Expecting ',' delimiter"),
        ('{a: [{"text": "x"}]}', "malformed JSON (Expecting property name"),
        ('{"a": [{"text": "x"}]', "malformed JSON"),
        ('[{"text": "x"}]\n[{"text": "y"}]', "a.json: malformed JSON (Extra data: line 2"),
        ("7", "a.json: expected an array of objects"),
        (" \n", "a.json: the file is empty"),
    ],
)
def test_json_of_another_form_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError, match=re.escape(message)):
        list(open_corpus(tmp_path / "a.json"))


def test_an_id_beside_the_id_is_a_field(tmp_path: Path) -> None:
    row = {"_id": "5f1", "id": 77, "doc_id": "x", "text": "t"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "a.csv").write_text(as_csv([row]))
    (tmp_path / "corpus.jsonl").write_text(json.dumps(row) + "\n")
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    expected = [Document("5f1", "t", "", {"id": 77, "doc_id": "x"})]
    for source in (tmp_path / "a.jsonl", tmp_path / "a.csv", tmp_path / "a.parquet", tmp_path, [row], pd.DataFrame([row])):
        assert list(open_corpus(source)) == expected
    assert list(read_documents(tmp_path / "corpus.jsonl")) == expected
    index = build_index([{**row, "text": "owls"}], "bm25")
    assert [(hit.id, hit.fields["id"]) for hit in index.search("owls", filter="id=77")] == [("5f1", 77)]


def test_levels_of_an_index_that_have_names_are_fields(caplog: pytest.LogCaptureFixture) -> None:
    frame = pd.DataFrame({"id": ["a", "b"], "text": ["x", "y"], "year": [1, 2]})
    expected = list(open_corpus(frame))
    for same in (frame.set_index("id"), frame.set_index("id", drop=False), frame.set_index(["year", "id"])):
        assert list(open_corpus(same)) == expected
    assert not caplog.records
    with pytest.raises(InputError, match="'year' is a column and the name of the index, with other values; rename one of the two"):
        list(open_corpus(frame.set_index(frame["year"] + 1)))
    assert [document.id for document in open_corpus(frame.set_index("id").rename_axis(None))] == ["1", "2"]
    assert "the index of the data frame has no name and is not read; name it with frame.rename_axis('id')" in caplog.text


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = pa.table([["a"], ["x"], ["y"]], names=["id", "text", "text"])
    pq.write_table(twice, tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "a.arrow", twice.schema) as sink:
        sink.write_table(twice)
    (tmp_path / "a.tsv").write_text("a\tx\ty\n")
    for source in (tmp_path / "a.parquet", tmp_path / "a.arrow", twice, pd.DataFrame([["a", "x", "y"]], columns=["id", "text", "text"])):
        with pytest.raises(InputError, match="the column 'text' is there twice; columns need different names"):
            list(open_corpus(source))
    with pytest.raises(InputError, match="the column 'text' is there twice"):
        list(open_corpus(tmp_path / "a.tsv", SourceOptions(columns=("id", "text", "text"))))


def test_lazy_frames_of_polars_are_read() -> None:
    pl = pytest.importorskip("polars")
    rows = {"id": ["a", "b"], "text": ["x", "y"], "on": [datetime.date(2020, 1, 2), None]}
    frame = pl.DataFrame(rows).lazy()
    expected = [Document("a", "x", "", {"on": "2020-01-02"}), Document("b", "y")]
    assert list(open_corpus(frame)) == list(GivenDocuments(frame)) == expected


def test_values_of_frames_are_those_of_rows(caplog: pytest.LogCaptureFixture) -> None:
    values = {
        "period": [pd.Period("2021-01", "M"), pd.NaT],
        "interval": pd.IntervalIndex.from_tuples([(0, 1), (1, 2)]),
        "duration": [pd.Timedelta("90s"), pd.NaT],
        "category": pd.Categorical(["owl", None]),
        "decimal": [Decimal("1.50"), Decimal("NaN")],
        "uuid": [uuid.UUID(int=7), None],
        "zoned": pd.to_datetime(["2021-01-02T03:04:05+01:00", None]),
        "bytes": [b"\x00", None],
        "integer": pd.array([7, None], dtype="Int64"),
        "boolean": pd.array([True, None], dtype="boolean"),
        "float": [0.5, float("nan")],
        "array": [np.array([1, 2]), np.array([])],
        "days": [np.array(["2021-01-02"], "datetime64[ns]"), None],
        "numpy": [np.int64(7), np.float32(0.5)],
    }
    frame = pd.DataFrame({"id": ["a", "b"], "text": ["x", "y"], **values})
    first, second = open_corpus(frame)
    assert first.metadata == {
        "period": "2021-01", "interval": "(0, 1]", "duration": 90.0, "category": "owl", "decimal": 1.5,
        "uuid": "00000000-0000-0000-0000-000000000007", "zoned": "2021-01-02T03:04:05+01:00", "integer": 7, "boolean": True, "float": 0.5,
        "array": [1, 2], "days": ["2021-01-02T00:00:00.000000000"], "numpy": 7.0,
    }  # fmt: skip
    assert second.metadata == {"interval": "(1, 2]", "array": [], "numpy": 0.5}
    assert list(open_corpus(frame.to_dict("records"))) == [first, second]
    assert "the bytes in bytes are left out" in caplog.text
    times = {"moment": np.datetime64("2021-01-02", "ns"), "never": np.datetime64("NaT"), "span": np.timedelta64(1500, "ms")}
    assert [document.metadata for document in open_corpus([{"text": "x", **times}])] == [
        {"moment": "2021-01-02T00:00:00.000000000", "span": 1.5}
    ]
