"""Attention of whole sequences: those of one length form one call on views of the packed tensors.

In a global layer such a call has no mask. In a local layer it has one, the band of one length, where the sequences are so short
that this costs less than blocks with halos (`encoder.attention.packed`).

Shapes: N packed tokens, H heads, K head width, G sequences of one length, n their length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from encoder.ops.heads import room_for_thirds
from encoder.packing import PackedBatch, places_by_length, token_order

# Queries of one call with ALiBi, whose penalty is as wide as the sequence and differs from head to head.
SLOPING_BLOCK = 128


@dataclass(frozen=True)
class LengthGroup:
    """Neighbouring sequences of one length.

    Attributes:
        start: Its first token, in group order.
        sequences: G.
        length: n.
        keys: Leading tokens of each sequence that may be attended to.
        rows: Leading tokens of each sequence that see any key; the others get zeros.
        mask: What is added to the scores, (rows, keys), or None.
    """

    start: int
    sequences: int
    length: int
    keys: int
    rows: int
    mask: Tensor | None = None

    def heads(self, x: Tensor, tokens: int) -> Tensor:
        """The first so many tokens of each sequence, of (N, H, K), as (G, H, tokens, K): a view, without gradients."""
        token, head, width = x.stride()
        size = (self.sequences, x.shape[1], tokens, x.shape[2])
        return x.as_strided(size, (self.length * token, head, token, width), x.storage_offset() + self.start * token)


@dataclass(frozen=True)
class LengthGroups:
    """Sequences of a batch by length.

    Attributes:
        groups: One a length.
        order: Permutation that brings the tokens into group order, (N,); None when they lie so already.
        inverse: The way back, (N,).
    """

    groups: tuple[LengthGroup, ...]
    order: Tensor | None
    inverse: Tensor | None

    @property
    def sizes(self) -> list[int]:
        """Tokens of each group."""
        return [group.sequences * group.length for group in self.groups]


@torch.inference_mode(False)  # what inference makes and keeps, training could not use
def length_groups(batch: PackedBatch) -> LengthGroups:
    """Group a batch's sequences by (length, key length), in order of first appearance."""
    members = places_by_length(batch)
    groups, start = [], 0
    for (length, keys), places in members.items():
        groups.append(LengthGroup(start, len(places), length, keys, rows=length))
        start += len(places) * length
    flat = [place for places in members.values() for place in places]
    if flat == sorted(flat):
        return LengthGroups(tuple(groups), None, None)
    order, inverse = token_order(batch, flat)
    return LengthGroups(tuple(groups), order, inverse)


@torch.inference_mode(False)  # likewise
def banded(groups: LengthGroups, window: int, dtype: torch.dtype) -> LengthGroups:
    """The groups of a local layer on a CPU: a token sees its neighbours up to window // 2 away."""
    half = window // 2

    def band(group: LengthGroup) -> LengthGroup:
        rows = min(group.length, group.keys + half)
        if rows - 1 <= half:
            return replace(group, rows=rows)
        place = torch.arange(rows)
        far = (place[:, None] - place[: group.keys]).abs() > half  # (rows, keys)
        mask = torch.zeros(far.shape, dtype=dtype).masked_fill_(far, torch.finfo(dtype).min)
        return replace(group, rows=rows, mask=mask)

    return replace(groups, groups=tuple(map(band, groups.groups)))


def attend_grouped(q: Tensor, k: Tensor, v: Tensor, groups: LengthGroups, slopes: Tensor | None, dropout: float) -> Tensor:
    """Each sequence with itself; see `encoder.attention.attend` for the contract. ALiBi and dropout are for groups without masks."""
    if groups.order is not None:
        q, k, v = q[groups.order], k[groups.order], v[groups.order]
    if slopes is None and not dropout and differentiated_on_cpu(q, k, v):
        output: Tensor = _GroupedAttention.apply(q, k, v, groups)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    else:
        output = _attend_groups(q, k, v, groups, slopes, dropout)
    return output if groups.inverse is None else output[groups.inverse]


