"""The recipe of a training run: what is trained, on what, and how; YAML in, every problem at once.

The fields stand in `retrieval.training.sections`, how they hang together in `retrieval.training.rules`. This module opens no
data and no model: what a hub or a folder holds is found out by whoever loads it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from encoder.errors import InputError
from retrieval.training.rules import RULES
from retrieval.training.schema import build
from retrieval.training.sections import Recipe
from retrieval.training.strict_yaml import parse_yaml


class RecipeError(InputError):
    """A recipe cannot be used.

    Attributes:
        problems: All of them, each ``dotted.path: what is wrong`` or ``line N: what is wrong``.
    """

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        if len(self.problems) == 1:
            super().__init__(f"{source}: {self.problems[0]}")
        else:
            super().__init__("\n  ".join([f"{source}: {len(self.problems)} problems", *self.problems]))


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: A YAML file, or the name of a shipped recipe.
        overrides: ``training.batch_size=64`` and the like, applied in order before anything is checked. ``key=`` and
            ``key=null`` unset; a value in quotes is text, quotes taken off; ``[1, 2]`` is a list.

    Raises:
        RecipeError: The file is not YAML, or a setting is unknown, missing, of the wrong type, out of its range, repeated,
            or at odds with another; names all of them.
        InputError: There is no such recipe, or it cannot be read.
    """
    file = find_recipe(path)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 ({error.reason} at byte {error.start}); convert the file") from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    try:
        document, problems = parse_yaml(text)
    except InputError as error:
        raise RecipeError(str(file), [str(error)]) from error
    for override in overrides:
        problems.extend(_override(document, override))
    recipe, found = build(Recipe, document, RULES)
    if recipe is None or problems:
        raise RecipeError(str(file), problems + found)
    return recipe


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe with every default spelt out, as JSON has it; written as YAML or JSON it loads as the same recipe."""
    return dataclasses.asdict(recipe)


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with Quiver, sorted."""
    return sorted(path.stem for path in _shipped_folder().glob("*.yaml"))


def find_recipe(name_or_path: str | Path) -> Path:
    """The file of a recipe.

    Args:
        name_or_path: What ends in .yaml, .yml or .json, or has a folder in it, is a path; anything else is the name of a
            shipped recipe.

    Raises:
        InputError: It is a folder; or there is no such file, or no such name (gives those that are like it, or else all of them).
    """
    path = Path(name_or_path)
    is_path = path.suffix in {".yaml", ".yml", ".json"} or len(path.parts) > 1
    names = shipped_recipes()
    if not is_path and str(path) in names:
        return _shipped_folder() / f"{path}.yaml"
    if path.is_dir():
        raise InputError(f"{path}: a folder; give the recipes in it, as in {path / '*.yaml'}")
    if is_path:
        if not path.is_file():
            raise InputError(f"{path}: there is no such file")
        return path
    if close := difflib.get_close_matches(str(path), names):
        raise InputError(f"no shipped recipe {str(path)!r}; did you mean {' or '.join(map(repr, close))}?")
    raise InputError(f"no shipped recipe {str(path)!r}; give the path of a .yaml file, or one of {', '.join(names)}")


def _shipped_folder() -> Path:
    # Beside the packages in a checkout as in site-packages. Not importlib.resources: torchtune installs a top-level
    # ``recipes`` too, and which of the two an import finds is anyone's guess.
    return Path(__file__).resolve().parents[2] / "recipes"


def _override(document: object, override: str) -> list[str]:
    """Apply ``dotted.path=value`` to a parsed recipe; the problem, if any, in a list."""
    key, equals, text = override.partition("=")
    *parents, name = key.strip().split(".")
    if not equals or not all([*parents, name]):
        return [f"override {override!r}: must read section.setting=value"]
    target = document
    for number, parent in enumerate(parents):
        if not isinstance(target, dict) or not isinstance(target.get(parent, {}), dict | None):
            return [f"override {override!r}: {'.'.join(parents[: number + 1])} is not a section"]
        target[parent] = target = target.get(parent) or {}
    if not isinstance(target, dict):
        return [f"override {override!r}: the recipe has no settings"]
    try:
        target[name] = _scalar(text)
    except InputError as error:
        return [f"override {override!r}: {error}"]
    return []


def _scalar(text: str) -> object:
    """An override's value: null, a list in brackets, or text; not parsed any further, for ``search_query: `` would be a mapping."""
    if text in ("", "~", "null"):
        return None
    return parse_yaml(text)[0] if text[0] in "\"'[" else text
