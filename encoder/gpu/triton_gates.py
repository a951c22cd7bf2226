"""Triton kernels of the gate of a gated MLP, forward and backward; results match `quiver.encoder.ops.gated` to rounding.

The backward pass recomputes the activation from the saved product, which is cheaper than storing it.

Shapes: N packed tokens, I MLP width.
Source: GLU Variants Improve Transformer, arXiv:2002.05202.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

# Block of (N, I) per program. I is usually a multiple of 128, and 128 numbers of a row are whole memory sectors.
GATE_ROWS, GATE_COLUMNS = 8, 128


@triton.jit
def _activate(x, activation: tl.constexpr):
    """The activation and its derivative at ``x``, float32."""
    if activation == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))  # normal distribution; 1 / sqrt(2)
        return x * share, share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)  # 1 / sqrt(2 pi)
    elif activation == "gelu_tanh":
        # 0.5 (1 + tanh(u)) is sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3); 1 - sigmoid(2 u) would cancel.
        twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        share = tl.sigmoid(twice)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return x * share, share + x * share * tl.sigmoid(-twice) * slope
    elif activation == "silu":
        share = tl.sigmoid(x)
        return x * share, share + x * share * (1.0 - share)
    else:
        tl.static_assert(activation == "relu")
        return tl.maximum(x, 0.0), tl.where(x > 0, 1.0, 0.0)


@triton.jit(do_not_specialize=["tokens"])
def gated_kernel(up, output, tokens, width: tl.constexpr, activation: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr):
    """Product of the activated first half and the second half of each row."""
    row = (tl.program_id(0) * block_rows + tl.arange(0, block_rows)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * block_columns + tl.arange(0, block_columns))[None, :]
    inside = (row < tokens) & (column < width)
    first = tl.load(up + row * (2 * width) + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(up + row * (2 * width) + width + column, mask=inside, other=0.0).to(tl.float32)
    activated, _ = _activate(first, activation)
    tl.store(output + row * width + column, activated * second, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def gated_backward_kernel(
    up, incoming, gradient, tokens, width: tl.constexpr, activation: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr
):
    """Gradient of `gated_kernel` with respect to its input."""
    row = (tl.program_id(0) * block_rows + tl.arange(0, block_rows)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * block_columns + tl.arange(0, block_columns))[None, :]
    inside = (row < tokens) & (column < width)
    place = row * (2 * width) + column
    first = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(up + place + width, mask=inside, other=0.0).to(tl.float32)
    received = tl.load(incoming + row * width + column, mask=inside, other=0.0).to(tl.float32)
    activated, slope = _activate(first, activation)
    tl.store(gradient + place, received * second * slope, mask=inside)
    tl.store(gradient + place + width, received * activated, mask=inside)


def _gate_grid(tokens: int, width: int) -> tuple[int, int]:
    return triton.cdiv(tokens, GATE_ROWS), triton.cdiv(width, GATE_COLUMNS)


def _gated_forward(up: Tensor, activation: str) -> Tensor:
    tokens, width = up.shape[0], up.shape[1] // 2
    output = up.new_empty(tokens, width)
    with torch.cuda.device_of(up):
        gated_kernel[_gate_grid(tokens, width)](
            up, output, tokens, width=width, activation=activation, block_rows=GATE_ROWS, block_columns=GATE_COLUMNS
        )
    return output


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(up)
        ctx.activation = activation
        return _gated_forward(up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None]:
        (up,) = ctx.saved_tensors
        tokens, width = incoming.shape
        gradient = torch.empty_like(up)
        with torch.cuda.device_of(up):
            gated_backward_kernel[_gate_grid(tokens, width)](
                up,
                incoming.contiguous(),
                gradient,
                tokens,
                width=width,
                activation=ctx.activation,
                block_rows=GATE_ROWS,
                block_columns=GATE_COLUMNS,
            )
        return gradient, None


def gated(up: Tensor, activation: str) -> Tensor:
    """act(first half) * second half of ``up``, (N, 2 I); see `quiver.encoder.ops.gated`."""
    up = up.contiguous()
    if not (torch.is_grad_enabled() and up.requires_grad):
        return _gated_forward(up, activation)
    output: Tensor = _Gated.apply(up, activation)
    return output
