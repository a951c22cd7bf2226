"""Attention over packed batches by PyTorch operators on any device, without an n x n tensor in local layers or masks in global ones.

Global layers: neighbouring sequences of one length form one call on views of the packed tensors. Local layers cut the tokens into blocks of
queries; each block meets its own keys and a halo of window // 2 on either side, so the cost is N x window. Document borders and the window
are one additive mask, built once per batch for all local layers. Where PyTorch would write all weights out (ALiBi; some dtypes and head
widths on a GPU), a chunk of queries is processed at a time.

Global attention with dropout on the attention weights has its own form on CPUs: a chunk of queries and heads at a time, whose weights and
masks the backward pass computes again (arXiv:2205.14135, section 3.1 and appendix B). PyTorch's operators write scores, softmax, mask and
dropped weights in full and keep three of them: MiniLM's training takes twice as long with them on texts of 2,048 tokens.

Shapes: N packed tokens, H heads, K head width, G sequences of one length, n their length, P pairs of a sequence and a head, W query blocks.
Source: ModernBERT, arXiv:2412.13663, section 2.1.2 (alternating attention, unpadding); the blocking is our own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from quiver.encoder.attention.layout import empty_qkv
from quiver.encoder.dropout import DROPOUT_CHUNK, DropoutMask, new_seed
from quiver.encoder.packing import PackedBatch, effective_window


@dataclass(frozen=True)
class LengthGroup:
    """Neighbouring sequences of one length, n, of which the first ``keys`` tokens can be attended to; they begin at token ``start``."""

    start: int
    sequences: int
    length: int
    keys: int

    def heads(self, x: Tensor, tokens: int) -> Tensor:
        """Return the first ``tokens`` tokens of each sequence of (N, H, K) as a view (G, H, tokens, K), without gradients."""
        token, head, width = x.stride()
        size = (self.sequences, x.shape[1], tokens, x.shape[2])
        return x.as_strided(size, (self.length * token, head, token, width), x.storage_offset() + self.start * token)


def length_groups(batch: PackedBatch) -> list[LengthGroup]:
    """Group a batch's neighbouring sequences of equal (length, key length)."""
    groups, start = list[LengthGroup](), 0
    for (length, keys), members in groupby(zip(batch.lengths, batch.key_lengths or batch.lengths, strict=True)):
        groups.append(LengthGroup(start, len(list(members)), length, keys))
        start += groups[-1].sequences * length
    return groups


def attend_dropping(
    q: Tensor, k: Tensor, v: Tensor, groups: list[LengthGroup], probability: float, *, chunk: int = DROPOUT_CHUNK
) -> Tensor:
    """Attention with dropout of each sequence with itself on a CPU, (N, H, K) each; at most ``chunk`` weights are in memory at a time."""
    output: Tensor = _DroppingAttention.apply(q, k, v, groups, probability, new_seed(), chunk)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return output


