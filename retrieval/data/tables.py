"""Documents of tables: CSV, TSV, Parquet, Arrow, JSON and JSON Lines with fields of any name.

The first row decides which fields are id, title and text, unless they are named. Without a field for the id, documents are numbered from 1.
All other fields become metadata. Every error names file and line (Parquet, Arrow and JSON: row).

CSV is read by Python's csv module, not by pyarrow, which fixes the type of a column by the first block and does not know the line of an
error. `quiver.retrieval.data.entries` decides the type of a column by all of its cells, in a pass of its own.
"""

from __future__ import annotations

import ast
import csv
import datetime
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from decimal import Decimal
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from quiver.encoder.errors import EmptyInputError, InputError
from quiver.encoder.files import SURROGATE_ESCAPE, check_regular, check_row, decoded_lines, read_json_lines, read_whole, warn_once
from quiver.encoder.schema import closest_name
from quiver.retrieval.data.entries import BEIR_FIELDS, STRING, ColumnTypes, EntryPosition, FieldNames, read_cell, to_document, to_metadata
from quiver.retrieval.records import Document

Row: TypeAlias = Mapping[str, object]

ID_FIELDS = ("_id", "id", "doc_id", "docid", "document_id")
"""Fields that hold the id if none is named, in order of preference."""

TEXT_FIELDS = ("text", "contents", "content", "body", "passage", "document")
"""Fields that hold the text if none is named, in order of preference."""

TITLE_FIELD = "title"
"""Field that holds the title if none is named."""

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")  # of the files of a BEIR folder
_STATE = "state.json"
_DESCRIPTIONS = frozenset({"dataset_info.json", _STATE})  # of a saved data set
_ROWS = 256  # of a Parquet or Arrow file in memory at a time
_SEPARATOR_LINE = re.compile("sep=([,;|])")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_SEPARATORS = re.compile(r"[,;|]")

_PLAIN = frozenset({str, int, float, bool, type(None)})


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
        label: What comes before the number of a row without an id, such as ``b.csv`` of ``b.csv#1``; empty for the number alone.
    """

    id: str | None = None
    title: str | None = None
    text: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    by_options: bool = True
    taken_over: bool = False
    lists: tuple[str, ...] = ()
    label: str = ""


BY_NAME = Columns()
"""The fields are found by their usual names."""


class _Chosen(NamedTuple):
    """The fields of a table: of the id (none: numbers), texts, title; whether the title is metadata too."""

    ids: tuple[str, ...]
    texts: tuple[str, ...]
    title: str
    keeps_title: bool = False


class _Table(NamedTuple):
    """A table: starts a pass over its rows, and tells what separates its cells (empty: its values have types)."""

    rows: Callable[[], Iterable[tuple[EntryPosition, Row]]]
    separator: Callable[[], str] = str


def find_jsonl(folder: Path, stem: str) -> Path:
    """Return the path of ``<stem>.jsonl`` or ``<stem>.jsonl.gz`` in a folder; raises InputError if neither exists, or both do."""
    found = [folder / f"{stem}{suffix}" for suffix in JSONL_SUFFIXES if (folder / f"{stem}{suffix}").is_file()]
    if not found:
        raise InputError(f"{folder}: no {stem}.jsonl or {stem}.jsonl.gz in this folder")
    if len(found) > 1:
        raise InputError(f"{folder}: both {found[0].name} and {found[1].name} exist; remove one")
    return found[0]


def read_tables(files: Iterable[Path], columns: Columns = BY_NAME, shown: Path | None = None) -> Iterator[tuple[EntryPosition, Document]]:
    """Stream the documents of tables; running numbers count over all of them.

    Args:
        files: Files with one of the suffixes that `is_table` accepts.
        columns: The fields that make a document.
        shown: Name that positions and warnings have instead of the files' own.

    Raises:
        InputError: While iterating, at the first malformed row. Names file and line; if a field is missing, also the fields that exist.
    """

    def rows_of(file: Path) -> Iterable[tuple[EntryPosition, Row]]:
        rows = _READERS[_suffix(file)](file, columns.names)
        return rows if shown is None else ((EntryPosition(shown, position.number), row) for position, row in rows)

    yield from _documents([_Table(partial(rows_of, file), partial(_separator, file)) for file in files], columns)


def are_numbered(files: Iterable[Path], columns: Columns) -> bool:
    """Whether the rows of tables get numbers as ids, because the first one has no id; raises InputError as `read_tables`."""
    first = next(chain.from_iterable(_READERS[_suffix(file)](file, columns.names) for file in files), None)
    return first is not None and not _choose_fields(first[0], _with_nested(first[1], _nested_names(columns)), columns).ids


def _nested_names(columns: Columns) -> list[str]:
    return [name for name in (columns.id, columns.title, *columns.text) if name is not None and "." in name]


def read_rows(file: Path) -> Iterator[tuple[EntryPosition, Row]]:
    """Stream the rows of one table with their positions; the values of CSV and TSV are strings."""
    check_regular(file)
    return _READERS[_suffix(file)](file, ())


def is_table(path: Path) -> bool:
    """Whether the suffix of a file is that of a table, such as ``.csv`` or ``.jsonl.gz``."""
    return _suffix(path) in _READERS


def tables_of(path: Path) -> Sequence[Path]:
    """The tables of a path: the file itself, or those of a folder that a data set was saved in.

    Of a saved data set, only the files that its description names: beside them lies what its library has cached, such as the rows that a
    filter chose. Raises InputError if it has several splits, or a file that its description names is missing.
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


