"""The architecture of an encoder, as one set of switches. Every model of the family is a value of it, not a subclass.

Source: ModernBERT, arXiv:2412.13663, section 2.1 and Table 4; BERT, arXiv:1810.04805; MosaicBERT, arXiv:2312.17482; NomicBERT,
arXiv:2402.01613; GTE, arXiv:2407.19669.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_type_hints

from quiver.encoder.errors import InputError

Family = Literal["modernbert", "bert", "roberta", "mosaicbert", "nomicbert", "gte", "quiver"]
LayerType = Literal["global", "local"]
NormPosition = Literal["pre", "post", "parallel"]
Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]
RopeKind = Literal["linear", "ntk", "yarn"]
InitMethod = Literal["full_megatron", "mitchell", "normal", "kaiming_normal", "fan_in"]
Tiling = Literal["wraparound", "random-edges", "from-edge"]
"""Where the values of an enlarged encoder come from, see `quiver.encoder.pretraining.tiling`."""
Precision = Literal["float", "int8"]
"""Precision of matrix products in inference: the values of the weights, or quantised."""

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
INIT_METHODS: Mapping[InitMethod, str] = {
    "full_megatron": "truncated normals of width ``std``, output matrices divided by sqrt(2 L); ModernBERT's",
    "mitchell": "truncated normals of width 1 / sqrt(fan in), output matrices of layer l, from 0, divided by sqrt(2 (l + 1)): by layer",
    "normal": "normals of width ``std``; BERT's",
    "kaiming_normal": "normals of width sqrt(2 / fan in)",
    "fan_in": "normals of width 1 / sqrt(fan in)",
}
"""Ways to draw the weights of an encoder of L layers; output matrices are those that write to the residual stream.

