"""The refine store and the search of one segment: candidates from compressed codes, scores from int8 or int16 codes.

    fine.i8       codes, (P, d); fine.i16 with 16 bits
    scales.f32    scales, (P,)

Every score comes from the refine store, whichever way the document was found, so that hits of several segments can be merged. Searching
the whole store is exact search over the stored codes: the ranking is that of the float64 scores, each rounded once.

Shapes: Q queries, P documents, n vectors, d width, k hits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index import kernels
from quiver.retrieval.index.dense.settings import Bits, DenseParams
from quiver.retrieval.index.engines import Bitmap, Found, Size
from quiver.retrieval.index.files import Disk, Files, RecordFiles, map_array, write_array
from quiver.retrieval.index.ranking import Block, HostScorer, float32_error, rank

Codes: TypeAlias = NDArray[np.signedinteger[Any]]
"""Codes of either size."""

_CENTRE, _SPREAD = "centre.f32", "spread.f32"
# Minimum spread of a coordinate relative to the others: a coordinate that is constant in the sample may vary in later vectors.
_LEAST_SPREAD = 0.1
# Vectors of a sample processed together.
_BLOCK = 4096

SCALES = "scales.f32"

BLOCK = 4096
"""Number of documents coded or decoded at a time."""

# Number of documents searched at a time.
_SEARCHED = 16_384

# Float32 roundings of a score in addition to those of the sum: weights, scale and offset.
_ROUNDINGS = 4

# If a filter leaves this few documents, all of them are scored, which is no slower than finding candidates: up to a multiple of the
# candidates, or up to a share of all documents within a limit. Scoring a document takes as long as scanning about twenty codes.
_FEW = 8
_SHARE = 24
_MANY = 20_000
# Maximum factor by which a filter increases search parameters.
_WIDER = 4.0


@dataclass(frozen=True)
class ScalarCoding:
    """Parameters shared by the codes of all vectors."""

    centre: NDArray[np.float32]  # mean of the sample, (d,)
    spread: NDArray[np.float32]  # standard deviation of each coordinate, (d,), positive
    bits: Bits = 8  # bits per code

    @classmethod
    def learn(cls, vectors: NDArray[np.float32], bits: Bits = 8) -> ScalarCoding:
        """Compute centre and spread of a sample, (n, d) with n >= 1.

        Example:
            >>> coding = ScalarCoding.learn(np.array([[1, 8], [3, 8]], np.float32))
            >>> coding.centre.tolist(), [round(spread, 3) for spread in coding.spread.tolist()]
            ([2.0, 8.0], [1.002, 0.071])
        """
        # In float64 and block by block, because a sample may take half of the memory.
        blocks = [vectors[start : start + _BLOCK] for start in range(0, len(vectors), _BLOCK)]
        centre = np.sum([block.sum(axis=0, dtype=np.float64) for block in blocks], axis=0) / len(vectors)
        variance = np.sum([((block - centre) ** 2).sum(axis=0) for block in blocks], axis=0) / len(vectors)
        spread = np.sqrt(variance + _LEAST_SPREAD**2 * variance.mean())
        spread[spread.astype(np.float32) == 0] = 1  # all vectors are equal
        return cls(centre.astype(np.float32), spread.astype(np.float32), bits)

    def weigh(self, query: NDArray[np.float32]) -> tuple[NDArray[np.float64], float]:
        """Prepare a query (d,) for scoring codes: the query times the spread, (d,), and its inner product with the centre."""
        exact, (centre, spread) = query.astype(np.float64), self._exact
        return exact * spread, float(exact @ centre)

    @cached_property
    def _exact(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self.centre.astype(np.float64), self.spread.astype(np.float64)

    @property
    def dim(self) -> int:
        """Vector width d."""
        return len(self.centre)

    @property
    def largest(self) -> int:
        """The largest code."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def code_type(self) -> np.dtype[Any]:
        """Type of a code."""
        return np.dtype(f"<i{self.bits // 8}")

    @property
    def nbytes(self) -> int:
        """Bytes per vector: its codes and its scale."""
        return self.dim * self.bits // 8 + 4

    def encode(self, vectors: NDArray[np.float32]) -> tuple[Codes, NDArray[np.float32]]:
        """Codes, (n, d), and scales, (n,), of vectors; the code of a vector does not depend on the other vectors.

        Raises:
            InputError: The norm of a vector is so large that its code overflows float32.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = (vectors - self.centre) / self.spread
            largest = np.abs(scaled).max(axis=1, initial=0)
        scales = largest / np.float32(self.largest)
        if not np.isfinite(scales).all():
            raise InputError("the norm of a vector is too large for quantized codes; use the engine exact-dense")
        # A vector so close to the centre that its scale would be subnormal is stored as the centre.
        scales[scales < np.finfo(np.float32).tiny] = 0
        codes = np.rint(np.divide(scaled, scales[:, None], out=np.zeros_like(scaled), where=scales[:, None] > 0))
        return codes.clip(-self.largest, self.largest).astype(self.code_type), scales

    def decode(self, codes: Codes, scales: NDArray[np.float32]) -> NDArray[np.float32]:
        """Decode vectors, (n, d)."""
        decoded: NDArray[np.float32] = codes * scales[:, None] * self.spread + self.centre
        return decoded


def save_scalar(coding: ScalarCoding, folder: Path, disk: Disk) -> Mapping[str, str]:
    """Write a coding into the folder of its codec; return what each file holds, by name."""
    write_array(folder / _CENTRE, coding.centre, disk)
    write_array(folder / _SPREAD, coding.spread, disk)
    return {_CENTRE: "centre of the vectors, (d,) float32", _SPREAD: "spread of each coordinate, (d,) float32"}


def open_scalar(folder: Path, dim: int, bits: Bits) -> ScalarCoding:
    """Read a coding of vectors of width d that `save_scalar` wrote; the codec stores ``bits`` itself."""
    centre, spread = (np.array(map_array(folder / name, np.float32, (dim,))) for name in (_CENTRE, _SPREAD))
    return ScalarCoding(centre, spread, bits)


class RefineStore:
    """The codes of one segment, memory-mapped."""

    def __init__(self, coding: ScalarCoding, files: Files, rows: int) -> None:
        self.coding = coding
        self.codes = files.map(fine(coding), coding.code_type, (rows, coding.dim))
        self.scales = files.map(SCALES, np.float32, (rows,))

    def __len__(self) -> int:
        return len(self.scales)

    @property
    def nbytes(self) -> int:
        """Size of the mapped files in bytes."""
        return self.codes.nbytes + self.scales.nbytes

    def decode(self, rows: NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """Decode the vectors of given rows, (n, d)."""
        return self.coding.decode(self.codes[rows], self.scales[rows])

    def scores(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Scores of given rows for one query (d,), (len(rows),)."""
        products = kernels.inner_products(self.codes.rows(rows), self.scales.rows(rows), rows, *self.coding.weigh(query))
        return products.astype(np.float32)

    def nearest_of(
        self, rows: NDArray[np.int64], query: NDArray[np.float32], k: int, *, ranks: NDArray[np.uint32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], float]:
        """The k best of given rows for one query (d,) by `scores`, ties to the greater rank; and the lowest score of all rows."""
        return kernels.nearest_of(self.codes.rows(rows), self.scales.rows(rows), rows, *self.coding.weigh(query), ranks, k)

    def search(self, queries: NDArray[np.float32], k: int, *, ranks: NDArray[np.uint32], allowed: Bitmap | None) -> list[Found]:
        """The k best allowed rows by float64 scores rounded once to float32; ties go to the greater rank.

        Raises:
            ValueError: A query has scores that overflow float32.
        """
        weighed = [self.coding.weigh(query) for query in queries]
        weights = np.array([each for each, _ in weighed], np.float64).reshape(len(queries), self.coding.dim)
        offsets = np.array([offset for _, offset in weighed], np.float64)
        picked = None if allowed is None else np.flatnonzero(allowed)
        findable = len(self) if picked is None else len(picked)
        # Upper bound on the length of a code. It is looser than the longest code, but needs no pass over the codes.
        longest = float(self._largest_scale) * self.coding.largest * self.coding.dim**0.5
        magnitudes = np.sqrt((weights**2).sum(axis=1)) * longest + np.abs(offsets)
        errors = np.array([float32_error(self.coding.dim + _ROUNDINGS, float(magnitude)) for magnitude in magnitudes])

        def score_block(codes: NDArray[np.float32], scales: NDArray[np.float32], some: Sequence[int]) -> NDArray[np.float32]:
            products: NDArray[np.float32] = weights[some].astype(np.float32) @ codes.T  # (Q', n)
            return products * scales + offsets[some].astype(np.float32)[:, None]

        def blocks() -> Iterator[Block]:
            for start in range(0, findable, _SEARCHED):
                part = slice(start, start + _SEARCHED) if picked is None else picked[start : start + _SEARCHED]
                scales = self.scales[part]
                yield Block(start, len(scales), partial(score_block, self.codes[part].astype(np.float32), scales))

        def exact(query: int, places: NDArray[np.int64]) -> NDArray[np.float64]:
            rows = places if picked is None else picked[places]
            return kernels.inner_products(self.codes.rows(rows), self.scales.rows(rows), rows, *weighed[query])

        scorer = HostScorer(len(queries), blocks, exact)
        found = rank(scorer, k, findable=findable, errors=errors, ids=ranks if picked is None else ranks[picked], all_exact=True)
        return found if picked is None else [Found(picked[places], scores) for places, scores in found]

    def copy(self, files: RecordFiles, keep: Bitmap) -> None:
        """Append the kept rows, (P,), to the files of another segment, byte for byte."""
        files.copy(fine(self.coding), self.codes, keep)
        files.copy(SCALES, self.scales, keep)

    @cached_property
    def _largest_scale(self) -> np.float32:
        scales: NDArray[np.float32] = self.scales.whole()
        return np.max(scales, initial=np.float32(0))

    def damaged(self) -> Bitmap:
        """Rows lost with a damaged file, (P,)."""
        return self.codes.damaged() | self.scales.damaged()


