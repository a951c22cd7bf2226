"""One setting of a JSON file, checked for its type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from quiver.encoder import InputError

Value = TypeVar("Value")


def typed(values: Mapping[str, Any], key: str, kind: type[Value], default: Value, path: Path) -> Value:
    """A setting of one type; absent and null give the default.

    Args:
        values: The parsed file.
        key: Of the setting.
        kind: What it must be, exactly: True is no int.
        default: Taken where the file has none.
        path: The file, named in errors.

    Raises:
        InputError: The setting is of another type.

    Example:
        >>> typed({"max_seq_length": 256}, "max_seq_length", int, 512, Path("sentence_bert_config.json"))
        256
    """
    value = values.get(key)
    if value is None:
        return default
    if type(value) is not kind:  # not isinstance: True is an int to Python
        raise InputError(f"{path}: {key} must be of type {kind.__name__}, got {value!r}")
    return value


def words(values: Mapping[str, Any], key: str, default: tuple[str, ...], path: Path) -> tuple[str, ...]:
    """A setting that is a list of strings; absent and null give the default.

    Raises:
        InputError: It is no list, or an item is no string.
    """
    found = typed(values, key, list, list(default), path)
    if not all(isinstance(word, str) for word in found):
        raise InputError(f"{path}: {key} must be a list of strings, got {found!r}")
    return tuple(found)


def required(values: Mapping[str, Any], key: str, allowed: tuple[object, ...], path: Path) -> None:
    """A setting that Quiver follows in some values only; absent and null are as the first of them.

    Raises:
        InputError: It has another value.
    """
    value = values.get(key)
    if value is not None and value not in allowed:
        raise InputError(f"{path}: {key} must be {' or '.join(repr(one) for one in allowed)}, got {value!r}; Quiver runs nothing else")
