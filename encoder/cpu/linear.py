"""Matrices on a CPU: plain ones, and prepacked ones for inference, in float or int8.

`Linear` keeps its weights in the plain layout; for a large batch with gradients they are packed for one call by oneDNN where its kernels
are fastest. `PrepackedLinear` replaces it for inference: where compiled kernels read the weights of large batches it keeps the plain
layout, and CPUs that multiply few tokens faster in oneDNN's hold that as well, from the first small batch on.

In int8, weights have one scale per output row, activations a shift and a scale per token: a scale per batch, as in common dynamic
quantisation, would make the vector of a text depend on its neighbours. Features are rotated by a Hadamard matrix first, which spreads
outliers over all of them: a token's quantisation step follows its largest feature. The matrix is the Kronecker power of a regular one of
order four (equal row sums): what all features have in common stays common, and the token's shift removes it. It is symmetric and not
scaled: rotating twice multiplies by its order.

Shapes: N packed tokens, D and O widths of input and output.
Source: QuaRot, arXiv:2404.00456, section 3 (rotated activations and weights); vector-wise quantisation of LLM.int8(), arXiv:2208.07339,
section 3.1; FBGEMM's 8-bit kernels, arXiv:2101.05615.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from quiver.encoder.config import Precision
from quiver.encoder.cpu.support import SMALLEST_SPAN, has_onednn, has_vnni, native_on_cpu, prefers_plain_weights
from quiver.encoder.errors import InputError

Product = Callable[[Tensor], Tensor]
"""A matrix ready to multiply: (n, D) to (n, O)."""


class PlainMatrix(NamedTuple):
    """A matrix in plain layout, on the CPU."""

    weight: Tensor  # (O, D), floating point, or int8 with rotated inputs (`hadamard`)
    bias: Tensor | None  # (O,)
    scales: Tensor | None = None  # int8: scale of each row, (O,)
    ones: Tensor | None = None  # int8: product with rotated features that are all 1, without bias, (O,)

    def split(self, parts: int) -> list[PlainMatrix]:
        """Split the matrix into equal parts of its rows."""
        fields = ([None] * parts if field is None else field.chunk(parts) for field in self)
        return [PlainMatrix(*part) for part in zip(*fields, strict=True)]


# Number of tokens from which the faster product pays for packing the weights: 5 % of 10 MFLOP per token against 2 ms per layer.
PACK_TOKENS = 1024


def compute_dtype(device: torch.device, weights: torch.dtype) -> torch.dtype:
    """Return the dtype that PyTorch operators use for weights of a dtype without gradients, and for the hidden states then."""
    return weights if device.type != "cpu" or native_on_cpu(weights) else torch.float32


def is_cpu_inference(x: Tensor) -> bool:
    """Return whether ``x`` is on a CPU and nothing will be differentiated, so that memory can be reused."""
    eager = not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling())
    return x.device.type == "cpu" and eager


class Linear(nn.Linear):
    """nn.Linear whose weights follow the dtype of the input; kernels compute its output in equal parts (queries, keys, values: 3)."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype | None = None, parts: int = 1) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=dtype)
        self.parts = parts

    def rows(self) -> list[PlainMatrix]:
        """Return the parts of the matrix in plain layout, without gradients."""
        return PlainMatrix(self.weight.detach(), None if self.bias is None else self.bias.detach()).split(self.parts)

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) to (N, O)."""
        return multiply(x, self.weight, self.bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply (N, D) by a weight (O, D) in the dtype of ``x``, with gradients."""
    # Compiling is checked first, because a traced graph must not depend on the number of tokens.
    is_large = not torch.compiler.is_compiling() and x.device.type == "cpu" and len(x) >= PACK_TOKENS
    is_float32 = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if is_large and is_float32 and has_onednn() and not prefers_plain_weights():
        output: Tensor = _PackedLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return output
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class _PackedLinear(torch.autograd.Function):
    """A float32 product; its forward pass and the gradient of its input use oneDNN's packed kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return packed_product(_pack_weight(weight.detach(), len(x)), bias)(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        gradient = gradient.contiguous()
        of_x = packed_product(_pack_weight(weight.detach().t().contiguous(), len(x)), None)(gradient) if wants_x else None
        return of_x, gradient.t() @ x if wants_weight else None, gradient.sum(0) if wants_bias else None


def _pack_weight(weight: Tensor, tokens: int) -> Tensor:
    """Convert a weight to oneDNN's layout that is fastest for a number of tokens; it works for any number."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, tokens)
    return packed


