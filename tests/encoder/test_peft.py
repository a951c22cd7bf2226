"""LoRA adapters in PEFT's files: added to their base as PEFT does, or refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quiver.encoder import Encoder, InputError, init_weights, load_encoder, pack_ids, save_adapter, save_encoder
from quiver.encoder.lora import add_lora, lora_matrices
from tests.encoder.test_checkpoint import tiny

BATCH = pack_ids([[5, 6, 7], [9], list(range(30))])
QUERY, VALUE = (f"encoder.layer.0.attention.self.{name}" for name in ("query", "value"))


def made(name: str) -> Encoder:
    return init_weights(Encoder(tiny(name, intermediate_size=256)), seed=5).eval()


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def update(module: str, rank: int = 4, rows: int = 32, columns: int = 32) -> dict[str, Tensor]:
    """A and B of a matrix, as PEFT names them."""
    start = f"base_model.model.{module}.lora_"
    return {f"{start}A.weight": drawn(rank, columns), f"{start}B.weight": drawn(rows, rank, seed=2)}


def adapter(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["query", "value"], "base_model_name_or_path": "base"}
    (folder / "adapter_config.json").write_text(json.dumps(given | settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_encoder(made("bert-base"), tmp_path / "base")
    return tmp_path / "base"


def merged(base: Path, changes: dict[str, Tensor], folder: Path) -> Tensor:
    """Hidden states of the base with these sums added to its tensors."""
    shutil.copytree(base, folder)
    state = load_file(folder / "model.safetensors")
    save_file({key: tensor + changes.get(key, 0) for key, tensor in state.items()}, folder / "model.safetensors")
    return states(folder)


def states(folder: Path) -> Tensor:
    with torch.no_grad():
        return load_encoder(folder)(BATCH)


def product(tensors: dict[str, Tensor], module: str) -> Tensor:
    a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
    return b @ a


SETTINGS: dict[str, tuple[dict[str, Any], float, float]] = {
    "alpha / r": ({}, 2.0, 2.0),
    "defaults": ({"lora_alpha": None, "r": 4, "init_lora_weights": True}, 2.0, 2.0),
    "rank-stabilized": ({"use_rslora": True}, 4.0, 4.0),
    "pattern of alpha": ({"alpha_pattern": {"query": 3, r"layer\.1\.attention.self.value": 9}}, 0.75, 2.0),
    "pattern of ranks": ({"r": 16, "rank_pattern": {"query": 4, "layer.0.attention.self.value": 4}}, 2.0, 2.0),
    "regular expression": ({"target_modules": r".*\.self\.(query|value)"}, 2.0, 2.0),
    "all-linear": ({"target_modules": "all-linear", "fan_in_fan_out": True, "bias": "none", "lora_dropout": 0.5}, 2.0, 2.0),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("place", ["beside", "alone"])
def test_an_adapter_is_added_to_its_base(base: Path, tmp_path: Path, name: str, place: str) -> None:
    settings, query, value = SETTINGS[name]
    if settings.get("lora_alpha", 8) is None:  # PEFT's default is 8
        settings = {key: each for key, each in settings.items() if key != "lora_alpha"}
    tensors = update(QUERY) | update(VALUE)
    changes = {f"{module}.weight": scale * product(tensors, module) for module, scale in ((QUERY, query), (VALUE, value))}
    expected = merged(base, changes, tmp_path / "merged")
    folder = tmp_path / "adapted"
    if place == "beside":
        shutil.copytree(base, folder)
    adapter(folder, tensors, **{"base_model_name_or_path": str(base) if place == "alone" else "owner/somewhere"} | settings)
    torch.testing.assert_close(states(folder), expected, atol=1e-6, rtol=0)
    assert (states(folder) - states(base)).abs().max() > 0.01


@pytest.mark.parametrize("family", ["modernbert-base", "roberta-base", "nomicbert", "gte-en-mlm-base"])
def test_what_save_adapter_writes_is_read(tmp_path: Path, family: str) -> None:
    encoder = made(family)
    save_encoder(encoder, tmp_path / "base", prefix=True)
    add_lora(encoder, rank=2, alpha=3.0, dropout=0.0, seed=1)
    with torch.no_grad():
        for matrix in lora_matrices(encoder).values():
            matrix.lora_b.copy_(drawn(*matrix.lora_b.shape) * 0.1)
        expected = encoder.eval()(BATCH)
    save_adapter(encoder, tmp_path / "adapter", base_model=str(tmp_path / "base"))
    torch.testing.assert_close(states(tmp_path / "adapter"), expected, atol=1e-6, rtol=0)


def test_trained_biases_norms_and_embeddings_take_the_place_of_the_bases(base: Path, tmp_path: Path) -> None:
    table, start = "embeddings.word_embeddings", "base_model.model."
    norm, bias = "encoder.layer.1.output.LayerNorm.weight", f"{QUERY}.bias"
    tensors = {
        f"{start}{norm}": drawn(32),
        f"{start}{QUERY}.base_layer.bias": drawn(32),
        f"{start}{VALUE}.lora_B.bias": drawn(32, seed=3),
        f"{start}{table}.lora_embedding_A": drawn(4, 64),
        f"{start}{table}.lora_embedding_B": drawn(32, 4, seed=2),
        f"{start}pooler.dense.weight": drawn(32, 32),  # a head: no hidden state depends on it
        **update(VALUE),
    }
    adapter(tmp_path / "adapter", tensors, target_modules=["value", "word_embeddings"], modules_to_save=["LayerNorm"], bias="all",
            base_model_name_or_path="../base", lora_bias=True)  # fmt: skip
    state = load_file(base / "model.safetensors")
    changes = {
        norm: drawn(32) - state[norm],
        bias: drawn(32) - state[bias],
        f"{VALUE}.bias": 2 * drawn(32, seed=3),
        f"{VALUE}.weight": 2 * product(tensors, VALUE),
        f"{table}.weight": 2 * (drawn(32, 4, seed=2) @ drawn(4, 64)).T,
    }
    torch.testing.assert_close(states(tmp_path / "adapter"), merged(base, changes, tmp_path / "merged"), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA, got 'IA3'; merge it into its base with PEFT"),
        ({"use_dora": True}, "use_dora is not supported, got True; merge it into its base with PEFT"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is not supported"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is not supported"),
        ({"a_setting_of_later": 3}, "a_setting_of_later is not supported, got 3"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported, because it changes the base too"),
        ({"r": 8}, "the rank of encoder.layer.0.attention.self.query must be 4, as in the adapter's weights, got 8"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number > 0, got '8'"),
        ({"rank_pattern": {"query": -4}}, "rank_pattern must be a number > 0, got -4"),
        ({"alpha_pattern": {"(": 4}}, "is not a regular expression"),
        ({"target_modules": ["key"]}, "an update of encoder.layer.0.attention.self.query, which target_modules does not name"),
        ({"target_modules": 3}, "must be a list or a regular expression, got 3"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path must name the model that the adapter belongs to, got None"),
        ({"base_model_name_or_path": "/no/such/folder"}, "the base of this LoRA adapter cannot be loaded: /no/such/folder: neither"),
        ({"base_model_name_or_path": "/"}, "the base of this LoRA adapter, /, has no config.json"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_in_one_line(base: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = adapter(tmp_path / "adapter", update(QUERY), **{"base_model_name_or_path": str(base)} | settings)
    with pytest.raises(InputError) as refused:
        load_encoder(folder)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "it has no tensors"),
        ({f"base_model.model.{QUERY}.lora_magnitude_vector": drawn(32)}, "lora_magnitude_vector is not supported"),
        ({f"base_model.model.{QUERY}.lora_A.weight": drawn(4, 32)}, f"must have A and B of {QUERY}, got lora_A.weight"),
        (update(f"encoder.layer.7.{'query'}"), "changes encoder.layer.7.query.weight, which its base does not have"),
        (update(QUERY, rows=31), f"has (31, 32) for {QUERY}.weight, its base (32, 32)"),
        ({"base_model.model.embeddings.LayerNorm.bias": drawn(3)}, "has (3,) for embeddings.LayerNorm.bias, its base (32,)"),
    ],
    ids=["empty", "magnitude", "half", "unknown", "rows", "bias"],
)
def test_weights_that_do_not_fit_are_named(base: Path, tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(InputError) as refused:
        load_encoder(adapter(tmp_path / "adapter", tensors, base_model_name_or_path=str(base)))
    assert message in str(refused.value)


def test_an_adapter_without_weights_and_one_that_names_itself(base: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", update(QUERY), base_model_name_or_path=str(tmp_path / "adapter"))
    with pytest.raises(InputError, match="must be a model without an adapter of its own"):
        load_encoder(folder)
    shutil.copytree(base, folder, dirs_exist_ok=True)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match=r"adapter_model\.safetensors is missing, the weights of the adapter"):
        load_encoder(folder)


def test_weights_beside_an_adapter_that_are_not_its_bases_are_refused(base: Path, tmp_path: Path) -> None:
    """As after merging into the same folder: the update would count twice."""
    folder = adapter(shutil.copytree(base, tmp_path / "merged"), update(QUERY), base_model_name_or_path=str(base))
    state = load_file(base / "model.safetensors")
    save_file({key: tensor.half() for key, tensor in state.items()}, folder / "model.safetensors")  # the same in lower precision
    load_encoder(folder)
    save_file(state | {f"{QUERY}.weight": state[f"{QUERY}.weight"] + 0.01}, folder / "model.safetensors")
    with pytest.raises(InputError, match=rf"are not those of its base .*base \({QUERY}.weight differs\).*; delete adapter_config\.json"):
        load_encoder(folder)


def test_saving_over_an_adapter_removes_it(base: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", update(QUERY), base_model_name_or_path=str(base))
    encoder = load_encoder(folder)
    save_encoder(encoder, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(states(folder), encoder(BATCH).detach())
