"""What the commands take as text: the memory of a build, and settings of an engine."""

from __future__ import annotations

from quiver.encoder import InputError
from quiver.retrieval.index.engines import Setting
from quiver.retrieval.units import parse_size

_LEAST_MEMORY = 16 << 20


def parse_memory(text: str) -> int:
    """A size that an index can be built in; what is smaller is a number whose unit was forgotten.

    Raises:
        InputError: It is no size, or too small.
    """
    size = parse_size(text)
    if size < _LEAST_MEMORY:
        raise InputError(f"--memory {text} is {size:,} bytes; an index wants {_LEAST_MEMORY >> 20} MB at least, write it as 500MB or 2GB")
    return size


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
