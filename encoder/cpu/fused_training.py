"""Blocks with gradients on a CPU: forward by the compiled loops of `encoder.cpu.fused`, a step of autograd on either side of attention.

What is kept is the residual stream in front of attention and in front of the MLP, heads, what attention made of them, and what the first
matrix of the MLP gave; norms are computed again, which takes no longer than reading what they gave.

Shapes: N packed tokens, D model width, I MLP width, H heads, K head width, R rotary width.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from quiver.encoder.attention import attend, compiled
from quiver.encoder.cpu.chunked_mlp import CHUNK, mlp_gradients
from quiver.encoder.cpu.fused import Passes, unsupported_reason
from quiver.encoder.cpu.linear import Linear, product_gradients
from quiver.encoder.layers import MLP, Block, RotaryRows, SelfAttention
from quiver.encoder.ops import join_qkv, rotate_
from quiver.encoder.packing import PackedBatch

logger = logging.getLogger(__name__)

MATRICES = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")


def is_supported(layers: Sequence[Block], batch: PackedBatch, hidden: Tensor, rope: RotaryRows | None) -> bool:
    """Whether these blocks can be trained here, and are worth it for a batch; what is found is logged once.

    Args:
        layers: All blocks of an encoder.
        batch: The packed batch.
        hidden: Its hidden states, (N, D).
        rope: Rows of the rotary table of one of the layers.
    """
    if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not compiled.is_supported(batch, hidden):
        return False
    wanted = hidden.requires_grad or any(weight.requires_grad for layer in layers for weight in layer.parameters())
    if not wanted:
        return False
    reason = next(filter(None, map(_obstacle, layers)), None) or unsupported_reason(layers, hidden, rope)
    _note(reason)
    return reason is None


def _obstacle(block: Block) -> str | None:
    """What of a block these loops would pass over in training."""
    if block.norm_position != "pre":
        return f"norms elsewhere than before attention and before the MLP ({block.norm_position})"
    attention, mlp = block.attention, block.mlp
    drops = attention.dropout.p, mlp.inner_dropout.p, mlp.output_dropout.p
    reasons = {
        "dropout": block.training and any(drops),
        "RMSNorm": any(isinstance(norm, nn.RMSNorm) for norm in (block.attention_norm, block.mlp_norm)),
        "weights in half precision": any(weight.dtype != torch.float32 for weight in block.parameters()),
        "modules of other kinds": not _is_plain(block),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _is_plain(block: Block) -> bool:
    """Whether a block's modules are those that it was made of, and nobody listens to what goes through them."""
    kinds = {"": Block, "attention": SelfAttention, "mlp": MLP} | dict.fromkeys(MATRICES, Linear)
    for name, module in block.named_modules():
        hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        if any(hooks) or "forward" in vars(module) or type(module) is not kinds.get(name, type(module)):
            return False
    return True


@cache
def _note(reason: str | None) -> None:
    logger.info("training of blocks on cpu: %s", "compiled forward" if reason is None else f"torch's operators ({reason})")


def advance(block: Block, hidden: Tensor, batch: PackedBatch, rope: RotaryRows | None) -> Tensor:
    """One block with gradients.

    Args:
        block: Of an encoder that `is_supported` has been asked for.
        hidden: The residual stream, (N, D).
        batch: The packed batch.
        rope: Its rows of this layer's rotary table.

    Returns:
        The residual stream behind the block, (N, D).
    """
    attention, mlp = block.attention, block.mlp
    dropout = attention.probability_dropout if block.training else 0.0
    weights = *_norm_weights(block.attention_norm), attention.qkv.weight, attention.qkv.bias
    q, k, v = _Heads.apply(hidden, block, rope, *weights)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    mixed = attend(q, k, v, batch, attention.window, slopes=attention.slopes, dropout=dropout)
    matrices = (each for matrix in (attention.out, mlp.up, mlp.down) for each in (matrix.weight, matrix.bias))
    output: Tensor = _States.apply(hidden, mixed, block, *_norm_weights(block.mlp_norm), *matrices)  # type: ignore[no-untyped-call]
    return output


