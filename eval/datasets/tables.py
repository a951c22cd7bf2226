"""The rows of a published table, whatever its files are: JSON lines, plain or compressed, or Parquet; streamed, with their places.

Columns that nobody asks for are not read from Parquet. This module knows nothing of layouts or of where files come from.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json_lines
from quiver.retrieval.data.corpus import Columns, Judgement, Place, key_of, read_judgements, to_document, to_judgement, to_query
from quiver.retrieval.records import Document, Query

QUERY_COLUMNS = ("query-id", "query_id")
"""What a table of judgements calls the query: mteb's, BEIR's and NanoBEIR's name, and CoIR's."""

DOCUMENT_COLUMNS = ("corpus-id", "corpus_id")
"""What it calls the document."""

GRADE_COLUMN = "score"
"""What it calls the grade."""

# Rows of Parquet held at a time: few enough for documents of a megabyte.
_BATCH = 256


def read_rows(files: Sequence[Path], columns: Sequence[str]) -> Iterator[tuple[Place, Mapping[str, object]]]:
    """The rows of a table in the order of its files.

    Args:
        files: ``.jsonl``, ``.jsonl.gz`` or ``.parquet``.
        columns: What is read of a Parquet row, as far as it is there.

    Raises:
        InputError: A file is missing, empty, damaged or of another kind.
    """
    for file in files:
        if file.suffix == ".parquet":
            yield from _parquet_rows(file, columns)
        elif file.name.endswith((".jsonl", ".jsonl.gz")):
            for number, row in read_json_lines(file):
                yield Place(file, number), row
        else:
            raise InputError(f"{file}: a table is read from .jsonl, .jsonl.gz or .parquet")


def table_documents(files: Sequence[Path], columns: Columns) -> Iterator[tuple[Place, Document]]:
    """The documents of a table.

    Raises:
        InputError: As `read_rows`; or a row is no document, names file and row.
    """
    for place, row in read_rows(files, (*columns.id, columns.text, columns.title)):
        yield place, to_document(place, row, columns)


def table_queries(files: Sequence[Path], columns: Columns) -> Iterator[tuple[Place, Query]]:
    """The queries of a table.

    Raises:
        InputError: As `read_rows`; or a row is no query, names file and row.
    """
    for place, row in read_rows(files, (*columns.id, columns.text)):
        yield place, to_query(place, row, columns)


def table_judgements(files: Sequence[Path], *, graded: bool = True) -> Iterator[Judgement]:
    """The judgements of a table, or of BEIR's and TREC's ``.tsv`` files.

    Args:
        files: The table's files.
        graded: False where a table lists the relevant documents and has no grades, as NanoBEIR's: each is 1.

    Raises:
        InputError: A file cannot be read, or a row is no judgement; names file and row.
    """
    for file in files:
        if file.name.endswith((".tsv", ".tsv.gz")):
            yield from read_judgements(file)
            continue
        for place, row in read_rows([file], (*QUERY_COLUMNS, *DOCUMENT_COLUMNS, GRADE_COLUMN)):
            grade = row.get(GRADE_COLUMN) if graded else 1
            yield to_judgement(place, _key(place, row, QUERY_COLUMNS), _key(place, row, DOCUMENT_COLUMNS), grade)


def _key(place: Place, row: Mapping[str, object], names: Sequence[str]) -> str:
    key = key_of(next((row[name] for name in names if name in row), None))
    if key is None:
        raise InputError(f"{place}: '{names[0]}' (or '{names[1]}') must be a string or an integer")
    return key


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[Place, Mapping[str, object]]]:
    arrow, parquet = _pyarrow()
    if not file.is_file():
        raise InputError(f"{file}: cannot be read (no such file)")
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            there = [name for name in columns if name in table.schema_arrow.names]
            for batch in table.iter_batches(batch_size=_BATCH, columns=there):
                for row in batch.to_pylist():
                    number += 1
                    yield Place(file, number), row
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: damaged Parquet after row {number} ({_first_line(error)}); fetch the file again") from error
    if number == 0:
        raise InputError(f"{file}: the file is empty")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise InputError("reading Parquet needs pyarrow: pip install 'quiver-retrieval[eval]'") from error
