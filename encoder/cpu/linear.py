"""A matrix product that takes oneDNN's packed kernels on a CPU where they are the fastest.

Weights keep their plain layout; they are packed for the length of one call, once for all tokens of it. That costs a few
thousandths of the product where it is worth it, needs no second copy of the model in memory, and can never be stale.
Half-precision weights are multiplied in float32 where the processor is not faster with them (`quiver.encoder.cpu.processor`).

Shapes: N packed tokens, D and O widths of the input and the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from quiver.encoder.cpu.processor import has_onednn, multiplies_best_plain, native_on_cpu

Product = Callable[[Tensor], Tensor]
"""(n, D) to (n, O): a matrix that is ready to be multiplied with."""


class Rows(NamedTuple):
    """A matrix as it is, on the CPU."""

    weight: Tensor
    """(O, D), in floating point or, rotated (`quiver.encoder.cpu.hadamard`), in 8-bit integers."""
    bias: Tensor | None
    """(O,)."""
    scales: Tensor | None = None
    """What integers are multiplied by, (O,)."""
    ones: Tensor | None = None
    """Of integers, what rotated features that are all 1 give, without the bias, (O,)."""


# From so many tokens on the faster product pays for packing the weights: 5 % of 10 MFLOP a token against 2 ms a layer.
PACK_TOKENS = 1024


def compute_dtype(device: torch.device, weights: torch.dtype) -> torch.dtype:
    """The dtype in which weights of this one are multiplied by torch's operators without gradients, and which hidden states have there."""
    return weights if device.type != "cpu" or native_on_cpu(weights) else torch.float32


def lean(x: Tensor) -> bool:
    """Whether ``x`` is on a CPU and nothing will be differentiated: memory may be reused and weights packed."""
    return (
        x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def packable(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype can and should be laid out for oneDNN here."""
    return has_onednn() and native_on_cpu(dtype) and dtype != torch.float64


class Linear(nn.Linear):
    """nn.Linear whose weights follow the dtype of what they are multiplied with.

    Args:
        in_features: D.
        out_features: O.
        bias: It has one.
        dtype: Of the weights.
        parts: Equal parts of the output that its layer takes one by one on a CPU (queries, keys, values: 3).
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype | None = None, parts: int = 1) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=dtype)
        self.parts = parts

    def products(self, x: Tensor) -> Sequence[Product]:
        """The matrix's parts, ready for ``x`` or pieces of it.

        Args:
            x: (N, D), what will be multiplied; without gradients.

        Returns:
            One product a part, each to (n, O / parts).
        """
        return ready_products(x, self.weight, self.bias, self.parts)

    readable = True
    """Whether `rows` can be asked for."""
    levels = 0
    """Of what is multiplied no integers are made; see `quiver.encoder.cpu.frozen.FrozenLinear`."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.weight.dtype

    def rows(self) -> list[Rows]:
        """The matrix's parts as they are, a row of numbers for each output."""
        return in_parts(self.weight.detach(), self.bias, self.parts)

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) to (N, O)."""
        return multiply(x, self.weight, self.bias)


def in_parts(weight: Tensor, bias: Tensor | None, parts: int) -> list[Rows]:
    """Equal parts of a matrix's rows, without gradients."""
    biases = [None] * parts if bias is None else bias.detach().chunk(parts)
    return [Rows(*part) for part in zip(weight.chunk(parts), biases, strict=True)]


def ready_products(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> list[Product]:
    """A matrix in equal parts of its rows, ready for ``x`` or pieces of it.

    Args:
        x: (N, D), what will be multiplied; without gradients.
        weight: (O, D).
        bias: (O,), or None.
        parts: Number of parts.

    Returns:
        One product a part, each to (n, O / parts).
    """
    rows = in_parts(weight.to(x.dtype), None if bias is None else bias.to(x.dtype), parts)
    if len(x) < PACK_TOKENS or not packable(x.dtype):
        return [partial(F.linear, weight=part.weight, bias=part.bias) for part in rows]
    return [packed_product(pack_weight(part.weight, len(x)), part.bias) for part in rows]


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(N, D) to (N, O) by a weight (O, D) in the dtype of ``x``, with gradients where they are wanted."""
    if multiplies_packed(x, weight):
        output: Tensor = _PackedLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return output
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def multiplies_packed(x: Tensor, weight: Tensor) -> bool:
    """Whether a product that may be differentiated is worth oneDNN's layout."""
    if torch.compiler.is_compiling():  # asked first: a graph of any number of tokens must not ask for it
        return False
    on_cpu = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    return on_cpu and len(x) >= PACK_TOKENS and has_onednn() and not torch.is_autocast_enabled("cpu")


class _PackedLinear(torch.autograd.Function):
    """A float32 product whose forward pass and whose gradient of the input take oneDNN's packed kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return packed_product(pack_weight(weight, len(x)), bias)(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return product_gradients(x, weight, gradient.contiguous(), ctx.needs_input_grad)


def product_gradients(
    x: Tensor, weight: Tensor, gradient: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a float32 product on a CPU.

    Args:
        x: (N, D), what was multiplied.
        weight: (O, D).
        gradient: Of the product, (N, O).
        wanted: Which of them are.

    Returns:
        Of ``x``, the weight and the bias; None for those that are not wanted.
    """
    wants_x, wants_weight, wants_bias = wanted
    of_x = packed_product(pack_weight(weight.t(), len(x)), None)(gradient) if wants_x else None
    return of_x, gradient.t() @ x if wants_weight else None, gradient.sum(0) if wants_bias else None


def pack_weight(weight: Tensor, tokens: int) -> Tensor:
    """A weight (O, D) in the layout that so many tokens are best multiplied with, oneDNN's or the plain one; without gradients."""
    if multiplies_best_plain():
        return weight.detach()
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), tokens)
    return packed


def packed_product(weight: Tensor, bias: Tensor | None) -> Product:
    """A product with a weight in oneDNN's own layout, or in the plain one."""
    if not weight.is_mkldnn:
        return partial(F.linear, weight=weight, bias=bias)

    def product(x: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return output

    return product
