"""One entry of a collection's file, a line of text or a row of a table, with its place: to a document, a query or a judgement.

What is wrong with an entry is an ``InputError`` that begins with its place. This module reads no file.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from quiver.encoder.errors import InputError
from quiver.retrieval.records import Document, Metadata, Query, Value

# Nine digits fit every integer type that a scorer may keep grades in; a longer one is damage, not a judgement.
_GRADE = re.compile(r"[+-]?[0-9]{1,9}")
_MAX_GRADE = 10**9

Identified = TypeVar("Identified", Document, Query)


class Place(NamedTuple):
    """Where an entry stands: its file and, from 1, its line (in a table: its row)."""

    file: Path
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"

    def seen_from(self, other: Place) -> str:
        """This place in words, for an error that begins with another one.

        Example:
            >>> Place(Path("c.jsonl"), 3).seen_from(Place(Path("c.jsonl"), 9))
            'on line 3'
        """
        if self.file != other.file:
            return f"in {self}"
        return f"{'in row' if self.file.suffix == '.parquet' else 'on line'} {self.number}"


class Judgement(NamedTuple):
    """One judgement and where it stands."""

    place: Place
    query: str
    document: str
    grade: int


class Columns(NamedTuple):
    """What a layout calls the fields of its documents or queries.

    Attributes:
        id: Names of the id, in order of preference.
        text: Name of the text.
        title: Name of the title, which need not be there.
    """

    id: tuple[str, ...] = ("_id", "id")
    text: str = "text"
    title: str = "title"


BEIR_COLUMNS = Columns()
"""The names in BEIR's files, and in most that follow it."""


def to_document(place: Place, row: Mapping[str, object], columns: Columns = BEIR_COLUMNS) -> Document:
    """The document of a row; its text may be empty, its id may be an integer, and further fields are left alone.

    Raises:
        InputError: A field is missing or of another type, or the id is blank.
    """
    key = _id(place, row, columns)
    title = row.get(columns.title)
    if title is not None and not isinstance(title, str):
        raise InputError(f"{place}: '{columns.title}' must be a string, got {_shown(title)}")
    return Document(key, _text(place, row, columns), title or "")


def to_metadata(place: Place, row: Mapping[str, object], columns: Columns = BEIR_COLUMNS) -> Metadata | None:
    """The metadata of a row: all that it has beside the fields of a document, see `flat_metadata`; None if there is nothing.

    The fields of BEIR's object ``metadata`` count as the row's own, which come first where both are there; what is no object is a field
    of that name.

    Raises:
        InputError: A value is no metadata; names the field.

    Example:
        >>> to_metadata(Place(Path("c.jsonl"), 1), {"_id": "a", "text": "x", "year": 2019, "metadata": {"tags": ["b", "c"]}})
        {'tags': ['b', 'c'], 'year': 2019}
    """
    inner = row.get("metadata")
    fields = {**inner} if isinstance(inner, Mapping) else {"metadata": inner}
    own = {*columns.id, columns.text, columns.title, "metadata"}
    fields |= {name: value for name, value in row.items() if name not in own}
    return flat_metadata(fields, where=str(place))


def checked_document(document: Document) -> Document:
    """A document that Python code gave, by the rules that hold for files: an integer id becomes a string, metadata become flat.

    Raises:
        InputError: The id is blank or neither a string nor an integer, or a value is no metadata.

    Example:
        >>> checked_document(Document(7, "x", metadata={"author": {"name": "Bo"}, "year": None}))
        Document(id='7', text='x', title='', metadata={'author.name': 'Bo'})
    """
    key = as_id(document.id)
    if not key.strip():
        raise InputError("the id of a document is blank")
    given: object = document.metadata
    if given is not None and not isinstance(given, Mapping):
        raise InputError(f"document {key!r}: the metadata must be a mapping from field to value, got {_shown(given)}")
    return document._replace(id=key, metadata=flat_metadata(given or {}, where=f"document {key!r}"))


