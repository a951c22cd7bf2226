"""The resumable part of a build: documents are split into pieces, each piece becomes a segment, and the segments are merged.

A *chunk* is a list of documents that the model encodes in one call. Vectors may depend on it in their last bits, because the batch decides
how matrices are multiplied; chunks therefore do not depend on the number of workers. A *piece* is a run of chunks: the work unit of
an executor and the most work that is lost if a process is killed. The plan is stored with the pieces, so that a resumed build has the same
pieces whatever its memory limit or number of workers. A finished piece has a durable marker, and a resumed build makes only the missing
ones. Merging copies bytes and encodes nothing; the resulting bytes do not depend on the borders of the pieces or on which worker made them.

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
from quiver.retrieval.records import IN_PROCESS, Document, Executor, ModelCard, TokenCounts
from quiver.retrieval.utils import Advance, progress_bar


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build.

    Attributes:
        engine: ``auto`` (chosen by the number of documents), ``exact``, or an engine by name with settings, as in
            ``ivf-dense:nlist=64``; see `quiver.retrieval.index.engine_table.parse_engine`.
        settings: Settings of the engine; the others are chosen from the size of the corpus.
        seed: Random seed; equal documents, model, options and seed give byte-identical segments.
        memory: Memory limit of a build in bytes, in addition to the model and one chunk of documents.
        use_title: Whether titles are put before the texts.
        store_text: Store the texts, so that hits can be shown.
        fields: Metadata fields that filters can test; some document must have each of them. None for all fields. The name of a field in a
            nested object consists of both names, joined by a dot.
        calibrate: Whether to measure the index's recall and latency (`retrieval.index.calibration`) at the end of the build, unless its
            engine is exact. `quiver.retrieval.index.calibration.allowed_seconds` limits the time.
        threads: Threads that each worker encodes with; None divides the threads of this process among the workers on its machine. A
            resumed build keeps the number that it was started with. With another number, vectors may differ in the last bit because
            libraries may add in another order.
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
        """Check that some document has each of the filter fields.

        Args:
            there: Names of all fields of the documents.

        Raises:
            InputError: No document has one of the fields.
        """
        missing = [name for name in self.fields or () if name not in there]
        if missing:
            known = f"the documents have {', '.join(sorted(there))}" if there else "they have none"
            raise InputError(f"no document has the field {', '.join(map(repr, missing))} to filter by; {known}")


DEFAULTS = BuildOptions()
"""Default options."""


FAN = 4
"""Number of segments, the new one included, from which an addition is merged with earlier segments."""

FLOOR = 1 << 20
"""Bytes below which the cost of writing a segment does not depend on its size: it has a dozen files, each of which is synced."""


class Extent(NamedTuple):
    """Size of a segment.

    Attributes:
        documents: Number of documents.
        vectors: Number of their vectors.
        described: Size of the files of ids and metadata, in bytes.
        size: Size of all files, in bytes.
    """

    documents: int
    vectors: int
    described: int = 0
    size: int = 0

    def with_more(self, other: Extent) -> Extent:
        """The sum of two sizes."""
        return Extent(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def groups(codec: AnyCodec, extents: Sequence[Extent], memory: int) -> list[range]:
    """Group successive segments so that each group can be merged within the memory limit.

    Args:
        codec: Codec of the segments; it estimates the memory of a merge.
        extents: Size of each segment.
        memory: Memory limit of a merge in bytes; a segment that exceeds it stays alone.
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
    """Choose the segments that an addition is merged with, so that small segments stay few and none is rewritten often.

    This is a size-tiered merge policy, as in Lucene and log-structured stores: going back from the addition, a segment joins the merge if
    it is no larger than all newer segments together, and the merge takes place if it has at least `FAN` segments. A merged segment at least
    doubles in size: n additions of equal size rewrite each document at most log2(n) times and leave about log2(n) + `FAN` segments.
    Segments smaller than `FLOOR` count as that size; they are rewritten more often and stay fewer.

    Args:
        extents: Size of each segment without its deleted documents; the last one is the addition.
        fits: Whether a merge that results in a segment of a given size is allowed.

    Returns:
        Number of the first segment to merge; the number of the addition if no merge is due.

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
    """Maximum memory in bytes for writing or merging a segment."""
    return codec.memory(extent.documents, extent.vectors) + DOCUMENT_BYTES * extent.documents + DESCRIBED_COPIES * extent.described


# English has about four characters per token, code and other scripts two or three; special tokens are added.
_CHARACTERS_A_VECTOR = 2
_SPECIAL = 3


@dataclass(frozen=True)
class SegmentPiece:
    """A piece of the index: successive documents that become one segment.

    Attributes:
        name: Name of the piece.
        first: Number of its first document.
        ends: End of each of its chunks as a document number, exclusive and ascending.
    """

    name: str
    first: int
    ends: tuple[int, ...]

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.ends[-1] - self.first

    def chunks(self) -> Iterable[tuple[int, int]]:
        """First document of each chunk, and the document after its last."""
        return zip((self.first, *self.ends), self.ends, strict=False)


@dataclass(frozen=True)
class SamplePiece:
    """Documents that are encoded to train a codec.

    Attributes:
        name: Name of the piece.
        numbers: Numbers of the documents, ascending.
        chunk: Number of documents that the model encodes in one call.
    """

    name: str
    numbers: NDArray[np.int64]
    chunk: int

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.numbers)


@dataclass(frozen=True)
class PieceLimits:
    """Limits of a piece; it is full when it reaches one of them.

    Attributes:
        documents: Number of documents.
        characters: Characters of their texts.
        vectors: Number of vectors, estimated from the texts.
        memory: Memory limit of the build in bytes; writing a piece may use half of it.
    """

    documents: int
    characters: int
    vectors: int
    memory: int


@dataclass(frozen=True)
class PiecePlan:
    """The pieces of a build.

    Attributes:
        pieces: The pieces, in the order of the documents.
    """

    pieces: tuple[SegmentPiece, ...]

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {"pieces": [list(piece.ends) for piece in self.pieces]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PiecePlan:
        """Read the output of ``to_json``."""
        first, pieces = 0, list[SegmentPiece]()
        for ends in content["pieces"]:
            pieces.append(SegmentPiece(piece_name(len(pieces)), first, tuple(ends)))
            first = ends[-1]
        return cls(tuple(pieces))


def piece_name(number: int) -> str:
    """Name of the piece with a given number."""
    return f"piece-{number:06d}"


def chunk_ends(lengths: NDArray[np.uint32], *, documents: int, characters: int) -> list[int]:
    """End of each chunk as a document number, exclusive.

    Args:
        lengths: Characters of each document, (P,).
        documents: Maximum number of documents per chunk.
        characters: A chunk ends when its texts have at least this many characters.

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
    """Group chunks into pieces.

    Args:
        lengths: Characters of each document, (P,).
        ends: End of each chunk as a document number, exclusive.
        limits: Limits of a piece.
        card: Card of the model that encodes.
        codec: Codec of the index; it estimates the memory of writing a piece.
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
    """A finished piece.

    Attributes:
        folder: Folder with its files.
        holds: Description of each file, by name.
        facts: Further information stored with it, as JSON.
    """

    folder: Path
    holds: Mapping[str, str]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class PieceFolders:
    """Stores pieces in the folder of a build.

    Attributes:
        folder: The folder.
        disk: Performs all writes.
        worker: Unique name of the worker; empty for the process that holds the writers' lock.
    """

    folder: Path
    disk: Disk
    worker: str = ""

    def finished(self, name: str) -> Finished | None:
        """The finished piece of a name, verified; None if it has to be made.

        Raises:
            InputError: A file cannot be read for a reason other than damage, such as too many open files.
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
            # Log a message of its own: the error gives advice for a committed index. The files are damaged, or a killed commit has moved
            # them.
            logger.warning("%s: files are missing or damaged; this piece of the build is made again", self.folder / name)
            logger.debug("%s: %s", name, error)
            return None
        return Finished(folder, {file: entry.holds for file, entry in files.items()}, content["facts"])

    def discard(self, name: str) -> None:
        """Remove the marker of a damaged piece; only for the process that holds the lock."""
        if self._marker(name).exists():
            self.disk.unlink(self._marker(name))

    def begin(self, name: str) -> Path:
        """Create an empty folder for a piece; an existing folder of that name is removed."""
        if not self.worker:
            self.discard(name)
        folder = self.folder / (f"{name}.{self.worker}" if self.worker else name)
        if folder.exists():
            remove_tree(folder, self.disk)
        self.disk.mkdir(folder)
        return folder

    def finish(self, name: str, folder: Path, holds: Mapping[str, str], facts: Mapping[str, Any]) -> Finished:
        """Make a piece durable and mark it as finished.

        Args:
            name: Name of the piece.
            folder: Folder that ``begin`` returned.
            holds: Description of each file, by name.
            facts: Further information to store, as JSON.

        Returns:
            The piece; if another worker finished it first, that worker's.
        """
        files = {file: asdict(entry) for file, entry in seal(folder, holds, self.disk).items()}
        self.disk.sync_folder(self.folder)
        content = {"folder": folder.name, "files": files, "facts": dict(facts)}
        temporary = self.folder / f"{folder.name}.tmp"
        if temporary.exists():  # left by this worker, or by a killed process that held the lock
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
    """The working folder of one build; the caller holds the writers' lock of the index.

    Args:
        layout: Paths of the index.
        plan: Everything that determines the result, as JSON.
        disk: Performs all writes.

    Attributes:
        folder: The folder.
        pieces: The pieces in it.
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
        """Names of the finished pieces."""
        return sorted(path.stem for path in self.folder.iterdir() if path.suffix == _SUFFIX)

    def remove(self) -> None:
        """Remove the folder with all pieces."""
        # Rename first: a worker that outlived its killed build may be about to write another file into the folder, and now cannot. The next
        # writer of the index removes leftovers of such a renamed folder.
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
"""A unit of work."""


@dataclass(frozen=True)
class Sampled:
    """The finished pieces of the training sample.

    Attributes:
        pieces: Each piece with its folder.
        dim: Vector width d.
    """

    pieces: tuple[tuple[SamplePiece, Path], ...]
    dim: int

    def encoded(self) -> list[Encoded]:
        """The vectors of each piece, memory-mapped."""
        return [read_encoded(folder, piece.documents, self.dim) for piece, folder in self.pieces]

    def vectors(self) -> StoredSample:
        """The vectors by document number, memory-mapped."""
        return StoredSample([(piece.numbers, encoded) for (piece, _), encoded in zip(self.pieces, self.encoded(), strict=True)])


class PieceMaker:
    """Encodes documents and writes pieces.

    Args:
        model: Encodes the documents.
        reading: Reads the documents.
        options: Options of the build.
        folders: Stores the pieces.
        codec: Writes segments; None if only samples are made.
        sample: Vectors of the training sample, which are not encoded again.
        advance: Called with the number of documents finished since the last call.
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
            InputError: A vector is not finite (names the document), or the corpus has changed.
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
            raise ValueError("train the codec before writing a segment")
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
    """Counts and files of a finished piece of the index."""
    facts: Mapping[str, Any] = finished.facts
    return Contents(facts["documents"], facts["vectors"], TokenCounts(**facts["tokens"]), finished.holds)


