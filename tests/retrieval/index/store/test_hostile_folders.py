"""Folders that somebody has tampered with, moved in part, or may not read; and what a writer does when its lock does not hold."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from quiver.encoder.errors import InputError
from quiver.retrieval.index import (
    DamagedIndexError,
    add_documents,
    build_index,
    check_index,
    compact_index,
    delete_documents,
    open_index,
    repair,
    repair_index,
)
from quiver.retrieval.index import files as blocks
from quiver.retrieval.index.files import REAL, Disk, make_folders, remove_tree
from quiver.retrieval.index.store import reading
from quiver.retrieval.index.store import reading as manifests
from quiver.retrieval.index.store.reading import Layout, manifest_bytes, read_manifest
from quiver.retrieval.index.store.writing import writing
from quiver.retrieval.records import Document

OLD = [Document(f"old{number}", f"word{number} text") for number in range(20)]
NEW = [Document(f"new{number}", f"other{number}") for number in range(7)]


@pytest.fixture
def built(tmp_path: Path, word_sum: Any) -> Path:
    return build_index(OLD, word_sum, tmp_path / "index").path


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and make its checksum fit."""
    content = json.loads(path.read_text())
    content.pop("checksum")
    change(content)
    path.write_text(json.dumps({**content, "checksum": manifests._checksum(content)}))


def segment(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["segments"][0]
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: segment(content).update(documents=-1), r"segments\.0\.documents: must be >= 0, got -1"),
        (lambda content: segment(content).update(documents="20"), r"segments\.0\.documents: must be a whole number, got '20'"),
        (lambda content: segment(content).update(documents=True), r"segments\.0\.documents: must be a number, got true"),
        (lambda content: segment(content).update(documents=1 << 32), "must be < 4294967296, got 4294967296"),
        (lambda content: segment(content)["tokens"].update(tokens=1.5), r"segments\.0\.tokens\.tokens: must be a whole number, got 1\.5"),
        (lambda content: segment(content)["files"]["ids.arrow"].update(bytes=None), r"ids\.arrow\.bytes: must be a number, got null"),
        (
            lambda content: segment(content)["files"].update({"..": segment(content)["files"]["ids.arrow"]}),
            "'..' is not the name of a file",
        ),
        (
            lambda content: segment(content)["files"].update({"a/b": segment(content)["files"]["ids.arrow"]}),
            "'a/b' is not the name of a file",
        ),
        (lambda content: segment(content)["files"].update({"a\0": segment(content)["files"]["ids.arrow"]}), "is not the name of a file"),
        (
            lambda content: segment(content).update(name="s-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661-0000"),
            "is not the name of a segment",
        ),
        (lambda content: content["model"].update(dim="8"), r"model\.dim: must be a whole number, got '8'"),
        (lambda content: content["model"].update(kind="other"), r"model\.kind: must be one of dense, colbert, bm25; got 'other'"),
        (lambda content: content["model"].update(dims=8), r"model\.dims: unknown key, did you mean 'dim'\?"),
        (lambda content: content["codec"].update(engine=7), r"codec\.engine: must be text, got 7"),
        (lambda content: segment(content).pop("deleted"), r"segments\.0\.deleted: missing"),
        (lambda content: content["policy"].pop("fields"), r"policy\.fields: missing"),
        (lambda content: content["model"].pop("library"), r"model\.library: missing"),
        (lambda content: content.pop("calibration"), "calibration: missing"),
    ],
)
def test_a_forged_manifest_is_refused_before_anything_is_sized_by_it(built: Path, change: Any, message: str) -> None:
    forge(Layout(built).manifest(1), change)
    with pytest.raises(InputError, match=message) as caught:
        open_index(built, verify=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"dim": 8}, {"dim": 0}, {"kind": "colbert"}])
def test_a_model_of_another_width_than_the_codecs_is_damage(built: Path, change: dict[str, Any]) -> None:
    """Queries would be checked against the manifest, and read by loops that take the width of the codec for granted."""
    forge(Layout(built).manifest(1), lambda content: content["model"].update(change))
    with pytest.raises(DamagedIndexError, match="not a codec for"):
        open_index(built, verify=False)


def test_the_manifest_of_another_generation_is_damage_and_no_endless_search(built: Path) -> None:
    layout = Layout(built)
    shutil.copy(layout.manifest(1), layout.manifest(2))
    shutil.rmtree(next(layout.segments.iterdir()))
    with pytest.raises(DamagedIndexError, match=r"m-000000000002\.json: is the manifest of generation 1"):
        open_index(built)


def test_a_segment_that_was_moved_away_behind_a_link_keeps_its_files(built: Path, tmp_path: Path, word_sum: Any) -> None:
    """Somebody has put a large segment on another disk: the index works, and what is behind the link is not the index's to remove."""
    (folder,) = Layout(built).segments.iterdir()
    away = tmp_path / "away"
    shutil.move(folder, away)
    folder.symlink_to(away, target_is_directory=True)
    names = sorted(path.name for path in away.iterdir())
    assert len(open_index(built)) == 20
    delete_documents(built, ["old1"])
    compact_index(built)
    assert len(delete_documents(built, ["old2"])) == 18
    assert not folder.exists()
    assert not folder.is_symlink()
    assert sorted(path.name for path in away.iterdir()) == names
    assert check_index(built).leftovers == ()
    link = tmp_path / "link"
    link.symlink_to(away, target_is_directory=True)
    remove_tree(link, REAL)
    assert sorted(path.name for path in away.iterdir()) == names


