"""Output folder of mining and teacher scores: parts in ``OUT/.quiver-work`` (`quiver.encoder.work_folder`), then the result and its record.

A killed job that is started again with the same settings computes the missing parts and gives the same result. The record is written last,
then the work folder is removed. Only files that such a job has written are deleted or replaced.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from quiver.encoder.environment import installed_version
from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, write_json
from quiver.encoder.work_folder import WorkFolder, open_work

WORK = ".quiver-work"  # folder of an unfinished job inside its output folder

_PACKAGES = ("quiver-retrieval", "torch", "numpy", "faiss-cpu", "sentence-transformers")


class Job:
    """A job with numbered parts; ``agree`` and ``scratch`` are those of its `WorkFolder`."""

    def __init__(self, work: WorkFolder, record: str, schema: str) -> None:
        self._work, self._record, self._schema = work, record, schema
        self.agree, self.scratch = work.agree, work.scratch
        self._started = time.perf_counter()

    def missing(self, parts: Iterable[int]) -> list[int]:
        """Return those parts that have no result."""
        return [part for part in parts if self._work.find(f"{part:06d}") is None]

    def save(self, part: int, content: bytes) -> None:
        """Save the result of a part."""
        self._work.save(f"{part:06d}", content)

    def read(self, part: int) -> bytes:
        """Return the result of a part."""
        return self._work.read(f"{part:06d}")

    def finish(self, content: Mapping[str, Any], command: str | None) -> dict[str, Any]:
        """Write the record and remove the work folder."""
        whole = {
            "schema": self._schema,
            "command": command,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {name: installed_version(name) for name in _PACKAGES},
            **content,
            "seconds": round(time.perf_counter() - self._started, 1),
        }
        write_json(self._work.path.parent / self._record, whole)
        self._work.remove()
        return whole


@contextmanager
def open_job(out: Path, record: str, schema: str, *, settings: Mapping[str, object], overwrite: bool) -> Iterator[Job]:
    """Start a job in a folder, or resume the unfinished one there; a finished job and other files are refused."""
    if not (out / WORK).exists() and out.is_dir():
        try:
            found = read_json(out / record).get("schema") if (out / record).is_file() else None
        except InputError:
            found = None
        if str(found).partition("/")[0] == schema.partition("/")[0]:  # in any version
            if not overwrite:
                WorkFolder(out / WORK).remove_leftovers()
                raise InputError(f"{out}: holds a finished result ({record}); choose another --out, or add --overwrite")
        elif any(not path.name.startswith(WORK) for path in out.iterdir()):
            raise InputError(f"{out}: holds other files; choose another --out")
    with open_work(out, WORK, {"record": record, **settings}, doing="working there", overwrite=overwrite) as work:
        yield Job(work, record, schema)
