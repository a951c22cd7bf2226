"""The folder of a training run, its checkpoints and its record.

Every kind of run (retrieval, fine-tuning, pretraining) uses these names:

    recipe.json      resolved recipe; without run.json beside it, the run is unfinished
    begun.json       processes, data, device, threads and versions of the run; a resumed session is compared with them
    data/            prepared rows; deleted at the end              start/       initial model of a LoRA run; deleted at the end
    probe/           a probe of a pretraining run; deleted at the end
    tokenizer/       vocabulary trained for a pretraining run       corpus/      token ids of a pretraining run
    log.jsonl        losses and scores                              tensorboard/ the same, where TensorBoard is installed
    checkpoints/     states to resume from, each sealed             nonfinite/   batches with a non-finite loss or gradient
    model/           the trained model                              run.json     the record, written last
    .replaced-*      an earlier run that --overwrite replaces, kept until the new one is complete
    .lock            lock file of the session that trains here, deleted at its end

The log has one JSON object per line and grows while the run goes on: one every few steps and after the last, one after each evaluation.

    {"step": 40, "epoch": 0.5, "loss": 0.731, "learning_rate": 4.8e-05, "grad_norm": 1.92, "tokens_per_second": 5210, "seconds": 61.2}
    {"step": 500, "epoch": 1.0, "ndcg@10": 0.4123, "seconds": 712.0}

``loss`` is the mean since the previous line of its kind; ``learning_rate`` and ``grad_norm`` (before clipping) are those of the step;
``tokens_per_second`` counts all processes, without the time of evaluation and saving; ``seconds`` includes earlier sessions. On a GPU
``activation_bytes`` is the most memory that a step since that line took beside weights and optimizer state. A resumed run removes the lines
after its checkpoint and writes them again.

A run with a non-finite loss or gradient stops before the optimizer step and writes the batch:

    nonfinite/step-000013/batch.json         step, loss, gradient norm, and the rows of the batch
    nonfinite/step-000013/batch.safetensors  inputs of the loss, named ``{batch}.{input}``; a packed batch as the arguments of `pack_ids`
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from quiver.encoder.checkpoints.checkpoint import downloaded_commit, is_commit, local_folder
from quiver.encoder.environment import installed_version
from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home, naming, read_json, save_tensors, sync_folder, write_json, write_text
from quiver.encoder.schema import Schema, TextSchema, validate
from quiver.encoder.training.processes import Processes, exact_float32, init_distributed, keep_freed_memory
from quiver.encoder.training.recipe_file import AUTO, WITHOUT_WEIGHT
from quiver.encoder.training.state import preserve_rng_state
from quiver.encoder.work_folder import OtherVersionError, SealedFolders, describe_changes, exclusive_lock, remove_temporary, setting_changes

logger = logging.getLogger(__name__)

RECIPE, BEGUN, RECORD, MODEL, CHECKPOINTS = "recipe.json", "begun.json", "run.json", "model", "checkpoints"
DATA, START, PROBE, TOKENIZER, CORPUS, TENSORBOARD = "data", "start", "probe", "tokenizer", "corpus", "tensorboard"

REPORTS = ("report.md", "report.html")  # reports that are rendered from a run into its folder

LOG, NONFINITE = "log.jsonl", "nonfinite"  # names in the run folder

MADE = (RECIPE, BEGUN, RECORD, MODEL, DATA, START, PROBE, TOKENIZER, CORPUS, LOG, CHECKPOINTS, TENSORBOARD, NONFINITE, *REPORTS)
"""Names of everything that a run creates in its folder; nothing else there is ever moved or deleted."""

LOCK = ".lock"

_BEGUN_SCHEMAS, _RECORD_SCHEMAS = "quiver-begun/", "quiver-run/"
SCHEMA = f"{_BEGUN_SCHEMAS}1"  # schema of ``begun.json``

PACKAGES = (
    *("quiver-retrieval", "torch", "numpy", "tokenizers", "safetensors", "sentence-transformers", "pylate", "transformers", "datasets"),
    *("schedulefree", "torch-optimi"),
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


Settled = TypeVar("Settled", bound=TextSchema)


def with_commit(recipe: Settled, *, resumed: Path | None = None) -> Settled:
    """Return the recipe with the commit of ``model.init`` as ``model.revision``: the one that the run began with, or the Hub's now.

    A recipe of random weights or of a local folder is returned as it is.
    """
    model: Any = vars(recipe)["model"]
    begun = ((None if resumed is None else recipe_of(resumed)) or {}).get("model", {})
    if begun.get("init") == model.init:
        commit = model.revision if is_commit(model.revision) else begun.get("revision")
    elif model.init == "random" or expand_home(model.init).exists():
        return recipe
    else:
        commit = downloaded_commit(local_folder(model.init, revision=model.revision))
    if commit in (None, model.revision):
        return recipe
    # Not by `RecipeSchema.replace`: what the recipe says of its result holds for the commit too.
    return TextSchema.replace(recipe, model=model.replace(revision=commit))


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
    """Go on with the run in a folder, from its last intact checkpoint, and return its step, 0 without one; called by all processes.

    Settings that have changed are logged, and whether the weights may differ in their last bits because of them. The identity of this
    session is written, and later lines of the log are removed.
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
    """For each setting in which two recipes differ, its dotted path, the value in ``was`` and the value in ``now``.

    `AUTO` differs from no value, and a missing ``model.revision`` neither: they stand for what the run chose, or will choose.
    """
    known = None if schema is None else validate(schema, was)[0]
    then, since = json.loads(json.dumps([was if known is None else known.model_dump(), now]))
    found = (change for change in setting_changes(then, since) if AUTO not in change[1:])
    return [change for change in found if change[0] != "model.revision" or None not in change[1:]]


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
    for left in (out / DATA, out / START, out / PROBE, *out.glob(".replaced-*")):
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


