"""Grids of sweeps: axes, the recipe of each run, and grids that are refused before training."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from quiver.encoder import InputError
from quiver.encoder.pretraining.recipe import load_pretraining_recipe
from quiver.encoder.schema import SchemaError
from quiver.encoder.training.recipe_file import find_recipe
from quiver.eval.sweep import PAPER_LEARNING_RATES, make_grid
from quiver.retrieval.training.recipe import load_recipe

RECIPE = {**yaml.safe_load(find_recipe("quickstart").read_text(encoding="utf-8")), "development": {"data": "dev"}}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    return path


def test_the_papers_learning_rates_are_the_default(recipe: Path) -> None:
    grid = make_grid(recipe)
    assert list(grid.axes) == ["training.learning_rate"]
    assert [run.recipe.training.learning_rate for run in grid.runs] == [1e-5, 2e-5, 3e-5, 5e-5, 8e-5, 1e-4]
    assert [run.name for run in grid.runs] == [f"learning_rate={rate}" for rate in PAPER_LEARNING_RATES]
    assert grid.fixed == ()


def test_every_combination_is_a_recipe_and_seeds_vary_fastest(recipe: Path) -> None:
    grid = make_grid(recipe, ["training.seed=1,2", "training.batch_size=8", "training.learning_rate=3e-5,0.0001"])
    assert [run.name for run in grid.runs] == [f"learning_rate={rate}_seed={seed}" for rate in ("3e-5", "1e-4") for seed in (1, 2)]
    assert grid.axes == {"training.learning_rate": (3e-5, 1e-4), "training.seed": (1, 2)}
    assert grid.fixed == ("training.batch_size=8",)
    for run in grid.runs:
        assert run.recipe.training.batch_size == 8
        assert run.recipe == load_recipe(recipe, run.overrides), "what a run's overrides say is what it is"
        assert run.settings == {"training.learning_rate": run.recipe.training.learning_rate, "training.seed": run.recipe.training.seed}


def test_a_fixed_learning_rate_is_not_an_axis(recipe: Path) -> None:
    grid = make_grid(recipe, ["training.learning_rate=3e-5", "training.seed=1,2"])
    assert list(grid.axes) == ["training.seed"]
    assert {run.recipe.training.learning_rate for run in grid.runs} == {3e-5}


def test_values_may_be_lists_and_texts(recipe: Path) -> None:
    settings = ["training.learning_rate=3e-5", "loss.matryoshka_dims=[8, 4],[8]", "model.query_prompt='query, ',''"]
    grid = make_grid(recipe, settings)
    assert [run.recipe.loss.matryoshka_dims for run in grid.runs] == [(8, 4), (8, 4), (8,), (8,)]
    assert grid.axes["loss.matryoshka_dims"] == ([8, 4], [8])
    assert grid.axes["model.query_prompt"] == ("query, ", "")
    names = [run.name for run in grid.runs]
    assert len(set(names)) == 4
    assert not set("/[], '\"") & set("".join(names)), "names are folders"


def test_folder_names_distinguish_texts_that_are_not_valid_names(recipe: Path) -> None:
    grid = make_grid(recipe, ["training.learning_rate=3e-5", "data.train=a/b.jsonl,a-b.jsonl,../c.jsonl", "model.tokenizer=x/y,x y"])
    assert len({run.name for run in grid.runs}) == 6
    assert not any("/" in run.name or run.name.startswith(".") for run in grid.runs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["training.learning_rate=3e-5"], "nothing to sweep"),
        (["training.learning_rate=3e-5,,8e-5"], "a value between two commas is empty"),
        (["training.learning_rate=3e-5,8e-5,"], "a value between two commas is empty"),
        (["training.learning_rate=3e-5,0.00003"], "learning_rate=3e-5 occurs twice in the grid"),
        (["training.seed=1,2", "training.seed=3"], "training.seed is set twice"),
        (["development.split=dev,test"], "must be the same in all runs"),
        (["development="], "a sweep needs a development collection"),
    ],
)
def test_invalid_grids_are_refused(recipe: Path, settings: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        make_grid(recipe, settings)
    assert "\n" not in str(refused.value)


def test_problems_of_all_combinations_are_named_once(recipe: Path) -> None:
    with pytest.raises(SchemaError) as refused:
        make_grid(recipe, ["training.learning_rate=3,8e-5", "training.batch_size=0,1,4"])
    assert sorted(refused.value.problems) == [
        "loss.name: mnrl takes its negatives from the batch: training.batch_size must be >= 2",
        "training.batch_size: must be >= 1, got 0",
        "training.learning_rate: must be <= 1, got 3",
    ]


LISTED = {
    "name": "mine",
    "kind": "sweep",
    "recipe": "pretrain-small",
    "settings": ["model.layers=2", "training.eps=1e-5"],
    "runs": [{"name": "base", "seeds": [1, 2]}, {"name": "rms-norm", "settings": ["model.norm=rmsnorm", "model.layers=3"]}],
}


def write_sweep(folder: Path, **changes: object) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(LISTED | changes), encoding="utf-8")
    return path


def test_a_sweep_recipe_names_its_runs(tmp_path: Path) -> None:
    grid = make_grid(write_sweep(tmp_path), ["training.eps=1e-3"])
    assert [run.name for run in grid.runs] == ["base_seed=1", "base_seed=2", "rms-norm_seed=12"]
    assert grid.axes == {"run": ("base", "rms-norm"), "training.seed": (1, 2, 12)}
    assert (grid.name, grid.source, grid.fixed) == ("mine", "pretrain-small", ("model.layers=2", "training.eps=1e-3"))
    assert [(run.recipe.model.norm, run.recipe.model.layers) for run in grid.runs] == [("layernorm", 2)] * 2 + [("rmsnorm", 3)]
    for run in grid.runs:
        assert run.recipe == load_pretraining_recipe("pretrain-small", run.overrides)


def test_values_are_combined_with_the_runs_of_a_sweep_recipe(tmp_path: Path) -> None:
    grid = make_grid(write_sweep(tmp_path), ["model.global_every=1,2", "training.seed=5,6"])
    assert len(grid.runs) == 2 * 2 * 2, "seeds of the command replace those of the recipe"
    assert grid.runs[-1].name == "rms-norm_global_every=2_seed=6"
    assert grid.runs[-1].settings == {"run": "rms-norm", "model.global_every": 2, "training.seed": 6}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": [{"name": "a"}, {"name": "a"}]}, "runs: the name 'a' stands twice"),
        ({"runs": [{"name": "a/b"}, {"name": "c"}]}, "runs.0.name: must be usable as a folder, got 'a/b'"),
        ({"recipe": "ablations"}, "recipe ablations is a sweep too"),
        ({"recipe": "pretrain-smal"}, "did you mean 'pretrain-small'"),
        ({"runs": [{"name": "a"}]}, "nothing to sweep"),
        ({"settings": ["model.norm=rmsnorm", "model.norm_bias=true"]}, "model.norm_bias: must be false with norm rmsnorm"),
        ({"settings": ["data.held_out=0"]}, "compares runs by their held-out loss; set data.held_out=0.01"),
    ],
)
def test_invalid_sweep_recipes_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_grid(write_sweep(tmp_path, **changes))


@pytest.mark.parametrize(("name", "command"), [("glue-base", "glue"), ("pretrain-base", "pretrain"), ("ablations", "pretrain")])
def test_a_shipped_recipe_of_any_kind_is_found_by_name(name: str, command: str) -> None:
    grid = make_grid(name, ["training.seed=1,2"])
    assert grid.kind.command == command
    assert {run.recipe.training.seed for run in grid.runs} == {1, 2}
