"""Commands that read a corpus: any table, standard input, and fields of any name."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quiver.retrieval.data.source import SourceOptions, open_corpus
from quiver.retrieval.index import open_index
from quiver.retrieval.index.files import REAL
from quiver.retrieval.index.sources import describe_source, options_like, write_sources


class Input(io.BytesIO):
    """Standard input, as far as a source reads it."""

    @property
    def buffer(self) -> Input:
        return self


def test_a_csv_with_fields_of_any_name_is_indexed_added_to_and_searched(quiver: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    table = tmp_path / "products.csv"
    table.write_text("sku,name,about,more,price\nA1,Bird,a text about birds,and wings,5\nA2,Salt,a text about salt,,7\n")
    fields = ("--id", "sku", "--title", "name", "--text", "about", "--text", "more")
    index = tmp_path / "index"
    done = quiver("index", "build", table, *fields, "--field", "price", "--model", model, "--out", index, "--json")
    assert done.code == 0, done.err
    assert list(json.loads(done.out)["fields"]) == ["price"]
    (tmp_path / "more.tsv").write_text("sku\tname\tabout\tmore\tprice\nA3\tSeas\ta text about seas\t\t9\n")
    done = quiver("index", "add", index, tmp_path / "more.tsv")  # read with the fields of the build
    assert (done.code, done.out) == (0, f"{index}: 3 documents, 1 more than before\n")
    done = quiver("index", "add", index, tmp_path / "more.tsv", "--id", "name", "--text", "about")
    assert (done.code, done.out) == (0, f"{index}: 4 documents, 1 more than before\n")
    assert quiver("index", "delete", index, "Seas").out == f"{index}: 3 documents, 1 fewer than before\n"
    (tmp_path / "other.jsonl").write_text('{"id": "A4", "text": "a text about seas"}\n')
    done = quiver("index", "add", index, tmp_path / "other.jsonl")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "no field 'name' (--id); the index was built or extended with this option, and options given to index add replace" in done.err
    hits = json.loads(quiver("search", index, "birds", "-k", "3", "--filter", "price<8", "--json").out)
    assert {hit["id"]: hit["text"] for hit in hits} == {"A1": "Bird a text about birds\nand wings", "A2": "Salt a text about salt"}
    done = quiver("search", index, "birds", "--group-by", "price")
    assert "one for each price" in done.out
    assert "price" in next(line for line in done.out.splitlines() if "passages" in line)  # a column names the group of each hit


def test_passages_of_rows_are_grouped_by_their_document_whatever_fields_are_chosen(quiver: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text,kind,price\n1," + "birds fly far. " * 20 + ",a,5\n2,salt is in birds too,b,7\n")
    cut = ("--passages", "tokens:16", "--field", "kind", "--model", "bm25", "--out", tmp_path / "index")
    assert quiver("index", "build", tmp_path / "a.csv", *cut).code == 0
    assert list(open_index(tmp_path / "index").fields) == ["document", "kind"]
    hits = json.loads(quiver("search", tmp_path / "index", "birds", "--group-by", "document", "--json").out)
    assert sorted(hit["group"] for hit in hits) == ["1", "2"]


def test_sources_are_listed_with_their_options(quiver: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("1,birds fly\n")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "b.md").write_text("salt")
    index, named = tmp_path / "index", ("--id", "sku", "--text", "about", "--columns", "sku,about")
    assert quiver("index", "build", tmp_path / "a.csv", *named, "--model", "bm25", "--out", index).code == 0
    assert quiver("index", "add", index, tmp_path / "notes", "--exclude", "c", "--exclude", "*.txt").code == 0
    monkeypatch.setenv("COLUMNS", "300")
    shown = quiver("index", "info", index).out
    assert f" {tmp_path}/a.csv --id sku --text about --columns sku,about " in shown
    assert f" {tmp_path}/notes --exclude c --exclude '*.txt' " in shown
    sources = json.loads(quiver("index", "info", index, "--json").out)["sources"]
    assert [(each["source"], each["options"]["exclude"]) for each in sources] == [
        (f"{tmp_path}/a.csv", []),
        (f"{tmp_path}/notes", ["c", "*.txt"]),
    ]


def test_standard_input_is_indexed(
    quiver: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stdin", Input(b'{"id": "a", "text": "birds"}\n{"id": "b", "text": "salt"}\n'))
    done = quiver("index", "build", "-", "--model", model, "--out", tmp_path / "index", "--json")
    assert (done.code, json.loads(done.out)["documents"]) == (0, 2)
    monkeypatch.setattr(sys, "stdin", Input(b'{"id": "a", "text": "birds"}\n{"id": "b"\n'))
    done = quiver("index", "build", "-", "--model", model, "--out", tmp_path / "other")
    assert done.code == 2
    assert "standard input:2: malformed JSON" in done.err
    monkeypatch.setattr(sys, "stdin", Input(b'{"sku": "a", "body": "birds"}\n'))
    done = quiver("index", "build", "-", "--model", model, "--out", tmp_path / "guessed")
    assert done.code == 0
    assert "standard input: id: number of the row, title: none, text: body; other fields: sku" in caplog.messages[-1]
    assert "standard-input" not in caplog.text


CUT = SourceOptions(passages="tokens:20", include=("*.md",), exclude=("b",))
FIELDS = SourceOptions("sku", None, ("about",), ("sku", "about"), "headings", exclude=("b",))


@pytest.fixture
def index_of(tmp_path: Path) -> Callable[..., Path]:
    """Write folders of each kind and return a function that writes the sources of an index of some of them."""
    for name, text in (
        ("files/a.md", "# A"),
        ("more files/a.md", "# A"),
        ("beir/corpus.jsonl", '{"_id": "d", "text": "x"}'),
        ("tables/a.csv", "sku,about\n1,x"),
        ("more tables/a.csv", "sku,about\n1,x"),
        ("rows/a.jsonl", '{"sku": "1", "about": "x"}'),
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)

    def remember(**known: SourceOptions) -> Path:
        corpora = [open_corpus(tmp_path / name, options) for name, options in known.items()]
        assert all(list(corpus) for corpus in corpora)
        write_sources(tmp_path, 1, [describe_source(corpus, 2) for corpus in corpora], REAL)
        return tmp_path

    return remember


def test_rows_added_to_an_index_of_files_take_nothing_over(index_of: Callable[..., Path]) -> None:
    root = index_of(files=CUT)
    for rows in ("beir", "tables", "rows", "tables/a.csv"):
        assert options_like(root, str(root / rows)) == SourceOptions()
    assert options_like(root, "-") == options_like(root, "hub://owner/name") == SourceOptions()
    for files in ("more files", "more files/a.md"):
        assert options_like(root, str(root / files)) == SourceOptions(passages="tokens:20")
    assert options_like(root, str(root / "files")) == CUT  # the same source again


def test_rows_take_over_the_fields_of_the_latest_rows(index_of: Callable[..., Path]) -> None:
    root = index_of(tables=FIELDS, files=CUT)
    for rows in ("beir", "rows", "rows/a.jsonl"):
        assert options_like(root, str(root / rows)) == replace(FIELDS, columns=(), exclude=())
    assert options_like(root, "-") == options_like(root, "ir:name") == replace(FIELDS, columns=(), exclude=())
    for delimited in ("more tables", "more tables/a.csv"):
        assert options_like(root, str(root / delimited)) == replace(FIELDS, exclude=())
    assert options_like(root, str(root / "more files")) == SourceOptions(passages="tokens:20")


def test_a_wrong_field_is_one_line_before_the_model_is_loaded(quiver: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,body\n1,x\n")
    done = quiver("index", "build", tmp_path / "a.xlsx", "--model", "none", "--out", tmp_path / "index")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "no such file or folder" in done.err
    done = quiver("index", "build", tmp_path / "a.csv", "--text", "bdy", "--model", "none", "--out", tmp_path / "index")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "a.csv:2: no field 'bdy' (--text); did you mean 'body'? the fields are id, body" in done.err
    assert not (tmp_path / "index").exists()


def test_a_corpus_of_any_kind_can_be_estimated(quiver: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("sku,about\n1,birds\n2,salt\n")
    done = quiver("estimate", "--model", model, "--sample", tmp_path / "a.csv", "--id", "sku", "--text", "about")
    assert done.code == 0, done.err
    assert "2 documents" in done.out
    done = quiver("estimate", "--model", model, "--docs", "5", "--text", "about")
    assert (done.code, done.err) == (2, "quiver: error: --id, --text and the other options of a source need one; pass --sample CORPUS\n")
