"""Threads: temporary thread limits of FAISS and torch, and lazily created values that threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import faiss
import torch

# FAISS's type stubs lack the functions that its Python layer adds.
_faiss: Any = faiss


class one_thread:  # noqa: N801, a context as those of contextlib are named
    """Limit FAISS to one thread, because more threads make a single query slower; the previous number is restored on exit.

    A class, because every search enters it and a generator-based context manager takes three times as long (2.4 us).
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
    """Limit torch to a number of threads; the previous number is restored on exit."""
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
    """A value that is expensive to create: one thread creates it, the others wait.

    Since Python 3.12, ``functools.cached_property`` lets concurrent threads create the value several times. The factory is not stored: a
    bound method would form a reference cycle and keep the value alive until the next garbage collection.

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
        """Return the value, creating it on first use; if creation fails, the next call tries again."""
        if not self._made:
            with self._lock:
                if not self._made:
                    self._made.append(make())
        return self._made[0]
