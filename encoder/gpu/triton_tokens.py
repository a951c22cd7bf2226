"""Triton kernels of the work beside norms and attention: gate, rotary positions, and the cross entropy of logits.

Results match `quiver.encoder.layers` to rounding. The gate's backward pass recomputes the activation, which is cheaper than storing it.
RoPE runs forward in place, and backward from three gradients to that of the packed product in one pass. The cross entropy reads a row of
logits twice, the second time from the cache, and writes its gradient over it; PyTorch's operators read and write the whole chunk four
times.

Shapes: N packed tokens, I MLP width, H heads, K head width, R leading dimensions of a head that rotate, C rows of logits, V vocabulary.
Source: GLU Variants Improve Transformer, arXiv:2002.05202; RoFormer, arXiv:2104.09864; Online normalizer calculation for softmax,
arXiv:1805.02867; Liger Kernel, arXiv:2410.10989, section 3.2.
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

from quiver.encoder.packing import is_joined_qkv, join_qkv

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


class _TritonGate(torch.autograd.Function):
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
            sizes = {"width": width, "block_rows": GATE_ROWS, "block_columns": GATE_COLUMNS}
            gated_backward_kernel[_gate_grid(tokens, width)](
                up, incoming.contiguous(), gradient, tokens, activation=ctx.activation, **sizes
            )
        return gradient, None


def gated(up: Tensor, activation: str) -> Tensor:
    """act(first half) * second half of ``up``, (N, 2 I); see `quiver.encoder.layers.gated`."""
    up = up.contiguous()
    if not (torch.is_grad_enabled() and up.requires_grad):
        return _gated_forward(up, activation)
    output: Tensor = _TritonGate.apply(up, activation)
    return output


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
    """Write queries and keys, (N, H, K), rotated by ``direction`` times the angle, and values as they are, to ``target``, (N, 3, H, K)."""
    tokens, heads, width = parts[0].shape
    half = cos.shape[-1]
    rest = 0 if len(parts) == 2 else width - 2 * half  # two parts, without values, are those of the target itself
    blocks = {"block_half": triton.next_power_of_2(half), "block_rest": triton.next_power_of_2(max(rest, 1))}
    rows = max(1, ROTARY_PAIRS // blocks["block_half"])
    sources = parts[0], parts[1], parts[-1]
    strides = [stride for part in sources for stride in part.stride()[:2]]
    sizes = {"heads": heads, "half": half, "rest": rest, "width": width, "block_rows": rows, **blocks}
    with torch.cuda.device_of(target):
        grid = triton.cdiv(tokens * heads, rows), len(parts)
        turn_kernel[grid](*sources, target, cos, sin, tokens * heads, direction, *strides, **sizes)


def _turn_in_place(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unbind(1)
    _turn((q, k), qkv, cos, sin, 1.0)
    return q, k, v


class _Rotate(torch.autograd.Function):
    """The kernel with its derivative; autograd is not told of the change in place, see `quiver.encoder.layers`."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turn_in_place(qkv, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *parts: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        if is_joined_qkv(*parts):  # attention has written them in the layout of the product
            gradient = join_qkv(*parts)
            _turn(parts[:2], gradient, cos, sin, -1.0)
            return gradient, None, None
        tokens, heads, width = parts[0].shape
        gradient = parts[0].new_empty(tokens, 3, heads, width)
        _turn([part if part.stride(-1) == 1 else part.contiguous() for part in parts], gradient, cos, sin, -1.0)
        return gradient, None, None


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate the queries and keys of ``qkv``, (N, 3, H, K), in place; see `quiver.encoder.layers.rotate`."""
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    if not (torch.is_grad_enabled() and qkv.requires_grad):
        return _turn_in_place(qkv, cos, sin)
    q, k, v = _Rotate.apply(qkv, cos, sin)
    return q, k, v


# Logits that a program holds at a time: 16 per thread.
LOGITS = 4096


@triton.jit
def cross_entropy_kernel(logits, labels, values, z_loss, width: tl.constexpr, differentiable: tl.constexpr, block: tl.constexpr):
    """Three values of a row; its logits become the derivatives of the loss: without z-loss the probabilities, minus one at the label."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    logits += row * width
    column = tl.arange(0, block)
    label = tl.load(labels + row)
    known = (label >= 0) & (label < width)  # another label gives NaN, which training refuses, instead of other memory
    # Before the reductions below, after which other threads may overwrite it.
    picked = tl.load(logits + label, mask=known, other=float("nan")).to(tl.float32)
    highest = tl.full([block], -3.0e38, dtype=tl.float32)  # finite: the difference of two infinities is no number
    total = tl.zeros([block], dtype=tl.float32)
    ahead = tl.zeros([block], dtype=tl.int32)
    for start in range(0, width, block):
        x = tl.load(logits + start + column, mask=start + column < width, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, x)
        total = total * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
        if not differentiable:
            ahead += ((x > picked) | ((x == picked) & (start + column < label))).to(tl.int32)
    top = tl.max(highest, axis=0)
    normalizer = tl.sum(total * tl.exp(highest - top), axis=0)
    log_sum = top + tl.log(normalizer)
    tl.store(values + row, (top - picked) + tl.log(normalizer) + z_loss * log_sum * log_sum)
    tl.store(values + rows + row, log_sum * log_sum)
    first = tl.where((tl.sum(ahead, axis=0) == 0) & known, 1.0, 0.0)
    tl.store(values + 2 * rows + row, float("nan") if differentiable else first)
    if differentiable:
        scale = (1.0 + 2.0 * z_loss * log_sum) / normalizer
        for start in range(0, width, block):
            inside = start + column < width
            x = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
            slope = tl.exp(x - top) * scale - tl.where(start + column == label, 1.0, 0.0)
            tl.store(logits + start + column, slope, mask=inside)


def cross_entropy_(logits: Tensor, labels: Tensor, *, z_loss: float, differentiable: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return `quiver.encoder.heads.CrossEntropy` of logits (C, V), in float32; ``differentiable``: overwrites them with its derivatives."""
    values = logits.new_empty(3, len(logits), dtype=torch.float32)
    sizes = {"width": logits.shape[1], "differentiable": differentiable, "block": LOGITS}
    with torch.cuda.device_of(logits):
        cross_entropy_kernel[(len(logits),)](logits, labels, values, z_loss, **sizes, num_warps=8)
    losses, squares, correct = values
    return losses, squares, correct
