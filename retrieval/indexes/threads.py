"""How many threads FAISS uses for a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import faiss

# FAISS's type stubs know nothing of what its Python layer adds.
_faiss: Any = faiss


@contextmanager
def one_thread() -> Iterator[None]:
    """FAISS on the calling thread alone: more of them make one query slower. What the caller had set is set again."""
    former = _faiss.omp_get_max_threads()
    _faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        _faiss.omp_set_num_threads(former)
