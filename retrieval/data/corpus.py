"""Collections and runs on disk: documents, queries and judgements, streamed from their files and checked entry by entry; TREC runs.

Every error about an entry begins with its position, ``file:line``. Title and text are kept apart here; `quiver.retrieval.records` joins
them.

A run is TREC text, ``query Q0 document rank score tag``, one retrieved document per line. It is ordered by score as float32, then by
document id, both descending, as trec_eval ranks; the rank column is ignored. Scores are written with nine significant digits, which
represent every float32 exactly.

Source: the BEIR folder layout, arXiv:2104.08663 and https://github.com/beir-cellar/beir; https://github.com/usnistgov/trec_eval
(form_res_rels.c: the comparison of two results).
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import atomic_file, check_utf8, decoded_lines, read_json_lines, read_lines, write_json_lines
from quiver.retrieval.data.entries import (
    BEIR_FIELDS,
    EntryPosition,
    FieldNames,
    check_id,
    id_of_row,
    is_missing,
    key_of,
    show_value,
    text_of_row,
    to_document,
    to_metadata,
    unique,
)
from quiver.retrieval.data.tables import JSONL_SUFFIXES, find_jsonl, is_table, read_rows, tables_of
from quiver.retrieval.records import Document, Query, Run

logger = logging.getLogger(__name__)

# Nine digits fit every integer type that scorers use for grades; a longer number means a damaged file.
# Tables with gaps have 1.0 for 1, or 1,0 in countries with a decimal comma; 1,000 may be a thousand.
_GRADE = re.compile(r"([+-]?[0-9]{1,9})(?:\.0*|,00?)?")
_MAX_GRADE = 10**9

# White space between the columns of TREC files: an id may hold any other, such as the no-break spaces of file names.
_COLUMN_ENDS = re.compile(r"[ \t]+")
_NOT_IN_RUNS = re.compile(r"[\t\r\n]")
_TABS = (".tsv", ".tsv.gz")
_TABLES = ".jsonl, .json, .csv, .tsv, .parquet or .arrow files, and saved data sets"

DuplicateJudgements = Literal["error", "max", "sum"]
"""What several judgements of one document for a query give: an error if their grades differ, the highest grade, or the sum of all."""

QUERY_IDS = ("_id", "id", "query-id", "query_id", "qid", "question_id")
"""Names of the id in a table of queries, in order of preference; capitals do not matter."""

QUERY_TEXTS = ("text", "query", "question", "query_text")
"""Names of the text in a table of queries."""

JUDGED_QUERIES = ("query-id", "query_id", "qid", "question_id", "query", "question")
"""Names of the query's id in a table of judgements."""

JUDGED_DOCUMENTS = (
    *("corpus-id", "corpus_id", "doc-id", "doc_id", "docid", "document_id", "document", "passage_id", "passage", "file"),
    *("documents", "passages", "files", "relevant", "doc_ids", "relevant_documents", "positives"),
)
"""Names of the document's id in a table of judgements."""

# A first line of TSV whose third column has one of these names is a header; anything else that is not a grade is an error.
GRADES = ("score", "relevance", "rel", "grade", "label")
"""Names of the grade in a table of judgements."""

NO_NAMES: Mapping[str, str] = MappingProxyType({})
"""Fields are read by their own names."""

_OF_QUERIES = (QUERY_IDS, QUERY_TEXTS, JUDGED_DOCUMENTS, GRADES)
_OF_JUDGEMENTS = (JUDGED_QUERIES, JUDGED_DOCUMENTS, GRADES)

# Names of files and folders that say nothing about the collection in them.
_GENERIC = re.compile(
    r"(?:data|data-?sets?|collections?|corpus|corpora|documents|docs|files|queries|query|qrels|judge?ments|test|dev|valid|val|validation|train"
    r"|training|eval|evaluation|benchmarks?|beir|work|downloads?|home|root|te?mp(?:[._-]?\w{6,})?|out|output|results|v?\d+)",
    re.IGNORECASE,
)

SPACE = "\N{SYMBOL FOR SPACE}"
"""What a run holds instead of a space in an id, such as the name of a file, because its columns are separated by white space."""

UNFIT = f"is empty, or has {SPACE}, a tab or a line end, which a TREC run cannot hold"
"""What is wrong with an id for which `fits_run` is false."""


class Judgement(NamedTuple):
    """A judgement and its position."""

    position: EntryPosition
    query: str
    document: str
    grade: int


def to_query(position: EntryPosition, row: Mapping[str, object], columns: FieldNames = BEIR_FIELDS) -> Query:
    """Make a query of a row, as `to_document` does."""
    return Query(check_id(position, id_of_row(position, row, columns)), text_of_row(position, row, columns))


