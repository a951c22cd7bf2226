"""The gate of GeGLU and SwiGLU: one half of a product, activated, times the other half.

Shapes: N packed tokens, I MLP width.
Source: GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quiver.encoder.ops.activations import ACTIVATION_FUNCTIONS, ACTIVATION_GRADIENTS
from quiver.encoder.ops.choice import fused

# Tokens of one step on a CPU: what the passes over them share stays in its cache.
CHUNK = 256


def gated(up: Tensor, activation: str) -> Tensor:
    """act(first half) * second half.

    Args:
        up: (N, 2 I), the half to activate first.
        activation: A key of `quiver.encoder.ops.activations.ACTIVATION_FUNCTIONS`.

    Returns:
        (N, I) in the input's dtype.
    """
    if fused(up):
        from quiver.encoder.gpu import triton_gated

        return triton_gated.gated(up, activation)
    if up.device.type == "cpu" and torch.is_grad_enabled() and up.requires_grad and not torch.compiler.is_compiling():
        output: Tensor = _Gated.apply(up, activation)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return output
    activated, gate = up.chunk(2, dim=-1)
    return ACTIVATION_FUNCTIONS[activation](activated) * gate


def gated_backward(up: Tensor, gradient: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """`gated` again, and its gradient; without gradients of its own.

    Args:
        up: (N, 2 I), what `gated` was given.
        gradient: Of what it gave, (N, I).
        activation: As it was given.

    Returns:
        What it gave, (N, I), and the gradient of ``up``, (N, 2 I).
    """
    first, gate = up.chunk(2, dim=-1)
    activated = ACTIVATION_FUNCTIONS[activation](first)
    of_up = torch.empty_like(up)
    of_first, of_gate = of_up.chunk(2, dim=-1)
    torch.mul(gradient, activated, out=of_gate)
    of_first.copy_(ACTIVATION_GRADIENTS[activation](gradient * gate, first))
    return activated.mul_(gate), of_up


class _Gated(torch.autograd.Function):
    """The gate a few tokens at a time, its gradient written where the product before it wants it.

    Autograd's own way makes five passes over memory backward and then puts the two halves together.
    """

    @staticmethod
    def forward(ctx: Any, up: Tensor, activation: str) -> Tensor:
        first, gate = up.chunk(2, dim=-1)
        output = first.new_empty(first.shape)
        for part in _chunks(up):
            torch.mul(ACTIVATION_FUNCTIONS[activation](first[part]), gate[part], out=output[part])
        ctx.activation = activation
        ctx.save_for_backward(up)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (up,) = ctx.saved_tensors
        of_up = up.new_empty(up.shape)
        for part in _chunks(up):
            of_up[part] = gated_backward(up[part], gradient[part], ctx.activation)[1]
        return of_up, None


def _chunks(x: Tensor) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, len(x), CHUNK)]
