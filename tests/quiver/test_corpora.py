"""Commands that read a corpus: any table, standard input, and fields of any name."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


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
    assert "no field 'name' (--id)" in done.err  # of the latest addition
    hits = json.loads(quiver("search", index, "birds", "-k", "3", "--filter", "price<8", "--json").out)
    assert {hit["id"]: hit["text"] for hit in hits} == {"A1": "Bird a text about birds and wings", "A2": "Salt a text about salt"}
    done = quiver("search", index, "birds", "--group-by", "price")
    assert "one for each price" in done.out
    assert "price" in next(line for line in done.out.splitlines() if "passages" in line)  # a column names the group of each hit


def test_standard_input_is_indexed(quiver: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Input(b'{"id": "a", "text": "birds"}\n{"id": "b", "text": "salt"}\n'))
    done = quiver("index", "build", "-", "--model", model, "--out", tmp_path / "index", "--json")
    assert (done.code, json.loads(done.out)["documents"]) == (0, 2)
    monkeypatch.setattr(sys, "stdin", Input(b'{"id": "a", "text": "birds"}\n{"id": "b"\n'))
    done = quiver("index", "build", "-", "--model", model, "--out", tmp_path / "other")
    assert done.code == 2
    assert "standard input:2: malformed JSON" in done.err


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
    (tmp_path / "a.csv").write_text("id,text\n1,birds\n2,salt\n")
    done = quiver("estimate", "--model", model, "--sample", tmp_path / "a.csv")
    assert done.code == 0, done.err
    assert "2 documents" in done.out
