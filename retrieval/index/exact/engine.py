"""The exact engines: float32 vectors as they came, in one mapped file a segment; nothing is trained.

Shapes: Q queries, P documents, T vectors of all documents, d width.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json
from quiver.retrieval.index.disk import Disk, little_endian, write_array, write_file
from quiver.retrieval.index.engines import Bitmap, Found, Preset, Sample, Setting, Size
from quiver.retrieval.index.errors import DamagedIndexError
from quiver.retrieval.index.exact.arrays import ROWS, largest_norm
from quiver.retrieval.index.exact.colbert import document_blocks, exact_maxsim, search_tokens, token_rows
from quiver.retrieval.index.exact.dense import exact_products, search_dense
from quiver.retrieval.index.mapped import CheckedArray, Files, lengths_around, rows_with
from quiver.retrieval.protocols import MatrixRows
from quiver.retrieval.records import DenseVectors, ModelCard, TokenVectors

_CODEC = "codec.json"
_VECTORS = "vectors.f32"
_LENGTHS = "lengths.u32"
_FACTS = "vectors.json"
# What a writer holds beside the places where documents begin: the buffers of its files.
_BUFFERS = 4 << 20


@dataclass(frozen=True)
class ExactEffort:
    """Exact search has no knobs."""


class ExactDenseSegment:
    """One vector a document; see `quiver.retrieval.index.engines.Segment`."""

    def __init__(self, matrix: CheckedArray, largest_norm: float) -> None:
        self.matrix = matrix
        self._largest_norm = largest_norm

    def __len__(self) -> int:
        return len(self.matrix)

    @property
    def size(self) -> Size:
        """See `quiver.retrieval.index.engines.Segment`."""
        return Size(0, self.matrix.nbytes)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """See `quiver.retrieval.index.engines.Segment`."""
        return np.ones(len(self.matrix), np.int64)

    def search(
        self, queries: DenseVectors, k: int, *, effort: ExactEffort, ranks: NDArray[np.uint32], allowed: Bitmap | None = None
    ) -> list[Found]:
        """See `quiver.retrieval.index.engines.Segment`."""
        del effort
        rows = MatrixRows(self.matrix)
        found = search_dense(rows, queries, k, largest_norm=self._largest_norm, ids=ranks, allowed=allowed, all_exact=True)
        return [Found(rows, scores) for rows, scores in found]

    def exact_scores(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `quiver.retrieval.index.engines.Segment`."""
        return exact_products(self.matrix, query, rows).astype(np.float32)

    def vectors(self, rows: NDArray[np.int64]) -> tuple[DenseVectors, NDArray[np.int64]]:
        """See `quiver.retrieval.index.engines.Segment`."""
        return np.asarray(self.matrix[rows]), np.ones(len(rows), np.int64)

    def damaged(self) -> Bitmap:
        """See `quiver.retrieval.index.engines.Segment`."""
        return self.matrix.damaged()

    def kept(self, keep: Bitmap) -> Iterator[tuple[DenseVectors, None]]:
        """The rows to keep, a block at a time."""
        for start in range(0, len(self.matrix), ROWS):
            yield self.matrix[start : start + ROWS][keep[start : start + ROWS]], None


