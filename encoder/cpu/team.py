"""The threads that torch's own operators run on, for a compiled function.

A second pool beside torch's would be slowed down by it: its threads go on looking for work for milliseconds after an operator is done.
So the function is handed to the same OpenMP runtime that torch was linked with, which wakes the same threads.

Source: libgomp's entry point ``GOMP_parallel``, which LLVM's and Intel's runtimes have too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# Bytes of a cache line. A vector that lies across two of them takes twice as long to load.
LINE = 64

Launch = Callable[[int, int, int, int], None]
"""(address of the function, address of its argument, threads, flags): all threads call the function; returns when all are done."""


@cache
def launcher() -> Launch | None:
    """How a function is run on torch's threads; None where torch was built with another kind of them."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Looked up through the library that calls it: another package may have brought a runtime of its own.
        launch = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    launch.restype = None
    found: Launch = launch
    return found


def run(function: int, argument: int, threads: int) -> None:
    """Call a compiled function once on each of some of torch's threads, all with the same argument.

    Args:
        function: Its address.
        argument: An address, which it is given.
        threads: How many; where the runtime gives fewer, those are all.

    Raises:
        RuntimeError: Torch's threads are not OpenMP's.
    """
    launch = launcher()
    if launch is None:
        raise RuntimeError("this build of torch does not run on OpenMP threads")
    launch(function, argument, threads, 0)


def scratch(threads: int, size: int) -> Tensor:
    """Bytes for every thread, (threads, at least ``size``); each one's begin at the beginning of a cache line, as torch's tensors do."""
    return torch.empty(threads, -(-size // LINE) * LINE, dtype=torch.uint8, device="cpu")
