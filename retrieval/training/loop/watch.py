"""What happens between two updates: the log, the bar, the scores, the checkpoints, the end.

Importing this module imports transformers (extra ``train``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from quiver.encoder.training.bar import Show
from quiver.encoder.training.checkpoints import Checkpoints
from quiver.encoder.training.log import RunLog
from quiver.encoder.training.processes import Processes
from quiver.encoder.training.random_state import preserve_rng_state, random_state, seed_random, set_random_state
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.training.loop.batches import Batch
from quiver.retrieval.training.loop.board import SCORE, Board
from quiver.retrieval.training.loop.course import Course
from quiver.retrieval.training.loop.optimizers import learning_rate_share
from quiver.retrieval.training.loop.snapshot import Progress, Trainee, write_snapshot
from quiver.retrieval.training.sections import Recipe

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """One update, over all processes.

    Attributes:
        loss: Mean over its batches.
        grad_norm: L2 norm of its gradient, before clipping.
        texts: Texts that were read for it.
        truncated: Texts that were cut.
        tokens: Tokens of the texts.
        stop: Somebody has asked one of the processes to stop.
        batches: What it was done with, at least one.
    """

    loss: float
    grad_norm: float
    texts: int
    truncated: int
    tokens: int
    stop: bool
    batches: Sequence[Batch]


@dataclass(frozen=True)
class Place:
    """Where a run leaves what it does.

    Attributes:
        checkpoints: Of the run.
        log: Of the run.
        board: TensorBoard, or nothing.
        show: The bar, or nothing.
    """

    checkpoints: Checkpoints
    log: RunLog
    board: Board
    show: Show


class Watch(TrainerCallback):  # type: ignore[misc]  # the library is untyped
    """Follows a trainer from update to update.

    Args:
        recipe: What is logged, scored and kept when.
        course: How long it takes.
        processes: Of the run.
        place: Where things are written.
        score: Scores a model on the development collection; given if the recipe has one.
    """

    def __init__(
        self, recipe: Recipe, course: Course, processes: Processes, place: Place, score: Callable[[BiEncoder | ColBERT], float] | None
    ) -> None:
        self.progress = Progress()
        self.stopped = False
        """The run was asked to stop before its last update, and did."""
        self._recipe = recipe
        self._course = course
        self._processes = processes
        self._place = place
        self._score = score
        self._trainee: Trainee | None = None
        self._random: list[dict[str, Any]] | None = None
        self._began = False
        self._last: Update | None = None
        self._mark = self._start = time.perf_counter()
        self._earlier = 0.0

    def attach(self, trainee: Trainee, progress: Progress, random: list[dict[str, Any]] | None) -> None:
        """Say what is trained, and from where on.

        Args:
            trainee: In the state that ``progress`` tells of.
            progress: Changed in place from now on.
            random: States of the generators by process; None for a run that begins.
        """
        self._trainee, self.progress, self._random = trainee, progress, random
        self._earlier = progress.seconds

    def measured(self, update: Update) -> None:
        """Take what is known of an update when its gradient is, before it is done."""
        self._last = update

    def on_train_begin(self, args: object, state: Any, control: object, **others: object) -> None:
        """Count on from where an earlier session stopped."""
        del args, control, others
        state.global_step = self.progress.step
        self._mark = self._start = time.perf_counter()

    def on_step_begin(self, args: object, state: object, control: object, **others: object) -> None:
        """Before the first update set the generators: nothing that the libraries draw before it counts."""
        del args, state, control, others
        if self._began:
            return
        self._began = True
        rank = self._processes.rank
        if self._random is None:
            seed_random(self._recipe.training.seed + rank)  # ranks with equal generators would drop out the same units
        else:
            set_random_state(self._random[rank])

    def on_step_end(self, args: object, state: Any, control: Any, **others: object) -> None:
        """After an update: count, log, score, save, stop, in this order, so that a checkpoint knows all that was logged."""
        del args, others
        if self._last is None or self._trainee is None:
            raise ValueError("a watch is attached to a trainee, and the trainer tells it what it measured")
        update, progress, course = self._last, self.progress, self._course
        progress.step = state.global_step
        self._count(update)
        self._place.show(progress.step, {})
        if self._due(self._recipe.training.log_every) and progress.window_updates:
            self._write_window(update)
        best = self._scored(self._trainee)
        self.stopped = update.stop and progress.step < course.steps
        if best or self.stopped or self._due(self._recipe.training.save_every):
            self._save(self._trainee)
        control.should_training_stop = self.stopped or progress.step >= course.steps
        self._mark = time.perf_counter()  # what was done here is no part of the next update's time

    def _due(self, every: int | None) -> bool:
        return self._course.due(every, self.progress.step, self.progress.epoch_ends)

    def _count(self, update: Update) -> None:
        progress, now = self.progress, time.perf_counter()
        progress.epoch, progress.epoch_batches = update.batches[-1].then
        if any(batch.last for batch in update.batches):
            progress.epoch_ends.append(progress.step)
        progress.texts += update.texts
        progress.truncated += update.truncated
        progress.tokens += update.tokens
        progress.window_updates += 1
        progress.window_loss += update.loss
        progress.window_tokens += update.tokens
        progress.window_seconds += now - self._mark
        progress.seconds = self._earlier + now - self._start

    def _write_window(self, update: Update) -> None:
        progress, training = self.progress, self._recipe.training
        share = learning_rate_share(training, progress.step - 1, self._course.steps)
        line = {
            "loss": progress.window_loss / progress.window_updates,
            "learning_rate": training.learning_rate * share,
            "grad_norm": update.grad_norm,
            "tokens_per_second": progress.window_tokens / progress.window_seconds,
        }
        self._write(line)
        progress.window_updates = progress.window_tokens = 0
        progress.window_loss = progress.window_seconds = 0.0

    def _write(self, values: dict[str, float]) -> None:
        step = self.progress.step
        self._place.show(step, values)
        if self._processes.leads:
            epochs = self._course.epochs(self.progress.epoch, self.progress.epoch_batches)
            self._place.log.append({"step": step, "epoch": epochs, **values, "seconds": self.progress.seconds})
            self._place.board.write(step, values)

    def _scored(self, trainee: Trainee) -> bool:
        """Score the model if it is time to; whether its weights are to be kept as the best so far."""
        section = self._recipe.development
        if section is None or self._score is None or not self._due(section.every):
            return False
        score = 0.0
        with preserve_rng_state(), trainee.together() as model:
            trainee.library.eval()
            if self._processes.leads and model is not None:
                score = self._score(model)
            trainee.library.train()
        score = self._processes.told(score)
        self.progress.seconds = self._earlier + time.perf_counter() - self._start
        self._write({SCORE: score})
        if self.progress.best_score is not None and score <= self.progress.best_score:
            return False
        self.progress.best_score, self.progress.best_step = score, self.progress.step
        return section.keep_best

    def _save(self, trainee: Trainee) -> None:
        states = self._processes.gathered(random_state())
        self.progress.seconds = self._earlier + time.perf_counter() - self._start
        if not self._processes.leads:
            write_snapshot(None, trainee, self.progress, states)
            return
        self._place.log.sync()
        step, checkpoints = self.progress.step, self._place.checkpoints
        with checkpoints.writing(step) as folder:
            write_snapshot(folder, trainee, self.progress, states)
        checkpoints.keep(self._kept(checkpoints.steps()))
        logger.info("checkpoint of step %d saved", step)

    def _kept(self, steps: list[int]) -> set[int]:
        """The newest, the best, and of those that the recipe asks for as many as it says.

        What a signal has left is none of these: a run that was stopped has the same checkpoints in the end as one that was not.
        """
        training, development, best = self._recipe.training, self._recipe.development, self.progress.best_step
        planned = self._course.planned(steps, training.save_every, self.progress.epoch_ends)
        kept = {self.progress.step, *planned[-training.keep_checkpoints :]}
        return kept | {best} if development is not None and development.keep_best and best is not None else kept
