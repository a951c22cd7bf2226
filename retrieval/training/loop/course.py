"""The length of a run in updates, and after which of them something is due."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from retrieval.training.sections import Recipe


@dataclass(frozen=True)
class Course:
    """The length of a run.

    Attributes:
        steps: Updates.
        batches_per_epoch: Batches of a pass over the rows.
        accumulation: Batches of an update.
    """

    steps: int
    batches_per_epoch: int
    accumulation: int

    @classmethod
    def of(cls, recipe: Recipe, batches_per_epoch: int) -> Course:
        """The course of a recipe."""
        training = recipe.training
        steps = max(1, math.ceil(batches_per_epoch * training.epochs / training.accumulation))
        return cls(steps if training.max_steps is None else min(steps, training.max_steps), batches_per_epoch, training.accumulation)

    def epoch(self, step: int) -> float:
        """Passes over the rows that are done after so many updates.

        Example:
            >>> Course(steps=9, batches_per_epoch=4, accumulation=2).epoch(3)
            1.5
        """
        return step * self.accumulation / self.batches_per_epoch

    def due(self, every: int | None, step: int) -> bool:
        """Whether what is done every so many updates, or with None at the end of each epoch, is done after this one.

        Example:
            >>> course = Course(steps=9, batches_per_epoch=4, accumulation=2)
            >>> [step for step in range(1, 10) if course.due(None, step)], [step for step in range(1, 10) if course.due(5, step)]
            ([2, 4, 6, 8, 9], [5, 9])
        """
        if step == self.steps:
            return True
        return step % every == 0 if every else int(self.epoch(step)) > int(self.epoch(step - 1))

    def planned(self, steps: Iterable[int], every: int | None) -> list[int]:
        """Those of some steps after which something is `due`."""
        return [step for step in steps if self.due(every, step)]
