"""Blocks without gradients on a CPU by compiled loops (`encoder.cpu.blocks`): what surrounds attention is two passes over the tokens.

The first makes heads of hidden states, the second the next hidden states of what attention made of them. Matrices are float32, bfloat16
where the processor has AMX or, of a frozen encoder, 8-bit integers; hidden states are float32 all the same. `encoder.cpu.lean` does the
same
with torch's operators where this cannot serve.

Shapes: N packed tokens, D model width, I MLP width, H heads, K head width, R rotary width.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quiver.encoder.attention import attend, compiled
from quiver.encoder.attention.dispatch import VARIABLE
from quiver.encoder.cpu.availability import MULTIPLE, is_plain, quads_run, tiles_run
from quiver.encoder.cpu.linear import Linear
from quiver.encoder.layers import Block, RotaryRows
from quiver.encoder.packing import PackedBatch

if TYPE_CHECKING:
    from quiver.encoder.ops import Norm

logger = logging.getLogger(__name__)


def is_supported(layers: Sequence[Block], batch: PackedBatch, hidden: Tensor, rope: RotaryRows | None) -> bool:
    """Whether these blocks can run here, and are worth it for a batch; what is found is logged once.

    Where the environment variable QUIVER_ATTENTION names another attention than the compiled one, blocks are torch's too.

    Args:
        layers: All blocks of an encoder.
        batch: The packed batch.
        hidden: Its hidden states, (N, D).
        rope: Rows of the rotary table of one of the layers.
    """
    if not compiled.is_supported(batch, hidden):
        return False
    reason = unsupported_reason(layers, hidden, rope)
    _note(reason)
    return reason is None


def unsupported_reason(layers: Sequence[Block], hidden: Tensor, rope: RotaryRows | None) -> str | None:
    """Why the compiled passes cannot run these blocks, in a few words; None where they can."""
    width, heads = hidden.shape[1], layers[0].attention.heads
    widths = (width, width // heads, layers[0].mlp.width, 0 if rope is None else rope[0].shape[1])
    levels = layers[0].attention.qkv.levels
    override = os.environ.get(VARIABLE)
    reasons = {
        f"8-bit integers up to {levels}": levels > 0 and not quads_run(levels),
        f"{VARIABLE}={override}": override is not None and override != "compiled",
        f"dtype {str(hidden.dtype).removeprefix('torch.')}": hidden.dtype != torch.float32,
        "hidden states with gaps": not hidden.is_contiguous(),
        f"norms before attention and MLP side by side ({layers[0].norm_position})": layers[0].norm_position not in ("pre", "post"),
        f"widths {widths}, not all multiples of {MULTIPLE}": any(each % MULTIPLE for each in widths),
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason is None and not all(matrix.readable for layer in layers for matrix in _matrices(layer)):
        return "packed matrices"
    if reason is None and not all(map(is_plain, (weight for layer in layers for weight in layer.parameters()))):
        return "weights elsewhere"
    return reason


def are_paired(layers: Sequence[Block], width: int) -> bool:
    """Whether the loops multiply matrices as pairs of bfloat16, and attend to such heads: those of that dtype, where AMX makes it worth it.

    Args:
        layers: Blocks of an encoder.
        width: D.
    """
    attention, mlp = layers[0].attention, layers[0].mlp
    odd = any(each % (2 * MULTIPLE) for each in (width, width // attention.heads, mlp.width))
    if odd or attention.qkv.levels or attention.slopes is not None:
        return False
    # Asked last: it loads the loops.
    return all(matrix.dtype == torch.bfloat16 for layer in layers for matrix in _matrices(layer)) and tiles_run()


def widens(layers: Sequence[Block], batch: PackedBatch, wide: Tensor, rope: RotaryRows | None) -> bool:
    """Whether the loops will run these blocks of bfloat16 over a batch, and so want its hidden states in float32.

    Args:
        layers: All blocks of an encoder.
        batch: The packed batch.
        wide: What stands for its hidden states, (0, D) float32.
        rope: Rows of the rotary table of one of the layers.
    """
    return compiled.is_supported(batch, wide) and are_paired(layers, wide.shape[1]) and unsupported_reason(layers, wide, rope) is None


@cache
def _note(reason: str | None) -> None:
    logger.info("blocks on cpu: %s", "compiled" if reason is None else f"torch's operators ({reason})")


def _matrices(block: Block) -> tuple[Linear, Linear, Linear, Linear]:
    return block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down


class Passes:
    """The two passes around attention, for one block of an encoder after the other over one batch.

    Args:
        block: Any of them.
        hidden: Hidden states, (N, D).
        paired: What `are_paired` said.
    """

    def __init__(self, block: Block, hidden: Tensor, *, paired: bool = False) -> None:
        from quiver.encoder.cpu import blocks  # `is_supported` has loaded numba

        self.names = blocks
        tokens, width = hidden.shape
        inner, levels = block.mlp.width, block.attention.qkv.levels
        self.matrices = torch.bfloat16 if paired else torch.int8 if levels else torch.float32
        self.call = blocks.Call(tokens, width, inner, block.attention.heads, torch.get_num_threads(), self.matrices)
        self.call.put(blocks.LEVELS, levels)
        self.none = hidden.new_zeros(max(width, 2 * inner))

    def room_for_heads(self, block: Block, hidden: Tensor) -> Tensor:
        """Room for queries, keys and values, (3, H, N, K): attention reads the tokens of one head after the other."""
        heads, dtype = block.attention.heads, torch.bfloat16 if self.matrices == torch.bfloat16 else hidden.dtype
        return hidden.new_empty(3, heads, len(hidden), hidden.shape[1] // heads, dtype=dtype)

    def make_heads(self, block: Block, rope: RotaryRows | None, hidden: Tensor, heads: Tensor) -> None:
        """Queries, keys and values of hidden states.

        Args:
            block: It is not asked for dropout.
            rope: Its rows of this layer's rotary table.
            hidden: The residual stream, (N, D).
            heads: Where they go, (3, H, N, K).
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
        """Hidden states of what attention mixed.

        Args:
            block: It is not asked for dropout.
            hidden: The residual stream, (N, D).
            mixed: What attention gave, (N, H, K).
            places: Where the stream goes behind attention and behind the block, (N, D) each; both may be ``hidden``.
            inner: Where what the first matrix of the MLP gives goes, if it is wanted, (N, I) or, gated, (N, 2 I).
        """
        names, call, post = self.names, self.call, block.norm_position == "post"
        kept: list[Tensor] = []
        for place, matrix in zip((names.OUT, names.UP, names.DOWN), _matrices(block)[1:], strict=True):
            kept += self._put_matrix(place, matrix)
        kept += self._put_norm(names.ATTENTION_NORM, block.attention_norm) + self._put_norm(names.MLP_NORM, block.mlp_norm)
        call.put(names.HIDDEN, hidden.data_ptr())
        call.put(names.MIXED, mixed.data_ptr(), names.ACTIVATIONS[block.mlp.activation], int(block.mlp.gated), int(post))
        call.put(names.MIDDLE, *(place.data_ptr() for place in places), 0 if inner is None else inner.data_ptr())
        call.run()

    def _put_matrix(self, place: int, matrix: Linear) -> list[Tensor]:
        """Where a matrix's numbers lie, and what keeps them there."""
        kept = []
        for part, rows in enumerate(matrix.rows()):
            weight = rows.weight.to(self.matrices)
            numbers = [weight, *(self.none if each is None else each.float() for each in rows[1:])]
            numbers = [each.contiguous() for each in numbers]
            self.call.put(place + self.names.MATRIX * part, *(each.data_ptr() for each in numbers))
            kept += numbers
        return kept

    def _put_norm(self, place: int, norm: Norm) -> list[Tensor]:
        """A norm's numbers, and what they point to, to be kept until they have been used."""
        if isinstance(norm, nn.Identity):
            self.call.put(place, 0)
            return []
        weight = norm.weight.float().contiguous()
        bias = getattr(norm, "bias", None)
        bias = self.none if bias is None else bias.float().contiguous()
        self.call.put(place, weight.data_ptr(), bias.data_ptr(), int(isinstance(norm, nn.LayerNorm)))
        self.call.put_eps(place, torch.finfo(torch.float32).eps if norm.eps is None else norm.eps)
        return [weight, bias]


class FusedBlocks:
    """The blocks of one encoder over one batch, one after the other.

    Args:
        layers: All of them.
        batch: The packed batch.
        hidden: The residual stream, (N, D); every `advance_` overwrites it.
    """

    def __init__(self, layers: Sequence[Block], batch: PackedBatch, hidden: Tensor) -> None:
        self.hidden, self.batch = hidden, batch
        self.passes = Passes(layers[0], hidden, paired=are_paired(layers, hidden.shape[1]))
        self.heads = self.passes.room_for_heads(layers[0], hidden)

    def advance_(self, block: Block, rope: RotaryRows | None) -> None:
        """Run a block over the residual stream.

        Args:
            block: In evaluation mode.
            rope: Its rows of this layer's rotary table.
        """
        self.passes.make_heads(block, rope, self.hidden, self.heads)
        q, k, v = self.heads.transpose(1, 2)  # (N, H, K) each
        mixed = attend(q, k, v, self.batch, block.attention.window, slopes=block.attention.slopes).contiguous()
        self.passes.make_states(block, self.hidden, mixed, (self.hidden, self.hidden))
