"""Files of an index: written through a `Disk`, memory-mapped and verified block by block as they are read.

Files are raw arrays without a header: the reader knows dtype and shape, the manifest holds the checksum. A file is divided into blocks of
16 KiB with a digest each. `CheckedArray` compares a block with its digest when the block is first read. Damage raises `DamagedIndexError`,
so that programs can distinguish it from a wrong path; repair reads around damaged blocks. `format_version` tells the folder of an index
from others.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import io
import math
import mmap
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import REAL as REAL
from quiver.encoder.files import Disk as Disk
from quiver.encoder.files import link_if_absent as link_if_absent
from quiver.encoder.files import make_folders as make_folders
from quiver.encoder.files import put_file as put_file
from quiver.encoder.files import read_json
from quiver.encoder.files import remove as remove
from quiver.encoder.files import remove_tree as remove_tree
from quiver.encoder.files import write_file as write_file
from quiver.encoder.schema import Count, SchemaError, parse_record

Record = TypeVar("Record")
Content = TypeVar("Content")

# Errors that mean that a file is missing or damaged. Other errors, such as missing permissions or too many open files, may be temporary.
_SPOILT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)

BLOCK = 1 << 14
"""Block size in bytes; the last block of a file may be shorter."""

CHECKSUMS = "checksums"
"""Name of the file with the digests of all other files of a folder, sorted by file name."""

COPY = "copy"
"""Name of the file of a codec that holds its other files once more, one after the other."""

DIGEST = 16
"""Bytes of a digest: a CRC-32 and 12 bytes of a SHA-256."""

COPIED = 1 << 20
"""Bytes copied at a time."""

_SHIFT = BLOCK.bit_length() - 1
_CRC = 4
# Blocks read at a time to hash a whole file.
_READ = 64

FORMAT = "quiver-index"
VERSION = 6
"""Name and version of the format of index folders."""


class DamagedIndexError(InputError):
    """A file of an index is missing, truncated or changed; the message names it. ``quiver index repair`` reports what can be kept."""


def read_description(kind: type[Record], path: Path) -> Record:
    """Read a JSON file that describes others, such as the sizes of a codec, as a dataclass configured by `quiver.encoder.schema.RECORD`.

    Raises:
        DamagedIndexError: A field is missing, unknown or invalid.
        InputError: The file is missing or not JSON.
    """
    content = read_json(path)
    try:
        return parse_record(kind, content, source=str(path))
    except SchemaError as error:
        problems = "; ".join(error.problems)
        raise DamagedIndexError(f"{path}: not the description that was written ({problems}); run quiver index repair") from error


def unreadable(path: Path, error: OSError) -> InputError:
    """Convert an error of reading a file: only missing or damaged files count as index damage, because repair replaces damaged files."""
    if error.errno in _SPOILT:
        return DamagedIndexError(f"{path}: cannot be read ({error.strerror}); the index is damaged, run quiver index repair")
    if error.errno in _TOO_MANY:
        return InputError(f"{path}: cannot be read ({error.strerror}); raise the limit, such as with ulimit -n 4096")
    return InputError(f"{path}: cannot be read ({error.strerror})")


def missing_file(path: Path) -> DamagedIndexError:
    """Error for a file that is missing from a committed state."""
    return DamagedIndexError(f"{path}: missing; the index is damaged: run quiver index repair to keep the intact documents")


class MemoryDisk(Disk):
    """Files of an index without a folder, in memory: ``contents`` has the bytes of those written and closed, by path."""

    def __init__(self) -> None:
        self.contents: dict[Path, NDArray[np.uint8]] = {}

    def create(self, path: Path) -> BinaryIO:
        """See `Disk`."""
        if path in self.contents:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        return _MemoryFile(path, self.contents)

    def sync_file(self, path: Path) -> None:
        """See `Disk`; nothing to do."""

    sync_folder = sync_file

    def mkdir(self, path: Path) -> None:
        """Refuse: an index in memory has no folders."""
        raise NotImplementedError(f"{path}: an index in memory has no folders")

    rmdir = mkdir

    def rename(self, source: Path, target: Path) -> None:
        """Refuse: an index in memory neither renames nor links files."""
        raise NotImplementedError(f"{source}: an index in memory cannot rename or link files")

    link = rename

    def unlink(self, path: Path) -> None:
        """See `Disk`."""
        del self.contents[path]


class _MemoryFile(io.BytesIO):
    def __init__(self, path: Path, contents: dict[Path, NDArray[np.uint8]]) -> None:
        super().__init__()
        self._path = path
        self._contents = contents

    def close(self) -> None:
        if not self.closed and self._path not in self._contents:
            self._contents[self._path] = np.frombuffer(self.getvalue(), np.uint8)
        super().close()


def write_array(path: Path, array: NDArray[np.generic], disk: Disk) -> None:
    """Write the raw data of an array, little-endian and in C order, without a header; readers must know shape and dtype."""
    with disk.create(path) as file:
        file.write(little_endian(array).data)


def little_endian(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """The array as it is stored: contiguous and little-endian; the same array if it is so already."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def map_file(path: Path, size: int) -> NDArray[np.uint8]:
    """Map a file of ``size`` >= 1 bytes into memory, read-only; pages are read on access. Raises OSError."""
    if os.name == "nt":  # Windows has no mmap call and no limit on mappings
        return np.asarray(np.memmap(path, np.uint8, "r", shape=(size,)))
    return np.asarray(_Mapping(path, size))


