"""Attention of whole sequences that drops weights, on a CPU, where no kernel of torch's does.

torch's own way writes the scores, their softmax, a mask of random numbers and the dropped weights in full, heads x n x n each, and
keeps three of them for the backward pass. Here some queries of some heads are in work at a time, as many as a cache holds, and the
backward pass makes their weights and masks again (arXiv:2205.14135, section 3.1 and appendix B).

Shapes: P pairs of a sequence and a head, n their length, K head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quiver.encoder.attention.groups import LengthGroup, LengthGroups, fill_heads
from quiver.encoder.ops.dropout import CHUNK, Kept, new_seed
from quiver.encoder.ops.heads import room_for_thirds

# Random bits a weight, as many as flash attention draws: a probability is taken to the nearest multiple of 1/256.
BITS = torch.int8


def attend_dropping(q: Tensor, k: Tensor, v: Tensor, groups: LengthGroups, probability: float) -> Tensor:
    """Each sequence with itself, as `quiver.encoder.attention.attend` has it; the groups have no masks.

    Args:
        q: Queries in group order, (N, H, K), on a CPU.
        k: Keys, likewise.
        v: Values, likewise.
        groups: Where the sequences lie.
        probability: Of dropping a weight, above 0 and below 1, taken to the nearest multiple of 1/256 that is so too.
    """
    output: Tensor = _DroppingAttention.apply(q, k, v, groups, probability, new_seed())  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return output


class _DroppingAttention(torch.autograd.Function):
    """All groups without masks as one step of autograd: q, k, v (N, H, K), groups, probability, seed to (N, H, K)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, groups: LengthGroups, probability: float, seed: int) -> Tensor:
        output = q.new_empty(q.shape)
        kept, sums = Kept(probability, seed, bits=BITS), []
        for group in groups.groups:
            query, key, value = _pairs(group, q, k, v)
            query *= q.shape[-1] ** -0.5
            mixed, logsumexp = torch.empty_like(query), query.new_empty((*query.shape[:2], 1))
            scratch = query.new_empty(2, _largest(query, key))
            for pairs, rows in _chunks(query, key):
                size = (*query[pairs, rows].shape[:2], key.shape[1])
                scores, keep = (_of_size(part, size) for part in scratch)
                torch.bmm(query[pairs, rows], key[pairs].transpose(1, 2), out=scores)
                highest = scores.amax(-1, keepdim=True)
                total = scores.sub_(highest).exp_().sum(-1, keepdim=True)
                logsumexp[pairs, rows] = highest + total.log()
                scores.mul_(kept.fill(keep))
                mixed[pairs, rows] = _product(scores, value[pairs]).mul_(kept.scale / total)
            fill_heads(group, output, mixed.view(group.sequences, -1, *mixed.shape[1:]))
            sums.append(logsumexp)
        ctx.groups, ctx.drawn = groups, (probability, seed)
        ctx.save_for_backward(q, k, v, output, *sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, output, *sums = ctx.saved_tensors
        kept, scale = Kept(*ctx.drawn, bits=BITS), q.shape[-1] ** -0.5
        of_q, of_k, of_v = room_for_thirds(q)
        gradient = gradient.contiguous()
        for group, logsumexp in zip(ctx.groups.groups, sums, strict=True):
            query, key, value = _pairs(group, q, k, v)
            query *= scale
            mixed, upstream = (_flat(group, x, group.rows) for x in (output, gradient))
            inner = (mixed * upstream).sum(-1, keepdim=True)  # (P, n, 1): what softmax takes off each gradient
            upstream *= kept.scale
            of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
            scratch = query.new_empty(3, _largest(query, key))
            for pairs, rows in _chunks(query, key):
                size = (*query[pairs, rows].shape[:2], key.shape[1])
                weights, keep, of_weights = (_of_size(part, size) for part in scratch)
                torch.bmm(query[pairs, rows], key[pairs].transpose(1, 2), out=weights)
                weights.sub_(logsumexp[pairs, rows]).exp_()
                kept.fill(keep)
                torch.bmm(upstream[pairs, rows], value[pairs].transpose(1, 2), out=of_weights)
                of_weights.mul_(keep).sub_(inner[pairs, rows]).mul_(weights)  # now of the scores
                of_value[pairs].baddbmm_(weights.mul_(keep).transpose(1, 2), upstream[pairs, rows])
                of_key[pairs].baddbmm_(of_weights.transpose(1, 2), query[pairs, rows])
                of_query[pairs, rows] = _product(of_weights, key[pairs])
            of_query *= scale
            for place, each in ((of_q, of_query), (of_k, of_key), (of_v, of_value)):
                fill_heads(group, place, each.view(group.sequences, -1, *each.shape[1:]))
        return of_q, of_k, of_v, None, None, None


def _pairs(group: LengthGroup, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of a group's queries, (P, rows, K), keys and values, (P, keys, K), in float32 or wider."""
    return _flat(group, q, group.rows), _flat(group, k, group.keys), _flat(group, v, group.keys)


def _flat(group: LengthGroup, x: Tensor, tokens: int) -> Tensor:
    heads = group.heads(x, tokens)
    return torch.empty(heads.shape, dtype=torch.promote_types(x.dtype, torch.float32), device="cpu").copy_(heads).flatten(0, 1)


def _chunks(query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice]]:
    """Pairs and queries to be in work together: their weights are no more than CHUNK, or those of one query."""
    rows = min(query.shape[1], max(1, CHUNK // key.shape[1]))
    pairs = max(1, CHUNK // (rows * key.shape[1])) if rows == query.shape[1] else 1
    for pair in range(0, len(query), pairs):
        for row in range(0, query.shape[1], rows):
            yield slice(pair, pair + pairs), slice(row, row + rows)


def _largest(query: Tensor, key: Tensor) -> int:
    pairs, rows = next(_chunks(query, key))
    return query[pairs, rows].shape[:2].numel() * key.shape[1]


def _of_size(scratch: Tensor, size: tuple[int, ...]) -> Tensor:
    return scratch[: size[0] * size[1] * size[2]].view(size)


def _product(weights: Tensor, values: Tensor) -> Tensor:
    """A product in its own type whatever autocast says, which leaves alone what is given its place."""
    return torch.bmm(weights, values, out=weights.new_empty(*weights.shape[:2], values.shape[2]))
