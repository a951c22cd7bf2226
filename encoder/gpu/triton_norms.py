"""Triton kernels of norms with what precedes them: dropout and residual sum, or the sum of the embeddings' vectors.

Each kernel makes one pass over memory; results match `quiver.encoder.layers` to rounding, sums are float32, and a norm is written in the
dtype that the next product multiplies. Dropout keeps no mask: Philox draws 16 bits per number from a seed and the number's place, and the
backward pass draws them again; the seed comes from PyTorch's default generator on the host. Gradients of norm weights are summed in two
stages, by each program over its tokens, then over the programs, without atomic additions, so the same batch gives the same bits.

Shapes: N packed tokens, D model width, V rows of a table, P programs of the backward pass.
Source: Layer Normalization, arXiv:1607.06450; Root Mean Square Layer Normalization, arXiv:1910.07467; Philox: Parallel Random Numbers: As
Easy as 1, 2, 3, SC 2011, doi:10.1145/2063384.2063405.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from quiver.encoder.dropout import dropped_levels, new_seed

# Programs of the backward pass. A constant instead of the device's number of multiprocessors, so that the order of the sums is the same
# everywhere; enough to fill the largest device, few enough that their (P, D) partial sums are small.
NORM_PROGRAMS = 1024
# Random bits that decide on one number, in units of 2**-16.
LEVELS = 2**16


@triton.jit
def _draw_kept(seed, row, dropped, block: tl.constexpr):
    """Whether each number of a row is kept, (block,): 16 of the 128 bits that Philox draws for eight neighbours."""
    place = tl.arange(0, block // 8)
    none = tl.zeros_like(place)
    a, b, c, d = tl.philox(seed, place, none + row.to(tl.int32), none, none)
    words = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [block // 8, 4])
    halves = tl.reshape(tl.join(words & 0xFFFF, words >> 16), [block])
    return halves.to(tl.int32) >= dropped


@triton.jit
def _sum_row(  # noqa: PLR0913 (pointers and sizes; a kernel has no other way to get them)
    hidden, update, types, rows, update_rows, row, seed, dropped, kept_scale, width: tl.constexpr, drops: tl.constexpr, block: tl.constexpr
):
    """One row of what a norm is computed of, float32: hidden states and update, or rows of tables and one row for all."""
    column = tl.arange(0, block)
    inside = column < width
    source = row
    if rows is not None:
        source = tl.load(rows + row)
    x = tl.load(hidden + source * width + column, mask=inside, other=0.0).to(tl.float32)
    if update is not None:
        source = row
        if update_rows is not None:
            source = tl.load(update_rows + row)
        added = tl.load(update + source * width + column, mask=inside, other=0.0).to(tl.float32)
        if drops:
            added = tl.where(_draw_kept(seed, row, dropped, block), added * kept_scale, 0.0)
        x += added
    if types is not None:
        x += tl.load(types + column, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["seed", "dropped"])
def norm_kernel(  # noqa: PLR0913 (pointers and sizes; a kernel has no other way to get them)
    hidden,
    update,
    types,
    rows,
    update_rows,
    weight,
    bias,
    total,
    normed,
    means,
    scales,
    epsilon,
    seed,
    dropped,
    kept_scale,
    width: tl.constexpr,
    centred: tl.constexpr,
    drops: tl.constexpr,
    block: tl.constexpr,
):
    """Layer or RMS normalization of one row of a sum; the sum itself and the statistics are written where there is a place for them."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    place = row * width + column
    x = _sum_row(hidden, update, types, rows, update_rows, row, seed, dropped, kept_scale, width, drops, block)
    if total is not None:
        rounded = x.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        x = rounded.to(tl.float32)  # the norm of the rounded sum, which is what is stored
    if centred:
        mean = tl.sum(x, axis=0) / width
        x = tl.where(inside, x - mean, 0.0)
        if means is not None:
            tl.store(means + row, mean)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + epsilon)
    if scales is not None:
        tl.store(scales + row, scale)
    y = x * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + place, y, mask=inside)


