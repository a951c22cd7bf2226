"""Prepacking: prepare an encoder for inference on a CPU, in float or int8.

Small batches gain most: a lone query no longer waits for weights to be packed or widened from half precision. A prepacked matrix replaces
the plain one. Where compiled kernels read the weights of large batches, it keeps the plain layout; CPUs that multiply few tokens faster in
oneDNN's layout hold that as well, from the first small batch on.

int8: features are rotated (`quiver.encoder.cpu.linear.hadamard`); weights have one scale per output row, activations a shift and a scale
per token. A scale per batch, as in common dynamic quantisation, would make the vector of a text depend on its neighbours. Blocks run by
compiled kernels for any number of tokens; configurations that these do not support use FBGEMM's products of the same integers, in a layout
of their own.

Shapes: N packed tokens, D and O widths of input and output.
Source: vector-wise quantisation of LLM.int8(), arXiv:2208.07339, section 3.1; FBGEMM's 8-bit kernels, arXiv:2101.05615.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from quiver.encoder.config import Precision
from quiver.encoder.cpu.fast_blocks import multiplies_bfloat16, unsupported_reason
from quiver.encoder.cpu.linear import Linear, Product, Rows, compute_dtype, hadamard, hadamard_size, packable, packed_product, split_matrix
from quiver.encoder.cpu.support import SMALLEST_SPAN, has_vnni, kernels_available, native_on_cpu, prefers_plain_weights
from quiver.encoder.errors import InputError
from quiver.encoder.lora import lora_matrices
from quiver.encoder.model import Encoder

if TYPE_CHECKING:
    from quiver.encoder.layers import Block

# Number of tokens that the packed layout is optimised for; it works for any number.
TYPICAL_TOKENS = 1024
# Largest quantised activation. Pairs of 8-bit products are summed in 16 bits, which two full products overflow: without VNNI activations
# have 7 bits.
INT8_LEVELS, INT8_LEVELS_VNNI = 127, 255


def optimize_for_inference(encoder: Encoder, *, precision: Precision = "float") -> Encoder:
    """Prepack an encoder's matrices for inference on a CPU, in place.

    Afterwards it has no gradients and cannot be moved. In float it gives the same hidden states to rounding and the same state dict; in
    int8 the state dict holds the quantised weights.

    Args:
        encoder: An encoder on the CPU.
        precision: ``float`` keeps the values of the weights. ``int8`` takes a quarter of their memory; compiled kernels multiply it at
            twice the speed of float32, or four times where the CPU has an instruction for it, but PyTorch operators are slower with it.

    Returns:
        The same encoder, in evaluation mode.

    Raises:
        InputError: The encoder is not on a CPU, or this build of PyTorch has no 8-bit kernels for this CPU.
        ValueError: The encoder is prepacked already or has low-rank updates, or the precision is unknown.
    """
    if precision not in MATRICES:
        raise ValueError(f"precision must be one of {', '.join(MATRICES)}, got {precision!r}")
    if encoder.device.type != "cpu":
        raise InputError(f"optimize_for_inference is for encoders on a CPU, this one is on {encoder.device}; a GPU needs no prepacking")
    if encoder.prepacked:
        raise ValueError("this encoder is prepacked already")
    if lora_matrices(encoder):
        raise ValueError("this encoder has LoRA matrices; call merge_lora first")
    if precision == "int8" and torch.backends.quantized.engine not in ("x86", "fbgemm"):
        raise InputError(f"int8 needs torch's x86 kernels, but this machine has {torch.backends.quantized.engine!r}; use precision float")
    encoder.eval().requires_grad_(False)
    plain_layout = kernels_will_read(encoder, precision)
    for module in list(encoder.modules()):
        for name, child in module.named_children():
            if isinstance(child, Linear):
                setattr(module, name, PrepackedLinear(child, precision, plain_layout=plain_layout))
    encoder.prepacked = precision
    return encoder


def kernels_will_read(encoder: Encoder, precision: Precision) -> bool:
    """Return whether compiled kernels will read the matrices, as far as that can be told without a batch."""
    layers, config = cast("list[Block]", list(encoder.layers)), encoder.config
    if not kernels_available() or not layers:
        return False
    widened = precision == "int8" or multiplies_bfloat16(layers, config.hidden_size)
    dtype = torch.float32 if widened else compute_dtype(encoder.device, encoder.embeddings.tokens.weight.dtype)
    hidden = torch.empty(0, config.hidden_size, dtype=dtype)
    angles = torch.empty(0, config.rotary_width // 2 if config.positions == "rope" else 0)
    return unsupported_reason(layers, hidden, (angles, angles)) is None


class PrepackedMatrix(Protocol):
    """A matrix ready to multiply; can be copied with ``copy.deepcopy``."""

    levels: int
    """Largest integer that activations are quantised to; 0 if they are not."""

    @property
    def rows(self) -> Rows | None:
        """The matrix in plain layout; None if it is only held in another layout."""

    def __call__(self, x: Tensor) -> Tensor:
        """(N, D) to (N, O) in the dtype of ``x``."""

    def state(self) -> dict[str, Tensor]:
        """Tensors for the state dict, with one row per output."""


class FloatMatrix:
    """A weight in a dtype that the CPU multiplies natively; half precision is widened once.

    Args:
        weight: (O, D).
        bias: (O,), or None.
        plain_layout: Kernels read it in large batches; PyTorch operators multiply with it in small ones.
    """

    levels = 0

    def __init__(self, weight: Tensor, bias: Tensor | None, *, plain_layout: bool) -> None:
        self.dtype = weight.dtype
        compute = self.dtype if native_on_cpu(self.dtype) else torch.float32
        wide = weight.to(compute)
        self.bias = None if bias is None else bias.to(compute)
        self._packs = packable(compute) and not (compute == torch.float32 and prefers_plain_weights())
        self.weight = wide if plain_layout or not self._packs else _packed(wide)
        self.rows = Rows(self.weight, self.bias) if plain_layout else None

    @cached_property
    def _product(self) -> Product:
        packs = self._packs and not self.weight.is_mkldnn
        return packed_product(_packed(self.weight) if packs else self.weight, self.bias)

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
        return FloatMatrix(state["weight"], state.get("bias"), plain_layout=self.rows is not None)


def _packed(weight: Tensor) -> Tensor:
    """Convert a weight to oneDNN's layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_TOKENS)
    return packed


