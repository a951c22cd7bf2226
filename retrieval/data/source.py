"""Open a corpus by its name: a BEIR folder, tables, or standard input.

Everything that reads a corpus opens it here. A corpus is read as often as it is iterated, one document at a time, and checked while it is
read: every error names file and line.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import with_config

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home
from quiver.encoder.schema import RECORD
from quiver.retrieval.data.corpus import EntryPosition, find_jsonl, unique
from quiver.retrieval.data.tables import Columns, is_table, read_tables
from quiver.retrieval.records import Document

STANDARD_INPUT = "-"
"""Source that reads JSON lines from standard input."""

_BEIR = ("corpus.jsonl", "corpus.jsonl.gz")
# Files that describe a data set saved by the datasets library; its rows are in Arrow files beside them.
_DESCRIPTIONS = frozenset({"dataset_info.json", "state.json"})


@with_config(RECORD)
@dataclass(frozen=True)
class SourceOptions:
    """How documents are made of a source.

    Attributes:
        id: Field of a table that holds the id; None for the first of ``_id``, ``id``, ``doc_id``, ``docid``, ``document_id``, or numbers.
        title: Field that holds the title; None for ``title``.
        text: Fields that hold the text, joined by line feeds; empty for the first of ``text``, ``contents``, ``content``, ``body``,
            ``passage``, ``document``.
        columns: Names of the columns of a CSV or TSV file without a header.
    """

    id: str | None = None
    title: str | None = None
    text: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


DEFAULTS = SourceOptions()
"""Options that fit most sources."""


@dataclass(frozen=True)
class Corpus:
    """An opened corpus; each iteration reads it from the start.

    Attributes:
        source: Its name; paths are absolute.
        options: How documents are made of it.
        read: Function that starts a pass over the documents and their positions.
    """

    source: str
    options: SourceOptions
    read: Callable[[], Iterator[tuple[EntryPosition, Document]]] = field(repr=False)

    def __iter__(self) -> Iterator[Document]:
        """Iterate over the documents.

        Raises:
            InputError: While iterating, at the first malformed entry; at the end, if an id is repeated (names both positions).
        """
        return (document for _, document in unique(self.read))


def open_corpus(source: str | Path, options: SourceOptions = DEFAULTS) -> Corpus:
    """Open a corpus.

    Args:
        source: One of

            - a folder with ``corpus.jsonl[.gz]`` (BEIR's layout);
            - a table with the suffix ``.jsonl``, ``.ndjson``, ``.json``, ``.csv`` or ``.tsv`` (each also with ``.gz``), ``.parquet`` or
              ``.arrow``, or a folder of such tables, which are read in the order of their names;
            - ``-``: JSON lines from standard input, which are kept in a temporary file.
        options: Fields of the documents.

    Raises:
        InputError: The source does not exist or is of no known type. Malformed entries are found while the corpus is iterated.
    """
    if str(source) == STANDARD_INPUT:
        return _standard_input(options)
    path = expand_home(source)
    return Corpus(str(path.absolute()), options, partial(read_tables, _tables(path), _columns(options)))


def _columns(options: SourceOptions) -> Columns:
    return Columns(options.id, options.title, options.text, options.columns)


def _tables(path: Path) -> Sequence[Path]:
    """The tables of a source.

    Raises:
        InputError: There are none.
    """
    if path.is_dir():
        if any((path / name).is_file() for name in _BEIR):
            return [find_jsonl(path, "corpus")]
        if (path / "dataset_dict.json").is_file():
            splits = sorted(inner.name for inner in path.iterdir() if inner.is_dir())
            raise InputError(f"{path}: a data set with several splits; choose one of {', '.join(str(path / name) for name in splits)}")
        found = sorted(file for file in path.iterdir() if is_table(file) and file.is_file() and file.name not in _DESCRIPTIONS)
        if not found:
            raise InputError(f"{path}: no corpus.jsonl[.gz] and no other tables ({_SUFFIXES}) in this folder")
        return found
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if not is_table(path):
        raise InputError(f"{path}: unsupported type; documents are read from {_SUFFIXES}")
    return [path]


_SUFFIXES = ".jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow"


def _standard_input(options: SourceOptions) -> Corpus:
    """Keep standard input in a temporary file, which is removed together with the corpus."""
    folder = tempfile.TemporaryDirectory(prefix="quiver-")
    spool = Path(folder.name) / "standard-input.jsonl"
    with spool.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)

    def read(kept: object = folder) -> Iterator[tuple[EntryPosition, Document]]:
        del kept  # the default argument keeps the folder as long as this function exists
        shown = Path("standard input")
        try:
            for position, document in read_tables([spool], _columns(options)):
                yield EntryPosition(shown, position.number), document
        except InputError as error:
            raise InputError(str(error).replace(str(spool), str(shown))) from error

    return Corpus(STANDARD_INPUT, options, read)
