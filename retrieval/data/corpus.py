"""Collections on disk: documents, queries and judgements, streamed from their files and checked entry by entry.

Whatever is wrong with a file is an ``InputError`` that begins with ``file:line``. This module knows nothing of models or
indexes; title and text are kept apart here and joined in ``quiver.retrieval.records``.

Source: the BEIR folder layout, arXiv:2104.08663 and https://github.com/beir-cellar/beir.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Protocol

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json_lines, read_lines
from quiver.retrieval.data.entries import Judgement, Place, check_id, to_document, to_judgement, to_metadata, to_query, unique
from quiver.retrieval.records import Document, Query

_SUFFIXES = (".jsonl", ".jsonl.gz")
# Names of the third column that mark the first line of a judgement file as its header; a mistyped grade must not pass as one.
_GRADE_HEADINGS = frozenset({"score", "relevance", "rel", "grade", "label"})


class Documents(Protocol):
    """Documents that can be gone through as often as one likes, and whose number is known: a tuple, or files that are streamed."""

    def __iter__(self) -> Iterator[Document]:
        """The documents in their order, from the first one each time."""

    def __len__(self) -> int:
        """Number of documents."""


@dataclass(frozen=True)
class Collection:
    """One split of a test collection.

    Attributes:
        name: Name of the folder.
        split: Name of the judgement file without its suffix.
        documents: All documents, in file order; those of a file stay there, and each time round reads it again.
        queries: The queries that the split judges, in file order.
        qrels: Query id -> document id -> grade; its queries are exactly ``queries``.
        empty_texts: Documents whose text is blank (a title may still be there).
    """

    name: str
    split: str
    documents: Documents
    queries: Sequence[Query]
    qrels: dict[str, dict[str, int]]
    empty_texts: int


class StreamedDocuments:
    """Documents that stay in their files: one is held at a time, however large the corpus."""

    def __init__(self, read: Callable[[], Iterable[tuple[Place, Document]]], count: int) -> None:
        """Documents that have been read once and found sound.

        Args:
            read: Starts a reading.
            count: How many there were.
        """
        self._read = read
        self._count = count

    def __iter__(self) -> Iterator[Document]:
        """The documents in file order.

        Raises:
            InputError: An entry is malformed, or their number is another than at first: somebody has changed the files.
        """
        file, found = None, 0
        for place, document in self._read():
            file, found = place.file, found + 1
            yield document
        if found != self._count:
            where = "the corpus" if file is None else file
            raise InputError(f"{where}: {self._count:,} documents at the first reading, {found:,} at a later one; leave the files alone")

    def __len__(self) -> int:
        return self._count


def load_collection(folder: Path, split: str) -> Collection:
    """Read a BEIR folder: ``corpus.jsonl``, ``queries.jsonl`` (each may be ``.gz``) and ``qrels/<split>.tsv``.

    The whole corpus is read once and checked; what stays in memory of it is the number of documents.

    Args:
        folder: The collection's folder.
        split: Which judgements to use, such as ``test``; a bare name, never a path.

    Raises:
        InputError: A file is missing or malformed, the split is a path or does not exist (lists those that do), or a judgement
            names a query or document that the collection lacks (names the judgement's line).
    """
    qrels_file = find_split(folder, split)
    return assemble(
        folder.resolve().name,
        split,
        documents=partial(_documents, folder),
        queries=lambda: _queries(find_jsonl(folder, "queries")),
        judgements=read_judgements(qrels_file),
    )


def assemble(
    name: str,
    split: str,
    *,
    documents: Callable[[], Iterable[tuple[Place, Document]]],
    queries: Callable[[], Iterable[tuple[Place, Query]]],
    judgements: Iterable[Judgement],
) -> Collection:
    """A collection from entries of any origin, with the checks that every collection has to pass.

    Args:
        name: What the collection is called.
        split: Name of the judgements.
        documents: Starts a reading of the corpus; called again for every time the collection's documents are gone through.
        queries: Starts a reading of the queries; those that the split does not judge are dropped.
        judgements: The split's judgements.

    Raises:
        InputError: An id of a document or query, or a pair that is judged, comes twice; or a judgement names a query or document that
            is not there. Names the entry.
    """
    judged = tuple(judgements)
    qrels = _by_query(judged)
    wanted = {judgement.document for judgement in judged}
    count = empty = 0
    for _, document in unique(documents):
        count += 1
        empty += not document.text.strip()
        wanted.discard(document.id)
    asked: list[Query] = []
    unasked = set(qrels)
    for _, query in unique(queries):
        if query.id in qrels:
            asked.append(query)
            unasked.discard(query.id)
    for judgement in judged if wanted or unasked else ():
        if judgement.query in unasked:
            raise InputError(f"{judgement.place}: query '{judgement.query}' is not among the collection's queries")
        if judgement.document in wanted:
            raise InputError(f"{judgement.place}: document '{judgement.document}' is not in the corpus")
    return Collection(name, split, StreamedDocuments(documents, count), tuple(asked), qrels, empty)


def read_documents(path: Path) -> Iterator[Document]:
    """Stream the documents of a corpus, one JSON object a line: ``_id`` (or ``id``), ``text`` and perhaps ``title``.

    An id may be a JSON integer, as in some BEIR collections; it becomes a string. A text may be empty. Further fields, and those of
    BEIR's object ``metadata``, become the document's metadata, see `quiver.retrieval.data.entries.flat_metadata`.

    Args:
        path: A ``.jsonl`` or ``.jsonl.gz`` file, or a folder that holds ``corpus.jsonl[.gz]``.

    Raises:
        InputError: While iterating, at the first line that is malformed; at the end, if an id came twice (names both lines).
    """
    return (document for _, document in unique(partial(_documents, path)))


def read_queries(path: Path) -> Iterator[Query]:
    """Stream queries from ``.jsonl[.gz]`` (``_id`` or ``id``, and ``text``) or ``.tsv[.gz]`` (id, tab, text; no header).

    Raises:
        InputError: While iterating, at the first line that is malformed; at the end, if an id came twice; or the suffix is another.
    """
    return (query for _, query in unique(partial(_queries, path)))


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Read judgements: BEIR's three tab-separated columns with or without a header, or TREC's four columns.

    The first line decides which of the two the file is: ``query, document, grade`` split at tabs, or
    ``query, iteration, document, grade`` split at white space. Fields are taken as they stand, without CSV quoting.

    Raises:
        InputError: Names the line with a wrong column count, an id that is blank, a grade that is no integer of at most nine
            digits, or a pair that an earlier line has judged.
    """
    return _by_query(read_judgements(path))


def find_jsonl(folder: Path, stem: str) -> Path:
    """The file ``<stem>.jsonl`` or ``<stem>.jsonl.gz`` of a folder.

    Raises:
        InputError: Neither is there, or both are.
    """
    found = [folder / f"{stem}{suffix}" for suffix in _SUFFIXES if (folder / f"{stem}{suffix}").is_file()]
    if not found:
        raise InputError(f"{folder}: no {stem}.jsonl or {stem}.jsonl.gz in this folder")
    if len(found) > 1:
        raise InputError(f"{folder}: both {found[0].name} and {found[1].name} are there; remove one")
    return found[0]


def find_split(folder: Path, split: str) -> Path:
    """The file with a BEIR folder's judgements of a split.

    Raises:
        InputError: There is no such folder or split (lists those that there are), or the split is a path.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if split != PurePath(split).name:
        raise InputError(f"{folder}: a split is the name of a file in qrels/ without its suffix, not a path; got '{split}'")
    file = folder / "qrels" / f"{split}.tsv"
    if file.is_dir():
        raise InputError(f"{file}: is a folder; the judgements of a split are a file")
    if not file.is_file():
        splits = sorted(path.name.removesuffix(".tsv") for path in (folder / "qrels").glob("*.tsv") if path.is_file())
        there = f"the splits there are {', '.join(splits)}" if splits else "the folder has no qrels/*.tsv"
        raise InputError(f"{file}: no split '{split}'; {there}")
    return file


def read_judgements(path: Path) -> Iterator[Judgement]:
    """The judgements of a file as `read_qrels` knows them, with their places; a pair that comes twice is not noticed here.

    Raises:
        InputError: While iterating, at the first line that is malformed; at the end, if there was nothing but a header.
    """
    split: str | None = "\t"
    found = False
    for number, (line_number, line) in enumerate(read_lines(path)):
        place = Place(path, line_number)
        columns = line.split(split)
        if number == 0 and len(columns) != 3:
            split = None  # not BEIR's layout; str.split(None) splits at white space, as TREC's files are
            columns = line.split()
        if len(columns) != (3 if split else 4):
            layout = "3 (query, document, grade; tab-separated)" if split else "3 tab-separated or 4 (query, iteration, document, grade)"
            raise InputError(f"{place}: expected {layout} columns, got {len(columns)}")
        grade = columns[-1].strip()
        if number == 0 and split and grade.lower() in _GRADE_HEADINGS:
            continue
        found = True
        yield to_judgement(place, columns[0], columns[-2], grade)
    if not found:
        raise InputError(f"{path}: no judgements, only a header")


def _documents(path: Path) -> Iterator[tuple[Place, Document]]:
    file = find_jsonl(path, "corpus") if path.is_dir() else path
    for number, row in read_json_lines(file):
        place = Place(file, number)
        yield place, to_document(place, row)._replace(metadata=to_metadata(place, row))


def _queries(path: Path) -> Iterator[tuple[Place, Query]]:
    if path.name.endswith(_SUFFIXES):
        for number, row in read_json_lines(path):
            place = Place(path, number)
            yield place, to_query(place, row)
        return
    if not path.name.endswith((".tsv", ".tsv.gz")):
        raise InputError(f"{path}: queries are read from .jsonl, .jsonl.gz, .tsv or .tsv.gz")
    for number, line in read_lines(path):
        place = Place(path, number)
        columns = line.split("\t")
        if len(columns) != 2:
            raise InputError(f"{place}: expected 2 columns (id, tab, text), got {len(columns)}")
        yield place, Query(check_id(place, columns[0]), columns[1])


def _by_query(judgements: Iterable[Judgement]) -> dict[str, dict[str, int]]:
    """Judgements as query id -> document id -> grade, each pair once."""
    qrels: dict[str, dict[str, int]] = {}
    places: dict[tuple[str, str], Place] = {}
    for place, query, document, grade in judgements:
        first = places.setdefault((query, document), place)
        if first != place:
            raise InputError(f"{place}: document '{document}' was judged for query '{query}' {first.seen_from(place)} already")
        qrels.setdefault(query, {})[document] = grade
    return qrels
