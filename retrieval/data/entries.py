"""Entries of files: documents and queries made of rows, with checked ids and fields; ids that are used twice are found.

Every error about an entry begins with its position, ``file:line``.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from quiver.encoder.errors import InputError, check_utf8
from quiver.retrieval.records import Document, Metadata, Query, Value

_MAX_INTEGER = 2**53  # beyond it, floats skip integers


Identified = TypeVar("Identified", Document, Query)


class EntryPosition(NamedTuple):
    """Position of an entry: its file and line (in a table: row), from 1."""

    file: Path
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"

    def seen_from(self, other: EntryPosition) -> str:
        """Describe this position for an error that begins with another position: ``on line 3``."""
        if self.file != other.file:
            return f"in {self}"
        return f"{'in row' if self.file.name.removesuffix('.gz').endswith(('.parquet', '.arrow', '.json')) else 'on line'} {self.number}"


Position = TypeVar("Position", EntryPosition, None)


class FieldNames(NamedTuple):
    """Names of the fields of documents or queries in a file; those of the id in order of preference."""

    id: tuple[str, ...] = ("_id", "id")
    text: str = "text"
    title: str = "title"


BEIR_FIELDS = FieldNames()
"""Field names of BEIR files."""


def to_document(position: EntryPosition, row: Mapping[str, object], columns: FieldNames = BEIR_FIELDS) -> Document:
    """Make a document of a row, without metadata. The text may be empty, the id may be an integer.

    Raises:
        InputError: A field is missing or has the wrong type, or the id is blank.
    """
    key = id_of_row(position, row, columns)
    title = row.get(columns.title)
    if title is not None and not isinstance(title, str):
        raise InputError(f"{position}: '{columns.title}' must be a string, got {show_value(title)}")
    return Document(key, text_of_row(position, row, columns), check_utf8(title or "", f"{position}: '{columns.title}'"))


def to_metadata(position: EntryPosition, row: Mapping[str, object], columns: FieldNames = BEIR_FIELDS) -> Metadata | None:
    """Make the metadata of a row: all fields that are not part of the document, see `flat_metadata`; None if there are none.

    The fields of BEIR's object ``metadata`` are treated as fields of the row; the row's own take precedence. A ``metadata`` that is not an
    object is a field of that name.

    Example:
        >>> to_metadata(EntryPosition(Path("c.jsonl"), 1), {"_id": "a", "text": "x", "year": 2019, "metadata": {"tags": ["b", "c"]}})
        {'tags': ['b', 'c'], 'year': 2019}
    """
    inner = row.get("metadata")
    fields = {**inner} if isinstance(inner, Mapping) else {"metadata": inner}
    key = next((name for name in columns.id if name in row), "")  # another one, such as an ``id`` beside ``_id``, is a field
    own = {key, columns.text, columns.title, "metadata"}
    fields |= {name: value for name, value in row.items() if name not in own}
    return flat_metadata(fields, where=str(position))


def checked_document(document: Document) -> Document:
    """Apply the rules for files to a document from Python code: an integer id becomes a string, metadata are flattened.

    Raises:
        InputError: The id is blank or neither a string nor an integer, or a value cannot be metadata.
    """
    key = as_id(document.id)
    if not key.isascii():
        check_utf8(key, f"the id {key!a} of a document")
    if not key.strip():
        raise InputError("the id of a document is blank")
    for name, text in (("title", document.title), ("text", document.text)):
        if isinstance(text, str):
            check_utf8(text, f"document {key!r}: the {name}")
    given: object = document.metadata
    if given is not None and not isinstance(given, Mapping):
        raise InputError(f"document {key!r}: the metadata must be a mapping from field to value, got {show_value(given)}")
    return document._replace(id=key, metadata=flat_metadata(given or {}, where=f"document {key!r}"))


def flat_metadata(fields: Mapping[str, object], *, where: str) -> Metadata | None:
    """Flatten metadata to what an index stores: field -> string, finite number, boolean, or list of these; None if there are none.

    Fields of a nested object are named ``object.field``; those of objects in a list become lists. Null and NaN mean a missing value.
    ``where`` is the position of the document, for errors.

    Raises:
        InputError: A value has another type, a field's name is not a string, or two fields get the same name.

    Example:
        >>> flat_metadata({"venue": {"name": "ACL", "year": 2020}, "authors": [{"name": "A"}, {"name": "B"}], "doi": None}, where="d1")
        {'venue.name': 'ACL', 'venue.year': 2020, 'authors.name': ['A', 'B']}
    """
    found: dict[str, Value | list[Value]] = {}
    lists: dict[str, list[Value]] = {}
    paths: dict[str, tuple[str, ...]] = {}
    left: list[tuple[tuple[Any, ...], object, bool]] = [((name,), value, False) for name, value in reversed(list(fields.items()))]
    while left:
        path, value, listed = left.pop()
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not isinstance(path[-1], str):
            raise InputError(f"{where}: names of metadata fields must be strings, got {path[-1]!r}")
        name = check_utf8(".".join(path), f"{where}: the name {path[-1]!r}")
        if isinstance(value, Mapping):
            left += [((*path, inner), each, listed) for inner, each in reversed(list(value.items()))]
        elif not is_missing(value):
            if paths.setdefault(name, path) != path:
                raise InputError(f"{where}: two metadata fields have the name {name!r}: one with a dot and one in an object; rename one")
            if isinstance(value, list | tuple):
                left += [(path, each, True) for each in reversed(value)]
                found.update({} if value else {name: lists.setdefault(name, [])})
            elif listed:
                found[name] = lists.setdefault(name, [])
                lists[name].append(_value(value, name, where))
            else:
                found[name] = _value(value, name, where)
    return cast(Metadata, found) or None


def is_missing(value: object) -> bool:
    """Whether a value is None or NaN."""
    return value is None or (isinstance(value, float | np.floating) and math.isnan(value))


def _value(value: object, name: str, where: str) -> Value:
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, str):
        return check_utf8(plain, f"{where}: metadata field {name!r}")
    if isinstance(plain, int) or (isinstance(plain, float) and math.isfinite(plain)):
        return plain
    kinds = "strings, finite numbers, booleans, or lists or objects of these"
    raise InputError(f"{where}: metadata field {name!r} must hold {kinds}, got {show_value(plain)}")


def check_id(position: EntryPosition, key: str) -> str:
    """Return the id unchanged; raises InputError if it is blank, or contains half of a surrogate pair."""
    if not check_utf8(key, f"{position}: the id").strip():
        raise InputError(f"{position}: the id is blank")
    return key


def key_of(value: object) -> str | None:
    """Return a string or integer id as a string; None for other types. Pandas makes floats of integers in a column with gaps: 7.0 is 7."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, float | np.floating):
        return str(int(value)) if abs(value) < _MAX_INTEGER and value == int(value) else None
    return value if isinstance(value, str) else None


