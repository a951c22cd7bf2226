"""The disk as an index sees it: every change of the file system that building, adding, deleting, compacting or repairing makes.

There is one implementation, ``REAL``. Tests put another in its place that dies at a chosen call, has no room left, writes short, or
forgets what was not synced: that nothing is ever lost is a property of the order of these calls, and is tested call by call.

Reading does not go through here, nor does the writers' lock, which holds no data.
"""

from __future__ import annotations

import errno
import io
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.files import sync_folder

_BUFFER = 1 << 20
# What a file system without hard links says.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Disk(Protocol):
    """The calls that change what is on the disk; each may raise OSError."""

    def create(self, path: Path) -> BinaryIO:
        """Open a new file for writing; one that is there is an error. What is written is durable after ``sync_file``."""

    def sync_file(self, path: Path) -> None:
        """Make the content of a file durable."""

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""

    def mkdir(self, path: Path) -> None:
        """Make a folder; one that is there is an error."""

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name in one step; a file at the target is replaced."""

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name in one step; one that is taken is an error."""

    def unlink(self, path: Path) -> None:
        """Remove a file."""

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""


class RealDisk:
    """The file system itself."""

    def create(self, path: Path) -> BinaryIO:
        """See `Disk`."""
        return path.open("xb", buffering=_BUFFER)

    def sync_file(self, path: Path) -> None:
        """See `Disk`."""
        with path.open("rb+") as file:
            os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """See `Disk`."""
        sync_folder(path)

    def mkdir(self, path: Path) -> None:
        """See `Disk`."""
        path.mkdir()

    def rename(self, source: Path, target: Path) -> None:
        """See `Disk`."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """See `Disk`."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        """See `Disk`."""
        path.unlink()

    def rmdir(self, path: Path) -> None:
        """See `Disk`."""
        path.rmdir()


class MemoryDisk:
    """Files of an index without a folder: what is created stays in memory. Folders, renames and links are not supported.

    Attributes:
        contents: Path -> bytes of the files that have been written and closed.
    """

    def __init__(self) -> None:
        self.contents: dict[Path, NDArray[np.uint8]] = {}

    def create(self, path: Path) -> BinaryIO:
        """See `Disk`."""
        if path in self.contents:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        return _MemoryFile(path, self.contents)

    def sync_file(self, path: Path) -> None:
        """See `Disk`; nothing to do."""

    def sync_folder(self, path: Path) -> None:
        """See `Disk`; nothing to do."""

    def mkdir(self, path: Path) -> None:
        """See `Disk`."""
        raise NotImplementedError(f"{path}: an index in memory has no folders")

    def rename(self, source: Path, target: Path) -> None:
        """See `Disk`."""
        raise NotImplementedError(f"{source}: files of an index in memory are not renamed")

    def link(self, source: Path, target: Path) -> None:
        """See `Disk`."""
        raise NotImplementedError(f"{source}: files of an index in memory are not linked")

    def unlink(self, path: Path) -> None:
        """See `Disk`."""
        del self.contents[path]

    def rmdir(self, path: Path) -> None:
        """See `Disk`."""
        raise NotImplementedError(f"{path}: an index in memory has no folders")


class _MemoryFile(io.BytesIO):
    def __init__(self, path: Path, contents: dict[Path, NDArray[np.uint8]]) -> None:
        super().__init__()
        self._path = path
        self._contents = contents

    def close(self) -> None:
        if not self.closed and self._path not in self._contents:
            self._contents[self._path] = np.frombuffer(self.getvalue(), np.uint8)
        super().close()


REAL: Disk = RealDisk()
"""The disk that everything writes to unless it is told another."""


def write_file(path: Path, content: bytes, disk: Disk) -> None:
    """Write a new file that is durable when this returns; its name is not before its folder is synced."""
    with disk.create(path) as file:
        file.write(content)
    disk.sync_file(path)


def put_file(path: Path, content: bytes, disk: Disk) -> None:
    """Write a file that appears under its name whole and durable, in the place of what had the name."""
    temporary = path.with_name(f"{path.name}.tmp")
    if temporary.exists():  # of a process that was killed; whoever writes here is alone
        disk.unlink(temporary)
    write_file(temporary, content, disk)
    disk.rename(temporary, path)
    disk.sync_folder(path.parent)


def link_if_absent(source: Path, target: Path, disk: Disk) -> None:
    """Give a durable file the name it is to have, in one step; its present name is gone then.

    Raises:
        FileExistsError: The name is taken; where the file system knows no hard links, what has the name is replaced instead.
    """
    try:
        disk.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        disk.rename(source, target)
    else:
        disk.unlink(source)


def write_array(path: Path, array: NDArray[np.generic], disk: Disk) -> None:
    """Write the bare numbers of an array, little-endian, in C order: shape and type are the reader's knowledge."""
    with disk.create(path) as file:
        file.write(little_endian(array).data)


def little_endian(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """The array as it is stored: contiguous and little-endian; itself where it is so already."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def remove_tree(folder: Path, disk: Disk) -> None:
    """Remove a folder with all that is in it; links are removed, not followed, and a link to a folder is no more than that."""
    if folder.is_symlink():
        disk.unlink(folder)
        return
    for entry in sorted(folder.iterdir()):
        remove(entry, disk)
    disk.rmdir(folder)


def remove(path: Path, disk: Disk) -> None:
    """Remove a file, a link, or a folder with all that is in it."""
    if path.is_dir():
        remove_tree(path, disk)
    else:
        disk.unlink(path)


def make_folders(folder: Path, disk: Disk) -> None:
    """Make a folder and those above it that are missing, each durable under its name."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    # The last of those that are there may have been made by a process that was killed before its name was durable.
    with suppress(PermissionError):  # whoever made it could read the folder above
        disk.sync_folder(folder.parent)
    for path in reversed(missing):
        disk.mkdir(path)
        disk.sync_folder(path.parent)
