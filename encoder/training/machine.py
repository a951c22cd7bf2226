"""What a run takes of the machine that it runs on."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Parameters of glibc's mallopt(3), in bytes and, the last, in mappings.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, MMAP_MAX = -1, -2, -3, -4
KEEPING = {TRIM_THRESHOLD: -1, TOP_PAD: 64 * 2**20, MMAP_MAX: 0}
# glibc moves its thresholds by itself until one is set, and never again: afterwards they stand where its own steps end.
AFTERWARDS = {TRIM_THRESHOLD: 64 * 2**20, TOP_PAD: 128 * 2**10, MMAP_THRESHOLD: 32 * 2**20, MMAP_MAX: 65_536}
# Beginnings of environment variables that set an allocator up; what they say stands.
CHOSEN = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Have the C library keep the memory of freed tensors for the next ones while a model is trained on a CPU.

    glibc gives each large tensor back to the system, which hands it out again page by page, zeroed: an eighth of a training step. What is
    held in between is about the most that the training has needed. Nothing is done on a machine with a GPU, without glibc, or where
    the environment sets the allocator up. It is for the main thread and once at a time: another thread's tensors beyond 64 MB are given
    back all the same, and the end of one context is the end of all.
    """
    libc = None if torch.cuda.is_available() or any(name.startswith(CHOSEN) for name in os.environ) else _glibc()
    if libc is None:
        yield
        return
    for parameter, value in KEEPING.items():
        libc.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, value in AFTERWARDS.items():
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None


def peak_memory() -> int | None:
    """The most memory that this process has held, in bytes: of its GPU where it has one, else of the machine; None on Windows."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return None
    import resource  # there is none on Windows

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # kilobytes but on macOS
