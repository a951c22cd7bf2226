"""The folder of an index: what is refused and how it is said, damage that is named, locks, repair."""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index import (
    DamagedIndexError,
    Filter,
    add_documents,
    build_index,
    check_index,
    compact_index,
    delete_documents,
    open_index,
    repair_index,
)
from quiver.retrieval.index.files import VERSION, Disk, format_line
from quiver.retrieval.index.store.reading import Layout, manifest_bytes, read_manifest, tombstones_bytes
from quiver.retrieval.index.store.writing import writing
from quiver.retrieval.records import Document
from tests.processes import imported_python

OLD = [Document(f"old{number}", f"word{number} text", "Title", {"n": number}) for number in range(5)]
NEW = [Document(f"new{number}", f"other{number}") for number in range(7)]


@pytest.fixture
def built(tmp_path: Path, word_sum: Any) -> Path:
    return build_index(OLD, word_sum, tmp_path / "index").path


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in ("LOCK", "FORMAT"))


def answers(folder: Path, *, verify: bool = True) -> list[Any]:
    """Whatever can be read of the index: a search, a filtered one, ids, texts, places and fields."""
    index = open_index(folder, verify=verify)
    query = np.eye(1, index.manifest.model.dim, dtype=np.float32)
    hits = [index.search(query, 10), index.search(query, 10, filter=Filter.parse(["n>=0"]))]
    read = [index.ids[:], [*index.documents], index.locate(["old1", "old2"]), index.fields]
    return [*([found.ids, [scores.tolist() for scores in found.scores]] for found in hits), *read]


def test_a_truncated_or_missing_file_is_found_without_hashing(built: Path) -> None:
    seen, expected = 0, answers(built)
    for path in files_of(built):
        whole = path.read_bytes()
        for length in {0, 1, len(whole) - 1 if path.parent.name != "manifests" else len(whole) - 3}:
            path.write_bytes(whole[:length])
            damaged_or_equal(built, path.name, expected)
            seen += 1
        path.unlink()
        damaged_or_equal(built, path.name, expected)
        path.write_bytes(whole)
    assert answers(built, verify=False) == expected
    assert seen >= 3 * 10


def damaged_or_equal(folder: Path, name: str, expected: list[Any]) -> None:
    try:
        assert answers(folder, verify=False) == expected
    except DamagedIndexError as error:
        assert name in str(error)  # noqa: PT017 - either is right
    else:
        assert name in ("HEAD", "checksums", "copy", "ids.arrow", "fields.arrow")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 7}, "index format version 7, this version of Quiver reads version 6; update Quiver"),
        ({"version": 1}, "index format version 1, this version of Quiver reads version 6; build the index again"),
        ({"format": "other"}, "not the manifest of a Quiver index"),
        ({"surprise": 1}, r"not a manifest of version 6 \(surprise: unknown key\); build the index again"),
        ({"segments": [{}]}, r"segments\.0\.name: missing; segments\.0\.documents: missing"),
        (
            {"codec": {"engine": "exact-dense", "name": "../../etc", "parameters": {}, "files": {}}},
            "'../../etc' is not the name of a codec",
        ),
    ],
)
def test_a_manifest_of_something_else_is_refused_in_one_line(built: Path, change: dict[str, object], message: str) -> None:
    from quiver.retrieval.index.store import reading as module

    path = built / "manifests" / "m-000000000001.json"
    content = {**json.loads(path.read_text()), **change}
    content.pop("checksum")
    path.write_text(json.dumps({**content, "checksum": module._checksum(content)}))
    with pytest.raises(InputError, match=message) as caught:
        open_index(built)
    assert "\n" not in str(caught.value)


