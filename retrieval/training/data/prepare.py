"""Training rows made ready under a run's folder: whole or not there, once for all processes of a run, and found again by a later one.

``work/<key>`` holds the table of `retrieval.training.data.table` and ``rows.json``. The key is taken over the section and over the size
and time of all files that it reads: equal keys, equal rows, as far as can be told without reading them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home, file_sha256, read_json, sync_folder, write_json
from quiver.retrieval.data.corpus import find_jsonl, find_split
from quiver.retrieval.data.docstrings import Pair, mine, split_by_module
from quiver.retrieval.progress import progress_bar
from quiver.retrieval.training.data.build import Built, build_pairs, build_table
from quiver.retrieval.training.data.rows import RowReader, TrainingRows, open_view
from quiver.retrieval.training.data.sources import count_rows, source_files
from quiver.retrieval.training.data.table import Table
from quiver.retrieval.training.sections import STDLIB_DOCSTRINGS, DataSection

logger = logging.getLogger(__name__)

HELD_OUT = 0.15
"""Share of the mined pairs that training never sees: what quickstart is scored on."""

RECORD = "rows.json"
"""What is written last: without it a folder is unfinished."""

_FAMILY = "quiver-rows/"
_SCHEMA = f"{_FAMILY}2"


def prepare_rows(data: DataSection, work: Path, *, seed: int, progress: bool = False) -> TrainingRows:
    """Read the rows that a recipe names into ``work``, or take them over if they are there.

    The rows are streamed: what they take in memory does not grow with their number, but for the hashes of ids (16 bytes each while they
    are sorted). Where several processes call this at once, one reads and the others wait and take what it made.

    Args:
        data: Which rows, and what of them.
        work: Folder of the run; made where it is missing. On one machine all processes name the same.
        seed: Of the shuffling, of the negatives that are drawn, and of what is held out of ``docstrings:stdlib``.
        progress: Show a bar of the rows and texts read.

    Raises:
        InputError: A source is missing or cannot be read, a row is malformed, an id has no text, no row is left, or ``work`` cannot be
            written. Names file and line.
    """
    seeded = data.shuffle or data.negatives == "random" or STDLIB_DOCSTRINGS in data.train
    key = _sum([data.model_dump(), seed if seeded else None, _stamps(data)])

    def build(folder: Path) -> Built:
        if STDLIB_DOCSTRINGS in data.train:
            pairs, _ = split_by_module(mine(progress=progress), held_out=HELD_OUT, seed=seed)
            return build_pairs(data, pairs, folder, seed=seed)
        with progress_bar("reading rows", count_rows(_sources(data)) if progress else 0, enabled=progress) as advance:
            return build_table(data, folder, seed=seed, advance=advance)

    return _open(_made(work, key, build), seed=seed if data.negatives == "random" else None, scored=bool(data.score_fields))


def discard_rows(work: Path) -> None:
    """Remove what `prepare_rows` has made in a folder, and the folder if nothing else is in it."""
    if not work.is_dir():
        return
    for path in work.iterdir():
        if str(_record(path).get("schema")).startswith(_FAMILY):
            shutil.rmtree(path)
            (work / f".{path.name}.lock").unlink(missing_ok=True)
    if not any(work.iterdir()):
        work.rmdir()


def rows_of_pairs(pairs: Sequence[Pair], work: Path) -> TrainingRows:
    """Mined pairs as training rows, query and function, in their order.

    Args:
        pairs: At least one.
        work: As `prepare_rows` has it.

    Raises:
        InputError: There is no pair, or ``work`` cannot be written.
    """
    key = _sum([[pair.query, pair.code] for pair in pairs])
    section = DataSection(train=(STDLIB_DOCSTRINGS,))
    return _open(_made(work, key, lambda folder: build_pairs(section, pairs, folder, seed=0)), seed=None, scored=False)


def _made(work: Path, key: str, build: Callable[[Path], Built]) -> Path:
    """The folder of a key, built unless it is there; who comes while another builds waits for it."""
    target = work / key
    try:
        work.mkdir(parents=True, exist_ok=True)
        with FileLock(work / f".{key}.lock"):
            if not _whole(target):
                _build(target, build)
    except OSError as error:
        raise InputError(f"{work}: cannot be written ({error.strerror or error})") from error
    return target


def _build(target: Path, build: Callable[[Path], Built]) -> None:
    """Build beside the target and put it in its place."""
    # Whoever holds the lock is alone: what lies here under the key is what a killed process has left, or is damaged.
    for left in (target, *target.parent.glob(f".{target.name}.*.tmp")):
        shutil.rmtree(left, ignore_errors=True)
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    folder.mkdir()
    try:
        built = build(folder)
        files = sorted(folder.iterdir())
        for file in files:
            with file.open("rb") as written:
                os.fsync(written.fileno())
        sums = {file.name: file_sha256(file) for file in files}
        write_json(folder / RECORD, {"schema": _SCHEMA, **built._asdict(), "files": sums})
        folder.replace(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    logger.info("%s: %d rows prepared, %d skipped", target, built.rows, built.skipped)


def _record(folder: Path) -> Mapping[str, Any]:
    """What is written last into a folder of rows; empty where it is not there, or is no such record."""
    try:
        return read_json(folder / RECORD)
    except InputError:
        return {}


def _whole(folder: Path) -> bool:
    """Whether a folder is there, and is what was made, to the byte."""
    if not (folder / RECORD).is_file():
        return False
    record = _record(folder)
    sums = record.get("files", {})
    sound = ((folder / name).is_file() and file_sha256(folder / name) == known for name, known in sums.items())
    whole = record.get("schema") == _SCHEMA and all(sound)
    if not whole:
        logger.warning("%s: damaged, or made by another version; the rows are read again", folder)
    return whole


def _open(folder: Path, *, seed: int | None, scored: bool) -> TrainingRows:
    record = read_json(folder / RECORD)
    reader = RowReader(Table(folder), record["documents"], seed=seed)
    dataset = open_view(folder, reader)
    return TrainingRows(dataset, record["documents"], scored, record["sha256"], record["skipped"], record["copies"], reader)


def _sources(data: DataSection) -> list[str]:
    """The sources that rows or texts by id are read from, one by one; none where others read them."""
    if STDLIB_DOCSTRINGS in data.train or data.format == "beir":
        return []
    return [source for source in (*data.train, data.queries, data.documents) if source is not None]


def _stamps(data: DataSection) -> list[object]:
    """What tells that a source has changed: of each file its path, size and time; the version of the interpreter."""
    if STDLIB_DOCSTRINGS in data.train:
        return [platform.python_version()]
    if data.format == "beir":
        folders = [expand_home(folder) for folder in data.train]
        files = [file for folder in folders for file in (*_texts(folder), find_split(folder, data.split))]
    else:
        files = [file for source in _sources(data) for file in source_files(source)]
    return [_stamp(file) for file in files]


def _texts(folder: Path) -> tuple[Path, Path]:
    return find_jsonl(folder, "corpus"), find_jsonl(folder, "queries")


def _stamp(file: Path) -> list[object]:
    try:
        found = file.stat()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    return [str(file.resolve()), found.st_size, found.st_mtime_ns]


def _sum(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()[:32]
