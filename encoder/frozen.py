"""An encoder made ready for inference on a CPU: its matrices packed once, in float or in 8 bits.

A frozen matrix replaces the plain one instead of standing beside it, so nothing is held twice. Small batches gain most: a
lone query no longer waits for weights to be laid out, or to be widened from half precision. Where blocks run by compiled loops
(`encoder.fused`), which read weights as they lie, a frozen matrix keeps the plain layout.

int8: weights have one scale an output row, activations a shift and a scale a token. One for a whole batch, as dynamic
quantisation usually has it, would make a text's vector depend on its neighbours.

Shapes: N packed tokens, D and O widths of the input and the output.
Source: vector-wise quantisation of LLM.int8(), arXiv:2208.07339, section 3.1; FBGEMM's 8-bit kernels, arXiv:2101.05615.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from encoder.compiled.availability import available
from encoder.config import Precision
from encoder.errors import InputError
from encoder.linear import Linear, Product, Rows, packable, packed_product
from encoder.lora import lora_matrices
from encoder.model import Encoder
from encoder.processor import has_many_registers, native_on_cpu

# Tokens the packed layout is chosen for; it serves every number of them.
TYPICAL_TOKENS = 1024
# FBGEMM adds pairs of 8-bit products in 16 bits; without VNNI two of 8 bits each overflow, so activations have 7.
LEVELS, LEVELS_VNNI = 127, 255
# torch's checks for it; where one is gone the answer is the safe one.
VNNI = ("_is_avx512_supported", "_is_vnni_supported")


def freeze(encoder: Encoder, *, precision: Precision = "float") -> Encoder:
    """Pack an encoder's matrices for inference on a CPU, in place.

    Afterwards it has no gradients, stays where it is and, in float, gives the same hidden states to rounding and the same
    state dict; in int8 the state dict has the quantised weights.

    Args:
        encoder: On the CPU.
        precision: ``float`` for the weights' own values, ``int8`` for a quarter of their memory and products at about twice the speed.

    Returns:
        The same encoder, in evaluation mode.

    Raises:
        InputError: It is not on a CPU, or this build of torch has no 8-bit kernels for this processor.
        ValueError: It is frozen already, has low-rank updates, or the precision is unknown.
    """
    if precision not in FROZEN:
        raise ValueError(f"precision must be one of {', '.join(FROZEN)}, got {precision!r}")
    if encoder.device.type != "cpu":
        raise InputError(f"an encoder is frozen on the CPU, this one is on {encoder.device}; a GPU needs no freezing")
    if encoder.frozen:
        raise ValueError("this encoder is frozen already")
    if lora_matrices(encoder):
        raise ValueError("this encoder has low-rank updates beside its matrices; merge_lora first")
    if precision == "int8" and torch.backends.quantized.engine not in ("x86", "fbgemm"):
        raise InputError(f"int8 needs torch's x86 kernels, this machine has {torch.backends.quantized.engine!r}; use float")
    encoder.eval().requires_grad_(False)
    for module in list(encoder.modules()):
        for name, child in module.named_children():
            if isinstance(child, Linear):
                setattr(module, name, FrozenLinear(child, precision))
    encoder.frozen = precision
    return encoder


class FrozenMatrix(Protocol):
    """One matrix, ready to be multiplied with; copies with ``copy.deepcopy``."""

    def __call__(self, x: Tensor) -> Tensor:
        """(N, D) to (N, O) in the dtype of ``x``."""

    def state(self) -> dict[str, Tensor]:
        """What it goes by in a state dict: tensors with a row for each of its O outputs."""


class PackedMatrix:
    """A weight in a dtype the processor multiplies in, half precision widened once; in oneDNN's layout where no compiled loops read it.

    Args:
        weight: (O, D).
        bias: (O,), or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.dtype = weight.dtype
        compute = self.dtype if native_on_cpu(self.dtype) else torch.float32
        wide = weight.to(compute)
        fuses = compute == torch.float32 and has_many_registers() and available()
        packs = packable(compute) and not fuses
        self.weight = torch.ops.mkldnn._reorder_linear_weight(wide, TYPICAL_TOKENS) if packs else wide
        self.bias = None if bias is None else bias.to(compute)
        self.product = packed_product(self.weight, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """(N, D) to (N, O)."""
        return self.product(x)

    def state(self) -> dict[str, Tensor]:
        """The plain weights under their plain names: a frozen encoder is saved and hashed like any other."""
        weight = self.weight.to_dense() if self.weight.is_mkldnn else self.weight
        plain = {"weight": weight.to(self.dtype)}
        return plain if self.bias is None else plain | {"bias": self.bias.to(self.dtype)}

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedMatrix:
        """Packed tensors cannot be copied, what they were packed from can."""
        state = {name: tensor.clone() for name, tensor in self.state().items()}
        return PackedMatrix(state["weight"], state.get("bias"))


class Int8Matrix:
    """A weight in 8 bits with a scale a row; tokens are quantised as they come, with a shift and a scale each.

    Args:
        weight: (O, D).
        bias: (O,), or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        scales = (weight.float().abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        rows = torch.quantize_per_channel(weight.float(), scales.double(), zeros, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(rows, None)
        # What an input of ones would give: the part of the product that a token's smallest number makes.
        self.ones = rows.dequantize().sum(1)
        self.bias = None if bias is None else bias.float()
        self.levels = LEVELS_VNNI if all(getattr(torch.cpu, name, bool)() for name in VNNI) else LEVELS

    def __call__(self, x: Tensor) -> Tensor:
        """(N, D) to (N, O) in the dtype of ``x``.

        Every token is shifted and scaled to [0, 1], so that one fixed grid serves them all, those of a GELU too, which
        hardly go below zero.
        """
        rows = x.float()
        least = rows.amin(dim=1, keepdim=True)
        span = (rows.amax(dim=1, keepdim=True) - least).clamp_(min=torch.finfo(torch.float32).tiny)
        unit = torch.sub(rows, least).div_(span)
        output: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(unit, 1 / self.levels, 0, self.packed)
        output = output.mul_(span) if self.bias is None else torch.addcmul(self.bias, output, span, out=output)
        return output.addr_(least[:, 0], self.ones).to(x.dtype)

    def state(self) -> dict[str, Tensor]:
        """The quantised weights: they are what the vectors depend on, so they are what is hashed."""
        rows = torch.ops.quantized.linear_unpack(self.packed)[0]
        quantised = {"weight_int8": rows.int_repr(), "weight_scales": rows.q_per_channel_scales().float()}
        return quantised if self.bias is None else quantised | {"bias": self.bias}


FROZEN: dict[str, Callable[[Tensor, Tensor | None], FrozenMatrix]] = {"float": PackedMatrix, "int8": Int8Matrix}


class FrozenLinear(nn.Module):
    """`encoder.linear.Linear` for inference, in the equal parts its layer takes it in.

    Args:
        linear: The plain matrix, on the CPU.
        precision: A key of `FROZEN`.
    """

    def __init__(self, linear: Linear, precision: Precision) -> None:
        super().__init__()
        self.dtype = linear.weight.dtype
        weights = linear.weight.detach().chunk(linear.parts)
        biases = [None] * linear.parts if linear.bias is None else linear.bias.detach().chunk(linear.parts)
        self.matrices = [FROZEN[precision](weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def products(self, x: Tensor) -> Sequence[Product]:
        """The parts as products; see `encoder.linear.Linear.products`."""
        del x  # they are packed already
        return self.matrices

    @property
    def readable(self) -> bool:
        """Whether the parts have kept their plain layout."""
        return all(isinstance(matrix, PackedMatrix) and not matrix.weight.is_mkldnn for matrix in self.matrices)

    def rows(self) -> list[Rows]:
        """The parts as they are; see `encoder.linear.Linear.rows`."""
        return [(matrix.weight, matrix.bias) for matrix in self.matrices if isinstance(matrix, PackedMatrix)]

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) to (N, O)."""
        return torch.cat([matrix(x) for matrix in self.matrices], dim=-1)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        del keep_vars
        states = [matrix.state() for matrix in self.matrices]
        destination.update({f"{prefix}{name}": torch.cat([state[name] for state in states]) for name in states[0]})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenLinear:
        moved = fn(torch.empty(0, dtype=self.dtype))
        if moved.device.type != "cpu" or moved.dtype != self.dtype:
            raise InputError("a frozen encoder keeps its device and dtype; load it anew where it shall run")
        return self
