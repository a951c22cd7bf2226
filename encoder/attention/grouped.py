"""Attention of whole sequences: those of one length form one call on views of the packed tensors.

In a global layer such a call has no mask. In a local layer it has one, the band of one length, where the sequences are so short
that this costs less than blocks with halos (`quiver.encoder.attention.packed`).

Shapes: N packed tokens, H heads, K head width, G sequences of one length, n their length.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from quiver.encoder.attention.dropping import attend_dropping
from quiver.encoder.attention.groups import LengthGroups, fill_heads
from quiver.encoder.ops.heads import room_for_thirds

# Queries of one call with ALiBi, whose penalty is as wide as the sequence and differs from head to head.
SLOPING_BLOCK = 128
# Tokens from which dropping a few weights at a time is faster than torch's way: shorter sequences have fewer weights than values.
DROPPING_LENGTH = 64


def attend_grouped(q: Tensor, k: Tensor, v: Tensor, groups: LengthGroups, slopes: Tensor | None, dropout: float) -> Tensor:
    """Each sequence with itself; see `quiver.encoder.attention.attend` for the contract. ALiBi and dropout are for groups without masks."""
    if groups.order is not None:
        q, k, v = q[groups.order], k[groups.order], v[groups.order]
    output: Tensor
    if slopes is None and 0 < dropout < 1 and q.device.type == "cpu" and any(group.length >= DROPPING_LENGTH for group in groups.groups):
        output = attend_dropping(q, k, v, groups, dropout)
    elif slopes is None and not dropout and differentiated_on_cpu(q, k, v):
        output = _GroupedAttention.apply(q, k, v, groups)  # type: ignore[no-untyped-call]  # torch leaves it untyped
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
            fill_heads(group, output, mixed)
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
                fill_heads(group, place, each)
        return of_q, of_k, of_v, None


def _attend_sloping(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, dropout: float) -> Tensor:
    """ALiBi over whole sequences, a few queries at a time: the penalty is (H, SLOPING_BLOCK, n), never n x n."""
    outputs = []
    place = torch.arange(key.shape[2], device=key.device)
    for start, rows in zip(range(0, query.shape[2], SLOPING_BLOCK), torch.split(query, SLOPING_BLOCK, dim=2), strict=True):
        distance = (torch.arange(start, start + rows.shape[2], device=key.device)[:, None] - place).abs()
        penalty = (-slopes.view(-1, 1, 1) * distance).to(query.dtype)
        outputs.append(F.scaled_dot_product_attention(rows, key, value, attn_mask=penalty[None], dropout_p=dropout))
    return torch.cat(outputs, dim=2)
