"""Rows that a teacher is to score: their queries and documents as numbers of texts, however the rows hold them.

What is in memory of a row is 8 bytes for its query and for each document, and 16 to know it again; of a text, where rows hold texts, 24.
Texts lie in a folder.

Shapes: R rows, n_r documents of row r, T texts.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.embedding_store import KEY, KeyTable, text_keys
from quiver.retrieval.training.data.prepare import IdNumbering, read_text_entries, write_texts_by_id
from quiver.retrieval.training.data.sources import Example, encode_text, iter_source, read_whole
from quiver.retrieval.training.data.table import TableWriter, TextColumn, blocks
from quiver.retrieval.training.sections import DataSection

SCORES = "scores"
"""Field of the scores; one that a row has already is replaced."""


@dataclass(frozen=True)
class ScoringData:
    """What is scored.

    Attributes:
        texts: T texts, on the disk.
        queries: Number of each row's query, (R,).
        documents: Numbers of all rows' documents, row after row.
        ends: (R + 1,) the documents of row r are ``documents[ends[r]:ends[r + 1]]``.
        rows: A key of each row with all its fields but the scores, (R,).
        sha256: Of the rows and of the texts in them: equal sums, equal data.
    """

    texts: TextColumn
    queries: NDArray[np.int64]
    documents: NDArray[np.int64]
    ends: NDArray[np.int64]
    rows: NDArray[np.bytes_]
    sha256: str

    def __len__(self) -> int:
        return len(self.queries)

    def pairs(self, rows: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Numbers of the query and of the document of every pair of some rows, (B,) each."""
        counts = np.diff(self.ends[rows.start : rows.stop + 1])
        documents = self.documents[self.ends[rows.start] : self.ends[rows.stop]]
        return np.repeat(self.queries[rows], counts), documents


def read_scoring_data(section: DataSection, folder: Path) -> ScoringData:
    """Read the rows of a section and their texts.

    Args:
        section: Sources and fields; ``format`` is texts or ids.
        folder: Takes the texts; must be empty.

    Raises:
        InputError: A row is malformed, has no document or a blank query or positive, holds what JSON cannot, or names an id without a
            text (names the place); or there are no rows.
    """
    rows = _Rows()
    with TableWriter(folder) as writer:
        if section.format == "ids":
            _number_ids(section, rows, writer, folder)
        else:
            _number_texts(section, rows, writer)
        if not len(rows.queries):
            raise InputError(f"{', '.join(section.train)}: no rows")
        return rows.data(writer)


def read_again(section: DataSection, data: ScoringData) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The rows once more, each with its place, for their scores to be written beside them.

    Raises:
        InputError: They are not the rows that were scored: somebody has changed the file.
    """
    remedy = "put the file back as it was, or begin anew with --overwrite"
    found = 0
    for source in section.train:
        for place, row in iter_source(source):
            if found == len(data) or text_keys([row_line(place, row, ())])[0] != data.rows[found]:
                raise InputError(f"{place}: the row has changed since it was scored; {remedy}")
            found += 1
            yield place, row
    if found < len(data):
        raise InputError(f"{', '.join(section.train)}: {found:,} rows, and {len(data):,} were scored; {remedy}")


def row_line(place: str, row: Mapping[str, object], scores: Sequence[float]) -> str:
    """A row with its scores as a line of JSON, without its end.

    Raises:
        InputError: A field holds what JSON cannot.
    """
    try:
        return json.dumps({**row, SCORES: scores}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{place}: a field holds what JSON cannot ({error}); leave it out of the file") from error


class _Rows:
    """Takes the numbers of rows, one after the other."""

    def __init__(self) -> None:
        self.queries, self.documents, self.ends = array("q"), array("q"), array("q", [0])
        self._keys = bytearray()

    def read(self, section: DataSection) -> Iterator[Example]:
        """The rows, each known again from here on."""
        for example, row in read_whole(section, all_columns=True):
            self._keys += text_keys([row_line(example.place, row, ())]).tobytes()
            yield example

    def add(self, query: int, documents: Sequence[int]) -> None:
        """The next row's numbers."""
        self.queries.append(query)
        self.documents.extend(documents)
        self.ends.append(len(self.documents))

    def data(self, writer: TableWriter) -> ScoringData:
        """All of them, with their texts."""
        queries, documents, ends = (np.array(numbers, np.int64) for numbers in (self.queries, self.documents, self.ends))
        digest = hashlib.sha256(self._keys)
        for numbers in (queries, documents, ends):
            digest.update(numbers.tobytes())
        for block in blocks(np.unique(np.concatenate([queries, documents])).tolist()):
            digest.update(b"".join(writer.digests(block)))
        writer.texts.close()
        keys = np.frombuffer(self._keys, KEY)
        return ScoringData(TextColumn(writer.folder / "texts.arrow"), queries, documents, ends, keys, digest.hexdigest())


def _number_texts(section: DataSection, rows: _Rows, writer: TableWriter) -> None:
    """Write each distinct text once."""
    known = KeyTable()
    for block in blocks(rows.read(section)):
        places = {text: example.place for example in block for text in (example.query, *example.documents)}
        texts = list(places)
        keys = text_keys(texts)
        numbers = known.find(keys)
        new = np.flatnonzero(numbers < 0)
        numbers[new] = [writer.add_text(encode_text(places[texts[number]], texts[number])) for number in new.tolist()]
        known.add(keys[new], numbers[new])
        of = dict(zip(texts, numbers.tolist(), strict=True))
        for example in block:
            rows.add(of[example.query], [of[text] for text in example.documents])


def _number_ids(section: DataSection, rows: _Rows, writer: TableWriter, folder: Path) -> None:
    """Write all texts that have an id."""
    if section.queries is None or section.documents is None:
        raise InputError("rows of ids need the sources of their texts: queries and documents")
    queries, documents = (
        write_texts_by_id(
            read_text_entries(source, id_field, section.text_field),
            writer,
            folder / f"{name}.arrow",
            source=source,
            advance=lambda steps: None,
        )
        for name, source, id_field in (
            ("queries", section.queries, section.query_id_field),
            ("documents", section.documents, section.document_id_field),
        )
    )
    examples = rows.read(section)
    ids = IdNumbering(examples, queries, documents, writer)
    for block in blocks(examples):
        for example, query, numbers in ids.look_up(block):
            if flaw := ids.flaw(example, query, numbers[0]):
                raise InputError(f"{example.place}: {flaw}")
            rows.add(query, numbers)
    ids.close()
