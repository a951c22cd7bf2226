"""BERT (and MiniLM), RoBERTa (and XLM-R, CamemBERT) and MosaicBERT: config.json, tensor names and heads.

MosaicBERT's config.json says ``model_type: bert`` like BERT's; it is recognised by ``alibi_starting_size`` or by the code that it points
to.

Source: the published config.json files; ``BertConfig`` and ``RobertaConfig`` of transformers 5.3 and the state dicts of their classes;
``configuration_bert.py`` and ``bert_layers.py`` of mosaicml/examples, benchmarks/bert.
"""

from __future__ import annotations

import re
from typing import Any

from quiver.encoder.checkpoints.family import CheckpointFormat, ConfigReader, ConfigStyle, HeadLayout, TensorNames
from quiver.encoder.config import EncoderConfig, Family, global_every

MOSAIC_CODE = "mosaicml/mosaic-bert-base--bert_layers."


def read_bert(keys: ConfigReader) -> EncoderConfig:
    """Read a BERT, or a MosaicBERT if the file is one."""
    return _read_mosaicbert(keys) if _is_mosaicbert(keys) else _read_post_norm(keys, "bert", offset=0)


def read_roberta(keys: ConfigReader) -> EncoderConfig:
    """Read a RoBERTa: positions start at the padding id + 1, so the embedding begins with that many unused rows."""
    return _read_post_norm(keys, "roberta", offset=keys.integer("pad_token_id", 1) + 1)


def _read_post_norm(keys: ConfigReader, family: Family, *, offset: int) -> EncoderConfig:
    keys.require("position_embedding_type", "absolute")
    keys.require("is_decoder", False)
    dropout = keys.number("hidden_dropout_prob", 0.1)
    return EncoderConfig(
        family=family,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_heads=keys.integer("num_attention_heads"),
        intermediate_size=keys.integer("intermediate_size"),
        layer_types=global_every(keys.integer("num_hidden_layers"), 1),
        max_positions=keys.integer("max_position_embeddings") - offset,
        norm_position="post",
        mlp="plain",
        positions="absolute",
        activation=keys.activation("hidden_act"),
        position_offset=offset,
        norm_eps=keys.number("layer_norm_eps", 1e-12),
        norm_bias=True,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_input_bias=True,
        mlp_output_bias=True,
        type_vocab_size=keys.integer("type_vocab_size", 2),
        embedding_dropout=dropout,
        attention_dropout=keys.number("attention_probs_dropout_prob", 0.1),
        attention_output_dropout=dropout,
        mlp_output_dropout=dropout,
        initializer_range=keys.number("initializer_range", 0.02),
        pad_token_id=keys.integer("pad_token_id", max(offset - 1, 0)),
    )


def _is_mosaicbert(keys: ConfigReader) -> bool:
    code = keys.inner("auto_map")
    return "alibi_starting_size" in keys.hf or (code is not None and any("bert_layers." in str(name) for name in code.hf.values()))


def _read_mosaicbert(keys: ConfigReader) -> EncoderConfig:
    keys.require("position_embedding_type", "absolute", "alibi")  # published files say absolute, and the code ignores it
    keys.require("is_decoder", False)
    keys.require("hidden_act", "gelu")  # the gate is always GELU, so a file that says otherwise is refused
    dropout = keys.number("hidden_dropout_prob", 0.1)
    return EncoderConfig(
        family="mosaicbert",
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_heads=keys.integer("num_attention_heads"),
        intermediate_size=keys.integer("intermediate_size"),
        layer_types=global_every(keys.integer("num_hidden_layers"), 1),
        max_positions=keys.integer("alibi_starting_size", 512),
        norm_position="post",
        mlp="gated",
        positions="alibi",
        norm_eps=keys.number("layer_norm_eps", 1e-12),
        norm_bias=True,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_output_bias=True,
        type_vocab_size=keys.integer("type_vocab_size", 2),
        embedding_dropout=dropout,
        attention_dropout=keys.number("attention_probs_dropout_prob", 0.0),
        attention_output_dropout=dropout,
        mlp_inner_dropout=dropout,  # before the second matrix, and none after it
        initializer_range=keys.number("initializer_range", 0.02),
        pad_token_id=keys.integer("pad_token_id", 0),
    )


def write_bert(config: EncoderConfig, style: ConfigStyle) -> dict[str, Any]:
    """Write BERT's keys; they are the same in transformers 4 and 5."""
    del style
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        **_sizes(config),
        "hidden_act": "gelu_new" if config.activation == "gelu_tanh" else config.activation,
        "max_position_embeddings": config.max_positions,
    }


