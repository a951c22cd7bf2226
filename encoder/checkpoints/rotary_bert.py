"""The BERTs with rotary positions and a gated MLP, NomicBERT and GTE-en-MLM: config.json, tensor names and heads.

Source: ``configuration_nomic_bert.py`` and ``modeling_hf_nomic_bert.py`` of nomic-ai/contrastors; ``configuration.py`` and ``modeling.py``
of Alibaba-NLP/new-impl; the config.json of gte-base-en-v1.5 and gte-large-en-v1.5.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Literal

from quiver.encoder.checkpoints.bert import BERT_BUFFERS, BERT_EMBEDDINGS, BERT_LM, BERT_POOLER
from quiver.encoder.checkpoints.family import CheckpointFormat, ConfigReader, ConfigStyle, HeadLayout, TensorNames
from quiver.encoder.config import EncoderConfig, RopeScaling, global_every
from quiver.encoder.errors import InputError

logger = logging.getLogger(__name__)

NOMIC_MLPS: dict[str, tuple[Literal["gated", "plain"], str]] = {
    "swiglu": ("gated", "silu"),
    "geglu": ("gated", "gelu"),
    "gelu": ("plain", "gelu"),
}
# The width of NomicBERT's gated MLP is rounded up to a multiple of this.
NOMIC_MLP_MULTIPLE = 256

# Options of contrastors' FlexBERT-like class that none of its text encoders uses.
NOMIC_OFF = ("prenorm", "parallel_block", "causal", "use_rms_norm", "rotary_emb_interleaved", "rotary_head_dim", "norm_mlp")


def read_nomicbert(keys: ConfigReader) -> EncoderConfig:
    """Read a NomicBERT or a model trained from it (nomic-embed-text, CodeRankEmbed)."""
    for key in NOMIC_OFF:
        keys.require(key, False)
    for key in ("rotary_emb_scale_base", "num_heads_kv"):
        keys.require(key)
    keys.require("num_experts", 0)
    if keys.number("rotary_emb_fraction", 0.0) <= 0:
        raise keys.error("rotary_emb_fraction", "must be > 0 (a nomic_bert with learnt positions is not supported)")
    name = keys.hf.get("activation_function", "gelu_new")  # GPT-2's default, from which the config class inherits
    if not isinstance(name, str) or name not in NOMIC_MLPS:
        raise keys.error("activation_function", f"must be one of {', '.join(NOMIC_MLPS)}")
    mlp, activation = NOMIC_MLPS[name]
    vocabulary, multiple = keys.integer("vocab_size"), keys.integer("pad_vocab_size_multiple", 1)
    dropout = keys.number("resid_pdrop", 0.1)
    return EncoderConfig(
        family="nomicbert",
        vocab_size=_round_up(vocabulary, multiple),
        hidden_size=keys.integer("n_embd"),
        num_heads=keys.integer("n_head"),
        intermediate_size=_nomic_intermediate(keys, gated=mlp == "gated"),
        layer_types=global_every(keys.integer("n_layer"), 1),
        max_positions=_nomic_positions(keys),
        norm_position="post",
        mlp=mlp,
        positions="rope",
        activation=activation,
        global_theta=keys.number("rotary_emb_base", 10_000.0),
        rotary_fraction=keys.number("rotary_emb_fraction", 0.0),
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        norm_bias=True,
        qkv_bias=keys.flag("qkv_proj_bias", True),
        attention_output_bias=keys.flag("qkv_proj_bias", True),
        mlp_input_bias=keys.flag("mlp_fc1_bias", True),
        mlp_output_bias=keys.flag("mlp_fc2_bias", True),
        type_vocab_size=keys.integer("type_vocab_size", 2),
        embedding_dropout=dropout,  # embd_pdrop is in the file but not used
        attention_dropout=keys.number("attn_pdrop", 0.1),
        attention_output_dropout=dropout,
        mlp_output_dropout=dropout,
        initializer_range=keys.number("initializer_range", 0.02),
        pad_token_id=keys.integer("pad_token_id", 0),
    )


def _nomic_intermediate(keys: ConfigReader, *, gated: bool) -> int:
    width = keys.integer("n_embd")
    if not gated:
        return keys.integer("n_inner", 4 * width)
    return _round_up(keys.integer("n_inner", 8 * width // 3), NOMIC_MLP_MULTIPLE)


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


def write_nomicbert(config: EncoderConfig, style: ConfigStyle) -> dict[str, Any]:
    """Write NomicBERT's keys, with a pointer to its code for versions of transformers without the model."""
    del style
    names = {mlp: name for name, mlp in NOMIC_MLPS.items()}
    if (config.mlp, config.activation) not in names:
        raise InputError(
            f"a nomic_bert config.json supports {', '.join(NOMIC_MLPS)}, got activation {config.activation} with mlp {config.mlp}"
        )
    return {
        "architectures": ["NomicBertModel"],
        "auto_map": {
            "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
            "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
            "AutoModelForMaskedLM": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertForPreTraining",
        },
        "model_type": "nomic_bert",
        "vocab_size": config.vocab_size,
        "pad_vocab_size_multiple": 1,
        "n_embd": config.hidden_size,
        "n_head": config.num_heads,
        "n_inner": config.intermediate_size,
        "n_layer": config.num_layers,
        "n_positions": config.max_positions,
        "max_trained_positions": config.max_positions,
        "activation_function": names[config.mlp, config.activation],
        "rotary_emb_base": config.global_theta,
        "rotary_emb_fraction": config.rotary_fraction,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "layer_norm_epsilon": config.norm_eps,
        "qkv_proj_bias": config.qkv_bias,
        "mlp_fc1_bias": config.mlp_input_bias,
        "mlp_fc2_bias": config.mlp_output_bias,
        "type_vocab_size": config.type_vocab_size,
        "embd_pdrop": config.embedding_dropout,
        "attn_pdrop": config.attention_dropout,
        "resid_pdrop": config.attention_output_dropout,
        "prenorm": False,
        "parallel_block": False,
        "causal": False,
        "use_rms_norm": False,
        "initializer_range": config.initializer_range,
        "pad_token_id": config.pad_token_id,
    }


