"""Checkpoints: strict reading, whole writing, shards, and errors that name the tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from encoder import Encoder, EncoderConfig, InputError, init_weights, load_encoder, pack_ids, save_encoder
from encoder.checkpoint import from_hf_state, to_hf_state
from encoder.hf_config import config_from_hf

MODERNBERT = EncoderConfig.modernbert(
    vocab_size=64, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "local"], max_positions=64
)
BERT = config_from_hf(
    {
        "model_type": "bert",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
)
BATCH = pack_ids([[1, 2, 3], [4]])


@pytest.fixture(params=[MODERNBERT, BERT], ids=["modernbert", "bert"])
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return init_weights(Encoder(request.param), seed=5).eval()


@pytest.mark.parametrize("prefix", [False, True])
def test_round_trip_is_bit_exact(encoder: Encoder, tmp_path: Path, prefix: bool) -> None:
    save_encoder(encoder, tmp_path, prefix=prefix)
    again = load_encoder(tmp_path)
    assert again.config == encoder.config
    assert not again.training
    assert torch.equal(again(BATCH), encoder(BATCH))
    assert set(again.state_dict()) == set(encoder.state_dict())


def test_shards_are_read(encoder: Encoder, tmp_path: Path) -> None:
    save_encoder(encoder, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    names = sorted(state)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({key: state[key] for key in keys}, tmp_path / file)
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(load_encoder(tmp_path)(BATCH), encoder(BATCH))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_encoder(tmp_path)


def test_saving_over_shards_replaces_them(encoder: Encoder, tmp_path: Path) -> None:
    save_encoder(encoder, tmp_path)
    shard = tmp_path / "model-00001-of-00001.safetensors"
    (tmp_path / "model.safetensors").rename(shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(load_file(shard), shard.name)}))
    changed = init_weights(load_encoder(tmp_path), seed=99)
    save_encoder(changed, tmp_path)
    assert torch.equal(load_encoder(tmp_path)(BATCH), changed(BATCH))
    assert not shard.exists()


@pytest.mark.parametrize("index", ["{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_an_index_of_shards_without_files_is_named(encoder: Encoder, tmp_path: Path, index: str) -> None:
    save_encoder(encoder, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InputError, match="weight_map must map tensors to files"):
        load_encoder(tmp_path)


def test_quantised_weights_are_refused(encoder: Encoder) -> None:
    state = to_hf_state(encoder)
    key = next(key for key in state if state[key].ndim == 2)
    with pytest.raises(InputError, match="not floating-point numbers"):
        from_hf_state(encoder, {**state, key: state[key].to(torch.int8)}, where="here")


def test_each_part_of_a_fused_matrix_has_its_shape() -> None:
    encoder = init_weights(Encoder(BERT), seed=5)
    state = to_hf_state(encoder)
    key = "encoder.layer.0.attention.self.key.weight"
    with pytest.raises(InputError, match=rf"{key} has shape \(32, 16\), config.json asks for \(32, 32\)"):
        from_hf_state(encoder, {**state, key: state[key][:, :16]}, where="here")


def test_errors_name_the_folder(encoder: Encoder, tmp_path: Path) -> None:
    save_encoder(encoder, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(InputError, match=rf"{tmp_path}: config\.json: model_type must be one of"):
        load_encoder(tmp_path)


def test_tables_stay_float32_in_half_precision(tmp_path: Path) -> None:
    save_encoder(init_weights(Encoder(MODERNBERT), seed=5), tmp_path)
    half = load_encoder(tmp_path, dtype=torch.bfloat16)
    assert half.embeddings.tokens.weight.dtype == torch.bfloat16
    assert {table.cos.dtype for table in half.rotary} == {torch.float32}


def test_a_missing_tensor_is_named(encoder: Encoder) -> None:
    state = to_hf_state(encoder)
    key = sorted(state)[0]
    del state[key]
    with pytest.raises(InputError, match=f"missing {key}"):
        from_hf_state(encoder, state, where="here")


def test_an_unknown_tensor_is_named(encoder: Encoder) -> None:
    with pytest.raises(InputError, match=r"unknown layers\.9\.extra\.weight"):
        from_hf_state(encoder, {**to_hf_state(encoder), "layers.9.extra.weight": torch.zeros(1)}, where="here")


def test_a_wrong_shape_is_named(encoder: Encoder) -> None:
    state = to_hf_state(encoder)
    key = next(key for key in state if "embeddings" in key and state[key].ndim == 2)
    with pytest.raises(InputError, match=rf"{key} has shape \(64, 16\), config.json asks for \(64, 32\)"):
        from_hf_state(encoder, {**state, key: state[key][:, :16]}, where="here")


def test_a_head_is_left_aside_and_said(encoder: Encoder, caplog: pytest.LogCaptureFixture) -> None:
    head = "head.dense.weight" if encoder.config.family == "modernbert" else "cls.predictions.bias"
    with caplog.at_level("INFO", logger="encoder"):
        from_hf_state(encoder, {**to_hf_state(encoder, prefix=True), head: torch.zeros(1)}, where="here")
    assert head in caplog.text


def test_old_tensorflow_names_are_read() -> None:
    encoder = init_weights(Encoder(BERT), seed=5)
    state = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for key, tensor in to_hf_state(encoder).items()
    }
    assert any("gamma" in key for key in state)
    for name, tensor in from_hf_state(encoder, state, where="here").items():
        assert torch.equal(tensor, encoder.state_dict()[name])


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_corrupt_file_is_an_input_error(encoder: Encoder, tmp_path: Path, damage: str) -> None:
    save_encoder(encoder, tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes({"truncate": content[: len(content) // 2], "flip": b"\xff" * 8 + content[8:], "empty": b""}[damage])
    with pytest.raises(InputError, match="corrupt checkpoint"):
        load_encoder(tmp_path)


def test_a_pickle_is_not_read(tmp_path: Path, encoder: Encoder) -> None:
    save_encoder(encoder, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="is a pickle and is not read"):
        load_encoder(tmp_path)


def test_no_folder_and_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="no such folder"):
        load_encoder("quiver-tests/there-is-no-such-model")
    with pytest.raises(InputError, match="not a hub id"):
        load_encoder(tmp_path / "nowhere" / "at" / "all")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InputError, match="a model is a folder, this is a file"):
        load_encoder(file)


def test_an_interrupted_write_leaves_the_old_checkpoint(encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_encoder(encoder, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("encoder.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_encoder(init_weights(encoder, seed=9), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