def differentiated_on_cpu(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether gradients are wanted where torch's kernel for CPUs gives them."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)) and q.device.type == "cpu" and _has_cpu_kernel()


@cache
def _has_cpu_kernel() -> bool:
    name = "_scaled_dot_product_flash_attention_for_cpu"
    return hasattr(torch.ops.aten, name) and hasattr(torch.ops.aten, f"{name}_backward")


def _attend_groups(q: Tensor, k: Tensor, v: Tensor, groups: LengthGroups, slopes: Tensor | None, dropout: float) -> Tensor:
    outputs = []
    # One split, not a slice a group: the backward of a slice is a whole tensor of zeros, that of the split one concatenation.
    parts = (torch.split(x, groups.sizes) for x in (q, k, v))
    for group, *pieces in zip(groups.groups, *parts, strict=True):
        query, key, value = (piece.view(group.sequences, group.length, *piece.shape[1:]).transpose(1, 2) for piece in pieces)
        query, key, value = query[:, :, : group.rows], key[:, :, : group.keys], value[:, :, : group.keys]
        if slopes is None:
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask, dropout_p=dropout)
        else:
            mixed = _attend_sloping(query, key, value, slopes, dropout)
        if group.rows < group.length:
            mixed = F.pad(mixed, (0, 0, 0, group.length - group.rows))
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))  # (G * n, H, K)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _GroupedAttention(torch.autograd.Function):
    """All groups as one step of autograd, whose gradients are written where the product behind queries, keys and values wants them.

    Autograd's own way keeps a dozen views a group and puts the gradients together twice.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, groups: LengthGroups) -> Tensor:
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output = q.new_empty(q.shape)
        sums = []
        for group in groups.groups:
            read = group.heads(q, group.rows), group.heads(k, group.keys), group.heads(v, group.keys)
            mixed, logsumexp = attention(*read, attn_mask=group.mask)
            _fill(group, output, mixed)
            sums.append(logsumexp)
        ctx.groups = groups
        ctx.save_for_backward(q, k, v, output, *sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, output, *sums = ctx.saved_tensors
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        of_q, of_k, of_v = room_for_thirds(q)
        gradient = gradient.contiguous()
        for group, logsumexp in zip(ctx.groups.groups, sums, strict=True):
            query, mixed, upstream = (group.heads(x, group.rows) for x in (q, output, gradient))
            key, value = group.heads(k, group.keys), group.heads(v, group.keys)
            found = backward(upstream, query, key, value, mixed, logsumexp, 0.0, False, attn_mask=group.mask)
            for place, each in zip((of_q, of_k, of_v), found, strict=True):
                _fill(group, place, each)
        return of_q, of_k, of_v, None


def _fill(group: LengthGroup, place: Tensor, heads: Tensor) -> None:
    """Write the leading tokens of a group's sequences, (G, H, tokens, K), into (N, H, K); the others, which nobody saw, are zeros."""
    tokens = heads.shape[2]
    if tokens < group.length:
        whole = group.heads(place, group.length)
        whole[:, :, tokens:] = 0
    group.heads(place, tokens).copy_(heads)


def _attend_sloping(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, dropout: float) -> Tensor:
    """ALiBi over whole sequences, a few queries at a time: the penalty is (H, SLOPING_BLOCK, n), never n x n."""
    outputs = []
    place = torch.arange(key.shape[2], device=key.device)
    for start, rows in zip(range(0, query.shape[2], SLOPING_BLOCK), torch.split(query, SLOPING_BLOCK, dim=2), strict=True):
        distance = (torch.arange(start, start + rows.shape[2], device=key.device)[:, None] - place).abs()
        penalty = (-slopes.view(-1, 1, 1) * distance).to(query.dtype)
        outputs.append(F.scaled_dot_product_attention(rows, key, value, attn_mask=penalty[None], dropout_p=dropout))
    return torch.cat(outputs, dim=2)
