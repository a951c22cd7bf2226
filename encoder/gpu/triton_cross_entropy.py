"""Triton kernel of the cross entropy of logits: the loss, and the gradient in the logits' own memory.

A row is read twice, the second time from the cache, and written once; PyTorch's operators read and write the whole chunk four times, partly
in float32. `quiver.encoder.heads.linear_cross_entropy` calls it for a chunk of rows at a time.

Shapes: C rows of logits, V vocabulary.
Source: Online normalizer calculation for softmax, arXiv:1805.02867; Liger Kernel, arXiv:2410.10989, section 3.2.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Logits that a program holds at a time: 16 per thread.
LOGITS = 4096


@triton.jit
def cross_entropy_kernel(logits, labels, losses, width: tl.constexpr, differentiable: tl.constexpr, block: tl.constexpr):
    """Loss of a row; its logits become the derivatives of the loss: the probabilities, minus one at the label."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    column = tl.arange(0, block)
    label = tl.load(labels + row)
    known = (label >= 0) & (label < width)  # another label gives NaN, which training refuses, instead of other memory
    # Before the reductions below, after which other threads may overwrite it.
    picked = tl.load(logits + label, mask=known, other=float("nan")).to(tl.float32)
    highest = tl.full([block], -3.0e38, dtype=tl.float32)  # finite: the difference of two infinities is no number
    total = tl.zeros([block], dtype=tl.float32)
    for start in range(0, width, block):
        x = tl.load(logits + start + column, mask=start + column < width, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, x)
        total = total * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
    top = tl.max(highest, axis=0)
    normalizer = tl.sum(total * tl.exp(highest - top), axis=0)
    tl.store(losses + row, (top - picked) + tl.log(normalizer))
    if differentiable:
        for start in range(0, width, block):
            inside = start + column < width
            x = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
            slope = tl.exp(x - top) / normalizer - tl.where(start + column == label, 1.0, 0.0)
            tl.store(logits + start + column, slope, mask=inside)


def cross_entropy_(logits: Tensor, labels: Tensor, *, differentiable: bool) -> Tensor:
    """Return the loss of each row, (C,) float32; if ``differentiable``, overwrite the logits with its derivatives.

    Args:
        logits: (C, V), contiguous.
        labels: (C,) int64, each 0..V-1.
        differentiable: Whether the derivatives are needed; otherwise the logits stay.
    """
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    with torch.cuda.device_of(logits):
        cross_entropy_kernel[(len(logits),)](
            logits, labels, losses, width=logits.shape[1], differentiable=differentiable, block=LOGITS, num_warps=8
        )
    return losses