def to_judgement(position: EntryPosition, query: str, document: str, grade: object) -> Judgement:
    """Make a judgement. The grade may be an integer, a float without a fraction, or a text of either, such as ``1.0``.

    Raises:
        InputError: An id is blank, or the grade is not a whole number of at most nine digits.
    """
    if isinstance(grade, str):
        digits = _GRADE.fullmatch(grade.strip())
        whole = int(digits[1]) if digits else None
    elif isinstance(grade, (int, float, np.number)) and not isinstance(grade, bool) and abs(grade) < _MAX_GRADE and grade == int(grade):
        whole = int(grade)
    else:
        whole = None
    if whole is None:
        raise InputError(f"{position}: the grade must be an integer of at most 9 digits, got {show_value(grade)}")
    for what, key in (("query", query), ("document", document)):
        if not check_utf8(key, f"{position}: the {what} id").strip():
            raise InputError(f"{position}: the {what} id is blank")
    return Judgement(position, query, document, whole)


def check_names(rename: Mapping[str, str], tables: Iterable[Iterable[tuple[EntryPosition, Mapping[str, object]]]]) -> None:
    """Check that fields to rename exist in the first row of one of the tables, and get a name by which queries and judgements are read."""
    known = dict.fromkeys((*QUERY_IDS, *QUERY_TEXTS, *JUDGED_QUERIES, *JUDGED_DOCUMENTS, *GRADES))
    if not rename:
        return
    first = [row for rows in tables for _, row in itertools.islice(rows, 1)]
    there = dict.fromkeys(name for row in first for name in row)
    for old, new in rename.items():
        if new not in known:
            raise InputError(f"--rename {old}={new}: a field of queries and judgements is called {', '.join(known)}, not {new!r}")
        if old not in there:
            raise InputError(f"--rename {old}={new}: no such field; the fields are {', '.join(there) or 'none'}")


def renamed(row: Mapping[str, object], rename: Mapping[str, str]) -> Mapping[str, object]:
    """A row by the names that its fields are read by; a field that is renamed takes the place of others with such a name.

    Example:
        >>> renamed({"id": 1, "text": "not asked", "search": "owls"}, {"search": "query"})
        {'id': 1, 'query': 'owls'}
    """
    if not rename:
        return row
    groups = [names for names in _OF_QUERIES if any(new in names for old, new in rename.items() if old in row)]
    return {
        rename.get(name, name): value for name, value in row.items() if name in rename or not any(name.lower() in names for names in groups)
    }


def check_names_of(rename: Mapping[str, str], files: Iterable[Path | None]) -> None:
    """Check fields of files as `check_names` does."""
    check_names(rename, [_rows(file, NO_NAMES) for file in files if file is not None and _is_table(file)])


class DocumentSource(Protocol):
    """Documents that can be iterated repeatedly and whose number is known: a tuple, or files that are streamed."""

    def __iter__(self) -> Iterator[Document]:
        """Iterate over the documents from the first one."""

    def __len__(self) -> int:
        """Number of documents."""


@dataclass(frozen=True)
class Collection:
    """One split of a collection.

    Attributes:
        name: Name of the folder.
        split: Name of the judgement file without its suffix.
        documents: All documents, in file order; those in files are read again in every pass.
        queries: The queries with judgements in the split, in file order.
        qrels: Query id -> document id -> grade; its queries are exactly ``queries``.
        empty_texts: Number of documents whose text is blank (they may have a title).
        has_corpus: Whether it has documents of its own. False: only the ids of its judged documents are known.
        missing: Judged documents that are not among the documents. Their judgements stay: a ranking without them has not found them.
    """

    name: str
    split: str
    documents: DocumentSource
    queries: Sequence[Query]
    qrels: dict[str, dict[str, int]]
    empty_texts: int
    has_corpus: bool = True
    missing: tuple[str, ...] = ()


class StreamedDocuments:
    """Documents that are read from their files one at a time; their number is that of a first pass, which has checked them."""

    def __init__(self, read: Callable[[], Iterable[tuple[EntryPosition, Document]]], count: int) -> None:
        self._read = read
        self._count = count

    def __iter__(self) -> Iterator[Document]:
        file, found = None, 0
        for position, document in self._read():
            file, found = position.file, found + 1
            yield document
        if found != self._count:
            where = "the corpus" if file is None else file
            raise InputError(f"{where}: changed while in use: {self._count:,} documents at first, {found:,} now; run the command again")

    def __len__(self) -> int:
        return self._count


class NamedDocuments:
    """Documents of which only the ids are known."""

    def __init__(self, ids: Iterable[str]) -> None:
        self._ids = tuple(dict.fromkeys(ids))

    def __iter__(self) -> Iterator[Document]:
        return (Document(key, "") for key in self._ids)

    def __len__(self) -> int:
        return len(self._ids)


