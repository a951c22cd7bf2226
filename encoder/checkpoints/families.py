"""The families of encoders: config.json, tensor names and heads of each, and their registry by name and model types.

Writing loses nothing: the written config.json is read again, and if the architectures differ the error names the field.

- BERT (and MiniLM), RoBERTa (and XLM-R, CamemBERT), MosaicBERT, NomicBERT and GTE-en-MLM have the norms of BERT, after the residual sums.
  MosaicBERT's config.json says ``model_type: bert`` like BERT's; it is recognised by ``alibi_starting_size`` or by the code that it points
  to.
- ModernBERT, and Ettin, gte-modernbert, granite-embedding-r2 and mmBERT in its format. Both generations of keys are read and written: v4
  (``global_attn_every_n_layers``, ``global_rope_theta``, ``rope_scaling``) and v5 (``layer_types``, ``rope_parameters``). Missing keys have
  the defaults of transformers.

Source: the published config.json files; ``BertConfig``, ``RobertaConfig`` and ``ModernBertConfig`` of transformers 5.3 and the state dicts
of their classes; FlexBERT under Composer (AnswerDotAI/ModernBERT); ``configuration_bert.py`` and ``bert_layers.py`` of mosaicml/examples,
benchmarks/bert; ``configuration_nomic_bert.py`` and ``modeling_hf_nomic_bert.py`` of nomic-ai/contrastors; ``configuration.py`` and
``modeling.py`` of Alibaba-NLP/new-impl.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quiver.encoder.checkpoints.format import (
    TO_HF_ACTIVATION,
    CheckpointFormat,
    ConfigKey,
    ConfigReader,
    ConfigStyle,
    HeadLayout,
    Task,
    TensorNames,
    global_layers,
)
from quiver.encoder.config import EncoderConfig, Family, LayerType, RopeKind, RopeScaling, global_every
from quiver.encoder.errors import InputError

logger = logging.getLogger(__name__)

HF_ACTIVATION = {"gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu", "relu": "relu"}
"""Names of activations in transformers' older configurations."""

SIZES = (
    ConfigKey("vocab_size"),
    ConfigKey("hidden_size"),
    ConfigKey("intermediate_size"),
    ConfigKey("num_attention_heads", ("num_heads",)),
)
ACTIVATION = ConfigKey("hidden_act", ("activation",), to_hf=HF_ACTIVATION)
INITIALIZER_RANGE = ConfigKey("initializer_range", default=0.02)
# Biases everywhere but in the first matrix of the MLP, which differs by family.
POST_NORM = {
    "norm_position": "post",
    "norm_bias": True,
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_output_bias": True,
}
BERT_KEYS = (
    *SIZES,
    ACTIVATION,
    ConfigKey("type_vocab_size", default=2),
    ConfigKey("layer_norm_eps", ("norm_eps",), 1e-12),
    ConfigKey("hidden_dropout_prob", ("embedding_dropout", "attention_output_dropout", "mlp_output_dropout"), 0.1),
    ConfigKey("attention_probs_dropout_prob", ("attention_dropout",), 0.1),
    INITIALIZER_RANGE,
)
BERT_REQUIRES = {"position_embedding_type": ("absolute",), "is_decoder": (False,)}
BERT_CONSTANTS = {**POST_NORM, "mlp": "plain", "positions": "absolute", "mlp_input_bias": True}


def _write_bert(config: EncoderConfig, _style: ConfigStyle) -> dict[str, Any]:
    positions = config.max_positions + config.position_offset
    return {"num_hidden_layers": config.num_layers, "max_position_embeddings": positions, "position_embedding_type": "absolute"}


def _read_roberta(keys: ConfigReader) -> dict[str, Any]:
    """Positions start at the padding id + 1, so the embedding begins with that many unused rows."""
    offset = keys.integer("pad_token_id", 1) + 1
    return {**global_layers(keys), "max_positions": keys.integer("max_position_embeddings") - offset, "position_offset": offset}


