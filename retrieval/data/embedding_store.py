"""The embedding store: vectors of texts on disk, by model and text, so that no text is encoded twice by the same model.

    FOLDER/<fingerprint>-<role>-v2/manifest.json        the model that the vectors come from
    FOLDER/<fingerprint>-<role>-v2/000000-1a2b3c.arrow  a few thousand texts

`VERSION` of the format is part of the name: vectors of another version are ignored, and the texts are encoded again.

A text is identified by a hash of its content. Shards are only added, every few thousand texts or 30 seconds, each by one rename: a killed
process loses what it encoded since the last shard, and may leave a temporary file, which a later process removes. Several processes may
write at the same time; a text that two of them encode is stored twice, and the older shard is used. A damaged shard is renamed with a
warning, and its texts are encoded again. Vectors are stored scaled to length 1 if the model compares by cosine.

A shard is an Arrow IPC file with one record batch, one row per text:

    key                  fixed_size_binary[16]    first half of the sha256 of the text
    tokens               int32                    number of tokens after truncation
    truncated, empty     bool
    vectors              fixed_size_list<float>[d], or a large_list of them for a ColBERT model

Its schema has two checksums: of the records (all columns but the vectors), compared when the shard is opened, and of the vectors, compared
before the first vector is used. Any Arrow reader opens it, such as ``pyarrow.ipc.open_file`` or DuckDB.

Shapes: B texts of a chunk, P texts in all, T rows of all texts, d vector width.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, replacing, write_json
from quiver.encoder.progress import Advance, progress_bar
from quiver.retrieval.cache import limit_of, mark_used, prune_cache
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.encoding import comparable
from quiver.retrieval.models.loading import WorkerModel
from quiver.retrieval.records import (
    IN_PROCESS,
    PLURALS,
    DenseEncoding,
    DenseModel,
    DenseVectors,
    Executor,
    Item,
    ModelCard,
    Role,
    Rows,
    TextTokens,
    TokenCounts,
    TokenEncoding,
    TokenModel,
)

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

KEY = np.dtype("S16")
"""Dtype of a text's key: 16 bytes, ordered as bytes."""

FORMAT = "quiver-vectors"
VERSION = 2
"""Version of the format of shards and manifests; part of the folder's name."""

MANIFEST = "manifest.json"
SUFFIX = ".arrow"
RECORD = np.dtype([("key", KEY), ("rows", "<i4"), ("tokens", "<i4"), ("truncated", "?"), ("empty", "?")])
"""What is in memory for each stored text."""

Keys: TypeAlias = NDArray[np.bytes_]

Encoding: TypeAlias = DenseEncoding | TokenEncoding
"""What `encode` of a dense or a token model returns."""

_BLOCK = 1 << 20
_FLOAT = np.dtype("<f4")
# Writing a shard takes seconds: a temporary file of this age belongs to a process that has ended.
_STALE_SECONDS = 3600.0


@dataclass(frozen=True)
class StoreLimits:
    """Sizes of encoding calls and shards.

    Attributes:
        chunk_texts: Texts per encoding call: enough to fill a batch, few enough for the progress bar to move every few seconds.
        chunk_characters: Characters per encoding call (about 250,000 tokens), so that a kill does not lose an hour of long texts.
        shard_texts: Texts after which a shard is written.
        shard_bytes: Bytes of vectors after which a shard is written.
        shard_seconds: Seconds after which a shard is written.
        clock: Clock in seconds.
    """

    chunk_texts: int = 512
    chunk_characters: int = 1 << 20
    shard_texts: int = 8192
    shard_bytes: int = 64 << 20
    shard_seconds: float = 30.0
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class StoredVectors:
    """Vectors of texts, in the order of the texts.

    Attributes:
        counts: Token counts of the texts.
        reused: Texts whose vectors were already in the store.
        rows: All rows, (T, d), which stay on disk; T is P for a dense model.
        lengths: Rows per text for a token model, (P,) int64; None for a dense model.
    """

    counts: TokenCounts
    reused: int
    rows: Rows
    lengths: NDArray[np.int64] | None

    def as_queries(self) -> Any:
        """All vectors in memory, in the form that an index expects of queries: (Q, d), or for a ColBERT a list of (T_i, d)."""
        rows = self.rows.span(0, self.rows.shape[0])
        return rows if self.lengths is None else np.split(rows, np.cumsum(self.lengths)[:-1])


