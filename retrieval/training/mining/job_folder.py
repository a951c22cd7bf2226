"""Output folder of a resumable job: finished parts are saved, and a record marks the finished result.

    OUT/.quiver-work/plan.json      settings of the job; a job with other settings must not resume it
    OUT/.quiver-work/000012.part    result of one part with a checksum, written by one rename
    OUT/...                         the result; its record is written last, then .quiver-work/ is deleted

A killed job that is started again with the same settings computes the missing parts and gives the same result. Only files that such a job
has written are deleted or replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from quiver.encoder.environment import installed_version
from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, replacing, write_json

logger = logging.getLogger(__name__)

WORK = ".quiver-work"
"""Folder of an unfinished job inside its output folder."""

_PLAN, _LOCK = "plan.json", "lock"
_SCHEMA = "quiver-work/1"


class JobFolder:
    """An unfinished job in an output folder, see `open_job`."""

    def __init__(self, out: Path, record: str, schema: str) -> None:
        self.out = out
        self._work = out / WORK
        self._record = record
        self._schema = schema
        self._started = time.perf_counter()

    def agree(self, **settings: object) -> None:
        """Record settings of the job, or compare them with the recorded ones.

        Raises:
            InputError: A setting differs; names it.
        """
        path = self._work / _PLAN
        plan = read_json(path) if path.is_file() else {}
        settings = json.loads(json.dumps(settings))  # tuples become lists, as in the file
        for name, value in settings.items():
            if name in plan and plan[name] != value:
                raise InputError(
                    f"{self.out}: holds an unfinished run with another {name} ({plan[name]} then, {value} now); use the same settings to "
                    "resume it, or --overwrite to start over"
                )
        if not settings.keys() <= plan.keys():
            write_json(path, {"schema": _SCHEMA, **plan, **settings})

    def fresh(self, name: str) -> Path:
        """Create an empty folder inside the work folder; it is deleted when the job is finished."""
        folder = self._work / name
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        return folder

    def has(self, part: int) -> bool:
        """Test whether a part is finished; a damaged one is not."""
        path = self._path(part)
        if not path.is_file():
            return False
        content = path.read_bytes()
        if content[:32] == hashlib.sha256(content[32:]).digest():
            return True
        logger.warning("%s: damaged; computing this part again", path)
        return False

    def write(self, part: int, content: bytes) -> None:
        """Save the result of a part by one rename.

        Raises:
            InputError: The file cannot be written.
        """
        try:
            with replacing(self._path(part)) as temporary:
                temporary.write_bytes(hashlib.sha256(content).digest() + content)
        except OSError as error:
            raise InputError(f"{self._work}: cannot be written ({error.strerror}); free space and run the command again") from error

    def read(self, part: int) -> bytes:
        """Return the result of a part."""
        return self._path(part).read_bytes()[32:]

    def finish(self, content: Mapping[str, Any], *, command: str | None, packages: Sequence[str]) -> dict[str, Any]:
        """Write the record and delete the work folder.

        Args:
            content: Settings and results of the job.
            command: Command line to record.
            packages: Distributions whose versions are recorded.

        Returns:
            The content of the record.
        """
        record = {
            "schema": self._schema,
            "command": command,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {name: installed_version(name) for name in packages},
            **content,
            "seconds": round(time.perf_counter() - self._started, 1),
        }
        write_json(self.out / self._record, record)
        shutil.rmtree(self._work)
        return record

    def _path(self, part: int) -> Path:
        return self._work / f"{part:06d}.part"


@contextmanager
def open_job(out: Path, record: str, schema: str, *, settings: Mapping[str, object], overwrite: bool) -> Iterator[JobFolder]:
    """Start a job in a folder, or resume the unfinished one there.

    Args:
        out: The folder; created if missing. It is unchanged if an error occurs before the first part is finished.
        record: Name of the record of a finished job.
        schema: Value of ``schema`` in the record.
        settings: Settings that must be equal to resume a job, as JSON values.
        overwrite: Start over; a finished result is replaced once the new one is complete.

    Raises:
        InputError: The folder holds a finished job, an unfinished one with other settings, or other files; it cannot be written; or another
            process uses it.
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
        raise InputError(f"{out}: another process is using this folder; wait for it, or choose another --out") from error
    try:
        if overwrite:
            _empty(work)
        folder = JobFolder(out, record, schema)
        folder.agree(record=record, **settings)
        yield folder
    finally:
        if work.is_dir() and not any(work.glob("*.part")):
            shutil.rmtree(work)
            if made and not any(out.iterdir()):
                out.rmdir()
        lock.release()


def _refuse_others(out: Path, record: str, schema: str, *, overwrite: bool) -> None:
    """Check, before anything is written, that the folder can be used."""
    work = out / WORK
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; --out must name a folder")
    if (work.exists() or work.is_symlink()) and not _begun_here(work):
        raise InputError(f"{out}: holds {WORK}, which is not from an unfinished run; choose another --out")
    finished = _has_schema(out / record, schema)
    if finished and not work.exists() and not overwrite:
        raise InputError(f"{out}: holds a finished result ({record}); choose another --out, or add --overwrite")
    if out.is_dir() and any(out.iterdir()) and not work.exists() and not finished:
        raise InputError(f"{out}: holds other files; choose another --out")


def _begun_here(work: Path) -> bool:
    """Whether a job made the folder: it has a plan, or is empty because the job was killed before it wrote one."""
    if work.is_symlink() or not work.is_dir():
        return False
    lock = work / _LOCK
    return _has_schema(work / _PLAN, _SCHEMA) or all(path == lock and path.stat().st_size == 0 for path in work.iterdir())


def _has_schema(file: Path, schema: str) -> bool:
    """Whether a file is JSON with this schema, in any version."""
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
