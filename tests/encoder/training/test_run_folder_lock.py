"""The lock of a run folder: one session at a time, no leftovers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from quiver.encoder import InputError
from quiver.encoder.training.run_folder import LOCK, exclusive_lock


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="out: cannot be written"), exclusive_lock(tmp_path / "file" / "out"):
        pass


def test_a_second_session_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    used = rf"{out}: another session is training there; wait for it, or choose another --out$"
    with exclusive_lock(out):
        assert out.is_dir()
        for _ in range(2):
            with pytest.raises(InputError, match=used), exclusive_lock(out):
                pass
    assert not out.exists(), "what was made and is empty goes again"
    with exclusive_lock(out), exclusive_lock(tmp_path / "deep" / "other"):
        (out / "rows").touch()
    assert [path.name for path in out.iterdir()] == ["rows"]
    (out / LOCK).touch()  # left by a killed session
    with pytest.raises(ValueError, match="in the block"), exclusive_lock(out):
        raise ValueError("in the block")
    assert [path.name for path in out.iterdir()] == ["rows"]
    (tmp_path / "empty").mkdir()
    with exclusive_lock(tmp_path / "empty"):
        pass
    assert list((tmp_path / "empty").iterdir()) == [], "it was there before"


def test_a_lock_on_a_removed_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on a file without a name does not exclude other sessions."""
    real = FileLock.acquire

    def late(self: FileLock, *arguments: Any, **others: Any) -> Any:
        taken = real(self, *arguments, **others)
        (tmp_path / LOCK).unlink()
        return taken

    monkeypatch.setattr(FileLock, "acquire", late)
    with pytest.raises(InputError, match="another session is training there"), exclusive_lock(tmp_path):
        pass
