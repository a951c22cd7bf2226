"""config.json of every family: published files, both generations of keys, round trips, and errors that name the key."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from quiver.encoder import EncoderConfig, InputError
from quiver.encoder.checkpoints import config_from_hf, config_to_hf
from quiver.encoder.config import RopeScaling
from quiver.encoder.presets import preset

# answerdotai/ModernBERT-base as it was published: v4 keys.
MODERNBERT_BASE = {
    "model_type": "modernbert",
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "local_attention": 128,
    "layer_norm_eps": 1e-05,
    "norm_eps": 1e-05,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "pad_token_id": 50283,
    "cls_token_id": 50281,
    "sep_token_id": 50282,
}
BERT_BASE = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.2,
}
ROBERTA_BASE = {
    "model_type": "roberta",
    "vocab_size": 50265,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-05,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "pad_token_id": 1,
}
MOSAICBERT_BASE = {**BERT_BASE, "vocab_size": 30528, "attention_probs_dropout_prob": 0.0, "alibi_starting_size": 512}
NOMICBERT = {
    "model_type": "nomic_bert",
    "vocab_size": 30528,
    "pad_vocab_size_multiple": 64,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": 3072,
    "n_layer": 12,
    "n_positions": 2048,
    "max_trained_positions": 2048,
    "activation_function": "swiglu",
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "layer_norm_epsilon": 1e-12,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "type_vocab_size": 2,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "prenorm": False,
    "parallel_block": False,
    "causal": False,
    "use_rms_norm": False,
    "initializer_range": 0.02,
}
# Alibaba-NLP/gte-large-en-v1.5 as it was published.
GTE_LARGE = {
    "model_type": "new",
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": None,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pack_qkv": True,
    "pad_token_id": 0,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 2.0, "type": "ntk"},
    "rope_theta": 160000,
    "type_vocab_size": 2,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
    "vocab_size": 30528,
}
# FlexBERT with every switch away from its default.
ABLATION = EncoderConfig(
    family="quiver",
    vocab_size=128,
    hidden_size=64,
    num_heads=2,
    intermediate_size=96,
    layer_types=("local", "global", "local"),
    max_positions=256,
    norm_position="parallel",
    mlp="plain",
    positions="rope",
    activation="relu",
    window=30,
    global_theta=7.0,
    local_theta=8.0,
    global_scaling=RopeScaling("ntk", 3.0, 64),
    local_scaling=RopeScaling("yarn", 2.0, 128, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25),
    rotary_fraction=0.75,
    norm="rmsnorm",
    norm_eps=1e-6,
    qkv_bias=True,
    attention_output_bias=True,
    mlp_input_bias=True,
    mlp_output_bias=True,
    embedding_norm=False,
    final_norm=True,
    type_vocab_size=3,
    embedding_dropout=0.1,
    attention_dropout=0.2,
    attention_output_dropout=0.3,
    mlp_inner_dropout=0.4,
    mlp_output_dropout=0.5,
    initializer_range=0.01,
    pad_token_id=5,
    cls_token_id=6,
    sep_token_id=7,
)


def test_modernbert_base_has_the_papers_shape() -> None:
    config = config_from_hf(MODERNBERT_BASE)
    assert (config.num_layers, config.head_width, config.window) == (22, 64, 128)
    assert config.layer_types.count("global") == 8  # layers 0, 3, ..., 21
    assert config.layer_types[0] == config.layer_types[21] == "global"
    assert (config.theta("global"), config.theta("local")) == (160_000.0, 10_000.0)
    assert not config.first_attention_norm
    assert config.final_norm


def test_bert_base_keeps_its_dropouts() -> None:
    config = config_from_hf(BERT_BASE)
    assert (config.embedding_dropout, config.attention_dropout, config.mlp_output_dropout) == (0.1, 0.2, 0.1)
    assert (config.norm_eps, config.norm_position, config.positions) == (1e-12, "post", "absolute")


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "camembert"])
def test_robertas_positions_begin_behind_the_padding_id(name: str) -> None:
    config = config_from_hf({**ROBERTA_BASE, "model_type": name})
    assert (config.family, config.max_positions, config.position_offset) == ("roberta", 512, 2)
    config = config_from_hf({**ROBERTA_BASE, "model_type": name, "pad_token_id": 5})
    assert (config.max_positions, config.position_offset, config.pad_token_id) == (508, 6, 5)


@pytest.mark.parametrize(
    ("hf", "name"),
    [(ROBERTA_BASE, "roberta-base"), (MOSAICBERT_BASE, "mosaicbert-base"), (NOMICBERT, "nomicbert"), (MODERNBERT_BASE, "modernbert-base")],
)
def test_published_files_are_the_presets(hf: dict[str, object], name: str) -> None:
    assert config_from_hf(hf) == preset(name)


def test_nomicberts_sizes_are_rounded_up_as_its_code_does() -> None:
    config = config_from_hf({**NOMICBERT, "vocab_size": 30522, "n_inner": 3000})
    assert (config.vocab_size, config.intermediate_size) == (30_528, 3072)
    assert config_from_hf({**NOMICBERT, "n_inner": None}).intermediate_size == 2048  # 8/3 of the width
    plain = config_from_hf({**NOMICBERT, "activation_function": "gelu", "n_inner": 3000})
    assert (plain.mlp, plain.activation, plain.intermediate_size) == ("plain", "gelu", 3000)
    assert config_from_hf({**NOMICBERT, "activation_function": "geglu"}).activation == "gelu"


def test_nomicberts_dynamic_scaling_ends_at_the_trained_length(caplog: pytest.LogCaptureFixture) -> None:
    long = {**NOMICBERT, "n_positions": 8192}
    assert config_from_hf(long).max_positions == 8192
    assert not caplog.records
    with caplog.at_level(logging.WARNING, logger="quiver.encoder"):
        assert config_from_hf({**long, "rotary_scaling_factor": 2.0}).max_positions == 2048
    assert "rotary_scaling_factor is 2.0" in caplog.text


def test_gtes_scaling_stretches_its_positions() -> None:
    config = config_from_hf(GTE_LARGE)
    assert config.scaling("global") == RopeScaling("ntk", 2.0, 8192)
    assert (config.max_positions, config.theta("global"), config.type_vocab_size) == (16_384, 160_000.0, 2)
    assert config_from_hf({**GTE_LARGE, "rope_scaling": None}).max_positions == 8192
    # As transformers 5 saves it again.
    moved = {key: value for key, value in GTE_LARGE.items() if key not in ("rope_theta", "rope_scaling")}
    rope = {"rope_theta": 160000, "rope_type": "ntk", "type": "ntk", "factor": 2.0}
    assert config_from_hf({**moved, "rope_parameters": rope}) == config
    rope = {"rope_theta": 160000, "rope_type": "default"}
    assert config_from_hf({**moved, "rope_parameters": rope}) == replace(config, global_scaling=None, max_positions=8192)


PUBLISHED = {
    "modernbert": MODERNBERT_BASE,
    "bert": BERT_BASE,
    "roberta": ROBERTA_BASE,
    "mosaicbert": MOSAICBERT_BASE,
    "nomicbert": NOMICBERT,
    "gte": GTE_LARGE,
}


@pytest.mark.parametrize("style", ["v4", "v5"])
@pytest.mark.parametrize("family", PUBLISHED)
def test_round_trip(family: str, style: str) -> None:
    config = config_from_hf(PUBLISHED[family])
    assert config.family == family
    written = json.loads(json.dumps(config_to_hf(config, style=style)))
    assert config_from_hf(written) == config
    if family == "modernbert":
        assert ("layer_types" in written) == (style == "v5")


def test_mosaicbert_is_known_by_its_code_too() -> None:
    config = config_from_hf({**BERT_BASE, "auto_map": {"AutoModelForMaskedLM": "bert_layers.BertForMaskedLM"}})
    assert (config.family, config.positions, config.max_positions) == ("mosaicbert", "alibi", 512)
    assert config_from_hf({**BERT_BASE, "auto_map": {"AutoModel": "modeling_bert.BertModel"}}).family == "bert"


def test_quivers_file_holds_every_field() -> None:
    written = json.loads(json.dumps(config_to_hf(ABLATION)))
    assert config_from_hf({**written, "torch_dtype": "float32"}) == ABLATION
    del written["window"], written["hidden_size"]
    with pytest.raises(InputError, match="the key 'hidden_size' is missing"):
        config_from_hf(written)


def test_an_irregular_pattern_needs_v5_keys() -> None:
    hf = {**MODERNBERT_BASE, "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    config = config_from_hf(hf)
    assert config.layer_types == ("local", "global", "global")
    assert config_from_hf(config_to_hf(config, style="v4")) == config


def test_what_rope_parameters_leave_out_has_transformers_defaults() -> None:
    bare = {key: value for key, value in MODERNBERT_BASE.items() if "rope_theta" not in key}
    full = {"rope_type": "default", "rope_theta": 777}
    config = config_from_hf({**bare, "rope_parameters": {"full_attention": full}})
    assert (config.global_theta, config.local_theta) == (777.0, 10_000.0)
    config = config_from_hf({**bare, "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": full}})
    assert (config.global_theta, config.local_theta) == (160_000.0, 777.0)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "beta_fast": 32, "beta_slow": 1}
OURS = RopeScaling("yarn", 4.0, 8192)


def test_v5s_rope_parameters_scale_each_layer_type() -> None:
    rope = {"full_attention": {**YARN, "rope_theta": 1e5}, "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    config = config_from_hf({**MODERNBERT_BASE, "rope_parameters": rope})
    assert (config.global_scaling, config.local_scaling) == (OURS, RopeScaling("linear", 2.0, 8192))
    written = config_to_hf(config, style="v4")  # which has no words for two scalings
    assert written["rope_parameters"]["sliding_attention"] == rope["sliding_attention"]
    assert config_from_hf(written) == config
    alone = {"full_attention": {**YARN, "rope_theta": 1e5, "attention_factor": 1.5}}
    config = config_from_hf({**MODERNBERT_BASE, "rope_parameters": alone})
    assert (config.global_scaling, config.local_scaling) == (replace(OURS, attention_factor=1.5), None)
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "t5"},
            "model_type must be one of bert, camembert, gte, modernbert, new, nomic_bert, quiver, roberta, xlm-roberta,",
        ),
        ({"model_type": None}, "got None"),
        ({"hidden_activation": "mish"}, "hidden_activation must be one of"),
        ({"num_attention_heads": 7}, "num_heads must divide hidden_size 768, got 7"),
        ({"num_attention_heads": 256}, "num_heads must give an even head width times rotary_fraction, got 3 times 1.0"),
        ({"local_attention": 7}, "window must be even and >= 2, got 7"),
        ({"hidden_size": 0}, "hidden_size must be >= 1, got 0"),
        ({"num_hidden_layers": 0}, "at least one layer"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling.rope_type must be default, linear, yarn, got 'dynamic'"),
        ({"rope_scaling": {"type": "yarn"}}, "the key 'rope_scaling.factor' is missing"),
        ({"rope_scaling": {**YARN, "mscale": 0.7}}, "rope_scaling.mscale is not supported, got 0.7"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "factor must be >= 1, got 0.5"),
        ({"rope_scaling": {**YARN, "beta_fast": "x"}}, "rope_scaling.beta_fast must be a number, got 'x'"),
        ({"rope_scaling": 4}, "rope_scaling must be an object, got 4"),
        ({"rope_parameters": {"rope_type": "default"}}, "must name full_attention and sliding_attention, got rope_type"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, but num_hidden_layers is 22"),
        ({"layer_types": ["odd"] * 22}, "got odd"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "llama3", "rope_theta": 1}}},
            "rope_parameters.full_attention.rope_type must be default, linear, yarn, got 'llama3'",
        ),
        ({"global_rope_theta": 0}, "theta must be > 0"),
        ({"hidden_size": "abc"}, "hidden_size must be an integer, got 'abc'"),
        ({"vocab_size": True}, "vocab_size must be an integer, got True"),
        ({"norm_eps": "x"}, "norm_eps must be a number, got 'x'"),
        ({"norm_bias": 1}, "norm_bias must be true or false, got 1"),
        ({"hidden_activation": ["gelu"]}, "got ['gelu']"),
        ({"attention_dropout": 2}, "attention_dropout must be >= 0 and < 1, got 2"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object, got [1]"),
        ({"rope_parameters": {"full_attention": 5}}, "rope_parameters.full_attention must be an object, got 5"),
        ({"layer_types": "full_attention"}, "layer_types must be a list"),
        ({"model_type": ["bert"]}, "got ['bert']"),
    ],
)
def test_a_bad_key_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        config_from_hf({**MODERNBERT_BASE, **change})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("hf", "change", "message"),
    [
        (BERT_BASE, {"is_decoder": True}, "is_decoder must be False, got True"),
        (BERT_BASE, {"position_embedding_type": "relative_key"}, "position_embedding_type must be 'absolute', got 'relative_key'"),
        (ROBERTA_BASE, {"is_decoder": True}, "is_decoder must be False"),
        (ROBERTA_BASE, {"max_position_embeddings": 2}, "max_positions must be >= 1, got 0"),
        (MOSAICBERT_BASE, {"hidden_act": "silu"}, "hidden_act must be 'gelu', got 'silu'"),
        (NOMICBERT, {"causal": True}, "causal must be False, got True"),
        (NOMICBERT, {"prenorm": True}, "prenorm must be False, got True"),
        (NOMICBERT, {"parallel_block": True}, "parallel_block must be False"),
        (NOMICBERT, {"use_rms_norm": True}, "use_rms_norm must be False"),
        (NOMICBERT, {"rotary_emb_interleaved": True}, "rotary_emb_interleaved must be False"),
        (NOMICBERT, {"rotary_emb_scale_base": 512}, "rotary_emb_scale_base is not supported, got 512"),
        (NOMICBERT, {"rotary_emb_fraction": 0.0}, "rotary_emb_fraction must be > 0"),
        (NOMICBERT, {"num_experts": 8}, "num_experts must be 0, got 8"),
        (NOMICBERT, {"activation_function": "glu"}, "activation_function must be one of swiglu, geglu, gelu, got 'glu'"),
        (GTE_LARGE, {"layer_norm_type": "rms_norm"}, "layer_norm_type must be 'layer_norm', got 'rms_norm'"),
        (GTE_LARGE, {"position_embedding_type": "absolute"}, "position_embedding_type must be 'rope', got 'absolute'"),
        (GTE_LARGE, {"logn_attention_scale": True}, "logn_attention_scale must be False, got True"),
        (GTE_LARGE, {"pack_qkv": False}, "pack_qkv must be True, got False"),
        (GTE_LARGE, {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}, "rope_scaling.mixed_b is not supported, got 0.6"),
        (GTE_LARGE, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type must be 'ntk' or 'default', got 'linear'"),
    ],
)
def test_what_is_not_supported_is_named(hf: dict[str, object], change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        config_from_hf({**hf, **change})
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"])
def test_a_missing_key_is_named(key: str) -> None:
    hf = {name: value for name, value in MODERNBERT_BASE.items() if name != key}
    with pytest.raises(InputError, match=f"the key '{key}' is missing"):
        config_from_hf(hf)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "unknown key colour"),
        ({"global_scaling": {"kind": "ntk", "factor": 2.0, "original_positions": 64, "mixed_b": 1}}, "unknown key global_scaling.mixed_b"),
        ({"global_scaling": {"kind": "ntk", "factor": 2.0}}, "the key 'global_scaling.original_positions' is missing"),
        ({"global_scaling": {"kind": "new", "factor": 2.0, "original_positions": 1}}, "global_scaling.kind must be linear or ntk or yarn"),
        ({"global_scaling": 2}, "global_scaling must be an object, got 2"),
        ({"hidden_size": 64.0}, "hidden_size must be an integer, got 64.0"),
        ({"final_norm": 1}, "final_norm must be true or false, got 1"),
        ({"norm_eps": "1e-5"}, "norm_eps must be a number, got '1e-5'"),
        ({"norm": "batchnorm"}, "norm must be layernorm or rmsnorm, got 'batchnorm'"),
        ({"activation": "mish"}, "activation must be one of gelu, gelu_tanh, silu, relu, got 'mish'"),
        ({"layer_types": "global"}, "layer_types must be a list, got 'global'"),
        ({"layer_types": ["global", "odd"]}, "layer_types must be global or local, got 'odd'"),
        ({"rotary_fraction": 0.7}, "must give an even head width"),
        ({"family": "bert"}, "unknown key family"),
    ],
)
def test_quivers_file_is_read_strictly(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        config_from_hf({**config_to_hf(ABLATION), **change})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        ("modernbert-base", {"norm": "rmsnorm"}, "norm"),
        ("modernbert-base", {"norm_position": "parallel"}, "norm_position"),
        ("modernbert-base", {"mlp": "plain"}, "mlp"),
        ("modernbert-base", {"rotary_fraction": 0.5}, "rotary_fraction"),
        ("modernbert-base", {"qkv_bias": True}, "attention_output_bias"),
        ("modernbert-base", {"attention_output_dropout": 0.1}, "attention_output_dropout"),
        ("modernbert-base", {"global_scaling": RopeScaling("ntk", 2.0, 8192)}, "rope_parameters.full_attention.rope_type"),
        ("modernbert-base", {"first_attention_norm": True}, "first_attention_norm"),
        ("bert-base", {"layer_types": ("local",) * 12}, "layer_types"),
        ("bert-base", {"positions": "alibi"}, "positions"),
        ("bert-base", {"position_offset": 2}, "position_offset"),
        ("bert-base", {"final_norm": True}, "final_norm"),
        ("roberta-base", {"position_offset": 3}, "position_offset"),
        ("mosaicbert-base", {"activation": "silu"}, "activation"),
        ("mosaicbert-base", {"mlp_input_bias": True}, "mlp_input_bias"),
        ("nomicbert", {"activation": "relu"}, "activation"),
        ("nomicbert", {"intermediate_size": 3000}, "intermediate_size"),
        ("nomicbert", {"global_scaling": RopeScaling("ntk", 2.0, 2048)}, "global_scaling"),
        ("gte-en-mlm-base", {"global_scaling": RopeScaling("yarn", 2.0, 4096)}, "global_scaling"),
        ("gte-en-mlm-base", {"global_scaling": RopeScaling("ntk", 2.0, 8192)}, "max_positions"),
        ("gte-en-mlm-base", {"rotary_fraction": 0.5}, "rotary_fraction"),
        ("gte-en-mlm-base", {"qkv_bias": False}, "qkv_bias False"),
    ],
)
def test_a_file_that_cannot_hold_an_architecture_is_not_written(name: str, change: dict[str, object], field: str) -> None:
    config = replace(preset(name), **change)
    with pytest.raises(InputError) as caught:
        config_to_hf(config)
    assert field in str(caught.value)
    own = replace(config, family="quiver")
    assert config_from_hf(config_to_hf(own)) == own


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "t5"}, "family must be one of modernbert, bert, roberta, mosaicbert, nomicbert, gte, quiver, got 't5'"),
        ({"norm_position": "none"}, "norm_position must be one of pre, post, parallel, got 'none'"),
        ({"rotary_fraction": 1.5}, "rotary_fraction must be > 0 and <= 1, got 1.5"),
        ({"norm": "rmsnorm", "norm_bias": True}, "norm_bias must be false with norm rmsnorm"),
        ({"position_offset": 2}, "position_offset must be 0 unless positions is absolute, got 2"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        replace(preset("modernbert-base"), **change)
    assert message in str(caught.value)
