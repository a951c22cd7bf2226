"""Attention over packed batches on any device, without an n x n tensor in local layers and without masks in global ones.

Global layers are in `quiver.encoder.attention.grouped`, and so are local ones over texts that are hardly longer than the window. Other
local layers: the packed tokens are cut into blocks of queries; each block meets its own keys and a halo of window // 2 on either
side, so the cost is N x window. Document borders and the window are one additive mask, made once a batch for all local layers.

Shapes: N packed tokens, H heads, K head width, W query blocks.
Source: ModernBERT, arXiv:2412.13663, section 2.1.2 (alternating attention, unpadding); the blocking is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from quiver.encoder.attention.grouped import attend_grouped, differentiated_on_cpu
from quiver.encoder.attention.groups import LengthGroups, banded, length_groups
from quiver.encoder.ops.heads import room_for_thirds
from quiver.encoder.packing import PackedBatch

# Queries in a block of a local layer: of 32, 64 and 128 the fastest on CPU (reference measurements: 19.5, 21.6 and
# 27.2 ms for 2,048 tokens of 12 heads of 64).
BLOCK = 32
# Blocks of one call without gradients, 2,048 tokens: what the call copies stays small whatever the batch.
LOCAL_BLOCKS = 64


@dataclass(frozen=True)
class LocalMask:
    """What the local layers of a batch share.

    Attributes:
        bias: 0 where a query may see a key, the dtype's minimum where not, (W, 1, BLOCK, BLOCK + window).
        sees: Whether each token sees any key, (N, 1, 1); None when all of them do.
    """

    bias: Tensor
    sees: Tensor | None


@torch.inference_mode(False)  # likewise
def local_mask(batch: PackedBatch, window: int, dtype: torch.dtype) -> LocalMask:
    """The mask of a batch's local layers for one window."""
    half = window // 2
    blocks = -(-batch.num_tokens // BLOCK)
    device = batch.ids.device
    sequence = torch.repeat_interleave(
        torch.arange(len(batch), device=device), batch.cu_seqlens.diff().long(), output_size=batch.num_tokens
    )
    key_sequence = sequence
    if batch.key_lengths is not None:
        limit = torch.tensor(batch.key_lengths).to(device, non_blocking=True)[sequence]
        key_sequence = torch.where(batch.positions < limit, sequence, -1)
    # Beyond either end of the batch there is nothing to see: queries get -2, keys -1, and these never match.
    queries = F.pad(sequence, (0, blocks * BLOCK - batch.num_tokens), value=-2).view(blocks, BLOCK, 1)
    keys = F.pad(key_sequence, (half, half + blocks * BLOCK - batch.num_tokens), value=-1).unfold(0, BLOCK + 2 * half, BLOCK)
    distance = _block_distance(half, device)
    visible = (queries == keys[:, None]) & (distance.abs() <= half)  # (W, BLOCK, BLOCK + window)
    bias = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, torch.finfo(dtype).min)
    sees = None
    if batch.key_lengths is not None:
        sees = visible.any(-1).flatten()[: batch.num_tokens, None, None]
    return LocalMask(bias[:, None], sees)


