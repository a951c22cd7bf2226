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
from quiver.encoder.dropout import drop
from quiver.encoder.errors import InputError

logger = logging.getLogger(__name__)

OPS_VARIABLE = "QUIVER_OPS"
"""Environment variable that overrides the choice: torch or triton."""

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def choose_ops(device_type: str, dtype: torch.dtype, override: str | None = None) -> str:
    """Choose the implementation for tensors of a device type and dtype; the choice is logged once.

    Args:
        device_type: cpu, cuda, mps, ...
        dtype: Dtype of the tensors.
        override: torch or triton; None for the best available.

    Raises:
        InputError: The override is unknown, or is triton where that is not installed.

    Example:
        >>> choose_ops("cpu", torch.float32)
        'torch'
    """
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
    """Gate: the activation of the first half times the second half.

    Args:
        up: (N, 2 I), the half to activate first.
        activation: A key of `quiver.encoder.ops.ACTIVATION_FUNCTIONS`.

    Returns:
        (N, I) in the input's dtype.
    """
    if use_triton(up):
        from quiver.encoder.gpu import triton_gates

        return triton_gates.gated(up, activation)
    if up.device.type == "cpu" and torch.is_grad_enabled() and up.requires_grad and not torch.compiler.is_compiling():
        output: Tensor = _Gated.apply(up, activation)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return output
    activated, gate = up.chunk(2, dim=-1)
    return ACTIVATION_FUNCTIONS[activation](activated) * gate


def gated_backward(up: Tensor, gradient: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Recompute `gated` and compute its gradient; not differentiable itself.

    Args:
        up: Input of `gated`, (N, 2 I).
        gradient: Gradient of its output, (N, I).
        activation: The same activation.

    Returns:
        The output, (N, I), and the gradient of ``up``, (N, 2 I).
    """
    first, gate = up.chunk(2, dim=-1)
    activated = ACTIVATION_FUNCTIONS[activation](first)
    of_up = torch.empty_like(up)
    of_first, of_gate = of_up.chunk(2, dim=-1)
    torch.mul(gradient, activated, out=of_gate)
    of_first.copy_(ACTIVATION_GRADIENTS[activation](gradient * gate, first))
    return activated.mul_(gate), of_up


class _Gated(torch.autograd.Function):
    """The gate, a few tokens at a time, with its gradient in the layout that the preceding product needs.

    Plain autograd makes five passes over memory backward and then concatenates the two halves.
    """

    @staticmethod
    def forward(ctx: Any, up: Tensor, activation: str) -> Tensor:
        first, gate = up.chunk(2, dim=-1)
        output = first.new_empty(first.shape)
        for part in _gate_chunks(up):
            torch.mul(ACTIVATION_FUNCTIONS[activation](first[part]), gate[part], out=output[part])
        ctx.activation = activation
        ctx.save_for_backward(up)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (up,) = ctx.saved_tensors
        of_up = up.new_empty(up.shape)
        for part in _gate_chunks(up):
            of_up[part] = gated_backward(up[part], gradient[part], ctx.activation)[1]
        return of_up, None


def _gate_chunks(x: Tensor) -> list[slice]:
    return [slice(start, start + GATE_CHUNK) for start in range(0, len(x), GATE_CHUNK)]


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
    """Add an update to the residual stream and normalize the sum.

    Args:
        hidden: The residual stream, (N, D); without gradients it is overwritten by the sum.
        update: Output of a sub-layer, (N, D); None for nothing.
        norm: Norm over D; nn.Identity for none.
        dropout: Probability with which a number of the update is dropped.
        dtype: Dtype of the norm. Default: that of the sum; under autocast a kernel writes the dtype of the product that reads it.

    Returns:
        The sum and its norm, (N, D) each; the same tensor twice for nn.Identity.
    """
    if not isinstance(norm, nn.Identity) and _use_triton_norm(hidden, norm):
        from quiver.encoder.gpu import triton_norms

        autocast = torch.is_autocast_enabled(hidden.device.type)
        return triton_norms.add_norm(hidden, update, norm, dropout=dropout, dtype=dtype or (product_dtype(hidden) if autocast else None))
    if update is not None:
        update = drop(update, dropout, training=True) if dropout else update
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
    """Sum the embedding vectors of each token, and normalize the sum.

    Args:
        ids: Token ids, (N,) int64.
        tokens: Token embedding, (V, D).
        norm: Norm over D; nn.Identity for none.
        positions: Position embedding, (rows, D), and the row of each token, (N,) int64; None for none.
        types: Token type embedding, (rows, D), of which every token gets the first row; None for none.
        dtype: Dtype of the result; under autocast a kernel writes the dtype of the product that reads it.

    Returns:
        (N, D). The gradients of the tables are added in one order under ``torch.use_deterministic_algorithms``.
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
    """Apply rotary positions to queries and keys, with gradients.

    The arithmetic is float32 for every dtype: at position 8,191 a bfloat16 angle is wrong by full turns.

    Args:
        qkv: Queries, keys and values, (N, 3, H, K), fresh from their product: they may be rotated in place.
        cos: Cosines of the tokens' positions, (N, R/2) float32.
        sin: Sines, likewise.

    Returns:
        Queries, keys and values, (N, H, K) each, in the dtype of the input.
    """
    if use_triton(qkv):
        from quiver.encoder.gpu import triton_rotary

        return triton_rotary.rotate(qkv, cos, sin)
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

    Autograd is not told of the change in place, which is safe: ``qkv`` comes fresh from a product whose backward pass does not read it, and
    is used only here.
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
    """Apply rotary positions in place, without gradients; the arithmetic is float32 or wider.

    Args:
        heads: Queries or keys, (N, H, K); overwritten.
        cos: Cosines of the tokens' positions, (N, R/2) float32.
        sin: Sines, likewise.

    Returns:
        ``heads``.
    """
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
