"""Exact search, and the exact engines: uncompressed float32 vectors, all of which are compared with every query.

On disk a segment is one memory-mapped file of vectors; in memory it is any `Rows`, such as vectors of the embedding store. Dense vectors
are searched with ``faiss.knn``, the search of ``IndexFlatIP`` without its copy of the vectors; token vectors are scored by MaxSim. A
document without token vectors keeps its row and id and is never found.

Close scores are computed again in float64 (`quiver.retrieval.index.ranking`), on a GPU after a search in half precision
(`quiver.retrieval.index.on_device`); a ranking depends neither on the device nor on its threads.

Shapes: Q queries, P documents, n documents of a block, T token vectors of all documents, n_i token vectors of text i, k hits, d width.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import faiss
import numpy as np
from numpy.typing import NDArray

from quiver.encoder.files import read_json
from quiver.retrieval.index.engines import (
    EXACT_DENSE,
    EXACT_TOKENS,
    AnySegment,
    Bitmap,
    Engine,
    Found,
    Lazy,
    Preset,
    Sample,
    Setting,
    Size,
    check_names,
)
from quiver.retrieval.index.files import DamagedIndexError, Disk, Files, lengths_around, little_endian, rows_with, write_array, write_file
from quiver.retrieval.index.ranking import (
    LIMITS,
    InParts,
    Ranked,
    SearchLimits,
    document_blocks,
    float32_error,
    nearest_by_scores,
    rank,
    token_pieces,
    token_rows,
)
from quiver.retrieval.models.encoding import maxsim_packed
from quiver.retrieval.records import DenseVectors, MatrixRows, ModelCard, PickedRows, Rows, TokenVectors

if TYPE_CHECKING:
    import torch

    from quiver.retrieval.index.on_device import DeviceScorer, Resident, Streamed

ROWS = 8192
"""Rows of a matrix that are checked in one step, so that a check never copies the complete matrix."""


def largest_norm(rows: Rows) -> float:
    """Length of the longest row; not finite if a row is not, or if a length overflows float32."""
    largest = np.float32(0)
    for _, block in rows.blocks(ROWS):
        with np.errstate(over="ignore", invalid="ignore"):
            largest = np.maximum(largest, np.linalg.norm(block, axis=1).max())
    return float(largest)


# If a filter allows fewer rows than this share, they are gathered before scoring; otherwise all rows are scored and the others masked.
_FEW = 0.25


def search_dense(  # noqa: PLR0913 - one option for each choice
    rows: Rows,
    queries: DenseVectors,
    k: int,
    *,
    largest_norm: float,
    ids: NDArray[Any],
    allowed: NDArray[np.bool_] | None = None,
    all_exact: bool = False,
    limits: SearchLimits = LIMITS,
    placed: Resident | Streamed | None = None,
) -> list[Ranked]:
    """The k best rows of each query by exact inner product; ties go to the greater id.

    Args:
        rows: (P, d), finite.
        queries: (Q, d), finite.
        k: Hits per query, at least 1.
        largest_norm: Length of the longest row.
        ids: Document ids, or their ranks, (P,).
        allowed: Rows that may be found, (P,); None for all.
        all_exact: See `quiver.retrieval.index.ranking.rank`.
        limits: Sizes of the parts of the search.
        placed: The rows for a search on a device; None to search on the host.

    Raises:
        ValueError: A query has scores that overflow float32.
    """
    if allowed is not None and np.count_nonzero(allowed) < _FEW * len(allowed) and (placed is None or placed.streamed):
        picked = np.flatnonzero(allowed)
        found = search_dense(
            some := PickedRows(rows, picked),
            queries,
            k,
            largest_norm=largest_norm,
            ids=ids[picked],
            all_exact=all_exact,
            limits=limits,
            placed=None if placed is None else _streamed(some, placed.device),
        )
        return [(picked[places], scores) for places, scores in found]
    findable = rows.shape[0] if allowed is None else int(np.count_nonzero(allowed))
    ranked: list[Ranked] = []
    for start in range(0, len(queries), limits.dense_queries):
        group = queries[start : start + limits.dense_queries]
        if placed is not None:
            from quiver.retrieval.index.on_device import DeviceScorer  # imports PyTorch, which a search on the CPU does not need

            scorer = DeviceScorer(placed, group, documents=rows.shape[0], allowed=allowed, largest_norm=largest_norm, limits=limits)
            ranked += _ranked(scorer, k, findable=findable, ids=ids, all_exact=all_exact, limits=limits)
            continue
        with np.errstate(over="ignore"):  # an overflow becomes infinity, which float32_error rejects
            lengths = np.linalg.norm(group, axis=1)
        errors = np.array([float32_error(rows.shape[1], float(length) * largest_norm) for length in lengths])
        walk = InParts(_DenseWalk(rows, group, allowed, limits), limits.queries_rescored)
        ranked += rank(walk, k, findable=findable, errors=errors, ids=ids, all_exact=all_exact, group=limits.queries_rescored)
    return ranked


def _streamed(rows: Rows, device: torch.device) -> Streamed:
    from quiver.retrieval.index.on_device import Streamed  # imports PyTorch, which a search on the CPU does not need

    return Streamed(rows, device)


def _ranked(scorer: DeviceScorer, k: int, *, findable: int, ids: NDArray[Any], all_exact: bool, limits: SearchLimits) -> list[Ranked]:
    exact, group = all_exact or scorer.all_exact, limits.queries_rescored
    return rank(scorer, k, findable=findable, errors=scorer.errors, ids=ids, margin=scorer.margin(k), all_exact=exact, group=group)


class _DensePart:
    """A block of documents and the queries, both in memory; implements `quiver.retrieval.index.ranking.Part`."""

    def __init__(self, queries: DenseVectors, block: DenseVectors, hidden: NDArray[np.bool_] | None, limits: SearchLimits) -> None:
        self._queries = queries
        self._block = block
        self._limits = limits
        self._hidden = hidden  # (n,) documents that must not be found

    def nearest(self, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        if self._hidden is not None:
            return nearest_by_scores(self, len(self._queries), len(self._block), k, held=self._limits.scores_held)
        scores, places = faiss.knn(self._queries, self._block, min(k, len(self._block)), metric=faiss.METRIC_INNER_PRODUCT)
        return scores, places

    def scores(self, queries: Sequence[int]) -> NDArray[np.float32]:
        scores: NDArray[np.float32] = self._queries[queries] @ self._block.T  # (Q', n)
        if self._hidden is not None:
            scores[:, self._hidden] = -np.inf
        return scores

    def exact(self, query: int, places: NDArray[np.intp]) -> NDArray[np.float64]:
        return exact_products(MatrixRows(self._block), self._queries[query], places)


def exact_products(rows: Rows, query: NDArray[np.float32], places: NDArray[np.intp]) -> NDArray[np.float64]:
    """Inner products of a query with given rows in float64, (len(places),)."""
    vector = query.astype(np.float64)
    parts = (places[start : start + ROWS] for start in range(0, len(places), ROWS))
    return np.concatenate([np.zeros(0), *(rows.take(part).astype(np.float64) @ vector for part in parts)])


class _DenseWalk:
    """The documents in blocks; implements `quiver.retrieval.index.ranking.Walk`."""

    def __init__(self, rows: Rows, queries: DenseVectors, allowed: NDArray[np.bool_] | None, limits: SearchLimits) -> None:
        self._rows = rows
        self._queries = queries
        self._allowed = allowed
        self._limits = limits

    def parts(self) -> Iterator[tuple[int, _DensePart]]:
        for start, block in self._rows.blocks(self._limits.block_rows(self._rows.shape[1])):
            hidden = None if self._allowed is None else ~self._allowed[start : start + len(block)]
            yield start, _DensePart(self._queries, block, hidden, self._limits)

    def pick(self, rows: NDArray[np.intp]) -> Iterator[tuple[int, _DensePart]]:
        for start in range(0, len(rows), ROWS):
            picked = rows[start : start + ROWS]
            yield len(picked), _DensePart(self._queries, self._rows.take(picked), None, self._limits)


def search_tokens(  # noqa: PLR0913 - one option for each choice
    rows: Rows,
    offsets: NDArray[np.int64],
    queries: Sequence[TokenVectors],
    k: int,
    *,
    largest_norm: float,
    ids: NDArray[Any],
    allowed: NDArray[np.bool_] | None = None,
    all_exact: bool = False,
    limits: SearchLimits = LIMITS,
    placed: Resident | Streamed | None = None,
) -> list[Ranked]:
    """The k best documents of each query by exact MaxSim; ties go to the greater id.

    Args:
        rows: Token vectors of all documents, (T, d), finite.
        offsets: First token vector of each document, and T, (P + 1,).
        queries: Q arrays of (n_i >= 1, d) float32, finite.
        k: Hits per query, at least 1.
        largest_norm: Length of the longest row.
        ids: Document ids, or their ranks, (P,).
        allowed: Documents that may be found, (P,); None for all. Documents without a vector are never found.
        all_exact: See `quiver.retrieval.index.ranking.rank`.
        limits: Sizes of the parts of the search.
        placed: The rows for a search on a device; None to search on the host.

    Raises:
        ValueError: A query has scores that overflow float32.
    """
    filled = np.diff(offsets) > 0
    findable = int(np.count_nonzero(filled if allowed is None else filled & allowed))
    if allowed is not None and findable < _FEW * len(allowed) and (placed is None or placed.streamed):
        picked = np.flatnonzero(allowed & filled)
        lengths = offsets[picked + 1] - offsets[picked]
        found = search_tokens(
            some := PickedRows(rows, token_rows(offsets, picked)),
            np.append(0, np.cumsum(lengths)),
            queries,
            k,
            largest_norm=largest_norm,
            ids=ids[picked],
            all_exact=all_exact,
            limits=limits,
            placed=None if placed is None else _streamed(some, placed.device),
        )
        return [(picked[places], scores) for places, scores in found]
    ranked: list[Ranked] = []
    for start in range(0, len(queries), limits.token_queries):
        group = queries[start : start + limits.token_queries]
        if placed is not None:
            from quiver.retrieval.index.on_device import DeviceScorer  # imports PyTorch, which a search on the CPU does not need

            scorer = DeviceScorer(placed, group, offsets, documents=len(ids), allowed=allowed, largest_norm=largest_norm, limits=limits)
            ranked += _ranked(scorer, k, findable=findable, ids=ids, all_exact=all_exact, limits=limits)
            continue
        errors = np.array([_error(query, largest_norm) for query in group])
        walk = InParts(_TokenWalk(rows, offsets, group, allowed, limits), limits.queries_rescored)
        ranked += rank(walk, k, findable=findable, errors=errors, ids=ids, all_exact=all_exact, group=limits.queries_rescored)
    return ranked


def _error(query: TokenVectors, largest_norm: float) -> float:
    with np.errstate(over="ignore"):  # an overflow becomes infinity, which float32_error rejects
        magnitude = float(np.linalg.norm(query, axis=1).sum()) * largest_norm
    return float32_error(query.shape[1] + len(query), magnitude)


class _TokenPart:
    """Some documents and the queries, both in memory; implements `quiver.retrieval.index.ranking.Part`."""

    def __init__(
        self, queries: Sequence[TokenVectors], tokens: TokenVectors, offsets: NDArray[np.int64], hidden: Bitmap | None, limits: SearchLimits
    ) -> None:
        self._queries, self._tokens, self._offsets, self._limits = queries, tokens, offsets, limits
        self._hidden = hidden  # (n,) documents that must not be found

    def nearest(self, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        return nearest_by_scores(self, len(self._queries), len(self._offsets) - 1, k, held=self._limits.scores_held)

    def scores(self, queries: Sequence[int]) -> NDArray[np.float32]:
        scores = maxsim_packed([self._queries[query] for query in queries], self._tokens, self._offsets)  # (Q', n)
        if self._hidden is not None:
            scores[:, self._hidden] = -np.inf
        return scores

    def exact(self, query: int, places: NDArray[np.intp]) -> NDArray[np.float64]:
        return exact_maxsim(MatrixRows(self._tokens), self._offsets, self._queries[query], places, size=self._limits.tokens_rescored)


def exact_maxsim(
    rows: Rows, offsets: NDArray[np.int64], query: TokenVectors, places: NDArray[np.intp], *, size: int = LIMITS.tokens_rescored
) -> NDArray[np.float64]:
    """MaxSim of a query with given documents in float64.

    Args:
        rows: Token vectors of all documents, (T, d).
        offsets: First token vector of each document, and T, (P + 1,).
        query: (n_i, d).
        places: Numbers of the documents; each must have a token vector.
        size: Maximum number of token vectors that are gathered at a time.

    Returns:
        (len(places),).
    """
    vectors = query.astype(np.float64)
    scores = np.empty(len(places), dtype=np.float64)
    for first, last in token_pieces(offsets, places, size):
        piece = places[first:last]
        tokens = rows.take(token_rows(offsets, piece))
        lengths = offsets[piece + 1] - offsets[piece]
        similarities = vectors @ tokens.astype(np.float64).T  # (n_i, tokens)
        scores[first:last] = np.maximum.reduceat(similarities, np.cumsum(lengths) - lengths, axis=1).sum(axis=0)
    return scores


class _TokenWalk:
    """The documents in blocks of whole documents; implements `quiver.retrieval.index.ranking.Walk`."""

    def __init__(
        self, rows: Rows, offsets: NDArray[np.int64], queries: Sequence[TokenVectors], allowed: Bitmap | None, limits: SearchLimits
    ) -> None:
        self._rows, self._offsets, self._queries, self._allowed, self._limits = rows, offsets, queries, allowed, limits

    def parts(self) -> Iterator[tuple[int, _TokenPart]]:
        for begin, end in document_blocks(self._offsets, self._limits.block_rows(self._rows.shape[1])):
            first, last = int(self._offsets[begin]), int(self._offsets[end])
            hidden = None if self._allowed is None else ~self._allowed[begin:end]
            yield (
                begin,
                _TokenPart(self._queries, self._rows.span(first, last), self._offsets[begin : end + 1] - first, hidden, self._limits),
            )

    def pick(self, rows: NDArray[np.intp]) -> Iterator[tuple[int, _TokenPart]]:
        for first, last in token_pieces(self._offsets, rows, self._limits.tokens_rescored):
            picked = rows[first:last]
            offsets = np.append(0, np.cumsum(self._offsets[picked + 1] - self._offsets[picked]))
            yield len(picked), _TokenPart(self._queries, self._rows.take(token_rows(self._offsets, picked)), offsets, None, self._limits)


_CODEC = "codec.json"
_VECTORS = "vectors.f32"
_LENGTHS = "lengths.u32"
_FACTS = "vectors.json"
# Memory of a writer in bytes for the buffers of its files, in addition to the document lengths.
_BUFFERS = 4 << 20


@dataclass(frozen=True)
class ExactParams:
    """Exact search has no search parameters."""


def _placement(rows: Rows, device: torch.device | None) -> Callable[[], Resident | Streamed | None]:
    """Function that copies the vectors of a segment to a device when it is first called. On the CPU, FAISS and NumPy search: None."""
    if device is None or device.type == "cpu":
        return lambda: None
    from quiver.retrieval.index.on_device import place  # imports PyTorch, which a search on the CPU does not need

    return partial(Lazy["Resident | Streamed"]().get, partial(place, rows, device))


class ExactDenseSegment:
    """One vector per document; see `quiver.retrieval.index.engines.Segment`.

    Args:
        rows: Vectors, (P, d); memory-mapped, or any other source that is read in blocks.
        largest_norm: Length of the longest vector.
        damaged: Function that returns the rows lost with a damaged file, (P,); None if nothing is lost.
        all_exact: Compute every score in float64. Required where scores of several segments are merged; an index in memory has only one.
    """

    def __init__(self, rows: Rows, largest_norm: float, *, damaged: Callable[[], Bitmap] | None = None, all_exact: bool = True) -> None:
        self._rows = rows
        self._largest_norm = largest_norm
        self._damaged = damaged
        self._all_exact = all_exact
        self._device: torch.device | None = None
        self._placed = _placement(rows, None)

    def __len__(self) -> int:
        return self._rows.shape[0]

    def search_on(self, device: torch.device) -> None:
        """Search on a device from now on; the vectors are copied at the first search."""
        if device != self._device:
            self._device, self._placed = device, _placement(self._rows, device)

    @property
    def size(self) -> Size:
        """See `quiver.retrieval.index.engines.Segment`."""
        return Size(0, 4 * len(self) * self._rows.shape[1])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """See `quiver.retrieval.index.engines.Segment`."""
        return np.ones(len(self), np.int64)

    def search(
        self, queries: DenseVectors, k: int, *, params: ExactParams, ranks: NDArray[np.uint32], allowed: Bitmap | None = None
    ) -> list[Found]:
        """See `quiver.retrieval.index.engines.Segment`."""
        del params
        norm, all_exact, placed = self._largest_norm, self._all_exact, self._placed()
        found = search_dense(self._rows, queries, k, largest_norm=norm, ids=ranks, allowed=allowed, all_exact=all_exact, placed=placed)
        return [Found(rows, scores) for rows, scores in found]

    def exact_scores(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `quiver.retrieval.index.engines.Segment`."""
        return exact_products(self._rows, query, rows).astype(np.float32)

    def vectors(self, rows: NDArray[np.int64]) -> tuple[DenseVectors, NDArray[np.int64]]:
        """See `quiver.retrieval.index.engines.Segment`."""
        return np.asarray(self._rows.take(rows)), np.ones(len(rows), np.int64)

    def damaged(self) -> Bitmap:
        """See `quiver.retrieval.index.engines.Segment`."""
        return np.zeros(len(self), bool) if self._damaged is None else self._damaged()

    def kept(self, keep: Bitmap) -> Iterator[tuple[DenseVectors, None]]:
        """The vectors of the kept rows, in blocks."""
        for start, block in self._rows.blocks(ROWS):
            yield block[keep[start : start + ROWS]], None


