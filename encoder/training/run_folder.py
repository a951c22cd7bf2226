"""The folder of a training run, its checkpoints and its record.

Every kind of run (retrieval, fine-tuning, pretraining) uses these names:

    recipe.json      resolved recipe; without run.json beside it, the run is unfinished
    begun.json       processes, data, device, threads and versions of the run; a resumed session is compared with them
    data/            prepared rows; deleted at the end              start/       initial model of a LoRA run; deleted at the end
    tokenizer/       vocabulary trained for a pretraining run       corpus/      token ids of a pretraining run
    log.jsonl        losses and scores                              tensorboard/ the same, where TensorBoard is installed
    checkpoints/     states to resume from, each sealed             nonfinite/   batches with a non-finite loss or gradient
    model/           the trained model                              run.json     the record, written last
    .replaced-*      an earlier run that --overwrite replaces, kept until the new one is complete
    .lock            lock file of the session that trains here, deleted at its end
"""

from __future__ import annotations

import json
import logging
import platform
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from quiver.encoder.environment import installed_version
from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, sync_folder, write_json
from quiver.encoder.schema import Schema, validate
from quiver.encoder.training.log import LOG, NONFINITE, RunLog
from quiver.encoder.training.processes import Processes, exact_float32, init_distributed, keep_freed_memory
from quiver.encoder.training.recipe_file import AUTO, WITHOUT_WEIGHT
from quiver.encoder.training.state import preserve_rng_state
from quiver.encoder.work_folder import OtherVersionError, SealedFolders, describe_changes, exclusive_lock, remove_temporary, setting_changes

logger = logging.getLogger(__name__)

RECIPE, BEGUN, RECORD, MODEL, CHECKPOINTS = "recipe.json", "begun.json", "run.json", "model", "checkpoints"
DATA, START, TOKENIZER, CORPUS, TENSORBOARD = "data", "start", "tokenizer", "corpus", "tensorboard"

REPORTS = ("report.md", "report.html")  # reports that are rendered from a run into its folder

MADE = (RECIPE, BEGUN, RECORD, MODEL, DATA, START, TOKENIZER, CORPUS, LOG, CHECKPOINTS, TENSORBOARD, NONFINITE, *REPORTS)
"""Names of everything that a run creates in its folder; nothing else there is ever moved or deleted."""

LOCK = ".lock"

_BEGUN_SCHEMAS, _RECORD_SCHEMAS = "quiver-begun/", "quiver-run/"
SCHEMA = f"{_BEGUN_SCHEMAS}1"  # schema of ``begun.json``

PACKAGES = (
    "quiver-retrieval",
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "sentence-transformers",
    "pylate",
    "transformers",
    "datasets",
    "schedulefree",
    "torch-optimi",
)
"""Distributions whose versions are recorded."""


@contextmanager
def session_environment(out: Path, device: str) -> Iterator[Processes]:
    """Processes, random generators, memory and products of a session; the main process locks the run folder."""
    with (
        init_distributed(device) as processes,
        preserve_rng_state(),
        keep_freed_memory(),
        exact_float32(),
        lock_run(out) if processes.is_main_process else nullcontext(),
    ):
        yield processes


