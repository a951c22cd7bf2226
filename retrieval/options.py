"""Values that the command line and Python's functions share. Nothing here imports numpy, so that every ``--help`` is fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quiver.encoder.errors import check_utf8

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
