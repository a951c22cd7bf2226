"""Documents of tables: CSV, TSV, Parquet, Arrow, JSON and JSON Lines with fields of any name.

The first row decides which fields are id, title and text, unless they are named. Without a field for the id, documents are numbered from 1.
All other fields become metadata. Every error names file and line (Parquet and Arrow: row).

CSV is read by Python's csv module, not by pyarrow: pyarrow's streaming reader fixes the type of a column by the first block, fails at a
later value of another type, and does not know the line of an error. Here each value has its own type, as in JSON Lines; only numbers and
dates as spreadsheets write them are told by their whole column, see `_cells`.
"""

from __future__ import annotations

import ast
import csv
import datetime
import difflib
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from decimal import Decimal
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from quiver.encoder.errors import InputError
from quiver.encoder.files import (
    SURROGATE_ESCAPE,
    check_regular,
    check_row,
    decoded_lines,
    read_json_lines,
    read_whole,
    warn_once,
)
from quiver.retrieval.data.corpus import BEIR_FIELDS, EntryPosition, FieldNames, to_document, to_metadata
from quiver.retrieval.records import Document

logger = logging.getLogger(__name__)

Row: TypeAlias = Mapping[str, object]
Cell: TypeAlias = Callable[[object], object]  # reads the text of a cell

ID_FIELDS = ("_id", "id", "doc_id", "docid", "document_id")
"""Fields that hold the id if none is named, in order of preference."""

TEXT_FIELDS = ("text", "contents", "content", "body", "passage", "document")
"""Fields that hold the text if none is named, in order of preference."""

TITLE_FIELD = "title"
"""Field that holds the title if none is named."""

_STATE = "state.json"
_DESCRIPTIONS = frozenset({"dataset_info.json", _STATE})  # of a saved data set
_ROWS = 256  # of a Parquet or Arrow file in memory at a time
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)\.[0-9]+(?:[eE][+-]?[0-9]+)?")
_DECIMAL_COMMA = re.compile(r"-?(?:0|[1-9][0-9]*|[1-9][0-9]{0,2}(?:\.[0-9]{3})+)(?:,[0-9]+)?")
_DECIMAL_POINT = re.compile(r"-?(?:0|[1-9][0-9]*|[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?:\.[0-9]+)?")
_CURRENCIES = "$€£¥"
_LOOKED_AT = 100  # rows that decide whether the cells of a table are looked at before it is read
_TIME = r"(?:(?P<clock>[ T])(?P<hour>[0-9]{1,2})(?P<rest>:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?(?:Z|[+-][0-9]{2}:?[0-9]{2})?))?"
_DAY_FIRST = re.compile(r"(?P<day>[0-9]{1,2})(?P<sign>[./-])(?P<month>[0-9]{1,2})(?P=sign)(?P<year>[12][0-9]{3})" + _TIME)
_YEAR_FIRST = re.compile(r"(?P<year>[12][0-9]{3})(?P<sign>[/-])(?P<month>[0-9]{1,2})(?P=sign)(?P<day>[0-9]{1,2})" + _TIME)
_SEPARATOR_LINE = re.compile("sep=([,;|])")
_SEPARATORS = re.compile(r"[,;|]")
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


class Columns(NamedTuple):
    """The fields of a table that make a document.

    Attributes:
        id: Field of the id; None for the first of `ID_FIELDS`, in any case, or running numbers.
        title: Field of the title; None for ``title``, if there is one.
        text: Fields of the text, joined by line feeds; empty for the first of `TEXT_FIELDS`.
        names: Names of the columns of a CSV or TSV file without a header; empty if the first line is the header.
        by_options: Whether options choose these fields, which messages then name; otherwise the caller renames its fields.
        taken_over: Whether the options are those of another source of the same index, which errors then say.
        lists: Fields whose texts hold several values, separated by commas, semicolons or vertical bars.
    """

    id: str | None = None
    title: str | None = None
    text: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    by_options: bool = True
    taken_over: bool = False
    lists: tuple[str, ...] = ()


BY_NAME = Columns()
"""The fields are found by their usual names."""


