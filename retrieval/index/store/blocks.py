"""Checksums of blocks: what lets a reader verify only the bytes that it reads, and repair lose only the blocks that are damaged.

Every file is divided into blocks of 16 KiB. The digests of a folder's files lie in one file beside them, ``checksums``; the manifest
holds one sha256 a file, that of its digests. 16 KiB is a compromise: a scattered read hashes one block (about 10 us), the digests take
0.1 % of the data, and a damaged block of 384-dimensional float32 vectors costs eleven documents.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.errors import DamagedIndexError, unreadable

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
