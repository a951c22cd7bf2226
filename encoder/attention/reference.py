"""Attention written down as its definition: what the fast forms are tested against.

It builds every n x n score matrix, so it is for tests and short texts only.

Shapes: N packed tokens, H heads, K head width, n tokens of one sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from quiver.encoder.packing import PackedBatch


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float
) -> Tensor:
    """Softmax attention of each sequence by itself; see `quiver.encoder.attention.attend` for the contract."""
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
        # A token that sees nothing (unattended expansion far from the text) gets zeros, as torch's own kernels give it.
        weights = F.dropout(weights * visible.any(-1, keepdim=True), dropout)
        outputs.append(torch.einsum("hij,jhk->ihk", weights, v[start:end]))
    return torch.cat(outputs)
