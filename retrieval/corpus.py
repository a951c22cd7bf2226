"""Collections on disk: documents, queries and judgements, streamed from their files and checked line by line.

Whatever is wrong with a file is an ``InputError`` that begins with ``file:line``. This module knows nothing of models or
indexes; title and text are kept apart here and joined in ``retrieval.records``.

Source: the BEIR folder layout, arXiv:2104.08663 and https://github.com/beir-cellar/beir.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from encoder.errors import InputError
from retrieval.files import read_json_lines, read_lines
from retrieval.records import Document, Query

_SUFFIXES = (".jsonl", ".jsonl.gz")
# Nine digits fit every integer type that a scorer may keep grades in; a longer one is damage, not a judgement.
_GRADE = re.compile(r"[+-]?[0-9]{1,9}")
# Names of the third column that mark the first line of a judgement file as its header; a mistyped grade must not pass as one.
_GRADE_HEADINGS = frozenset({"score", "relevance", "rel", "grade", "label"})


@dataclass(frozen=True)
class Collection:
    """One split of a test collection, held in memory.

    Attributes:
        name: Name of the folder.
        split: Name of the judgement file without its suffix.
        documents: All documents, in file order.
        queries: The queries that the split judges, in file order.
        qrels: Query id -> document id -> grade; its queries are exactly ``queries``.
        empty_texts: Documents whose text is blank (a title may still be there).
    """

    name: str
    split: str
    documents: Sequence[Document]
    queries: Sequence[Query]
    qrels: dict[str, dict[str, int]]
    empty_texts: int


def load_collection(folder: Path, split: str) -> Collection:
    """Read a BEIR folder: ``corpus.jsonl``, ``queries.jsonl`` (each may be ``.gz``) and ``qrels/<split>.tsv``.

    Args:
        folder: The collection's folder.
        split: Which judgements to use, such as ``test``; a bare name, never a path.

    Raises:
        InputError: A file is missing or malformed, the split is a path or does not exist (lists those that do), or a judgement
            names a query or document that the collection lacks (names the judgement's line).
    """
    qrels_file = _split_file(folder, split)
    judged = dict(_judgements(qrels_file))
    documents = tuple(read_documents(folder))
    queries = tuple(read_queries(find_jsonl(folder, "queries")))
    _check_known(qrels_file, judged, {document.id for document in documents}, {query.id for query in queries})
    qrels = _by_query(judged)
    return Collection(
        name=folder.resolve().name,
        split=split,
        documents=documents,
        queries=tuple(query for query in queries if query.id in qrels),
        qrels=qrels,
        empty_texts=sum(1 for document in documents if not document.text.strip()),
    )


def read_documents(path: Path) -> Iterator[Document]:
    """Stream the documents of a corpus, one JSON object a line: ``_id`` (or ``id``), ``text`` and perhaps ``title``.

    An id may be a JSON integer, as in some BEIR collections; it becomes a string. A text may be empty. Further fields are
    left alone.

    Args:
        path: A ``.jsonl`` or ``.jsonl.gz`` file, or a folder that holds ``corpus.jsonl[.gz]``.

    Raises:
        InputError: While iterating, at the first line that is malformed or repeats an id; names both lines then.
    """
    file = find_jsonl(path, "corpus") if path.is_dir() else path
    for where, row, key in _records(file):
        title = row.get("title")
        if title is not None and not isinstance(title, str):
            raise InputError(f"{where}: 'title' must be a string, got {_shown(title)}")
        yield Document(key, _text(row, where), title or "")


def read_queries(path: Path) -> Iterator[Query]:
    """Stream queries from ``.jsonl[.gz]`` (``_id`` or ``id``, and ``text``) or ``.tsv[.gz]`` (id, tab, text; no header).

    Raises:
        InputError: While iterating, at the first line that is malformed or repeats an id; or the suffix is another.
    """
    if path.name.endswith(_SUFFIXES):
        for where, row, key in _records(path):
            yield Query(key, _text(row, where))
        return
    if not path.name.endswith((".tsv", ".tsv.gz")):
        raise InputError(f"{path}: queries are read from .jsonl, .jsonl.gz, .tsv or .tsv.gz")
    seen: dict[str, int] = {}
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        columns = line.split("\t")
        if len(columns) != 2:
            raise InputError(f"{where}: expected 2 columns (id, tab, text), got {len(columns)}")
        _claim(columns[0], number, seen, where)
        yield Query(columns[0], columns[1])


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Read judgements: BEIR's three tab-separated columns with or without a header, or TREC's four columns.

    The first line decides which of the two the file is: ``query, document, grade`` split at tabs, or
    ``query, iteration, document, grade`` split at white space. Fields are taken as they stand, without CSV quoting.

    Raises:
        InputError: Names the line with a wrong column count, an id that is blank, a grade that is no integer of at most nine
            digits, or a pair that an earlier line has judged.
    """
    return _by_query(dict(_judgements(path)))


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


def _split_file(folder: Path, split: str) -> Path:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if split != PurePath(split).name:
        raise InputError(f"{folder}: a split is the name of a file in qrels/ without its suffix, not a path; got '{split}'")
    file = folder / "qrels" / f"{split}.tsv"
    if not file.is_file():
        splits = sorted(path.name.removesuffix(".tsv") for path in (folder / "qrels").glob("*.tsv"))
        there = f"the splits there are {', '.join(splits)}" if splits else "the folder has no qrels/*.tsv"
        raise InputError(f"{file}: no split '{split}'; {there}")
    return file


def _records(path: Path) -> Iterator[tuple[str, dict[str, object], str]]:
    """The objects of a JSON lines file, each with its place (file:line) and its id."""
    seen: dict[str, int] = {}
    for number, row in read_json_lines(path):
        where = f"{path}:{number}"
        key = row.get("_id", row.get("id"))
        if isinstance(key, int) and not isinstance(key, bool):
            key = str(key)
        if not isinstance(key, str):
            raise InputError(f"{where}: '_id' (or 'id') must be a string or an integer, got {_shown(key)}")
        _claim(key, number, seen, where)
        yield where, row, key


def _text(row: Mapping[str, object], where: str) -> str:
    text = row.get("text")
    if not isinstance(text, str):
        raise InputError(f"{where}: 'text' must be a string, got {_shown(text)}")
    return text


def _claim(key: str, number: int, seen: dict[str, int], where: str) -> None:
    if not key.strip():
        raise InputError(f"{where}: the id is blank")
    first = seen.setdefault(key, number)
    if first != number:
        raise InputError(f"{where}: id '{key}' was used on line {first} already; ids must be unique")


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _judgements(path: Path) -> Iterator[tuple[tuple[str, str], tuple[int, int]]]:
    """Judgements as ((query, document), (grade, line)), each pair once."""
    seen: dict[tuple[str, str], int] = {}
    split: str | None = "\t"
    for place, (number, line) in enumerate(read_lines(path)):
        where = f"{path}:{number}"
        columns = line.split(split)
        if place == 0 and len(columns) != 3:
            split = None  # not BEIR's layout; str.split(None) splits at white space, as TREC's files are
            columns = line.split()
        if len(columns) != (3 if split else 4):
            layout = "3 (query, document, grade; tab-separated)" if split else "3 tab-separated or 4 (query, iteration, document, grade)"
            raise InputError(f"{where}: expected {layout} columns, got {len(columns)}")
        query, document, grade = columns[0], columns[-2], columns[-1].strip()
        if place == 0 and split and grade.lower() in _GRADE_HEADINGS:
            continue
        if not _GRADE.fullmatch(grade):
            raise InputError(f"{where}: the grade must be an integer of at most 9 digits, got {_shown(grade)}")
        if not query.strip() or not document.strip():
            raise InputError(f"{where}: the {'document' if query.strip() else 'query'} id is blank")
        first = seen.setdefault((query, document), number)
        if first != number:
            raise InputError(f"{where}: document '{document}' was judged for query '{query}' on line {first} already")
        yield (query, document), (int(grade), number)


def _by_query(judged: Mapping[tuple[str, str], tuple[int, int]]) -> dict[str, dict[str, int]]:
    qrels: dict[str, dict[str, int]] = {}
    for (query, document), (grade, _) in judged.items():
        qrels.setdefault(query, {})[document] = grade
    return qrels


def _check_known(path: Path, judged: Mapping[tuple[str, str], tuple[int, int]], documents: set[str], queries: set[str]) -> None:
    for (query, document), (_, line) in judged.items():
        if query not in queries:
            raise InputError(f"{path}:{line}: query '{query}' is not among the collection's queries")
        if document not in documents:
            raise InputError(f"{path}:{line}: document '{document}' is not in the corpus")