def load_collection(
    folder: Path | None,
    split: str,
    *,
    queries: Path | None = None,
    qrels: Path | None = None,
    rename: Mapping[str, str] = NO_NAMES,
    needs_corpus: bool = True,
    duplicates: DuplicateJudgements = "error",
) -> Collection:
    """Read a BEIR folder: ``corpus.jsonl``, ``queries.jsonl`` (each may be ``.gz``) and ``qrels/<split>.tsv``.

    The corpus is read once to check it, and not kept in memory.

    Args:
        folder: Folder of the collection; None for a collection of ``queries`` and ``qrels`` without a corpus, named by `name_of`.
        split: Name of the judgements, such as ``test``.
        queries: File of queries instead of the folder's, see `read_queries`.
        qrels: File of judgements instead of the folder's, see `read_qrels`.
        rename: Field of these tables -> name that it is read by.
        needs_corpus: Refuse a collection without a corpus.
        duplicates: What several judgements of one pair give, see `merged_judgements`.

    Raises:
        InputError: Files are missing (names all of them), a file is malformed, the split does not exist, or `assemble` raises.
    """
    without_corpus = folder is None or not (needs_corpus or has_corpus(folder))
    if folder is not None:
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder")
        problems: list[str] = []
        if not without_corpus:
            _find_or_note(find_jsonl, folder, "corpus", problems)
        queries = queries or _find_or_note(find_jsonl, folder, "queries", problems)
        qrels = qrels or _find_or_note(find_split, folder, split, problems)
        if problems:
            raise InputError("; ".join([problems[0], *(each.removeprefix(f"{folder}: ") for each in problems[1:])]))
    if queries is None or qrels is None:
        raise ValueError("without a folder, queries and qrels must be given")
    if queries == qrels and _has_fields(queries, rename):
        check_one_table(_rows(queries, rename))
    judgements: Iterable[Judgement] = merged_judgements(read_judgements(qrels, rename), duplicates)
    if _has_fields(queries, rename) and not have_ids(_rows(queries, rename)):
        judgements = with_numbers(list(judgements), queries, _queries(queries, rename))
    return assemble(
        name_of(queries) if folder is None else folder.resolve().name,
        split,
        documents=None if folder is None or without_corpus else partial(_documents, folder),
        queries=partial(_queries, queries, rename),
        judgements=judgements,
    )


def with_numbers(judged: Sequence[Judgement], path: Path, queries: Iterable[tuple[EntryPosition, Query]]) -> Iterator[Judgement]:
    """Replace the texts that judgements name by the numbers of the queries; raises InputError if none names the text of a query."""
    numbers = {query.text: query.id for _, query in queries}
    if judged and not any(judgement.query in numbers for judgement in judged):
        raise InputError(
            f"{path}: no field for the id of the queries, and {judged[0].position.file} does not name their texts; call the field of the"
            f" id {', '.join(QUERY_IDS[:-1])} or {QUERY_IDS[-1]}"
        )
    return (judgement._replace(query=numbers.get(judgement.query, judgement.query)) for judgement in judged)


def _find_or_note(find: Callable[[Path, str], Path], folder: Path, name: str, problems: list[str]) -> Path | None:
    """The file, or None with the reason added to ``problems``."""
    try:
        return find(folder, name)
    except InputError as error:
        problems.append(str(error))
        return None


def has_corpus(folder: Path) -> bool:
    """Whether a folder holds ``corpus.jsonl`` or ``corpus.jsonl.gz``."""
    return any((folder / f"corpus{suffix}").is_file() for suffix in JSONL_SUFFIXES)


def stem(file: Path) -> str:
    """Name of a file without its suffix and ``.gz``, which names the collection or split that it holds."""
    return PurePath(file.name.removesuffix(".gz")).stem


def telling_name(path: Path, own: str = "") -> str:
    """Name of a collection: the last part of the path that says something, which ``data``, ``test`` and the like do not.

    ``own`` is the name of a file without its suffixes, empty for a folder. Links are not followed: one may have the better name.

    Example:
        >>> telling_name(Path("/srv/manuals/data/test")), telling_name(Path("/srv/manuals/queries.jsonl"), "queries")
        ('manuals', 'manuals')
        >>> telling_name(Path("/data"))
        'data'
    """
    whole = Path(os.path.abspath(path))  # noqa: PTH100 - Path.resolve would follow the link
    names = [own or whole.name]
    for parent in whole.parents:
        if parent == Path.home():  # nothing above it is about the collection
            break
        names.append(parent.name)
    return next((name for name in names if name and not _GENERIC.fullmatch(name)), names[0])


