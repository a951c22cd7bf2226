"""Several sources in one index: their documents are told apart when they are added, added again, replaced and refreshed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.source import SourceOptions, open_corpus
from quiver.retrieval.index import IndexReader, add_documents, build_index, open_index, refresh_index
from quiver.retrieval.models.loading import load_index_model
from quiver.retrieval.records import Document
from quiver.retrieval.search.index import Index

WORDS = load_index_model("bm25")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def texts(index: IndexReader | Path) -> dict[str, str]:
    opened = open_index(index) if isinstance(index, Path) else index
    return {key: opened.document(key).text.strip() for key in sorted(opened.ids)}


@pytest.fixture
def index(tmp_path: Path) -> Path:
    write(tmp_path / "A", {"README.md": "# Install\nheron A\n# Usage\nusage A\n", "sub/note.md": "note A\n"})
    build_index(tmp_path / "A", "bm25", tmp_path / "index")
    return tmp_path / "index"


OF_A = {"README.md#1": "# Install\nheron A", "README.md#2": "# Usage\nusage A", "sub/note.md#1": "note A"}


def test_a_file_of_the_same_path_in_another_folder_is_another_file(index: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "B", {"README.md": "heron B\n"})
    added = add_documents(index, folder, "bm25")
    assert texts(added) == {**OF_A, "B/README.md#1": "heron B"}
    document = added.document("B/README.md#1")
    assert (document.title, (document.metadata or {})["file"]) == ("README.md", "B/README.md")
    hits = Index.of(added).search("heron", group_by="file")
    assert sorted(str(hit.group) for hit in hits) == ["B/README.md", "README.md"]
    unchanged = refresh_index(index, WORDS)
    assert (unchanged.added, unchanged.changed, unchanged.deleted, unchanged.unchanged) == (0, 0, 0, 4)
    write(folder, {"README.md": "crane B\n", "new.md": "new B\n"})
    write(tmp_path / "A", {"README.md": "# Install\nheron A\n"})
    done = refresh_index(index, WORDS)
    assert (done.added, done.changed, done.deleted) == (1, 1, 1)
    assert texts(index) == {
        "B/README.md#1": "crane B",
        "B/new.md#1": "new B",
        "README.md#1": "# Install\nheron A",
        "sub/note.md#1": "note A",
    }
    (folder / "README.md").unlink()
    assert refresh_index(index, WORDS).deleted == 1
    moved = folder.rename(tmp_path / "elsewhere")
    assert refresh_index(index, WORDS, moved).unchanged == 3  # the ids stay
    assert refresh_index(index, WORDS, moved, options=SourceOptions(exclude=("new.md",)), force=True).deleted == 1
    assert list(texts(index)) == ["README.md#1", "sub/note.md#1"]


def test_folders_of_one_name_have_longer_labels(index: Path, tmp_path: Path) -> None:
    write(tmp_path, {f"{parent}/docs/a.md": f"text {parent}\n" for parent in "xyz"})
    for parent in "xyz":
        add_documents(index, tmp_path / parent / "docs", "bm25")
    write(tmp_path, {"sub/a.md": "text of sub\n"})
    add_documents(index, tmp_path / "sub", "bm25")  # A has a folder of this name
    add_documents(index, tmp_path / "sub" / "a.md", "bm25")
    found = texts(index)
    assert {*found} == {*OF_A, "docs/a.md#1", "y/docs/a.md#1", "z/docs/a.md#1", f"{tmp_path.name}/sub/a.md#1", "sub/a.md#1"}
    assert (found["y/docs/a.md#1"], found["sub/a.md#1"]) == ("text y", "text of sub")
    assert refresh_index(index, WORDS).unchanged == 8


def test_a_file_that_is_added_alone_has_the_name_of_its_folder(index: Path, tmp_path: Path) -> None:
    write(tmp_path, {"B/README.md": "one\n", "B/other.md": "two\n"})
    for name in ("README.md", "other.md"):
        add_documents(index, tmp_path / "B" / name, "bm25")
    assert texts(index) == {**OF_A, "B/README.md#1": "one", "B/other.md#1": "two"}
    write(tmp_path, {"B/README.md": "three\n"})
    assert refresh_index(index, WORDS).changed == 1


def test_numbers_of_rows_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path, {"a.csv": "text\nfirst\nsecond\n", "b.csv": "text\nthird\nfourth\n", "c.csv": "text\n" + "# One\nfifth\n"})
    build_index(tmp_path / "a.csv", "bm25", tmp_path / "index")
    index = tmp_path / "index"
    (tmp_path / "x").mkdir()
    add_documents(index, tmp_path / "b.csv", "bm25")
    add_documents(index, open_corpus(tmp_path / "c.csv", SourceOptions(passages="headings")), "bm25")
    expected = {"1": "first", "2": "second", "b.csv#1": "third", "b.csv#2": "fourth", "c.csv#1#1": "# One", "c.csv#2#1": "fifth"}
    assert texts(index) == expected
    assert (open_index(index).document("c.csv#2#1").metadata or {})["document"] == "c.csv#2"
    assert refresh_index(index, WORDS).unchanged == 6
    for source in (tmp_path / "b.csv", tmp_path / "x" / ".." / "b.csv"):
        with pytest.raises(InputError, match=r"b.csv was added before \(document 'b.csv#1' .* read it again with quiver index refresh"):
            add_documents(index, source, "bm25")
    write(tmp_path, {"b.csv": "text\nthird\nanother\n"})
    assert texts(add_documents(index, tmp_path / "b.csv", "bm25", replace_existing=True)) == {**expected, "b.csv#2": "another"}
    write(tmp_path, {"b.csv": "text\nthird\n"})
    assert refresh_index(index, WORDS).deleted == 1


def test_replacing_a_passage_replaces_all_of_its_file_or_row(index: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "B", {"README.md": "# A\none\n# B\ntwo\n# C\nthree\n", "other.md": "other\n"})
    add_documents(index, folder, "bm25")
    write(folder, {"README.md": "# A\nfour\n"})
    done = add_documents(index, folder, "bm25", replace_existing=True)
    assert texts(done) == {**OF_A, "B/README.md#1": "# A\nfour", "B/other.md#1": "other"}
    pages, options = tmp_path / "p.jsonl", SourceOptions(passages="headings")
    pages.write_text(json.dumps({"id": "p", "text": "# A\none\n# B\ntwo\n"}) + "\n" + json.dumps({"id": "q", "text": "# A\nq\n"}) + "\n")
    add_documents(index, open_corpus(pages, options), "bm25")
    newer = tmp_path / "newer.jsonl"
    newer.write_text(json.dumps({"id": "p", "text": "# A\nfive\n"}) + "\n")
    done = add_documents(index, open_corpus(newer, options), "bm25", replace_existing=True)
    assert {key: text for key, text in texts(done).items() if key[0] in "pq"} == {"p#1": "# A\nfive", "q#1": "# A\nq"}


def test_an_id_of_two_sources_is_an_error_that_names_both(tmp_path: Path) -> None:
    write(tmp_path, {"a.csv": "id,text\nk1,old\nk2,other\n", "b.csv": "id,text\nk1,new\n"})
    index = tmp_path / "index"
    build_index(tmp_path / "a.csv", "bm25", index)
    message = r"document 'k1' of .*b.csv is in this index already, from .*a.csv; replace it with --replace if it is the same document, or"
    with pytest.raises(InputError, match=message):
        add_documents(index, tmp_path / "b.csv", "bm25")
    assert texts(add_documents(index, tmp_path / "b.csv", "bm25", replace_existing=True)) == {"k1": "new", "k2": "other"}
    assert refresh_index(index, WORDS).unchanged == 2


ROWS = [{"text": "new"}]


@pytest.mark.parametrize(
    "given", [["new"], ROWS, open_corpus(ROWS), pd.DataFrame(ROWS), "b.csv"], ids=["texts", "rows", "corpus", "frame", "csv"]
)
def test_no_source_replaces_a_row_by_its_number(tmp_path: Path, given: Any) -> None:
    write(tmp_path, {"a.csv": "text\nfirst\nsecond\n", "b.csv": "id,text\n1,new\n"})
    index = tmp_path / "index"
    build_index(tmp_path / "a.csv", "bm25", index)
    with pytest.raises(InputError, match=r"document '1' would replace a row of .*a.csv, whose rows have no ids and are numbered; give"):
        add_documents(index, tmp_path / given if isinstance(given, str) else given, "bm25", replace_existing=True)
    assert texts(index) == {"1": "first", "2": "second"}


def test_a_document_that_is_named_by_the_number_of_its_row_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, {"a.csv": "text\nfirst\nsecond\n"})
    build_index(tmp_path / "a.csv", "bm25", tmp_path / "index")
    add_documents(tmp_path / "index", [Document("2", "edited")], "bm25", replace_existing=True)
    add_documents(tmp_path / "index", [{"id": 1, "text": "changed"}], "bm25", replace_existing=True)
    assert texts(tmp_path / "index") == {"1": "changed", "2": "edited"}


def test_a_source_added_to_documents_from_python_is_refreshed_without_them(tmp_path: Path) -> None:
    write(tmp_path, {"b.csv": "text\nthird\nfourth\n"})
    index = tmp_path / "index"
    build_index(["one", "two"], "bm25", index)
    add_documents(index, ["three"], "bm25", replace_existing=True)  # texts of the same origin
    add_documents(index, tmp_path / "b.csv", "bm25")
    write(tmp_path, {"b.csv": "text\nfifth\n"})
    done = refresh_index(index, WORDS)
    assert (done.changed, done.deleted, texts(index)) == (1, 1, {"1": "three", "2": "two", "b.csv#1": "fifth"})


def test_a_folder_that_takes_an_id_of_a_later_source_is_told(index: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_documents(index, write(tmp_path / "B", {"x.md": "of B\n"}), "bm25")
    write(tmp_path / "A", {"B/x.md": "of A\n"})
    refresh_index(index, WORDS)
    assert texts(index)["B/x.md#1"] == "of B"
    assert "A: 1 documents are left out, because a source that was added later has their ids, such as 'B/x.md#1'" in caplog.text


@pytest.mark.parametrize(
    ("full", "empty", "others"),
    [
        ({"d/a.md": "secret\n", "d/b.txt": "words\n"}, None, 0),
        ({"d/a.md": "secret\n", "d/b.txt": "words\n"}, None, 9),
        ({"d/a.csv": "id,text\n1,secret\n"}, None, 9),
        ({"d/a.jsonl": '{"text": "secret"}\n'}, None, 9),
        ({"d": "id,text\n1,secret\n"}, {"d": "id,text\n"}, 9),
        ({"d": "id,text\n1,secret\n"}, {"d": ""}, 0),
        ({"d": '{"id": "a", "text": "secret"}\n'}, {"d": "\n"}, 9),
        ({"d": '[{"id": "a", "text": "secret"}]'}, {"d": "[]"}, 9),
        ({"d": '[{"id": "a", "text": "secret"}]'}, {"d": ""}, 0),
        ({"d": "# secret\n"}, {"d": ""}, 9),
        ({"d/corpus.jsonl": '{"_id": "a", "text": "secret"}\n'}, {"d/corpus.jsonl": ""}, 0),
        ({"d": "<p>secret</p>"}, {"d": "<title>nothing</title>"}, 0),
    ],
)
def test_an_emptied_source_empties_the_index_if_forced(
    tmp_path: Path, full: dict[str, str], empty: dict[str, str] | None, others: int
) -> None:
    suffix = ""
    if "d" in full:
        suffix = {"i": ".csv", "{": ".jsonl", "[": ".json", "#": ".md", "<": ".html"}[full["d"][0]]
    write(tmp_path, {f"{name}{suffix}": text for name, text in full.items()})
    source, index = tmp_path / f"d{suffix}", tmp_path / "index"
    build_index(source, "bm25", index)
    if others:
        add_documents(index, write(tmp_path / "others", {f"{number}.md": "kept\n" for number in range(others)}), "bm25")
    count = len(open_index(index)) - others
    if empty is None:
        for name in full:
            (tmp_path / name).unlink()
    write(tmp_path, {f"{name}{suffix}": text for name, text in (empty or {}).items()})
    message = rf"nothing is left of {source}; {count} of {count + others} documents .* would be deleted; if that is right, add --force"
    for named in (None, source):
        with pytest.raises(InputError, match=message):
            refresh_index(index, WORDS, named)
    assert refresh_index(index, WORDS, dry_run=True).deleted == count
    done = refresh_index(index, WORDS, force=True)
    assert (done.deleted, len(open_index(index))) == (count, others)
    assert refresh_index(index, WORDS).deleted == 0  # what was emptied before needs no force
    write(tmp_path, {f"{name}{suffix}": text for name, text in full.items()})
    assert refresh_index(index, WORDS).added == count


def test_an_emptied_folder_takes_no_documents_from_python(index: Path, tmp_path: Path) -> None:
    add_documents(index, [Document("mine", "my own")], "bm25")
    for file in [*(tmp_path / "A").rglob("*.md")]:
        file.unlink()
    assert refresh_index(index, WORDS, force=True).deleted == 3
    assert refresh_index(index, WORDS, force=True).deleted == 0
    assert texts(index) == {"mine": "my own"}


def test_a_source_that_is_no_longer_there_is_named_with_what_to_do(index: Path, tmp_path: Path) -> None:
    (tmp_path / "A").rename(tmp_path / "gone")
    for force in (False, True):
        with pytest.raises(InputError, match=r"A is no longer there; if it was moved, .* put an empty folder in its place and add --force"):
            refresh_index(index, WORDS, force=force)
    (tmp_path / "A").mkdir()
    assert refresh_index(index, WORDS, force=True).deleted == 3


def test_a_path_that_is_not_utf_8_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "caf\udce9"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("the file system stores only names in UTF-8")
    write(folder, {"a.md": "text\n", "a.csv": "id,text\n1,x\n"})
    for source in (folder, folder / "a.md", folder / "a.csv"):
        with pytest.raises(InputError, match="is not in the encoding of the file system") as caught:
            build_index(source, "bm25", tmp_path / "index")
        assert str(caught.value).isprintable()
    assert not (tmp_path / "index" / "HEAD").exists()
