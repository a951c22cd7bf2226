"""Searching one segment of token vectors.

Candidates come from the inverted lists; MaxSim with the coarse parts of their tokens says which may be among the best, and these are
scored by MaxSim with all of it. What is scored is what the files hold: a search that looks at everything gives the MaxSim of the coded
vectors, and every other gives the same scores.

Shapes: Q queries, P documents (rows), T vectors of all documents, n vectors of a query, d width, k hits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.engines import Bitmap, Found, Size
from quiver.retrieval.index.errors import DamagedIndexError
from quiver.retrieval.index.kernels.choice import kernels
from quiver.retrieval.index.kernels.packing import lanes
from quiver.retrieval.index.lazy import Lazy
from quiver.retrieval.index.mapped import Files, lengths_around, rows_with
from quiver.retrieval.index.tokens.candidates import CandidateLists
from quiver.retrieval.index.tokens.coding import Coding
from quiver.retrieval.index.tokens.settings import TokenEffort
from quiver.retrieval.records import TokenVectors

LENGTHS = "lengths.u32"
COARSE = "coarse.u8"
FINE = "fine.u8"

# Where a filter leaves so few documents, as a multiple of the candidates, all of them are candidates.
_FEW = 2
# A filter that allows one document in f makes the search look at f times as many lists, up to so many times.
_WIDER = 8
# Candidates that are scored before the first look at what is left, and between two looks.
_FIRST = 48
_NEXT = 32


class TokenSegment:
    """The documents of one segment; see `quiver.retrieval.index.engines.Segment`.

    Args:
        coding: Of the codec.
        files: What a writer wrote.
        rows: Documents it must have.

    Raises:
        FileNotFoundError: A file is missing.
        DamagedIndexError: A file has another size than the others ask for.
    """

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
            raise DamagedIndexError(f"{files.folder / LENGTHS}: does not fit {len(self.coarse)} vectors; quiver index repair")
        self._filled: Bitmap = self.offsets[1:] > self.offsets[:-1]
        self._findable = int(np.count_nonzero(self._filled))
        self._folder = files.folder
        self._lists: Lazy[CandidateLists] = Lazy()

    def __len__(self) -> int:
        return len(self._filled)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many vectors each document has, after pooling, (P,)."""
        return np.diff(self.offsets)

    @property
    def size(self) -> Size:
        """What it takes in memory, the lists included, which are made at the first search, and on the disk."""
        lists = CandidateLists.size(int(self.offsets[-1]), self._coding.dim, len(self._coding.clustering.centroids))
        return Size(
            resident=lists + self.offsets.nbytes + self._filled.nbytes, mapped=self.coarse.nbytes + self.fine.nbytes + 4 * len(self)
        )

    def search(
        self,
        queries: Sequence[TokenVectors],
        k: int,
        *,
        effort: TokenEffort,
        ranks: NDArray[np.uint32],
        allowed: Bitmap | None = None,
    ) -> list[Found]:
        """The k best rows of each query; see `quiver.retrieval.index.engines.Segment`."""
        may = None if allowed is None else self._filled & allowed
        count = self._findable if may is None else int(np.count_nonzero(may))
        wanted = max(k, effort.candidates)
        if effort.exhaustive or count <= k:
            everything = self._rows(may)
            return [_best(everything, self.exact_scores(query, everything), k, ranks) for query in queries]
        nprobe = effort.nprobe if may is None else round(effort.nprobe * min(_WIDER, len(may) / count))
        all_rows = self._rows(may) if count <= (wanted if may is None else _FEW * wanted) else None
        found = []
        for query in queries:
            query = np.ascontiguousarray(query, np.float32)
            lists, closeness, similarities = self._coding.clustering.probe(query, nprobe)
            rows = self._met(query, lists, closeness, wanted, effort.tokens_k, may) if all_rows is None else all_rows
            if len(rows) < k:  # the lists met fewer documents than are wanted: all are looked at
                rows = self._rows(may)
            found.append(_best(*self._likely(query, rows, k, similarities, effort.slack), k, ranks))
        return found

    def _rows(self, allowed: Bitmap | None) -> NDArray[np.int64]:
        """The rows that have a vector and are allowed."""
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
        rows, guesses = inverted.search(query, lists, closeness, tokens_k=tokens_k, allowed=allowed)
        return rows[np.argpartition(-guesses, wanted - 1)[:wanted]] if wanted < len(rows) else rows

    def _likely(
        self, query: NDArray[np.float32], rows: NDArray[np.int64], k: int, similarities: NDArray[np.float32], slack: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows that may be among the k best of these, with their scores; where rows are left out, their estimates say that they are not."""
        table = self._coding.table(query)
        begins, ends = self.offsets[rows], self.offsets[rows + 1]
        estimates = self._checked(rows, kernels().estimate(self.coarse.spans(begins, ends), begins, ends, similarities, table))
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
        """MaxSim of a query with the coded vectors of some rows; minus infinity for a row without a vector.

        Raises:
            DamagedIndexError: A row names a centroid that there is not.
            ValueError: The query makes scores that float32 cannot hold.
        """
        if not len(rows):
            return np.empty(0, np.float32)
        query = np.ascontiguousarray(query, np.float32)
        _, _, similarities = self._coding.clustering.probe(query, 1)
        return self._scores(query, rows, similarities)

    def _scores(self, query: NDArray[np.float32], rows: NDArray[np.int64], similarities: NDArray[np.float32]) -> NDArray[np.float32]:
        begins, ends, coding = self.offsets[rows], self.offsets[rows + 1], self._coding
        coarse, fine = self.coarse.spans(begins, ends), self.fine.spans(begins, ends)
        scores = kernels().score(coarse, fine, begins, ends, similarities, coding.products, coding.pairs, lanes(query))
        return self._checked(rows, scores)

    def _checked(self, rows: NDArray[np.int64], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scores of rows, unless these are damaged or the query is too long."""
        if not (np.isfinite(scores) | (scores == -np.inf)).all():
            for row in rows.tolist():
                self._numbers(self.coarse[self.offsets[row] : self.offsets[row + 1]])
            raise ValueError("the scores of a query do not fit into float32; its vectors are too long")
        return scores

    def vectors(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The decoded vectors of some rows, (n, d), row after row, and how many each has, (len(rows),)."""
        parts = [np.arange(self.offsets[row], self.offsets[row + 1]) for row in rows.tolist()]
        places = np.concatenate([np.empty(0, np.int64), *parts])
        coarse = self.coarse[places]
        self._numbers(coarse)
        return self._coding.decode(coarse, self.fine[places]), self.offsets[rows + 1] - self.offsets[rows]

    def damaged(self) -> Bitmap:
        """See `quiver.retrieval.index.engines.Segment`."""
        return self._unplaced | rows_with(self.coarse.damaged() | self.fine.damaged(), self.offsets)

    def _make_lists(self) -> CandidateLists:
        coarse = self.coarse.whole()
        codes, numbers = coarse[:, : self._coding.dim // 8], self._numbers(coarse)
        return CandidateLists(self._coding.clustering, self._coding.products, codes, numbers, self.lengths)

    def _numbers(self, coarse: NDArray[np.uint8]) -> NDArray[np.integer[Any]]:
        """The centroids of coarse parts, all of which there are."""
        numbers = self._coding.numbers(coarse)
        if len(numbers) and int(numbers.max()) >= len(self._coding.clustering.centroids):
            raise DamagedIndexError(f"{self._folder / COARSE}: names a centroid that the codec does not have; quiver index repair")
        return numbers


def _best(rows: NDArray[np.int64], scores: NDArray[np.float32], k: int, ranks: NDArray[np.uint32]) -> Found:
    """The k best rows by score and then by rank, both descending."""
    if len(rows) > k:
        kept = np.flatnonzero(scores >= np.partition(scores, len(scores) - k)[len(scores) - k])
        rows, scores = rows[kept], scores[kept]
    order = np.lexsort((ranks[rows], scores))[::-1][:k]
    return Found(rows[order], scores[order])
