"""Attention of whole sequences: those of one length form one mask-free call on views of the packed tensors.

Shapes: N packed tokens, H heads, K head width, G sequences of one length, n their length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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

    @property
    def sizes(self) -> list[int]:
        """Tokens of each group."""
        return [sequences * length for sequences, length, _ in self.shapes]


@torch.inference_mode(False)  # what inference makes and keeps, training could not use
def length_groups(batch: PackedBatch) -> LengthGroups:
    """Group a batch's sequences by (length, key length), in order of first appearance."""
    members = places_by_length(batch)
    shapes = tuple((len(places), length, keys) for (length, keys), places in members.items())
    flat = [place for places in members.values() for place in places]
    if flat == sorted(flat):
        return LengthGroups(shapes, None, None)
    order, inverse = token_order(batch, flat)
    return LengthGroups(shapes, order, inverse)


def attend_global(q: Tensor, k: Tensor, v: Tensor, groups: LengthGroups, slopes: Tensor | None, dropout: float) -> Tensor:
    """Each sequence with itself; see `encoder.attention.attend` for the contract."""
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
    for (sequences, length, keys), *rows in zip(groups.shapes, *parts, strict=True):
        query, key, value = _heads_first(rows, sequences, length, keys)
        if slopes is None:
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        else:
            mixed = _attend_sloping(query, key, value, slopes, dropout)
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))  # (G * n, H, K)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _heads_first(rows: list[Tensor], sequences: int, length: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """A group's queries (G, H, n, K), its keys and values (G, H, keys, K): views, nothing is copied."""
    query, key, value = (part.view(sequences, length, *part.shape[1:]).transpose(1, 2) for part in rows)
    return query, key[:, :, :keys], value[:, :, :keys]


class _GroupedAttention(torch.autograd.Function):
    """All groups as one step of autograd, whose gradients are written where the product behind queries, keys and values wants them.

    Autograd's own way keeps a dozen views a group and puts the gradients together twice.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, groups: LengthGroups) -> Tensor:
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output = q.new_empty(q.shape)
        sums = []
        for (sequences, length, keys), *rows, out in _groups(groups, q, k, v, output):
            mixed, logsumexp = attention(*_heads_first(rows, sequences, length, keys))
            out.view(sequences, length, *out.shape[1:]).copy_(mixed.transpose(1, 2))
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
        pieces = _groups(ctx.groups, q, k, v, output, gradient.contiguous(), of_q, of_k, of_v)
        for ((sequences, length, keys), *rows), logsumexp in zip(pieces, sums, strict=True):
            heads = [row.view(sequences, length, *row.shape[1:]).transpose(1, 2) for row in rows]  # (G, H, n, K) each
            query, key, value, mixed, upstream, *into = heads
            found = backward(upstream, query, key[:, :, :keys], value[:, :, :keys], mixed, logsumexp, 0.0, False)
            for place, each in zip(into, found, strict=True):
                place[:, :, : each.shape[2]] = each
                place[:, :, each.shape[2] :] = 0  # nobody read them
        return of_q, of_k, of_v, None


def _groups(groups: LengthGroups, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Each group's shape and its rows of some tensors (N, ...)."""
    return zip(groups.shapes, *(torch.split(x, groups.sizes) for x in tensors), strict=True)


def _attend_sloping(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, dropout: float) -> Tensor:
    """ALiBi over whole sequences, a few queries at a time: the penalty is (H, SLOPING_BLOCK, n), never n x n."""
    outputs = []
    place = torch.arange(key.shape[2], device=key.device)
    for start, rows in zip(range(0, query.shape[2], SLOPING_BLOCK), torch.split(query, SLOPING_BLOCK, dim=2), strict=True):
        distance = (torch.arange(start, start + rows.shape[2], device=key.device)[:, None] - place).abs()
        penalty = (-slopes.view(-1, 1, 1) * distance).to(query.dtype)
        outputs.append(F.scaled_dot_product_attention(rows, key, value, attn_mask=penalty[None], dropout_p=dropout))
    return torch.cat(outputs, dim=2)
