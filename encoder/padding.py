"""Padded batches: what programs that cannot pack give an encoder's graph. Inside it tokens lie side by side, padding among them.

Shapes: B sequences, S padded length, N = B * S places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """B sequences of one length, padding behind their ends.

    Attributes:
        ids: Token ids, (N,), sequence after sequence.
        positions: Place of each in its sequence, (N,).
        attended: Whether a place may be attended to, (B, S) bool; the others only read, padding among them.
    """

    ids: Tensor
    positions: Tensor
    attended: Tensor

    @classmethod
    def of(cls, ids: Tensor, mask: Tensor) -> PaddedBatch:
        """From a tokenizer's two tensors, (B, S) each.

        Example:
            >>> PaddedBatch.of(torch.tensor([[5, 6], [7, 0]]), torch.tensor([[1, 1], [1, 0]])).positions.tolist()
            [0, 1, 0, 1]
        """
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return cls(ids.flatten(), positions.flatten(), mask.to(torch.bool))
