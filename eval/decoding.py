"""JSON to frozen dataclasses, strictly: unknown, missing and mistyped fields are errors that name their place.

A number must be finite: JSON knows no infinity, but ``1e999`` is read as one.
This module knows nothing of results; the types of a dataclass's fields are the schema. Supported are str, int, float, bool,
None, literals, unions, ``tuple[T, ...]``, ``Mapping[str, T]`` and dataclasses of these.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json

Record = TypeVar("Record")


def encode(record: Any, schema: str) -> dict[str, object]:
    """A dataclass as parsed JSON, with the name and version of its format under ``schema``."""
    return json.loads(json.dumps({"schema": schema, **dataclasses.asdict(record)}))  # type: ignore[no-any-return]


def read_record(record: type[Record], path: Path, *, schema: str, command: str) -> Record:
    """Read a file of what `encode` gave.

    Args:
        record: The dataclass.
        path: The file.
        schema: The format that is read.
        command: What writes the file, for the error.

    Raises:
        InputError: The file is missing, damaged, or of another program or version.
    """
    content = read_json(path)
    found = content.pop("schema", None)
    if found != schema:
        raise InputError(f"{path}: the schema is {found!r}, this version reads {schema!r}; run {command} again")
    return decode(record, content, str(path))


def decode(record: type[Record], data: object, where: str) -> Record:
    """Build a dataclass from parsed JSON.

    Args:
        record: The dataclass.
        data: What ``json.loads`` returned.
        where: The place to name in errors; fields are appended with dots.

    Raises:
        InputError: A field is unknown, missing, of another type or not finite; names the first such field.

    Example:
        >>> Point = dataclasses.make_dataclass("Point", [("x", int), ("tags", tuple[str, ...])], frozen=True)
        >>> decode(Point, {"x": 1, "tags": ["a"]}, "point")
        Point(x=1, tags=('a',))
    """
    if not isinstance(data, dict):
        raise _mismatch(where, "an object", data)
    hints = get_type_hints(record)
    if unknown := sorted(data.keys() - hints.keys()):
        raise InputError(f"{where}: unknown field {unknown[0]!r}; it was written by another version or by hand")
    if missing := [name for name in hints if name not in data]:
        raise InputError(f"{where}: the field {missing[0]!r} is missing; the file is damaged or of another version")
    return record(**{name: _value(hint, data[name], f"{where}.{name}") for name, hint in hints.items()})


def _value(hint: Any, data: object, where: str) -> object:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _one_of(arguments, data, where)
    if origin is Literal:
        if data not in arguments:
            raise _mismatch(where, f"one of {', '.join(map(str, arguments))}", data)
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise _mismatch(where, "a list", data)
        return tuple(_value(arguments[0], item, f"{where}[{place}]") for place, item in enumerate(data))
    if origin is Mapping:
        if not isinstance(data, dict):
            raise _mismatch(where, "an object", data)
        return {key: _value(arguments[1], item, f"{where}.{key if key.isprintable() else repr(key)}") for key, item in data.items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return decode(hint, data, where)
    return _scalar(hint, data, where)


def _one_of(hints: tuple[Any, ...], data: object, where: str) -> object:
    """The member that is the data's very type takes it; otherwise the first has to."""
    return _value(type(data) if type(data) in hints else hints[0], data, where)


def _scalar(hint: Any, data: object, where: str) -> object:
    if hint is float and type(data) in (int, float):  # JSON has one kind of number, and other writers drop the ".0"
        return _finite(data, where)
    if type(data) is not hint:  # not isinstance: True is an int to Python, and a mistake here
        raise _mismatch(where, {str: "a string", bool: "true or false", int: "an integer", float: "a number"}[hint], data)
    return data


def _finite(number: Any, where: str) -> float:
    try:
        value = float(number)
    except OverflowError as error:
        raise _mismatch(where, "a finite number", number) from error
    if not math.isfinite(value):
        raise _mismatch(where, "a finite number", number)
    return value


def _mismatch(where: str, expected: str, data: object) -> InputError:
    return InputError(f"{where}: must be {expected}, got {str(data)[:60]!r}")