class _Mapping:
    """A memory mapping that is released when the last array on it is deleted."""

    def __init__(self, path: Path, size: int) -> None:
        map_pages, unmap_pages = _load_mmap_calls()
        with path.open("rb", buffering=0) as file:
            address = map_pages(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, True)}
        # Not at interpreter exit: other threads may still be reading, and the operating system releases the mapping.
        weakref.finalize(self, unmap_pages, address, size).atexit = False


@lru_cache(maxsize=1)
def _load_mmap_calls() -> tuple[Any, Any]:
    """``mmap`` and ``munmap`` of the C library."""
    library = ctypes.CDLL(None, use_errno=True)
    map_pages, unmap_pages = library.mmap, library.munmap
    # The last argument is an off_t, which is as wide as a long on all platforms of torch.
    map_pages.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    map_pages.restype = ctypes.c_void_p
    unmap_pages.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return map_pages, unmap_pages


@dataclass(frozen=True)
class FileEntry:
    """One file of a manifest."""

    holds: str  # description of its content
    bytes: Count  # its size in bytes
    sha256: str  # SHA-256 of the digests of its blocks


def count_blocks(size: int) -> int:
    """Number of blocks of a file of ``size`` bytes."""
    return -(-size // BLOCK)


def block_digest(content: bytes | bytearray | memoryview) -> bytes:
    """Digest of one block."""
    return zlib.crc32(content).to_bytes(_CRC, "little") + hashlib.sha256(content).digest()[: DIGEST - _CRC]


def file_digests(path: Path) -> NDArray[np.uint8]:
    """Digests of a file's blocks, (blocks, 16). Raises OSError."""
    digests = bytearray()
    with path.open("rb", buffering=0) as file:
        while content := file.read(_READ * BLOCK):
            view = memoryview(content)
            for start in range(0, len(content), BLOCK):
                digests += block_digest(view[start : start + BLOCK])
    return np.frombuffer(bytes(digests), np.uint8).reshape(-1, DIGEST)


def digests_sha256(digests: NDArray[np.uint8]) -> str:
    """Checksum of a file in the manifest: the SHA-256 of its digests."""
    return hashlib.sha256(digests.tobytes()).hexdigest()


def read_digests(folder: Path, files: Mapping[str, FileEntry]) -> dict[str, NDArray[np.uint8]]:
    """Digests of the files of a folder, (blocks, 16) each, verified with the manifest where possible.

    If the file of digests is damaged, the digests of intact files are computed again. Those of damaged files are returned unverified: a
    block that matches its stored digest is intact in any case.
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
            computed = read_around(folder / name, file_digests)
            digests = computed if computed is not None and digests_sha256(computed) == entry.sha256 else digests
        found[name] = digests
    return found


def read_around(path: Path, read: Callable[[Path], Content]) -> Content | None:
    """Read a file; None if it is damaged. Raises InputError if it cannot be read for a reason other than damage."""
    try:
        return read(path)
    except OSError as error:
        problem = unreadable(path, error)
        if isinstance(problem, DamagedIndexError):
            return None
        raise problem from error


class BlockChecks:
    """Keeps track of the blocks of an open file that have been compared with their digests, (blocks, 16)."""

    def __init__(self, path: Path, content: NDArray[np.uint8], digests: NDArray[np.uint8]) -> None:
        self._path, self._content, self._digests = path, content, digests
        # The same bytes twice: one span is looked up faster in the first, many in the second.
        self._marks = bytearray(b"\1") * len(digests)
        self._unread = np.frombuffer(self._marks, bool)
        self._left = len(digests)
        self._lock = threading.Lock()

    def need(self, first: int, last: int) -> None:
        """Verify the blocks of the bytes ``first`` to ``last - 1`` that have not been verified yet; raises DamagedIndexError."""
        if self._left and last > first:
            begin, end = first >> _SHIFT, ((last - 1) >> _SHIFT) + 1
            if self._marks.find(1, begin, end) >= 0:
                self._compare(np.arange(begin, end))

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
        if self._unread[begins].any():
            self._compare(begins)

    def _compare(self, blocks: NDArray[np.int64]) -> None:
        open_blocks = np.unique(blocks[self._unread[blocks]]).tolist()
        for block in open_blocks:
            if not self._holds(block):
                first = block * BLOCK
                last = min(first + BLOCK, len(self._content))
                raise DamagedIndexError(
                    f"{self._path}: bytes {first} to {last - 1} have changed since they were written; run quiver index"
                    " repair to keep the intact documents"
                )
        with self._lock:
            self._unread[open_blocks] = False
            self._left = int(np.count_nonzero(self._unread))

    def _holds(self, block: int) -> bool:
        content = self._content[block * BLOCK : (block + 1) * BLOCK]
        return block_digest(content.data) == bytes(self._digests[block])


def read_damaged(path: Path, size: int, digests: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Map a file that may be damaged; also return which of its blocks differ from their digests, (blocks,).

    A file of another size is padded with zeros or cut off, in memory; a missing one is all zeros.
    """
    there = path.stat().st_size if path.is_file() else 0
    content = map_file(path, size) if there == size > 0 else np.zeros(size, np.uint8)
    if 0 < there != size:
        part = np.fromfile(path, np.uint8, min(there, size))
        content[: len(part)] = part
    blocks = range(len(digests))
    return content, np.array([block_digest(content[block * BLOCK :][:BLOCK].data) != bytes(digests[block]) for block in blocks], bool)


def map_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map a file that `write_array` wrote as a read-only array; -1 as the first size of the shape is computed from the file's size.

    Raises:
        FileNotFoundError: The file does not exist.
        DamagedIndexError: The file has a wrong size.
        InputError: The file cannot be read for a reason other than damage.
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

    Indexing verifies what it returns. `rows`, `spans` and `whole` verify the named rows and return the complete array, for kernels that
    take an array and row numbers.

    Args:
        array: The array, (n, ...), C-contiguous, memory-mapped or in memory.
        checks: Verification of the underlying file; None for no verification.
        lost: Blocks of the file known to be damaged, (blocks,); repair reads around them.
        start: The byte of the file at which the array begins.
        is_verified: Whether the content is what was written: it has checks, or was just made in memory.
    """

    def __init__(
        self,
        array: NDArray[Any],
        checks: BlockChecks | None = None,
        *,
        lost: NDArray[np.bool_] | None = None,
        start: int = 0,
        is_verified: bool = True,
    ) -> None:
        self._array = array
        self._memory: memoryview | None = None
        self._checks = checks
        self._lost = lost
        self._start = start
        self.is_verified = is_verified
        self._width = array.itemsize * math.prod(array.shape[1:])
        self.shape: tuple[int, ...] = array.shape
        self.nbytes: int = array.nbytes

    @property
    def is_whole(self) -> bool:
        """Whether no block is known to be damaged."""
        return self._lost is None or not self._lost.any()

    def __len__(self) -> int:
        return self.shape[0]

    def part(self, start: int, dtype: DTypeLike, count: int) -> CheckedArray:
        """``count`` elements from a byte on as an array of their own; raises ValueError if there are fewer."""
        stored = np.dtype(dtype).newbyteorder("<")
        content = self._array.reshape(-1).view(np.uint8)[start : start + count * stored.itemsize].view(stored)
        if start < 0 or len(content) != count:
            raise ValueError(f"{count} elements of {stored} do not lie at byte {start} of {self.nbytes}")
        return CheckedArray(content, self._checks, lost=self._lost, start=self._start + start, is_verified=self.is_verified)

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> NDArray[Any]:
        if self._checks is None:
            return self._array[rows]
        if not isinstance(rows, slice):
            return self.rows(rows)[rows]
        first, last, _ = rows.indices(len(self))
        self._checks.need(self._start + first * self._width, self._start + last * self._width)
        return self._array[rows]

    def item(self, row: int) -> Any:
        """One element of a one-dimensional array, as a Python number."""
        if self._checks is not None:
            self._checks.need(self._start + row * self._width, self._start + (row + 1) * self._width)
        return self._array.item(row)

    def span(self, first: int, last: int) -> memoryview:
        """The elements ``first`` to ``last - 1`` of a one-dimensional array: for a few, faster than an array of them."""
        if self._checks is not None:
            self._checks.need(self._start + first * self._width, self._start + last * self._width)
        if self._memory is None:
            native = self._array.dtype.newbyteorder("=")  # a memoryview reads no other
            self._memory = self._array.astype(native, copy=False).view(native).data
        return self._memory[first:last]

    def rows(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """The complete array, after verifying the given rows."""
        if self._checks is not None:
            firsts = self._start + np.asarray(rows, np.int64) * self._width
            self._checks.need_each(firsts, firsts + self._width)
        return self._array

    def spans(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[Any]:
        """The complete array, after verifying the rows ``begins[i]`` to ``ends[i] - 1``."""
        if self._checks is not None:
            self._checks.need_each(self._start + begins * self._width, self._start + ends * self._width)
        return self._array

    def whole(self) -> NDArray[Any]:
        """The complete array, after verifying all of it."""
        if self._checks is not None:
            self._checks.need(self._start, self._start + self.nbytes)
        return self._array

    def damaged(self) -> NDArray[np.bool_]:
        """Which rows have a byte in a lost block, (n,)."""
        if self._lost is None or not len(self):
            return np.zeros(len(self), bool)
        lost_before = np.append(0, np.cumsum(self._lost))
        firsts = self._start + np.arange(len(self)) * self._width
        lasts = firsts + self._width
        damaged: NDArray[np.bool_] = lost_before[-(-lasts // BLOCK)] > lost_before[firsts // BLOCK]
        return damaged


class Files:
    """The files of one folder, opened for reading.

    Args:
        folder: The folder.
        digests: Digests of the blocks by file name; files without digests are not verified.
        sizes: Expected sizes in bytes by file name, as far as they are known.
        contents: File name -> bytes, for files in memory; None for files on disk.
        around_damage: Read damaged files without errors; `CheckedArray.damaged` names the rows that have a byte in a damaged block.
    """

    def __init__(
        self,
        folder: Path,
        digests: Mapping[str, NDArray[np.uint8]] | None = None,
        *,
        sizes: Mapping[str, int] | None = None,
        contents: Mapping[str, NDArray[np.uint8]] | None = None,
        around_damage: bool = False,
    ) -> None:
        self.folder = folder
        self._contents = contents
        self._sizes = sizes or {}
        self._digests = digests or {}
        self._around_damage = around_damage

    @classmethod
    def written(cls, folder: Path, disk: Disk) -> Files:
        """Files that were just written through a disk, possibly a `MemoryDisk`; they are not verified."""
        if not isinstance(disk, MemoryDisk):
            return cls(folder)
        return cls(folder, contents={path.name: content for path, content in disk.contents.items() if path.parent == folder})

    def map(self, name: str, dtype: DTypeLike, shape: tuple[int, ...]) -> CheckedArray:
        """Map a file; see `map_array`."""
        if self._around_damage:
            content, lost = read_damaged(self.folder / name, self._sizes[name], self._digests[name])
            return CheckedArray(content.view(np.dtype(dtype).newbyteorder("<")).reshape(shape), lost=lost)
        if self._contents is not None:
            return CheckedArray(self._contents[name].view(np.dtype(dtype).newbyteorder("<")).reshape(shape))
        path = self.folder / name
        array = map_array(path, dtype, shape)
        if self._sizes.get(name, array.nbytes) != array.nbytes:
            raise DamagedIndexError(
                f"{path}: {array.nbytes} bytes, but {self._sizes[name]} were written; run quiver index repair to keep the intact documents"
            )
        digests = self._digests.get(name)
        checks = None if digests is None else BlockChecks(path, array.reshape(-1).view(np.uint8), digests)
        return CheckedArray(array, checks, is_verified=checks is not None)

    def read(self, name: str) -> bytes:
        """Read and verify a file; raises FileNotFoundError or DamagedIndexError."""
        content: bytes = self.map(name, np.uint8, (-1,)).whole().tobytes()
        return content


def lengths_around(lengths: NDArray[np.integer[Any]], lost: NDArray[np.bool_], total: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Replace lost lengths so that the rows after them keep their first vectors; also return the rows that cannot be located, (P,).

    ``total`` is the number of vectors of all rows, T.

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
    """Rows that have at least one of the marked vectors, (P,); vectors (T,), first vector of each row and T, (P + 1,)."""
    before = np.append(0, np.cumsum(vectors))
    found: NDArray[np.bool_] = before[offsets[1:]] > before[offsets[:-1]]
    return found


class RecordFiles:
    """Writes several files of a folder at the same time; ``holds`` describes the content of each, by name."""

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
        if not len(records):  # an empty array has no buffer
            return
        try:
            self._open[name].write(little_endian(records).data)
        except OSError:
            self._abandon()
            raise

    def copy(self, name: str, records: NDArray[Any] | CheckedArray, keep: NDArray[np.bool_]) -> None:
        """Append the kept records of another segment, (P, ...), chosen by a bitmap (P,)."""
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
        """Close the files and return what each holds, by name."""
        try:
            for file in self._open.values():
                file.close()
        except OSError:
            self._abandon()
            raise
        return self._holds

    def _abandon(self) -> None:
        """Close the files after an error, ignoring further errors from unwritten buffers."""
        for file in self._open.values():
            try:
                file.close()
            except OSError:
                continue


def _step(records: NDArray[Any] | CheckedArray) -> int:
    """Number of records copied at a time."""
    return max(1, COPIED // max(1, records.nbytes // max(1, len(records))))


def format_version(root: Path) -> int | None:
    """Format version of the index in a folder, in whatever state; None if the folder is not an index."""
    path = root / "FORMAT"
    try:
        line = path.read_bytes()
        version = int(line.split()[1])
        return version if line == format_line(version) else None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, IndexError):
        return None
    except OSError as error:
        raise unreadable(path, error) from error


def format_line(version: int) -> bytes:
    """Content of the FORMAT file: the format, its version, and a checksum."""
    said = f"{FORMAT} {version}"
    return f"{said} {hashlib.sha256(said.encode()).hexdigest()[:16]}\n".encode()
