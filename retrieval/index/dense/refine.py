"""The refine store: the codes of all vectors of a segment in mapped files, from which every score that leaves the engine is computed.

    fine.i8       codes, (P, d); fine.i16 where they have two bytes
    scales.f32    scales, (P,)

Searching it whole is exact search over what it holds: the ranking is that of the scores in float64, each rounded once.

Shapes: Q queries, P documents, n documents of a part, d width, k hits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.dense.scalar import Codes, Prepared, ScalarCoding
from quiver.retrieval.index.engines import Bitmap, Found
from quiver.retrieval.index.kernels.choice import kernels
from quiver.retrieval.index.mapped import Files
from quiver.retrieval.index.ranking import float32_error, nearest_by_scores, search_walk
from quiver.retrieval.index.record_files import RecordFiles

SCALES = "scales.f32"

BLOCK = 4096
"""Documents that are coded or decoded at a time."""

# Documents that are searched at a time.
_SEARCHED = 16_384

# Float32 roundings on the way to a score beside the sum: the weights, the scale and the offset.
_ROUNDINGS = 4


class RefineStore:
    """The codes of one segment, mapped.

    Args:
        coding: Of the codec.
        files: What a writer wrote.
        rows: Documents P it must have.

    Raises:
        FileNotFoundError: A file is missing.
        DamagedIndexError: A file has another size.
    """

    def __init__(self, coding: ScalarCoding, files: Files, rows: int) -> None:
        self.coding = coding
        self.codes = files.map(fine(coding), coding.code_type, (rows, coding.dim))
        self.scales = files.map(SCALES, np.float32, (rows,))

    def __len__(self) -> int:
        return len(self.scales)

    @property
    def nbytes(self) -> int:
        """Size of what is mapped."""
        return self.codes.nbytes + self.scales.nbytes

    def decode(self, rows: NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """The vectors of some rows, (n, d)."""
        return self.coding.decode(self.codes[rows], self.scales[rows])

    def scores(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Scores of some rows for one query (d,), (len(rows),)."""
        products = kernels().inner_products(self.codes.rows(rows), self.scales.rows(rows), rows, *self.coding.weigh(query))
        return products.astype(np.float32)

    def nearest_of(
        self, rows: NDArray[np.int64], query: NDArray[np.float32], k: int, *, ranks: NDArray[np.uint32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], float]:
        """The k best of some rows for one query (d,), ties to the greater rank, with the scores of `scores`; and the least score of all."""
        return kernels().nearest_of(self.codes.rows(rows), self.scales.rows(rows), rows, *self.coding.weigh(query), ranks, k)

    def search(self, queries: NDArray[np.float32], k: int, *, ranks: NDArray[np.uint32], allowed: Bitmap | None) -> list[Found]:
        """The k best of all rows, or of those allowed, as of scores in float64 rounded once; ties go to the greater rank.

        Raises:
            ValueError: A query makes scores that float32 cannot hold.
        """
        prepared = Prepared.of(queries, self.coding)
        picked = None if allowed is None else np.flatnonzero(allowed)
        findable = len(self) if picked is None else len(picked)
        # No code is longer than this; a looser bound than the longest code itself, and needs no pass over them.
        longest = float(self._largest_scale) * self.coding.largest * self.coding.dim**0.5
        magnitudes = np.sqrt((prepared.weights**2).sum(axis=1)) * longest + np.abs(prepared.offsets)
        errors = np.array([float32_error(self.coding.dim + _ROUNDINGS, float(magnitude)) for magnitude in magnitudes])
        walk, ids = _Walk(self, prepared, picked), ranks if picked is None else ranks[picked]
        found = search_walk(walk, k, findable=findable, errors=errors, ids=ids, all_exact=True)
        return [Found(places if picked is None else picked[places], scores) for places, scores in found]

    def copy(self, files: RecordFiles, keep: Bitmap) -> None:
        """Append the rows that are kept, (P,), to the files of another segment, byte for byte."""
        files.copy(fine(self.coding), self.codes, keep)
        files.copy(SCALES, self.scales, keep)

    @cached_property
    def _largest_scale(self) -> np.float32:
        scales: NDArray[np.float32] = self.scales.whole()
        return np.max(scales, initial=np.float32(0))

    def damaged(self) -> Bitmap:
        """The rows that a salvaged file has lost, (P,)."""
        return self.codes.damaged() | self.scales.damaged()


def fine(coding: ScalarCoding) -> str:
    """Name of the file of codes."""
    return f"fine.i{coding.bits}"


def holds(coding: ScalarCoding) -> dict[str, str]:
    """The files of a refine store: file name -> what it holds."""
    return {fine(coding): f"codes of the final scores, (P, d) int{coding.bits}", SCALES: "their scales, (P,) float32"}


def write_codes(files: RecordFiles, coding: ScalarCoding, vectors: NDArray[np.float32]) -> None:
    """Append vectors, (n, d), to the files of a segment.

    Raises:
        InputError: One is too long.
    """
    codes, scales = coding.encode(vectors)
    files.write(fine(coding), codes)
    files.write(SCALES, scales)


class _Part:
    """Documents whose codes are in memory, and the queries; see `quiver.retrieval.index.ranking.Part`."""

    def __init__(self, prepared: Prepared, codes: Codes, scales: NDArray[np.float32]) -> None:
        self._prepared = prepared
        self._codes = codes
        self._scales = scales

    def nearest(self, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        return nearest_by_scores(self, len(self._prepared.offsets), len(self._scales), k)

    def scores(self, queries: Sequence[int]) -> NDArray[np.float32]:
        weights = self._prepared.weights[queries].astype(np.float32)
        products: NDArray[np.float32] = weights @ self._floats.T  # (Q', n)
        return products * self._scales + self._prepared.offsets[queries].astype(np.float32)[:, None]

    def exact(self, query: int, places: NDArray[np.intp]) -> NDArray[np.float64]:
        return self._prepared.score(query, self._codes, self._scales, places)

    @cached_property
    def _floats(self) -> NDArray[np.float32]:
        return self._codes.astype(np.float32)


class _Walk:
    """Chosen documents in parts, or all of them, of which nothing is copied; see `quiver.retrieval.index.ranking.Walk`."""

    def __init__(self, store: RefineStore, prepared: Prepared, picked: NDArray[np.int64] | None) -> None:
        self._store = store
        self._prepared = prepared
        self._picked = picked

    def parts(self) -> Iterator[tuple[int, _Part]]:
        for start in range(0, len(self._store if self._picked is None else self._picked), _SEARCHED):
            part = slice(start, start + _SEARCHED)
            yield start, self._part(part if self._picked is None else self._picked[part])

    def pick(self, rows: NDArray[np.intp]) -> Iterator[tuple[int, _Part]]:
        for start in range(0, len(rows), _SEARCHED):
            part = rows[start : start + _SEARCHED]
            yield len(part), self._part(part if self._picked is None else self._picked[part])

    def _part(self, rows: NDArray[np.int64] | slice) -> _Part:
        return _Part(self._prepared, self._store.codes[rows], self._store.scales[rows])
