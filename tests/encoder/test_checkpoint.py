"""Checkpoints: strict reading, whole writing, shards, and errors that name the tensor."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quiver.encoder import Encoder, EncoderConfig, InputError, init_weights, load_encoder, pack_ids, save_encoder
from quiver.encoder.checkpoints.checkpoint import from_hf_state, to_hf_state
from quiver.encoder.config import RopeScaling
from quiver.encoder.presets import preset
from tests.damage import Bomb


def tiny(name: str, **change: object) -> EncoderConfig:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "max_positions": 64}
    return replace(preset(name), **{**sizes, "layer_types": ("global", "global"), **change})


MODERNBERT = tiny("modernbert-base", layer_types=("global", "local"))
BERT = tiny("bert-base")
NOMICBERT = tiny("nomicbert", intermediate_size=256)  # its code knows no other widths
CONFIGS = {
    "modernbert": MODERNBERT,
    "modernbert-biases": tiny(
        "modernbert-base", norm_bias=True, qkv_bias=True, attention_output_bias=True, mlp_input_bias=True, mlp_output_bias=True
    ),
    "bert": BERT,
    "roberta": tiny("roberta-base"),
    "mosaicbert": tiny("mosaicbert-base"),
    "nomicbert": NOMICBERT,
    "nomicbert-plain": replace(NOMICBERT, mlp="plain", activation="gelu", mlp_input_bias=True, type_vocab_size=0),
    "gte": tiny("gte-en-mlm-large"),
    "gte-stretched": tiny("gte-en-mlm-base", global_scaling=RopeScaling("ntk", 2.0, 32)),
    "parallel": tiny("modernbert-base", family="quiver", norm_position="parallel", norm="rmsnorm", rotary_fraction=0.5),
    "plain": tiny("bert-base", family="quiver", positions="alibi", norm_position="pre", embedding_norm=False, final_norm=True),
}
PREFIXES = {"modernbert": "model.", "quiver": "", "roberta": "roberta.", "gte": "new."}
BATCH = pack_ids([[1, 2, 3], [4]])


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return init_weights(Encoder(request.param), seed=5).eval()


@pytest.mark.parametrize("prefix", [False, True])
def test_round_trip_is_bit_exact(encoder: Encoder, tmp_path: Path, prefix: bool) -> None:
    save_encoder(encoder, tmp_path, prefix=prefix)
    start = PREFIXES.get(encoder.config.family, "bert.") if prefix else ""
    assert all(key.startswith(start) for key in load_file(tmp_path / "model.safetensors"))
    random = torch.get_rng_state()
    again = load_encoder(tmp_path)
    assert torch.equal(torch.get_rng_state(), random)  # no weight was drawn that a loaded one would replace
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


@pytest.mark.parametrize("whole", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("shards", ["there", "deleted"])
def test_a_whole_file_is_read_before_the_index_of_earlier_shards(encoder: Encoder, tmp_path: Path, whole: str, shards: str) -> None:
    save_encoder(encoder, tmp_path)
    earlier = {key: tensor + 1 for key, tensor in to_hf_state(encoder).items()}
    save = save_file if whole.endswith(".safetensors") else torch.save
    if save is torch.save:
        torch.save(to_hf_state(encoder), tmp_path / whole)
        (tmp_path / "model.safetensors").unlink()
    shard = whole.replace(".", "-00001-of-00001.")
    (tmp_path / f"{whole}.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(earlier, shard)}))
    if shards == "there":
        save(earlier, tmp_path / shard)  # type: ignore[operator]
    assert torch.equal(load_encoder(tmp_path)(BATCH), encoder(BATCH))


def test_saving_over_shards_replaces_them(encoder: Encoder, tmp_path: Path) -> None:
    save_encoder(encoder, tmp_path)
    shard = tmp_path / "model-00001-of-00001.safetensors"
    (tmp_path / "model.safetensors").rename(shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(load_file(shard), shard.name)}))
    changed = init_weights(load_encoder(tmp_path), seed=99)
    save_encoder(changed, tmp_path)
    assert torch.equal(load_encoder(tmp_path)(BATCH), changed(BATCH))
    assert not shard.exists()


def test_each_part_of_a_fused_matrix_has_its_shape() -> None:
    encoder = init_weights(Encoder(BERT), seed=5)
    state = to_hf_state(encoder)
    key = "encoder.layer.0.attention.self.key.weight"
    with pytest.raises(InputError, match=rf"{key} has shape \(32, 16\), config.json requires \(32, 32\)"):
        from_hf_state(encoder, {**state, key: state[key][:, :16]}, where="here")


def test_tables_stay_float32_in_half_precision(tmp_path: Path) -> None:
    save_encoder(init_weights(Encoder(MODERNBERT), seed=5), tmp_path)
    half = load_encoder(tmp_path, dtype=torch.bfloat16)
    assert half.embeddings.tokens.weight.dtype == torch.bfloat16
    assert {table.cos.dtype for table in half.rotary} == {torch.float32}


def test_a_head_is_left_aside_and_said(encoder: Encoder, caplog: pytest.LogCaptureFixture) -> None:
    heads = {"modernbert": "head.dense.weight", "quiver": "head.dense.weight", "roberta": "lm_head.bias", "gte": "lm_head.norm.weight"}
    head = heads.get(encoder.config.family, "cls.predictions.transform.dense.weight")
    with caplog.at_level("INFO", logger="quiver.encoder"):
        from_hf_state(encoder, {**to_hf_state(encoder, prefix=True), head: torch.zeros(1)}, where="here")
    assert head in caplog.text


@pytest.mark.parametrize("start", ["bert.", "model.bert."])
def test_composers_names_are_read(start: str) -> None:
    encoder = init_weights(Encoder(MODERNBERT), seed=5)
    state = {f"{start}{'encoder.' if key.startswith('layers') else ''}{key}": tensor for key, tensor in to_hf_state(encoder).items()}
    heads = {f"{start.removesuffix('bert.')}{key}": torch.zeros(1) for key in ("head.dense.weight", "decoder.weight", "decoder.bias")}
    assert f"{start}encoder.layers.1.attn.Wqkv.weight" in state
    read = from_hf_state(encoder, {**state, **heads}, where="here")
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(read[name], tensor)


def test_a_name_with_and_without_prefix_is_refused(encoder: Encoder) -> None:
    with pytest.raises(InputError, match="two tensors have the same name"):
        from_hf_state(encoder, {**to_hf_state(encoder), **to_hf_state(encoder, prefix=True)}, where="here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.9.extra.weight": torch.zeros(1)}, r"unknown layers\.9\.extra\.weight"),
        ({"final_norm.weight": None}, r"missing final_norm\.weight"),
        ({"final_norm.weight": torch.zeros(32, dtype=torch.int8)}, r"final_norm\.weight holds .*not floating-point numbers"),
        ({"final_norm.weight": torch.zeros(16)}, r"final_norm\.weight has shape \(16,\), config\.json requires \(32,\)"),
    ],
    ids=["unknown", "missing", "quantized", "shape"],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Tensor | None], message: str) -> None:
    encoder = Encoder(MODERNBERT)
    state = {key: tensor for key, tensor in {**to_hf_state(encoder), **change}.items() if tensor is not None}
    with pytest.raises(InputError, match=message):
        from_hf_state(encoder, state, where="here")


def test_an_architecture_its_format_cannot_hold_is_not_saved(tmp_path: Path) -> None:
    encoder = Encoder(replace(BERT, norm_position="pre", final_norm=True))
    with pytest.raises(InputError, match=r"a bert config\.json cannot hold norm_position 'pre', final_norm True; use family quiver"):
        save_encoder(encoder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match=r"a bert checkpoint cannot store final_norm\.weight"):
        to_hf_state(encoder)


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_corrupt_file_is_an_input_error(encoder: Encoder, tmp_path: Path, damage: str) -> None:
    save_encoder(encoder, tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes({"truncate": content[: len(content) // 2], "flip": b"\xff" * 8 + content[8:], "empty": b""}[damage])
    with pytest.raises(InputError, match="corrupt checkpoint"):
        load_encoder(tmp_path)


def as_bin(folder: Path, *, legacy: bool = False, shards: int = 1) -> None:
    """Put what PyTorch saves into the place of a folder's model.safetensors."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        return
    weight_map = {key: f"pytorch_model-{place % shards + 1:05}-of-{shards:05}.bin" for place, key in enumerate(state)}
    for shard in set(weight_map.values()):
        torch.save({key: state[key] for key in state if weight_map[key] == shard}, folder / shard)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("form", [{}, {"legacy": True}, {"shards": 3}], ids=["zip", "legacy", "shards"])
