"""Residual sum and norm as Triton kernels: one read of stream and update, one write of their sum and its norm.

The gradients of weight and bias are summed in two stages, first by each program over its tokens, then over the programs:
no atomic additions, so the same batch gives the same bits.

Shapes: N packed tokens, D width, P programs of the backward pass.
Source: Layer Normalization, arXiv:1607.06450; Root Mean Square Layer Normalization, arXiv:1910.07467.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from quiver.encoder.gpu.triton_blocks import blocks, power_of_two

# Programs of the backward pass. A constant, not the device's number of multiprocessors, so that the order of the sums is
# the same everywhere; enough to fill the largest device, few enough that their (P, D) partial sums are a trifle.
PROGRAMS = 1024


@triton.jit
def _norm_kernel(  # noqa: PLR0913 (pointers and sizes; a kernel has no other way to get them)
    hidden,
    update,
    weight,
    bias,
    total,
    normed,
    means,
    scales,
    epsilon,
    width: tl.constexpr,
    centred: tl.constexpr,
    has_update: tl.constexpr,
    has_bias: tl.constexpr,
    keep_statistics: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    place = row * width + column
    x = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
    if has_update:
        x += tl.load(update + place, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        x = rounded.to(tl.float32)  # the norm of what is kept, not of what was before rounding
    if centred:
        mean = tl.sum(x, axis=0) / width
        x = tl.where(inside, x - mean, 0.0)
        if keep_statistics:
            tl.store(means + row, mean)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + epsilon)
    if keep_statistics:
        tl.store(scales + row, scale)
    y = x * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + place, y, mask=inside)


@triton.jit(do_not_specialize=["tokens", "each"])
def _norm_backward_kernel(  # noqa: PLR0913 (pointers and sizes; a kernel has no other way to get them)
    total,
    weight,
    means,
    scales,
    grad_total,
    grad_normed,
    gradient,
    weight_sums,
    bias_sums,
    tokens,
    each,
    width: tl.constexpr,
    centred: tl.constexpr,
    has_grad_total: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([block], dtype=tl.float32)
    bias_sum = tl.zeros([block], dtype=tl.float32)
    row = program * each
    end = tl.minimum(row + each, tokens)
    while row < end:  # not range(): Triton's interpreter cannot count to a number it is given with numpy 2.4
        place = row.to(tl.int64) * width + column
        x = tl.load(total + place, mask=inside, other=0.0).to(tl.float32)
        received = tl.load(grad_normed + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        if centred:
            x = tl.where(inside, x - tl.load(means + row), 0.0)
        unit = x * scale
        weight_sum += received * unit
        if has_bias:
            bias_sum += received
        inner = received * w
        slope = inner - unit * (tl.sum(inner * unit, axis=0) / width)
        if centred:
            slope -= tl.sum(inner, axis=0) / width
        slope *= scale
        if has_grad_total:
            slope += tl.load(grad_total + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(gradient + place, slope, mask=inside)
        row += 1
    sums = program * width + column
    tl.store(weight_sums + sums, weight_sum, mask=inside)
    if has_bias:
        tl.store(bias_sums + sums, bias_sum, mask=inside)


class _Norm(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    epsilon: float
    centred: bool
    """Whether the mean is taken away (LayerNorm) or not (RMSNorm)."""


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8


def _empty_sum(hidden: Tensor, update: Tensor | None) -> Tensor:
    """Where the sum goes; without an update the stream is its own sum."""
    return hidden if update is None else torch.empty_like(hidden, dtype=torch.promote_types(hidden.dtype, update.dtype))


def _forward(
    hidden: Tensor, update: Tensor | None, norm: _Norm, *, total: Tensor, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Write the sum to ``total``; give its norm and, to keep for the backward pass, each token's mean and scale."""
    tokens, width = hidden.shape
    normed = torch.empty_like(total)
    means = hidden.new_empty(tokens, dtype=torch.float32) if keep and norm.centred else None
    scales = hidden.new_empty(tokens, dtype=torch.float32) if keep else None
    with torch.cuda.device_of(hidden):
        _norm_kernel[(tokens,)](
            hidden,
            update,
            norm.weight,
            norm.bias,
            total,
            normed,
            means,
            scales,
            norm.epsilon,
            width=width,
            centred=norm.centred,
            has_update=update is not None,
            has_bias=norm.bias is not None,
            keep_statistics=keep,
            block=power_of_two(width),
            num_warps=_warps(width),
        )
    return normed, means, scales


