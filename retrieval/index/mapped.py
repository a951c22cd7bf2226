"""Arrays in files without a header, mapped: the reader knows shape and type, the manifest vouches for the bytes.

A `CheckedArray` compares a block of its file with its checksum when the block is first read (`quiver.retrieval.index.store.blocks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from quiver.retrieval.index.disk import Disk, MemoryDisk
from quiver.retrieval.index.errors import DamagedIndexError, unreadable
from quiver.retrieval.index.mapping import map_file
from quiver.retrieval.index.store.blocks import BLOCK, BlockChecks


def map_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map a file as an array, read-only: nothing is read until it is used.

    Args:
        path: The file, as ``write_array`` wrote it.
        dtype: Its type; it is little-endian in the file.
        shape: Its shape; -1 in the first place takes what the file holds.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedIndexError: It has another size.
        InputError: It cannot be read, for a reason that is not damage.
    """
    stored = np.dtype(dtype).newbyteorder("<")
    try:
        size = path.stat().st_size
        if shape[0] == -1:
            row = stored.itemsize * int(np.prod(shape[1:]))
            shape = (size // max(row, 1), *shape[1:])
        if size != stored.itemsize * int(np.prod(shape)):
            raise DamagedIndexError(f"{path}: {size} bytes are not an array of shape {shape} and type {stored}; quiver index repair")
        return map_file(path, size).view(stored).reshape(shape) if size else np.zeros(shape, stored)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error


class CheckedArray:
    """An array of rows whose bytes are verified when they are first read.

    Indexing verifies what it returns. `rows`, `spans` and `whole` verify and return the array itself, for loops that take an array
    and row numbers.

    Args:
        array: The array, (n, ...), C-contiguous, mapped or in memory.
        checks: Of the file behind it; None where nothing is to be verified.
        lost: Blocks of the file that are known to be damaged, (blocks,): repair reads around them.

    Attributes:
        shape: Shape of the array.
        nbytes: Its size in bytes.
    """

    def __init__(self, array: NDArray[Any], checks: BlockChecks | None = None, *, lost: NDArray[np.bool_] | None = None) -> None:
        self._array = array
        self._checks = checks
        self._lost = lost
        self._width = array.itemsize * int(np.prod(array.shape[1:]))
        self.shape: tuple[int, ...] = array.shape
        self.nbytes: int = array.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> NDArray[Any]:
        if self._checks is None:
            return self._array[rows]
        if not isinstance(rows, slice):
            return self.rows(rows)[rows]
        first, last, _ = rows.indices(len(self))
        self._checks.need(first * self._width, last * self._width)
        return self._array[rows]

    def item(self, row: int) -> Any:
        """One number of an array of one dimension, as Python has it."""
        if self._checks is not None:
            self._checks.need(row * self._width, (row + 1) * self._width)
        return self._array.item(row)

    def rows(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """The whole array, of which these rows are verified."""
        if self._checks is not None:
            firsts = np.asarray(rows, np.int64) * self._width
            self._checks.need_each(firsts, firsts + self._width)
        return self._array

    def spans(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[Any]:
        """The whole array, of which the rows ``begins[i]`` to ``ends[i] - 1`` are verified."""
        if self._checks is not None:
            self._checks.need_each(begins * self._width, ends * self._width)
        return self._array

    def whole(self) -> NDArray[Any]:
        """The whole array, verified."""
        if self._checks is not None:
            self._checks.need(0, self.nbytes)
        return self._array

    def damaged(self) -> NDArray[np.bool_]:
        """Which rows have a byte in a block that is lost, (n,)."""
        if self._lost is None or not len(self):
            return np.zeros(len(self), bool)
        lost_before = np.append(0, np.cumsum(self._lost))
        firsts = np.arange(len(self)) * self._width
        lasts = firsts + self._width
        damaged: NDArray[np.bool_] = lost_before[-(-lasts // BLOCK)] > lost_before[firsts // BLOCK]
        return damaged


def as_checked(array: NDArray[Any] | CheckedArray) -> CheckedArray:
    """An array in memory as a `CheckedArray` in which nothing is to be verified."""
    return array if isinstance(array, CheckedArray) else CheckedArray(array)


@dataclass(frozen=True)
class SalvagedFile:
    """A damaged file as far as it can be read.

    Attributes:
        content: Its bytes, (size,), with zeros where there is nothing to be read.
        lost: Which blocks are damaged, (blocks,).
    """

    content: NDArray[np.uint8]
    lost: NDArray[np.bool_]


class Files:
    """The files of one folder, opened for reading.

    Args:
        folder: The folder.
        digests: File name -> the digests of its blocks; what is not named is not verified.
        sizes: File name -> bytes that were written, for files whose size is known.
        salvaged: File name -> what is left of a damaged file, which is read in its place.
        contents: File name -> bytes, for files in memory; None for files on disk.
    """

    def __init__(
        self,
        folder: Path,
        digests: Mapping[str, NDArray[np.uint8]] | None = None,
        *,
        sizes: Mapping[str, int] | None = None,
        salvaged: Mapping[str, SalvagedFile] | None = None,
        contents: Mapping[str, NDArray[np.uint8]] | None = None,
    ) -> None:
        self.folder = folder
        self._contents = contents
        self._sizes = sizes or {}
        self._digests = digests or {}
        self._salvaged = salvaged or {}

    @classmethod
    def written(cls, folder: Path, disk: Disk) -> Files:
        """Files that were just written through a disk, which may keep them in memory; nothing is verified."""
        if not isinstance(disk, MemoryDisk):
            return cls(folder)
        return cls(folder, contents={path.name: content for path, content in disk.contents.items() if path.parent == folder})

    def map(self, name: str, dtype: DTypeLike, shape: tuple[int, ...]) -> CheckedArray:
        """Map a file; see `map_array`."""
        if name in self._salvaged:
            return self._salvage(self._salvaged[name], dtype, shape)
        if self._contents is not None:
            return CheckedArray(self._contents[name].view(np.dtype(dtype).newbyteorder("<")).reshape(shape))
        path = self.folder / name
        array = map_array(path, dtype, shape)
        if self._sizes.get(name, array.nbytes) != array.nbytes:
            raise DamagedIndexError(
                f"{path}: {array.nbytes} bytes, but {self._sizes[name]} were written; quiver index repair keeps the rest"
            )
        digests = self._digests.get(name)
        checks = None if digests is None else BlockChecks(path, array.reshape(-1).view(np.uint8), digests)
        return CheckedArray(array, checks)

    def read(self, name: str) -> bytes:
        """The content of a file, verified.

        Raises:
            FileNotFoundError: There is no such file.
            DamagedIndexError: It is not what was written.
        """
        content: bytes = self.map(name, np.uint8, (-1,)).whole().tobytes()
        return content

    @property
    def lost_names(self) -> list[str]:
        """The files of which a part is lost."""
        return [name for name, file in self._salvaged.items() if file.lost.any()]

    def is_lost(self, name: str) -> bool:
        """Whether a part of a file is lost."""
        return name in self.lost_names

    @staticmethod
    def _salvage(file: SalvagedFile, dtype: DTypeLike, shape: tuple[int, ...]) -> CheckedArray:
        array = file.content.view(np.dtype(dtype).newbyteorder("<"))
        return CheckedArray(array.reshape(shape), lost=file.lost)


def lengths_around(lengths: NDArray[np.integer[Any]], lost: NDArray[np.bool_], total: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Lengths of which some are lost, filled up so that the others begin where they did; and the rows that nobody can place, (P,).

    Args:
        lengths: Vectors of each row, (P,).
        lost: Which of the lengths are lost, (P,).
        total: Vectors of all rows T.

    Example:
        >>> lengths_around(np.array([2, 9, 9, 3]), np.array([False, True, True, False]), 10)
        (array([2, 5, 0, 3]), array([False,  True,  True, False]))
    """
    filled, unplaced = lengths.astype(np.int64), lost.copy()
    if lost.any():
        first, last = np.flatnonzero(lost)[[0, -1]].tolist()
        unplaced[first : last + 1] = True
        filled[first : last + 1] = 0
        filled[first] = max(0, total - int(filled.sum()))
    return filled, unplaced


def rows_with(vectors: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The rows that have one of some vectors, (P,).

    Args:
        vectors: Which vectors, (T,).
        offsets: First vector of each row, and T, (P + 1,).
    """
    before = np.append(0, np.cumsum(vectors))
    found: NDArray[np.bool_] = before[offsets[1:]] > before[offsets[:-1]]
    return found


def strings_lost(ends: CheckedArray, content: CheckedArray) -> NDArray[np.bool_]:
    """Which of some strings that lie one after the other have lost a byte or one of their borders, (n,).

    Args:
        ends: Where each string ends, (n,) int64.
        content: The bytes of all of them.
    """
    lost = ends.damaged()
    lost[1:] |= lost[:-1].copy()
    lost_before = np.append(0, np.cumsum(content.damaged()))
    places = np.where(lost, 0, ends.whole())
    begins = np.where(lost, 0, np.append(0, ends.whole()[:-1]))
    found: NDArray[np.bool_] = lost | (lost_before[places] > lost_before[begins])
    return found
