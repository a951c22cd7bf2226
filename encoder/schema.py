"""Schemas on pydantic: every problem at once, each with its dotted path and a suggestion for misspelt keys.

`Schema` is the base of all validated formats. `TextSchema` also reads numbers and booleans from text, for files in which every scalar is
text and for ``key=value`` options. Records, which only Quiver writes, are dataclasses with the configuration `RECORD`; `parse_record` reads
them and requires every field. Relations between fields of one schema are pydantic validators; `Rule` is for relations across sections.

    >>> from typing import Annotated
    >>> class Step(TextSchema):
    ...     size: Annotated[int, Field(ge=1)]
    >>> parse(Step, {"size": "8"}, source="step.yaml")
    Step(size=8)
    >>> validate(Step, {"sise": 8})
    (None, ['size: missing', "sise: unknown key, did you mean 'size'?"])
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError, ValidationInfo, field_validator
from pydantic import Field as Field
from pydantic import with_config as with_config
from pydantic_core import ErrorDetails, PydanticCustomError

from quiver.encoder.errors import InputError

Model = TypeVar("Model", bound="Schema")
Record = TypeVar("Record")

RECORD = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""Configuration of a dataclass whose instances are written as JSON: unknown keys are refused, types are not converted.

It is given to a pydantic dataclass, which is also checked when code makes it, or with `with_config` to one of the standard library. The
dataclasses of its fields inherit it.
"""

Count: TypeAlias = Annotated[int, Field(ge=0)]
"""A whole number >= 0, such as a size from which arrays are allocated."""

Positive: TypeAlias = Annotated[int, Field(ge=1)]
"""A whole number >= 1."""


class SchemaError(InputError):
    """A file or mapping does not match its schema; each of ``problems`` is ``dotted.path: what is wrong`` or ``line N: what is wrong``."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        if len(self.problems) == 1:
            super().__init__(f"{source}: {self.problems[0]}")
        else:
            super().__init__("\n  ".join([f"{source}: {len(self.problems)} problems", *self.problems]))


class Schema(BaseModel):
    """Base of all schemas: unknown keys are refused, types are not converted (but lists to tuples), instances cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _prepare(cls, raw: object, info: ValidationInfo) -> object:
        field = cls.model_fields.get(info.field_name or "")
        return raw if field is None else cls._convert(field.annotation, raw)

    @classmethod
    def _convert(cls, hint: object, raw: object) -> object:
        """Convert a raw value before pydantic validates it."""
        wanted = _without_none(hint)
        return tuple(raw) if isinstance(raw, list) and typing.get_origin(wanted) is tuple else raw

    def replace(self: Model, **changes: Any) -> Model:
        """A validated copy in which some fields have other values."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)


class TextSchema(Schema):
    """Base of schemas whose scalars may be text: ``"8e-5"`` is a number where a number is wanted, one value is a list with one item."""

    @classmethod
    def _convert(cls, hint: object, raw: object) -> object:
        wanted = _without_none(hint)
        if raw is None:
            return raw
        if typing.get_origin(wanted) is tuple:
            items = raw if isinstance(raw, list | tuple) else [raw]
            return tuple(cls._convert(typing.get_args(wanted)[0], item) for item in items)
        return _from_text(wanted, raw)


def _not_blank(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("blank", "must not be blank, got {shown}", {"shown": repr(value)})
    return value


NonBlank = Annotated[str, AfterValidator(_not_blank)]
"""A text with at least one character that is not white space."""


@dataclass(frozen=True)
class Rule:
    """A relation between fields of several sections, checked where all of them are valid, even if unrelated fields are not.

    The problem is reported for the first field. Paths through lists are not supported.
    """

    fields: tuple[str, ...]  # dotted paths
    broken: Callable[..., bool]  # takes the fields' values and tells whether the relation is violated
    message: str  # description of the problem, with ``{0}``, ``{1}``, ... for the values

    def problems(self, *values: Any) -> list[str]:
        """The problem, if any, in a list."""
        return [f"{self.fields[0]}: {self.message.format(*values)}"] if self.broken(*values) else []


@dataclass(frozen=True)
class SectionRule:
    """Relations between fields of a section, checked where the whole section is valid, even if others are not."""

    fields: tuple[str, ...]  # dotted path of the section, in a tuple
    problems: Callable[..., list[str]]  # takes the section and returns all problems, each with its dotted path


def validate(kind: type[Model], raw: object, rules: Iterable[Rule | SectionRule] = ()) -> tuple[Model | None, list[str]]:
    """Validate parsed JSON or YAML, and ``rules`` in addition; returns the instance and no problems, or None and all problems."""
    try:
        instance, errors = kind.model_validate(raw), []
    except ValidationError as error:
        instance, errors = None, error.errors(include_url=False)
    found = [_describe_problem(kind, one) for one in errors]
    invalid = [tuple(str(part) for part in one["loc"]) for one in errors]
    for rule in rules:
        try:
            values = [_valid_value(kind, instance if instance is not None else raw, path.split("."), invalid) for path in rule.fields]
        except LookupError:
            continue
        found += rule.problems(*values)
    return (None, found) if found else (instance, [])


def parse(kind: type[Model], raw: object, *, source: str, rules: Iterable[Rule | SectionRule] = ()) -> Model:
    """Validate parsed JSON or YAML, or raise a SchemaError with all problems that begins with where it comes from, such as a path."""
    instance, found = validate(kind, raw, rules)
    if instance is None:
        raise SchemaError(source, found)
    return instance


def parse_options(kind: type[Model], raw: object, *, source: str) -> Model:
    """Validate settings that were typed on a command line, as `parse`; the error is one line, whatever the number of problems."""
    try:
        return parse(kind, raw, source=source)
    except SchemaError as error:
        raise InputError(f"{source}: {'; '.join(error.problems)}") from error


def parse_record(kind: type[Record], raw: object, *, source: str) -> Record:
    """Make a dataclass with the configuration `RECORD` from parsed JSON, or raise a SchemaError with all problems.

    A file that Quiver wrote holds every field, so an absent one is a problem even if the field has a default.
    """
    adapter: TypeAdapter[Record] = _record_adapter(typing.cast(Hashable, kind))
    try:
        # Half of a surrogate pair, as in the name of a folder that is not UTF-8, becomes a question mark: pydantic refuses it.
        record = adapter.validate_json(json.dumps(raw, ensure_ascii=False).encode("utf-8", "replace"))
    except ValidationError as error:
        raise SchemaError(source, [_describe_problem(kind, one) for one in error.errors(include_url=False)]) from error
    if absent := list(_absent_fields(record, raw)):
        raise SchemaError(source, [f"{path}: missing" for path in absent])
    return record


def parse_fields(kind: type[Any], values: Mapping[str, object], *, source: str) -> dict[str, Any]:
    """Validate values of some fields of a dataclass, or raise a SchemaError with all problems that begins with their owner."""
    adapters, parsed, problems = _field_adapters(typing.cast(Hashable, kind)), dict[str, Any](), list[str]()
    for name, value in values.items():
        hint, adapter = adapters[name]
        try:
            parsed[name] = adapter.validate_python(_from_text(hint, value), strict=True)
        except ValidationError as error:
            problems += [_describe_problem(kind, {**one, "loc": (name, *one["loc"])}) for one in error.errors(include_url=False)]
    if problems:
        raise SchemaError(source, problems)
    return parsed


@cache
def _record_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@cache
def _field_adapters(kind: Any) -> dict[str, tuple[object, TypeAdapter[Any]]]:
    """Type and validator of each field of a dataclass."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: (_without_none(hint), TypeAdapter(hint)) for name, hint in hints.items()}