class _DroppingAttention(torch.autograd.Function):
    """All groups as one autograd step: q, k, v (N, H, K), groups, probability, seed, chunk to (N, H, K)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, groups: list[LengthGroup], probability: float, seed: int, chunk: int) -> Tensor:
        output = q.new_empty(q.shape)
        kept, sums = DropoutMask(probability, seed), []
        for group in groups:
            query, key, value = _flat_heads(group, q, k, v)
            query *= q.shape[-1] ** -0.5
            mixed, logsumexp = torch.empty_like(query), query.new_empty((*query.shape[:2], 1))
            scratch = query.new_empty(2, _largest_chunk(query, key, chunk))
            for pairs, rows in _dropout_chunks(query, key, chunk):
                size = (*query[pairs, rows].shape[:2], key.shape[1])
                scores, keep = (_view_of_size(part, size) for part in scratch)
                torch.bmm(query[pairs, rows], key[pairs].transpose(1, 2), out=scores)
                highest = scores.amax(-1, keepdim=True)
                total = scores.sub_(highest).exp_().sum(-1, keepdim=True)
                logsumexp[pairs, rows] = highest + total.log()
                scores.mul_(kept.fill(keep))
                mixed[pairs, rows] = _multiply_weights(scores, value[pairs]).mul_(kept.scale / total)
            group.heads(output, group.length).copy_(mixed.view(group.sequences, -1, *mixed.shape[1:]))
            sums.append(logsumexp)
        ctx.groups, ctx.drawn, ctx.chunk = groups, (probability, seed), chunk
        ctx.save_for_backward(q, k, v, output, *sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
        q, k, v, output, *sums = ctx.saved_tensors
        kept, scale = DropoutMask(*ctx.drawn), q.shape[-1] ** -0.5
        of_q, of_k, of_v = empty_qkv(q)
        gradient = gradient.contiguous()
        for group, logsumexp in zip(ctx.groups, sums, strict=True):
            query, key, value = _flat_heads(group, q, k, v)
            query *= scale
            mixed, upstream = (_copy_flat(group, x, group.length) for x in (output, gradient))
            inner = (mixed * upstream).sum(-1, keepdim=True)  # (P, n, 1): what softmax subtracts from each gradient
            upstream *= kept.scale
            of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
            scratch = query.new_empty(3, _largest_chunk(query, key, ctx.chunk))
            for pairs, rows in _dropout_chunks(query, key, ctx.chunk):
                size = (*query[pairs, rows].shape[:2], key.shape[1])
                weights, keep, of_weights = (_view_of_size(part, size) for part in scratch)
                torch.bmm(query[pairs, rows], key[pairs].transpose(1, 2), out=weights)
                weights.sub_(logsumexp[pairs, rows]).exp_()
                kept.fill(keep)
                torch.bmm(upstream[pairs, rows], value[pairs].transpose(1, 2), out=of_weights)
                of_weights.mul_(keep).sub_(inner[pairs, rows]).mul_(weights)  # now the gradient of the scores
                of_value[pairs].baddbmm_(weights.mul_(keep).transpose(1, 2), upstream[pairs, rows])
                of_key[pairs].baddbmm_(of_weights.transpose(1, 2), query[pairs, rows])
                of_query[pairs, rows] = _multiply_weights(of_weights, key[pairs])
            of_query *= scale
            for place, each in ((of_q, of_query), (of_k, of_key), (of_v, of_value)):
                group.heads(place, group.length)[:, :, each.shape[1] :] = 0  # of keys that are not attended to
                group.heads(place, each.shape[1]).copy_(each.view(group.sequences, -1, *each.shape[1:]))
        return of_q, of_k, of_v, None, None, None, None


def _flat_heads(group: LengthGroup, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copy a group's queries, (P, n, K), keys and values, (P, keys, K), in float32 or wider."""
    return _copy_flat(group, q, group.length), _copy_flat(group, k, group.keys), _copy_flat(group, v, group.keys)


def _copy_flat(group: LengthGroup, x: Tensor, tokens: int) -> Tensor:
    heads = group.heads(x, tokens)
    return torch.empty(heads.shape, dtype=torch.promote_types(x.dtype, torch.float32), device="cpu").copy_(heads).flatten(0, 1)


