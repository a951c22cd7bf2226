"""Run a recipe from start to end, or resume it: data, model, training, the record.

`quiver.encoder.training.run_folder` describes the folder. A process may be killed at any instruction: the folder then holds the run as it
was at its last checkpoint, and a resumed run ends with the weights of one that was not interrupted, on a CPU bit for bit.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home, read_json
from quiver.encoder.training.log import LOG, Line, RunLog, curve, read_log
from quiver.encoder.training.processes import Processes, RunStoppedError, init_distributed, keep_freed_memory, peak_memory
from quiver.encoder.training.run_folder import (
    DATA,
    RECORD,
    RunIdentity,
    describe_session,
    exclusive_lock,
    finish_run,
    is_run,
    new_run,
    refuse_existing,
    refuse_nothing_to_resume,
    refuse_other_run,
    remove_leftovers,
    unfinished_model,
    warn_of_changes,
)
from quiver.encoder.training.state import preserve_rng_state
from quiver.encoder.training.trainer import Callback, Progress
from quiver.retrieval.models.loading import default_device
from quiver.retrieval.training.data import TrainingRows, prepare_rows
from quiver.retrieval.training.loop.optimization import Schedule, require_optimizer
from quiver.retrieval.training.loop.state import average_models
from quiver.retrieval.training.loop.task import SCORE, Model, Run, Scorer, batch_order, fit
from quiver.retrieval.training.rules import IN_BATCH
from quiver.retrieval.training.sections import Recipe
from quiver.retrieval.training.start import build_model, require_extra

__all__ = ["RunStoppedError", "check_rows", "train", "train_and_save"]

logger = logging.getLogger(__name__)

SCHEMA = "quiver-run/2"
"""Schema of ``run.json``."""


def train(  # noqa: PLR0913  # each is an option of the command, or what a caller adds
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    command: str | None = None,
    scorer: Scorer | None = None,
    data_folder: Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Run a recipe; under torchrun, as one of its processes.

    Args:
        recipe: What to train, on what, and how.
        out: Folder of the run, see `quiver.encoder.training.run_folder`.
        resume: Go on with the unfinished run there, from its last checkpoint; from the beginning if it has none.
        overwrite: Replace an earlier run there, once this one is complete.
        progress: Show a bar.
        command: The command line to record.
        scorer: Scores a model on ``recipe.development``; needed where the recipe has one.
        data_folder: Where prepared rows are found and kept, for runs that share them; None for ``data/`` in ``out``, which the run removes
            when it is complete.
        callbacks: Receive events of the training loop.

    Returns:
        What ``run.json`` holds.

    Raises:
        InputError: The data or the starting checkpoint cannot be used, an extra is missing, ``out`` holds a run already or another
            process is training there, there is nothing to resume, or what is there was begun otherwise; or the loss is no number.
        RunStoppedError: SIGTERM or SIGINT came; the run is saved and can be resumed.
        ValueError: The recipe has a development collection, and there is no scorer.
    """
    if resume and overwrite:
        raise InputError("--resume goes on with a run and --overwrite replaces it; give one of them")
    if (recipe.development is None) is not (scorer is None):
        raise ValueError("a scorer is given if and only if the recipe has a development collection")
    require_extra()
    require_optimizer(recipe.training)
    with init_distributed(default_device()) as processes, preserve_rng_state(), keep_freed_memory(), _folder(out, processes):
        session = _Session(Run(recipe, out, processes, scorer, progress, callbacks), command, data_folder or out / DATA)
        return session.resume() if resume else session.begin(overwrite=overwrite)


