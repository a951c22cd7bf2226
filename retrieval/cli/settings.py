"""What the commands take as text: sizes, durations, and settings of an engine."""

from __future__ import annotations

import re

from encoder import InputError
from retrieval.indexes.engines import Setting

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?)(?:i?B)?", re.IGNORECASE)
_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s|m|h)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_LEAST_MEMORY = 16 << 20
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def parse_size(text: str) -> int:
    """Bytes from a number and a unit; the units are powers of 1,024.

    Raises:
        InputError: It is none.

    Example:
        >>> parse_size("1.5 GB")
        1610612736
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{text!r} is not a size; write one as 500MB or 2GB")
    return int(float(match["number"]) * (1 << _UNITS[match["unit"].upper()]))


def parse_memory(text: str) -> int:
    """A size that an index can be built in; what is smaller is a number whose unit was forgotten.

    Raises:
        InputError: It is no size, or too small.
    """
    size = parse_size(text)
    if size < _LEAST_MEMORY:
        raise InputError(f"--memory {text} is {size:,} bytes; an index wants {_LEAST_MEMORY >> 20} MB at least, write it as 500MB or 2GB")
    return size


def parse_duration(text: str) -> float:
    """Seconds from a number and a unit: ms, s, m or h; without a unit, seconds.

    Raises:
        InputError: It is none.

    Example:
        >>> parse_duration("30s"), parse_duration("1.5m"), parse_duration("500 ms")
        (30.0, 90.0, 0.5)
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{text!r} is not a duration; write one as 30s, 5m or 1h")
    return float(match["number"]) * _SECONDS[match["unit"] or "s"]


def parse_settings(texts: list[str]) -> dict[str, Setting]:
    """Settings from ``name=value``: numbers, true, false and none are what they say, all else is a string.

    Raises:
        InputError: One has no name or no value, or is there twice.

    Example:
        >>> parse_settings(["bits=4", "rotate=true", "factory=IVF64,Flat"])
        {'bits': 4, 'rotate': True, 'factory': 'IVF64,Flat'}
    """
    settings: dict[str, Setting] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value or name in settings:
            raise InputError(f"{text!r} is not a setting; write each once, as name=value")
        settings[name] = _value(value)
    return settings


def _value(text: str) -> Setting:
    words: dict[str, Setting] = {"true": True, "false": False, "none": None}
    if text in words:
        return words[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
