"""The work of a build: from documents to segments that only have to be committed.

Documents are encoded a chunk at a time and written in pieces of some thousand, each with a marker once it is durable: a build that is
killed goes on behind the last one when it is started again. In the end the pieces are merged, which copies bytes and encodes nothing,
into segments as large as the memory allows; the bytes do not depend on where the pieces ended.

Where a codec has to be trained, documents chosen at random are encoded first; their vectors wait on the disk until it is their turn.

Shapes: n vectors of some documents, d width.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from retrieval.indexes.documents.table import DESCRIBED_COPIES, DOCUMENT_BYTES, is_described
from retrieval.indexes.encoded import Encoded, Model, StoredSample, encode, joined, read_encoded, write_encoded
from retrieval.indexes.engine_table import engine, open_codec, train_codec
from retrieval.indexes.engines import AnyCodec, Sample, Setting
from retrieval.indexes.segments import Contents, OpenSegment, SegmentFolderWriter, merge_segments, open_segment
from retrieval.indexes.source import Source
from retrieval.indexes.work import WorkFolder
from retrieval.progress import progress_bar
from retrieval.records import Document, TokenCounts

logger = logging.getLogger(__name__)

# Documents encoded in one call: enough to fill a batch, few enough that the bar moves every few seconds on a CPU.
# Batches are packed, not padded: a larger choice of like lengths was not measurably faster.
_CHUNK = 512
# Long texts go in smaller calls, about 250,000 tokens each, whose vectors are held until they are written.
_CHUNK_CHARACTERS = 1 << 20
# A piece ends as soon as it has one of these; what is lost by a kill is less than a piece.
_PIECE_DOCUMENTS = 8192
_PIECE_BYTES = 256 << 20
_PIECE_SECONDS = 60.0
# Documents that are encoded to learn how many vectors a document has, and documents of one piece of the sample at most.
_PROBE = 256
_SAMPLE_PIECE = 2048


CODEC = "codec"
"""The piece that is the codec: all others are vectors."""


@dataclass(frozen=True)
class BuildOptions:
    """How an index is built.

    Attributes:
        engine: ``auto``, which suits the number of documents, ``exact``, or an engine of `retrieval.indexes.engine_table` by name.
        settings: The engine's settings; what is not named is chosen from the size of the corpus.
        seed: Of all that is random: equal documents, model, options and seed give equal segments, byte by byte.
        memory: Bytes that building may hold beside the model and one chunk of documents.
        use_title: Whether titles are put before the texts.
        store_text: Whether the texts are kept in the index, so that hits can be shown.
        fields: The fields of the metadata that can be filtered by; None for all.
        calibrate: Whether the recall and latency of its search are measured in the end (`retrieval.indexes.calibration`), where its engine
            is not exact; see `retrieval.indexes.calibration.allowed_seconds` for the time it takes.
    """

    engine: str = "auto"
    settings: Mapping[str, Setting] = field(default_factory=dict)
    seed: int = 0
    memory: int = 2 << 30
    use_title: bool = True
    store_text: bool = True
    fields: Sequence[str] | None = None
    calibrate: bool = True


DEFAULTS = BuildOptions()
"""How an index is built if nobody says otherwise."""


class Pieces:
    """One build.

    Args:
        model: Encodes the documents.
        source: The documents.
        options: How the index is built.
        work: Takes the pieces.
        progress: Show bars over the documents.
    """

    def __init__(self, model: Model, source: Source, options: BuildOptions, work: WorkFolder, *, progress: bool) -> None:
        self._model = model
        self._card = model.card
        self._source = source
        self._options = options
        self._work = work
        self._progress = progress
        self._sample = StoredSample([])

    def codec(self, name: str) -> tuple[AnyCodec, Path, Mapping[str, str]]:
        """The codec of an engine, trained now or before the build was interrupted; its folder, and file name -> what it holds."""
        wanted = engine(name, self._card).sample
        pieces = self._encode_sample(self._choose(wanted), "sample") if wanted(self._source.count) else []
        self._sample = StoredSample(pieces)
        done, folder = self._work.finished(CODEC), self._work.folder / CODEC
        if done is None:
            holds = self._train(name, pieces).save(self._work.begin(CODEC), self._work.disk)
            self._work.finish(CODEC, holds, {})
        else:
            holds = done["holds"]
        # Opened from its files even where it was trained a moment ago: a build that is resumed does the same.
        return open_codec(name, folder), folder, holds

    def segments(self, codec: AnyCodec) -> list[tuple[Path, Contents]]:
        """The finished segments, each with its folder, once everything is encoded.

        Raises:
            InputError: A vector is not finite (names the document).
        """
        done = self._finished_pieces()
        first = sum(contents.documents for _, contents in done)
        with progress_bar("documents", self._source.count, enabled=self._progress) as advance:
            if first:
                advance(first)
            stream = self._encoded_chunks(first)
            while first < self._source.count:
                name = f"piece-{len(done):06d}"
                writer = SegmentFolderWriter(
                    self._work.begin(name), codec, self._work.disk, texts=self._options.store_text, fields=self._options.fields
                )
                started = time.monotonic()
                for documents, encoded in stream:
                    lengths = None if self._card.kind == "dense" else encoded.lengths
                    writer.add(documents, encoded.vectors, lengths, encoded.token_ids, encoded.tokens)
                    advance(len(documents))
                    if self._is_full(writer, codec, time.monotonic() - started):
                        break
                contents = writer.close()
                self._work.finish(name, contents.holds, _facts(contents))
                done.append((name, contents))
                first += contents.documents
        return self._merged(codec, done)

    def _is_full(self, writer: SegmentFolderWriter, codec: AnyCodec, seconds: float) -> bool:
        return (
            writer.documents >= _PIECE_DOCUMENTS
            or 4 * self._card.dim * writer.vectors >= _PIECE_BYTES
            or seconds >= _PIECE_SECONDS
            or 2 * _held(codec, Extent(writer.documents, writer.vectors)) >= self._options.memory
        )

    def _finished_pieces(self) -> list[tuple[str, Contents]]:
        """The pieces that are done, from the first one to the first that is missing."""
        done: list[tuple[str, Contents]] = []
        while (facts := self._work.finished(name := f"piece-{len(done):06d}")) is not None:
            contents = Contents(facts["documents"], facts["vectors"], TokenCounts(**facts["tokens"]), facts["holds"])
            done.append((name, contents))
        if done:
            logger.info("%d documents were encoded before the interruption", sum(contents.documents for _, contents in done))
        return done

    def _encoded_chunks(self, first: int) -> Iterator[tuple[list[Document], Encoded]]:
        for documents in self._source.chunks(_CHUNK, first=first, characters=_CHUNK_CHARACTERS):
            known = self._sample.has(first, len(documents))
            rest = [document for document, stored in zip(documents, known.tolist(), strict=True) if not stored]
            encoded = encode(self._model, rest, use_title=self._options.use_title) if rest else None
            if encoded is None or known.any():
                encoded = self._sample.fill(first, known, encoded)
            yield documents, encoded
            first += len(documents)

    def _merged(self, codec: AnyCodec, pieces: Sequence[tuple[str, Contents]]) -> list[tuple[Path, Contents]]:
        """As few segments as the memory allows."""
        segments: list[tuple[Path, Contents]] = []
        extents = [Extent(each.documents, each.vectors, self._described_bytes(name, each)) for name, each in pieces]
        for group in groups(codec, extents, self._options.memory):
            chosen = pieces[group.start : group.stop]
            if len(chosen) == 1:
                segments.append((self._work.folder / chosen[0][0], chosen[0][1]))
                continue
            name = f"segment-{len(segments):04d}"
            opened = [self._open(codec, *each) for each in chosen]
            merged = merge_segments(opened, codec, self._work.begin(name), self._work.disk)
            segments.append((self._work.folder / name, merged))
        return segments

    def _described_bytes(self, name: str, contents: Contents) -> int:
        return sum((self._work.folder / name / file).stat().st_size for file in contents.holds if is_described(file))

    def _open(self, codec: AnyCodec, name: str, contents: Contents) -> OpenSegment:
        return open_segment(self._work.folder / name, codec, contents.documents, texts=self._options.store_text)

    def _choose(self, wanted: Callable[[int], int]) -> list[NDArray[np.int64]]:
        """Numbers of the documents of the sample, ascending, a piece at a time: as many as have the vectors that the engine wants."""
        count, mean = self._source.count, 1.0
        order = np.random.default_rng(self._options.seed).permutation(count)
        if self._card.kind != "dense":
            ((_, probe),) = self._encode_sample([np.sort(order[:_PROBE])], "probe")
            mean = max(float(probe.lengths.mean()), 1.0)
        # Half of the memory is the sample's, the other half the training's.
        best, fits = wanted(round(mean * count)), self._options.memory // (8 * self._card.dim)
        if fits < best:
            logger.warning("the memory holds %d of the %d vectors that the index is best trained on; allow more of it", fits, best)
        vectors = min(best, fits)
        numbers = np.sort(order[: max(1, math.ceil(vectors / mean))])
        size = max(1, min(_SAMPLE_PIECE, int(_PIECE_BYTES / (4 * self._card.dim * mean))))
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]

    def _encode_sample(self, parts: Sequence[NDArray[np.int64]], name: str) -> list[tuple[NDArray[np.int64], Encoded]]:
        """The vectors of chosen documents, encoded now or before the build was interrupted; the documents are read once."""
        pieces: list[tuple[NDArray[np.int64], Encoded]] = []
        stream = self._picked(np.concatenate([np.zeros(0, np.int64), *parts]))
        with progress_bar(name, sum(map(len, parts)), enabled=self._progress) as advance:
            for number, part in enumerate(parts):
                piece = f"{name}-{number:04d}"
                if self._work.finished(piece) is None:
                    chunks = list(_chunked(islice(stream, len(part))))
                    encoded = joined([encode(self._model, chunk, use_title=self._options.use_title) for chunk in chunks])
                    self._work.finish(piece, write_encoded(self._work.begin(piece), encoded, self._work.disk), {})
                else:
                    deque(islice(stream, len(part)), maxlen=0)
                pieces.append((part, read_encoded(self._work.folder / piece, len(part), self._card.dim)))
                advance(len(part))
        return pieces

    def _picked(self, numbers: NDArray[np.int64]) -> Iterator[Document]:
        """The documents with these numbers, which ascend."""
        first = 0
        for documents in self._source.chunks(_CHUNK):
            low, high = np.searchsorted(numbers, [first, first + len(documents)])
            for number in numbers[low:high].tolist():
                yield documents[number - first]
            first += len(documents)
            if high == len(numbers):
                return

    def _train(self, name: str, pieces: Sequence[tuple[NDArray[np.int64], Encoded]]) -> AnyCodec:
        count, dense = self._source.count, self._card.kind == "dense"
        sample, mean = Sample(np.zeros((0, self._card.dim), np.float32)), 0.0
        if pieces:
            encoded = joined([each for _, each in pieces])
            sample = Sample(encoded.vectors, None if dense else encoded.lengths, encoded.token_ids)
            mean = len(encoded.vectors) / len(encoded.lengths)
        if pieces and not len(sample.vectors):
            raise InputError("none of the documents has a vector; there is nothing to index")
        vectors = count if dense else round(mean * count)
        settings, seed = self._options.settings, self._options.seed
        return train_codec(name, sample, self._card, documents=count, vectors=vectors, settings=settings, seed=seed)


def _chunked(documents: Iterator[Document]) -> Iterator[list[Document]]:
    while chunk := list(islice(documents, _CHUNK)):
        yield chunk


class Extent(NamedTuple):
    """How large a segment is.

    Attributes:
        documents: Number of documents.
        vectors: Number of their vectors.
        described: Bytes of the files of their ids and metadata.
    """

    documents: int
    vectors: int
    described: int = 0

    def with_more(self, other: Extent) -> Extent:
        """Both together."""
        return Extent(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def groups(codec: AnyCodec, extents: Sequence[Extent], memory: int) -> list[range]:
    """Runs of segments that can be merged into one each.

    Args:
        codec: Says what merging takes.
        extents: How large each segment is.
        memory: Bytes that a merge may hold; a segment that takes more stays alone.
    """
    runs: list[range] = []
    begin, whole = 0, Extent(0, 0)
    for number, extent in enumerate(extents):
        whole = whole.with_more(extent)
        if number > begin and _held(codec, whole) > memory:
            runs.append(range(begin, number))
            begin, whole = number, extent
    return [*runs, range(begin, len(extents))]


def _held(codec: AnyCodec, extent: Extent) -> int:
    """Bytes that writing or merging a segment holds at most."""
    return codec.memory(extent.documents, extent.vectors) + DOCUMENT_BYTES * extent.documents + DESCRIBED_COPIES * extent.described


def _facts(contents: Contents) -> dict[str, Any]:
    return {"documents": contents.documents, "vectors": contents.vectors, "tokens": asdict(contents.tokens)}
