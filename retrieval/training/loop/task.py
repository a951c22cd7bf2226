"""A retrieval recipe as a task of the trainer, and one session of its run."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quiver.encoder.lora import add_lora
from quiver.encoder.training.callbacks import FORMS, BarCallback, tensorboard, training_bar
from quiver.encoder.training.checkpoints import Checkpoints
from quiver.encoder.training.log import LOG, RunLog
from quiver.encoder.training.processes import Processes, stop_requests
from quiver.encoder.training.run_folder import CHECKPOINTS, START, TENSORBOARD
from quiver.encoder.training.trainer import Callback, Progress, RunOutput, Trainer, TrainerSettings, TrainingBatch
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.training.data import TrainingRows
from quiver.retrieval.training.loop.dataloader import BatchOrder, DataLoader
from quiver.retrieval.training.loop.optimization import Schedule, learning_rate_share, make_optimizer
from quiver.retrieval.training.loop.state import TrainState, open_snapshot_model, read_snapshot, write_snapshot
from quiver.retrieval.training.sections import Recipe

if TYPE_CHECKING:  # it imports the libraries of the extra
    from quiver.retrieval.training.student.build import Student

logger = logging.getLogger(__name__)

Model: TypeAlias = BiEncoder | ColBERT

SCORE = "ndcg@10"
"""Log key of the score on the development collection."""

Scorer: TypeAlias = Callable[[Model], float]
"""A model's score on the development collection; higher is better."""


@dataclass(frozen=True)
class Run:
    """A run, as one of its processes sees it.

    Attributes:
        recipe: What is trained, and how.
        out: Folder of the run.
        processes: Of the run.
        score: Scores a model on the development collection; given if and only if the recipe has one.
        progress: Show a progress bar.
        callbacks: Receive events of the training loop.
    """

    recipe: Recipe
    out: Path
    processes: Processes
    score: Scorer | None = None
    progress: bool = False
    callbacks: Sequence[Callback] = ()

    @property
    def checkpoints(self) -> Checkpoints:
        """Checkpoints of the run."""
        return Checkpoints(self.out / CHECKPOINTS)


