"""Softmax cross entropy over a large vocabulary, without the matrix of all logits.

Rows are processed in chunks. A chunk's logits give its losses and its share of every gradient at once, so nothing of size M x V is stored
or computed twice: peak memory is that of one chunk for every M.

Shapes: M rows, D width, V vocabulary, C rows of a chunk.
Source: Liger Kernel, arXiv:2410.10989, section 3.2 (linear and cross entropy in one, gradients in the forward pass); Cut Cross-Entropy,
arXiv:2411.09009, section 3 (why the logits fill the memory).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from quiver.encoder.cpu.linear import compute_dtype

# A chunk has as many rows as the matrix has columns, so its logits are as large as the matrix, which is in memory anyway with its gradient.
# With fewer rows than this the products are no longer limited by arithmetic.
MIN_ROWS = 128


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """Mean cross entropy of ``softmax(hidden @ weight.T + bias)``.

    Products use the dtype of the inputs (autocast's dtype under autocast; float32 on a CPU that only emulates half precision), everything
    else float32 or better. The gradients are computed together with the loss, so only one backward pass is possible: a second one
    (``retain_graph``) and a derivative of the gradient raise torch's RuntimeError.

    Args:
        hidden: (M, D).
        weight: (V, D).
        bias: (V,), or None.
        labels: (M,) int64, each 0..V-1.

    Returns:
        A scalar in float32 (float64 for float64 inputs); for M = 0 zero, with gradients of zero.

    Example:
        >>> hidden, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 1.0]])
        >>> linear_cross_entropy(hidden, weight, None, torch.tensor([1])).item()  # two equal logits: log 2
        0.6931471824645996
    """
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, differentiable: bool) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        dtype = compute_dtype(hidden.device, dtype)
        exact = torch.promote_types(dtype, torch.float32)
        # Sums over chunks stay unscaled until the end: in float16 a gradient without the loss scale, which only the backward pass knows,
        # would underflow.
        grads = [
            torch.zeros_like(x, dtype=exact) if differentiable and needed and x is not None else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        with torch.autocast(device, enabled=False):
            casts = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
            total = _walk(*casts, labels, grads, exact)
        ctx.share = 1 / max(len(hidden), 1)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.save_for_backward(*grads)
        loss: Tensor = total * ctx.share
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale = upstream * ctx.share
        # In place: a second copy of the matrix's gradient would be the largest tensor of the whole step. torch detects the change of a
        # saved tensor and refuses a second backward pass.
        grads = [None if grad is None else grad.mul_(scale).to(dtype) for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return *grads, None, None


def _walk(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, grads: list[Tensor | None], exact: torch.dtype) -> Tensor:
    """Return the sum of all rows' losses; the gradients of that sum are added to ``grads`` (of hidden, weight, bias)."""
    grad_hidden, grad_weight, grad_bias = grads
    total = torch.zeros((), dtype=exact, device=hidden.device)
    rows = max(weight.shape[1], MIN_ROWS)
    for start in range(0, len(hidden), rows):
        chunk, target = hidden[start : start + rows], labels[start : start + rows, None]
        log_probabilities = F.log_softmax(F.linear(chunk, weight, bias), dim=-1, dtype=exact)  # (C, V)
        total -= log_probabilities.gather(1, target).sum()
        if grad_hidden is None and grad_weight is None and grad_bias is None:
            continue
        # The derivative of a row's loss with respect to its logits: its probabilities, minus one at the label.
        slope = log_probabilities.exp_().scatter_add_(1, target, torch.full_like(target, -1, dtype=exact))
        if grad_bias is not None:
            grad_bias += slope.sum(0)
        slope = slope.to(hidden.dtype)
        if grad_hidden is not None:
            grad_hidden[start : start + rows] = slope @ weight
        if grad_weight is not None:
            _add_product(grad_weight, slope.T, chunk)
    return total


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)  # no second tensor of this size
    else:
        total += left @ right