def as_id(value: object) -> str:
    """Return a string or integer id from Python code as a string; raises InputError if it is neither."""
    key = key_of(value)
    if key is None:
        raise InputError(f"the id of a document must be a string or an integer, got {value!r}")
    return key


def unique(
    read: Callable[[], Iterable[tuple[Position, Identified]]], *, hashed: Callable[[str], int] = hash
) -> Iterator[tuple[Position, Identified]]:
    """Yield entries, and check at the end that all ids are unique; raises InputError that names the positions of both entries.

    Only 8-byte hashes are kept, so five million ids take 40 MB (80 MB while they are sorted). Entries of equal hash are read a second time,
    by another call of ``read``, and compared.
    """
    hashes = array("q")
    for position, entry in read():
        hashes.append(hashed(entry.id))
        yield position, entry
    ordered = np.sort(np.frombuffer(hashes, np.int64)) if hashes else np.empty(0, np.int64)
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    seen: dict[str, Position] = {}
    for position, entry in read() if suspects else ():
        if hashed(entry.id) in suspects:
            if (before := seen.get(entry.id)) is not None and position is not None:
                # Positions may be equal: of minified JSON, all documents are on one line.
                raise InputError(f"{position}: id '{entry.id}' is already used {before.seen_from(position)}; ids must be unique")
            if entry.id in seen:
                raise InputError(f"document id '{entry.id}' occurs twice; ids must be unique")
            seen[entry.id] = position


def id_of_row(position: EntryPosition, row: Mapping[str, object], columns: FieldNames) -> str:
    """The id of a row, checked."""
    value = next((row[name] for name in columns.id if name in row), None)
    key = key_of(value)
    if key is None:
        first, *others = (f"'{name}'" for name in columns.id)
        raise InputError(
            f"{position}: {first}{f' (or {others[0]})' if others else ''} must be a string or an integer, got {show_value(value)}"
        )
    return check_id(position, key)


def text_of_row(position: EntryPosition, row: Mapping[str, object], columns: FieldNames) -> str:
    """The text of a row, checked."""
    text = row.get(columns.text)
    if not isinstance(text, str):
        remedy = "; leave the row out, or give it an empty text" if text is None else ""
        raise InputError(f"{position}: '{columns.text}' must be a string, got {show_value(text)}{remedy}")
    return check_utf8(text, f"{position}: '{columns.text}'")


def show_value(value: object) -> str:
    """A value for an error, in at most 40 characters."""
    if value is None:
        return "nothing"
    known = isinstance(value, str | int | float | list | tuple | Mapping)
    text = json.dumps(value, default=str) if known else f"a {type(value).__name__}, {value}"
    return text if len(text) <= 40 else f"{text[:40]}..."