class Int8Matrix:
    """A rotated weight in 8 bits with a scale per row; tokens are rotated and quantised with a shift and a scale each.

    Args:
        weight: (O, D).
        bias: (O,), or None.
        plain_layout: Kernels may read it; PyTorch operators use another layout, made at their first product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, plain_layout: bool) -> None:
        self._plain_layout = plain_layout
        wide = hadamard(weight.float()) / hadamard_size(weight.shape[1])
        self.scales = (wide.abs().amax(dim=1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
        self.weight = (wide / self.scales[:, None]).round_().to(torch.int8)
        # Product with rotated features that are all 1: the part of the result that a token's minimum contributes.
        self.ones = self.weight.sum(1) * self.scales
        self.bias = None if bias is None else bias.float()
        self.levels = INT8_LEVELS_VNNI if has_vnni() else INT8_LEVELS

    @property
    def rows(self) -> Rows | None:
        """The integers in plain layout, with their scales."""
        return Rows(self.weight, self.bias, self.scales, self.ones) if self._plain_layout else None

    @cached_property
    def _packed(self) -> Any:
        """The matrix in FBGEMM's layout, made at the first product that needs it."""
        zeros = torch.zeros(len(self.weight), dtype=torch.int64)
        rows = torch._make_per_channel_quantized_tensor(self.weight, self.scales.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(rows, None)

    def __call__(self, x: Tensor) -> Tensor:
        """(N, D) to (N, O) in the dtype of ``x``.

        Every token is shifted and scaled to [0, 1], so that one fixed grid suits all tokens.
        """
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


MATRICES: dict[str, Callable[..., PrepackedMatrix]] = {"float": FloatMatrix, "int8": Int8Matrix}


class PrepackedLinear(nn.Module):
    """`quiver.encoder.cpu.linear.Linear` for inference only.

    Args:
        linear: The plain matrix, on the CPU.
        precision: A key of `MATRICES`.
        plain_layout: Keep the plain layout, which compiled kernels read.
    """

    def __init__(self, linear: Linear, precision: Precision, *, plain_layout: bool) -> None:
        super().__init__()
        self.dtype = linear.weight.dtype
        self.parts = linear.parts
        bias = None if linear.bias is None else linear.bias.detach()
        self.matrix = MATRICES[precision](linear.weight.detach(), bias, plain_layout=plain_layout)

    @property
    def readable(self) -> bool:
        """Whether the matrix has kept its plain layout."""
        return self.matrix.rows is not None

    @property
    def levels(self) -> int:
        """Largest integer that activations are quantised to; 0 for float matrices."""
        return self.matrix.levels

    def rows(self) -> list[Rows]:
        """Return the parts in their plain layout; see `quiver.encoder.cpu.linear.Linear.rows`."""
        return [] if self.matrix.rows is None else split_matrix(self.matrix.rows, self.parts)

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
