"""Documents from every kind of file, and the errors for unreadable files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from quiver.encoder import InputError
from quiver.encoder.pretraining.corpus import read_documents
from quiver.encoder.pretraining.recipe import SourceSection


def read(path: Path, *, fields: tuple[str, ...] = ("title", "text"), split: str | None = None, lines: bool = False) -> list[str]:
    return list(read_documents(SourceSection(name="s", path=str(path), fields=fields, split=split, lines=lines)))


def rows(path: Path, *found: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def test_json_lines_are_read(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", {"title": "T", "text": "one"}, {"text": "two"}, {"title": None, "text": "three"}, {"text": " "})
    assert read(path) == ["T\n\none", "two", "three"]
    assert read(path, fields=("text",))[0] == "one"
    assert read(rows(tmp_path / "b.jsonl", {"text": None}, {"title": "", "text": None}, {"text": "one"})) == ["one"], "as in Parquet"
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read(packed) == read(path)


def test_plain_text_has_one_document_per_file_or_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\ufeffone\n\ntwo\n")
    assert read(path) == ["one\n\ntwo\n"]
    assert read(path, lines=True) == ["one", "two"]
    (tmp_path / "blank.txt").write_text(" \n")
    assert read(tmp_path / "blank.txt") == []


def test_parquet_is_read(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = arrow.table({"text": ["one", None, "two"], "title": ["A", None, None], "other": [1, 2, 3]})
    parquet.write_table(table, path)
    assert read(path) == ["A\n\none", "two"]
    with pytest.raises(InputError, match=r"a\.parquet: has none of the columns body; it has text, title, other$"):
        read(path, fields=("body",))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"a\.parquet: damaged Parquet"):
        read(path)


def test_a_folder_is_read_in_the_order_of_file_names(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    rows(tmp_path / "b.jsonl", {"text": "last"})
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "inner" / "c.txt").write_text("inner")
    (tmp_path / "notes.md").write_text("not read")
    assert read(tmp_path) == ["first", "last", "inner"]


def test_a_beir_folder_is_read_whole_or_by_split(tmp_path: Path) -> None:
    """Documents of a split are those that only this split judges."""
    rows(tmp_path / "corpus.jsonl", *({"_id": f"d{number}", "title": "", "text": f"text {number}"} for number in range(5)))
    (tmp_path / "qrels").mkdir()
    for name, documents in (("train", "d0 d1 d2"), ("test", "d2 d3")):
        lines = [f"q{number}\t{document}\t1" for number, document in enumerate(documents.split())]
        (tmp_path / "qrels" / f"{name}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n")
    assert read(tmp_path) == [f"text {number}" for number in range(5)]
    assert read(tmp_path, split="train") == ["text 0", "text 1"]
    with pytest.raises(InputError, match=r"has no qrels/dev\.tsv; its splits are test, train$"):
        read(tmp_path, split="dev")
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1 d1 1\n")
    with pytest.raises(InputError, match=r"test\.tsv:2: a line must hold query, document and grade"):
        read(tmp_path, split="train")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": "x"}, r"a\.jsonl:1: has none of the fields title, text; it has body$"),
        ({"text": 3}, r"a\.jsonl:1: 'text' must be text, got int$"),
        ([1], r"a\.jsonl:1: expected a JSON object, got list$"),
    ],
)
def test_an_invalid_row_is_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(rows(tmp_path / "a.jsonl", row))


def test_missing_and_unsupported_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.jsonl: there is no such file or folder$"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(InputError, match=r"a\.csv: the suffix must be one of \.jsonl"):
        read(tmp_path / "a.csv")
    with pytest.raises(InputError, match="contains no file with a suffix of"):
        read(tmp_path)
    with pytest.raises(InputError, match=r"split 'train' requires a BEIR folder"):
        read(tmp_path, split="train")