def train_and_save(
    recipe: Recipe, rows: TrainingRows, model: Model, out: Path, *, progress: bool = False, command: str | None = None
) -> dict[str, Any]:
    """Run a recipe whose rows and model are at hand.

    Args:
        recipe: Loss and optimisation; it has no development collection.
        rows: What is trained on.
        model: Trained in place.
        out: Folder of the run.
        progress: Show a bar.
        command: The command line to record.

    Returns:
        What ``run.json`` holds.

    Raises:
        InputError: The rows do not make a batch, training cannot go on, or ``out`` cannot be written or holds a run already.
        RunStoppedError: As `train`.
    """
    with init_distributed(default_device()) as processes, preserve_rng_state(), keep_freed_memory(), _folder(out, processes):
        return _Session(Run(recipe, out, processes, progress=progress), command, out / DATA).begin(at_hand=(rows, model))


def check_rows(recipe: Recipe, rows: TrainingRows) -> None:
    """Say before anything is written that the rows do not make one batch of one process.

    Raises:
        InputError: There are fewer rows than ``training.batch_size``.
    """
    batch_order(recipe, rows, Processes())


def _folder(out: Path, processes: Processes) -> AbstractContextManager[None]:
    """The folder of a run, held by the process that leads."""
    return exclusive_lock(out) if processes.is_main_process else nullcontext()


@dataclass(frozen=True)
class _Session:
    """One session of a run: it begins the run, or resumes it.

    Attributes:
        run: Recipe, folder, processes.
        command: The command line to record.
        data: Folder of the prepared rows.
    """

    run: Run
    command: str | None
    data: Path

    def begin(self, *, overwrite: bool = False, at_hand: tuple[TrainingRows, Model] | None = None) -> dict[str, Any]:
        """From the first update."""
        out, processes = self.run.out, self.run.processes
        room: AbstractContextManager[None] = nullcontext()
        if processes.is_main_process:
            refuse_existing(out, overwrite=overwrite)
            room = new_run(out)
        with room:
            if processes.is_main_process:
                self._identity(None).write(out)
            processes.barrier()
            rows, model = at_hand if at_hand is not None else (self._rows(), None)
            if processes.is_main_process:
                self._identity(rows).write(out)
            return self._go_on(rows, model, step=None)

    def resume(self) -> dict[str, Any]:
        """From the last checkpoint that is sound, or from the first update if there is none."""
        run, processes = self.run, self.run.processes
        if processes.is_main_process and is_run(run.out) and (run.out / RECORD).exists():  # killed when it was complete
            remove_leftovers(run.out)
        refuse_nothing_to_resume(run.out)
        refuse_other_run(run.out, self._identity(None))
        rows = self._rows()
        now = self._identity(rows)
        refuse_other_run(run.out, now)
        processes.barrier()  # all have read what is written now
        newest = 0
        if processes.is_main_process:
            warn_of_changes(run.out, now)
            now.write(run.out)
            newest = run.checkpoints.newest() or 0
            RunLog(run.out / LOG).cut(newest)
        step = int(processes.broadcast(newest))
        if processes.is_main_process:
            logger.info("%s: going on from step %d", run.out, step)
        return self._go_on(rows, None, step=step)

    def _rows(self) -> TrainingRows:
        run = self.run
        recipe, bar = run.recipe, run.progress and run.processes.is_main_process
        return prepare_rows(recipe.data, self.data, seed=recipe.training.seed, progress=bar)

    def _identity(self, rows: TrainingRows | None) -> RunIdentity:
        run = self.run
        facts: dict[str, Any] = {"processes": run.processes.size}
        if rows is not None:
            facts["data"] = describe_data(run.recipe, rows)
        return RunIdentity(run.recipe.model_dump(), facts, describe_session(self.command, default_device()), schema=Recipe)

    def _go_on(self, rows: TrainingRows, model: Model | None, *, step: int | None) -> dict[str, Any]:
        run = self.run
        progress, schedule = fit(run, rows, lambda: model if model is not None else build_model(run.recipe, rows.texts()), step=step)
        if run.processes.is_main_process:
            self._finish(rows, progress, schedule)
        run.processes.barrier()
        return read_json(run.out / RECORD)

    def _finish(self, rows: TrainingRows, progress: Progress, schedule: Schedule) -> None:
        """Write the model and the record."""
        run, recipe = self.run, self.run.recipe
        kept = _kept_steps(run, progress, schedule)
        model = average_models([run.checkpoints.path(step) for step in kept])
        final = type(model)(model.encoder, model.tokenizer, model.settings, source=recipe.model.init)
        shutil.rmtree(unfinished_model(run.out), ignore_errors=True)
        final.save(unfinished_model(run.out))
        epochs = schedule.epochs(progress.epoch, progress.epoch_batches)
        weights = final.encoder.num_parameters + sum(weight.numel() for weight in final.projections.parameters())
        parts = {
            "batch": describe_batch(recipe, rows, run.processes.size),
            "model": {"parameters": weights, "base_model": base_model(recipe), **asdict(final.card)},
            "result": describe_result(read_log(run.out / LOG), progress, epochs=epochs, kept_steps=kept),
        }
        finish_run(run.out, self._identity(rows).record(SCHEMA, parts))


