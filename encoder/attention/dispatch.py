"""Attention over packed batches by PyTorch operators on any device, attention as its definition, and the choice among all backends.

`attend_packed` has no n x n tensor in local layers and no masks in global ones. Global layers: neighbouring sequences of one length form
one call on views of the packed tensors. Local layers cut the tokens into blocks of queries; each block meets its own keys and a halo of
window // 2 on either side, so the cost is N x window. Document borders and the window are one additive mask, built once per batch for all
local layers. Where PyTorch would write all weights out (ALiBi; some dtypes and head widths on a GPU), a chunk of queries is processed at a
time.

Global attention with dropout on the attention weights has its own form on CPUs: a chunk of queries and heads at a time, whose weights and
masks the backward pass computes again (arXiv:2205.14135, section 3.1 and appendix B). With PyTorch's operators, which write everything
out, MiniLM's training takes twice as long on texts of 2,048 tokens.

`attend_reference` and `attend_padded` build full score matrices, so they are for tests, graphs exported to ONNX and short texts only.

Shapes: N packed tokens, H heads, K head width, G sequences of one length, n their length, P pairs of a sequence and a head, W query blocks,
B sequences, S padded length.
Source: ModernBERT, arXiv:2412.13663, section 2.1.2 (alternating attention, unpadding); the blocking is our own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from quiver.encoder.attention import flash
from quiver.encoder.cpu.support import WIDTH_MULTIPLE, bfloat16_kernels_run, supports_batch
from quiver.encoder.dropout import DROPOUT_CHUNK, DropoutMask, new_seed
from quiver.encoder.errors import InputError
from quiver.encoder.packing import PackedBatch, PaddedBatch, effective_window, empty_qkv

logger = logging.getLogger(__name__)


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
    """Attention over whole sequences, (G, H, n, K), in chunks of queries, each computed again in the backward pass: few weights at once."""
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

    bias: Tensor  # 0 where a query sees a key, the dtype's minimum elsewhere, (W, 1, BLOCK, BLOCK + window)
    sees: Tensor | None  # whether each token sees a key, (N, 1, 1); None if all do


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


def _attend_windows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, first: int, half: int, slopes: Tensor | None, dropout: float) -> Tensor:
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
    mask: LocalMask = batch.memo[memo]
    blocks = mask.bias.shape[0]
    # With gradients in one piece: in the backward pass each slice would be a full tensor of zeros.
    step = blocks if torch.is_grad_enabled() else LOCAL_BLOCKS
    outputs = [
        _attend_windows(q, k, v, mask.bias[first : first + step], first, window // 2, slopes, dropout) for first in range(0, blocks, step)
    ]
    output = (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[: len(q)]
    return output if mask.sees is None else output * mask.sees


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float
) -> Tensor:
    """Softmax attention of each sequence with itself; see `quiver.encoder.attention.attend` for the contract."""
    outputs = []
    key_lengths = batch.key_lengths or batch.lengths
    for start, end, keys in zip(batch.offsets, batch.offsets[1:], key_lengths, strict=False):
        scores = torch.einsum("ihk,jhk->hij", q[start:end], k[start:end]) * q.shape[-1] ** -0.5  # (H, n, n)
        place = torch.arange(end - start, device=q.device)
        distance = (place[:, None] - place[None]).abs()  # (n, n)
        if slopes is not None:
            scores = scores - slopes.to(scores.dtype)[:, None, None] * distance
        visible = (place < keys).expand(len(place), -1)
        if window is not None:
            visible = visible & (distance <= window // 2)
        weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
        # A token that sees nothing (query expansion far from the text) gets zeros, as in PyTorch's own kernels.
        weights = F.dropout(weights * visible.any(-1, keepdim=True), dropout)
        outputs.append(torch.einsum("hij,jhk->ihk", weights, v[start:end]))
    return torch.cat(outputs)


def attend_padded(q: Tensor, k: Tensor, v: Tensor, batch: PaddedBatch, window: int | None, slopes: Tensor | None) -> Tensor:
    """Softmax attention within each row of a padded batch, in operators that every graph format has, with (B, H, S, S) scores."""
    rows, length = batch.attended.shape
    q, k, v = (each.reshape(rows, length, *each.shape[1:]).transpose(1, 2) for each in (q, k, v))  # (B, H, S, K)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5  # (B, H, S, S)
    place = torch.arange(length, device=q.device)
    distance = (place[:, None] - place[None]).abs()  # (S, S)
    if slopes is not None:
        scores = scores - slopes.to(scores.dtype)[:, None, None] * distance
    visible = batch.attended[:, None, None]  # (B, 1, 1, S)
    if window is not None:
        visible = visible & (distance <= window // 2)
    weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
    weights = weights * visible.any(-1, keepdim=True)  # a position that sees nothing gets zeros
    mixed: Tensor = (weights @ v).transpose(1, 2).flatten(0, 1)  # (N, H, K)
    return mixed


VARIABLE = "QUIVER_ATTENTION"
"""Environment variable that names the backend to use where it supports the call."""


def _attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float
) -> Tensor:
    from quiver.encoder.cpu.attention import attend_compiled  # loads numba

    return attend_compiled(q, k, v, batch, window, slopes, dropout)


Backend = Callable[[Tensor, Tensor, Tensor, PackedBatch, "int | None", "Tensor | None", float], Tensor]

BACKENDS: dict[str, Backend] = {
    **{name: partial(flash.attend_flash, name) for name in flash.KERNELS},
    "compiled": _attend_compiled,
    "packed": attend_packed,
    "reference": attend_reference,
}

# The first backend that supports a call is taken; packed if none does. PyTorch's own flash kernel needs no package and is flash-attn 2
# itself; 3 and 4 are faster on the GPUs they are made for, and the package of 2 has ALiBi.
ORDER = ("flash_attn_4", "flash_attn_3", "aten_flash", "flash_attn_2", "compiled")


class AttentionCall(NamedTuple):
    """Everything that the choice of a backend depends on."""

    device_type: str
    dtype: torch.dtype
    head_width: int = 64
    capability: tuple[int, int] = (0, 0)  # compute capability of the CUDA device
    gradients: bool = False
    dropout: bool = False
    slopes: bool = False  # whether the call has ALiBi
    key_lengths: bool = False  # whether some tokens attend to others but are not attended to
    local: bool = False  # whether there is a window shorter than a sequence
    deterministic: bool = False  # whether gradients must be equal in every run
    installed: frozenset[str] = frozenset()
    """The keys of `LIMITS` that are installed and worth using here: `flash.installed` on CUDA, ``compiled`` on a CPU."""
    missing: frozenset[tuple[str, str]] = frozenset()  # what their releases and builds lack: `flash.missing` on CUDA


@dataclass(frozen=True)
class BackendLimits:
    """What a backend supports, by the checks in the kernels' own entry points (torch 2.11, flash-attn 2.8, 3.0 and 4.0.0b)."""

    device: str = "cuda"  # device type
    absent: str = "it is not installed"  # why the backend may be unavailable on that device
    capability: tuple[int, int] = (8, 0)  # lowest CUDA compute capability
    beyond: tuple[int, int] = (99, 0)  # first CUDA compute capability that is no longer supported
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    multiple: int | None = None  # the width of a head must be a multiple of this many bytes; None for any width
    widest: int = 256
    widest_gradient: int = 192  # widest head in training: with wider ones some GPUs lack the memory for the backward pass
    dropout: bool = False
    slopes: bool = False
    empty_query_blocks: bool = True
    """Whether a window may leave a whole block of queries without a key, as it does where many tokens are not attended to."""


