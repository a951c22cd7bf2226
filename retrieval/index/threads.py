"""How many threads FAISS uses for a call, and torch for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