Source: FlexBERT's initialization.py (AnswerDotAI/ModernBERT at 8c57a0f); Megatron-LM, arXiv:1909.08053; He et al., arXiv:1502.01852.
"""
INITIAL = ("initial_norm_position", "initial_mlp", "initial_rotary")
DROPOUTS = ("embedding_dropout", "attention_dropout", "attention_output_dropout", "mlp_inner_dropout", "mlp_output_dropout")


class ConfigError(InputError):
    """Values of a configuration are out of range or contradict each other; ``problems`` has for each the field and what is wrong."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{field} {text}" for field, text in problems))
        self.problems = list(problems)


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies are changed for texts longer than those of pretraining.

    Source: YaRN, arXiv:2309.00071, section 3; the values have the meaning they have in Hugging Face's rope_parameters.
    """

    kind: RopeKind  # linear divides every frequency by the factor; ntk raises theta; yarn scales low frequencies and keeps high ones
    factor: float  # ratio of the longest text to ``original_positions``
    original_positions: int  # longest text of pretraining, in tokens
    beta_fast: float = 32.0  # yarn: dimensions that make more turns than this within ``original_positions`` keep their frequency
    beta_slow: float = 1.0  # yarn: dimensions that make fewer turns than this are divided by the factor
    attention_factor: float | None = None  # yarn: factor of cosines and sines; None for 0.1 ln(factor) + 1

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
    """An encoder's architecture; a ConfigError on construction names the fields that are out of range or contradict each other."""

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
    norm_position: NormPosition
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
    initial_layers: int = 0
    """Number of layers at the beginning that differ from the others by the ``initial_`` settings (FlexBERT's ``num_initial_layers``)."""
    initial_norm_position: NormPosition | None = None
    """Norm position of the initial layers; None for that of the others (FlexBERT's ``initial_bert_layer``)."""
    initial_mlp: Literal["gated", "plain"] | None = None
    """MLP of the initial layers; None for that of the others (FlexBERT's ``initial_mlp_layer``)."""
    initial_rotary: bool | None = None
    """Whether the initial layers rotate queries and keys; None for as the others (FlexBERT's ``initial_attention_layer``)."""
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
        if problems := list(self._range_problems()) or [*self._size_problems(), *self._norm_problems(), *self._position_problems()]:
            raise ConfigError(problems)

    def _range_problems(self) -> Iterator[tuple[str, str]]:
        """Values that are wrong by themselves."""
        for name in ("vocab_size", "hidden_size", "num_heads", "intermediate_size", "max_positions"):
            if getattr(self, name) < 1:
                yield name, f"must be >= 1, got {getattr(self, name)}"
        for name in DROPOUTS:
            if not 0 <= getattr(self, name) < 1:
                yield name, f"must be >= 0 and < 1, got {getattr(self, name)}"
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                yield name, f"must be one of {', '.join(map(str, choices))}, got {getattr(self, name)!r}"
        if unknown := sorted({str(kind) for kind in self.layer_types} - set(get_args(LayerType))):
            yield "layer_types", f"must be global or local, got {', '.join(unknown)}"
        if self.position_offset < 0:
            yield "position_offset", f"must be >= 0, got {self.position_offset}"
        if self.positions == "rope" and not 0 < self.rotary_fraction <= 1:
            yield "rotary_fraction", f"must be > 0 and <= 1, got {self.rotary_fraction}"

    def _size_problems(self) -> Iterator[tuple[str, str]]:
        if not self.layer_types:
            yield "layer_types", "must name at least one layer"
        if self.hidden_size % self.num_heads:
            yield "num_heads", f"must divide hidden_size {self.hidden_size}, got {self.num_heads}"
        elif self.positions == "rope" and (self.rotary_width % 2 or self.rotary_width != self.head_width * self.rotary_fraction):
            yield (
                "num_heads",
                f"must give an even head width times rotary_fraction, got {self.head_width} times {self.rotary_fraction}",
            )
        if "local" in self.layer_types and (self.window < 2 or self.window % 2):
            yield "window", f"must be even and >= 2, got {self.window}"
        named = [name for name in INITIAL if getattr(self, name) is not None]
        if not 0 <= self.initial_layers <= self.num_layers:
            yield "initial_layers", f"must be >= 0 and <= the number of layers {self.num_layers}, got {self.initial_layers}"
        elif self.initial_layers and not named:
            yield "initial_layers", f"requires one of {', '.join(INITIAL)}"
        if not self.initial_layers:
            yield from ((name, "requires initial_layers >= 1") for name in named)

    def _norm_problems(self) -> Iterator[tuple[str, str]]:
        if self.norm == "rmsnorm" and self.norm_bias:
            yield "norm_bias", "must be false with norm rmsnorm"
        if self.layer_types and not self.first_attention_norm:
            if self.layer_norm_position(0) == "post":
                yield "first_attention_norm", "must be true with norm_position post, where it follows the attention"
            elif not self.embedding_norm:
                yield "first_attention_norm", "false requires embedding_norm true"

    def _position_problems(self) -> Iterator[tuple[str, str]]:
        if self.positions != "absolute" and self.position_offset:
            yield "position_offset", f"must be 0 unless positions is absolute, got {self.position_offset}"
        if self.positions == "rope":
            if min(self.global_theta, self.local_theta) <= 0:
                yield "global_theta", f"and local_theta must be > 0, got {self.global_theta} and {self.local_theta}"
            return
        rotary = {"rotary_fraction": 1.0, "global_scaling": None, "local_scaling": None, "initial_rotary": None}
        for name, default in rotary.items():
            if getattr(self, name) != default:
                yield name, f"requires positions rope, but positions is {self.positions}"

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

    def without_dropout(self) -> EncoderConfig:
        """Return a copy with all dropouts 0, as published checkpoints have."""
        none: dict[str, Any] = dict.fromkeys(DROPOUTS, 0.0)
        return replace(self, **none)

    def layer_norm_position(self, layer: int) -> NormPosition:
        """Return the norm position of a layer."""
        return self.initial_norm_position or self.norm_position if layer < self.initial_layers else self.norm_position

    def layer_mlp(self, layer: int) -> Literal["gated", "plain"]:
        """Return the MLP of a layer."""
        return self.initial_mlp or self.mlp if layer < self.initial_layers else self.mlp

    def layer_rotates(self, layer: int) -> bool:
        """Return whether a layer rotates queries and keys."""
        return self.positions == "rope" and not (layer < self.initial_layers and self.initial_rotary is False)

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
_HINTS = get_type_hints(EncoderConfig)
CHOICES = {name: get_args(_HINTS[name]) for name in ("family", "norm_position", "mlp", "positions", "norm")} | {"activation": ACTIVATIONS}