LIMITS = {
    "aten_flash": BackendLimits(dropout=True),
    "flash_attn_2": BackendLimits(dropout=True, slopes=True),
    "flash_attn_3": BackendLimits(capability=(9, 0), beyond=(10, 0)),
    # For a block of queries that sees no key, 4.0.0b36 loads the first keys and masks them as if they were others (flash_fwd_sm90.py).
    "flash_attn_4": BackendLimits(capability=(9, 0), beyond=(12, 0), widest=128, widest_gradient=128, empty_query_blocks=False),
    "compiled": BackendLimits(
        device="cpu",
        absent="too few tokens, or no numba, OpenMP threads, fused multiply-add or (for bfloat16 inference) fast bfloat16 products here",
        capability=(0, 0),
        dtypes=(torch.float32, torch.bfloat16),
        multiple=WIDTH_MULTIPLE * torch.float32.itemsize,
        widest_gradient=256,
    ),
}


def unsupported_reason(name: str, call: AttentionCall) -> str | None:
    """Say in a few words why a backend does not support a call; None if it does."""
    limits = LIMITS.get(name)
    if limits is None:  # packed and reference support every call
        return None
    widest = limits.widest_gradient if call.gradients else limits.widest
    width, multiple = call.head_width, (limits.multiple or call.dtype.itemsize) // call.dtype.itemsize
    widths = f"multiples of {multiple} to {widest}" if limits.multiple else f"up to {widest}"
    reasons = {
        f"it needs a {limits.device.upper()} device": call.device_type != limits.device,
        limits.absent: name not in call.installed,
        f"compute capability {'.'.join(map(str, call.capability))}": not limits.capability <= call.capability < limits.beyond,
        f"dtype {str(call.dtype).removeprefix('torch.')}": call.dtype not in limits.dtypes,
        f"head width {width} ({widths})": width % multiple != 0 or width > widest,
        "dropout": call.dropout and not limits.dropout,
        "ALiBi": call.slopes and not limits.slopes,
        "windows with key lengths": call.key_lengths and call.local and not limits.empty_query_blocks,
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), None):
        return reason
    needed = {
        "gradients": call.gradients,
        flash.DETERMINISTIC: call.gradients and call.deterministic,
        "windows": call.local,
        f"dtype {str(call.dtype).removeprefix('torch.')}": True,
        "sequences of different lengths": True,
    }
    return next((f"this build has no {feature}" for feature, needs in needed.items() if needs and (name, feature) in call.missing), None)