def _absent_fields(record: object, raw: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of the fields of a record and the records in it that the JSON it was made from does not hold."""
    if dataclasses.is_dataclass(record):
        for name in (field.name for field in dataclasses.fields(record) if field.init):
            if name in raw:
                yield from _absent_fields(getattr(record, name), raw[name], f"{path}{name}.")
            else:
                yield f"{path}{name}"
    elif isinstance(record, Mapping):
        for (key, value), part in zip(record.items(), raw.values(), strict=True):
            yield from _absent_fields(value, part, f"{path}{key}.")
    elif isinstance(record, list | tuple):
        for number, (value, part) in enumerate(zip(record, raw, strict=True)):
            yield from _absent_fields(value, part, f"{path}{number}.")


def _valid_value(kind: type[Schema], holder: object, path: Sequence[str], invalid: Sequence[tuple[str, ...]]) -> Any:
    """The valid value at a path of an instance or a raw mapping. Raises LookupError where there is none."""
    if any(bad[: len(path)] == tuple(path[: len(bad)]) or not bad for bad in invalid):
        raise LookupError(".".join(path))
    for number, name in enumerate(path):
        if isinstance(holder, Schema):
            holder = getattr(holder, name)
        elif isinstance(holder, Mapping):
            field = kind.model_fields[name]
            if name not in holder and field.is_required():
                raise LookupError(name)
            raw = holder.get(name, field.default)
            inner = _without_none(field.annotation)
            if number + 1 < len(path) and isinstance(inner, type) and issubclass(inner, Schema) and isinstance(raw, Mapping):
                kind, holder = inner, raw
            else:
                parts = (field.annotation, *field.metadata)
                checked: Any = typing.cast(Any, Annotated)[parts] if field.metadata else field.annotation
                holder = TypeAdapter(checked).validate_python(kind._convert(field.annotation, raw), strict=True)
        else:  # an optional section that is absent
            raise LookupError(name)
    return holder


def _without_none(hint: object) -> object:
    """``T`` of ``T | None`` and ``Annotated[T, ...]``; a union of several types as it is."""
    if typing.get_origin(hint) is Annotated:
        return _without_none(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        others = [one for one in typing.get_args(hint) if one is not types.NoneType]
        return _without_none(others[0]) if len(others) == 1 else hint
    return hint


def _from_text(wanted: object, raw: object) -> object:
    """A number or boolean from text, an integer from an integral float; anything else as it is, for pydantic to judge."""
    if wanted is bool and raw in ("true", "false"):
        return raw == "true"
    if typing.get_origin(wanted) is Literal and all(type(choice) is int for choice in typing.get_args(wanted)):
        wanted = int
    if wanted not in (int, float) or isinstance(raw, bool) or not isinstance(raw, str | int | float):
        return raw
    try:
        number = float(raw)
    except (ValueError, OverflowError):
        return raw
    if not math.isfinite(number):
        return raw
    if wanted is float:
        return number
    return int(raw) if isinstance(raw, int) else int(number) if number.is_integer() else raw


_BOUNDS = {
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "finite_number": "must be a number",
    "model_type": "must be a mapping of settings",
    "dict_type": "must be a mapping",
    "mapping_type": "must be a mapping",
    "dataclass_type": "must be a mapping of settings",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
}
"""pydantic error type -> message."""


def _describe_problem(kind: type[Any], error: ErrorDetails) -> str:
    """One pydantic error as ``dotted.path: what is wrong``."""
    loc, raw, context = error["loc"], error["input"], error.get("ctx", {})
    # A key of a file can hold control characters, which must not reach a terminal.
    path = ".".join(text if (text := str(part)).isprintable() else ascii(text) for part in loc) or "the whole document"
    name = error["type"]
    if name == "missing":
        problem = "missing"
    elif name in ("extra_forbidden", "unexpected_keyword_argument"):
        owner = _hint_at(kind, loc[:-1])
        # The keys of a section that people write.
        known = f"; the keys are {', '.join(owner.model_fields)}" if isinstance(owner, type) and issubclass(owner, TextSchema) else ""
        problem = f"unknown key{_did_you_mean(loc[-1], _fields_of(owner)) or known}"
    elif name == "literal_error":
        choices = [str(one) for one in typing.get_args(_hint_at(kind, loc))]
        problem = f"must be one of {', '.join(choices)}; got {_show(raw)}{_did_you_mean(raw, choices)}"
    elif name == "int_type":
        problem = f"must be a {'whole ' if _is_finite(raw) else ''}number, got {_show(raw)}"
    elif name == "string_type":
        problem = f"must be text, got {_show(raw)}; quote it if it is meant as text"
    elif name in _BOUNDS:
        limits = {key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in context.items()}
        problem = f"{_BOUNDS[name].format(**limits)}, got {_show(raw)}"
    else:
        problem = str(context["error"]) if name == "value_error" else error["msg"]
    return f"{path}: {problem}"


def _fields_of(kind: object) -> dict[str, object]:
    """Field name -> type of a schema or a dataclass; empty for anything else."""
    if isinstance(kind, type) and issubclass(kind, Schema):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    return typing.get_type_hints(kind) if isinstance(kind, type) and dataclasses.is_dataclass(kind) else {}


def _hint_at(kind: type[Any], loc: Sequence[int | str]) -> object:
    """The type that a schema gives the value at a location; None if it cannot be told."""
    hint: object = kind
    for part in loc:
        if fields := _fields_of(hint):
            hint = fields.get(str(part))
        elif typing.get_origin(hint) in (tuple, list, Sequence):
            hint = typing.get_args(hint)[0]
        elif typing.get_origin(hint) in (dict, Mapping):
            hint = typing.get_args(hint)[1]
        hint = _without_none(hint)
    return hint if typing.get_origin(hint) is Literal or isinstance(hint, type) else None


def _is_finite(raw: object) -> bool:
    """Whether a value is a finite number, or text that means one."""
    try:
        return isinstance(raw, str | float) and math.isfinite(float(raw))
    except ValueError:
        return False


def _show(raw: object) -> str:
    """A value as messages show it: short, in the words of YAML."""
    if isinstance(raw, Mapping):
        return "a mapping"
    if isinstance(raw, list | tuple):
        return "a list"
    if isinstance(raw, float) and raw.is_integer():
        raw = int(raw)
    words = {None: "null", True: "true", False: "false"}
    shown = words[raw] if raw is None or isinstance(raw, bool) else repr(raw)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name, in any case, that is closest to an unknown one; None if none is close."""
    lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), lower, n=1)
    return lower[close[0]] if close else None


def _did_you_mean(name: object, known: Iterable[str]) -> str:
    close = closest_name(name, known) if isinstance(name, str) else None
    return "" if close is None else f", did you mean {close!r}?"
