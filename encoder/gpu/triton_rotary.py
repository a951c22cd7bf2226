"""Rotary positions as a Triton kernel: queries and keys are turned where they lie in the packed product.

A turn's derivative is the turn by the negative angle; it is written straight into the gradient of the packed product,
which torch would first have to stack from three pieces.

Shapes: N packed tokens, H heads, K head width, R leading dimensions of a head that are turned.
Source: `quiver.encoder.ops.rotary`, whose result this reproduces.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from quiver.encoder.gpu.triton_blocks import blocks, power_of_two

# Pairs of numbers that one program turns: with four warps eight a thread, 16-byte loads in half precision.
PAIRS = 1024


@triton.jit(do_not_specialize=["rows"])
def _turn_kernel(  # noqa: PLR0913 (pointers, strides and sizes; a kernel has no other way to get them)
    source,
    target,
    cos,
    sin,
    rows,
    direction,
    source_token,
    source_head,
    target_token,
    target_head,
    heads: tl.constexpr,
    half: tl.constexpr,
    rest: tl.constexpr,
    block_rows: tl.constexpr,
    block_half: tl.constexpr,
    block_rest: tl.constexpr,
):
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)  # of (N * H)
    token = (row // heads).to(tl.int64)  # a large batch has more than 2 ** 31 numbers
    head = row % heads
    here = row < rows
    source += (token * source_token + head * source_head)[:, None]
    target += (token * target_token + head * target_head)[:, None]

    column = tl.arange(0, block_half)
    inside = here[:, None] & (column < half)[None, :]
    angle = token[:, None] * half + column[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0) * direction
    first = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(target + column[None, :], first * c - second * s, mask=inside)
    tl.store(target + half + column[None, :], second * c + first * s, mask=inside)

    if rest > 0:  # the dimensions without positions, where source and target differ
        column = tl.arange(0, block_rest)
        inside = here[:, None] & (column < rest)[None, :]
        place = 2 * half + column[None, :]
        tl.store(target + place, tl.load(source + place, mask=inside), mask=inside)


def _turn(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, direction: float) -> None:
    """Write ``source``, (N, H, K), turned by ``direction`` times the angle to ``target``; they may be one tensor."""
    tokens, heads, width = source.shape
    half = cos.shape[-1]
    rest = 0 if source is target else width - 2 * half
    block_half = power_of_two(half)
    block_rows = max(1, PAIRS // block_half)
    with torch.cuda.device_of(source):
        _turn_kernel[(blocks(tokens * heads, block_rows),)](
            source,
            target,
            cos,
            sin,
            tokens * heads,
            direction,
            source.stride(0),
            source.stride(1),
            target.stride(0),
            target.stride(1),
            heads=heads,
            half=half,
            rest=rest,
            block_rows=block_rows,
            block_half=block_half,
            block_rest=power_of_two(max(rest, 1)),
        )


def _turn_in_place(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = qkv[:, :2].flatten(1, 2)  # (N, 2 H, K), a view: queries and keys lie side by side
    _turn(heads, heads, cos, sin, 1.0)
    q, k, v = qkv.unbind(1)
    return q, k, v


class _Rotate(torch.autograd.Function):
    """The kernel with its derivative.

    Autograd does not hear of the change in place: ``qkv`` comes fresh from a product, whose backward pass does not look
    at it, and is used here only.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turn_in_place(qkv, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        tokens, heads, width = grad_q.shape
        gradient = grad_q.new_empty(tokens, 3, heads, width)
        for part, incoming in enumerate((grad_q, grad_k)):
            _turn(incoming if incoming.stride(-1) == 1 else incoming.contiguous(), gradient[:, part], cos, sin, -1.0)
        gradient[:, 2] = grad_v
        return gradient, None, None


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn the queries and keys of ``qkv``, (N, 3, H, K), where they lie; see `quiver.encoder.ops.rotary.rotate`."""
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    if not (torch.is_grad_enabled() and qkv.requires_grad):
        return _turn_in_place(qkv, cos, sin)
    q, k, v = _Rotate.apply(qkv, cos, sin)
    return q, k, v
