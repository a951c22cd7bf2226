"""The encoder: a packed batch in, one hidden state a token out. Nothing is padded on the way.

Shapes: B sequences, N packed tokens, D model width.
Source: ModernBERT, arXiv:2412.13663, section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quiver.encoder.config import EncoderConfig, Precision
from quiver.encoder.cpu import fused, fused_training
from quiver.encoder.cpu.lean import advance_, heads_buffer
from quiver.encoder.cpu.linear import compute_dtype, lean
from quiver.encoder.errors import InputError
from quiver.encoder.layers import Block, Embeddings, RotaryRows, has_hooks, make_norm
from quiver.encoder.ops import Norm, add_norm
from quiver.encoder.packing import PackedBatch, PaddedBatch, neighbours_of_equal_length
from quiver.encoder.positions import RotaryTable

if TYPE_CHECKING:
    from typing_extensions import Self


class Encoder(nn.Module):
    """A bidirectional transformer over packed batches.

    Args:
        config: Its architecture; the weights are torch's defaults until they are loaded or initialised.

    Example:
        >>> from quiver.encoder.packing import pack_ids
        >>> config = EncoderConfig.modernbert(
        ...     vocab_size=64, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "local"])
        >>> Encoder(config)(pack_ids([[1, 2, 3], [4, 5]])).shape
        torch.Size([5, 32])
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.final_norm: Norm = make_norm(config) if config.final_norm else nn.Identity()
        # One table for all layers that share theta and scaling; for each layer the place of its table.
        ropes = [(config.theta(kind), config.scaling(kind)) for kind in config.layer_types] if config.positions == "rope" else []
        tables = list(dict.fromkeys(ropes))
        self._table_of = [tables.index(rope) for rope in ropes]
        self.rotary = nn.ModuleList(
            RotaryTable(theta=theta, rotary_width=config.rotary_width, max_positions=config.max_positions, scaling=scaling)
            for theta, scaling in tables
        )
        self.frozen: Precision | None = None
        """How its matrices are packed for inference (`encoder.cpu.frozen.optimize_for_inference`); then it has no gradients."""
        self.gradient_checkpointing = False
        """In training, keep one hidden state a block and compute the rest again in the backward pass."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embeddings.tokens.weight.device

    @property
    def _blocks(self) -> list[Block]:
        return cast("list[Block]", list(self.layers))

    @property
    def num_parameters(self) -> int:
        """Number of weights."""
        return sum(weight.numel() for weight in self.state_dict().values())

    def train(self, mode: bool = True) -> Self:
        """Training mode, or evaluation mode.

        Raises:
            ValueError: It is frozen, and training would change nothing.
        """
        if mode and self.frozen:
            raise ValueError("a frozen encoder has no gradients; to train, load the checkpoint with load_encoder")
        return super().train(mode)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Encode a batch.

        In evaluation without gradients on a CPU the blocks run by `encoder.cpu.fused` or `encoder.cpu.lean`, where dropout that was
        switched on in
        single modules has no effect. With gradients `encoder.cpu.fused_training` runs them where it can, which leaves blocks with dropout
        alone. A block with a forward hook, on it or on a module inside of it, always runs by its own ``forward``, so that the hook fires.

        Args:
            batch: B sequences, N tokens in all; it is moved to the weights' device if it lies elsewhere.

        Returns:
            Hidden states after the last norm, (N, D), in the order of ``batch.ids``.

        Raises:
            InputError: A sequence is longer than the positions this encoder has.
        """
        if batch.max_seqlen > self.config.max_positions:
            raise InputError(f"a sequence has {batch.max_seqlen} tokens, this encoder has {self.config.max_positions} positions")
        if self.frozen and (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")):
            # Packed matrices have no gradients and one dtype.
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                return self.forward(batch)
        batch = batch.to(self.device)
        if self.frozen == "int8" and not batch.batch_invariant:
            # The loops answer a lone query sooner than torch's operators do, of which quantised products need some forty.
            batch = replace(batch, batch_invariant=True, memo={})
        batch, places = self._arranged(batch)
        ropes = self._ropes(batch.positions)
        hidden: Tensor = self.embeddings(batch, self._hidden_dtype(batch, ropes[0]))
        update: Tensor | None = None
        if lean(hidden) and not self.training:
            self._advance_(hidden, batch, ropes)
        else:
            step: Step = _fused_step if fused_training.is_supported(self._blocks, batch, hidden, ropes[0]) else _step
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                step = partial(checkpoint, step, use_reentrant=False)
            for layer, rope in zip(self._blocks, ropes, strict=True):
                hidden, update = step(layer, hidden, update, batch, rope)
        output = add_norm(hidden, update, self.final_norm)[1].to(self.embeddings.tokens.weight.dtype)
        return output if places is None else output[places]

    def _hidden_dtype(self, batch: PackedBatch, rope: RotaryRows | None) -> torch.dtype:
        """What hidden states are on their way; between products of integers, and of bfloat16 by compiled loops, they are float32."""
        dtype = torch.float32 if self.frozen == "int8" else self.embeddings.tokens.weight.dtype
        if torch.is_grad_enabled():
            return dtype
        dtype = compute_dtype(self.device, dtype)
        if dtype == torch.bfloat16 and not self.training:
            wide = torch.empty(0, self.config.hidden_size, dtype=torch.float32, device=self.device)
            if lean(wide) and fused.widens(self._blocks, batch, wide, rope):
                return torch.float32
        return dtype

    def _advance_(self, hidden: Tensor, batch: PackedBatch, ropes: Sequence[RotaryRows | None]) -> None:
        """All blocks over the residual stream, in place."""
        advance: Callable[[Block, RotaryRows | None], None]
        if fused.is_supported(self._blocks, batch, hidden, ropes[0]):
            advance = fused.FusedBlocks(self._blocks, batch, hidden).advance_
        else:
            buffer = heads_buffer(self._blocks[0], hidden, batch)
            advance = partial(_lean_step, hidden, batch, buffer)
        for layer, rope in zip(self._blocks, ropes, strict=True):
            if has_hooks(layer):
                stream, update = layer(hidden, None, batch, rope)
                hidden.copy_(stream if update is None else stream + update)
            else:
                advance(layer, rope)

    def forward_padded(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The same states from a padded batch, without a choice that depends on sizes: what is exported as a graph for other programs.

        It runs the same layers as ``forward``, and costs what padding costs; nothing here uses it to encode.

        Args:
            ids: Token ids, (B, S) int64.
            mask: 1 where a token may be attended to, 0 where one only reads, or there is padding, (B, S).

        Returns:
            (B, S, D); what stands in places of padding means nothing.
        """
        batch = PaddedBatch.of(ids, mask)
        hidden: Tensor = self.embeddings(batch, self.embeddings.tokens.weight.dtype)
        update: Tensor | None = None
        for layer, rope in zip(self.layers, self._ropes(batch.positions), strict=True):
            hidden, update = layer(hidden, update, batch, rope)
        return add_norm(hidden, update, self.final_norm)[1].reshape(*ids.shape, -1)

    def _ropes(self, positions: Tensor) -> Sequence[RotaryRows | None]:
        """For each layer the rows of its rotary table, (N,) positions; None where the family has none."""
        rows = [table(positions) for table in self.rotary]
        return [rows[place] for place in self._table_of] if rows else [None] * len(self.layers)

    def _arranged(self, batch: PackedBatch) -> tuple[PackedBatch, Tensor | None]:
        """The batch in the order in which its layers do best, and where each token has gone; None where nothing has moved.

        Attention on a CPU takes sequences of one length together: they are brought side by side once, not in every layer.
        """
        if self.device.type != "cpu" or torch.compiler.is_compiling():
            return batch, None
        if "arranged" not in batch.memo:
            batch.memo["arranged"] = neighbours_of_equal_length(batch)
        arranged: tuple[PackedBatch, Tensor | None] = batch.memo["arranged"]
        return arranged


def _lean_step(hidden: Tensor, batch: PackedBatch, buffer: Tensor, block: Block, rope: RotaryRows | None) -> None:
    advance_(block, hidden, batch, rope, buffer)


Step = Callable[[Block, Tensor, "Tensor | None", PackedBatch, "RotaryRows | None"], tuple[Tensor, "Tensor | None"]]
"""(block, residual stream, what is to be added to it, batch, rotary rows): the two behind the block."""


def _step(block: Block, hidden: Tensor, update: Tensor | None, batch: PackedBatch, rope: RotaryRows | None) -> tuple[Tensor, Tensor | None]:
    stream: tuple[Tensor, Tensor | None] = block(hidden, update, batch, rope)
    return stream


def _fused_step(
    block: Block, hidden: Tensor, update: Tensor | None, batch: PackedBatch, rope: RotaryRows | None
) -> tuple[Tensor, Tensor | None]:
    return fused_training.advance(block, hidden, batch, rope), update  # there never is one: this block adds its own


# In standard deviations; ModernBERT's init_cutoff_factor.
INIT_CUTOFF = 2.0


def init_weights(encoder: Encoder, *, seed: int) -> Encoder:
    """Draw all weights anew, in place.

    Args:
        encoder: Its configuration gives the standard deviation and the number of layers L.
        seed: Of torch's generator on the CPU; equal seeds give equal weights.

    Returns:
        The same encoder.
    """
    generator = torch.Generator().manual_seed(seed)
    std = encoder.config.initializer_range
    residual_std = std / math.sqrt(2 * encoder.config.num_layers)
    for name, module in encoder.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            scale = residual_std if name.endswith(("attention.out", "mlp.down")) else std
            nn.init.trunc_normal_(module.weight, std=scale, a=-INIT_CUTOFF * scale, b=INIT_CUTOFF * scale, generator=generator)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            nn.init.ones_(module.weight)
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter):
            nn.init.zeros_(bias)
    return encoder
