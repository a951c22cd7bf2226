"""Failures of the machine in one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from quiver.encoder.errors import InputError, describe_failure, full_disk


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_said_with_file_reason_room_and_remedy(code: int, tmp_path: Path) -> None:
    path = tmp_path / "not" / "there"
    for error in (OSError(code, "x", str(path)), OSError(code, "x", "other", None, os.fsencode(path))):
        said = describe_failure(error)
        assert said.startswith(f"{path}: cannot be written ({os.strerror(code)}; ")
        assert said.endswith(" MB free on its disk); free space and repeat the command")
        assert full_disk(error) is error
    assert describe_failure(OSError(code, "x")).startswith(f"a file or standard output: cannot be written ({os.strerror(code)})")
    assert describe_failure(OSError(code, "x", 7)).startswith("a file or standard output: ")


def test_an_error_that_a_full_disk_has_caused_keeps_its_message(tmp_path: Path) -> None:
    caught = InputError("runs/x: cannot be written (full); set QUIVER_CACHE")
    caught.__cause__ = OSError(errno.ENOSPC, "x", str(tmp_path / "f"))
    assert describe_failure(caught).startswith("runs/x: cannot be written (full); set QUIVER_CACHE; ")
    assert describe_failure(caught).endswith(" MB free on its disk")
    assert full_disk(caught) is caught.__cause__
    assert full_disk(InputError("a mistake")) is None


def test_a_disk_that_fails_is_said_with_its_file() -> None:
    assert describe_failure(OSError(errno.EROFS, "x", "a/b")) == f"a/b: cannot be read or written ({os.strerror(errno.EROFS)})"
    assert describe_failure(PermissionError(errno.EACCES, "denied", "a")) == "[Errno 13] denied: 'a'"
