"""Dropout whose masks are drawn from a seed, so that the backward pass can draw them again.

The seed comes from PyTorch's default generator, so whatever replays that generator replays the masks: checkpointing, GradCache, a resumed
run.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Values processed at a time: as float32 they fill half of a common second-level cache.
DROPOUT_CHUNK = 2**18


def new_seed() -> int:
    """Draw a seed from PyTorch's default generator; a generator uses 32 bits of its seed."""
    return int(torch.randint(2**32, (), device="cpu"))


def dropped_levels(probability: float, levels: int) -> int:
    """Return how many of the equally probable ``levels`` drop a value: a probability above 0 and below 1, rounded in the same range."""
    return min(max(round(probability * levels), 1), levels - 1)


class DropoutMask:
    """A reproducible stream of zeros and ones on a CPU, drawn in pieces: 64 random bits serve eight values, as in flash attention.

    PyTorch draws one float per value, 7 ns of a core. The probability of a zero is rounded to a multiple of 2**-8.
    """

    def __init__(self, probability: float, seed: int) -> None:
        dropped = dropped_levels(probability, 256)
        # Factor for the kept values, so that the mean is preserved.
        self.scale = 256 / (256 - dropped)
        self._threshold = dropped - 128
        self._generator = torch.Generator().manual_seed(seed)

    def fill(self, place: Tensor) -> Tensor:
        """Write 1 where a value is kept and 0 where it is dropped to a contiguous CPU tensor; returns it."""
        bits = torch.empty(-(-place.numel() // 8), dtype=torch.int64, device="cpu").random_(-(2**63), None, generator=self._generator)
        return torch.ge(bits.view(torch.int8)[: place.numel()].view(place.shape), self._threshold, out=place)
