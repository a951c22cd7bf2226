"""Blocks on a CPU in inference, by compiled kernels: two passes over the tokens around attention.

The first pass computes queries, keys and values from hidden states, the second the next hidden states from the attention output. Matrices
are float32, bfloat16 where the CPU has AMX, or int8 for a prepacked encoder; the residual stream is always float32. For what the kernels do
not support `run_blocks` returns None; then `quiver.encoder.layers.Block.forward` runs the blocks.

`optimize_for_inference` prepacks the matrices of an encoder. A lone query gains most: it no longer waits for weights to be packed or
widened from half precision.

Shapes: N packed tokens, D model width, I MLP width, H heads, K head width, R rotary width.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from quiver.encoder.attention import attend
from quiver.encoder.attention.dispatch import VARIABLE
from quiver.encoder.cpu.linear import MATRICES, Linear, PrepackedLinear, compute_dtype, int8_levels, is_cpu_inference, weight_dtype
from quiver.encoder.cpu.support import WIDTH_MULTIPLE, amx_kernels_run, int8_kernels_run, is_plain, kernels_available, supports_batch
from quiver.encoder.errors import InputError
from quiver.encoder.layers import Block, RotaryRows, any_hooked
from quiver.encoder.packing import PackedBatch

if TYPE_CHECKING:
    from quiver.encoder.config import Precision
    from quiver.encoder.layers import Norm
    from quiver.encoder.model import Encoder

logger = logging.getLogger(__name__)


def run_blocks(layers: Sequence[Block], batch: PackedBatch, hidden: Tensor, ropes: Sequence[RotaryRows | None]) -> Tensor | None:
    """Run an encoder's blocks in inference where the kernels are faster; a block with a forward hook inside runs by its own ``forward``.

    The hidden states of the embeddings, (N, D), are overwritten by the residual stream after the last block; None if `Block.forward` has to
    run the blocks. ``ropes`` are the rows of each layer's rotary table.
    """
    if not is_cpu_inference(hidden) or any(layer.training for layer in layers):
        return None
    if not inference_is_supported(layers, batch, hidden, ropes[-1]):
        return None
    passes = _Passes(layers, hidden)
    q, k, v = passes.heads.transpose(1, 2)  # (N, H, K) each
    for layer, rope in zip(layers, ropes, strict=True):
        if any_hooked(layer.modules()):
            stream, update = layer(hidden, None, batch, rope)
            hidden.copy_(stream if update is None else stream + update)
            continue
        passes.make_heads(layer, rope)
        mixed = attend(q, k, v, batch, layer.attention.window, slopes=layer.attention.slopes).contiguous()
        passes.make_states(layer, mixed)
    return hidden


def hidden_dtype(layers: Sequence[Block], batch: PackedBatch, dtype: torch.dtype, width: int, rope: RotaryRows | None) -> torch.dtype:
    """Return the dtype in which embeddings of a dtype and a width D should hand hidden states to the blocks on a CPU.

    Without gradients, half precision is computed in float32 where the CPU is not faster with it; and kernels that multiply bfloat16
    matrices keep the residual stream in float32.
    """
    if torch.is_grad_enabled():
        return dtype
    dtype = compute_dtype(torch.device("cpu"), dtype)
    wide = torch.empty(0, width, dtype=torch.float32)
    is_candidate = dtype == torch.bfloat16 and not any(layer.training for layer in layers) and is_cpu_inference(wide)
    if is_candidate and supports_batch(batch, wide) and multiplies_bfloat16(layers, width):
        return dtype if unsupported_reason(layers, wide, rope) else torch.float32
    return dtype


def inference_is_supported(layers: Sequence[Block], batch: PackedBatch, hidden: Tensor, rope: RotaryRows | None) -> bool:
    """Return whether the kernels support these blocks and hidden states, (N, D), and are worth their overhead; logs the answer once."""
    if not supports_batch(batch, hidden):
        return False
    reason = unsupported_reason(layers, hidden, rope)
    _log_choice(reason)
    return reason is None


@cache
def _log_choice(reason: str | None) -> None:
    logger.info("encoder blocks on the CPU run in: %s", "compiled" if reason is None else f"torch's operators ({reason})")


def unsupported_reason(layers: Sequence[Block], hidden: Tensor, rope: RotaryRows | None) -> str | None:
    """Say in a few words why the kernels cannot run these blocks; None if they can.

    If the environment variable QUIVER_ATTENTION names another attention backend than compiled, blocks run by PyTorch operators too.
    """
    width, heads = hidden.shape[1], layers[0].attention.heads
    widths = (width, width // heads, layers[0].mlp.width, 0 if rope is None else rope[0].shape[1])
    levels = int8_levels(layers[0].attention.qkv)
    override = os.environ.get(VARIABLE)
    reasons = {
        f"8-bit integers up to {levels}": levels > 0 and not int8_kernels_run(levels),
        f"{VARIABLE}={override}": override is not None and override != "compiled",
        f"dtype {str(hidden.dtype).removeprefix('torch.')}": hidden.dtype != torch.float32,
        "hidden states with gaps": not hidden.is_contiguous(),
        "norms before attention and MLP side by side (parallel)": any(layer.norm_position == "parallel" for layer in layers),
        f"widths {widths}, not all multiples of {WIDTH_MULTIPLE}": any(each % WIDTH_MULTIPLE for each in widths),
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    matrices = (matrix for layer in layers for matrix in _matrices(layer))
    if reason is None and any(isinstance(matrix, PrepackedLinear) and not matrix.matrix.rows for matrix in matrices):
        return "packed matrices"
    if reason is None and not all(map(is_plain, (weight for layer in layers for weight in layer.parameters()))):
        return "weights elsewhere"
    return reason


def multiplies_bfloat16(layers: Sequence[Block], width: int) -> bool:
    """Return whether the kernels multiply bfloat16 matrices and attend to bfloat16 heads: for weights of that dtype, on a CPU with AMX."""
    attention, mlp = layers[0].attention, layers[0].mlp
    odd = any(each % (2 * WIDTH_MULTIPLE) for each in (width, width // attention.heads, mlp.width))
    if odd or int8_levels(attention.qkv) or attention.slopes is not None:
        return False
    # Checked last, because it loads the kernels.
    return all(weight_dtype(matrix) == torch.bfloat16 for layer in layers for matrix in _matrices(layer)) and amx_kernels_run()


def _matrices(block: Block) -> tuple[Linear, Linear, Linear, Linear]:
    return block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down


class _Passes:
    """The two passes around attention, for the blocks of one encoder over one batch; hidden states, (N, D), are changed in place."""

    def __init__(self, layers: Sequence[Block], hidden: Tensor) -> None:
        from quiver.encoder.cpu import block_kernels, tiles  # `supports_batch` has loaded numba

        self.names, self.activations, self.hidden = block_kernels, tiles.ACTIVATIONS, hidden
        tokens, width = hidden.shape
        heads, inner, levels = layers[0].attention.heads, layers[0].mlp.width, int8_levels(layers[0].attention.qkv)
        half = multiplies_bfloat16(layers, width)
        self.matrices = torch.bfloat16 if half else torch.int8 if levels else torch.float32
        # Queries, keys and values, (3, H, N, K): attention reads the tokens of one head after another.
        self.heads = hidden.new_empty(3, heads, tokens, width // heads, dtype=torch.bfloat16 if half else torch.float32)
        self.call = block_kernels.BlockArguments(tokens, width, inner, heads, torch.get_num_threads(), self.matrices)
        self.call.put(block_kernels.LEVELS, levels)
        self.call.put(block_kernels.HIDDEN, hidden.data_ptr())
        self.zeros = hidden.new_zeros(max(width, 2 * inner))

    def make_heads(self, block: Block, rope: RotaryRows | None) -> None:
        """Compute queries, keys and values from hidden states."""
        names, call, post = self.names, self.call, block.norm_position == "post"
        kept = self._put_matrix(names.QKV, block.attention.qkv)  # alive until the kernel has run
        kept += self._put_norm(names.ATTENTION_NORM, nn.Identity() if post else block.attention_norm)
        angles = [x.contiguous() for x in rope or ()]
        call.put(names.COSINES, *((angles[0].data_ptr(), angles[1].data_ptr(), angles[0].shape[1]) if angles else (0, 0, 0)))
        strides = (self.heads.stride(each) * self.heads.itemsize // self.hidden.itemsize for each in (2, 1))
        call.put(names.Q, *(part.data_ptr() for part in self.heads), *strides)
        call.put(names.MIXED, 0)
        call.run()

    def make_states(self, block: Block, mixed: Tensor) -> None:
        """Compute the residual stream after the block from the attention output, (N, H, K)."""
        names, call = self.names, self.call
        kept: list[Tensor] = []
        for place, matrix in zip((names.OUT, names.UP, names.DOWN), _matrices(block)[1:], strict=True):
            kept += self._put_matrix(place, matrix)
        kept += self._put_norm(names.ATTENTION_NORM, block.attention_norm) + self._put_norm(names.MLP_NORM, block.mlp_norm)
        post = int(block.norm_position == "post")
        call.put(names.MIXED, mixed.data_ptr(), self.activations[block.mlp.activation], int(block.mlp.gated), post)
        call.run()

    def _put_matrix(self, place: int, matrix: Linear) -> list[Tensor]:
        """Pass the addresses of a matrix; returns the tensors that must stay alive until the kernel has run."""
        kept = []
        for part, rows in enumerate(matrix.rows()):
            weight = rows.weight.to(self.matrices)
            numbers = [weight, *(self.zeros if each is None else each.float() for each in rows[1:])]
            numbers = [each.contiguous() for each in numbers]
            self.call.put(place + self.names.MATRIX * part, *(each.data_ptr() for each in numbers))
            kept += numbers
        return kept

    def _put_norm(self, place: int, norm: Norm) -> list[Tensor]:
        """Pass the addresses of a norm; returns the tensors that must stay alive until the kernel has run."""
        if isinstance(norm, nn.Identity):
            self.call.put(place, 0)
            return []
        weight = norm.weight.float().contiguous()
        bias = getattr(norm, "bias", None)
        bias = self.zeros if bias is None else bias.float().contiguous()
        self.call.put(place, weight.data_ptr(), bias.data_ptr(), int(isinstance(norm, nn.LayerNorm)))
        self.call.numbers.view("float64")[place + 3] = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        return [weight, bias]


def optimize_for_inference(encoder: Encoder, *, precision: Precision = "float") -> Encoder:
    """Prepack an encoder's matrices for inference on a CPU, in place.

    Afterwards it has no gradients and cannot be moved. In float it gives the same hidden states to rounding and the same state dict; in
    int8 the state dict holds the quantised weights.

    ``float`` keeps the values of the weights. ``int8`` takes a quarter of their memory; compiled kernels multiply it at twice the speed of
    float32, or four times where the CPU has an instruction for it, but PyTorch operators are slower with it. Returns the same encoder, in
    evaluation mode.

    Raises:
        InputError: The encoder is not on a CPU, or this build of PyTorch has no 8-bit kernels for this CPU.
        ValueError: The encoder is prepacked already or has low-rank updates, or the precision is unknown.
    """
    layers, config = cast("list[Block]", list(encoder.layers)), encoder.config
    if precision not in MATRICES:
        raise ValueError(f"precision must be one of {', '.join(MATRICES)}, got {precision!r}")
    if encoder.device.type != "cpu":
        raise InputError(f"optimize_for_inference is for encoders on a CPU, this one is on {encoder.device}; a GPU needs no prepacking")
    if encoder.prepacked:
        raise ValueError("this encoder is prepacked already")
    if not all(type(matrix) is Linear for layer in layers for matrix in _matrices(layer)):
        raise ValueError("this encoder has LoRA matrices; call merge_lora first")
    if precision == "int8" and torch.backends.quantized.engine not in ("x86", "fbgemm"):
        raise InputError(f"int8 needs torch's x86 kernels, but this machine has {torch.backends.quantized.engine!r}; use precision float")
    encoder.eval().requires_grad_(False)
    plain_layout = False
    if kernels_available():  # whether they will read the matrices, as far as that can be told without a batch
        widened = precision == "int8" or multiplies_bfloat16(layers, config.hidden_size)
        dtype = torch.float32 if widened else compute_dtype(encoder.device, encoder.embeddings.tokens.weight.dtype)
        angles = torch.empty(0, config.rotary_width // 2 if config.positions == "rope" else 0)
        plain_layout = unsupported_reason(layers, torch.empty(0, config.hidden_size, dtype=dtype), (angles, angles)) is None
    for module in list(encoder.modules()):
        for name, child in module.named_children():
            if isinstance(child, Linear):
                setattr(module, name, PrepackedLinear(child, precision, plain_layout=plain_layout))
    encoder.prepacked = precision
    return encoder
