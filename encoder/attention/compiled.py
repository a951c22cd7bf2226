"""Attention on a CPU by compiled loops (`quiver.encoder.cpu.attention`): no mask, no copy, no padding.

Shapes: N packed tokens, H heads, K head width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quiver.encoder.cpu.availability import has_numbers, loops_run, worthwhile
from quiver.encoder.ops import empty_qkv
from quiver.encoder.packing import PackedBatch

UNIT = 4
"""Bytes that the loops read as one number: a float32 one, or a pair of bfloat16."""


def is_supported(batch: PackedBatch, q: Tensor) -> bool:
    """Whether the loops can run on these numbers, and are worth it for a batch.

    Args:
        batch: The packed batch.
        q: Its queries or hidden states.
    """
    if not has_numbers(q):  # asked first: a graph of any number of tokens must not ask for it
        return False
    return (batch.batch_invariant or worthwhile(batch.num_tokens)) and loops_run()


def attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float
) -> Tensor:
    """Attention by compiled loops; see `quiver.encoder.attention.attend` for the contract.

    Without gradients bfloat16 is multiplied in pairs. Weights are rounded to it before they meet the values, as in flash attention; scores,
    sums and what is gathered are float32. With gradients it is brought to float32, and what comes of it is rounded.
    """
    del slopes, dropout  # the choice of the backend has seen to it that there are none
    output: Tensor
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        output = _CompiledAttention.apply(q, k, v, batch, window)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    else:
        output, _ = _attend(q, k, v, batch, window, summed=False)
    return output


class _CompiledAttention(torch.autograd.Function):
    """The loops with their gradients, which are written where the product behind queries, keys and values wants them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
        output, tops = _attend(q.float(), k.float(), v.float(), batch, window, summed=True)
        output = output.to(q.dtype)
        ctx.batch, ctx.window = batch, window
        ctx.save_for_backward(q, k, v, output, tops)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        from quiver.encoder.cpu import attention_gradients

        q, k, v, output, tops = ctx.saved_tensors
        batch, window = ctx.batch, ctx.window
        room = found = empty_qkv(q)
        if q.dtype != torch.float32:
            found = q.new_empty((3, *q.shape), dtype=torch.float32).unbind(0)
        if batch.key_lengths is not None:  # nothing is written for keys that nobody may attend to
            for each in found[1:]:
                each.zero_()
        read = [_with_heads(x.float()) for x in (q, k, v, output, gradient)]
        tables = _table(batch, window), _table(batch, window, keys=True)
        attention_gradients.differentiate([*map(_heads, read)], [*map(_heads, found)], tables, q.shape[1:], window, tops)
        if found is not room:
            for narrow, wide in zip(room, found, strict=True):
                narrow.copy_(wide)
        return *room, None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, *, summed: bool) -> tuple[Tensor, Tensor | None]:
    """The output, (N, H, K), and where it is asked for what gradients count weights from."""
    from quiver.encoder.cpu import attention, attention_call

    read = [_with_heads(x) for x in (q, k, v)]
    output, table = q.new_empty(q.shape), _table(batch, window)
    sums = q.new_empty(2, q.shape[1], attention_call.lane_tokens(table)) if summed else None
    paired = q.dtype == torch.bfloat16
    attention.attend([_heads(x) for x in (*read, output)], table, (q.shape[1], q.shape[2]), window, paired=paired, sums=sums)
    return output, None if sums is None else attention_call.counted_from(sums)


def _with_heads(x: Tensor) -> Tensor:
    """The tensor, the numbers of a head side by side, and every head where a unit begins."""
    places = (x.data_ptr(), *(stride * x.itemsize for stride in x.stride()[:2]))
    in_place = x.stride(-1) == 1 and not any(place % UNIT for place in places)
    return x if in_place else x.clone(memory_format=torch.contiguous_format)


def _heads(x: Tensor) -> tuple[int, int, int]:
    numbers = UNIT // x.itemsize
    return x.data_ptr(), x.stride(0) // numbers, x.stride(1) // numbers


def _table(batch: PackedBatch, window: int | None, *, keys: bool = False) -> Any:
    """Where the sequences are, made once for all layers of a kind."""
    from quiver.encoder.cpu import attention_call

    memo = ("sequences", window is not None, keys)
    if memo not in batch.memo:
        lengths = np.asarray(batch.lengths, np.int64)
        seen = np.asarray(batch.key_lengths or batch.lengths, np.int64)
        starts = np.cumsum(lengths) - lengths
        batch.memo[memo] = attention_call.sequences(starts, lengths, seen, local=window is not None, keys=keys)
    return batch.memo[memo]
