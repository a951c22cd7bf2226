"""Recipe files: found by path or name, read as strict YAML, changed by overrides, validated with all problems at once.

The content of a recipe is a schema (`quiver.encoder.schema`); the key ``kind`` tells which one.

Scalars in YAML stay text. YAML 1.1 reads ``8e-5`` as text but ``064`` as 52, ``1:30`` as 90, ``no`` as false and ``2024-01-01`` as a
date. The schema knows the type of each setting and converts the text; only null is recognised here. A key that appears twice is an error.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import numpy as np
import yaml

from quiver.encoder.errors import InputError, first_line
from quiver.encoder.schema import NonBlank, Rule, Schema, SchemaError, SectionRule, TextSchema, validate

Section = TypeVar("Section", bound=TextSchema)
Described = TypeVar("Described", bound="RecipeSchema")

Overrides: TypeAlias = Sequence[str] | Mapping[str, Any]
"""Changes to a recipe: ``["training.batch_size=64"]``, or ``{"training.batch_size": 64}``, also nested."""

AUTO = "auto"  # value of a setting that a run chooses when it begins; the recipe in its folder has the choice
TrainingDtype: TypeAlias = Literal["auto", "float32", "bfloat16"]  # see `quiver.encoder.training.optimization.training_dtype`

WITHOUT_WEIGHT = frozenset(
    {"name", "description", "source", "cost", "expected", "data.revision", "training.log_every", "training.keep_checkpoints"}
)
"""Settings of a recipe that do not affect the weights; a resumed session may change them."""

_SAME_RESULT = WITHOUT_WEIGHT | {"training.dtype", "training.save_every", "training.keep"}
"""Settings whose change leaves cost and expected result of a recipe as they are; so does one of ``development`` or ``probe``."""

_SHIPPED_KIND = re.compile(r"^kind: *([\w-]+)", re.MULTILINE)

_TAG = "tag:yaml.org,2002:"


class RecipeSchema(TextSchema):
    """Base of recipes of all kinds.

    What describes a whole run holds for the settings that it was written for. In a recipe with another model or other data
    ``description``, ``source``, ``cost`` and ``expected`` are None, and ``data.revision`` is empty; with other settings of another kind,
    such as the learning rate, ``cost`` and ``expected`` are None.
    """

    name: NonBlank
    """Short name of the run; in a shipped recipe that of its file, without suffix."""
    description: NonBlank | None = None
    """What the recipe trains, and for what purpose."""
    source: NonBlank | None = None
    """Paper or script that the settings come from."""
    cost: NonBlank | None = None
    """Duration and machine of a whole run."""
    expected: NonBlank | None = None
    """Result of a whole run, with its tolerance."""

    def replace(self: Described, **changes: Any) -> Described:
        """A validated copy in which some fields have other values; what described the fields before is left out."""
        changed: Described = super().replace(**changes)
        return changed.adapted(self, changes)

    def adapted(self: Described, before: Described, given: Collection[str]) -> Described:
        """Leave out what is no longer true."""
        changed = set(_changed_settings(before, self)) - WITHOUT_WEIGHT
        replaced = any(path.partition(".")[0] in ("model", "data") for path in changed)
        retrained = any(path not in _SAME_RESULT and path.partition(".")[0] not in ("development", "probe") for path in changed)
        names = ("description", "source", "cost", "expected") if replaced else ("cost", "expected") if retrained else ()
        updates: dict[str, Any] = {name: None for name in names if name not in given and getattr(self, name) == getattr(before, name)}
        data, known = getattr(self, "data", None), getattr(getattr(before, "data", None), "revision", "")
        if replaced and known and "data.revision" not in given and isinstance(data, Schema) and getattr(data, "revision", "") == known:
            updates["data"] = data.replace(revision="")
        return TextSchema.replace(self, **updates)


def _changed_settings(before: Schema, after: Schema) -> Iterator[str]:
    """Dotted paths of two levels at which two recipes differ."""
    for name in type(after).model_fields:
        was, now = getattr(before, name), getattr(after, name)
        if isinstance(was, Schema) and isinstance(now, Schema):
            yield from (f"{name}.{inner}" for inner in type(now).model_fields if getattr(was, inner) != getattr(now, inner))
        elif was != now:
            yield name


class _Loader(yaml.SafeLoader):
    """Text, null, lists and mappings; notes keys that are given twice instead of letting the last one win."""

    # Tags such as !!int or !!timestamp are not supported; the constructor under None refuses unknown tags.
    yaml_constructors: ClassVar = {
        tag: yaml.SafeLoader.yaml_constructors[tag] for tag in (f"{_TAG}null", f"{_TAG}str", f"{_TAG}seq", f"{_TAG}map", None)
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        # First character of a plain scalar -> tags it may have; what matches none is text.
        null = (f"{_TAG}null", re.compile(r"(?:~|null|Null|NULL|)\Z"))
        self.yaml_implicit_resolvers = {"~": [null], "n": [null], "N": [null], "": [null], "<": [(f"{_TAG}merge", re.compile(r"<<\Z"))]}
        self.repeated: list[str] = []

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # typeshed has a wrong type for the anchor
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                self.repeated.append(f"line {line}: the key {key.value!r} stands in line {lines[key.value]} already")
            elif isinstance(key, yaml.ScalarNode):
                lines[key.value] = line
        return node


def parse_yaml(text: str) -> tuple[object, list[str]]:
    """One YAML document as text, None, lists and mappings, and a problem for each repeated key."""
    try:
        loader = _Loader(text)
        document = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise InputError(f"{where}not YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise InputError(f"not YAML: {first_line(error)}") from error
    return document, loader.repeated


def load_sections(
    recipe: str | Path | Mapping[str, Any] | TextSchema,
    kind: type[Section],
    rules: Iterable[Rule | SectionRule],
    *,
    kinds: Collection[str] | None = None,
    overrides: Overrides = (),
) -> Section:
    """Read and check a recipe: a YAML file, a shipped recipe by name and ``kinds``, its sections as a mapping, or a recipe.

    ``overrides`` are applied in order before anything is checked: ``section.setting=value``, where ``key=`` and ``key=null`` set None, a
    value in quotes is text without the quotes, ``[1, 2]`` is a list, and items of a list are addressed by number, from 0. Or a mapping
    from dotted paths, or nested, to values.
    """
    source, document, problems = _read_recipe(recipe, kinds)
    original, given = copy.deepcopy(document), set[str]()
    for path, value, override in _settings(overrides, problems):
        given.add(path)
        problems.extend(_override(document, path, value, override))
    rules = tuple(rules)
    found, wrong = validate(kind, document, rules)
    if found is None or problems:
        raise SchemaError(source, problems + wrong)
    if given and isinstance(found, RecipeSchema):
        before: Any = validate(kind, original, rules)[0]
        if before is not None:  # otherwise the file is a template, and the overrides complete it
            return found.adapted(before, given)
    return found


def _read_recipe(recipe: str | Path | Mapping[str, Any] | TextSchema, kinds: Collection[str] | None) -> tuple[str, object, list[str]]:
    """Name of a recipe for errors, its content as `parse_yaml` gives it, and problems of its syntax."""
    if isinstance(recipe, TextSchema | Mapping):
        return "recipe", _plain(recipe.model_dump() if isinstance(recipe, TextSchema) else recipe), []
    file = find_recipe(recipe, kinds)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 ({error.reason} at byte {error.start}); convert the file") from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    try:
        return str(file), *parse_yaml(text)
    except InputError as error:
        raise SchemaError(str(file), [str(error)]) from error


def _plain(value: object) -> object:
    """A value of Python as a parsed file has it: lists, mappings of new identity, paths as text, numbers of NumPy as Python's."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value) if isinstance(value, PurePath) else value


