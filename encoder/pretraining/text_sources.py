"""Documents out of files, one after the other: JSON lines, Parquet, plain text, BEIR folders."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home, read_json_lines, read_lines, read_whole
from quiver.encoder.pretraining.sections import SourceSection

JSON_LINES = (".jsonl", ".jsonl.gz")
PLAIN_TEXT = (".txt", ".txt.gz")
PARQUET = ".parquet"
SUFFIXES = (*JSON_LINES, *PLAIN_TEXT, PARQUET)
"""Of the files that are read."""

_ROWS = 512
"""Rows of a Parquet file that are in memory at a time."""


def read_documents(source: SourceSection) -> Iterator[str]:
    """The documents of a source that hold more than white space.

    Raises:
        InputError: There is no such file, it is damaged, not UTF-8 (names the line) or of no known kind, a row has none of the fields, or
            one that is not text; or the folder has no such split.
    """
    path = expand_home(source.path)
    if not path.is_dir():
        yield from _file(path, source)
        return
    if corpus := next((path / f"corpus{suffix}" for suffix in JSON_LINES if (path / f"corpus{suffix}").is_file()), None):
        wanted = None if source.split is None else _judged(path, source.split)
        for number, row in read_json_lines(corpus):
            if wanted is None or row.get("_id") in wanted:
                yield from _joined(row, source.fields, f"{corpus}:{number}")
        return
    if source.split is not None:
        raise InputError(f"{path}: split {source.split!r} is of a BEIR folder, but this one holds no corpus.jsonl; leave it out")
    files = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file())
    if not files:
        raise InputError(f"{path}: holds no file with one of the suffixes {', '.join(SUFFIXES)}")
    for file in files:
        yield from _file(file, source)


def _file(path: Path, source: SourceSection) -> Iterator[str]:
    if not path.is_file():
        raise InputError(f"{path}: there is no such file or folder")
    if path.name.endswith(JSON_LINES):
        for number, row in read_json_lines(path):
            yield from _joined(row, source.fields, f"{path}:{number}")
    elif path.name.endswith(PLAIN_TEXT) and source.lines:
        yield from (line for _, line in read_lines(path))
    elif path.name.endswith(PLAIN_TEXT):
        if (text := read_whole(path)).strip():
            yield text
    elif path.suffix == PARQUET:
        yield from _parquet(path, source.fields)
    else:
        raise InputError(f"{path}: the suffix must be one of {', '.join(SUFFIXES)}")


def _joined(row: Mapping[str, object], fields: Sequence[str], where: str) -> Iterator[str]:
    """A row's fields as one document; none if all that it has of them are null or blank."""
    if row.keys().isdisjoint(fields):
        raise InputError(f"{where}: has none of the fields {', '.join(fields)}; it has {', '.join(map(str, row))}")
    found = [(name, row[name]) for name in fields if row.get(name) is not None]
    for name, value in found:
        if not isinstance(value, str):
            raise InputError(f"{where}: '{name}' must be text, got {type(value).__name__}")
    text = "\n\n".join(str(value) for _, value in found if str(value).strip())
    if text:
        yield text


def _parquet(path: Path, fields: Sequence[str]) -> Iterator[str]:
    arrow, parquet = _imported("pyarrow"), _imported("pyarrow.parquet")
    number = 0
    try:
        with parquet.ParquetFile(path, pre_buffer=False) as table:
            names = table.schema_arrow.names
            if not (columns := [name for name in fields if name in names]):
                raise InputError(f"{path}: has none of the columns {', '.join(fields)}; it has {', '.join(names)}")
            for batch in table.iter_batches(batch_size=_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield from _joined(row, fields, f"{path}:{number}")
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"{path}: damaged Parquet behind row {number} ({reason}); fetch the file again") from error


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError("Parquet needs pyarrow: pip install 'quiver-retrieval[train]'") from error


def _judged(folder: Path, split: str) -> set[str]:
    """Documents that one split judges and no other."""
    splits = {path.stem: path for path in sorted((folder / "qrels").glob("*.tsv"))}
    if split not in splits:
        raise InputError(f"{folder}: has no qrels/{split}.tsv; its splits are {', '.join(splits) or 'none'}")
    judged = {name: _documents(path) for name, path in splits.items()}
    return judged.pop(split).difference(*judged.values())


def _documents(path: Path) -> set[str]:
    """The documents of a qrels file: query, document, grade by tabs, under a header."""
    found = set()
    for number, line in read_lines(path):
        parts = line.split("\t")
        if len(parts) < 3:
            raise InputError(f"{path}:{number}: must read query, document and grade with tabs between them")
        if number > 1:
            found.add(parts[1])
    return found
