"""One row of a source to one training example: which field is the query, which are documents, which the teacher's scores.

What is wrong with a row is an ``InputError`` that begins with its place. Nothing here opens a file or evaluates what it reads.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import key_of
from quiver.retrieval.training.sections import DataSection

_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?:nan|inf|infinity)"
_QUOTED = r"'[^'\\]*'|\"[^\"\\]*\""
_ITEM = re.compile(rf"\s*(?:({_QUOTED})|({_NUMBER}))(?=[\s,]|\Z)\s*,?", re.IGNORECASE)
"""One item of a list as Python or NumPy print it: a number or a text in quotes, and the comma or blank behind it."""


class Example(NamedTuple):
    """One training row before ids become texts.

    Attributes:
        place: Where it stands, for errors.
        query: Text or id.
        documents: Texts or ids, the positive first.
        scores: The teacher's, one for each document; none where the section names no field of scores.
        flaw: Why the row cannot be trained on, though its fields are in order; empty where it can.
        left_out: Negatives of the row that are not among the documents, since they are other positives of it.
        rank: Where rows are shuffled, they are sorted by it.
    """

    place: str
    query: str
    documents: list[str]
    scores: list[float]
    flaw: str = ""
    left_out: int = 0
    rank: float = 0.0


class _Missing:
    """What a path leads to that the row does not have; None is what it leads to where the row says null."""


_MISSING = _Missing()


class FieldReader:
    """Rows to examples by the fields that a section names."""

    def __init__(self, section: DataSection) -> None:
        """Read rows as ``section`` says."""
        self._query = section.query_field
        self._documents = section.document_fields
        self._scores = section.score_fields
        self._each = section.positives == "each"
        self._item = _id if section.format == "ids" else _text

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""
        return (self._query, *self._documents, *self._scores)

    def check(self, place: str, row: Mapping[str, object]) -> None:
        """Look at a source's first row for a mistyped field: further down, a field that is not there means no document.

        Raises:
            InputError: A field is not there; names those that are.
        """
        for name in self.columns:
            if _reach(place, name, row) is _MISSING:
                known = ", ".join(map(str, row)) or "none"
                close = difflib.get_close_matches(name, [str(key) for key in row], n=1)
                hint = f"did you mean '{close[0]}'? " if close else ""
                raise InputError(f"{place}: no field '{name}'; {hint}the row's fields are {known}")

    def examples(self, place: str, row: Mapping[str, object]) -> list[Example]:
        """What a row gives to train on: one example, or one for each positive.

        An example is flawed where its query or its positive is blank or not there.

        Raises:
            InputError: A field holds something else than it should, the first of several document fields more than one positive though
                not each is to be taken, or the number of scores differs from the number of documents.
        """
        whole, positives = self._read(place, row)
        if self._each and positives:
            return self._one_each(whole, positives)
        if positives > 1 and len(self._documents) > 1:
            name = self._documents[0]
            one = name.replace("*", "0") if "*" in name else f"{name}.0"
            raise InputError(
                f"{place}: the field '{name}' holds {positives} documents; the first of several fields holds the positive alone, the "
                f"others would become its negatives (make an example of each by data.positives: each, or take one: {one})"
            )
        return [whole]

    def whole(self, place: str, row: Mapping[str, object]) -> Example:
        """All documents of a row as one example, the positives first, however many they are.

        Raises:
            InputError: A field holds something else than it should, or the number of scores differs from the number of documents.
        """
        return self._read(place, row)[0]

    def _read(self, place: str, row: Mapping[str, object]) -> tuple[Example, int]:
        """A row as it is, and how many documents its first field holds."""
        query = self._item(place, self._query, _one(place, self._query, row))
        fields = [self._items(place, name, row) for name in self._documents]
        documents = [document for field in fields for document in field]
        scores = self._row_scores(place, row, len(documents)) if self._scores else []
        return Example(place, query, documents, scores, self._flaw(query, fields[0])), len(fields[0])

    def _one_each(self, whole: Example, positives: int) -> list[Example]:
        """An example for each positive, with the negatives that are no positives."""
        known = {document.strip() for document in whole.documents[:positives]}
        kept = [place for place in range(positives, len(whole.documents)) if whole.documents[place].strip() not in known]
        examples = []
        for positive in range(positives):
            documents = [whole.documents[place] for place in (positive, *kept)]
            scores = [whole.scores[place] for place in (positive, *kept)] if whole.scores else []
            flaw = self._flaw(whole.query, documents[:1])
            examples.append(Example(whole.place, whole.query, documents, scores, flaw, len(whole.documents) - positives - len(kept)))
        return examples

    def _flaw(self, query: str, positives: Sequence[str]) -> str:
        if not positives or not positives[0].strip():
            return f"the field '{self._documents[0]}' holds no positive"
        return "" if query.strip() else f"the field '{self._query}' is blank"

    def _items(self, place: str, name: str, row: Mapping[str, object]) -> list[str]:
        return [self._item(place, name, value) for value in self._values(place, name, row, parse=self._item is _id)]

    def _row_scores(self, place: str, row: Mapping[str, object], documents: int) -> list[float]:
        scores = [_score(place, name, value) for name in self._scores for value in self._values(place, name, row, parse=True)]
        if len(scores) != documents:
            raise InputError(f"{place}: {len(scores)} scores ({', '.join(self._scores)}) for {documents} documents")
        return scores

    @staticmethod
    def _values(place: str, name: str, row: Mapping[str, object], *, parse: bool) -> Sequence[object]:
        """The values of a field: of a list its items, none of a field that is not there or null, else the one."""
        value = _reach(place, name, row)
        if value is _MISSING or value is None:
            return ()
        if parse and isinstance(value, str) and value.lstrip().startswith("["):
            return parse_list(place, name, value)
        return value if isinstance(value, list) else (value,)


def encoded(place: str, text: str) -> bytes:
    """A text in UTF-8.

    Raises:
        InputError: It holds half of a surrogate pair, which no file and no tokenizer takes.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{place}: a text holds an unpaired surrogate") from error