def name_of(queries: Path) -> str:
    """Name of the collection of a file of queries, see `telling_name`."""
    return telling_name(queries, stem(queries))


def assemble(
    name: str,
    split: str,
    *,
    documents: Callable[[], Iterable[tuple[EntryPosition, Document]]] | None,
    queries: Callable[[], Iterable[tuple[EntryPosition, Query]]],
    judgements: Iterable[Judgement],
) -> Collection:
    """Make a collection of entries from any source, and check it.

    Args:
        name: Name of the collection.
        split: Name of the judgements.
        documents: Function that starts a pass over the corpus; called for every pass over the collection's documents. None without a
            corpus: the collection's documents are the judged ones, without texts.
        queries: Function that starts a pass over the queries; those without judgements are dropped.
        judgements: The judgements of the split, at most one for each pair, see `merged_judgements`.

    Raises:
        InputError: An id is repeated, a judgement names a missing query, or none of the judged documents is in the corpus. Names the entry.
    """
    judged = tuple(judgements)
    qrels = _by_query(judged)
    wanted = {judgement.document for judgement in judged}
    judged_documents = NamedDocuments(judgement.document for judgement in judged)
    count = empty = 0
    first: str | None = None
    for _, document in unique(documents) if documents is not None else ():
        first = first or document.id
        count += 1
        empty += not document.text.strip()
        wanted.discard(document.id)
    if documents is None:
        wanted.clear()
    judged_queries: list[Query] = []
    missing_queries = set(qrels)
    for _, query in unique(queries):
        if query.id in qrels:
            judged_queries.append(query)
            missing_queries.discard(query.id)
    for judgement in judged if wanted or missing_queries else ():
        if judgement.query in missing_queries:
            several = f"; {len(missing_queries):,} of the {len(qrels):,} judged queries are missing" if len(missing_queries) > 1 else ""
            raise InputError(
                f"{judgement.position}: query '{judgement.query}' is not among the collection's queries{several}; add what is missing, or"
                " leave out its judgements"
            )
        if len(wanted) == len(judged_documents):
            raise InputError(
                f"{judgement.position}: document '{judgement.document}' is not in the corpus, and none of the {len(wanted):,} judged"
                f" documents is; judgements must name documents by their ids{'' if first is None else f', such as {first!r}'}"
            )
    known = judged_documents if documents is None else StreamedDocuments(documents, count)
    missing = tuple(key for key in (document.id for document in judged_documents) if key in wanted)
    return Collection(name, split, known, tuple(judged_queries), qrels, empty, documents is not None, missing)


def describe_missing(collection: Collection) -> str:
    """Say how many of a collection's judged documents its corpus lacks, with an example; it lacks at least one."""
    judged, (first, *others) = len({document for grades in collection.qrels.values() for document in grades}), collection.missing
    are, such_as = ("are", "such as ") if others else ("is", "")
    return f"{len(others) + 1:,} of {judged:,} judged documents {are} not in the corpus, {such_as}{first!r}"


def write_beir(
    folder: Path, documents: Iterable[Document], queries: Iterable[Query], splits: Mapping[str, Iterable[tuple[str, str, int]]]
) -> None:
    """Write a BEIR folder: ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/<split>.tsv``, with split -> (query id, document id, grade).

    The splits are written last, so an interrupted call leaves no valid collection.

    Raises:
        InputError: ``folder`` already contains a collection, or cannot be written.
    """
    if (folder / "corpus.jsonl").exists():
        raise InputError(f"{folder}: already contains a collection; remove it, or choose another --out")
    try:
        (folder / "qrels").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror})") from error
    write_json_lines(
        folder / "corpus.jsonl",
        (
            {"_id": document.id, "title": document.title, "text": document.text}
            | ({"metadata": document.metadata} if document.metadata else {})
            for document in documents
        ),
    )
    write_json_lines(folder / "queries.jsonl", ({"_id": query.id, "text": query.text} for query in queries))
    for split, judgements in splits.items():
        with atomic_file(folder / "qrels" / f"{split}.tsv") as file:
            file.write(b"query-id\tcorpus-id\tscore\n")
            file.writelines(f"{query}\t{document}\t{grade}\n".encode() for query, document, grade in judgements)


def read_documents(path: Path) -> Iterator[Document]:
    """Stream the documents of ``.jsonl[.gz]``, one JSON object per line: ``_id`` (or ``id``), ``text`` and optionally ``title``.

    An integer id becomes a string. A text may be empty. Further fields, and those of BEIR's object ``metadata``, become the document's
    metadata, see `flat_metadata`. ``path`` may be a folder that holds ``corpus.jsonl[.gz]``.

    Raises:
        InputError: While iterating, at the first malformed line; at the end, if an id is repeated (names both lines).
    """
    return (document for _, document in unique(partial(_documents, path)))


