"""The resumable part of a build: documents are split into pieces, each piece becomes a segment, and the segments are merged.

A *chunk* is a list of documents that the model encodes in one call. Vectors may depend on it in their last bits, because the batch decides
how matrices are multiplied; chunks are therefore the same for one worker and for a hundred. A *piece* is a run of chunks: the work unit of
an executor and the most that a kill can cost. The plan is stored with the pieces, so that a resumed build has the same pieces whatever
memory or workers it gets. A finished piece has a durable marker, and a resumed build makes only the missing ones. Merging copies bytes
and encodes nothing; the resulting bytes do not depend on the borders of the pieces or on who made them.

If a codec has to be trained, documents chosen at random are encoded first, and their vectors wait on disk until their piece is written.
Training, merging and the commit happen in the building process. A worker needs only the folder of the index, on a shared file system,
and loads the model itself.

Shapes: P documents, n vectors of some documents, d width.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.disk import REAL, Disk, link_if_absent, remove_tree, write_file
from quiver.retrieval.index.documents.table import DESCRIBED_COPIES, DOCUMENT_BYTES, is_described
from quiver.retrieval.index.engine_table import engine, open_codec, train_codec
from quiver.retrieval.index.engines import AnyCodec, Sample, Setting
from quiver.retrieval.index.errors import DamagedIndexError, unreadable
from quiver.retrieval.index.mapped import Files
from quiver.retrieval.index.segments import Contents, OpenSegment, SegmentFolderWriter, merge_segments, open_segment
from quiver.retrieval.index.source import Encoded, Model, Reading, Source, Spool, StoredSample, encode, joined, read_encoded, write_encoded
from quiver.retrieval.index.store.layout import Layout
from quiver.retrieval.index.store.manifest import FileEntry
from quiver.retrieval.index.store.reading import verify_files
from quiver.retrieval.index.store.writing import seal
from quiver.retrieval.index.threads import computing_with
from quiver.retrieval.models.loading import load_from_card, with_absolute_source
from quiver.retrieval.progress import Advance, progress_bar
from quiver.retrieval.protocols import IN_PROCESS, Executor
from quiver.retrieval.records import Document, ModelCard, TokenCounts


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build.

    Attributes:
        engine: ``auto``, which suits the number of documents, ``exact``, or an engine by name, with settings as in ``ivf-dense:nlist=64``;
            see `quiver.retrieval.index.engine_table.parse_engine`.
        settings: Settings of the engine; the others are chosen from the size of the corpus.
        seed: Random seed; equal documents, model, options and seed give byte-identical segments.
        memory: Memory limit of a build in bytes, beside the model and one chunk of documents.
        use_title: Put titles before the texts.
        store_text: Store the texts, so that hits can be shown.
        fields: The fields of the metadata that can be filtered by, each of which a document must have; None for all. A field of a nested
            object has the names of both with a dot between.
        calibrate: Whether the recall and latency of its search are measured in the end (`retrieval.index.calibration`), where its engine
            is not exact; see `quiver.retrieval.index.calibration.allowed_seconds` for the time it takes.
        threads: Threads that each worker encodes with; None for those of this process, shared out among the workers that run on its
            machine. A build that goes on keeps the number that it was begun with. Vectors made with another number may differ in the
            last bit where a library adds up in another order.
    """

    engine: str = "auto"
    settings: Mapping[str, Setting] = field(default_factory=dict)
    seed: int = 0
    memory: int = 2 << 30
    use_title: bool = True
    store_text: bool = True
    fields: Sequence[str] | None = None
    calibrate: bool = True
    threads: int | None = None

    def check_fields(self, there: Collection[str]) -> None:
        """Refuse fields to filter by that no document has.

        Args:
            there: Names of all fields of the documents.

        Raises:
            InputError: A field is not among them.
        """
        missing = [name for name in self.fields or () if name not in there]
        if missing:
            known = f"the documents have {', '.join(sorted(there))}" if there else "they have none"
            raise InputError(f"no document has the field {', '.join(map(repr, missing))} to filter by; {known}")


DEFAULTS = BuildOptions()
"""Default options."""


FAN = 4
"""Segments that a merge of an addition with those before it waits for."""

FLOOR = 1 << 20
"""Bytes below which a segment costs about the same to write, whatever is in it: a dozen files, each synced."""


class Extent(NamedTuple):
    """How large a segment is.

    Attributes:
        documents: Number of documents.
        vectors: Number of their vectors.
        described: Bytes of the files of their ids and metadata.
        size: Bytes of all files.
    """

    documents: int
    vectors: int
    described: int = 0
    size: int = 0

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
        if number > begin and held(codec, whole) > memory:
            runs.append(range(begin, number))
            begin, whole = number, extent
    return [*runs, range(begin, len(extents))]


