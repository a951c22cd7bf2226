"""Attention written as its definition: the reference for the fast backends, and the form that is exported to ONNX.

Both functions build full score matrices, so they are for tests, exported graphs and short texts only.

Shapes: N packed tokens, H heads, K head width, n tokens of one sequence, B sequences, S padded length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from quiver.encoder.packing import PackedBatch, PaddedBatch


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
