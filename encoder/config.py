"""The architecture of an encoder, as one set of switches. Every model of the family is a value of it, not a subclass.

Source: ModernBERT, arXiv:2412.13663, section 2.1 and Table 4; BERT, arXiv:1810.04805; MosaicBERT, arXiv:2312.17482; NomicBERT,
arXiv:2402.01613; GTE, arXiv:2407.19669.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from quiver.encoder.errors import InputError

Family = Literal["modernbert", "bert", "roberta", "mosaicbert", "nomicbert", "gte", "quiver"]
LayerType = Literal["global", "local"]
RopeKind = Literal["linear", "ntk", "yarn"]
Precision = Literal["float", "int8"]
"""Precision of matrix products in inference: the values of the weights, or quantised."""

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")
DROPOUTS = ("embedding_dropout", "attention_dropout", "attention_output_dropout", "mlp_inner_dropout", "mlp_output_dropout")


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies are changed for texts longer than those of pretraining.

    Source: YaRN, arXiv:2309.00071, section 3; the values have the meaning they have in Hugging Face's rope_parameters.
    """

    kind: RopeKind
    """linear divides every frequency by the factor; ntk raises theta; yarn scales low frequencies and keeps high ones."""
    factor: float
    """Ratio of the longest text to ``original_positions``."""
    original_positions: int
    """Longest text of pretraining, in tokens."""
    beta_fast: float = 32.0
    """yarn: dimensions that make more turns than this within ``original_positions`` keep their frequency."""
    beta_slow: float = 1.0
    """yarn: dimensions that make fewer turns than this are divided by the factor."""
    attention_factor: float | None = None
    """yarn: factor of cosines and sines; None for 0.1 ln(factor) + 1."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeKind):
            raise InputError(f"RoPE scaling: kind must be one of {', '.join(get_args(RopeKind))}, got {self.kind!r}")
        if self.factor < 1:
            raise InputError(f"RoPE scaling: factor must be >= 1, got {self.factor}")
        if self.original_positions < 1:
            raise InputError(f"RoPE scaling: original_positions must be >= 1, got {self.original_positions}")
        if not 0 < self.beta_slow <= self.beta_fast:
            raise InputError(f"RoPE scaling: beta_slow must be > 0 and <= beta_fast, got {self.beta_slow} and {self.beta_fast}")


@dataclass(frozen=True)
class EncoderConfig:
    """An encoder's architecture; validated on construction.

    Raises:
        InputError: A value is out of range or two values contradict each other; the message names the field.
    """

    family: Family
    """Family whose config.json and tensor names are used in checkpoints."""
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
    norm_position: Literal["pre", "post", "parallel"]
    """Norm before each sub-layer (ModernBERT), after the residual sum (BERT), or one before attention and MLP in parallel."""
    mlp: Literal["gated", "plain"]
    """GeGLU-style gate, or one activation between two matrices."""
    positions: Literal["rope", "absolute", "alibi"]
    """Rotary positions on queries and keys, a learnt vector added to the embedding, or a penalty on distance (ALiBi)."""
    activation: str = "gelu"
    """One of `ACTIVATIONS`; gelu is the exact (erf) form."""
    window: int = 128
    """Local layers: a token sees tokens at a distance of at most window // 2, both ends included."""
    global_theta: float = 160_000.0
    """RoPE base of the global layers."""
    local_theta: float = 10_000.0
    """RoPE base of the local layers."""
    global_scaling: RopeScaling | None = None
    """Scaling of RoPE in the global layers, for long texts."""
    local_scaling: RopeScaling | None = None
    """Scaling of RoPE in the local layers, for long texts."""
    rotary_fraction: float = 1.0
    """Share of a head's width that RoPE rotates; the rest carries no position."""
    position_offset: int = 0
    """Row of the position embedding for the first token of a text (RoBERTa: 2). The row before it is that of the padding token, whose id
    is this less 1 and which takes no position."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Type of every norm of the model."""
    norm_eps: float = 1e-5
    """Added to the variance (layernorm) or the mean square (rmsnorm)."""
    norm_bias: bool = False
    """Whether the norms have a bias; not possible with rmsnorm."""
    qkv_bias: bool = False
    """Whether the matrix of queries, keys and values has a bias."""
    attention_output_bias: bool = False
    """Whether the attention's output matrix has a bias."""
    mlp_input_bias: bool = False
    """Whether the MLP's first matrix has a bias."""
    mlp_output_bias: bool = False
    """Whether the MLP's second matrix has a bias."""
    embedding_norm: bool = True
    """Whether a norm follows the embedding."""
    first_attention_norm: bool = True
    """Whether a norm precedes the first attention; ModernBERT has none there, because the embedding norm was just applied."""
    final_norm: bool = False
    """Whether a norm follows the last block."""
    type_vocab_size: int = 0
    """Number of token types (BERT's segments); 0 for none."""
    embedding_dropout: float = 0.0
    """Dropout on the embedding's output."""
    attention_dropout: float = 0.0
    """Dropout on the attention probabilities."""
    attention_output_dropout: float = 0.0
    """Dropout on the attention's contribution to the residual stream."""
    mlp_inner_dropout: float = 0.0
    """Dropout between the MLP's activation and its second matrix."""
    mlp_output_dropout: float = 0.0
    """Dropout on the MLP's contribution to the residual stream."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    pad_token_id: int = 0
    """Only written to config.json, because batches are not padded."""
    cls_token_id: int | None = None
    """Written to config.json if the family has the key."""
    sep_token_id: int | None = None
    """Written to config.json if the family has the key."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_heads", "intermediate_size", "max_positions"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in DROPOUTS:
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be >= 0 and < 1, got {getattr(self, name)}")
        for name in ("family", "norm_position", "mlp", "positions", "norm"):
            if getattr(self, name) not in CHOICES[name]:
                raise InputError(f"{name} must be one of {', '.join(CHOICES[name])}, got {getattr(self, name)!r}")
        self._check_layers()
        if self.positions == "rope":
            self._check_rope()

    def _check_layers(self) -> None:
        if not self.layer_types:
            raise InputError("layer_types must name at least one layer")
        if self.hidden_size % self.num_heads:
            raise InputError(f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}")
        if self.activation not in ACTIVATIONS:
            raise InputError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        if "local" in self.layer_types and (self.window < 2 or self.window % 2):
            raise InputError(f"window must be even and >= 2, got {self.window}")
        if unknown := sorted({str(kind) for kind in self.layer_types} - set(get_args(LayerType))):
            raise InputError(f"layer_types must be global or local, got {', '.join(unknown)}")
        if self.norm == "rmsnorm" and self.norm_bias:
            raise InputError("norm_bias must be false with norm rmsnorm")
        if self.norm_position != "post" and not self.first_attention_norm and not self.embedding_norm:
            raise InputError("first_attention_norm: false requires embedding_norm: true")
        if self.position_offset < 0 or (self.position_offset and self.positions != "absolute"):
            raise InputError(f"position_offset must be >= 0, and 0 unless positions is absolute, got {self.position_offset}")

    def _check_rope(self) -> None:
        if not 0 < self.rotary_fraction <= 1:
            raise InputError(f"rotary_fraction must be > 0 and <= 1, got {self.rotary_fraction}")
        if self.rotary_width % 2 or self.rotary_width != self.head_width * self.rotary_fraction:
            raise InputError(
                f"RoPE rotates pairs of coordinates: head width {self.head_width} (hidden_size / num_heads) times rotary_fraction "
                f"{self.rotary_fraction} must be an even number"
            )
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

    @property
    def rotary_width(self) -> int:
        """Leading dimensions of a head that RoPE rotates, R."""
        return int(self.head_width * self.rotary_fraction)

    def theta(self, layer_type: LayerType) -> float:
        """Return the RoPE base of a layer type."""
        return self.global_theta if layer_type == "global" else self.local_theta

    def scaling(self, layer_type: LayerType) -> RopeScaling | None:
        """Return the RoPE scaling of a layer type."""
        return self.global_scaling if layer_type == "global" else self.local_scaling

    def layer_window(self, layer: int) -> int | None:
        """Return the window of a layer, None if it is global."""
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
        """Make a ModernBERT of any size: pre-norm, GeGLU, RoPE, no biases, no norm before the first attention."""
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

    @classmethod
    def bert(
        cls,
        *,
        vocab_size: int,
        hidden_size: int,
        num_heads: int,
        intermediate_size: int,
        layers: int,
        max_positions: int = 512,
        dropout: float = 0.0,
    ) -> EncoderConfig:
        """Make a BERT of any size: post-norm, plain MLP, absolute positions, biases everywhere, two token types."""
        biases = ("norm_bias", "qkv_bias", "attention_output_bias", "mlp_input_bias", "mlp_output_bias")
        dropouts = ("embedding_dropout", "attention_dropout", "attention_output_dropout", "mlp_output_dropout")
        settings: dict[str, Any] = {**dict.fromkeys(biases, True), **dict.fromkeys(dropouts, dropout)}
        return cls(
            family="bert",
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_heads=num_heads,
            intermediate_size=intermediate_size,
            layer_types=global_every(layers, 1),
            max_positions=max_positions,
            norm_position="post",
            mlp="plain",
            positions="absolute",
            norm_eps=1e-12,
            type_vocab_size=2,
            **settings,
        )


def global_every(layers: int, every: int) -> tuple[LayerType, ...]:
    """Return layer types with a global layer first and then at every ``every``-th layer.

    Example:
        >>> global_every(4, 3)
        ('global', 'local', 'local', 'global')
    """
    if every < 1:
        raise InputError(f"global_attn_every_n_layers must be >= 1, got {every}")
    return tuple("global" if layer % every == 0 else "local" for layer in range(layers))


# Values of each switch, checked at run time because a config may come from a file or a command line.
CHOICES = {name: get_args(get_type_hints(EncoderConfig)[name]) for name in ("family", "norm_position", "mlp", "positions", "norm")}
