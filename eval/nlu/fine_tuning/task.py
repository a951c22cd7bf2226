"""Fine-tuning as a task of the trainer: examples with a head's loss, AdamW with linear warm-up and decay, checkpoints, early stopping.

Sources: AdamW, arXiv:1711.05101; BERT, arXiv:1810.04805, appendix A.2, for the schedule. Weight decay scaled by the learning rate's share
of its peak: section 3 of the AdamW paper, and Composer's DecoupledAdamW, which ModernBERT's release uses for fine-tuning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from quiver.encoder.heads import SequenceClassifier, SpanQA
from quiver.encoder.packing import PackedBatch
from quiver.encoder.training.callbacks import FORMS, BarCallback, training_bar
from quiver.encoder.training.checkpoints import Checkpoints
from quiver.encoder.training.log import LOG, RunLog
from quiver.encoder.training.processes import Processes, stop_requests
from quiver.encoder.training.state import read_state, write_state
from quiver.encoder.training.trainer import Progress, RunOutput, Trainer, TrainerSettings, TrainingBatch, read_progress
from quiver.eval.nlu.fine_tuning.sections import FineTuningSection, UpdatesSection

Model = TypeVar("Model", SequenceClassifier, SpanQA)
Example = TypeVar("Example")

SCORE = "score"
"""Log key of the measure that decides which checkpoint is best."""

STATE = "trainer"
"""Stem of the state files in a checkpoint."""

_PACKED = "packed"


@dataclass(frozen=True)
class TaskBatch:
    """A batch of examples.

    Attributes:
        packed: Tokens of the examples.
        targets: Targets of the loss by name, one row per example.
    """

    packed: PackedBatch
    targets: Mapping[str, Tensor]


class Task(Protocol[Model, Example]):
    """Examples to learn from, with their loss and score."""

    @property
    def examples(self) -> Sequence[Example]:
        """Training examples, at least one."""

    def batch(self, examples: Sequence[Example]) -> TaskBatch:
        """Put examples into one batch, in their order."""

    def loss(self, model: Model, batch: TaskBatch) -> Tensor:
        """The mean loss of a batch on the model's device, a float32 scalar."""

    def score(self, model: Model) -> Mapping[str, float]:
        """Measures on held-out examples, higher is better; the first decides which checkpoint is best. Empty if there are none.

        The model is in training mode before and after.
        """

    def described(self, example: Example) -> dict[str, Any]:
        """An example as JSON, for the report on a non-finite loss."""

    def save(self, model: Model, folder: Path) -> None:
        """Save the model and its tokenizer in the usual format."""

    def open(self, folder: Path) -> Model:
        """Load a model saved by `save`, in evaluation mode, on the CPU."""