def fine(coding: ScalarCoding) -> str:
    """Name of the file of codes."""
    return f"fine.i{coding.bits}"


def holds(coding: ScalarCoding) -> dict[str, str]:
    """Descriptions of the files of a refine store, by name."""
    return {fine(coding): f"codes of the final scores, (P, d) int{coding.bits}", SCALES: "their scales, (P,) float32"}


def write_codes(files: RecordFiles, coding: ScalarCoding, vectors: NDArray[np.float32]) -> None:
    """Append vectors, (n, d), to the files of a segment."""
    codes, scales = coding.encode(vectors)
    files.write(fine(coding), codes)
    files.write(SCALES, scales)


def widened(parameter: int, allowed: Bitmap | None) -> int:
    """Increase a search parameter for a search with a filter.

    If one document in f is allowed, the ten best allowed ones are among the 10 f best of all documents, which lie somewhat farther apart.

    Args:
        parameter: Its value without a filter.
        allowed: Rows that may be found, (P,); None for all.

    Example:
        >>> widened(10, np.array([True, False, False, False])), widened(10, None)
        (20, 10)
    """
    if allowed is None:
        return parameter
    sparser = len(allowed) / max(1, int(np.count_nonzero(allowed)))
    return round(parameter * min(_WIDER, math.sqrt(sparser)))


