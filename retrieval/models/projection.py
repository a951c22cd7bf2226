"""A linear layer on top of the encoder: sentence-transformers' and PyLate's ``Dense``.

Shapes: N vectors, D width in, d width out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quiver.encoder import InputError

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
