"""Matrix products on a CPU: oneDNN's packed kernels where they are fastest, and the Hadamard rotation of int8 products.

Weights keep their plain layout; they are packed for one call, once for all its tokens. That costs a few thousandths of a product that is
large enough, needs no second copy of the model in memory and is never stale. Half-precision weights are multiplied in float32 where the
CPU is not faster with them (`quiver.encoder.cpu.support`).

Before int8 quantisation, features are rotated by a Hadamard matrix. Some features of a transformer are many times larger than the others;
the quantisation step of a token follows its largest feature, so the small ones are lost. Each rotated feature is a sum of many, which
spreads outliers over all of them, and a weight whose inputs are rotated the same way gives the same outputs. The matrix is the Kronecker
power of a regular one of order four (equal row sums): what all features have in common stays common, and the token's shift removes it,
whereas Sylvester's matrix would turn it into one outlier. It is symmetric and not scaled: rotating twice multiplies by its order.

The rotation lives in this folder because the kernels contain it too: their cache key is a digest of the folder.

Shapes: N packed tokens, D and O widths of input and output.
Source: QuaRot, arXiv:2404.00456, section 3 (rotated activations and weights).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from quiver.encoder.cpu.support import has_onednn, native_on_cpu, prefers_plain_weights

Product = Callable[[Tensor], Tensor]
"""A matrix ready to multiply: (n, D) to (n, O)."""


class Rows(NamedTuple):
    """A matrix in plain layout, on the CPU."""

    weight: Tensor
    """(O, D), floating point, or int8 with rotated inputs (`hadamard`)."""
    bias: Tensor | None
    """(O,)."""
    scales: Tensor | None = None
    """int8: scale of each row, (O,)."""
    ones: Tensor | None = None
    """int8: product with rotated features that are all 1, without bias, (O,)."""


# Number of tokens from which the faster product pays for packing the weights: 5 % of 10 MFLOP per token against 2 ms per layer.
PACK_TOKENS = 1024


def compute_dtype(device: torch.device, weights: torch.dtype) -> torch.dtype:
    """Return the dtype that PyTorch operators use for weights of a dtype without gradients, and for the hidden states then."""
    return weights if device.type != "cpu" or native_on_cpu(weights) else torch.float32


def is_cpu_inference(x: Tensor) -> bool:
    """Return whether ``x`` is on a CPU and nothing will be differentiated, so that memory can be reused."""
    return (
        x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def packable(dtype: torch.dtype) -> bool:
    """Return whether weights of this dtype can and should have oneDNN's layout here."""
    return has_onednn() and native_on_cpu(dtype) and dtype != torch.float64


class Linear(nn.Linear):
    """nn.Linear whose weights follow the dtype of the input.

    Args:
        in_features: D.
        out_features: O.
        bias: Whether it has a bias.
        dtype: Dtype of the weights.
        parts: Equal parts of the output that compiled kernels compute one after another (queries, keys, values: 3).
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype | None = None, parts: int = 1) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=dtype)
        self.parts = parts

    readable = True
    """Whether `rows` has the matrix in plain layout."""
    levels = 0
    """Inputs are not quantised; see `quiver.encoder.cpu.prepack.PrepackedLinear`."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.weight.dtype

    def rows(self) -> list[Rows]:
        """Return the parts of the matrix in plain layout."""
        return split_matrix(Rows(self.weight.detach(), None if self.bias is None else self.bias.detach()), self.parts)

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) to (N, O)."""
        return multiply(x, self.weight, self.bias)


def split_matrix(rows: Rows, parts: int) -> list[Rows]:
    """Split a matrix into equal parts of its rows."""
    fields = ([None] * parts if field is None else field.chunk(parts) for field in rows)
    return [Rows(*part) for part in zip(*fields, strict=True)]


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply (N, D) by a weight (O, D) in the dtype of ``x``, with gradients."""
    if multiplies_packed(x, weight):
        output: Tensor = _PackedLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return output
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def multiplies_packed(x: Tensor, weight: Tensor) -> bool:
    """Return whether a product with gradients is large enough for oneDNN's layout."""
    if torch.compiler.is_compiling():  # first, because a traced graph must not depend on the number of tokens
        return False
    on_cpu = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    return on_cpu and len(x) >= PACK_TOKENS and has_onednn() and not torch.is_autocast_enabled("cpu")


class _PackedLinear(torch.autograd.Function):
    """A float32 product; its forward pass and the gradient of its input use oneDNN's packed kernels."""

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
        x: The input, (N, D).
        weight: (O, D).
        gradient: Gradient of the product, (N, O).
        wanted: Which gradients to compute.

    Returns:
        Gradients of ``x``, the weight and the bias; None for those not wanted.
    """
    wants_x, wants_weight, wants_bias = wanted
    of_x = packed_product(pack_weight(weight.t(), len(x)), None)(gradient) if wants_x else None
    return of_x, gradient.t() @ x if wants_weight else None, gradient.sum(0) if wants_bias else None


def pack_weight(weight: Tensor, tokens: int) -> Tensor:
    """Return a weight (O, D) in the fastest layout for a number of tokens, oneDNN's or the plain one; without gradients."""
    if prefers_plain_weights():
        return weight.detach()
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), tokens)
    return packed


def packed_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return a product with a weight in oneDNN's layout or in the plain one."""
    if not weight.is_mkldnn:
        return partial(F.linear, weight=weight, bias=bias)

    def product(x: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return output

    return product


HADAMARD_SIZES = (64, 16, 4, 1)
"""Orders of the Hadamard matrix, powers of four: how many neighbouring features are rotated together."""


def hadamard_size(width: int) -> int:
    """Return how many of ``width`` features are rotated together: the first of `HADAMARD_SIZES` that divides it."""
    return next(size for size in HADAMARD_SIZES if width % size == 0)


def hadamard(x: Tensor) -> Tensor:
    """Rotate features (..., D) block by block, in the dtype of ``x``.

    The order of the sums is that of the kernels, and does not depend on the number of tokens.

    Example:
        >>> hadamard(torch.tensor([[8.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])).tolist()
        [[8.0, 8.0, 8.0, -8.0], [2.0, 2.0, 2.0, 2.0]]
    """
    shape, distance = x.shape, 1
    while distance < hadamard_size(shape[-1]):
        first, second, third, fourth = x.reshape(-1, 4, distance).unbind(1)
        outer, inner = (first + second, first - second), (third + fourth, third - fourth)
        x = torch.stack((outer[0] + inner[1], outer[0] - inner[1], outer[1] + inner[0], inner[0] - outer[1]), dim=1)
        distance *= 4
    return x.reshape(shape)