def table_of(read: Callable[[], Iterable[Row]], source: str, columns: Columns = BY_NAME) -> Iterator[tuple[EntryPosition, Document]]:
    """Make documents of rows from another library, such as those of a data set; raises as `read_tables`.

    ``read`` starts a pass over the rows, field -> value; a second pass is made if ``columns`` has lists. ``source`` is a name for errors.
    """
    yield from _documents([_Table(lambda: _plain_rows(Path(source), read()))], columns)


def _documents(tables: Sequence[_Table], columns: Columns) -> Iterator[tuple[EntryPosition, Document]]:
    """The documents of tables, whose columns have one type each."""
    types: Mapping[str, str] | None = None
    number, missing = 0, [("--list", name) for name in columns.lists]
    missing += [] if columns.title is None else [("--title", columns.title)]
    position: EntryPosition | None = None
    row: Row = {}
    named = _nested_names(columns)
    for table in tables:
        chosen = None
        separator = table.separator()
        for position, row in table.rows():
            row = _with_nested(row, named) if named else row
            number += 1
            if chosen is None:
                chosen = _choose_fields(position, row, columns)
                _tell_guess(position, row, columns, chosen)
            if types is None:
                types = _infer_types(tables, columns, chosen, row)
            missing = [(option, name) for option, name in missing if name not in row] if missing else missing
            values = _typed_values(row, types, columns.lists, separator)
            yield position, _document(position, row, values, chosen, f"{columns.label}#{number}" if columns.label else number)
    if position is not None and missing:
        raise _no_field(position.file, *missing[0], row, columns)


def _infer_types(tables: Sequence[_Table], columns: Columns, chosen: _Chosen, first: Row) -> Mapping[str, str]:
    """Decide the type of each column by the cells of all tables; of tables whose values have types only those that `_split_list` makes."""
    types = ColumnTypes()
    strings = {*[name for name in chosen.ids if name in first][:1], *chosen.texts, chosen.title}.difference(columns.lists)
    for table in tables:
        separator = table.separator()
        for position, row in table.rows() if separator or columns.lists else ():
            names = [name for name in row if name not in strings] if separator else columns.lists
            given = [(name, value if isinstance(value := row.get(name), str) else "") for name in names]
            cells = [
                (name, cell)
                for name, value in given
                for cell in ([part for part, _ in _split_list(value)] or [""] if name in columns.lists else [value])
            ]
            # A list, not a generator: every cell counts.
            if not any([types.add(name, cell, comma=separator == ";", position=position) for name, cell in cells]):  # noqa: C419
                break  # all columns hold strings
    return types.types()


def _typed_values(row: Row, types: Mapping[str, str], lists: Sequence[str], separator: str) -> Row:
    """The values of a row: of a table with types those that it has, but for lists in a text."""
    comma = separator == ";"

    def value_of(name: str, value: object) -> object:
        if not isinstance(value, str) or not (separator or name in lists):
            return value
        kind = types.get(name, STRING)
        if name not in lists:
            return read_cell(value, kind, comma=comma)
        return [text if kind == STRING else read_cell(cell, kind, comma=comma) for cell, text in _split_list(value)] or None

    return {name: value_of(name, value) for name, value in row.items()}


