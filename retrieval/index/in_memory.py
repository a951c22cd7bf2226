"""Indexes in memory: of documents that are encoded now, or of vectors that a store of vectors holds.

Shapes: P documents, d vector width.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import checked_document
from quiver.retrieval.data.embedding_store import StoredVectors, stack_vectors
from quiver.retrieval.index.exact.colbert import ExactColBERTIndex
from quiver.retrieval.index.exact.dense import ExactDenseIndex
from quiver.retrieval.index.faiss_dense import FaissDenseIndex, check_factory
from quiver.retrieval.index.segments import total_counts
from quiver.retrieval.models.pooling import make_comparable
from quiver.retrieval.progress import progress_bar
from quiver.retrieval.protocols import DenseModel, MatrixRows, TokenModel, VectorIndex
from quiver.retrieval.records import DenseEncoding, Document, ModelCard, TokenCounts, TokenEncoding

logger = logging.getLogger(__name__)

ExactIndex: TypeAlias = ExactDenseIndex | ExactColBERTIndex
"""An exact index of either kind."""

Model: TypeAlias = DenseModel | TokenModel
"""A model of either kind; ``model.card.kind`` says which."""

# Documents encoded in one call: enough to fill a batch, few enough that the bar moves every few seconds on a CPU.
# Batches are packed, not padded: a larger choice of like lengths was not measurably faster.
_CHUNK = 512
# Stored vectors up to this size are read into memory once, and searched there.
_IN_MEMORY = 256 << 20


@dataclass(frozen=True)
class BuiltIndex:
    """An index in memory and what tokenising did to its documents."""

    index: ExactIndex
    counts: TokenCounts


def build_in_memory(model: Model, documents: Iterable[Document], *, use_title: bool = True, progress: bool = False) -> BuiltIndex:
    """Encode documents and index them exactly.

    Args:
        model: Its kind decides which index it is.
        documents: At least one; consumed in chunks.
        use_title: Whether titles are put before the texts.
        progress: Show a bar over all documents; where their number is not known, the model's own for every chunk.

    Raises:
        InputError: No documents, an id twice, or a document whose vector is not finite.
    """
    return _build(model, documents, total=_length(documents), use_title=use_title, progress=progress)


def check_kind(kind: str, card: ModelCard) -> None:
    """Say before anything is encoded that a model's vectors cannot be indexed in this way.

    Args:
        kind: As `index_vectors` takes it.
        card: The model.

    Raises:
        InputError: There is no such kind, or not for this model.
    """
    if kind == "exact":
        return
    if card.kind == "colbert":
        raise InputError(f"index {kind!r}: a ColBERT is searched with 'exact', the only kind for one vector a token")
    check_factory(kind, card.dim)


def index_vectors(ids: Sequence[str], stored: StoredVectors, card: ModelCard, *, kind: str = "exact") -> VectorIndex[Any]:
    """Index vectors that a store holds; an exact index leaves them there if they are many.

    Args:
        ids: P document ids, in the order of the texts that were encoded.
        stored: Their vectors.
        card: The model that they come from.
        kind: ``exact``, or for a dense model a FAISS factory string with the settings of its search, such as ``IVF1024,Flat?nprobe=16``.

    Raises:
        InputError: The kind is not one of these, or FAISS cannot build it; no documents, an id twice, or none with a vector.
        ValueError: Not as many ids as texts.
    """
    check_kind(kind, card)
    rows = stored.rows
    if kind != "exact":
        return FaissDenseIndex.from_rows(ids, rows, kind)
    if 4 * rows.shape[0] * rows.shape[1] <= _IN_MEMORY:
        rows = MatrixRows(rows.span(0, rows.shape[0]))
    if stored.lengths is None:
        return ExactDenseIndex.from_rows(ids, rows)
    return ExactColBERTIndex.from_rows(ids, rows, stored.lengths)


def _length(documents: Iterable[Document]) -> int | None:
    return len(documents) if isinstance(documents, Sized) else None


def _build(model: Model, documents: Iterable[Document], *, total: int | None, use_title: bool, progress: bool) -> BuiltIndex:
    ids: list[str] = []
    parts: list[_Part] = []
    stream = map(checked_document, documents)
    # Without a total there is no time to go; the model's own bars then show at least that something happens.
    with progress_bar("documents", total or 0, enabled=progress) as advance:
        while chunk := list(islice(stream, _CHUNK)):
            contents = [document.content(use_title=use_title) for document in chunk]
            parts.append(_part(model.encode(contents, "document", progress=progress and total is None), model.card))
            ids += [document.id for document in chunk]
            advance(len(chunk))
    if not ids:
        raise InputError("there are no documents to index")
    logger.info("%d documents encoded", len(ids))
    counts, lengths = total_counts([part.counts for part in parts]), [length for part in parts for length in part.lengths]
    matrix = _stack(parts, model.card)
    if model.card.kind == "dense":
        return BuiltIndex(ExactDenseIndex.from_vectors(ids, matrix), counts)
    return BuiltIndex(ExactColBERTIndex.from_packed(ids, matrix, lengths), counts)


@dataclass(frozen=True)
class _Part:
    """The vectors of one chunk, (rows, d), how many of them each document has, and what tokenising did."""

    vectors: NDArray[np.float32]
    lengths: Sequence[int]
    counts: TokenCounts


def _part(encoding: DenseEncoding | TokenEncoding, card: ModelCard) -> _Part:
    vectors, lengths = stack_vectors(encoding, card)
    return _Part(vectors, lengths, encoding.counts)


def _stack(parts: list[_Part], card: ModelCard) -> NDArray[np.float32]:
    """All vectors in one matrix, (rows, d), as the index wants them; the parts are used up, so that no corpus is held twice."""
    end = sum(len(part.vectors) for part in parts)
    matrix = np.empty((end, card.dim), np.float32)
    while parts:
        # From the back: what was allocated last can be given back to the system first.
        vectors = parts.pop().vectors
        block = matrix[end - len(vectors) : end]
        block[:] = vectors
        make_comparable(block, card)
        end -= len(vectors)
    return matrix
