"""Rotary positions on packed queries and keys.

Shapes: N packed tokens, H heads, K head width, R leading dimensions of a head that are turned (R <= K).
Source: RoFormer, arXiv:2104.09864, in the half-rotation layout of GPT-NeoX that ModernBERT uses: dimension i is
turned with dimension i + R/2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from encoder.ops.choice import fused

# Tokens turned at a time on a CPU: their halves stay in its cache between the five passes over them.
CHUNK = 1024


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn queries and keys to their positions, with gradients.

    The arithmetic is float32 whatever the input: at position 8,191 a bfloat16 angle is off by whole turns.

    Args:
        qkv: Queries, keys and values, (N, 3, H, K), fresh from their product: a Triton kernel turns them where they lie.
        cos: Cosines of the tokens' positions, (N, R/2) float32.
        sin: Sines, likewise.

    Returns:
        Queries, keys and values, (N, H, K) each, in the input's dtype.
    """
    if fused(qkv):
        from encoder.ops import triton_rotary

        return triton_rotary.rotate(qkv, cos, sin)
    qk, v = qkv[:, :2], qkv[:, 2]
    width = 2 * cos.shape[-1]
    first, second = qk[..., :width].float().chunk(2, dim=-1)  # (N, 2, H, R/2) each
    cos, sin = cos[:, None, None], sin[:, None, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    q, k = (turned if width == qkv.shape[-1] else torch.cat((turned, qk[..., width:]), dim=-1)).unbind(1)
    return q, k, v


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn float32 queries or keys in place, without gradients.

    Args:
        heads: Queries or keys, (N, H, K) float32; overwritten.
        cos: Cosines of the tokens' positions, (N, R/2) float32.
        sin: Sines, likewise.

    Returns:
        ``heads``.
    """
    half = cos.shape[-1]
    for start in range(0, len(heads), CHUNK):
        chunk = heads[start : start + CHUNK]
        first, second = chunk[..., :half], chunk[..., half : 2 * half]
        c, s = cos[start : start + CHUNK, None], sin[start : start + CHUNK, None]
        moved = first * s
        first.mul_(c).addcmul_(second, s, value=-1)
        second.mul_(c).add_(moved)
    return heads