def _kept_steps(run: Run, progress: Progress, schedule: Schedule) -> list[int]:
    """The steps whose checkpoints make the run's model: the best, or the last that the recipe asks for."""
    recipe, checkpoints = run.recipe, run.checkpoints
    if recipe.development is not None and recipe.development.keep_best and progress.best_step is not None:
        return checkpoints.sound([progress.best_step]) or [progress.step]
    wanted = recipe.training.average_checkpoints
    found = schedule.planned(checkpoints.steps(), recipe.training.save_every, progress.epoch_ends)[-wanted:]
    if len(found) < wanted:
        logger.warning("training.average_checkpoints: the run has %d checkpoints, not %d; lower training.save_every", len(found), wanted)
    return checkpoints.sound(found) or [progress.step]


def describe_data(recipe: Recipe, rows: TrainingRows) -> dict[str, Any]:
    """What tells one set of rows from another."""
    return {
        "rows": len(rows),
        "documents_per_row": rows.documents_per_row,
        "sha256": rows.sha256,
        "skipped": rows.skipped,
        "copies": rows.copies,
        "revision": recipe.data.revision,
    }


def base_model(recipe: Recipe) -> str | None:
    """The hub's id of the checkpoint that a recipe starts from; None where that is a folder of this machine, or random weights."""
    init = recipe.model.init
    return None if init == "random" or expand_home(init).is_dir() else init


def negatives_per_query(recipe: Recipe, documents_per_row: int, processes: int) -> int:
    """Documents that a query is told from: its row's own, and with in-batch negatives those of the other rows too."""
    if recipe.loss.name not in IN_BATCH:
        return documents_per_row - 1
    rows = recipe.training.batch_size * (processes if recipe.loss.gather_across_devices else 1)
    return rows * documents_per_row - 1


def describe_batch(recipe: Recipe, rows: TrainingRows, processes: int) -> dict[str, int]:
    """How many rows an update sees, and how many negatives a query."""
    training = recipe.training
    return {
        "rows": training.batch_size,
        "accumulation": training.accumulation,
        "processes": processes,
        "effective": training.batch_size * training.accumulation * processes,
        "negatives_per_query": negatives_per_query(recipe, rows.documents_per_row, processes),
    }


def describe_result(log: Sequence[Line], progress: Progress, *, epochs: float, kept_steps: Sequence[int]) -> dict[str, Any]:
    """How a run went, from its log and its last progress."""
    return {
        "steps": progress.step,
        "epochs": epochs,
        "losses": curve(log, "loss"),
        "learning_rates": curve(log, "learning_rate"),
        "grad_norms": curve(log, "grad_norm"),
        "tokens_per_second": curve(log, "tokens_per_second"),
        "development": [{key: line[key] for key in ("step", SCORE, "seconds")} for line in log if SCORE in line],
        "kept_steps": list(kept_steps),
        "texts": progress.texts,
        "texts_truncated": progress.truncated,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "resumed_at": list(progress.resumed_at),
        "peak_memory_bytes": peak_memory(),
    }
