"""Dropout that draws its bits from a seed, so that the backward pass can draw them again.

PyTorch draws one float per value, 7 ns of a core; here 64 random bits serve four or eight values, and no mask is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# Values processed at a time: as float32 they fill half of a common second-level cache.
DROPOUT_CHUNK = 2**18


def new_seed() -> int:
    """Draw a seed from PyTorch's default generator; a generator uses 32 bits of its seed."""
    return int(torch.randint(2**32, (), device="cpu"))


def dropped_levels(probability: float, levels: int) -> int:
    """Return how many of the equally probable ``levels`` drop a value: a probability above 0 and below 1, rounded in the same range."""
    return min(max(round(probability * levels), 1), levels - 1)


class DropoutMask:
    """A reproducible stream of zeros and ones, drawn in pieces.

    PyTorch draws one float per value, 7 ns of a core; here 64 random bits serve four or eight values, and the backward pass draws them
    again from the seed instead of keeping a mask. The seed comes from PyTorch's default generator, so whatever replays that generator
    replays the masks: checkpointing, GradCache, a resumed run.

    Attributes:
        scale: Factor for the kept values, so that the mean is preserved.
    """

    def __init__(self, probability: float, seed: int, *, bits: torch.dtype = torch.int16) -> None:
        """Start a stream.

        Args:
            probability: Probability of dropping a value, above 0 and below 1; rounded to a multiple of 2**-16 or 2**-8 in the same range.
            seed: Seed of the stream.
            bits: Random bits per value: int16 or int8.
        """
        levels = 2 ** (8 * bits.itemsize)
        dropped = dropped_levels(probability, levels)
        self.scale = levels / (levels - dropped)
        self._bits, self._threshold = bits, dropped - levels // 2
        self._generator = torch.Generator().manual_seed(seed)

    def fill(self, place: Tensor) -> Tensor:
        """Write 1 where a value is kept and 0 where it is dropped to a contiguous CPU tensor; returns it."""
        count = -(-place.numel() * self._bits.itemsize // 8)
        bits = torch.empty(count, dtype=torch.int64, device="cpu").random_(-(2**63), None, generator=self._generator)
        return torch.ge(bits.view(self._bits)[: place.numel()].view(place.shape), self._threshold, out=place)


class Dropout(nn.Dropout):
    """nn.Dropout with `DropoutMask` on a CPU; never in place, and not supported by torch.func."""

    @property
    def probability(self) -> float:
        """The probability now: zero in evaluation. For functions that drop values themselves, such as `add_norm`."""
        return self.p if self.training else 0.0

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Drop values in training; any shape."""
        return drop(input, self.p, training=self.training)


def drop(x: Tensor, probability: float, *, training: bool, chunk: int = DROPOUT_CHUNK) -> Tensor:
    """Dropout of any shape; see torch.nn.functional.dropout."""
    if not training or not 0 < probability < 1 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, probability, training)
    output: Tensor = _Dropout.apply(x, probability, new_seed(), chunk)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return output


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float, seed: int, chunk: int) -> Tensor:
        ctx.drawn, ctx.chunk = (probability, seed), chunk
        return _dropped(x, DropoutMask(probability, seed), chunk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _dropped(gradient, DropoutMask(*ctx.drawn), ctx.chunk), None, None, None


def _dropped(x: Tensor, kept: DropoutMask, chunk: int) -> Tensor:
    x = x.contiguous()
    output = torch.empty_like(x)
    for values, place in zip(torch.split(x.view(-1), chunk), torch.split(output.view(-1), chunk), strict=True):
        torch.mul(values, kept.fill(place), out=place)
        place.mul_(kept.scale)
    return output
