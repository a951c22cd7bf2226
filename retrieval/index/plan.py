"""In what parts the documents of a build are encoded and written: decided once, before anything is encoded, whoever does it.

A *chunk* is what goes to the model in one call. A vector may depend on it in its last bits, for what is multiplied depends on how texts
are batched: chunks are the same for one worker and for a hundred. A *piece* is a run of chunks that becomes a segment of its own: what
a worker is given, and what a kill may cost. The plan is kept with the pieces, so that a build that goes on has the same ones whatever
memory or workers it is given then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.engines import AnyCodec
from quiver.retrieval.index.extents import Extent, held
from quiver.retrieval.records import ModelCard

# English has about four characters a token, code and other scripts two or three; and there are special tokens.
_CHARACTERS_A_VECTOR = 2
_SPECIAL = 3


@dataclass(frozen=True)
class SegmentPiece:
    """A piece of the index.

    Attributes:
        name: Its name among the pieces.
        first: Number of its first document.
        ends: Behind which document each of its chunks ends, ascending.
    """

    name: str
    first: int
    ends: tuple[int, ...]

    @property
    def documents(self) -> int:
        """How many it has."""
        return self.ends[-1] - self.first

    def chunks(self) -> Iterable[tuple[int, int]]:
        """First document of each chunk, and the one behind its last."""
        return zip((self.first, *self.ends), self.ends, strict=False)


@dataclass(frozen=True)
class SamplePiece:
    """Documents that are encoded to train a codec on.

    Attributes:
        name: Its name among the pieces.
        numbers: Of the documents, ascending.
        chunk: How many go to the model in one call.
    """

    name: str
    numbers: NDArray[np.int64]
    chunk: int

    @property
    def documents(self) -> int:
        """How many it has."""
        return len(self.numbers)


@dataclass(frozen=True)
class PieceLimits:
    """When a piece is full: as soon as it has one of these.

    Attributes:
        documents: Number of documents.
        characters: Of their texts.
        vectors: Number of vectors, as far as that can be told from the texts.
        memory: Bytes that a build may hold, twice what writing the piece takes.
    """

    documents: int
    characters: int
    vectors: int
    memory: int


@dataclass(frozen=True)
class PiecePlan:
    """The pieces of a build.

    Attributes:
        pieces: In the order of the documents.
    """

    pieces: tuple[SegmentPiece, ...]

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return {"pieces": [list(piece.ends) for piece in self.pieces]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PiecePlan:
        """From what ``to_json`` gave."""
        first, pieces = 0, list[SegmentPiece]()
        for ends in content["pieces"]:
            pieces.append(SegmentPiece(piece_name(len(pieces)), first, tuple(ends)))
            first = ends[-1]
        return cls(tuple(pieces))


def piece_name(number: int) -> str:
    """Name of a piece by its place."""
    return f"piece-{number:06d}"


def chunk_ends(lengths: NDArray[np.uint32], *, documents: int, characters: int) -> list[int]:
    """Behind which document each chunk ends.

    Args:
        lengths: Characters of each document, (P,).
        documents: Of a chunk, at most.
        characters: A chunk ends as soon as its texts have so many.

    Example:
        >>> chunk_ends(np.array([1, 1, 1, 9, 1], np.uint32), documents=2, characters=5)
        [2, 4, 5]
    """
    total, ends, first = np.append(0, np.cumsum(lengths, dtype=np.int64)), list[int](), 0
    while first < len(lengths):
        full = int(np.searchsorted(total, total[first] + characters))
        first = min(first + documents, full, len(lengths))
        ends.append(first)
    return ends


def plan_pieces(lengths: NDArray[np.uint32], ends: Iterable[int], limits: PieceLimits, card: ModelCard, codec: AnyCodec) -> PiecePlan:
    """Runs of chunks.

    Args:
        lengths: Characters of each document, (P,).
        ends: Behind which document each chunk ends.
        limits: When a piece is full.
        card: Of the model that encodes.
        codec: Says what writing a piece takes.
    """
    vectors = np.minimum(lengths // _CHARACTERS_A_VECTOR + _SPECIAL, card.document_length) if card.kind == "colbert" else lengths * 0 + 1
    characters = np.append(0, np.cumsum(lengths, dtype=np.int64))
    all_vectors = np.append(0, np.cumsum(vectors, dtype=np.int64))
    pieces, first, held_ends = list[SegmentPiece](), 0, list[int]()

    def is_full(stop: int) -> bool:
        count = int(all_vectors[stop] - all_vectors[first])
        return (
            stop - first >= limits.documents
            or int(characters[stop] - characters[first]) >= limits.characters
            or count >= limits.vectors
            or 2 * held(codec, Extent(stop - first, count)) >= limits.memory
        )

    for stop in ends:
        held_ends.append(stop)
        if stop == len(lengths) or is_full(stop):
            pieces.append(SegmentPiece(piece_name(len(pieces)), first, tuple(held_ends)))
            first, held_ends = stop, []
    return PiecePlan(tuple(pieces))
