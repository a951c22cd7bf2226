"""The updates of a fine-tuning: the log, the score, the checkpoints, early stopping, the end.

Behind every so many updates, or every epoch, the model is scored and saved. A score counts as better only if it is higher: of equal ones
the earlier stays the best. A signal is answered behind the update in which it came, with a checkpoint and before anything is scored; the
session that goes on does that first.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import numpy as np
import torch

from quiver.encoder.training.bar import FORMS, Show, training_bar
from quiver.encoder.training.checkpoints import Checkpoints
from quiver.encoder.training.log import LOG, RunLog, read_log
from quiver.encoder.training.nonfinite import NONFINITE, SeenBatch, keep_batches, nonfinite_error
from quiver.encoder.training.random_state import preserve_rng_state, seed_random, set_random_state
from quiver.encoder.training.stopping import RunStoppedError, StopRequest, stop_requests
from quiver.eval.nlu.fine_tuning.optimizer import learning_rate_share, make_optimizer, set_learning_rate
from quiver.eval.nlu.fine_tuning.sections import FineTuningSection, UpdatesSection
from quiver.eval.nlu.fine_tuning.snapshot import Progress, read_snapshot, write_snapshot
from quiver.eval.nlu.fine_tuning.task import Example, Model, Task, TaskBatch

logger = logging.getLogger(__name__)

SCORE = "score"
"""Key, in a line of the log, of the measure that says which checkpoint is best."""

BAR = {**FORMS, SCORE: "score {:.4f}"}
"""What the bar of a run tells."""


@dataclass(frozen=True)
class Course:
    """The updates of a run, as they follow from the number of examples.

    Attributes:
        updates: Epochs, size, rate.
        training: The rest.
        setting: What the recipe calls the section with the learning rate, for errors.
        examples: How many there are.
    """

    updates: UpdatesSection
    training: FineTuningSection
    setting: str
    examples: int

    @property
    def per_epoch(self) -> int:
        """Updates of an epoch."""
        return math.ceil(self.examples / self.updates.batch_size)

    @property
    def steps(self) -> int:
        """Updates of the whole run, at least one."""
        return max(1, round(self.per_epoch * self.updates.epochs))

    def members(self, step: int) -> list[int]:
        """The examples of an update, from 1: each once an epoch, in an order drawn by seed and epoch.

        Example:
            >>> updates = UpdatesSection(epochs=2, batch_size=2, learning_rate=1e-3)
            >>> course = Course(updates, FineTuningSection(), "updates", examples=3)
            >>> sorted(course.members(1) + course.members(2)), len(course.members(2)), course.steps
            ([0, 1, 2], 1, 4)
        """
        epoch, place = divmod(step - 1, self.per_epoch)
        order = np.random.default_rng([self.training.seed, epoch]).permutation(self.examples)
        first = place * self.updates.batch_size
        return [int(member) for member in order[first : first + self.updates.batch_size]]

    def is_marked(self, step: int) -> bool:
        """Whether the model is scored, and saved, behind an update."""
        return step > 0 and (step == self.steps or step % (self.updates.evaluate_every or self.per_epoch) == 0)


@dataclass(frozen=True)
class Session(Generic[Model, Example]):
    """What a session is about.

    Attributes:
        task: What is learnt.
        course: How long and how fast.
        out: Folder of the run.
        checkpoints: Of the run.
        device: Where the model is trained.
        progress: Show a bar.
    """

    task: Task[Model, Example]
    course: Course
    out: Path
    checkpoints: Checkpoints
    device: str
    progress: bool = False


def fine_tune(session: Session[Model, Example], first_model: Callable[[], Model], *, step: int | None) -> tuple[Progress, Model]:
    """Train until the end of the run, or until its score has not risen for long enough.

    Args:
        session: Its task, course and folder.
        first_model: Gives the model that a run starts from; not asked where there is a checkpoint.
        step: Updates that the checkpoint to go on from has done, 0 for a resumed run that has none; None for a run that begins.

    Returns:
        The progress at the end, and the model behind the last update, in evaluation mode.

    Raises:
        RunStoppedError: A signal came, and the run is saved.
        InputError: The loss is no number.
    """
    loop = _Loop(session, first_model, step or 0)
    if step is not None:
        loop.progress.resumed_at.append(step)
    with stop_requests() as stop, training_bar(loop.progress.step, session.course.steps, enabled=session.progress, forms=BAR) as show:
        loop.run(stop, show)
    return loop.progress, loop.model.eval()


@dataclass(frozen=True)
class _Update:
    """What was measured in an update."""

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int


class _Loop(Generic[Model, Example]):
    """A session in the doing."""

    def __init__(self, session: Session[Model, Example], first_model: Callable[[], Model], step: int) -> None:
        self._session: Session[Model, Example] = session
        self._log = RunLog(session.out / LOG)
        place = session.checkpoints.path(step)
        self.model: Model = (session.task.open(place) if step else first_model()).to(session.device)
        self._optimizer = make_optimizer(self.model, session.course.updates, session.course.training)
        if step:
            snapshot = read_snapshot(place)
            self.progress = snapshot.progress
            self._optimizer.load_state_dict(snapshot.optimizer)
            set_random_state(snapshot.random)
        else:
            self.progress = Progress()
            seed_random(session.course.training.seed)
        self._saved = step
        # A session that was killed behind a score may have left it in the log, while the checkpoint knows nothing of it yet.
        logged = read_log(session.out / LOG) if (session.out / LOG).exists() else []
        self._told = [line["step"] for line in logged if SCORE in line]
        self._earlier, self._start = self.progress.seconds, time.perf_counter()

    def run(self, stop: StopRequest, show: Show) -> None:
        """All updates that are left; a score that the last session had no time for first."""
        progress, course = self.progress, self._session.course
        self.model.train()
        while True:
            if stop.name is not None and progress.step:
                self._save()
                raise RunStoppedError(progress.step)
            if course.is_marked(progress.step) and progress.marked != progress.step:
                self._mark(show)
            elif progress.step and course.training.save_every and progress.step % course.training.save_every == 0:
                self._save()
            if self._over():
                return
            self._update(show)

    def _over(self) -> bool:
        progress, course = self.progress, self._session.course
        if course.training.patience is not None and progress.worse >= course.training.patience:
            logger.info("stopped after update %d: the last %d scores were no better than the best", progress.step, progress.worse)
            return True
        return progress.step >= course.steps

    def _update(self, show: Show) -> None:
        course, progress = self._session.course, self.progress
        began = time.perf_counter()
        update = self._step(progress.step + 1)
        now = time.perf_counter()
        progress.step += 1
        progress.tokens += update.tokens
        progress.window_updates += 1
        progress.window_loss += update.loss
        progress.window_tokens += update.tokens
        progress.window_seconds += now - began
        show(progress.step, {})
        if progress.step % course.training.log_every == 0 or progress.step == course.steps:
            self._write_window(update, show)

    def _step(self, step: int) -> _Update:
        """Forward, backward, and the optimiser's step unless there is something that is no number."""
        session, course = self._session, self._session.course
        members = [session.task.examples[place] for place in course.members(step)]
        batch = session.task.batch(members)
        on_device = TaskBatch(batch.packed.to(session.device), batch.targets)
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(torch.device(session.device).type, torch.bfloat16, enabled=course.training.precision == "bf16"):
            loss = session.task.loss(self.model, on_device)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        highest = course.training.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), math.inf if highest is None else highest)
        value, grad_norm = torch.stack([loss.detach(), norm.to(loss.dtype)]).tolist()  # one wait for the device an update
        if not (math.isfinite(value) and math.isfinite(grad_norm)):
            self._refuse(members, batch, step=step, loss=value, grad_norm=grad_norm)
        rate = course.updates.learning_rate * learning_rate_share(step, course.steps, warmup_ratio=course.training.warmup_ratio)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        return _Update(value, grad_norm, rate, batch.packed.num_tokens)

    def _refuse(self, members: Sequence[Example], batch: TaskBatch, *, step: int, loss: float, grad_norm: float) -> None:
        """Keep the batch that an update cannot be done with, and raise."""
        folder = self._session.out / NONFINITE / f"step-{step:06d}"
        features = {"ids": batch.packed.ids, "cu_seqlens": batch.packed.cu_seqlens, **batch.targets}
        rows = [self._session.task.described(member) for member in members]
        keep_batches(folder, [SeenBatch(rows, features, loss)], step=step, grad_norm=grad_norm)
        setting = f"{self._session.course.setting}.learning_rate"
        raise nonfinite_error(folder, step=step, loss=loss, grad_norm=grad_norm, setting=setting)

    def _write_window(self, update: _Update, show: Show) -> None:
        progress = self.progress
        line = {
            "loss": progress.window_loss / progress.window_updates,
            "learning_rate": update.learning_rate,
            "grad_norm": update.grad_norm,
            "tokens_per_second": progress.window_tokens / progress.window_seconds,
        }
        self._write(line, show)
        progress.window_updates = progress.window_tokens = 0
        progress.window_loss = progress.window_seconds = 0.0

    def _write(self, values: Mapping[str, int | float], show: Show) -> None:
        progress = self.progress
        progress.seconds = self._earlier + time.perf_counter() - self._start
        show(progress.step, values)
        epoch = progress.step / self._session.course.per_epoch
        self._log.append({"step": progress.step, "epoch": epoch, **values, "seconds": progress.seconds})

    def _mark(self, show: Show) -> None:
        """Score the model, if there is anything to score it on, and save it."""
        progress = self.progress
        with preserve_rng_state():
            measures = self._session.task.score(self.model)
        if measures:
            score = next(iter(measures.values()))
            if progress.step not in self._told:
                self._write({SCORE: score, **measures}, show)
            better = progress.best_score is None or score > progress.best_score
            if better:
                progress.best_step, progress.best_score = progress.step, score
            progress.worse = 0 if better else progress.worse + 1
        progress.marked = progress.step
        self._save()

    def _save(self) -> None:
        """A checkpoint behind the last update, unless there is one: a score that came later is found again by whoever goes on from it."""
        session, progress = self._session, self.progress
        if self._saved == progress.step:
            return
        progress.seconds = self._earlier + time.perf_counter() - self._start
        self._log.sync()
        with session.checkpoints.writing(progress.step) as folder:
            session.task.save(self.model, folder)
            write_snapshot(folder, self._optimizer, progress)
        self._saved = progress.step
        kept = set(session.checkpoints.steps()[-session.course.training.keep_checkpoints :])
        if progress.best_step is not None:
            kept.add(progress.best_step)
        session.checkpoints.keep(kept)
        logger.info("checkpoint of update %d saved", progress.step)
