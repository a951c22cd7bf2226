"""Token-wise arithmetic between the matrix products: activations, gates, norms, rotary positions.

On CUDA tensors each operation runs as one Triton kernel (`quiver.encoder.gpu`); elsewhere it runs as PyTorch operators.
`choose_ops` decides which.

Shapes: N packed tokens, D model width, I MLP width, H heads, K head width, R leading dimensions of a head that RoPE rotates (R <= K).
Source: GLU Variants Improve Transformer, arXiv:2002.05202; RoFormer, arXiv:2104.09864, in the half-rotation layout of GPT-NeoX that
ModernBERT uses: dimension i is rotated together with dimension i + R/2.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from quiver.encoder.attention.layout import join_qkv
from quiver.encoder.errors import InputError

logger = logging.getLogger(__name__)

OPS_VARIABLE = "QUIVER_OPS"
"""Environment variable that overrides the choice: torch or triton."""

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def choose_ops(device_type: str, dtype: torch.dtype, override: str | None = None) -> str:
    """Choose torch or triton for tensors of a device type and dtype; the choice is logged once. A wrong override is an InputError."""
    if override not in (None, "torch", "triton"):
        raise InputError(f"{OPS_VARIABLE} must be torch or triton, got {override!r}")
    installed = importlib.util.find_spec("triton") is not None
    if override == "triton" and not installed:
        raise InputError(f"{OPS_VARIABLE} is triton, which is not installed: install it or unset the variable")
    interpreted = override == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    able = installed and dtype in TRITON_DTYPES and (device_type == "cuda" or interpreted)
    name = "triton" if able and override != "torch" else "torch"
    logger.info("token-wise arithmetic on %s in %s: %s", device_type, str(dtype).removeprefix("torch."), name)
    return name


def use_triton(x: Tensor) -> bool:
    """Return whether a Triton kernel processes ``x``."""
    if torch.compiler.is_compiling() or not x.numel():
        return False
    return choose_ops(x.device.type, x.dtype, os.environ.get(OPS_VARIABLE)) == "triton"


ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}

ACTIVATION_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": lambda gradient, x: torch.ops.aten.gelu_backward(gradient, x, approximate="tanh"),
    "silu": torch.ops.aten.silu_backward,
    "relu": lambda gradient, x: torch.ops.aten.threshold_backward(gradient, x, 0),
}
"""For each activation, the gradient of its input from the gradient of its output and the input."""


# Tokens per step on a CPU: the data that several passes share stays in its cache.
GATE_CHUNK = 256


def gated(up: Tensor, activation: str) -> Tensor:
    """Gate (N, 2 I): the activation of the first half times the second half, (N, I)."""
    if use_triton(up):
        from quiver.encoder.gpu import triton_tokens

        return triton_tokens.gated(up, activation)
    if up.device.type == "cpu" and torch.is_grad_enabled() and up.requires_grad and not torch.compiler.is_compiling():
        output: Tensor = _Gated.apply(up, activation)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return output
    activated, gate = up.chunk(2, dim=-1)
    return ACTIVATION_FUNCTIONS[activation](activated) * gate


class _Gated(torch.autograd.Function):
    """The gate, a few tokens at a time, with its gradient in the layout that the preceding product needs."""

    @staticmethod
    def forward(ctx: Any, up: Tensor, activation: str) -> Tensor:
        output = up.new_empty(len(up), up.shape[1] // 2)
        for part, place in zip(torch.split(up, GATE_CHUNK), torch.split(output, GATE_CHUNK), strict=True):
            first, gate = part.chunk(2, dim=-1)
            torch.mul(ACTIVATION_FUNCTIONS[activation](first), gate, out=place)
        ctx.activation = activation
        ctx.save_for_backward(up)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (up,) = ctx.saved_tensors
        of_up = up.new_empty(up.shape)
        for part, upstream, place in zip(*(torch.split(x, GATE_CHUNK) for x in (up, gradient, of_up)), strict=True):
            first, gate = part.chunk(2, dim=-1)
            of_first, of_gate = place.chunk(2, dim=-1)
            torch.mul(upstream, ACTIVATION_FUNCTIONS[ctx.activation](first), out=of_gate)
            of_first.copy_(ACTIVATION_GRADIENTS[ctx.activation](upstream * gate, first))
        return of_up, None


Norm = nn.LayerNorm | nn.RMSNorm | nn.Identity

# Largest D of the Triton kernel: a program holds a row in registers.
MAX_TRITON_WIDTH = 16384


def _use_triton_norm(hidden: Tensor, norm: nn.LayerNorm | nn.RMSNorm) -> bool:
    return use_triton(hidden) and hidden.shape[-1] <= MAX_TRITON_WIDTH and norm.eps is not None


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product reads ``x``: that of autocast where it is on, otherwise that of ``x``."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def normalize(hidden: Tensor, norm: Norm) -> Tensor:
    """Normalize each token; the weights of the norm follow the dtype of the hidden states."""
    if isinstance(norm, nn.Identity):
        return hidden
    if _use_triton_norm(hidden, norm):
        return add_norm(hidden, None, norm)[1]
    weight = norm.weight.to(hidden.dtype)
    if isinstance(norm, nn.RMSNorm):
        return F.rms_norm(hidden, tuple(norm.normalized_shape), weight, norm.eps)
    bias = None if norm.bias is None else norm.bias.to(hidden.dtype)
    return F.layer_norm(hidden, tuple(norm.normalized_shape), weight, bias, norm.eps)


def add_norm(
    hidden: Tensor, update: Tensor | None, norm: Norm, *, dropout: float = 0.0, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Add an update, (N, D) or None, to the residual stream, (N, D), and normalize the sum; returns both.

    Without gradients the stream is overwritten by the sum. The norm's ``dtype`` defaults to that of the sum; under autocast a kernel writes
    the dtype of the product that reads it.
    """
    if not isinstance(norm, nn.Identity) and _use_triton_norm(hidden, norm):
        from quiver.encoder.gpu import triton_norms

        autocast = torch.is_autocast_enabled(hidden.device.type)
        return triton_norms.add_norm(hidden, update, norm, dropout=dropout, dtype=dtype or (product_dtype(hidden) if autocast else None))
    if update is not None:
        update = F.dropout(update, dropout) if dropout else update
        hidden = hidden + update if torch.is_grad_enabled() else hidden.add_(update)
    normed = normalize(hidden, norm)
    return hidden, normed if dtype is None else normed.to(dtype)