LEARNING_RATE = "learning_rate"  # key of the lines about the training itself; the others are of an evaluation

Line: TypeAlias = Mapping[str, int | float]
Curve: TypeAlias = list[tuple[int, float]]  # (step, value), steps rising


class RunLog:
    """Appends lines to the log file of a run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, line: Line) -> None:
        """Append one line and flush it, so that readers see it."""
        with naming(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def measures(self, step: int, position: Collection[str]) -> dict[str, float]:
        """Return the measures that were logged after a step, in their order; empty if there are none."""
        lines = [line for line in read_log(self._path) if line["step"] == step] if self._path.exists() else []
        found = next((line for line in lines if LEARNING_RATE not in line), {})
        return {key: float(value) for key, value in found.items() if key not in ("step", "seconds", *position)}

    def sync(self) -> None:
        """Sync the lines to disk, before a checkpoint of the same step is sealed."""
        if self._path.exists():
            with naming(self._path), self._path.open("rb") as file:
                os.fsync(file.fileno())

    def cut(self, step: int) -> None:
        """Remove every line after ``step``, and an incomplete line of a killed process."""
        if self._path.exists():
            lines = [line for line in read_log(self._path) if line["step"] <= step]
            write_text(self._path, "".join(json.dumps(line) + "\n" for line in lines))


def read_log(path: Path) -> list[Line]:
    """Read the lines of a log; an incomplete last line is ignored."""
    try:
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error
    lines: list[Line] = []
    for number, text in enumerate(whole.splitlines(), start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: malformed JSON ({error})") from error
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise InputError(f"{path}:{number}: not a line of a training log, it has no step")
        lines.append(line)
    return lines


def curve(lines: Sequence[Line], key: str) -> Curve:
    """One quantity of a log over the steps."""
    return [(int(line["step"]), float(line[key])) for line in lines if key in line]


def training_curves(lines: Sequence[Line]) -> dict[str, Curve]:
    """Loss, learning rate, gradient norm and throughput over the steps, by their keys in the record of a run."""
    keys = {"losses": "loss", "learning_rates": "learning_rate", "grad_norms": "grad_norm", "tokens_per_second": "tokens_per_second"}
    return {name: curve(lines, key) for name, key in keys.items()}


def keep_batches(
    folder: Path, batches: Sequence[tuple[float, Iterable[dict[str, Any]], Mapping[str, Any]]], *, step: int, grad_norm: float
) -> None:
    """Write the batches of a step with a non-finite loss, or all batches if only the gradient is not finite.

    A batch is its loss, its rows as JSON, and the inputs of the loss, of which tensors are written.
    """
    bad = [batch for batch in batches if not math.isfinite(batch[0])] or list(batches)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{number}.{name}": value.detach().to("cpu", copy=True).contiguous()  # safetensors refuses tensors that share storage
        for number, (_, _, inputs) in enumerate(bad)
        for name, value in inputs.items()
        if isinstance(value, Tensor)
    }
    save_tensors(tensors, folder / "batch.safetensors")
    norm, *losses = (value if math.isfinite(value) else str(value) for value in (grad_norm, *(loss for loss, _, _ in bad)))
    described = [{"loss": loss, "rows": list(rows)} for loss, (_, rows, _) in zip(losses, bad, strict=True)]
    write_json(folder / "batch.json", {"step": step, "grad_norm": norm, "batches": described})
