"""The random generators that training draws from, as a value that can be kept and put back.

Python's, NumPy's (the global one, which libraries use), and torch's on the CPU and on this process's GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The state of all of them: numbers, text, tuples and tensors, for `quiver.encoder.training.state_files`."""
    name, words, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  # it is the global generator's state that counts
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(words).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `random_state` gave; a state from a machine without a GPU leaves the GPU's generator as it is."""
    random.setstate(state["python"])
    name, words, *rest = state["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *rest))  # noqa: NPY002  # as above
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_random(seed: int) -> None:
    """Seed all of them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # as above
    torch.manual_seed(seed)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Whatever the block draws, afterwards the generators are where they were before it."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
