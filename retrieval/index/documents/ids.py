"""Document ids of one segment: from row to id and from id to row, for millions, without a Python object each.

Beside the strings there is a table of 64-bit hashes in ascending order with the row of each (ids of equal hash are told apart by their
bytes), and the rank of every id among the others, by which ties are broken. All of it is mapped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.data.corpus import as_id
from quiver.retrieval.index.disk import Disk, write_array
from quiver.retrieval.index.documents.strings import LOOK, PackedStrings
from quiver.retrieval.index.errors import DamagedIndexError
from quiver.retrieval.index.mapped import CheckedArray, Files

STEM = "ids"
"""What the names of the files begin with."""

_HASHES = "ids.hashes"
_ROWS = "ids.rows"
_RANKS = "ids.ranks"

# Ids that are objects at a time.
_TOGETHER = 65_536


class IdTable:
    """The ids of a segment's P documents.

    Attributes:
        strings: The ids by row.
    """

    def __init__(self, strings: PackedStrings, hashes: CheckedArray, rows: CheckedArray, ranks: CheckedArray) -> None:
        self.strings = strings
        self._hashes = hashes
        self._rows = rows
        self._ranks = ranks

    @classmethod
    def open(cls, files: Files, count: int) -> IdTable:
        """Map what `write_ids` wrote.

        Raises:
            FileNotFoundError: A file is missing.
            DamagedIndexError: A file does not fit the number of documents.
        """
        return cls(
            PackedStrings.open(files, STEM, count),
            files.map(_HASHES, np.uint64, (count,)),
            files.map(_ROWS, np.uint32, (count,)),
            files.map(_RANKS, np.uint32, (count,)),
        )

    @classmethod
    def of(cls, ids: Sequence[str]) -> IdTable:
        """A table in memory of ids that differ from each other."""
        strings = PackedStrings.pack(ids)
        return cls(strings, *(CheckedArray(table) for table in _tables(strings)))

    @property
    def ranks(self) -> NDArray[np.uint32]:
        """The rank of each id in ascending order, (P,)."""
        return self._ranks.whole()

    def __len__(self) -> int:
        return len(self.strings)

    def hashes_of(self, rows: NDArray[np.bool_] | None) -> NDArray[np.uint64]:
        """The hashes of the ids in some rows, ascending; equal hashes of 64 bits are equal ids but for one chance in many millions.

        Args:
            rows: Which rows, (P,); None for all.

        Raises:
            DamagedIndexError: The table is not what was written.
        """
        if rows is None:
            return self._hashes.whole()
        numbers = self._rows.whole()
        if len(self) and int(numbers.max()) >= len(self):
            raise DamagedIndexError(f"the table of ids names a row that there is not; {LOOK}")
        hashes: NDArray[np.uint64] = self._hashes.whole()[rows[numbers]]
        return hashes

    def rows_of(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """The row of each id, (len(ids),); -1 where the segment has no such document. An integer stands for its digits, as in files.

        Raises:
            InputError: An id is neither a string nor an integer.
            DamagedIndexError: The table is not what was written, which nobody has asked for before.
        """
        found = np.full(len(ids), -1, np.int64)
        if not len(self) or not len(ids):
            return found
        keys = [as_id(key) for key in ids]
        hashes, asked = id_hashes(keys), PackedStrings.pack(keys)
        stored = self._hashes.whole()
        places = np.searchsorted(stored, hashes)
        open_questions = np.arange(len(ids))
        # Nearly always one round: another one is for ids of equal hash, which stand side by side.
        while len(open_questions):
            open_questions = open_questions[places[open_questions] < len(self)]
            open_questions = open_questions[stored[places[open_questions]] == hashes[open_questions]]
            rows = self._rows[places[open_questions]].astype(np.int64)
            if (rows >= len(self)).any():
                raise DamagedIndexError(f"the table of ids names a row that there is not; {LOOK}")
            same = self.strings.equal(rows, asked, open_questions)
            found[open_questions[same]] = rows[same]
            open_questions = open_questions[~same]
            places[open_questions] += 1
        return found


def write_ids(folder: Path, strings: PackedStrings, disk: Disk) -> dict[str, str]:
    """Write the ids of a segment, which differ from each other; file name -> what it holds."""
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


def _tables(strings: PackedStrings) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint32]]:
    """Hashes in ascending order, the row of each hash, and the rank of each row's id."""
    chunks = range(0, len(strings), _TOGETHER)
    hashes = np.concatenate([np.zeros(0, np.uint64), *(id_hashes(strings[start : start + _TOGETHER]) for start in chunks)])
    by_hash = np.argsort(hashes, kind="stable")
    ranks = np.empty(len(strings), np.uint32)
    ranks[strings.order()] = np.arange(len(strings), dtype=np.uint32)
    return hashes[by_hash], by_hash.astype(np.uint32), ranks


def is_ids(name: str) -> bool:
    """Whether a file of a segment holds the ids themselves."""
    return name == f"{STEM}.utf8"


def id_hashes(ids: Sequence[str]) -> NDArray[np.uint64]:
    """A 64-bit hash of each id, the same on every machine."""
    digests = [hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest() for key in ids]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64, copy=False)
