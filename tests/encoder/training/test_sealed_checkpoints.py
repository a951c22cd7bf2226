"""Checkpoints: complete or absent after a kill at any file operation; damaged ones are detected."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quiver.encoder import InputError
from quiver.encoder.files import file_sha256
from quiver.encoder.training import sealed_checkpoints as module
from quiver.encoder.training.sealed_checkpoints import SEAL, Checkpoints

EachDeath = Callable[[Callable[[], object], Callable[[], object]], Iterator[None]]


def write(found: Checkpoints, *steps: int) -> None:
    for step in steps:
        with found.writing(step) as folder:
            (folder / "model.bin").write_bytes(b"weights of %d" % step)
            (folder / "inner").mkdir()
            (folder / "inner" / "state.bin").write_bytes(b"state of %d" % step)


def whole(found: Checkpoints, step: int) -> bool:
    folder = found.path(step)
    contents = [(folder / "model.bin").read_bytes(), (folder / "inner" / "state.bin").read_bytes()]
    return contents == [b"weights of %d" % step, b"state of %d" % step]


@pytest.fixture
def two(tmp_path: Path) -> Checkpoints:
    """Of the steps 4 and 8."""
    found = Checkpoints(tmp_path / "checkpoints")
    write(found, 4, 8)
    return found


def test_a_written_checkpoint_is_found(tmp_path: Path) -> None:
    found = Checkpoints(tmp_path / "checkpoints")
    assert (found.steps(), found.newest()) == ([], None)
    write(found, 12, 4, 1_000_008)
    assert found.steps() == [4, 12, 1_000_008]
    assert found.newest() == 1_000_008
    assert sorted(path.name for path in found.folder.iterdir()) == ["step-000004", "step-000012", "step-1000008"]
    assert whole(found, 12)
    seal = json.loads((found.path(4) / SEAL).read_text())
    assert seal["step"] == 4
    assert {name: entry["bytes"] for name, entry in seal["files"].items()} == {"inner/state.bin": 10, "model.bin": 12}


def test_a_write_that_fails_leaves_nothing(two: Checkpoints) -> None:
    def fail() -> None:
        with two.writing(12) as folder:
            (folder / "model.bin").write_text("half")
            raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        fail()
    assert sorted(path.name for path in two.folder.iterdir()) == ["step-000004", "step-000008"]


def test_files_are_synced_before_the_seal_and_the_seal_before_the_rename(two: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real, rename = os.fsync, Path.rename

    def noting(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    def renaming(self: Path, target: Path) -> Path:
        events.append(f"rename {self.name}")
        return rename(self, target)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(Path, "rename", renaming)
    write(two, 12)
    hidden = ".step-000012.unfinished"
    seal, *rest = [event for event in events if SEAL in event]
    assert rest == []
    assert events == ["state.bin", "model.bin", "inner", hidden, seal, hidden, f"rename {hidden}", "checkpoints"]


def test_a_kill_at_any_file_operation_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, each_death: EachDeath) -> None:
    found = Checkpoints(tmp_path / "checkpoints")

    def reset() -> None:
        shutil.rmtree(found.folder, ignore_errors=True)
        write(found, 4)

    def replace() -> None:
        write(found, 8)
        found.keep([8])

    newest = []
    for _ in each_death(reset, replace):
        step = found.newest()
        assert step is not None
        assert whole(found, step)
        newest.append(step)
        assert all((path / SEAL).exists() for path in found.folder.iterdir()), "what the kill has left is gone"
        assert found.steps() in ([4], [8], [4, 8])
        write(found, 12)  # and in nobody's way
        found.keep([12])
        assert [path.name for path in found.folder.iterdir()] == ["step-000012"]
    first = newest.index(8)
    assert newest == [4] * first + [8] * (len(newest) - first)
    assert first >= 12  # two folders, two files and the seal, their fsyncs, two renames
    assert len(newest) > first + 5  # the seal of the old one, its files, its folders


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("name", ["model.bin", "inner/state.bin"])
@pytest.mark.parametrize("harm", [truncate, flip, lengthen, empty, Path.unlink])
def test_a_damaged_checkpoint_is_removed(
    two: Checkpoints, name: str, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    harm(two.path(8) / name)
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        assert two.newest() == 4
    flaw = "missing" if harm is Path.unlink else "damaged"
    assert caplog.messages == [f"{two.path(8)}: {name} is {flaw}; removed it, so the run resumes from the checkpoint before it"]
    assert not two.path(8).exists()
    assert whole(two, 4)


@pytest.mark.parametrize("seal", ["", "{", "[]", "{}", '{"schema": "other/1", "step": 8, "files": {}}', '{"step": 8, "files": {"a": 1}}'])
def test_a_checkpoint_with_a_damaged_seal_is_removed(two: Checkpoints, seal: str, caplog: pytest.LogCaptureFixture) -> None:
    (two.path(8) / SEAL).write_text(seal)
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        assert two.newest() == 4
    assert f"{two.path(8)}: {SEAL} is missing or damaged; removed" in caplog.text


def test_every_flipped_bit_is_detected(two: Checkpoints) -> None:
    path = two.path(8) / "model.bin"
    content = path.read_bytes()
    for place in range(len(content)):
        for bit in range(8):
            path.write_bytes(content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :])
            assert two.sound([8]) == []
    path.write_bytes(content)
    assert two.sound([8]) == [8]


def test_no_checkpoint_is_left_if_all_are_damaged(two: Checkpoints) -> None:
    for step in (4, 8):
        flip(two.path(step) / "model.bin")
    assert two.newest() is None
    assert list(two.folder.iterdir()) == []


def test_a_folder_without_a_seal_is_not_a_checkpoint(two: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    (two.path(8) / SEAL).unlink()
    assert two.steps() == [4]
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        assert two.newest() == 4
    assert not two.path(8).exists()
    assert caplog.messages == []  # that is what a kill leaves, and no harm is done


def test_a_checkpoint_under_the_name_of_another_step_is_removed(two: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    two.path(4).rename(two.path(12))
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        assert two.newest() == 8
    assert f"{two.path(12)}: it was written as the checkpoint of step 4; removed" in caplog.text


def test_a_checkpoint_with_an_unreadable_file_is_removed(
    two: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(path: Path) -> str:
        if path == two.path(8) / "model.bin":
            raise OSError(5, "Input/output error")
        return file_sha256(path)

    monkeypatch.setattr(module, "file_sha256", failing)
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        assert two.newest() == 4
    assert "model.bin is unreadable (Input/output error)" in caplog.text


def test_a_checkpoint_of_another_version_is_kept(two: Checkpoints) -> None:
    seal = two.path(8) / SEAL
    seal.write_text(seal.read_text().replace("quiver-checkpoint/2", "quiver-checkpoint/1"))
    with pytest.raises(InputError, match=r"step-000008: its schema is quiver-checkpoint/1, this version reads quiver-checkpoint/2; resume"):
        two.newest()
    assert (two.path(8) / "model.bin").exists()


def test_files_of_the_user_are_kept(two: Checkpoints) -> None:
    (two.folder / "step-notes.txt").write_text("mine")
    shutil.copytree(two.path(4), two.folder / "step-000004-mine")
    (two.folder / "step-000004-mine" / SEAL).unlink()
    (two.folder / ".step-000012.unfinished").mkdir()
    shutil.copytree(two.path(8), two.folder / ".step-000016.unfinished")  # sealed, and killed before it had its name
    assert two.newest() == 8
    two.keep([8])
    assert sorted(path.name for path in two.folder.iterdir()) == ["step-000004-mine", "step-000008", "step-notes.txt"]


def test_keep_removes_all_other_steps(two: Checkpoints) -> None:
    write(two, 12, 16)
    two.keep([8, 16, 99])
    assert two.steps() == [8, 16]
    assert sorted(path.name for path in two.folder.iterdir()) == ["step-000008", "step-000016"]


def test_damaged_checkpoints_are_left_out_of_an_average(two: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    flip(two.path(4) / "model.bin")
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        assert two.sound([4, 8, 12]) == [8]
    assert caplog.messages == [
        f"{two.path(4)}: model.bin is damaged; its weights are excluded from the average",
        f"{two.path(12)}: {SEAL} is missing or damaged; its weights are excluded from the average",
    ]
    assert two.path(4).exists()