def packed_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return a product with a weight in oneDNN's layout or in the plain one."""
    if not weight.is_mkldnn:
        return partial(F.linear, weight=weight, bias=bias)
    return lambda x: cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))


HADAMARD_SIZES = (64, 16, 4, 1)
"""Orders of the Hadamard matrix, powers of four: how many neighbouring features are rotated together."""


def hadamard_size(width: int) -> int:
    """Return how many of ``width`` features are rotated together: the first of `HADAMARD_SIZES` that divides it."""
    return next(size for size in HADAMARD_SIZES if width % size == 0)


def hadamard(x: Tensor) -> Tensor:
    """Rotate features (..., D) block by block, in the order of the kernels' sums.

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


# Number of tokens that the layout of prepacked weights is optimised for.
TYPICAL_TOKENS = 1024
# Largest quantised activation. Pairs of 8-bit products are summed in 16 bits, which two full products overflow: without VNNI activations
# have 7 bits.
INT8_LEVELS, INT8_LEVELS_VNNI = 127, 255


class FloatMatrix:
    """A weight (O, D) in a dtype that the CPU multiplies natively, half precision widened once, and its bias (O,).

    Kernels compute its rows in equal ``parts`` and read the ``plain_layout`` in large batches; PyTorch operators multiply in small ones.
    ``rows`` are the parts in plain layout; empty if the weight is only held in another layout.
    """

    levels = 0  # largest integer that activations are quantised to; 0 for none

    def __init__(self, weight: Tensor, bias: Tensor | None, *, parts: int, plain_layout: bool) -> None:
        self.dtype = weight.dtype
        compute = self.dtype if native_on_cpu(self.dtype) else torch.float32
        wide = weight.to(compute)
        self.bias = None if bias is None else bias.to(compute)
        plain_is_faster = compute == torch.float64 or (compute == torch.float32 and prefers_plain_weights())
        self._packs = has_onednn() and not plain_is_faster
        self.weight = wide if plain_layout or not self._packs else _pack_weight(wide, TYPICAL_TOKENS)
        self.rows = PlainMatrix(self.weight, self.bias).split(parts) if plain_layout else []
        self._parts = parts

    @cached_property
    def _product(self) -> Product:
        packs = self._packs and not self.weight.is_mkldnn
        return packed_product(_pack_weight(self.weight, TYPICAL_TOKENS) if packs else self.weight, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """(N, D) to (N, O)."""
        return self._product(x)

    def state(self) -> dict[str, Tensor]:
        """Return the weights under their plain names: a prepacked encoder is saved and hashed like any other."""
        weight = self.weight.to_dense() if self.weight.is_mkldnn else self.weight
        plain = {"weight": weight.to(self.dtype)}
        return plain if self.bias is None else plain | {"bias": self.bias.to(self.dtype)}

    def __deepcopy__(self, memo: dict[int, Any]) -> FloatMatrix:
        """Copy the plain weights, because packed tensors cannot be copied."""
        state = {name: tensor.clone() for name, tensor in self.state().items()}
        return FloatMatrix(state["weight"], state.get("bias"), parts=self._parts, plain_layout=bool(self.rows))


class Int8Matrix:
    """A rotated weight in 8 bits with a scale per row; tokens are rotated and quantised too. Arguments are those of `FloatMatrix`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, parts: int = 1, plain_layout: bool) -> None:
        wide = hadamard(weight.float()) / hadamard_size(weight.shape[1])
        self.scales = (wide.abs().amax(dim=1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
        self.weight = (wide / self.scales[:, None]).round_().to(torch.int8)
        # Product with rotated features that are all 1: the part of the result that a token's minimum contributes.
        self.ones = self.weight.sum(1) * self.scales
        self.bias = None if bias is None else bias.float()
        self.levels = INT8_LEVELS_VNNI if has_vnni() else INT8_LEVELS
        # Split once: for a lone query seven views per matrix and layer take as long as a twentieth of the products.
        self.rows = PlainMatrix(self.weight, self.bias, self.scales, self.ones).split(parts) if plain_layout else []

    @cached_property
    def _packed(self) -> Any:
        """The matrix in FBGEMM's layout, made at the first product that needs it."""
        zeros = torch.zeros(len(self.weight), dtype=torch.int64)
        rows = torch._make_per_channel_quantized_tensor(self.weight, self.scales.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(rows, None)

    def __call__(self, x: Tensor) -> Tensor:
        """(N, D) to (N, O) in the dtype of ``x``; every token is scaled to [0, 1], so that one fixed grid suits all of them."""
        rows = hadamard(x.float())
        least = rows.amin(dim=1, keepdim=True)
        span = (rows.amax(dim=1, keepdim=True) - least).clamp_(min=SMALLEST_SPAN)
        unit = torch.sub(rows, least).div_(span)
        output: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(unit, 1 / self.levels, 0, self._packed)
        output = output.mul_(span) if self.bias is None else torch.addcmul(self.bias, output, span, out=output)
        return output.addr_(least[:, 0], self.ones).to(x.dtype)

    def state(self) -> dict[str, Tensor]:
        """Return the quantised weights, which determine the vectors and so are hashed."""
        quantised = {"weight_int8": self.weight, "weight_scales": self.scales}
        return quantised if self.bias is None else quantised | {"bias": self.bias}


MATRICES: dict[str, Callable[..., FloatMatrix | Int8Matrix]] = {"float": FloatMatrix, "int8": Int8Matrix}


class PrepackedLinear(nn.Module):
    """`Linear` for inference only, in a precision of `MATRICES`; ``plain_layout`` keeps the layout that compiled kernels read."""

    def __init__(self, linear: Linear, precision: Precision, *, plain_layout: bool) -> None:
        super().__init__()
        self.dtype = linear.weight.dtype
        bias = None if linear.bias is None else linear.bias.detach()
        self.matrix = MATRICES[precision](linear.weight.detach(), bias, parts=linear.parts, plain_layout=plain_layout)

    def rows(self) -> list[PlainMatrix]:
        """Return the parts in their plain layout; see `Linear.rows`."""
        return self.matrix.rows

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) to (N, O)."""
        return self.matrix(x)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        del keep_vars
        destination.update({f"{prefix}{name}": tensor for name, tensor in self.matrix.state().items()})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PrepackedLinear:
        moved = fn(torch.empty(0, dtype=self.dtype))
        if moved.device.type != "cpu" or moved.dtype != self.dtype:
            raise InputError("a prepacked encoder cannot be moved to another device or dtype; load the checkpoint again")
        return self


def int8_levels(matrix: nn.Module) -> int:
    """Return the largest integer to which a matrix quantises its inputs; 0 if it does not."""
    return matrix.matrix.levels if isinstance(matrix, PrepackedLinear) else 0


def weight_dtype(matrix: nn.Module) -> torch.dtype:
    """Return the dtype of a matrix's weights; for a prepacked one, that of the weights it was made from."""
    dtype: torch.dtype = matrix.dtype if isinstance(matrix, PrepackedLinear) else cast(Tensor, matrix.weight).dtype
    return dtype
