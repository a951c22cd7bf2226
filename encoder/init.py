"""Initial weights.

Source: ModernBERT, arXiv:2412.13663, appendix A.1 (Megatron initialisation): truncated normal everywhere, the matrices
that write into the residual stream divided by sqrt(2 L).
"""

from __future__ import annotations

import math

import torch
from torch import nn

from quiver.encoder.model import Encoder

# In standard deviations; ModernBERT's init_cutoff_factor.
CUTOFF = 2.0


def init_weights(encoder: Encoder, *, seed: int) -> Encoder:
    """Draw all weights anew, in place.

    Args:
        encoder: Its configuration gives the standard deviation and the number of layers L.
        seed: Of torch's generator on the CPU; equal seeds give equal weights.

    Returns:
        The same encoder.
    """
    generator = torch.Generator().manual_seed(seed)
    std = encoder.config.initializer_range
    residual_std = std / math.sqrt(2 * encoder.config.num_layers)
    for name, module in encoder.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            scale = residual_std if name.endswith(("attention.out", "mlp.down")) else std
            nn.init.trunc_normal_(module.weight, std=scale, a=-CUTOFF * scale, b=CUTOFF * scale, generator=generator)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            nn.init.ones_(module.weight)
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter):
            nn.init.zeros_(bias)
    return encoder
