"""The length of a run in updates, and after which of them something is due."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from quiver.retrieval.training.sections import Recipe


@dataclass(frozen=True)
class Course:
    """The length of a run.

    How many batches an epoch has is not known beforehand where no text may come twice in one; the number of updates is.

    Attributes:
        steps: Updates.
        batches_per_epoch: Full batches of the rows, which is what a pass over them has at most.
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

    def epochs(self, epoch: int, batches: int) -> float:
        """Passes over the rows that are done.

        Args:
            epoch: Whole ones.
            batches: Batches of the one that has begun.

        Example:
            >>> Course(steps=9, batches_per_epoch=4, accumulation=2).epochs(1, 2)
            1.5
        """
        return epoch + batches / self.batches_per_epoch

    def due(self, every: int | None, step: int, ends: Collection[int]) -> bool:
        """Whether what is done every so many updates, or with None at the end of each epoch, is done after this one.

        Args:
            every: So many; None for the end of each epoch.
            step: The update.
            ends: Updates in which an epoch ended.

        Example:
            >>> course = Course(steps=9, batches_per_epoch=4, accumulation=1)
            >>> [[step for step in range(1, 10) if course.due(every, step, ends=[4, 7])] for every in (None, 5)]
            [[4, 7, 9], [5, 9]]
        """
        return step == self.steps or (step % every == 0 if every else step in ends)

    def planned(self, steps: Iterable[int], every: int | None, ends: Collection[int]) -> list[int]:
        """Those of some steps after which something is `due`."""
        return [step for step in steps if self.due(every, step, ends)]
