"""Indexes of FAISS in files: written through the disk, read within limits.

A file is read only after its checksum has been compared, which is the store's affair: a name that ends in ``.faiss`` says so to it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.disk import Disk
from quiver.retrieval.index.errors import DamagedIndexError

# FAISS's type stubs know nothing of what its Python layer adds.
_faiss: Any = faiss

_BUFFER = 1 << 20
# The limits are FAISS's, for the whole process.
_READING = threading.Lock()


def write_index(index: Any, path: Path, disk: Disk) -> None:
    """Write an index to a new file.

    Raises:
        OSError: The disk's.
    """
    errors: list[OSError] = []
    with disk.create(path) as file:

        def write(data: bytes) -> int:
            if not errors:  # FAISS has to be let go on: an exception does not come back out of it
                try:
                    file.write(data)
                except OSError as error:
                    errors.append(error)
            return len(data)

        faiss.write_index(index, _faiss.PyCallbackIOWriter(write, _BUFFER))
        if errors:
            raise errors[0]


def index_bytes(index: Any) -> int:
    """Size of an index as FAISS writes it."""
    written = 0

    def count(data: bytes) -> int:
        nonlocal written
        written += len(data)
        return len(data)

    faiss.write_index(index, _faiss.PyCallbackIOWriter(count))
    return written


def read_index(content: NDArray[np.uint8], path: Path) -> Any:
    """Read an index whose bytes are known to be those that were written.

    Args:
        content: The file, mapped.
        path: Where it is, for errors.

    Raises:
        DamagedIndexError: It is no index, or one of its parts would be larger than the file.
    """
    stream = _Stream(content)
    try:
        with _limits(len(content)):
            return faiss.read_index(_faiss.PyCallbackIOReader(stream.read, _BUFFER))
    except RuntimeError as error:
        raise DamagedIndexError(f"{path}: FAISS cannot read it; quiver index repair") from error


class _Stream:
    """Bytes, from the first to the last."""

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self._content = content
        self._place = 0

    def read(self, size: int) -> bytes:
        part = self._content[self._place : self._place + size]
        self._place += len(part)
        return part.tobytes()


@contextmanager
def _limits(size: int) -> Iterator[None]:
    """No part of what is read is larger than so many bytes; older versions of FAISS cannot be told."""
    if not hasattr(_faiss, "set_deserialization_vector_byte_limit"):
        yield
        return
    with _READING:
        former = _faiss.get_deserialization_vector_byte_limit()
        _faiss.set_deserialization_vector_byte_limit(size + 1)  # what is read has to be smaller than the limit
        try:
            yield
        finally:
            _faiss.set_deserialization_vector_byte_limit(former)