def embed(
    ids: Tensor,
    tokens: Tensor,
    norm: Norm,
    *,
    positions: tuple[Tensor, Tensor] | None = None,
    types: Tensor | None = None,
    dtype: torch.dtype,
) -> Tensor:
    """Sum the embedding vectors of each token, (V, D) tables, and normalize the sum: (N,) ids to (N, D).

    ``positions`` are a table and the row of each token; of the table ``types`` every token gets the first row. Under autocast a kernel
    writes the dtype of the product that reads it.
    """
    if ids.numel() and not isinstance(norm, nn.Identity) and _use_triton_norm(tokens, norm):
        from quiver.encoder.gpu import triton_norms

        autocast = torch.is_autocast_enabled(tokens.device.type)
        return triton_norms.embed(ids, tokens, positions, types, norm, dtype=product_dtype(tokens) if autocast else dtype)
    hidden = F.embedding(ids, tokens).to(dtype)
    if types is not None:
        hidden = hidden + types[0].to(dtype)
    if positions is not None:
        table, places = positions
        hidden = hidden + F.embedding(places, table).to(dtype)
    return normalize(hidden, norm)


# Tokens rotated at a time on a CPU: their halves stay in its cache during the five passes over them.
ROTARY_CHUNK = 1024


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Apply rotary positions to queries and keys, with gradients, in float32: at position 8,191 a bfloat16 angle is wrong by full turns.

    ``qkv``, (N, 3, H, K), is fresh from its product and may be rotated in place by cosines and sines (N, R/2). Returns queries, keys and
    values, (N, H, K) each, in the dtype of the input.
    """
    if use_triton(qkv):
        from quiver.encoder.gpu import triton_tokens

        return triton_tokens.rotate(qkv, cos, sin)
    if qkv.device.type == "cpu" and qkv.dtype in (torch.float32, torch.bfloat16) and not torch.compiler.is_compiling():
        turned: tuple[Tensor, Tensor, Tensor] = _RotateInPlace.apply(qkv, cos, sin)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return turned
    return rotate_reference(qkv, cos, sin)


def rotate_reference(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`rotate` by PyTorch operators, for any dtype and device; ``qkv`` is not changed."""
    qk, v = qkv[:, :2], qkv[:, 2]
    width = 2 * cos.shape[-1]
    first, second = qk[..., :width].float().chunk(2, dim=-1)  # (N, 2, H, R/2) each
    cos, sin = cos[:, None, None], sin[:, None, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    q, k = (turned if width == qkv.shape[-1] else torch.cat((turned, qk[..., width:]), dim=-1)).unbind(1)
    return q, k, v


class _RotateInPlace(torch.autograd.Function):
    """`rotate_` with its derivative, the rotation by the negative angle, written into the gradient of the packed product.

    Autograd is not told of the change in place, which is safe: nothing else reads ``qkv``, not even the backward pass of its product.
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
        gradient = join_qkv(grad_q, grad_k, grad_v)
        for turned in gradient.unbind(1)[:2]:
            rotate_(turned, cos, -sin)
        return gradient, None, None


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions in place to queries or keys, (N, H, K), without gradients; the arithmetic is float32 or wider."""
    half = cos.shape[-1]
    for start in range(0, len(heads), ROTARY_CHUNK):
        chunk = heads[start : start + ROTARY_CHUNK]
        wide = chunk.to(torch.promote_types(heads.dtype, torch.float32))
        first, second = wide[..., :half], wide[..., half : 2 * half]
        c, s = cos[start : start + ROTARY_CHUNK, None], sin[start : start + ROTARY_CHUNK, None]
        moved = first * s
        first.mul_(c).addcmul_(second, s, value=-1)
        second.mul_(c).add_(moved)
        if wide is not chunk:
            chunk.copy_(wide)
    return heads
