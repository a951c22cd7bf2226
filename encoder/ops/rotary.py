"""Rotary positions on packed queries and keys.

Shapes: N packed tokens, H heads, K head width, R leading dimensions of a head that are turned (R <= K).
Source: RoFormer, arXiv:2104.09864, in the half-rotation layout of GPT-NeoX that ModernBERT uses: dimension i is
turned with dimension i + R/2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quiver.encoder.cpu.availability import serves_rows
from quiver.encoder.ops.choice import fused
from quiver.encoder.ops.heads import joined

# Tokens turned at a time on a CPU: their halves stay in its cache between the five passes over them.
CHUNK = 1024


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn queries and keys to their positions, with gradients.

    The arithmetic is float32 whatever the input: at position 8,191 a bfloat16 angle is off by whole turns.

    Args:
        qkv: Queries, keys and values, (N, 3, H, K), fresh from their product: they may be turned where they lie.
        cos: Cosines of the tokens' positions, (N, R/2) float32.
        sin: Sines, likewise.

    Returns:
        Queries, keys and values, (N, H, K) each, in the input's dtype.
    """
    if fused(qkv):
        from quiver.encoder.gpu import triton_rotary

        return triton_rotary.rotate(qkv, cos, sin)
    if qkv.device.type == "cpu" and qkv.dtype in (torch.float32, torch.bfloat16) and not torch.compiler.is_compiling():
        turned: tuple[Tensor, Tensor, Tensor] = _RotateInPlace.apply(qkv, cos, sin)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return turned
    return rotate_reference(qkv, cos, sin)


def rotate_reference(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`rotate` as torch's own operators, in any dtype on any device; ``qkv`` stays as it is."""
    qk, v = qkv[:, :2], qkv[:, 2]
    width = 2 * cos.shape[-1]
    first, second = qk[..., :width].float().chunk(2, dim=-1)  # (N, 2, H, R/2) each
    cos, sin = cos[:, None, None], sin[:, None, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    q, k = (turned if width == qkv.shape[-1] else torch.cat((turned, qk[..., width:]), dim=-1)).unbind(1)
    return q, k, v


class _RotateInPlace(torch.autograd.Function):
    """`rotate_` with its derivative, the turn by the negative angle, written into the gradient of the packed product.

    Autograd does not hear of the change in place: ``qkv`` comes fresh from a product, whose backward pass does not look
    at it, and is used here only.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k, v = qkv.unbind(1)
        return rotate_(q, cos, sin), rotate_(k, cos, sin), v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        gradient = joined(grad_q, grad_k, grad_v)
        for turned in gradient.unbind(1)[:2]:
            rotate_(turned, cos, -sin)
        return gradient, None, None


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor, *, batch_invariant: bool = False) -> Tensor:
    """Turn queries or keys in place, without gradients; the arithmetic is float32 or wider.

    Args:
        heads: Queries or keys, (N, H, K); overwritten.
        cos: Cosines of the tokens' positions, (N, R/2) float32.
        sin: Sines, likewise.
        batch_invariant: See `encoder.PackedBatch`.

    Returns:
        ``heads``.
    """
    half = cos.shape[-1]
    if cos.dtype == torch.float32 and serves_rows(heads, half, (torch.float32, torch.bfloat16), batch_invariant=batch_invariant):
        from quiver.encoder.cpu import token_rows

        token_rows.rotate_(heads, cos.contiguous(), sin.contiguous())
        return heads
    for start in range(0, len(heads), CHUNK):
        chunk = heads[start : start + CHUNK]
        wide = chunk.to(torch.promote_types(heads.dtype, torch.float32))
        first, second = wide[..., :half], wide[..., half : 2 * half]
        c, s = cos[start : start + CHUNK, None], sin[start : start + CHUNK, None]
        moved = first * s
        first.mul_(c).addcmul_(second, s, value=-1)
        second.mul_(c).add_(moved)
        if wide is not chunk:
            chunk.copy_(wide)
    return heads
