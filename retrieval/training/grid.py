"""The grid of a sweep: which settings of a recipe take which values, and the recipe of every combination.

This module trains nothing; `quiver.retrieval.training.sweep` does.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from quiver.encoder.errors import InputError
from quiver.encoder.schema import SchemaError
from quiver.retrieval.training.recipe import load_recipe
from quiver.retrieval.training.sections import Recipe

LEARNING_RATE, SEED = "training.learning_rate", "training.seed"

PAPER_LEARNING_RATES = ("1e-5", "2e-5", "3e-5", "5e-5", "8e-5", "1e-4")
"""The learning rates that the ModernBERT paper sweeps for its retrievers (arXiv:2412.13663, appendix E.2); Table 9 lists the winners."""

Value: TypeAlias = bool | int | float | str | list[int] | list[float] | list[str] | None
"""What a setting can be, as JSON has it."""

_LONGEST_NAME = 60
_UNSAFE = re.compile(r"[^A-Za-z0-9.+-]+")
_OPENING, _CLOSING, _QUOTES = "[", "]", "\"'"


@dataclass(frozen=True)
class GridRun:
    """One combination of values.

    Attributes:
        name: Names its folder; no two of a grid have the same.
        settings: Dotted path of every axis -> its value.
        overrides: What makes the recipe of the file its own, as ``quiver train`` takes it.
        recipe: Its recipe.
    """

    name: str
    settings: Mapping[str, Value]
    overrides: tuple[str, ...]
    recipe: Recipe


@dataclass(frozen=True)
class Grid:
    """All combinations.

    Attributes:
        source: Where the recipe came from: a path or the name of a shipped one.
        fixed: Overrides that all runs share.
        axes: Dotted path -> values, in the order of the runs; the last varies fastest.
        runs: At least two.
    """

    source: str
    fixed: tuple[str, ...]
    axes: Mapping[str, tuple[Value, ...]]
    runs: tuple[GridRun, ...]


def make_grid(source: str | Path, settings: Sequence[str] = ()) -> Grid:
    """Read a recipe once for every combination of values.

    Args:
        source: A YAML file, or the name of a shipped recipe.
        settings: ``section.setting=value`` for all runs, or ``section.setting=value,value`` for an axis; a comma inside of quotes or
            brackets parts no values. Where ``training.learning_rate`` is not among them, it is an axis with the paper's values.

    Returns:
        The grid; seeds vary fastest, so that one candidate is complete before the next begins.

    Raises:
        SchemaError: A combination is no valid recipe; names the problems of all of them.
        InputError: There is nothing to vary, a value repeats, or the runs could not be told apart by a development score.
    """
    fixed, axes = _parse(settings)
    combinations = list(itertools.product(*axes.values()))
    if len(combinations) < 2:
        raise InputError(f"nothing to sweep over: give some setting two values or more, as in {LEARNING_RATE}=3e-5,8e-5")
    recipes = _load(source, [(*fixed, *(f"{path}={text}" for path, text in zip(axes, texts, strict=True))) for texts in combinations])
    _check_development(source, [recipe for _, recipe in recipes])
    labels = short_names(axes)
    runs = []
    for overrides, recipe in recipes:
        values = {path: _value_of(recipe, path) for path in axes}
        name = "_".join(f"{labels[path]}={_file_name(value)}" for path, value in values.items())
        runs.append(GridRun(name, values, overrides, recipe))
    if repeated := next((run.name for place, run in enumerate(runs) if run.name in {other.name for other in runs[:place]}), None):
        raise InputError(f"a value repeats: {repeated} stands in the grid twice")
    values_of = {path: tuple(run.settings[path] for run in runs) for path in axes}
    return Grid(str(source), fixed, {path: _distinct(values) for path, values in values_of.items()}, tuple(runs))


def show_value(value: Value) -> str:
    """A value as people write it; one alone stands for a list of one.

    Example:
        >>> [show_value(value) for value in (3e-05, 0.0001, 0.05, 20.0, 64, True, None, [384, 128], ["a.jsonl"], "cls")]
        ['3e-5', '1e-4', '0.05', '20', '64', 'true', 'null', '[384, 128]', 'a.jsonl', 'cls']
    """
    if isinstance(value, list):
        return show_value(value[0]) if len(value) == 1 else f"[{', '.join(map(show_value, value))}]"
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        small = 0 < abs(value) < 0.01
        return np.format_float_scientific(value, trim="-", exp_digits=1) if small else np.format_float_positional(value, trim="-")
    return str(value)


def show_settings(settings: Mapping[str, Value]) -> str:
    """Settings in a line, without their sections.

    Example:
        >>> show_settings({"training.learning_rate": 3e-5, "training.batch_size": 64})
        'learning_rate=3e-5 batch_size=64'
    """
    labels = short_names(settings)
    return " ".join(f"{labels[path]}={show_value(value)}" for path, value in settings.items())


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """The last part of each dotted path, or the whole where two would be the same."""
    last = {path: path.rpartition(".")[2] for path in paths}
    return {path: label if list(last.values()).count(label) == 1 else path for path, label in last.items()}


def split_values(text: str) -> list[str]:
    """Values between commas, except for commas inside of quotes or brackets.

    Example:
        >>> split_values('[2, 1],[2],"a, b",c')
        ['[2, 1]', '[2]', '"a, b"', 'c']
    """
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES and not parts[-1].strip():
            quote = character  # only where a value starts: an apostrophe inside of a word is one
        elif character in (_OPENING, _CLOSING):
            depth += 1 if character == _OPENING else -1
        elif character == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += character
    return parts


def _parse(settings: Sequence[str]) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Overrides with one value, and the axes in the order of the runs."""
    fixed: list[str] = []
    axes: dict[str, list[str]] = {}
    named: set[str] = set()
    for setting in settings:
        path, _, text = setting.partition("=")
        path = path.strip()
        if path in named:
            raise InputError(f"{path} is set twice; give all of its values in one place: {path}=value,value")
        named.add(path)
        values = split_values(text)
        if len(values) == 1:
            fixed.append(setting)
        elif not all(value.strip() for value in values):
            raise InputError(f"{setting}: there is nothing between two commas; a text with a comma in it stands in quotes")
        else:
            axes[path] = values
    if LEARNING_RATE not in named:
        axes = {LEARNING_RATE: list(PAPER_LEARNING_RATES), **axes}
    if SEED in axes:
        axes[SEED] = axes.pop(SEED)
    return tuple(fixed), axes


