"""ModernBERT, and Ettin, gte-modernbert, granite-embedding-r2 and mmBERT in its format: config.json, tensor names and heads.

Both generations of keys are read and written: v4 (``global_attn_every_n_layers``, ``global_rope_theta``, ``rope_scaling``) and v5
(``layer_types``, ``rope_parameters``). Missing keys have the defaults of transformers.

Source: the published config.json files; ``ModernBertConfig`` of transformers 5.3 and the state dicts of its classes; FlexBERT under
Composer (AnswerDotAI/ModernBERT).
"""

from __future__ import annotations

import re
from typing import Any

from quiver.encoder.checkpoints.format import (
    TO_HF_ACTIVATION,
    CheckpointFormat,
    ConfigKey,
    ConfigReader,
    ConfigStyle,
    HeadLayout,
    TensorNames,
)
from quiver.encoder.config import EncoderConfig, LayerType, RopeKind, RopeScaling, global_every
from quiver.encoder.errors import InputError

HF_LAYER_TYPES: dict[str, LayerType] = {"full_attention": "global", "sliding_attention": "local"}
TO_HF_LAYER_TYPE: dict[LayerType, str] = {"global": "full_attention", "local": "sliding_attention"}
# Defaults of transformers.
GLOBAL_THETA = 160_000.0
LOCAL_THETA = 10_000.0
MAX_POSITIONS = 8192