def flat_metadata(fields: Mapping[str, object], *, where: str) -> Metadata | None:
    """Metadata as an index keeps them: field -> string, finite number, truth value, or list of these.

    The fields of an object within get its name and a dot before theirs, and those of objects in a list become lists. Null and
    NaN are no values: a table has them where a value is missing.

    Args:
        fields: Of one document.
        where: Its place, for errors.

    Returns:
        The fields; None if there are none.

    Raises:
        InputError: A value is something else, a field's name is no string, or two fields get one name.

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
        if not isinstance(path[-1], str):
            raise InputError(f"{where}: the name of a metadata field must be a string, got {path[-1]!r}")
        name = ".".join(path)
        if isinstance(value, Mapping):
            left += [((*path, inner), each, listed) for inner, each in reversed(list(value.items()))]
        elif not _is_missing(value):
            if paths.setdefault(name, path) != path:
                raise InputError(f"{where}: two metadata fields are called {name!r}, a field with a dot and one of an object; rename one")
            if isinstance(value, list | tuple):
                left += [(path, each, True) for each in reversed(value)]
                found.update({} if value else {name: lists.setdefault(name, [])})
            elif listed:
                found[name] = lists.setdefault(name, [])
                lists[name].append(_value(value, name, where))
            else:
                found[name] = _value(value, name, where)
    return cast(Metadata, found) or None


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float | np.floating) and math.isnan(value))


def _value(value: object, name: str, where: str) -> Value:
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, str | int) or (isinstance(plain, float) and math.isfinite(plain)):
        return plain
    kinds = "strings, finite numbers, truth values, or lists or objects of them"
    raise InputError(f"{where}: metadata field {name!r} must hold {kinds}, got {_shown(plain)}")


def to_query(place: Place, row: Mapping[str, object], columns: Columns = BEIR_COLUMNS) -> Query:
    """The query of a row, as `to_document`.

    Raises:
        InputError: A field is missing or of another type, or the id is blank.
    """
    return Query(check_id(place, _id(place, row, columns)), _text(place, row, columns))


def to_judgement(place: Place, query: str, document: str, grade: object) -> Judgement:
    """A judgement; its grade is an integer, or digits where the file is text, or in a table a float without a fraction.

    Raises:
        InputError: An id is blank, or the grade is no integer of at most nine digits.
    """
    if isinstance(grade, str):
        whole = int(grade) if _GRADE.fullmatch(grade) else None
    elif isinstance(grade, (int, float)) and not isinstance(grade, bool) and abs(grade) < _MAX_GRADE and grade == int(grade):
        whole = int(grade)
    else:
        whole = None
    if whole is None:
        raise InputError(f"{place}: the grade must be an integer of at most 9 digits, got {_shown(grade)}")
    if not query.strip() or not document.strip():
        raise InputError(f"{place}: the {'document' if query.strip() else 'query'} id is blank")
    return Judgement(place, query, document, whole)


def check_id(place: Place, key: str) -> str:
    """The id as it is.

    Raises:
        InputError: It is blank.
    """
    if not key.strip():
        raise InputError(f"{place}: the id is blank")
    return key


def key_of(value: object) -> str | None:
    """An id as a string, whether it was a string or an integer; None where it is neither."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | np.integer):
        return str(int(value))
    return value if isinstance(value, str) else None


def as_id(value: object) -> str:
    """An id that Python code gave, as a string: an integer becomes one, as in files.

    Raises:
        InputError: It is neither a string nor an integer.
    """
    key = key_of(value)
    if key is None:
        raise InputError(f"the id of a document must be a string or an integer, got {value!r}")
    return key


def unique(
    read: Callable[[], Iterable[tuple[Place, Identified]]], *, hashed: Callable[[str], int] = hash
) -> Iterator[tuple[Place, Identified]]:
    """Pass entries on and, when they are through, make sure that no id came twice.

    What is remembered of an entry is a hash of 8 bytes, so that five million ids take 40 MB (twice that while they are sorted). Ids of
    equal hash are compared in a second reading, and only then called equal.

    Args:
        read: Starts a reading of the entries.
        hashed: A hash of at most 64 bits.

    Raises:
        InputError: At the end, if an id came twice; names the first repetition and what it repeats.
    """
    hashes = array("q")
    for place, entry in read():
        hashes.append(hashed(entry.id))
        yield place, entry
    ordered = np.sort(np.frombuffer(hashes, np.int64)) if hashes else np.empty(0, np.int64)
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    seen: dict[str, Place] = {}
    for place, entry in read() if suspects else ():
        if hashed(entry.id) in suspects:
            first = seen.setdefault(entry.id, place)
            if first != place:
                raise InputError(f"{place}: id '{entry.id}' was used {first.seen_from(place)} already; ids must be unique")


def _id(place: Place, row: Mapping[str, object], columns: Columns) -> str:
    value = next((row[name] for name in columns.id if name in row), None)
    key = key_of(value)
    if key is None:
        first, *others = (f"'{name}'" for name in columns.id)
        raise InputError(f"{place}: {first}{f' (or {others[0]})' if others else ''} must be a string or an integer, got {_shown(value)}")
    return check_id(place, key)


def _text(place: Place, row: Mapping[str, object], columns: Columns) -> str:
    text = row.get(columns.text)
    if not isinstance(text, str):
        raise InputError(f"{place}: '{columns.text}' must be a string, got {_shown(text)}")
    return text


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:40]}..."
