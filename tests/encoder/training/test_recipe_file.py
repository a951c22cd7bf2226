"""Recipes as files: their kind, and overrides that reach into lists. The rest is tested with the loader of each kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from quiver.encoder.training.recipe_file import RecipeError, find_recipe, load_sections, recipe_kind, shipped_recipes


@dataclass(frozen=True)
class Part:
    size: int


@dataclass(frozen=True)
class Whole:
    kind: str
    parts: tuple[Part, ...]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "whole.yaml"
    path.write_text("kind: whole\nparts:\n  - size: 1\n  - size: 2\n")
    return path


def test_overrides_reach_into_lists(recipe: Path) -> None:
    assert load_sections(recipe, Whole, (), overrides=["parts.1.size=7"]) == Whole("whole", (Part(1), Part(7)))
    assert load_sections(recipe, Whole, (), overrides=["parts=[]"]) == Whole("whole", ())


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("parts.2.size=7", "override 'parts.2.size=7': parts.2 is not a section"),
        ("parts.x.size=7", "override 'parts.x.size=7': parts.x is not a section"),
        ("parts.0=7", "override 'parts.0=7': parts is a list, name one of its items by its number"),
        ("kind.name=7", "override 'kind.name=7': kind is not a section"),
    ],
)
def test_overrides_that_lead_nowhere(recipe: Path, override: str, problem: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_sections(recipe, Whole, (), overrides=[override])
    assert refused.value.problems == [problem]


def test_the_kind_of_a_recipe(recipe: Path, tmp_path: Path) -> None:
    assert recipe_kind(recipe) == "whole"
    for text, kind in (('{"inner": {"kind": "a"}, "kind": "b"}', "b"), ("inner:\n  kind: a\n", None), ("[1]", None), ("a: [", None)):
        (tmp_path / "other.json").write_text(text)
        assert recipe_kind(tmp_path / "other.json") == kind
    assert recipe_kind(tmp_path / "none.yaml") is None


def test_every_shipped_recipe_is_of_the_kind_that_its_file_says() -> None:
    names = shipped_recipes()
    kinds = {name: recipe_kind(find_recipe(name)) for name in names}
    assert None not in kinds.values()
    found = [name for kind in {str(kind) for kind in kinds.values()} for name in shipped_recipes([kind])]
    assert sorted(found) == names
    assert len(names) > 28
