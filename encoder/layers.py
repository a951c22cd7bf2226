"""The parts of an encoder: embeddings, attention, MLP, block. Each takes its numbers from one `EncoderConfig`.

Shapes: N packed tokens, D model width, H heads, K head width, I MLP width.
Source: ModernBERT, arXiv:2412.13663, section 2.1; BERT, arXiv:1810.04805, section 3.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from encoder.attention import attend
from encoder.config import EncoderConfig
from encoder.packing import PackedBatch
from encoder.positions import rotate

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}

RotaryRows = tuple[Tensor, Tensor]


def layer_norm(config: EncoderConfig) -> nn.LayerNorm:
    """The family's LayerNorm over D."""
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


class Embeddings(nn.Module):
    """Token ids to hidden states: token vector, plus position and type vectors where the family has them, then a norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_positions, config.hidden_size) if config.positions == "absolute" else None
        self.token_types = nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        self.norm = layer_norm(config)
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, batch: PackedBatch) -> Tensor:
        """(N,) ids to (N, D)."""
        hidden = self.tokens(batch.ids)
        if self.token_types is not None:
            hidden = hidden + self.token_types.weight[0]  # single texts: every token is of the first type
        if self.positions is not None:
            hidden = hidden + self.positions(batch.positions)
        output: Tensor = self.dropout(self.norm(hidden))
        return output


class SelfAttention(nn.Module):
    """Multi-head self-attention on packed tokens, queries, keys and values from one matrix."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.window = config.layer_window(layer)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)
        self.probability_dropout = config.attention_dropout
        self.dropout = nn.Dropout(config.attention_output_dropout)

    def forward(self, hidden: Tensor, batch: PackedBatch, rope: RotaryRows | None) -> Tensor:
        """(N, D) to (N, D)."""
        qkv = self.qkv(hidden).unflatten(-1, (3, self.heads, -1))  # (N, 3, H, K)
        q, k, v = qkv.unbind(1)
        if rope is not None:
            q, k = rotate(qkv[:, :2], rope).unbind(1)
        mixed = attend(q, k, v, batch, self.window, dropout=self.probability_dropout if self.training else 0.0)
        output: Tensor = self.dropout(self.out(mixed.flatten(1)))
        return output


class MLP(nn.Module):
    """Two matrices and an activation; gated, the first matrix gives the activated half and its gate."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "gated"
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.up = nn.Linear(config.hidden_size, config.intermediate_size * (2 if self.gated else 1), bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.inner_dropout = nn.Dropout(config.mlp_inner_dropout)
        self.output_dropout = nn.Dropout(config.mlp_output_dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """(N, D) to (N, D)."""
        inner = self.up(hidden)  # (N, I) or (N, 2 I)
        if self.gated:
            activated, gate = inner.chunk(2, dim=-1)
            inner = self.activation(activated) * gate
        else:
            inner = self.activation(inner)
        output: Tensor = self.output_dropout(self.down(self.inner_dropout(inner)))
        return output


class Block(nn.Module):
    """Attention and MLP around a residual stream, with the norm before (pre) or after (post) each."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.pre_norm = config.norm_position == "pre"
        has_norm = layer > 0 or config.first_attention_norm
        self.attention_norm = layer_norm(config) if has_norm else nn.Identity()
        self.attention = SelfAttention(config, layer)
        self.mlp_norm = layer_norm(config)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, batch: PackedBatch, rope: RotaryRows | None) -> Tensor:
        """(N, D) to (N, D)."""
        if self.pre_norm:
            hidden = hidden + self.attention(self.attention_norm(hidden), batch, rope)
            output: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
            return output
        hidden = self.attention_norm(hidden + self.attention(hidden, batch, rope))
        output = self.mlp_norm(hidden + self.mlp(hidden))
        return output
