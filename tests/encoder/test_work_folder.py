"""Work folders: locks, settings of resumed jobs, parts and sealed folders. What their users share is in tests/test_work_folders.py."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from quiver.encoder import InputError
from quiver.encoder.files import Disk, file_sha256
from quiver.encoder.work_folder import SEAL, SealedFolders, describe_changes, exclusive_lock, open_work, setting_changes
from tests.damage import flip

WAIT = "wait for it"
WORK = ".work"


@pytest.fixture
def folders(tmp_path: Path) -> SealedFolders:
    """One sealed folder, ``a``."""
    found = SealedFolders(tmp_path / "parts", "test-part/2")
    write(found, "a")
    return found


def write(folders: SealedFolders, name: str, text: str = "text", **options: Any) -> None:
    with folders.writing(name, **options) as part:
        (part.folder / "inner").mkdir(exist_ok=True)
        (part.folder / "inner" / "file").write_text(text)
        part.about["name"] = name


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Locks.


def test_a_second_process_is_refused_and_told_who_holds_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "deep" / "out" / ".lock"
    used = rf"{lock.parent}: process {os.getpid()} on \S+ is training there; wait for it$"
    with exclusive_lock(lock, "training there", remedy=WAIT):
        with pytest.raises(InputError, match=used), exclusive_lock(lock, "training there", remedy=WAIT):
            pass
        with (
            pytest.raises(InputError, match=r"still training there after 0\.1 s; wait for it"),
            exclusive_lock(lock, "training there", remedy=WAIT, wait=0.1),
        ):
            pass
    assert not lock.parent.exists(), "it was created and is empty"
    lock.parent.mkdir()
    lock.touch()  # left by a killed process
    with pytest.raises(ValueError, match="in the block"), exclusive_lock(lock, "training there", remedy=WAIT):
        raise ValueError("in the block")
    assert entries(lock.parent) == []


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("wait", [60.0, math.inf])
def test_many_threads_that_wait_work_one_after_the_other(tmp_path: Path, wait: float, keep: bool) -> None:
    working, most, done = 0, 0, 0

    def work() -> None:
        nonlocal working, most, done
        with exclusive_lock(tmp_path / "lock", "counting", remedy=WAIT, wait=wait, keep=keep):
            working += 1
            most = max(most, working)
            time.sleep(0.01)
            working -= 1
            done += 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, done) == (1, 8)
    assert entries(tmp_path) == ["lock"] * keep


def test_a_lock_on_a_removed_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on a file without a name does not exclude other processes."""
    real, lock = FileLock.acquire, tmp_path / ".lock"

    def late(self: FileLock, *arguments: Any, **others: Any) -> Any:
        taken = real(self, *arguments, **others)
        lock.unlink()
        return taken

    monkeypatch.setattr(FileLock, "acquire", late)
    with pytest.raises(InputError, match="another process is training there"), exclusive_lock(lock, "training there", remedy=WAIT):
        pass


def test_a_folder_that_cannot_be_created_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="out: cannot be written"), exclusive_lock(tmp_path / "file" / "out" / "lock", "", remedy=WAIT):
        pass
    with pytest.raises(InputError, match="file: is a file; --out must name a folder"), open_work(tmp_path / "file", WORK, {}, doing=""):
        pass


# Settings.


def test_each_changed_setting_is_named_with_both_values() -> None:
    was = {"rules": {"seed": 1, "ranks": [1, 200]}, "phases": [{"lr": 1.0}, {"lr": 2.0}], "gone": None}
    now = {"rules": {"seed": 2, "ranks": [1, 100]}, "phases": [{"lr": 1.0}, {"lr": 3.0}], "new": "x"}
    assert describe_changes(setting_changes(was, now)) == (
        'rules.seed was 1, is 2; rules.ranks was [1, 200], is [1, 100]; phases.1.lr was 2.0, is 3.0; new was null, is "x"'
    )
    assert list(setting_changes(was, was)) == []


# Unfinished jobs.


