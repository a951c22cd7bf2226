"""Checkpoint folders: written whole or not at all, sealed with checksums, and verified before a run is resumed from them.

    checkpoints/step-000500/             a model that opens, and the state of the run
    checkpoints/step-000500/seal.json    size and sha256 of every other file; written last, when all of them are on disk
    checkpoints/.step-001000.unfinished  left by a killed process; never read, deleted when the run is resumed

The content of a checkpoint is up to the task.
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
from quiver.encoder.files import file_sha256, read_json, sync_folder, write_json

logger = logging.getLogger(__name__)

SEAL = "seal.json"
"""File that marks a folder as a complete checkpoint."""

_SCHEMAS = "quiver-checkpoint/"
_SCHEMA = f"{_SCHEMAS}1"
_NAME = re.compile(r"step-(\d{6,})")
_LEFT = re.compile(r"step-\d{6,}|\.step-\d{6,}\.unfinished")
"""Names of folders that a killed process may leave without a seal; other folders are not touched."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: Folder of the checkpoints; it need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step, whether it exists or not."""
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps with a sealed checkpoint, in increasing order; the checksums are not verified."""
        found = [_NAME.fullmatch(path.parent.name) for path in self.folder.glob(f"*/{SEAL}")]
        return sorted(int(name[1]) for name in found if name)

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """A folder to write into, which becomes the checkpoint of the step when the block ends without an error.

        Until then the folder is hidden. If the block fails, the folder is deleted; if the process is killed, its remains are never taken
        for a checkpoint.
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
            shutil.rmtree(hidden, ignore_errors=True)  # gone already, unless the block failed

    def newest(self) -> int | None:
        """Last step with a valid checkpoint; None if there is none. Damaged checkpoints are deleted, with a warning.

        Raises:
            InputError: Another version of Quiver sealed the checkpoint; it is not deleted.
        """
        for left in self.folder.glob("*"):
            hidden = left.name.startswith(".")  # the process may have been killed between sealing and renaming
            if _LEFT.fullmatch(left.name) and left.is_dir() and (hidden or not (left / SEAL).is_file()):
                shutil.rmtree(left)
        for step in reversed(self.steps()):
            flaw = _flaw(self.path(step), step)
            if flaw is None:
                return step
            logger.warning("%s: %s; deleted, the run is resumed from the checkpoint before it", self.path(step), flaw)
            self._remove(step)
        return None

    def sound(self, steps: Iterable[int]) -> list[int]:
        """Those of the given steps whose checkpoints are valid; the others are logged as warnings."""
        flaws = {step: _flaw(self.path(step), step) for step in steps}
        for step, flaw in flaws.items():
            if flaw is not None:
                logger.warning("%s: %s; its weights are not used", self.path(step), flaw)
        return [step for step, flaw in flaws.items() if flaw is None]

    def keep(self, steps: Collection[int]) -> None:
        """Delete the checkpoints of all other steps."""
        for step in self.steps():
            if step not in steps:
                self._remove(step)

    def _remove(self, step: int) -> None:
        # The seal goes first: if the process is killed in between, no incomplete checkpoint looks complete.
        (self.path(step) / SEAL).unlink()
        shutil.rmtree(self.path(step))


def _seal(folder: Path, step: int) -> None:
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as written:
            os.fsync(written.fileno())
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_folder(inner)
    write_json(folder / SEAL, {"schema": _SCHEMA, "step": step, "files": files})


def _flaw(folder: Path, step: int) -> str | None:
    """Problem of the sealed folder of a step, read in full; None if it is valid."""
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
        return f"it is the checkpoint of step {sealed}"
    return next((f"{name} is {flaw}" for name, (size, digest) in files.items() if (flaw := _file_flaw(folder / name, size, digest))), None)


def _file_flaw(path: Path, size: int, digest: str) -> str | None:
    """Problem of a file; None if it is as it was sealed."""
    try:
        if not path.is_file():
            return "missing"
        same = path.stat().st_size == size and file_sha256(path) == digest
    except OSError as error:  # a failing disk
        return f"unreadable ({error.strerror})"
    return None if same else "damaged"