ROPE_TYPES: dict[str, RopeKind | None] = {"default": None, "linear": "linear", "yarn": "yarn"}
ROPE_KEYS = frozenset(
    {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"}
)


def _read_modernbert(keys: ConfigReader) -> dict[str, Any]:
    max_positions = keys.integer("max_position_embeddings", MAX_POSITIONS)
    parameters = keys.inner("rope_parameters")
    if parameters is not None and (unknown := sorted(parameters.hf.keys() - HF_LAYER_TYPES.keys())):
        raise InputError(f"config.json: rope_parameters must name {' and '.join(HF_LAYER_TYPES)}, got {', '.join(unknown)}")
    global_rope = _read_rope(keys, "full_attention")
    local_rope = _read_rope(keys, "sliding_attention")
    global_theta = _read_theta(global_rope, keys, "global_rope_theta", GLOBAL_THETA)
    # Old files write null for "the same as in global layers".
    same = "local_rope_theta" in keys.hf and keys.hf["local_rope_theta"] is None
    return {
        "layer_types": _read_layer_types(keys),
        "global_theta": global_theta,
        "local_theta": _read_theta(local_rope, keys, "local_rope_theta", global_theta if same else LOCAL_THETA),
        "global_scaling": _read_scaling(global_rope, max_positions),
        "local_scaling": _read_scaling(local_rope, max_positions),
        "cls_token_id": keys.identifier("cls_token_id"),
        "sep_token_id": keys.identifier("sep_token_id"),
    }


def _read_layer_types(keys: ConfigReader) -> tuple[LayerType, ...]:
    layers = keys.integer("num_hidden_layers")
    names = keys.hf.get("layer_types")
    if names is None:
        return global_every(layers, keys.integer("global_attn_every_n_layers", 3))
    if not isinstance(names, list):
        raise keys.error("layer_types", "must be a list")
    unknown = sorted({str(name) for name in names} - HF_LAYER_TYPES.keys())
    if unknown:
        raise InputError(f"config.json: layer_types must be {' or '.join(HF_LAYER_TYPES)}, got {', '.join(unknown)}")
    if len(names) != layers:
        raise InputError(f"config.json: layer_types has {len(names)} entries, but num_hidden_layers is {layers}")
    return tuple(HF_LAYER_TYPES[name] for name in names)


def _read_rope(keys: ConfigReader, name: str) -> ConfigReader:
    """RoPE of one layer type: v5's rope_parameters, overridden for both types by v4's rope_scaling, as in transformers."""
    merged: dict[str, Any] = {}
    path = "rope_scaling."
    by_type = keys.inner("rope_parameters")
    for rope in (None if by_type is None else by_type.inner(name), keys.inner("rope_scaling")):
        if rope is None:
            continue
        unknown = sorted(key for key, value in rope.hf.items() if key not in ROPE_KEYS and value is not None)
        if unknown:
            raise rope.error(unknown[0], "is not supported")
        merged |= rope.hf
        if "rope_type" not in rope.hf and "type" in rope.hf:
            merged["rope_type"] = rope.hf["type"]
        path = rope.path
    return ConfigReader(merged, path=path)


def _read_theta(rope: ConfigReader, keys: ConfigReader, key: str, default: float) -> float:
    return rope.number("rope_theta") if rope.hf.get("rope_theta") is not None else keys.number(key, default)


def _read_scaling(rope: ConfigReader, max_positions: int) -> RopeScaling | None:
    name = rope.hf.get("rope_type") or "default"
    if not isinstance(name, str) or name not in ROPE_TYPES:
        raise rope.error("rope_type", f"must be {', '.join(ROPE_TYPES)}")
    kind = ROPE_TYPES[name]
    if kind is None:
        return None
    return RopeScaling(
        kind=kind,
        factor=rope.number("factor"),
        original_positions=rope.integer("original_max_position_embeddings", max_positions),
        beta_fast=rope.number("beta_fast", RopeScaling.beta_fast),
        beta_slow=rope.number("beta_slow", RopeScaling.beta_slow),
        attention_factor=None if rope.hf.get("attention_factor") is None else rope.number("attention_factor"),
    )


def _write_modernbert(config: EncoderConfig, style: ConfigStyle) -> dict[str, Any]:
    """Write the keys of one generation; v5's if v4 cannot express the pattern of layers or a scaling of one layer type."""
    hf: dict[str, Any] = {"num_hidden_layers": config.num_layers}
    if config.cls_token_id is not None:
        hf |= {"cls_token_id": config.cls_token_id, "bos_token_id": config.cls_token_id}
    if config.sep_token_id is not None:
        hf |= {"sep_token_id": config.sep_token_id, "eos_token_id": config.sep_token_id}
    # The n of "every n-th layer is global".
    periods = (each for each in range(1, config.num_layers + 1) if global_every(config.num_layers, each) == config.layer_types)
    every = next(periods, None)
    scalings = {config.scaling(kind) for kind in config.layer_types}
    if style == "v5" or every is None or len(scalings) > 1:
        hf["layer_types"] = [TO_HF_LAYER_TYPE[kind] for kind in config.layer_types]
        hf["rope_parameters"] = {
            theirs: {**_write_scaling(config.scaling(ours), config.max_positions), "rope_theta": config.theta(ours)}
            for theirs, ours in HF_LAYER_TYPES.items()
        }
        return hf
    hf["global_attn_every_n_layers"] = every
    hf["global_rope_theta"] = config.global_theta
    hf["local_rope_theta"] = config.local_theta
    (scaling,) = scalings
    if scaling is not None:
        hf["rope_scaling"] = _write_scaling(scaling, config.max_positions)
    return hf


def _write_scaling(scaling: RopeScaling | None, max_positions: int) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    written: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    # Linear scaling does not use the original length, and transformers warns about unused keys.
    if scaling.kind == "yarn" or scaling.original_positions != max_positions:
        written["original_max_position_embeddings"] = scaling.original_positions
    if scaling.kind == "yarn":
        written |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.attention_factor is not None:
            written["attention_factor"] = scaling.attention_factor
    return written


MODERNBERT_TRANSFORM = {"transform.dense": "head.dense", "transform.norm": "head.norm"}

MODERNBERT = CheckpointFormat(
    family="modernbert",
    about={"architectures": ["ModernBertModel"], "model_type": "modernbert"},
    keys=(
        ConfigKey("vocab_size"),
        ConfigKey("hidden_size"),
        ConfigKey("intermediate_size"),
        ConfigKey("num_attention_heads", ("num_heads",)),
        ConfigKey("hidden_activation", ("activation",), to_hf=TO_HF_ACTIVATION),
        ConfigKey("max_position_embeddings", ("max_positions",), MAX_POSITIONS),
        ConfigKey("local_attention", ("window",), 128),
        # Some published files also have layer_norm_eps; transformers reads only norm_eps.
        ConfigKey("norm_eps", default=1e-5),
        ConfigKey("norm_bias", default=False),
        ConfigKey("attention_bias", ("qkv_bias", "attention_output_bias"), False),
        ConfigKey("mlp_bias", ("mlp_input_bias", "mlp_output_bias"), False),
        ConfigKey("embedding_dropout", default=0.0),
        ConfigKey("attention_dropout", ("attention_dropout", "attention_output_dropout"), 0.0),
        ConfigKey("mlp_dropout", ("mlp_inner_dropout",), 0.0),
        ConfigKey("initializer_range", default=0.02),
        ConfigKey("pad_token_id", default=50283),
    ),
    constants={"norm_position": "pre", "mlp": "gated", "positions": "rope", "first_attention_norm": False, "final_norm": True},
    read=_read_modernbert,
    write=_write_modernbert,
    tensors=TensorNames(
        prefix="model.",
        names={
            "embeddings.tokens": ("embeddings.tok_embeddings",),
            "embeddings.norm": ("embeddings.norm",),
            "layers.{}.attention_norm": ("layers.{}.attn_norm",),
            "layers.{}.attention.qkv": ("layers.{}.attn.Wqkv",),
            "layers.{}.attention.out": ("layers.{}.attn.Wo",),
            "layers.{}.mlp_norm": ("layers.{}.mlp_norm",),
            "layers.{}.mlp.up": ("layers.{}.mlp.Wi",),
            "layers.{}.mlp.down": ("layers.{}.mlp.Wo",),
            "final_norm": ("final_norm",),
        },
        heads=re.compile(r"(head|decoder|classifier)\."),
        buffers=re.compile(r"rotary_emb\."),
        other_prefixes=("bert.", "model.bert."),  # as Composer saved it in pretraining
        renames=((re.compile(r"^encoder\.layers\."), "layers."),),
    ),
    heads={
        "masked_lm": HeadLayout("ModernBertForMaskedLM", {**MODERNBERT_TRANSFORM, "decoder": "decoder"}),
        "classifier": HeadLayout("ModernBertForSequenceClassification", {**MODERNBERT_TRANSFORM, "out": "classifier"}),
        "span_qa": HeadLayout("ModernBertForQuestionAnswering", {**MODERNBERT_TRANSFORM, "out": "classifier"}),
    },
)
