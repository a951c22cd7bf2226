"""Our encoder against transformers' on random weights: hidden states, strict loading, checkpoints that open there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quiver.encoder import Encoder, EncoderConfig, InputError, init_weights, load_encoder, pack_ids, save_encoder

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

LENGTHS = (1, 63, 64, 65, 129, 1000)


def modernbert(folder: Path, **overrides: object) -> transformers.ModernBertModel:
    settings = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "sdpa",
    }
    torch.manual_seed(7)
    model = transformers.ModernBertModel(transformers.ModernBertConfig(**{**settings, **overrides})).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the library's initial weights are too small to show a mistake
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


def post_norm(name: str, folder: Path, **overrides: object) -> transformers.PreTrainedModel:
    """BERT, RoBERTa or one of RoBERTa's kin."""
    settings = {
        "vocab_size": 512,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "max_position_embeddings": 1024,
        "attn_implementation": "sdpa",
    }
    if name != "bert":
        settings |= {"max_position_embeddings": 1026, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
    torch.manual_seed(7)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(name, **{**settings, **overrides})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


def bert(folder: Path, **overrides: object) -> transformers.BertModel:
    return post_norm("bert", folder, **overrides)


def roberta(folder: Path, **overrides: object) -> transformers.RobertaModel:
    return post_norm("roberta", folder, **overrides)


FAMILIES = {"modernbert": modernbert, "bert": bert, "roberta": roberta}


def sequences(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 512, (length,), generator=generator).tolist() for length in lengths]


def compare(model: torch.nn.Module, encoder: Encoder, texts: list[list[int]], *, atol: float = 1e-5) -> None:
    batch = pack_ids(texts)
    with torch.no_grad():
        expected = [
            model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long)).last_hidden_state[0]
            for ids in texts
        ]
        states = encoder(batch)
    # Inference and training may take different kernels.
    for ours in (states, encoder(batch).detach()):
        assert len(batch.unpack(ours)) == len(texts)
        for state, theirs in zip(batch.unpack(ours), expected, strict=True):
            torch.testing.assert_close(state, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize("head_width", [32, 64, 128])
@pytest.mark.parametrize("activation", ["gelu", "silu", "gelu_pytorch_tanh"])
def test_modernbert_equals_transformers_on_a_mixed_batch(tmp_path: Path, head_width: int, activation: str) -> None:
    model = modernbert(tmp_path, hidden_size=2 * head_width, hidden_activation=activation)
    compare(model, load_encoder(tmp_path), sequences(LENGTHS))


@pytest.mark.parametrize("length", LENGTHS)
def test_modernbert_equals_transformers_alone(tmp_path: Path, length: int) -> None:
    compare(modernbert(tmp_path), load_encoder(tmp_path), sequences((length,)))


@pytest.mark.parametrize("window", [2, 30, 64, 128, 256])
def test_modernbert_windows(tmp_path: Path, window: int) -> None:
    model = modernbert(tmp_path, local_attention=window)
    lengths = (1, window // 2, window // 2 + 1, window // 2 + 2, 3 * window + 1, 200)
    compare(model, load_encoder(tmp_path), sequences(lengths))


def test_modernbert_equals_transformers_padded_batch(tmp_path: Path) -> None:
    model = modernbert(tmp_path)
    texts = sequences((5, 180, 70))
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(text), dtype=torch.long) for text in texts], batch_first=True)
    batch = pack_ids(texts)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
        torch.testing.assert_close(load_encoder(tmp_path)(batch), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("biases", [True, False])
def test_modernbert_biases_layer_types_and_thetas(tmp_path: Path, biases: bool) -> None:
    model = modernbert(
        tmp_path,
        attention_bias=biases,
        mlp_bias=biases,
        norm_bias=biases,
        norm_eps=1e-3,
        layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 80_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    )
    compare(model, load_encoder(tmp_path), sequences((3, 150, 65)))


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_new"])
@pytest.mark.parametrize("heads", [1, 3])
def test_bert_equals_transformers(tmp_path: Path, activation: str, heads: int) -> None:
    model = bert(tmp_path, hidden_act=activation, num_attention_heads=heads)
    compare(model, load_encoder(tmp_path), sequences(LENGTHS))


@pytest.mark.parametrize("padding", [1, 4])
def test_xlm_r_in_a_bin_file_equals_transformers(tmp_path: Path, padding: int) -> None:
    model = post_norm("xlm-roberta", tmp_path, pad_token_id=padding, max_position_embeddings=1000 + padding + 1)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    compare(model, load_encoder(tmp_path), [*sequences(LENGTHS), [7] * 1000])


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "camembert"])
@pytest.mark.parametrize("padding", [1, 4])
def test_roberta_and_its_kin_equal_transformers(tmp_path: Path, name: str, padding: int) -> None:
    model = post_norm(name, tmp_path, pad_token_id=padding)
    encoder = load_encoder(tmp_path)
    assert (encoder.config.family, encoder.config.position_offset) == ("roberta", padding + 1)
    compare(model, encoder, sequences(LENGTHS))
    compare(model, encoder, [[padding, 7, padding, padding, 8, padding], [7, 8], [padding], [padding, padding, 9]])  # it stands in texts
    longest = encoder.config.max_positions
    compare(model, encoder, [[7] * longest])
    with pytest.raises(InputError, match=f"a sequence has {longest + 1} tokens, more than the encoder's {longest} positions"):
        encoder(pack_ids([[7] * (longest + 1)]))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32.0, "beta_slow": 1.0}
