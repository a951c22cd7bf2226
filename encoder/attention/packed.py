"""Attention over packed batches on any device, without an n x n tensor in local layers and without masks in global ones.

Global layers: sequences of one length form one mask-free call on views of the packed tensors. Local layers: the packed
tokens are cut into blocks of queries; each block meets its own keys and a halo of window // 2 on either side, so the
cost is N x window. Document borders and the window are one additive mask, made once a batch for all local layers.

Shapes: N packed tokens, H heads, K head width, G sequences of one length, n their length, W query blocks.
Source: ModernBERT, arXiv:2412.13663, section 2.1.2 (alternating attention, unpadding); the blocking is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from encoder.packing import PackedBatch

# Queries in a block of a local layer: of 32, 64 and 128 the fastest on CPU (reference measurements: 19.5, 21.6 and
# 27.2 ms for 2,048 tokens of 12 heads of 64).
BLOCK = 32
# Blocks of one call without gradients, 2,048 tokens: what the call copies stays small whatever the batch.
LOCAL_BLOCKS = 64
# Queries of one call with ALiBi, whose penalty is as wide as the sequence and differs from head to head.
SLOPING_BLOCK = 128


@dataclass(frozen=True)
class LengthGroups:
    """Sequences of a batch by length.

    Attributes:
        shapes: For each group (G, n, keys): sequences, tokens, leading tokens that may be attended to.
        order: Permutation that brings the tokens into group order, (N,); None when they lie so already.
        inverse: The way back, (N,).
    """

    shapes: tuple[tuple[int, int, int], ...]
    order: Tensor | None
    inverse: Tensor | None


def length_groups(batch: PackedBatch) -> LengthGroups:
    """Group a batch's sequences by (length, key length), in order of first appearance."""
    members: dict[tuple[int, int], list[int]] = {}
    key_lengths = batch.key_lengths or batch.lengths
    for place, shape in enumerate(zip(batch.lengths, key_lengths, strict=True)):
        members.setdefault(shape, []).append(place)
    shapes = tuple((len(places), length, keys) for (length, keys), places in members.items())
    flat = [place for places in members.values() for place in places]
    if flat == sorted(flat):
        return LengthGroups(shapes, None, None)
    order = torch.cat([torch.arange(batch.offsets[place], batch.offsets[place + 1]) for place in flat]).to(batch.ids.device)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return LengthGroups(shapes, order, inverse)


def _attend_global(q: Tensor, k: Tensor, v: Tensor, groups: LengthGroups, slopes: Tensor | None, dropout: float) -> Tensor:
    if groups.order is not None:
        q, k, v = q[groups.order], k[groups.order], v[groups.order]
    outputs = []
    # One split, not a slice a group: the backward of a slice is a whole tensor of zeros, that of the split one concatenation.
    sizes = [sequences * length for sequences, length, _ in groups.shapes]
    for (sequences, length, keys), *parts in zip(groups.shapes, *(torch.split(x, sizes) for x in (q, k, v)), strict=True):
        # (G, H, n, K) views: nothing is copied.
        query, key, value = (part.view(sequences, length, *part.shape[1:]).transpose(1, 2) for part in parts)
        key, value = key[:, :, :keys], value[:, :, :keys]
        if slopes is None:
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        else:
            mixed = _attend_sloping(query, key, value, slopes, dropout)
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))  # (G * n, H, K)
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if groups.inverse is None else output[groups.inverse]


def _attend_sloping(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, dropout: float) -> Tensor:
    """ALiBi over whole sequences, a few queries at a time: the penalty is (H, SLOPING_BLOCK, n), never n x n."""
    outputs = []
    place = torch.arange(key.shape[2], device=key.device)
    for start, rows in zip(range(0, query.shape[2], SLOPING_BLOCK), torch.split(query, SLOPING_BLOCK, dim=2), strict=True):
        distance = (torch.arange(start, start + rows.shape[2], device=key.device)[:, None] - place).abs()
        penalty = (-slopes.view(-1, 1, 1) * distance).to(query.dtype)
        outputs.append(F.scaled_dot_product_attention(rows, key, value, attn_mask=penalty[None], dropout_p=dropout))
    return torch.cat(outputs, dim=2)


@dataclass(frozen=True)
class LocalMask:
    """What the local layers of a batch share.

    Attributes:
        bias: 0 where a query may see a key, the dtype's minimum where not, (W, 1, BLOCK, BLOCK + window).
        sees: Whether each token sees any key, (N, 1, 1); None when all of them do.
    """

    bias: Tensor
    sees: Tensor | None


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
        limit = torch.tensor(batch.key_lengths, device=device)[sequence]
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


def _attend_local(q: Tensor, k: Tensor, v: Tensor, mask: LocalMask, window: int, slopes: Tensor | None, dropout: float) -> Tensor:
    tokens = len(q)
    half = window // 2
    blocks = mask.bias.shape[0]
    tail = blocks * BLOCK - tokens
    differentiable = torch.is_grad_enabled()
    # Slices save copies, but each would be a whole tensor of zeros in the backward pass.
    step = blocks if differentiable else LOCAL_BLOCKS
    outputs = []
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        query = _rows(q, first * BLOCK, last * BLOCK).view(last - first, BLOCK, *q.shape[1:]).transpose(1, 2)  # (W, H, BLOCK, K)
        # Overlapping views of the block and its halo: (W, H, BLOCK + window, K).
        key, value = (
            _rows(x, first * BLOCK - half, last * BLOCK + half).unfold(0, BLOCK + 2 * half, BLOCK).transpose(2, 3) for x in (k, v)
        )
        bias = mask.bias[first:last]
        if slopes is not None:
            bias = (bias - _slope_penalty(slopes, half)).clamp(min=torch.finfo(q.dtype).min).to(q.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))  # (W * BLOCK, H, K)
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    output = output[:tokens] if tail else output
    return output if mask.sees is None else output * mask.sees


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
    """Attention without padding on any device; see `encoder.attention.attend` for the contract."""
    # Where every distance fits the window, local and global are the same, and global needs no mask.
    if window is None or batch.max_seqlen - 1 <= window // 2:
        if "groups" not in batch.memo:
            batch.memo["groups"] = length_groups(batch)
        return _attend_global(q, k, v, batch.memo["groups"], slopes, dropout)
    memo = ("local", window, q.dtype)
    if memo not in batch.memo:
        batch.memo[memo] = local_mask(batch, window, q.dtype)
    return _attend_local(q, k, v, batch.memo[memo], window, slopes, dropout)
