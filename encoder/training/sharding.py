"""What several processes share of a model: gradients averaged over them, or weights, gradients and optimizer state sharded over them.

Gradients are averaged in buckets while the backward pass still runs. DistributedDataParallel does the same for a loop with one backward
pass per step and equally many batches in every process. Here a process may have no batch in a step, a GradCache loss runs several backward
passes inside one, and a weight may be unused everywhere.

Sharded weights (FSDP) are gathered again to be saved. The result is that of data-parallel training; all processes must then run equally
many forward and backward passes.

Source: FSDP, arXiv:2304.11277 (torch's ``fully_shard``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from quiver.encoder.training.processes import Processes

logger = logging.getLogger(__name__)


def shard(module: nn.Module, blocks: Iterable[nn.Module], processes: Processes, device: torch.device) -> None:
    """Shard the weights of a module in place; call it before an optimizer is made over them."""
    from torch.distributed.device_mesh import init_device_mesh  # slow imports that one process does not need
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (processes.size,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    weights = list(module.parameters())
    own = sum(weight.to_local().numel() if isinstance(weight, DTensor) else weight.numel() for weight in weights)
    logger.info("process %d holds %s of %s weights", processes.rank, f"{own:,}", f"{sum(weight.numel() for weight in weights):,}")


def reshard(module: nn.Module) -> None:
    """Split the weights again that a forward pass without a backward pass has left whole; no effect on a module that is not sharded."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that is sharded over the processes, all of which must call this; return any other tensor unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    full: Tensor = tensor.full_tensor()
    return full


def like_weight(value: Any, weight: Tensor) -> Any:
    """A tensor of a weight's shape, sharded as the weight is; any other value, or that of a whole weight, unchanged."""
    if isinstance(weight, DTensor) and isinstance(value, Tensor) and value.shape == weight.shape and value.ndim:
        return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
    return value


