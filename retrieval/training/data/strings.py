"""Many texts on disk, each by its number: their bytes one after the other in one file, where each ends in another.

These are the two buffers of an Arrow large-string array. They are written as the texts come and read through a memory map, so that
neither takes memory by the number of texts, and a text is found in constant time however long the others are.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.training.data.blocks import blocks

Number = TypeVar("Number", bound=np.generic)

BYTES, ENDS = ".bytes", ".ends"
"""What the names of the two files end in; the second holds int64."""


class StringWriter:
    """Writes texts as they come."""

    def __init__(self, stem: Path) -> None:
        """Begin.

        Args:
            stem: Path of both files without their suffixes; the folder must exist.
        """
        self._bytes: BinaryIO = stem.with_name(stem.name + BYTES).open("xb")
        self._ends: BinaryIO = stem.with_name(stem.name + ENDS).open("xb")
        self._size = 0
        self._count = 0

    def __len__(self) -> int:
        """Texts written so far, which is the number that the next one gets."""
        return self._count

    def add(self, text: bytes) -> int:
        """Write a text in UTF-8; its number."""
        self._bytes.write(text)
        self._size += len(text)
        self._ends.write(self._size.to_bytes(8, "little"))
        self._count += 1
        return self._count - 1

    def close(self) -> None:
        """Close the files."""
        self._bytes.close()
        self._ends.close()


class Strings:
    """Texts that a `StringWriter` wrote. Pickled or copied, it is the path alone: whoever unpacks it maps the files again."""

    def __init__(self, stem: Path) -> None:
        """Map the files of ``stem``."""
        self._stem = stem
        self._bytes = _mapped(stem.with_name(stem.name + BYTES))
        self._ends = mapped_numbers(stem.with_name(stem.name + ENDS), np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> str:
        start = int(self._ends[number - 1]) if number else 0
        return self._bytes[start : int(self._ends[number])].decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        for numbers in blocks(range(len(self))):
            yield from self.take(numbers)

    def take(self, numbers: NDArray[np.int64] | Sequence[int]) -> list[str]:
        """The texts of these numbers, in their order."""
        asked = np.asarray(numbers, np.int64)
        ends = self._ends[asked].tolist()
        starts = np.where(asked > 0, self._ends[asked - 1], 0).tolist()
        return [self._bytes[start:end].decode("utf-8") for start, end in zip(starts, ends, strict=True)]

    def __reduce__(self) -> tuple[type[Strings], tuple[Path]]:
        return Strings, (self._stem,)


def mapped_numbers(path: Path, kind: type[Number]) -> NDArray[Number]:
    """The numbers of a file, memory-mapped, (n,); no header, so that they can be written without knowing how many will come."""
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, kind)
    # A plain view: an element of np.memmap itself takes ten times as long to read.
    return np.asarray(np.memmap(path, np.dtype(kind).newbyteorder("<"), "r"))


def _mapped(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
