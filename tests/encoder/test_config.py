"""EncoderConfig: both generations of keys, round trips, and errors that name the key."""

from __future__ import annotations

import pytest

from encoder import InputError
from encoder.config import global_every
from encoder.hf_config import config_from_hf, config_to_hf

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


@pytest.mark.parametrize("style", ["v4", "v5"])
@pytest.mark.parametrize("hf", [MODERNBERT_BASE, BERT_BASE], ids=["modernbert", "bert"])
def test_round_trip(hf: dict[str, object], style: str) -> None:
    config = config_from_hf(hf)
    written = config_to_hf(config, style=style)
    assert config_from_hf(written) == config
    if hf is MODERNBERT_BASE:
        assert ("layer_types" in written) == (style == "v5")


def test_an_irregular_pattern_needs_v5_keys() -> None:
    hf = {**MODERNBERT_BASE, "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    config = config_from_hf(hf)
    assert config.layer_types == ("local", "global", "global")
    assert config_from_hf(config_to_hf(config, style="v4")) == config


def test_a_null_local_theta_means_the_global_one() -> None:
    assert config_from_hf({**MODERNBERT_BASE, "local_rope_theta": None}).local_theta == 160_000.0


def test_what_rope_parameters_leave_out_has_transformers_defaults() -> None:
    config = config_from_hf({**MODERNBERT_BASE, "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 777}}})
    assert (config.global_theta, config.local_theta) == (777.0, 10_000.0)


def test_layer_norm_eps_is_not_modernberts_key() -> None:
    hf = {key: value for key, value in MODERNBERT_BASE.items() if key != "norm_eps"}
    assert config_from_hf({**hf, "layer_norm_eps": 0.5}).norm_eps == 1e-5


def test_global_every() -> None:
    assert global_every(3, 1) == ("global",) * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "model_type must be one of bert, modernbert, got 't5'"),
        ({"model_type": None}, "got None"),
        ({"hidden_activation": "mish"}, "got 'mish'"),
        ({"num_attention_heads": 7}, "hidden_size 768 must be a multiple of num_heads 7"),
        ({"num_attention_heads": 256}, "even head width, got hidden_size / num_heads = 3"),
        ({"local_attention": 7}, "window must be even and >= 2, got 7"),
        ({"hidden_size": 0}, "hidden_size must be >= 1, got 0"),
        ({"num_hidden_layers": 0}, "at least one layer"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers says 22"),
        ({"layer_types": ["odd"] * 22}, "got odd"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1}}}, "rope_type must be 'default', got 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_theta is missing"),
        ({"global_rope_theta": 0}, "theta must be > 0"),
        ({"hidden_size": "abc"}, "hidden_size must be an integer, got 'abc'"),
        ({"intermediate_size": 48.0}, "intermediate_size must be an integer, got 48.0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be an integer, got '2'"),
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


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"])
def test_a_missing_key_is_named(key: str) -> None:
    hf = {name: value for name, value in MODERNBERT_BASE.items() if name != key}
    with pytest.raises(InputError, match=f"the key '{key}' is missing"):
        config_from_hf(hf)


def test_bert_as_a_decoder_is_refused() -> None:
    with pytest.raises(InputError, match="is_decoder"):
        config_from_hf({**BERT_BASE, "is_decoder": True})
    with pytest.raises(InputError, match="position_embedding_type"):
        config_from_hf({**BERT_BASE, "position_embedding_type": "relative_key"})