@dataclass(frozen=True)
class Schedule:
    """The steps of a run and the examples of each.

    Attributes:
        updates: Epochs, batch size, learning rate.
        training: Other settings.
        setting: Name of the recipe's section with the learning rate, for error messages.
        examples: Number of training examples.
    """

    updates: UpdatesSection
    training: FineTuningSection
    setting: str
    examples: int

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        return math.ceil(self.examples / self.updates.batch_size)

    @property
    def steps(self) -> int:
        """Steps of the whole run, at least one."""
        return max(1, round(self.per_epoch * self.updates.epochs))

    def members(self, step: int) -> list[int]:
        """Row numbers of the examples of a step, from 1: each example once per epoch, in an order drawn by seed and epoch.

        Example:
            >>> updates = UpdatesSection(epochs=2, batch_size=2, learning_rate=1e-3)
            >>> schedule = Schedule(updates, FineTuningSection(), "updates", examples=3)
            >>> sorted(schedule.members(1) + schedule.members(2)), len(schedule.members(2)), schedule.steps
            ([0, 1, 2], 1, 4)
        """
        epoch, place = divmod(step - 1, self.per_epoch)
        order = np.random.default_rng([self.training.seed, epoch]).permutation(self.examples)
        first = place * self.updates.batch_size
        return [int(member) for member in order[first : first + self.updates.batch_size]]

    def evaluation_due(self, step: int) -> bool:
        """Whether the model is evaluated and saved after a step."""
        return step > 0 and (step == self.steps or step % (self.updates.evaluate_every or self.per_epoch) == 0)

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step, from 1."""
        return self.updates.learning_rate * learning_rate_share(step, self.steps, warmup_ratio=self.training.warmup_ratio)


def learning_rate_share(step: int, steps: int, *, warmup_ratio: float) -> float:
    """Share of the peak learning rate in a step.

    Args:
        step: From 1.
        steps: Steps of the whole run.
        warmup_ratio: Share of them in which the rate rises.

    Returns:
        Above 0, and 1 where the rise ends and the decay begins.

    Example:
        >>> [learning_rate_share(step, 6, warmup_ratio=0.3) for step in range(1, 7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warmup = math.ceil(steps * warmup_ratio)
    return step / warmup if step <= warmup else (steps - step + 1) / (steps - warmup)


def make_optimizer(model: nn.Module, updates: UpdatesSection, training: FineTuningSection) -> AdamW:
    """AdamW over all weights of a model; matrices decay, vectors (norms, biases) do not."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    # AdamW subtracts learning rate x decay. Dividing the decay by the peak rate gives decay x (share of the peak).
    decay = updates.weight_decay / updates.learning_rate if training.decoupled_decay else updates.weight_decay
    return AdamW(
        [
            {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": decay},
            {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
        ],
        lr=updates.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.eps,
    )


def set_learning_rate(optimizer: AdamW, learning_rate: float) -> None:
    """Set the learning rate of all weights."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


@dataclass(frozen=True)
class Session(Generic[Model, Example]):
    """One session of a run.

    Attributes:
        task: The task to learn.
        schedule: Steps and learning rates.
        out: Run folder.
        checkpoints: Checkpoints of the run.
        device: Device to train on.
        progress: Show a progress bar.
    """

    task: Task[Model, Example]
    schedule: Schedule
    out: Path
    checkpoints: Checkpoints
    device: str
    progress: bool = False


class _TrainerTask(Generic[Model, Example]):
    """Adapts a `Task` to the trainer."""

    def __init__(self, session: Session[Model, Example], model: Model, done: int) -> None:
        self._session: Session[Model, Example] = session
        self.model: Model = model
        self.optimizer = make_optimizer(model, session.schedule.updates, session.schedule.training)
        self.device = torch.device(session.device)
        self._done = done
        self.set_learning_rate(done)

    @property
    def module(self) -> nn.Module:
        return self.model

    def batches(self) -> Iterator[TrainingBatch]:
        task, schedule = self._session.task, self._session.schedule
        for step in range(self._done + 1, schedule.steps + 1):
            examples = [task.examples[row] for row in schedule.members(step)]
            batch = task.batch(examples)
            yield TrainingBatch(
                {_PACKED: batch.packed, **batch.targets},
                map(task.described, examples),
                texts=len(examples),
                truncated=0,
                tokens=batch.packed.num_tokens,
                next_position=divmod(step, schedule.per_epoch),
                ends_epoch=step % schedule.per_epoch == 0,
            )

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        batch = TaskBatch(inputs[_PACKED], {name: value for name, value in inputs.items() if name != _PACKED})
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._session.schedule.training.precision == "bf16"):
            return self._session.task.loss(self.model, batch)

    def learning_rate(self, step: int) -> float:
        return self._session.schedule.learning_rate(step)

    def set_learning_rate(self, step: int) -> None:
        if step < self._session.schedule.steps:
            set_learning_rate(self.optimizer, self.learning_rate(step + 1))

    def evaluation_due(self, progress: Progress) -> bool:
        return self._session.schedule.evaluation_due(progress.step)

    def evaluate(self) -> Mapping[str, float]:
        measures = self._session.task.score(self.model)
        return {SCORE: next(iter(measures.values())), **measures} if measures else {}

    def save_due(self, progress: Progress) -> bool:
        every = self._session.schedule.training.save_every
        return self.evaluation_due(progress) or (every is not None and progress.step % every == 0)

    def save(self, folder: Path | None, progress: Progress, random_states: list[dict[str, Any]]) -> None:
        if folder is not None:
            self._session.task.save(self.model, folder)
            write_state(folder / STATE, {"optimizer": self.optimizer.state_dict(), "random": random_states, "progress": asdict(progress)})

    def kept_steps(self, saved: list[int], progress: Progress) -> set[int]:
        newest = set(saved[-self._session.schedule.training.keep_checkpoints :])
        return newest if progress.best_step is None else newest | {progress.best_step}


def fine_tune(session: Session[Model, Example], first_model: Callable[[], Model], *, step: int | None) -> tuple[Progress, Model]:
    """Train until the end of the run, or until the score has not risen for ``patience`` evaluations.

    Args:
        session: Session with the task, schedule and run folder.
        first_model: Returns the initial model of a new run; not called if training continues from a checkpoint.
        step: Step of the checkpoint to resume, 0 for a resumed run without one; None for a new run.

    Returns:
        The progress at the end, and the model after the last step, in evaluation mode.

    Raises:
        RunStoppedError: SIGTERM or SIGINT was received; the run was saved.
        InputError: The loss is not finite.
    """
    schedule, place = session.schedule, session.checkpoints.path(step or 0)
    model: Model = (session.task.open(place) if step else first_model()).to(session.device)
    task = _TrainerTask(session, model, step or 0)
    progress, random_states = Progress(), None
    if step:
        state = read_state(place / STATE)
        progress = read_progress(state, place)
        random_states = state["random"]
        task.optimizer.load_state_dict(state["optimizer"])
    if step is not None:
        progress.resumed_at.append(step)
    highest = schedule.training.max_grad_norm
    settings = TrainerSettings(
        steps=schedule.steps,
        accumulation=1,
        batches_per_epoch=schedule.per_epoch,
        max_grad_norm=math.inf if highest is None else highest,
        log_every=schedule.training.log_every,
        seed=schedule.training.seed,
        keep_best=False,  # every evaluated step is saved
        learning_rate_setting=f"{schedule.setting}.learning_rate",
        patience=schedule.training.patience,
    )
    forms = {**FORMS, SCORE: "score {:.4f}"}
    with stop_requests() as stop, training_bar(progress.step, schedule.steps, enabled=session.progress, forms=forms) as show:
        output = RunOutput(session.out, session.checkpoints, RunLog(session.out / LOG), [BarCallback(show)])
        Trainer(task, settings, output, Processes(), stop, progress, random_states).train()
    return progress, model.eval()