BERT_EMBEDDINGS = {
    "embeddings.tokens": ("embeddings.word_embeddings",),
    "embeddings.positions": ("embeddings.position_embeddings",),
    "embeddings.token_types": ("embeddings.token_type_embeddings",),
    "embeddings.norm": ("embeddings.LayerNorm",),
}
BERT_ATTENTION_OUTPUT = {
    "layers.{}.attention.out": ("encoder.layer.{}.attention.output.dense",),
    "layers.{}.attention_norm": ("encoder.layer.{}.attention.output.LayerNorm",),
}
BERT_NAMES = {
    **BERT_EMBEDDINGS,
    "layers.{}.attention.qkv": (
        "encoder.layer.{}.attention.self.query",
        "encoder.layer.{}.attention.self.key",
        "encoder.layer.{}.attention.self.value",
    ),
    **BERT_ATTENTION_OUTPUT,
    "layers.{}.mlp.up": ("encoder.layer.{}.intermediate.dense",),
    "layers.{}.mlp.down": ("encoder.layer.{}.output.dense",),
    "layers.{}.mlp_norm": ("encoder.layer.{}.output.LayerNorm",),
}
# Names of BERT's TensorFlow release; transformers 5 writes them again when it saves such a model.
TENSORFLOW_NAMES = ((re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"), (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"))
BERT_HEADS = re.compile(r"(cls|pooler|classifier|qa_outputs)\.")
LM_HEADS = re.compile(r"(lm_head|pooler|classifier|qa_outputs)\.")
BERT_BUFFERS = re.compile(r"embeddings\.(position_ids|token_type_ids)$")
BERT_LM = {"transform.dense": "cls.predictions.transform.dense", "decoder": "cls.predictions.decoder"}
BERT_LAYER_NORM = {"transform.norm": "cls.predictions.transform.LayerNorm"}
ROBERTA_LM = {"transform.dense": "lm_head.dense", "transform.norm": "lm_head.layer_norm", "decoder": "lm_head.decoder"}
ROBERTA_CLASSIFIER = {"transform.dense": "classifier.dense", "out": "classifier.out_proj"}
POOLER = {"transform.dense": "{}pooler.dense", "out": "classifier"}

BERT = CheckpointFormat(
    family="bert",
    about={"architectures": ["BertModel"], "model_type": "bert"},
    keys=(*BERT_KEYS, ConfigKey("pad_token_id", default=0)),
    requires=BERT_REQUIRES,
    constants=BERT_CONSTANTS,
    read=lambda keys: {**global_layers(keys), "max_positions": keys.integer("max_position_embeddings")},
    write=_write_bert,
    tensors=TensorNames(prefix="bert.", names=BERT_NAMES, heads=BERT_HEADS, buffers=BERT_BUFFERS, renames=TENSORFLOW_NAMES),
    heads={
        "masked_lm": HeadLayout("BertForMaskedLM", {**BERT_LM, **BERT_LAYER_NORM}, {"decoder.bias": "cls.predictions.bias"}),
        "classifier": HeadLayout("BertForSequenceClassification", POOLER),
        "span_qa": HeadLayout("BertForQuestionAnswering", {"out": "qa_outputs"}),
    },
)

ROBERTA = CheckpointFormat(
    family="roberta",
    about={"architectures": ["RobertaModel"], "model_type": "roberta"},
    keys=(*BERT_KEYS, ConfigKey("pad_token_id", default=1)),
    requires=BERT_REQUIRES,
    constants=BERT_CONSTANTS,
    read=_read_roberta,
    write=_write_bert,
    tensors=TensorNames(prefix="roberta.", names=BERT_NAMES, heads=LM_HEADS, buffers=BERT_BUFFERS, renames=TENSORFLOW_NAMES),
    heads={
        "masked_lm": HeadLayout("RobertaForMaskedLM", ROBERTA_LM, {"decoder.bias": "lm_head.bias"}),
        "classifier": HeadLayout("RobertaForSequenceClassification", ROBERTA_CLASSIFIER),
        "span_qa": HeadLayout("RobertaForQuestionAnswering", {"out": "qa_outputs"}),
    },
)