def test_a_job_resumes_with_equal_settings_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with open_work(out, WORK, {"seed": (1, 2)}, doing="mining there") as work:
        work.agree({"data": "abc"})
    assert not out.exists(), "nothing was finished"
    with open_work(out, WORK, {"seed": (1, 2)}, doing="mining there") as work:
        work.agree({"data": "abc"})
        work.save("000000", b"zero")
    assert entries(out) == [WORK]
    with pytest.raises(InputError) as raised, open_work(out, WORK, {"seed": [1, 3]}, doing="mining there"):
        pass
    assert str(raised.value) == (
        f"{out}: holds an unfinished run with other settings: seed was [1, 2], is [1, 3]; use the same settings to resume it, "
        "or --overwrite to start over"
    )
    with open_work(out, WORK, {"seed": [1, 2]}, doing="mining there") as work:
        assert work.names() == ["000000"]
        assert (work.find("000000"), work.find("000001")) == (b"zero", None)
        with pytest.raises(InputError, match='data was "abc", is "def"'):
            work.agree({"data": "def"})
        with pytest.raises(InputError, match=f"{out}: process .* is mining there"), open_work(out, WORK, {}, doing="mining there"):
            pass
    with open_work(out, WORK, {"seed": 9}, doing="mining there", overwrite=True) as work:
        assert work.names() == []
    assert entries(out) == []


@pytest.mark.parametrize("harm", [lambda content: content[:-1], lambda content: content[:40] + b"!" + content[41:], lambda content: b""])
def test_a_damaged_part_is_computed_again(tmp_path: Path, harm: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture) -> None:
    with open_work(tmp_path, WORK, {}, doing="mining there") as work:
        work.save("000000", b"result of the part")
        path = work.path / "000000.part"
        path.write_bytes(harm(path.read_bytes()))
        assert work.find("000000") is None
        work.remove()
    assert caplog.messages == [f"{path}: damaged; computing this part again"]


def test_a_folder_that_no_job_made_is_never_used_or_removed(tmp_path: Path) -> None:
    (tmp_path / WORK).mkdir()
    (tmp_path / WORK / "thesis.tex").touch()
    for overwrite in (False, True):
        problem = f"holds {WORK}, which is not from an unfinished run"
        with pytest.raises(InputError, match=problem), open_work(tmp_path, WORK, {}, doing="mining", overwrite=overwrite):
            pass
    assert entries(tmp_path / WORK) == ["thesis.tex"]


def test_a_job_of_another_version_is_refused_until_it_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / WORK).mkdir()
    (tmp_path / WORK / "plan.json").write_text('{"schema": "quiver-work/0"}')
    with pytest.raises(InputError, match="another version of Quiver began this run"), open_work(tmp_path, WORK, {}, doing=""):
        pass
    with open_work(tmp_path, WORK, {}, doing="", overwrite=True) as work:
        assert json.loads((work.path / "plan.json").read_text())["schema"] == "quiver-work/1"


# Sealed folders.


def test_a_sealed_folder_is_read_back(folders: SealedFolders) -> None:
    with folders.writing("b") as part:
        (part.folder / "file").write_bytes(b"12345")
        part.about["rows"] = 5
    sealed = folders.finished("b", "")
    assert sealed == part
    assert (part.folder, part.about, part.files) == (folders.path("b"), {"rows": 5}, {"file": (5, file_sha256(part.folder / "file"))})
    assert folders.names() == ["a", "b"]
    assert folders.finished("c", "") is None
    folders.remove("a")
    assert entries(folders.folder) == ["b"]


def test_a_note_with_a_name_of_the_seal_is_refused(folders: SealedFolders) -> None:
    with pytest.raises(ValueError, match="sha256: these names of the seal"), folders.writing("b") as part:
        part.about = {"sha256": "of something else"}


def test_a_folder_that_fails_leaves_nothing_and_one_that_resumes_is_continued(folders: SealedFolders) -> None:
    def fail(*, resume: bool) -> None:
        with folders.writing("b", resume=resume) as part:
            (part.folder / "half").touch()
            raise OSError("disk on fire")

    for resume in (False, True):
        with pytest.raises(OSError, match="disk on fire"):
            fail(resume=resume)
        assert entries(folders.folder) == [*([".b.unfinished"] * resume), "a"]
    write(folders, "b", resume=True)
    assert entries(folders.path("b")) == ["half", "inner", SEAL]
    (folders.folder / ".c.unfinished").mkdir()
    folders.remove_unfinished()
    assert entries(folders.folder) == ["a", "b"]


