"""Recipe files: found by path or name, read as strict YAML, changed by overrides, validated with all problems at once.

The content of a recipe is a schema (`quiver.encoder.schema`); the key ``kind`` tells which one. Two keys are resolved before it is checked:

    extends: dpr                # recipe whose settings hold where this one gives none; what describes it is not taken over
    encoders:                   # one recipe for several encoders: a row for each
      bert-base: {model.init: google-bert/bert-base-uncased, training.learning_rate: 5e-5, beir: 38.9}

A row holds settings by dotted path, whole sections, and words: ``{beir}`` and ``{encoder}`` in the texts of the recipe are replaced by the
values of the chosen row. It is chosen by ``encoder=bert-base``, an override, or by name: ``dpr-bert-base`` is that row of ``dpr``.

Scalars in YAML stay text. YAML 1.1 reads ``8e-5`` as text but ``064`` as 52, ``1:30`` as 90, ``no`` as false and ``2024-01-01`` as a
date. The schema knows the type of each setting and converts the text; only null is recognised here. A key that appears twice is an error.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
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
    {
        *("name", "encoder", "description", "source", "cost", "expected", "data.revision", "data.licence"),
        *("training.log_every", "training.keep_checkpoints"),
    }
)
"""Settings of a recipe that do not affect the weights; a resumed session may change them."""

_SAME_RESULT = WITHOUT_WEIGHT | {"training.dtype", "training.save_every", "training.keep"}
"""Settings whose change leaves cost and expected result of a recipe as they are; so does one of ``development`` or ``probe``."""

_SHIPPED_KIND = re.compile(r"^kind: *([\w-]+)", re.MULTILINE)
_SHIPPED_TABLE = re.compile(r"^encoders:.*\n((?:(?: .*)?\n)+)", re.MULTILINE)
_SHIPPED_ROW = re.compile(r"^  ([\w.-]+):", re.MULTILINE)

ENCODER = "encoder"
"""Override that chooses a row of a recipe's table of encoders, and key of the chosen row in the recipe."""

RENAMED = {"coir-codesearchnet": "finetune-codesearchnet-python", "coir-stackoverflow-qa": "finetune-stackoverflow-qa"}
"""Former name of a shipped recipe -> its name."""

_TABLE, _EXTENDS = "encoders", "extends"
_OWN_KEYS = ("name", "description", "source", "cost", "expected")  # keys that a recipe does not take over from the one that it extends
_WORD = re.compile(r"\{(\w+)\}")

_TAG = "tag:yaml.org,2002:"


class RecipeSchema(TextSchema):
    """Base of recipes of all kinds.

    What describes a whole run holds for the settings that it was written for. In a recipe with another model or other data
    ``description``, ``source``, ``cost`` and ``expected`` are None, and ``data.revision`` and ``data.licence`` are empty; with another
    ``model.init``, ``model.revision`` is None; with other settings of another kind, such as the learning rate, ``cost`` and ``expected``
    are None.
    """

    name: NonBlank
    """Short name of the run; in a shipped recipe that of its file, without suffix, and that of the encoder if there is a table of them."""
    encoder: NonBlank | None = None
    """Chosen row of the recipe's table of encoders; null without a table, and with another ``model.init``."""
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
        names = (*names, *([ENCODER] if "model.init" in changed else []))
        updates: dict[str, Any] = {name: None for name in names if name not in given and getattr(self, name) == getattr(before, name)}
        if replaced:
            updates |= _without_old_facts(before, self, "data", {"revision": "", "licence": ""}, given)
        if "model.init" in changed:
            updates |= _without_old_facts(before, self, "model", {"revision": None}, given)
        return TextSchema.replace(self, **updates)


def _without_old_facts(
    before: Schema, after: Schema, section: str, empty: Mapping[str, object], given: Collection[str]
) -> dict[str, Schema]:
    """The section without the facts that it has from the recipe before, where they are not given with the changes."""
    old, new = getattr(before, section), getattr(after, section)
    facts = {name: getattr(new, name) for name in empty if hasattr(old, name) and getattr(old, name) == getattr(new, name)}
    stale = {name: empty[name] for name, value in facts.items() if value != empty[name] and f"{section}.{name}" not in given}
    return {section: new.replace(**stale)} if stale else {}


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
    problems: list[str] = []
    settings = list(_settings(overrides, problems))
    chosen = next((str(value) for path, value, _ in reversed(settings) if path == ENCODER and value is not None), None)
    source, document, wrong = _read_recipe(recipe, kinds, chosen)
    problems += wrong
    if chosen is not None and isinstance(document, dict) and document.get(ENCODER) != chosen:
        problems.append(f"encoder: {chosen} is not a choice: the recipe has no table of encoders or is one of its rows; set model.init")
    original, given = copy.deepcopy(document), set[str]()
    for path, value, override in (setting for setting in settings if setting[0] != ENCODER):
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


