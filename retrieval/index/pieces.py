"""The work of a build: from documents to segments that only have to be committed.

The documents are split into pieces of some thousand (`quiver.retrieval.index.plan`), which an executor has made, here or by workers
(`retrieval.index.piece_maker`); each has a marker once it is durable, and a build that is killed makes those that are missing when it
is started again. In the end the pieces are merged, which copies bytes and encodes nothing, into segments as large as the memory allows;
the bytes do not depend on where the pieces ended, nor on who made them.

Where a codec has to be trained, documents chosen at random are encoded first; their vectors wait on the disk until it is their turn.
Training, merging and the commit are done here alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.documents.table import is_described
from quiver.retrieval.index.encoded import Encoded, Model, joined
from quiver.retrieval.index.engine_table import engine, open_codec, train_codec
from quiver.retrieval.index.engines import AnyCodec, Sample
from quiver.retrieval.index.extents import Extent, groups
from quiver.retrieval.index.mapped import Files
from quiver.retrieval.index.options import BuildOptions
from quiver.retrieval.index.piece_maker import MakeAnywhere, MakeHere, Piece, PieceMaker, Sampled, contents_of
from quiver.retrieval.index.plan import PieceLimits, PiecePlan, SamplePiece, chunk_ends, plan_pieces
from quiver.retrieval.index.segments import Contents, OpenSegment, merge_segments, open_segment
from quiver.retrieval.index.source import Reading, Source
from quiver.retrieval.index.threads import computing_with
from quiver.retrieval.index.work import Finished, WorkFolder
from quiver.retrieval.models.loading import with_absolute_source
from quiver.retrieval.progress import Advance, progress_bar
from quiver.retrieval.protocols import IN_PROCESS, Executor
from quiver.retrieval.records import ModelCard

logger = logging.getLogger(__name__)

# Documents encoded in one call: enough to fill a batch, few enough that the bar moves every few seconds on a CPU.
# Batches are packed, not padded: a larger choice of like lengths was not measurably faster.
_CHUNK = 512
# Long texts go in smaller calls, about 250,000 tokens each, whose vectors are held until they are written.
_CHUNK_CHARACTERS = 1 << 20
# A piece is full as soon as it has one of these; what is lost by a kill is less than a piece a worker. A small corpus has smaller ones,
# about `_PIECES` of them, so that there is something for every worker; a large one has no more than can be open at once.
_PIECE_DOCUMENTS = 8192
_PIECE_CHARACTERS = 8 << 20
_PIECE_BYTES = 256 << 20
_PIECES = 256
_LEAST_PIECE = 512
# Documents that are encoded to learn how many vectors a document has, and documents of one piece of the sample at most.
_PROBE = 256
_SAMPLE_PIECE = 2048

CODEC = "codec"
"""The piece that is the codec."""
_PLAN, _THREADS = "plan", "threads"
ENCODES_NOTHING = frozenset({CODEC, _PLAN, _THREADS})
"""The pieces that are made in a moment; all others have cost encoding."""


@dataclass(frozen=True)
class CodecPlace:
    """A codec on the disk.

    Attributes:
        engine: Name of its engine.
        folder: Where its files are.
        holds: File name -> what it holds.
    """

    engine: str
    folder: Path
    holds: Mapping[str, str]


class Pieces:
    """One build.

    Args:
        model: Encodes the documents.
        source: The documents.
        options: How the index is built.
        work: Takes the pieces.
        executor: Has the pieces made.
        progress: Show bars over the documents.
    """

    def __init__(
        self, model: Model, source: Source, options: BuildOptions, work: WorkFolder, *, executor: Executor = IN_PROCESS, progress: bool
    ) -> None:
        self._model = model
        self._card: ModelCard = model.card
        self._source = source
        self._options = options
        self._work = work
        self._executor = executor
        self._progress = progress
        self._sampled = Sampled((), self._card.dim)
        self._threads = self._agreed_threads()

    def codec(self, name: str) -> tuple[AnyCodec, CodecPlace]:
        """The codec of an engine, trained now or before the build was interrupted."""
        wanted = engine(name, self._card).sample
        if wanted(self._source.count):
            self._sampled = self._encode_sample(self._choose(wanted), "sample")
        done = self._work.pieces.finished(CODEC)
        if done is None:
            folder = self._work.pieces.begin(CODEC)
            done = self._work.pieces.finish(
                CODEC, folder, self._train(name, self._sampled.encoded()).save(folder, self._work.pieces.disk), {}
            )
        # Opened from its files even where it was trained a moment ago: a build that is resumed does the same.
        return open_codec(name, done.folder), CodecPlace(name, done.folder, done.holds)

    def pieces(self, codec: AnyCodec, place: CodecPlace) -> list[tuple[Path, Contents]]:
        """The finished pieces, each with its folder, once everything is encoded.

        Args:
            codec: Writes them.
            place: Where it is on the disk.

        Raises:
            InputError: A vector is not finite (names the document).
        """
        plan = self._agreed_plan(codec)
        made = self._make(plan.pieces, "documents", codec=codec, place=place)
        return [(each.folder, contents_of(each)) for each in made]

    def merged(
        self, codec: AnyCodec, pieces: Sequence[tuple[Path, Contents]], *, before: Sequence[OpenSegment] = ()
    ) -> list[tuple[Path, Contents]]:
        """As few segments as the memory allows, each with its folder.

        Args:
            codec: Wrote the pieces.
            pieces: The finished pieces.
            before: Segments of the index that become one segment together with all pieces; `first_merged` chooses them.
        """
        extents = [piece_extent(folder, each) for folder, each in pieces]
        runs = [range(len(pieces))] if before else groups(codec, extents, self._options.memory)
        segments: list[tuple[Path, Contents]] = []
        for run in runs:
            chosen = pieces[run.start : run.stop]
            if len(chosen) == 1 and not before:
                segments.append(chosen[0])
                continue
            opened = [*before, *(self._open(codec, *each) for each in chosen)]
            folder = self._work.pieces.begin(f"segment-{len(segments):04d}")
            segments.append((folder, merge_segments(opened, codec, folder, self._work.pieces.disk)))
        return segments

    def _agreed_threads(self) -> int:
        """The number of threads that the build was begun with, which is this one's if it is new."""
        wanted = self._options.threads or self._executor.threads(torch.get_num_threads())
        done = self._work.pieces.finished(_THREADS)
        if done is None:
            folder = self._work.pieces.begin(_THREADS)
            done = self._work.pieces.finish(_THREADS, folder, {}, {"threads": wanted})
        threads = int(done.facts["threads"])
        if threads != wanted:
            logger.info("going on with %d threads a worker, as the build was begun", threads)
        return threads

    def _agreed_plan(self, codec: AnyCodec) -> PiecePlan:
        """The pieces that the build was begun with, which are those of this memory if it is new."""
        done = self._work.pieces.finished(_PLAN)
        if done is not None:
            return PiecePlan.from_json(done.facts)
        lengths = self._source.lengths
        ends = chunk_ends(lengths, documents=_CHUNK, characters=_CHUNK_CHARACTERS)
        share = max(_CHUNK_CHARACTERS, int(lengths.sum(dtype=np.int64)) // _PIECES)
        limits = PieceLimits(
            documents=min(_PIECE_DOCUMENTS, max(_LEAST_PIECE, len(lengths) // _PIECES)),
            characters=min(_PIECE_CHARACTERS, share),
            vectors=_PIECE_BYTES // (4 * self._card.dim),
            memory=self._options.memory,
        )
        plan = plan_pieces(lengths, ends, limits, self._card, codec)
        self._work.pieces.finish(_PLAN, self._work.pieces.begin(_PLAN), {}, plan.to_json())
        return plan

    def _make(
        self, pieces: Sequence[Piece], description: str, *, codec: AnyCodec | None = None, place: CodecPlace | None = None
    ) -> list[Finished]:
        """Pieces in the order given, made now or before the build was interrupted."""
        made: dict[str, Finished] = {}
        for piece in pieces:
            if (done := self._work.pieces.finished(piece.name)) is not None:
                made[piece.name] = done
            else:
                self._work.pieces.discard(piece.name)
        missing = [piece for piece in pieces if piece.name not in made]
        if made:
            logger.info("%s: %d of %d pieces were made before the interruption", description, len(made), len(pieces))
        with progress_bar(description, sum(piece.documents for piece in pieces), enabled=self._progress) as advance:
            if made:
                advance(sum(piece.documents for piece in pieces if piece.name in made))
            if missing:
                with self._running(missing, codec, place, advance) as finished:
                    made.update((piece.name, done) for piece, done in finished)
        return [made[piece.name] for piece in pieces]

    @contextmanager
    def _running(
        self, pieces: Sequence[Piece], codec: AnyCodec | None, place: CodecPlace | None, advance: Advance
    ) -> Iterator[Iterator[tuple[Piece, Finished]]]:
        """Pieces as they are finished; workers are gone when the block ends."""
        if not self._executor.remote:
            reading = Reading(self._source.read_from, self._source.count)
            vectors = self._sampled.vectors()
            maker = PieceMaker(self._model, reading, self._options, self._work.pieces, codec=codec, sample=vectors, advance=advance)
            with computing_with(self._threads), closing(self._executor.run(MakeHere(maker), pieces, threads=self._threads)) as finished:
                yield finished
            return
        task = MakeAnywhere(
            folder=self._work.folder,
            spool=self._source.spool,
            count=self._source.count,
            options=self._options,
            card=with_absolute_source(self._card),
            threads=self._threads,
            codec=None if place is None else (place.engine, place.folder),
            sampled=self._sampled,
        )

        def counted() -> Iterator[tuple[Piece, Finished]]:
            for piece, done in results:
                advance(piece.documents)
                yield piece, done

        with closing(self._executor.run(task, pieces, threads=self._threads)) as results:
            yield counted()

    def _open(self, codec: AnyCodec, folder: Path, contents: Contents) -> OpenSegment:
        return open_segment(Files(folder), codec, contents.documents, texts=self._options.store_text)

    def _choose(self, wanted: Callable[[int], int]) -> list[NDArray[np.int64]]:
        """Numbers of the documents of the sample, ascending, a piece at a time: as many as have the vectors that the engine wants."""
        count, mean = self._source.count, 1.0
        order = np.random.default_rng(self._options.seed).permutation(count)
        if self._card.kind != "dense":
            probe = self._encode_sample([np.sort(order[:_PROBE])], "probe")
            mean = max(float(probe.encoded()[0].lengths.mean()), 1.0)
        # Half of the memory is the sample's, the other half the training's.
        best, fits = wanted(round(mean * count)), self._options.memory // (8 * self._card.dim)
        if fits < best:
            logger.warning("the memory holds %d of the %d vectors that the index is best trained on; allow more of it", fits, best)
        vectors = min(best, fits)
        numbers = np.sort(order[: max(1, math.ceil(vectors / mean))])
        size = max(1, min(_SAMPLE_PIECE, int(_PIECE_BYTES / (4 * self._card.dim * mean))))
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]

    def _encode_sample(self, parts: Sequence[NDArray[np.int64]], name: str) -> Sampled:
        """Chosen documents, encoded now or before the build was interrupted."""
        pieces = [SamplePiece(f"{name}-{number:04d}", part, _CHUNK) for number, part in enumerate(parts)]
        made = self._make(pieces, name)
        return Sampled(tuple((piece, each.folder) for piece, each in zip(pieces, made, strict=True)), self._card.dim)

    def _train(self, name: str, pieces: Sequence[Encoded]) -> AnyCodec:
        count, dense = self._source.count, self._card.kind == "dense"
        sample, mean = Sample(np.zeros((0, self._card.dim), np.float32)), 0.0
        if pieces:
            encoded = joined(pieces)
            sample = Sample(encoded.vectors, None if dense else encoded.lengths, encoded.token_ids)
            mean = len(encoded.vectors) / len(encoded.lengths)
        if pieces and not len(sample.vectors):
            raise InputError("none of the documents has a vector; there is nothing to index")
        vectors = count if dense else round(mean * count)
        settings, seed = self._options.settings, self._options.seed
        return train_codec(name, sample, self._card, documents=count, vectors=vectors, settings=settings, seed=seed)


def piece_extent(folder: Path, contents: Contents) -> Extent:
    """How large a finished piece is."""
    sizes = {file: (folder / file).stat().st_size for file in contents.holds}
    described = sum(size for file, size in sizes.items() if is_described(file))
    return Extent(contents.documents, contents.vectors, described, sum(sizes.values()))
