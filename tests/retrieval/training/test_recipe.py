"""Recipes: every kind of problem with its path, all at once; overrides; what is shipped; the round trip."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from encoder.errors import InputError
from retrieval.training.recipe import RULES, Recipe, RecipeError, find_recipe, load_recipe, shipped_recipes, to_dict

RANDOM: dict[str, Any] = {
    "name": "sample",
    "description": "A sample.",
    "kind": "dense",
    "source": "none",
    "cost": "none",
    "expected": "none",
    "model": {
        "init": "random",
        "tokenizer": "train",
        "architecture": {
            "family": "modernbert",
            "hidden_size": 64,
            "layers": 2,
            "heads": 2,
            "intermediate_size": 96,
            "vocab_size": 512,
            "max_positions": 128,
            "global_every": 3,
            "window": 16,
            "global_theta": 10000.0,
            "local_theta": 10000.0,
        },
        "pooling": "mean",
        "normalize": True,
        "max_length": 64,
        "query_prompt": "search_query: ",
    },
    "data": {"train": "rows.jsonl.gz", "negative_field": "negative", "limit": 100},
    "loss": {"name": "mnrl"},
    "training": {
        "epochs": 1.5,
        "batch_size": 8,
        "learning_rate": 8e-5,
        "warmup_ratio": 0.05,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "seed": 12,
        "precision": "bf16",
        "scheduler": "cosine",
        "no_duplicates": False,
        "log_every": 10,
    },
}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The sample with settings replaced by dotted path; ``...`` takes one out."""
    recipe = copy.deepcopy(RANDOM)
    for path, value in changes.items():
        *parents, name = path.split(".")
        section = recipe
        for parent in parents:
            section = section[parent]
        if value is ...:
            del section[name]
        else:
            section[name] = value
    return recipe


def write(folder: Path, recipe: object, name: str = "sample.yaml") -> Path:
    path = folder / name
    path.write_text(recipe if isinstance(recipe, str) else yaml.safe_dump(recipe), encoding="utf-8")
    return path


def problems(path: Path, overrides: list[str] | None = None) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides or [])
    assert isinstance(caught.value, InputError)
    assert str(caught.value).startswith(f"{path}: ")
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def test_a_recipe_is_read_with_its_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, RANDOM))
    assert recipe.training.learning_rate == 8e-5
    assert recipe.model.query_prompt == "search_query: "
    assert recipe.model.architecture is not None
    assert recipe.model.architecture.window == 16
    assert (recipe.loss.scale, recipe.data.positive_field, recipe.training.max_steps) == (20.0, "positive", None)


def test_a_recipe_that_starts_from_a_checkpoint_needs_no_architecture(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, changed({"model.init": "some/model", "model.architecture": ..., "model.tokenizer": None})))
    assert (recipe.model.architecture, recipe.model.tokenizer) == (None, None)