@pytest.mark.parametrize("failure", [errno.EACCES, errno.EMFILE, errno.ESTALE])
def test_a_file_that_may_not_be_read_is_no_damage_and_repair_keeps_it(
    built: Path, word_sum: Any, failure: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_documents(built, NEW, word_sum)

    def refused(path: Path) -> str:
        raise OSError(failure, os.strerror(failure), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(blocks, "file_digests", refused)
        patched.setattr(reading, "file_digests", refused)
        for attempt in (open_index, check_index, repair_index):
            with pytest.raises(InputError, match=os.strerror(failure)) as caught:
                attempt(built)
            assert not isinstance(caught.value, DamagedIndexError)
        patched.setattr(reading, "file_digests", lambda path: refused_with_io_error(path))
        with pytest.raises(DamagedIndexError, match="quiver index repair"):
            open_index(built)
    assert len(open_index(built)) == 27


def refused_with_io_error(path: Path) -> str:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def test_a_check_during_commits_does_not_report_removed_files_as_damage(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all files of a large index takes long enough for two commits, which remove what is just being read."""
    verify, commits = repair.verify_file, iter(["old1", "old2", "old3"])

    def verify_slowly(*arguments: Any) -> None:
        for key in commits:
            compact_index(built)
            delete_documents(built, [key])
        verify(*arguments)

    monkeypatch.setattr(repair, "verify_file", verify_slowly)
    report = check_index(built)
    assert report.problems == ()
    assert report.generations[-1].generation == Layout(built).generations()[-1] > 3
    assert all(not each.problems for each in report.generations)


def test_an_index_with_a_damaged_codec_can_be_built_again_in_its_place(built: Path, word_sum: Any) -> None:
    """The new codec has the bytes, and with them the name, that the damaged one had."""
    (folder,) = Layout(built).codecs.iterdir()
    (folder / "codec.json").write_text("{}")
    with pytest.raises(DamagedIndexError, match=r"codec\.json"):
        open_index(built)
    assert len(build_index(NEW, word_sum, built, overwrite=True)) == 7
    assert [path.name for path in Layout(built).codecs.iterdir()] == [folder.name]
    assert check_index(built).problems == ()


def test_two_writers_whose_lock_does_not_hold_lose_nothing(built: Path, word_sum: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems take a lock and keep nobody out: the one that commits second is refused, and touches nothing."""
    monkeypatch.setattr(FileLock, "acquire", lambda lock, timeout: None)
    before = files_of(built)
    for use in (
        lambda writer: writer.commit(writer.manifest),
        lambda writer: writer.add_segment(writer.scratch("x"), {}, documents=1, vectors=1, tokens=writer.manifest.tokens),
        lambda writer: writer.add_codec(writer.scratch("x"), "exact-dense", {}, {}),
        lambda writer: writer.delete(writer.manifest.segments[0], open_index(built).segments[0].kept),
    ):
        with writing(built) as writer:
            add_documents(built, [Document(f"x{len(files_of(built))}", "word")], word_sum)
            after = files_of(built)
            with pytest.raises(InputError, match="another process changed this index at the same time"):
                use(writer)
        assert {name: content for name, content in files_of(built).items() if not name.startswith("tmp")} == after
    assert len(open_index(built)) == 24
    gone = before.keys() - files_of(built).keys()
    assert [name for name in gone if name.startswith("manifests")] == ["manifests/m-000000000001.json"]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "LOCK"}


def test_a_lock_that_cannot_be_taken_and_one_that_cannot_be_described(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(lock: FileLock, timeout: float) -> None:
        raise PermissionError(errno.EROFS, "read-only file system", str(lock.lock_file))

    with monkeypatch.context() as patched:
        patched.setattr(FileLock, "acquire", refused)
        with pytest.raises(InputError, match=r"cannot be written \(read-only file system\)"):
            delete_documents(built, ["old1"])
    write_text = Path.write_text

    def full(path: Path, *arguments: Any, **settings: Any) -> int:
        if path.name == "LOCK":
            raise OSError(errno.ENOSPC, "no space left on device")
        return write_text(path, *arguments, **settings)

    monkeypatch.setattr(Path, "write_text", full)
    assert len(delete_documents(built, ["old1"])) == 19


def test_a_manifest_holds_a_path_that_is_not_unicode(built: Path) -> None:
    path = Layout(built).manifest(1)
    manifest = read_manifest(path)
    odd = replace(manifest, model=replace(manifest.model, source="/models/caf\udce9 é"))
    path.write_bytes(manifest_bytes(odd))
    assert "\\udce9 é" in path.read_text(encoding="utf-8")
    assert read_manifest(path) == odd
    assert open_index(built).manifest.model.source == "/models/caf\udce9 é"


def test_folders_made_by_a_process_that_was_killed_become_durable(tmp_path: Path) -> None:
    synced: list[Path] = []

    class Watched(Disk):
        def sync_folder(self, path: Path) -> None:
            synced.append(path)
            super().sync_folder(path)

    (tmp_path / "a" / "b").mkdir(parents=True)
    make_folders(tmp_path / "a" / "b", Watched())
    assert synced == [tmp_path / "a"]
    make_folders(tmp_path / "a" / "b" / "c", Watched())
    assert synced == [tmp_path / "a", tmp_path / "a", tmp_path / "a" / "b"]
