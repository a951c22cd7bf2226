"""Memory-mapped files of an index, verified block by block as they are read.

Files are raw arrays without a header: the reader knows dtype and shape, the manifest holds the checksum. A file is divided into blocks of
16 KiB with a digest each. `CheckedArray` compares a block with its digest when the block is first read; repair reads around damaged
blocks (`SalvagedFile`).
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from quiver.retrieval.index.disk import Disk, MemoryDisk, little_endian
from quiver.retrieval.index.errors import DamagedIndexError, unreadable

_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path, size: int) -> NDArray[np.uint8]:
    """The bytes of a file, (size,), mapped read-only: nothing is read until it is used.

    Args:
        path: The file.
        size: Its size in bytes, at least 1.

    Raises:
        OSError: It cannot be opened or mapped.
    """
    if os.name == "nt":  # no mmap there to call, and no such limit
        return np.asarray(np.memmap(path, np.uint8, "r", shape=(size,)))
    return np.asarray(_Mapping(path, size))


class _Mapping:
    """A mapping that ends when the last array of it is gone."""

    def __init__(self, path: Path, size: int) -> None:
        map_pages, unmap_pages = _calls()
        with path.open("rb", buffering=0) as file:
            address = map_pages(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, True)}
        # Not when the interpreter ends: other threads may still be reading, and the system unmaps what is left.
        weakref.finalize(self, unmap_pages, address, size).atexit = False


@lru_cache(maxsize=1)
def _calls() -> tuple[Any, Any]:
    """``mmap`` and ``munmap`` of the C library."""
    library = ctypes.CDLL(None, use_errno=True)
    map_pages, unmap_pages = library.mmap, library.munmap
    # The last argument is an off_t, which is as wide as a long wherever torch runs.
    map_pages.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    map_pages.restype = ctypes.c_void_p
    unmap_pages.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return map_pages, unmap_pages


if TYPE_CHECKING:
    from quiver.retrieval.index.store.manifest import FileEntry

Content = TypeVar("Content")

BLOCK = 1 << 14
"""Bytes of a block; the last one of a file may be shorter."""

CHECKSUMS = "checksums"
"""Name of the file that holds the digests of the other files of a folder, in the order of their names."""

DIGEST = 16
"""Bytes of a digest: a CRC-32, which tells where a single bit has flipped, and 12 bytes of a sha256, which tells everything else."""

_SHIFT = BLOCK.bit_length() - 1
_CRC = 4
# Blocks that are hashed at a time where a whole file is.
_READ = 64


def count_blocks(size: int) -> int:
    """Number of blocks of a file of ``size`` bytes."""
    return -(-size // BLOCK)


def block_digest(content: bytes | bytearray | memoryview) -> bytes:
    """Digest of one block."""
    return zlib.crc32(content).to_bytes(_CRC, "little") + hashlib.sha256(content).digest()[: DIGEST - _CRC]


def file_digests(path: Path) -> NDArray[np.uint8]:
    """The digests of a file's blocks, (blocks, 16).

    Raises:
        OSError: It cannot be read.
    """
    digests = bytearray()
    with path.open("rb", buffering=0) as file:
        while content := file.read(_READ * BLOCK):
            view = memoryview(content)
            for start in range(0, len(content), BLOCK):
                digests += block_digest(view[start : start + BLOCK])
    return np.frombuffer(bytes(digests), np.uint8).reshape(-1, DIGEST)


def digests_sha256(digests: NDArray[np.uint8]) -> str:
    """What the manifest holds of a file: the sha256 of its digests."""
    return hashlib.sha256(digests.tobytes()).hexdigest()


def read_digests(folder: Path, files: Mapping[str, FileEntry]) -> dict[str, NDArray[np.uint8]]:
    """The digests of the files of a folder, (blocks, 16) each, which are those that the manifest vouches for wherever that is possible.

    Where the file of digests is damaged, those of a file that is whole are computed again; those of another file are taken as they are:
    the blocks that agree with them are whole, whatever happened to the others.

    Args:
        folder: The folder of a segment or codec.
        files: The manifest's entries.

    Raises:
        InputError: A file may not be read, which is no damage.
    """
    stored = read_around(folder / CHECKSUMS, Path.read_bytes) or b""
    wanted = DIGEST * sum(count_blocks(entry.bytes) for entry in files.values())
    stored = stored[:wanted].ljust(wanted, b"\0")
    found, place = {}, 0
    for name, entry in sorted(files.items()):
        size = DIGEST * count_blocks(entry.bytes)
        digests = np.frombuffer(stored, np.uint8, size, place).reshape(-1, DIGEST)
        place += size
        if digests_sha256(digests) != entry.sha256:
            digests = _recomputed(folder / name, entry, digests)
        found[name] = digests
    return found


def _recomputed(path: Path, entry: FileEntry, otherwise: NDArray[np.uint8]) -> NDArray[np.uint8]:
    digests = read_around(path, file_digests)
    return digests if digests is not None and digests_sha256(digests) == entry.sha256 else otherwise


def read_around(path: Path, read: Callable[[Path], Content]) -> Content | None:
    """What is read of a file; None where the file is damaged.

    Raises:
        InputError: It cannot be read for a reason that is not damage.
    """
    try:
        return read(path)
    except OSError as error:
        problem = unreadable(path, error)
        if isinstance(problem, DamagedIndexError):
            return None
        raise problem from error


class BlockChecks:
    """Which blocks of one file have been compared with their digests; made for one reader of the file.

    Args:
        path: The file, for messages.
        content: Its bytes, mapped, (size,).
        digests: Of its blocks, (blocks, 16).
    """

    def __init__(self, path: Path, content: NDArray[np.uint8], digests: NDArray[np.uint8]) -> None:
        self._path = path
        self._content = content
        self._digests = digests
        self._unread = np.ones(len(digests), bool)
        self._left = len(digests)
        self._lock = threading.Lock()

    def need(self, first: int, last: int) -> None:
        """Compare the blocks of the bytes ``first`` to ``last - 1`` that have not been compared yet.

        Raises:
            DamagedIndexError: One is not what was written.
        """
        if self._left and last > first:
            self._compare(np.arange(first >> _SHIFT, ((last - 1) >> _SHIFT) + 1))

    def need_each(self, firsts: NDArray[np.int64], lasts: NDArray[np.int64]) -> None:
        """`need` for many spans of bytes, (n,) each; empty spans are allowed."""
        if not self._left:
            return
        begins, ends = firsts >> _SHIFT, ((lasts - 1) >> _SHIFT) + 1
        filled = lasts > firsts
        begins, counts = begins[filled], (ends - begins)[filled]
        if not len(begins):
            return
        if int(counts.max()) > 1:
            offsets = np.cumsum(counts) - counts
            begins = np.repeat(begins - offsets, counts) + np.arange(int(counts.sum()))
        self._compare(begins)

    def damaged(self) -> NDArray[np.bool_]:
        """Which blocks are not what was written, (blocks,); all of them are read."""
        return np.array([not self._holds(block) for block in range(len(self._digests))], bool)

    def _compare(self, blocks: NDArray[np.int64]) -> None:
        open_blocks = np.unique(blocks[self._unread[blocks]]).tolist()
        for block in open_blocks:
            if not self._holds(block):
                first = block * BLOCK
                last = min(first + BLOCK, len(self._content))
                raise DamagedIndexError(
                    f"{self._path}: bytes {first} to {last - 1} have changed since they were written; quiver index repair keeps the rest"
                )
        with self._lock:
            self._unread[open_blocks] = False
            self._left = int(np.count_nonzero(self._unread))

    def _holds(self, block: int) -> bool:
        content = self._content[block * BLOCK : (block + 1) * BLOCK]
        return block_digest(content.data) == bytes(self._digests[block])


def corrected(content: bytes, digest: bytes) -> bytes | None:
    """A block with the one flipped bit turned back that makes it agree with its digest; None where no single bit does.

    Flipped bits are what faulty memory and worn media leave most often.

    Example:
        >>> corrected(b"sea birdc", block_digest(b"sea birds"))
        b'sea birds'
    """
    change = zlib.crc32(content) ^ int.from_bytes(digest[:_CRC], "little")
    for distance, bit in np.argwhere(_crc_changes()[: len(content)] == change).tolist():
        whole = bytearray(content)
        whole[len(content) - 1 - distance] ^= 1 << bit
        if block_digest(whole) == digest:
            return bytes(whole)
    return None


@cache
def _crc_changes() -> NDArray[np.uint32]:
    """What a flipped bit changes of a block's CRC-32: by the byte's distance from the end, and by the bit, (16,384, 8)."""
    table = np.array([zlib.crc32(bytes([value])) ^ zlib.crc32(b"\0") for value in range(256)], np.uint32)
    changes = np.empty((BLOCK, 8), np.uint32)
    changes[0] = table[1 << np.arange(8)]
    for distance in range(1, BLOCK):  # a further byte behind the flipped one
        before = changes[distance - 1]
        changes[distance] = table[before & 0xFF] ^ (before >> 8)
    return changes


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
            raise DamagedIndexError(f"{path}: {size} bytes are not an array of shape {shape} and type {stored}; run quiver index repair")
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


def strings_lost(offsets: CheckedArray, content: CheckedArray) -> NDArray[np.bool_]:
    """Which of some strings have lost a byte or one of their borders, (n,).

    Args:
        offsets: Where each string begins, and the number of bytes, (n + 1,) int64.
        content: The bytes of all of them.
    """
    damaged = offsets.damaged()
    lost = damaged[:-1] | damaged[1:]
    lost_before = np.append(0, np.cumsum(content.damaged()))
    places = offsets.whole()
    found: NDArray[np.bool_] = lost | (lost_before[np.where(lost, 0, places[1:])] > lost_before[np.where(lost, 0, places[:-1])])
    return found


COPIED = 1 << 20
"""Bytes copied at a time."""


class RecordFiles:
    """Writes the files of a segment side by side.

    Args:
        folder: An existing folder.
        disk: Writes.
        holds: File name -> what it holds.
    """

    def __init__(self, folder: Path, disk: Disk, holds: Mapping[str, str]) -> None:
        self._holds = dict(holds)
        self._open: dict[str, BinaryIO] = {}
        try:
            for name in holds:
                self._open[name] = disk.create(folder / name)
        except OSError:
            self._abandon()
            raise

    def write(self, name: str, records: NDArray[Any]) -> None:
        """Append records to a file, (n, ...)."""
        if not len(records):  # what has no bytes has no buffer either
            return
        try:
            self._open[name].write(little_endian(records).data)
        except OSError:
            self._abandon()
            raise

    def copy(self, name: str, records: NDArray[Any] | CheckedArray, keep: NDArray[np.bool_]) -> None:
        """Append those of the records of another segment, (P, ...), that are kept, (P,)."""
        step = _step(records)
        for start in range(0, len(records), step):
            part = slice(start, start + step)
            self.write(name, records[part][keep[part]])

    def copy_span(self, name: str, records: NDArray[Any] | CheckedArray, first: int, last: int) -> None:
        """Append the records ``first`` to ``last - 1`` of another segment."""
        step = _step(records)
        for start in range(first, last, step):
            self.write(name, records[start : min(start + step, last)])

    def close(self) -> dict[str, str]:
        """Finish the files; file name -> what it holds."""
        try:
            for file in self._open.values():
                file.close()
        except OSError:
            self._abandon()
            raise
        return self._holds

    def _abandon(self) -> None:
        """Let go of the files after an error; what their buffers hold cannot be written, which is no news."""
        for file in self._open.values():
            try:
                file.close()
            except OSError:
                continue


def _step(records: NDArray[Any] | CheckedArray) -> int:
    """Records that are copied at a time."""
    return max(1, COPIED // max(1, records.nbytes // max(1, len(records))))
