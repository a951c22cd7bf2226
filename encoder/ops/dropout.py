"""Dropout on a CPU whose random numbers cost less than the arithmetic around them, and which keeps no mask for the backward pass.

torch draws one float a value, 7 ns of a core; here, on one core, 64 random bits serve four or eight values, and the backward pass draws
them again from the seed. The seed is from torch's default generator, so whatever replays that one replays these too: checkpointing,
GradCache, a resumed run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# Values in work at once: a float32 tensor of them is half of a common second-level cache.
CHUNK = 2**18


def new_seed() -> int:
    """A seed from torch's default generator; of a generator's seed 32 bits count."""
    return int(torch.randint(2**32, (), device="cpu"))


class Kept:
    """Zeros and ones in the order of one seed, as many at a time as are asked for.

    Attributes:
        scale: What the kept values are multiplied by, so that their mean stays.
    """

    def __init__(self, probability: float, seed: int, *, bits: torch.dtype = torch.int16) -> None:
        """Draw from a seed.

        Args:
            probability: Of dropping a value, above 0 and below 1, taken to the nearest multiple of 2**-16 or 2**-8 that is so too.
            seed: Of the order.
            bits: What is drawn for each value, int16 or int8.
        """
        levels = 2 ** (8 * bits.itemsize)
        dropped = min(max(round(probability * levels), 1), levels - 1)
        self.scale = levels / (levels - dropped)
        self._bits, self._threshold = bits, dropped - levels // 2
        self._generator = torch.Generator().manual_seed(seed)

    def fill(self, place: Tensor) -> Tensor:
        """Write 1 where a value is kept and 0 where it is dropped into a contiguous CPU tensor; returns it."""
        count = -(-place.numel() * self._bits.itemsize // 8)
        bits = torch.empty(count, dtype=torch.int64, device="cpu").random_(-(2**63), None, generator=self._generator)
        return torch.ge(bits.view(self._bits)[: place.numel()].view(place.shape), self._threshold, out=place)


class Dropout(nn.Dropout):
    """torch's module, other random numbers on a CPU; never in place, and not for torch.func."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Drop values in training, any shape."""
        return drop(input, self.p, training=self.training)


def drop(x: Tensor, probability: float, *, training: bool) -> Tensor:
    """Dropout of any shape; see torch.nn.functional.dropout."""
    if not training or not 0 < probability < 1 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, probability, training)
    output: Tensor = _Dropout.apply(x, probability, new_seed())  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return output


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float, seed: int) -> Tensor:
        ctx.drawn = probability, seed
        return _dropped(x, Kept(probability, seed))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _dropped(gradient, Kept(*ctx.drawn)), None, None


def _dropped(x: Tensor, kept: Kept) -> Tensor:
    x = x.contiguous()
    output = torch.empty_like(x)
    for values, place in zip(torch.split(x.view(-1), CHUNK), torch.split(output.view(-1), CHUNK), strict=True):
        torch.mul(values, kept.fill(place), out=place)
        place.mul_(kept.scale)
    return output
