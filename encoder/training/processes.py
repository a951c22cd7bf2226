"""The processes of a run: one, or those that torchrun has started.

All processes read the same batches, each its own part of them, and do the same steps. Only the main process (rank 0) writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from quiver.encoder.errors import InputError
from quiver.encoder.training.stopping import RunStoppedError

Value = TypeVar("Value")

TIMEOUT = timedelta(hours=12)
"""How long a process waits for the others, for instance while the main process evaluates the model or writes."""


class Processes:
    """Rank, number of processes, and communication between them.

    Args:
        rank: Of this process, 0..size - 1.
        size: Number of processes.
        device: Device of exchanged tensors: ``cuda`` with NCCL, ``cpu`` with gloo.
    """

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
        said = torch.tensor([value], dtype=torch.float64, device=self._device)
        distributed.broadcast(said, 0)
        return float(said.item())

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value)
        return found


@contextmanager
def init_distributed(device: str) -> Iterator[Processes]:
    """Initialise torch.distributed if torchrun has started several processes.

    Args:
        device: Device of the models, ``cpu`` or ``cuda``; with ``cuda`` each process gets its own GPU.

    Raises:
        InputError: There are fewer GPUs than processes on this machine.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Processes()
        return
    if device == "cuda":
        place = int(os.environ.get("LOCAL_RANK", "0"))
        if place >= torch.cuda.device_count():
            raise InputError(f"torchrun: process {place} has no GPU, there are {torch.cuda.device_count()}; lower --nproc-per-node")
        torch.cuda.set_device(place)
    begun = not distributed.is_initialized()
    if begun:
        distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size(), device=device)
    except RunStoppedError:  # all processes stop
        _leave(begun)
        raise
    _leave(begun)  # not after other errors: the other processes may be waiting, and leaving would wait for them


def _leave(begun: bool) -> None:
    """Destroy the process group if it was initialised here."""
    if begun:
        distributed.destroy_process_group()
