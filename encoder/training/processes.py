"""The processes of a run: communication between them, signals that stop them, their memory, and the precision of their products.

A run has one process, or those that torchrun has started. Each process trains on its own part of every batch, and all do
the same steps. Only the main process (rank 0) writes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import distributed

from quiver.encoder.environment import STATUS, resident
from quiver.encoder.errors import InputError, RunStoppedError

logger = logging.getLogger(__name__)

_SAME = 1.0  # seconds within which a second signal is the first one again: a terminal and torchrun both pass a Ctrl-C on


class StopRequest:
    """Whether a signal has requested the run to stop; ``name`` is SIGTERM or SIGINT, None without a request."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._when = 0.0

    @property
    def is_requested(self) -> bool:
        """Whether a signal has requested the run to stop."""
        return self.name is not None

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; a second SIGINT raises KeyboardInterrupt."""
        del frame
        if number == signal.SIGINT and self.name is not None and time.monotonic() - self._when > _SAME:
            raise KeyboardInterrupt
        if self.name is None:
            self.name = signal.Signals(number).name
            self._when = time.monotonic()
            # By another thread: the signal may have come in the middle of a write to the very stream that the log goes to.
            message = "%s: stopping after this step or batch of the evaluation, with a checkpoint; Ctrl-C again stops at once"
            threading.Thread(target=logger.warning, args=(message, self.name)).start()


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn SIGTERM and SIGINT into stop requests within the block; in other threads than the main one signals are not handled."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.take) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


Value = TypeVar("Value")

TIMEOUT = timedelta(hours=12)  # how long a process waits for the others, for instance while the main process evaluates the model or writes


class Processes:
    """Rank, number of processes, and communication between them."""

    def __init__(self, rank: int = 0, size: int = 1, *, device: str = "cpu") -> None:
        self.rank = rank
        self.size = size
        self._device = device

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            distributed.barrier()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum of each value over the processes, in float64; equal in all of them."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        distributed.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def broadcast(self, value: float) -> float:
        """The value of the main process."""
        if self.size == 1:
            return value
        sent = torch.tensor([value], dtype=torch.float64, device=self._device)
        distributed.broadcast(sent, 0)
        return float(sent.item())

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value)
        return found


_NESTED: ContextVar[bool] = ContextVar("_NESTED", default=False)


@contextmanager
def nested_training() -> Iterator[None]:
    """Let this process alone train within the block, in the middle of another training that may have several processes."""
    token = _NESTED.set(True)
    try:
        yield
    finally:
        _NESTED.reset(token)


@contextmanager
def init_distributed(device: str) -> Iterator[Processes]:
    """Initialise torch.distributed if torchrun has started several processes."""
    size = 1 if _NESTED.get() else int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        with current_device(device):
            yield Processes()
        return
    if ":" in device:
        raise InputError(f"--device: under torchrun each process has a GPU of its own; pass cuda or cpu, got {device}")
    if device == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            raise InputError(f"torchrun: process {local_rank} has no GPU, there are {torch.cuda.device_count()}; lower --nproc-per-node")
        torch.cuda.set_device(local_rank)
    begun = not distributed.is_initialized()
    if begun:
        distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size(), device=device)
    except RunStoppedError:  # all processes stop
        if begun:
            distributed.destroy_process_group()
        raise
    if begun:  # not after other errors: the other processes may be waiting, and leaving would wait for them
        distributed.destroy_process_group()


@contextmanager
def current_device(device: str) -> Iterator[None]:
    """Make a GPU the current one within the block: generators, memory counters and kernels are those of the current GPU."""
    kind, _, number = device.partition(":")
    with torch.cuda.device(int(number)) if kind == "cuda" and number else nullcontext():
        yield


@contextmanager
def exact_float32() -> Iterator[None]:
    """Multiply float32 matrices in float32 within the block, never in TF32, whatever the process has set."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to say it if ``torch.backends.cuda.matmul.fp32_precision`` alone was set to TF32
        before = "high"
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# Parameters of glibc's mallopt(3): three sizes in bytes, and a number of mappings.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, MMAP_MAX = -1, -2, -3, -4
KEEPING = {TRIM_THRESHOLD: -1, TOP_PAD: 64 * 2**20, MMAP_MAX: 0}
# glibc adapts its thresholds until one of them is set; afterwards they are set to the values at which its adaptation ends.
AFTERWARDS = {TRIM_THRESHOLD: 64 * 2**20, TOP_PAD: 128 * 2**10, MMAP_THRESHOLD: 32 * 2**20, MMAP_MAX: 65_536}
# Prefixes of environment variables that configure an allocator; they take precedence.
CHOSEN = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Have the C library keep the memory of freed tensors for the next ones while a model is trained on a CPU.

    glibc returns each large tensor to the system, which zeroes its pages before they are used again: an eighth of a training step. With
    this context the process keeps about its peak memory. It does nothing on a machine with a GPU, without glibc, or if environment
    variables configure the allocator, and in a nested training. Use it in the main thread: tensors of other threads beyond 64 MB are
    returned anyway.
    """
    libc = None if _NESTED.get() or torch.cuda.is_available() or any(name.startswith(CHOSEN) for name in os.environ) else glibc()
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


def glibc() -> ctypes.CDLL | None:
    """The C library of this process if it is glibc."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None


class StepMemory:
    """Memory that one training step allocates; all values are 0 on a CPU.

    Counting starts when the object is made, which should be at the beginning of a step: then only weights and optimizer state exist.
    ``before`` is the peak memory on a GPU in bytes between the previous object (or the start of the process) and this one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun = self.before = 0
        if device.type == "cuda":
            self._begun, self.before = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def activations(self) -> int:
        """Most memory that was allocated since the beginning, in bytes: activations, and gradients as far as they exist beside them."""
        return max(0, torch.cuda.max_memory_allocated(self._device) - self._begun) if self._device.type == "cuda" else 0


def peak_memory() -> int | None:
    """Peak memory of this process in bytes: on its GPU if it uses one, otherwise in RAM; None on Windows."""
    if torch.cuda.is_available() and (peak := torch.cuda.max_memory_allocated()):
        return peak
    if sys.platform == "win32":
        return None
    if STATUS.exists():  # a process that was started by another begins with the other's ru_maxrss
        return resident("VmHWM")
    import resource  # not available on Windows

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # in kilobytes, except on macOS
