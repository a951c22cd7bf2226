"""A recipe run from start to end, or from where an earlier session left it: data, model, training, the record.

`quiver.retrieval.training.run_folder` says what lies where, and when. A session may end at any instruction: what is there afterwards is the
run as it was at its last checkpoint, and a run that is resumed ends with the weights of one that was not interrupted, on a CPU to the bit.
"""

from __future__ import annotations

import logging
import platform
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json
from quiver.encoder.training.lock import alone
from quiver.encoder.training.log import LOG, RunLog, read_log
from quiver.encoder.training.machine import keep_freed_memory
from quiver.encoder.training.processes import Processes, joined
from quiver.encoder.training.random_state import preserve_rng_state
from quiver.encoder.training.stopping import RunStoppedError
from quiver.retrieval.models.loading import default_device
from quiver.retrieval.training.averaging import average_models
from quiver.retrieval.training.data import TrainingRows, prepare_rows
from quiver.retrieval.training.loop.course import Course
from quiver.retrieval.training.loop.optimizers import require_optimizer
from quiver.retrieval.training.loop.session import Model, Scorer, Session, batch_order, fit
from quiver.retrieval.training.loop.snapshot import Progress
from quiver.retrieval.training.run_folder import (
    DATA,
    RECORD,
    Beginning,
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
from quiver.retrieval.training.run_record import SCHEMA, base_model, describe_batch, describe_data, describe_result, versions
from quiver.retrieval.training.sections import Recipe
from quiver.retrieval.training.start import build_model, require_extra

__all__ = ["RunStoppedError", "check_rows", "train", "train_and_save"]

logger = logging.getLogger(__name__)


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    command: str | None = None,
    scorer: Scorer | None = None,
    data_folder: Path | None = None,
) -> dict[str, Any]:
    """Run a recipe; under torchrun, as one of its processes.

    Args:
        recipe: What to train, on what, and how.
        out: Folder of the run, see `quiver.retrieval.training.run_folder`.
        resume: Go on with the unfinished run there, from its last checkpoint; from the beginning if it has none.
        overwrite: Replace an earlier run there, once this one is complete.
        progress: Show a bar.
        command: The command line to record.
        scorer: Scores a model on ``recipe.development``; needed where the recipe has one.
        data_folder: Where prepared rows are found and kept, for runs that share them; None for ``data/`` in ``out``, which the run removes
            when it is complete.

    Returns:
        What ``run.json`` holds.

    Raises:
        InputError: The data or the starting checkpoint cannot be used, an extra is missing, ``out`` holds a run already or another
            session is training there, there is nothing to resume, or what is there was begun otherwise; or the loss is no number.
        RunStoppedError: SIGTERM or SIGINT came; the run is saved and can be resumed.
        ValueError: The recipe has a development collection, and there is no scorer.
    """
    if resume and overwrite:
        raise InputError("--resume goes on with a run and --overwrite replaces it; give one of them")
    if (recipe.development is None) is not (scorer is None):
        raise ValueError("a scorer is given if and only if the recipe has a development collection")
    require_extra()
    require_optimizer(recipe.training)
    with joined(default_device()) as processes, preserve_rng_state(), keep_freed_memory(), _folder(out, processes):
        run = _Run(Session(recipe, out, processes, scorer, progress), command, data_folder or out / DATA)
        return run.resume() if resume else run.begin(overwrite=overwrite)


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
    with joined(default_device()) as processes, preserve_rng_state(), keep_freed_memory(), _folder(out, processes):
        return _Run(Session(recipe, out, processes, progress=progress), command, out / DATA).begin(at_hand=(rows, model))


def check_rows(recipe: Recipe, rows: TrainingRows) -> None:
    """Say before anything is written that the rows do not make one batch of one process.

    Raises:
        InputError: There are fewer rows than ``training.batch_size``.
    """
    batch_order(recipe, rows, Processes())


def _folder(out: Path, processes: Processes) -> AbstractContextManager[None]:
    """The folder of a run, held by the process that leads."""
    return alone(out) if processes.leads else nullcontext()