class _Chosen(NamedTuple):
    """The fields of a table: of the id (none: numbers), texts, title, lists; how cells are read; whether the title is metadata too."""

    ids: tuple[str, ...]
    texts: tuple[str, ...]
    title: str
    cells: Mapping[str, Cell] | None = None
    lists: tuple[str, ...] = ()
    keeps_title: bool = False


def read_tables(files: Iterable[Path], columns: Columns = BY_NAME, shown: Path | None = None) -> Iterator[tuple[EntryPosition, Document]]:
    """Stream the documents of tables; running numbers count over all of them.

    Args:
        files: Files with one of the suffixes that `is_table` accepts.
        columns: The fields that make a document.
        shown: Name that positions and warnings have instead of the files' own.

    Raises:
        InputError: While iterating, at the first malformed row. Names file and line; if a field is missing, also the fields that exist.
    """
    opened = ((_cells(file, columns.names), _shown_as(shown, _READERS[_suffix(file)](file, columns.names))) for file in files)
    yield from _documents(opened, columns)


def _shown_as(shown: Path | None, rows: Iterable[tuple[EntryPosition, Row]]) -> Iterable[tuple[EntryPosition, Row]]:
    return rows if shown is None else ((EntryPosition(shown, position.number), row) for position, row in rows)


def read_rows(file: Path) -> Iterator[tuple[EntryPosition, Row]]:
    """Stream the rows of one table with their positions; the values of CSV and TSV are strings.

    Raises:
        InputError: The file is a pipe or a device; while iterating, at the first malformed row.
    """
    check_regular(file)
    return _READERS[_suffix(file)](file, ())


def is_table(path: Path) -> bool:
    """Whether the suffix of a file is that of a table, such as ``.csv`` or ``.jsonl.gz``."""
    return _suffix(path) in _READERS


def tables_of(path: Path) -> Sequence[Path]:
    """The tables of a path: the file itself, or those of a folder that a data set was saved in.

    Of a saved data set, only the files that its description names: beside them lies what its library has cached, such as the rows that a
    filter chose.

    Raises:
        InputError: The data set has several splits, or a file that its description names is missing.
    """
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = sorted(inner.name for inner in path.iterdir() if inner.is_dir())
        if len(splits) != 1:
            raise InputError(f"{path}: a data set with several splits; choose one of {', '.join(str(path / name) for name in splits)}")
        path = path / splits[0]
    if (named := _files_of_data_set(path)) is not None:
        if missing := next((file for file in named if not file.is_file()), None):
            raise InputError(f"{missing}: no such file; {path / _STATE} names it as a part of the data set")
        return named
    return sorted(file for file in path.iterdir() if is_table(file) and file.is_file() and file.name not in _DESCRIPTIONS)