def text_of(place: str, name: str, row: Mapping[str, object]) -> str:
    """The text of a field.

    Raises:
        InputError: It is not there or not text.
    """
    return _text(place, name, _one(place, name, row))


def id_of(place: str, name: str, row: Mapping[str, object]) -> str:
    """The id of a field.

    Raises:
        InputError: It is not there, or neither text nor a whole number.
    """
    return _id(place, name, _one(place, name, row))


def parse_list(place: str, name: str, text: str) -> list[object]:
    """A list that was stored as text: JSON, or numbers and quoted texts as Python or NumPy print them.

    In what is not JSON a number without a fraction stays the text that it is: an id ``007`` is none with the name ``7``.

    Raises:
        InputError: It is neither.

    Example:
        >>> parse_list("rows.jsonl:1", "scores", "[0.5, 1e-3]"), parse_list("rows.jsonl:1", "ids", "['a' 'b']")
        ([0.5, 0.001], ['a', 'b'])
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _printed_list(text.strip())
    if not isinstance(value, list):
        raise InputError(f"{place}: the field '{name}' holds no list of numbers or ids: {_shown(text)}")
    return value


def _printed_list(text: str) -> list[object] | None:
    if not text.endswith("]"):
        return None
    inner, items, position = text[1:-1].rstrip(), list[object](), 0
    while position < len(inner):
        match = _ITEM.match(inner, position)
        if match is None:
            return None
        quoted, number = match.groups()
        items.append(quoted[1:-1] if quoted is not None else number if number.lstrip("+-").isdigit() else float(number))
        position = match.end()
    return items


def _reach(place: str, name: str, row: Mapping[str, object]) -> object:
    """What a dotted path leads to. A key of the row that is spelt like the whole path comes first."""
    return row[name] if name in row else _walk(place, name, row, name.split("."))


def _walk(place: str, name: str, value: object, parts: Sequence[str]) -> object:
    for position, part in enumerate(parts):
        if value is None or value is _MISSING:
            return value
        if part == "*":
            return _every(place, name, value, parts[position + 1 :])
        if isinstance(value, Mapping):
            value = value.get(part, _MISSING)
        elif isinstance(value, list) and part.isdigit():
            value = value[int(part)] if int(part) < len(value) else None
        else:
            raise InputError(f"{place}: the path '{name}' finds {_kind(value)} where '{part}' should be")
    return value


def _every(place: str, name: str, value: object, parts: Sequence[str]) -> list[object]:
    """The path's rest from each item of a list; lists in lists become one."""
    if not isinstance(value, list):
        raise InputError(f"{place}: the path '{name}' finds {_kind(value)} where '*' wants a list")
    found: list[object] = []
    for item in value:
        reached = _walk(place, name, item, parts)
        if reached is _MISSING:
            raise InputError(f"{place}: an item of '{name}' has no '{'.'.join(parts)}'")
        found.extend(reached if "*" in parts and isinstance(reached, list) else [reached])
    return found


def _one(place: str, name: str, row: Mapping[str, object]) -> object:
    value = _reach(place, name, row)
    if value is _MISSING:
        raise InputError(f"{place}: no field '{name}'; the row's fields are {', '.join(map(str, row)) or 'none'}")
    return value


def _text(place: str, name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InputError(f"{place}: the field '{name}' must hold text, got {_shown(value)}")
    return value


def _id(place: str, name: str, value: object) -> str:
    key = key_of(value)
    if key is None or not key.strip():
        raise InputError(f"{place}: the field '{name}' must hold an id, text or a whole number, got {_shown(value)}")
    return key


def _score(place: str, name: str, value: object) -> float:
    try:
        score = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        score = None
    if score is None or not math.isfinite(score):
        raise InputError(f"{place}: a score in '{name}' must be a finite number, got {_shown(value)}")
    return score


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, Mapping) else _shown(value)


def _shown(value: object) -> str:
    text = "null" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
