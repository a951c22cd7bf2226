"""The shape of an encoder, as one set of switches, and its Hugging Face ``config.json`` both ways.

ModernBERT and BERT are values of `EncoderConfig`, not subclasses. Both generations of ModernBERT keys are read and
written: v4 (``global_attn_every_n_layers``, ``global_rope_theta``) and v5 (``layer_types``, ``rope_parameters``).

Source: ModernBERT, arXiv:2412.13663, section 2.1 and Table 4; BERT, arXiv:1810.04805; the published config.json files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from encoder.errors import InputError

Family = Literal["modernbert", "bert"]
LayerType = Literal["global", "local"]
ConfigStyle = Literal["v4", "v5"]

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")
# Hugging Face's names for the same functions.
HF_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
TO_HF_ACTIVATION = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu", "relu": "relu"}
HF_LAYER_TYPES: dict[str, LayerType] = {"full_attention": "global", "sliding_attention": "local"}
TO_HF_LAYER_TYPE = {ours: theirs for theirs, ours in HF_LAYER_TYPES.items()}


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
        if not self.layer_types:
            raise InputError("layer_types must name at least one layer")
        if self.hidden_size % self.num_heads:
            raise InputError(f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}")
        if self.positions == "rope" and self.head_width % 2:
            raise InputError(f"RoPE needs an even head width, got hidden_size / num_heads = {self.head_width}")
        if self.activation not in ACTIVATIONS:
            raise InputError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        if "local" in self.layer_types and (self.window < 2 or self.window % 2):
            raise InputError(f"window must be even and >= 2, got {self.window}")
        if self.positions == "rope" and min(self.global_theta, self.local_theta) <= 0:
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
    def modernbert(
        cls,
        *,
        vocab_size: int,
        hidden_size: int,
        num_heads: int,
        intermediate_size: int,
        layer_types: Sequence[LayerType],
        max_positions: int = 8192,
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
            first_attention_norm=False,
            final_norm=True,
        )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> EncoderConfig:
        """Read a parsed Hugging Face config.json.

        Raises:
            InputError: The architecture or a setting is not one of ours; the message names the key.
        """
        family = hf.get("model_type")
        if family not in READERS:
            raise InputError(f"config.json: model_type must be one of {', '.join(sorted(READERS))}, got {family!r}")
        try:
            return READERS[family](hf)
        except KeyError as error:
            raise InputError(f"config.json: the key {error.args[0]!r} is missing") from error

    def to_hf(self, *, style: ConfigStyle = "v4") -> dict[str, Any]:
        """This architecture as a Hugging Face config.json.

        Args:
            style: For ModernBERT: v4 keys, which transformers 4 and 5 both read, or v5 keys.
        """
        return WRITERS[self.family](self, style)


def global_every(layers: int, every: int) -> tuple[LayerType, ...]:
    """Layer types with a global layer first and then at every ``every``-th layer.

    Example:
        >>> global_every(4, 3)
        ('global', 'local', 'local', 'global')
    """
    if every < 1:
        raise InputError(f"global_attn_every_n_layers must be >= 1, got {every}")
    return tuple("global" if layer % every == 0 else "local" for layer in range(layers))


def _activation(name: object) -> str:
    if name not in HF_ACTIVATIONS:
        raise InputError(f"config.json: the activation must be one of {', '.join(sorted(HF_ACTIVATIONS))}, got {name!r}")
    return HF_ACTIVATIONS[str(name)]


def _layer_types(hf: Mapping[str, Any]) -> tuple[LayerType, ...]:
    names = hf.get("layer_types")
    if names is None:
        return global_every(hf["num_hidden_layers"], hf.get("global_attn_every_n_layers", 3))
    unknown = sorted({str(name) for name in names} - HF_LAYER_TYPES.keys())
    if unknown:
        raise InputError(f"config.json: layer_types must be {' or '.join(HF_LAYER_TYPES)}, got {', '.join(unknown)}")
    if len(names) != hf["num_hidden_layers"]:
        raise InputError(f"config.json: layer_types names {len(names)} layers, num_hidden_layers says {hf['num_hidden_layers']}")
    return tuple(HF_LAYER_TYPES[name] for name in names)


def _thetas(hf: Mapping[str, Any]) -> tuple[float, float]:
    """RoPE bases of global and local layers, from v5's rope_parameters or v4's two keys."""
    if hf.get("rope_scaling") is not None:
        raise InputError(f"config.json: rope_scaling is not supported, got {hf['rope_scaling']!r}")
    by_type = hf.get("rope_parameters")
    if by_type is None:
        global_theta = float(hf.get("global_rope_theta", 160_000.0))
        local_theta = hf.get("local_rope_theta", 10_000.0)
        # Old configs write null for "the same as in global layers".
        return global_theta, global_theta if local_theta is None else float(local_theta)
    thetas = []
    for name in HF_LAYER_TYPES:
        # A model with global layers only has no entry for the other type; its value is then never used.
        rope = by_type.get(name) or by_type.get("full_attention") or {}
        if rope.get("rope_type", "default") != "default":
            raise InputError(f"config.json: rope_parameters.{name}.rope_type must be 'default', got {rope['rope_type']!r}")
        if "rope_theta" not in rope:
            raise InputError(f"config.json: rope_parameters.{name}.rope_theta is missing")
        thetas.append(float(rope["rope_theta"]))
    return thetas[0], thetas[1]


def _read_modernbert(hf: Mapping[str, Any]) -> EncoderConfig:
    global_theta, local_theta = _thetas(hf)
    eps = hf["norm_eps"] if "norm_eps" in hf else hf.get("layer_norm_eps", 1e-5)
    attention_dropout = hf.get("attention_dropout", 0.0)
    return EncoderConfig(
        family="modernbert",
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        num_heads=hf["num_attention_heads"],
        intermediate_size=hf["intermediate_size"],
        layer_types=_layer_types(hf),
        max_positions=hf["max_position_embeddings"],
        norm_position="pre",
        mlp="gated",
        positions="rope",
        activation=_activation(hf.get("hidden_activation", "gelu")),
        window=hf.get("local_attention", 128),
        global_theta=global_theta,
        local_theta=local_theta,
        norm_eps=eps,
        norm_bias=hf.get("norm_bias", False),
        attention_bias=hf.get("attention_bias", False),
        mlp_bias=hf.get("mlp_bias", False),
        first_attention_norm=False,
        final_norm=True,
        embedding_dropout=hf.get("embedding_dropout", 0.0),
        attention_dropout=attention_dropout,
        attention_output_dropout=attention_dropout,  # transformers uses one value for both
        mlp_inner_dropout=hf.get("mlp_dropout", 0.0),
        initializer_range=hf.get("initializer_range", 0.02),
        pad_token_id=hf.get("pad_token_id", 50283),
        cls_token_id=hf.get("cls_token_id"),
        sep_token_id=hf.get("sep_token_id"),
    )


def _write_modernbert(config: EncoderConfig, style: ConfigStyle) -> dict[str, Any]:
    hf: dict[str, Any] = {
        "architectures": ["ModernBertModel"],
        "model_type": "modernbert",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_activation": TO_HF_ACTIVATION[config.activation],
        "max_position_embeddings": config.max_positions,
        "local_attention": config.window,
        "norm_eps": config.norm_eps,
        "norm_bias": config.norm_bias,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "embedding_dropout": config.embedding_dropout,
        "attention_dropout": config.attention_dropout,
        "mlp_dropout": config.mlp_inner_dropout,
        "initializer_range": config.initializer_range,
        "pad_token_id": config.pad_token_id,
    }
    if config.cls_token_id is not None and config.sep_token_id is not None:
        hf |= {"cls_token_id": config.cls_token_id, "bos_token_id": config.cls_token_id}
        hf |= {"sep_token_id": config.sep_token_id, "eos_token_id": config.sep_token_id}
    every = _period(config.layer_types)
    if style == "v5" or every is None:  # v4 has no words for an irregular pattern
        hf["layer_types"] = [TO_HF_LAYER_TYPE[kind] for kind in config.layer_types]
        hf["rope_parameters"] = {
            theirs: {"rope_type": "default", "rope_theta": config.theta(ours)} for theirs, ours in HF_LAYER_TYPES.items()
        }
    else:
        hf["global_attn_every_n_layers"] = every
        hf["global_rope_theta"] = config.global_theta
        hf["local_rope_theta"] = config.local_theta
    return hf


def _period(layer_types: tuple[LayerType, ...]) -> int | None:
    """The n of "every n-th layer is global", None if there is none."""
    candidates = (every for every in range(1, len(layer_types) + 1) if global_every(len(layer_types), every) == layer_types)
    return next(candidates, None)


def _read_bert(hf: Mapping[str, Any]) -> EncoderConfig:
    if hf.get("position_embedding_type", "absolute") != "absolute":
        raise InputError(f"config.json: position_embedding_type must be 'absolute', got {hf['position_embedding_type']!r}")
    if hf.get("is_decoder", False):
        raise InputError("config.json: is_decoder must be false: a causal BERT is not an encoder")
    dropout = hf.get("hidden_dropout_prob", 0.1)
    return EncoderConfig(
        family="bert",
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        num_heads=hf["num_attention_heads"],
        intermediate_size=hf["intermediate_size"],
        layer_types=("global",) * hf["num_hidden_layers"],
        max_positions=hf["max_position_embeddings"],
        norm_position="post",
        mlp="plain",
        positions="absolute",
        activation=_activation(hf.get("hidden_act", "gelu")),
        norm_eps=hf.get("layer_norm_eps", 1e-12),
        norm_bias=True,
        attention_bias=True,
        mlp_bias=True,
        type_vocab_size=hf.get("type_vocab_size", 2),
        embedding_dropout=dropout,
        attention_dropout=hf.get("attention_probs_dropout_prob", 0.1),
        attention_output_dropout=dropout,
        mlp_output_dropout=dropout,
        initializer_range=hf.get("initializer_range", 0.02),
        pad_token_id=hf.get("pad_token_id", 0),
    )


def _write_bert(config: EncoderConfig, style: ConfigStyle) -> dict[str, Any]:
    del style  # BERT's keys have not changed
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": "gelu_new" if config.activation == "gelu_tanh" else config.activation,
        "max_position_embeddings": config.max_positions,
        "position_embedding_type": "absolute",
        "type_vocab_size": config.type_vocab_size,
        "layer_norm_eps": config.norm_eps,
        "hidden_dropout_prob": config.embedding_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "initializer_range": config.initializer_range,
        "pad_token_id": config.pad_token_id,
    }


READERS = {"modernbert": _read_modernbert, "bert": _read_bert}
WRITERS = {"modernbert": _write_modernbert, "bert": _write_bert}
