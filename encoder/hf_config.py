"""Hugging Face ``config.json`` to `EncoderConfig` and back.

Both generations of ModernBERT keys are read and written: v4 (``global_attn_every_n_layers``, ``global_rope_theta``) and v5
(``layer_types``, ``rope_parameters``). Where a file leaves a key out, transformers' default stands.

Source: the published config.json files; ``ModernBertConfig`` and ``BertConfig`` of transformers 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from encoder.config import EncoderConfig, Family, LayerType, global_every
from encoder.errors import InputError

ConfigStyle = Literal["v4", "v5"]

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
# transformers' defaults for files that leave them out.
GLOBAL_THETA = 160_000.0
LOCAL_THETA = 10_000.0


def config_from_hf(hf: Mapping[str, Any]) -> EncoderConfig:
    """Read a parsed config.json.

    Raises:
        InputError: The architecture or a setting is not one of ours; the message names the key.
    """
    family = hf.get("model_type")
    if not isinstance(family, str) or family not in READERS:
        raise InputError(f"config.json: model_type must be one of {', '.join(sorted(READERS))}, got {family!r}")
    return READERS[family](_Keys(hf))


def config_to_hf(config: EncoderConfig, *, style: ConfigStyle = "v4") -> dict[str, Any]:
    """An architecture as a config.json.

    Args:
        config: The architecture.
        style: For ModernBERT: v4 keys, which transformers 4 and 5 both read, or v5 keys.
    """
    return WRITERS[config.family](config, style)


class _Keys:
    """A parsed config.json whose values are asked for by key and type."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        self.hf = hf

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; without a default the key must be there."""
        value = self._value(key, default)
        if type(value) is not int:  # not isinstance: True is an int to Python
            raise InputError(f"config.json: {key} must be an integer, got {value!r}")
        return value

    def identifier(self, key: str) -> int | None:
        """A token id that may be absent or null."""
        return None if self.hf.get(key) is None else self.integer(key)

    def number(self, key: str, default: float) -> float:
        """A number; null counts as absent."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"config.json: {key} must be a number, got {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; absent is false."""
        value = self._value(key, False)
        if not isinstance(value, bool):
            raise InputError(f"config.json: {key} must be true or false, got {value!r}")
        return value

    def activation(self, key: str) -> str:
        """One of `ACTIVATIONS` under a Hugging Face name."""
        name = self._value(key, "gelu")
        if not isinstance(name, str) or name not in HF_ACTIVATIONS:
            raise InputError(f"config.json: {key} must be one of {', '.join(sorted(HF_ACTIVATIONS))}, got {name!r}")
        return HF_ACTIVATIONS[name]

    def _value(self, key: str, default: object) -> object:
        value = self.hf.get(key)
        if value is None and default is None:
            raise InputError(f"config.json: the key {key!r} is missing")
        return default if value is None else value


def _layer_types(keys: _Keys) -> tuple[LayerType, ...]:
    layers = keys.integer("num_hidden_layers")
    names = keys.hf.get("layer_types")
    if names is None:
        return global_every(layers, keys.integer("global_attn_every_n_layers", 3))
    if not isinstance(names, list):
        raise InputError(f"config.json: layer_types must be a list, got {names!r}")
    unknown = sorted({str(name) for name in names} - HF_LAYER_TYPES.keys())
    if unknown:
        raise InputError(f"config.json: layer_types must be {' or '.join(HF_LAYER_TYPES)}, got {', '.join(unknown)}")
    if len(names) != layers:
        raise InputError(f"config.json: layer_types names {len(names)} layers, num_hidden_layers says {layers}")
    return tuple(HF_LAYER_TYPES[name] for name in names)


def _thetas(keys: _Keys) -> tuple[float, float]:
    """RoPE bases of global and local layers, from v5's rope_parameters or v4's two keys; defaults as in transformers."""
    if keys.hf.get("rope_scaling") is not None:
        raise InputError(f"config.json: rope_scaling is not supported, got {keys.hf['rope_scaling']!r}")
    by_type = keys.hf.get("rope_parameters")
    if by_type is None:
        global_theta = keys.number("global_rope_theta", GLOBAL_THETA)
        # Old configs write null for "the same as in global layers".
        same = "local_rope_theta" in keys.hf and keys.hf["local_rope_theta"] is None
        return global_theta, global_theta if same else keys.number("local_rope_theta", LOCAL_THETA)
    if not isinstance(by_type, Mapping):
        raise InputError(f"config.json: rope_parameters must be an object, got {by_type!r}")
    return _theta(by_type, "full_attention", GLOBAL_THETA), _theta(by_type, "sliding_attention", LOCAL_THETA)


def _theta(by_type: Mapping[str, Any], name: str, default: float) -> float:
    """RoPE base of one layer type; a model without such layers need not name it."""
    rope = by_type.get(name)
    if rope is None:
        return default
    if not isinstance(rope, Mapping):
        raise InputError(f"config.json: rope_parameters.{name} must be an object, got {rope!r}")
    if rope.get("rope_type", "default") != "default":
        raise InputError(f"config.json: rope_parameters.{name}.rope_type must be 'default', got {rope['rope_type']!r}")
    if rope.get("rope_theta") is None:
        raise InputError(f"config.json: rope_parameters.{name}.rope_theta is missing")
    return _Keys(rope).number("rope_theta", default)


def _read_modernbert(keys: _Keys) -> EncoderConfig:
    global_theta, local_theta = _thetas(keys)
    attention_dropout = keys.number("attention_dropout", 0.0)
    return EncoderConfig(
        family="modernbert",
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_heads=keys.integer("num_attention_heads"),
        intermediate_size=keys.integer("intermediate_size"),
        layer_types=_layer_types(keys),
        max_positions=keys.integer("max_position_embeddings"),
        norm_position="pre",
        mlp="gated",
        positions="rope",
        activation=keys.activation("hidden_activation"),
        window=keys.integer("local_attention", 128),
        global_theta=global_theta,
        local_theta=local_theta,
        # Some published files carry layer_norm_eps too; transformers reads norm_eps alone.
        norm_eps=keys.number("norm_eps", 1e-5),
        norm_bias=keys.flag("norm_bias"),
        attention_bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
        first_attention_norm=False,
        final_norm=True,
        embedding_dropout=keys.number("embedding_dropout", 0.0),
        attention_dropout=attention_dropout,
        attention_output_dropout=attention_dropout,  # transformers uses one value for both
        mlp_inner_dropout=keys.number("mlp_dropout", 0.0),
        initializer_range=keys.number("initializer_range", 0.02),
        pad_token_id=keys.integer("pad_token_id", 50283),
        cls_token_id=keys.identifier("cls_token_id"),
        sep_token_id=keys.identifier("sep_token_id"),
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


def _read_bert(keys: _Keys) -> EncoderConfig:
    kind = keys.hf.get("position_embedding_type")
    if kind not in (None, "absolute"):
        raise InputError(f"config.json: position_embedding_type must be 'absolute', got {kind!r}")
    if keys.flag("is_decoder"):
        raise InputError("config.json: is_decoder must be false: a causal BERT is not an encoder")
    dropout = keys.number("hidden_dropout_prob", 0.1)
    return EncoderConfig(
        family="bert",
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_heads=keys.integer("num_attention_heads"),
        intermediate_size=keys.integer("intermediate_size"),
        layer_types=global_every(keys.integer("num_hidden_layers"), 1),
        max_positions=keys.integer("max_position_embeddings"),
        norm_position="post",
        mlp="plain",
        positions="absolute",
        activation=keys.activation("hidden_act"),
        norm_eps=keys.number("layer_norm_eps", 1e-12),
        norm_bias=True,
        attention_bias=True,
        mlp_bias=True,
        type_vocab_size=keys.integer("type_vocab_size", 2),
        embedding_dropout=dropout,
        attention_dropout=keys.number("attention_probs_dropout_prob", 0.1),
        attention_output_dropout=dropout,
        mlp_output_dropout=dropout,
        initializer_range=keys.number("initializer_range", 0.02),
        pad_token_id=keys.integer("pad_token_id", 0),
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


READERS: dict[str, Callable[[_Keys], EncoderConfig]] = {"modernbert": _read_modernbert, "bert": _read_bert}
WRITERS: dict[Family, Callable[[EncoderConfig, ConfigStyle], dict[str, Any]]] = {"modernbert": _write_modernbert, "bert": _write_bert}
