"""The processes of a run: one, or as many as torchrun has started; what they tell each other.

They are all given the same batches, each a part of its own, and do the same updates. Process 0 leads: it alone writes.
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

PATIENCE = timedelta(hours=12)
"""How long a process waits for the others: while process 0 scores the model or writes, they have nothing to do."""


class Processes:
    """This process among the others.

    Args:
        rank: Its number, 0..size - 1.
        size: How many there are.
        device: Where tensors must lie to be exchanged: ``cuda`` under NCCL, ``cpu`` under gloo.
    """

    def __init__(self, rank: int = 0, size: int = 1, *, device: str = "cpu") -> None:
        self.rank = rank
        self.size = size
        self._device = device

    @property
    def leads(self) -> bool:
        """Whether this is process 0."""
        return self.rank == 0

    def wait(self) -> None:
        """Go on when all have come here."""
        if self.size > 1:
            distributed.barrier()

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the processes, in float64; the same in all of them."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        distributed.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def told(self, value: float) -> float:
        """The value that process 0 gives."""
        if self.size == 1:
            return value
        said = torch.tensor([value], dtype=torch.float64, device=self._device)
        distributed.broadcast(said, 0)
        return float(said.item())

    def gathered(self, value: Value) -> list[Value]:
        """The values of all processes by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value)
        return found


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """Meet the other processes, if torchrun has started any.

    Args:
        device: Where the models of this run go, ``cpu`` or ``cuda``; on ``cuda`` each process gets its own GPU.

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
        distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size(), device=device)
    except RunStoppedError:  # all of them stop
        _leave(begun)
        raise
    _leave(begun)  # not after any other error: the rest may be waiting, and to take leave of them would take as long


def _leave(begun: bool) -> None:
    """Leave the processes, if it was here that they were met."""
    if begun:
        distributed.destroy_process_group()
