"""Pretraining recipes: all problems are reported at once with their paths; the shipped recipes have the paper's settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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
        (("model.heads=3",), "model.heads: must divide hidden_size 16, got 3"),
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
