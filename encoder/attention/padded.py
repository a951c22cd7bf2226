"""Attention over padded batches, in operators that every graph format has: for encoders that are exported.

It builds the (B, H, S, S) scores, as other padded encoders do; packed batches never take it.

Shapes: B sequences, S padded length, N = B * S places, H heads, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quiver.encoder.padding import PaddedBatch


def attend_padded(q: Tensor, k: Tensor, v: Tensor, batch: PaddedBatch, window: int | None, slopes: Tensor | None) -> Tensor:
    """Softmax attention of each sequence with the places of it that may be attended to.

    See `quiver.encoder.attention.attend` for the contract; `quiver.encoder.attention.reference` is the same definition over packed batches.
    """
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
    weights = weights * visible.any(-1, keepdim=True)  # a place that sees nothing gets zeros
    mixed: Tensor = (weights @ v).transpose(1, 2).flatten(0, 1)  # (N, H, K)
    return mixed