class RetrievalTask:
    """A dense or ColBERT recipe as the trainer's task.

    Args:
        run: Recipe and processes.
        schedule: Length of the run.
        student: Model, loss and collator.
        state: The student's weights and optimizer.
        loader: The remaining batches.
    """

    def __init__(self, run: Run, schedule: Schedule, student: Student, state: TrainState, loader: DataLoader) -> None:
        self._run = run
        self._schedule = schedule
        self._student = student
        self._state = state
        self._loader = loader

    @property
    def module(self) -> nn.Module:
        """The model of sentence-transformers or PyLate around the weights."""
        library: nn.Module = self._student.library
        return library

    @property
    def optimizer(self) -> Optimizer:
        """Over all trained weights."""
        return self._state.optimizer

    @property
    def device(self) -> torch.device:
        """Device of the encoder."""
        return self._student.model.encoder.device

    def batches(self) -> Iterator[TrainingBatch]:
        """The remaining batches."""
        return iter(self._loader)

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        """The recipe's loss."""
        return self._student.batch_loss(inputs)

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step, counted from 1."""
        training = self._run.recipe.training
        return training.learning_rate * learning_rate_share(training, step - 1, self._schedule.steps)

    def set_learning_rate(self, step: int) -> None:
        """Advance the schedule."""
        del step  # the schedule counts by itself; its state is part of the checkpoint
        self._state.schedule.step()

    def evaluation_due(self, progress: Progress) -> bool:
        """Whether the development collection is scored after this step."""
        section = self._run.recipe.development
        return section is not None and self._due(section.every, progress)

    def evaluate(self) -> Mapping[str, float]:
        """nDCG@10 on the development collection, computed by the main process."""
        processes, score = self._run.processes, 0.0
        with self._state.together() as model:
            self.module.eval()
            if processes.is_main_process and model is not None and self._run.score is not None:
                score = self._run.score(model)
        return {SCORE: processes.broadcast(score)}

    def save_due(self, progress: Progress) -> bool:
        """Whether the recipe asks for a checkpoint after this step."""
        return self._due(self._run.recipe.training.save_every, progress)

    def save(self, folder: Path | None, progress: Progress, random_states: list[dict[str, Any]]) -> None:
        """Write a checkpoint, see `quiver.retrieval.training.loop.state`."""
        write_snapshot(folder, self._state, progress, random_states)

    def kept_steps(self, saved: list[int], progress: Progress) -> set[int]:
        """The newest that the recipe asks for, the best, and the current one.

        A checkpoint saved for a signal does not count: a run that was stopped ends with the checkpoints of one that was not.
        """
        training, development, best = self._run.recipe.training, self._run.recipe.development, progress.best_step
        planned = self._schedule.planned(saved, training.save_every, progress.epoch_ends)
        kept = {progress.step, *planned[-training.keep_checkpoints :]}
        return kept | {best} if development is not None and development.keep_best and best is not None else kept

    def _due(self, every: int | None, progress: Progress) -> bool:
        return self._schedule.due(every, progress.step, progress.epoch_ends)


def fit(run: Run, rows: TrainingRows, first_model: Callable[[], Model], *, step: int | None) -> tuple[Progress, Schedule]:
    """Train until the end of the run.

    Args:
        run: Its recipe, folder and processes.
        rows: Training data.
        first_model: Makes the model of a new run; not called if there is a checkpoint.
        step: Step of the checkpoint to resume, 0 for a resumed run without one; None for a new run.

    Returns:
        The progress at the end, and the schedule of the run.

    Raises:
        RunStoppedError: A signal came, and the run is saved.
        InputError: There are fewer rows than one batch, no batch can be filled, or the loss is not finite.
    """
    from quiver.retrieval.training.student.build import build_student  # imports the libraries of the extra

    recipe, processes = run.recipe, run.processes
    training = recipe.training
    order = batch_order(recipe, rows, processes)
    schedule = Schedule.of(recipe, order.per_epoch)
    model = _model(run, first_model, step=step or 0)
    student = build_student(recipe, model)
    if processes.is_main_process and not any(learning_rate_share(training, update, schedule.steps) for update in range(schedule.steps)):
        logger.warning(
            "nothing is trained: the warm-up begins with a learning rate of 0, and the run has one update; "
            "set training.warmup_ratio to 0, or raise training.max_steps"
        )
    state = _train_state(run, schedule, student)
    progress, random_states = read_snapshot(run.checkpoints.path(step), state) if step else (Progress(), None)
    if step is not None:
        progress.resumed_at.append(step)
    if progress.step == schedule.steps:  # killed after the last step
        return progress, schedule
    start, count = (progress.epoch, progress.epoch_batches), (schedule.steps - progress.step) * training.accumulation
    loader = DataLoader(order, rows, student.collator, processes, start=start, count=count)
    settings = TrainerSettings(
        steps=schedule.steps,
        accumulation=training.accumulation,
        batches_per_epoch=schedule.batches_per_epoch,
        max_grad_norm=training.max_grad_norm,
        log_every=training.log_every,
        seed=training.seed,
        keep_best=recipe.development is not None and recipe.development.keep_best,
        learning_rate_setting="training.learning_rate",
    )
    with ExitStack() as stack:
        stop = stack.enter_context(stop_requests())
        bar = training_bar(
            progress.step, schedule.steps, enabled=run.progress and processes.is_main_process, forms={**FORMS, SCORE: "nDCG@10 {:.4f}"}
        )
        board = tensorboard(
            run.out / TENSORBOARD, step=progress.step + 1, enabled=processes.is_main_process, names={SCORE: "development/ndcg_at_10"}
        )
        callbacks = [BarCallback(stack.enter_context(bar)), stack.enter_context(board), *run.callbacks]
        output = RunOutput(run.out, run.checkpoints, RunLog(run.out / LOG), callbacks)
        task = RetrievalTask(run, schedule, student, state, loader)
        Trainer(task, settings, output, processes, stop, progress, random_states).train()
    return progress, schedule


def batch_order(recipe: Recipe, rows: TrainingRows, processes: Processes) -> BatchOrder:
    """The batches of a run over all its processes.

    Raises:
        InputError: There are fewer rows than one batch.
    """
    training = recipe.training
    size = training.batch_size * processes.size
    return BatchOrder(rows, size=size, seed=training.seed, no_duplicates=training.no_duplicates, warn=processes.is_main_process)


def _train_state(run: Run, schedule: Schedule, student: Student) -> TrainState:
    training, shards = run.recipe.training, None
    if training.sharding == "full" and run.processes.size > 1:
        from quiver.retrieval.training.loop.fsdp import shard

        shards = shard(student.model, student.library, run.processes)
    optimizer, rates = make_optimizer(training, student.library.named_parameters(), schedule.steps)
    return TrainState(student.model, student.library, optimizer, rates, lora=training.lora is not None, shards=shards)


def _model(run: Run, first_model: Callable[[], Model], *, step: int) -> Model:
    """The model as it was at a step, with weights that can be trained; of a LoRA run the frozen weights alone."""
    lora, start = run.recipe.training.lora, run.out / START
    if lora is None:
        return open_snapshot_model(run.checkpoints.path(step)) if step else first_model()
    model = open_snapshot_model(start) if step else first_model()
    if not step and run.processes.is_main_process:
        # The starting model may have changed or be gone when the run is resumed, and the frozen weights must stay these.
        shutil.rmtree(start, ignore_errors=True)
        model.save(start)
    add_lora(model.encoder, rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout, seed=run.recipe.training.seed)
    return model