class ExactTokenSegment:
    """One vector per token; see `quiver.retrieval.index.engines.Segment`.

    Args:
        rows: Token vectors of all documents, (T, d); memory-mapped, or any other source that is read in blocks.
        offsets: First token vector of each document, and T, (P + 1,).
        largest_norm: As for `ExactDenseSegment`.
        damaged: As for `ExactDenseSegment`.
        all_exact: As for `ExactDenseSegment`.
    """

    def __init__(
        self,
        rows: Rows,
        offsets: NDArray[np.int64],
        largest_norm: float,
        *,
        damaged: Callable[[], Bitmap] | None = None,
        all_exact: bool = True,
    ) -> None:
        self.offsets = offsets
        self._rows, self._largest_norm, self._damaged, self._all_exact = rows, largest_norm, damaged, all_exact
        self._device: torch.device | None = None
        self._placed = _placement(rows, None)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def search_on(self, device: torch.device) -> None:
        """Search on a device from now on; the vectors are copied at the first search."""
        if device != self._device:
            self._device, self._placed = device, _placement(self._rows, device)

    @property
    def size(self) -> Size:
        """See `quiver.retrieval.index.engines.Segment`."""
        return Size(0, 4 * self._rows.shape[0] * self._rows.shape[1] + self.offsets.nbytes)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """See `quiver.retrieval.index.engines.Segment`."""
        return np.diff(self.offsets)

    def search(
        self, queries: Sequence[TokenVectors], k: int, *, params: ExactParams, ranks: NDArray[np.uint32], allowed: Bitmap | None = None
    ) -> list[Found]:
        """See `quiver.retrieval.index.engines.Segment`."""
        del params
        norm, all_exact, placed = self._largest_norm, self._all_exact, self._placed()
        found = search_tokens(
            self._rows, self.offsets, queries, k, largest_norm=norm, ids=ranks, allowed=allowed, all_exact=all_exact, placed=placed
        )
        return [Found(rows, scores) for rows, scores in found]

    def exact_scores(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `quiver.retrieval.index.engines.Segment`."""
        scores = np.full(len(rows), -np.inf, np.float32)
        filled = np.flatnonzero(self.offsets[rows + 1] > self.offsets[rows])
        scores[filled] = exact_maxsim(self._rows, self.offsets, query, rows[filled])
        return scores

    def vectors(self, rows: NDArray[np.int64]) -> tuple[TokenVectors, NDArray[np.int64]]:
        """See `quiver.retrieval.index.engines.Segment`."""
        return np.asarray(self._rows.take(token_rows(self.offsets, rows))), self.offsets[rows + 1] - self.offsets[rows]

    def damaged(self) -> Bitmap:
        """See `quiver.retrieval.index.engines.Segment`."""
        return np.zeros(len(self), bool) if self._damaged is None else self._damaged()

    def kept(self, keep: Bitmap) -> Iterator[tuple[TokenVectors, NDArray[np.int64]]]:
        """The token vectors of the kept documents, in blocks."""
        lengths = self.lengths
        for first, last in document_blocks(self.offsets, ROWS):
            block, chosen = self._rows.span(int(self.offsets[first]), int(self.offsets[last])), keep[first:last]
            yield block[np.repeat(chosen, lengths[first:last])], lengths[first:last][chosen]


def move_search(segments: Sequence[AnySegment], device: torch.device) -> torch.device:
    """Choose where the segments of an index are searched: exact engines on the device, all others on the CPU; return the choice."""
    import torch

    chosen = device
    for segment in segments:
        if isinstance(segment, (ExactDenseSegment, ExactTokenSegment)):
            segment.search_on(device)
        else:
            chosen = torch.device("cpu")
    return chosen


ExactSegment = TypeVar("ExactSegment", ExactDenseSegment, ExactTokenSegment)


class _ExactWriter:
    """Writes the vectors of a segment, and the document lengths for token vectors."""

    def __init__(self, folder: Path, disk: Disk, *, tokens: bool) -> None:
        self._folder = folder
        self._disk = disk
        self._file = disk.create(folder / _VECTORS)
        self._lengths = array("I") if tokens else None
        self._norm = 0.0

    def add(
        self, vectors: NDArray[np.float32], lengths: NDArray[np.int64] | None = None, token_ids: NDArray[np.uint32] | None = None
    ) -> None:
        """See `quiver.retrieval.index.engines.SegmentWriter`."""
        del token_ids
        if self._lengths is not None and lengths is not None:
            self._lengths.extend(lengths.tolist())
        if len(vectors):
            self._file.write(little_endian(np.asarray(vectors, np.float32)).data)
            self._norm = max(self._norm, largest_norm(MatrixRows(vectors)))

    def close(self) -> dict[str, str]:
        """See `quiver.retrieval.index.engines.SegmentWriter`."""
        self._file.close()
        holds = {_VECTORS: "vectors, (T, d) float32", _FACTS: "the length of the longest vector"}
        if self._lengths is not None:
            write_array(self._folder / _LENGTHS, np.array(self._lengths, np.uint32), self._disk)
            holds[_LENGTHS] = "vectors of each document, (P,) uint32"
        write_file(self._folder / _FACTS, json.dumps({"largest_norm": self._norm}).encode(), self._disk)
        return holds


@dataclass(frozen=True)
class ExactCodec(Generic[ExactSegment]):
    """Codec of an exact index: the vector width and a function that opens segments; see `quiver.retrieval.index.engines.Codec`.

    Attributes:
        name: ``exact-dense`` or ``exact-tokens``.
        dim: Vector width d.
        opened: Opens a segment's files, given the width and the number of rows.
    """

    name: str
    dim: int
    opened: Callable[[Files, int, int], ExactSegment]

    @property
    def parameters(self) -> Mapping[str, Setting]:
        """See `quiver.retrieval.index.engines.Codec`."""
        return {"precision": "float32"}

    def save(self, folder: Path, disk: Disk) -> Mapping[str, str]:
        """See `quiver.retrieval.index.engines.Codec`."""
        write_file(folder / _CODEC, _content(self.dim), disk)
        return {_CODEC: "the width of the vectors"}

    def memory(self, rows: int, vectors: int) -> int:
        """See `quiver.retrieval.index.engines.Codec`."""
        del vectors
        return _BUFFERS + 16 * rows

    def writer(self, folder: Path, disk: Disk) -> _ExactWriter:
        """See `quiver.retrieval.index.engines.Codec`."""
        return _ExactWriter(folder, disk, tokens=self.name == EXACT_TOKENS)

    def open(self, files: Files, rows: int) -> ExactSegment:
        """See `quiver.retrieval.index.engines.Codec`."""
        return self.opened(files, self.dim, rows)

    def merge(self, parts: Sequence[tuple[ExactSegment, Bitmap]], folder: Path, disk: Disk) -> Mapping[str, str]:
        """See `quiver.retrieval.index.engines.Codec`."""
        writer = self.writer(folder, disk)
        for segment, keep in parts:
            for vectors, lengths in segment.kept(keep):
                writer.add(vectors, lengths)
        return writer.close()

    def preset_params(self, preset: Preset, *, k: int) -> ExactParams:
        """See `quiver.retrieval.index.engines.Codec`."""
        del preset, k
        return ExactParams()

    def param_grid(self, k: int, *, documents: int) -> Sequence[ExactParams]:
        """See `quiver.retrieval.index.engines.Codec`."""
        del documents
        return [self.preset_params("exact", k=k)]

    def resized(self, search_params: Mapping[str, Setting], *, measured: int, k: int) -> Mapping[str, Setting]:
        """See `quiver.retrieval.index.engines.Codec`."""
        del measured, k
        return search_params

    def search_params_from(self, search_params: Mapping[str, Setting]) -> ExactParams:
        """See `quiver.retrieval.index.engines.Codec`."""
        check_names(f"this {self.name} index", "search parameter", search_params, ())
        return ExactParams()


def _content(dim: int) -> bytes:
    return json.dumps({"dim": dim}).encode()


def train_dense(
    sample: Sample, card: ModelCard, *, documents: int, vectors: int, settings: Mapping[str, Setting], seed: int
) -> ExactCodec[ExactDenseSegment]:
    """The exact codec for dense vectors; see `quiver.retrieval.index.engines.train_codec`."""
    del sample, documents, vectors, seed
    check_names(EXACT_DENSE, "setting", settings, ())
    return ExactCodec(EXACT_DENSE, card.dim, _open_dense)


def train_tokens(
    sample: Sample, card: ModelCard, *, documents: int, vectors: int, settings: Mapping[str, Setting], seed: int
) -> ExactCodec[ExactTokenSegment]:
    """The exact codec for token vectors; see `quiver.retrieval.index.engines.train_codec`."""
    del sample, documents, vectors, seed
    check_names(EXACT_TOKENS, "setting", settings, ())
    return ExactCodec(EXACT_TOKENS, card.dim, _open_tokens)


def open_dense(folder: Path) -> ExactCodec[ExactDenseSegment]:
    """Open a codec folder written by ``ExactCodec.save``.

    Raises:
        InputError: The folder does not hold such a codec.
    """
    return ExactCodec(EXACT_DENSE, _width_of(folder / _CODEC), _open_dense)


def open_tokens(folder: Path) -> ExactCodec[ExactTokenSegment]:
    """Open a codec folder written by ``ExactCodec.save``.

    Raises:
        InputError: The folder does not hold such a codec.
    """
    return ExactCodec(EXACT_TOKENS, _width_of(folder / _CODEC), _open_tokens)


def _open_dense(files: Files, dim: int, rows: int) -> ExactDenseSegment:
    matrix = files.map(_VECTORS, np.float32, (rows, dim))
    return ExactDenseSegment(MatrixRows(matrix), _norm_of(files), damaged=matrix.damaged)


def _open_tokens(files: Files, dim: int, rows: int) -> ExactTokenSegment:
    tokens, stored = files.map(_VECTORS, np.float32, (-1, dim)), files.map(_LENGTHS, np.uint32, (rows,))
    lengths, unplaced = lengths_around(stored.whole(), stored.damaged(), len(tokens))
    offsets: NDArray[np.int64] = np.append(0, np.cumsum(lengths))
    if int(offsets[-1]) != len(tokens):
        raise DamagedIndexError(
            f"{files.folder / _LENGTHS}: does not match {len(tokens)} vectors; run quiver index repair to keep the intact documents"
        )

    def damaged() -> Bitmap:
        return unplaced | rows_with(tokens.damaged(), offsets)

    return ExactTokenSegment(MatrixRows(tokens), offsets, _norm_of(files), damaged=damaged)


def _norm_of(files: Files) -> float:
    """Length of the longest vector; infinity if it is damaged, because repair does not need it."""
    stored = files.map(_FACTS, np.uint8, (-1,))
    if not stored.is_whole:
        return math.inf
    path = files.folder / _FACTS
    return float(_number(_parsed(stored.whole().tobytes(), path), "largest_norm", path))


def _width_of(path: Path) -> int:
    return int(_number(read_json(path), "dim", path))


def _parsed(content: bytes, path: Path) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedIndexError(f"{path}: not JSON ({error}); run quiver index repair") from error


def _number(content: Any, name: str, path: Path) -> float:
    """Read a non-negative number from parsed JSON."""
    try:
        value = float(content[name])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedIndexError(f"{path}: does not hold {name} ({error}); run quiver index repair") from error
    if not value >= 0:
        raise DamagedIndexError(f"{path}: {name} has the impossible value {value}; run quiver index repair")
    return value


ENGINES = {
    EXACT_DENSE: Engine("dense", train_dense, open_dense),
    EXACT_TOKENS: Engine("colbert", train_tokens, open_tokens),
}
"""The exact engines; see `quiver.retrieval.index.engines.ENGINE_MODULES`."""
