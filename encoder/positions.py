"""Rotary position tables and their application to packed queries and keys.

Shapes: N packed tokens, H heads, K head width, P positions in a table.
Source: RoFormer, arXiv:2104.09864, in the half-rotation layout of GPT-NeoX that ModernBERT uses: dimension i is
rotated with dimension i + K/2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class RotaryTable(nn.Module):
    """Cosines and sines of one theta for positions 0..P-1, kept in float32 beside the weights."""

    cos: Tensor  # (P, K/2)
    sin: Tensor  # (P, K/2)

    def __init__(self, *, theta: float, head_width: int, max_positions: int) -> None:
        super().__init__()
        frequencies = 1.0 / theta ** (torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        # Not persistent: checkpoints hold no tables, they follow from the configuration.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTable:
        """Follow the weights to their device, but not to their dtype: the tables stay float32 in a half-precision model."""
        cos, sin = self.cos, self.sin
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.cos, self.sin = cos.to(self.cos.device), sin.to(self.sin.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the table for these positions, shaped to broadcast over (N, 2, H, K/2).

        Args:
            positions: (N,) int64.

        Returns:
            Cosines and sines, each (N, 1, 1, K/2) float32.
        """
        return self.cos[positions, None, None], self.sin[positions, None, None]


def rotate(qk: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries and keys to their positions.

    The arithmetic is float32 whatever the input: at position 8,191 a bfloat16 angle is off by whole turns.

    Args:
        qk: Queries and keys, (N, 2, H, K).
        table: What `RotaryTable` returned for these tokens.

    Returns:
        (N, 2, H, K) in the input's dtype.
    """
    cos, sin = table
    first, second = qk.float().chunk(2, dim=-1)  # (N, 2, H, K/2) each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qk.dtype)
