"""Enlarging a pretrained model: its initial held-out loss is lower than that of random weights, and a run can start from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quiver.encoder import MaskedLM, Tokenizer
from quiver.encoder.checkpoints.head_checkpoint import load_head
from quiver.encoder.files import read_json
from quiver.encoder.pretraining.corpus import open_corpus
from quiver.encoder.pretraining.phases import first_model
from quiver.encoder.pretraining.recipe import PretrainingRecipe, load_pretraining_recipe
from quiver.encoder.pretraining.task import HeldOut, save_model
from quiver.encoder.pretraining.tiling import enlarge_masked_lm
from quiver.encoder.training.processes import Processes

LARGER = ("model.layers=3", "model.hidden_size=24", "model.heads=3", "model.intermediate_size=41")


def recipe_of(run: Path, *overrides: str) -> PretrainingRecipe:
    return load_pretraining_recipe(run / "recipe.json", overrides)


@pytest.fixture
def enlarged(whole_run: Path) -> MaskedLM:
    config = first_model(recipe_of(whole_run, *LARGER), Tokenizer.from_pretrained(whole_run / "model")).encoder.config
    parent = load_head(MaskedLM, whole_run / "model")
    return enlarge_masked_lm(parent, replace(config, max_positions=48, global_theta=160_000.0, attention_output_dropout=0.0))


def test_an_enlarged_model_has_a_lower_loss_than_random_weights(whole_run: Path, enlarged: MaskedLM) -> None:
    recipe, tokenizer = recipe_of(whole_run), Tokenizer.from_pretrained(whole_run / "model")
    held_out = HeldOut(recipe, recipe.phases[-1], open_corpus(whole_run / "corpus").held_out, tokenizer, Processes())
    random = first_model(recipe_of(whole_run, *LARGER, "phases.0.context=48"), tokenizer)
    parent, tiled, untrained = (held_out.loss(model) for model in (load_head(MaskedLM, whole_run / "model"), enlarged, random))
    assert parent < untrained - 0.5
    assert tiled - parent <= 0.8 * (untrained - parent), (parent, tiled, untrained)


def test_a_run_starts_from_an_enlarged_model(whole_run: Path, enlarged: MaskedLM, tmp_path: Path) -> None:
    save_model(enlarged, Tokenizer.from_pretrained(whole_run / "model"), tmp_path / "enlarged")
    start = (f"model.init={tmp_path / 'enlarged'}", f"model.tokenizer={tmp_path / 'enlarged'}")
    found = first_model(recipe_of(whole_run, *LARGER, *start), Tokenizer.from_pretrained(tmp_path / "enlarged"))
    assert read_json(tmp_path / "enlarged" / "config.json")["num_hidden_layers"] == 3
    for name, weight in enlarged.state_dict().items():
        assert found.state_dict()[name].equal(weight)
