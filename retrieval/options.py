"""Values that the command line and Python's functions share: options of sources, dtypes, sizes and durations as people write them.

Nothing here imports numpy, so that every ``--help`` is fast.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from quiver.encoder.errors import InputError
from quiver.encoder.files import check_utf8

Dtype = Literal["float32", "bfloat16", "float16", "int8"]
"""Dtype of an encoder's weights in memory; int8 is for CPUs only, where kernels multiply quantized matrices."""


@dataclass(frozen=True)
class SourceOptions:
    """How documents are made of a source.

    Attributes:
        id: Field of a table that holds the id; None for the first of ``_id``, ``id``, ``doc_id``, ``docid``, ``document_id``, or numbers.
        title: Field that holds the title; None for ``title``.
        text: Fields that hold the text, joined by line feeds; empty for the first of ``text``, ``contents``, ``content``, ``body``,
            ``passage``, ``document``.
        columns: Names of the columns of a CSV or TSV file without a header.
        passages: Where texts are cut, see `quiver.retrieval.data.passages.parse_passages`; empty for files by headings and functions, and
            for tables not at all.
        include: Patterns of files to read in a folder; empty for all of a known type that are neither hidden nor in a folder of packages.
        exclude: Patterns of files and folders to leave out.
        lists: Fields of a table whose texts hold several values, separated by commas, semicolons or vertical bars.
        label: What the ids of files, and of rows without ids, begin with, so that they are told from those of other sources in one index:
            ``B/README.md#1`` of a folder, ``b.csv#1`` of a table. An addition to an index chooses it.

    Raises:
        InputError: A pattern or a name contains half of a surrogate pair.

    Example:
        >>> from quiver import SourceOptions
        >>> SourceOptions(id="sku", title="name", text=("description", "features")).text
        ('description', 'features')
    """

    id: str | None = None
    title: str | None = None
    text: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    passages: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    label: str = ""

    def __post_init__(self) -> None:
        """Make tuples of lists and of single names."""
        for name in ("text", "columns", "include", "exclude", "lists"):
            given = getattr(self, name)
            names = (given,) if isinstance(given, str) else tuple(given)
            object.__setattr__(self, name, tuple(check_utf8(each, f"{name} {each!r}") for each in names))

    @property
    def names_fields(self) -> bool:
        """Whether an option applies only to tables.

        Example:
            >>> from quiver import SourceOptions
            >>> SourceOptions(id="sku").names_fields, SourceOptions(passages="headings").names_fields
            (True, False)
        """
        return bool(self.id or self.title or self.text or self.columns or self.lists)


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
