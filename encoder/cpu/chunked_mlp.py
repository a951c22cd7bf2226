"""The MLP with gradients on a CPU, a thousand tokens at a time.

The widest tensors of a block lie between the two matrices of its MLP. A chunk of them stays in the processor's last cache from the
first product to the last, forward and backward, and one is kept for the backward pass where autograd keeps two or three: the
activation is computed again, which takes no longer than reading it from memory.

Shapes: N packed tokens, D model width, I MLP width, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quiver.encoder.cpu.availability import serves_rows
from quiver.encoder.cpu.linear import Linear, multiplies_packed, pack_weight, packed_product
from quiver.encoder.ops import ACTIVATION_FUNCTIONS, ACTIVATION_GRADIENTS, gated, gated_backward

# Tokens of a chunk. Fewer make the products that add up the weights' gradients slower, more no longer fit the cache: an MLP of 384 and
# 1,536 takes, forward and backward over 7,000 tokens, 924 ms in chunks of 256, 864 of 512, 855 of 1,024, 886 of 2,048, 912 in one piece.
CHUNK = 1024


def runs_in_chunks(x: Tensor, up: object, down: object) -> bool:
    """Whether `mlp_in_chunks` serves: gradients are wanted, in float32 on a CPU, of plain matrices over enough tokens."""
    if not (type(up) is Linear and type(down) is Linear and torch.is_grad_enabled()):
        return False
    weights = (up.weight, up.bias, down.weight, down.bias)
    wanted = x.requires_grad or any(weight is not None and weight.requires_grad for weight in weights)
    return wanted and multiplies_packed(x, up.weight) and multiplies_packed(x, down.weight)


def mlp_in_chunks(x: Tensor, up: Linear, down: Linear, activation: str, *, gate: bool) -> Tensor:
    """down(act(up(x))), its gradients included.

    Args:
        x: (N, D).
        up: To (N, I), or (N, 2 I) where there is a gate.
        down: To (N, D).
        activation: A key of `quiver.encoder.ops.ACTIVATION_FUNCTIONS`.
        gate: The second half of what ``up`` gives is multiplied with the activated first.

    Returns:
        (N, D).
    """
    output: Tensor = _ChunkedMLP.apply(x, up.weight, up.bias, down.weight, down.bias, activation, gate)  # type: ignore[no-untyped-call]
    return output


class _ChunkedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, activation: str, gate: bool
    ) -> Tensor:
        to_inner, to_output = packed_product(pack_weight(up, CHUNK), up_bias), packed_product(pack_weight(down, CHUNK), down_bias)
        inner, outputs = [], []
        for part in torch.split(x, CHUNK):
            inner.append(to_inner(part))  # (C, I) or (C, 2 I)
            activated = gated(inner[-1], activation) if gate else ACTIVATION_FUNCTIONS[activation](inner[-1])
            outputs.append(to_output(activated))
        ctx.activation, ctx.gate = activation, gate
        ctx.save_for_backward(x, up, down, *inner)
        return torch.cat(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, *inner = ctx.saved_tensors
        found = mlp_gradients(gradient.contiguous(), x, inner, up, down, ctx.activation, gate=ctx.gate, wanted=ctx.needs_input_grad[:5])
        return *found, None, None


def mlp_gradients(
    gradient: Tensor,
    x: Tensor,
    inner: Sequence[Tensor],
    up: Tensor,
    down: Tensor,
    activation: str,
    *,
    gate: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of an MLP of plain matrices.

    Args:
        gradient: Of what it gave, (N, D).
        x: What it was given, (N, D).
        inner: What the first matrix gave, in chunks of CHUNK tokens, (C, I) or (C, 2 I).
        up: The first matrix, (I, D) or (2 I, D).
        down: The second, (D, I).
        activation: A key of `quiver.encoder.ops.ACTIVATION_FUNCTIONS`.
        gate: There is a gate.
        wanted: Which of the gradients are.

    Returns:
        Of ``x``, the first matrix, its bias, the second and its bias; None for those that are not wanted.
    """
    wants_x, wants_up, wants_up_bias, wants_down, wants_down_bias = wanted
    of_x = torch.empty_like(x) if wants_x else None
    of_up, of_down = (torch.zeros_like(weight) if wants else None for weight, wants in ((up, wants_up), (down, wants_down)))
    of_up_bias = up.new_zeros(len(up)) if wants_up_bias else None
    from_output, from_inner = (packed_product(pack_weight(weight.t(), CHUNK), None) for weight in (down, up))
    places = range(0, len(x), CHUNK)
    parts, upstreams = (torch.split(rows, CHUNK) for rows in (x, gradient))
    for start, part, upstream, up_to in zip(places, parts, upstreams, inner, strict=True):
        activated, of_inner = _through(up_to, from_output(upstream), activation, gate=gate)
        if of_down is not None:
            of_down.addmm_(upstream.t(), activated)
        if of_up is not None:
            of_up.addmm_(of_inner.t(), part)
        if of_up_bias is not None:
            of_up_bias += of_inner.sum(0)
        if of_x is not None:
            of_x[start : start + CHUNK] = from_inner(of_inner)
    return of_x, of_up, of_up_bias, of_down, gradient.sum(0) if wants_down_bias else None


def _through(inner: Tensor, gradient: Tensor, activation: str, *, gate: bool) -> tuple[Tensor, Tensor]:
    """The activation of a chunk again, and the gradient of what was activated; that of what came out, (C, I), may be overwritten."""
    if inner.is_contiguous() and gradient.is_contiguous() and serves_rows(inner, gradient.shape[1]):
        from quiver.encoder.cpu import token_rows

        of_inner = torch.empty_like(inner)
        token_rows.undo_activation_(inner, gradient, of_inner, activation)
        return gradient, of_inner
    if gate:
        return gated_backward(inner, gradient, activation)
    return ACTIVATION_FUNCTIONS[activation](inner), ACTIVATION_GRADIENTS[activation](gradient, inner)