@dataclass(frozen=True)
class LocalBlocks:
    """Some neighbouring blocks of a local layer.

    Attributes:
        first: The first of them.
        last: One behind the last.
        half: Tokens of the halo on either side.
    """

    first: int
    last: int
    half: int

    @property
    def queries(self) -> tuple[int, int]:
        """Tokens of the blocks, start and end; the end may lie beyond the batch."""
        return self.first * BLOCK, self.last * BLOCK

    @property
    def keys(self) -> tuple[int, int]:
        """Tokens of the blocks and their halo, which may lie beyond the batch on either side."""
        return self.first * BLOCK - self.half, self.last * BLOCK + self.half

    def views(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (W, H, BLOCK, K), keys and values (W, H, BLOCK + window, K), the last two as overlapping views."""
        query = _rows(q, *self.queries).view(self.last - self.first, BLOCK, *q.shape[1:]).transpose(1, 2)
        key, value = (_rows(x, *self.keys).unfold(0, BLOCK + 2 * self.half, BLOCK).transpose(2, 3) for x in (k, v))
        return query, key, value

    def add_keys(self, gradient: Tensor, blocks: Tensor) -> None:
        """Add what the blocks' keys were given, (W, H, BLOCK + window, K), to a gradient (N, H, K)."""
        count, heads, span, width = blocks.shape
        total = blocks.new_zeros((count + -(-span // BLOCK)) * BLOCK, heads, width)
        for start in range(0, span, BLOCK):
            piece = blocks[:, :, start : start + BLOCK].transpose(1, 2)  # (W, <= BLOCK, H, K)
            total[start : start + count * BLOCK].view(count, BLOCK, heads, width)[:, : piece.shape[1]] += piece
        start, end = self.keys
        inside = slice(max(start, 0), min(end, len(gradient)))
        gradient[inside] += total[inside.start - start : inside.stop - start]


def _steps(blocks: int, half: int, step: int) -> list[LocalBlocks]:
    return [LocalBlocks(first, min(first + step, blocks), half) for first in range(0, blocks, step)]


def _attend_local(q: Tensor, k: Tensor, v: Tensor, mask: LocalMask, window: int, slopes: Tensor | None, dropout: float) -> Tensor:
    blocks, half = mask.bias.shape[0], window // 2
    if not torch.is_grad_enabled():
        outputs = [_attend_blocks(q, k, v, mask, some, slopes, dropout) for some in _steps(blocks, half, LOCAL_BLOCKS)]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    elif slopes is None and not dropout and differentiated_on_cpu(q, k, v):
        output = _LocalAttention.apply(q, k, v, mask.bias, half)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    else:
        # In one piece: each slice would be a whole tensor of zeros in the backward pass.
        output = _attend_blocks(q, k, v, mask, LocalBlocks(0, blocks, half), slopes, dropout)
    output = output[: len(q)]
    return output if mask.sees is None else output * mask.sees


def _attend_blocks(q: Tensor, k: Tensor, v: Tensor, mask: LocalMask, some: LocalBlocks, slopes: Tensor | None, dropout: float) -> Tensor:
    """Some blocks' queries over their keys, (W * BLOCK, H, K)."""
    bias = mask.bias[some.first : some.last]
    if slopes is not None:
        bias = (bias - _slope_penalty(slopes, some.half)).clamp(min=torch.finfo(q.dtype).min).to(q.dtype)
    query, key, value = some.views(q, k, v)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
    return mixed.transpose(1, 2).flatten(0, 1)


class _LocalAttention(torch.autograd.Function):
    """Local attention on a CPU a few blocks at a time, forward and backward.

    Autograd's own way keeps padded copies of keys and values and gives every block's keys a gradient of their own at once:
    five times the memory of the keys, fresh and zeroed in every layer.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, half: int) -> Tensor:
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        ctx.half = half
        outputs, sums = [], []
        for some in _steps(len(bias), half, LOCAL_BLOCKS):
            mixed, logsumexp = attention(*some.views(q, k, v), attn_mask=bias[some.first : some.last])
            outputs.append(mixed.transpose(1, 2).flatten(0, 1))
            sums.append(logsumexp)
        output = torch.cat(outputs)
        ctx.save_for_backward(q, k, v, bias, output, *sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, bias, output, *sums = ctx.saved_tensors
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        of_q, of_k, of_v = room_for_thirds(q)
        of_k.zero_()
        of_v.zero_()
        for some, logsumexp in zip(_steps(len(bias), ctx.half, LOCAL_BLOCKS), sums, strict=True):
            start, end = some.queries
            upstream, mixed = (x[start:end].view(some.last - some.first, BLOCK, *x.shape[1:]).transpose(1, 2) for x in (gradient, output))
            of_query, of_key, of_value = backward(
                upstream, *some.views(q, k, v), mixed, logsumexp, 0.0, False, attn_mask=bias[some.first : some.last]
            )
            of_q[start:end] = of_query.transpose(1, 2).flatten(0, 1)[: len(q) - start]
            some.add_keys(of_k, of_key)
            some.add_keys(of_v, of_value)
        return of_q, of_k, of_v, None, None


def _rows(x: Tensor, start: int, end: int) -> Tensor:
    """Tokens start..end of (N, H, K), zeros where they lie beyond the batch; a view where they do not."""
    before, after = max(-start, 0), max(end - len(x), 0)
    inside = x[max(start, 0) : min(end, len(x))]
    return F.pad(inside, (0, 0, 0, 0, before, after)) if before or after else inside


def _slope_penalty(slopes: Tensor, half: int) -> Tensor:
    """ALiBi's penalty inside a block of queries and its halo of keys, (1, H, BLOCK, BLOCK + window) float32."""
    return slopes.view(1, -1, 1, 1) * _block_distance(half, slopes.device).abs()


def _block_distance(half: int, device: torch.device) -> Tensor:
    """Key place minus query place in a block and its halo, (BLOCK, BLOCK + window)."""
    return torch.arange(BLOCK + 2 * half, device=device)[None] - half - torch.arange(BLOCK, device=device)[:, None]


def attend_packed(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float) -> Tensor:
    """Attention without padding on any device; see `quiver.encoder.attention.attend` for the contract."""
    # Where every distance fits the window, local and global are the same, and global needs no mask.
    if window is None or batch.max_seqlen - 1 <= window // 2:
        return attend_grouped(q, k, v, _groups(batch), slopes, dropout)
    if slopes is None and not dropout and q.device.type == "cpu" and pairs_of_groups(batch) <= pairs_of_blocks(batch, window):
        memo = ("banded", window, q.dtype)
        if memo not in batch.memo:
            batch.memo[memo] = banded(_groups(batch), window, q.dtype)
        return attend_grouped(q, k, v, batch.memo[memo], None, 0.0)
    memo = ("local", window, q.dtype)
    if memo not in batch.memo:
        batch.memo[memo] = local_mask(batch, window, q.dtype)
    return _attend_local(q, k, v, batch.memo[memo], window, slopes, dropout)


def pairs_of_groups(batch: PackedBatch) -> int:
    """Pairs of a query and a key that attention of whole sequences looks at."""
    return sum(length * keys for length, keys in zip(batch.lengths, batch.key_lengths or batch.lengths, strict=True))


def pairs_of_blocks(batch: PackedBatch, window: int) -> int:
    """Pairs that local attention in blocks looks at."""
    return -(-batch.num_tokens // BLOCK) * BLOCK * (BLOCK + 2 * (window // 2))


def _groups(batch: PackedBatch) -> LengthGroups:
    if "groups" not in batch.memo:
        batch.memo["groups"] = length_groups(batch)
    groups: LengthGroups = batch.memo["groups"]
    return groups