@dataclass(frozen=True)
class MakeHere:
    """Task that makes pieces in the building process."""

    maker: PieceMaker

    def open(self) -> Callable[[Piece], Finished]:
        """See `quiver.retrieval.records.Task`."""
        return self.maker


@dataclass(frozen=True)
class MakeAnywhere:
    """Task that makes pieces in another process, possibly on another machine.

    Attributes:
        folder: Folder of the build's pieces.
        spool: File of the documents.
        count: Number of documents.
        options: Options of the build.
        card: Card of the model.
        threads: Number of threads for torch.
        codec: Engine name and folder of the codec; None if only samples are made.
        sampled: The training sample.
        torch: Version of torch in the building process.
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
        """See `quiver.retrieval.records.Task`."""
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

# Documents encoded in one call: enough to fill a batch, few enough that the progress bar moves every few seconds on a CPU.
# Batches are packed, not padded, so grouping more documents by length gave no measurable speedup.
CHUNK = 512
# Calls with long texts are smaller, about 250,000 tokens each, because their vectors stay in memory until they are written.
CHUNK_CHARACTERS = 1 << 20
# A piece is full when it reaches one of these limits; a killed worker loses less than one piece. Small corpora have smaller pieces, about
# `PIECES` of them, so that every worker has something to do; `PIECES` also limits the number of files open at once.
PIECE_DOCUMENTS = 8192
PIECE_CHARACTERS = 8 << 20
PIECE_BYTES = 256 << 20
PIECES = 256
LEAST_PIECE = 512
# Documents encoded to estimate the number of vectors per document, and the maximum number of documents in a piece of the sample.
PROBE = 256
SAMPLE_PIECE = 2048

CODEC = "codec"
"""Name of the piece that holds the codec."""
_PLAN, _THREADS = "plan", "threads"
ENCODES_NOTHING = frozenset({CODEC, _PLAN, _THREADS})
"""Names of the pieces whose creation encodes nothing; all others are worth keeping for a resumed build."""


@dataclass(frozen=True)
class CodecPlace:
    """A codec on disk.

    Attributes:
        engine: Name of its engine.
        folder: Folder with its files.
        holds: Description of each file, by name.
    """

    engine: str
    folder: Path
    holds: Mapping[str, str]


class Pieces:
    """Makes the codec, the pieces and the segments of one build.

    Args:
        model: Encodes the documents.
        source: The documents.
        options: Options of the build.
        work: Working folder.
        executor: Runs the tasks that make pieces.
        progress: Show progress bars over the documents.
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
        """Return the codec of an engine, trained now or before an interruption."""
        wanted = engine(name, self._card).sample
        if wanted(self._source.count):
            self._sampled = self._encode_sample(self._choose(wanted), "sample")
        done = self._work.pieces.finished(CODEC)
        if done is None:
            folder = self._work.pieces.begin(CODEC)
            done = self._work.pieces.finish(
                CODEC, folder, self._train(name, self._sampled.encoded()).save(folder, self._work.pieces.disk), {}
            )
        # Open the codec from its files even if it was just trained, as a resumed build does.
        return open_codec(name, done.folder), CodecPlace(name, done.folder, done.holds)

    def pieces(self, codec: AnyCodec, place: CodecPlace) -> list[tuple[Path, Contents]]:
        """Encode all documents and return the finished pieces, each with its folder.

        Args:
            codec: Codec of the index.
            place: The same codec on disk.

        Raises:
            InputError: A vector is not finite (names the document).
        """
        plan = self._agreed_plan(codec)
        made = self._make(plan.pieces, "documents", codec=codec, place=place)
        return [(each.folder, contents_of(each)) for each in made]

    def merged(
        self, codec: AnyCodec, pieces: Sequence[tuple[Path, Contents]], *, before: Sequence[OpenSegment] = ()
    ) -> list[tuple[Path, Contents]]:
        """Merge pieces into as few segments as the memory allows; each is returned with its folder.

        Args:
            codec: Codec of the pieces.
            pieces: The finished pieces.
            before: Segments of the index to merge with all pieces into one segment, as chosen by `first_merged`.
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
        """The number of threads stored with the build; a new build stores its own."""
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
        """The plan stored with the build; a new build makes and stores one."""
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
        """Return pieces in the order given; those that are not finished are made."""
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
        """Yield pieces as they are finished; the workers are stopped when the block ends."""
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
        """Choose documents at random with as many vectors as the engine wants for training; their numbers, ascending, per piece."""
        count, mean = self._source.count, 1.0
        order = np.random.default_rng(self._options.seed).permutation(count)
        if self._card.kind != "dense":
            probe = self._encode_sample([np.sort(order[:PROBE])], "probe")
            mean = max(float(probe.encoded()[0].lengths.mean()), 1.0)
        # The sample may use half of the memory, training the other half.
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
        """Encode chosen documents, or reuse the result of an interrupted build."""
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
    """Size of a finished piece."""
    sizes = {file: (folder / file).stat().st_size for file in contents.holds}
    described = sum(size for file, size in sizes.items() if is_described(file))
    return Extent(contents.documents, contents.vectors, described, sum(sizes.values()))
