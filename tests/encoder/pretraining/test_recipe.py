"""Pretraining recipes: all problems are reported at once with their paths; the shipped recipes have the paper's settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quiver.encoder.presets import preset
from quiver.encoder.pretraining.recipe import KINDS, PretrainingRecipe, load_pretraining_recipe
from quiver.encoder.schema import SchemaError
from quiver.encoder.training.recipe_file import find_recipe, shipped_recipes

MakeRecipe = Callable[..., PretrainingRecipe]

SHIPPED = ["pretrain-base", "pretrain-large", "pretrain-small"]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ("phases.1.context=16",),
            "phases.1.context: must be >= 24, the context of phase 0 (short): a phase may not shorten it, for the positions that it learnt "
            "would be lost; got 16",
        ),
        (("phases.1.mix.0.source=web",), "phases.1.mix.0.source: no source 'web'; there are code, prose"),
        (("phases.1.mix.0.source=prose",), "phases.1.mix: names a source twice"),
        (("data.sources.1.name=code", "phases.1.mix=[]"), "data.sources: the name 'code' stands twice"),
        (
            ("phases.0.warmup_tokens=2e3", "phases.0.decay_tokens=2e3"),
            "phases.0.warmup_tokens: warmup_tokens and decay_tokens must fit into",
        ),
        (("phases.0.micro_batch=5",), "phases.0.micro_batch: must divide batch_size 12, got 5"),
        (("phases.0.batch_warmup_from=6",), "phases.0.batch_warmup_from: must be a multiple of micro_batch 4, got 6"),
        (("phases.0.batch_warmup_from=16",), "phases.0.batch_warmup_from: must be <= batch_size 12, got 16"),
        (("phases.1.batch_warmup_from=2",), "phases.1.batch_warmup_from: needs batch_warmup_tokens"),
        (
            ("data.held_out=0", "training.averaging.best=2"),
            "training.averaging.best: the best checkpoints are chosen by the held-out loss, but data.held_out is 0",
        ),
        (
            ("training.averaging.best=2", "training.averaging.ema_half_life=5"),
            "training.averaging.best: the mean of checkpoints and the moving average exclude each other",
        ),
        (
            ("training.averaging.best=2", "training.evaluate_every="),
            "training.evaluate_every: training.averaging.best 2 needs it: without it the last checkpoint alone has a held-out loss",
        ),
        (
            ("model.init=runs/other",),
            "model.tokenizer: a vocabulary learnt anew is not the one that the weights of runs/other know; name theirs",
        ),
        (("training.averaging.with_last=false",), "training.averaging.with_last: leaves no checkpoint where training.averaging.best is 0"),
        (("model.heads=3",), "model.heads: twice it must divide hidden_size 16, got 3"),
        (("model.vocabulary.size=330",), "model.vocabulary.size: must be a multiple of 64, got 330"),
        (
            ("model.vocabulary.unused=100",),
            "model.vocabulary.unused: leaves no room in size 320 for 256 bytes and 5 special tokens, got 100",
        ),
        (("phases.0.tokens=none",), "phases.0.tokens: must be a number, got 'none'"),
        (("phases.7.tokens=1",), "phases.7 is not a section"),
        (("phases.0.rate=1",), "phases.0.rate: unknown key"),
    ],
)
def test_inconsistent_settings_are_reported(make_recipe: MakeRecipe, overrides: tuple[str, ...], problem: str) -> None:
    with pytest.raises(SchemaError) as caught:
        make_recipe(*overrides)
    assert len(caught.value.problems) == 1
    assert problem in str(caught.value)


def test_all_problems_are_reported_at_once(make_recipe: MakeRecipe) -> None:
    with pytest.raises(SchemaError) as caught:
        make_recipe("phases.1.context=16", "phases.0.micro_batch=5", "phases.1.mix.0.source=web")
    assert len(caught.value.problems) == 3


def test_empty_lists_are_refused(make_recipe: MakeRecipe) -> None:
    def empty(raw: dict[str, Any]) -> None:
        raw["phases"], raw["data"]["sources"] = [], []

    with pytest.raises(SchemaError) as caught:
        make_recipe(change=empty)
    assert caught.value.problems == ["data.sources: must name at least one source", "phases: must hold at least one phase"]


def test_overrides_address_items_of_lists(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("phases.1.learning_rate=2e-4", "data.sources.0.fields=[text]", "model.vocabulary.split=identifiers")
    assert recipe.phases[1].learning_rate == 2e-4
    assert recipe.data.sources[0].fields == ("text",)
    assert recipe.model.vocabulary.split == "identifiers"
    assert recipe.phases[0].batch_warmup_tokens == 900


def test_the_shipped_recipes_load_and_are_described() -> None:
    assert shipped_recipes(KINDS) == SHIPPED
    for name in SHIPPED:
        recipe = load_pretraining_recipe(name)
        text = find_recipe(name, KINDS).read_text(encoding="utf-8")
        assert recipe.name == name
        assert text.startswith("# ")
        assert f"quiver pretrain {name}" in text or f"quiver pretrain recipes/{name}.yaml" in text
        assert len(recipe.phases) == (4 if name == "pretrain-large" else 3)
        assert [phase.decay_tokens > 0 for phase in recipe.phases] == [*[False] * (len(recipe.phases) - 1), True]
        assert len(recipe.data.sources) == 1 or any(part.times > 1 for part in recipe.phases[-1].mix), "the decay upsamples"


@pytest.mark.parametrize(
    ("name", "shape", "layers", "phases", "warmups", "start", "best"),
    [
        (
            "pretrain-base",
            "modernbert-base",
            22,
            [
                # tokens, context, theta, learning rate, batch, micro-batch, weight decay
                (1_719_000_000_000, 1024, 10_000, 8e-4, 4608, 96, 1e-5),
                (250_000_000_000, 8192, 160_000, 3e-4, 8 * 72, 12, 1e-5),
                (50_000_000_000, 8192, 160_000, 3e-4, 8 * 72, 12, 1e-5),
            ],
            (3_000_000_000, 50_000_000_000),
            768,
            (3, True),
        ),
        (
            "pretrain-large",
            "modernbert-large",
            28,
            [
                (919_000_000_000, 1024, 10_000, 5e-4, 4928, 56, 1e-5),
                (800_000_000_000, 1024, 10_000, 5e-5, 4928, 56, 1e-6),
                (250_000_000_000, 8192, 160_000, 5e-5, 8 * 77, 7, 1e-6),
                (50_000_000_000, 8192, 160_000, 5e-5, 8 * 78, 6, 1e-6),
            ],
            (2_000_000_000, 10_000_000_000),
            448,
            (1, False),
        ),
    ],
)
def test_the_base_recipe_has_the_settings_of_the_paper(
    name: str,
    shape: str,
    layers: int,
    phases: list[tuple[float, ...]],
    warmups: tuple[int, int],
    start: int,
    best: tuple[int, bool],
) -> None:
    """ModernBERT, arXiv:2412.13663, Table 3, sections 2.2.2 and A.4, typed independently; the later batch sizes are per GPU."""
    recipe, published = load_pretraining_recipe(name), preset(shape)
    model, training = recipe.model, recipe.training
    assert model.layers == layers == published.num_layers
    assert (model.hidden_size, model.heads) == (published.hidden_size, published.num_heads)
    assert (model.intermediate_size, model.window, model.global_every) == (published.intermediate_size, published.window, 3)
    found = [
        (one.tokens, one.context, one.global_theta, one.learning_rate, one.batch_size, one.micro_batch, one.weight_decay)
        for one in recipe.phases
    ]
    assert found == phases
    first, last = recipe.phases[0], recipe.phases[-1]
    assert (first.warmup_tokens, first.batch_warmup_tokens, first.batch_warmup_from) == (*warmups, start)
    assert (last.decay, last.decay_tokens) == ("one_minus_sqrt", last.tokens)
    assert (training.averaging.best, training.averaging.with_last) == best
    assert (training.beta1, training.beta2, training.eps) == (0.9, 0.98, 1e-6)
    assert (training.mask_probability, training.dtype, model.dropout) == (0.3, "auto", 0.1)
    assert (model.vocabulary.size, model.vocabulary.unused) == (50_368, 83)
    assert model.tokenizer != "train" or model.vocabulary.share <= 0.001, "merges of all two trillion tokens are counted by nobody"
