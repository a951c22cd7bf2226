"""Checkpoint folders: written whole or not at all, sealed with checksums, and verified before a run resumes from them.

    checkpoints/step-000500/             a model folder, and the state of the run
    checkpoints/step-000500/seal.json    size and sha256 of every other file; written last, after all of them are on disk
    checkpoints/.step-001000.unfinished  left by a killed process; never read, removed when the run resumes

This module does not depend on the content of the folders.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quiver.encoder.errors import InputError
from quiver.encoder.files import file_sha256, naming, read_json, sync_folder, write_json

logger = logging.getLogger(__name__)

SEAL = "seal.json"
"""The file that makes a folder a checkpoint."""

_SCHEMAS = "quiver-checkpoint/"
_SCHEMA = f"{_SCHEMAS}2"
_NAME = re.compile(r"step-(\d{6,})")
_LEFT = re.compile(r"step-\d{6,}|\.step-\d{6,}\.unfinished")
"""Names of folders that a killed process may leave unsealed. Copies made by a user have other names and are not deleted."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: Folder of the checkpoints; it need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Path of the checkpoint of a step, which need not exist."""
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps that have a sealed checkpoint, ascending; checksums are not verified."""
        found = [_NAME.fullmatch(path.parent.name) for path in self.folder.glob(f"*/{SEAL}")]
        return sorted(int(name[1]) for name in found if name)

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Yield a folder to write into; it becomes the checkpoint of the step when the block ends without an error.

        Until then it has a hidden name. If the block fails, the folder is removed; if the process is killed, the leftovers are
        never used as a checkpoint.
        """
        hidden = self.folder / f".{self.path(step).name}.unfinished"
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        try:
            yield hidden
            _seal(hidden, step)
            hidden.rename(self.path(step))
            sync_folder(self.folder)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)  # exists only if the block failed

    def newest(self) -> int | None:
        """The last step with an intact checkpoint; None if there is none. Damaged checkpoints are removed with a warning.

        Raises:
            InputError: Another version of Quiver has sealed the checkpoint; it is not removed.
        """
        for left in self.folder.glob("*"):
            hidden = left.name.startswith(".")  # may be sealed, if the process was killed before the rename
            if _LEFT.fullmatch(left.name) and left.is_dir() and (hidden or not (left / SEAL).is_file()):
                shutil.rmtree(left)
        for step in reversed(self.steps()):
            flaw = _flaw(self.path(step), step)
            if flaw is None:
                return step
            logger.warning("%s: %s; removed it, so the run resumes from the checkpoint before it", self.path(step), flaw)
            self._remove(step)
        return None

    def sound(self, steps: Iterable[int]) -> list[int]:
        """The given steps whose checkpoints are intact; a warning is logged for each of the others."""
        flaws = {step: _flaw(self.path(step), step) for step in steps}
        for step, flaw in flaws.items():
            if flaw is not None:
                logger.warning("%s: %s; its weights are excluded from the average", self.path(step), flaw)
        return [step for step, flaw in flaws.items() if flaw is None]

    def keep(self, steps: Collection[int]) -> None:
        """Remove the checkpoints of all other steps."""
        for step in self.steps():
            if step not in steps:
                self._remove(step)

    def _remove(self, step: int) -> None:
        # The seal goes first, so that a process that is killed here leaves no folder that looks complete.
        (self.path(step) / SEAL).unlink()
        shutil.rmtree(self.path(step))


def _seal(folder: Path, step: int) -> None:
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with naming(path), path.open("rb+") as written:  # Windows syncs no file that is open for reading only
            os.fsync(written.fileno())
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_folder(inner)
    write_json(folder / SEAL, {"schema": _SCHEMA, "step": step, "files": files})


def _flaw(folder: Path, step: int) -> str | None:
    """What is wrong with the sealed folder of a step, read in full; None if nothing is."""
    damaged = f"{SEAL} is missing or damaged"
    try:
        seal = read_json(folder / SEAL)
    except InputError:
        return damaged
    schema = str(seal.get("schema"))
    if schema.startswith(_SCHEMAS) and schema != _SCHEMA:
        raise InputError(f"{folder}: its schema is {schema}, this version reads {_SCHEMA}; resume the run with the version that wrote it")
    try:
        sealed, files = seal["step"], {name: (entry["bytes"], entry["sha256"]) for name, entry in seal["files"].items()}
    except (KeyError, TypeError, AttributeError):
        return damaged
    if schema != _SCHEMA:
        return damaged
    if sealed != step:
        return f"it was written as the checkpoint of step {sealed}"
    return next((f"{name} is {flaw}" for name, (size, digest) in files.items() if (flaw := _file_flaw(folder / name, size, digest))), None)


def _file_flaw(path: Path, size: int, digest: str) -> str | None:
    """What is wrong with a file, compared with the seal; None if nothing is."""
    try:
        if not path.is_file():
            return "missing"
        same = path.stat().st_size == size and file_sha256(path) == digest
    except OSError as error:  # a disk error
        return f"unreadable ({error.strerror})"
    return None if same else "damaged"
