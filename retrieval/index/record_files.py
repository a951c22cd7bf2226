"""Files of records, one a document or one a vector, that are appended to together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import NDArray

from quiver.retrieval.index.disk import Disk, little_endian
from quiver.retrieval.index.engines import Bitmap
from quiver.retrieval.index.mapped import CheckedArray

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

    def copy(self, name: str, records: NDArray[Any] | CheckedArray, keep: Bitmap) -> None:
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
