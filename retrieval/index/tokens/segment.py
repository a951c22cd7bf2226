"""One segment of token vectors: writing, candidates and search.

    lengths.u32    tokens of each document, (P,)
    coarse.u8      product code and centroid of each token, document after document
    fine.u8        code and scale of each token, in the same order

Every token is in the inverted list of its centroid. A search finds the k' nearest tokens of each query token in the lists of the ``nprobe``
best centroids; the similarities found, and a bound for documents that were not found, are a first estimate of its score. MaxSim with the
coarse parts refines the estimate, and the final score is MaxSim with the whole codes, whichever way the document was found. The lists are
built in memory from the codes at the first search: about a second for ten million tokens.

Shapes: Q queries, P documents (rows), T vectors of all documents, n vectors of a query, K centroids, d width, k hits.
Sources: FAISS, arXiv:2401.08281 (IVF-PQ with 4-bit codes and fast scan); XTR, arXiv:2304.01982 (imputation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index import kernels
from quiver.retrieval.index.engines import Bitmap, Found, Lazy, Size, in_order, one_thread
from quiver.retrieval.index.files import COPIED, DamagedIndexError, Disk, Files, RecordFiles, lengths_around, rows_with
from quiver.retrieval.index.kernels.packing import lanes
from quiver.retrieval.index.quantization import FastScanLists
from quiver.retrieval.index.ranking import document_blocks
from quiver.retrieval.index.tokens.settings import TokenParams
from quiver.retrieval.index.tokens.token_quantizer import WINDOW, Coding, pool
from quiver.retrieval.records import TokenVectors

LENGTHS = "lengths.u32"
COARSE = "coarse.u8"
FINE = "fine.u8"

CODED_DIMENSIONS = 4
"""Coordinates per 4-bit product code."""

# What a document that was not met is taken to score lies so much of the similarities' range below the least of them, which is its bound:
# half as many candidates then hold as many of the best documents (measured; from 0.1 to 0.2 it makes no difference).
_BELOW = 0.15

_HOLDS = {
    LENGTHS: "vectors of each document, (P,) uint32",
    COARSE: "product code and centroid of each vector, (T, bytes)",
    FINE: "code and scale of each vector, (T, bytes)",
}
# Number of vectors coded at a time.
_BLOCK = 16_384
# Copies of a block that are held at once while it is coded, or of the distances of all pairs while they are merged.
_COPIES = 8

# Where a filter leaves so few documents, as a multiple of the candidates, all of them are candidates.
_FEW = 2
# A filter that allows one document in f makes the search look at f times as many lists, up to so many times.
_WIDER = 8
# Candidates that are scored before the first look at what is left, and between two looks.
_FIRST = 48
_NEXT = 32


class TokenWriter:
    """Encodes vectors as they are added; see `quiver.retrieval.index.engines.SegmentWriter`."""

    def __init__(self, coding: Coding, *, pool_factor: int, folder: Path, disk: Disk) -> None:
        self._coding = coding
        self._pool_factor = pool_factor
        self._files = RecordFiles(folder, disk, _HOLDS)

    def add(
        self, vectors: NDArray[np.float32], lengths: NDArray[np.int64] | None = None, token_ids: NDArray[np.uint32] | None = None
    ) -> None:
        """Append documents."""
        if lengths is None:
            raise ValueError("token vectors need the number of vectors of each document")
        if vectors.ndim != 2 or vectors.shape[1] != self._coding.dim or int(lengths.sum()) != len(vectors):
            raise ValueError(f"{int(lengths.sum())} vectors of width {self._coding.dim} expected, got {vectors.shape}")
        if token_ids is not None and len(token_ids) != len(vectors):
            raise ValueError(f"{len(token_ids)} token ids for {len(vectors)} vectors")
        ends = np.append(0, np.cumsum(lengths))
        for first, last in document_blocks(ends, _BLOCK):
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
        """Finish the files; return what each holds, by name."""
        return self._files.close()


def memory(coding: Coding, *, pool_factor: int) -> int:
    """Maximum memory of a writer in bytes, without the vectors passed to it; it does not depend on the size of the segment."""
    centroids = coding.clustering.centroids.nbytes
    pairs = 8 * WINDOW * WINDOW * _COPIES if pool_factor > 1 else 0
    return 2 * centroids + _BLOCK * coding.dim * 4 * _COPIES + 3 * COPIED + pairs


def copy(parts: Sequence[tuple[TokenSegment, Bitmap]], folder: Path, disk: Disk) -> Mapping[str, str]:
    """Merge segments by copying the kept documents byte for byte."""
    files = RecordFiles(folder, disk, _HOLDS)
    for segment, keep in parts:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], keep, [False]]).astype(np.int8)))
        for first, last in edges.reshape(-1, 2).tolist():  # runs of adjacent rows
            begin, end = int(segment.offsets[first]), int(segment.offsets[last])
            for name, records in ((COARSE, segment.coarse), (FINE, segment.fine)):
                files.copy_span(name, records, begin, end)
            files.write(LENGTHS, np.diff(segment.offsets[first : last + 1]).astype("<u4"))
    return files.close()


class TokenSegment:
    """The documents of one segment; see `quiver.retrieval.index.engines.Segment`."""

    def __init__(self, coding: Coding, files: Files, rows: int) -> None:
        self._coding = coding
        self.coarse = files.map(COARSE, np.uint8, (-1, coding.coarse_width))
        """Coarse parts, (T, bytes), mapped."""
        self.fine = files.map(FINE, np.uint8, (len(self.coarse), coding.fine_width))
        """Fine parts, (T, bytes), mapped."""
        stored = files.map(LENGTHS, np.uint32, (rows,))
        lengths, self._unplaced = lengths_around(stored.whole(), stored.damaged(), len(self.coarse))
        self.offsets: NDArray[np.int64] = np.append(0, np.cumsum(lengths, dtype=np.int64))
        """First vector of each document, and T, (P + 1,)."""
        if int(self.offsets[-1]) != len(self.coarse):
            raise DamagedIndexError(f"{files.folder / LENGTHS}: does not fit {len(self.coarse)} vectors; run quiver index repair")
        self._filled: Bitmap = self.offsets[1:] > self.offsets[:-1]
        self._findable = int(np.count_nonzero(self._filled))
        self._folder = files.folder
        self._lists: Lazy[FastScanLists] = Lazy()

    def __len__(self) -> int:
        return len(self._filled)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of vectors of each document after pooling, (P,)."""
        return np.diff(self.offsets)

    @property
    def size(self) -> Size:
        """Size in memory, including the lists that the first search creates, and on disk."""
        books, count = self._coding.dim // CODED_DIMENSIONS, len(self._coding.clustering.centroids)
        lists = FastScanLists.nbytes(int(self.offsets[-1]), codebooks=books, lists=count)
        return Size(
            resident=lists + self.offsets.nbytes + self._filled.nbytes, mapped=self.coarse.nbytes + self.fine.nbytes + 4 * len(self)
        )

    def search(
        self, queries: Sequence[TokenVectors], k: int, *, params: TokenParams, ranks: NDArray[np.uint32], allowed: Bitmap | None = None
    ) -> list[Found]:
        """The k best rows of each query; see `quiver.retrieval.index.engines.Segment`."""
        may = None if allowed is None else self._filled & allowed
        count = self._findable if may is None else int(np.count_nonzero(may))
        wanted = max(k, params.candidates)
        if params.exhaustive or count <= k:
            everything = self._rows(may)
            return [in_order(everything, self.exact_scores(query, everything), k, ids=ranks) for query in queries]
        nprobe = params.nprobe if may is None else round(params.nprobe * min(_WIDER, len(may) / count))
        all_rows = self._rows(may) if count <= (wanted if may is None else _FEW * wanted) else None
        found = []
        for query in queries:
            query = np.ascontiguousarray(query, np.float32)
            lists, closeness, similarities = self._coding.clustering.probe(query, nprobe)
            rows = self._met(query, lists, closeness, wanted, params.tokens_k, may) if all_rows is None else all_rows
            if len(rows) < k:  # the lists met fewer documents than are wanted: all are looked at
                rows = self._rows(may)
            found.append(in_order(*self._likely(query, rows, k, similarities, params.slack), k, ids=ranks))
        return found

    def _rows(self, allowed: Bitmap | None) -> NDArray[np.int64]:
        """Allowed rows with a vector."""
        return np.flatnonzero(self._filled if allowed is None else allowed)

    def _met(
        self,
        query: NDArray[np.float32],
        lists: NDArray[np.int64],
        closeness: NDArray[np.float32],
        wanted: int,
        tokens_k: int,
        allowed: Bitmap | None,
    ) -> NDArray[np.int64]:
        """So many of the rows that the query's tokens meet in their lists, in no order, those that may score most."""
        inverted = self._lists.get(self._make_lists)
        with one_thread():
            similarities, documents = inverted.search(query, tokens_k, lists=lists, closeness=closeness, allowed=allowed)
        rows, guesses = kernels.aggregate(similarities, documents, _BELOW)
        return rows[np.argpartition(-guesses, wanted - 1)[:wanted]] if wanted < len(rows) else rows

    def _likely(
        self, query: NDArray[np.float32], rows: NDArray[np.int64], k: int, similarities: NDArray[np.float32], slack: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows that may be among the k best of these, with their scores; where rows are left out, their estimates say that they are not."""
        table = self._coding.table(query)
        begins, ends = self.offsets[rows], self.offsets[rows + 1]
        estimates = self._checked(rows, kernels.estimate(self.coarse.spans(begins, ends), begins, ends, similarities, table))
        order = np.argsort(-estimates, kind="stable")
        rows, estimates = rows[order], estimates[order]
        scores = self._scores(query, rows[: max(_FIRST, 2 * k)], similarities)
        while k <= len(scores) < len(rows):
            surprise = scores - estimates[: len(scores)]
            least = np.partition(scores, len(scores) - k)[len(scores) - k]
            if estimates[len(scores)] + surprise.mean() + slack * surprise.std() < least:
                break
            scores = np.concatenate([scores, self._scores(query, rows[len(scores) : len(scores) + _NEXT], similarities)])
        return rows[: len(scores)], scores

    def exact_scores(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """MaxSim of a query with the coded vectors of given rows; minus infinity for a row without a vector.

        Raises:
            DamagedIndexError: A row refers to a centroid that does not exist.
            ValueError: The query has scores that overflow float32.
        """
        if not len(rows):
            return np.empty(0, np.float32)
        query = np.ascontiguousarray(query, np.float32)
        _, _, similarities = self._coding.clustering.probe(query, 1)
        return self._scores(query, rows, similarities)

    def _scores(self, query: NDArray[np.float32], rows: NDArray[np.int64], similarities: NDArray[np.float32]) -> NDArray[np.float32]:
        begins, ends, coding = self.offsets[rows], self.offsets[rows + 1], self._coding
        coarse, fine = self.coarse.spans(begins, ends), self.fine.spans(begins, ends)
        scores = kernels.score(coarse, fine, begins, ends, similarities, coding.products, coding.pairs, lanes(query))
        return self._checked(rows, scores)

    def _checked(self, rows: NDArray[np.int64], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scores of rows, unless these are damaged or the query is too long."""
        if not (np.isfinite(scores) | (scores == -np.inf)).all():
            for row in rows.tolist():
                self._numbers(self.coarse[self.offsets[row] : self.offsets[row + 1]])
            raise ValueError("the scores of a query do not fit into float32; the norms of its vectors are too large")
        return scores

    def vectors(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Decoded vectors of given rows, (n, d), row after row, and the number of vectors of each row, (len(rows),)."""
        parts = [np.arange(self.offsets[row], self.offsets[row + 1]) for row in rows.tolist()]
        places = np.concatenate([np.empty(0, np.int64), *parts])
        coarse = self.coarse[places]
        self._numbers(coarse)
        return self._coding.decode(coarse, self.fine[places]), self.offsets[rows + 1] - self.offsets[rows]

    def damaged(self) -> Bitmap:
        """See `quiver.retrieval.index.engines.Segment`."""
        return self._unplaced | rows_with(self.coarse.damaged() | self.fine.damaged(), self.offsets)

    def _make_lists(self) -> FastScanLists:
        coarse, coding = self.coarse.whole(), self._coding
        codes, numbers = coarse[:, : coding.dim // 8], self._numbers(coarse)
        documents = np.repeat(np.arange(len(self), dtype=np.int64), self.lengths)
        return FastScanLists(coding.products, codes, numbers, documents, lists=len(coding.clustering.centroids))

    def _numbers(self, coarse: NDArray[np.uint8]) -> NDArray[np.integer[Any]]:
        """The centroids of coarse parts, all of which there are."""
        numbers = self._coding.numbers(coarse)
        if len(numbers) and int(numbers.max()) >= len(self._coding.clustering.centroids):
            raise DamagedIndexError(f"{self._folder / COARSE}: refers to a centroid that the codec does not have; run quiver index repair")
        return numbers
