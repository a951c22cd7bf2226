"""Attention over packed batches by PyTorch operators on any device, without an n x n tensor in local layers or masks in global ones.

Global layers: sequences of one length form one call on views of the packed tensors. Local layers over texts hardly longer than the window
do the same with a band mask. Other local layers cut the tokens into blocks of queries; each block meets its own keys and a halo of window
// 2 on either side, so the cost is N x window. Document borders and the window are one additive mask, built once per batch for all local
layers.

Where PyTorch would write all weights out (ALiBi; some dtypes and head widths on a GPU), a chunk of queries is processed at a time.

Global attention with dropout on the attention weights has its own form on CPUs, because PyTorch's fused CPU kernel has no dropout and its
plain operators write scores, softmax, random mask and dropped weights in full, heads x n x n each, keeping three of them. Here a chunk of
queries and heads is processed at a time, and the backward pass recomputes weights and masks (arXiv:2205.14135, section 3.1 and appendix B).

Shapes: N packed tokens, H heads, K head width, G sequences of one length, n their length, P pairs of a sequence and a head, W query blocks.
Source: ModernBERT, arXiv:2412.13663, section 2.1.2 (alternating attention, unpadding); the blocking is our own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from quiver.encoder.attention.layout import empty_qkv
from quiver.encoder.dropout import DROPOUT_CHUNK, DropoutMask, new_seed
from quiver.encoder.packing import PackedBatch, places_by_length, token_order


@dataclass(frozen=True)
class LengthGroup:
    """Neighbouring sequences of one length.

    Attributes:
        start: First token of the group, in group order.
        sequences: G.
        length: n.
        keys: Leading tokens of each sequence that can be attended to.
        rows: Leading tokens of each sequence that see at least one key; the others get zeros.
        mask: Added to the scores, (rows, keys), or None.
    """

    start: int
    sequences: int
    length: int
    keys: int
    rows: int
    mask: Tensor | None = None

    def heads(self, x: Tensor, tokens: int) -> Tensor:
        """Return the first ``tokens`` tokens of each sequence of (N, H, K) as a view (G, H, tokens, K), without gradients."""
        token, head, width = x.stride()
        size = (self.sequences, x.shape[1], tokens, x.shape[2])
        return x.as_strided(size, (self.length * token, head, token, width), x.storage_offset() + self.start * token)


@dataclass(frozen=True)
class LengthGroups:
    """The sequences of a batch, grouped by length.

    Attributes:
        groups: One group per length.
        order: Permutation that puts the tokens into group order, (N,); None if they are in that order.
        inverse: The inverse permutation, (N,).
    """

    groups: tuple[LengthGroup, ...]
    order: Tensor | None
    inverse: Tensor | None

    @property
    def sizes(self) -> list[int]:
        """Number of tokens of each group."""
        return [group.sequences * group.length for group in self.groups]


@torch.inference_mode(False)  # tensors made in inference mode could not be used in training
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


@torch.inference_mode(False)  # as above
def banded(groups: LengthGroups, window: int, dtype: torch.dtype) -> LengthGroups:
    """Return the groups of a local layer on a CPU: a token sees its neighbours up to window // 2 away."""
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


def fill_heads(group: LengthGroup, place: Tensor, heads: Tensor) -> None:
    """Write the leading tokens of a group's sequences, (G, H, tokens, K), into (N, H, K), and zeros for the other tokens."""
    tokens = heads.shape[2]
    if tokens < group.length:
        whole = group.heads(place, group.length)
        whole[:, :, tokens:] = 0
    group.heads(place, tokens).copy_(heads)


# Random bits per attention weight, as many as flash attention draws: the probability is rounded to a multiple of 1/256.
BITS = torch.int8


def attend_dropping(q: Tensor, k: Tensor, v: Tensor, groups: LengthGroups, probability: float, *, chunk: int = DROPOUT_CHUNK) -> Tensor:
    """Attention with dropout of each sequence with itself; see `quiver.encoder.attention.attend`. The groups must have no masks.

    Args:
        q: Queries in group order, (N, H, K), on a CPU.
        k: Keys, likewise.
        v: Values, likewise.
        groups: The sequences.
        probability: Probability of dropping a weight, above 0 and below 1; rounded to a multiple of 1/256 in the same range.
        chunk: Largest number of weights in memory at a time, or those of one query.
    """
    output: Tensor = _DroppingAttention.apply(q, k, v, groups, probability, new_seed(), chunk)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return output


