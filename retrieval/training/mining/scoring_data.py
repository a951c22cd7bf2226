"""Rows that a teacher is to score: their queries and documents as numbers of texts, however the rows hold them.

What is in memory of a row is 8 bytes for its query and for each document; texts lie in a folder.

Shapes: R rows, n_r documents of row r.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from retrieval.text_keys import text_keys
from retrieval.training.data.build import Ids
from retrieval.training.data.fields import Example, FieldReader
from retrieval.training.data.sources import iter_source
from retrieval.training.data.strings import Strings
from retrieval.training.data.table import TableWriter
from retrieval.training.data.texts_by_id import index_texts, read_entries
from retrieval.training.mining.text_table import TextTableWriter
from retrieval.training.sections import DataSection

# Rows whose texts are numbered together.
_ROWS = 1024

Item = TypeVar("Item")


class TextsByNumber(Protocol):
    """Texts on disk."""

    def __getitem__(self, number: int) -> str:
        """One of them."""


@dataclass(frozen=True)
class ScoringData:
    """What is scored.

    Attributes:
        queries: Texts of the queries.
        documents: Texts of the documents.
        query_numbers: Number of each row's query, (R,).
        document_numbers: Numbers of all rows' documents, row after row.
        ends: (R + 1,) the documents of row r are ``document_numbers[ends[r]:ends[r + 1]]``.
    """

    queries: TextsByNumber
    documents: TextsByNumber
    query_numbers: NDArray[np.int64]
    document_numbers: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.query_numbers)

    @property
    def sha256(self) -> str:
        """Of the rows and of the texts in them: equal sums, equal data."""
        digest = hashlib.sha256()
        for texts, numbers in ((self.queries, self.query_numbers), (self.documents, self.document_numbers)):
            digest.update(numbers.tobytes())
            for block in _blocks(np.unique(numbers).tolist()):
                digest.update(text_keys([texts[number] for number in block]).tobytes())
        digest.update(self.ends.tobytes())
        return digest.hexdigest()

    def pairs(self, rows: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Numbers of the query and of the document of every pair of some rows, (B,) each."""
        counts = np.diff(self.ends[rows.start : rows.stop + 1])
        documents = self.document_numbers[self.ends[rows.start] : self.ends[rows.stop]]
        return np.repeat(self.query_numbers[rows], counts), documents


def read_scoring_data(section: DataSection, folder: Path) -> ScoringData:
    """Read the rows of a section and their texts.

    Args:
        section: Sources and fields; ``format`` is texts or ids.
        folder: Takes the texts; must be empty.

    Raises:
        InputError: A row is malformed, has no document or a blank query or positive, or names an id without a text (names the place); or
            there are no rows.
    """
    data = _by_ids(section, folder) if section.format == "ids" else _by_texts(section, folder)
    if not len(data):
        raise InputError(f"{', '.join(section.train)}: no rows")
    return data


def read_rows(section: DataSection) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The rows as they are, each with its place."""
    for source in section.train:
        yield from iter_source(source)


class _Numbers:
    """Takes the numbers of rows, one after the other."""

    def __init__(self) -> None:
        self.queries, self.documents, self.ends = array("q"), array("q"), array("q", [0])

    def add(self, query: int, documents: Sequence[int]) -> None:
        """The next row."""
        self.queries.append(query)
        self.documents.extend(documents)
        self.ends.append(len(self.documents))

    def data(self, queries: TextsByNumber, documents: TextsByNumber) -> ScoringData:
        """All of them, with their texts."""
        arrays = (np.array(numbers, np.int64) for numbers in (self.queries, self.documents, self.ends))
        return ScoringData(queries, documents, *arrays)


def _by_texts(section: DataSection, folder: Path) -> ScoringData:
    numbers = _Numbers()
    for name in ("queries", "documents"):
        (folder / name).mkdir()
    queries, documents = TextTableWriter(folder / "queries"), TextTableWriter(folder / "documents")
    with queries, documents:
        for block in _blocks(_examples(section)):
            texts = [text for example in block for text in example.documents]
            asked, found = queries.number([example.query for example in block]), documents.number(texts)
            for example, query in zip(block, asked.tolist(), strict=True):
                size = len(example.documents)
                numbers.add(query, found[:size].tolist())
                found = found[size:]
    return numbers.data(queries.table(), documents.table())


def _by_ids(section: DataSection, folder: Path) -> ScoringData:
    numbers = _Numbers()
    if section.queries is None or section.documents is None:
        raise InputError("rows of ids need the sources of their texts: queries and documents")
    with TableWriter(folder) as writer:
        found = [
            index_texts(
                read_entries(source, id_field, section.text_field), writer, folder / name, source=source, advance=lambda steps: None
            )
            for name, source, id_field in (
                ("queries", section.queries, section.query_id_field),
                ("documents", section.documents, section.document_id_field),
            )
        ]
        examples = _examples(section)
        ids = Ids(examples, *found)
        for block in _blocks(examples):
            for row in ids.number(block):
                if row.flaw:
                    raise InputError(f"{row.example.place}: {row.flaw}")
                numbers.add(row.query, row.documents)
        ids.close()
    texts = Strings(folder / "texts")
    return numbers.data(texts, texts)


def _examples(section: DataSection) -> Iterator[Example]:
    reader = FieldReader(section)
    for number, (place, row) in enumerate(read_rows(section)):
        if number == 0:
            reader.check(place, row)
        example = reader.example(place, row)
        if example.flaw:
            raise InputError(f"{place}: {example.flaw}")
        yield example


def _blocks(items: Iterable[Item]) -> Iterator[Sequence[Item]]:
    stream = iter(items)
    while block := list(islice(stream, _ROWS)):
        yield block
