"""Strings, ids and texts of a segment, stored without a Python object per document.

Strings are stored as in Arrow's large string layout, in two raw files: all UTF-8 bytes, and the offset where each string ends. The order
of UTF-8 bytes is that of code points, which is Python's order and that of ``strcmp``, by which trec_eval sorts ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.data.corpus import as_id
from quiver.retrieval.index.files import (
    CheckedArray,
    DamagedIndexError,
    Disk,
    Files,
    as_checked,
    write_array,
)
from quiver.retrieval.records import Document

LOOK = "the index is damaged, run quiver index check to find the file"
"""Advice for errors about damaged memory-mapped files."""


# Up to this many elements, reading them one by one is faster than as an array; hits of a search are that few.
_FEW = 20


class StringColumn(Sequence[str]):
    """Strings as an Arrow ``large_string`` array, in memory or in two mapped files that are verified as they are read.

    The one class for ids, texts and string values of metadata. The bytes may hold lone surrogates, which Arrow calls ``large_binary``.

    Args:
        content: The bytes of all strings.
        offsets: Start of each string, and the number of bytes, (n + 1,) int64, ascending.
    """

    def __init__(self, content: NDArray[np.uint8] | CheckedArray, offsets: NDArray[np.int64] | CheckedArray) -> None:
        self._content = as_checked(content)
        self._offsets = as_checked(offsets)

    @property
    def content(self) -> NDArray[np.uint8]:
        """The bytes of all strings, verified."""
        return self._content.whole()

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Start of each string, and the number of bytes, (n + 1,), verified."""
        return self._offsets.whole()

    @classmethod
    def pack(cls, strings: Iterable[str]) -> StringColumn:
        """Create a column from strings in memory."""
        encoded = [string.encode("utf-8", "surrogatepass") for string in strings]
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=offsets[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), offsets)

    @classmethod
    def concatenate(cls, columns: Sequence[StringColumn]) -> StringColumn:
        """Concatenate at least one column, in memory."""
        firsts = np.cumsum([0, *(len(column.content) for column in columns)])
        offsets = [column.offsets[:-1] + first for column, first in zip(columns, firsts, strict=False)]
        return cls(np.concatenate([column.content for column in columns]), np.concatenate([*offsets, firsts[-1:]]))

    @classmethod
    def open(cls, files: Files, stem: str, count: int, *, content: str | None = None) -> StringColumn:
        """Map the files that ``save`` wrote; bytes are verified as they are read.

        Args:
            files: Files of the folder.
            stem: Start of the names of both files.
            count: Number of strings n.
            content: Name of the file of bytes; by default the stem with ``.utf8``.

        Raises:
            FileNotFoundError: A file is missing.
            DamagedIndexError: The files are inconsistent.
        """
        offsets = files.map(f"{stem}.offsets", np.int64, (count + 1,))
        stored = files.map(content or f"{stem}.utf8", np.uint8, (-1,))
        if offsets.is_whole and len(stored) != int(offsets.item(count)):
            raise DamagedIndexError(
                f"{files.folder / stem}.offsets: does not match {len(stored)} bytes of strings; run quiver index repair"
            )
        return cls(stored, offsets)

    def save(self, stem: Path, disk: Disk, what: str) -> dict[str, str]:
        """Write the bytes and the offsets to two files; return what each holds, by name."""
        write_array(stem.with_name(f"{stem.name}.utf8"), self.content, disk)
        write_array(stem.with_name(f"{stem.name}.offsets"), self.offsets, disk)
        return {f"{stem.name}.utf8": f"{what}, UTF-8", f"{stem.name}.offsets": f"the begin of each of the {what}, and the end, int64"}

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        number, size = index, len(self)
        if isinstance(number, slice):
            return self.take(np.arange(size)[number])
        if not -size <= number < size:
            raise IndexError(f"the string number must be below {size}, got {number}")
        return _decoded([self.bytes_of(number % size)])[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), 65_536):
            yield from self.take(np.arange(start, min(start + 65_536, len(self))))

    def bytes_of(self, index: int) -> bytes:
        """The UTF-8 bytes of one string, 0 <= index < n."""
        content: bytes = self._content[self._offsets.item(index) : self._offsets.item(index + 1)].tobytes()
        return content

    def take(self, indices: NDArray[np.intp]) -> list[str]:
        """The strings with given numbers, in the order given.

        Raises:
            DamagedIndexError: The bytes are damaged.
        """
        if len(indices) <= _FEW:
            offset = self._offsets.item
            spans = [(offset(index), offset(index + 1)) for index in indices.tolist()]
            return _decoded([self._content[begin:end].data for begin, end in spans])
        begins, ends = self._offsets[indices], self._offsets[indices + 1]
        content = self._content.spans(begins, ends).data
        return _decoded([content[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)])

    def select(self, indices: NDArray[np.intp], *, part: int = 1 << 20) -> StringColumn:
        """The strings with given numbers, in the order given, as a column in memory.

        Args:
            indices: Numbers of strings.
            part: Number of bytes whose positions are computed at a time.
        """
        begins = self._offsets[indices]
        lengths = self._offsets[indices + 1] - begins
        source = self._content.spans(begins, begins + lengths)
        offsets = np.append(0, np.cumsum(lengths))
        total = int(offsets[-1])
        content = np.empty(max(total, 0), np.uint8)
        first = done = 0
        while done < total:  # in parts: the index of a byte takes eight bytes
            last = max(first + 1, int(np.searchsorted(offsets[1:], done + part, side="right")))
            end = int(offsets[last])
            shifts = begins[first:last] - offsets[first:last]
            content[done:end] = source[np.repeat(shifts, lengths[first:last]) + np.arange(done, end)]
            first, done = last, end
        return StringColumn(content, offsets)

    def beginning_with(self, start: str) -> NDArray[np.intp]:
        """The numbers of the strings that begin with a text, ascending.

        Example:
            >>> StringColumn.pack(["docs/a", "doc", "docs/b"]).beginning_with("docs/").tolist()
            [0, 2]
        """
        wanted = start.encode("utf-8", "surrogatepass")
        begins, content = self.offsets[:-1], self.content
        found = np.flatnonzero(np.diff(self.offsets) >= len(wanted))
        for place, byte in enumerate(wanted):
            found = found[content[begins[found] + place] == byte]
        return found

    def equal(self, indices: NDArray[np.intp], others: StringColumn, theirs: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Compare strings with those of another column, pair by pair; (len(indices),).

        Args:
            indices: Numbers of strings.
            others: The other column.
            theirs: Numbers of strings of the other column, as many.
        """
        lengths = self._lengths(indices)
        same: NDArray[np.bool_] = lengths == others._lengths(theirs)
        alike = np.flatnonzero(same & (lengths > 0))
        if len(alike):
            mine = self.select(indices[alike])
            equal = mine.content == others.select(theirs[alike]).content
            same[alike] = np.logical_and.reduceat(equal, mine.offsets[:-1])
        return same

    def _lengths(self, indices: NDArray[np.intp]) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = self._offsets[indices + 1] - self._offsets[indices]
        return lengths

    def lost(self) -> NDArray[np.bool_]:
        """Strings lost with a damaged file, (n,)."""
        damaged = self._offsets.damaged()
        lost = damaged[:-1] | damaged[1:]
        lost_before, places = np.append(0, np.cumsum(self._content.damaged())), np.where(damaged, 0, self._offsets.whole())
        found: NDArray[np.bool_] = lost | (lost_before[places[1:]] > lost_before[places[:-1]])
        return found

    def order(self) -> NDArray[np.int64]:
        """Numbers of the strings in ascending order, (n,); equal strings keep their order.

        Eight bytes are compared at a time, only among strings that are equal so far; memory use is a few numbers per string.
        """
        lengths = np.diff(self.offsets)
        order = np.argsort(self._words(np.arange(len(self)), 0, lengths), kind="stable")
        group = _starts(self._words(order, 0, lengths))
        offset = 8
        while True:
            tied = _tied(group)
            # Padding with zeros makes a string equal to a longer one that ends in zero bytes: in that case their lengths decide.
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
        """Eight bytes of each string from ``offset`` on, padded with zeros, as a number with the same order."""
        words = np.zeros((len(rows), 8), np.uint8)
        begins, content = self._offsets[rows] + offset, self.content
        left = lengths[rows] - offset
        for place in range(8):
            has = np.flatnonzero(left > place)
            words[has, place] = content[begins[has] + place]
        numbers: NDArray[np.uint64] = words.view(">u8")[:, 0].astype(np.uint64)
        return numbers


def _decoded(strings: Sequence[bytes | memoryview]) -> list[str]:
    try:
        return [str(string, "utf-8") for string in strings]
    except UnicodeDecodeError as error:
        raise DamagedIndexError(f"a string in the index is not UTF-8 ({error.reason}); {LOOK}") from error


def _starts(ordered: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The first position with the same value, for each position of a sorted array."""
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
    """Split groups where the words at the given places differ; a group is named by its first place."""
    new = np.ones(len(places), bool)
    new[1:] = (words[1:] != words[:-1]) | (group[places][1:] != group[places][:-1])
    refined: NDArray[np.int64] = group.copy()
    refined[places] = places[np.maximum.accumulate(np.where(new, np.arange(len(places)), 0))]
    return refined


STEM = "ids"
"""Start of the file names."""

_HASHES = "ids.hashes"
_ROWS = "ids.rows"
_RANKS = "ids.ranks"

# Number of ids that are Python objects at a time.
_TOGETHER = 65_536


class IdTable:
    """The ids of a segment's P documents.

    Attributes:
        strings: The ids by row.
    """

    def __init__(self, strings: StringColumn, hashes: CheckedArray, rows: CheckedArray, ranks: CheckedArray) -> None:
        self.strings = strings
        self._hashes = hashes
        self._rows = rows
        self._ranks = ranks

    @classmethod
    def open(cls, files: Files, count: int) -> IdTable:
        """Map the files that `write_ids` wrote.

        Raises:
            FileNotFoundError: A file is missing.
            DamagedIndexError: A file does not match the number of documents.
        """
        return cls(
            StringColumn.open(files, STEM, count),
            files.map(_HASHES, np.uint64, (count,)),
            files.map(_ROWS, np.uint32, (count,)),
            files.map(_RANKS, np.uint32, (count,)),
        )

    @classmethod
    def of(cls, ids: Sequence[str]) -> IdTable:
        """Create a table of unique ids in memory."""
        strings = StringColumn.pack(ids)
        return cls(strings, *(CheckedArray(table) for table in _tables(strings)))

    @property
    def ranks(self) -> NDArray[np.uint32]:
        """The rank of each id in ascending order, (P,)."""
        return self._ranks.whole()

    def __len__(self) -> int:
        return len(self.strings)

    def hashes_of(self, rows: NDArray[np.bool_] | None) -> NDArray[np.uint64]:
        """Hashes of the ids in given rows, ascending. Ids with equal 64-bit hashes are treated as equal; collisions are extremely rare.

        Args:
            rows: Bitmap of the rows, (P,); None for all.

        Raises:
            DamagedIndexError: The table is damaged.
        """
        if rows is None:
            return self._hashes.whole()
        numbers = self._rows.whole()
        if len(self) and int(numbers.max()) >= len(self):
            raise DamagedIndexError(f"the table of ids refers to a row that does not exist; {LOOK}")
        hashes: NDArray[np.uint64] = self._hashes.whole()[rows[numbers]]
        return hashes

    def rows_of(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """The row of each id, (len(ids),); -1 if the segment has no such document. An integer means the string of its digits, as in files.

        Raises:
            InputError: An id is neither a string nor an integer.
            DamagedIndexError: The table is damaged; it is verified at the first call.
        """
        found = np.full(len(ids), -1, np.int64)
        if not len(self) or not len(ids):
            return found
        keys = [as_id(key) for key in ids]
        hashes, wanted = id_hashes(keys), StringColumn.pack(keys)
        stored = self._hashes.whole()
        places = np.searchsorted(stored, hashes)
        open_questions = np.arange(len(ids))
        # Usually one round; more are needed only for ids of equal hash, which are adjacent in the table.
        while len(open_questions):
            open_questions = open_questions[places[open_questions] < len(self)]
            open_questions = open_questions[stored[places[open_questions]] == hashes[open_questions]]
            rows = self._rows[places[open_questions]].astype(np.int64)
            if (rows >= len(self)).any():
                raise DamagedIndexError(f"the table of ids refers to a row that does not exist; {LOOK}")
            same = self.strings.equal(rows, wanted, open_questions)
            found[open_questions[same]] = rows[same]
            open_questions = open_questions[~same]
            places[open_questions] += 1
        return found


def write_ids(folder: Path, strings: StringColumn, disk: Disk) -> dict[str, str]:
    """Write the unique ids of a segment; return what each file holds, by name."""
    hashes, rows, ranks = _tables(strings)
    holds = strings.save(folder / STEM, disk, "document ids in the order of the rows")
    write_array(folder / _HASHES, hashes, disk)
    write_array(folder / _ROWS, rows, disk)
    write_array(folder / _RANKS, ranks, disk)
    return holds | {
        _HASHES: "64-bit hashes of the ids, ascending, (P,) uint64",
        _ROWS: "the row of each hash, (P,) uint32",
        _RANKS: "the rank of each row's id in ascending order, (P,) uint32",
    }


def _tables(strings: StringColumn) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint32]]:
    """Hashes in ascending order, the row of each hash, and the rank of each row's id."""
    chunks = range(0, len(strings), _TOGETHER)
    hashes = np.concatenate([np.zeros(0, np.uint64), *(id_hashes(strings[start : start + _TOGETHER]) for start in chunks)])
    by_hash = np.argsort(hashes, kind="stable")
    ranks = np.empty(len(strings), np.uint32)
    ranks[strings.order()] = np.arange(len(strings), dtype=np.uint32)
    return hashes[by_hash], by_hash.astype(np.uint32), ranks


