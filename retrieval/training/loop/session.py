"""One session of a run: from its first update, or from a checkpoint, to its last update or a signal."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from quiver.encoder.lora import add_lora
from quiver.encoder.training.bar import FORMS, training_bar
from quiver.encoder.training.checkpoints import Checkpoints
from quiver.encoder.training.log import LOG, RunLog
from quiver.encoder.training.processes import Processes
from quiver.encoder.training.stopping import RunStoppedError, stop_requests
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.training.data import TrainingRows
from quiver.retrieval.training.loop.batches import BatchOrder
from quiver.retrieval.training.loop.board import SCORE, tensorboard
from quiver.retrieval.training.loop.course import Course
from quiver.retrieval.training.loop.feed import Feed
from quiver.retrieval.training.loop.optimizers import learning_rate_share, make_optimizer
from quiver.retrieval.training.loop.snapshot import Progress, Trainee, open_snapshot_model, read_snapshot
from quiver.retrieval.training.run_folder import CHECKPOINTS, START, TENSORBOARD
from quiver.retrieval.training.sections import Recipe

logger = logging.getLogger(__name__)

Model: TypeAlias = BiEncoder | ColBERT
BAR = {**FORMS, SCORE: "nDCG@10 {:.4f}"}
"""What the bar of a run tells."""

Scorer: TypeAlias = Callable[[Model], float]
"""A model's score on the development collection; higher is better."""


@dataclass(frozen=True)
class Session:
    """What a session is about.

    Attributes:
        recipe: What is trained, and how.
        out: Folder of the run.
        processes: Those of the session.
        score: Scores the model on the development collection, if the recipe has one.
        progress: Show a bar, in the process that leads.
    """

    recipe: Recipe
    out: Path
    processes: Processes
    score: Scorer | None = None
    progress: bool = False

    @property
    def checkpoints(self) -> Checkpoints:
        """Of the run."""
        return Checkpoints(self.out / CHECKPOINTS)


def fit(session: Session, rows: TrainingRows, first_model: Callable[[], Model], *, step: int | None) -> tuple[Progress, Course]:
    """Train until the end of the run.

    Args:
        session: Its recipe, folder and processes.
        rows: What is trained on.
        first_model: Gives the model that a run starts from; not asked where there is a checkpoint.
        step: Updates that the checkpoint to go on from has done, 0 for a resumed run that has none; None for a run that begins.

    Returns:
        The progress at the end, and the course of the run.

    Raises:
        RunStoppedError: A signal came, and the run is saved.
        InputError: There are fewer rows than one batch, no batch can be filled, or the loss is no number.
    """
    from quiver.retrieval.training.loop.trainer import Fitting, Trainer
    from quiver.retrieval.training.loop.watch import Place, Watch
    from quiver.retrieval.training.student.build import build_student  # these import the libraries of the extra

    recipe, processes = session.recipe, session.processes
    training = recipe.training
    order = batch_order(recipe, rows, processes)
    course = Course.of(recipe, order.per_epoch)
    model = _model(session, first_model, step=step or 0)
    student = build_student(recipe, model)
    if processes.leads and not any(learning_rate_share(training, update, course.steps) for update in range(course.steps)):
        logger.warning(
            "nothing is trained: the warm-up begins with a learning rate of 0, and the run has one update; "
            "set training.warmup_ratio to 0, or raise training.max_steps"
        )
    shards = None
    if training.sharding == "full" and processes.size > 1:
        from quiver.retrieval.training.loop.fsdp import shard

        shards = shard(model, student.library, processes)
    optimizer, schedule = make_optimizer(training, student.library.named_parameters(), course.steps)
    trainee = Trainee(model, student.library, optimizer, schedule, lora=training.lora is not None, shards=shards)
    progress, random = read_snapshot(session.checkpoints.path(step), trainee) if step else (Progress(), None)
    if step is not None:
        progress.resumed_at.append(step)
    done = progress.step
    if done == course.steps:  # killed after its last update
        return progress, course
    start, count = (progress.epoch, progress.epoch_batches), (course.steps - done) * training.accumulation
    feed = Feed(order, rows, student.collator, processes, start=start, count=count)
    with (
        stop_requests() as stop,
        training_bar(done, course.steps, enabled=session.progress and processes.leads, forms=BAR) as show,
        tensorboard(session.out / TENSORBOARD, step=done + 1, enabled=processes.leads) as board,
    ):
        place = Place(session.checkpoints, RunLog(session.out / LOG), board, show)
        watch = Watch(recipe, course, processes, place, session.score)
        watch.attach(trainee, progress, random)
        try:
            Trainer(Fitting(recipe, course.steps, student, trainee, feed, processes, watch, stop), session.out).train()
        finally:
            student.library.eval()
    if watch.stopped:
        raise RunStoppedError(progress.step)
    return progress, course


def batch_order(recipe: Recipe, rows: TrainingRows, processes: Processes) -> BatchOrder:
    """The batches of a run over all its processes.

    Raises:
        InputError: There are fewer rows than one batch.
    """
    training = recipe.training
    size = training.batch_size * processes.size
    return BatchOrder(rows, size=size, seed=training.seed, no_duplicates=training.no_duplicates, warn=processes.leads)


def _model(session: Session, first_model: Callable[[], Model], *, step: int) -> Model:
    """The model as it was at a step, with weights to be trained; those of a LoRA run without what is trained of it."""
    lora, start = session.recipe.training.lora, session.out / START
    if lora is None:
        return open_snapshot_model(session.checkpoints.path(step)) if step else first_model()
    model = open_snapshot_model(start) if step else first_model()
    if not step and session.processes.leads:
        # What it starts from may have changed, or be gone, when the run goes on; its frozen weights must be these.
        shutil.rmtree(start, ignore_errors=True)
        model.save(start)
    add_lora(model.encoder, rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout, seed=session.recipe.training.seed)
    return model
