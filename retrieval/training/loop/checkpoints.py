"""Folders that a run is resumed from: written whole or not at all, sealed, and checked before they are used.

    checkpoints/step-000500/             a model that opens, and what `retrieval.training.loop.snapshot` puts beside it
    checkpoints/step-000500/seal.json    size and sha256 of every other file; written last, when all of them are on the disk
    checkpoints/.step-001000.unfinished  what a kill has left; never read, removed when the run goes on

This module knows nothing of what is in them.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from encoder.errors import InputError
from encoder.files import read_json, sync_folder, write_json
from retrieval.files import file_sha256

logger = logging.getLogger(__name__)

SEAL = "seal.json"
"""The file that makes a folder a checkpoint."""

_SCHEMA = "quiver-checkpoint/1"
_NAME = re.compile(r"step-(\d{6,})")


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: It need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies, or would."""
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps that have a sealed checkpoint, rising; whether it is sound is not asked."""
        found = [_NAME.fullmatch(path.parent.name) for path in self.folder.glob(f"*/{SEAL}")]
        return sorted(int(name[1]) for name in found if name)

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """A folder to write into, which is the step's checkpoint once the block has ended without an error.

        Until then it has a hidden name; if the block fails nothing is left of it, and if the process is killed the rest is
        never taken for a checkpoint.
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
        """The last step with a sound checkpoint; None where there is none. What is not sound is removed, with a warning."""
        for left in (*self.folder.glob(".step-*.unfinished"), *self.folder.glob("step-*")):
            if not (left / SEAL).is_file():
                shutil.rmtree(left)
        for step in reversed(self.steps()):
            flaw = _flaw(self.path(step))
            if flaw is None:
                return step
            logger.warning("%s: %s; removed, the run goes on from the checkpoint before it", self.path(step), flaw)
            shutil.rmtree(self.path(step))
        return None

    def keep(self, count: int, *, also: int | None = None) -> None:
        """Remove all but the newest.

        Args:
            count: How many are kept.
            also: A step whose checkpoint is kept beside them.
        """
        for step in self.steps()[:-count]:
            if step != also:
                # Unsealed first: a kill half way leaves nothing that looks whole.
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


def _flaw(folder: Path) -> str | None:
    """What is wrong with a sealed folder, read in full; None if nothing is."""
    try:
        seal = read_json(folder / SEAL)
        if seal["schema"] != _SCHEMA:
            return f"its schema is {seal['schema']}, this version reads {_SCHEMA}"
        for name, entry in seal["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != entry["bytes"] or file_sha256(path) != entry["sha256"]:
                return f"{name} is damaged"
    except (InputError, KeyError, TypeError, AttributeError):
        return f"{SEAL} is damaged"
    return None
