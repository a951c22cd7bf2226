"""The folder of a pretraining run: what lies in it, whose it is, and whether the run in it is over.

What a run makes there:

    recipe.json      the resolved recipe; without run.json beside it, the run is unfinished
    begun.json       what else a session that goes on with it must have the same, or is warned of: processes, corpus; device, versions
    tokenizer/       the vocabulary, where it was learnt for this run
    corpus/          token ids, see `quiver.encoder.pretraining.corpus`
    log.jsonl        losses, while it goes on          nonfinite/   rows that could not be trained on
    checkpoints/     to resume from                    model/       the masked language model
    run.json         the record, written last          .lock        held by the session that runs there
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, sync_folder, write_json
from quiver.encoder.training.log import LOG, NONFINITE

logger = logging.getLogger(__name__)

RECIPE, BEGUN, RECORD, MODEL = "recipe.json", "begun.json", "run.json", "model"
TOKENIZER, CORPUS, CHECKPOINTS = "tokenizer", "corpus", "checkpoints"

MADE = (RECIPE, BEGUN, RECORD, MODEL, TOKENIZER, CORPUS, LOG, CHECKPOINTS, NONFINITE)
"""All that a run makes in its folder."""

SCHEMA = "quiver-pretraining/1"
"""Of ``run.json`` and ``begun.json``."""

WITHOUT_WEIGHT = frozenset(
    {"name", "description", "source", "cost", "expected", "training.log_every", "training.keep_checkpoints", "training.save_every"}
)
"""Settings of a recipe that no weight of its model depends on: a run goes on with others."""


def refuse_existing(out: Path) -> None:
    """Say before anything is read that a new run cannot go there.

    Raises:
        InputError: ``out`` holds a run, or something by the name of what a run makes.
    """
    held = [name for name in MADE if (out / name).exists()]
    if not held:
        return
    if (out / RECORD).exists():
        raise InputError(f"{out}: holds a run already; choose another --out")
    if (out / RECIPE).exists():
        raise InputError(f"{out}: holds an unfinished run; go on with it by --resume, or choose another --out")
    raise InputError(f"{out}: holds {held[0]} already, and not from a pretraining run; choose another --out")


def refuse_nothing_to_resume(out: Path, recipe: Mapping[str, Any]) -> None:
    """Say before anything is read that there is no run to go on with, or another.

    Args:
        out: Folder of the run.
        recipe: Resolved, of the session that would resume it.

    Raises:
        InputError: There is none, it is complete, or its recipe differs in more than `WITHOUT_WEIGHT`.
    """
    if (out / RECORD).exists():
        raise InputError(f"{out}: the run is complete, there is nothing to resume; its model is {out / MODEL}")
    if not (out / RECIPE).exists():
        raise InputError(f"{out}: holds no run to resume; leave --resume out to begin one")
    changes = _differences(read_json(out / RECIPE), json.loads(json.dumps(recipe)))
    _refuse(out, [change for change in changes if change[0] not in WITHOUT_WEIGHT])


def refuse_other_facts(out: Path, facts: Mapping[str, Any]) -> None:
    """Say in one line how corpus or processes differ from those that a run was begun with.

    Raises:
        InputError: They differ.
    """
    if (out / BEGUN).exists():
        begun = read_json(out / BEGUN)
        _refuse(out, list(_differences({key: begun.get(key) for key in facts}, json.loads(json.dumps(facts)))))


def warn_of_changes(out: Path, about: Mapping[str, Any]) -> None:
    """Say what may keep a resumed run from ending with the same bits.

    Args:
        out: Folder of the run.
        about: Device, threads and versions of the session that resumes it.
    """
    if not (out / BEGUN).exists():
        return
    begun = read_json(out / BEGUN)
    changed = [path for path, *_ in _differences({key: begun.get(key) for key in about}, json.loads(json.dumps(about)))]
    if changed:
        logger.warning("%s: changed since the run was begun: %s; it may not end with the very same weights", out, ", ".join(changed))


def _refuse(out: Path, changes: list[tuple[str, object, object]]) -> None:
    if changes:
        told = "; ".join(f"{path} was {json.dumps(was)}, is {json.dumps(value)}" for path, was, value in changes)
        raise InputError(f"{out}: --resume needs the run as it was begun; {told}")


def _differences(was: object, now: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    """The dotted paths at which two JSON values differ; lists of equal length are gone through item by item."""
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        was, now = ({str(place): value for place, value in enumerate(held)} for held in (was, now))
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*was, *now]):
            yield from _differences(was.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif was != now:
        yield path, was, now


def unfinished(out: Path, name: str) -> Path:
    """Where a folder of the run is written before `give_name` gives it its name."""
    return out / f".{name}-unfinished"


def give_name(out: Path, name: str) -> None:
    """Make a folder that was written under `unfinished` appear, whole."""
    shutil.rmtree(out / name, ignore_errors=True)  # of a session that was killed before it had written what says that it is done
    unfinished(out, name).rename(out / name)
    sync_folder(out)


def finish_run(out: Path, record: Mapping[str, Any]) -> None:
    """Make a run complete; its model lies under `unfinished`."""
    give_name(out, MODEL)
    write_json(out / RECORD, record)
