"""A folder of results: whole or not at all.

``results.json`` holds ``schema``, ``ndcg@10`` (the headline, null where an average would lack a member) and the fields of
``quiver.eval.results.Results``. Beside it are the TREC runs under ``runs/``, the scores of every query under ``per_query/`` and the queries
themselves under ``queries/``. It is written last and names the others with their checksums, so that where it is, all is there.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from quiver.encoder.errors import InputError
from quiver.encoder.files import file_sha256, sync_folder, write_json, write_text
from quiver.eval.decoding import decode
from quiver.eval.results import HEADLINE, CollectionResult, FileReference, Results, check_collection, check_results

logger = logging.getLogger(__name__)

SCHEMA = "quiver-results/2"
"""Name and version of the format, the value of ``schema`` in the file."""

FILE = "results.json"
"""The file whose presence says that a folder of results is complete."""

REPORTS = ("report.md", "report.html")
"""Reports that ``quiver evaluate`` writes beside the results."""

# Where results are made before they are published: a hidden folder inside the target.
_STAGE = ".unfinished"
_PLAN = "plan.json"
_FINISHED = "finished"
_LOCK = "lock"


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
    content = _content(path)
    schema = content.pop("schema", None)
    if schema != SCHEMA:
        raise InputError(
            f"{path}: the schema is {schema!r}, this version reads {SCHEMA!r}; it is not a result of quiver evaluate, or of another version"
        )
    headline = content.pop(HEADLINE, None)
    results = decode(Results, content, str(path))
    check_results(results, str(path))
    if headline != results.headline:
        raise InputError(f"{path}: {HEADLINE} is {headline} but the collections say {results.headline}; the file was changed by hand")
    for collection in results.collections:
        for reference in _references(collection):
            _check(Path(folder), reference)
    return results


def _content(path: Path) -> dict[str, Any]:
    """The JSON object of a file, of which nothing else is known yet; empty where it is something else."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text, parse_constant=partial(_refuse_constant, path))
        if "\\ud" in text.lower():  # half of a surrogate pair is legal JSON and no text: every report would fail on it
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except InputError:
        raise
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON ({error.msg}); the file is damaged, run quiver evaluate again") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8; the file is damaged, run quiver evaluate again") from error
    except (ValueError, RecursionError) as error:  # an unpaired surrogate, a number of 5,000 digits, a thousand brackets
        raise InputError(f"{path}: cannot be read ({str(error)[:80]}); the file is damaged, run quiver evaluate again") from error
    return content if isinstance(content, dict) else {}


