"""The documents of one segment by row: ids, metadata, token counts and, if stored, texts.

Shapes: P documents of a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.disk import Disk, write_array
from quiver.retrieval.index.documents.metadata import (
    Condition,
    MetadataTable,
    MetadataWriter,
    is_metadata,
    matching_rows,
    merge_columns,
    write_columns,
)
from quiver.retrieval.index.documents.strings import IdTable, StringColumn, Texts, TextWriter, is_ids, write_ids
from quiver.retrieval.index.errors import DamagedIndexError, missing_file
from quiver.retrieval.index.mapped import CheckedArray, Files
from quiver.retrieval.records import Document, TextTokens, TokenCounts

Part = TypeVar("Part")

DOCUMENT_BYTES = 256
"""Maximum memory per document for writing or merging, in bytes, without its id and metadata: hash, rank, offsets, and copies of them."""

DESCRIBED_COPIES = 12
"""Maximum memory for ids and metadata while writing or merging, as a multiple of the size of their files (`is_described`)."""

_TOKENS = "documents.tokens"


class DocumentTable:
    """The documents of a segment, opened.

    Args:
        ids: The ids.
        metadata: Metadata columns, or the error that prevents reading them.
        tokens: Packed token counts of each document, (P,), or the error.
        texts: The texts, or the error; None if texts are not stored.

    Attributes:
        ids: The ids.
    """

    def __init__(
        self,
        ids: IdTable,
        metadata: MetadataTable | DamagedIndexError,
        tokens: CheckedArray | DamagedIndexError,
        texts: Texts | DamagedIndexError | None,
    ) -> None:
        self.ids = ids
        self._metadata = metadata
        self._tokens = tokens
        self._texts = texts

    @classmethod
    def open(cls, files: Files, count: int, *, texts: bool) -> DocumentTable:
        """Open what a `DocumentTableWriter` wrote.

        Every search needs ids, but not texts and metadata: if their files are damaged, only operations that read them fail.

        Args:
            files: Files of the segment.
            count: Number of documents P.
            texts: Whether texts are stored.

        Raises:
            FileNotFoundError: A file is missing.
            DamagedIndexError: A file of the ids is inconsistent with the others.
        """
        return cls(
            IdTable.open(files, count),
            _optional(files, lambda: MetadataTable.open(files)),
            _optional(files, lambda: open_tokens(files, count)),
            _optional(files, lambda: Texts(files, count)) if texts else None,
        )

    @property
    def metadata(self) -> MetadataTable:
        """Metadata columns of the documents.

        Raises:
            DamagedIndexError: Their files are damaged.
        """
        return _opened(self._metadata)

    @property
    def tokens(self) -> CheckedArray:
        """Token counts of each document, (P,), in the packed form of ``_write_tokens``."""
        return _opened(self._tokens)

    @property
    def texts(self) -> Texts | None:
        """The texts; None if they are not stored.

        Raises:
            DamagedIndexError: Their files are damaged.
        """
        return None if self._texts is None else _opened(self._texts)

    def __len__(self) -> int:
        return len(self.ids)

    def matching(self, condition: Condition) -> NDArray[np.bool_]:
        """Rows that meet a condition, as a bitmap (P,)."""
        return matching_rows(condition, self.metadata, len(self))

    def token_counts(self, rows: NDArray[np.bool_]) -> TokenCounts:
        """Total token counts of chosen documents.

        Args:
            rows: Bitmap of the documents, (P,).
        """
        packed = self.tokens.whole()[rows]
        tokens = int((packed >> 2).sum(dtype=np.int64))
        return TokenCounts(len(packed), tokens, int(np.count_nonzero(packed & 2)), int(np.count_nonzero(packed & 1)))

    def having(self, ids: Collection[str]) -> NDArray[np.bool_]:
        """Rows whose ids are among the given ones, as a bitmap (P,)."""
        found = np.zeros(len(self), bool)
        rows = self.ids.rows_of(list(ids))
        found[rows[rows >= 0]] = True
        return found


def _optional(files: Files, opened: Callable[[], Part]) -> Part | DamagedIndexError:
    """Open a part of a segment that searches do not need; return the error if it is damaged.

    Files are opened immediately, not on first use, so that they stay readable when a writer removes them.
    """
    try:
        return opened()
    except FileNotFoundError as error:
        if not files.folder.is_dir():  # a writer has just removed the whole segment
            raise
        return missing_file(Path(error.filename))
    except DamagedIndexError as error:
        return error


def _opened(part: Part | DamagedIndexError) -> Part:
    if isinstance(part, DamagedIndexError):
        raise DamagedIndexError(str(part))
    return part


def open_tokens(files: Files, count: int) -> CheckedArray:
    """Packed token counts of each document, (P,) uint32."""
    return files.map(_TOKENS, np.uint32, (count,))


def is_described(name: str) -> bool:
    """Whether a file holds ids or metadata, so that its size does not follow from the number of documents."""
    return is_ids(name) or is_metadata(name)


class DocumentTableWriter:
    """Writes the documents of a segment; ids and distinct metadata values are kept in memory.

    Args:
        folder: Folder of the segment.
        disk: Performs all writes.
        texts: Whether to store texts.
        fields: Metadata fields to store; None for all.
    """

    def __init__(self, folder: Path, disk: Disk, *, texts: bool, fields: Sequence[str] | None = None) -> None:
        self._folder = folder
        self._disk = disk
        self._texts = TextWriter(folder, disk) if texts else None
        self._metadata = MetadataWriter(fields)
        self._ids = bytearray()
        self._offsets = [0]
        self._tokens: list[NDArray[np.uint32]] = []

    def add(self, documents: Sequence[Document], tokens: TextTokens) -> None:
        """Append documents, whose ids must be unique in the segment, with their token counts."""
        for document in documents:
            self._ids += document.id.encode("utf-8")
            self._offsets.append(len(self._ids))
            self._metadata.add(document.metadata)
            if self._texts is not None:
                self._texts.add(document)
        packed = tokens.tokens.astype(np.uint32) << 2 | tokens.truncated.astype(np.uint32) << 1 | tokens.empty.astype(np.uint32)
        self._tokens.append(packed.astype(np.uint32))

    def close(self) -> dict[str, str]:
        """Finish the files; return what each holds, by name."""
        strings = StringColumn(np.frombuffer(self._ids, np.uint8), np.array(self._offsets, np.int64))
        holds = write_ids(self._folder, strings, self._disk) | self._metadata.save(self._folder, self._disk)
        holds |= _write_tokens(self._folder, np.concatenate([np.zeros(0, np.uint32), *self._tokens]), self._disk)
        return holds | (self._texts.close() if self._texts is not None else {})


def merge_documents(parts: Sequence[tuple[DocumentTable, NDArray[np.bool_]]], folder: Path, disk: Disk) -> dict[str, str]:
    """Merge the documents of segments, keeping chosen rows in order; the bytes equal those of a segment written at once.

    Args:
        parts: Documents of segments, each with the rows to keep; either all have texts or none.
        folder: Folder of the new segment.
        disk: Performs all writes.

    Returns:
        What each file holds, by name.
    """
    holds: dict[str, str] = {}
    if parts[0][0].texts is not None:
        writer = TextWriter(folder, disk)
        for table, keep in parts:
            if table.texts is None:
                raise ValueError("a segment with texts cannot be merged with one without")
            for row in np.flatnonzero(keep).tolist():
                writer.add_line(table.texts.line(row))
        holds |= writer.close()
    kept = [table.ids.strings.select(np.flatnonzero(keep)) for table, keep in parts]
    holds |= write_ids(folder, StringColumn.concatenate(kept), disk)
    holds |= _write_tokens(folder, np.concatenate([table.tokens.whole()[keep] for table, keep in parts]), disk)
    return holds | write_columns(folder, merge_columns([(table.metadata, keep) for table, keep in parts]), disk)


def _write_tokens(folder: Path, tokens: NDArray[np.uint32], disk: Disk) -> dict[str, str]:
    write_array(folder / _TOKENS, tokens, disk)
    return {_TOKENS: "what tokenising did to each document: 4 times its tokens, + 2 if it was truncated, + 1 if it was empty, (P,) uint32"}