def read_gte(keys: ConfigReader) -> EncoderConfig:
    """Read a GTE: GTE-en-MLM, gte-*-en-v1.5, gte-multilingual and arctic-embed-v2 (``model_type`` new or gte)."""
    keys.require("position_embedding_type", "rope")
    keys.require("layer_norm_type", "layer_norm")
    keys.require("pack_qkv", True)
    keys.require("logn_attention_scale", False)
    dropout = keys.number("hidden_dropout_prob", 0.1)
    positions = keys.integer("max_position_embeddings", 2048)
    scaling = _gte_scaling(keys, positions)
    return EncoderConfig(
        family="gte",
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_heads=keys.integer("num_attention_heads"),
        intermediate_size=keys.integer("intermediate_size"),
        layer_types=global_every(keys.integer("num_hidden_layers"), 1),
        # The file has the length before scaling: the model's own tables have factor times as many positions.
        max_positions=positions if scaling is None else int(positions * scaling.factor),
        norm_position="post",
        mlp="gated",
        positions="rope",
        activation=keys.activation("hidden_act"),
        global_theta=_gte_rope(keys, "rope_theta").number("rope_theta", 10_000.0),
        global_scaling=scaling,
        norm_eps=keys.number("layer_norm_eps", 1e-12),
        norm_bias=True,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_output_bias=True,
        type_vocab_size=keys.integer("type_vocab_size", 1),
        embedding_dropout=dropout,
        attention_dropout=keys.number("attention_probs_dropout_prob", 0.0),
        attention_output_dropout=dropout,
        mlp_inner_dropout=dropout,
        mlp_output_dropout=dropout,
        initializer_range=keys.number("initializer_range", 0.02),
        pad_token_id=keys.integer("pad_token_id", 0),
    )


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


def write_gte(config: EncoderConfig, style: ConfigStyle) -> dict[str, Any]:
    """Write the keys of Alibaba-NLP/new-impl, with a pointer to its code."""
    del style
    scaling = config.global_scaling
    if scaling is not None and scaling.kind != "ntk":
        raise InputError(f"global_scaling: a gte config.json can only express ntk, got {scaling.kind}")
    return {
        "architectures": ["NewModel"],
        "auto_map": {
            "AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig",
            "AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel",
            "AutoModelForMaskedLM": "Alibaba-NLP/new-impl--modeling.NewForMaskedLM",
        },
        "model_type": "new",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": "gelu_new" if config.activation == "gelu_tanh" else config.activation,
        "max_position_embeddings": config.max_positions if scaling is None else scaling.original_positions,
        "position_embedding_type": "rope",
        "rope_theta": config.global_theta,
        "rope_scaling": None if scaling is None else {"type": "ntk", "factor": scaling.factor},
        "layer_norm_type": "layer_norm",
        "layer_norm_eps": config.norm_eps,
        "type_vocab_size": config.type_vocab_size,
        "hidden_dropout_prob": config.embedding_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "pack_qkv": True,
        "unpad_inputs": False,
        "use_memory_efficient_attention": False,
        "logn_attention_scale": False,
        "logn_attention_clip1": False,
        "initializer_range": config.initializer_range,
        "pad_token_id": config.pad_token_id,
    }


GTE_LM = {"transform.dense": "lm_head.dense", "transform.norm": "lm_head.norm", "decoder": "lm_head.decoder"}

NOMICBERT = CheckpointFormat(
    write=write_nomicbert,
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
        "classifier": HeadLayout("NomicBertForSequenceClassification", BERT_POOLER),
    },
)

GTE = CheckpointFormat(
    write=write_gte,
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
        heads=re.compile(r"(lm_head|pooler|classifier|qa_outputs)\."),
        buffers=BERT_BUFFERS,
        swapped=frozenset({"layers.{}.mlp.up"}),  # up first, then the gate, which is the activated half
    ),
    heads={
        "masked_lm": HeadLayout("NewForMaskedLM", GTE_LM),
        "classifier": HeadLayout("NewForSequenceClassification", BERT_POOLER),
        "span_qa": HeadLayout("NewForQuestionAnswering", {"out": "qa_outputs"}),
    },
)
