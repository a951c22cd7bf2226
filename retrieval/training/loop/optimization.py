"""Optimizers, learning rates and the schedule of a recipe.

Matrices and embeddings decay; biases and the scales of norms do not, as in transformers' trainer.

Source: AdamW, arXiv:1711.05101; its schedule-free form, arXiv:2405.15682 (package schedulefree); transformers' schedules.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from quiver.encoder.training import optimization as schedules
from quiver.encoder.training.optimization import OptimizerSettings
from quiver.retrieval.training.sections import Recipe, TrainingSection

SCHEDULE_FREE = "schedule_free_adamw"


def warmup_steps(training: TrainingSection, steps: int) -> int:
    """Steps in which the learning rate rises."""
    return math.ceil(steps * training.warmup_ratio)


def learning_rate_share(training: TrainingSection, update: int, steps: int) -> float:
    """Learning rate of a step as a share of its peak.

    Args:
        training: Scheduler and warm-up.
        update: Steps done before it.
        steps: Steps of the whole run.
    """
    warmup = warmup_steps(training, steps)
    if training.optimizer == SCHEDULE_FREE and update < warmup:
        return (update + 1) / warmup  # schedules of transformers start at zero, the schedule-free form does not
    return schedules.learning_rate_share(update, warmup=warmup, decay_start=warmup, total=steps, decay=training.scheduler)


def make_optimizer(training: TrainingSection, parameters: Iterable[nn.Parameter], steps: int) -> tuple[Optimizer, LambdaLR]:
    """The optimizer of a recipe and its schedule.

    Args:
        training: Optimizer, learning rate, weight decay and warm-up.
        parameters: Those without gradients are left out.
        steps: Steps of the whole run.

    Raises:
        InputError: The package of the optimizer is not installed.
    """
    settings = OptimizerSettings(
        training.optimizer, training.learning_rate, training.weight_decay, warmup_steps=warmup_steps(training, steps), fused=True
    )
    optimizer = schedules.make_optimizer(settings, parameters)
    if training.optimizer == SCHEDULE_FREE:
        return optimizer, LambdaLR(optimizer, lambda update: 1.0)  # it has its own
    return optimizer, LambdaLR(optimizer, lambda update: learning_rate_share(training, update, steps))


def has_two_weights(optimizer: Optimizer) -> bool:
    """Whether the weights that are trained on are not those that the model is used with, as in the schedule-free form."""
    return callable(getattr(optimizer, "eval", None))


@contextmanager
def weights_for_use(optimizer: Optimizer) -> Iterator[None]:
    """In the block the model has the weights that it is used with; afterwards, to the bit, those it is trained on."""
    if not has_two_weights(optimizer):
        yield
        return
    groups: list[dict[str, Any]] = optimizer.param_groups
    parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
    kept = [parameter.detach().clone() for parameter in parameters]
    modes = [group["train_mode"] for group in groups]
    optimizer.eval()  # type: ignore[attr-defined]  # has_two_weights says that it is there
    try:
        yield
    finally:
        # Not optimizer.train(): going there and back by interpolation would round, and saving would change the run.
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
        for group, mode in zip(groups, modes, strict=True):
            group["train_mode"] = mode


@dataclass(frozen=True)
class Schedule:
    """The length of a run in steps, and after which of them it logs, evaluates and saves.

    The number of steps is fixed in advance. The number of batches in an epoch is not, where no text may occur twice in a batch.

    Attributes:
        steps: Optimizer steps.
        batches_per_epoch: Full batches that the rows make; the most that an epoch can have.
        accumulation: Batches per step.
    """

    steps: int
    batches_per_epoch: int
    accumulation: int

    @classmethod
    def of(cls, recipe: Recipe, batches_per_epoch: int) -> Schedule:
        """The schedule of a recipe."""
        training = recipe.training
        steps = max(1, math.ceil(batches_per_epoch * training.epochs / training.accumulation))
        return cls(steps if training.max_steps is None else min(steps, training.max_steps), batches_per_epoch, training.accumulation)

    def epochs(self, epoch: int, batches: int) -> float:
        """Passes over the rows, as a fraction.

        Args:
            epoch: Complete passes.
            batches: Batches done in the current one.

        Example:
            >>> Schedule(steps=9, batches_per_epoch=4, accumulation=2).epochs(1, 2)
            1.5
        """
        return epoch + batches / self.batches_per_epoch

    def due(self, every: int | None, step: int, ends: Collection[int]) -> bool:
        """Whether a periodic action is due after a step; after the last step it always is.

        Args:
            every: Period in steps; None for the end of each epoch.
            step: The step, from 1.
            ends: Steps in which an epoch ended.

        Example:
            >>> schedule = Schedule(steps=9, batches_per_epoch=4, accumulation=1)
            >>> [[step for step in range(1, 10) if schedule.due(every, step, ends=[4, 7])] for every in (None, 5)]
            [[4, 7, 9], [5, 9]]
        """
        return step == self.steps or (step % every == 0 if every else step in ends)

    def planned(self, steps: Iterable[int], every: int | None, ends: Collection[int]) -> list[int]:
        """The steps after which a periodic action is due, see `due`."""
        return [step for step in steps if self.due(every, step, ends)]
