"""The folder of a run: what lies in it, whose it is, and whether the run in it is over.

What a run makes there:

    recipe.json      the resolved recipe; without run.json beside it, the run is unfinished
    begun.json       what else a session that goes on with it must have the same, or is warned of: processes, data, versions
    data/            prepared rows, removed at the end          start/       LoRA alone: the model it started from, likewise
    log.jsonl        losses and scores, while it goes on        tensorboard/ the same, where TensorBoard is installed
    checkpoints/     to resume from, and to evaluate            nonfinite/   a batch that could not be trained on
    model/           the trained model                          run.json     the record, written last
    .replaced-*      an earlier run, whole, until the one that takes its place is complete
    .lock            held by the session that trains there, and gone with it
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, sync_folder, write_json
from quiver.encoder.schema import validate
from quiver.encoder.training.checkpoints import Checkpoints
from quiver.encoder.training.lock import exclusive_lock, remove_empty
from quiver.encoder.training.log import LOG
from quiver.encoder.training.nonfinite import NONFINITE
from quiver.retrieval.training.recipe import Recipe

logger = logging.getLogger(__name__)

RECIPE, BEGUN, RECORD, MODEL = "recipe.json", "begun.json", "run.json", "model"
DATA, START, CHECKPOINTS, TENSORBOARD = "data", "start", "checkpoints", "tensorboard"

REPORTS = ("report.md", "report.html")
"""What is rendered from a run beside it."""

MADE = (RECIPE, BEGUN, RECORD, MODEL, DATA, START, LOG, CHECKPOINTS, TENSORBOARD, NONFINITE, *REPORTS)
"""All that a run makes in its folder, and all that is ever moved or removed there."""

SCHEMA = "quiver-begun/1"
"""Of ``begun.json``."""

WITHOUT_WEIGHT = frozenset({"name", "description", "source", "cost", "expected", "training.log_every", "training.keep_checkpoints"})
"""Settings of a recipe that no weight of its model depends on: a run goes on with others."""


def refuse_existing(out: Path, *, overwrite: bool) -> None:
    """Say before anything is read that a new run cannot go there.

    Raises:
        InputError: ``out`` holds a run, and ``overwrite`` is not asked for; or holds something by the name of what a run makes
            that is not a run's.
    """
    held = [name for name in MADE if (out / name).exists()]
    if not held:
        return
    if not is_run(out):
        raise InputError(f"{out}: holds {held[0]} already, and not from a training run; choose another --out")
    if not overwrite and (out / RECORD).exists():
        raise InputError(f"{out}: holds a run already; choose another --out, or --overwrite")
    if not overwrite:
        raise InputError(f"{out}: holds an unfinished run; go on with it by --resume, or begin again by --overwrite")


def is_run(out: Path) -> bool:
    """Whether the folder holds a run, complete or not."""
    for name, schema in ((BEGUN, "quiver-begun/"), (RECORD, "quiver-run/")):
        if (out / name).is_file() and str(read_json(out / name).get("schema", "")).startswith(schema):
            return True
    return False


def recipe_of(out: Path) -> Mapping[str, Any] | None:
    """The recipe of the run there, complete or not; None where there is none."""
    if (out / RECORD).is_file():
        return dict(read_json(out / RECORD)["recipe"])
    return read_json(out / RECIPE) if (out / RECIPE).is_file() else None


def refuse_nothing_to_resume(out: Path) -> None:
    """Say before anything is read that there is no run to go on with.

    Raises:
        InputError: There is none, or it is complete.
    """
    if (out / RECORD).exists():
        raise InputError(f"{out}: the run is complete, there is nothing to resume; its model is {out / MODEL}")
    if not (out / BEGUN).exists():
        raise InputError(f"{out}: holds no run to resume; leave --resume out to begin one")


# The record leaves first: a record without its model would be worse than none. The recipe outlives the checkpoints, which a run of
# another recipe must not be resumed from. What says that this is a run leaves last: after a kill half way it can be overwritten, and is
# not taken for somebody's files.
_LEAVING = (RECORD, *(name for name in MADE if name not in (RECORD, RECIPE, BEGUN)), RECIPE, BEGUN)


@contextmanager
def new_run(out: Path) -> Iterator[None]:
    """Room for a new run; an earlier one is moved aside, and put back if the block fails with nothing to resume from.

    Args:
        out: A folder that is there, and that this session has `alone`.

    Raises:
        InputError: ``out`` cannot be written.
    """
    try:
        old = Path(mkdtemp(prefix=".replaced-", dir=out))
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    with ExitStack() as undo:  # in reverse: remove the new, put back the old, remove what held it
        undo.callback(old.rmdir)
        for name in _LEAVING:
            if (out / name).exists():
                (out / name).rename(old / name)
                undo.callback((old / name).rename, out / name)
        undo.callback(_remove_made, out)
        try:
            yield
        finally:
            if (out / RECORD).exists() or Checkpoints(out / CHECKPOINTS).steps() or (out / NONFINITE).exists():
                undo.pop_all()
                if old.exists():
                    remove_empty(old)


@dataclass(frozen=True)
class Beginning:
    """What a run is begun with, as JSON has it.

    Attributes:
        recipe: Resolved.
        facts: ``processes``, and once they are known ``data``: what a session that goes on with the run must have the same.
        about: ``command``, ``device``, ``versions``: what may differ, perhaps with a warning.
    """

    recipe: Mapping[str, Any]
    facts: Mapping[str, Any]
    about: Mapping[str, Any]

    def write(self, out: Path) -> None:
        """Write ``begun.json`` and ``recipe.json``."""
        write_json(out / BEGUN, {"schema": SCHEMA, **self.about, **self.facts})
        write_json(out / RECIPE, self.recipe)


def refuse_other_run(out: Path, now: Beginning) -> None:
    """Say in one line how a run that is to be resumed differs from the one that was begun.

    Args:
        out: Holds ``begun.json``.
        now: Of the session that would resume it.

    Raises:
        InputError: Recipe, data or number of processes differ.
    """
    begun = read_json(out / BEGUN)
    found = [change for key, value in now.facts.items() if key in begun for change in _differences(begun[key], value, key)]
    if (out / RECIPE).exists():  # it is written second
        changes = recipe_changes(read_json(out / RECIPE), now.recipe)
        found = [*(change for change in changes if change[0] not in WITHOUT_WEIGHT), *found]
    if found:
        told = "; ".join(f"{path} was {json.dumps(was)}, is {json.dumps(value)}" for path, was, value in found)
        raise InputError(f"{out}: --resume needs the run as it was begun; {told}")


def warn_of_changes(out: Path, now: Beginning) -> None:
    """Say what may keep a resumed run from ending with the same bits (device, threads, versions), and what is other without that."""
    begun = read_json(out / BEGUN)
    if (out / RECIPE).exists() and (others := [path for path, *_ in recipe_changes(read_json(out / RECIPE), now.recipe)]):
        logger.warning("%s: changed since the run was begun: %s; no weight depends on that", out, ", ".join(others))
    about = ("device", "threads", "versions")
    changed = [path for key in about if key in begun for path, *_ in _differences(begun[key], now.about[key], key)]
    if changed:
        logger.warning("%s: changed since the run was begun: %s; it may not end with the very same weights", out, ", ".join(changed))


def recipe_changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, object, object]]:
    """What differs between two recipes as JSON has them.

    Args:
        was: As a run's folder has it. A setting that it lacks, for the version that wrote it had none, has its default.
        now: A resolved recipe.

    Returns:
        Of each setting that differs its dotted path, its value then, its value now.
    """
    known, _ = validate(Recipe, was)
    then, since = json.loads(json.dumps([was if known is None else known.model_dump(), now]))
    return list(_differences(then, since))


def _differences(was: object, now: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    """The dotted paths at which two JSON values differ."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*was, *now]):
            yield from _differences(was.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif was != now:
        yield path, was, now


def finish_run(out: Path, record: Mapping[str, Any]) -> None:
    """Make a run complete: its model lies under ``.model-unfinished``, and all that it needs no more is removed."""
    shutil.rmtree(out / MODEL, ignore_errors=True)  # of a session that was killed right here
    unfinished_model(out).rename(out / MODEL)
    sync_folder(out)
    write_json(out / RECORD, record)
    remove_leftovers(out)


def remove_leftovers(out: Path) -> None:
    """Remove what a complete run needs no more; it is there where the session was killed before it had done that itself."""
    for left in (out / DATA, out / START, *out.glob(".replaced-*")):
        shutil.rmtree(left, ignore_errors=True)
    for half_written in (path for name in (RECIPE, BEGUN, RECORD, LOG) for path in out.glob(f".{name}.*.tmp")):
        half_written.unlink()


def remove_run(out: Path) -> None:
    """Remove a run and nothing else; the folder too if nothing else is in it.

    Raises:
        InputError: Another session trains there.
    """
    with exclusive_lock(out):
        remove_leftovers(out)
        _remove_made(out)
    remove_empty(out)


def unfinished_model(out: Path) -> Path:
    """Where the model is written before `finish_run` gives it its name."""
    return out / ".model-unfinished"


def _remove_made(out: Path) -> None:
    for path in (unfinished_model(out), *(out / name for name in _LEAVING)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
