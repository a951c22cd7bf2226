"""From hidden states to vectors: pooling, projections, and scaling for inner-product search.

Shapes: B texts, N packed tokens, D encoder width, d vector width.
Source: sentence-transformers' ``Pooling`` and ``Dense`` modules; PyLate's ``Dense``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from quiver.encoder import InputError, PackedBatch
from quiver.retrieval.records import DenseVectors, ModelCard


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


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.GELU": nn.functional.gelu,
    "torch.nn.modules.activation.SiLU": nn.functional.silu,
}
"""By the class names that checkpoints store."""

IDENTITY = "torch.nn.modules.linear.Identity"


class Projection(nn.Module):
    """Linear map, activation and, where the checkpoint has it, a residual path.

    Args:
        in_features: D.
        out_features: d.
        bias: The linear map has a bias.
        activation: A key of `ACTIVATIONS`.
        residual: Add the input to the output, through a matrix where the widths differ (PyLate's ``use_residual``).

    Raises:
        InputError: The activation is not known.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, activation: str = IDENTITY, residual: bool = False
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise InputError(f"a Dense module's activation_function must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation
        self.use_residual = residual
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.residual = nn.Linear(in_features, out_features, bias=False) if residual and in_features != out_features else None

    def forward(self, vectors: Tensor) -> Tensor:
        """(N, D) to (N, d)."""
        projected = ACTIVATIONS[self.activation](self.linear(vectors))
        if self.use_residual:
            projected = projected + (vectors if self.residual is None else self.residual(vectors))
        return projected


def comparable(vectors: DenseVectors, card: ModelCard) -> DenseVectors:
    """Vectors whose inner product is the model's similarity: scaled to length 1 for cosine, as they are for dot product.

    A model with cosine similarity need not end in a normalising module, and then gives vectors of any length.

    Args:
        vectors: (B, d).
        card: The model they come from.

    Returns:
        (B, d); a zero vector stays zero, one that is not finite stays so. The given vectors are left alone.
    """
    if card.similarity != "cosine":
        return vectors
    scaled: DenseVectors = vectors.copy()
    make_comparable(scaled, card)
    return scaled


def make_comparable(vectors: DenseVectors, card: ModelCard) -> None:
    """As `comparable`, in place: a corpus is scaled without a second copy of it.

    Args:
        vectors: (B, d), changed where the model's similarity is cosine.
        card: The model they come from.
    """
    if card.similarity != "cosine":
        return
    # Squares of float32 overflow from 1e19 on and vanish below 1e-23; in float64 no float32 vector but zero has length zero.
    lengths = np.sqrt(np.einsum("bd,bd->b", vectors, vectors, dtype=np.float64))[:, None]  # (B, 1)
    with np.errstate(invalid="ignore"):  # an infinite vector becomes NaN; whoever indexes or searches it says whose it is
        # Not `lengths > 0`: that is False for NaN too, and a broken model would pass for one that found nothing.
        np.divide(vectors, lengths, out=vectors, where=lengths != 0, casting="same_kind")
