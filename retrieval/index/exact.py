"""Exact search, and the exact engines: uncompressed float32 vectors, all of which are compared with every query.

On disk a segment is one memory-mapped file of vectors; in memory it is any `Rows`, such as vectors of the embedding store. Documents are
scored by inner products or MaxSim. A document without token vectors keeps its row and id and is never found.
Close scores are computed again in float64 (`quiver.retrieval.index.ranking`), on a GPU after a search in half precision.

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
from typing import TYPE_CHECKING, Any, TypeAlias

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
    NoParams,
    Preset,
    Sample,
    Setting,
    Size,
    check_names,
)
from quiver.retrieval.index.files import DamagedIndexError, Disk, Files, lengths_around, little_endian, rows_with, write_array, write_file
from quiver.retrieval.index.ranking import (
    LIMITS,
    Block,
    HostScorer,
    SearchLimits,
    document_blocks,
    float32_error,
    picked_offsets,
    rank,
    token_rows,
)
from quiver.retrieval.models.encoding import maxsim_packed
from quiver.retrieval.records import DenseVectors, MatrixRows, ModelCard, PickedRows, Rows, TokenVectors, row_blocks

if TYPE_CHECKING:
    import torch

    from quiver.retrieval.index.on_device import DeviceVectors

_faiss: Any = faiss  # the type stubs lack the functions that FAISS's Python layer adds

Queries: TypeAlias = DenseVectors | Sequence[TokenVectors]
"""(Q, d), or Q arrays of (n_i >= 1, d) float32; finite."""

ROWS = 8192
"""Rows of a matrix that are read in one step, so that a check never copies the complete matrix."""

# If a filter allows fewer rows than this share, they are gathered before scoring; otherwise all rows are scored and the others masked.
_FEW = 0.25
# For fewer queries, FAISS's inner products take half the time of a matrix product; for more, three times as long.
_FEW_QUERIES = 8

_CODEC = "codec.json"
_VECTORS = "vectors.f32"
_LENGTHS = "lengths.u32"
_FACTS = "vectors.json"
# Memory of a writer in bytes for the buffers of its files, in addition to the document lengths.
_BUFFERS = 4 << 20


def largest_norm(rows: Rows) -> float:
    """Length of the longest row; not finite if a row is not, or if a length overflows float32."""
    largest = np.float32(0)
    for _, block in row_blocks(rows, ROWS):
        with np.errstate(over="ignore", invalid="ignore"):
            largest = np.maximum(largest, np.linalg.norm(block, axis=1).max())
    return float(largest)


def search_exact(  # noqa: PLR0913 - one option for each choice
    rows: Rows,
    offsets: NDArray[np.int64] | None,
    queries: Queries,
    k: int,
    *,
    largest_norm: float,
    ids: NDArray[Any],
    allowed: Bitmap | None = None,
    all_exact: bool = False,
    limits: SearchLimits = LIMITS,
    placed: DeviceVectors | None = None,
) -> list[Found]:
    """The k best documents of each query by exact inner product or MaxSim; ties go to the greater id.

    Args:
        rows: (P, d), or the token vectors of all documents, (T, d); finite.
        offsets: First token vector of each document, and T, (P + 1,); None for one vector per document.
        queries: Vectors for the first, token vectors for the second.
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
    filled = None if offsets is None else np.diff(offsets) > 0
    findable = filled if allowed is None else allowed if filled is None else filled & allowed
    count = len(ids) if findable is None else int(np.count_nonzero(findable))
    if allowed is not None and findable is not None and count < _FEW * len(allowed) and (placed is None or placed.resident is None):
        picked = np.flatnonzero(findable)
        some, ends = PickedRows(rows, picked), None
        if offsets is not None:
            some, ends = PickedRows(rows, token_rows(offsets, picked)), picked_offsets(offsets, picked)
        onto = None if placed is None else placed.of(some)
        found = search_exact(
            some, ends, queries, k, largest_norm=largest_norm, ids=ids[picked], all_exact=all_exact, limits=limits, placed=onto
        )
        return [Found(picked[places], scores) for places, scores in found]
    ranked: list[Found] = []
    for start in range(0, len(queries), limits.queries):
        some_queries = queries[start : start + limits.queries]
        if placed is None:
            host = HostScorer(
                len(some_queries),
                partial(_read_blocks, rows, offsets, some_queries, allowed, limits),
                partial(_score_exactly, rows, offsets, some_queries, limits),
                limits.scores_held,
            )
            errors = _bound_errors(some_queries, largest_norm, tokens=offsets is not None)
            ranked += rank(host, k, findable=count, errors=errors, ids=ids, all_exact=all_exact, group=limits.queries_rescored)
            continue
        from quiver.retrieval.index.on_device import DeviceScorer  # imports PyTorch, which a search on the CPU does not need

        scorer = DeviceScorer(placed, some_queries, offsets, documents=len(ids), allowed=allowed, largest_norm=largest_norm, limits=limits)
        exact, margin = all_exact or scorer.all_exact, scorer.margin(k)
        group = limits.queries_rescored
        ranked += rank(scorer, k, findable=count, errors=scorer.errors, ids=ids, margin=margin, all_exact=exact, group=group)
    return ranked