def first_merged(extents: Sequence[Extent], fits: Callable[[Extent], bool]) -> int:
    """Where the segments begin that an addition is merged with, so that there are never many small ones and none is written often.

    A size-tiered merge policy, as Lucene and log-structured stores have it: going back from the addition, a segment joins while it is no
    larger than all that is newer than it, and a merge waits for `FAN` segments. A segment that is merged at least doubles: n additions of
    one size write each of them log2(n) times at most, and leave about log2(n) + `FAN` segments. Segments smaller than `FLOOR` count as
    that size; they are written more often, and are fewer.

    Args:
        extents: How large each segment is, without its deleted documents; the last one is the addition.
        fits: Whether a merged segment of an extent may be made.

    Returns:
        The first segment of the merge; the place of the addition where no merge is due.

    Example:
        >>> def first(*sizes):
        ...     return first_merged([Extent(1, 1, 0, size << 20) for size in sizes], lambda extent: True)
        >>> first(90, 1, 1), first(90, 1, 1, 1), first(90, 1, 1, 1, 1), first(90, 8, 4, 1, 1, 1, 1), first(90, 64, 9, 9, 9, 9)
        (2, 3, 1, 1, 2)
    """
    begin, whole = len(extents) - 1, extents[-1]
    while begin and extents[begin - 1].size <= max(whole.size, FLOOR) and fits(extents[begin - 1].with_more(whole)):
        begin -= 1
        whole = whole.with_more(extents[begin])
    return begin if len(extents) - begin >= FAN else len(extents) - 1


def held(codec: AnyCodec, extent: Extent) -> int:
    """Bytes that writing or merging a segment holds at most."""
    return codec.memory(extent.documents, extent.vectors) + DOCUMENT_BYTES * extent.documents + DESCRIBED_COPIES * extent.described


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


logger = logging.getLogger(__name__)

_SUFFIX = ".done"


