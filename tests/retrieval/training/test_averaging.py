"""Averages of models: every weight against NumPy, models that cannot be averaged, and atomic writing of the folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from quiver.encoder import InputError
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.training.model import build_model
from quiver.retrieval.training.recipe import Recipe
from quiver.retrieval.training.state import average_models, write_average

MakeRecipe = Callable[..., Recipe]
Write = Callable[..., Path]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def write(make_recipe: MakeRecipe, tmp_path: Path) -> Write:
    """Write a model with the weights of the starting model plus noise drawn by a seed."""

    def model(seed: int | None, kind: str = "dense", *overrides: str, change: Callable[[Any], Any] = lambda made: made) -> Path:
        made = change(build_model(make_recipe(kind, *overrides), []))
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for weight in (*made.encoder.parameters(), *made.projections.parameters()):
                    weight.add_(torch.randn(weight.shape, generator=generator) * 10.0 ** (seed % 3))
        folder = tmp_path / f"{kind}-{seed}-{len(list(tmp_path.iterdir()))}"
        made.save_pretrained(folder)
        return folder

    return model


def mean_of(folders: list[Path], name: str) -> dict[str, Any]:
    """NumPy's mean: summed in float64, rounded once."""
    loaded = [load_file(folder / name) for folder in folders]
    return {key: np.mean([one[key].astype(np.float64) for one in loaded], axis=0).astype(np.float32) for key in loaded[0]}


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_weight_is_the_mean(write: Write, tmp_path: Path, count: int) -> None:
    folders = [write(seed) for seed in range(count)]
    card = write_average(folders, tmp_path / "mean")
    found, expected = load_file(tmp_path / "mean" / "model.safetensors"), mean_of(folders, "model.safetensors")
    assert sorted(found) == sorted(expected)
    for name, weight in found.items():
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, expected[name], err_msg=name)
    assert len(found) >= 10
    model = load_model(tmp_path / "mean")
    assert isinstance(model, BiEncoder)
    assert model.card.fingerprint == card.fingerprint
    assert card.source == str(tmp_path / "mean")
    assert model.settings.query_prompt == "find: "
    if count == 1:
        assert contents(tmp_path / "mean") == contents(folders[0])
    else:
        assert card.fingerprint not in {load_model(folder).card.fingerprint for folder in folders}


def test_a_large_weight_does_not_swallow_small_ones(write: Write) -> None:
    """In float32, 2^25 + 1 equals 2^25."""

    def filled(value: float) -> Callable[[Any], Any]:
        def change(made: Any) -> Any:
            nn.init.constant_(made.encoder.final_norm.weight, value)
            return made

        return change

    folders = [write(None, change=filled(value)) for value in (2.0**25, *[1.0] * 7)]
    assert average_models(folders).encoder.final_norm.weight.tolist() == [float(np.float32((2**25 + 7) / 8))] * 16
    assert np.float32((2**25 + 7) / 8) == 4194305 != 2**22


def other_prompt(made: Any) -> Any:
    return type(made).from_parts(made.encoder, made.tokenizer, replace(made.settings, query_prompt="look: "), source=made.source)


def dense_module(activation: str) -> Callable[[Any], Any]:
    def change(made: Any) -> Any:
        settings = replace(made.settings, projections=(Projection(16, 16, bias=True, activation=activation),))
        return type(made).from_parts(made.encoder, made.tokenizer, settings, source=made.source)

    return change


def test_different_models_are_refused_with_their_difference(write: Write, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    one = write(1)
    random = ("model.tokenizer=" + str(one), "model.init=random", "model.architecture.family=modernbert")
    shape = {
        "hidden_size": 16,
        "layers": 2,
        "heads": 2,
        "intermediate_size": 32,
        "vocab_size": 320,
        "max_positions": 64,
        "global_every": 2,
        "window": 8,
        "global_theta": 160000,
        "local_theta": 10000,
    }
    shaped = (*random, *(f"model.architecture.{key}={value}" for key, value in shape.items()))
    tokenizer = write(1)
    changed = json.loads((tokenizer / "tokenizer.json").read_text())
    changed["model"]["vocab"] = dict(zip(changed["model"]["vocab"], reversed(changed["model"]["vocab"].values()), strict=True))
    (tokenizer / "tokenizer.json").write_text(json.dumps(changed))
    others = {
        "kind": write(1, "colbert"),
        "architecture": write(1, "dense", *shaped),
        "vocabulary": tokenizer,
        "the shapes of their weights": write(1, change=dense_module("torch.nn.modules.linear.Identity")),
        "their settings": write(1, change=other_prompt),
    }
    before = contents(one)
    for what, other in others.items():
        with pytest.raises(InputError) as caught:
            write_average([one, one, other], tmp_path / "mean")
        assert str(caught.value) == f"{other} and {one} cannot be averaged: they differ in {what}"
    tanh = write(1, change=dense_module("torch.nn.modules.activation.Tanh"))
    with pytest.raises(InputError, match=r"cannot be averaged: they differ in their Dense modules$"):
        average_models([others["the shapes of their weights"], tanh])
    assert not (tmp_path / "mean").exists()
    assert contents(one) == before


def test_the_output_folder_is_checked(write: Write, tmp_path: Path) -> None:
    one, other = write(1), write(2)
    before = contents(one)
    for out in (one, tmp_path):
        with pytest.raises(InputError, match="is or contains one of the models to average; choose another --out"):
            write_average([other, one], out, overwrite=True)
    third = write(3)
    with pytest.raises(InputError, match="not empty; choose another --out, or add --overwrite"):
        write_average([one, other], third)
    assert write_average([one, other], third, overwrite=True).fingerprint == load_model(third).card.fingerprint
    assert contents(one) == before
    assert not list(tmp_path.rglob(".*"))