def _files_of_data_set(path: Path) -> Sequence[Path] | None:
    """The files of a data set that `datasets` has saved, in its order; None for another folder."""
    try:
        return [path / each["filename"] for each in json.loads((path / _STATE).read_text(encoding="utf-8"))["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_delimited(path: Path) -> bool:
    """Whether the suffix of a file is that of CSV or TSV, whose columns have names only if the first line is a header."""
    return _suffix(path) in _CELLS


def table_of(rows: Iterable[Row], source: str, columns: Columns = BY_NAME) -> Iterator[tuple[EntryPosition, Document]]:
    """Make documents of rows from another library, such as those of a data set.

    Args:
        rows: Field -> value.
        source: Name for errors.
        columns: The fields that make a document.

    Raises:
        InputError: As `read_tables`.
    """
    yield from _documents([(None, _plain_rows(Path(source), rows))], columns)


def _documents(
    tables: Iterable[tuple[Mapping[str, Cell] | None, Iterable[tuple[EntryPosition, Row]]]], columns: Columns
) -> Iterator[tuple[EntryPosition, Document]]:
    """The documents of tables, each with how its cells are read; None for a table of typed values."""
    number, missing = 0, [("--list", name) for name in columns.lists]
    missing += [] if columns.title is None else [("--title", columns.title)]
    position: EntryPosition | None = None
    row: Row = {}
    named = [name for name in (columns.id, columns.title, *columns.text) if name is not None and "." in name]
    for cells, rows in tables:
        chosen = None
        for position, row in rows if not named else ((position, _with_nested(row, named)) for position, row in rows):
            number += 1
            if chosen is None:
                chosen = _choose(position, row, columns)._replace(cells=cells)
                _tell_guess(position, row, columns, chosen)
            missing = [(option, name) for option, name in missing if name not in row] if missing else missing
            yield position, _document(position, row, chosen, number)
    if position is not None and missing:
        raise _no_field(position.file, *missing[0], row, columns)


def _with_nested(row: Row, names: Sequence[str]) -> Row:
    """A row with what is called ``object.field`` as a field of its own; of objects in a list a list.

    Example:
        >>> _with_nested({"meta": {"title": "A", "year": 7}, "parts": [{"body": "x"}, {"body": "y"}]}, ["meta.title", "parts.body"])
        {'meta': {'year': 7}, 'parts': [{}, {}], 'meta.title': 'A', 'parts.body': ['x', 'y']}
    """
    taken = dict(row)
    for name in names:
        top, *path = name.split(".")
        if name in row or top not in row:
            continue
        found: list[object] = []
        rest = _without(taken[top], path, found)
        if found:
            taken[top] = rest
            taken[name] = found if isinstance(row[top], list) or len(found) > 1 else found[0]
    return taken


def _without(value: object, path: Sequence[str], found: list[object]) -> object:
    """A value without what is at a path of it, which is added to ``found``."""
    if isinstance(value, list):
        return [_without(each, path, found) for each in value]
    if not isinstance(value, Mapping) or path[0] not in value:
        return value
    if len(path) > 1:
        return {**value, path[0]: _without(value[path[0]], path[1:], found)}
    inner = value[path[0]]
    found += inner if isinstance(inner, list) else [inner]
    return {name: each for name, each in value.items() if name != path[0]}


class GivenDocuments:
    """Documents made of what Python code has: texts, rows of any fields, a data frame, or a data set of the datasets library.

    Args:
        given: Items of one kind: texts, which are numbered from 1; mappings, whose fields are found as `table_of` finds them; or documents.
            Or a data frame of pandas or polars, whose columns are the fields. It is read again at each iteration.

    Example:
        >>> list(GivenDocuments(["owls", "trout"]))
        [Document(id='1', text='owls', title='', metadata=None), Document(id='2', text='trout', title='', metadata=None)]
        >>> list(GivenDocuments([{"id": "a", "text": "owls", "year": 2012}]))
        [Document(id='a', text='owls', title='', metadata={'year': 2012})]
    """

    def __init__(self, given: Any) -> None:
        self._given = given

    def __iter__(self) -> Iterator[Document]:
        """Iterate over the documents.

        Raises:
            InputError: While iterating: an item is neither text, mapping nor document, or of another kind than the first, or as `table_of`.
        """
        return documents_among(rows_of_frame(self._given))


def documents_among(items: Iterable[Any]) -> Iterator[Document]:
    """Make documents of items of one kind; see `GivenDocuments`."""
    stream = iter(items)
    first = next(stream, None)
    if first is None:
        return iter(())
    kind = Document if isinstance(first, Document) else str if isinstance(first, str) else Mapping
    checked = _of_one_kind(chain([first], stream), kind)
    if kind is Document:
        return checked
    if kind is str:
        return (Document(str(number), text) for number, text in enumerate(checked, start=1))
    return (document for _, document in table_of(checked, "documents", Columns(by_options=False)))


def read_given(given: Any, columns: Columns) -> Iterator[tuple[EntryPosition, Document]]:
    """The documents of rows in memory: a data frame, a pyarrow table, a data set or mappings.

    Raises:
        InputError: They are something else, or as `table_of`.
    """
    if isinstance(given, Iterator | Document) or (not isinstance(given, Iterable) and not hasattr(given, "to_batches")):
        raise InputError(f"documents: must be a data frame, a data set or a list of mappings, got a {type(given).__name__}")

    def checked() -> Iterator[Row]:
        for row in rows_of_frame(given):
            if not isinstance(row, Mapping):
                raise InputError(f"documents: must be mappings from field to value, got a {type(row).__name__}; pass texts to build_index")
            yield row

    yield from table_of(checked(), "documents", columns)


def _of_one_kind(items: Iterable[Any], kind: type) -> Iterator[Any]:
    for number, item in enumerate(items, start=1):
        if not isinstance(item, kind):
            wanted = {Document: "a Document", str: "a string"}.get(kind, "a string, a mapping or a Document")
            raise InputError(f"documents:{number}: must be {wanted}, got {type(item).__name__}")
        yield item


def rows_of_frame(given: Any, what: str = "documents") -> Iterable[Any]:
    """The rows of a data frame or pyarrow table as mappings, without importing their library, or of the only split of a data set.

    Other values are returned unchanged.

    Args:
        given: The data frame, table or data set.
        what: What the rows are, for errors.

    Raises:
        InputError: A data set has several splits, or a mapping holds something else.
    """
    if isinstance(given, Mapping):
        if not given or not all(hasattr(split, "column_names") for split in given.values()):
            raise InputError(f"{what}: must be a list, a data frame or a data set, got a mapping; put it into a list")
        if len(given) > 1:
            raise InputError(f"{what}: a data set with several splits; pass one of {', '.join(map(repr, given))}, such as data['train']")
        rows: Iterable[Any] = next(iter(given.values()))
        return rows
    if hasattr(given, "iter_rows") and hasattr(given, "columns"):  # polars
        return given.iter_rows(named=True)  # type: ignore[no-any-return]
    if hasattr(given, "itertuples") and hasattr(given, "columns"):  # pandas
        names, cells = [str(name) for name in given.columns], given.itertuples(index=False, name=None)
        return (
            {name: None if gap else _without_array(value) for name, value, gap in zip(names, row, gaps, strict=True)}
            for row, gaps in zip(cells, given.isna().itertuples(index=False, name=None), strict=True)
        )
    if hasattr(given, "to_batches"):  # a table of pyarrow
        return chain.from_iterable(batch.to_pylist() for batch in given.to_batches())
    return given  # type: ignore[no-any-return]


def _without_array(value: Any) -> Any:
    """A list for an array, as which pandas reads lists from Parquet; other values unchanged."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def _choose(position: EntryPosition, row: Row, columns: Columns) -> _Chosen:
    """Find the fields of a document in the first row.

    Raises:
        InputError: A named field is missing, or there is no field that could be the text.
    """
    for option, name in (("--id", columns.id), *(("--text", name) for name in columns.text)):
        if name is not None and name not in row:
            raise _no_field(position, option, name, row, columns)
    texts = columns.text or _usual(row, TEXT_FIELDS)
    if not texts:
        advice = (
            "name the field of the text with --text"
            if columns.by_options
            else "rename the field of the text to 'text', or name it: open_corpus(data, SourceOptions(text='...'))"
        )
        raise InputError(f"{position}: no field 'text'; {_known('text', row)}; {advice}")
    if columns.id is not None:
        ids: tuple[str, ...] = (columns.id,)
    else:
        found = _usual(row, ID_FIELDS, texts)
        ids = BEIR_FIELDS.id if found and found[0] in BEIR_FIELDS.id else found
    title = columns.title or next(iter(_usual(row, (TITLE_FIELD,), texts)), TITLE_FIELD)
    return _Chosen(
        ids, texts, "" if title in texts else title, lists=columns.lists, keeps_title=columns.title is not None or "_id" not in row
    )


def _usual(row: Row, names: Sequence[str], taken: Sequence[str] = ()) -> tuple[str, ...]:
    """The field that has the first of several names, whatever its case; empty if there is none."""
    fields = {field.lower(): field for field in reversed(list(row)) if field not in taken}
    return tuple(fields[name] for name in names if name in fields)[:1]


def _no_field(place: EntryPosition | Path, option: str, name: str, row: Row, columns: Columns) -> InputError:
    """The error for a field that an option names and a row has not."""
    origin = "the index was built or extended with this option, and options given to index add replace all of these; "
    return InputError(f"{place}: no field '{name}' ({option}); {origin if columns.taken_over else ''}{_known(name, row)}")


def _tell_guess(position: EntryPosition, row: Row, columns: Columns, chosen: _Chosen) -> None:
    """Say which fields make a document, where the first row has others that could have been meant."""
    title = chosen.title if chosen.title in row else ""
    others = [name for name in row if name not in (*chosen.ids, *chosen.texts, title)]
    standard = bool(chosen.ids or columns.id) and bool(title or chosen.texts[0] == "text")
    if standard or not others or (columns.id and columns.text):
        return
    made = f"id: {chosen.ids[0] if chosen.ids else 'number of the row'}, title: {title or 'none'}, text: {', '.join(chosen.texts)}"
    how = "choose with --id, --title and --text" if columns.by_options else "choose with open_corpus(data, SourceOptions(...))"
    warn_once(f"{position.file}: {made}; other fields: {', '.join(others)} ({how})")


def _known(name: str, row: Row) -> str:
    """The fields of a row, the closest to a missing one first."""
    fields = {field.lower(): field for field in row}
    close = difflib.get_close_matches(name.lower(), list(fields), n=1)
    hint = f"did you mean '{fields[close[0]]}'? " if close else ""
    return f"{hint}the fields are {', '.join(row) or 'none'}"


def _document(position: EntryPosition, row: Row, chosen: _Chosen, number: int) -> Document:
    names = FieldNames(chosen.ids, chosen.texts[0], chosen.title)
    if not chosen.ids and (late := _usual(row, ID_FIELDS, chosen.texts)):
        raise InputError(f"{position}: has an id in the field '{late[0]}', but the first row has none; give every row an id")
    given = row if chosen.ids else {**row, "": number}
    if not chosen.ids:
        names = names._replace(id=("",))
    if len(chosen.texts) > 1 or isinstance(row.get(chosen.texts[0]), list):
        given = {**given, chosen.texts[0]: _joined(position, row, chosen.texts)}
    document = to_document(position, given, names)
    rest = {
        name: _listed(value) if name in chosen.lists else value if chosen.cells is None else chosen.cells.get(name, _typed)(value)
        for name, value in row.items()
        if name not in chosen.texts[1:]
    }
    return document._replace(
        metadata=to_metadata(position, rest, names._replace(title="") if chosen.keeps_title and document.title else names)
    )


def _listed(value: object) -> object:
    """The values that a text holds, none if it is blank: separated, or as a list of JSON or Python, as pandas writes it to CSV.

    Other values are returned unchanged.

    Example:
        >>> _listed("new; sale"), _listed('["new", 7]'), _listed("['new', None]"), _listed("[a], b"), _listed("[]")
        (['new', 'sale'], ['new', 7], ['new', None], ['[a]', 'b'], None)
    """
    if not isinstance(value, str):
        return value
    for read in (json.loads, ast.literal_eval) if value.startswith("[") and value.endswith("]") else ():
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = read(value)
            if all(each is None or isinstance(each, str | int) or (isinstance(each, float) and math.isfinite(each)) for each in found):
                return found or None
    return [_typed(part) for part in map(str.strip, _SEPARATORS.split(value)) if part] or None


def _joined(position: EntryPosition, row: Row, texts: Sequence[str]) -> str | None:
    """Join the texts of several fields, and of lists of texts, by line feeds; None if all are missing."""
    parts: list[str] = []
    for name in texts:
        value = row.get(name)
        several: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, str) for each in several):
            raise InputError(f"{position}: '{name}' must be a string or a list of strings")
        parts += several
    present = any(row.get(name) is not None for name in texts)
    return "\n".join(part for part in parts if part) if present else None


def _suffix(path: Path) -> str:
    """The suffix of a table without ``.gz``; Parquet and Arrow are not read through gzip."""
    name = path.name.lower()
    if not name.endswith(".gz"):
        return path.suffix.lower()
    inner = Path(name.removesuffix(".gz")).suffix
    return "" if inner in (".parquet", ".arrow") else inner


def _json_line_rows(file: Path, names: tuple[str, ...]) -> Iterator[tuple[EntryPosition, Row]]:
    del names
    return ((EntryPosition(file, number), row) for number, row in read_json_lines(file))


def _json_rows(file: Path, names: tuple[str, ...]) -> Iterator[tuple[EntryPosition, Row]]:
    """Read an array of objects, or an object whose only list holds them; each object's line is that of its first character.

    Raises:
        InputError: The file is not JSON or has another form.
    """
    del names
    text = read_whole(file)
    start = _array_start(file, text)
    decoder, line, counted = json.JSONDecoder(), 1, 0
    place = _past_space(text, start + 1)
    while text[place : place + 1] != "]":
        line, counted = line + text.count("\n", counted, place), place
        position = EntryPosition(file, line)
        try:
            row, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{position}: malformed JSON ({error})") from error
        if not isinstance(row, dict):
            raise InputError(f"{position}: expected a JSON object, got {type(row).__name__}")
        if SURROGATE_ESCAPE.search(text, counted, place):
            check_row(row, str(position))
        yield position, row
        place = _past_space(text, place)
        if text[place : place + 1] == ",":
            place = _past_space(text, place + 1)
        elif text[place : place + 1] != "]":
            raise InputError(f"{position}: malformed JSON (expected ',' or ']' after this object)")


def _array_start(file: Path, text: str) -> int:
    """The place of the bracket that opens the array of documents."""
    place = _past_space(text, 0)
    if text[place : place + 1] == "[":
        return place
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: malformed JSON ({error}); a file with one object per line must be named .jsonl") from error
    lists = [name for name, value in whole.items() if isinstance(value, list)] if isinstance(whole, dict) else []
    if len(lists) != 1:
        raise InputError(
            f"{file}: expected an array of objects, or an object with one such array; a file of JSON lines must be named .jsonl"
        )
    key = re.compile(re.escape(json.dumps(lists[0], ensure_ascii=False)) + r"\s*:\s*\[")
    found = key.search(text)
    if found is None:
        raise InputError(f"{file}: expected an array of objects; write the array '{lists[0]}' to a file of its own")
    return found.end() - 1


def _past_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place


def _delimited_rows(file: Path, names: tuple[str, ...]) -> Generator[tuple[EntryPosition, Row], None, None]:
    """Read CSV, quoted as RFC 4180 says, or TSV, which has no quoting.

    Raises:
        InputError: A row has another number of columns than the header, a column's name is repeated, or the file is no text or empty.
    """
    csv.field_size_limit((1 << 31) - 1)  # the default, 128 KiB, is less than a long article; the limit belongs to the process
    separator = _separator(file)
    # Excel's first line may name the separator.
    lines = (line for number, line in decoded_lines(file, legacy=True) if number > 1 or not _SEPARATOR_LINE.fullmatch(line.strip()))
    if separator == "\t":
        reader = csv.reader(lines, csv.excel_tab, quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(lines, delimiter=separator, strict=True)
    header, number = list(names), 0
    try:
        for row in reader:
            position, number = EntryPosition(file, number + 1), reader.line_num
            if not row:
                continue
            if not header:
                header = _checked_header(position, row)
            elif len(row) != len(header):
                raise InputError(f"{position}: expected {len(header)} columns ({', '.join(header)}), got {len(row)}")
            else:
                yield position, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise InputError(f"{file}:{number + 1}: malformed CSV ({error})") from error
    if not number:
        raise InputError(f"{file}: the file is empty")


def _separator(file: Path) -> str:
    """What separates the cells of CSV or TSV; empty for a table of another kind."""
    if not is_delimited(file):
        return ""
    if _suffix(file) == ".tsv":
        return "\t"
    with closing(decoded_lines(file, legacy=True)) as lines:
        first = next((line for _, line in lines if line.strip()), "")
    if named := _SEPARATOR_LINE.fullmatch(first.strip()):
        return named[1]
    first = re.sub('"[^"]*"', "", first)
    return ";" if ";" in first and "," not in first else ","


def _checked_header(position: EntryPosition, row: Sequence[str]) -> list[str]:
    header = [name.strip() or f"column_{number}" for number, name in enumerate(row, start=1)]
    for name in header:
        if header.count(name) > 1:
            raise InputError(f"{position}: the column '{name}' is there twice; columns need different names")
    return header


def _cells(file: Path, names: tuple[str, ...]) -> Mapping[str, Cell] | None:
    """How cells of CSV or TSV are read, by column; columns that are not named by `_typed`. None for a table of typed values.

    A column of amounts in one currency, such as ``$1,299.50``, holds numbers, and one of dates such as ``2021/6/1`` those of ISO 8601,
    which sort. Spreadsheets separate cells by semicolons where a comma begins decimals: there a column of numbers such as ``1.250,50``
    holds numbers, and dates may have the day first. All cells of a column decide: if one of the first rows looks so, the file is read
    once more.
    """
    separator = _separator(file)
    if not separator:
        return None
    comma = separator == ";"
    with closing(_delimited_rows(file, names)) as rows:
        columns = _candidates((row for _, row in islice(rows, _LOOKED_AT)), comma=comma)
    if columns:
        with closing(_delimited_rows(file, names)) as rows:
            columns = _candidates((row for _, row in rows), comma=comma, among=columns)
    return columns


def _candidates(rows: Iterable[Row], *, comma: bool, among: Collection[str] | None = None) -> Mapping[str, Cell]:
    """The columns whose cells are all amounts, numbers with a decimal comma, or dates that are not those of ISO 8601; how they are read.

    Args:
        rows: The rows.
        comma: Whether a comma begins decimals, and dates may have the day first.
        among: Columns that are looked at; None for all.
    """
    number = _DECIMAL_COMMA if comma else _DECIMAL_POINT
    signs: dict[str, set[str]] = {}
    numbers: dict[str, bool] = {}  # whether one of the cells is no plain number
    dates: dict[str, bool] = {}  # whether one of the cells is another date than that of ISO 8601
    iso = partial(_iso_date, day_first=comma)
    for count, row in enumerate(rows):
        if not count:
            numbers = dict.fromkeys(row if among is None else among, False)
            dates, signs = numbers.copy(), {name: set() for name in numbers}
        for name in [name for name in signs if row[name] and str(row[name]).strip()]:
            cell = str(row[name]).strip()
            sign, bare = _split_sign(cell)
            signs[name].add(sign)
            if name in numbers and (not number.fullmatch(bare) or len(signs[name]) > 1):
                del numbers[name]
            elif name in numbers:
                numbers[name] = numbers[name] or bool(sign) or (comma and "," in bare)
            if name in dates:
                date = iso(cell)
                dates[name] |= date != cell
                if date is None:
                    del dates[name]
    read = partial(_amount, comma=comma)
    found: dict[str, Cell] = dict.fromkeys((name for name, other in numbers.items() if other), read)
    return found | dict.fromkeys((name for name, other in dates.items() if other), iso)


def _split_sign(cell: str) -> tuple[str, str]:
    """The sign of a currency before or behind a number, and the number."""
    bare = cell.strip(_CURRENCIES).strip()
    return cell.replace(bare, "", 1).strip(), bare


def _amount(value: object, *, comma: bool) -> object:
    """A number without the sign of its currency; missing if it is blank.

    Example:
        >>> [_amount(cell, comma=True) for cell in ("0,5", "1.250", "-1.250,50 €", "")]
        [0.5, 1250.0, -1250.5, None]
        >>> _amount("$1,299.50", comma=False)
        1299.5
    """
    _, bare = _split_sign(str(value).strip())
    thousands, point = (".", ",") if comma else (",", ".")
    return float(bare.replace(thousands, "").replace(point, ".")) if bare else None


def _iso_date(value: object, *, day_first: bool) -> object:
    """A date as that of ISO 8601; None if it is blank or no such date.

    Example:
        >>> [_iso_date(cell, day_first=False) for cell in ("2017/2/9 8:30", "2017-02-19", "2017-02-31", "9/2/2017", "2017/2/9 8:30 PM")]
        ['2017-02-09 08:30', '2017-02-19', None, None, None]
        >>> [_iso_date(cell, day_first=True) for cell in ("9.2.2017", "19/02/2017 08:30", "31.02.2017", "2017-02-19")]
        ['2017-02-09', '2017-02-19 08:30', None, '2017-02-19']
    """
    text = str(value).strip()
    date = _YEAR_FIRST.fullmatch(text) or (_DAY_FIRST.fullmatch(text) if day_first else None)
    with suppress(ValueError):  # no such day
        time = f"{date['clock']}{date['hour'].zfill(2)}{date['rest']}" if date and date["hour"] else ""
        return date and f"{datetime.date(int(date['year']), int(date['month']), int(date['day']))}{time}"
    return None


def _typed(value: object) -> object:
    """The value of a cell: missing, an integer, a number, a boolean or a string; leading zeros make a string.

    Example:
        >>> [_typed(cell) for cell in ("", "12", "-0.5", "true", "007", "1e5", "x", "0,5")]
        [None, 12, -0.5, True, '007', '1e5', 'x', '0,5']
    """
    if not isinstance(value, str) or not value:
        return None
    if value in _BOOLEANS:
        return _BOOLEANS[value]
    if _INTEGER.fullmatch(value):
        return int(value)
    return float(value) if _NUMBER.fullmatch(value) else value


def _parquet_rows(file: Path, names: tuple[str, ...]) -> Iterator[tuple[EntryPosition, Row]]:
    del names
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            yield from _plain_rows(file, (row for batch in opened.iter_batches(batch_size=_ROWS) for row in batch.to_pylist()))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read as Parquet ({_one_line(error)})") from error


def _arrow_rows(file: Path, names: tuple[str, ...]) -> Iterator[tuple[EntryPosition, Row]]:
    """Read an Arrow stream, as ``save_to_disk`` of the datasets library writes it, or an Arrow file."""
    del names
    import pyarrow

    try:
        with closing(pyarrow.memory_map(str(file))) as mapped:
            yield from _plain_rows(file, (row for batch in _arrow_batches(mapped) for row in _rows_of(batch)))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read as Arrow ({_one_line(error)})") from error


def _rows_of(batch: Any) -> Iterator[Row]:
    for first in range(0, batch.num_rows, _ROWS):
        yield from batch.slice(first, _ROWS).to_pylist()


def _arrow_batches(mapped: Any) -> Iterator[Any]:
    from pyarrow import ipc

    if mapped.read(6) == b"ARROW1":
        opened = ipc.open_file(mapped)
        yield from (opened.get_batch(number) for number in range(opened.num_record_batches))
    else:
        mapped.seek(0)
        yield from ipc.open_stream(mapped)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _plain_rows(file: Path, rows: Iterable[Row]) -> Iterator[tuple[EntryPosition, Row]]:
    """Rows with values as JSON has them; bytes are left out, because an index cannot hold them."""
    left_out: set[str] = set()
    for number, row in enumerate(rows, start=1):
        yield EntryPosition(file, number), {name: _plain(value, name, left_out) for name, value in row.items()}
        if number == 1 and left_out:
            logger.warning("%s: the bytes in %s are left out", file, ", ".join(sorted(left_out)))


def _plain(value: object, field: str, left_out: set[str]) -> object:
    """A value as JSON has it: times become ISO 8601 text, decimals numbers."""
    if isinstance(value, Mapping):
        return {name: _plain(inner, f"{field}.{name}", left_out) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, field, left_out) for inner in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes):
        left_out.add(field)
        return None
    return value


_READERS: Mapping[str, Callable[[Path, tuple[str, ...]], Iterator[tuple[EntryPosition, Row]]]] = {
    ".jsonl": _json_line_rows,
    ".ndjson": _json_line_rows,
    ".json": _json_rows,
    ".csv": _delimited_rows,
    ".tsv": _delimited_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
}

_CELLS = frozenset({".csv", ".tsv"})  # tables without types
