"""The encoder: a packed batch in, one hidden state a token out. Nothing is padded on the way.

Shapes: B sequences, N packed tokens, D model width.
Source: ModernBERT, arXiv:2412.13663, section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from encoder.config import EncoderConfig
from encoder.errors import InputError
from encoder.layers import Block, Embeddings
from encoder.packing import PackedBatch
from encoder.positions import RotaryTable


class Encoder(nn.Module):
    """A bidirectional transformer over packed batches.

    Args:
        config: Its architecture; the weights are torch's defaults until they are loaded or initialised.

    Example:
        >>> from encoder.packing import pack_ids
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
        self.final_norm = (
            nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias) if config.final_norm else nn.Identity()
        )
        # One table a theta, not one a layer: theta -> module, in layer order.
        thetas = dict.fromkeys(config.theta(kind) for kind in config.layer_types) if config.positions == "rope" else {}
        self._table_of = {theta: place for place, theta in enumerate(thetas)}
        self.rotary = nn.ModuleList(
            RotaryTable(theta=theta, head_width=config.head_width, max_positions=config.max_positions) for theta in thetas
        )

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embeddings.tokens.weight.device

    @property
    def num_parameters(self) -> int:
        """Number of weights."""
        return sum(weight.numel() for weight in self.parameters())

    def forward(self, batch: PackedBatch) -> Tensor:
        """Encode a batch.

        Args:
            batch: B sequences, N tokens in all; it is moved to the weights' device if it lies elsewhere.

        Returns:
            Hidden states after the last norm, (N, D), in the order of ``batch.ids``.

        Raises:
            InputError: A sequence is longer than the positions this encoder has.
        """
        if batch.max_seqlen > self.config.max_positions:
            raise InputError(f"a sequence has {batch.max_seqlen} tokens, this encoder has {self.config.max_positions} positions")
        batch = batch.to(self.device)
        rows = [table(batch.positions) for table in self.rotary]
        hidden: Tensor = self.embeddings(batch)
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            rope = rows[self._table_of[self.config.theta(kind)]] if rows else None
            hidden = layer(hidden, batch, rope)
        output: Tensor = self.final_norm(hidden)
        return output