@dataclass(frozen=True)
class Chunk:
    """Texts of one encoding call.

    Attributes:
        number: Position among the chunks, from 0.
        texts: B texts.
    """

    number: int
    texts: tuple[str, ...]


class DamagedError(Exception):
    """A shard differs from what was written. Its texts have to be encoded again."""


# Keys of texts.


def text_keys(texts: Sequence[str]) -> Keys:
    """Hash texts to keys, (B,): the first 128 bits of the sha256 of each."""
    # "surrogatepass": the tokenizer refuses invalid text with a better message than an encoding error.
    digests = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[: KEY.itemsize] for text in texts]
    return np.frombuffer(b"".join(digests), KEY)


class KeyTable:
    """A map from keys to numbers; if a key was added twice, its first number counts.

    A dict of millions of entries takes gigabytes; sorted arrays take 24 bytes per key. They are kept as runs, each at least twice as long
    as the next, so that adding n keys in small chunks costs O(n log n) and a look-up is a binary search in each run.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[Keys, NDArray[np.int64]]] = []

    @property
    def runs(self) -> int:
        """Number of sorted runs; logarithmic in the number of calls to `add`."""
        return len(self._runs)

    def add(self, keys: Keys, numbers: NDArray[np.int64]) -> None:
        """Add B keys with their numbers."""
        if not len(keys):
            return
        order = np.argsort(keys, kind="stable")
        self._runs.append((keys[order], numbers[order]))
        while len(self._runs) > 1 and len(self._runs[-2][0]) < 2 * len(self._runs[-1][0]):
            newer, older = self._runs.pop(), self._runs.pop()
            keys, numbers = np.concatenate([older[0], newer[0]]), np.concatenate([older[1], newer[1]])
            order = np.argsort(keys, kind="stable")
            self._runs.append((keys[order], numbers[order]))

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """Look up the number of each key, (B,); -1 for an unknown key."""
        found = np.full(len(keys), -1, np.int64)
        for known, numbers in self._runs:
            pending = np.flatnonzero(found < 0)
            wanted = keys[pending]
            positions = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            same = known[positions] == wanted
            found[pending[same]] = numbers[positions[same]]
        return found

    def drop(self, first: int, last: int) -> None:
        """Remove the keys with the numbers ``first`` to ``last - 1``."""
        runs = []
        for keys, numbers in self._runs:
            kept = (numbers < first) | (numbers >= last)
            if kept.any():
                runs.append((keys[kept], numbers[kept]))
        self._runs = runs


# Shards.


@dataclass(frozen=True)
class VectorShard:
    """An open shard: records in memory, vectors in the file.

    Rows are read by plain reads or through a mapping that is closed at once, so that neither the memory of the process nor the number of
    its open files grows with the number of shards.

    Attributes:
        path: The file.
        records: Records of dtype `RECORD`, (B,).
        dim: Vector width d.
        vectors_start: Position of the vectors in the file, in bytes.
        vectors_sha256: Checksum of the vectors' bytes, see `verify`.
    """

    path: Path
    records: NDArray[np.void]
    dim: int
    vectors_start: int
    vectors_sha256: str

    def __len__(self) -> int:
        return len(self.records)

    @property
    def rows(self) -> int:
        """Number of rows T."""
        return int(self.records["rows"].sum(dtype=np.int64))

    def verify(self) -> None:
        """Read the vectors and compare their checksum.

        Raises:
            DamagedError: The vectors changed or cannot be read.
            InputError: Too many files are open.
        """
        digest, left = hashlib.sha256(), self.rows * self.dim * _FLOAT.itemsize
        try:
            with self.path.open("rb") as file:
                file.seek(self.vectors_start)
                while left and (block := file.read(min(left, _BLOCK))):
                    digest.update(block)
                    left -= len(block)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if digest.hexdigest() != self.vectors_sha256:
            raise DamagedError("its vectors have changed since they were written")

    def read(self, rows: NDArray[np.intp], out: DenseVectors) -> None:
        """Copy rows out of the file.

        Args:
            rows: Row numbers in this shard, (n,).
            out: Filled with the rows in the order given, (n, d), contiguous.

        Raises:
            InputError: The file was removed, truncated, or cannot be read.
        """
        first, row_bytes = int(rows[0]), self.dim * _FLOAT.itemsize
        try:
            if rows[-1] - first == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
                with self.path.open("rb") as file:
                    file.seek(self.vectors_start + first * row_bytes)
                    complete = file.readinto(out.data.cast("B")) == out.nbytes
            else:
                complete = self.path.stat().st_size >= self.vectors_start + self.rows * row_bytes
                if complete:
                    out[:] = np.memmap(self.path, _FLOAT, "r", self.vectors_start, (self.rows, self.dim))[rows]
            mark_used(self.path)  # keeps the shards of a run that takes days in the cache
        except OSError as error:
            raise InputError(f"{self.path}: can no longer be read ({error.strerror}); run the command again") from error
        if not complete:
            raise InputError(f"{self.path}: was truncated while in use; run the command again")


def make_records(keys: Keys, lengths: Sequence[int], tokens: TextTokens) -> NDArray[np.void]:
    """Make the records of B texts from their keys, rows per text and token counts."""
    records = np.zeros(len(keys), RECORD)
    records["key"], records["rows"], records["tokens"] = keys, lengths, tokens.tokens
    records["truncated"], records["empty"] = tokens.truncated, tokens.empty
    return records


def write_shard(path: Path, records: NDArray[np.void], vectors: DenseVectors, card: ModelCard) -> None:
    """Write a shard atomically, by one rename, and sync it to disk.

    Args:
        path: The file.
        records: Records of dtype `RECORD`.
        vectors: The rows of all texts in order, (T, d).
        card: Model of the vectors.

    Raises:
        InputError: The file cannot be written.
    """
    import pyarrow as pa

    rows = np.ascontiguousarray(vectors, _FLOAT)
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), card.dim)
    if card.kind == "colbert":
        column = pa.LargeListArray.from_arrays(pa.array(np.append(0, np.cumsum(records["rows"], dtype=np.int64))), column)
    keys = pa.FixedSizeBinaryArray.from_buffers(pa.binary(KEY.itemsize), len(records), [None, pa.py_buffer(records["key"].tobytes())])
    others = [pa.array(np.ascontiguousarray(records[name])) for name in ("tokens", "truncated", "empty")]
    schema = _schema(card).with_metadata(
        {
            "format": FORMAT,
            "records_sha256": hashlib.sha256(records.tobytes()).hexdigest(),
            "vectors_sha256": hashlib.sha256(rows.data).hexdigest(),
        }
    )
    try:
        with replacing(path) as temporary, pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays([keys, *others, column], schema=schema))
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{path}: cannot be written ({reason}); free space, or choose another folder for vectors") from error


def open_shard(path: Path, card: ModelCard) -> VectorShard:
    """Open a shard: read its records, and compare their checksum.

    Args:
        path: The file.
        card: Model of the vectors.

    Raises:
        DamagedError: The file is not a shard, or differs from what was written.
        InputError: Too many files are open.
    """
    import pyarrow as pa

    try:
        # Not pyarrow.memory_map: it would keep a file open per shard.
        mapped = _mapped(path)
        batch = pa.ipc.open_file(pa.py_buffer(mapped)).get_batch(0)
        batch.validate()
        metadata = {name.decode(): value.decode() for name, value in (batch.schema.metadata or {}).items()}
        if metadata["format"] != FORMAT or not batch.schema.equals(_schema(card)):
            raise ValueError(f"not a shard of {card.kind} vectors of width {card.dim}")
        records, vectors = _records(batch), batch.column("vectors").buffers()[-1]
        expected, vectors_sha256 = metadata["records_sha256"], metadata["vectors_sha256"]
    except OSError as error:
        raise _unreadable(path, error) from error
    except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"not readable as a shard ({' '.join(str(error).split())})") from error
    if hashlib.sha256(records.tobytes()).hexdigest() != expected:
        raise DamagedError("its records have changed since they were written")
    # A batch without vectors may have no buffer for them.
    start, size = (vectors.address - mapped.ctypes.data, vectors.size) if vectors else (0, 0)
    shard = VectorShard(path, records, card.dim, start, vectors_sha256)
    if size < shard.rows * card.dim * _FLOAT.itemsize:
        raise DamagedError(f"{size} bytes are too few for {shard.rows} vectors of width {card.dim}")
    return shard


def _mapped(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file: memory-mapped, or read on a file system that cannot map files."""
    try:
        return np.memmap(path, np.uint8, "r")
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
        return np.fromfile(path, np.uint8)