def shipped_recipes(kinds: Collection[str] | None = None) -> list[str]:
    """Names of the shipped recipes, sorted; only those with one of the given values of ``kind``, or all."""
    return sorted(path.stem for path in _shipped_folder().glob("*.yaml") if kinds is None or _shipped_kind(path) in kinds)


def recipe_kind(path: Path) -> str | None:
    """Value of ``kind`` in a recipe; None if it has none or cannot be read (loading the recipe reports the problem)."""
    try:
        document, _ = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, InputError):
        return None
    kind = document.get("kind") if isinstance(document, dict) else None
    return kind if isinstance(kind, str) else None


def _shipped_kind(path: Path) -> str | None:
    # Not parsed: thirty files would cost a command half a second, and those that are shipped have the key in a line of its own.
    found = _SHIPPED_KIND.search(path.read_text(encoding="utf-8"))
    return found[1] if found else None


def find_recipe(name_or_path: str | Path, kinds: Collection[str] | None = None) -> Path:
    """Find the file of a recipe."""
    path = Path(name_or_path)
    is_path = path.suffix in {".yaml", ".yml", ".json"} or len(path.parts) > 1
    names = shipped_recipes(kinds)
    if not is_path and str(path) in names:
        return _shipped_folder() / f"{path}.yaml"
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name the recipes in it, such as {path / '*.yaml'}")
    if is_path:
        if not path.is_file():
            shipped = f"; {path.stem} alone names the shipped recipe" if path.stem in names else ""
            raise InputError(f"{path}: there is no such file{shipped}")
        return path
    every = shipped_recipes()
    if "_" in str(path) and (renamed := str(path).replace("_", "-")) in every:
        raise InputError(f"the recipe {str(path)!r} is now called {renamed!r}")
    if str(path) in every:
        raise InputError(f"the recipe {str(path)!r} is run by another command; quiver recipes lists them")
    if close := difflib.get_close_matches(str(path), names):
        raise InputError(f"no shipped recipe {str(path)!r}; did you mean {' or '.join(map(repr, close))}?")
    raise InputError(f"no shipped recipe {str(path)!r}; give the path of a .yaml file, or one of {', '.join(names)}")


