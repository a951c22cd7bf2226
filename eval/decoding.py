"""Strict decoding of JSON to frozen dataclasses: an unknown, missing or mistyped field is an error that names its place.

Numbers must be finite: JSON has no infinity, but Python reads ``1e999`` as one.
The types of a dataclass's fields are the schema. Supported are str, int, float, bool, None, literals, unions, ``tuple[T, ...]``,
``Mapping[str, T]`` and dataclasses of these.
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
    """Convert a dataclass to parsed JSON; the field ``schema`` holds the name and version of the format."""
    return json.loads(json.dumps({"schema": schema, **dataclasses.asdict(record)}))  # type: ignore[no-any-return]


def read_record(record: type[Record], path: Path, *, schema: str, command: str) -> Record:
    """Read a JSON file that holds the result of `encode`.

    Args:
        record: Dataclass to build.
        path: File to read.
        schema: Expected value of the field ``schema``.
        command: Command that writes such files, named in the error.

    Raises:
        InputError: The file is missing, damaged, or written by another program or version.
    """
    content = read_json(path)
    found = content.pop("schema", None)
    if found != schema:
        raise InputError(f"{path}: the schema is {found!r}, this version reads {schema!r}; run {command} again")
    return decode(record, content, str(path))


def decode(record: type[Record], data: object, where: str) -> Record:
    """Build a dataclass from parsed JSON.

    Args:
        record: Dataclass to build.
        data: Value returned by ``json.loads``.
        where: Place to name in errors; field names are appended to it with dots.

    Raises:
        InputError: A field is unknown, missing, of the wrong type or not finite; names the first such field.

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
    """Decode with the member of the union that equals the data's type, or else with the first member."""
    return _value(type(data) if type(data) in hints else hints[0], data, where)


def _scalar(hint: Any, data: object, where: str) -> object:
    if hint is float and type(data) in (int, float):  # JSON does not distinguish them, and other writers drop the ".0"
        return _finite(data, where)
    if type(data) is not hint:  # not isinstance: True is an int in Python, but here it is an error
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
