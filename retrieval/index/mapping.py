"""Files mapped into memory without an open descriptor each.

Python's ``mmap``, and with it ``numpy.memmap``, keeps a duplicate of the descriptor for as long as the mapping lives; Python 3.13 can be
told not to (``trackfd=False``). A segment has a dozen files: an index of twenty segments, or a build that merges a hundred pieces, would
reach the limit of open files, which is 256 on macOS and 1,024 on most Linux systems. The system itself needs no descriptor once a file is
mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path, size: int) -> NDArray[np.uint8]:
    """The bytes of a file, (size,), mapped read-only: nothing is read until it is used.

    Args:
        path: The file.
        size: Its size in bytes, at least 1.

    Raises:
        OSError: It cannot be opened or mapped.
    """
    if os.name == "nt":  # no mmap there to call, and no such limit
        return np.asarray(np.memmap(path, np.uint8, "r", shape=(size,)))
    return np.asarray(_Mapping(path, size))


class _Mapping:
    """A mapping that ends when the last array of it is gone."""

    def __init__(self, path: Path, size: int) -> None:
        map_pages, unmap_pages = _calls()
        with path.open("rb", buffering=0) as file:
            address = map_pages(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, True)}
        # Not when the interpreter ends: other threads may still be reading, and the system unmaps what is left.
        weakref.finalize(self, unmap_pages, address, size).atexit = False


@lru_cache(maxsize=1)
def _calls() -> tuple[Any, Any]:
    """``mmap`` and ``munmap`` of the C library."""
    library = ctypes.CDLL(None, use_errno=True)
    map_pages, unmap_pages = library.mmap, library.munmap
    # The last argument is an off_t, which is as wide as a long wherever torch runs.
    map_pages.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    map_pages.restype = ctypes.c_void_p
    unmap_pages.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return map_pages, unmap_pages
