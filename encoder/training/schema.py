"""Frozen dataclasses from untyped mappings: all problems at once, each with its dotted path.

The dataclass is the schema. Field types may be bool, int, float, str, a Literal of texts, another dataclass, a tuple of any
number of one of these, and any of these or None; a field without a default is required. A tuple is a list in YAML,
and one value alone stands for a list of one. Bounds are field metadata, named as in ``CHECKS`` and asked of each item of a
tuple; relations between fields are ``Rule``s. A number may come as text, since YAML readers differ on what a number is.
This module knows nothing of recipes or files.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Section = TypeVar("Section")

CHECKS: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "at_least": (operator.ge, "must be >= {}"),
    "at_most": (operator.le, "must be <= {}"),
    "above": (operator.gt, "must be > {}"),
    "below": (operator.lt, "must be < {}"),
    "multiple_of": (lambda value, step: value % step == 0, "must be a multiple of {}"),
    "not_blank": (lambda value, wanted: bool(value.strip()) is wanted, "must not be blank"),
}
"""What a field's metadata may ask of its value: key -> check and what to say where it fails."""


@dataclass(frozen=True)
class Rule:
    """A relation between fields, asked where all of them have valid values.

    Attributes:
        fields: Dotted paths; the first is the one that is blamed. A section stands for its mapping, or None.
        broken: Given the fields' values, whether the relation is violated.
        message: What to say, with ``{0}``, ``{1}``, ... for the values.
    """

    fields: tuple[str, ...]
    broken: Callable[..., bool]
    message: str


def build(kind: type[Section], raw: object, rules: Iterable[Rule] = ()) -> tuple[Section | None, list[str]]:
    """Make a dataclass of a mapping.

    Args:
        kind: The dataclass.
        raw: Parsed YAML or JSON.
        rules: Relations to check after the fields.

    Returns:
        The instance and no problems, or None and every problem as ``path: what is wrong``.

    Example:
        >>> @dataclass(frozen=True)
        ... class Step:
        ...     size: int = field(metadata={"at_least": 1})
        >>> build(Step, {"size": "8"})
        (Step(size=8), [])
        >>> build(Step, {"sise": 8})
        (None, ["sise: unknown key, did you mean 'size'?", 'size: missing'])
    """
    walk = _Walk()
    instance = walk.section(kind, raw, "")
    for rule in rules:
        if all(path in walk.valid for path in rule.fields):
            values = [walk.valid[path] for path in rule.fields]
            if rule.broken(*values):
                walk.problems.append(f"{rule.fields[0]}: {rule.message.format(*values)}")
    return (None, walk.problems) if walk.problems else (instance, [])


@dataclass
class _Walk:
    """One pass over a mapping: the problems found, and the valid values by dotted path."""

    problems: list[str] = field(default_factory=list)
    valid: dict[str, object] = field(default_factory=dict)

    def section(self, kind: type[Section], raw: object, path: str) -> Section | None:
        """The instance; None once there is any problem."""
        if not isinstance(raw, Mapping):
            self.problems.append(f"{path or 'the whole'}: must be a mapping of settings, got {_show(raw)}")
            return None
        prefix = f"{path}." if path else ""
        fields = {one.name: one for one in dataclasses.fields(typing.cast(Any, kind))}
        self.problems.extend(f"{prefix}{key}: unknown key{_did_you_mean(key, fields)}" for key in raw if key not in fields)
        hints = typing.get_type_hints(kind)
        values: dict[str, object] = {}
        for name, one in fields.items():
            if name in raw:
                values[name] = self.value(hints[name], raw[name], one.metadata, f"{prefix}{name}")
            elif one.default is dataclasses.MISSING:
                self.problems.append(f"{prefix}{name}: missing")
            else:
                values[name] = self.valid[f"{prefix}{name}"] = one.default
        return None if self.problems else kind(**values)

    def value(self, hint: object, raw: object, metadata: Mapping[str, object], path: str) -> object:
        """One field's value; None after a problem."""
        choices = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        if raw is None and types.NoneType in choices:
            self.valid[path] = None
            return None
        [wanted] = [choice for choice in choices if choice is not types.NoneType]
        if dataclasses.is_dataclass(wanted) and isinstance(wanted, type):
            if isinstance(raw, Mapping):
                self.valid[path] = raw
            return self.section(wanted, raw, path)
        value: object
        if typing.get_origin(wanted) is tuple:
            value = self.items(typing.get_args(wanted)[0], raw, metadata, path)
        else:
            value = self.plain(wanted, raw, metadata, path)
        if value is not None:
            self.valid[path] = value
        return value

    def items(self, one: object, raw: object, metadata: Mapping[str, object], path: str) -> tuple[object, ...] | None:
        """The items of a list; None after a problem."""
        items = raw if isinstance(raw, list) else [raw]
        paths = [f"{path}.{place}" if items is raw else path for place in range(len(items))]
        values: list[object]
        if dataclasses.is_dataclass(one) and isinstance(one, type):
            values = [self.section(one, item, where) for item, where in zip(items, paths, strict=True)]
        else:
            values = [self.plain(one, item, metadata, where) for item, where in zip(items, paths, strict=True)]
        return None if None in values else tuple(values)

    def plain(self, wanted: object, raw: object, metadata: Mapping[str, object], path: str) -> object:
        """One number, text or choice; None after a problem."""
        try:
            value = _choice(wanted, raw) if typing.get_origin(wanted) is Literal else _READERS[wanted](raw)
            for key, bound in metadata.items():
                check, message = CHECKS[key]
                if not check(value, bound):
                    raise ValueError(f"{message.format(bound)}, got {_show(raw)}")
        except ValueError as error:
            self.problems.append(f"{path}: {error}")
            return None
        return value


def _choice(wanted: object, raw: object) -> object:
    choices = typing.get_args(wanted)
    if raw not in choices:
        raise ValueError(f"must be one of {', '.join(choices)}; got {_show(raw)}{_did_you_mean(raw, choices)}")
    return raw


def _boolean(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if raw not in ("true", "false"):
        raise ValueError(f"must be true or false, got {_show(raw)}")
    return raw == "true"


def _number(raw: object) -> float:
    try:
        number = float(raw) if isinstance(raw, str | int | float) and not isinstance(raw, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"must be a number, got {_show(raw)}")
    return number


def _whole(raw: object) -> int:
    number = _number(raw)
    if not number.is_integer():
        raise ValueError(f"must be a whole number, got {_show(raw)}")
    return int(number)


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"must be text, got {_show(raw)}; quote it if it is meant as text")
    return raw


_READERS: Mapping[object, Callable[[object], object]] = {bool: _boolean, int: _whole, float: _number, str: _text}


def _show(raw: object) -> str:
    """A value as a message shows it: short, and in the words of YAML."""
    if isinstance(raw, Mapping):
        return "a mapping"
    if isinstance(raw, list):
        return "a list"
    words = {None: "null", True: "true", False: "false"}
    shown = words[raw] if raw is None or isinstance(raw, bool) else repr(raw)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _did_you_mean(name: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1) if isinstance(name, str) else []
    return f", did you mean {close[0]!r}?" if close else ""
