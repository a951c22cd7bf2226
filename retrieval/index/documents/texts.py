"""The documents of a segment as text, so that a hit can be shown: JSON lines and the byte at which each ends.

Reading one document touches that line alone, whatever the size of the corpus.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.disk import Disk, write_array
from quiver.retrieval.index.errors import DamagedIndexError, LostTextError
from quiver.retrieval.index.mapped import CheckedArray, Files, strings_lost
from quiver.retrieval.records import Document

_LINES = "documents.jsonl"
_ENDS = "documents.ends"
_LOST = "lost"


class TextWriter:
    """Writes documents one after the other.

    Args:
        folder: Takes the files.
        disk: Writes them.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._ends: list[int] = []
        self._end = 0
        self._file = disk.create(folder / _LINES)

    def add(self, document: Document) -> None:
        """Append one document."""
        fields: dict[str, object] = {"_id": document.id, "title": document.title, "text": document.text}
        if document.metadata:
            fields["metadata"] = dict(document.metadata)
        self.add_line(json.dumps(fields, ensure_ascii=False).encode("utf-8") + b"\n")

    def add_line(self, line: bytes) -> None:
        """Append a document as another segment has it."""
        self._file.write(line)
        self._end += len(line)
        self._ends.append(self._end)

    def close(self) -> dict[str, str]:
        """Finish the files; file name -> what it holds."""
        self._file.close()
        write_array(self._folder / _ENDS, np.array(self._ends, np.int64), self._disk)
        return {
            _LINES: "the documents as JSON lines, in the order of the rows",
            _ENDS: "the byte at which each line ends, (P,) int64",
        }


class Texts:
    """The stored documents by row; both files stay on the disk."""

    def __init__(self, files: Files, count: int, *, instead: Mapping[int, bytes] | None = None) -> None:
        """Map what `TextWriter` wrote.

        Args:
            files: The segment's.
            count: Number of documents P.
            instead: Row -> the line that takes the place of one that cannot be read.

        Raises:
            FileNotFoundError: A file is missing.
            DamagedIndexError: A file does not fit the number of documents.
        """
        self._path = files.folder / _LINES
        self._instead = instead or {}
        self._ends = files.map(_ENDS, np.int64, (count,))
        self._bytes = files.map(_LINES, np.uint8, (-1,))
        if files.is_lost(_ENDS) and not files.is_lost(_LINES):  # JSON has no line ends within a line
            ends = 1 + np.flatnonzero(self._bytes.whole() == ord("\n"))
            self._ends = CheckedArray(ends) if len(ends) == count else self._ends
        if not files.is_lost(_ENDS) and len(self._bytes) != (int(self._ends.item(count - 1)) if count else 0):
            raise DamagedIndexError(f"{files.folder / _ENDS}: does not fit {len(self._bytes)} bytes of texts; quiver index repair")

    def line(self, row: int) -> bytes:
        """The line of a document, with its end."""
        if row in self._instead:
            return self._instead[row]
        content: bytes = self._bytes[(self._ends.item(row - 1) if row else 0) : self._ends.item(row)].tobytes()
        return content

    def __getitem__(self, row: int) -> Document:
        try:
            fields = json.loads(self.line(row))
            if not fields.get(_LOST):
                return Document(fields["_id"], fields["text"], fields["title"], fields.get("metadata"))
        except DamagedIndexError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedIndexError(f"{self._path}:{row + 1}: not a document ({error}); quiver index repair") from error
        raise LostTextError(f"the text of document '{fields['_id']}' was lost to damage; add the document again with --replace")

    def lost(self) -> NDArray[np.bool_]:
        """The rows whose line a salvaged file has lost, (P,)."""
        return strings_lost(self._ends, self._bytes)


def lost_line(key: str) -> bytes:
    """The line of a document whose text is lost."""
    return json.dumps({"_id": key, _LOST: True}, ensure_ascii=False).encode("utf-8") + b"\n"


def is_texts(name: str) -> bool:
    """Whether a file of a segment holds texts, which no search reads."""
    return name in (_LINES, _ENDS)