SCALINGS = {
    "yarn": YARN,
    "yarn-betas": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "factor": 2.5},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.3},
    "yarn-defaults": {"rope_type": "yarn", "factor": 2.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("style", ["v4", "v5", "global alone"])
def test_modernbert_with_stretched_rope(tmp_path: Path, scaling: dict[str, object], style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The check of YaRN's settings in transformers 5.3 looks for them beside the layer types, not in them, and fails.
    monkeypatch.setattr(transformers.ModernBertConfig, "validate_rope", lambda self, ignore_keys=None: None)
    plain = {"rope_type": "default", "rope_theta": 2000.0}
    stretched = {**scaling, "rope_theta": 30_000.0}
    local = plain if style == "global alone" else {**scaling, "rope_theta": 2000.0}
    model = modernbert(tmp_path, rope_parameters={"full_attention": stretched, "sliding_attention": local})
    if style == "v4":
        to_v4(tmp_path, {"global_rope_theta": 30_000.0, "local_rope_theta": 2000.0, "rope_scaling": scaling, "norm_eps": 1e-5})
        theirs = transformers.ModernBertModel.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
        compare(theirs, load_encoder(tmp_path), sequences((300,)))
    encoder = load_encoder(tmp_path)
    assert encoder.config.scaling("global") is not None
    assert (encoder.config.scaling("local") is None) == (style == "global alone")
    compare(model, encoder, sequences((1, 65, 400)))
    for ours in ("v4", "v5"):
        save_encoder(encoder, tmp_path / ours, style=ours)
        reopened = transformers.AutoModel.from_pretrained(tmp_path / ours, attn_implementation="sdpa").eval()
        compare(reopened, encoder, sequences((300, 7)))


def test_modernbert_with_a_null_local_theta(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 900.0}
    model = modernbert(tmp_path, rope_parameters={"full_attention": rope, "sliding_attention": rope})
    to_v4(tmp_path, {"global_rope_theta": 900.0, "local_rope_theta": None})
    compare(model, load_encoder(tmp_path), sequences(LENGTHS))


V4_KEYS = {
    "global_attn_every_n_layers": 2,
    "global_rope_theta": 40_000.0,
    "local_rope_theta": 700.0,
    "layer_norm_eps": 1e-5,
    "hidden_activation": "gelu",
}


def to_v4(folder: Path, keys: dict[str, object]) -> None:
    """Rewrite a saved config.json with the keys that transformers 4 wrote."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in ("layer_types", "rope_parameters", "norm_eps"):
        del config[key]
    path.write_text(json.dumps({**config, **keys}))


def test_v4_keys_give_the_same_states(tmp_path: Path) -> None:
    modernbert(tmp_path)
    to_v4(tmp_path, V4_KEYS)
    model = transformers.ModernBertModel.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    encoder = load_encoder(tmp_path)
    assert encoder.config.layer_types == ("global", "local", "global", "local")
    assert (encoder.config.global_theta, encoder.config.local_theta) == (40_000.0, 700.0)
    compare(model, encoder, sequences((2, 140)))


HEADS = {
    "modernbert": transformers.ModernBertForMaskedLM,
    "bert": transformers.BertForMaskedLM,
    "roberta": transformers.RobertaForMaskedLM,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_masked_language_model_checkpoints_load_with_their_prefix(tmp_path: Path, family: str) -> None:
    torch.manual_seed(3)
    base = FAMILIES[family](tmp_path / "base")
    head = HEADS[family](base.config).eval()
    head.save_pretrained(tmp_path / "mlm")
    compare(head.base_model, load_encoder(tmp_path / "mlm"), sequences((9, 80)))


@pytest.mark.parametrize("style", ["v4", "v5"])
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_checkpoints_open_in_transformers(tmp_path: Path, family: str, prefix: bool, style: str) -> None:
    model = FAMILIES[family](tmp_path / "theirs")
    encoder = load_encoder(tmp_path / "theirs")
    save_encoder(encoder, tmp_path / "ours", style=style, prefix=prefix)
    if prefix:  # the layout of a checkpoint with a head: transformers strips the prefix for the bare model
        reopened, info = HEADS[family].from_pretrained(tmp_path / "ours", attn_implementation="sdpa", output_loading_info=True)
        reopened = reopened.base_model
        assert all(key.startswith(("head.", "decoder.", "cls.", "lm_head.")) for key in info["missing_keys"])
    else:
        kwargs = {} if family == "modernbert" else {"add_pooling_layer": False}
        kind = transformers.AutoModel
        reopened, info = kind.from_pretrained(tmp_path / "ours", attn_implementation="sdpa", output_loading_info=True, **kwargs)
        assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    theirs = dict(model.named_parameters())
    for name, weight in reopened.named_parameters():
        torch.testing.assert_close(weight, theirs[name], atol=0, rtol=0)
    compare(reopened.eval(), load_encoder(tmp_path / "ours"), sequences((4, 100)))


def test_an_encoder_of_ours_opens_in_transformers(tmp_path: Path) -> None:
    config = EncoderConfig.modernbert(
        vocab_size=512,
        hidden_size=64,
        num_heads=2,
        intermediate_size=96,
        layer_types=["global", "local", "local", "global"],
        max_positions=512,
    )
    encoder = init_weights(Encoder(config), seed=1).eval()
    save_encoder(encoder, tmp_path)
    model, info = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    compare(model.eval(), encoder, sequences((7, 200)))


def test_minilm_equals_transformers(minilm: Path) -> None:
    model = transformers.BertModel.from_pretrained(minilm, attn_implementation="sdpa").eval()
    compare(model, load_encoder(minilm), sequences((1, 17, 256, 512)))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_error_is_no_larger_than_transformers_own(tmp_path: Path, family: str) -> None:
    model = FAMILIES[family](tmp_path)
    texts = sequences((40, 300, 129))
    exact = [model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in texts]
    half = model.to(torch.bfloat16)
    theirs = [half(input_ids=torch.tensor([ids])).last_hidden_state[0].float() for ids in texts]
    batch = pack_ids(texts)
    ours = batch.unpack(load_encoder(tmp_path, dtype=torch.bfloat16)(batch).float())
    error = torch.cat([(a - b).abs().flatten() for a, b in zip(ours, exact, strict=True)]).mean()
    reference = torch.cat([(a - b).abs().flatten() for a, b in zip(theirs, exact, strict=True)]).mean()
    assert error <= 1.1 * reference