@dataclass(frozen=True)
class RunIdentity:
    """Identity of a run: only a session with the same recipe and fixed values may resume it."""

    recipe: Mapping[str, Any]
    fixed: Mapping[str, Any]  # other values that must be the same, such as the number of processes and checksums of the data
    about: Mapping[str, Any]  # values that may differ, some with a warning; see `describe_session`
    # Schema of the recipe, whose defaults stand for settings that an older version did not write; None for no defaults.
    schema: type[Schema] | None = None
    without_weight: Collection[str] = WITHOUT_WEIGHT  # settings that may differ because they do not affect the weights

    def write(self, out: Path) -> None:
        """Write ``begun.json`` and ``recipe.json``."""
        write_json(out / BEGUN, {"schema": SCHEMA, **self.about, **self.fixed})
        write_json(out / RECIPE, self.recipe)

    def record(self, schema: str, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Content of ``run.json``."""
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        head = {"schema": schema, "recipe": self.recipe, "date": date, "platform": platform.platform()}
        return {**head, **self.about, **self.fixed, **parts}


def describe_session(command: str | None, device: str) -> dict[str, Any]:
    """Describe a session for the record: command line, device, threads, and versions of Python and of `PACKAGES` (None: not installed)."""
    versions = {"python": platform.python_version(), **{name: installed_version(name) for name in PACKAGES}}
    return {"command": command, "device": device, "threads": torch.get_num_threads(), "versions": versions}


def refuse_existing(out: Path, *, overwrite: bool | None) -> None:
    """Check that a new run can be written to a folder."""
    held = [name for name in MADE if (out / name).exists()]
    if not held or (overwrite and is_run(out)):
        return
    if not is_run(out):
        raise InputError(f"{out}: holds {held[0]}, which does not come from a training run; choose another --out")
    if (out / RECORD).exists():
        remedy = "" if overwrite is None else ", or pass --overwrite (overwrite=True in Python)"
        raise InputError(f"{out}: already contains a run; choose another --out{remedy}")
    remedy = "choose another --out" if overwrite is None else "start over with --overwrite"
    in_python = "" if overwrite is None else " (resume=True or overwrite=True in Python)"
    raise InputError(f"{out}: contains an unfinished run; resume it with --resume, or {remedy}{in_python}")


def is_run(out: Path) -> bool:
    """Whether the folder holds a run, complete or not."""
    for name, schemas in ((BEGUN, _BEGUN_SCHEMAS), (RECORD, _RECORD_SCHEMAS)):
        if (out / name).is_file() and str(read_json(out / name).get("schema", "")).startswith(schemas):
            return True
    return False


def recipe_of(out: Path) -> Mapping[str, Any] | None:
    """Recipe of the run in a folder, complete or not; None if there is none."""
    if (out / RECORD).is_file():
        return dict(read_json(out / RECORD)["recipe"])
    return read_json(out / RECIPE) if (out / RECIPE).is_file() else None


def refuse_nothing_to_resume(out: Path) -> None:
    """Check that a folder holds an unfinished run."""
    if (out / RECORD).exists():
        raise InputError(f"{out}: the run is complete, there is nothing to resume; its model is {out / MODEL}")
    if not (out / BEGUN).exists():
        raise InputError(f"{out}: contains no run to resume; omit --resume to start one")
    if (schema := read_json(out / BEGUN).get("schema")) != SCHEMA:
        raise InputError(f"{out / BEGUN}: its schema is {schema}, this version reads {SCHEMA}; start the run again in another folder")


# Order of removal. The record goes first, because a record without its model would be wrong. The recipe stays longer than the checkpoints,
# so that they cannot be resumed with another recipe. The file that marks the folder as a run goes last: if the process is killed before
# that, the rest can still be overwritten.
_LEAVING = (RECORD, *(name for name in MADE if name not in (RECORD, RECIPE, BEGUN)), RECIPE, BEGUN)


@contextmanager
def new_run(out: Path) -> Iterator[None]:
    """Make room for a new run: an earlier run is moved aside, and moved back if the block fails before a checkpoint is saved."""
    try:
        old = Path(mkdtemp(prefix=".replaced-", dir=out))
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    with ExitStack() as undo:  # runs in reverse: delete the new run, move the old one back, delete the folder that held it
        undo.callback(old.rmdir)
        for name in _LEAVING:
            if (out / name).exists():
                (out / name).rename(old / name)
                undo.callback((old / name).rename, out / name)
        undo.callback(remove_made, out)
        try:
            yield
        finally:
            if (out / RECORD).exists() or Checkpoints(out / CHECKPOINTS).steps() or (out / NONFINITE).exists():
                undo.pop_all()
                if old.exists():
                    remove_empty(old)


def refuse_other_run(out: Path, now: RunIdentity) -> None:
    """Check that a session may resume the run in a folder."""
    begun = read_json(out / BEGUN)
    fixed = json.loads(json.dumps(dict(now.fixed)))
    found = [change for key, value in fixed.items() if key in begun for change in setting_changes(begun[key], value, key)]
    if (out / RECIPE).exists():  # it is written second
        changes = recipe_changes(read_json(out / RECIPE), now.recipe, now.schema)
        found = [*(change for change in changes if change[0] not in now.without_weight), *found]
    if found:
        raise InputError(f"{out}: --resume needs the recipe and data of the interrupted run; {describe_changes(found)}")


def resume_run(out: Path, now: RunIdentity, processes: Processes) -> int:
    """Go on with the run in a folder, from its last intact checkpoint; called by all processes.

    Settings that have changed are logged, and whether the weights may differ in their last bits because of them. The identity of this
    session is written, and later lines of the log are removed.

    Returns:
        The step of the checkpoint; 0 if there is none.
    """
    refuse_other_run(out, now)
    processes.barrier()  # all processes have read the files that are written now
    newest = 0
    if processes.is_main_process:
        begun, recipe = read_json(out / BEGUN), read_json(out / RECIPE) if (out / RECIPE).exists() else now.recipe
        if others := [path for path, *_ in recipe_changes(recipe, now.recipe, now.schema)]:
            logger.warning("%s: changed since the run was started: %s; this does not affect the weights", out, ", ".join(others))
        about = [key for key in ("device", "threads", "versions") if key in begun]
        if changed := [path for key in about for path, *_ in setting_changes(begun[key], now.about[key], key)]:
            logger.warning("%s: changed since the run was started: %s; the final weights may differ slightly", out, ", ".join(changed))
        now.write(out)
        newest = Checkpoints(out / CHECKPOINTS).newest() or 0
        RunLog(out / LOG).cut(newest)
        logger.info("%s: resuming from step %d", out, newest)
    return int(processes.broadcast(newest))


def recipe_changes(was: Mapping[str, Any], now: Mapping[str, Any], schema: type[Schema] | None = None) -> list[tuple[str, object, object]]:
    """Differences between two recipes.

    Returns:
        For each setting that differs, its dotted path, the value in ``was`` and the value in ``now``. `AUTO` differs from no
        value: it stands for what the run chose, or will choose.
    """
    known = None if schema is None else validate(schema, was)[0]
    then, since = json.loads(json.dumps([was if known is None else known.model_dump(), now]))
    return [change for change in setting_changes(then, since) if AUTO not in change[1:]]


def write_part(out: Path, name: str, write: Callable[[Path], object]) -> None:
    """Write a folder of a run under a hidden name, which it keeps until it is complete."""
    part = out / f".{name}-unfinished"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    write(part)
    shutil.rmtree(out / name, ignore_errors=True)  # left by a session that was killed right here
    part.rename(out / name)
    sync_folder(out)


def finish_run(out: Path, save: Callable[[Path], object], record: Mapping[str, Any]) -> None:
    """Complete a run: save its model, write the record, delete temporary files."""
    write_part(out, MODEL, save)
    write_json(out / RECORD, record)
    remove_leftovers(out)


def remove_leftovers(out: Path) -> None:
    """Delete files that a complete run no longer needs; a session that was killed at its end may have left them."""
    for left in (out / DATA, out / START, *out.glob(".replaced-*")):
        shutil.rmtree(left, ignore_errors=True)
    remove_temporary(out)


def remove_run(out: Path) -> None:
    """Delete a run and nothing else; the folder too if it is then empty."""
    with lock_run(out):
        remove_leftovers(out)
        remove_made(out)
    remove_empty(out)


def remove_made(out: Path) -> None:
    """Delete everything that an unfinished run has created in a folder."""
    for path in (out / name for name in (f".{MODEL}-unfinished", f".{TOKENIZER}-unfinished", f".{CORPUS}.unfinished", *_LEAVING)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def lock_run(out: Path) -> AbstractContextManager[None]:
    """Lock a run folder, see `exclusive_lock`; it is created if it is missing, and removed at the end if it is empty then."""
    return exclusive_lock(out / LOCK, "training there", remedy="wait for it, or choose another --out")


def remove_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    if not any(folder.iterdir()):
        folder.rmdir()


_CHECKPOINT_SCHEMA = "quiver-checkpoint/2"
_STEP_NAME = re.compile(r"step-(\d{6,})")


class Checkpoints:
    """The checkpoints of a run, each a sealed folder: a model, and the state of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sealed = SealedFolders(folder, _CHECKPOINT_SCHEMA)

    def path(self, step: int) -> Path:
        """Path of the checkpoint of a step, which need not exist."""
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending; checksums are not compared."""
        return sorted(int(name[1]) for name in map(_STEP_NAME.fullmatch, self._sealed.names()) if name)

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Yield a hidden folder to write into; it becomes the checkpoint of the step when the block ends without an error."""
        with self._sealed.writing(self.path(step).name) as part:
            part.about["step"] = step
            yield part.folder

    def newest(self) -> int | None:
        """The last step with an intact checkpoint; None if there is none. Damaged checkpoints are removed with a warning."""
        self._sealed.remove_unfinished()
        for step in reversed(self.steps()):
            flaw = self._find_flaw(step)
            if flaw is None:
                return step
            logger.warning("%s: %s; removed it, so the run resumes from the checkpoint before it", self.path(step), flaw)
            self._sealed.remove(self.path(step).name)
        return None

    def sound(self, steps: Iterable[int]) -> list[int]:
        """The given steps whose checkpoints are intact; a warning is logged for each of the others."""
        flaws = {step: self._find_flaw(step) for step in steps}
        for step, flaw in flaws.items():
            if flaw is not None:
                logger.warning("%s: %s; its weights are excluded from the average", self.path(step), flaw)
        return [step for step, flaw in flaws.items() if flaw is None]

    def keep(self, steps: Collection[int]) -> None:
        """Remove the checkpoints of all other steps."""
        for step in self.steps():
            if step not in steps:
                self._sealed.remove(self.path(step).name)

    def _find_flaw(self, step: int) -> str | None:
        """What is wrong with the checkpoint of a step, read in full; None if nothing is."""
        name = self.path(step).name
        try:
            sealed, flaw = self._sealed.read(name), self._sealed.flaw(name)
        except OtherVersionError as error:
            raise InputError(f"{error}; resume the run with the version that wrote it") from error
        if sealed is not None and sealed.about.get("step") != step:
            return f"it was written as the checkpoint of step {sealed.about.get('step')}"
        return flaw
