"""A long job's output folder: what is done stays done, and the folder is finished when its record is there.

    OUT/.quiver-work/plan.json      what the job is: going on with another job's parts would mix two results
    OUT/.quiver-work/000012.part    what one part of it gave, with a checksum; written whole or not at all
    OUT/...                         the result; its record is written last, and then .quiver-work/ goes

A job that is killed and started again with the same settings does the parts that are missing, and ends with the same result. Nothing
is removed or replaced but what such a job has made. This module knows nothing of what the parts hold.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, replacing, write_json

logger = logging.getLogger(__name__)

WORK = ".quiver-work"
"""Folder of an unfinished job, inside its output folder."""

_PLAN, _LOCK = "plan.json", "lock"
_SCHEMA = "quiver-work/1"


class WorkFolder:
    """The unfinished job in an output folder; `open_work` gives it."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._work = out / WORK

    def agree(self, **settings: object) -> None:
        """Write down settings of the job, or compare them with those of the job that was begun here.

        Raises:
            InputError: One differs from what was written down; names it.
        """
        path = self._work / _PLAN
        plan = read_json(path) if path.is_file() else {}
        settings = json.loads(json.dumps(settings))  # as they are read back: lists, not tuples
        for name, value in settings.items():
            if name in plan and plan[name] != value:
                raise InputError(
                    f"{self.out}: an unfinished run with another {name} ({plan[name]} then, {value} now); run it as it was begun, or "
                    "with --overwrite to begin anew"
                )
        if not settings.keys() <= plan.keys():
            write_json(path, {"schema": _SCHEMA, **plan, **settings})

    def fresh(self, name: str) -> Path:
        """An empty folder inside the work folder, which is gone when the job is finished."""
        folder = self._work / name
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        return folder

    def has(self, part: int) -> bool:
        """Whether a part is done; a damaged one is not."""
        path = self._path(part)
        if not path.is_file():
            return False
        content = path.read_bytes()
        if content[:32] == hashlib.sha256(content[32:]).digest():
            return True
        logger.warning("%s: damaged, it is done again", path)
        return False

    def write(self, part: int, content: bytes) -> None:
        """Keep what a part gave; it is there whole or not at all.

        Raises:
            InputError: It cannot be written.
        """
        try:
            with replacing(self._path(part)) as temporary:
                temporary.write_bytes(hashlib.sha256(content).digest() + content)
        except OSError as error:
            raise InputError(f"{self._work}: cannot be written ({error.strerror}); make room and run it again") from error

    def read(self, part: int) -> bytes:
        """What a part gave."""
        return self._path(part).read_bytes()[32:]

    def finish(self, record: str, content: Mapping[str, object]) -> None:
        """Write the record and remove the work folder: the result is whole."""
        write_json(self.out / record, content)
        shutil.rmtree(self._work)

    def _path(self, part: int) -> Path:
        return self._work / f"{part:06d}.part"


@contextmanager
def open_work(out: Path, record: str, schema: str, *, settings: Mapping[str, object], overwrite: bool) -> Iterator[WorkFolder]:
    """Begin a job in a folder, or go on with the one that was begun there.

    Args:
        out: The folder; made where it is not there. After a mistake that is found before the first part it is as it was.
        record: Name of the file that a finished job has left.
        schema: What the record has under ``schema``.
        settings: What must be equal for a job to be gone on with; JSON.
        overwrite: Begin anew, whatever such a job has left; a finished result is replaced when the new one is.

    Raises:
        InputError: The folder holds a finished job, an unfinished one with other settings, or something else; it cannot be written; or
            another process is at work in it.
    """
    work = out / WORK
    _refuse_others(out, record, schema, overwrite=overwrite)
    made = not out.exists()
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    lock = FileLock(work / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(f"{out}: another process is at work in this folder") from error
    try:
        if overwrite:
            _empty(work)
        folder = WorkFolder(out)
        folder.agree(record=record, **settings)
        yield folder
    finally:
        if work.is_dir() and not any(work.glob("*.part")):
            shutil.rmtree(work)
            if made and not any(out.iterdir()):
                out.rmdir()
        lock.release()


def _refuse_others(out: Path, record: str, schema: str, *, overwrite: bool) -> None:
    """Say before anything is written that the folder is taken."""
    work = out / WORK
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: a file; --out names a folder")
    if (work.exists() or work.is_symlink()) and not _begun_here(work):
        raise InputError(f"{out}: holds {WORK} already, and not from an unfinished run; choose another --out")
    finished = _has_schema(out / record, schema)
    if finished and not work.exists() and not overwrite:
        raise InputError(f"{out}: holds a finished result ({record}); choose another --out, or --overwrite")
    if out.is_dir() and any(out.iterdir()) and not work.exists() and not finished:
        raise InputError(f"{out}: holds other files; choose another --out")


def _begun_here(work: Path) -> bool:
    """Whether a job of ours made the folder: it has a plan, or was killed before it had one and holds nothing."""
    if work.is_symlink() or not work.is_dir():
        return False
    lock = work / _LOCK
    return _has_schema(work / _PLAN, _SCHEMA) or all(path == lock and path.stat().st_size == 0 for path in work.iterdir())


def _has_schema(file: Path, schema: str) -> bool:
    """Whether a file is JSON that says so, in this version or another; whatever else it may be, it is not ours."""
    try:
        found = read_json(file).get("schema") if file.is_file() else None
    except InputError:
        return False
    return str(found).partition("/")[0] == schema.partition("/")[0]


def _empty(work: Path) -> None:
    for path in work.iterdir():
        if path.name == _LOCK:
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
