"""Hidden states to one vector a text.

Shapes: B sequences, N packed tokens, D width.
Source: the definitions of sentence-transformers' ``Pooling`` module.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quiver.encoder import PackedBatch


def _segment(hidden: Tensor, batch: PackedBatch, skip: int, reduce: str) -> Tensor:
    """Reduce each sequence, its first ``skip`` tokens left out, to (B, D)."""
    lengths = batch.cu_seqlens.to(hidden.device).diff().long()
    if skip:
        positions = batch.positions.to(hidden.device)
        hidden = hidden[positions >= skip]
        lengths = (lengths - skip).clamp(min=0)
    return torch.segment_reduce(hidden, reduce, lengths=lengths, axis=0)


def _cls(hidden: Tensor, batch: PackedBatch, skip: int) -> Tensor:
    del skip  # the first token stands before any prompt
    return hidden[batch.cu_seqlens[:-1].to(hidden.device).long()]


def _mean(hidden: Tensor, batch: PackedBatch, skip: int) -> Tensor:
    # A sum and a division, not "mean": a text whose tokens are all skipped gives zeros, not NaN.
    lengths = batch.cu_seqlens.to(hidden.device).diff().long()
    return _segment(hidden, batch, skip, "sum") / (lengths - skip).clamp(min=1)[:, None]


def _max(hidden: Tensor, batch: PackedBatch, skip: int) -> Tensor:
    return _segment(hidden, batch, skip, "max")


def _last(hidden: Tensor, batch: PackedBatch, skip: int) -> Tensor:
    del skip  # the last token stands behind any prompt
    return hidden[batch.cu_seqlens[1:].to(hidden.device).long() - 1]


POOLINGS: dict[str, Callable[[Tensor, PackedBatch, int], Tensor]] = {"cls": _cls, "mean": _mean, "max": _max, "lasttoken": _last}
"""By sentence-transformers' names: hidden states (N, D), their batch and a number of leading tokens to skip, to (B, D)."""


def pool(hidden: Tensor, batch: PackedBatch, mode: str, *, skip: int = 0) -> Tensor:
    """One vector a sequence.

    Args:
        hidden: (N, D).
        batch: Where the sequences begin and end.
        mode: A key of `POOLINGS`.
        skip: Leading tokens that mean and max leave out (a prompt that is not to be pooled).

    Returns:
        (B, D) float32.

    Raises:
        ValueError: The mode is unknown.

    Example:
        >>> from quiver.encoder import pack_ids
        >>> pool(torch.tensor([[1.0], [3.0], [5.0]]), pack_ids([[7, 7], [7]]), "mean").tolist()
        [[2.0], [5.0]]
    """
    if mode not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {mode!r}")
    # In half precision a sum over thousands of tokens stops growing long before its end.
    return POOLINGS[mode](hidden.float(), batch, skip)