class ExactTokenSegment:
    """One vector a token; see `quiver.retrieval.index.engines.Segment`."""

    def __init__(self, tokens: CheckedArray, lengths: CheckedArray, largest_norm: float) -> None:
        filled, self._unplaced = lengths_around(lengths.whole(), lengths.damaged(), len(tokens))
        self.tokens = tokens
        self.offsets: NDArray[np.int64] = np.append(0, np.cumsum(filled))
        self._largest_norm = largest_norm

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def size(self) -> Size:
        """See `quiver.retrieval.index.engines.Segment`."""
        return Size(0, self.tokens.nbytes + self.offsets.nbytes)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """See `quiver.retrieval.index.engines.Segment`."""
        return np.diff(self.offsets)

    def search(
        self, queries: Sequence[TokenVectors], k: int, *, effort: ExactEffort, ranks: NDArray[np.uint32], allowed: Bitmap | None = None
    ) -> list[Found]:
        """See `quiver.retrieval.index.engines.Segment`."""
        del effort
        rows, norm = MatrixRows(self.tokens), self._largest_norm
        found = search_tokens(rows, self.offsets, queries, k, largest_norm=norm, ids=ranks, allowed=allowed, all_exact=True)
        return [Found(rows, scores) for rows, scores in found]

    def exact_scores(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `quiver.retrieval.index.engines.Segment`."""
        scores = np.full(len(rows), -np.inf, np.float32)
        filled = np.flatnonzero(self.offsets[rows + 1] > self.offsets[rows])
        scores[filled] = exact_maxsim(MatrixRows(self.tokens), self.offsets, query, rows[filled])
        return scores

    def vectors(self, rows: NDArray[np.int64]) -> tuple[TokenVectors, NDArray[np.int64]]:
        """See `quiver.retrieval.index.engines.Segment`."""
        return np.asarray(self.tokens[token_rows(self.offsets, rows)]), self.offsets[rows + 1] - self.offsets[rows]

    def damaged(self) -> Bitmap:
        """See `quiver.retrieval.index.engines.Segment`."""
        return self._unplaced | rows_with(self.tokens.damaged(), self.offsets)

    def kept(self, keep: Bitmap) -> Iterator[tuple[TokenVectors, NDArray[np.int64]]]:
        """The documents to keep, a block at a time."""
        lengths = self.lengths
        for first, last in document_blocks(self.offsets, ROWS):
            block, chosen = self.tokens[self.offsets[first] : self.offsets[last]], keep[first:last]
            yield block[np.repeat(chosen, lengths[first:last])], lengths[first:last][chosen]


ExactSegment = TypeVar("ExactSegment", ExactDenseSegment, ExactTokenSegment)


class _Writer:
    """Writes the vectors of a segment, and for one vector a token the places where documents begin."""

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
    """What the segments of an exact index share: the width, and how a segment is opened; see `quiver.retrieval.index.engines.Codec`.

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

    def writer(self, folder: Path, disk: Disk) -> _Writer:
        """See `quiver.retrieval.index.engines.Codec`."""
        return _Writer(folder, disk, tokens=self.name == TOKENS)

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

    def effort(self, preset: Preset, *, k: int) -> ExactEffort:
        """See `quiver.retrieval.index.engines.Codec`."""
        del preset, k
        return ExactEffort()

    def ladder(self, k: int, *, documents: int) -> Sequence[ExactEffort]:
        """See `quiver.retrieval.index.engines.Codec`."""
        del documents
        return [self.effort("exact", k=k)]

    def resized(self, knobs: Mapping[str, Setting], *, measured: int, k: int) -> Mapping[str, Setting]:
        """See `quiver.retrieval.index.engines.Codec`."""
        del measured, k
        return knobs

    def effort_from(self, knobs: Mapping[str, Setting]) -> ExactEffort:
        """See `quiver.retrieval.index.engines.Codec`."""
        if knobs:
            raise InputError(f"exact search has no knobs, got {', '.join(knobs)}")
        return ExactEffort()


def codec_content(kind: str, dim: int) -> Mapping[str, bytes] | None:
    """The files of an exact codec, which hold nothing but the width; None for another engine."""
    return {_CODEC: _content(dim)} if kind in (DENSE, TOKENS) else None


def _content(dim: int) -> bytes:
    return json.dumps({"dim": dim}).encode()


DENSE = "exact-dense"
TOKENS = "exact-tokens"


def train_dense(
    sample: Sample, card: ModelCard, *, documents: int, vectors: int, settings: Mapping[str, Setting], seed: int
) -> ExactCodec[ExactDenseSegment]:
    """The exact codec for one vector a document; see `quiver.retrieval.index.engine_table.train_codec`."""
    del sample, documents, vectors, seed
    _check_settings(settings)
    return ExactCodec(DENSE, card.dim, _open_dense)


def train_tokens(
    sample: Sample, card: ModelCard, *, documents: int, vectors: int, settings: Mapping[str, Setting], seed: int
) -> ExactCodec[ExactTokenSegment]:
    """The exact codec for one vector a token; see `quiver.retrieval.index.engine_table.train_codec`."""
    del sample, documents, vectors, seed
    _check_settings(settings)
    return ExactCodec(TOKENS, card.dim, _open_tokens)


def open_dense(folder: Path) -> ExactCodec[ExactDenseSegment]:
    """Open what ``save`` wrote.

    Raises:
        InputError: It is something else.
    """
    return ExactCodec(DENSE, _width_of(folder / _CODEC), _open_dense)


def open_tokens(folder: Path) -> ExactCodec[ExactTokenSegment]:
    """Open what ``save`` wrote.

    Raises:
        InputError: It is something else.
    """
    return ExactCodec(TOKENS, _width_of(folder / _CODEC), _open_tokens)


def _check_settings(settings: Mapping[str, Setting]) -> None:
    if settings:
        raise InputError(f"an exact index has no settings, got {', '.join(settings)}")


def _open_dense(files: Files, dim: int, rows: int) -> ExactDenseSegment:
    return ExactDenseSegment(files.map(_VECTORS, np.float32, (rows, dim)), _norm_of(files))


def _open_tokens(files: Files, dim: int, rows: int) -> ExactTokenSegment:
    tokens, lengths = files.map(_VECTORS, np.float32, (-1, dim)), files.map(_LENGTHS, np.uint32, (rows,))
    segment = ExactTokenSegment(tokens, lengths, _norm_of(files))
    if int(segment.offsets[-1]) != len(tokens):
        raise DamagedIndexError(f"{files.folder / _LENGTHS}: does not fit {len(tokens)} vectors; quiver index repair keeps the rest")
    return segment


def _norm_of(files: Files) -> float:
    """The length of the longest vector; not known where repair reads around a damaged file, and not needed there."""
    if files.is_lost(_FACTS):
        return math.inf
    return float(_number(_parsed(files.read(_FACTS), files.folder / _FACTS), "largest_norm", files.folder / _FACTS))


def _width_of(path: Path) -> int:
    return int(_number(read_json(path), "dim", path))


def _parsed(content: bytes, path: Path) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedIndexError(f"{path}: not JSON ({error}); quiver index repair") from error


def _number(content: Any, name: str, path: Path) -> float:
    """A number that a file holds, which may not be negative."""
    try:
        value = float(content[name])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedIndexError(f"{path}: does not hold {name} ({error}); quiver index repair") from error
    if not value >= 0:
        raise DamagedIndexError(f"{path}: {name} is {value}; quiver index repair")
    return value
