"""Sizes and durations as people write them: ``2GB``, ``30s``."""

from __future__ import annotations

import re

from quiver.encoder.errors import InputError

_SIZE = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,15})?)\s*(?P<unit>[KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_DURATION = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,15})?)\s*(?P<unit>ms|s|m|h)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_size(text: str, name: str = "") -> int:
    """Parse a size: a number and a unit, powers of 1,024; the result is in bytes. ``name`` is the option or variable, for the error.

    Example:
        >>> parse_size("1.5 GB")
        1610612736
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{name}{': ' if name else ''}{text!r} is not a size; write one as 500MB or 2GB")
    return int(float(match["number"]) * (1 << _UNITS[match["unit"].upper()]))


def parse_duration(text: str) -> float:
    """Parse a duration: a number and a unit (ms, s, m or h; without a unit, seconds); the result is in seconds.

    Example:
        >>> parse_duration("30s"), parse_duration("1.5m"), parse_duration("500 ms")
        (30.0, 90.0, 0.5)
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{text!r} is not a duration; write one as 30s, 5m or 1h")
    return float(match["number"]) * _SECONDS[match["unit"] or "s"]