def _backward(
    total: Tensor, norm: _Norm, statistics: tuple[Tensor | None, Tensor], grad_total: Tensor | None, grad_normed: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the sum, the weight and the bias."""
    tokens, width = total.shape
    programs = min(tokens, PROGRAMS)
    gradient = torch.empty_like(total)
    weight_sums = total.new_empty(programs, width, dtype=torch.float32)
    bias_sums = None if norm.bias is None else torch.empty_like(weight_sums)
    with torch.cuda.device_of(total):
        _norm_backward_kernel[(programs,)](
            total,
            norm.weight,
            *statistics,
            None if grad_total is None else grad_total.contiguous(),
            grad_normed.contiguous(),
            gradient,
            weight_sums,
            bias_sums,
            tokens,
            blocks(tokens, programs),
            width=width,
            centred=norm.centred,
            has_grad_total=grad_total is not None,
            has_bias=norm.bias is not None,
            block=power_of_two(width),
            num_warps=_warps(width),
        )
    grad_bias = None if bias_sums is None or norm.bias is None else bias_sums.sum(0).to(norm.bias.dtype)
    return gradient, weight_sums.sum(0).to(norm.weight.dtype), grad_bias


class _AddNorm(torch.autograd.Function):
    """(hidden, update) to (sum, norm of the sum); without an update, hidden to its norm."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        norm = _Norm(weight, bias, epsilon, centred)
        total = _empty_sum(hidden, update)
        normed, means, scales = _forward(hidden, update, norm, total=total, keep=True)
        ctx.save_for_backward(total, weight, bias, means, scales)
        ctx.epsilon, ctx.centred = epsilon, centred
        ctx.dtypes = (hidden.dtype, None if update is None else update.dtype)
        ctx.set_materialize_grads(False)
        return normed if update is None else (total, normed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, bias, means, scales = ctx.saved_tensors
        hidden_dtype, update_dtype = ctx.dtypes
        grad_normed, grad_total = incoming[-1], incoming[0] if update_dtype else None
        if grad_normed is None:  # only the stream was used
            gradient, grad_weight, grad_bias = grad_total, None, None
        else:
            norm = _Norm(weight, bias, ctx.epsilon, ctx.centred)
            gradient, grad_weight, grad_bias = _backward(total, norm, (means, scales), grad_total, grad_normed)
        if gradient is None:
            return None, None, None, None, None, None
        grad_update = None if update_dtype is None else gradient.to(update_dtype)
        return gradient.to(hidden_dtype), grad_update, grad_weight, grad_bias, None, None


def add_norm(hidden: Tensor, update: Tensor | None, norm: nn.LayerNorm | nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """The sum and its norm, (N, D) each; see `quiver.encoder.ops.norms.add_norm`."""
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    settings = _Norm(norm.weight, bias, cast("float", norm.eps), centred=isinstance(norm, nn.LayerNorm))
    hidden = hidden.contiguous()
    update = None if update is None else update.contiguous()
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, update, norm.weight, bias)):
        output = _AddNorm.apply(hidden, update, *settings)
        return (hidden, output) if update is None else output
    total = _empty_sum(hidden, update) if torch.is_grad_enabled() else hidden  # without gradients nothing asks for the old stream
    return total, _forward(hidden, update, settings, total=total, keep=False)[0]
