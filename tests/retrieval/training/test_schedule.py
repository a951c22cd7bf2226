"""Number of steps of a run, and the steps after which periodic actions are due."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quiver.retrieval.training.recipe import Recipe
from quiver.retrieval.training.state import Schedule

MakeRecipe = Callable[..., Recipe]


@pytest.mark.parametrize(
    ("overrides", "batches", "steps"),
    [
        ((), 8, 8),
        (("training.epochs=1.5",), 8, 12),
        (("training.epochs=2.01",), 8, 17),
        (("training.epochs=0.001",), 8, 1),
        (("training.accumulation=3",), 8, 3),
        (("training.accumulation=3", "training.epochs=3"), 8, 8),
        (("training.accumulation=100",), 8, 1),
        (("training.max_steps=5",), 8, 5),
        (("training.max_steps=500",), 8, 8),
        (("training.max_steps=3", "training.accumulation=2", "training.epochs=4"), 8, 3),
    ],
)
def test_steps_of_a_run_follow_from_rows_and_settings(
    make_recipe: MakeRecipe, overrides: tuple[str, ...], batches: int, steps: int
) -> None:
    schedule = Schedule.of(make_recipe("dense", *overrides), batches)
    assert schedule.steps == steps
    assert schedule.batches_per_epoch == batches


def test_passes_over_the_rows_are_fractional() -> None:
    schedule = Schedule(steps=10, batches_per_epoch=16, accumulation=3)
    assert [schedule.epochs(*done) for done in ((0, 0), (0, 6), (1, 0), (2, 4))] == [0.0, 0.375, 1.0, 2.25]


def test_periodic_actions_are_due_at_their_steps() -> None:
    schedule = Schedule(steps=7, batches_per_epoch=4, accumulation=1)
    assert [step for step in range(1, 8) if schedule.due(3, step, ends=[2])] == [3, 6, 7]
    assert [step for step in range(1, 8) if schedule.due(100, step, ends=[2])] == [7]
    assert [step for step in range(1, 8) if schedule.due(None, step, ends=[2, 5])] == [2, 5, 7]
    assert schedule.planned([1, 3, 4, 5, 7], 3, ends=[4]) == [3, 7]
    assert schedule.planned([1, 3, 4, 5, 7], None, ends=[4]) == [4, 7]