class _DroppingAttention(torch.autograd.Function):
    """All groups without masks as one autograd step: q, k, v (N, H, K), groups, probability, seed, chunk to (N, H, K)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, groups: LengthGroups, probability: float, seed: int, chunk: int) -> Tensor:
        output = q.new_empty(q.shape)
        kept, sums = DropoutMask(probability, seed, bits=BITS), []
        for group in groups.groups:
            query, key, value = _pairs(group, q, k, v)
            query *= q.shape[-1] ** -0.5
            mixed, logsumexp = torch.empty_like(query), query.new_empty((*query.shape[:2], 1))
            scratch = query.new_empty(2, _largest(query, key, chunk))
            for pairs, rows in _dropout_chunks(query, key, chunk):
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
        ctx.groups, ctx.drawn, ctx.chunk = groups, (probability, seed), chunk
        ctx.save_for_backward(q, k, v, output, *sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
        q, k, v, output, *sums = ctx.saved_tensors
        kept, scale = DropoutMask(*ctx.drawn, bits=BITS), q.shape[-1] ** -0.5
        of_q, of_k, of_v = empty_qkv(q)
        gradient = gradient.contiguous()
        for group, logsumexp in zip(ctx.groups.groups, sums, strict=True):
            query, key, value = _pairs(group, q, k, v)
            query *= scale
            mixed, upstream = (_flat(group, x, group.rows) for x in (output, gradient))
            inner = (mixed * upstream).sum(-1, keepdim=True)  # (P, n, 1): what softmax subtracts from each gradient
            upstream *= kept.scale
            of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
            scratch = query.new_empty(3, _largest(query, key, ctx.chunk))
            for pairs, rows in _dropout_chunks(query, key, ctx.chunk):
                size = (*query[pairs, rows].shape[:2], key.shape[1])
                weights, keep, of_weights = (_of_size(part, size) for part in scratch)
                torch.bmm(query[pairs, rows], key[pairs].transpose(1, 2), out=weights)
                weights.sub_(logsumexp[pairs, rows]).exp_()
                kept.fill(keep)
                torch.bmm(upstream[pairs, rows], value[pairs].transpose(1, 2), out=of_weights)
                of_weights.mul_(keep).sub_(inner[pairs, rows]).mul_(weights)  # now the gradient of the scores
                of_value[pairs].baddbmm_(weights.mul_(keep).transpose(1, 2), upstream[pairs, rows])
                of_key[pairs].baddbmm_(of_weights.transpose(1, 2), query[pairs, rows])
                of_query[pairs, rows] = _product(of_weights, key[pairs])
            of_query *= scale
            for place, each in ((of_q, of_query), (of_k, of_key), (of_v, of_value)):
                fill_heads(group, place, each.view(group.sequences, -1, *each.shape[1:]))
        return of_q, of_k, of_v, None, None, None, None


def _pairs(group: LengthGroup, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copy a group's queries, (P, rows, K), keys and values, (P, keys, K), in float32 or wider."""
    return _flat(group, q, group.rows), _flat(group, k, group.keys), _flat(group, v, group.keys)


def _flat(group: LengthGroup, x: Tensor, tokens: int) -> Tensor:
    heads = group.heads(x, tokens)
    return torch.empty(heads.shape, dtype=torch.promote_types(x.dtype, torch.float32), device="cpu").copy_(heads).flatten(0, 1)


