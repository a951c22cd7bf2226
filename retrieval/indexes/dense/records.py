"""Files of records, one a document, that are appended to together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import NDArray

from retrieval.indexes.disk import Disk, little_endian
from retrieval.indexes.engines import Bitmap

# Documents copied at a time.
_COPIED = 16_384


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

    def copy(self, name: str, records: NDArray[Any], keep: Bitmap) -> None:
        """Append those of the records of another segment, (P, ...), that are kept, (P,)."""
        for start in range(0, len(records), _COPIED):
            part = slice(start, start + _COPIED)
            self.write(name, records[part][keep[part]])

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