def _bound_errors(queries: Queries, largest_norm: float, *, tokens: bool) -> NDArray[np.float64]:
    """Bound on the error of a float32 score of each query, (Q,)."""
    with np.errstate(over="ignore"):  # an overflow becomes infinity, which float32_error rejects
        lengths = [np.linalg.norm(query, axis=1).sum() for query in queries] if tokens else np.linalg.norm(np.asarray(queries), axis=1)
    terms = [query.shape[-1] + (len(query) if tokens else 0) for query in queries]
    return np.array([float32_error(count, float(length) * largest_norm) for count, length in zip(terms, lengths, strict=True)])


def _read_blocks(
    rows: Rows, offsets: NDArray[np.int64] | None, queries: Queries, allowed: Bitmap | None, limits: SearchLimits
) -> Iterator[Block]:
    """The documents in blocks of whole documents."""
    size, few = limits.block_rows(rows.shape[1]), allowed is None and len(queries) < _FEW_QUERIES
    if offsets is None:
        matrix = np.asarray(queries)
        for start, vectors in row_blocks(rows, size):
            hidden = None if allowed is None else ~allowed[start : start + len(vectors)]
            nearest = partial(_faiss.knn, matrix, vectors, metric=_faiss.METRIC_INNER_PRODUCT) if few else None
            yield Block(start, len(vectors), partial(_score_block, matrix, vectors, None, hidden), nearest)
        return
    for begin, end in document_blocks(offsets, size):
        first, last = int(offsets[begin]), int(offsets[end])
        hidden = None if allowed is None else ~allowed[begin:end]
        scores = partial(_score_block, queries, rows.span(first, last), offsets[begin : end + 1] - first, hidden)
        yield Block(begin, end - begin, scores)


def _score_block(
    queries: Queries, vectors: NDArray[np.float32], offsets: NDArray[np.int64] | None, hidden: Bitmap | None, some: Sequence[int]
) -> NDArray[np.float32]:
    """Scores of the documents of a block for some queries, (Q', n)."""
    if offsets is None:
        scores: NDArray[np.float32] = np.asarray(queries)[some] @ vectors.T
    else:
        scores = maxsim_packed([queries[query] for query in some], vectors, offsets)
    if hidden is not None:
        scores[:, hidden] = -np.inf
    return scores


def _score_exactly(
    rows: Rows, offsets: NDArray[np.int64] | None, queries: Queries, limits: SearchLimits, query: int, places: NDArray[np.int64]
) -> NDArray[np.float64]:
    return exact_scores(rows, offsets, queries[query], places, size=limits.tokens_rescored)


def exact_scores(
    rows: Rows,
    offsets: NDArray[np.int64] | None,
    query: NDArray[np.float32],
    places: NDArray[np.intp],
    *,
    size: int = LIMITS.tokens_rescored,
) -> NDArray[np.float64]:
    """Scores of given documents, which have a vector each, in float64, (len(places),); ``size`` token vectors are gathered at a time."""
    vectors, scores = query.astype(np.float64), np.empty(len(places), np.float64)
    if offsets is None:
        for start in range(0, len(places), ROWS):
            scores[start : start + ROWS] = rows.take(places[start : start + ROWS]).astype(np.float64) @ vectors
        return scores
    ends = picked_offsets(offsets, places)
    for first, last in document_blocks(ends, size):
        similarities = vectors @ rows.take(token_rows(offsets, places[first:last])).astype(np.float64).T  # (n_i, tokens)
        scores[first:last] = np.maximum.reduceat(similarities, ends[first:last] - ends[first], axis=1).sum(axis=0)
    return scores