def test_tombstones_that_do_not_fit_the_counts_of_the_manifest_are_damage(built: Path) -> None:
    """Their checksum fits, but another number of documents is deleted."""
    delete_documents(built, ["old1"])
    path = built / "manifests" / "m-000000000002.json"
    manifest = read_manifest(path)
    (segment,) = manifest.segments
    assert segment.deleted is not None
    content = tombstones_bytes(np.array([True, False, False, True, True]))
    (built / "tombstones" / segment.deleted.name).write_bytes(2 * content)
    deleted = replace(segment.deleted, bytes=2 * len(content), sha256=hashlib.sha256(content).hexdigest())
    path.write_bytes(manifest_bytes(replace(manifest, segments=(replace(segment, deleted=deleted),))))
    for attempt in (lambda: open_index(built), lambda: delete_documents(built, ["old0"]), lambda: answers(built)):
        with pytest.raises(DamagedIndexError, match=rf"{segment.deleted.name}: does not fit its segment"):
            attempt()
    assert any(segment.deleted.name in problem for problem in check_index(built).problems)


def test_a_newer_format_an_old_format_and_an_unknown_engine(built: Path, tmp_path: Path, word_sum: Any) -> None:
    (built / "FORMAT").write_bytes(format_line(9))
    for attempt in (lambda: open_index(built), lambda: delete_documents(built, ["old1"]), lambda: check_index(built)):
        with pytest.raises(InputError, match="index format version 9, this version of Quiver reads version 6; update Quiver"):
            attempt()
    with pytest.raises(InputError, match="format version 9, which a newer Quiver wrote"):
        build_index(NEW, word_sum, built, overwrite=True)
    (built / "FORMAT").write_bytes(format_line(VERSION))
    path = built / "manifests" / "m-000000000001.json"
    manifest = read_manifest(path)
    path.write_bytes(manifest_bytes(replace(manifest, codec=replace(manifest.codec, engine="magic"))))
    with pytest.raises(InputError, match=r"made by the index engine 'magic'; this version of Quiver supports .*exact-dense"):
        open_index(built)


def test_foreign_folders_are_not_opened_and_not_overwritten(tmp_path: Path, word_sum: Any) -> None:
    for number, content in enumerate(["[]", "{}", "null", "{", '{"name": "my project"}']):
        foreign = tmp_path / f"home{number}"
        foreign.mkdir()
        (foreign / "manifest.json").write_text(content)
        (foreign / "thesis.txt").write_text("years of work")
        with pytest.raises(InputError, match="the folder is not an index"):
            open_index(foreign)
        for overwrite in (True, False):
            with pytest.raises(InputError, match="neither empty nor an index"):
                build_index(OLD, word_sum, foreign, overwrite=overwrite)
        assert sorted(path.name for path in foreign.iterdir()) == ["manifest.json", "thesis.txt"]
    for attempt in (open_index, compact_index, repair_index):
        with pytest.raises(InputError, match="none: no such folder"):
            attempt(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="file: a file, not a folder"):
        build_index(OLD, word_sum, tmp_path / "file")
    with pytest.raises(InputError, match="cannot be written"):
        build_index(OLD, word_sum, tmp_path / "file" / "below")
    (tmp_path / "empty").mkdir()
    assert len(build_index(OLD, word_sum, tmp_path / "empty")) == 5
    assert len(build_index(OLD, word_sum, tmp_path / "deep" / "er")) == 5


def test_one_writer_at_a_time(built: Path, word_sum: Any) -> None:
    with writing(built):
        for attempt in (
            lambda: add_documents(built, NEW, word_sum),
            lambda: delete_documents(built, ["old1"]),
            lambda: compact_index(built),
            lambda: build_index(NEW, word_sum, built, overwrite=True),
        ):
            with pytest.raises(InputError, match=r"process \d+ on .* is writing to this index"):
                attempt()
        assert len(open_index(built)) == 5  # readers take no lock
    assert len(add_documents(built, NEW, word_sum)) == 12


def test_the_lock_of_a_killed_process_is_free(built: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from quiver.retrieval.index.store.writing import writing\n"
        "with writing(Path(sys.argv[1])): os._exit(9)"
    )
    assert subprocess.run([imported_python(), "-c", script, str(built)], check=False).returncode == 9
    assert len(delete_documents(built, ["old1"])) == 4