def is_ids(name: str) -> bool:
    """Whether a file of a segment holds the strings of the ids."""
    return name == f"{STEM}.utf8"


def id_hashes(ids: Sequence[str]) -> NDArray[np.uint64]:
    """A 64-bit hash of each id, the same on every machine."""
    digests = [hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest() for key in ids]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64, copy=False)


_DOCUMENTS = "documents"
_LINES, _OFFSETS = f"{_DOCUMENTS}.jsonl", f"{_DOCUMENTS}.offsets"


class TextWriter:
    """Writes documents as JSON lines.

    Args:
        folder: Folder of the files.
        disk: Performs all writes.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._offsets = [0]
        self._file = disk.create(folder / _LINES)

    def add(self, document: Document) -> None:
        """Append one document."""
        fields: dict[str, object] = {"_id": document.id, "title": document.title, "text": document.text}
        if document.metadata:
            fields["metadata"] = dict(document.metadata)
        self.add_line(json.dumps(fields, ensure_ascii=False).encode("utf-8") + b"\n")

    def add_line(self, line: bytes) -> None:
        """Append the stored line of a document from another segment."""
        self._file.write(line)
        self._offsets.append(self._offsets[-1] + len(line))

    def close(self) -> dict[str, str]:
        """Finish the files; return what each holds, by name."""
        self._file.close()
        write_array(self._folder / _OFFSETS, np.array(self._offsets, np.int64), self._disk)
        return {
            _LINES: "the documents as JSON lines, in the order of the rows",
            _OFFSETS: "the byte at which each line begins, and the number of bytes, (P + 1,) int64",
        }


class Texts:
    """The stored documents by row, as JSON lines; both files stay on disk."""

    def __init__(self, files: Files, count: int) -> None:
        """Map the files that `TextWriter` wrote.

        Args:
            files: Files of the segment.
            count: Number of documents P.

        Raises:
            FileNotFoundError: A file is missing.
            DamagedIndexError: A file does not match the number of documents.
        """
        self._path = files.folder / _LINES
        self._lines = StringColumn.open(files, _DOCUMENTS, count, content=_LINES)

    def line(self, row: int) -> bytes:
        """The line of a document, including its line feed."""
        return self._lines.bytes_of(row)

    def __getitem__(self, row: int) -> Document:
        try:
            fields = json.loads(self.line(row))
            return Document(fields["_id"], fields["text"], fields["title"], fields.get("metadata"))
        except DamagedIndexError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedIndexError(f"{self._path}:{row + 1}: not a document ({error}); run quiver index repair") from error

    def lost(self) -> NDArray[np.bool_]:
        """Rows whose line was lost with a damaged file, (P,)."""
        return self._lines.lost()


def is_texts(name: str) -> bool:
    """Whether a file of a segment holds texts, which no search reads."""
    return name in (_LINES, _OFFSETS)
