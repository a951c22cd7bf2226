"""Makes one piece of a build from some documents, whoever runs it: the process that builds, or a worker anywhere.

A worker sees no more than the folder of the index, which must be on a file system that all share, and what it was sent. It loads the
model itself and compares its fingerprint; with another release of torch it would make other bits, and does not.

Shapes: n vectors of some documents, d width.
"""

from __future__ import annotations

import platform
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import torch

from quiver.encoder.errors import InputError
from quiver.retrieval.index.disk import REAL
from quiver.retrieval.index.encoded import Encoded, Model, StoredSample, encode, joined, read_encoded, write_encoded
from quiver.retrieval.index.engine_table import open_codec
from quiver.retrieval.index.engines import AnyCodec
from quiver.retrieval.index.options import BuildOptions
from quiver.retrieval.index.plan import SamplePiece, SegmentPiece
from quiver.retrieval.index.segments import Contents, SegmentFolderWriter
from quiver.retrieval.index.source import Reading, Spool
from quiver.retrieval.index.work import Finished, PieceFolders
from quiver.retrieval.models.loading import load_from_card
from quiver.retrieval.progress import Advance
from quiver.retrieval.records import Document, ModelCard, TokenCounts

Piece: TypeAlias = SegmentPiece | SamplePiece
"""What is made."""


@dataclass(frozen=True)
class Sampled:
    """The pieces of the sample, which are finished.

    Attributes:
        pieces: What was asked for, and the folder in which it is.
        dim: Vector width d.
    """

    pieces: tuple[tuple[SamplePiece, Path], ...]
    dim: int

    def encoded(self) -> list[Encoded]:
        """The vectors of each piece, mapped."""
        return [read_encoded(folder, piece.documents, self.dim) for piece, folder in self.pieces]

    def vectors(self) -> StoredSample:
        """The vectors by the documents' numbers, mapped."""
        return StoredSample([(piece.numbers, encoded) for (piece, _), encoded in zip(self.pieces, self.encoded(), strict=True)])


class PieceMaker:
    """Makes pieces.

    Args:
        model: Encodes the documents.
        reading: The documents.
        options: How the index is built.
        folders: Where pieces go.
        codec: Writes segments; None while there are only samples to make.
        sample: Vectors that are there already.
        advance: Is told of documents that are done.
    """

    def __init__(
        self,
        model: Model,
        reading: Reading,
        options: BuildOptions,
        folders: PieceFolders,
        *,
        codec: AnyCodec | None,
        sample: StoredSample,
        advance: Advance = lambda documents: None,
    ) -> None:
        self._model, self._reading, self._options, self._folders = model, reading, options, folders
        self._codec, self._sample, self._advance = codec, sample, advance

    def __call__(self, piece: Piece) -> Finished:
        """Make a piece.

        Raises:
            InputError: A vector is not finite (names the document), or the documents have changed.
        """
        return self._make_sample(piece) if isinstance(piece, SamplePiece) else self._make_segment(piece)

    def _make_sample(self, piece: SamplePiece) -> Finished:
        stream, parts = self._reading.picked(piece.numbers), list[Encoded]()
        while chunk := list(islice(stream, piece.chunk)):
            parts.append(encode(self._model, chunk, use_title=self._options.use_title))
            self._advance(len(chunk))
        folder = self._folders.begin(piece.name)
        return self._folders.finish(piece.name, folder, write_encoded(folder, joined(parts), self._folders.disk), {})

    def _make_segment(self, piece: SegmentPiece) -> Finished:
        if self._codec is None:
            raise ValueError("a segment is written by a codec, and there is none yet")
        folder, dense = self._folders.begin(piece.name), self._model.card.kind == "dense"
        options = self._options
        writer = SegmentFolderWriter(folder, self._codec, self._folders.disk, texts=options.store_text, fields=options.fields)
        for documents, encoded in self._encoded(piece):
            writer.add(documents, encoded.vectors, None if dense else encoded.lengths, encoded.token_ids, encoded.tokens)
            self._advance(len(documents))
        contents = writer.close()
        facts = {"documents": contents.documents, "vectors": contents.vectors, "tokens": asdict(contents.tokens)}
        return self._folders.finish(piece.name, folder, contents.holds, facts)

    def _encoded(self, piece: SegmentPiece) -> Iterator[tuple[list[Document], Encoded]]:
        for first, stop in piece.chunks():
            documents = self._reading.span(first, stop)
            known = self._sample.has(first, len(documents))
            rest = [document for document, stored in zip(documents, known.tolist(), strict=True) if not stored]
            encoded = encode(self._model, rest, use_title=self._options.use_title) if rest else None
            if encoded is None or known.any():
                encoded = self._sample.fill(first, known, encoded)
            yield documents, encoded


def contents_of(finished: Finished) -> Contents:
    """What a finished piece of the index holds."""
    facts: Mapping[str, Any] = finished.facts
    return Contents(facts["documents"], facts["vectors"], TokenCounts(**facts["tokens"]), finished.holds)


@dataclass(frozen=True)
class MakeHere:
    """The task of making pieces in the process that builds."""

    maker: PieceMaker

    def open(self) -> Callable[[Piece], Finished]:
        """See `quiver.retrieval.protocols.Task`."""
        return self.maker


@dataclass(frozen=True)
class MakeAnywhere:
    """The task of making pieces in another process, perhaps on another machine.

    Attributes:
        folder: Of the build's pieces.
        spool: The documents.
        count: How many there are.
        options: How the index is built.
        card: Of the model.
        threads: Threads to compute with.
        codec: The engine and the folder of the codec; None while there are only samples to make.
        sampled: The sample.
        torch: Release of torch in the process that builds.
    """

    folder: Path
    spool: Spool
    count: int
    options: BuildOptions
    card: ModelCard
    threads: int
    codec: tuple[str, Path] | None
    sampled: Sampled
    torch: str = str(torch.__version__)

    def open(self) -> Callable[[Piece], Finished]:
        """See `quiver.retrieval.protocols.Task`."""
        here = platform.node()
        if not self.folder.is_dir():
            raise InputError(f"{self.folder}: not there on {here}; workers need the folder of the index on a file system that all share")
        if str(torch.__version__) != self.torch:
            raise InputError(f"torch {torch.__version__} on {here}, {self.torch} where the index is built; workers need the same one")
        torch.set_num_threads(self.threads)
        folders = PieceFolders(self.folder, REAL, uuid.uuid4().hex[:12])
        codec = None if self.codec is None else open_codec(*self.codec)
        reading = Reading(self.spool, self.count)
        return PieceMaker(load_from_card(self.card), reading, self.options, folders, codec=codec, sample=self.sampled.vectors())
