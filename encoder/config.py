"""The shape of an encoder, as one set of switches. Every member of the family is a value of it, not a subclass.

Source: ModernBERT, arXiv:2412.13663, section 2.1 and Table 4; BERT, arXiv:1810.04805; MosaicBERT, arXiv:2312.17482;
NomicBERT, arXiv:2402.01613; GTE, arXiv:2407.19669.
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
"""How matrices are multiplied in inference: with the weights' own values, or quantised."""

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
    """How many times longer than ``original_positions`` a text may be."""
    original_positions: int
    """Longest text of pretraining, in tokens."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this within ``original_positions`` keep their frequency."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are divided by the factor."""
    attention_factor: float | None = None
    """yarn: what cosines and sines are multiplied by; None for 0.1 ln(factor) + 1."""

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
    norm_position: Literal["pre", "post", "parallel"]
    """Norm before each sub-layer (ModernBERT), after the residual sum (BERT), or one before attention and MLP side by side."""
    mlp: Literal["gated", "plain"]
    """GeGLU-style gate, or one activation between two matrices."""
    positions: Literal["rope", "absolute", "alibi"]
    """Rotary positions on queries and keys, a learnt vector added to the embedding, or a penalty on distance (ALiBi)."""
    activation: str = "gelu"
    """One of `ACTIVATIONS`; gelu is the exact (erf) form."""
    window: int = 128
    """Local layers: a token sees |i - j| <= window // 2, both ends included."""
    global_theta: float = 160_000.0
    """RoPE base of the global layers."""
    local_theta: float = 10_000.0
    """RoPE base of the local layers."""
    global_scaling: RopeScaling | None = None
    """How the global layers' RoPE is stretched."""
    local_scaling: RopeScaling | None = None
    """How the local layers' RoPE is stretched."""
    rotary_fraction: float = 1.0
    """Share of a head's width that RoPE turns; the rest carries no position."""
    position_offset: int = 0
    """Row of the position embedding that a text's first token takes (RoBERTa: 2)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Every norm of the model."""
    norm_eps: float = 1e-5
    """Added to the variance (layernorm) or the mean square (rmsnorm)."""
    norm_bias: bool = False
    """The norms have a bias; rmsnorm cannot."""
    qkv_bias: bool = False
    """The matrix of queries, keys and values has a bias."""
    attention_output_bias: bool = False
    """The attention's output matrix has a bias."""
    mlp_input_bias: bool = False
    """The MLP's first matrix has a bias."""
    mlp_output_bias: bool = False
    """The MLP's second matrix has a bias."""
    embedding_norm: bool = True
    """A norm after the embedding."""
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
            raise InputError("first_attention_norm may only be left away where embedding_norm is true")
        if self.position_offset < 0 or (self.position_offset and self.positions != "absolute"):
            raise InputError(f"position_offset must be >= 0, and 0 unless positions is absolute, got {self.position_offset}")

    def _check_rope(self) -> None:
        if not 0 < self.rotary_fraction <= 1:
            raise InputError(f"rotary_fraction must be > 0 and <= 1, got {self.rotary_fraction}")
        if self.rotary_width % 2 or self.rotary_width != self.head_width * self.rotary_fraction:
            raise InputError(
                f"RoPE turns pairs: head width {self.head_width} (hidden_size / num_heads) times rotary_fraction "
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
        """Leading dimensions of a head that RoPE turns, R."""
        return int(self.head_width * self.rotary_fraction)

    def theta(self, layer_type: LayerType) -> float:
        """RoPE base of a layer of this type."""
        return self.global_theta if layer_type == "global" else self.local_theta

    def scaling(self, layer_type: LayerType) -> RopeScaling | None:
        """RoPE scaling of a layer of this type."""
        return self.global_scaling if layer_type == "global" else self.local_scaling

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


def _choices() -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(EncoderConfig)
    return {name: get_args(hints[name]) for name in ("family", "norm_position", "mlp", "positions", "norm")}


# The values of each switch, for checks at run time: a config may come from a file or a command line.
CHOICES = _choices()