def is_mosaicbert(keys: ConfigReader) -> bool:
    """Return whether a config.json with ``model_type: bert`` is a MosaicBERT's."""
    code = keys.inner("auto_map")
    return "alibi_starting_size" in keys.hf or (code is not None and any("bert_layers." in str(name) for name in code.hf.values()))


MOSAIC_CODE = "mosaicml/mosaic-bert-base--bert_layers."
MOSAICBERT = CheckpointFormat(
    family="mosaicbert",
    about={
        "architectures": ["BertForMaskedLM"],
        # Without a pointer to its code transformers would read a BERT and drop its weights.
        "auto_map": {
            "AutoConfig": "mosaicml/mosaic-bert-base--configuration_bert.BertConfig",
            "AutoModelForMaskedLM": f"{MOSAIC_CODE}BertForMaskedLM",
            "AutoModelForSequenceClassification": f"{MOSAIC_CODE}BertForSequenceClassification",
        },
        "model_type": "bert",
    },
    keys=(
        *SIZES,
        ConfigKey("alibi_starting_size", ("max_positions",), 512),
        ConfigKey("type_vocab_size", default=2),
        ConfigKey("layer_norm_eps", ("norm_eps",), 1e-12),
        # Dropout before the second matrix of the MLP, and none after it.
        ConfigKey("hidden_dropout_prob", ("embedding_dropout", "attention_output_dropout", "mlp_inner_dropout"), 0.1),
        ConfigKey("attention_probs_dropout_prob", ("attention_dropout",), 0.0),
        INITIALIZER_RANGE,
        ConfigKey("pad_token_id", default=0),
    ),
    requires={
        "position_embedding_type": ("absolute", "alibi"),  # published files say absolute, and the code ignores it
        "is_decoder": (False,),
        "hidden_act": ("gelu",),  # the gate is always GELU
    },
    constants={**POST_NORM, "mlp": "gated", "positions": "alibi"},
    write=lambda config, style: {**_write_bert(config, style), "hidden_act": "gelu"},
    tensors=TensorNames(
        prefix="bert.",
        names={
            **BERT_EMBEDDINGS,
            "layers.{}.attention.qkv": ("encoder.layer.{}.attention.self.Wqkv",),
            **BERT_ATTENTION_OUTPUT,
            "layers.{}.mlp.up": ("encoder.layer.{}.mlp.gated_layers",),
            "layers.{}.mlp.down": ("encoder.layer.{}.mlp.wo",),
            "layers.{}.mlp_norm": ("encoder.layer.{}.mlp.layernorm",),
        },
        heads=BERT_HEADS,
        buffers=BERT_BUFFERS,
        renames=TENSORFLOW_NAMES,
    ),
    heads={
        "masked_lm": HeadLayout("BertForMaskedLM", {**BERT_LM, **BERT_LAYER_NORM}),
        "classifier": HeadLayout("BertForSequenceClassification", POOLER),
    },
)

NOMIC_MLPS: dict[str, tuple[Literal["gated", "plain"], str]] = {
    "swiglu": ("gated", "silu"),
    "geglu": ("gated", "gelu"),
    "gelu": ("plain", "gelu"),
}
# The width of NomicBERT's gated MLP is rounded up to a multiple of this.
NOMIC_MLP_MULTIPLE = 256
# Options of contrastors' FlexBERT-like class that none of its text encoders uses.
NOMIC_OFF = ("prenorm", "parallel_block", "causal", "use_rms_norm", "rotary_emb_interleaved", "rotary_head_dim", "norm_mlp")


