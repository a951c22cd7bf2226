"""The layer between an encoder and a head's last matrix, and what each family's is.

Shapes: D model width.
Source: BERT, arXiv:1810.04805, section 3.1; RoBERTa, arXiv:1907.11692; ModernBERT's prediction head in transformers 5.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quiver.encoder.config import EncoderConfig
from quiver.encoder.layers import make_norm
from quiver.encoder.ops import ACTIVATION_FUNCTIONS

HEAD_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {**ACTIVATION_FUNCTIONS, "tanh": torch.tanh}
# Families whose tasks all put their last matrix on the masked language model's transform.
SHARED_TRANSFORM = ("modernbert", "quiver")


@dataclass(frozen=True)
class TransformConfig:
    """The layer between an encoder and a head's last matrix: dense matrix, activation, perhaps a norm."""

    bias: bool
    """The dense matrix has a bias."""
    activation: str
    """A key of `HEAD_ACTIVATIONS`."""
    norm: bool
    """The encoder's kind of norm follows."""
    input_dropout: bool = False
    """The classifier's dropout stands before this layer too (RoBERTa)."""

    def __post_init__(self) -> None:
        if self.activation not in HEAD_ACTIVATIONS:
            raise ValueError(f"a head's activation must be one of {', '.join(HEAD_ACTIVATIONS)}, got {self.activation!r}")


def masked_lm_transform(config: EncoderConfig) -> TransformConfig:
    """The family's transform before the decoder."""
    if config.family in SHARED_TRANSFORM:
        return TransformConfig(bias=False, activation="gelu", norm=True)
    # RoBERTa's is gelu whatever the layers have.
    activation = "gelu" if config.family == "roberta" else config.activation
    return TransformConfig(bias=decoder_has_bias(config), activation=activation, norm=True)


def decoder_has_bias(config: EncoderConfig) -> bool:
    """Whether the family's decoder has a bias; NomicBERT's follows the first matrix of its MLP."""
    return config.family != "nomicbert" or config.mlp_input_bias


def classifier_transform(config: EncoderConfig) -> TransformConfig:
    """The family's transform before the matrix of labels: BERT's pooler, where the family has no other."""
    if config.family in SHARED_TRANSFORM:
        return masked_lm_transform(config)
    return TransformConfig(bias=True, activation="tanh", norm=False, input_dropout=config.family == "roberta")


def head_dropout(config: EncoderConfig) -> float:
    """The family's dropout before the matrix of labels where config.json says nothing."""
    return 0.0 if config.family in SHARED_TRANSFORM else config.embedding_dropout


class Transform(nn.Module):
    """Dense matrix, activation and perhaps a norm over D."""

    def __init__(self, config: EncoderConfig, transform: TransformConfig) -> None:
        super().__init__()
        self.config = transform
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=transform.bias)
        self.norm = make_norm(config) if transform.norm else nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        """(n, D) to (n, D)."""
        output: Tensor = self.norm(HEAD_ACTIVATIONS[self.config.activation](self.dense(hidden)))
        return output
