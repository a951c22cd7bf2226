"""Tokenizer, configuration and initial weights of the phases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quiver.encoder import InputError
from quiver.encoder.checkpoints.head_checkpoint import load_head
from quiver.encoder.heads import MaskedLM
from quiver.encoder.packing import pack_ids
from quiver.encoder.pretraining.phases import first_model, in_form, make_tokenizer, phase_config
from quiver.encoder.pretraining.recipe import PretrainingRecipe
from quiver.encoder.pretraining.task import save_model
from quiver.encoder.pretraining.tiling import enlarge_masked_lm

MakeRecipe = Callable[..., PretrainingRecipe]


def test_the_tokenizer_has_the_template_of_the_paper(make_recipe: MakeRecipe) -> None:
    tokenizer = make_tokenizer(make_recipe("model.vocabulary.size=384", "model.vocabulary.unused=20"))
    assert len(tokenizer) == 384
    special = [tokenizer.token_id(name) for name in ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")]
    begin = special[0]
    assert begin is not None
    assert begin <= 384 - 20 - 5
    assert special == list(range(begin, begin + 5))
    unused = [tokenizer.token_id(f"[unused{number}]") for number in range(384 - begin - 5)]
    assert unused == list(range(begin + 5, 384))
    assert tokenizer.max_length == 48
    ids = tokenizer.encode(["open the file"], max_length=64).ids[0]
    assert (ids[0], ids[-1]) == (special[1], special[2])


def test_phases_differ_only_in_context_and_theta(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    tokenizer = make_tokenizer(recipe)
    short, long = (phase_config(recipe, phase, tokenizer) for phase in recipe.phases)
    assert (short.max_positions, short.global_theta) == (24, 10_000.0)
    assert (long.max_positions, long.global_theta) == (48, 160_000.0)
    assert short.local_theta == long.local_theta == 10_000.0
    assert short.attention_output_dropout == 0.1
    model = first_model(recipe, tokenizer).eval()
    assert model.transform.dense.weight.abs().max() <= 2 * 0.02, "drawn as ModernBERT's heads are"
    other = first_model(make_recipe("training.seed=8"), tokenizer)
    assert not torch.equal(other.encoder.embeddings.tokens.weight, model.encoder.embeddings.tokens.weight)
    longer = in_form(model, long, where="here").eval()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, longer.state_dict()[name])
    batch = pack_ids([list(range(20))])
    positions = torch.arange(20)
    assert not torch.equal(model.logits(batch, positions), longer.logits(batch, positions)), "the base of the global layers is another"
    with pytest.raises(InputError, match="24 positions"):
        model.encoder(pack_ids([list(range(30))]))
    assert longer.encoder(pack_ids([list(range(30))])).shape == (30, 16)


def test_a_run_starts_from_a_checkpoint_of_the_same_architecture_only(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe()
    tokenizer = make_tokenizer(recipe)
    start = first_model(recipe, tokenizer)
    save_model(start, tokenizer, tmp_path / "start")
    assert load_head(MaskedLM, tmp_path / "start").encoder.config.attention_output_dropout == 0.0, "a saved model has no dropout"
    assert start.encoder.config.attention_output_dropout == 0.1
    found = first_model(make_recipe(f"model.init={tmp_path / 'start'}", f"model.tokenizer={tmp_path / 'start'}"), tokenizer)
    for name, weight in start.state_dict().items():
        assert torch.equal(weight, found.state_dict()[name])
    named = (f"model.init={tmp_path / 'start'}", f"model.tokenizer={tmp_path / 'start'}")
    for override, message in (
        ("model.layers=3", r"model: .*start differs from the recipe: .*layers\.2.* is missing"),
        ("model.intermediate_size=32", r"differs from the recipe: .* is \(48, 16\), the recipe requires \(64, 16\)"),
        ("model.window=16", r"model\.init: .*start differs from the recipe: its window is 8, the recipe has 16"),
        ("model.global_every=1", r"layer_types is \('global', 'local'\), the recipe has \('global', 'global'\)"),
        ("model.local_theta=500", r"local_theta is 10000\.0, the recipe has 500\.0"),
    ):
        with pytest.raises(InputError, match=message):
            first_model(make_recipe(*named, override), tokenizer)


def test_a_run_may_start_from_a_smaller_checkpoint_that_it_tiles(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe()
    tokenizer = make_tokenizer(recipe)
    start = first_model(recipe, tokenizer)
    save_model(start, tokenizer, tmp_path / "start")
    sizes = ("model.hidden_size=32", "model.heads=4", "model.layers=4", "model.intermediate_size=40")
    for tiling in ("wraparound", "random-edges", "from-edge"):
        named = (f"model.init={tmp_path / 'start'}", f"model.tokenizer={tmp_path / 'start'}", f"model.tiling={tiling}")
        larger = make_recipe(*named, *sizes, "model.tiling_shared=false")
        found, config = first_model(larger, tokenizer), phase_config(larger, larger.phases[0], tokenizer)
        expected = enlarge_masked_lm(start, config, shared=False, tiling=tiling, seed=7).state_dict()
        assert found.encoder.config == config
        assert all(torch.equal(weight, expected[name]) for name, weight in found.state_dict().items())
    with pytest.raises(InputError, match=r"model\.tiling: .*start: enlarging an encoder may change only its sizes, but activation is"):
        first_model(make_recipe(*named, *sizes, "model.activation=relu"), tokenizer)
    with pytest.raises(InputError, match=r"model\.tiling: enlarges the weights of a checkpoint, but init is random"):
        make_recipe("model.tiling=from-edge")
