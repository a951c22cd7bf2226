"""Our encoder against transformers' on random weights: hidden states, strict loading, checkpoints that open there."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from quiver.encoder import Encoder, InputError, load_encoder, pack_ids, save_encoder
from tests.parity.encoders import random_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

LENGTHS = (1, 63, 64, 65, 129, 1000)


def modernbert(folder: Path, **settings: object) -> transformers.ModernBertModel:
    return random_model("modernbert", folder, **{"hidden_size": 128, "max_position_embeddings": 1024, **settings})


def post_norm(name: str, folder: Path, **settings: object) -> transformers.PreTrainedModel:
    """BERT, RoBERTa or one of RoBERTa's kin."""
    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3, "max_position_embeddings": 1024 + 2 * (name != "bert")}
    return random_model(name, folder, **{**sizes, **settings})


FAMILIES = {"modernbert": modernbert, "bert": partial(post_norm, "bert"), "roberta": partial(post_norm, "roberta")}


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


@pytest.mark.parametrize("window", [2, 30, 64, 128, 256])
def test_modernbert_windows(tmp_path: Path, window: int) -> None:
    model = modernbert(tmp_path, local_attention=window)
    lengths = (1, window // 2, window // 2 + 1, window // 2 + 2, 3 * window + 1, 200)
    compare(model, load_encoder(tmp_path), sequences(lengths))


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
    model = post_norm("bert", tmp_path, hidden_act=activation, num_attention_heads=heads)
    compare(model, load_encoder(tmp_path), sequences(LENGTHS))


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "camembert"])
@pytest.mark.parametrize("padding", [1, 4])
def test_roberta_and_its_kin_equal_transformers(tmp_path: Path, name: str, padding: int) -> None:
    model = post_norm(name, tmp_path, pad_token_id=padding)
    if name == "xlm-roberta":
        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
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


HEADS = {"modernbert": transformers.ModernBertForMaskedLM, "bert": transformers.BertForMaskedLM, "roberta": transformers.RobertaForMaskedLM}


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
