"""Gradients of several processes: averaged in buckets while the backward pass still runs.

DistributedDataParallel does the same for a loop with one backward pass per step and equally many batches in every process. Here a process
may have no batch in a step, a GradCache loss runs several backward passes inside one, and a weight may be unused everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from quiver.encoder.training.processes import Processes

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
            self._buckets += [_Bucket(part) for part in _parts(alike, bucket_bytes)]
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


def _parts(weights: Iterable[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Weights in order, cut after each one with which a part has at least this many bytes."""
    parts: list[list[nn.Parameter]] = []
    full = True
    for weight in weights:
        if full:
            parts.append([])
        parts[-1].append(weight)
        full = sum(one.numel() * one.element_size() for one in parts[-1]) >= size
    return parts
