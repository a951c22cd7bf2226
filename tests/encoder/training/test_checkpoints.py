"""Checkpoints of a run: found by step, damaged ones removed, others kept. Kills are in tests/test_work_folders.py."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.encoder import InputError
from quiver.encoder.training import run_folder
from quiver.encoder.training.run_folder import Checkpoints
from quiver.encoder.work_folder import SEAL
from tests.damage import flip


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
    """Checkpoints of steps 4 and 8."""
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


@pytest.mark.parametrize("name", ["model.bin", "inner/state.bin"])
@pytest.mark.parametrize("harm", [flip, Path.unlink])
def test_a_damaged_checkpoint_is_removed(
    two: Checkpoints, name: str, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    harm(two.path(8) / name)
    with caplog.at_level(logging.WARNING, logger=run_folder.__name__):
        assert two.newest() == 4
    flaw = "missing" if harm is Path.unlink else "damaged"
    assert caplog.messages == [f"{two.path(8)}: {name} is {flaw}; removed it, so the run resumes from the checkpoint before it"]
    assert not two.path(8).exists()
    assert whole(two, 4)


def test_a_folder_without_a_seal_is_not_a_checkpoint(two: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    (two.path(8) / SEAL).unlink()
    assert two.steps() == [4]
    with caplog.at_level(logging.WARNING, logger=run_folder.__name__):
        assert two.newest() == 4
    write(two, 8)
    assert two.newest() == 8
    assert caplog.messages == []


def test_a_checkpoint_under_the_name_of_another_step_is_removed(two: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    two.path(4).rename(two.path(12))
    with caplog.at_level(logging.WARNING, logger=run_folder.__name__):
        assert two.newest() == 8
    assert f"{two.path(12)}: it was written as the checkpoint of step 4; removed" in caplog.text


def test_a_checkpoint_of_another_version_is_kept(two: Checkpoints) -> None:
    seal = two.path(8) / SEAL
    seal.write_text(seal.read_text().replace("quiver-checkpoint/2", "quiver-checkpoint/1"))
    with pytest.raises(InputError, match=r"step-000008: its schema is quiver-checkpoint/1, this version reads quiver-checkpoint/2; resume"):
        two.newest()
    assert (two.path(8) / "model.bin").exists()


def test_keep_removes_all_other_steps(two: Checkpoints) -> None:
    write(two, 12, 16)
    two.keep([8, 16, 99])
    assert two.steps() == [8, 16]
    assert sorted(path.name for path in two.folder.iterdir()) == ["step-000008", "step-000016"]


def test_damaged_checkpoints_are_left_out_of_an_average(two: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    flip(two.path(4) / "model.bin")
    with caplog.at_level(logging.WARNING, logger=run_folder.__name__):
        assert two.sound([4, 8, 12]) == [8]
    assert caplog.messages == [
        f"{two.path(4)}: model.bin is damaged; its weights are excluded from the average",
        f"{two.path(12)}: {SEAL} is missing or damaged; its weights are excluded from the average",
    ]
    assert two.path(4).exists()
