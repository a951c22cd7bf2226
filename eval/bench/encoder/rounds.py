"""Timing in turns: everybody does the same work, round by round in one process.

A machine that slows down slows all of them, so that the ratio of a round means something where its seconds do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

import torch

from quiver.encoder.errors import InputError
from quiver.retrieval.progress import Advance

Pass = Callable[[], None]
"""One library's pass over the whole set; it returns when the work is done, not when it is queued."""


def time_in_turns(passes: Mapping[str, Pass], *, rounds: int, advance: Advance = lambda steps: None) -> dict[str, tuple[float, ...]]:
    """Run every pass once a round and time it.

    Args:
        passes: Library -> its pass, warmed up.
        rounds: How often each of them runs.
        advance: Told of every pass.

    Returns:
        Library -> seconds of each round.

    Raises:
        ValueError: rounds < 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}")
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(rounds):
        # Every other round runs backwards, so that nobody always follows the same neighbour.
        for name in list(passes)[:: -1 if number % 2 else 1]:
            started = perf_counter()
            passes[name]()
            seconds[name].append(perf_counter() - started)
            advance(1)
    return {name: tuple(each) for name, each in seconds.items()}


# What torch says where it raises no OutOfMemoryError: its allocator on a CPU, the CUDA runtime, cuBLAS.
OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


@contextmanager
def naming_who_ran_out(library: str, where: str) -> Iterator[None]:
    """Turn running out of memory into one line that says who, where and what to do.

    Raises:
        InputError: The block ran out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(f"{library} ran out of memory on {where}; give a smaller --batch-size or --batch-tokens") from error


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Let torch compute with so many threads inside the block; None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
