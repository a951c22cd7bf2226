"""The shape of an encoder, as one set of switches. ModernBERT and BERT are values of it, not subclasses.

Source: ModernBERT, arXiv:2412.13663, section 2.1 and Table 4; BERT, arXiv:1810.04805.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from encoder.errors import InputError

Family = Literal["modernbert", "bert"]
LayerType = Literal["global", "local"]

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")
DROPOUTS = ("embedding_dropout", "attention_dropout", "attention_output_dropout", "mlp_inner_dropout", "mlp_output_dropout")


@dataclass(frozen=True)
class EncoderConfig:
    """An encoder's architecture; checked when it is made.

    Raises:
        InputError: A value is out of range or two values contradict each other; the message names the field.
    """

    family: Family
    """Whose config.json and tensor names this encoder is stored under."""
    vocab_size: int
    """Rows of the token embedding, V."""
    hidden_size: int
    """Model width, D."""
    num_heads: int
    """Attention heads, H; the head width K is hidden_size / num_heads."""
    intermediate_size: int
    """Width inside the MLP; a gated MLP's first matrix has twice as many rows."""
    layer_types: tuple[LayerType, ...]
    """For each layer: attention over the whole sequence (global) or inside the window (local)."""
    max_positions: int
    """Longest sequence, in tokens."""
    norm_position: Literal["pre", "post"]
    """LayerNorm before each sub-layer (ModernBERT) or after the residual sum (BERT)."""
    mlp: Literal["gated", "plain"]
    """GeGLU-style gate, or one activation between two matrices."""
    positions: Literal["rope", "absolute"]
    """Rotary positions on queries and keys, or a learnt vector added to the embedding."""
    activation: str = "gelu"
    """One of `ACTIVATIONS`; gelu is the exact (erf) form."""
    window: int = 128
    """Local layers: a token sees |i - j| <= window // 2, both ends included."""
    global_theta: float = 160_000.0
    """RoPE base of the global layers."""
    local_theta: float = 10_000.0
    """RoPE base of the local layers."""
    norm_eps: float = 1e-5
    """Added to the variance in every LayerNorm."""
    norm_bias: bool = False
    """LayerNorm has a bias."""
    attention_bias: bool = False
    """The attention's matrices have biases."""
    mlp_bias: bool = False
    """The MLP's matrices have biases."""
    first_attention_norm: bool = True
    """False leaves the norm before the first attention away (the embedding norm has just been applied)."""
    final_norm: bool = False
    """A LayerNorm after the last block."""
    type_vocab_size: int = 0
    """Token types (BERT's segments); 0 for none."""
    embedding_dropout: float = 0.0
    """Dropout on the embedding's output."""
    attention_dropout: float = 0.0
    """Dropout on the attention probabilities."""
    attention_output_dropout: float = 0.0
    """Dropout on what the attention adds to the residual."""
    mlp_inner_dropout: float = 0.0
    """Dropout between the MLP's activation and its second matrix."""
    mlp_output_dropout: float = 0.0
    """Dropout on what the MLP adds to the residual."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    pad_token_id: int = 0
    """Only written to config.json; nothing is padded here."""
    cls_token_id: int | None = None
    """Written to config.json where the family has the key."""
    sep_token_id: int | None = None
    """Written to config.json where the family has the key."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_heads", "intermediate_size", "max_positions"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in DROPOUTS:
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be >= 0 and < 1, got {getattr(self, name)}")
        if not self.layer_types:
            raise InputError("layer_types must name at least one layer")
        if self.hidden_size % self.num_heads:
            raise InputError(f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}")
        if self.positions == "rope":
            self._check_rope()
        if self.activation not in ACTIVATIONS:
            raise InputError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        if "local" in self.layer_types and (self.window < 2 or self.window % 2):
            raise InputError(f"window must be even and >= 2, got {self.window}")

    def _check_rope(self) -> None:
        if self.head_width % 2:
            raise InputError(f"RoPE needs an even head width, got hidden_size / num_heads = {self.head_width}")
        if min(self.global_theta, self.local_theta) <= 0:
            raise InputError(f"RoPE theta must be > 0, got {self.global_theta} (global) and {self.local_theta} (local)")

    @property
    def num_layers(self) -> int:
        """Number of blocks, L."""
        return len(self.layer_types)

    @property
    def head_width(self) -> int:
        """Width of one head, K."""
        return self.hidden_size // self.num_heads

    def theta(self, layer_type: LayerType) -> float:
        """RoPE base of a layer of this type."""
        return self.global_theta if layer_type == "global" else self.local_theta

    def layer_window(self, layer: int) -> int | None:
        """Window of a layer, None where it is global."""
        return self.window if self.layer_types[layer] == "local" else None

    @classmethod
    def modernbert(  # noqa: PLR0913 - keywords alone, one for each number of the architecture
        cls,
        *,
        vocab_size: int,
        hidden_size: int,
        num_heads: int,
        intermediate_size: int,
        layer_types: Sequence[LayerType],
        max_positions: int = 8192,
        window: int = 128,
        global_theta: float = 160_000.0,
        local_theta: float = 10_000.0,
        pad_token_id: int = 0,
        cls_token_id: int | None = None,
        sep_token_id: int | None = None,
    ) -> EncoderConfig:
        """A ModernBERT of any size: pre-norm, GeGLU, RoPE, no biases, no norm before the first attention."""
        return cls(
            family="modernbert",
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_heads=num_heads,
            intermediate_size=intermediate_size,
            layer_types=tuple(layer_types),
            max_positions=max_positions,
            norm_position="pre",
            mlp="gated",
            positions="rope",
            window=window,
            global_theta=global_theta,
            local_theta=local_theta,
            first_attention_norm=False,
            final_norm=True,
            pad_token_id=pad_token_id,
            cls_token_id=cls_token_id,
            sep_token_id=sep_token_id,
        )


def global_every(layers: int, every: int) -> tuple[LayerType, ...]:
    """Layer types with a global layer first and then at every ``every``-th layer.

    Example:
        >>> global_every(4, 3)
        ('global', 'local', 'local', 'global')
    """
    if every < 1:
        raise InputError(f"global_attn_every_n_layers must be >= 1, got {every}")
    return tuple("global" if layer % every == 0 else "local" for layer in range(layers))
