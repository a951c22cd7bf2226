"""Changes to the file system that tests can interrupt call by call.

Long jobs and indexes change files through a `Disk`. ``REAL`` is the real file system. Tests use disks that fail at a chosen call, run
out of space, write partially, or forget unsynced data: durability depends on the order of these calls. Reads and locks do not use a disk.
"""

from __future__ import annotations

import errno
import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from quiver.encoder.files import naming, sync_folder

_BUFFER = 1 << 20
# Errors of file systems without hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class _NamedFile(io.FileIO):
    """A file whose errors name it, as those of opening it do: a full disk is reported for a descriptor only."""

    def write(self, content: Any) -> int:
        with naming(Path(os.fsdecode(self.name))):
            return super().write(content)


class Disk:
    """The calls that change files, on the real file system; each may raise OSError."""

    def create(self, path: Path) -> BinaryIO:
        """Create a file and open it for writing; an existing file is an error. Its content is durable after ``sync_file``."""
        return io.BufferedWriter(_NamedFile(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o666)), _BUFFER)

    def sync_file(self, path: Path) -> None:
        """Make the content of a file durable."""
        with path.open("rb+") as file, naming(path):
            os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Make the names of a folder's entries durable."""
        sync_folder(path)

    def mkdir(self, path: Path) -> None:
        """Create a folder; an existing one is an error."""
        path.mkdir()

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder atomically; a file at the target is replaced."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name atomically; an existing target is an error."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()


REAL = Disk()
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
    """Rename a durable file atomically; an existing target is a FileExistsError, but on a file system without hard links replaced."""
    try:
        disk.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        disk.rename(source, target)
    else:
        disk.unlink(source)


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