@dataclass(frozen=True)
class Finished:
    """A piece that is finished.

    Attributes:
        folder: Where its files are.
        holds: Its files, file name -> what it holds.
        facts: What else is known of it.
    """

    folder: Path
    holds: Mapping[str, str]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class PieceFolders:
    """Makes pieces in the folder of a build that is there.

    Attributes:
        folder: The folder.
        disk: Takes all changes.
        worker: Name of a worker, which nobody else has; empty for the process that holds the lock.
    """

    folder: Path
    disk: Disk
    worker: str = ""

    def finished(self, name: str) -> Finished | None:
        """A piece that is finished and whole; None for one that is to be made.

        Raises:
            InputError: It cannot be read, for a reason that is not damage, such as too many open files.
        """
        marker = self._marker(name)
        if not marker.is_file():
            return None
        try:
            content = _read_marker(marker)
            files = {file: FileEntry(**entry) for file, entry in content["files"].items()}
            folder = self.folder / content["folder"]
            verify_files(folder, files, full=True)
        except (DamagedIndexError, KeyError, TypeError) as error:
            # Not the whole error, which says what to do about an index: a commit that was killed has taken the files, or they are damaged.
            logger.warning("%s: files are missing or damaged; this piece of the build is made again", self.folder / name)
            logger.debug("%s: %s", name, error)
            return None
        return Finished(folder, {file: entry.holds for file, entry in files.items()}, content["facts"])

    def discard(self, name: str) -> None:
        """Forget a piece that is not whole; for the process that holds the lock."""
        if self._marker(name).exists():
            self.disk.unlink(self._marker(name))

    def begin(self, name: str) -> Path:
        """An empty folder for a piece; what was there under that name is thrown away."""
        if not self.worker:
            self.discard(name)
        folder = self.folder / (f"{name}.{self.worker}" if self.worker else name)
        if folder.exists():
            remove_tree(folder, self.disk)
        self.disk.mkdir(folder)
        return folder

    def finish(self, name: str, folder: Path, holds: Mapping[str, str], facts: Mapping[str, Any]) -> Finished:
        """Make a piece durable, and note that it is finished.

        Args:
            name: The piece.
            folder: What ``begin`` gave.
            holds: Its files, file name -> what it holds.
            facts: What else is to be known of it, as JSON has it.

        Returns:
            The piece; where another worker was faster, that worker's.
        """
        files = {file: asdict(entry) for file, entry in seal(folder, holds, self.disk).items()}
        self.disk.sync_folder(self.folder)
        content = {"folder": folder.name, "files": files, "facts": dict(facts)}
        temporary = self.folder / f"{folder.name}.tmp"
        if temporary.exists():  # of this worker's own, or of a process that held the lock and was killed
            self.disk.unlink(temporary)
        write_file(temporary, json.dumps({**content, "checksum": _digest(content)}).encode(), self.disk)
        try:
            link_if_absent(temporary, self._marker(name), self.disk)
        except FileExistsError:
            self.disk.unlink(temporary)
            remove_tree(folder, self.disk)
            if (other := self.finished(name)) is None:
                raise
            return other
        self.disk.sync_folder(self.folder)
        return Finished(folder, dict(holds), dict(facts))

    def _marker(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"


class WorkFolder:
    """The folder of one build; the lock of the index is held.

    Args:
        layout: The index.
        plan: Everything that decides the result, as JSON has it.
        disk: Takes all changes.

    Attributes:
        folder: The folder.
        pieces: What is in it.
    """

    def __init__(self, layout: Layout, plan: Mapping[str, Any], *, disk: Disk) -> None:
        self._disk = disk
        self._layout = layout
        self.folder = layout.pieces(_digest(plan)[:24])
        self.pieces = PieceFolders(self.folder, disk)
        if self.folder.is_dir():
            logger.info("%s: resuming the interrupted build", layout.root)
        else:
            disk.mkdir(self.folder)
            disk.sync_folder(layout.temporary)

    @property
    def names(self) -> list[str]:
        """The pieces that are finished."""
        return sorted(path.stem for path in self.folder.iterdir() if path.suffix == _SUFFIX)

    def remove(self) -> None:
        """Remove the folder with all pieces."""
        # Renamed first: a worker whose build was killed may be about to make one more file in it, and now cannot. What is left of a
        # folder of this name is removed by whoever writes to the index next.
        doomed = self._layout.doomed(self.folder.name)
        self._disk.rename(self.folder, doomed)
        remove_tree(doomed, self._disk)


def _read_marker(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise DamagedIndexError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict) or content.pop("checksum", None) != _digest(content):
        raise DamagedIndexError(f"{path}: its checksum does not match")
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
            raise InputError(f"{self.folder}: does not exist on {here}; workers need the folder of the index on a shared file system")
        if str(torch.__version__) != self.torch:
            raise InputError(
                f"torch is {torch.__version__} on {here} but {self.torch} on the building machine; install the same version on all workers"
            )
        torch.set_num_threads(self.threads)
        folders = PieceFolders(self.folder, REAL, uuid.uuid4().hex[:12])
        codec = None if self.codec is None else open_codec(*self.codec)
        reading = Reading(self.spool, self.count)
        return PieceMaker(load_from_card(self.card), reading, self.options, folders, codec=codec, sample=self.sampled.vectors())


logger = logging.getLogger(__name__)

# Documents encoded in one call: enough to fill a batch, few enough that the bar moves every few seconds on a CPU.
# Batches are packed, not padded: a larger choice of like lengths was not measurably faster.
CHUNK = 512
# Long texts go in smaller calls, about 250,000 tokens each, whose vectors are held until they are written.
CHUNK_CHARACTERS = 1 << 20
# A piece is full as soon as it has one of these; what is lost by a kill is less than a piece a worker. A small corpus has smaller ones,
# about `PIECES` of them, so that there is something for every worker; a large one has no more than can be open at once.
PIECE_DOCUMENTS = 8192
PIECE_CHARACTERS = 8 << 20
PIECE_BYTES = 256 << 20
PIECES = 256
LEAST_PIECE = 512
# Documents that are encoded to learn how many vectors a document has, and documents of one piece of the sample at most.
PROBE = 256
SAMPLE_PIECE = 2048

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
            logger.info("resuming with %d threads per worker, as the build was started", threads)
        return threads

    def _agreed_plan(self, codec: AnyCodec) -> PiecePlan:
        """The pieces that the build was begun with, which are those of this memory if it is new."""
        done = self._work.pieces.finished(_PLAN)
        if done is not None:
            return PiecePlan.from_json(done.facts)
        lengths = self._source.lengths
        ends = chunk_ends(lengths, documents=CHUNK, characters=CHUNK_CHARACTERS)
        share = max(CHUNK_CHARACTERS, int(lengths.sum(dtype=np.int64)) // PIECES)
        limits = PieceLimits(
            documents=min(PIECE_DOCUMENTS, max(LEAST_PIECE, len(lengths) // PIECES)),
            characters=min(PIECE_CHARACTERS, share),
            vectors=PIECE_BYTES // (4 * self._card.dim),
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
            logger.info("%s: %d of %d pieces were finished before the interruption", description, len(made), len(pieces))
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
            probe = self._encode_sample([np.sort(order[:PROBE])], "probe")
            mean = max(float(probe.encoded()[0].lengths.mean()), 1.0)
        # Half of the memory is the sample's, the other half the training's.
        best, fits = wanted(round(mean * count)), self._options.memory // (8 * self._card.dim)
        if fits < best:
            logger.warning(
                "training uses %d vectors instead of %d, to stay within the memory limit; raise the limit for better recall", fits, best
            )
        vectors = min(best, fits)
        numbers = np.sort(order[: max(1, math.ceil(vectors / mean))])
        size = max(1, min(SAMPLE_PIECE, int(PIECE_BYTES / (4 * self._card.dim * mean))))
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]

    def _encode_sample(self, parts: Sequence[NDArray[np.int64]], name: str) -> Sampled:
        """Chosen documents, encoded now or before the build was interrupted."""
        pieces = [SamplePiece(f"{name}-{number:04d}", part, CHUNK) for number, part in enumerate(parts)]
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