class ExactSegment:
    """Float32 vectors, one or several per document; see `quiver.retrieval.index.engines.Segment`.

    Args:
        rows: Vectors of all documents, (P, d) or (T, d); memory-mapped, or any other source that is read in blocks.
        offsets: First token vector of each document, and T, (P + 1,); None for one vector per document.
        largest_norm: Length of the longest vector.
        damaged: Function that returns the rows lost with a damaged file, (P,); None if nothing is lost.
        all_exact: Compute every score in float64. Required where scores of several segments are merged; an index in memory has only one.
    """

    def __init__(
        self,
        rows: Rows,
        offsets: NDArray[np.int64] | None,
        largest_norm: float,
        *,
        damaged: Callable[[], Bitmap] | None = None,
        all_exact: bool = True,
    ) -> None:
        self._rows, self._offsets, self._largest_norm, self._damaged, self._all_exact = rows, offsets, largest_norm, damaged, all_exact
        self._device: torch.device | None = None  # where the vectors are searched; None for the CPU
        self._placed: Lazy[DeviceVectors] = Lazy()

    def __len__(self) -> int:
        return self._rows.shape[0] if self._offsets is None else len(self._offsets) - 1

    def search_on(self, device: torch.device) -> None:
        """Search on a device from now on; the vectors are copied at the first search."""
        if device != self._device:
            self._device, self._placed = None if device.type == "cpu" else device, Lazy()

    @property
    def size(self) -> Size:
        """See `quiver.retrieval.index.engines.Segment`."""
        return Size(0, 4 * self._rows.shape[0] * self._rows.shape[1] + (0 if self._offsets is None else self._offsets.nbytes))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """See `quiver.retrieval.index.engines.Segment`."""
        return np.ones(len(self), np.int64) if self._offsets is None else np.diff(self._offsets)

    def search(
        self, queries: Queries, k: int, *, params: NoParams, ranks: NDArray[np.uint32], allowed: Bitmap | None = None
    ) -> list[Found]:
        """See `quiver.retrieval.index.engines.Segment`."""
        del params
        placed, norm, exact = None, self._largest_norm, self._all_exact
        if self._device is not None:
            from quiver.retrieval.index.on_device import place  # imports PyTorch, which a search on the CPU does not need

            placed = self._placed.get(partial(place, self._rows, self._device))
        return search_exact(
            self._rows, self._offsets, queries, k, largest_norm=norm, ids=ranks, allowed=allowed, all_exact=exact, placed=placed
        )

    def exact_scores(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `quiver.retrieval.index.engines.Segment`."""
        scores = np.full(len(rows), -np.inf, np.float32)
        filled = np.arange(len(rows)) if self._offsets is None else np.flatnonzero(self._offsets[rows + 1] > self._offsets[rows])
        scores[filled] = exact_scores(self._rows, self._offsets, query, rows[filled])
        return scores

    def vectors(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """See `quiver.retrieval.index.engines.Segment`."""
        if self._offsets is None:
            return np.asarray(self._rows.take(rows)), np.ones(len(rows), np.int64)
        return np.asarray(self._rows.take(token_rows(self._offsets, rows))), self._offsets[rows + 1] - self._offsets[rows]

    def damaged(self) -> Bitmap:
        """See `quiver.retrieval.index.engines.Segment`."""
        return np.zeros(len(self), bool) if self._damaged is None else self._damaged()

    def kept(self, keep: Bitmap) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64] | None]]:
        """The vectors of the kept documents, and for token vectors their number of each document, in blocks."""
        if self._offsets is None:
            for start, block in row_blocks(self._rows, ROWS):
                yield block[keep[start : start + ROWS]], None
            return
        lengths = self.lengths
        for first, last in document_blocks(self._offsets, ROWS):
            block, chosen = self._rows.span(int(self._offsets[first]), int(self._offsets[last])), keep[first:last]
            yield block[np.repeat(chosen, lengths[first:last])], lengths[first:last][chosen]


def move_search(segments: Sequence[AnySegment], device: torch.device) -> torch.device:
    """Choose where the segments of an index are searched: exact engines on the device, all others on the CPU; return the choice."""
    import torch

    chosen = device
    for segment in segments:
        if isinstance(segment, ExactSegment):
            segment.search_on(device)
        else:
            chosen = torch.device("cpu")
    return chosen


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
        del token_ids
        if self._lengths is not None and lengths is not None:
            self._lengths.extend(lengths.tolist())
        if len(vectors):
            self._file.write(little_endian(np.asarray(vectors, np.float32)).data)
            self._norm = max(self._norm, largest_norm(MatrixRows(vectors)))

    def close(self) -> dict[str, str]:
        self._file.close()
        holds = {_VECTORS: "vectors, (T, d) float32", _FACTS: "the length of the longest vector"}
        if self._lengths is not None:
            write_array(self._folder / _LENGTHS, np.array(self._lengths, np.uint32), self._disk)
            holds[_LENGTHS] = "vectors of each document, (P,) uint32"
        write_file(self._folder / _FACTS, json.dumps({"largest_norm": self._norm}).encode(), self._disk)
        return holds


@dataclass(frozen=True)
class _ExactCodec:
    """Codec of an exact index, which holds only the vector width; see `quiver.retrieval.index.engines.Codec`."""

    name: str  # exact-dense or exact-tokens
    dim: int  # vector width d

    @property
    def parameters(self) -> Mapping[str, Setting]:
        return {"precision": "float32"}

    def save(self, folder: Path, disk: Disk) -> Mapping[str, str]:
        write_file(folder / _CODEC, json.dumps({"dim": self.dim}).encode(), disk)
        return {_CODEC: "the width of the vectors"}

    def memory(self, rows: int, vectors: int) -> int:
        del vectors
        return _BUFFERS + 16 * rows

    def writer(self, folder: Path, disk: Disk) -> _ExactWriter:
        return _ExactWriter(folder, disk, tokens=self.name == EXACT_TOKENS)

    def open(self, files: Files, rows: int) -> ExactSegment:
        if self.name == EXACT_DENSE:
            matrix = files.map(_VECTORS, np.float32, (rows, self.dim))
            return ExactSegment(MatrixRows(matrix), None, _read_norm(files), damaged=matrix.damaged)
        tokens, stored = files.map(_VECTORS, np.float32, (-1, self.dim)), files.map(_LENGTHS, np.uint32, (rows,))
        lengths, unplaced = lengths_around(stored.whole(), stored.damaged(), len(tokens))
        offsets: NDArray[np.int64] = np.append(0, np.cumsum(lengths))
        if int(offsets[-1]) != len(tokens):
            raise DamagedIndexError(
                f"{files.folder / _LENGTHS}: does not match {len(tokens)} vectors; run quiver index repair to keep the intact documents"
            )
        damaged = lambda: unplaced | rows_with(tokens.damaged(), offsets)  # noqa: E731
        return ExactSegment(MatrixRows(tokens), offsets, _read_norm(files), damaged=damaged)

    def merge(self, parts: Sequence[tuple[ExactSegment, Bitmap]], folder: Path, disk: Disk) -> Mapping[str, str]:
        writer = self.writer(folder, disk)
        for segment, keep in parts:
            for vectors, lengths in segment.kept(keep):
                writer.add(vectors, lengths)
        return writer.close()

    def preset_params(self, preset: Preset, *, k: int) -> NoParams:
        del preset, k
        return NoParams()

    def param_grid(self, k: int, *, documents: int) -> Sequence[NoParams]:
        del documents
        return [self.preset_params("exact", k=k)]


def _train(
    name: str, sample: Sample, card: ModelCard, *, documents: int, vectors: int, settings: Mapping[str, Setting], seed: int
) -> _ExactCodec:
    del sample, documents, vectors, seed
    check_names(name, "setting", settings, ())
    return _ExactCodec(name, card.dim)


def _open(name: str, folder: Path) -> _ExactCodec:
    path = folder / _CODEC
    return _ExactCodec(name, int(_number(read_json(path), "dim", path)))


def _read_norm(files: Files) -> float:
    """Length of the longest vector; infinity if it is damaged, because repair does not need it."""
    stored = files.map(_FACTS, np.uint8, (-1,))
    if not stored.is_whole:
        return math.inf
    path = files.folder / _FACTS
    try:
        content = json.loads(stored.whole().tobytes())
    except (ValueError, RecursionError) as error:
        raise DamagedIndexError(f"{path}: not JSON ({error}); run quiver index repair") from error
    return float(_number(content, "largest_norm", path))


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
    EXACT_DENSE: Engine("dense", partial(_train, EXACT_DENSE), partial(_open, EXACT_DENSE)),
    EXACT_TOKENS: Engine("colbert", partial(_train, EXACT_TOKENS), partial(_open, EXACT_TOKENS)),
}
"""The exact engines; see `quiver.retrieval.index.engines.ENGINE_MODULES`."""
