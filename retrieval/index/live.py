"""The documents of an index in the order they were added, deleted ones left out: their ids, and their texts where they are kept.

Nothing is read before it is asked for; a number is a document's place among those that are not deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np

from quiver.retrieval.index.segments import OpenSegment
from quiver.retrieval.records import Document


class Place(NamedTuple):
    """Where a document is: the number of its segment, and its row there."""

    segment: int
    row: int


class _Places:
    """The places of all documents."""

    def __init__(self, segments: Sequence[OpenSegment]) -> None:
        self._rows = [None if segment.alive is None else np.flatnonzero(segment.alive) for segment in segments]
        counts = [len(segment.documents) if rows is None else len(rows) for segment, rows in zip(segments, self._rows, strict=True)]
        self._ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __iter__(self) -> Iterator[Place]:
        begin = 0
        for segment, (rows, end) in enumerate(zip(self._rows, self._ends.tolist(), strict=True)):
            for row in range(end - begin) if rows is None else rows.tolist():
                yield Place(segment, row)
            begin = end

    def __getitem__(self, number: int) -> Place:
        if not -len(self) <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        number %= len(self)
        segment = int(np.searchsorted(self._ends, number, side="right"))
        row, rows = number - (int(self._ends[segment - 1]) if segment else 0), self._rows[segment]
        return Place(segment, row if rows is None else int(rows[row]))


class LiveIds(Sequence[str]):
    """The ids of the documents.

    Args:
        segments: The segments of an index.
    """

    def __init__(self, segments: Sequence[OpenSegment]) -> None:
        self._strings = [segment.documents.ids.strings for segment in segments]
        self._places = _Places(segments)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return (self._strings[place.segment][place.row] for place in self._places)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        place = self._places[index]
        return self._strings[place.segment][place.row]


class LiveDocuments:
    """The documents of an index that was built with texts.

    Args:
        segments: The segments of an index.
    """

    def __init__(self, segments: Sequence[OpenSegment]) -> None:
        self._segments = segments
        self._places = _Places(segments)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Document]:
        return map(self.at, self._places)

    def __getitem__(self, number: int) -> Document:
        return self.at(self._places[number])

    def at(self, place: Place) -> Document:
        """The document at a place."""
        texts = self._segments[place.segment].documents.texts
        if texts is None:
            raise ValueError("this segment was opened without its texts")
        return texts[place.row]
