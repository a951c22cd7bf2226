"""A section of a recipe to a table of rows: what its three formats read, and which rows are left out.

Rows are read, numbered and written in blocks; what stays in memory of them is the number of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

import numpy as np

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home
from quiver.retrieval.data.corpus import load_collection
from quiver.retrieval.data.docstrings import Pair
from quiver.retrieval.progress import Advance
from quiver.retrieval.training.data.examples import read_examples
from quiver.retrieval.training.data.fields import Example, encoded
from quiver.retrieval.training.data.rows import write_view
from quiver.retrieval.training.data.sampling import Sample
from quiver.retrieval.training.data.table import TableWriter
from quiver.retrieval.training.data.texts_by_id import Entry, TextsById, index_texts, read_entries
from quiver.retrieval.training.sections import DataSection

Value = TypeVar("Value")


class Built(NamedTuple):
    """What came of the rows.

    Attributes:
        documents: Documents n that a row trains on.
        rows: Rows that are trained on.
        skipped: Rows that were left out.
        copies: Documents that were left out of their rows.
        sha256: As `TableWriter.finish` gives it.
    """

    documents: int
    rows: int
    skipped: int
    copies: int
    sha256: str


class Fit:
    """Which rows are trained on, and with which of their documents."""

    def __init__(self, section: DataSection) -> None:
        """As ``section`` says; where it does not say how many documents, the first row does."""
        self.documents = section.documents_per_row
        self.skipped = 0
        self.copies = 0
        self._section = section

    def sound(self, examples: Iterable[Example]) -> Iterator[Example]:
        """Those without a flaw.

        Raises:
            InputError: One has a flaw and is not to be skipped.
        """
        for example in examples:
            if example.flaw:
                self.leave_out(example.place, example.flaw)
            else:
                yield example

    def places(self, example: Example, contents: Sequence[str | bytes]) -> list[int]:
        """Places of the documents that an example is trained on; none where it is left out.

        Negatives that are blank, or the same as the positive or another negative, are none. Of what remains as many are taken as are
        trained on; where negatives are drawn, all.

        Args:
            example: One without a flaw.
            contents: What is equal for equal documents, and empty for blank ones; the positive's is not.

        Raises:
            InputError: Too few documents remain, and the row is not to be skipped.
        """
        wanted = self.documents = len(contents) + example.left_out if self.documents is None else self.documents
        first = {content: place for place, content in reversed(list(enumerate(contents))) if content}
        places = sorted(first.values())
        left_out = len(contents) - len(places) + example.left_out
        self.copies += left_out
        if len(places) < wanted:
            why = f" (besides {left_out} blank or the same as another)" if left_out else ""
            self.leave_out(example.place, f"{len(places)} documents{why}, {wanted} are wanted")
            return []
        return places if self._section.negatives == "random" else places[:wanted]

    def leave_out(self, place: str, flaw: str) -> None:
        """Count a row that cannot be used.

        Raises:
            InputError: Such rows are not to be skipped.
        """
        if self._section.short_rows == "error":
            raise InputError(
                f"{place}: {flaw}; mend the row, lower data.documents_per_row, or leave such rows out by data.short_rows: skip"
            )
        self.skipped += 1


class Numbered(NamedTuple):
    """An example that is trained on, its texts by their numbers in the table."""

    example: Example
    query: int
    documents: Sequence[int]
    scores: Sequence[float]


class Texts:
    """Writes the texts of examples that hold them."""

    def __init__(self, examples: Iterable[Example], writer: TableWriter) -> None:
        """Number ``examples`` into a table."""
        self.examples = examples
        self._writer = writer

    def number(self, block: Iterable[Example], fit: Fit) -> Iterator[Numbered]:
        """Write the texts of those examples that are trained on."""
        for example in block:
            # Encoders take no notice of white space at the ends.
            if places := fit.places(example, [text.strip() for text in example.documents]):
                texts = (example.query, *(example.documents[place] for place in places))
                query, *documents = (self._writer.add_text(encoded(example.place, text)) for text in texts)
                yield Numbered(example, query, documents, _at(example.scores, places))

    def close(self) -> None:
        """Nothing is left to say."""


class Ids:
    """Finds the texts of examples that name them."""

    def __init__(self, examples: Iterable[Example], queries: TextsById, documents: TextsById, writer: TableWriter) -> None:
        """Number ``examples`` by texts that are in the table of ``writer``."""
        self.examples = examples
        self._queries = queries
        self._documents = documents
        self._writer = writer
        self._missing = Missing()

    def number(self, block: Iterable[Example], fit: Fit) -> Iterator[Numbered]:
        """Look up the texts of these examples, and take those that are trained on."""
        found = list(self.look_up(list(block)))
        digests = iter(self._writer.digests([number for _, _, numbers in found for number in numbers]))
        for example, query, numbers in found:
            own = zip(numbers, islice(digests, len(numbers)), strict=True)
            contents = [b"" if number in self._documents.blank else digest for number, digest in own]
            if flaw := self.flaw(example, query, numbers[0]):
                fit.leave_out(example.place, flaw)
            elif places := fit.places(example, contents):
                yield Numbered(example, query, _at(numbers, places), _at(example.scores, places))

    def look_up(self, block: Sequence[Example]) -> Iterator[tuple[Example, int, list[int]]]:
        """The numbers of the query and of the documents; examples that lack a text are counted for `close` instead."""
        if not block:
            return
        queries = self._queries.numbers([example.query for example in block])
        documents = self._documents.numbers([one for example in block for one in example.documents])
        ends = np.cumsum([len(example.documents) for example in block])
        for example, query, numbers in zip(block, queries.tolist(), np.split(documents, ends[:-1]), strict=True):
            absent = np.flatnonzero(numbers < 0)
            if query < 0:
                self._missing.note(example.place, f"query '{example.query}' is not in {self._queries.source}", 1 + len(absent))
            elif len(absent):
                first = example.documents[absent[0]]
                self._missing.note(example.place, f"document '{first}' is not in {self._documents.source}", len(absent))
            else:
                yield example, query, numbers.tolist()

    def flaw(self, example: Example, query: int, positive: int) -> str:
        """Why an example whose texts were found cannot be trained on: a blank query or positive; empty where it can."""
        for number, texts, key in ((query, self._queries, example.query), (positive, self._documents, example.documents[0])):
            if number in texts.blank:
                return f"the text of '{key}' in {texts.source} is blank"
        return ""

    def close(self) -> None:
        """Say what was missing.

        Raises:
            InputError: An id was.
        """
        self._missing.refuse()


class Missing:
    """Ids without a text: the first one, and how many."""

    def __init__(self) -> None:
        self._first = ""
        self._ids = 0
        self._rows = 0

    def note(self, place: str, what: str, ids: int) -> None:
        """A row lacks texts."""
        self._first = self._first or f"{place}: {what}"
        self._ids += ids
        self._rows += 1

    def refuse(self) -> None:
        """End, if a row did.

        Raises:
            InputError: Names the first id, where it stands, and how many there are.
        """
        if self._rows:
            raise InputError(f"{self._first}; in all {self._ids:,} ids of {self._rows:,} rows have no text")


def build_table(section: DataSection, folder: Path, *, seed: int, advance: Advance) -> Built:
    """Write the table of a section's rows.

    Args:
        section: What to read; not the standard library, whose pairs `build_pairs` takes.
        folder: Exists and is empty.
        seed: Of the shuffling.
        advance: Takes the number of further rows and texts that were read.

    Raises:
        InputError: A source cannot be read, a row is malformed or short, an id is missing or has two texts, or no row is left.
    """
    with TableWriter(folder) as writer, TemporaryDirectory(dir=folder) as ids:
        return _write_rows(section, FORMATS[section.format](section, writer, Path(ids), advance), writer, seed=seed)


def build_pairs(section: DataSection, pairs: Iterable[Pair], folder: Path, *, seed: int) -> Built:
    """Write the table of mined pairs.

    Args:
        section: Which of them, in which order.
        pairs: The pairs.
        folder: Exists and is empty.
        seed: Of the shuffling.

    Raises:
        InputError: There is none.
    """
    with TableWriter(folder) as writer:
        examples = (Example(pair.id, pair.query, [pair.code], []) for pair in pairs)
        return _write_rows(section, Texts(examples, writer), writer, seed=seed)


def _write_rows(section: DataSection, numbering: Texts | Ids, writer: TableWriter, *, seed: int) -> Built:
    """Write the rows, as far as they are wanted, and their order."""
    fit = Fit(section)
    sample = Sample(shuffle=section.shuffle, limit=section.limit, seed=seed)
    examples = iter(numbering.examples)
    while block := list(islice(examples, sample.next_rows)):  # not `blocks`: how many rows come next depends on how many were taken
        for row in numbering.number(fit.sound(sample.wanted(block)), fit):
            writer.add_row(row.query, row.documents, row.scores)
            sample.add(row.example)
    numbering.close()
    order = sample.order()
    if not len(order) or fit.documents is None:
        raise InputError(f"data.train: no rows in {', '.join(section.train)}{f' ({fit.skipped:,} skipped)' if fit.skipped else ''}")
    write_view(writer.folder, order, fit.documents, scored=bool(section.score_fields))
    return Built(fit.documents, len(order), fit.skipped, fit.copies, writer.finish(order))


def _at(values: Sequence[Value], places: Sequence[int]) -> list[Value]:
    """The values in these places; of no values none."""
    return [values[place] for place in places] if values else []


def _by_ids(section: DataSection, writer: TableWriter, ids: Path, advance: Advance) -> Ids:
    found = []
    for name, source, id_field in (
        ("queries", section.queries, section.query_id_field),
        ("documents", section.documents, section.document_id_field),
    ):
        if source is None:
            raise InputError(f"data.{name}: needed, since format is ids")
        entries = read_entries(source, id_field, section.text_field)
        found.append(index_texts(entries, writer, ids / name, source=source, advance=advance))
    queries, documents = found
    return Ids(read_examples(section, advance), queries, documents, writer)


def _judged(section: DataSection, writer: TableWriter, ids: Path, advance: Advance) -> Ids:
    """One example for each document that a BEIR folder judges relevant, in the order of the judgements."""
    collections = {folder: load_collection(expand_home(folder), section.split) for folder in section.train}

    def texts(kind: str) -> Iterator[Entry]:
        for folder, collection in collections.items():
            # Ids of two collections may be the same.
            if kind == "queries":
                yield from (Entry(folder, f"{folder}/{query.id}", query.text) for query in collection.queries)
            else:
                yield from (Entry(folder, f"{folder}/{document.id}", document.content()) for document in collection.documents)

    def examples() -> Iterator[Example]:
        for folder, collection in collections.items():
            for query, judged in collection.qrels.items():
                advance(1)
                for document, grade in judged.items():
                    if grade > 0:
                        yield Example(f"{folder} ({section.split})", f"{folder}/{query}", [f"{folder}/{document}"], [])

    source = ", ".join(section.train)
    queries, documents = (index_texts(texts(kind), writer, ids / kind, source=source, advance=advance) for kind in ("queries", "documents"))
    return Ids(examples(), queries, documents, writer)


FORMATS: Mapping[str, Callable[[DataSection, TableWriter, Path, Advance], Texts | Ids]] = {
    "texts": lambda section, writer, ids, advance: Texts(read_examples(section, advance), writer),
    "ids": _by_ids,
    "beir": _judged,
}
"""What a recipe may name -> how its rows become numbers; the path is a folder for the ids, which is removed in the end."""
