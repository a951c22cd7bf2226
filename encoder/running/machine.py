"""What a run has taken of the machine that it ran on."""

from __future__ import annotations

import sys

import torch


def peak_memory() -> int | None:
    """The most memory that this process has held, in bytes: of its GPU where it has one, else of the machine; None on Windows."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return None
    import resource  # there is none on Windows

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # kilobytes but on macOS