@triton.jit(do_not_specialize=["tokens", "each", "seed", "dropped"])
def norm_backward_kernel(  # noqa: PLR0913 (pointers and sizes; a kernel has no other way to get them)
    hidden,
    update,
    types,
    rows,
    update_rows,
    weight,
    means,
    scales,
    grad_total,
    grad_normed,
    gradient,
    grad_update,
    weight_sums,
    bias_sums,
    tokens,
    each,
    seed,
    dropped,
    kept_scale,
    width: tl.constexpr,
    centred: tl.constexpr,
    drops: tl.constexpr,
    block: tl.constexpr,
):
    """Gradients of the sum and, where it differs, of the update that was added; partial sums of those of the norm's weights."""
    program = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([block], dtype=tl.float32)
    bias_sum = tl.zeros([block], dtype=tl.float32)
    for index in range(program * each, tl.minimum(program * each + each, tokens)):
        row = tl.cast(index, tl.int64)
        place = row * width + column
        x = _sum_row(hidden, update, types, rows, update_rows, row, seed, dropped, kept_scale, width, False, block)
        received = tl.load(grad_normed + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        if centred:
            x = tl.where(inside, x - tl.load(means + row), 0.0)
        unit = x * scale
        weight_sum += received * unit
        if bias_sums is not None:
            bias_sum += received
        inner = received * w
        slope = inner - unit * (tl.sum(inner * unit, axis=0) / width)
        if centred:
            slope -= tl.sum(inner, axis=0) / width
        slope *= scale
        if grad_total is not None:
            slope += tl.load(grad_total + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(gradient + place, slope, mask=inside)
        if grad_update is not None:
            if drops:
                slope = tl.where(_draw_kept(seed, row, dropped, block), slope * kept_scale, 0.0)
            tl.store(grad_update + place, slope, mask=inside)
    sums = program * width + column
    tl.store(weight_sums + sums, weight_sum, mask=inside)
    if bias_sums is not None:
        tl.store(bias_sums + sums, bias_sum, mask=inside)


class _Norm(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    epsilon: float
    centred: bool  # whether the mean is subtracted (LayerNorm) or not (RMSNorm)


class _Source(NamedTuple):
    """What a norm is computed of."""

    hidden: Tensor  # (N, D), or (V, D) with ``rows``
    update: Tensor | None = None  # what is added: (N, D), or (V, D) with ``update_rows``
    types: Tensor | None = None  # a vector that is added to every token, (D,)
    rows: Tensor | None = None  # row of the table ``hidden`` of each token, (N,) int64
    update_rows: Tensor | None = None  # row of the table ``update`` of each token, (N,) int64


class _Drop(NamedTuple):
    """Dropout of an update."""

    seed: int = 0
    dropped: int = 0  # number of the `LEVELS` that drop a number; 0 for no dropout

    @classmethod
    def draw(cls, probability: float) -> _Drop:
        # 31 bits: a seed that is sometimes a wider integer would be compiled twice.
        return cls(new_seed() >> 1, dropped_levels(probability, LEVELS)) if probability else cls()

    @property
    def arguments(self) -> tuple[int, int, float]:
        return self.seed, self.dropped, LEVELS / (LEVELS - self.dropped)


def _shape(width: int) -> dict[str, int]:
    return {"width": width, "block": max(triton.next_power_of_2(width), 8), "num_warps": 4 if width <= 2048 else 8}


def _forward(
    source: _Source, norm: _Norm, drop: _Drop, *, tokens: int, total: Tensor | None, dtype: torch.dtype, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Write the sum to ``total``; return its norm and, for the backward pass, each token's mean and scale."""
    width, device = source.hidden.shape[1], source.hidden.device
    normed = torch.empty(tokens, width, dtype=dtype, device=device)
    means = torch.empty(tokens, dtype=torch.float32, device=device) if keep and norm.centred else None
    scales = torch.empty(tokens, dtype=torch.float32, device=device) if keep else None
    written, kind = (total, normed, means, scales), {"centred": norm.centred, "drops": drop.dropped > 0, **_shape(width)}
    with torch.cuda.device_of(normed):
        norm_kernel[(tokens,)](*source, norm.weight, norm.bias, *written, norm.epsilon, *drop.arguments, **kind)
    return normed, means, scales


def _backward(
    source: _Source,
    norm: _Norm,
    drop: _Drop,
    statistics: tuple[Tensor | None, Tensor],
    grad_total: Tensor | None,
    grad_normed: Tensor,
    *,
    dtypes: tuple[torch.dtype, torch.dtype | None],
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Gradients of the sum in the first dtype, of the update in the second, of the weight and of the bias."""
    tokens, width = grad_normed.shape
    programs = min(tokens, NORM_PROGRAMS)
    gradient = torch.empty_like(grad_normed, dtype=dtypes[0])
    # Without dropout it is the gradient of the sum.
    grad_update = torch.empty_like(grad_normed, dtype=dtypes[1]) if dtypes[1] and (drop.dropped or dtypes[1] != dtypes[0]) else None
    weight_sums = grad_normed.new_empty(programs, width, dtype=torch.float32)
    bias_sums = None if norm.bias is None else torch.empty_like(weight_sums)
    read, written = (*source, norm.weight, *statistics, grad_total, grad_normed), (gradient, grad_update, weight_sums, bias_sums)
    kind = {"centred": norm.centred, "drops": drop.dropped > 0, **_shape(width)}
    with torch.cuda.device_of(gradient):
        norm_backward_kernel[(programs,)](*read, *written, tokens, triton.cdiv(tokens, programs), *drop.arguments, **kind)
    grad_bias = None if bias_sums is None or norm.bias is None else bias_sums.sum(0).to(norm.bias.dtype)
    return gradient, gradient if grad_update is None else grad_update, weight_sums.sum(0).to(norm.weight.dtype), grad_bias


class _AddNorm(torch.autograd.Function):
    """(hidden, update) to (sum, norm of the sum); without an update, hidden to its norm."""

    @staticmethod
    def forward(  # noqa: PLR0913 (autograd sees tensors only as arguments)
        ctx: Any,
        hidden: Tensor,
        update: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        centred: bool,
        drop: _Drop,
        dtype: torch.dtype,
    ) -> Tensor | tuple[Tensor, Tensor]:
        norm = _Norm(weight, bias, epsilon, centred)
        total = None if update is None else torch.empty_like(hidden, dtype=_sum_dtype(hidden, update, norm))
        normed, means, scales = _forward(_Source(hidden, update), norm, drop, tokens=len(hidden), total=total, dtype=dtype, keep=True)
        ctx.save_for_backward(hidden if total is None else total, weight, bias, means, scales)
        ctx.settings = epsilon, centred, drop
        ctx.dtypes = hidden.dtype, None if update is None else update.dtype
        ctx.set_materialize_grads(False)
        return normed if total is None else (total, normed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, bias, means, scales = ctx.saved_tensors
        epsilon, centred, drop = ctx.settings
        grad_normed, grad_total = incoming[-1], incoming[0] if ctx.dtypes[1] else None
        if grad_normed is None and grad_total is None:
            return (None,) * 8
        if grad_normed is None:  # only the stream was used
            grad_normed = torch.zeros_like(total)
        gradient, grad_update, grad_weight, grad_bias = _backward(
            _Source(total),
            _Norm(weight, bias, epsilon, centred),
            drop,
            (means, scales),
            None if grad_total is None else grad_total.contiguous(),
            grad_normed.contiguous(),
            dtypes=ctx.dtypes,
        )
        return gradient, grad_update if ctx.dtypes[1] else None, grad_weight, grad_bias, None, None, None, None


def _sum_dtype(hidden: Tensor, update: Tensor, norm: _Norm) -> torch.dtype:
    """Return the dtype of the residual stream: never less than that of the weights, however the embeddings wrote it under autocast."""
    return torch.promote_types(torch.promote_types(hidden.dtype, update.dtype), norm.weight.dtype)


def _settings(norm: nn.LayerNorm | nn.RMSNorm) -> _Norm:
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    return _Norm(norm.weight, bias, cast("float", norm.eps), centred=isinstance(norm, nn.LayerNorm))


def _differentiable(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def add_norm(
    hidden: Tensor, update: Tensor | None, norm: nn.LayerNorm | nn.RMSNorm, *, dropout: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """The sum and its norm, (N, D) each; see `quiver.encoder.layers.add_norm`. ``dtype`` of the norm: None for that of the sum."""
    settings = _settings(norm)
    drop = _Drop.draw(dropout if update is not None else 0.0)
    hidden = hidden.contiguous()
    update = None if update is None else update.contiguous()
    wide = hidden.dtype if update is None else _sum_dtype(hidden, update, settings)
    if _differentiable(hidden, update, norm.weight, settings.bias):
        output = _AddNorm.apply(hidden, update, *settings, drop, dtype or wide)
        return (hidden, output) if update is None else output
    if update is None:
        total = None
    elif torch.is_grad_enabled() or hidden.dtype != wide:
        total = torch.empty_like(hidden, dtype=wide)
    else:
        total = hidden  # without gradients nothing reads the old stream
    normed, _, _ = _forward(_Source(hidden, update), settings, drop, tokens=len(hidden), total=total, dtype=dtype or wide, keep=False)
    return hidden if total is None else total, normed


class _Embed(torch.autograd.Function):
    """Rows of tables to the norm of their sum; the sum is computed again in the backward pass, from the tables."""

    @staticmethod
    def forward(  # noqa: PLR0913 (autograd sees tensors only as arguments)
        ctx: Any,
        tokens: Tensor,
        positions: Tensor | None,
        types: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        places: Tensor | None,
        epsilon: float,
        centred: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        norm = _Norm(weight, bias, epsilon, centred)
        source = _Source(tokens, positions, None if types is None else types[0], ids, places)
        normed, means, scales = _forward(source, norm, _Drop(), tokens=len(ids), total=None, dtype=dtype, keep=True)
        ctx.save_for_backward(tokens, positions, types, weight, bias, ids, places, means, scales)
        ctx.settings = epsilon, centred
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        tokens, positions, types, weight, bias, ids, places, means, scales = ctx.saved_tensors
        gradient, _, grad_weight, grad_bias = _backward(
            _Source(tokens, positions, None if types is None else types[0], ids, places),
            _Norm(weight, bias, *ctx.settings),
            _Drop(),
            (means, scales),
            None,
            incoming.contiguous(),
            dtypes=(tokens.dtype, None),
        )
        needed = ctx.needs_input_grad
        grad_tokens = torch.ops.aten.embedding_dense_backward(gradient, ids, len(tokens), -1, False) if needed[0] else None
        grad_positions = grad_types = None
        if positions is not None and needed[1]:
            grad_positions = torch.ops.aten.embedding_dense_backward(gradient, places, len(positions), -1, False)
        if types is not None and needed[2]:
            grad_types = torch.zeros_like(types)
            grad_types[0] = gradient.sum(0)
        return grad_tokens, grad_positions, grad_types, grad_weight, grad_bias, None, None, None, None, None


def embed(
    ids: Tensor,
    tokens: Tensor,
    positions: tuple[Tensor, Tensor] | None,
    types: Tensor | None,
    norm: nn.LayerNorm | nn.RMSNorm,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Sums of rows of the tables, normalized, (N, D) in ``dtype``; see `quiver.encoder.layers.embed`."""
    settings = _settings(norm)
    table, places = positions or (None, None)
    ids = ids.contiguous()
    if _differentiable(tokens, table, types, norm.weight, settings.bias):
        output: Tensor = _Embed.apply(tokens, table, types, settings.weight, settings.bias, ids, places, *settings[2:], dtype)
        return output
    source = _Source(tokens, table, None if types is None else types[0], ids, places)
    return _forward(source, settings, _Drop(), tokens=len(ids), total=None, dtype=dtype, keep=False)[0]
