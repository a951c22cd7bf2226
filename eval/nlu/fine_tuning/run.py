"""A fine-tuning run, from the beginning or resumed: run folder, training, best model, record.

The run folder is described in `retrieval.training.run_folder`; it also holds the results of the task. A session can be interrupted at any
point: the folder then holds the run at its last checkpoint. A resumed run ends with the same weights as an uninterrupted one, bit for bit
on a CPU.
"""

from __future__ import annotations

import logging
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from quiver.encoder.errors import InputError
from quiver.encoder.training.checkpoints import Checkpoints
from quiver.encoder.training.lock import exclusive_lock
from quiver.encoder.training.log import LOG, RunLog, curve, read_log
from quiver.encoder.training.machine import keep_freed_memory, peak_memory
from quiver.encoder.training.random_state import preserve_rng_state
from quiver.encoder.training.trainer import Progress
from quiver.eval.nlu.fine_tuning.task import SCORE, Example, Model, Schedule, Session, Task, fine_tune
from quiver.retrieval.models.loading import default_device
from quiver.retrieval.training.run_folder import (
    CHECKPOINTS,
    RECORD,
    Beginning,
    finish_run,
    new_run,
    refuse_existing,
    refuse_nothing_to_resume,
    refuse_other_run,
    remove_leftovers,
    unfinished_model,
    warn_of_changes,
)
from quiver.retrieval.training.run_record import versions

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

Result = TypeVar("Result", bound="DataclassInstance")

SCHEMA = "quiver-run/fine-tuning-1"
"""Schema of ``run.json``."""


@dataclass(frozen=True)
class Prepared(Generic[Model, Example, Result]):
    """A run whose input has been read.

    Attributes:
        task: The task to learn.
        schedule: Steps and learning rates.
        facts: Values that must be equal in a resumed session, as JSON: checksums of the data.
        counts: Counts for the record, as JSON.
        first_model: Returns the initial model.
        finish: Scores the trained model and writes the results into the run folder.
    """

    task: Task[Model, Example]
    schedule: Schedule
    facts: Mapping[str, Any]
    counts: Mapping[str, Any]
    first_model: Callable[[], Model]
    finish: Callable[[Model], Result]


@dataclass(frozen=True)
class Request:
    """A request to fine-tune a model.

    Attributes:
        recipe: Resolved recipe, as JSON.
        out: Run folder.
        results: Names of the files that ``finish`` writes there.
        resume: Resume the unfinished run in ``out`` from its last checkpoint, or from the beginning if it has none.
        overwrite: Replace an earlier run in ``out``.
        progress: Show progress bars.
        command: Command line to record.
    """

    recipe: Mapping[str, Any]
    out: Path
    results: Sequence[str]
    resume: bool = False
    overwrite: bool = False
    progress: bool = False
    command: str | None = None


def run_fine_tuning(request: Request, prepare: Callable[[], Prepared[Model, Example, Result]]) -> Result:
    """Fine-tune a model, and write the model, the results and the record.

    Args:
        request: Recipe and run folder.
        prepare: Reads the input of the run; called after the run folder has been checked.

    Returns:
        The value that ``finish`` returned; ``run.json`` holds it as ``scores``.

    Raises:
        InputError: The input is invalid; ``out`` already holds a run, or another session is training there; there is no run to resume, or
            it was started with other settings or data; or the loss is not finite.
        RunStoppedError: SIGTERM or SIGINT was received; the run was saved and can be resumed.
    """
    if request.resume and request.overwrite:
        raise InputError("--resume and --overwrite exclude each other; pass only one of them")
    out = request.out
    with preserve_rng_state(), keep_freed_memory(), exclusive_lock(out):
        if request.resume:
            refuse_nothing_to_resume(out)
            refuse_other_run(out, _beginning(request, {}))
        else:
            refuse_existing(out, overwrite=request.overwrite)
        prepared = prepare()
        now = _beginning(request, prepared.facts)
        room: AbstractContextManager[None] = nullcontext() if request.resume else new_run(out)
        try:
            with room:
                return _train(request, prepared, now)
        finally:
            if not (out / RECORD).exists():  # remove results of an earlier run in this folder
                for name in request.results:
                    (out / name).unlink(missing_ok=True)


def _beginning(request: Request, facts: Mapping[str, Any]) -> Beginning:
    about = {"command": request.command, "device": default_device(), "threads": torch.get_num_threads(), "versions": versions()}
    return Beginning(request.recipe, facts, about)


def _train(request: Request, prepared: Prepared[Model, Example, Result], now: Beginning) -> Result:
    out, checkpoints = request.out, Checkpoints(request.out / CHECKPOINTS)
    step = None
    if request.resume:
        refuse_other_run(out, now)
        warn_of_changes(out, now)
        step = checkpoints.newest() or 0
        RunLog(out / LOG).cut(step)
        logger.info("%s: resuming from update %d", out, step)
    now.write(out)
    session = Session(prepared.task, prepared.schedule, out, checkpoints, default_device(), request.progress)
    progress, last = fine_tune(session, prepared.first_model, step=step)
    model = last if progress.best_step in (None, progress.step) else _best(session, progress)
    shutil.rmtree(unfinished_model(out), ignore_errors=True)
    prepared.task.save(model, unfinished_model(out))
    scores = prepared.finish(model)
    record = {
        "schema": SCHEMA,
        "recipe": request.recipe,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        **now.about,
        **prepared.facts,
        "counts": prepared.counts,
        "model": {"parameters": sum(weight.numel() for weight in model.parameters())},
        "result": _result(session, progress),
        "scores": asdict(scores),
    }
    finish_run(out, record)
    return scores


def _best(session: Session[Model, Example], progress: Progress) -> Model:
    """Load the best model from its checkpoint."""
    best = progress.best_step or 0
    if not session.checkpoints.sound([best]):
        raise InputError(f"{session.checkpoints.path(best)}: the best checkpoint is damaged or gone; train again with --overwrite")
    model: Model = session.task.open(session.checkpoints.path(best)).to(session.device)
    return model


def _result(session: Session[Model, Example], progress: Progress) -> dict[str, Any]:
    """Summary of the run, from its log and its final progress."""
    log, schedule = read_log(session.out / LOG), session.schedule
    about = ("epoch", "seconds")
    return {
        "steps": progress.step,
        "planned_steps": schedule.steps,
        "epochs": progress.step / schedule.per_epoch,
        "stopped_early": progress.step < schedule.steps,
        "best_step": progress.best_step,
        "losses": curve(log, "loss"),
        "learning_rates": curve(log, "learning_rate"),
        "grad_norms": curve(log, "grad_norm"),
        "tokens_per_second": curve(log, "tokens_per_second"),
        "development": [{key: value for key, value in line.items() if key not in about} for line in log if SCORE in line],
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "resumed_at": list(progress.resumed_at),
        "peak_memory_bytes": peak_memory(),
    }


def finished(out: Path) -> bool:
    """Whether the folder holds a complete run; also removes files left by a session that was killed at the end of training."""
    if not (out / RECORD).is_file():
        return False
    remove_leftovers(out)
    return True