@cache
def choose_backend(call: AttentionCall, override: str | None = None) -> str:
    """Choose the backend for a kind of call; each choice is logged once, with the reason why a better one was not possible.

    Example:
        >>> choose_backend(AttentionCall("cuda", torch.bfloat16, capability=(9, 0), installed=frozenset({"aten_flash"})))
        'aten_flash'
    """
    if override is not None and override not in BACKENDS:
        raise InputError(f"{VARIABLE} must be one of {', '.join(BACKENDS)}, got {override!r}")
    names: list[str] = [*([override] if override else []), *ORDER, "packed"]
    name = next(candidate for candidate in names if unsupported_reason(candidate, call) is None)
    if override and name != override:
        logger.warning("%s=%s does not support this attention (%s); using %s", VARIABLE, override, unsupported_reason(override, call), name)
    elif call.device_type == "cuda" and name == "packed" and override is None:
        logger.info(
            "%s: using packed, because flash attention is not usable (%s)", _describe_call(call), unsupported_reason("aten_flash", call)
        )
    else:
        logger.info("%s: using %s", _describe_call(call), name)
    return name


def _describe_call(call: AttentionCall) -> str:
    words = [
        name.replace("_", " ")
        for name in ("gradients", "dropout", "slopes", "key_lengths", "local", "deterministic")
        if getattr(call, name)
    ]
    kind = f"attention on {call.device_type} in {str(call.dtype).removeprefix('torch.')}, head width {call.head_width}"
    return ", ".join((kind, *words))


def describe(
    q: Tensor, batch: PackedBatch, *, window: int | None = None, slopes: Tensor | None = None, dropout: float = 0.0, gradients: bool = False
) -> AttentionCall:
    """Describe the call that `attend` would make on these tensors."""
    cuda = q.device.type == "cuda"
    if cuda:
        installed = flash.installed()
    else:
        paired = q.dtype == torch.bfloat16 and not gradients  # with gradients the inputs are converted to float32
        installed = frozenset({"compiled"} if supports_batch(batch, q) and (not paired or bfloat16_kernels_run()) else ())
    return AttentionCall(
        device_type=q.device.type,
        dtype=q.dtype,
        head_width=q.shape[-1],
        capability=torch.cuda.get_device_capability(q.device) if cuda else (0, 0),
        gradients=gradients,
        dropout=dropout > 0,
        slopes=slopes is not None,
        key_lengths=batch.key_lengths is not None,
        local=window is not None,
        deterministic=gradients and flash.deterministic_is_requested(),
        installed=installed,
        missing=flash.missing() if cuda else frozenset(),
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PackedBatch | PaddedBatch,
    window: int | None,
    *,
    slopes: Tensor | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention within each sequence of a packed batch, scaled by K ** -0.5.

    Args:
        q: Queries, (N, H, K).
        k: Keys, (N, H, K).
        v: Values, (N, H, K).
        batch: The sequences, and which of their tokens can be attended to; a padded batch for ONNX export, without dropout or backend.
        window: A token sees |i - j| <= window // 2, both ends included; None for the whole sequence.
        slopes: ALiBi's slope of each head, (H,): a score loses slope * |i - j|; None without ALiBi.
        dropout: Probability of dropping an attention weight. On a CPU it is rounded to a multiple of 1/256, as in flash attention, in
            global layers with sequences of 64 tokens or more.
        backend: A key of `BACKENDS`. Default: the one in the environment variable QUIVER_ATTENTION if it supports the call, otherwise the
            best.

    Returns:
        (N, H, K). A token that sees nothing gets zeros.

    Raises:
        ValueError: ``backend`` is unknown or does not support the call; gives the reason.
        InputError: The environment variable names no backend.
    """
    if isinstance(batch, PaddedBatch):
        return attend_padded(q, k, v, batch, window, slopes)
    window = effective_window(batch.max_seqlen, window)
    gradients = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    call = describe(q, batch, window=window, slopes=slopes, dropout=dropout, gradients=gradients)
    if backend is None:
        backend = choose_backend(call, os.environ.get(VARIABLE))
    elif backend not in BACKENDS:
        raise ValueError(f"attention backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    elif reason := unsupported_reason(backend, call):
        raise ValueError(f"attention backend {backend} does not support this call: {reason}")
    return BACKENDS[backend](q, k, v, batch, window, slopes, dropout)
