"""Writing a segment of token vectors: streamed from vectors, or copied from other segments.

    lengths.u32    tokens of each document, (P,)
    coarse.u8      product code and centroid of each token, document after document
    fine.u8        code and scale of each token, in the same order

Shapes: P documents, n vectors of a call, m documents of a call, d width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.disk import Disk
from quiver.retrieval.index.engines import Bitmap
from quiver.retrieval.index.record_files import COPIED, RecordFiles
from quiver.retrieval.index.tokens.coding import Coding
from quiver.retrieval.index.tokens.pooling import WINDOW, pool
from quiver.retrieval.index.tokens.segment import COARSE, FINE, LENGTHS, TokenSegment

_HOLDS = {
    LENGTHS: "vectors of each document, (P,) uint32",
    COARSE: "product code and centroid of each vector, (T, bytes)",
    FINE: "code and scale of each vector, (T, bytes)",
}
# Vectors coded at a time.
_BLOCK = 16_384
# Copies of a block that are held at once while it is coded, or of the distances of all pairs while they are merged.
_COPIES = 8


class TokenWriter:
    """Codes vectors as they come; see `quiver.retrieval.index.engines.SegmentWriter`.

    Args:
        coding: Of the codec.
        pool_factor: Every document's vectors are merged until one in so many is left.
        folder: An existing folder.
        disk: Writes.
    """

    def __init__(self, coding: Coding, *, pool_factor: int, folder: Path, disk: Disk) -> None:
        self._coding = coding
        self._pool_factor = pool_factor
        self._files = RecordFiles(folder, disk, _HOLDS)

    def add(
        self, vectors: NDArray[np.float32], lengths: NDArray[np.int64] | None = None, token_ids: NDArray[np.uint32] | None = None
    ) -> None:
        """Append documents.

        Args:
            vectors: (n, d) float32, document after document.
            lengths: Vectors of each of the m documents, (m,).
            token_ids: Which token of the vocabulary each vector is of, (n,), if known.

        Raises:
            ValueError: The width is not that of the codec, or the lengths or token ids do not fit the vectors.
        """
        if lengths is None:
            raise ValueError("token vectors need the number of vectors of each document")
        if vectors.ndim != 2 or vectors.shape[1] != self._coding.dim or int(lengths.sum()) != len(vectors):
            raise ValueError(f"{int(lengths.sum())} vectors of width {self._coding.dim} expected, got {vectors.shape}")
        if token_ids is not None and len(token_ids) != len(vectors):
            raise ValueError(f"{len(token_ids)} token ids for {len(vectors)} vectors")
        ends = np.append(0, np.cumsum(lengths))
        for first, last in _pieces(ends):
            part = slice(ends[first], ends[last])
            self._add(vectors[part], lengths[first:last], None if token_ids is None else token_ids[part])

    def _add(self, vectors: NDArray[np.float32], lengths: NDArray[np.int64], token_ids: NDArray[np.uint32] | None) -> None:
        if self._pool_factor > 1:
            vectors, lengths, token_ids = pool(vectors, lengths, token_ids, factor=self._pool_factor)
        for begin in range(0, len(vectors), _BLOCK):
            ids = None if token_ids is None else token_ids[begin : begin + _BLOCK]
            coarse, fine = self._coding.encode(np.ascontiguousarray(vectors[begin : begin + _BLOCK], np.float32), ids)
            self._files.write(COARSE, coarse)
            self._files.write(FINE, fine)
        self._files.write(LENGTHS, lengths.astype("<u4"))

    def close(self) -> Mapping[str, str]:
        """Finish the files; file name -> what it holds."""
        return self._files.close()


def memory(coding: Coding, *, pool_factor: int) -> int:
    """Bytes that writing holds at most beside the vectors given, whatever the size of the segment."""
    centroids = coding.clustering.centroids.nbytes
    pairs = 8 * WINDOW * WINDOW * _COPIES if pool_factor > 1 else 0
    return 2 * centroids + _BLOCK * coding.dim * 4 * _COPIES + 3 * COPIED + pairs


def copy(parts: Sequence[tuple[TokenSegment, Bitmap]], folder: Path, disk: Disk) -> Mapping[str, str]:
    """Write a segment from the documents of others that are kept, byte for byte.

    Args:
        parts: Segments of one codec, each with the rows to keep, (P,).
        folder: An existing folder.
        disk: Writes.

    Returns:
        File name -> what it holds.
    """
    files = RecordFiles(folder, disk, _HOLDS)
    for segment, keep in parts:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], keep, [False]]).astype(np.int8)))
        for first, last in edges.reshape(-1, 2).tolist():  # runs of rows that follow each other
            begin, end = int(segment.offsets[first]), int(segment.offsets[last])
            for name, records in ((COARSE, segment.coarse), (FINE, segment.fine)):
                files.copy_span(name, records, begin, end)
            files.write(LENGTHS, np.diff(segment.offsets[first : last + 1]).astype("<u4"))
    return files.close()


def _pieces(ends: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Runs of documents with a block of vectors at most, one document at least."""
    first = 0
    while first < len(ends) - 1:
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + _BLOCK, side="right")) - 1)
        yield first, last
        first = last
