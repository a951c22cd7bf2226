"""The documents of an index as text, so that a hit can be shown: JSON lines and the byte at which each begins.

Reading one document touches that line alone, whatever the size of the corpus.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from encoder.errors import InputError
from retrieval.indexes.arrays import read_array
from retrieval.records import Document

_DOCUMENTS = "documents.jsonl"
_OFFSETS = "documents.offsets.npy"


class TextWriter:
    """Writes documents one after the other; use it in a ``with`` block, at whose end the files are whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets = [0]

    def __enter__(self) -> TextWriter:
        self._file: BinaryIO = (self._folder / _DOCUMENTS).open("xb")
        return self

    def add(self, document: Document) -> None:
        """Append one document."""
        line = json.dumps({"_id": document.id, "title": document.title, "text": document.text}, ensure_ascii=False) + "\n"
        self._offsets.append(self._offsets[-1] + self._file.write(line.encode("utf-8")))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        if error is None:
            np.save(self._folder / _OFFSETS, np.array(self._offsets, dtype=np.int64), allow_pickle=False)

    @property
    def holds(self) -> dict[str, str]:
        """File name -> what it holds."""
        return {
            _DOCUMENTS: "the documents as JSON lines, in the order of the vectors",
            _OFFSETS: "first byte of each line, and the size of the file, (P + 1,) int64",
        }


class Texts:
    """The stored documents by row; both files stay on disk."""

    def __init__(self, folder: Path, count: int) -> None:
        """Open what ``TextWriter`` wrote.

        Args:
            folder: Where the two files are.
            count: Number of documents P.

        Raises:
            InputError: A file is missing or does not fit the number of documents.
        """
        self._path = folder / _DOCUMENTS
        self._offsets = read_array(folder / _OFFSETS, np.int64, 1)
        try:
            # Mapped, so that an index that is overwritten meanwhile can still be read to the end by those that have it open.
            self._bytes = np.memmap(self._path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise InputError(f"{self._path}: cannot be read ({error}); build the index again") from error
        if len(self._offsets) != count + 1 or self._offsets[-1] != len(self._bytes):
            raise InputError(f"{self._path}: does not fit the {count} documents of the index; build it again")

    def __getitem__(self, row: int) -> Document:
        line = self._bytes[self._offsets[row] : self._offsets[row + 1]].tobytes()
        try:
            fields = json.loads(line)
            return Document(fields["_id"], fields["text"], fields["title"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self._path}:{row + 1}: not a document ({error}); the index is damaged, build it again") from error