def _read_recipe(
    recipe: str | Path | Mapping[str, Any] | TextSchema,
    kinds: Collection[str] | None,
    encoder: str | None = None,
    below: tuple[str, ...] = (),
) -> tuple[str, Any, list[str]]:
    """Name of a recipe for errors, its content with those of the recipes that it extends, and problems of its syntax."""
    if isinstance(recipe, TextSchema | Mapping):
        given = _plain(recipe.model_dump() if isinstance(recipe, TextSchema) else recipe)
        return "recipe", *_resolve_recipe("recipe", given, encoder, below)
    file, row = _locate_recipe(recipe, kinds)
    try:
        document, problems = _parse_file(file)
    except InputError as error:
        raise SchemaError(str(file), [str(error)]) from error
    resolved, more = _resolve_recipe(str(file), document, row or encoder, (*below, str(recipe)))
    return str(file), resolved, problems + more


def _parse_file(file: Path) -> tuple[Any, list[str]]:
    try:
        document, problems = _parse_once(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 ({error.reason} at byte {error.start}); convert the file") from error
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})") from error
    return copy.deepcopy(document), list(problems)


@lru_cache(maxsize=64)  # a table is read once for each of its rows
def _parse_once(text: str) -> tuple[object, list[str]]:
    return parse_yaml(text)


def _resolve_recipe(source: str, document: Any, encoder: str | None, below: tuple[str, ...]) -> tuple[Any, list[str]]:
    """The content of a recipe without ``extends`` and ``encoders``, and problems of the two."""
    if not isinstance(document, dict):
        return document, []
    table, base = document.pop(_TABLE, None), document.pop(_EXTENDS, None)
    rows = table if isinstance(table, dict) else {}
    if table is not None and encoder not in rows:
        wrong = "choose a row of the table of encoders" if encoder is None else f"the table of encoders has no {encoder!r}"
        raise SchemaError(source, [f"encoder: {wrong}: --encoder {' or '.join(map(str, rows)) or 'needs one'}"])
    problems: list[str] = []
    if base is not None:
        if base in below:
            raise SchemaError(source, [f"extends: {base} extends itself"])
        _, parent, problems = _read_recipe(str(base), None, encoder, below)
        document = _merge_sections(_drop_own_keys(parent, document, chosen=encoder is not None), document)
    return document, problems if encoder is None or not rows else problems + _apply_row(document, encoder, rows)


def _drop_own_keys(parent: Any, child: Mapping[str, Any], *, chosen: bool) -> dict[str, Any]:
    """What a recipe takes over from the one that it extends: settings, and neither what describes them nor revisions of other data."""
    kept = copy.deepcopy(parent) if isinstance(parent, dict) else {}
    new_model = isinstance(child.get("model"), dict) and "init" in child["model"]
    dropped: list[tuple[Any, tuple[str, ...]]] = [(kept, (*_OWN_KEYS, *([ENCODER] if new_model and not chosen else [])))]
    dropped += [(kept.get("model"), ("revision",))] if new_model else []
    dropped += [(kept.get("data"), ("revision", "licence"))] if "data" in child else []
    for section, keys in dropped:
        for key in keys if isinstance(section, dict) else ():
            section.pop(key, None)
    return kept