def _schema(card: ModelCard) -> pyarrow.Schema:
    import pyarrow as pa

    vector = pa.list_(pa.float32(), card.dim)
    return pa.schema(
        {
            "key": pa.binary(KEY.itemsize),
            "tokens": pa.int32(),
            "truncated": pa.bool_(),
            "empty": pa.bool_(),
            "vectors": vector if card.kind == "dense" else pa.large_list(vector),
        }
    )


def _records(batch: pyarrow.RecordBatch) -> NDArray[np.void]:
    """The records of a shard, copied out of the mapped file."""
    records = np.zeros(len(batch), RECORD)
    records["key"] = np.frombuffer(batch.column("key").buffers()[1] or b"", KEY, len(batch))
    column = batch.column("vectors")
    records["rows"] = np.diff(column.offsets.to_numpy()) if hasattr(column, "offsets") else 1
    for name in ("tokens", "truncated", "empty"):
        records[name] = batch.column(name).to_numpy(zero_copy_only=False)
    return records


def _unreadable(path: Path, error: OSError) -> Exception:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return InputError(f"{path}: cannot be read ({error.strerror}); raise the limit on open files, for example with ulimit -n 4096")
    # Arrow raises an OSError without a number for content that is not its format. A shard that is gone was renamed by another process.
    if error.errno in (None, errno.EIO, errno.ENOENT):
        return DamagedError(str(error.strerror or error))
    return InputError(f"{path}: cannot be read ({error.strerror or error})")