def test_numbers_that_yaml_takes_for_text_are_numbers(tmp_path: Path) -> None:
    text = yaml.safe_dump(RANDOM).replace("8.0e-05", "8e-5").replace("seed: 12", "seed: 0012").replace("limit: 100", "limit: 1e2")
    assert text.count("8e-5") == text.count("0012") == text.count("1e2") == 1
    recipe = load_recipe(write(tmp_path, text))
    assert (recipe.training.learning_rate, recipe.training.seed, recipe.data.limit) == (8e-5, 12, 100)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model.architecture.heads": 3}, "model.architecture.heads: must divide hidden_size 64, got 3"),
        (
            {"model.architecture.heads": 64},
            "model.architecture.heads: RoPE needs an even head width, got hidden_size / heads = 64 / 64",
        ),
        ({"model.architecture.window": 15}, "model.architecture.window: must be a multiple of 2, got '15'"),
        ({"model.architecture.vocab_size": 256}, "model.architecture.vocab_size: must be >= 261, got '256'"),
        (
            {"model.architecture.family": "bert"},
            "model.architecture.family: must be one of modernbert; got 'bert'",
        ),
        ({"model.architecture": ...}, "model.architecture: needed, since init is random"),
        ({"model.tokenizer": ...}, "model.tokenizer: needed, since init is random"),
        ({"model.init": "a/b", "model.tokenizer": None}, "model.architecture: only for init: random; 'a/b' has its own"),
        ({"model.init": "a/b", "model.architecture": None}, "model.tokenizer: only for init: random; 'a/b' has its own"),
        ({"model.max_length": 129}, "model.max_length: must be <= architecture.max_positions 128, got 129"),
        ({"model.max_length": 2}, "model.max_length: must be >= 3, got '2'"),
        ({"model.pooling": "max"}, "model.pooling: must be one of mean, cls; got 'max'"),
        ({"model.normalize": "yes"}, "model.normalize: must be true or false, got 'yes'"),
        ({"model.init": " "}, "model.init: must not be blank, got ' '"),
        ({"data.train": "rows.csv"}, "data.train: must be a .jsonl or .jsonl.gz file or docstrings:stdlib, got 'rows.csv'"),
        ({"data.positive_field": "query"}, "data.positive_field: is query_field too: 'query'"),
        ({"data.negative_field": "positive"}, "data.negative_field: is query_field or positive_field too: 'positive'"),
        ({"data.limit": 7}, "data.limit: must be >= training.batch_size 8, got 7"),
        ({"loss.scale": 0}, "loss.scale: must be > 0, got '0'"),
        ({"loss.name": "mnlr"}, "loss.name: must be one of mnrl; got 'mnlr', did you mean 'mnrl'?"),
        ({"training.batch_size": 1}, "training.batch_size: must be >= 2, got '1'"),
        ({"training.batch_size": 8.5}, "training.batch_size: must be a whole number, got '8.5'"),
        ({"training.learning_rate": -1}, "training.learning_rate: must be > 0, got '-1'"),
        ({"training.warmup_ratio": 5}, "training.warmup_ratio: must be <= 1, got '5'"),
        ({"training.seed": 2**32}, "training.seed: must be <= 4294967295, got '4294967296'"),
        ({"training.seed": None}, "training.seed: must be a number, got null"),
        ({"training.precision": "fp16"}, "training.precision: must be one of fp32, bf16; got 'fp16', did you mean 'bf16'?"),
        ({"training.max_steps": 0}, "training.max_steps: must be >= 1, got '0'"),
        ({"training.epochs": ...}, "training.epochs: missing"),
        ({"training.leraning_rate": 1}, "training.leraning_rate: unknown key, did you mean 'learning_rate'?"),
        ({"training": ...}, "training: missing"),
        ({"loss": "mnrl"}, "loss: must be a mapping of settings, got 'mnrl'"),
        ({"kind": "colbert"}, "kind: must be one of dense; got 'colbert'"),
    ],
)
def test_each_kind_of_problem(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    assert problems(write(tmp_path, changed(changes))) == [problem]


def test_every_rule_is_tested_above() -> None:
    assert len(RULES) == 11  # a rule more asks for a line more in the table


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    recipe = changed(
        {
            "name": ...,
            "model.architecture.window": 15,
            "model.architecture.heads": 3,
            "model.max_length": 500,
            "training.batch_size": "many",
            "training.precison": "fp32",
            "data.train": "rows.txt",
        }
    )
    path = write(tmp_path, yaml.safe_dump(recipe) + "kind: dense\n")
    repeated = path.read_text(encoding="utf-8").splitlines().index("kind: dense") + 1
    assert problems(path, ["training.seed=-1", "lr=3"]) == [
        f"line {len(path.read_text(encoding='utf-8').splitlines())}: the key 'kind' stands in line {repeated} already",
        "lr: unknown key",
        "name: missing",
        "model.architecture.window: must be a multiple of 2, got '15'",
        "training.precison: unknown key, did you mean 'precision'?",
        "training.batch_size: must be a number, got 'many'",
        "training.seed: must be >= 0, got '-1'",
        "model.architecture.heads: must divide hidden_size 64, got 3",
        "model.max_length: must be <= architecture.max_positions 128, got 500",
        "data.train: must be a .jsonl or .jsonl.gz file or docstrings:stdlib, got 'rows.txt'",
    ]


def test_overrides_take_the_place_of_what_the_file_says(tmp_path: Path) -> None:
    path = write(tmp_path, RANDOM)
    overrides = [
        "training.batch_size=4",
        "training.batch_size=64",
        "training.learning_rate=3e-4",
        "training.no_duplicates=true",
        "data.limit=",
        "data.negative_field=null",
        "data.revision=''",
        'name="a = b"',
        "model.query_prompt=query: ",
        "model.architecture.layers=7",
    ]
    recipe = load_recipe(path, overrides)
    assert (recipe.training.batch_size, recipe.training.learning_rate, recipe.training.no_duplicates) == (64, 3e-4, True)
    assert (recipe.data.limit, recipe.data.negative_field, recipe.data.revision, recipe.name) == (None, None, "", "a = b")
    assert recipe.model.query_prompt == "query: "
    assert recipe.model.architecture is not None
    assert recipe.model.architecture.layers == 7
    assert load_recipe(path).training.batch_size == 8


def test_a_section_can_be_unset_and_set_up_by_overrides(tmp_path: Path) -> None:
    pretrained = ["model.init=a/b", "model.architecture=null", "model.tokenizer=null"]
    assert load_recipe(write(tmp_path, RANDOM), pretrained).model.architecture is None
    empty = write(tmp_path, changed({"model.architecture": None}))
    shape = [f"model.architecture.{key}={value}" for key, value in RANDOM["model"]["architecture"].items()]
    assert load_recipe(empty, shape) == load_recipe(write(tmp_path, RANDOM))


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("training.batch_size", "override 'training.batch_size': must read section.setting=value"),
        ("=3", "override '=3': must read section.setting=value"),
        ("training..seed=3", "override 'training..seed=3': must read section.setting=value"),
        ("training.seed.x=3", "override 'training.seed.x=3': training.seed is not a section"),
        ("training.batchsize=3", "training.batchsize: unknown key, did you mean 'batch_size'?"),
        ("trainig.seed=3", "trainig: unknown key, did you mean 'training'?"),
        ("name='open", 'override "name=\'open": line 1: not YAML: found unexpected end of stream'),
    ],
)
def test_an_override_that_cannot_be_applied(tmp_path: Path, override: str, problem: str) -> None:
    assert problems(write(tmp_path, RANDOM), [override]) == [problem]