@dataclass(frozen=True)
class _Run:
    """A run as one of its processes sees it.

    Attributes:
        session: Recipe, folder, processes.
        command: The command line to record.
        data: Folder of the prepared rows.
    """

    session: Session
    command: str | None
    data: Path

    def begin(self, *, overwrite: bool = False, at_hand: tuple[TrainingRows, Model] | None = None) -> dict[str, Any]:
        """From the first update."""
        out, processes = self.session.out, self.session.processes
        room: AbstractContextManager[None] = nullcontext()
        if processes.leads:
            refuse_existing(out, overwrite=overwrite)
            room = new_run(out)
        with room:
            if processes.leads:
                self._beginning(None).write(out)
            processes.wait()
            rows, model = at_hand if at_hand is not None else (self._rows(), None)
            if processes.leads:
                self._beginning(rows).write(out)
            return self._go_on(rows, model, step=None)

    def resume(self) -> dict[str, Any]:
        """From the last checkpoint that is sound, or from the first update if there is none."""
        session, processes = self.session, self.session.processes
        if processes.leads and is_run(session.out) and (session.out / RECORD).exists():  # killed when it was complete
            remove_leftovers(session.out)
        refuse_nothing_to_resume(session.out)
        refuse_other_run(session.out, self._beginning(None))
        rows = self._rows()
        now = self._beginning(rows)
        refuse_other_run(session.out, now)
        processes.wait()  # all have read what is written now
        newest = 0
        if processes.leads:
            warn_of_changes(session.out, now)
            now.write(session.out)
            newest = session.checkpoints.newest() or 0
            RunLog(session.out / LOG).cut(newest)
        step = int(processes.told(newest))
        if processes.leads:
            logger.info("%s: going on from step %d", session.out, step)
        return self._go_on(rows, None, step=step)

    def _rows(self) -> TrainingRows:
        session = self.session
        recipe, bar = session.recipe, session.progress and session.processes.leads
        return prepare_rows(recipe.data, self.data, seed=recipe.training.seed, progress=bar)

    def _beginning(self, rows: TrainingRows | None) -> Beginning:
        session = self.session
        facts: dict[str, Any] = {"processes": session.processes.size}
        if rows is not None:
            facts["data"] = describe_data(session.recipe, rows)
        about = {"command": self.command, "device": default_device(), "threads": torch.get_num_threads(), "versions": versions()}
        return Beginning(session.recipe.model_dump(), facts, about)

    def _go_on(self, rows: TrainingRows, model: Model | None, *, step: int | None) -> dict[str, Any]:
        session = self.session
        progress, course = fit(session, rows, lambda: model if model is not None else build_model(session.recipe, rows.texts()), step=step)
        if session.processes.leads:
            self._finish(rows, progress, course)
        session.processes.wait()
        return read_json(session.out / RECORD)

    def _finish(self, rows: TrainingRows, progress: Progress, course: Course) -> None:
        """Write the model and the record."""
        session, recipe = self.session, self.session.recipe
        kept = _kept_steps(session, progress, course)
        model = average_models([session.checkpoints.path(step) for step in kept])
        final = type(model)(model.encoder, model.tokenizer, model.settings, source=recipe.model.init)
        shutil.rmtree(unfinished_model(session.out), ignore_errors=True)
        final.save(unfinished_model(session.out))
        epochs = course.epochs(progress.epoch, progress.epoch_batches)
        weights = final.encoder.num_parameters + sum(weight.numel() for weight in final.projections.parameters())
        record = {
            "schema": SCHEMA,
            "recipe": recipe.model_dump(),
            "command": self.command,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": versions(),
            "platform": platform.platform(),
            "device": default_device(),
            "threads": torch.get_num_threads(),
            "processes": session.processes.size,
            "data": describe_data(recipe, rows),
            "batch": describe_batch(recipe, rows, session.processes.size),
            "model": {"parameters": weights, "base_model": base_model(recipe), **asdict(final.card)},
            "result": describe_result(read_log(session.out / LOG), progress, epochs=epochs, kept_steps=kept),
        }
        finish_run(session.out, record)


def _kept_steps(session: Session, progress: Progress, course: Course) -> list[int]:
    """The steps whose checkpoints make the run's model: the best, or the last that the recipe asks for."""
    recipe, checkpoints = session.recipe, session.checkpoints
    if recipe.development is not None and recipe.development.keep_best and progress.best_step is not None:
        return checkpoints.sound([progress.best_step]) or [progress.step]
    wanted = recipe.training.average_checkpoints
    found = course.planned(checkpoints.steps(), recipe.training.save_every, progress.epoch_ends)[-wanted:]
    if len(found) < wanted:
        logger.warning("training.average_checkpoints: the run has %d checkpoints, not %d; lower training.save_every", len(found), wanted)
    return checkpoints.sound(found) or [progress.step]