def test_bin_weights_are_read_where_there_are_no_safetensors(form: dict[str, Any], encoder: Encoder, tmp_path: Path) -> None:
    save_encoder(encoder, tmp_path)
    as_bin(tmp_path, **form)
    found = load_encoder(tmp_path).state_dict()
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(found[name], tensor)


def write_plain_pickle(content: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


def write_legacy(content: object, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("save", [torch.save, write_legacy, write_plain_pickle])
def test_a_malicious_bin_file_is_refused_and_executes_nothing(save: Callable[[object, Path], None], tmp_path: Path) -> None:
    save_encoder(init_weights(Encoder(tiny("bert-base")), seed=1), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    save({"embeddings.word_embeddings.weight": Bomb(tmp_path / "went off")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model.bin: (refused|corrupt)") as caught:
        load_encoder(tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "went off").exists()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("damage", ["truncate", "garbage", "empty"])
def test_a_damaged_bin_file_is_an_input_error(damage: str, legacy: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    save_encoder(init_weights(Encoder(tiny("bert-base")), seed=1), tmp_path)
    as_bin(tmp_path, legacy=legacy)
    path = tmp_path / "pytorch_model.bin"
    content = path.read_bytes()
    noise = bytes(range(256)) * 8
    path.write_bytes({"truncate": content[: len(content) // 2], "garbage": content[:4] + noise, "empty": b""}[damage])
    with pytest.raises(InputError, match=r"pytorch_model.bin: corrupt checkpoint: .") as caught:
        load_encoder(tmp_path)
    assert "\n" not in str(caught.value)
    assert not recwarn.list


@pytest.mark.parametrize("content", [{"state_dict": {"weight": torch.ones(2)}}, [torch.ones(2)], {"weight": 1.0}])
def test_a_bin_file_of_something_else_is_read_last_and_refused(content: object, tmp_path: Path) -> None:
    save_encoder(init_weights(Encoder(MODERNBERT), seed=1), tmp_path)
    torch.save(content, tmp_path / "pytorch_model.bin")
    load_encoder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match="must hold a dictionary of tensors by name"):
        load_encoder(tmp_path)


def test_a_folder_without_weights_names_what_is_missing(encoder: Encoder, tmp_path: Path) -> None:
    save_encoder(encoder, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model.safetensors is missing, and so is pytorch_model.bin"):
        load_encoder(tmp_path)


def test_a_full_disk_is_an_oserror_that_names_the_file(
    encoder: Encoder, tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    """The tensors' own writer meets the end of the disk: what it raises is no OSError."""
    save_encoder(encoder, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with full_disk(4096), pytest.raises(OSError, match="File too large") as caught:
        save_encoder(init_weights(encoder, seed=9), tmp_path)
    assert caught.value.filename == str(tmp_path / "model.safetensors")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
