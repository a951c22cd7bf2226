"""Token sequences to packed batches and back: no padding, nothing dropped, order kept.

A packed batch lays its sequences end to end. It is built on the host, so lengths are known without synchronizing with a device.
`PaddedBatch` is for exported graphs only.

Shapes: B sequences, N tokens in the batch, S the longest sequence, D width of a hidden state.
Source: ModernBERT, arXiv:2412.13663, section 2.1.2 (unpadding before the embedding).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """B sequences end to end."""

    ids: Tensor  # token ids, (N,) int64
    cu_seqlens: Tensor  # borders of the sequences, (B + 1,) int32
    offsets: tuple[int, ...]  # the same numbers as Python integers
    max_seqlen: int  # length of the longest sequence, in tokens
    positions: Tensor  # position of each token in its sequence, (N,) int64
    rows: tuple[int, ...]  # index of each sequence in the list that it came from, B integers
    # For each sequence, the number of leading tokens that can be attended to; the others only attend to them (ColBERT's unattended query
    # expansion). None: all tokens.
    key_lengths: tuple[int, ...] | None = None
    # On a CPU, compute the hidden states of a sequence bit-identically whatever else is in the batch, even where another method would be
    # faster for few tokens.
    batch_invariant: bool = False
    # Masks and groups that attention derives from the layout; built once per batch and shared by its layers.
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> PackedBatch:
        """Return the sequences of a slice without a step, as views of the tokens; the memo is empty."""
        first, last, _ = rows.indices(len(self))
        start, end = self.offsets[first], self.offsets[last]
        offsets = self.offsets[first : last + 1]
        lengths = tuple(end - start for start, end in pairwise(offsets))
        keys = None if self.key_lengths is None else self.key_lengths[first:last]
        return PackedBatch(
            ids=self.ids[start:end],
            cu_seqlens=self.cu_seqlens[first : last + 1] - start,
            offsets=tuple(offset - start for offset in offsets),
            max_seqlen=max(lengths),
            positions=self.positions[start:end],
            rows=self.rows[first:last],
            key_lengths=None if keys == lengths else keys,
            batch_invariant=self.batch_invariant,
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens, N."""
        return self.offsets[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each sequence in tokens, B integers."""
        return tuple(end - start for start, end in pairwise(self.offsets))

    def to(self, device: torch.device | str) -> PackedBatch:
        """Move the batch to a device, without waiting for a GPU; the memo is empty there."""
        if torch.device(device) == self.ids.device:
            return self
        ids, cu_seqlens, positions = copy_to(device, self.ids, self.cu_seqlens, self.positions)
        return replace(self, ids=ids, cu_seqlens=cu_seqlens, positions=positions, memo={})

    def unpack(self, hidden: Tensor) -> list[Tensor]:
        """Split (N, D) into B views of (n_i, D), in batch order."""
        return list(torch.split(hidden, list(self.lengths)))

    def pad(self, hidden: Tensor) -> Tensor:
        """Lay (N, D) out as (B, S, D), with zeros after the end of each sequence."""
        padded = hidden.new_zeros(len(self), self.max_seqlen, hidden.shape[-1])
        row_of_token = torch.repeat_interleave(
            torch.arange(len(self), device=hidden.device), self.cu_seqlens.diff().long(), output_size=self.num_tokens
        )
        return padded.index_put((row_of_token, self.positions), hidden)


_ALIGNMENT = 16  # bytes at which a tensor begins in a common buffer; a multiple of every item size


def copy_to(device: torch.device | str, *tensors: Tensor) -> list[Tensor]:
    """Copy tensors to a device; from the host to a GPU in one transfer, for which the host does not wait, as views of one tensor.

    The tensors go through one buffer of pinned memory. A copy from other memory would make the host wait, whatever ``non_blocking`` says.
    """
    target = torch.device(device)
    if target.type != "cuda" or any(tensor.device.type != "cpu" for tensor in tensors):
        # A copy to the host has to be waited for: its memory could be read before it is written.
        return [tensor.to(target, non_blocking=target.type == "cuda") for tensor in tensors]
    ends = list(accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors))
    # PyTorch does not reuse the buffer before the transfer has ended.
    pinned = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    places = [slice(start, start + tensor.nbytes) for start, tensor in zip([0, *ends], tensors, strict=False)]
    for place, tensor in zip(places, tensors, strict=True):
        pinned[place].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    moved = pinned.to(target, non_blocking=True)
    return [moved[place].view(tensor.dtype).view(tensor.shape) for place, tensor in zip(places, tensors, strict=True)]


def pack_ids(
    sequences: Sequence[Sequence[int]], *, rows: Sequence[int] | None = None, key_lengths: Sequence[int] | None = None
) -> PackedBatch:
    """Pack sequences into one batch in the given order.

    Args:
        sequences: Token ids, special tokens included; B >= 1 sequences of at least one token.
        rows: Index of each sequence in its source; default 0..B-1.
        key_lengths: For each sequence, the number of leading tokens that can be attended to.

    Raises:
        ValueError: There is no sequence, one is empty, or a key length lies outside its sequence; names its row.

    Example:
        >>> from quiver.encoder import pack_ids
        >>> pack_ids([[5, 6, 7], [8]]).cu_seqlens.tolist()
        [0, 3, 4]
    """
    if not sequences:
        raise ValueError("a batch needs at least one sequence")
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    places = tuple(range(len(sequences))) if rows is None else tuple(rows)
    if not lengths.all():
        raise ValueError(f"sequence {places[int(lengths.argmin())]} is empty")
    if key_lengths is not None:
        for row, length, keys in zip(places, lengths.tolist(), key_lengths, strict=True):
            if not 1 <= keys <= length:
                raise ValueError(f"sequence {row}: key length must be in 1..{length}, got {keys}")
        if lengths.tolist() == list(key_lengths):
            key_lengths = None
    offsets = np.append(0, np.cumsum(lengths))
    tokens = int(offsets[-1])
    return PackedBatch(
        ids=torch.from_numpy(np.fromiter(chain.from_iterable(sequences), np.int64, tokens)),
        cu_seqlens=torch.from_numpy(offsets.astype(np.int32)),
        offsets=tuple(offsets.tolist()),
        max_seqlen=int(lengths.max()),
        positions=torch.from_numpy(np.arange(tokens) - np.repeat(offsets[:-1], lengths)),
        rows=places,
        key_lengths=None if key_lengths is None else tuple(key_lengths),
    )


def rows_by_length(lengths: NDArray[np.int64], *, max_tokens: int) -> list[NDArray[np.int64]]:
    """Group sequences of similar length into batches of at most ``max_tokens`` tokens, longest first; returns their numbers.

    A sequence that is empty or longer than the budget is a ValueError that names its row.
    """
    wrong = np.flatnonzero((lengths < 1) | (lengths > max_tokens))
    if len(wrong):
        raise ValueError(f"sequence {wrong[0]} has {lengths[wrong[0]]} tokens; it must have 1 to {max_tokens}")
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths[order])
    batches: list[NDArray[np.int64]] = []
    first, filled = 0, 0
    while first < len(order):
        last = int(np.searchsorted(ends, filled + max_tokens, side="right"))
        batches.append(order[first:last])
        first, filled = last, int(ends[last - 1])
    return batches


def pack(sequences: Sequence[Sequence[int]], *, max_tokens: int, key_lengths: Sequence[int] | None = None) -> Iterator[PackedBatch]:
    """Group sequences into batches of at most ``max_tokens`` tokens, longest first.

    Sequences of similar length share a batch, so attention can process equal lengths in one call.

    Args:
        sequences: Token ids, special tokens included; each 1..max_tokens long.
        max_tokens: Budget of one batch in tokens, N <= max_tokens.
        key_lengths: For each sequence, the number of leading tokens that can be attended to.

    Yields:
        Batches with B >= 1; ``rows`` holds the index of each sequence.

    Raises:
        ValueError: A sequence is empty or longer than the budget; names its row.

    Example:
        >>> from quiver.encoder import pack
        >>> [(b.offsets, b.rows) for b in pack([[1], [2, 2], [3, 3, 3]], max_tokens=4)]
        [((0, 3), (2,)), ((0, 2, 3), (1, 0))]
    """
    for group in rows_by_length(np.fromiter(map(len, sequences), np.int64, len(sequences)), max_tokens=max_tokens):
        rows = group.tolist()
        keys = None if key_lengths is None else [key_lengths[row] for row in rows]
        yield pack_ids([sequences[row] for row in rows], rows=rows, key_lengths=keys)


@torch.inference_mode(False)  # tensors made in inference mode could not be used in training
def neighbours_of_equal_length(batch: PackedBatch) -> tuple[PackedBatch, Tensor | None]:
    """Put sequences of equal length side by side, as attention on a CPU processes them.

    Returns the batch and the position of each original token in it, (N,); the given batch and None if nothing has to move.
    """
    members: dict[tuple[int, int], list[int]] = {}  # by (length, key length), in order of first appearance
    for place, shape in enumerate(zip(batch.lengths, batch.key_lengths or batch.lengths, strict=True)):
        members.setdefault(shape, []).append(place)
    flat = [place for places in members.values() for place in places]
    if flat == sorted(flat):
        return batch, None
    device = batch.ids.device
    order = torch.cat([torch.arange(batch.offsets[place], batch.offsets[place + 1]) for place in flat]).to(device, non_blocking=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=device)
    offsets = (0, *accumulate(batch.lengths[place] for place in flat))
    keys = batch.key_lengths
    arranged = PackedBatch(
        ids=batch.ids[order],
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32, device=device),
        offsets=offsets,
        max_seqlen=batch.max_seqlen,
        positions=batch.positions[order],
        rows=tuple(batch.rows[place] for place in flat),
        key_lengths=None if keys is None else tuple(keys[place] for place in flat),
        batch_invariant=batch.batch_invariant,
    )
    return arranged, inverse


def pack_padded(ids: Tensor, mask: Tensor) -> PackedBatch:
    """Pack a padded batch, as a data collator returns it.

    ``ids`` are (B, S) int64; the mask, (B, S), is 1 for tokens and 0 for padding, which is on the right. A ValueError if the shapes differ,
    a row contains only padding, or padding precedes a token.
    """
    if ids.shape != mask.shape or ids.ndim != 2:
        raise ValueError(f"ids and mask must share one shape (B, S), got {tuple(ids.shape)} and {tuple(mask.shape)}")
    attended = mask.to("cpu", torch.bool)
    lengths = attended.sum(1).tolist()
    if 0 in lengths:
        raise ValueError(f"row {lengths.index(0)} contains only padding")
    if not torch.equal(attended, torch.arange(mask.shape[1])[None] < torch.tensor(lengths)[:, None]):
        raise ValueError("padding must be on the right of each row")
    return pack_ids([row[:length] for row, length in zip(ids.tolist(), lengths, strict=True)]).to(ids.device)


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """B sequences padded to one length, N = B * S positions: the input of exported graphs."""

    ids: Tensor
    positions: Tensor
    attended: Tensor
    batch_invariant: ClassVar[bool] = False

    @classmethod
    def of(cls, ids: Tensor, mask: Tensor) -> PaddedBatch:
        """Make a batch of a tokenizer's two tensors, (B, S) each."""
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return cls(ids.flatten(), positions.flatten(), mask.to(torch.bool))


def effective_window(longest: int, window: int | None) -> int | None:
    """Return a window, or None if it covers every distance up to the longest sequence: global attention then gives the same."""
    return None if window is not None and longest - 1 <= window // 2 else window


def empty_qkv(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate gradients of queries, keys and values, each shaped like ``like`` (N, H, K), which `join_qkv` need not copy."""
    q, k, v = like.new_empty(len(like), 3, *like.shape[1:]).unbind(1)
    return q, k, v


def is_joined_qkv(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether three tensors (N, H, K) are the parts of one tensor (N, 3, H, K), such as those of `empty_qkv`."""
    heads, width = q.shape[1:]
    size = heads * width
    starts = [part.storage_offset() - q.storage_offset() for part in (q, k, v)]
    same = len({part.untyped_storage()._cdata for part in (q, k, v)}) == 1
    return same and starts == [0, size, 2 * size] and {q.stride(), k.stride(), v.stride()} == {(3 * size, width, 1)}


def join_qkv(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Join three tensors (N, H, K) to (N, 3, H, K): the tensor that they are parts of, otherwise a copy."""
    if not is_joined_qkv(q, k, v):
        return torch.stack((q, k, v), dim=1)
    heads, width = q.shape[1:]
    size = heads * width
    return q.as_strided((len(q), 3, heads, width), (3 * size, size, width, 1))
