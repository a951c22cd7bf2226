"""Interface for all changes to the file system that building, adding, deleting, compacting and repairing an index make.

The implementation for real files is ``REAL``. Tests use implementations that fail at a chosen call, run out of space, write partially, or
forget unsynced data: durability depends on the order of these calls, and is tested call by call.

Reads do not use this interface, nor does the writers' lock, which holds no data.
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
# Errors of file systems without hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Disk(Protocol):
    """The calls that change files; each may raise OSError."""

    def create(self, path: Path) -> BinaryIO:
        """Create a file and open it for writing; an existing file is an error. Its content is durable after ``sync_file``."""

    def sync_file(self, path: Path) -> None:
        """Make the content of a file durable."""

    def sync_folder(self, path: Path) -> None:
        """Make the names of a folder's entries durable."""

    def mkdir(self, path: Path) -> None:
        """Create a folder; an existing one is an error."""

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder atomically; a file at the target is replaced."""

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name atomically; an existing target is an error."""

    def unlink(self, path: Path) -> None:
        """Remove a file."""

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""


class RealDisk:
    """The real file system."""

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
    """Files of an index without a folder, kept in memory. Folders, renames and links are not supported.

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
"""Default disk: the real file system."""


def write_file(path: Path, content: bytes, disk: Disk) -> None:
    """Write a new file with durable content; its name is durable only after its folder is synced."""
    with disk.create(path) as file:
        file.write(content)
    disk.sync_file(path)


def put_file(path: Path, content: bytes, disk: Disk) -> None:
    """Write a file atomically and durably; an existing file of that name is replaced."""
    temporary = path.with_name(f"{path.name}.tmp")
    if temporary.exists():  # left by a killed process; the caller is the only writer
        disk.unlink(temporary)
    write_file(temporary, content, disk)
    disk.rename(temporary, path)
    disk.sync_folder(path.parent)


def link_if_absent(source: Path, target: Path, disk: Disk) -> None:
    """Rename a durable file atomically, without replacing an existing file.

    Raises:
        FileExistsError: The target exists. On a file system without hard links, an existing target is replaced instead.
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
    """Write the raw data of an array, little-endian and in C order, without a header; readers must know shape and dtype."""
    with disk.create(path) as file:
        file.write(little_endian(array).data)


def little_endian(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """The array as it is stored: contiguous and little-endian; the same array if it is so already."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def remove_tree(folder: Path, disk: Disk) -> None:
    """Remove a folder and its content; symbolic links are removed, not followed."""
    if folder.is_symlink():
        disk.unlink(folder)
        return
    for entry in sorted(folder.iterdir()):
        remove(entry, disk)
    disk.rmdir(folder)


def remove(path: Path, disk: Disk) -> None:
    """Remove a file, a symbolic link, or a folder with its content."""
    if path.is_dir():
        remove_tree(path, disk)
    else:
        disk.unlink(path)


def make_folders(folder: Path, disk: Disk) -> None:
    """Create a folder and its missing parents, each with a durable name."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    # A process that was killed may have created the last existing folder and not have made its name durable.
    with suppress(PermissionError):  # the process that made it could read its parent
        disk.sync_folder(folder.parent)
    for path in reversed(missing):
        disk.mkdir(path)
        disk.sync_folder(path.parent)