def _with_nested(row: Row, names: Sequence[str]) -> Row:
    """A row with what is called ``object.field`` as a field of its own; of objects in a list a list."""
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

    Items are of one kind: texts, which are numbered from 1; mappings, whose fields are found as `table_of` finds them; or documents. Data
    frames are those of pandas or polars, their columns the fields. What was given is read again at each iteration.

    Example:
        >>> list(GivenDocuments(["owls", "trout"]))
        [Document(id='1', text='owls', title='', metadata=None), Document(id='2', text='trout', title='', metadata=None)]
        >>> list(GivenDocuments([{"id": "a", "text": "owls", "year": 2012}]))
        [Document(id='a', text='owls', title='', metadata={'year': 2012})]
    """

    def __init__(self, given: Any) -> None:
        self._given = given

    def __iter__(self) -> Iterator[Document]:
        return documents_among(rows_of_frame(self._given))

    def numbered(self) -> bool:
        """Whether the ids are numbers, because texts or rows have none."""
        first = next(iter(rows_of_frame(self._given)), None)
        if not isinstance(first, Mapping):
            return isinstance(first, str)
        return not _choose_fields(EntryPosition(Path("documents"), 1), _plain_fields(first, "", set()), Columns(by_options=False)).ids


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
    return (document for _, document in table_of(lambda: checked, "documents", Columns(by_options=False)))


def read_given(given: Any, columns: Columns) -> Iterator[tuple[EntryPosition, Document]]:
    """The documents of rows in memory: a data frame, a pyarrow table, a data set or mappings; raises InputError for something else."""
    is_frame = hasattr(given, "to_batches") or hasattr(given, "collect_schema")
    if isinstance(given, Iterator | Document) or not (isinstance(given, Iterable) or is_frame):
        raise InputError(f"documents: must be a data frame, a data set or a list of mappings, got a {type(given).__name__}")

    def checked() -> Iterator[Row]:
        for row in rows_of_frame(given):
            if not isinstance(row, Mapping):
                raise InputError(f"documents: must be mappings from field to value, got a {type(row).__name__}; pass texts to build_index")
            yield row

    yield from table_of(checked, "documents", columns)


def _of_one_kind(items: Iterable[Any], kind: type) -> Iterator[Any]:
    for number, item in enumerate(items, start=1):
        if not isinstance(item, kind):
            wanted = {Document: "a Document", str: "a string"}.get(kind, "a string, a mapping or a Document")
            raise InputError(f"documents:{number}: must be {wanted}, got {type(item).__name__}")
        yield item


def rows_of_frame(given: Any, what: str = "documents") -> Iterable[Any]:
    """The rows of a data frame or pyarrow table as mappings, without importing their library, or of the only split of a data set.

    Other values are returned unchanged. ``what`` says in errors what the rows are. Raises InputError if a data set has several splits, or a
    mapping holds something else.
    """
    if isinstance(given, Mapping):
        if not given or not all(hasattr(split, "column_names") for split in given.values()):
            raise InputError(f"{what}: must be a list, a data frame or a data set, got a mapping; put it into a list")
        if len(given) > 1:
            raise InputError(f"{what}: a data set with several splits; pass one of {', '.join(map(repr, given))}, such as data['train']")
        rows: Iterable[Any] = next(iter(given.values()))
        return rows
    if hasattr(given, "collect") and hasattr(given, "collect_schema"):  # a lazy frame of polars
        given = given.collect()
    if hasattr(given, "iter_rows") and hasattr(given, "columns"):  # polars
        return given.iter_rows(named=True)  # type: ignore[no-any-return]
    if hasattr(given, "itertuples") and hasattr(given, "columns"):  # pandas
        return _rows_of_pandas(given, what)
    if hasattr(given, "to_batches"):  # a table of pyarrow
        _check_names(what, given.schema.names)
        return chain.from_iterable(batch.to_pylist() for batch in given.to_batches())
    return given  # type: ignore[no-any-return]


def _rows_of_pandas(frame: Any, what: str) -> Iterator[Row]:
    """The rows of a data frame of pandas; levels of its index that have names are fields."""
    _check_names(what, [str(name) for name in frame.columns])
    for level, name in enumerate(frame.index.names):
        values = frame.index.get_level_values(level)
        columns = [str(column) for column in frame.columns]
        if name is None:
            if values.inferred_type not in ("integer", "empty"):
                warn_once(f"{what}: the index of the data frame has no name and is not read; name it with frame.rename_axis('id')")
        elif str(name) not in columns:
            frame = frame.assign(**{str(name): values})
        elif values.tolist() != frame.iloc[:, columns.index(str(name))].tolist():
            raise InputError(f"{what}: '{name}' is a column and the name of the index, with other values; rename one of the two")
    names, cells = [str(name) for name in frame.columns], frame.itertuples(index=False, name=None)
    for row, gaps in zip(cells, frame.isna().itertuples(index=False, name=None), strict=True):
        yield {name: None if gap else value for name, value, gap in zip(names, row, gaps, strict=True)}


def _check_names(what: str, names: Sequence[str]) -> None:
    """Refuse columns of one name, of which only one could be kept."""
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise InputError(f"{what}: the column '{twice}' is there twice; columns need different names")


def _choose_fields(position: EntryPosition, row: Row, columns: Columns) -> _Chosen:
    """Find the fields of a document in the first row; raises InputError if a named field is missing, or none could be the text."""
    for option, name in (("--id", columns.id), *(("--text", name) for name in columns.text)):
        if name is not None and name not in row:
            raise _no_field(position, option, name, row, columns)
    texts = columns.text or _find_usual(row, TEXT_FIELDS)
    if not texts:
        advice = (
            "name the field of the text with --text"
            if columns.by_options
            else "rename the field of the text to 'text', or name it: open_corpus(data, SourceOptions(text='...'))"
        )
        raise InputError(f"{position}: no field 'text'; {_describe_fields('text', row)}; {advice}")
    if columns.id is not None:
        ids: tuple[str, ...] = (columns.id,)
    else:
        found = _find_usual(row, ID_FIELDS, texts)
        ids = BEIR_FIELDS.id if found and found[0] in BEIR_FIELDS.id else found
    title = columns.title or next(iter(_find_usual(row, (TITLE_FIELD,), texts)), TITLE_FIELD)
    return _Chosen(ids, texts, "" if title in texts else title, keeps_title=columns.title is not None or "_id" not in row)


def _find_usual(row: Row, names: Sequence[str], taken: Sequence[str] = ()) -> tuple[str, ...]:
    """The field that has the first of several names, whatever its case; empty if there is none."""
    fields = {field.lower(): field for field in reversed(list(row)) if field not in taken}
    return tuple(fields[name] for name in names if name in fields)[:1]


def _no_field(place: EntryPosition | Path, option: str, name: str, row: Row, columns: Columns) -> InputError:
    """The error for a field that an option names and a row has not."""
    origin = "the index was built or extended with this option, and options given to index add replace all of these; "
    return InputError(f"{place}: no field '{name}' ({option}); {origin if columns.taken_over else ''}{_describe_fields(name, row)}")


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


def _describe_fields(name: str, row: Row) -> str:
    """The fields of a row, the closest to a missing one first."""
    close = closest_name(name, row)
    hint = f"did you mean '{close}'? " if close else ""
    return f"{hint}the fields are {', '.join(row) or 'none'}"


def _document(position: EntryPosition, row: Row, values: Row, chosen: _Chosen, number: str | int) -> Document:
    names = FieldNames(chosen.ids, chosen.texts[0], chosen.title)
    if not chosen.ids and (late := _find_usual(row, ID_FIELDS, chosen.texts)):
        raise InputError(f"{position}: has an id in the field '{late[0]}', but the first row has none; give every row an id")
    given = row if chosen.ids else {**row, "": number}
    if not chosen.ids:
        names = names._replace(id=("",))
    if len(chosen.texts) > 1 or isinstance(row.get(chosen.texts[0]), list):
        given = {**given, chosen.texts[0]: _join_fields(position, row, chosen.texts)}
    document = to_document(position, given, names)
    rest = {name: value for name, value in values.items() if name not in chosen.texts[1:]}
    keeps_title = chosen.keeps_title and document.title
    return document._replace(metadata=to_metadata(position, rest, names._replace(title="") if keeps_title else names))


def _split_list(value: str) -> list[tuple[str, str]]:
    """The values that a text holds: separated, or as a list of JSON or Python, as pandas writes it to CSV.

    Returns:
        Of each value the cell that decides its type, and its text; the cell of a string in a list of JSON or Python is quoted.

    Example:
        >>> _split_list("new; 7"), _split_list("['new', 7, None]"), _split_list("[a], b"), _split_list("[]")
        ([('new', 'new'), ('7', '7')], [('"new"', 'new'), ('7', '7')], [('[a]', '[a]'), ('b', 'b')], [])
    """
    for read in (json.loads, ast.literal_eval) if value.startswith("[") and value.endswith("]") else ():
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = read(value)
            if all(each is None or isinstance(each, str | int) or (isinstance(each, float) and math.isfinite(each)) for each in found):
                return [(json.dumps(each), each if isinstance(each, str) else json.dumps(each)) for each in found if each is not None]
    return [(part, part) for part in map(str.strip, _SEPARATORS.split(value)) if part]


def _join_fields(position: EntryPosition, row: Row, texts: Sequence[str]) -> str | None:
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


def _json_line_rows(file: Path, _names: tuple[str, ...]) -> Iterator[tuple[EntryPosition, Row]]:
    return ((EntryPosition(file, number), row) for number, row in read_json_lines(file))


def _json_rows(file: Path, _names: tuple[str, ...]) -> Iterator[tuple[EntryPosition, Row]]:
    """Read an array of objects, or an object with one array of objects."""
    text = read_whole(file)
    if not text.strip():
        raise EmptyInputError(f"{file}: the file is empty")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: malformed JSON ({error}); a file with one object per line must be named .jsonl") from error
    may_be_broken = SURROGATE_ESCAPE.search(text)
    del text
    arrays = {name: value for name, value in content.items() if isinstance(value, list)} if isinstance(content, dict) else {}
    found = {name: value for name, value in arrays.items() if value and isinstance(value[0], dict)} or arrays
    if len(found) != 1 and not isinstance(content, list):
        several = f"this one has {', '.join(map(repr, found))}: write one of them to a file of its own"
        raise InputError(
            f"{file}: expected an array of objects, or an object with one such array; "
            + (several if found else "write an array that is nested deeper to a file of its own; a file of JSON lines must be named .jsonl")
        )
    for number, row in enumerate(content if isinstance(content, list) else next(iter(found.values())), start=1):
        position = EntryPosition(file, number)
        if not isinstance(row, dict):
            raise InputError(f"{position}: expected a JSON object, got {type(row).__name__}")
        if may_be_broken:
            check_row(row, str(position))
        yield position, row


def _delimited_rows(file: Path, names: tuple[str, ...]) -> Generator[tuple[EntryPosition, Row], None, None]:
    """Read CSV, quoted as RFC 4180 says, or TSV, which has no quoting."""
    csv.field_size_limit((1 << 31) - 1)  # the default, 128 KiB, is less than a long article; the limit belongs to the process
    separator = _separator(file)
    # Excel's first line may name the separator.
    lines = (line for number, line in enumerate(_table_lines(file)) if number or not _SEPARATOR_LINE.fullmatch(line.strip()))
    if separator == "\t":
        reader = csv.reader(lines, csv.excel_tab, quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(lines, delimiter=separator, strict=True)
    header, number = _checked_header(file, names), 0
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
        raise EmptyInputError(f"{file}: the file is empty")


def _table_lines(file: Path) -> Generator[str, None, None]:
    """The lines of CSV or TSV with their ends, also where these are carriage returns alone, as older spreadsheets write them."""
    for _, line in decoded_lines(file, legacy=True):
        # Within quotes, the csv module puts the parts of a line together again.
        yield from _LINE.findall(line) if "\r" in line.removesuffix("\r\n") else (line,)


def _separator(file: Path) -> str:
    """What separates the cells of CSV or TSV; empty for a table of another kind."""
    if not is_delimited(file):
        return ""
    if _suffix(file) == ".tsv":
        return "\t"
    with closing(_table_lines(file)) as lines:
        first = next((line for line in lines if line.strip()), "")
    if named := _SEPARATOR_LINE.fullmatch(first.strip()):
        return named[1]
    first = re.sub('"[^"]*"', "", first)
    return ";" if ";" in first and "," not in first else ","


def _checked_header(position: EntryPosition | Path, row: Sequence[str]) -> list[str]:
    header = [name.strip() or f"column_{number}" for number, name in enumerate(row, start=1)]
    _check_names(str(position), header)
    return header


def _parquet_rows(file: Path, _names: tuple[str, ...]) -> Iterator[tuple[EntryPosition, Row]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            _check_names(str(file), opened.schema_arrow.names)
            yield from _plain_rows(file, (row for batch in opened.iter_batches(batch_size=_ROWS) for row in batch.to_pylist()))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read as Parquet ({_one_line(error)})") from error


def _arrow_rows(file: Path, _names: tuple[str, ...]) -> Iterator[tuple[EntryPosition, Row]]:
    """Read an Arrow stream, as ``save_to_disk`` of the datasets library writes it, or an Arrow file."""
    import pyarrow

    try:
        with closing(pyarrow.memory_map(str(file))) as mapped:
            yield from _plain_rows(file, (row for batch in _arrow_batches(file, mapped) for row in _rows_of(batch)))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read as Arrow ({_one_line(error)})") from error


def _rows_of(batch: Any) -> Iterator[Row]:
    for first in range(0, batch.num_rows, _ROWS):
        yield from batch.slice(first, _ROWS).to_pylist()


def _arrow_batches(file: Path, mapped: Any) -> Iterator[Any]:
    from pyarrow import ipc

    if mapped.read(6) == b"ARROW1":
        opened = ipc.open_file(mapped)
        _check_names(str(file), opened.schema.names)
        yield from (opened.get_batch(number) for number in range(opened.num_record_batches))
    else:
        mapped.seek(0)
        stream = ipc.open_stream(mapped)
        _check_names(str(file), stream.schema.names)
        yield from stream


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _plain_rows(file: Path, rows: Iterable[Row]) -> Iterator[tuple[EntryPosition, Row]]:
    """Rows with values as JSON has them; bytes are left out, because an index cannot hold them."""
    left_out: set[str] = set()
    for number, row in enumerate(rows, start=1):
        position = EntryPosition(file, number)
        try:
            plain = _plain_fields(row, "", left_out)
        except InputError as error:
            raise InputError(f"{position}: {error}") from error
        yield position, plain
        if left_out:
            warn_once(f"{file}: the bytes in {', '.join(sorted(left_out))} are left out")


def _plain_fields(fields: Mapping[Any, object], above: str, left_out: set[str]) -> Row:
    """Fields whose names are strings, as JSON has them; raises InputError if a cell has no field, or two names are the same as strings."""
    found: dict[str, object] = {}
    for key, value in fields.items():
        name = key if type(key) is str else str(key)
        if key is None:
            raise InputError("a value without a field (its name is None); rows of csv.DictReader have that beyond the last column")
        if name in found:
            raise InputError(f"two fields have the name '{above}{name}'; rename one")
        found[name] = value if type(value) in _PLAIN else _plain(value, f"{above}{name}", left_out)
    return found


def _plain(value: object, field: str, left_out: set[str]) -> object:
    """A value as JSON has it: times become ISO 8601 text, decimals numbers, periods, intervals and identifiers text."""
    if isinstance(value, Mapping):
        return _plain_fields(value, f"{field}.", left_out)
    if isinstance(value, np.ndarray) and not value.ndim:
        return _plain(value[()], field, left_out)
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(inner, field, left_out) for inner in value]
    if isinstance(value, bytes | bytearray | memoryview):
        left_out.add(field)
        return None
    if isinstance(value, np.datetime64 | np.timedelta64) and np.isnat(value):
        return None
    if isinstance(value, np.datetime64):
        return str(value)
    if isinstance(value, np.timedelta64):
        return float(value / np.timedelta64(1, "s"))
    return _plain_scalar(value.item() if isinstance(value, np.generic) else value)


def _plain_scalar(value: object) -> object:
    name = type(value).__name__
    if name in ("NAType", "NaTType"):  # of pandas: missing
        return None
    if name in ("Period", "Interval", "UUID"):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
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