class Stage:
    """Results that are being made: the private folder their files go into, and the collections that are finished.

    Attributes:
        folder: Where runs and scores by query are written, under the names that ``results.json`` gives them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._finished = folder / _FINISHED

    def keep(self, result: CollectionResult) -> None:
        """Note a collection as finished: after a kill it is not scored again."""
        write_json(self._finished / f"{result.key}.json", asdict(result))

    def finished(self, key: str, conditions: Mapping[str, object]) -> CollectionResult | None:
        """A collection that an evaluation with the same plan finished before it was stopped.

        Args:
            key: The collection with its split.
            conditions: Fields of the result with the values they would have now: the data's checksum, the policy. Under others the
                result is not this one.

        Returns:
            Its result, if it is there and its files are whole.
        """
        path = self._finished / f"{key}.json"
        if not path.is_file():
            return None
        try:
            result = decode(CollectionResult, _content(path), str(path))
            check_collection(result, str(path))
            for reference in _references(result):
                _check(self.folder, reference)
        except InputError as error:
            logger.warning("%s cannot be taken over, it is scored again (%s)", key, error)
            return None
        changed = [name for name, value in conditions.items() if getattr(result, name) != value]
        if changed:
            logger.warning("%s was finished under another %s, it is scored again", key, ", ".join(changed))
        return None if changed else result

    def any_finished(self) -> bool:
        """Whether there is something to take over."""
        return any(self._finished.glob("*.json"))


@contextmanager
def results_folder(folder: Path, plan: Mapping[str, object], *, overwrite: bool = False) -> Iterator[Stage]:
    """A private folder to write results into; its files appear in ``folder`` when the block ends without an error.

    ``results.json`` moves last, and an old one goes first: after a kill at any instruction a reader finds the old results,
    the new ones, or none, never a mixture. Whatever else the folder holds stays. What was finished when the block ends with an
    error, or the process is killed, waits in ``.unfinished`` for the next evaluation with an equal plan.

    Args:
        folder: Where the results will be.
        plan: Everything but the data that decides them, as JSON; another plan starts anew.
        overwrite: Replace the results that are there.

    Raises:
        InputError: ``refuse_existing`` has an objection, or the folder cannot be written.
    """
    refuse_existing(folder, overwrite=overwrite)
    created = not folder.exists()
    stage = Stage(folder / _STAGE)
    done = False
    try:
        with _locked(stage.folder):
            try:
                _prepare(stage, plan, overwrite=overwrite)
                yield stage
                _publish(stage.folder, folder)
                done = True
            finally:
                if done or not stage.any_finished():
                    _remove(stage.folder)
    finally:
        if created and folder.exists() and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """The stage, made if it is not there, for one process alone; the lock goes with the process, however that ends."""
    lock = FileLock(root / _LOCK)
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(f"{root.parent}: another evaluation is writing here; wait for it, or name another folder") from error
    except OSError as error:
        raise InputError(f"{root.parent}: cannot be written ({error.strerror})") from error
    try:
        if not (root / _LOCK).exists():  # the stage of another evaluation, which was cleared between the two steps
            raise InputError(f"{root.parent}: another evaluation was writing here until now; run this one again")
        yield
    finally:
        lock.release()


def _prepare(stage: Stage, plan: Mapping[str, object], *, overwrite: bool) -> None:
    """Go on with a stage of the same plan; start anew otherwise, but never at the price of what another has finished.

    Raises:
        InputError: Another plan has finished collections here and ``overwrite`` is off, or the folder cannot be written.
    """
    content = json.dumps(plan, indent=2, sort_keys=True)
    path = stage.folder / _PLAN
    before = path.read_text(encoding="utf-8") if path.is_file() else None
    if before == content:
        logger.info("%s: going on with an evaluation that was stopped", stage.folder.parent)
        return
    if before is not None and stage.any_finished() and not overwrite:
        raise InputError(
            f"{stage.folder.parent}: holds an evaluation that was stopped, of other {_differing(before, plan)}; finish it by its own "
            "command, name another folder, or say overwrite to throw it away"
        )
    try:
        for entry in stage.folder.iterdir():
            if entry.name != _LOCK:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        (stage.folder / _FINISHED).mkdir()
    except OSError as error:
        raise InputError(f"{stage.folder.parent}: cannot be written ({error.strerror})") from error
    write_text(path, content)


def _differing(before: str, plan: Mapping[str, object]) -> str:
    """The parts of a plan that an older one has otherwise."""
    try:
        old = json.loads(before)
    except ValueError:
        return "settings"
    new = json.loads(json.dumps(plan))
    return ", ".join(name for name in new if not isinstance(old, dict) or old.get(name) != new[name])


def _remove(root: Path) -> None:
    """Clear a stage: out of the way in one step, so that the next evaluation never meets half of it."""
    gone = root.with_name(f"{root.name}-{uuid.uuid4().hex[:12]}")
    root.rename(gone)
    shutil.rmtree(gone)


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
    old = _named_files(folder)
    (folder / FILE).unlink(missing_ok=True)
    sync_folder(folder)
    # What only the old results name, and the reports of them, would otherwise stand beside the new ones.
    for path in (*old, *(folder / name for name in REPORTS)):
        path.unlink(missing_ok=True)
    own = {stage / _PLAN, stage / _LOCK, *(stage / _FINISHED).iterdir()}
    files = sorted((path for path in stage.rglob("*") if path.is_file() and path not in own), key=lambda path: (path.name == FILE, path))
    for path in files:
        target = folder / path.relative_to(stage)
        target.parent.mkdir(exist_ok=True)
        path.replace(target)
        sync_folder(target.parent)


def _named_files(folder: Path) -> list[Path]:
    """The files that the results in a folder name; none where there are no sound results."""
    if not (folder / FILE).is_file():
        return []
    try:
        results = read_results(folder)
    except InputError:
        return []
    return [folder / reference.file for collection in results.collections for reference in _references(collection)]


def _references(collection: CollectionResult) -> Iterator[FileReference]:
    files = [collection.run, collection.per_query, collection.query_texts]
    files += [file for baseline in collection.baselines for file in (baseline.run, baseline.per_query)]
    yield from (reference for reference in files if reference is not None)


def _check(folder: Path, reference: FileReference) -> None:
    path = folder / reference.file
    if not path.is_file():
        raise InputError(f"{path}: {FILE} names this file, but it is missing; copy the whole folder, or run quiver evaluate again")
    if file_sha256(path) != reference.sha256:
        raise InputError(f"{path}: not the file that was scored, its sha256 differs from {FILE}; run quiver evaluate again")


def _refuse_constant(path: Path, name: str) -> float:
    raise InputError(f"{path} holds {name}, which is not JSON; the file is damaged, run quiver evaluate again")
