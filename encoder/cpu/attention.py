"""The attention backend ``compiled`` for CPUs, by the kernels of `quiver.encoder.cpu.attention_kernels`: no mask, copy or padding.

Shapes: N packed tokens, H heads, K head width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quiver.encoder.cpu.kernels import kernels_run
from quiver.encoder.cpu.support import enough_tokens, is_plain
from quiver.encoder.packing import PackedBatch, empty_qkv

UNIT_BYTES = 4
"""Bytes that the kernels move as one unit: a float32, or two bfloat16."""


def is_supported(batch: PackedBatch, q: Tensor) -> bool:
    """Return whether the kernels support a batch of queries or hidden states and are worth their overhead."""
    # A traced graph must not depend on the number of tokens, so this is checked first.
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    if traced or not is_plain(q):
        return False
    return (batch.batch_invariant or enough_tokens(batch.num_tokens)) and kernels_run()


def attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float
) -> Tensor:
    """Attention by compiled kernels; see `quiver.encoder.attention.attend` for the contract.

    Without gradients bfloat16 heads are multiplied as they are; weights are rounded to bfloat16 before they meet the values, scores and
    sums are float32. With gradients the inputs are converted to float32 and the results rounded.
    """
    del slopes, dropout  # `choose_backend` ensures that there are none
    output: Tensor
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        output = _CompiledAttention.apply(q, k, v, batch, window)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    else:
        output, _ = _attend_with_sums(q, k, v, batch, window, summed=False)
    return output


class _CompiledAttention(torch.autograd.Function):
    """The kernels with gradients, written in the layout that the product of queries, keys and values needs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
        output, tops = _attend_with_sums(q.float(), k.float(), v.float(), batch, window, summed=True)
        output = output.to(q.dtype)
        ctx.batch, ctx.window = batch, window
        ctx.save_for_backward(q, k, v, output, tops)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        from quiver.encoder.cpu.attention_kernels import differentiate

        q, k, v, output, tops = ctx.saved_tensors
        batch, window = ctx.batch, ctx.window
        room = found = empty_qkv(q)
        if q.dtype != torch.float32:
            found = q.new_empty((3, *q.shape), dtype=torch.float32).unbind(0)
        if batch.key_lengths is not None:  # the kernels write no gradients for keys that are not attended to
            for each in found[1:]:
                each.zero_()
        read = [_with_contiguous_heads(x.float()) for x in (q, k, v, output, gradient)]
        tables = _sequence_table(batch, window), _sequence_table(batch, window, keys=True)
        differentiate([*map(_head_places, read)], [*map(_head_places, found)], tables, q.shape[1:], window, tops)
        if found is not room:
            for narrow, wide in zip(room, found, strict=True):
                narrow.copy_(wide)
        return *room, None, None


def _attend_with_sums(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, *, summed: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the output, (N, H, K), and the normalizers that the gradients need, if ``summed``."""
    from quiver.encoder.cpu.attention_kernels import attend, lane_tokens, log2_sum_exp

    read = [_with_contiguous_heads(x) for x in (q, k, v)]
    output, table = q.new_empty(q.shape), _sequence_table(batch, window)
    sums = q.new_empty(2, q.shape[1], lane_tokens(table)) if summed else None
    paired = q.dtype == torch.bfloat16
    attend([_head_places(x) for x in (*read, output)], table, (q.shape[1], q.shape[2]), window, paired=paired, sums=sums)
    return output, None if sums is None else log2_sum_exp(sums)


def _with_contiguous_heads(x: Tensor) -> Tensor:
    """Return the tensor with contiguous heads that start at a unit; a copy if necessary."""
    places = (x.data_ptr(), *(stride * x.itemsize for stride in x.stride()[:2]))
    in_place = x.stride(-1) == 1 and not any(place % UNIT_BYTES for place in places)
    return x if in_place else x.clone(memory_format=torch.contiguous_format)


def _head_places(x: Tensor) -> tuple[int, int, int]:
    numbers = UNIT_BYTES // x.itemsize
    return x.data_ptr(), x.stride(0) // numbers, x.stride(1) // numbers


def _sequence_table(batch: PackedBatch, window: int | None, *, keys: bool = False) -> Any:
    """Return the table of sequences, built once for all layers of a kind."""
    from quiver.encoder.cpu.attention_kernels import sequences

    memo = ("sequences", window is not None, keys)
    if memo not in batch.memo:
        lengths = np.asarray(batch.lengths, np.int64)
        seen = np.asarray(batch.key_lengths or batch.lengths, np.int64)
        starts = np.cumsum(lengths) - lengths
        batch.memo[memo] = sequences(starts, lengths, seen, local=window is not None, keys=keys)
    return batch.memo[memo]
