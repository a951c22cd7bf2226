"""An encoder made ready for inference on a CPU: its matrices packed once, in float or in 8 bits.

A frozen matrix replaces the plain one instead of standing beside it, so nothing is held twice. Small batches gain most: a
lone query no longer waits for weights to be laid out, or to be widened from half precision.

int8: weights have one scale an output row, activations a shift and a scale a token. One for a whole batch, as dynamic
quantisation usually has it, would make a text's vector depend on its neighbours.

Shapes: N packed tokens, D and O widths of the input and the output.
Source: dynamic quantisation as in arXiv:2110.02861 (row-wise) with FBGEMM's 8-bit kernels, arXiv:2101.05615.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from encoder.config import Precision
from encoder.errors import InputError
from encoder.linear import Linear, Product, native_on_cpu, packable, packed_product
from encoder.model import Encoder

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
        precision: ``float`` for the weights' own values, ``int8`` for a quarter of the memory and about twice the speed.

    Returns:
        The same encoder, in evaluation mode.

    Raises:
        InputError: It is not on a CPU, or this build of torch has no 8-bit kernels for this processor.
        ValueError: It is frozen already, or the precision is unknown.
    """
    if precision not in FROZEN:
        raise ValueError(f"precision must be one of {', '.join(FROZEN)}, got {precision!r}")
    if encoder.device.type != "cpu":
        raise InputError(f"an encoder is frozen on the CPU, this one is on {encoder.device}; a GPU needs no freezing")
    if encoder.frozen:
        raise ValueError("this encoder is frozen already")
    if precision == "int8" and torch.backends.quantized.engine not in ("x86", "fbgemm"):
        raise InputError(f"int8 needs torch's x86 kernels, this machine has {torch.backends.quantized.engine!r}; use float")
    encoder.eval().requires_grad_(False)
    for module in list(encoder.modules()):
        for name, child in module.named_children():
            if isinstance(child, Linear):
                setattr(module, name, FROZEN[precision](child))
    encoder.frozen = precision
    return encoder


class FrozenLinear(nn.Module):
    """A matrix packed for inference, in the equal parts its layer takes it in.

    Args:
        linear: The plain matrix, on the CPU.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.parts = linear.in_features, linear.out_features, linear.parts
        self.dtype = linear.weight.dtype

    def products(self, x: Tensor) -> list[Product]:
        """The parts as products; see `encoder.linear.Linear.products`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) to (N, O)."""
        outputs = [product(x) for product in self.products(x)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenLinear:
        moved = fn(torch.empty(0, dtype=self.dtype))
        if moved.device.type != "cpu" or moved.dtype != self.dtype:
            raise InputError("a frozen encoder keeps its device and dtype; load it anew where it shall run")
        return self


class PackedLinear(FrozenLinear):
    """Weights in oneDNN's layout, in a dtype the processor multiplies in; half precision is widened once."""

    def __init__(self, linear: Linear) -> None:
        super().__init__(linear)
        compute = self.dtype if native_on_cpu(self.dtype) else torch.float32
        weights = linear.weight.detach().to(compute).chunk(self.parts)
        self.weights = [
            torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_TOKENS) if packable(compute) else weight for weight in weights
        ]
        self.bias = None if linear.bias is None else linear.bias.detach().to(compute)

    def products(self, x: Tensor) -> list[Product]:
        """The parts as products; see `encoder.linear.Linear.products`."""
        biases = [None] * self.parts if self.bias is None else self.bias.chunk(self.parts)
        return [packed_product(weight, bias) for weight, bias in zip(self.weights, biases, strict=True)]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """The plain weights under their plain names: a frozen encoder is saved and hashed like any other."""
        del keep_vars
        destination[f"{prefix}weight"] = torch.cat([weight.to_dense() if weight.is_mkldnn else weight for weight in self.weights]).to(
            self.dtype
        )
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.to(self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        """Packed tensors cannot be copied, what they were packed from can."""
        state: dict[str, Any] = {}
        self._save_to_state_dict(state, "", keep_vars=False)
        plain = Linear(self.in_features, self.out_features, bias=self.bias is not None, dtype=self.dtype, parts=self.parts)
        plain.load_state_dict(copy.deepcopy(state, memo))
        return PackedLinear(plain)


class Int8Linear(FrozenLinear):
    """Weights in 8 bits with a scale a row; tokens are quantised as they come, with a scale each."""

    def __init__(self, linear: Linear) -> None:
        super().__init__(linear)
        self.packed = [_quantized(part) for part in linear.weight.detach().float().chunk(self.parts)]
        # What an input of ones would give: the part of the product that a token's smallest number makes.
        self.ones = [torch.ops.quantized.linear_unpack(packed)[0].dequantize().sum(1) for packed in self.packed]
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.levels = LEVELS_VNNI if all(getattr(torch.cpu, name, bool)() for name in VNNI) else LEVELS

    def products(self, x: Tensor) -> list[Product]:
        """The parts as products; see `encoder.linear.Linear.products`."""
        biases = [None] * self.parts if self.bias is None else self.bias.chunk(self.parts)
        return [partial(self._product, packed, ones, bias) for packed, ones, bias in zip(self.packed, self.ones, biases, strict=True)]

    def _product(self, packed: Any, ones: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        """One part of the product.

        Every token is shifted and scaled to [0, 1], so that one fixed grid serves them all, those of a GELU too, which
        hardly go below zero.
        """
        rows = x.float()
        least = rows.amin(dim=1, keepdim=True)
        span = (rows.amax(dim=1, keepdim=True) - least).clamp_(min=torch.finfo(torch.float32).tiny)
        unit = torch.sub(rows, least).div_(span)
        output: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(unit, 1 / self.levels, 0, packed)
        output = output.mul_(span) if bias is None else torch.addcmul(bias, output, span, out=output)
        return output.addr_(least[:, 0], ones).to(x.dtype)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """The quantised weights: they are what the vectors depend on, so they are what is hashed."""
        del keep_vars
        parts = [torch.ops.quantized.linear_unpack(packed)[0] for packed in self.packed]
        destination[f"{prefix}weight_int8"] = torch.cat([part.int_repr() for part in parts])
        destination[f"{prefix}weight_scales"] = torch.cat([part.q_per_channel_scales().float() for part in parts])
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias


def _quantized(weight: Tensor) -> Any:
    """A matrix in 8 bits, one scale a row, in the kernels' layout."""
    scales = (weight.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    rows = torch.quantize_per_channel(weight, scales.double(), torch.zeros(len(weight), dtype=torch.int64), 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(rows, None)


FROZEN: dict[str, Callable[[Linear], FrozenLinear]] = {"float": PackedLinear, "int8": Int8Linear}