def whole_weights(module: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Gather copies of the state of a module in CPU memory, one tensor at a time; empty without ``keep``. Called by all processes."""
    found = {}
    for name, tensor in module.state_dict().items():
        full = whole_tensor(tensor)
        if keep:
            found[name] = full.detach().to("cpu", copy=True)
    return found


def whole_optimizer_state(optimizer: Optimizer, *, keep: bool = True) -> dict[str, Any]:
    """Return the optimizer state of the whole weights; called by all processes."""

    def gathered(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        full = whole_tensor(value)
        return full.cpu() if keep else None

    state = optimizer.state_dict()
    slots = {number: {name: gathered(value) for name, value in held.items()} for number, held in state["state"].items()}
    return {**state, "state": slots}


def load_whole_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state of `whole_optimizer_state`; all processes call it with the same state."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    slots = {number: {name: like_weight(value, weights[number]) for name, value in held.items()} for number, held in state["state"].items()}
    optimizer.load_state_dict({**state, "state": slots})


BUCKET_BYTES = 32 * 2**20  # size from which a bucket is full


@dataclass(eq=False)
class _Bucket:
    """Weights whose gradients are reduced in one operation."""

    weights: Sequence[nn.Parameter]  # weights of one dtype on one device
    left: int = 0  # gradients that the last backward passes have still to add
    # Their gradients end to end, followed by a mark per weight: whether a process has used it. None until the reduction begins.
    flat: Tensor | None = None
    unused: Sequence[int] = ()  # positions of the weights that have no gradient in this process
    work: distributed.Work | None = None


@dataclass
class Unused:
    """Weights that have no gradient in this process."""

    weights: list[nn.Parameter] = field(default_factory=list)  # the weights; their gradients are now those of the other processes, or zeros
    marks: list[Tensor] = field(default_factory=list)  # above zero where a process has a gradient, one 0-dimensional tensor per weight

    def drop(self, marks: Sequence[float]) -> None:
        """Remove the gradients of weights that no process has used: an optimizer would decay these weights otherwise."""
        for weight, mark in zip(self.weights, marks, strict=True):
            if not mark:
                weight.grad = None


class GradientReducer:
    """Averages the gradients of a module over the processes.

    Buckets hold the weights in reverse order, which is about the order in which a backward pass completes them. All processes reduce the
    buckets in this order, whatever weights each of them uses, so that none waits for a reduction that another does not begin.
    """

    def __init__(self, weights: Iterable[nn.Parameter], processes: Processes, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._processes = processes
        self._passes = 0
        self._next = 0
        whole = [weight for weight in reversed(list(weights)) if not isinstance(weight, DTensor)] if processes.size > 1 else []
        self._buckets: list[_Bucket] = []
        for _, alike in groupby(whole, lambda weight: (weight.dtype, weight.device)):
            self._buckets += [_Bucket(part) for part in _cut_weights(alike, bucket_bytes)]
        bucket_of = {weight: bucket for bucket in self._buckets for weight in bucket.weights}
        self._hooks = [
            weight.register_post_accumulate_grad_hook(lambda weight, bucket=bucket: self._added(bucket))  # type: ignore[no-untyped-call]
            for weight, bucket in bucket_of.items()
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, passes: int = 1) -> None:
        """Announce the last backward passes of a step. The reduction of a bucket begins as soon as its weights have their gradients."""
        self._passes = passes
        for bucket in self._buckets:
            bucket.left = passes * len(bucket.weights)

    def finish(self) -> Unused:
        """Begin the reductions that are left, and let the device wait for all; returns the weights without a gradient here."""
        for bucket in self._buckets[self._next :]:
            self._reduce(bucket)
        found = Unused()
        for bucket in self._buckets:
            if bucket.work is None or bucket.flat is None:
                raise ValueError("a bucket was not reduced")
            bucket.work.wait()
            *gradients, marks = torch.split(bucket.flat, [*(weight.numel() for weight in bucket.weights), len(bucket.weights)])
            for weight, gradient in zip(bucket.weights, gradients, strict=True):
                weight.grad = gradient.view_as(weight)
            found.weights += [bucket.weights[position] for position in bucket.unused]
            found.marks += [marks[position] for position in bucket.unused]
            bucket.work = bucket.flat = None
        self._passes = self._next = 0
        return found

    def _added(self, bucket: _Bucket) -> None:
        """A gradient of a bucket has been added to."""
        if not self._passes:
            return  # another backward pass of the step follows
        if bucket.work is not None:
            raise RuntimeError(
                "a gradient arrived after its bucket was reduced: the loss runs more backward passes than Task.backward_passes returned"
            )
        bucket.left -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].left:
            self._reduce(self._buckets[self._next])
            self._next += 1

    def _reduce(self, bucket: _Bucket) -> None:
        first = bucket.weights[0]
        gradients = [weight.grad for weight in bucket.weights]
        bucket.unused = [position for position, gradient in enumerate(gradients) if gradient is None]
        marks = [first.new_zeros(1) if gradient is None else first.new_ones(1) for gradient in gradients] if bucket.unused else []
        flat = [torch.zeros_like(weight) if one is None else one for weight, one in zip(bucket.weights, gradients, strict=True)]
        bucket.flat = torch.cat([*(one.reshape(-1) for one in flat), *(marks or [first.new_ones(len(flat))])])
        for weight in bucket.weights:
            weight.grad = None  # the buffer replaces it
        bucket.work = distributed.all_reduce(bucket.flat.div_(self._processes.size), async_op=True)


def _cut_weights(weights: Iterable[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Weights in order, cut after each one with which a part has at least this many bytes."""
    parts: list[list[nn.Parameter]] = []
    full = True
    for weight in weights:
        if full:
            parts.append([])
        parts[-1].append(weight)
        full = sum(one.numel() * one.element_size() for one in parts[-1]) >= size
    return parts