def test_two_generations_stay_and_names_are_never_used_twice(built: Path, word_sum: Any) -> None:
    for number in range(4):
        delete_documents(built, [f"old{number}"])
    layout = Layout(built)
    assert layout.generations() == [4, 5]
    assert len(list(layout.tombstones.iterdir())) == 2
    compact_index(built)
    assert sorted(path.name for path in layout.segments.iterdir()) == ["s-000000000001-0000", "s-000000000006-0000"]
    layout.manifest(6).unlink()
    assert repair_index(built).generation == 7  # from the copy in the head
    add_documents(built, NEW, word_sum)
    assert layout.generations() == [7, 8]
    assert sorted(path.name for path in layout.segments.iterdir()) == ["s-000000000006-0000", "s-000000000008-0000"]


def test_repair_goes_back_a_generation_where_both_copies_of_the_manifest_are_lost(built: Path, word_sum: Any) -> None:
    add_documents(built, NEW, word_sum)
    (built / "manifests" / "m-000000000002.json").unlink()
    head = (built / "HEAD").read_bytes()
    (built / "HEAD").write_bytes(head[: head.index(b"{") + 9])
    with pytest.raises(DamagedIndexError, match=r"m-000000000002\.json: missing, and it is the newest .*--generation 1 .*opens"):
        open_index(built)
    assert len(open_index(built, generation=1)) == 5
    report = repair_index(built)
    assert (report.generation, report.restored, report.documents_before, report.documents) == (3, 1, None, 5)
    assert [document.id for document in open_index(built).documents] == [document.id for document in OLD]
    assert (built / "quarantine" / "000000000003" / "s-000000000002-0000").is_dir()


@pytest.mark.parametrize("content", [b"", b"quiver-index 5\n", b"quiver-index 5 8f6c1d8f3b9e5a11\n", None])
def test_a_damaged_format_file_is_damage_and_repaired(built: Path, content: bytes | None) -> None:
    (built / "FORMAT").unlink()
    if content is not None:
        (built / "FORMAT").write_bytes(content)
    for attempt in (lambda: open_index(built), lambda: delete_documents(built, ["old1"]), lambda: check_index(built)):
        with pytest.raises(DamagedIndexError, match="FORMAT: missing or changed"):
            attempt()
    assert repair_index(built).documents == 5
    assert len(open_index(built)) == 5


def test_a_damaged_index_can_be_overwritten(built: Path, word_sum: Any) -> None:
    (built / "manifests" / "m-000000000001.json").write_text("{}")
    assert len(build_index(NEW, word_sum, built, overwrite=True)) == 7
    assert Layout(built).generations() == [2]
    assert check_index(built).problems == ()


def test_leftovers_of_an_interrupted_commit_are_reported_and_removed(built: Path, word_sum: Any) -> None:
    orphan = built / "segments" / "s-000000000002-0000"
    orphan.mkdir()
    (orphan / "x").write_text("x")
    (built / "tmp" / "manifest.json").write_text("{")
    doomed = built / "tmp" / "removed-s-000000000000-0000"
    doomed.mkdir()
    (doomed / "y").write_text("y")
    assert {path.name for path in check_index(built).leftovers} == {orphan.name, "manifest.json", doomed.name}
    assert len(add_documents(built, NEW, word_sum)) == 12
    assert check_index(built).leftovers == ()
    assert open_index(built).manifest.segments[1].name == orphan.name


def test_a_file_system_without_hard_links(tmp_path: Path, word_sum: Any) -> None:
    class NoLinks(Disk):
        def link(self, source: Path, target: Path) -> None:
            raise OSError(errno.EPERM, "operation not permitted")

    build_index(OLD, word_sum, tmp_path / "i", disk=NoLinks())
    index = delete_documents(tmp_path / "i", ["old1"], disk=NoLinks())
    assert (len(index), index.manifest.generation) == (4, 2)
    assert check_index(tmp_path / "i").problems == ()


def test_no_file_is_a_pickle(built: Path) -> None:
    for path in files_of(built):
        assert path.suffix != ".npy"
        assert not path.read_bytes().startswith(b"\x80")
