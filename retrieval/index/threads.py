"""Threads: how many a library uses, and values that one thread creates for all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import faiss
import torch

# FAISS's type stubs know nothing of what its Python layer adds.
_faiss: Any = faiss


class one_thread:  # noqa: N801, a context as those of contextlib are named
    """FAISS on the calling thread alone: more of them make one query slower. What the caller had set is set again.

    A class, as every search enters it: a generator takes three times as long (2.4 us).
    """

    __slots__ = ("_former",)

    def __enter__(self) -> None:
        self._former: int = _faiss.omp_get_max_threads()
        if self._former > 1:
            _faiss.omp_set_num_threads(1)

    def __exit__(self, *error: object) -> None:
        if self._former > 1:
            _faiss.omp_set_num_threads(self._former)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Torch computes with so many threads; what the caller had set is set again."""
    former = torch.get_num_threads()
    if threads == former:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(former)


Made = TypeVar("Made")


class Lazy(Generic[Made]):
    """A place for something that takes seconds to make, and several times its own memory: one thread makes it, the others wait.

    Since Python 3.12 ``functools.cached_property`` lets every thread that comes in time make its own. How it is made is not kept: a bound
    method here would lead back to its owner, and what was made would stay until Python looks for circles.

    Example:
        >>> calls = []
        >>> once = Lazy()
        >>> once.get(lambda: calls.append("made")), once.get(lambda: calls.append("made again")), calls
        (None, None, ['made'])
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[Made] = []

    def get(self, make: Callable[[], Made]) -> Made:
        """What was made, now if it was not before; after an error the next one who asks tries again."""
        if not self._made:
            with self._lock:
                if not self._made:
                    self._made.append(make())
        return self._made[0]
