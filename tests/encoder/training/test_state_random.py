"""Random generators of training: saved, restored, seeded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from quiver.encoder.training.state import preserve_rng_state, random_state, read_state, seed_random, set_random_state, write_state

Draw = tuple[float, float, tuple[float, ...], float, tuple[float, ...]]


def draw() -> Draw:
    """Draw from all three generators, also Gaussian numbers: Python and NumPy draw two of these at once and keep one."""
    drawn = (random.random(), random.gauss(0, 1), tuple(np.random.rand(2)), float(np.random.randn()), tuple(torch.rand(3).tolist()))  # noqa: NPY002
    assert len(set(drawn)) == 5
    return drawn


@pytest.fixture(autouse=True)
def back() -> Iterator[None]:
    with preserve_rng_state():
        yield


def test_a_restored_generator_draws_the_same_numbers(tmp_path: Path) -> None:
    seed_random(3)
    draw()
    state = random_state()
    first = [draw() for _ in range(400)]  # past the 624 words that the generators make at once
    set_random_state(state)
    assert [draw() for _ in range(400)] == first
    write_state(tmp_path / "state", state)
    set_random_state(read_state(tmp_path / "state"))
    assert [draw() for _ in range(400)] == first


def test_equal_seeds_draw_the_same_and_others_do_not() -> None:
    found = []
    for seed in (3, 3, 4, 2**32 - 1, 2**32 + 1):  # a process adds its rank to the recipe's seed
        seed_random(seed)
        found.append(draw())
    assert found[0] == found[1]
    assert all(one != other for drawn in found[2:] for one, other in zip(found[0], drawn, strict=True))


def test_preserve_rng_state_hides_draws_and_seeds_of_the_block() -> None:
    seed_random(3)
    expected = draw()

    def fail() -> None:
        with preserve_rng_state():
            draw()
            seed_random(99)
            raise ValueError("in the block")

    seed_random(3)
    with pytest.raises(ValueError, match="in the block"):
        fail()
    assert draw() == expected
