"""Many strings without a Python object each: their UTF-8 bytes one after the other, and the place where each ends.

The order of UTF-8 bytes is that of code points, and thus Python's own and ``strcmp``'s, which trec_eval sorts ids by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.disk import Disk, write_array
from quiver.retrieval.index.errors import DamagedIndexError
from quiver.retrieval.index.mapped import CheckedArray, Files, as_checked, strings_lost

LOOK = "the index is damaged: quiver index check names the file"
"""What to do where a file that is mapped turns out not to be what was written."""


# Bytes whose places are worked out together.
_PLACES = 1 << 20
# So many numbers are read from an array faster one by one than as arrays: those of a search's hits.
_FEW = 20


class PackedStrings(Sequence[str]):
    """Strings in two arrays, in memory or mapped.

    Args:
        blob: The bytes of all strings.
        ends: Where each string ends, (n,) int64, ascending.
    """

    def __init__(self, blob: NDArray[np.uint8] | CheckedArray, ends: NDArray[np.int64] | CheckedArray) -> None:
        self._blob = as_checked(blob)
        self._ends = as_checked(ends)

    @property
    def blob(self) -> NDArray[np.uint8]:
        """The bytes of all strings, verified."""
        return self._blob.whole()

    @property
    def ends(self) -> NDArray[np.int64]:
        """Where each string ends, (n,), verified."""
        return self._ends.whole()

    @classmethod
    def pack(cls, strings: Iterable[str]) -> PackedStrings:
        """Pack strings that are in memory."""
        encoded = [string.encode("utf-8", "surrogatepass") for string in strings]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return cls(np.frombuffer(b"".join(encoded), np.uint8), np.cumsum(lengths))

    @classmethod
    def open(cls, files: Files, stem: str, count: int) -> PackedStrings:
        """Map what ``save`` wrote; the bytes are verified as they are read.

        Raises:
            FileNotFoundError: A file is missing.
            DamagedIndexError: The files do not fit each other.
        """
        ends = files.map(f"{stem}.ends", np.int64, (count,))
        blob = files.map(f"{stem}.utf8", np.uint8, (-1,))
        if not files.is_lost(f"{stem}.ends") and len(blob) != (int(ends.item(count - 1)) if count else 0):
            raise DamagedIndexError(f"{files.folder / stem}.ends: does not fit {len(blob)} bytes of strings; quiver index repair")
        return cls(blob, ends)

    def save(self, stem: Path, disk: Disk, what: str) -> dict[str, str]:
        """Write two files beside each other; file name -> what it holds."""
        write_array(stem.with_name(f"{stem.name}.utf8"), self.blob, disk)
        write_array(stem.with_name(f"{stem.name}.ends"), self.ends, disk)
        return {f"{stem.name}.utf8": f"{what}, UTF-8", f"{stem.name}.ends": f"the end of each of the {what}, int64"}

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        return _decoded([self.bytes_of(index % len(self))])[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), 65_536):
            yield from self.take(np.arange(start, min(start + 65_536, len(self))))

    def bytes_of(self, index: int) -> bytes:
        """The UTF-8 bytes of one string, 0 <= index < n."""
        content: bytes = self._blob[(self._ends.item(index - 1) if index else 0) : self._ends.item(index)].tobytes()
        return content

    def take(self, indices: NDArray[np.intp]) -> list[str]:
        """The strings with these numbers, in the order given.

        Raises:
            DamagedIndexError: They are not what was written.
        """
        if len(indices) <= _FEW:
            end = self._ends.item
            spans = [(end(index - 1) if index else 0, end(index)) for index in indices.tolist()]
            return _decoded([self._blob[begin:last].data for begin, last in spans])
        begins, ends = self.begins(indices), self._ends[indices]
        blob = self._blob.spans(begins, ends).data
        return _decoded([blob[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)])

    def begins(self, indices: NDArray[np.intp]) -> NDArray[np.int64]:
        """Where the strings with these numbers begin."""
        begins: NDArray[np.int64] = np.where(indices > 0, self._ends[np.maximum(indices - 1, 0)], 0)
        return begins

    def select(self, indices: NDArray[np.intp]) -> PackedStrings:
        """The strings with these numbers, in the order given, as packed strings in memory."""
        begins = self.begins(indices)
        lengths = self._ends[indices] - begins
        source = self._blob.spans(begins, begins + lengths)
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        blob = np.empty(max(total, 0), np.uint8)
        first = done = 0
        while done < total:  # some at a time: the place of a byte takes eight of them
            last = max(first + 1, int(np.searchsorted(ends, done + _PLACES, side="right")))
            end = int(ends[last - 1])
            shifts = begins[first:last] - (ends[first:last] - lengths[first:last])
            blob[done:end] = source[np.repeat(shifts, lengths[first:last]) + np.arange(done, end)]
            first, done = last, end
        return PackedStrings(blob, ends)

    def equal(self, indices: NDArray[np.intp], others: PackedStrings, theirs: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Whether strings are those of another pack, pair by pair, (len(indices),).

        Args:
            indices: Numbers of strings.
            others: Another pack.
            theirs: Numbers of strings there, as many.
        """
        lengths = self._lengths(indices)
        same: NDArray[np.bool_] = lengths == others._lengths(theirs)
        alike = np.flatnonzero(same & (lengths > 0))
        if len(alike):
            mine = self.select(indices[alike])
            equal = mine.blob == others.select(theirs[alike]).blob
            same[alike] = np.logical_and.reduceat(equal, mine.ends - lengths[alike])
        return same

    def _lengths(self, indices: NDArray[np.intp]) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = self._ends[indices] - self.begins(indices)
        return lengths

    def lost(self) -> NDArray[np.bool_]:
        """The strings that a salvaged file has lost, (n,)."""
        return strings_lost(self._ends, self._blob)

    def order(self) -> NDArray[np.int64]:
        """Numbers of the strings in ascending order, (n,); equal strings stay in the order they have.

        Eight bytes are compared at a time, and only among those strings that are equal so far: what is held is some numbers a string.
        """
        lengths = np.diff(self.ends, prepend=0)
        order = np.argsort(self._words(np.arange(len(self)), 0, lengths), kind="stable")
        group = _starts(self._words(order, 0, lengths))
        offset = 8
        while True:
            tied = _tied(group)
            # Padding with zeros makes a string equal to a longer one that ends in zeros: their lengths decide, when nothing else is left.
            places = np.flatnonzero(tied)
            if not len(places):
                return order
            rows = order[places]
            if int(lengths[rows].max()) <= offset:
                order[places] = rows[np.lexsort((rows, lengths[rows], group[places]))]
                return order
            words = self._words(rows, offset, lengths)
            inner = np.lexsort((words, group[places]))
            order[places] = rows[inner]
            group = _refined(group, places, words[inner])
            offset += 8

    def _words(self, rows: NDArray[np.intp], offset: int, lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Eight bytes of each string from ``offset`` on as a number that sorts like them, filled up with zeros."""
        words = np.zeros((len(rows), 8), np.uint8)
        begins, blob = self.begins(rows) + offset, self.blob
        left = lengths[rows] - offset
        for place in range(8):
            has = np.flatnonzero(left > place)
            words[has, place] = blob[begins[has] + place]
        numbers: NDArray[np.uint64] = words.view(">u8")[:, 0].astype(np.uint64)
        return numbers


def _decoded(strings: Sequence[bytes | memoryview]) -> list[str]:
    try:
        return [str(string, "utf-8") for string in strings]
    except UnicodeDecodeError as error:
        raise DamagedIndexError(f"a string in the index is not UTF-8 ({error.reason}); {LOOK}") from error


def _starts(ordered: NDArray[np.uint64]) -> NDArray[np.int64]:
    """For each place of an ordered array the first place with the same value."""
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    starts: NDArray[np.int64] = np.maximum.accumulate(np.where(new, np.arange(len(ordered)), 0))
    return starts


def _tied(group: NDArray[np.int64]) -> NDArray[np.bool_]:
    same = group[1:] == group[:-1]
    tied: NDArray[np.bool_] = np.zeros(len(group), bool)
    tied[1:] = same
    tied[:-1] |= same
    return tied


def _refined(group: NDArray[np.int64], places: NDArray[np.intp], words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The groups, split where the words at these places differ; a group is the first place that is in it."""
    new = np.ones(len(places), bool)
    new[1:] = (words[1:] != words[:-1]) | (group[places][1:] != group[places][:-1])
    refined: NDArray[np.int64] = group.copy()
    refined[places] = places[np.maximum.accumulate(np.where(new, np.arange(len(places)), 0))]
    return refined
