"""Texts that rows name by their ids: read once, written into the table of rows, and found again by id."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.progress import Advance
from quiver.retrieval.training.data.fields import encoded, id_of, text_of
from quiver.retrieval.training.data.lookup import IdTable, IdWriter
from quiver.retrieval.training.data.sources import iter_source
from quiver.retrieval.training.data.table import TableWriter


class Entry(NamedTuple):
    """A text with its id, and where it stands."""

    place: str
    id: str
    text: str


class TextsById:
    """The texts of one source."""

    def __init__(self, source: str, table: IdTable, first: int, blank: frozenset[int]) -> None:
        """What `index_texts` made.

        Args:
            source: What errors call it.
            table: Ids in the order of the texts.
            first: Number of the first text in the table of rows.
            blank: Numbers of texts that are blank.
        """
        self.source = source
        self.blank = blank
        self._table = table
        self._first = first

    def numbers(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """The numbers of the texts with these ids, (B,) for B ids; -1 where there is none."""
        places = self._table.find(ids)
        return np.where(places < 0, -1, places + self._first)


def read_entries(source: str, id_field: str, text_field: str) -> Iterator[Entry]:
    """The texts of a source with their ids.

    Raises:
        InputError: The source cannot be read, or a row has no id or no text.
    """
    for place, row in iter_source(source, (id_field, text_field)):
        yield Entry(place, id_of(place, id_field, row), text_of(place, text_field, row))


def index_texts(
    entries: Iterable[Entry],
    writer: TableWriter,
    stem: Path,
    *,
    source: str,
    advance: Advance,
    hashed: Callable[[str], int] = hash,
) -> TextsById:
    """Write texts into a table and sort their ids.

    Args:
        entries: The texts.
        writer: Takes them.
        stem: Path of the files with the ids, without suffixes; they are of no use to another process.
        source: What errors call it.
        advance: Takes the number of further texts.
        hashed: As `IdWriter` has it.

    Raises:
        InputError: An id has two different texts; the same text twice is no harm.
    """
    first, blank = len(writer.texts), set[int]()
    ids = IdWriter(stem, hashed=hashed)
    for entry in entries:
        number = writer.add_text(encoded(entry.place, entry.text))
        ids.add(entry.id, encoded(entry.place, entry.id))
        if not entry.text.strip():
            blank.add(number)
        advance(1)
    table = ids.table()
    for one, other in table.repeated():
        if len(set(writer.digests([first + one, first + other]))) > 1:
            raise InputError(f"{source}: id '{table.id(one)}' has two different texts, in rows {one + 1} and {other + 1}")
    return TextsById(source, table, first, frozenset(blank))