def write_roberta(config: EncoderConfig, style: ConfigStyle) -> dict[str, Any]:
    """Write RoBERTa's keys, which XLM-R and CamemBERT share."""
    return {
        **write_bert(config, style),
        "architectures": ["RobertaModel"],
        "model_type": "roberta",
        "max_position_embeddings": config.max_positions + config.position_offset,
    }


def write_mosaicbert(config: EncoderConfig, style: ConfigStyle) -> dict[str, Any]:
    """Write MosaicBERT's keys, with a pointer to its code: otherwise transformers would read a BERT and drop its weights."""
    return {
        **write_bert(config, style),
        "architectures": ["BertForMaskedLM"],
        "auto_map": {
            "AutoConfig": "mosaicml/mosaic-bert-base--configuration_bert.BertConfig",
            "AutoModelForMaskedLM": f"{MOSAIC_CODE}BertForMaskedLM",
            "AutoModelForSequenceClassification": f"{MOSAIC_CODE}BertForSequenceClassification",
        },
        "hidden_act": "gelu",
        "alibi_starting_size": config.max_positions,
    }


def _sizes(config: EncoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "position_embedding_type": "absolute",
        "type_vocab_size": config.type_vocab_size,
        "layer_norm_eps": config.norm_eps,
        "hidden_dropout_prob": config.embedding_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "initializer_range": config.initializer_range,
        "pad_token_id": config.pad_token_id,
    }


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
    "layers.{}.attention.qkv": tuple(f"encoder.layer.{{}}.attention.self.{name}" for name in ("query", "key", "value")),
    **BERT_ATTENTION_OUTPUT,
    "layers.{}.mlp.up": ("encoder.layer.{}.intermediate.dense",),
    "layers.{}.mlp.down": ("encoder.layer.{}.output.dense",),
    "layers.{}.mlp_norm": ("encoder.layer.{}.output.LayerNorm",),
}
# Names of BERT's TensorFlow release; transformers 5 writes them again when it saves such a model.
TENSORFLOW_NAMES = ((re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"), (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"))
BERT_HEADS = re.compile(r"(cls|pooler|classifier|qa_outputs)\.")
BERT_BUFFERS = re.compile(r"embeddings\.(position_ids|token_type_ids)$")
BERT_LM = {"transform.dense": "cls.predictions.transform.dense", "decoder": "cls.predictions.decoder"}
BERT_LAYER_NORM = {"transform.norm": "cls.predictions.transform.LayerNorm"}
BERT_POOLER = {"transform.dense": "{}pooler.dense", "out": "classifier"}
ROBERTA_LM = {"transform.dense": "lm_head.dense", "transform.norm": "lm_head.layer_norm", "decoder": "lm_head.decoder"}
ROBERTA_CLASSIFIER = {"transform.dense": "classifier.dense", "out": "classifier.out_proj"}

BERT = CheckpointFormat(
    write=write_bert,
    tensors=TensorNames(prefix="bert.", names=BERT_NAMES, heads=BERT_HEADS, buffers=BERT_BUFFERS, renames=TENSORFLOW_NAMES),
    heads={
        "masked_lm": HeadLayout("BertForMaskedLM", {**BERT_LM, **BERT_LAYER_NORM}, {"decoder.bias": "cls.predictions.bias"}),
        "classifier": HeadLayout("BertForSequenceClassification", BERT_POOLER),
        "span_qa": HeadLayout("BertForQuestionAnswering", {"out": "qa_outputs"}),
    },
)

ROBERTA = CheckpointFormat(
    write=write_roberta,
    tensors=TensorNames(
        prefix="roberta.",
        names=BERT_NAMES,
        heads=re.compile(r"(lm_head|pooler|classifier|qa_outputs)\."),
        buffers=BERT_BUFFERS,
        renames=TENSORFLOW_NAMES,
    ),
    heads={
        "masked_lm": HeadLayout("RobertaForMaskedLM", ROBERTA_LM, {"decoder.bias": "lm_head.bias"}),
        "classifier": HeadLayout("RobertaForSequenceClassification", ROBERTA_CLASSIFIER),
        "span_qa": HeadLayout("RobertaForQuestionAnswering", {"out": "qa_outputs"}),
    },
)

MOSAICBERT = CheckpointFormat(
    write=write_mosaicbert,
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
        "classifier": HeadLayout("BertForSequenceClassification", BERT_POOLER),
    },
)
