"""How long a run takes, and after which updates something is due."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest

from retrieval.training.loop.course import Course
from retrieval.training.sections import Recipe

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
def test_updates_of_a_run(make_recipe: MakeRecipe, overrides: tuple[str, ...], batches: int, steps: int) -> None:
    course = Course.of(make_recipe("dense", *overrides), batches)
    assert course.steps == steps
    assert course.batches_per_epoch == batches


@pytest.mark.parametrize("batches", [1, 2, 3, 7, 10, 49, 98])
@pytest.mark.parametrize("accumulation", [1, 2, 3, 7, 64])
def test_the_end_of_an_epoch_is_due_once(batches: int, accumulation: int) -> None:
    course = Course(steps=10_000, batches_per_epoch=batches, accumulation=accumulation)
    done = [Fraction(step * accumulation, batches) for step in range(400)]
    assert [course.due(None, step) for step in range(1, 400)] == [int(now) > int(before) for before, now in pairwise(done)]
    assert course.epoch(300) == float(done[300])


def test_the_last_update_is_always_due() -> None:
    course = Course(steps=7, batches_per_epoch=4, accumulation=1)
    assert [step for step in range(1, 8) if course.due(3, step)] == [3, 6, 7]
    assert [step for step in range(1, 8) if course.due(100, step)] == [7]
    assert [step for step in range(1, 8) if course.due(None, step)] == [4, 7]
    assert course.planned([1, 3, 4, 5, 7], 3) == [3, 7]
    assert course.planned([1, 3, 4, 5, 7], None) == [4, 7]