def _load(source: str | Path, combinations: Sequence[tuple[str, ...]]) -> list[tuple[tuple[str, ...], Recipe]]:
    recipes, problems = [], dict[str, None]()
    for overrides in combinations:
        try:
            recipes.append((overrides, load_recipe(source, overrides)))
        except SchemaError as error:
            problems.update(dict.fromkeys(error.problems))
    if problems:
        raise SchemaError(str(source), list(problems))
    return recipes


def _check_development(source: str | Path, recipes: Sequence[Recipe]) -> None:
    """One collection must tell the runs apart: scores on different ones cannot be compared."""
    sections = [recipe.development for recipe in recipes]
    if any(section is None for section in sections):
        raise InputError(
            f"{source}: a sweep selects by nDCG@10 on a development collection, and the recipe has none; add a development section, "
            "or development.data=FOLDER_OR_NAME to the command"
        )
    if len({(section.data, section.split) for section in sections if section is not None}) > 1:
        raise InputError("development.data and development.split must be the same in all runs: scores on different data do not compare")


def _value_of(recipe: Recipe, path: str) -> Any:
    value: Any = recipe.model_dump()
    for part in path.split("."):
        value = value[part]
    return list(value) if isinstance(value, tuple) else value


def _file_name(value: Value) -> str:
    """A value as a part of a folder's name; one that had to be changed for that gets a checksum."""
    shown = show_value(value)
    safe = _UNSAFE.sub("-", shown).strip("-.")
    if safe == shown and len(safe) <= _LONGEST_NAME:
        return safe
    return f"{safe[-_LONGEST_NAME:].lstrip('-.')}-{hashlib.sha256(shown.encode()).hexdigest()[:8]}"


def _distinct(values: Sequence[Value]) -> tuple[Value, ...]:
    """Values in the order they come first; lists cannot be keys, what they show as can."""
    return tuple({show_value(value): value for value in values}.values())
