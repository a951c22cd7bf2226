"""Recipe files: their kind, overrides, and what they say of themselves. The loader of each kind has its own tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.encoder.schema import SchemaError, TextSchema
from quiver.encoder.training.recipe_file import (
    RecipeSchema,
    find_recipe,
    load_sections,
    parse_yaml,
    recipe_encoders,
    recipe_kind,
    shipped_recipes,
)


class Part(TextSchema):
    size: int


class Whole(TextSchema):
    kind: str
    parts: tuple[Part, ...]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "whole.yaml"
    path.write_text("kind: whole\nparts:\n  - size: 1\n  - size: 2\n")
    return path


def test_overrides_address_items_of_lists(recipe: Path) -> None:
    assert load_sections(recipe, Whole, (), overrides=["parts.1.size=7"]) == Whole(kind="whole", parts=(Part(size=1), Part(size=7)))
    assert load_sections(recipe, Whole, (), overrides=["parts=[]"]) == Whole(kind="whole", parts=())


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("parts.2.size=7", "override 'parts.2.size=7': parts.2 is not a section"),
        ("parts.x.size=7", "override 'parts.x.size=7': parts.x is not a section"),
        ("parts.0=7", "override 'parts.0=7': parts is a list, name one of its items by its number"),
        ("kind.name=7", "override 'kind.name=7': kind is not a section"),
    ],
)
def test_overrides_of_unknown_settings_are_refused(recipe: Path, override: str, problem: str) -> None:
    with pytest.raises(SchemaError) as refused:
        load_sections(recipe, Whole, (), overrides=[override])
    assert refused.value.problems == [problem]


def test_the_kind_of_a_recipe_is_read_from_its_file(recipe: Path, tmp_path: Path) -> None:
    assert recipe_kind(recipe) == "whole"
    for text, kind in (('{"inner": {"kind": "a"}, "kind": "b"}', "b"), ("inner:\n  kind: a\n", None), ("[1]", None), ("a: [", None)):
        (tmp_path / "other.json").write_text(text)
        assert recipe_kind(tmp_path / "other.json") == kind
    assert recipe_kind(tmp_path / "none.yaml") is None


def test_every_shipped_recipe_validates_as_its_kind() -> None:
    names = shipped_recipes()
    kinds = {name: recipe_kind(find_recipe(name)) for name in names}
    assert None not in kinds.values()
    found = [name for kind in {str(kind) for kind in kinds.values()} for name in shipped_recipes([kind])]
    assert sorted(found) == names
    assert len(names) >= 28


@pytest.mark.parametrize("scalar", ["8e-5", "064", "1:30", "no", "true", "2024-01-01", "0x10", "1_000", ".inf", "nulls", "Nan"])
def test_scalars_are_read_as_text(scalar: str) -> None:
    assert parse_yaml(f"key: {scalar}") == ({"key": scalar}, [])


@pytest.mark.parametrize("scalar", ["null", "Null", "~", ""])
def test_null_is_distinguished_from_text(scalar: str) -> None:
    assert parse_yaml(f"key: {scalar}") == ({"key": None}, [])
    assert parse_yaml(f"key: '{scalar}'") == ({"key": scalar}, [])


def test_nested_values_and_merge_keys_are_parsed() -> None:
    text = "base: &base {a: 1, b: 2}\nlist: [x, {y: z}]\nderived:\n  <<: *base\n  b: 3\n"
    document, repeated = parse_yaml(text)
    assert document == {"base": {"a": "1", "b": "2"}, "list": ["x", {"y": "z"}], "derived": {"a": "1", "b": "3"}}
    assert repeated == []
    assert parse_yaml("") == (None, [])


def test_every_repeated_key_is_reported_with_both_lines() -> None:
    _, repeated = parse_yaml("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\na: 2\na: 3\n")
    assert repeated == [
        "line 5: the key 'c' stands in line 3 already",
        "line 6: the key 'a' stands in line 1 already",
        "line 7: the key 'a' stands in line 1 already",
    ]
    assert parse_yaml("{a: 1, a: 2}")[1] == ["line 1: the key 'a' stands in line 1 already"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "^line 3: not YAML: "),
        ("a: 1\n\tb: 2\n", "^line 2: not YAML: "),
        ("a: b: c\n", "^line 1: not YAML: mapping values are not allowed here"),
        ("a: 1\n---\nb: 2\n", "^line 2: not YAML: "),
        ("a: *unknown\n", "^line 1: not YAML: found undefined alias"),
        ("a: !!int 3\n", "^line 1: not YAML: could not determine a constructor"),
        ("a: !!python/name:os.system x\n", "^line 1: not YAML: could not determine a constructor"),
        ("? [a]\n: b\n", "^line 1: not YAML: found unhashable key"),
        ("a: \x07\n", "^not YAML: unacceptable character"),
    ],
)
def test_a_syntax_error_names_its_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_yaml(text)


class Data(TextSchema):
    train: str
    revision: str = ""


class Model(TextSchema):
    init: str
    length: int | None = None


class Training(TextSchema):
    learning_rate: float
    log_every: int = 10
    dtype: str = "auto"


class DescribedRecipe(RecipeSchema):
    model: Model
    data: Data
    training: Training
    development: str | None = None


ALL = {"description": "what", "source": "where", "cost": "much", "expected": "0.6", "revision": "v1"}
RESULT_FREE = ALL | {"cost": None, "expected": None}
NOTHING = dict.fromkeys(ALL) | {"revision": ""}
DESCRIBED = {
    "name": "shipped",
    **{key: ALL[key] for key in ("description", "source", "cost", "expected")},
    "model": {"init": "a/b"},
    "data": {"train": "rows.jsonl", "revision": "v1"},
    "training": {"learning_rate": "1e-3"},
}


def claims_of(recipe: DescribedRecipe) -> dict[str, str | None]:
    return {**{name: getattr(recipe, name) for name in ALL if name != "revision"}, "revision": recipe.data.revision}


@pytest.mark.parametrize(
    ("overrides", "claims"),
    [
        ([], ALL),
        (["training.log_every=5", "name=mine", "development=x", "training.dtype=float32"], ALL),
        (["data.train=rows.jsonl", "training.learning_rate=0.001"], ALL),
        (["training.learning_rate=1e-4"], RESULT_FREE),
        (["data.train=mine.jsonl"], NOTHING),
        (["model.init=c/d"], NOTHING),
        (["model.length=8"], NOTHING),
        (["data.train=mine.jsonl", "description=mine", "data.revision=v1"], NOTHING | {"description": "mine", "revision": "v1"}),
        (["model.init=c/d", "expected=0.6"], NOTHING | {"expected": "0.6"}),
    ],
)
def test_what_describes_a_recipe_falls_away_with_what_it_describes(
    tmp_path: Path, overrides: list[str], claims: dict[str, str | None]
) -> None:
    file = tmp_path / "shipped.json"
    file.write_text(json.dumps(DESCRIBED))
    assert claims_of(load_sections(file, DescribedRecipe, (), overrides=overrides)) == claims
    values = dict(override.split("=") for override in overrides)
    assert claims_of(load_sections(file, DescribedRecipe, (), overrides=values)) == claims
    assert claims_of(load_sections(DESCRIBED, DescribedRecipe, (), overrides=overrides)) == claims


def test_overrides_take_numbers_of_numpy() -> None:
    overrides = {"training": {"learning_rate": np.float64(0.5), "log_every": np.arange(3)[2]}}
    training = load_sections(DESCRIBED, DescribedRecipe, (), overrides=overrides).training
    assert (training.learning_rate, training.log_every) == (0.5, 2)


def test_a_recipe_changed_in_code_describes_itself_too() -> None:
    recipe = load_sections(DESCRIBED, DescribedRecipe, ())
    assert claims_of(recipe.replace(data=recipe.data.replace(train="mine.jsonl"))) == NOTHING
    assert claims_of(recipe.replace(training=recipe.training.replace(learning_rate=1.0))) == RESULT_FREE
    assert claims_of(recipe.replace(training=recipe.training.replace(log_every=1))) == ALL
    assert claims_of(recipe.replace(model=Model(init="c/d"), expected="0.7")) == NOTHING | {"expected": "0.7"}


def test_a_template_that_lacks_a_setting_keeps_its_description(tmp_path: Path) -> None:
    template = {**DESCRIBED, "data": {"revision": "v1"}}
    assert claims_of(load_sections(template, DescribedRecipe, (), overrides=["data.train=mine.jsonl"])) == ALL


def test_an_own_recipe_needs_no_description() -> None:
    bare = {key: DESCRIBED[key] for key in ("name", "model", "training")} | {"data": {"train": "rows.jsonl"}}
    assert claims_of(load_sections(bare, DescribedRecipe, ())) == NOTHING


TABLE: dict[str, Any] = {
    "name": "kd",
    "expected": "{score} with {encoder}",
    "model": {"init": "a/{encoder}"},
    "data": {"train": "rows.jsonl", "revision": "v1"},
    "training": {"learning_rate": 0.1},
    "encoders": {"small": {"score": "0.5"}, "large": {"score": "0.7", "training.learning_rate": "0.2", "data": {"train": "more.jsonl"}}},
}
"""A recipe with a table of encoders: words, a setting and a section in its rows."""


def test_a_row_of_the_table_of_encoders_completes_the_recipe() -> None:
    small, large = (load_sections(TABLE, DescribedRecipe, (), overrides=[f"encoder={row}"]) for row in ("small", "large"))
    assert (small.name, small.encoder, small.expected, small.model.init) == ("kd-small", "small", "0.5 with small", "a/small")
    assert (large.training.learning_rate, large.data.train, large.data.revision) == (0.2, "more.jsonl", "v1")
    assert load_sections(TABLE, DescribedRecipe, (), overrides={"encoder": "small", "training.learning_rate": 0.3}).expected is None
    assert load_sections(small, DescribedRecipe, ()) == small
    other = load_sections(TABLE, DescribedRecipe, (), overrides=["encoder=small", "model.init=c/d"])
    assert (other.encoder, other.description, other.data.revision) == (None, None, "")


@pytest.mark.parametrize(
    ("changes", "overrides", "problem"),
    [
        ({}, [], "encoder: choose a row of the table of encoders: --encoder small or large"),
        ({}, ["encoder=huge"], "encoder: the table of encoders has no 'huge': --encoder small or large"),
        (
            {"encoders": None},
            ["encoder=small"],
            "encoder: small is not a choice: the recipe has no table of encoders or is one of its rows",
        ),
        ({"encoders": {"small": {}, "large": {"score": 1}}}, ["encoder=small"], "encoders.small: lacks score, which the recipe names"),
        ({"encoders": {"small": {"score": 1, "training.rate": 1}}}, ["encoder=small"], "training.rate: unknown key"),
        ({"encoders": {"small": "0.5"}}, ["encoder=small"], "encoders.small: must hold settings, such as training.learning_rate: 5e-5"),
    ],
)
def test_problems_of_a_table_of_encoders_are_reported(changes: dict[str, Any], overrides: list[str], problem: str) -> None:
    document = {key: value for key, value in {**TABLE, **changes}.items() if value is not None}
    with pytest.raises(SchemaError) as refused:
        load_sections(document, DescribedRecipe, (), overrides=overrides)
    assert any(each.startswith(problem) for each in refused.value.problems)


def test_a_recipe_extends_another(tmp_path: Path) -> None:
    parent, child = tmp_path / "parent.yaml", tmp_path / "child.yaml"
    parent.write_text(json.dumps({**TABLE, "description": "as the parent"}))
    own = {"name": "child", "extends": str(parent), "data": {"train": "mine.jsonl"}, "training": {"log_every": 3}}
    child.write_text(json.dumps(own))
    found = load_sections(child, DescribedRecipe, (), overrides=["encoder=large"])
    assert (found.model.init, found.training.learning_rate, found.training.log_every) == ("a/large", 0.2, 3)
    assert (found.name, found.encoder, claims_of(found)) == ("child", "large", NOTHING)  # what describes the parent is not taken over
    assert recipe_encoders(child) == ["small", "large"]
    child.write_text(json.dumps({**own, "expected": "{score}", "encoders": {"small": {"score": 9}}}))
    found = load_sections(child, DescribedRecipe, (), overrides=["encoder=small"])
    assert (found.name, found.expected, recipe_encoders(child)) == ("child-small", "9", ["small"])
    child.write_text(json.dumps({**own, "extends": str(child)}))
    with pytest.raises(SchemaError, match=r"child\.yaml: extends: .*child\.yaml extends itself"):
        load_sections(child, DescribedRecipe, ())


def test_names_of_recipes_have_dashes_and_a_name_with_underscores_is_answered_with_the_name() -> None:
    names = shipped_recipes()
    assert not [name for name in names if "_" in name]
    for name in (each for each in names if "-" in each):
        with pytest.raises(InputError, match=f"^the recipe '{name.replace('-', '_')}' is now called '{name}'$"):
            find_recipe(name.replace("-", "_"))