def _dropout_chunks(query: Tensor, key: Tensor, chunk: int) -> Iterator[tuple[slice, slice]]:
    """Yield pairs and queries to process together: at most ``chunk`` weights, or those of one query."""
    rows = min(query.shape[1], max(1, chunk // key.shape[1]))
    pairs = max(1, chunk // (rows * key.shape[1])) if rows == query.shape[1] else 1
    for pair in range(0, len(query), pairs):
        for row in range(0, query.shape[1], rows):
            yield slice(pair, pair + pairs), slice(row, row + rows)


def _largest_chunk(query: Tensor, key: Tensor, chunk: int) -> int:
    pairs, rows = next(_dropout_chunks(query, key, chunk))
    return query[pairs, rows].shape[:2].numel() * key.shape[1]


def _view_of_size(scratch: Tensor, size: tuple[int, ...]) -> Tensor:
    return scratch[: size[0] * size[1] * size[2]].view(size)


def _multiply_weights(weights: Tensor, values: Tensor) -> Tensor:
    """A product in its own dtype even under autocast, which does not touch operators with an output argument."""
    return torch.bmm(weights, values, out=weights.new_empty(*weights.shape[:2], values.shape[2]))


# Attention weights in memory at a time where PyTorch would write them out: 64 MiB in float32.
WEIGHTS = 2**24
# Sequence length from which dropout in chunks is faster than PyTorch operators: shorter sequences have fewer weights than values.
DROPPING_LENGTH = 64


def _attend_whole(q: Tensor, k: Tensor, v: Tensor, groups: list[LengthGroup], slopes: Tensor | None, dropout: float) -> Tensor:
    """Attention of each sequence with itself."""
    is_long = any(group.length >= DROPPING_LENGTH for group in groups)
    if slopes is None and 0 < dropout < 1 and q.device.type == "cpu" and is_long:
        return attend_dropping(q, k, v, groups, dropout)
    outputs = []
    # One split instead of a slice per group: the backward of a slice is a full tensor of zeros, that of the split one concatenation.
    parts = (torch.split(x, [group.sequences * group.length for group in groups]) for x in (q, k, v))
    for group, *pieces in zip(groups, *parts, strict=True):
        query, key, value = (piece.view(group.sequences, group.length, *piece.shape[1:]).transpose(1, 2) for piece in pieces)
        key, value = key[:, :, : group.keys], value[:, :, : group.keys]
        if slopes is None and _is_bounded(query):
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        else:
            mixed = _attend_in_chunks(query, key, value, slopes, dropout)
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))  # (G * n, H, K)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _is_bounded(query: Tensor) -> bool:
    """Whether PyTorch computes attention without a mask and without writing all weights out: on CUDA, can_use_mem_efficient_attention."""
    if query.device.type != "cuda":
        return query.device.type == "cpu"
    multiples = {torch.float32: 4, torch.float16: 8, torch.bfloat16: 8}
    fits = query.dtype in multiples and query.shape[-1] % multiples[query.dtype] == 0
    old = query.dtype == torch.bfloat16 and torch.cuda.get_device_capability(query.device) < (8, 0)
    return fits and not old and bool(torch.backends.cuda.mem_efficient_sdp_enabled())  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _attend_in_chunks(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None, dropout: float) -> Tensor:
    """Attention over whole sequences, (G, H, n, K), a chunk of queries at a time: at most `WEIGHTS` weights, or those of one query.

    With gradients, each chunk is computed again in the backward pass.
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


class LocalMask(NamedTuple):
    """The mask that the local layers of a batch share."""

    bias: Tensor
    """0 where a query sees a key, the dtype's minimum elsewhere, (W, 1, BLOCK, BLOCK + window)."""
    sees: Tensor | None
    """Whether each token sees a key, (N, 1, 1); None if all do."""


@torch.inference_mode(False)  # tensors made in inference mode could not be used in training
def _make_local_mask(batch: PackedBatch, window: int, dtype: torch.dtype) -> LocalMask:
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


def _attend_local(q: Tensor, k: Tensor, v: Tensor, mask: LocalMask, window: int, slopes: Tensor | None, dropout: float) -> Tensor:
    blocks = mask.bias.shape[0]
    # With gradients in one piece: in the backward pass each slice would be a full tensor of zeros.
    step = blocks if torch.is_grad_enabled() else LOCAL_BLOCKS
    outputs = [
        _attend_blocks(q, k, v, mask.bias[first : first + step], first, window // 2, slopes, dropout) for first in range(0, blocks, step)
    ]
    output = (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[: len(q)]
    return output if mask.sees is None else output * mask.sees


def _attend_blocks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, first: int, half: int, slopes: Tensor | None, dropout: float) -> Tensor:
    """Attention of the queries of neighbouring blocks over their keys, a halo of ``half`` on either side: (W * BLOCK, H, K)."""
    if slopes is not None:
        distance = _block_distance(half, slopes.device).abs()
        bias = (bias - slopes.view(1, -1, 1, 1) * distance).clamp(min=torch.finfo(q.dtype).min).to(q.dtype)
    start, end = first * BLOCK, (first + len(bias)) * BLOCK  # the end can lie outside the batch
    query = _pad_rows(q, start, end).view(len(bias), BLOCK, *q.shape[1:]).transpose(1, 2)  # (W, H, BLOCK, K)
    # (W, H, BLOCK + window, K), overlapping views
    key, value = (_pad_rows(x, start - half, end + half).unfold(0, BLOCK + 2 * half, BLOCK).transpose(2, 3) for x in (k, v))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
    return mixed.transpose(1, 2).flatten(0, 1)


def _pad_rows(x: Tensor, start: int, end: int) -> Tensor:
    """Return tokens start..end of (N, H, K), with zeros outside the batch; a view if none lie outside."""
    before, after = max(-start, 0), max(end - len(x), 0)
    inside = x[max(start, 0) : min(end, len(x))]
    return F.pad(inside, (0, 0, 0, 0, before, after)) if before or after else inside


def _block_distance(half: int, device: torch.device) -> Tensor:
    """Key position minus query position within a block and its halo, (BLOCK, BLOCK + window)."""
    return torch.arange(BLOCK + 2 * half, device=device)[None] - half - torch.arange(BLOCK, device=device)[:, None]


def attend_packed(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float) -> Tensor:
    """Packed attention on any device; see `quiver.encoder.attention.attend` for the contract."""
    window = effective_window(batch.max_seqlen, window)
    if window is None:
        if "groups" not in batch.memo:
            batch.memo["groups"] = length_groups(batch)
        return _attend_whole(q, k, v, batch.memo["groups"], slopes, dropout)
    memo = ("local", window, q.dtype)
    if memo not in batch.memo:
        batch.memo[memo] = _make_local_mask(batch, window, q.dtype)
    return _attend_local(q, k, v, batch.memo[memo], window, slopes, dropout)
