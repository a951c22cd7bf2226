"""Recipe files: found by path or name, read as strict YAML, changed by overrides, validated with all problems at once.

The content of a recipe is a schema (`quiver.encoder.schema`); the key ``kind`` tells which one.

Scalars in YAML stay text. YAML 1.1 reads ``8e-5`` as text but ``064`` as 52, ``1:30`` as 90, ``no`` as false and ``2024-01-01`` as a
date. The schema knows the type of each setting and converts the text; only null is recognised here. A key that appears twice is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import yaml

from quiver.encoder.errors import InputError, first_line
from quiver.encoder.schema import Rule, SchemaError, TextSchema, validate

Section = TypeVar("Section", bound=TextSchema)

AUTO = "auto"
"""Value of a setting that a run chooses when it begins; the recipe in its folder has the choice."""

TrainingDtype: TypeAlias = Literal["auto", "float32", "bfloat16"]
"""Values of ``training.dtype``, see `quiver.encoder.training.autocast`."""

_SHIPPED_KIND = re.compile(r"^kind: *([\w-]+)", re.MULTILINE)

_TAG = "tag:yaml.org,2002:"


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
    r"""One YAML document as text, None, lists and mappings, and a problem for each repeated key.

    Raises:
        InputError: The syntax is broken; the message begins with the line.

    Example:
        >>> parse_yaml("rate: 8e-5\nlimit: null")
        ({'rate': '8e-5', 'limit': None}, [])
    """
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
    path: str | Path, kind: type[Section], rules: Iterable[Rule], *, kinds: Collection[str] | None = None, overrides: Sequence[str] = ()
) -> Section:
    """Read and check a recipe.

    Args:
        path: A YAML file, or the name of a shipped recipe.
        kind: The dataclass of the whole recipe.
        rules: Relations between its fields.
        kinds: Kinds of the shipped recipes that a name may select; None for any.
        overrides: ``section.setting=value``, applied in order before anything is checked. ``key=`` and ``key=null`` set None; a value in
            quotes is text without the quotes; ``[1, 2]`` is a list; items of a list are addressed by number, from 0.

    Raises:
        SchemaError: The file is not YAML, or a setting is unknown, missing, of the wrong type, out of its range, repeated,
            or at odds with another; names all of them.
        InputError: There is no such recipe, or it cannot be read.
    """
    file = find_recipe(path, kinds)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 ({error.reason} at byte {error.start}); convert the file") from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    try:
        document, problems = parse_yaml(text)
    except InputError as error:
        raise SchemaError(str(file), [str(error)]) from error
    for override in overrides:
        problems.extend(_override(document, override))
    recipe, found = validate(kind, document, rules)
    if recipe is None or problems:
        raise SchemaError(str(file), problems + found)
    return recipe


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
    """Find the file of a recipe.

    Args:
        name_or_path: A path if it ends in .yaml, .yml or .json or contains a folder, otherwise the name of a shipped
            recipe.
        kinds: Accepted values of ``kind`` of shipped recipes; None for any.

    Raises:
        InputError: It is a folder, or the file or name does not exist (suggests similar names, or lists all).
    """
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
    if close := difflib.get_close_matches(str(path), names):
        raise InputError(f"no shipped recipe {str(path)!r}; did you mean {' or '.join(map(repr, close))}?")
    raise InputError(f"no shipped recipe {str(path)!r}; give the path of a .yaml file, or one of {', '.join(names)}")


def _shipped_folder() -> Path:
    # Beside the packages in a checkout as in site-packages. Not importlib.resources: torchtune installs a top-level
    # ``recipes`` too, and either of the two may be imported.
    return Path(__file__).resolve().parents[2] / "recipes"


def _override(document: object, override: str) -> list[str]:
    """Apply ``dotted.path=value`` to a parsed recipe; the problem, if any, in a list."""
    key, equals, text = override.partition("=")
    *parents, name = key.strip().split(".")
    if not equals or not all([*parents, name]):
        return [f"override {override!r}: must read section.setting=value"]
    target = document
    for number, parent in enumerate(parents):
        target = _inner(target, parent)
        if target is None:
            return [f"override {override!r}: {'.'.join(parents[: number + 1])} is not a section"]
    if not isinstance(target, dict):
        why = f"{'.'.join(parents)} is a list, name one of its items by its number" if parents else "the recipe has no settings"
        return [f"override {override!r}: {why}"]
    try:
        target[name] = _scalar(text)
    except InputError as error:
        return [f"override {override!r}: {error}"]
    return []


def _inner(target: object, key: str) -> dict[str, object] | list[object] | None:
    """The section or list under a key, or in a list under a number; a section that is missing is made. None if something else is there."""
    if isinstance(target, list):
        found = target[int(key)] if key.isdecimal() and int(key) < len(target) else None
    elif isinstance(target, dict):
        found = target.get(key)
        if found is None:
            target[key] = found = {}
    else:
        return None
    return found if isinstance(found, dict | list) else None


def _scalar(text: str) -> object:
    """An override's value: null, a list in brackets, or text; not parsed any further, for ``search_query: `` would be a mapping."""
    if text in ("", "~", "null"):
        return None
    return parse_yaml(text)[0] if text[0] in "\"'[" else text
