"""How many threads FAISS uses for a call, and torch for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import faiss
import torch

# FAISS's type stubs know nothing of what its Python layer adds.
_faiss: Any = faiss


@contextmanager
def one_thread() -> Iterator[None]:
    """FAISS on the calling thread alone: more of them make one query slower. What the caller had set is set again."""
    former = _faiss.omp_get_max_threads()
    if former == 1:
        yield
        return
    _faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        _faiss.omp_set_num_threads(former)


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
