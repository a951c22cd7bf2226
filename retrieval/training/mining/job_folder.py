"""Output folder of mining and teacher scores: parts in ``OUT/.quiver-work`` (`quiver.encoder.work_folder`), then the result and its record.

A killed job that is started again with the same settings computes the missing parts and gives the same result. The record is written last,
then the work folder is removed. Only files that such a job has written are deleted or replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from quiver.encoder.environment import installed_version
from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, write_json
from quiver.encoder.work_folder import WorkFolder, open_work

WORK = ".quiver-work"
"""Folder of an unfinished job inside its output folder."""


def part_name(number: int) -> str:
    """Name of a part in the work folder."""
    return f"{number:06d}"


@contextmanager
def open_job(out: Path, record: str, schema: str, *, settings: Mapping[str, object], overwrite: bool) -> Iterator[WorkFolder]:
    """Start a job in a folder, or resume the unfinished one there."""
    begun = (out / WORK).exists()
    if not begun and _is_finished(out / record, schema):
        if not overwrite:
            WorkFolder(out / WORK).remove_leftovers()
            raise InputError(f"{out}: holds a finished result ({record}); choose another --out, or add --overwrite")
    elif not begun and out.is_dir() and any(not path.name.startswith(WORK) for path in out.iterdir()):
        raise InputError(f"{out}: holds other files; choose another --out")
    with open_work(out, WORK, {"record": record, **settings}, doing="working there", overwrite=overwrite) as work:
        yield work


def finish_job(
    work: WorkFolder, record: str, schema: str, content: Mapping[str, Any], *, seconds: float, command: str | None, packages: Sequence[str]
) -> dict[str, Any]:
    """Write the record of a job and remove its work folder."""
    whole = {
        "schema": schema,
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {name: installed_version(name) for name in packages},
        **content,
        "seconds": round(seconds, 1),
    }
    write_json(work.path.parent / record, whole)
    work.remove()
    return whole


def _is_finished(file: Path, schema: str) -> bool:
    """Whether a file is the record of a job of this kind, in any version."""
    try:
        found = read_json(file).get("schema") if file.is_file() else None
    except InputError:
        return False
    return str(found).partition("/")[0] == schema.partition("/")[0]