def test_files_are_synced_before_the_seal_and_the_seal_before_the_rename(tmp_path: Path) -> None:
    calls = []

    class Noting(Disk):
        def sync_file(self, path: Path) -> None:
            calls.append(f"sync {path.name}")
            super().sync_file(path)

        def sync_folder(self, path: Path) -> None:
            calls.append(f"sync {path.name}/")
            super().sync_folder(path)

        def rename(self, source: Path, target: Path) -> None:
            calls.append(f"{source.name} -> {target.name}")
            super().rename(source, target)

    (tmp_path / "parts").mkdir()
    write(SealedFolders(tmp_path / "parts", "test-part/2", disk=Noting()), "a")
    hidden = ".a.unfinished"
    assert calls[-9:] == [
        "sync parts/",
        "sync file",
        "sync inner/",
        f"sync {hidden}/",
        f"sync {SEAL}.tmp",
        f"{SEAL}.tmp -> {SEAL}",
        f"sync {hidden}/",
        f"{hidden} -> a",
        "sync parts/",
    ]


@pytest.mark.parametrize("harm", [flip, Path.unlink, lambda path: path.write_bytes(b""), lambda path: path.write_text("text!")])
def test_damage_of_a_file_is_detected(folders: SealedFolders, harm: Callable[[Path], object], caplog: pytest.LogCaptureFixture) -> None:
    harm(folders.path("a") / "inner" / "file")
    assert folders.finished("a", "making it again") is None
    flaw = "missing" if harm is Path.unlink else "damaged"
    assert caplog.messages == [f"{folders.path('a')}: inner/file is {flaw}; making it again"]
    write(folders, "a", "other")
    assert folders.flaw("a") is None
    assert (folders.path("a") / "inner" / "file").read_text() == "other"


@pytest.mark.parametrize(
    "seal", [None, "", "{", "[]", "{}", '{"schema": "other/2", "files": {}}', '{"schema": "test-part/2", "files": {"a": 1}}']
)
def test_damage_of_a_seal_is_detected(folders: SealedFolders, seal: str | None, caplog: pytest.LogCaptureFixture) -> None:
    path = folders.path("a") / SEAL
    path.write_text(seal if seal is not None else path.read_text().replace('"name": "a"', '"name": "b"'))
    assert folders.finished("a", "making it again") is None
    assert caplog.messages == [f"{folders.path('a')}: {SEAL} is missing or damaged; making it again"]


def test_a_seal_of_another_version_is_named(folders: SealedFolders) -> None:
    newer = SealedFolders(folders.folder, "test-part/3")
    with pytest.raises(InputError, match="its schema is test-part/2, this version reads test-part/3"):
        newer.flaw("a")
    assert newer.finished("a", "making it again") is None


def test_a_file_that_cannot_be_read_now_is_not_damaged(folders: SealedFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path) -> str:
        raise OSError(number, os.strerror(number), str(path))

    number = errno.EIO
    monkeypatch.setattr("quiver.encoder.work_folder.file_sha256", failing)
    assert folders.flaw("a") == "inner/file is unreadable (Input/output error)"
    number = errno.EMFILE
    with pytest.raises(InputError, match="inner/file: cannot be read"):
        folders.flaw("a")


def test_the_first_of_several_workers_counts(folders: SealedFolders) -> None:
    """Each writes to its own name, whatever the second does, and however far a third came."""
    (folders.folder / ".b.dead.unfinished").mkdir()
    with folders.writing("b", worker="one") as one:
        (one.folder / "file").write_text("first")
        with folders.writing("b", worker="two") as two:
            (two.folder / "file").write_text("second")
            two.about["worker"] = 2
    assert one == two
    assert one.about == {"worker": 2}
    assert (folders.path("b") / "file").read_text() == "second"
    assert entries(folders.folder) == [".b.dead.unfinished", "a", "b"]


def test_others_wait_while_a_folder_is_made_and_use_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders, made, found = SealedFolders(tmp_path, "test-part/2"), list[str](), list[str]()

    def build(part: Any) -> None:
        time.sleep(0.05)
        made.append("once")
        (part.folder / "file").write_text("made")

    def use() -> None:
        found.append((folders.make("a", build, doing="making it", redo="making it again").folder / "file").read_text())

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (made, found) == (["once"], ["made"] * 4)
    flip(folders.path("a") / "file")
    with caplog.at_level(logging.WARNING):
        use()
    assert made == ["once", "once"]
    assert "file is damaged; making it again" in caplog.text