def _norm_weights(norm: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    return (norm.weight, norm.bias) if isinstance(norm, nn.LayerNorm) else (None, None)


class _Heads(torch.autograd.Function):
    """Norm, product and RoPE: hidden states to queries, keys and values."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, block: Block, rope: RotaryRows | None, *weights: Tensor | None) -> tuple[Tensor, ...]:
        passes = Passes(block, hidden)
        heads = passes.room_for_heads(block, hidden)
        passes.make_heads(block, rope, hidden, heads)
        ctx.norm, ctx.rope = block.attention_norm, rope
        ctx.save_for_backward(hidden, *weights)
        return heads.transpose(1, 2).unbind(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, norm_weight, norm_bias, qkv, _ = ctx.saved_tensors
        of_product = join_qkv(*gradients)
        if ctx.rope is not None:
            cos, sin = ctx.rope
            for turned in of_product.unbind(1)[:2]:
                rotate_(turned, cos, -sin)
        norm = _Norm(ctx.norm, hidden, norm_weight, norm_bias)
        wants_hidden, _, _, *wants_norm, wants_qkv, wants_bias = ctx.needs_input_grad
        wanted = wants_hidden or any(wants_norm), wants_qkv, wants_bias
        of_normed, *of_qkv = product_gradients(norm.output, qkv, of_product.flatten(1), wanted)
        of_hidden, *of_norm = norm.gradients(of_normed, wants_norm)
        return of_hidden, None, None, *of_norm, *of_qkv


class _States(torch.autograd.Function):
    """What is behind attention: its product, the residual sums, norm and MLP."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, mixed: Tensor, block: Block, *weights: Tensor | None) -> Tensor:
        mixed = mixed.contiguous()
        middle, output = torch.empty_like(hidden), torch.empty_like(hidden)
        inner = hidden.new_empty(len(hidden), block.mlp.up.out_features)
        Passes(block, hidden).make_states(block, hidden, mixed, (middle, output), inner)
        ctx.norm, ctx.activation, ctx.gate = block.mlp_norm, block.mlp.activation, block.mlp.gated
        ctx.save_for_backward(mixed, middle, inner, *weights)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        mixed, middle, inner, norm_weight, norm_bias, out, _, up, _, down, _ = ctx.saved_tensors
        wants_hidden, wants_mixed, _, *wants_norm, wants_out, wants_bias = ctx.needs_input_grad[:7]
        norm = _Norm(ctx.norm, middle, norm_weight, norm_bias)
        gradient = gradient.contiguous()
        wanted = True, *ctx.needs_input_grad[7:]
        of_normed, *of_mlp = mlp_gradients(
            gradient, norm.output, inner.split(CHUNK), up, down, ctx.activation, gate=ctx.gate, wanted=wanted
        )
        of_middle, *of_norm = norm.gradients(of_normed, wants_norm)
        of_middle = of_middle.add_(gradient)
        of_mixed, *of_out = product_gradients(mixed.flatten(1), out, of_middle, (wants_mixed, wants_out, wants_bias))
        of_mixed = None if of_mixed is None else of_mixed.view_as(mixed)
        return of_middle if wants_hidden else None, of_mixed, None, *of_norm, *of_out, *of_mlp


class _Norm:
    """A LayerNorm, or none, computed again.

    Args:
        norm: The module.
        x: What it was given, (N, D).
        weight: Its weight then, (D,).
        bias: Its bias then, (D,), or None.
    """

    def __init__(self, norm: nn.Module, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        self.output = self._x = x
        self._weights, self._moments = (weight, bias), None
        if isinstance(norm, nn.LayerNorm):
            self.output, *self._moments = torch.native_layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)

    def gradients(self, gradient: Tensor | None, wanted: Sequence[bool]) -> tuple[Any, Any, Any]:
        """Of what it was given, (N, D) and a tensor of its own, its weight and its bias, from that of its output."""
        if self._moments is None or gradient is None:
            return gradient, None, None
        found: tuple[Any, Any, Any] = torch.ops.aten.native_layer_norm_backward(
            gradient, self._x, self._x.shape[-1:], *self._moments, *self._weights, (True, *wanted)
        )
        return found
