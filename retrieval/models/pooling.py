"""On top of the encoder: pooling, projections, and the fingerprint of a model.

Shapes: B texts, N packed tokens, D encoder width, d vector width.
Source: sentence-transformers' ``Pooling`` and ``Dense`` modules; PyLate's ``Dense``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, InputError, PackedBatch, Tokenizer
from quiver.encoder.config import DROPOUTS
from quiver.encoder.tokenizer import SPECIAL_TOKENS

# Configuration fields that do not affect vectors.
WITHOUT_EFFECT = frozenset({"family", "initializer_range", "pad_token_id", "cls_token_id", "sep_token_id", *DROPOUTS})


def fingerprint(encoder: Encoder, projections: nn.Sequential, tokenizer: Tokenizer, settings: object) -> str:
    """Hash weights, architecture, tokenizer and the JSON values of other settings with sha256: equal fingerprints mean equal vectors."""
    digest = hashlib.sha256()
    for module in (encoder, projections):
        for name, tensor in module.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    digest.update(tokenizer.to_json().encode())
    described = {
        "architecture": {name: value for name, value in asdict(encoder.config).items() if name not in WITHOUT_EFFECT},
        "projections": [(module.activation, module.use_residual) for module in projections if isinstance(module, Projection)],
        "special": [tokenizer.special_id(name) for name in SPECIAL_TOKENS],
        "truncation": tokenizer.truncation_side,
        "settings": settings,
    }
    digest.update(json.dumps(described, sort_keys=True).encode())
    return digest.hexdigest()


def _reduce_segments(hidden: Tensor, batch: PackedBatch, skip: int, reduce: str) -> Tensor:
    """Reduce each sequence without its first ``skip`` tokens to (B, D), without waiting for the device."""
    lengths = batch.cu_seqlens.diff().long()
    if skip:
        skipped = batch.positions < skip
        hidden = hidden.masked_fill(skipped[:, None], 0.0 if reduce == "sum" else -torch.inf)
    # Checks of the lengths would wait for the device; those of a batch are right.
    return torch.segment_reduce(hidden, reduce, lengths=lengths, axis=0, unsafe=True)


def _cls(hidden: Tensor, batch: PackedBatch, skip: int) -> Tensor:
    del skip  # the first token precedes any prompt
    return hidden[batch.cu_seqlens[:-1].long()]


def _mean(hidden: Tensor, batch: PackedBatch, skip: int) -> Tensor:
    # A sum and a division instead of "mean": a text whose tokens are all skipped gives zeros, not NaN.
    lengths = batch.cu_seqlens.diff().long()
    return _reduce_segments(hidden, batch, skip, "sum") / (lengths - skip).clamp(min=1)[:, None]


def _last(hidden: Tensor, batch: PackedBatch, skip: int) -> Tensor:
    del skip  # the last token follows any prompt
    return hidden[batch.cu_seqlens[1:].long() - 1]


POOLINGS: dict[str, Callable[[Tensor, PackedBatch, int], Tensor]] = {
    "cls": _cls,
    "mean": _mean,
    "max": partial(_reduce_segments, reduce="max"),
    "lasttoken": _last,
}
"""Pooling functions by sentence-transformers' names: hidden states (N, D), batch and number of leading tokens to skip -> (B, D)."""


def pool(hidden: Tensor, batch: PackedBatch, mode: str, *, skip: int = 0) -> Tensor:
    """Pool hidden states (N, D) by a mode of `POOLINGS` to one float32 vector per sequence, (B, D).

    Mean and max exclude the first ``skip`` tokens: a prompt that is not pooled.

    Example:
        >>> from quiver.encoder import pack_ids
        >>> pool(torch.tensor([[1.0], [3.0], [5.0]]), pack_ids([[7, 7], [7]]), "mean").tolist()
        [[2.0], [5.0]]
    """
    # In half precision a sum over thousands of tokens would saturate.
    return POOLINGS[mode](hidden.float(), batch.to(hidden.device), skip)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.GELU": nn.functional.gelu,
    "torch.nn.modules.activation.SiLU": nn.functional.silu,
}
"""Activations by the class names that checkpoints store."""

IDENTITY = "torch.nn.modules.linear.Identity"


class Projection(nn.Module):
    """Linear layer on top of the encoder, with an activation of `ACTIVATIONS`: the ``Dense`` module of checkpoints.

    With ``residual``, the input is added to the output, through a matrix if the widths differ (PyLate's ``use_residual``).
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
        """Map vectors (N, D) to (N, d)."""
        projected = ACTIVATIONS[self.activation](self.linear(vectors))
        if self.use_residual:
            projected = projected + (vectors if self.residual is None else self.residual(vectors))
        return projected