def _open_shards(folder: Path, card: ModelCard) -> list[VectorShard]:
    """Open the sound shards of a folder, oldest first; rename damaged ones and remove stale temporary files."""
    shards = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            shards.append(open_shard(path, card))
        except DamagedError as error:
            _set_aside(path, error)
    for path in folder.glob(".*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
        except FileNotFoundError:
            continue  # removed by another process
    return shards


def _is_sound(shard: VectorShard) -> bool:
    try:
        shard.verify()
    except DamagedError as error:
        _set_aside(shard.path, error)
        return False
    mark_used(shard.path)
    return True


def _set_aside(path: Path, error: DamagedError) -> None:
    aside = path.with_suffix(".damaged")
    try:
        path.replace(aside)
    except OSError:  # another process has renamed it, or the folder is read-only; it is not used in either case
        aside = path
    logger.warning("%s: damaged (%s); its texts are encoded again and the file can be deleted", aside, error)


# Encoding in chunks, here or in workers.


def _texts_of(chunk: Chunk) -> Sequence[str]:
    return chunk.texts


@dataclass(frozen=True)
class _EncodeInWorker:
    """Encode successive chunks with a model that the worker loads."""

    model: WorkerModel
    role: Role
    threads: int

    def open(self, advance: Advance) -> Callable[[tuple[Chunk, ...]], list[Encoding]]:
        torch.set_num_threads(self.threads)
        model = self.model.load()
        return lambda chunks: [encoding for _, encoding in encode_here(model, chunks, _texts_of, self.role, advance=advance)]


def encode_here(
    model: DenseModel | TokenModel,
    chunks: Iterable[Item],
    texts: Callable[[Item], Sequence[str]],
    role: Role,
    *,
    show: bool = False,
    advance: Advance = lambda texts: None,
) -> Generator[tuple[Item, Encoding], None, None]:
    """Encode chunks in this process and yield each with its vectors; a model of Quiver on a GPU does not wait between chunks.

    Args:
        model: The model.
        chunks: Chunks, of any type; consumed as needed.
        texts: The texts of a chunk.
        role: Queries or documents; decides the prompt.
        show: Show the model's own progress bar for every chunk.
        advance: Called with the number of texts encoded since the last call: after each batch of a model of Quiver, otherwise each chunk.
    """
    if not isinstance(model, BiEncoder | ColBERT) or show:
        for chunk in chunks:
            encoding = model.encode_texts(given := list(texts(chunk)), role, progress=show)
            advance(len(given))
            yield chunk, encoding
        return
    taken = deque[Item]()

    def taking() -> Iterator[Sequence[str]]:
        for chunk in chunks:
            taken.append(chunk)
            yield texts(chunk)

    with closing(model.encode_chunks(taking(), role, advance=advance)) as encodings:
        for encoding in encodings:
            yield taken.popleft(), encoding


_TOGETHER = 4  # chunks of an item on a GPU, which waits for the next item but not between the chunks of one


def encode_chunks(
    model: DenseModel | TokenModel,
    chunks: Iterable[Chunk],
    role: Role,
    *,
    executor: Executor,
    show: bool = False,
    together: int | None = None,
    advance: Advance = lambda texts: None,
) -> Generator[tuple[Chunk, Encoding], None, None]:
    """Encode chunks and yield the results in the order of the chunks.

    Args:
        model: The model; workers load it by its card.
        chunks: Numbered from 0; consumed as needed.
        role: Queries or documents; decides the prompt.
        executor: Where documents are encoded. Queries take seconds and are always encoded in this process.
        show: Show the model's own progress bar for every chunk that is encoded in this process.
        together: Chunks that are sent to a worker at a time; None for 4 on a GPU, and 1 on a CPU.
        advance: Called with the number of texts encoded since the last call: after each batch of a model of Quiver, otherwise each chunk.

    Raises:
        InputError: A worker cannot load the model.
        WorkerError: Workers died repeatedly.
    """
    if role == "query" or not executor.remote:
        with closing(encode_here(model, chunks, _texts_of, role, show=show, advance=advance)) as encoded:
            yield from encoded
        return
    threads = executor.threads(torch.get_num_threads())
    if together is None:
        together = _TOGETHER if isinstance(model, BiEncoder | ColBERT) and model.encoder.device.type == "cuda" else 1
    source = iter(chunks)
    items = iter(lambda: tuple(islice(source, together)), ())
    early: dict[int, tuple[Chunk, Encoding]] = {}
    following = 0
    task = _EncodeInWorker(WorkerModel.of(model), role, threads)
    with closing(executor.run(task, items, threads=threads, advance=advance)) as results:
        for item, encodings in results:
            early.update((chunk.number, (chunk, encoding)) for chunk, encoding in zip(item, encodings, strict=True))
            while following in early:
                yield early.pop(following)
                following += 1


def stack_vectors(encoding: Encoding, card: ModelCard) -> tuple[DenseVectors, list[int]]:
    """Return an encoding as one matrix, (T, d), and the number of rows per text.

    Raises:
        ValueError: The width of the vectors differs from the model card.
    """
    if isinstance(encoding, DenseEncoding):
        vectors, lengths = encoding.vectors, [1] * len(encoding.vectors)
    else:
        vectors, lengths = np.concatenate(encoding.vectors), [len(matrix) for matrix in encoding.vectors]
    if vectors.ndim != 2 or vectors.shape[1] != card.dim:
        raise ValueError(f"{card.source} returned vectors of width {vectors.shape[-1]}, its card says {card.dim}")
    return vectors, lengths


# The store.


class EmbeddingStore:
    """A folder of vectors, of any number of models.

    Args:
        folder: Folder; created on the first write.
        executor: Executor that encodes documents. This process writes the shards, in the order of the texts.
        limits: Sizes of encoding calls and shards.
    """

    def __init__(self, folder: Path, executor: Executor = IN_PROCESS, *, limits: StoreLimits | None = None) -> None:
        self._folder = folder
        self._executor = executor
        self._limits = limits or StoreLimits()

    def encode(
        self,
        model: DenseModel | TokenModel,
        texts: Iterable[str],
        role: Role,
        *,
        total: int | None = None,
        progress: bool = False,
        description: str | None = None,
    ) -> StoredVectors:
        """Return the vectors of texts; encode those that the store lacks.

        Args:
            model: Its fingerprint identifies the stored vectors.
            texts: P texts, consumed in chunks; a text that occurs twice is encoded once.
            role: Queries and documents are stored separately.
            total: P if known, for the remaining time.
            progress: Show a progress bar over all texts; without ``total``, the model's own bar for every chunk.
            description: Label of the bar; by default ``queries`` or ``documents``.

        Raises:
            InputError: The folder cannot be written or belongs to another model, or a vector is not finite (names the text). Vectors
                encoded before the error stay in the store.
            WorkerError: Workers died repeatedly.
            ValueError: The vectors contradict the model card.
        """
        limit = limit_of(self._folder)
        folder = _model_folder(self._folder, model.card, role)
        label = description or PLURALS[role]
        with progress_bar(label, total or 0, enabled=progress) as advance:
            request = _EncodeRequest(folder, model.card, role, advance, self._limits)
            shown = progress and total is None
            encodings = encode_chunks(model, request.chunks(texts), role, executor=self._executor, show=shown, advance=advance)
            try:
                with closing(encodings):
                    for chunk, encoding in encodings:
                        request.add(chunk, encoding)
            finally:
                # Vectors that were encoded before an error are kept.
                request.commit()
        stored = request.stored()
        logger.info("%d texts, %d of them with stored vectors in %s", stored.counts.texts, stored.reused, folder)
        if limit is not None and stored.reused < stored.counts.texts:
            prune_cache(limit)
        return stored


@contextmanager
def open_embedding_store(folder: Path | None, executor: Executor = IN_PROCESS) -> Iterator[EmbeddingStore]:
    """Open the store in a folder, or in a temporary folder that is deleted at the end of the block.

    Args:
        folder: The folder; None for a temporary one.
        executor: Where documents are encoded.
    """
    if folder is not None:
        yield EmbeddingStore(folder, executor)
        return
    with TemporaryDirectory(prefix="quiver-vectors-") as temporary:
        yield EmbeddingStore(Path(temporary), executor)


class _EncodeRequest:
    """One call of `EmbeddingStore.encode`. New texts are numbered in the order in which they are encoded and stored."""

    def __init__(self, folder: Path, card: ModelCard, role: Role, advance: Advance, limits: StoreLimits) -> None:
        self._folder, self._card, self._role, self._advance, self._limits = folder, card, role, advance, limits
        self._shards = _open_shards(folder, card)
        self._first = np.cumsum([0, *map(len, self._shards)]).tolist()  # number of each shard's first text
        self._verified: set[int] = set()
        self._keys = KeyTable()
        if self._shards:
            self._keys.add(np.concatenate([shard.records["key"] for shard in self._shards]), np.arange(self._first[-1]))
        self._known = self._next = int(self._first[-1])
        self._reused = 0
        self._numbers: list[NDArray[np.int64]] = []
        self._pending: list[str] = []
        self._pending_keys: list[Keys] = []
        self._in_progress: deque[Keys] = deque()
        self._chunks = 0
        self._encoded: list[tuple[NDArray[np.void], DenseVectors]] = []
        self._committed = limits.clock()

    def chunks(self, texts: Iterable[str]) -> Iterator[Chunk]:
        """Yield the texts that have no vectors, in chunks; texts that do not fill a chunk wait for more."""
        stream = iter(texts)
        while read := list(islice(stream, self._limits.chunk_texts)):
            self._look_up(read)
            yield from self._full_chunks(everything=False)
        yield from self._full_chunks(everything=True)

    def _look_up(self, texts: list[str]) -> None:
        """Number texts; those that have no vectors become pending."""
        keys = text_keys(texts)
        numbers = self._find(keys)
        known = numbers >= 0
        unknown = np.flatnonzero(~known)
        _, first, same = np.unique(keys[unknown], return_index=True, return_inverse=True)
        order = np.argsort(first)
        numbers[unknown] = self._next + np.argsort(order)[same]
        new = unknown[first[order]]
        self._keys.add(keys[new], np.arange(self._next, self._next + len(new)))
        self._next += len(new)
        self._reused += int((known & (numbers < self._known)).sum())
        self._numbers.append(numbers)
        self._pending += [texts[row] for row in new.tolist()]
        self._pending_keys.append(keys[new])
        self._advance(len(texts) - len(new))

    def _find(self, keys: Keys) -> NDArray[np.int64]:
        """Numbers of the texts that are stored in a sound shard or pending; -1 for the others."""
        while True:
            numbers = self._keys.find(keys)
            stored = numbers[(numbers >= 0) & (numbers < self._known)]
            shards = set(np.unique(np.searchsorted(self._first, stored, side="right") - 1).tolist()) - self._verified
            damaged = [number for number in sorted(shards) if not _is_sound(self._shards[number])]
            self._verified |= shards - set(damaged)
            if not damaged:
                return numbers
            for number in damaged:
                self._keys.drop(self._first[number], self._first[number + 1])

    def _full_chunks(self, *, everything: bool) -> Iterator[Chunk]:
        limits = self._limits
        while self._pending and (
            everything or len(self._pending) >= limits.chunk_texts or sum(map(len, self._pending)) >= limits.chunk_characters
        ):
            ends = np.cumsum([len(text) for text in self._pending[: limits.chunk_texts]])
            size = max(1, int(np.searchsorted(ends, limits.chunk_characters, side="right")))
            texts, self._pending = self._pending[:size], self._pending[size:]
            waiting = np.concatenate(self._pending_keys)
            self._in_progress.append(waiting[:size])
            self._pending_keys = [waiting[size:]]
            self._chunks += 1
            yield Chunk(self._chunks - 1, tuple(texts))

    def add(self, chunk: Chunk, encoding: Encoding) -> None:
        """Take the vectors of the next chunk; write a shard if one is due."""
        keys, texts = self._in_progress.popleft(), chunk.texts
        vectors, lengths = stack_vectors(encoding, self._card)
        if len(lengths) != len(texts):
            raise ValueError(f"{self._card.source} returned vectors for {len(lengths)} texts, expected {len(texts)}")
        finite = np.isfinite(vectors).all(axis=1)
        if not finite.all():
            text = texts[int(np.searchsorted(np.cumsum(lengths), finite.argmin(), side="right"))]
            raise InputError(f"{self._card.source}: the vector of the {self._role} {text[:60]!r} is not finite")
        self._encoded.append((make_records(keys, lengths, encoding.tokens), comparable(vectors, self._card)))
        if self._is_due():
            self.commit()

    def _is_due(self) -> bool:
        limits = self._limits
        texts, size = sum(len(records) for records, _ in self._encoded), sum(vectors.nbytes for _, vectors in self._encoded)
        return texts >= limits.shard_texts or size >= limits.shard_bytes or limits.clock() - self._committed >= limits.shard_seconds

    def commit(self) -> None:
        """Write a shard of the vectors encoded since the last one."""
        if self._encoded:
            records = np.concatenate([records for records, _ in self._encoded])
            # Numbered, so that the older one of two shards with the same text is always used.
            path = self._folder / f"{len(self._shards):06d}-{uuid.uuid4().hex[:12]}{SUFFIX}"
            parts, self._encoded = deque(vectors for _, vectors in self._encoded), []
            self._encoded = [(records, _join_parts(parts))]  # kept until it is written: a second attempt then writes it
            write_shard(path, *self._encoded[0], self._card)
            try:
                self._shards.append(open_shard(path, self._card))
            except DamagedError as error:
                raise InputError(f"{path}: was written but cannot be read back ({error}); choose another folder for vectors") from error
            self._encoded = []
            self._first.append(self._first[-1] + len(records))
        self._committed = self._limits.clock()

    def stored(self) -> StoredVectors:
        """Look up the rows of all texts, after everything is committed."""
        numbers = np.concatenate(self._numbers) if self._numbers else np.empty(0, np.int64)
        del self._keys, self._numbers
        stored_rows = np.concatenate([np.empty(0, np.int32), *(shard.records["rows"] for shard in self._shards)])
        first_row = np.cumsum(stored_rows, dtype=np.int64) - stored_rows
        lengths = stored_rows[numbers].astype(np.int64)
        rows = _ShardRows(self._shards, self._card.dim, first_row[numbers], lengths)

        def total(field: str) -> int:
            values = np.concatenate([np.empty(0, np.int32), *(shard.records[field] for shard in self._shards)])
            return int(values[numbers].sum(dtype=np.int64))

        counts = TokenCounts(len(numbers), total("tokens"), total("truncated"), total("empty"))
        return StoredVectors(counts, self._reused, rows, None if self._card.kind == "dense" else lengths)


def _join_parts(parts: deque[DenseVectors]) -> DenseVectors:
    """Join parts of (n, d) to one matrix, (T, d). Each part is freed after it is copied, so that memory does not double."""
    if len(parts) == 1:
        return parts.popleft()
    joined = np.empty((sum(map(len, parts)), parts[0].shape[1]), np.float32)
    start = 0
    while parts:
        part = parts.popleft()
        joined[start : start + len(part)] = part
        start += len(part)
    return joined


class _ShardRows:
    """Rows of texts, read from shards (`quiver.retrieval.records.Rows`).

    Texts whose rows are adjacent in the shards form one run, so that the table is small if texts are read in the order of encoding, and
    never larger than two numbers per text.
    """

    def __init__(self, shards: list[VectorShard], dim: int, first: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        filled = lengths > 0
        first, lengths = first[filled], lengths[filled]
        heads = np.flatnonzero(np.append(True, first[1:] != first[:-1] + lengths[:-1])[: len(first)])
        ends = np.cumsum(lengths)
        self._shape = (int(ends[-1]) if len(ends) else 0, dim)
        self._stored = first[heads]  # first row of each run in the shards
        self._begins = (ends - lengths)[heads]  # first row of each run in the order of the texts
        self._shards = shards
        self._first_rows = np.cumsum([0, *(shard.rows for shard in shards)], dtype=np.int64)

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    def blocks(self, size: int) -> Iterator[tuple[int, DenseVectors]]:
        for start in range(0, self._shape[0], size):
            yield start, self.span(start, start + size)

    def span(self, start: int, stop: int) -> DenseVectors:
        return self.take(np.arange(start, min(stop, self._shape[0])))

    def take(self, indices: NDArray[np.intp]) -> DenseVectors:
        out = np.empty((len(indices), self._shape[1]), np.float32)
        runs = np.searchsorted(self._begins, indices, side="right") - 1
        stored = self._stored[runs] + (indices - self._begins[runs])
        shards = np.searchsorted(self._first_rows, stored, side="right") - 1
        for shard in np.unique(shards).tolist():
            positions = np.flatnonzero(shards == shard)
            local = stored[positions] - self._first_rows[shard]
            if positions[-1] - positions[0] == len(positions) - 1:
                self._shards[shard].read(local, out[positions[0] : positions[-1] + 1])
            else:
                part = np.empty((len(positions), self._shape[1]), np.float32)
                self._shards[shard].read(local, part)
                out[positions] = part
        return out


def _model_folder(store: Path, card: ModelCard, role: Role) -> Path:
    """Create or check the folder of a model's vectors."""
    if not re.fullmatch(r"[0-9a-f]{16,}", card.fingerprint):
        raise ValueError(f"a fingerprint must be a hexadecimal number, got {card.fingerprint!r}")
    folder = store / f"{card.fingerprint}-{role}-v{VERSION}"
    wanted = {"format": FORMAT, "version": VERSION, "role": role} | {
        name: value for name, value in asdict(card).items() if name in ("fingerprint", "kind", "dim", "similarity")
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be created ({error.strerror}); choose another folder for vectors") from error
    manifest = folder / MANIFEST
    if not manifest.is_file():
        write_json(manifest, wanted | {"source": card.source})
    found = read_json(manifest)
    for name, value in wanted.items():
        if found.get(name) != value:
            raise InputError(f"{manifest}: {name} is {found.get(name)!r}, expected {value!r}; delete the folder to encode again")
    return folder