def _read_nomicbert(keys: ConfigReader) -> dict[str, Any]:
    if keys.number("rotary_emb_fraction", 0.0) <= 0:
        raise keys.error("rotary_emb_fraction", "must be > 0 (a nomic_bert with learnt positions is not supported)")
    name = keys.hf.get("activation_function", "gelu_new")  # GPT-2's default, from which the config class inherits
    if not isinstance(name, str) or name not in NOMIC_MLPS:
        raise keys.error("activation_function", f"must be one of {', '.join(NOMIC_MLPS)}")
    mlp, activation = NOMIC_MLPS[name]
    width = keys.integer("n_embd")
    gated_width = _round_up(keys.integer("n_inner", 8 * width // 3), NOMIC_MLP_MULTIPLE)
    return {
        **global_layers(keys, "n_layer"),
        "vocab_size": _round_up(keys.integer("vocab_size"), keys.integer("pad_vocab_size_multiple", 1)),
        "mlp": mlp,
        "activation": activation,
        "intermediate_size": gated_width if mlp == "gated" else keys.integer("n_inner", 4 * width),
        "max_positions": _nomic_positions(keys),
    }


def _nomic_positions(keys: ConfigReader) -> int:
    positions = keys.integer("n_positions", 1024)
    if positions <= 0:  # a file without learnt positions may say -1 or 0; the class then uses 2,048
        positions = 2048
    if keys.hf.get("rotary_scaling_factor", 1.0) is None:
        return positions
    # Dynamic NTK: beyond the trained length RoPE's base depends on the longest text of the batch, so that the states of a text would depend
    # on its neighbours. Up to that length nothing is scaled.
    trained = keys.integer("max_trained_positions", 2048)
    if positions > trained:
        logger.warning(
            "rotary_scaling_factor is %s: RoPE is rescaled by batch beyond %d tokens, which is not supported; %d of %d positions are used",
            keys.hf.get("rotary_scaling_factor", 1.0),
            trained,
            trained,
            positions,
        )
    return min(positions, trained)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // max(multiple, 1)) * max(multiple, 1)


def _write_nomicbert(config: EncoderConfig, _style: ConfigStyle) -> dict[str, Any]:
    names = {mlp: name for name, mlp in NOMIC_MLPS.items()}
    if (config.mlp, config.activation) not in names:
        raise InputError(
            f"a nomic_bert config.json supports {', '.join(NOMIC_MLPS)}, got activation {config.activation} with mlp {config.mlp}"
        )
    return {
        "vocab_size": config.vocab_size,
        "pad_vocab_size_multiple": 1,
        "n_inner": config.intermediate_size,
        "n_layer": config.num_layers,
        "n_positions": config.max_positions,
        "max_trained_positions": config.max_positions,
        "activation_function": names[config.mlp, config.activation],
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "embd_pdrop": config.embedding_dropout,
        **dict.fromkeys(NOMIC_OFF[:5], False),
    }


NOMIC_CODE = "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert."
NOMICBERT = CheckpointFormat(
    family="nomicbert",
    about={
        "architectures": ["NomicBertModel"],
        # For versions of transformers without the model.
        "auto_map": {
            "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
            "AutoModel": f"{NOMIC_CODE}NomicBertModel",
            "AutoModelForMaskedLM": f"{NOMIC_CODE}NomicBertForPreTraining",
        },
        "model_type": "nomic_bert",
    },
    keys=(
        ConfigKey("n_embd", ("hidden_size",)),
        ConfigKey("n_head", ("num_heads",)),
        ConfigKey("rotary_emb_base", ("global_theta",), 10_000.0),
        ConfigKey("rotary_emb_fraction", ("rotary_fraction",), 0.0),
        ConfigKey("layer_norm_epsilon", ("norm_eps",), 1e-5),
        ConfigKey("qkv_proj_bias", ("qkv_bias", "attention_output_bias"), True),
        ConfigKey("mlp_fc1_bias", ("mlp_input_bias",), True),
        ConfigKey("mlp_fc2_bias", ("mlp_output_bias",), True),
        ConfigKey("type_vocab_size", default=2),
        # embd_pdrop is in the file but not used.
        ConfigKey("resid_pdrop", ("attention_output_dropout", "embedding_dropout", "mlp_output_dropout"), 0.1),
        ConfigKey("attn_pdrop", ("attention_dropout",), 0.1),
        INITIALIZER_RANGE,
        ConfigKey("pad_token_id", default=0),
    ),
    requires={**dict.fromkeys(NOMIC_OFF, (False,)), "rotary_emb_scale_base": (), "num_heads_kv": (), "num_experts": (0,)},
    constants={"norm_position": "post", "positions": "rope", "norm_bias": True},
    read=_read_nomicbert,
    write=_write_nomicbert,
    tensors=TensorNames(
        prefix="bert.",
        names={
            "embeddings.tokens": ("embeddings.word_embeddings",),
            "embeddings.token_types": ("embeddings.token_type_embeddings",),
            "embeddings.norm": ("emb_ln",),
            "layers.{}.attention.qkv": ("encoder.layers.{}.attn.Wqkv",),
            "layers.{}.attention.out": ("encoder.layers.{}.attn.out_proj",),
            "layers.{}.attention_norm": ("encoder.layers.{}.norm1",),
            "layers.{}.mlp.up": ("encoder.layers.{}.mlp.fc12", "encoder.layers.{}.mlp.fc11"),  # fc12 is the activated one
            "layers.{}.mlp.down": ("encoder.layers.{}.mlp.fc2",),
            "layers.{}.mlp_norm": ("encoder.layers.{}.norm2",),
        },
        heads=re.compile(r"(cls|pooler|classifier)\."),
        plain_names={"layers.{}.mlp.up": ("encoder.layers.{}.mlp.fc1",)},
    ),
    heads={
        "masked_lm": HeadLayout("NomicBertForPreTraining", {**BERT_LM, "transform.norm": "cls.predictions.transform.layer_norm"}),
        "classifier": HeadLayout("NomicBertForSequenceClassification", POOLER),
    },
)


def _read_gte(keys: ConfigReader) -> dict[str, Any]:
    positions = keys.integer("max_position_embeddings", 2048)
    scaling = _gte_scaling(keys, positions)
    return {
        **global_layers(keys),
        # The file has the length before scaling: the model's own tables have factor times as many positions.
        "max_positions": positions if scaling is None else int(positions * scaling.factor),
        "global_theta": _gte_rope(keys, "rope_theta").number("rope_theta", 10_000.0),
        "global_scaling": scaling,
    }


def _gte_rope(keys: ConfigReader, key: str) -> ConfigReader:
    """Return the object with a key of RoPE: transformers 5 moves rope_theta and rope_scaling to rope_parameters when it saves."""
    newer = keys.inner("rope_parameters")
    return keys if newer is None or keys.hf.get(key) is not None else newer


def _gte_scaling(keys: ConfigReader, positions: int) -> RopeScaling | None:
    rope = _gte_rope(keys, "rope_scaling")
    scaling = keys.inner("rope_scaling") if rope is keys else rope
    if scaling is None:
        return None
    name = "type" if "type" in scaling.hf else "rope_type"
    scaling.require(name, "ntk", "default")
    scaling.require("mixed_b")
    if scaling.hf.get(name, "default") == "default":
        return None
    return RopeScaling(kind="ntk", factor=scaling.number("factor"), original_positions=positions)


def _write_gte(config: EncoderConfig, _style: ConfigStyle) -> dict[str, Any]:
    scaling = config.global_scaling
    if scaling is not None and scaling.kind != "ntk":
        raise InputError(f"global_scaling: a gte config.json can only express ntk, got {scaling.kind}")
    return {
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_positions if scaling is None else scaling.original_positions,
        "rope_theta": config.global_theta,
        "rope_scaling": None if scaling is None else {"type": "ntk", "factor": scaling.factor},
        **{key: values[0] for key, values in GTE_REQUIRES.items()},
        "unpad_inputs": False,
        "use_memory_efficient_attention": False,
        "logn_attention_clip1": False,
    }


GTE_REQUIRES: dict[str, tuple[object, ...]] = {
    "position_embedding_type": ("rope",),
    "layer_norm_type": ("layer_norm",),
    "pack_qkv": (True,),
    "logn_attention_scale": (False,),
}
# GTE-en-MLM, gte-*-en-v1.5, gte-multilingual and arctic-embed-v2 (``model_type`` new or gte).
GTE = CheckpointFormat(
    family="gte",
    about={
        "architectures": ["NewModel"],
        "auto_map": {
            "AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig",
            "AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel",
            "AutoModelForMaskedLM": "Alibaba-NLP/new-impl--modeling.NewForMaskedLM",
        },
        "model_type": "new",
    },
    keys=(
        *SIZES,
        ACTIVATION,
        ConfigKey("type_vocab_size", default=1),
        ConfigKey("layer_norm_eps", ("norm_eps",), 1e-12),
        ConfigKey("hidden_dropout_prob", ("embedding_dropout", "attention_output_dropout", "mlp_inner_dropout", "mlp_output_dropout"), 0.1),
        ConfigKey("attention_probs_dropout_prob", ("attention_dropout",), 0.0),
        INITIALIZER_RANGE,
        ConfigKey("pad_token_id", default=0),
    ),
    requires=GTE_REQUIRES,
    constants={**POST_NORM, "mlp": "gated", "positions": "rope"},
    read=_read_gte,
    write=_write_gte,
    tensors=TensorNames(
        prefix="new.",
        names={
            **BERT_EMBEDDINGS,
            "layers.{}.attention.qkv": ("encoder.layer.{}.attention.qkv_proj",),
            "layers.{}.attention.out": ("encoder.layer.{}.attention.o_proj",),
            "layers.{}.attention_norm": ("encoder.layer.{}.attn_ln",),
            "layers.{}.mlp.up": ("encoder.layer.{}.mlp.up_gate_proj",),
            "layers.{}.mlp.down": ("encoder.layer.{}.mlp.down_proj",),
            "layers.{}.mlp_norm": ("encoder.layer.{}.mlp_ln",),
        },
        heads=LM_HEADS,
        buffers=BERT_BUFFERS,
        swapped=frozenset({"layers.{}.mlp.up"}),  # up first, then the gate, which is the activated half
    ),
    heads={
        "masked_lm": HeadLayout("NewForMaskedLM", {**ROBERTA_LM, "transform.norm": "lm_head.norm"}),
        "classifier": HeadLayout("NewForSequenceClassification", POOLER),
        "span_qa": HeadLayout("NewForQuestionAnswering", {"out": "qa_outputs"}),
    },
)


HF_LAYER_TYPES: dict[str, LayerType] = {"full_attention": "global", "sliding_attention": "local"}
TO_HF_LAYER_TYPE = {ours: theirs for theirs, ours in HF_LAYER_TYPES.items()}
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
    every = _global_period(config.layer_types)
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


def _global_period(layer_types: tuple[LayerType, ...]) -> int | None:
    """Return the n of "every n-th layer is global", None if there is none."""
    candidates = (every for every in range(1, len(layer_types) + 1) if global_every(len(layer_types), every) == layer_types)
    return next(candidates, None)


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


# Quiver's own format: every field of `EncoderConfig` under its name, for architectures that no other format can express.
# Keys of its config.json that are not fields.
ABOUT = frozenset({"model_type", "architectures", "torch_dtype", "dtype", "head"})


def _read_quiver(keys: ConfigReader) -> dict[str, Any]:
    """Missing fields have their defaults."""
    if "family" in keys.hf:
        raise InputError("config.json: unknown key family; use model_type")
    return _parse_fields(EncoderConfig, {"family": "quiver"} | {key: value for key, value in keys.hf.items() if key not in ABOUT}, "")


def _write_quiver(config: EncoderConfig, _style: ConfigStyle) -> dict[str, Any]:
    """Write all fields except the family, which model_type names."""
    values = asdict(config)
    del values["family"]
    return {**values, "layer_types": list(config.layer_types)}


def _parse_fields(kind: type[EncoderConfig | RopeScaling], values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Check the keys of an object and the types of their values."""
    hints = get_type_hints(kind)
    if unknown := sorted(values.keys() - hints.keys()):
        raise InputError(f"config.json: unknown key {path}{unknown[0]}; the keys of a quiver config.json are EncoderConfig's fields")
    for field in fields(kind):
        if field.name not in values and field.default is MISSING:
            raise InputError(f"config.json: the key {path + field.name!r} is missing")
    return {name: _parse_typed(value, hints[name], path + name) for name, value in values.items()}


def _parse_typed(value: object, hint: Any, name: str) -> Any:
    if get_origin(hint) in (Union, UnionType):
        (inner,) = (one for one in get_args(hint) if one is not type(None))
        return None if value is None else _parse_typed(value, inner, name)
    if hint is RopeScaling and isinstance(value, Mapping):
        return RopeScaling(**_parse_fields(RopeScaling, value, f"{name}."))
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_parse_typed(one, get_args(hint)[0], name) for one in value)
    if get_origin(hint) is Literal and value in get_args(hint):
        return value
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise InputError(f"config.json: {name} must be {_describe_hint(hint)}, got {value!r}")
    return value


def _describe_hint(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    spoken = {int: "an integer", float: "a number", bool: "true or false", str: "a string", RopeScaling: "an object"}
    return spoken.get(hint, "a list")


QUIVER = CheckpointFormat(
    family="quiver",
    about={"architectures": ["QuiverEncoder"], "model_type": "quiver"},
    read=_read_quiver,
    write=_write_quiver,
    tensors=TensorNames(prefix="encoder.", names={}, heads=re.compile(r"(head|decoder|classifier|qa_outputs)\.")),
    heads={
        "masked_lm": HeadLayout("QuiverForMaskedLM", {**MODERNBERT_TRANSFORM, "decoder": "decoder"}),
        "classifier": HeadLayout("QuiverForSequenceClassification", {**MODERNBERT_TRANSFORM, "out": "classifier"}),
        "span_qa": HeadLayout("QuiverForQuestionAnswering", {**MODERNBERT_TRANSFORM, "out": "classifier"}),
    },
)


FORMATS: dict[Family, CheckpointFormat] = {each.family: each for each in (MODERNBERT, BERT, ROBERTA, MOSAICBERT, NOMICBERT, GTE, QUIVER)}
MODEL_TYPES: dict[str, CheckpointFormat] = {
    "modernbert": MODERNBERT,
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "nomic_bert": NOMICBERT,
    "new": GTE,
    "gte": GTE,
    "quiver": QUIVER,
}
"""``model_type`` of config.json -> format; a MosaicBERT's file says bert."""


def families_with_head(task: Task) -> list[Family]:
    """Return the families whose checkpoints can hold a head of this task."""
    return [family for family, checkpoint_format in FORMATS.items() if task in checkpoint_format.heads]


def config_from_hf(hf: Mapping[str, Any]) -> EncoderConfig:
    """Convert a parsed config.json to an `EncoderConfig`."""
    family = hf.get("model_type")
    if not isinstance(family, str) or family not in MODEL_TYPES:
        raise InputError(f"config.json: model_type must be one of {', '.join(sorted(MODEL_TYPES))}, got {family!r}")
    keys, found = ConfigReader(hf), MODEL_TYPES[family]
    return (MOSAICBERT if found is BERT and is_mosaicbert(keys) else found).to_config(keys)


def config_to_hf(config: EncoderConfig, *, style: ConfigStyle = "v4") -> dict[str, Any]:
    """Convert an `EncoderConfig` to its family's config.json; an error names the field that its format cannot express."""
    written = FORMATS[config.family].to_hf(config, style)
    remedy = "use family quiver"
    try:
        again = config_from_hf(written)
    except InputError as error:
        raise InputError(f"a {config.family} config.json cannot hold this architecture ({error}); {remedy}") from error
    wanted, kept = _with_effect(config), _with_effect(again)
    if "cls_token_id" not in written:  # these families leave such ids to the tokenizer
        kept |= {key: wanted[key] for key in ("cls_token_id", "sep_token_id")}
    if lost := [name for name in wanted if name not in kept or wanted[name] != kept[name]]:
        raise InputError(f"a {config.family} config.json cannot hold {', '.join(f'{name} {wanted[name]!r}' for name in lost)}; {remedy}")
    return written


def _with_effect(config: EncoderConfig) -> dict[str, Any]:
    """Return the fields of an architecture that have an effect, given its other fields."""
    values = asdict(config)
    for kind in {"global", "local"} - (set(config.layer_types) if config.positions == "rope" else set()):
        del values[f"{kind}_theta"], values[f"{kind}_scaling"]
    if config.positions != "rope":
        del values["rotary_fraction"]
    if "local" not in config.layer_types:
        del values["window"]
    return values
