"""Triton kernel of rotary positions: forward in place, backward from three gradients to that of the packed product in one pass.

Shapes: N packed tokens, H heads, K head width, R leading dimensions of a head that are rotated.
Source: RoFormer, arXiv:2104.09864.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from quiver.encoder.attention.layout import is_packed, join_qkv

# Pairs of numbers that one program rotates: eight per thread with four warps, 16-byte loads in half precision.
ROTARY_PAIRS = 1024


@triton.jit(do_not_specialize=["rows"])
def turn_kernel(  # noqa: PLR0913 (pointers, strides and sizes; a kernel has no other way to get them)
    q,
    k,
    v,
    target,
    cos,
    sin,
    rows,
    direction,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    heads: tl.constexpr,
    half: tl.constexpr,
    rest: tl.constexpr,
    width: tl.constexpr,
    block_rows: tl.constexpr,
    block_half: tl.constexpr,
    block_rest: tl.constexpr,
):
    """Queries and keys, rotated, and values, as they are, to their places in (N, 3, H, K)."""
    part = tl.program_id(1)
    if part == 0:
        source, by_token, by_head = q, q_token, q_head
    elif part == 1:
        source, by_token, by_head = k, k_token, k_head
    else:
        source, by_token, by_head = v, v_token, v_head
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)  # of (N * H)
    token = (row // heads).to(tl.int64)  # a large batch has more than 2 ** 31 numbers
    head = row % heads
    here = row < rows
    source += (token * by_token + head * by_head)[:, None]
    target += (((token * 3 + part) * heads + head) * width)[:, None]

    column = tl.arange(0, block_half)
    inside = here[:, None] & (column < half)[None, :]
    angle = token[:, None] * half + column[None, :]
    turned = inside & (part < 2)
    c = tl.load(cos + angle, mask=turned, other=1.0)
    s = tl.load(sin + angle, mask=turned, other=0.0) * direction
    first = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(target + column[None, :], first * c - second * s, mask=inside)
    tl.store(target + half + column[None, :], second * c + first * s, mask=inside)

    if rest > 0:  # dimensions without positions, if source and target differ
        column = tl.arange(0, block_rest)
        inside = here[:, None] & (column < rest)[None, :]
        place = 2 * half + column[None, :]
        tl.store(target + place, tl.load(source + place, mask=inside), mask=inside)


def _turn(parts: Sequence[Tensor], target: Tensor, cos: Tensor, sin: Tensor, direction: float) -> None:
    """Write queries and keys, rotated by ``direction`` times the angle, and values as they are, to ``target``, (N, 3, H, K).

    The parts are (N, H, K) each. Two parts, without values, are those of the target itself.
    """
    tokens, heads, width = parts[0].shape
    half = cos.shape[-1]
    rest = 0 if len(parts) == 2 else width - 2 * half
    block_half = triton.next_power_of_2(half)
    block_rows = max(1, ROTARY_PAIRS // block_half)
    last = parts[-1]
    with torch.cuda.device_of(target):
        turn_kernel[(triton.cdiv(tokens * heads, block_rows), len(parts))](
            parts[0],
            parts[1],
            last,
            target,
            cos,
            sin,
            tokens * heads,
            direction,
            *(stride for part in (*parts[:2], last) for stride in part.stride()[:2]),
            heads=heads,
            half=half,
            rest=rest,
            width=width,
            block_rows=block_rows,
            block_half=block_half,
            block_rest=triton.next_power_of_2(max(rest, 1)),
        )


def _turn_in_place(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unbind(1)
    _turn((q, k), qkv, cos, sin, 1.0)
    return q, k, v


class _Rotate(torch.autograd.Function):
    """The kernel with its derivative.

    Autograd is not told of the change in place, which is safe: ``qkv`` comes fresh from a product whose backward pass does not read it, and
    is used only here.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turn_in_place(qkv, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *parts: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        if is_packed(*parts):  # attention has written them in the layout of the product
            gradient = join_qkv(*parts)
            _turn(parts[:2], gradient, cos, sin, -1.0)
            return gradient, None, None
        tokens, heads, width = parts[0].shape
        gradient = parts[0].new_empty(tokens, 3, heads, width)
        _turn([part if part.stride(-1) == 1 else part.contiguous() for part in parts], gradient, cos, sin, -1.0)
        return gradient, None, None


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate the queries and keys of ``qkv``, (N, 3, H, K), in place; see `quiver.encoder.ops.rotate`."""
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    if not (torch.is_grad_enabled() and qkv.requires_grad):
        return _turn_in_place(qkv, cos, sin)
    q, k, v = _Rotate.apply(qkv, cos, sin)
    return q, k, v
