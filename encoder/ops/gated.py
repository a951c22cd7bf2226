"""The gate of GeGLU and SwiGLU: one half of a product, activated, times the other half.

Shapes: N packed tokens, I MLP width.
Source: GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from __future__ import annotations

from torch import Tensor

from encoder.ops.activations import ACTIVATION_FUNCTIONS
from encoder.ops.choice import fused


def gated(up: Tensor, activation: str) -> Tensor:
    """act(first half) * second half.

    Args:
        up: (N, 2 I), the half to activate first.
        activation: A key of `encoder.ops.activations.ACTIVATION_FUNCTIONS`.

    Returns:
        (N, I) in the input's dtype.
    """
    if fused(up):
        from encoder.ops import triton_gated

        return triton_gated.gated(up, activation)
    activated, gate = up.chunk(2, dim=-1)
    return ACTIVATION_FUNCTIONS[activation](activated) * gate