def read_queries(path: Path, rename: Mapping[str, str] = NO_NAMES) -> Iterator[Query]:
    """Stream queries from a table, whose fields have names of `QUERY_IDS` and `QUERY_TEXTS`, or are renamed to them.

    A table is a file of JSON Lines, JSON, CSV, TSV, Parquet or Arrow, or a folder that a data set was saved in.

    A single field of another name beside the id is the text. A table of texts alone, or of texts and documents that answer them, needs no
    ids: its different texts are numbered from 1. A TSV file without such a header has two columns, id and text.

    Raises:
        InputError: While iterating, at the first malformed line; at the end, if an id is repeated; or the suffix is not supported.
    """
    return (query for _, query in unique(partial(_queries, path, rename)))


def read_qrels(path: Path, duplicates: DuplicateJudgements = "error") -> dict[str, dict[str, int]]:
    """Read judgements: BEIR's three tab-separated columns with or without a header, TREC's four columns, or a table such as CSV.

    A file of the types of `read_queries`, except TSV, is a table with a header, whose columns have names of `JUDGED_QUERIES`,
    `JUDGED_DOCUMENTS` and `GRADES`; without a grade, every document is relevant with grade 1. In all other files the first line decides the
    format: ``query, document, grade`` split at tabs, or ``query, iteration, document, grade`` split at spaces and tabs, without quoting.

    Raises:
        InputError: A line has the wrong number of columns, a blank id, a grade that is not a whole number of at most nine digits, or
            judges a pair otherwise than an earlier line. Names the line.
    """
    return _by_query(merged_judgements(read_judgements(path), duplicates))