@pytest.mark.parametrize("text", ["", "- a list\n", "text\n"])
def test_a_file_without_settings(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    [problem] = problems(path)
    assert problem.startswith("the whole: must be a mapping of settings, got ")
    assert problems(path, ["name=x"])[0] == "override 'name=x': the recipe has no settings"


def test_broken_yaml_names_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, "name: x\nmodel: [1\ndata: 2\n")
    [problem] = problems(path)
    assert problem.startswith("line 3: not YAML: ")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: gr\xfcn\n")
    with pytest.raises(InputError, match=r"latin\.yaml: not UTF-8 \(.* at byte 8\)"):
        load_recipe(tmp_path / "latin.yaml")
    with pytest.raises(InputError, match=r"none\.yaml: there is no such file"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="there is no such file"):
        load_recipe(tmp_path)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_what_is_written_loads_as_the_same_recipe(tmp_path: Path, suffix: str) -> None:
    awkward = changed(
        {"name": "null", "description": "1e5", "data.revision": "007", "model.document_prompt": " #: ", "training.learning_rate": 1e-7}
    )
    for recipe in (load_recipe(write(tmp_path, RANDOM)), load_recipe(write(tmp_path, awkward)), load_recipe("quickstart")):
        path = tmp_path / f"written.{suffix}"
        path.write_text(yaml.safe_dump(to_dict(recipe)) if suffix == "yaml" else json.dumps(to_dict(recipe)), encoding="utf-8")
        assert load_recipe(path) == recipe


def test_every_shipped_recipe_is_valid_and_found_by_name() -> None:
    names = shipped_recipes()
    folder = Path(__file__).resolve().parents[3] / "recipes"
    assert names == sorted(path.name.removesuffix(".yaml") for path in folder.iterdir() if path.name.endswith(".yaml"))
    assert len(names) >= 1
    for name in names:
        recipe = load_recipe(name)
        assert isinstance(recipe, Recipe)
        assert recipe.name == name
        assert find_recipe(name).read_text(encoding="utf-8").startswith("#"), "the header says what it is, its command and cost"


def test_the_quickstart_ends_with_a_global_layer() -> None:
    shape = load_recipe("quickstart").model.architecture
    assert shape is not None
    assert (shape.layers - 1) % shape.global_every == 0


def test_a_name_that_is_not_shipped() -> None:
    with pytest.raises(InputError, match=r"no shipped recipe 'quikstart'; did you mean 'quickstart'\? shipped: .*quickstart"):
        find_recipe("quikstart")
    with pytest.raises(InputError, match=r"no shipped recipe 'zzz'; shipped: .*; or give the path"):
        load_recipe("zzz")


def test_a_recipe_cannot_be_changed_by_accident() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_recipe("quickstart").name = "other"  # type: ignore[misc]
