"""A refresh makes the index equal to one that is built anew, encodes only what changed, and is safe when it is killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.source import SourceOptions, open_corpus
from quiver.retrieval.index import (
    IndexReader,
    add_documents,
    build_index,
    check_index,
    compact_index,
    delete_documents,
    open_index,
    refresh_index,
)
from quiver.retrieval.records import DenseEncoding, Document, ModelCard, Role, TextTokens

WHOLE = SourceOptions(passages="whole")


@dataclass
class Counting:
    """A model whose vectors depend on the text alone; it keeps the documents that it encoded."""

    encoded: list[str] = field(default_factory=list)
    fail_after: int | None = None

    @property
    def card(self) -> ModelCard:
        return ModelCard("counting", "dense", "c" * 64, 8, "cosine", 64, 64)

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> DenseEncoding:
        if self.fail_after is not None and len(self.encoded) + len(texts) > self.fail_after:
            raise KeyboardInterrupt
        if role == "document":
            self.encoded += texts
        rows = [np.random.default_rng(list(text.encode())).normal(size=8) for text in texts]
        vectors = np.array(rows, np.float32).reshape(-1, 8)
        counts = np.ones(len(texts), np.int32)
        return DenseEncoding(vectors, TextTokens(counts, counts < 0, counts < 0))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def content(index: IndexReader) -> dict[str, Document]:
    return {key: index.document(key) for key in index.ids}


def same_as_new(index: Path, root: Path, tmp_path: Path, options: SourceOptions = SourceOptions()) -> bool:  # noqa: B008 - frozen
    built = build_index(open_corpus(root, options), Counting())
    query = Counting().encode_texts(["a query"], "query").vectors
    refreshed = open_index(index)
    assert content(refreshed) == content(built)
    (a,), (b,) = refreshed.search(query, 50).ids, built.search(query, 50).ids
    return list(a) == list(b) and not check_index(index).problems


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    write(folder, {f"d/{number}.md": f"# A\nfirst {number}\n# B\nsecond {number}\n" for number in range(20)} | {"e.py": "x = 1\n"})
    return folder


@pytest.fixture
def index(root: Path, tmp_path: Path) -> Path:
    build_index(root, Counting(), tmp_path / "index")
    return tmp_path / "index"


def test_only_new_and_changed_documents_are_encoded_and_gone_ones_deleted(root: Path, index: Path, tmp_path: Path) -> None:
    write(root, {"d/3.md": "# A\nfirst 3\n# B\nanother\n# C\nthird\n", "new.txt": "new words\n", "d/5.md": "# A\nfirst 5\n"})
    (root / "d" / "7.md").unlink()
    model = Counting()
    done = refresh_index(index, model)
    assert sorted(model.encoded) == ["d/3.md > B # B\nanother", "d/3.md > C # C\nthird", "new.txt new words"]
    assert (done.added, done.changed, done.deleted, done.unchanged) == (2, 1, 3, 37)
    assert done.index.manifest.generation == 2
    assert same_as_new(index, root, tmp_path)
    again = refresh_index(index, Counting(fail_after=0))
    assert (again.added, again.changed, again.deleted, again.unchanged) == (0, 0, 0, 40)
    assert again.index.manifest.generation == 2


def test_a_change_of_lines_alone_is_a_change(root: Path, index: Path, tmp_path: Path) -> None:
    write(root, {"d/3.md": "\n\n# A\nfirst 3\n# B\nsecond 3\n"})
    assert refresh_index(index, Counting()).changed == 2
    assert same_as_new(index, root, tmp_path)


def test_unchanged_files_are_not_cut_again(root: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quiver.retrieval.data import files

    read: list[str] = []
    original = files.read_file
    monkeypatch.setattr(files, "read_file", lambda path, *rest: read.append(path.name) or original(path, *rest))
    write(root, {"d/3.md": "# A\nother\n"})
    os.utime(root / "d" / "4.md")
    refresh_index(index, Counting())
    assert read == ["3.md"]


@pytest.mark.parametrize("change", ["add", "compact"])
def test_after_another_change_of_the_index_every_document_is_compared(root: Path, index: Path, tmp_path: Path, change: str) -> None:
    key = "d/3.md#1"
    if change == "add":
        add_documents(index, [Document(key, "wrong", "", {"file": "d/3.md"})], Counting(), replace_existing=True)
    else:
        delete_documents(index, ["d/3.md#1", "d/4.md#1"])
        compact_index(index)
    refresh_index(index, Counting())
    assert same_as_new(index, root, tmp_path)


def test_a_file_that_cannot_be_opened_keeps_its_passages_and_a_folder_ends_the_refresh(
    root: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(root, {"e.py": "x = 2\n"})
    read, scan = Path.read_bytes, os.scandir

    def denied(path: Any) -> Any:
        if Path(path).name in closed:
            raise PermissionError(13, "Permission denied", str(path))
        return (scan if Path(path).is_dir() else read)(path)

    closed = {"3.md"}
    monkeypatch.setattr(Path, "read_bytes", denied)
    monkeypatch.setattr(os, "scandir", denied)
    done = refresh_index(index, Counting())
    assert (done.changed, done.deleted) == (1, 0)
    closed = {"d"}
    with pytest.raises(InputError, match=r"files/d: cannot be read \(Permission denied\); leave it out with --exclude"):
        refresh_index(index, Counting())
    assert len(open_index(index)) == 41


def test_a_kill_between_commit_and_the_file_of_sources_loses_nothing(root: Path, index: Path, tmp_path: Path) -> None:
    sources = (index / "sources.json").read_bytes()
    write(root, {"d/3.md": "# A\nchanged\n"})
    refresh_index(index, Counting())
    (index / "sources.json").write_bytes(sources)
    write(root, {"d/4.md": "# A\nchanged too\n"})
    model = Counting()
    refresh_index(index, model)
    assert model.encoded == ["d/4.md > A # A\nchanged too"]
    assert same_as_new(index, root, tmp_path)


def test_options_of_the_source_are_remembered_and_can_be_replaced(root: Path, tmp_path: Path) -> None:
    options = SourceOptions(exclude=("e.py",), passages="whole")
    build_index(open_corpus(root, options), Counting(), tmp_path / "index")
    write(root, {"f.py": "y = 2\n"})
    refresh_index(tmp_path / "index", Counting())
    assert same_as_new(tmp_path / "index", root, tmp_path, options)
    refresh_index(tmp_path / "index", Counting(), root, options=WHOLE)
    assert same_as_new(tmp_path / "index", root, tmp_path, WHOLE)
    refresh_index(tmp_path / "index", Counting())
    assert same_as_new(tmp_path / "index", root, tmp_path, WHOLE)


def test_an_edited_copy_takes_the_place_of_the_folder_if_forced(
    root: Path, index: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    (copy / "e.py").unlink()
    write(copy, {"new.md": "# New\n\nadded to the copy\n"})
    with pytest.raises(InputError, match=r"was built from .*, not from .*copy; --force reads .*copy in place of .*; quiver index add adds"):
        refresh_index(index, Counting(), copy)
    counted = refresh_index(index, Counting(), copy, dry_run=True)
    assert (counted.added, counted.changed, counted.deleted) == (1, 0, 1)
    assert "without --dry-run this would be refused: " in caplog.text
    model = Counting()
    done = refresh_index(index, model, copy, force=True)
    assert (done.added, done.changed, done.deleted, len(model.encoded)) == (1, 0, 1, 1)
    assert same_as_new(index, copy, tmp_path)
    assert refresh_index(index, Counting()).unchanged == len(done.index)  # from now on
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.md").write_text("# Other\n\nnothing of the index\n")
    with pytest.raises(InputError, match="would be deleted; if that is right, build the index again"):
        refresh_index(index, Counting(), tmp_path / "other", force=True)


def test_a_table_is_refreshed_row_by_row(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text("id,text,year\n" + "".join(f"{number},row {number},2000\n" for number in range(9)))
    build_index(table, Counting(), tmp_path / "index")
    table.write_text("id,text,year\n" + "".join(f"{number},row {number},{2000 + (number == 4)}\n" for number in range(1, 11)))
    model = Counting()
    done = refresh_index(tmp_path / "index", model)
    assert (done.added, done.changed, done.deleted, done.unchanged) == (2, 1, 1, 7)
    assert sorted(model.encoded) == ["row 10", "row 4", "row 9"]
    assert same_as_new(tmp_path / "index", table, tmp_path)


def test_rows_of_a_table_are_gone_when_a_folder_takes_its_place(root: Path, tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text("id,text\n1,one\n2,two\n")
    build_index(table, Counting(), tmp_path / "index")
    table.unlink()
    assert refresh_index(tmp_path / "index", Counting(), root, force=True).deleted == 2
    assert same_as_new(tmp_path / "index", root, tmp_path)


def test_a_build_from_documents_forgets_the_sources(index: Path) -> None:
    build_index([Document("a", "x")], Counting(), index, overwrite=True)
    with pytest.raises(InputError, match="the sources of this index are not known; pass the source: quiver index refresh"):
        refresh_index(index, Counting())


def test_every_source_of_an_index_is_refreshed(root: Path, index: Path, tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text("id,text\n1,one\n2,two\n")
    add_documents(index, table, Counting())
    table.write_text("id,text\n1,one\n3,three\n")
    (root / "e.py").unlink()
    done = refresh_index(index, Counting())
    assert (done.added, done.deleted) == (1, 2)
    assert {"1", "3"} <= set(done.index.ids)
    with pytest.raises(InputError, match=r"was built from .*, not from .*; quiver index add adds a source to those it has"):
        refresh_index(index, Counting(), tmp_path)
    moved = root.rename(tmp_path / "moved")
    (tmp_path / "unrelated").mkdir()
    (tmp_path / "unrelated" / "a.md").write_text("# Other\n\nnothing of the index\n")
    before = open_index(index).manifest.generation
    with pytest.raises(InputError, match="documents are no longer in the source and would be deleted; if that is right, add --force"):
        refresh_index(index, Counting(), tmp_path / "unrelated")
    assert open_index(index).manifest.generation == before
    (moved / "new.md").write_text("# New\n\nwhat came after the move\n")
    model = Counting()
    done = refresh_index(index, model, moved)
    assert (done.added, done.changed, done.deleted, len(model.encoded)) == (1, 0, 0, 1)
    assert refresh_index(index, Counting()).unchanged == len(done.index)


def test_of_two_sources_with_one_id_the_later_one_counts(tmp_path: Path) -> None:
    old, new = tmp_path / "a.csv", tmp_path / "b.csv"
    old.write_text("id,text\n1,old\n2,two\n")
    new.write_text("id,text\n1,new\n")
    build_index(old, Counting(), tmp_path / "index")
    add_documents(tmp_path / "index", new, Counting(), replace_existing=True)
    done = refresh_index(tmp_path / "index", Counting())
    assert (done.added, done.changed, done.deleted, done.unchanged) == (0, 0, 0, 2)
    old.write_text("id,text\n1,older\n2,two\n3,three\n")
    new.write_text("id,text\n1,newer\n3,drei\n")
    done = refresh_index(tmp_path / "index", Counting())
    assert (done.added, done.changed, done.deleted) == (1, 1, 0)
    assert [content(done.index)[key].text for key in "123"] == ["newer", "two", "drei"]


def test_a_source_that_lost_most_of_its_files_is_refused(root: Path, index: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(15):
        (root / "d" / f"{number}.md").unlink()
    with pytest.raises(InputError, match="30 of 41 documents are no longer in the source and would be deleted"):
        refresh_index(index, Counting())
    write(root, {"new.txt": "new"})
    with pytest.raises(InputError, match="--force"):
        refresh_index(index, Counting())
    assert len(open_index(index)) == 41
    assert refresh_index(index, Counting(), dry_run=True).deleted == 30
    assert "without --dry-run this would be refused: " in caplog.text
    assert refresh_index(index, Counting(), force=True).deleted == 30


def test_a_damaged_file_of_sources_is_told_and_the_source_can_be_given(root: Path, index: Path, caplog: pytest.LogCaptureFixture) -> None:
    (index / "sources.json").write_text("{")
    with pytest.raises(InputError, match="the sources of this index are not known"):
        refresh_index(index, Counting())
    assert "sources.json: not JSON" in caplog.text
    assert refresh_index(index, Counting(), root).unchanged == 41