def _dropout_chunks(query: Tensor, key: Tensor, chunk: int) -> Iterator[tuple[slice, slice]]:
    """Yield pairs and queries to process together: at most ``chunk`` weights, or those of one query."""
    rows = min(query.shape[1], max(1, chunk // key.shape[1]))
    pairs = max(1, chunk // (rows * key.shape[1])) if rows == query.shape[1] else 1
    for pair in range(0, len(query), pairs):
        for row in range(0, query.shape[1], rows):
            yield slice(pair, pair + pairs), slice(row, row + rows)


def _largest(query: Tensor, key: Tensor, chunk: int) -> int:
    pairs, rows = next(_dropout_chunks(query, key, chunk))
    return query[pairs, rows].shape[:2].numel() * key.shape[1]


def _of_size(scratch: Tensor, size: tuple[int, ...]) -> Tensor:
    return scratch[: size[0] * size[1] * size[2]].view(size)


def _product(weights: Tensor, values: Tensor) -> Tensor:
    """A product in its own dtype even under autocast, which does not touch operators with an output argument."""
    return torch.bmm(weights, values, out=weights.new_empty(*weights.shape[:2], values.shape[2]))


# Attention weights in memory at a time where PyTorch would write them out: 64 MiB in float32.
WEIGHTS = 2**24
# Sequence length from which dropout in chunks is faster than PyTorch operators: shorter sequences have fewer weights than values.
DROPPING_LENGTH = 64


def attend_grouped(q: Tensor, k: Tensor, v: Tensor, groups: LengthGroups, slopes: Tensor | None, dropout: float) -> Tensor:
    """Attention of each sequence with itself; see `quiver.encoder.attention.attend`. ALiBi and dropout require groups without masks."""
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
    """Return whether gradients are needed and PyTorch's CPU kernel provides them."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)) and q.device.type == "cpu" and _has_cpu_kernel()


@cache
def _has_cpu_kernel() -> bool:
    name = "_scaled_dot_product_flash_attention_for_cpu"
    return hasattr(torch.ops.aten, name) and hasattr(torch.ops.aten, f"{name}_backward")


def _attend_groups(q: Tensor, k: Tensor, v: Tensor, groups: LengthGroups, slopes: Tensor | None, dropout: float) -> Tensor:
    outputs = []
    # One split instead of a slice per group: the backward of a slice is a full tensor of zeros, that of the split one concatenation.
    parts = (torch.split(x, groups.sizes) for x in (q, k, v))
    for group, *pieces in zip(groups.groups, *parts, strict=True):
        query, key, value = (piece.view(group.sequences, group.length, *piece.shape[1:]).transpose(1, 2) for piece in pieces)
        query, key, value = query[:, :, : group.rows], key[:, :, : group.keys], value[:, :, : group.keys]
        if slopes is None and _is_bounded(query):
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask, dropout_p=dropout)
        else:
            mixed = _attend_in_chunks(query, key, value, slopes, dropout)
        if group.rows < group.length:
            mixed = F.pad(mixed, (0, 0, 0, group.length - group.rows))
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))  # (G * n, H, K)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _GroupedAttention(torch.autograd.Function):
    """All groups as one autograd step, with gradients in the layout that the product of queries, keys and values needs.

    Plain autograd keeps a dozen views per group and assembles the gradients twice.
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
        of_q, of_k, of_v = empty_qkv(q)
        gradient = gradient.contiguous()
        for group, logsumexp in zip(ctx.groups.groups, sums, strict=True):
            query, mixed, upstream = (group.heads(x, group.rows) for x in (q, output, gradient))
            key, value = group.heads(k, group.keys), group.heads(v, group.keys)
            found = backward(upstream, query, key, value, mixed, logsumexp, 0.0, False, attn_mask=group.mask)
            for place, each in zip((of_q, of_k, of_v), found, strict=True):
                fill_heads(group, place, each)
        return of_q, of_k, of_v, None


def _is_bounded(query: Tensor) -> bool:
    """Return whether PyTorch computes attention without a mask and without writing all weights out.

    Its CPU kernel does, and on CUDA the memory-efficient one, under the conditions of can_use_mem_efficient_attention in its sdp_utils.cpp.
    """
    if query.device.type != "cuda":
        return query.device.type == "cpu"
    multiples = {torch.float32: 4, torch.float16: 8, torch.bfloat16: 8}
    fits = query.dtype in multiples and query.shape[-1] % multiples[query.dtype] == 0
    old = query.dtype == torch.bfloat16 and torch.cuda.get_device_capability(query.device) < (8, 0)
    return fits and not old and bool(torch.backends.cuda.mem_efficient_sdp_enabled())  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _attend_in_chunks(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None, dropout: float) -> Tensor:
    """Attention over whole sequences, (G, H, rows, K), a chunk of queries at a time: at most `WEIGHTS` weights, or those of one query each.

    With gradients, each chunk is computed again in the backward pass. ALiBi's penalty differs between heads and is as wide as the sequence,
    so only that of one chunk is in memory.
    """
    sequences, heads, rows, _ = query.shape
    chunk = max(1, WEIGHTS // (sequences * heads * key.shape[2]))
    if chunk >= rows:
        return _attend_chunk(query, key, value, slopes, 0, dropout)
    outputs: list[Tensor] = []
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    for start, some in zip(range(0, rows, chunk), torch.split(query, chunk, dim=2), strict=True):
        inputs = some, key, value, slopes, start, dropout
        if differentiated:
            outputs.append(checkpoint(_attend_chunk, *inputs, use_reentrant=False, preserve_rng_state=dropout > 0))
        else:
            outputs.append(_attend_chunk(*inputs))
    return torch.cat(outputs, dim=2)


def _attend_chunk(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None, start: int, dropout: float) -> Tensor:
    """Attention of the queries from position ``start``, (G, H, chunk, K), over all keys."""
    penalty = None
    if slopes is not None:
        place = torch.arange(key.shape[2], device=key.device)
        distance = (torch.arange(start, start + query.shape[2], device=key.device)[:, None] - place).abs()
        penalty = (-slopes.view(-1, 1, 1) * distance).to(query.dtype)[None]  # (1, H, chunk, keys)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=penalty, dropout_p=dropout)


# Queries per block of a local layer: of 32, 64 and 128 the fastest on a CPU (19.5, 21.6 and 27.2 ms for 2,048 tokens with 12 heads of 64).
BLOCK = 32
# Blocks per call without gradients, 2,048 tokens: the memory that a call copies stays small for every batch.
LOCAL_BLOCKS = 64


@dataclass(frozen=True)
class LocalMask:
    """The mask that the local layers of a batch share.

    Attributes:
        bias: 0 where a query sees a key, the dtype's minimum elsewhere, (W, 1, BLOCK, BLOCK + window).
        sees: Whether each token sees a key, (N, 1, 1); None if all do.
    """

    bias: Tensor
    sees: Tensor | None


@torch.inference_mode(False)  # as above
def local_mask(batch: PackedBatch, window: int, dtype: torch.dtype) -> LocalMask:
    """Build the mask of a batch's local layers for one window."""
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
    # Positions outside the batch must match nothing: queries there get -2, keys -1.
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
        first: First block.
        last: One past the last block.
        half: Tokens of the halo on either side.
    """

    first: int
    last: int
    half: int

    @property
    def queries(self) -> tuple[int, int]:
        """Start and end token of the blocks; the end can lie outside the batch."""
        return self.first * BLOCK, self.last * BLOCK

    @property
    def keys(self) -> tuple[int, int]:
        """Start and end token of the blocks with their halo; both can lie outside the batch."""
        return self.first * BLOCK - self.half, self.last * BLOCK + self.half

    def views(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (W, H, BLOCK, K), keys and values (W, H, BLOCK + window, K); the last two are overlapping views."""
        query = _rows(q, *self.queries).view(self.last - self.first, BLOCK, *q.shape[1:]).transpose(1, 2)
        key, value = (_rows(x, *self.keys).unfold(0, BLOCK + 2 * self.half, BLOCK).transpose(2, 3) for x in (k, v))
        return query, key, value

    def add_keys(self, gradient: Tensor, blocks: Tensor) -> None:
        """Add the gradients of the blocks' keys, (W, H, BLOCK + window, K), to a gradient (N, H, K)."""
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
        # One piece: in the backward pass each slice would be a full tensor of zeros.
        output = _attend_blocks(q, k, v, mask, LocalBlocks(0, blocks, half), slopes, dropout)
    output = output[: len(q)]
    return output if mask.sees is None else output * mask.sees


def _attend_blocks(q: Tensor, k: Tensor, v: Tensor, mask: LocalMask, some: LocalBlocks, slopes: Tensor | None, dropout: float) -> Tensor:
    """Attention of some blocks' queries over their keys, (W * BLOCK, H, K)."""
    bias = mask.bias[some.first : some.last]
    if slopes is not None:
        bias = (bias - _slope_penalty(slopes, some.half)).clamp(min=torch.finfo(q.dtype).min).to(q.dtype)
    query, key, value = some.views(q, k, v)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
    return mixed.transpose(1, 2).flatten(0, 1)


class _LocalAttention(torch.autograd.Function):
    """Local attention on a CPU, a few blocks at a time, forward and backward.

    Plain autograd keeps padded copies of keys and values and a gradient for the keys of every block at once: five times the memory of the
    keys, allocated and zeroed in every layer.
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
        of_q, of_k, of_v = empty_qkv(q)
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
    """Return tokens start..end of (N, H, K), with zeros outside the batch; a view if none lie outside."""
    before, after = max(-start, 0), max(end - len(x), 0)
    inside = x[max(start, 0) : min(end, len(x))]
    return F.pad(inside, (0, 0, 0, 0, before, after)) if before or after else inside


def _slope_penalty(slopes: Tensor, half: int) -> Tensor:
    """ALiBi's penalty between a block of queries and its halo of keys, (1, H, BLOCK, BLOCK + window) float32."""
    return slopes.view(1, -1, 1, 1) * _block_distance(half, slopes.device).abs()


def _block_distance(half: int, device: torch.device) -> Tensor:
    """Key position minus query position within a block and its halo, (BLOCK, BLOCK + window)."""
    return torch.arange(BLOCK + 2 * half, device=device)[None] - half - torch.arange(BLOCK, device=device)[:, None]


def attend_packed(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float) -> Tensor:
    """Packed attention on any device; see `quiver.encoder.attention.attend` for the contract."""
    # If the window covers every distance, global attention gives the same without a mask.
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
    """Number of query-key pairs that attention over whole sequences computes."""
    return sum(length * keys for length, keys in zip(batch.lengths, batch.key_lengths or batch.lengths, strict=True))


def pairs_of_blocks(batch: PackedBatch, window: int) -> int:
    """Number of query-key pairs that local attention in blocks computes."""
    return -(-batch.num_tokens // BLOCK) * BLOCK * (BLOCK + 2 * (window // 2))


def _groups(batch: PackedBatch) -> LengthGroups:
    if "groups" not in batch.memo:
        batch.memo["groups"] = length_groups(batch)
    groups: LengthGroups = batch.memo["groups"]
    return groups
