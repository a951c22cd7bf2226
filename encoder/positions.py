"""Position information: tables of RoPE's cosines and sines, and ALiBi's slopes.

Shapes: N packed tokens, H heads, R leading dimensions of a head that RoPE rotates, P positions in a table.
Source: RoFormer, arXiv:2104.09864; YaRN, arXiv:2309.00071; ALiBi, arXiv:2108.12409.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from quiver.encoder.config import RopeScaling


def rope_frequencies(theta: float, rotary_width: int, scaling: RopeScaling | None = None) -> tuple[Tensor, float]:
    """Return RoPE's angle per position, and the factor for cosines and sines.

    Args:
        theta: RoPE's base.
        rotary_width: R, even.
        scaling: How the frequencies are changed for longer texts.

    Returns:
        (R/2,) float32 in radians per token, and the factor (1 except for YaRN).

    Example:
        >>> rope_frequencies(10_000.0, 4)[0].tolist()
        [1.0, 0.009999999776482582]
    """
    exponents = torch.arange(0, rotary_width, 2, dtype=torch.float32) / rotary_width
    if scaling is None:
        return 1.0 / theta**exponents, 1.0
    return SCALINGS[scaling.kind](theta, exponents, scaling)


def _linear(theta: float, exponents: Tensor, scaling: RopeScaling) -> tuple[Tensor, float]:
    return 1.0 / theta**exponents / scaling.factor, 1.0


def _ntk(theta: float, exponents: Tensor, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Scale both the base and the lowest frequency by the factor, as GTE's models do."""
    width = 2 * len(exponents)
    return 1.0 / (theta * scaling.factor) ** exponents / scaling.factor ** (2 / width), 1.0


def _yarn(theta: float, exponents: Tensor, scaling: RopeScaling) -> tuple[Tensor, float]:
    width = 2 * len(exponents)

    def dimension(turns: float) -> float:
        """Return the (real-valued) pair of dimensions that makes this many turns within the original positions."""
        return width * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), width - 1)
    span = (high - low) or 0.001  # both at the same pair: a step
    stretched = ((torch.arange(width // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    kept = 1.0 / theta**exponents
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return kept * (1 - stretched) + kept / scaling.factor * stretched, factor


SCALINGS: dict[str, Callable[[float, Tensor, RopeScaling], tuple[Tensor, float]]] = {"linear": _linear, "ntk": _ntk, "yarn": _yarn}


class RotaryTable(nn.Module):
    """Cosines and sines of one theta for positions 0..P-1, kept in float32."""

    cos: Tensor  # (P, R/2)
    sin: Tensor  # (P, R/2)

    def __init__(self, *, theta: float, rotary_width: int, max_positions: int, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        frequencies, factor = rope_frequencies(theta, rotary_width, scaling)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        # Not persistent: checkpoints hold no tables, which follow from the configuration.
        self.register_buffer("cos", angles.cos() * factor, persistent=False)
        self.register_buffer("sin", angles.sin() * factor, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTable:
        """Follow the weights to their device but not to their dtype: the tables stay float32 in a half-precision model."""
        cos, sin = self.cos, self.sin
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.cos, self.sin = cos.to(self.cos.device), sin.to(self.sin.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of the table.

        Args:
            positions: (N,) int64.

        Returns:
            Cosines and sines, each (N, R/2) float32.
        """
        return self.cos[positions], self.sin[positions]


def alibi_slopes(heads: int) -> Tensor:
    """Return ALiBi's slope of each head: a token at distance d loses slope * d from its score.

    For a power of two, slopes fall geometrically from 2 ** (-8 / H) to 2 ** -8. Other numbers of heads use the slopes of the next lower
    power of two and then every other slope of the next higher one.

    Returns:
        (H,) float32.

    Example:
        >>> alibi_slopes(8)[:3].tolist()
        [0.5, 0.25, 0.125]
    """
    whole = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    slopes += [2 ** (-8 * (head + 1) / (2 * whole)) for head in range(0, 2 * (heads - whole), 2)]
    return torch.tensor(slopes, dtype=torch.float32)