def _shipped_folder() -> Path:
    # Beside the packages in a checkout as in site-packages. Not importlib.resources: torchtune installs a top-level
    # ``recipes`` too, and either of the two may be imported.
    return Path(__file__).resolve().parents[2] / "recipes"


@contextmanager
def naming_fetch_command(recipe: str | Path, data: Schema) -> Iterator[None]:
    """Add the command of a recipe's head (``# Fetch:``) to an error about a source of its data section that is missing."""
    try:
        yield
    except InputError as error:
        missing = [each for each in _texts_in(data.model_dump()) if each in str(error) and not Path(each).exists()]
        text = find_recipe(recipe).read_text(encoding="utf-8")
        found = re.search(r"^# Fetch: +(.+\n(?:# {3,}.+\n)*)", text, re.MULTILINE)
        if found is None or not any(len(each) > 1 and each in text for each in missing):
            raise
        fetch = re.sub(r" *\\?\n# +", " ", found[1]).partition(" (")[0].strip()
        raise InputError(f"{error}; download the data of this recipe with: {fetch}") from error


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(inner)


def _settings(overrides: Overrides, problems: list[str]) -> Iterator[tuple[str, object, str]]:
    """Path, value and, for messages, the text of each override; overrides that are not one add to the problems."""
    if isinstance(overrides, Mapping):
        yield from ((path, _plain(value), path) for path, value in _leaves(overrides))
        return
    for override in [overrides] if isinstance(overrides, str) else overrides:
        key, equals, text = override.partition("=")
        path = key.strip()
        if not equals or not all(path.split(".")):
            problems.append(f"override {override!r}: must read section.setting=value")
            continue
        try:
            yield path, _scalar(text), override
        except InputError as error:
            problems.append(f"override {override!r}: {error}")


def _leaves(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    """Dotted paths and values of a mapping, whose values may be mappings."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _override(document: object, path: str, value: object, override: str) -> list[str]:
    """Set the value at a dotted path of a parsed recipe, where sections that are missing are made; the problem, if any, in a list."""
    *parents, name = path.split(".")
    target = document
    for number, key in enumerate(parents, start=1):
        if isinstance(target, list):  # of sections, addressed by number
            target = target[int(key)] if key.isdecimal() and int(key) < len(target) else None
        elif isinstance(target, dict):
            if target.get(key) is None:
                target[key] = {}
            target = target[key]
        if not isinstance(target, dict | list):
            return [f"override {override!r}: {'.'.join(parents[:number])} is not a section"]
    if not isinstance(target, dict):
        why = f"{'.'.join(parents)} is a list, name one of its items by its number" if parents else "the recipe has no settings"
        return [f"override {override!r}: {why}"]
    target[name] = value
    return []


def _scalar(text: str) -> object:
    """An override's value: null, a list in brackets, or text; not parsed any further, for ``search_query: `` would be a mapping."""
    if text in ("", "~", "null"):
        return None
    return parse_yaml(text)[0] if text[0] in "\"'[" else text