def _merge_sections(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        was = merged.get(key)
        merged[key] = _merge_sections(was, value) if isinstance(was, dict) and isinstance(value, dict) else value
    return merged


def _apply_row(document: dict[str, Any], encoder: str, rows: Mapping[str, Any]) -> list[str]:
    """Change a recipe to that of a row of its table; returns problems of the row."""
    row = rows[encoder] or {}
    if not isinstance(row, dict):
        return [f"encoders.{encoder}: must hold settings, such as training.learning_rate: 5e-5"]
    words, problems = {ENCODER: encoder}, list[str]()
    for key, value in row.items():
        if isinstance(value, dict):
            document.update(_merge_sections(document, {key: value}))
        elif "." in key:
            problems += _override(document, key, value, key)
        else:
            words[key] = str(value)
    document.update(_fill_words(document, words))
    document.update({"name": f"{document.get('name')}-{encoder}", ENCODER: encoder})
    lacking = {word for other in rows.values() if isinstance(other, dict) for word in other} - words.keys()
    unfilled = [word for word in dict.fromkeys(_WORD.findall(json.dumps(document))) if word in lacking]
    return problems + [f"encoders.{encoder}: lacks {word}, which the recipe names in a text" for word in unfilled]


def _fill_words(value: Any, words: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _fill_words(inner, words) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill_words(item, words) for item in value]
    return _WORD.sub(lambda found: words.get(found[1], found[0]), value) if isinstance(value, str) else value


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
    """Names of the shipped recipes, sorted; only those with one of the given values of ``kind``, or all.

    A recipe with a table of encoders has one name for each row, such as ``dpr-bert-base``.
    """
    return sorted(name for name, (path, row) in _list_shipped(kinds).items() if row is not None or not _shipped_rows(path))


def recipe_encoders(recipe: str | Path) -> list[str]:
    """Rows of a recipe's table of encoders; empty if it has none, is one row of a table, or cannot be read."""
    try:
        file, row = _locate_recipe(recipe, None)
        document, _ = _parse_file(file)
    except InputError:
        return []  # loading the recipe reports the problem
    if not isinstance(document, dict) or row is not None:
        return []
    if _TABLE not in document and _EXTENDS in document:
        return recipe_encoders(str(document[_EXTENDS]))
    table = document.get(_TABLE)
    return list(map(str, table)) if isinstance(table, dict) else []


def _list_shipped(kinds: Collection[str] | None) -> dict[str, tuple[Path, str | None]]:
    """Name -> file and row of the shipped recipes; a table has a name, too."""
    found = dict[str, tuple[Path, str | None]]()
    # Beside the packages in a checkout as in site-packages. Not importlib.resources: torchtune installs a top-level ``recipes`` too, and
    # either of the two may be imported.
    folder = Path(__file__).resolve().parents[2] / "recipes"
    for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem):
        # Not parsed: thirty files would cost a command half a second, and those that are shipped have the key in a line of its own.
        kind = _SHIPPED_KIND.search(path.read_text(encoding="utf-8"))
        if kinds is None or (kind and kind[1] in kinds):
            found[path.stem] = (path, None)
            found.update({f"{path.stem}-{row}": (path, row) for row in _shipped_rows(path)})
    return found


def recipe_kind(recipe: str | Path) -> str | None:
    """Value of ``kind`` in a recipe, or of the one that it extends; None if it has none or cannot be read (loading it reports why)."""
    try:
        document, _ = _parse_file(find_recipe(recipe))
    except InputError:
        return None
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind is None and isinstance(document, dict) and document.get(_EXTENDS) not in (None, str(recipe)):
        return recipe_kind(str(document[_EXTENDS]))
    return kind if isinstance(kind, str) else None


def _shipped_rows(path: Path) -> list[str]:
    found = _SHIPPED_TABLE.search(path.read_text(encoding="utf-8"))
    return _SHIPPED_ROW.findall(found[1]) if found else []


def find_recipe(name_or_path: str | Path, kinds: Collection[str] | None = None) -> Path:
    """Find the file of a recipe."""
    return _locate_recipe(name_or_path, kinds)[0]


def _locate_recipe(name_or_path: str | Path, kinds: Collection[str] | None) -> tuple[Path, str | None]:
    """The file of a recipe, and the row of its table of encoders if the name is that of a row."""
    path = Path(name_or_path)
    is_path = path.suffix in {".yaml", ".yml", ".json"} or len(path.parts) > 1
    known = _list_shipped(kinds)
    if not is_path and str(path) in known:
        return known[str(path)]
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name the recipes in it, such as {path / '*.yaml'}")
    if is_path:
        if not path.is_file():
            shipped = f"; {path.stem} alone names the shipped recipe" if path.stem in known else ""
            raise InputError(f"{path}: there is no such file{shipped}")
        return path, None
    every = _list_shipped(None)
    renamed = RENAMED.get(str(path), str(path).replace("_", "-"))
    if renamed != str(path) and renamed in every:
        raise InputError(f"the recipe {str(path)!r} is now called {renamed!r}")
    if str(path) in every:
        raise InputError(f"the recipe {str(path)!r} is run by another command; quiver recipes lists them")
    if close := difflib.get_close_matches(str(path), known):
        raise InputError(f"no shipped recipe {str(path)!r}; did you mean {' or '.join(map(repr, close))}?")
    names = ", ".join(name for name, (_, row) in known.items() if row is None)
    raise InputError(f"no shipped recipe {str(path)!r}; give the path of a .yaml file, or one of {names}")


@contextmanager
def naming_fetch_command(recipe: str | Path, data: Schema) -> Iterator[None]:
    """Add the command of a recipe's head (``# Fetch:``) to an error about a source of its data section that is missing."""
    try:
        yield
    except InputError as error:
        named = (each for each in _find_texts(data.model_dump()) if "/" in each and str(error).startswith(each))
        missing = [each for each in named if not Path(each).exists()]
        text = find_recipe(recipe).read_text(encoding="utf-8")
        found = re.search(r"^# Fetch: +(.+\n(?:# {3,}.+\n)*)", text, re.MULTILINE)
        if found is None or not any(each in text for each in missing):
            raise
        fetch = re.sub(r" *\\?\n# +", " ", found[1]).partition(" (")[0].strip()
        raise InputError(f"{error}; download the data of this recipe with: {fetch}") from error


def _find_texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _find_texts(inner)


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
