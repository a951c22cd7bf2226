"""Blocks on a CPU by compiled kernels, in inference and in training: two passes over the tokens around attention.

The first pass computes queries, keys and values from hidden states; the second computes the next hidden states from the attention
output. Matrices are float32, bfloat16 where the CPU has AMX, or int8 for a prepacked encoder; the residual stream is float32 in every case.
In training the forward pass runs the same kernels, with one autograd step on either side of attention.

For the backward pass an encoder keeps the residual stream before attention and before the MLP, the heads, the attention output and the
output of the MLP's first matrix. Norms are recomputed, which takes no longer than reading them from memory.

For what the kernels do not support `run_blocks` returns None; then `quiver.encoder.layers.Block.forward` runs the blocks.

`optimize_for_inference` prepacks the matrices of an encoder. Small batches gain most: a lone query no longer waits for weights to be packed
or widened from half precision.

Shapes: N packed tokens, D model width, I MLP width, H heads, K head width, R rotary width, C tokens of a chunk.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from quiver.encoder.attention import attend
from quiver.encoder.attention.dispatch import VARIABLE
from quiver.encoder.attention.layout import join_qkv
from quiver.encoder.cpu.attention import is_supported as attention_is_supported
from quiver.encoder.cpu.kernels import amx_kernels_run, int8_kernels_run
from quiver.encoder.cpu.linear import (
    MATRICES,
    Linear,
    PrepackedLinear,
    compute_dtype,
    has_plain_layout,
    int8_levels,
    is_cpu_inference,
    pack_weight,
    packed_product,
    product_gradients,
    weight_dtype,
)
from quiver.encoder.cpu.support import WIDTH_MULTIPLE, is_plain, kernels_available
from quiver.encoder.errors import InputError
from quiver.encoder.layers import MLP, Block, RotaryRows, SelfAttention, has_hooks
from quiver.encoder.ops import ACTIVATION_FUNCTIONS, ACTIVATION_GRADIENTS, gated_backward, rotate_
from quiver.encoder.packing import PackedBatch

if TYPE_CHECKING:
    from quiver.encoder.config import Precision
    from quiver.encoder.model import Encoder
    from quiver.encoder.ops import Norm

logger = logging.getLogger(__name__)


# Tokens per chunk of a backward pass: the inner states of ModernBERT-base's MLP, 9 MB, stay in the last-level cache. Smaller chunks make
# the products that sum up weight gradients slower: an MLP of 384 and 1,536 takes, forward and backward over 7,000 tokens, 924 ms in chunks
# of 256, 864 of 512, 855 of 1,024, 886 of 2,048, 912 in one piece.
CHUNK = 1024


def run_blocks(
    layers: Sequence[Block], batch: PackedBatch, hidden: Tensor, ropes: Sequence[RotaryRows | None], *, checkpointing: bool = False
) -> Tensor | None:
    """Run an encoder's blocks by compiled kernels where that is faster.

    In inference a block with a forward hook, on itself or on a module inside it, runs by its own ``forward``, so that the hook fires.

    Args:
        layers: All blocks of an encoder.
        batch: The packed batch, N tokens.
        hidden: Hidden states of the embeddings, (N, D); overwritten in inference.
        ropes: For each layer, its rows of the rotary table.
        checkpointing: In training, keep one hidden state per block and recompute the rest in the backward pass.

    Returns:
        The residual stream after the last block, (N, D); None if `Block.forward` has to run the blocks.
    """
    if is_cpu_inference(hidden) and not any(layer.training for layer in layers):
        return _infer(layers, batch, hidden, ropes) if inference_is_supported(layers, batch, hidden, ropes[0]) else None
    if not training_is_supported(layers, batch, hidden, ropes[0]):
        return None
    for layer, rope in zip(layers, ropes, strict=True):
        if checkpointing:
            hidden = checkpoint(_train_block, layer, hidden, batch, rope, use_reentrant=False)
        else:
            hidden = _train_block(layer, hidden, batch, rope)
    return hidden


def hidden_dtype(layers: Sequence[Block], batch: PackedBatch, dtype: torch.dtype, width: int, rope: RotaryRows | None) -> torch.dtype:
    """Return the dtype in which the embeddings should hand hidden states to the blocks on a CPU.

    Without gradients, half precision is computed in float32 where the CPU is not faster with it; and kernels that multiply bfloat16
    matrices keep the residual stream in float32.

    Args:
        layers: All blocks of an encoder.
        batch: The packed batch.
        dtype: Dtype of the embeddings.
        width: D.
        rope: Rows of the rotary table of one of the layers.
    """
    if torch.is_grad_enabled():
        return dtype
    dtype = compute_dtype(torch.device("cpu"), dtype)
    if dtype == torch.bfloat16 and not any(layer.training for layer in layers):
        wide = torch.empty(0, width, dtype=torch.float32)
        if is_cpu_inference(wide) and _keeps_float32(layers, batch, wide, rope):
            return torch.float32
    return dtype


def _infer(layers: Sequence[Block], batch: PackedBatch, hidden: Tensor, ropes: Sequence[RotaryRows | None]) -> Tensor:
    """Run all blocks over the residual stream, in place."""
    passes = Passes(layers[0], hidden, bfloat16=multiplies_bfloat16(layers, hidden.shape[1]))
    heads = passes.empty_heads(layers[0], hidden)
    q, k, v = heads.transpose(1, 2)  # (N, H, K) each
    for layer, rope in zip(layers, ropes, strict=True):
        if has_hooks(layer):
            _run_hooked(layer, batch, hidden, rope)
            continue
        passes.make_heads(layer, rope, hidden, heads)
        mixed = attend(q, k, v, batch, layer.attention.window, slopes=layer.attention.slopes).contiguous()
        passes.make_states(layer, hidden, mixed, (hidden, hidden))
    return hidden


def _run_hooked(layer: Block, batch: PackedBatch, hidden: Tensor, rope: RotaryRows | None) -> None:
    """Run a block by its ``forward``, so that hooks fire; ``hidden`` is overwritten."""
    stream, update = layer(hidden, None, batch, rope)
    hidden.copy_(stream if update is None else stream + update)


def inference_is_supported(layers: Sequence[Block], batch: PackedBatch, hidden: Tensor, rope: RotaryRows | None) -> bool:
    """Return whether the kernels support these blocks in inference and are worth their overhead; logs the answer once.

    If the environment variable QUIVER_ATTENTION names an attention backend other than compiled, blocks run by PyTorch operators too.

    Args:
        layers: All blocks of an encoder.
        batch: The packed batch.
        hidden: Its hidden states, (N, D).
        rope: Rows of the rotary table of one of the layers.
    """
    if not attention_is_supported(batch, hidden):
        return False
    reason = unsupported_reason(layers, hidden, rope)
    _note(reason)
    return reason is None


def unsupported_reason(layers: Sequence[Block], hidden: Tensor, rope: RotaryRows | None) -> str | None:
    """Say in a few words why the kernels cannot run these blocks; None if they can."""
    width, heads = hidden.shape[1], layers[0].attention.heads
    widths = (width, width // heads, layers[0].mlp.width, 0 if rope is None else rope[0].shape[1])
    levels = int8_levels(layers[0].attention.qkv)
    override = os.environ.get(VARIABLE)
    reasons = {
        f"8-bit integers up to {levels}": levels > 0 and not int8_kernels_run(levels),
        f"{VARIABLE}={override}": override is not None and override != "compiled",
        f"dtype {str(hidden.dtype).removeprefix('torch.')}": hidden.dtype != torch.float32,
        "hidden states with gaps": not hidden.is_contiguous(),
        f"norms before attention and MLP side by side ({layers[0].norm_position})": layers[0].norm_position not in ("pre", "post"),
        f"widths {widths}, not all multiples of {WIDTH_MULTIPLE}": any(each % WIDTH_MULTIPLE for each in widths),
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason is None and not all(has_plain_layout(matrix) for layer in layers for matrix in _matrices(layer)):
        return "packed matrices"
    if reason is None and not all(map(is_plain, (weight for layer in layers for weight in layer.parameters()))):
        return "weights elsewhere"
    return reason


def multiplies_bfloat16(layers: Sequence[Block], width: int) -> bool:
    """Return whether the kernels multiply bfloat16 matrices and attend to bfloat16 heads: for weights of that dtype, on a CPU with AMX.

    Args:
        layers: Blocks of an encoder.
        width: D.
    """
    attention, mlp = layers[0].attention, layers[0].mlp
    odd = any(each % (2 * WIDTH_MULTIPLE) for each in (width, width // attention.heads, mlp.width))
    if odd or int8_levels(attention.qkv) or attention.slopes is not None:
        return False
    # Checked last, because it loads the kernels.
    return all(weight_dtype(matrix) == torch.bfloat16 for layer in layers for matrix in _matrices(layer)) and amx_kernels_run()


def _keeps_float32(layers: Sequence[Block], batch: PackedBatch, wide: Tensor, rope: RotaryRows | None) -> bool:
    """Return whether kernels will run these bfloat16 blocks, which need hidden states in float32."""
    return (
        attention_is_supported(batch, wide)
        and multiplies_bfloat16(layers, wide.shape[1])
        and unsupported_reason(layers, wide, rope) is None
    )


@cache
def _note(reason: str | None) -> None:
    logger.info("encoder blocks on the CPU run in: %s", "compiled" if reason is None else f"torch's operators ({reason})")


def _matrices(block: Block) -> tuple[Linear, Linear, Linear, Linear]:
    return block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down


class Passes:
    """The two passes around attention, for the blocks of one encoder over one batch.

    Args:
        block: Any block of the encoder.
        hidden: Hidden states, (N, D).
        bfloat16: The result of `multiplies_bfloat16`.
    """

    def __init__(self, block: Block, hidden: Tensor, *, bfloat16: bool = False) -> None:
        from quiver.encoder.cpu import block_kernels, tiles  # `attention_is_supported` has loaded numba

        self.names, self.activations = block_kernels, tiles.ACTIVATIONS
        tokens, width = hidden.shape
        inner, levels = block.mlp.width, int8_levels(block.attention.qkv)
        self.matrices = torch.bfloat16 if bfloat16 else torch.int8 if levels else torch.float32
        self.call = block_kernels.BlockArguments(tokens, width, inner, block.attention.heads, torch.get_num_threads(), self.matrices)
        self.call.put(block_kernels.LEVELS, levels)
        self.none = hidden.new_zeros(max(width, 2 * inner))

    def empty_heads(self, block: Block, hidden: Tensor) -> Tensor:
        """Allocate queries, keys and values, (3, H, N, K): attention reads the tokens of one head after another."""
        heads, dtype = block.attention.heads, torch.bfloat16 if self.matrices == torch.bfloat16 else hidden.dtype
        return hidden.new_empty(3, heads, len(hidden), hidden.shape[1] // heads, dtype=dtype)

    def make_heads(self, block: Block, rope: RotaryRows | None, hidden: Tensor, heads: Tensor) -> None:
        """Compute queries, keys and values from hidden states.

        Args:
            block: Block of the model; its dropout is not applied.
            rope: Its rows of this layer's rotary table.
            hidden: The residual stream, (N, D).
            heads: Output, (3, H, N, K).
        """
        names, call, post = self.names, self.call, block.norm_position == "post"
        kept = self._put_matrix(names.QKV, block.attention.qkv)
        kept += self._put_norm(names.ATTENTION_NORM, nn.Identity() if post else block.attention_norm)
        angles = [x.contiguous() for x in rope or ()]
        call.put(names.COSINES, *((angles[0].data_ptr(), angles[1].data_ptr(), angles[0].shape[1]) if angles else (0, 0, 0)))
        call.put(names.HIDDEN, hidden.data_ptr())
        strides = (heads.stride(each) * heads.itemsize // hidden.itemsize for each in (2, 1))
        call.put(names.Q, *(part.data_ptr() for part in heads), *strides)
        call.put(names.MIXED, 0)
        call.run()

    def make_states(self, block: Block, hidden: Tensor, mixed: Tensor, places: tuple[Tensor, Tensor], inner: Tensor | None = None) -> None:
        """Compute the residual stream after the block from the attention output.

        Args:
            block: Block of the model; its dropout is not applied.
            hidden: The residual stream before the block, (N, D).
            mixed: Attention output, (N, H, K).
            places: Outputs: the stream after attention and after the block, (N, D) each; both may be ``hidden``.
            inner: Output for the product of the MLP's first matrix, (N, I) or, gated, (N, 2 I); None if it is not needed.
        """
        names, call, post = self.names, self.call, block.norm_position == "post"
        kept: list[Tensor] = []
        for place, matrix in zip((names.OUT, names.UP, names.DOWN), _matrices(block)[1:], strict=True):
            kept += self._put_matrix(place, matrix)
        kept += self._put_norm(names.ATTENTION_NORM, block.attention_norm) + self._put_norm(names.MLP_NORM, block.mlp_norm)
        call.put(names.HIDDEN, hidden.data_ptr())
        call.put(names.MIXED, mixed.data_ptr(), self.activations[block.mlp.activation], int(block.mlp.gated), int(post))
        call.put(names.MIDDLE, *(place.data_ptr() for place in places), 0 if inner is None else inner.data_ptr())
        call.run()

    def _put_matrix(self, place: int, matrix: Linear) -> list[Tensor]:
        """Pass the addresses of a matrix; returns the tensors that must stay alive until the kernel has run."""
        kept = []
        for part, rows in enumerate(matrix.rows()):
            weight = rows.weight.to(self.matrices)
            numbers = [weight, *(self.none if each is None else each.float() for each in rows[1:])]
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
        bias = self.none if bias is None else bias.float().contiguous()
        self.call.put(place, weight.data_ptr(), bias.data_ptr(), int(isinstance(norm, nn.LayerNorm)))
        self.call.put_eps(place, torch.finfo(torch.float32).eps if norm.eps is None else norm.eps)
        return [weight, bias]


MATRIX_NAMES = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")


def training_is_supported(layers: Sequence[Block], batch: PackedBatch, hidden: Tensor, rope: RotaryRows | None) -> bool:
    """Return whether the kernels support training of these blocks and are worth their overhead; logs the answer once.

    Args:
        layers: All blocks of an encoder.
        batch: The packed batch.
        hidden: Its hidden states, (N, D).
        rope: Rows of the rotary table of one of the layers.
    """
    if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not attention_is_supported(batch, hidden):
        return False
    wanted = hidden.requires_grad or any(weight.requires_grad for layer in layers for weight in layer.parameters())
    if not wanted:
        return False
    reason = next(filter(None, map(training_unsupported_reason, layers)), None) or unsupported_reason(layers, hidden, rope)
    _note_training(reason)
    return reason is None


def training_unsupported_reason(block: Block) -> str | None:
    """Say which part of a block the kernels would ignore in training; None if they run all of it."""
    if block.norm_position != "pre":
        return f"norms elsewhere than before attention and before the MLP ({block.norm_position})"
    attention, mlp = block.attention, block.mlp
    drops = attention.dropout.p, mlp.inner_dropout.p, mlp.output_dropout.p
    reasons = {
        "dropout": block.training and any(drops),
        "RMSNorm": any(isinstance(norm, nn.RMSNorm) for norm in (block.attention_norm, block.mlp_norm)),
        "weights in half precision": any(weight.dtype != torch.float32 for weight in block.parameters()),
        "modules of other kinds": not _is_unmodified(block),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _is_unmodified(block: Block) -> bool:
    """Return whether a block has its original module types, no hooks and no replaced methods, as `compile_encoder` replaces them."""
    kinds = {"": Block, "attention": SelfAttention, "mlp": MLP} | dict.fromkeys(MATRIX_NAMES, Linear)
    for name, module in block.named_modules():
        hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        if any(hooks) or not {"forward", "feed_forward"}.isdisjoint(vars(module)) or type(module) is not kinds.get(name, type(module)):
            return False
    return True


@cache
def _note_training(reason: str | None) -> None:
    logger.info(
        "training of encoder blocks on the CPU runs in: %s",
        "compiled forward" if reason is None else f"torch's operators ({reason})",
    )


def _train_block(block: Block, hidden: Tensor, batch: PackedBatch, rope: RotaryRows | None) -> Tensor:
    """Run one block with gradients; returns the residual stream after it, (N, D)."""
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
        heads = passes.empty_heads(block, hidden)
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
        norm = _RecomputedNorm(ctx.norm, hidden, norm_weight, norm_bias)
        wants_hidden, _, _, *wants_norm, wants_qkv, wants_bias = ctx.needs_input_grad
        wanted = wants_hidden or any(wants_norm), wants_qkv, wants_bias
        of_normed, *of_qkv = product_gradients(norm.output, qkv, of_product.flatten(1), wanted)
        of_hidden, *of_norm = norm.gradients(of_normed, wants_norm)
        return of_hidden, None, None, *of_norm, *of_qkv


class _States(torch.autograd.Function):
    """Everything after attention: its output matrix, the residual sums, norm and MLP."""

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
        norm = _RecomputedNorm(ctx.norm, middle, norm_weight, norm_bias)
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


class _RecomputedNorm:
    """A LayerNorm (or identity) recomputed in the backward pass.

    Args:
        norm: The module.
        x: Its input, (N, D).
        weight: Its weight in the forward pass, (D,).
        bias: Its bias in the forward pass, (D,), or None.
    """

    def __init__(self, norm: nn.Module, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        self.output = self._x = x
        self._weights, self._moments = (weight, bias), None
        if isinstance(norm, nn.LayerNorm):
            self.output, *self._moments = torch.native_layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)

    def gradients(self, gradient: Tensor | None, wanted: Sequence[bool]) -> tuple[Any, Any, Any]:
        """Gradients of input (N, D), weight and bias, from the gradient of the output."""
        if self._moments is None or gradient is None:
            return gradient, None, None
        found: tuple[Any, Any, Any] = torch.ops.aten.native_layer_norm_backward(
            gradient, self._x, self._x.shape[-1:], *self._moments, *self._weights, (True, *wanted)
        )
        return found


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
        gradient: Gradient of the output, (N, D).
        x: The input, (N, D).
        inner: Output of the first matrix, in chunks of CHUNK tokens, (C, I) or (C, 2 I).
        up: The first matrix, (I, D) or (2 I, D).
        down: The second, (D, I).
        activation: A key of `quiver.encoder.ops.ACTIVATION_FUNCTIONS`.
        gate: Whether the MLP is gated.
        wanted: Which gradients to compute.

    Returns:
        Gradients of ``x``, the first matrix, its bias, the second matrix and its bias; None for those not wanted.
    """
    wants_x, wants_up, wants_up_bias, wants_down, wants_down_bias = wanted
    of_x = torch.empty_like(x) if wants_x else None
    of_up, of_down = (torch.zeros_like(weight) if wants else None for weight, wants in ((up, wants_up), (down, wants_down)))
    of_up_bias = up.new_zeros(len(up)) if wants_up_bias else None
    from_output, from_inner = (packed_product(pack_weight(weight.t(), CHUNK), None) for weight in (down, up))
    places = range(0, len(x), CHUNK)
    parts, upstreams = (torch.split(rows, CHUNK) for rows in (x, gradient))
    for start, part, upstream, up_to in zip(places, parts, upstreams, inner, strict=True):
        of_activated = from_output(upstream)
        if gate:
            activated, of_inner = gated_backward(up_to, of_activated, activation)
        else:
            activated, of_inner = ACTIVATION_FUNCTIONS[activation](up_to), ACTIVATION_GRADIENTS[activation](of_activated, up_to)
        if of_down is not None:
            of_down.addmm_(upstream.t(), activated)
        if of_up is not None:
            of_up.addmm_(of_inner.t(), part)
        if of_up_bias is not None:
            of_up_bias += of_inner.sum(0)
        if of_x is not None:
            of_x[start : start + CHUNK] = from_inner(of_inner)
    return of_x, of_up, of_up_bias, of_down, gradient.sum(0) if wants_down_bias else None


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
    if not all(type(matrix) is Linear for layer in _blocks_of(encoder) for matrix in _matrices(layer)):
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
    layers, config = _blocks_of(encoder), encoder.config
    if not kernels_available() or not layers:
        return False
    widened = precision == "int8" or multiplies_bfloat16(layers, config.hidden_size)
    dtype = torch.float32 if widened else compute_dtype(encoder.device, encoder.embeddings.tokens.weight.dtype)
    hidden = torch.empty(0, config.hidden_size, dtype=dtype)
    angles = torch.empty(0, config.rotary_width // 2 if config.positions == "rope" else 0)
    return unsupported_reason(layers, hidden, (angles, angles)) is None


def _blocks_of(encoder: Encoder) -> list[Block]:
    return cast("list[Block]", list(encoder.layers))