def find_split(folder: Path, split: str) -> Path:
    """Return the path of a split's judgements in a BEIR folder; raises InputError, which lists the splits that exist."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if split != PurePath(split).name:
        raise InputError(f"{folder}: a split must be the name of a file in qrels/ without suffix, not a path; got '{split}'")
    file = folder / "qrels" / f"{split}.tsv"
    if file.is_dir():
        raise InputError(f"{file}: is a folder; the judgements of a split must be a file")
    if not file.is_file():
        splits = sorted(path.name.removesuffix(".tsv") for path in (folder / "qrels").glob("*.tsv") if path.is_file())
        beside = sorted(path.name for path in folder.glob("*.tsv"))
        none = f"move {beside[0]} to qrels/, or name it" if beside else "the folder has no qrels/*.tsv; name a file of judgements"
        none += " with --qrels FILE (quiver evaluate)"
        existing = f"existing splits: {', '.join(splits)}" if splits else none
        raise InputError(f"{file}: no split '{split}'; {existing}")
    return file


def read_judgements(path: Path, rename: Mapping[str, str] = NO_NAMES) -> Iterator[Judgement]:
    """Stream the judgements of a file that `read_qrels` can read, with their positions; repeated pairs are not checked.

    Raises:
        InputError: While iterating, at the first malformed line; at the end, if there is only a header.
    """
    if _is_table(path):
        # BEIR's or TREC's layout, if the header does not name two other columns or more than three.
        cells = _first_cells(path, rename) if path.name.endswith(_TABS) else {}
        if not cells or (len(cells) != 3 and _find_name(cells, JUDGED_QUERIES) and _find_name(cells, JUDGED_DOCUMENTS)):
            yield from table_judgements(path, _rows(path, rename))
            return
    split: str | None = "\t"
    found = False
    for number, (line_number, line) in enumerate(read_lines(path)):
        position = EntryPosition(path, line_number)
        columns = line.split("\t")
        if number == 0 and len(columns) != 3:
            split = None  # TREC's format
        if split is None:
            columns = _trec_columns(line)
        if len(columns) != (3 if split else 4):
            layout = "3 (query, document, grade; tab-separated)" if split else "3 tab-separated or 4 (query, iteration, document, grade)"
            raise InputError(f"{position}: expected {layout} columns, got {len(columns)}")
        grade = columns[-1].strip()
        if number == 0 and split and grade.lower() in GRADES:
            continue
        found = True
        query, document = (name.replace(SPACE, " ") for name in (columns[0], columns[-2]))
        yield to_judgement(position, query, document, grade)
    if not found:
        raise InputError(f"{path}: no judgements, only a header")


def _trec_columns(line: str) -> list[str]:
    """The columns of a TREC file, separated by spaces or tabs."""
    return _COLUMN_ENDS.split(line.strip(" \t"))


def _is_table(path: Path) -> bool:
    return is_table(path) or any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _rows(path: Path, rename: Mapping[str, str]) -> Iterator[tuple[EntryPosition, Mapping[str, object]]]:
    """The rows of a table, by the names that its fields are read by."""
    for file in tables_of(path):
        for position, row in read_rows(file):
            yield position, renamed(row, rename)


def _documents(path: Path) -> Iterator[tuple[EntryPosition, Document]]:
    file = find_jsonl(path, "corpus") if path.is_dir() else path
    for number, row in read_json_lines(file):
        position = EntryPosition(file, number)
        yield position, to_document(position, row)._replace(metadata=to_metadata(position, row))


def table_judgements(path: Path, rows: Iterable[tuple[EntryPosition, Mapping[str, object]]]) -> Iterator[Judgement]:
    """The judgements of a table whose columns have names."""
    names: tuple[str, str, str | None] | None = None
    for position, row in rows:
        if names is None:
            # The field that names the query: its id, also ``id`` where there is a text beside it, or its text.
            key = _find_name(row, QUERY_IDS) if _find_name(row, QUERY_TEXTS) is not None else None
            names = (
                key or _column(position, row, JUDGED_QUERIES, "the query's id", _OF_JUDGEMENTS),
                _column(position, row, JUDGED_DOCUMENTS, "the document's id", _OF_JUDGEMENTS),
                _find_name(row, GRADES),
            )
            if names[2] is None:
                _tell_possible_grade(path, row, names[:2])
        query, found, grade = row.get(names[0]), row.get(names[1]), 1 if names[2] is None else row.get(names[2])
        for document in found if isinstance(found, list) else [found]:
            yield to_judgement(position, _judged_id(position, "query", query), _judged_id(position, "document", document), grade)
    if names is None:
        raise InputError(f"{path}: no judgements, only a header")


def _judged_id(position: EntryPosition, what: str, value: object) -> str:
    """An id of a judgement; empty if there is none."""
    key = "" if is_missing(value) else key_of(value)
    if key is None:
        raise InputError(f"{position}: the {what} id must be a string or an integer, got {show_value(value)}")
    return key


def _tell_possible_grade(path: Path, row: Mapping[str, object], taken: Sequence[str | None]) -> None:
    """Warn of whole numbers that could be grades but are not called so."""
    found = [name for name, value in row.items() if name not in taken and _is_unknown(name, _OF_QUERIES) and _GRADE.fullmatch(str(value))]
    if found:
        logger.warning(
            "%s: no field is called %s, so that every document named is relevant; if '%s' holds the grades, pass --rename %s=grade",
            path,
            " or ".join((", ".join(GRADES[:-1]), GRADES[-1])),
            found[0],
            found[0],
        )


def _find_name(row: Mapping[str, object], names: Sequence[str]) -> str | None:
    """The field that has the first of several names; None if there is none."""
    fields = {field.lower(): field for field in reversed(list(row))}
    return next((fields[name] for name in names if name in fields), None)


def _is_unknown(name: str, known: Sequence[Sequence[str]]) -> bool:
    return not any(name.lower() in names for names in known)


def _column(position: EntryPosition, row: Mapping[str, object], names: Sequence[str], what: str, known: Sequence[Sequence[str]]) -> str:
    """The field that has one of the names, or the only one that has none of ``known``."""
    field = _find_name(row, names)
    if field is None:
        unknown = [name for name in row if _is_unknown(name, known)]
        if len(unknown) == 1:
            return unknown[0]
        plain = next(name for name in ("query_id", "document", "query") if name in names)
        raise InputError(
            f"{position}: no field for {what}; call it {', '.join(names[:-1])} or {names[-1]} (--rename FIELD={plain}); the fields are"
            f" {', '.join(row)}"
        )
    return field


def _queries(path: Path, rename: Mapping[str, str] = NO_NAMES) -> Iterator[tuple[EntryPosition, Query]]:
    if path.is_dir() and not _is_table(path):
        raise InputError(f"{path}: unsupported type; queries are read from {_TABLES}")
    if not _has_fields(path, rename):
        for number, line in read_lines(path):
            position = EntryPosition(path, number)
            columns = line.split("\t")
            if len(columns) != 2:
                raise InputError(f"{position}: expected 2 columns (id, tab, text), got {len(columns)}")
            yield position, Query(check_id(position, columns[0]), columns[1])
        return
    yield from table_queries(path, _rows(path, rename))


def table_queries(path: Path, rows: Iterable[tuple[EntryPosition, Mapping[str, object]]]) -> Iterator[tuple[EntryPosition, Query]]:
    """The queries of rows; see `read_queries`."""
    fields: FieldNames | None = None
    judged, numbers, seen = False, dict[str, int](), set[Query]()
    for position, row in rows:
        if fields is None:
            fields, judged = _query_fields(position, row), _find_name(row, JUDGED_DOCUMENTS) is not None
        if fields.id:
            query = to_query(position, row, fields)
            if not judged or query not in seen:  # a row of a table with judgements is one judgement
                yield position, query
            seen |= {query} if judged else set()
        elif (text := text_of_row(position, row, fields)) not in numbers:
            numbers[text] = len(numbers) + 1
            yield position, Query(str(numbers[text]), text)
    if fields is None:
        raise InputError(f"{path}: no queries, only a header")


def _query_fields(position: EntryPosition, row: Mapping[str, object]) -> FieldNames:
    """The fields of queries, of the first one; without an id where a table of texts names judged documents, or has nothing else."""
    text = _column(position, row, QUERY_TEXTS, "the text of the queries", _OF_QUERIES)
    judged, has_id = _find_name(row, JUDGED_DOCUMENTS) is not None, _find_name(row, QUERY_IDS) is not None
    if not has_id and (judged or not any(_is_unknown(name, (QUERY_TEXTS, GRADES)) and name != text for name in row)):
        return FieldNames((), text)
    if not has_id:
        raise InputError(
            f"{position}: no field for the id of the queries; call it {', '.join(QUERY_IDS[:-1])} or {QUERY_IDS[-1]} (--rename"
            f" FIELD=query_id); queries need none beside the documents that answer them (--rename FIELD=document); the fields are"
            f" {', '.join(row)}"
        )
    key = _find_name(row, QUERY_IDS) or ""
    return FieldNames(BEIR_FIELDS.id if key in BEIR_FIELDS.id else (key,), text)


def have_ids(rows: Iterable[tuple[EntryPosition, Mapping[str, object]]]) -> bool:
    """Whether rows of queries have ids."""
    first = next(iter(rows), None)
    return first is None or bool(_query_fields(*first).id)


def check_one_table(rows: Iterable[tuple[EntryPosition, Mapping[str, object]]]) -> None:
    """Check that in a table of queries with their documents, the only field without a known name is not taken for both."""
    for position, row in itertools.islice(rows, 1):
        text = _query_fields(position, row).text
        if text == _column(position, row, JUDGED_DOCUMENTS, "the document's id", _OF_JUDGEMENTS):
            raise InputError(
                f"{position}: '{text}' would be the text of the queries and the document that answers them; name both fields, such as"
                f" --rename question=query,{text}=document; the fields are {', '.join(row)}"
            )


def _has_fields(path: Path, rename: Mapping[str, str]) -> bool:
    """Whether a file of queries is a table whose fields have names; other files have two columns, id and text."""
    if not path.name.endswith(_TABS) or not _is_table(path):
        return _is_table(path)
    cells = _first_cells(path, rename)
    return _find_name(cells, QUERY_TEXTS) is not None and _find_name(cells, (*QUERY_IDS, *JUDGED_DOCUMENTS)) is not None


def _first_cells(path: Path, rename: Mapping[str, str]) -> Mapping[str, object]:
    """The cells of the first line of a TSV file that is not blank, as a row."""
    with closing(decoded_lines(path, legacy=True)) as lines:
        first = next((line.rstrip("\r\n") for _, line in lines if line.strip()), "")
    return renamed(dict.fromkeys(first.split("\t")), rename)


def merged_judgements(judgements: Iterable[Judgement], duplicates: DuplicateJudgements = "error") -> list[Judgement]:
    """Make one judgement of all that judge the same document for the same query, such as the clicks of a log; their number is logged.

    Args:
        judgements: The judgements, in any order.
        duplicates: ``error``: different grades are an error, as for trec_eval; ``max`` for the highest grade, or ``sum`` for the sum of the
            grades of all, equal ones too.

    Returns:
        The judgements, each with the position of the first that it was made of.

    Raises:
        InputError: ``duplicates`` is something else, or ``error`` and the grades of a pair differ. Names both.

    Example:
        >>> clicks = [Judgement(EntryPosition(Path("log.csv"), line), "owls", "d1", grade) for line, grade in ((2, 1), (3, 3), (4, 3))]
        >>> [merged_judgements(clicks, how)[0].grade for how in ("max", "sum")]
        [3, 7]
    """
    if duplicates not in get_args(DuplicateJudgements):
        raise InputError(f"duplicate judgements (--duplicate-judgements) must be error, max or sum, got {duplicates!r}")
    found: dict[tuple[str, str], Judgement] = {}
    repeated = 0
    for judgement in judgements:
        first = found.setdefault(judgement[1:3], judgement)
        if first is judgement:
            continue
        repeated += 1
        if duplicates == "error" and first.grade != judgement.grade:
            position, query, document, grade = judgement
            raise InputError(
                f"{position}: document '{document}' is already judged for query '{query}' {first.position.seen_from(position)}, with grade"
                f" {first.grade} instead of {grade}; keep one of the judgements, or take the highest grade or the sum of all:"
                " --duplicate-judgements max or sum (duplicate_judgements=)"
            )
        grade = first.grade + judgement.grade if duplicates == "sum" else max(first.grade, judgement.grade)
        found[judgement[1:3]] = first._replace(grade=grade)
    if repeated:
        made = {"error": "kept once", "max": "the highest grade was taken", "sum": "their grades were added"}[duplicates]
        where = next(iter(found.values())).position.file
        logger.warning("%s: %d of %d judgements repeat a query and document; %s", where, repeated, len(found) + repeated, made)
    return list(found.values())


def _by_query(judgements: Iterable[Judgement]) -> dict[str, dict[str, int]]:
    """Query id -> document id -> grade."""
    qrels: dict[str, dict[str, int]] = {}
    for _, query, document, grade in judgements:
        qrels.setdefault(query, {})[document] = grade
    return qrels


def ranked(scores: Mapping[str, float]) -> list[str]:
    """Sort the documents of one query, best first, in trec_eval's order; raises ValueError for a score that is NaN.

    Example:
        >>> ranked({"a": 1.0, "b": 2.0, "c": 1.0 + 1e-9})
        ['b', 'c', 'a']
    """
    return [document for _, document in _in_order(scores)]


def write_run(run: Run, path: Path, *, tag: str) -> None:
    """Write a run by one rename, queries in the order given. A query without documents has no line.

    ``path`` is compressed if it ends in ``.gz``; its folder must exist. ``tag``, one word, is the name of the system, the last column.

    Raises:
        InputError: An id is empty or contains a tab or a line end, which the format does not allow, or a score is not finite.
    """
    if tag.split() != [tag]:
        raise ValueError(f"the tag of a run must be one word, got {tag!r}")
    with atomic_file(path) as file:
        for query, scores in run.items():
            _check_id(query, "query", path)
            for document, score in scores.items():
                _check_id(document, "document", path)
                if not math.isfinite(score):
                    raise InputError(f"{path}: query '{query}', document '{document}': the score is {score}, it must be finite")
            query = query.replace(" ", SPACE)
            lines = (
                f"{query} Q0 {document.replace(' ', SPACE)} {rank} {score:.9g} {tag}\n"
                for rank, (score, document) in enumerate(_in_order(scores), start=1)
            )
            file.write("".join(lines).encode("utf-8"))


def read_run(path: Path) -> dict[str, dict[str, float]]:
    """Read a run: query id -> document id -> score, in the order of the file. The rank column is ignored.

    Raises:
        InputError: A line does not have six columns, a score is not a finite number, a document is repeated for a query (names the line),
            or the file is empty.
    """
    run: dict[str, dict[str, float]] = {}
    for number, line in read_lines(path):
        columns = _trec_columns(line)
        if len(columns) != 6:
            raise InputError(f"{path}:{number}: expected 6 columns (query Q0 document rank score tag), got {len(columns)}")
        query, _, document, _, text, _ = (column.replace(SPACE, " ") for column in columns)
        try:
            score = float(text)
        except ValueError as error:
            raise InputError(f"{path}:{number}: the score must be a number, got '{text}'") from error
        if not math.isfinite(score):
            raise InputError(f"{path}:{number}: the score must be finite, got '{text}'")
        documents = run.setdefault(query, {})
        if document in documents:
            raise InputError(f"{path}:{number}: document '{document}' is repeated for query '{query}'")
        documents[document] = score
    return run


def _in_order(scores: Mapping[str, float]) -> list[tuple[float, str]]:
    values: NDArray[np.float64] = np.fromiter(scores.values(), dtype=np.float64, count=len(scores))
    if np.isnan(values).any():
        document = next(document for document, score in scores.items() if math.isnan(score))
        raise ValueError(f"document '{document}' has the score NaN, which cannot be ranked")
    with np.errstate(over="ignore"):  # trec_eval also has infinity beyond float32
        single = values.astype(np.float32)
    return sorted(zip(single.tolist(), scores, strict=True), reverse=True)


def fits_run(key: str) -> bool:
    """Whether a run can hold an id: it is not empty, has neither tabs nor line ends, and no `SPACE`, which stands for a space."""
    return bool(key) and SPACE not in key and _NOT_IN_RUNS.search(key) is None


def _check_id(key: str, kind: str, path: Path) -> None:
    if not fits_run(check_utf8(key, f"{path}: the {kind} id")):
        raise InputError(f"{path}: the {kind} id {key!r} {UNFIT}")
