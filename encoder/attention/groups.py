"""The sequences of a packed batch by length: those of one length are views of the packed tensors, without a gap.

Shapes: N packed tokens, H heads, K head width, G sequences of one length, n their length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quiver.encoder.packing import PackedBatch, places_by_length, token_order


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


def fill_heads(group: LengthGroup, place: Tensor, heads: Tensor) -> None:
    """Write the leading tokens of a group's sequences, (G, H, tokens, K), into (N, H, K); the others, which nobody saw, are zeros."""
    tokens = heads.shape[2]
    if tokens < group.length:
        whole = group.heads(place, group.length)
        whole[:, :, tokens:] = 0
    group.heads(place, tokens).copy_(heads)
