"""A folder of results: whole or not at all.

``results.json`` holds ``schema``, ``ndcg@10`` (the headline, null where a collection was not scored by it) and the fields of
``eval.results.Results``. Beside it are the TREC runs under ``runs/`` and the scores of every query under ``per_query/``. It is
written last and names the others with their checksums, so that where it is, all is there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp

from encoder.errors import InputError
from encoder.files import sync_folder, write_json
from eval.decoding import decode
from eval.results import HEADLINE, FileReference, Results
from retrieval.files import file_sha256

SCHEMA = "quiver-results/1"
"""Name and version of the format, the value of ``schema`` in the file."""

FILE = "results.json"
"""The file whose presence says that a folder of results is complete."""


def write_results(results: Results, folder: Path) -> Path:
    """Write ``results.json`` into an existing folder, whole or not at all; what it names must be there already.

    Returns:
        The file.
    """
    content = {"schema": SCHEMA, HEADLINE: results.headline, **asdict(results)}
    write_json(folder / FILE, content)
    return folder / FILE


def read_results(folder: str | Path) -> Results:
    """Read a folder of results and check that it is whole: format, types, headline, and the checksum of every file.

    Raises:
        InputError: There is no ``results.json`` (the evaluation did not finish, or its output is elsewhere), it is damaged or
            of another program, or a file it names is missing or has changed.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise InputError(f"{folder}: no {FILE} here: the evaluation did not finish, or wrote elsewhere; run quiver evaluate again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON ({error.msg}); the file is damaged, run quiver evaluate again") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8; the file is damaged, run quiver evaluate again") from error
    schema = content.pop("schema", None) if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise InputError(
            f"{path}: the schema is {schema!r}, this version reads {SCHEMA!r}; it is not a result of quiver evaluate, or of another version"
        )
    headline = content.pop(HEADLINE, None)
    results = decode(Results, content, str(path))
    if headline != results.headline:
        raise InputError(f"{path}: {HEADLINE} is {headline} but the collections say {results.headline}; the file was changed by hand")
    for reference in _references(results):
        _check(Path(folder), reference)
    return results


@contextmanager
def results_folder(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A private folder to write results into; its files appear in ``folder`` when the block ends without an error.

    ``results.json`` moves last, and an old one goes first: after a kill at any instruction a reader finds the old results,
    the new ones, or none, never a mixture. Whatever else the folder holds stays. Only a process that is killed outright leaves
    its private folder behind, hidden and called ``.unfinished-...``.

    Raises:
        InputError: ``refuse_existing`` has an objection, or the folder cannot be written.
    """
    refuse_existing(folder, overwrite=overwrite)
    created = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stage = Path(mkdtemp(prefix=".unfinished-", dir=folder))
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror})") from error
    try:
        yield stage
        _publish(stage, folder)
    finally:
        shutil.rmtree(stage)
        if created and not any(folder.iterdir()):
            folder.rmdir()


def refuse_existing(folder: Path, *, overwrite: bool) -> None:
    """Say early that the output cannot go there.

    Raises:
        InputError: It is not a folder, or it holds results already and ``overwrite`` is off.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: cannot hold results, it is a file; name a folder")
    if (folder / FILE).exists() and not overwrite:
        raise InputError(f"{folder}: holds results already; name another folder, or say overwrite")


def _publish(stage: Path, folder: Path) -> None:
    (folder / FILE).unlink(missing_ok=True)
    sync_folder(folder)
    files = sorted((path for path in stage.rglob("*") if path.is_file()), key=lambda path: (path.name == FILE, path))
    for path in files:
        target = folder / path.relative_to(stage)
        target.parent.mkdir(exist_ok=True)
        path.replace(target)
        sync_folder(target.parent)


def _references(results: Results) -> Iterator[FileReference]:
    for collection in results.collections:
        runs = [collection.run, collection.per_query, *(baseline.run for baseline in collection.baselines)]
        yield from (reference for reference in runs if reference is not None)


def _check(folder: Path, reference: FileReference) -> None:
    path = folder / reference.file
    if not path.is_file():
        raise InputError(f"{path}: {FILE} names this file, but it is missing; copy the whole folder, or run quiver evaluate again")
    if file_sha256(path) != reference.sha256:
        raise InputError(f"{path}: not the file that was scored, its sha256 differs from {FILE}; run quiver evaluate again")


def _refuse_constant(name: str) -> float:
    raise InputError(f"{FILE} holds {name}, which is not JSON; the file is damaged, run quiver evaluate again")
