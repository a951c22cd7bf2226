"""The residual sum and the norm that follows it.

Shapes: N packed tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quiver.encoder.ops.choice import fused

Norm = nn.LayerNorm | nn.RMSNorm | nn.Identity

# Largest D of the Triton kernel: a program holds a row in registers.
WIDEST = 16384


def _fused(hidden: Tensor, norm: nn.LayerNorm | nn.RMSNorm) -> bool:
    return fused(hidden) and hidden.shape[-1] <= WIDEST and norm.eps is not None


def normalize(hidden: Tensor, norm: Norm) -> Tensor:
    """The norm of each token; its weights follow the dtype of the hidden states."""
    if isinstance(norm, nn.Identity):
        return hidden
    if _fused(hidden, norm):
        from quiver.encoder.gpu import triton_norms

        return triton_norms.add_norm(hidden, None, norm)[1]
    weight = norm.weight.to(hidden.dtype)
    if isinstance(norm, nn.RMSNorm):
        return F.rms_norm(hidden, tuple(norm.normalized_shape), weight, norm.eps)
    bias = None if norm.bias is None else norm.bias.to(hidden.dtype)
    return F.layer_norm(hidden, tuple(norm.normalized_shape), weight, bias, norm.eps)


def add_norm(hidden: Tensor, update: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """The residual stream with an update added, and its norm.

    Args:
        hidden: The residual stream, (N, D); without gradients it is overwritten by the sum.
        update: What a sub-layer adds to it, (N, D); None for nothing.
        norm: Over D; nn.Identity for none.

    Returns:
        The sum and its norm, (N, D) each; one tensor where the norm is none.
    """
    if not isinstance(norm, nn.Identity) and _fused(hidden, norm):
        from quiver.encoder.gpu import triton_norms

        return triton_norms.add_norm(hidden, update, norm)
    if update is not None:
        hidden = hidden + update if torch.is_grad_enabled() else hidden.add_(update)
    return hidden, normalize(hidden, norm)