class Finder(Protocol):
    """Finds candidates in one segment. Several threads may search at once."""

    @property
    def size(self) -> Size:
        """Size in memory, whether or not it is loaded yet, and on disk."""

    def find(self, queries: NDArray[np.float32], count: int, *, params: DenseParams, allowed: Bitmap | None) -> list[NDArray[np.int64]]:
        """Find documents that may be among the best of each query.

        Args:
            queries: (Q, d) float32, contiguous.
            count: Maximum number of documents per query.
            params: Search parameters.
            allowed: Rows that may be found, (P,); None for all.

        Returns:
            Allowed rows, unordered, each at most once; fewer than ``count`` if the search met no more.
        """

    def copy(self, files: RecordFiles, keep: Bitmap) -> None:
        """Append the stored records of the kept rows, (P,), byte for byte."""

    def damaged(self) -> Bitmap:
        """Rows lost with a damaged file, (P,)."""


class DenseSegment:
    """The documents of one segment; see `quiver.retrieval.index.engines.Segment`."""

    def __init__(self, store: RefineStore, finder: Finder) -> None:
        self.store = store
        self._finder = finder

    def __len__(self) -> int:
        return len(self.store)

    @property
    def size(self) -> Size:
        """Size in memory, including the lists that the first search creates, and on disk."""
        resident, mapped = self._finder.size
        return Size(resident, mapped + self.store.nbytes)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of vectors per row, (P,): 1."""
        return np.ones(len(self), np.int64)

    def search(
        self, queries: NDArray[np.float32], k: int, *, params: DenseParams, ranks: NDArray[np.uint32], allowed: Bitmap | None = None
    ) -> list[Found]:
        """The k best rows of each query; see `quiver.retrieval.index.engines.Segment`."""
        count = len(self) if allowed is None else int(np.count_nonzero(allowed))
        wanted = min(math.ceil(params.k_factor * k), count)
        if not len(queries):
            return []
        few = wanted if allowed is None else max(_FEW * wanted, min(len(self) // _SHARE, _MANY))
        if params.exhaustive or count <= few:
            return self.store.search(queries, k, ranks=ranks, allowed=allowed)
        matrix = np.ascontiguousarray(queries, np.float32)
        found = []
        for number, rows in enumerate(self._finder.find(matrix, wanted, params=params, allowed=allowed)):
            best, scores, least = self.store.nearest_of(rows, matrix[number], k, ranks=ranks)
            # Fewer than k rows were met, or all from the last hit on have equal scores: rows that were not met may belong to the k best.
            if len(rows) < k or (len(rows) > k and scores[-1] == least):
                found += self.store.search(matrix[number : number + 1], k, ranks=ranks, allowed=allowed)
            else:
                found.append(Found(best, scores))
        return found

    def exact_scores(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Scores of given rows from the refine store, (len(rows),)."""
        return self.store.scores(query, rows)

    def vectors(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Decoded vectors of given rows, (n, d), and the number of vectors of each row, (n,): 1."""
        return self.store.decode(rows), np.ones(len(rows), np.int64)

    def damaged(self) -> Bitmap:
        """See `quiver.retrieval.index.engines.Segment`."""
        return self.store.damaged() | self._finder.damaged()

    def copy(self, files: RecordFiles, keep: Bitmap) -> None:
        """Append the kept rows, (P,), to the files of another segment, byte for byte."""
        self._finder.copy(files, keep)
        self.store.copy(files, keep)
