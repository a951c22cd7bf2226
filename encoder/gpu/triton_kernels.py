"""Triton kernels of the token-wise arithmetic: gates, residual sum with norm, rotary positions.

Each kernel makes one pass over memory where PyTorch's operators make several. Results match `quiver.encoder.ops` to rounding.

The backward pass of a gate recomputes the activation from the saved product, which is cheaper than storing it. Gradients of norm weights
and biases are summed in two stages, first by each program over its tokens, then over the programs; there are no atomic additions, so the
same batch gives the same bits.

Shapes: N packed tokens, D model width, I MLP width, H heads, K head width, R leading dimensions of a head that RoPE rotates,
P programs of the backward pass of a norm.
Source: Layer Normalization, arXiv:1607.06450; Root Mean Square Layer Normalization, arXiv:1910.07467; RoFormer, arXiv:2104.09864.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two >= ``number`` >= 1: blocks must have such a size.

    Example:
        >>> [next_power_of_2(number) for number in (1, 48, 64, 768)]
        [1, 64, 64, 1024]
    """
    return 1 << (number - 1).bit_length()


def num_blocks(number: int, size: int) -> int:
    """Return the number of blocks of a size that cover ``number``."""
    return -(-number // size)


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
    return num_blocks(tokens, GATE_ROWS), num_blocks(width, GATE_COLUMNS)


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


# Programs of the backward pass. A constant instead of the device's number of multiprocessors, so that the order of the sums is the same
# everywhere; enough to fill the largest device, few enough that their (P, D) partial sums are small.
NORM_PROGRAMS = 1024


@triton.jit
def norm_kernel(  # noqa: PLR0913 (pointers and sizes; a kernel has no other way to get them)
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
    """Layer or RMS normalization of the sum of the hidden states and an update."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    place = row * width + column
    x = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
    if has_update:
        x += tl.load(update + place, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        x = rounded.to(tl.float32)  # the norm of the rounded sum, which is what is stored
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
def norm_backward_kernel(  # noqa: PLR0913 (pointers and sizes; a kernel has no other way to get them)
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
    """Gradients of `norm_kernel` with respect to its input, and partial sums of those of its weights."""
    program = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([block], dtype=tl.float32)
    bias_sum = tl.zeros([block], dtype=tl.float32)
    row = program * each
    end = tl.minimum(row + each, tokens)
    while row < end:  # not range(): Triton's interpreter cannot count to a runtime number with numpy 2.4
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
    """Whether the mean is subtracted (LayerNorm) or not (RMSNorm)."""


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8


def _empty_sum(hidden: Tensor, update: Tensor | None) -> Tensor:
    """Allocate the sum; without an update the stream itself is the sum."""
    return hidden if update is None else torch.empty_like(hidden, dtype=torch.promote_types(hidden.dtype, update.dtype))


def _norm_forward(
    hidden: Tensor, update: Tensor | None, norm: _Norm, *, total: Tensor, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Write the sum to ``total``; return its norm and, for the backward pass, each token's mean and scale."""
    tokens, width = hidden.shape
    normed = torch.empty_like(total)
    means = hidden.new_empty(tokens, dtype=torch.float32) if keep and norm.centred else None
    scales = hidden.new_empty(tokens, dtype=torch.float32) if keep else None
    with torch.cuda.device_of(hidden):
        norm_kernel[(tokens,)](
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
            block=next_power_of_2(width),
            num_warps=_warps(width),
        )
    return normed, means, scales


def _norm_backward(
    total: Tensor, norm: _Norm, statistics: tuple[Tensor | None, Tensor], grad_total: Tensor | None, grad_normed: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the sum, the weight and the bias."""
    tokens, width = total.shape
    programs = min(tokens, NORM_PROGRAMS)
    gradient = torch.empty_like(total)
    weight_sums = total.new_empty(programs, width, dtype=torch.float32)
    bias_sums = None if norm.bias is None else torch.empty_like(weight_sums)
    with torch.cuda.device_of(total):
        norm_backward_kernel[(programs,)](
            total,
            norm.weight,
            *statistics,
            None if grad_total is None else grad_total.contiguous(),
            grad_normed.contiguous(),
            gradient,
            weight_sums,
            bias_sums,
            tokens,
            num_blocks(tokens, programs),
            width=width,
            centred=norm.centred,
            has_grad_total=grad_total is not None,
            has_bias=norm.bias is not None,
            block=next_power_of_2(width),
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
        normed, means, scales = _norm_forward(hidden, update, norm, total=total, keep=True)
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
            gradient, grad_weight, grad_bias = _norm_backward(total, norm, (means, scales), grad_total, grad_normed)
        if gradient is None:
            return None, None, None, None, None, None
        grad_update = None if update_dtype is None else gradient.to(update_dtype)
        return gradient.to(hidden_dtype), grad_update, grad_weight, grad_bias, None, None


def add_norm(hidden: Tensor, update: Tensor | None, norm: nn.LayerNorm | nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """The sum and its norm, (N, D) each; see `quiver.encoder.ops.add_norm`."""
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    settings = _Norm(norm.weight, bias, cast("float", norm.eps), centred=isinstance(norm, nn.LayerNorm))
    hidden = hidden.contiguous()
    update = None if update is None else update.contiguous()
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, update, norm.weight, bias)):
        output = _AddNorm.apply(hidden, update, *settings)
        return (hidden, output) if update is None else output
    total = _empty_sum(hidden, update) if torch.is_grad_enabled() else hidden  # without gradients nothing reads the old stream
    return total, _norm_forward(hidden, update, settings, total=total, keep=False)[0]


# Pairs of numbers that one program rotates: eight per thread with four warps, 16-byte loads in half precision.
ROTARY_PAIRS = 1024


@triton.jit(do_not_specialize=["rows"])
def turn_kernel(  # noqa: PLR0913 (pointers, strides and sizes; a kernel has no other way to get them)
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
    """Rotation of pairs of numbers by their position's angles (RoPE)."""
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

    if rest > 0:  # dimensions without positions, if source and target differ
        column = tl.arange(0, block_rest)
        inside = here[:, None] & (column < rest)[None, :]
        place = 2 * half + column[None, :]
        tl.store(target + place, tl.load(source + place, mask=inside), mask=inside)


def _turn(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, direction: float) -> None:
    """Write ``source``, (N, H, K), rotated by ``direction`` times the angle to ``target``; both may be the same tensor."""
    tokens, heads, width = source.shape
    half = cos.shape[-1]
    rest = 0 if source is target else width - 2 * half
    block_half = next_power_of_2(half)
    block_rows = max(1, ROTARY_PAIRS // block_half)
    with torch.cuda.device_of(source):
        turn_kernel[(num_blocks(tokens * heads, block_rows),)](
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
            block_rest=next_power_of_2(max(rest, 1)),
        )


def _turn_in_place(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = qkv[:, :2].flatten(1, 2)  # (N, 2 H, K), a view: queries and keys are adjacent
    _turn(heads, heads, cos, sin, 1.0)
    q, k, v = qkv.unbind(1)
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
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        tokens, heads, width = grad_q.shape
        gradient = grad_q.new_empty(tokens, 3, heads, width)
        for part, incoming in enumerate((grad_q, grad_k)):
            _turn(incoming if incoming.stride(-1) == 1 else incoming.contiguous(), gradient[:, part], cos, sin, -1.0)
        gradient[:, 2] = grad_v
        return gradient, None, None


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate the queries and keys of ``qkv``, (N, 3, H, K), in place; see `quiver.encoder.ops.rotate`."""
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    if not (torch.is_grad_enabled() and qkv.requires_grad):
        return _turn_in_place(qkv, cos, sin)
    q, k, v = _Rotate.apply(qkv, cos, sin)
    return q, k, v
