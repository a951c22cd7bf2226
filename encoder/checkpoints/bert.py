"""BERT (and MiniLM), RoBERTa (and XLM-R, CamemBERT), MosaicBERT, NomicBERT and GTE-en-MLM: config.json, tensor names and heads.

All of them have the norms of BERT, after the residual sums. MosaicBERT's config.json says ``model_type: bert`` like BERT's; it is
recognised by ``alibi_starting_size`` or by the code that it points to.

Source: the published config.json files; ``BertConfig`` and ``RobertaConfig`` of transformers 5.3 and the state dicts of their classes;
``configuration_bert.py`` and ``bert_layers.py`` of mosaicml/examples, benchmarks/bert; ``configuration_nomic_bert.py`` and
``modeling_hf_nomic_bert.py`` of nomic-ai/contrastors; ``configuration.py`` and ``modeling.py`` of Alibaba-NLP/new-impl.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Literal

from quiver.encoder.checkpoints.format import CheckpointFormat, ConfigKey, ConfigReader, ConfigStyle, HeadLayout, TensorNames, global_layers
from quiver.encoder.config import EncoderConfig, RopeScaling
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
POST_NORM = {"norm_position": "post", "norm_bias": True, "qkv_bias": True, "attention_output_bias": True, "mlp_output_bias": True}
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
        text = (
            "rotary_scaling_factor is %s: RoPE is rescaled by batch beyond %d tokens, which is not supported; %d of %d positions are used"
        )
        logger.warning(text, keys.hf.get("rotary_scaling_factor", 1.0), trained, trained, positions)
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
