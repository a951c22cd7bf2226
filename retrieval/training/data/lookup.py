"""Numbers of texts by their ids, for tens of millions of ids: sorted 64-bit hashes and the ids themselves, both on disk.

Only as many ids are compared as are asked for, so that a look-up costs a binary search in memory-mapped numbers. An id of equal hash is
never taken for the one that was asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.training.data.strings import Strings, StringWriter, mapped_numbers

_HASH = np.dtype("<i8")


class IdTable:
    """Ids that have been read once, in the order of their hashes."""

    def __init__(self, ids: Strings, hashes: NDArray[np.int64], places: NDArray[np.int64], hashed: Callable[[str], int]) -> None:
        """What `build_ids` made."""
        self._ids = ids
        self._hashes = hashes
        self._places = places
        self._hashed = hashed

    def __len__(self) -> int:
        return len(self._ids)

    def id(self, place: int) -> str:
        """The id that was read at a place."""
        return self._ids[place]

    def find(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """The place of each id among those that were read, from 0, (B,) for B ids; -1 for one that was not."""
        asked = _hashes(ids, self._hashed)
        found = np.full(len(ids), -1, np.int64)
        at = np.searchsorted(self._hashes, asked)
        open_ = np.arange(len(ids))
        while len(open_):
            # Past the last of equal hash there is nothing more to compare.
            inside = at[open_] < len(self._hashes)
            open_ = open_[inside]
            open_ = open_[self._hashes[at[open_]] == asked[open_]]
            places = self._places[at[open_]]
            wanted = [ids[number] for number in open_.tolist()]
            same = np.fromiter(map(str.__eq__, self._ids.take(places), wanted), bool, len(wanted))
            found[open_[same]] = places[same]
            open_ = open_[~same]
            at[open_] += 1
        return found

    def repeated(self) -> Iterable[tuple[int, int]]:
        """Places of an id and of its repetitions, the first place first."""
        starts = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        group: list[int] = []
        for start in starts.tolist():
            if not group or group[-1] != start:
                yield from self._same(group)
                group = [start]
            group.append(start + 1)
        yield from self._same(group)

    def _same(self, group: Sequence[int]) -> Iterable[tuple[int, int]]:
        """The repetitions in a group of entries of equal hash."""
        first: dict[str, int] = {}
        for place in sorted(self._places[group].tolist()):
            known = first.setdefault(self._ids[place], place)
            if known != place:
                yield known, place


class IdWriter:
    """Takes ids as they come; a context that closes its files."""

    def __init__(self, stem: Path, *, hashed: Callable[[str], int] = hash) -> None:
        """Begin.

        Args:
            stem: Path of the files without their suffixes.
            hashed: A hash of at most 64 bits, signed. The interpreter's own differs from process to process, which is why the table
                serves the process that makes it.
        """
        self._stem = stem
        self._hashed = hashed
        self._strings = StringWriter(stem)
        self._found = array("q")

    def add(self, key: str, encoded: bytes) -> None:
        """Take the next id, as it is and in UTF-8."""
        self._strings.add(encoded)
        self._found.append(self._hashed(key))

    def table(self) -> IdTable:
        """Sort what was taken; nothing can be added after that."""
        self._strings.close()
        hashes = np.frombuffer(self._found, np.int64) if self._found else np.empty(0, np.int64)
        order = np.argsort(hashes, kind="stable")
        for suffix, values in ((".hashes", hashes[order]), (".places", order)):
            with self._stem.with_name(self._stem.name + suffix).open("xb") as file:
                file.write(np.ascontiguousarray(values, _HASH).data)
        self._found = array("q")
        return IdTable(
            Strings(self._stem),
            mapped_numbers(self._stem.with_name(f"{self._stem.name}.hashes"), np.int64),
            mapped_numbers(self._stem.with_name(f"{self._stem.name}.places"), np.int64),
            self._hashed,
        )


def _hashes(ids: Sequence[str], hashed: Callable[[str], int]) -> NDArray[np.int64]:
    return np.fromiter(map(hashed, ids), np.int64, len(ids))
