"""The embedding store: vectors of texts on disk, by model and text, so that no text is encoded twice by the same model.

    FOLDER/<fingerprint>-<role>-v3/000000-1a2b3c/texts.arrow  a shard: a few thousand texts and their vectors
    FOLDER/<fingerprint>-<role>-v3/000000-1a2b3c/seal.json    its size and checksum, and the model that the vectors come from

A text is identified by a hash of its content. Shards are only added, every few thousand texts or 30 seconds, each whole or not at all
(`quiver.encoder.work_folder`): a killed process loses what it encoded since the last shard. Several processes may encode at the same time
and wait for each other to write; a text that two of them encode is stored twice, and the older shard is used. A shard is compared with its
checksum before the first of its vectors is used; a damaged one is removed with a warning, and its texts are encoded again. Vectors are
stored scaled to length 1 if the model compares by cosine. A shard is an Arrow IPC file with one record batch, one row per text:

    key                  fixed_size_binary[16]    first half of the sha256 of the text
    tokens               int32                    number of tokens after truncation
    truncated, empty     bool
    vectors              fixed_size_list<float>[d], or a large_list of them for a ColBERT model

Shapes: B texts of a chunk, P texts in all, T rows of all texts, d vector width.
"""

from __future__ import annotations

import errno
import logging
import math
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import mark_used
from quiver.encoder.progress import Advance, progress_bar
from quiver.encoder.work_folder import SealedFolders, exclusive_lock, remove_temporary
from quiver.retrieval.cache import limit_of, prune_cache
from quiver.retrieval.models.encoding import AnyEncoding, stack_vectors
from quiver.retrieval.models.loading import WorkerModel
from quiver.retrieval.models.pretrained import PretrainedModel, encode_here
from quiver.retrieval.records import (
    IN_PROCESS,
    PLURALS,
    DenseModel,
    DenseVectors,
    Executor,
    ModelCard,
    Role,
    Rows,
    TextTokens,
    TokenCounts,
    TokenModel,
)

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

KEY = np.dtype("S16")
"""Dtype of a text's key: 16 bytes, ordered as bytes."""

VERSION = 3
"""Version of the format of shards; part of the folder's name."""

TEXTS = "texts.arrow"
"""Name of the file of a shard."""

Keys: TypeAlias = NDArray[np.bytes_]

NumberedChunks: TypeAlias = tuple[int, tuple[Sequence[str], ...]]
"""Successive chunks that a worker encodes, and the number of the first."""

_TOGETHER = 4  # chunks of an item on a GPU, which waits for the next item but not between the chunks of one


@dataclass(frozen=True)
class StoreLimits:
    """Sizes of encoding calls and shards."""

    chunk_texts: int = 512  # texts per encoding call: enough to fill a batch, few enough for the progress bar to move every few seconds
    chunk_characters: int = 1 << 20  # per encoding call, about 250,000 tokens, so that a kill does not lose an hour of long texts
    shard_texts: int = 8192  # a shard is written when it has this many texts,
    shard_bytes: int = 64 << 20  # or this many bytes of vectors,
    shard_seconds: float = 30.0  # or after this many seconds
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


def text_keys(texts: Sequence[str]) -> Keys:
    """Hash texts to keys, (B,): the first 128 bits of the sha256 of each."""
    # "surrogatepass": the tokenizer refuses invalid text with a better message than an encoding error.
    digests = [sha256(text.encode("utf-8", "surrogatepass")).digest()[: KEY.itemsize] for text in texts]
    return np.frombuffer(b"".join(digests), KEY)


class KeyTable:
    """A map from keys to numbers; if a key was added twice, its first number counts.

    A dict of millions of entries takes gigabytes; sorted arrays take 24 bytes per key. They are kept as runs, each at least twice as long
    as the next, so that adding n keys in small chunks costs O(n log n) and a look-up is a binary search in each run.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[Keys, NDArray[np.int64]]] = []

    def add(self, keys: Keys, numbers: NDArray[np.int64]) -> None:
        """Add B keys with their numbers."""
        while self._runs and len(self._runs[-1][0]) < 2 * len(keys):
            older_keys, older_numbers = self._runs.pop()
            keys, numbers = np.concatenate([older_keys, keys]), np.concatenate([older_numbers, numbers])
        if len(keys):
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


class Shard(NamedTuple):
    """An open shard of B texts. Its vectors are mapped only while they are read, so that they do not count as memory of the process."""

    folder: Path
    texts: pyarrow.RecordBatch  # all columns, memory-mapped
    lengths: NDArray[np.int32]  # rows of each text, (B,)
    shape: tuple[int, int]  # number of rows and vector width d
    start: int  # position of the vectors in the file, in bytes

    def read(self, rows: NDArray[np.intp] | slice) -> DenseVectors:
        """Rows of the file; an `InputError` if it was removed, truncated, or cannot be read."""
        path = self.folder / TEXTS
        try:
            vectors: DenseVectors = np.memmap(path, "<f4", "r", self.start, self.shape)[rows]
        except (OSError, ValueError) as error:  # the latter for a file that is too short
            raise InputError(f"{path}: can no longer be read ({getattr(error, 'strerror', error)}); run the command again") from error
        mark_used(self.folder)  # keeps the shards of a run that takes days in the cache
        return vectors


class VectorFolder:
    """The shards of a model's vectors for one role; ``shards`` are open, oldest first. An `InputError` if the folder cannot be created."""

    def __init__(self, store: Path, card: ModelCard, role: Role) -> None:
        if not re.fullmatch(r"[0-9a-f]{16,}", card.fingerprint):
            raise ValueError(f"a fingerprint must be a hexadecimal number, got {card.fingerprint!r}")
        self.path, self._card = store / f"{card.fingerprint}-{role}-v{VERSION}", card
        self._sealed = SealedFolders(self.path, f"quiver-vectors/{VERSION}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be created ({error.strerror}); choose another folder for vectors") from error
        opened = {name: self._open_shard(name) for name in self._sealed.names()}
        self.shards = [shard for shard in opened.values() if shard is not None]

    def write(self, keys: Keys, lengths: NDArray[np.int64], tokens: Sequence[TextTokens], vectors: Sequence[DenseVectors]) -> None:
        """Add a shard of B texts with the rows of each, chunk after chunk, while other processes that want to write one wait.

        An `InputError` if it cannot be written.
        """
        import pyarrow as pa

        rows = np.concatenate(vectors, dtype=np.float32)
        column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), self._card.dim)
        if self._card.kind == "colbert":
            column = pa.LargeListArray.from_arrays(pa.array(np.append(0, np.cumsum(lengths, dtype=np.int64))), column)
        keys_column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(KEY.itemsize), len(keys), [None, pa.py_buffer(keys.tobytes())])
        counts = [pa.array(np.concatenate([getattr(each, name) for each in tokens])) for name in ("tokens", "truncated", "empty")]
        batch = pa.RecordBatch.from_arrays([keys_column, *counts, column], schema=self._schema())
        try:
            with self._lock_writers():
                self._sealed.remove_unfinished()
                remove_temporary(self.path)
                # The older one of two shards with the same text is always used. A name is never that of another shard, which may be in use.
                number = int(max(self._sealed.names(), default="-1-").rpartition("-")[0]) + 1
                name = f"{number:06d}-{sha256(keys.tobytes()).hexdigest()[:12]}"
                with (
                    self._sealed.writing(name) as part,
                    pa.OSFile(str(part.folder / TEXTS), "wb") as file,
                    pa.ipc.new_file(file, batch.schema) as writer,
                ):
                    writer.write_batch(batch)
                    part.about = {"model": asdict(self._card)}
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"{self.path}: cannot be written ({reason}); free space, or choose another folder for vectors") from error
        shard = self._open_shard(name)
        if shard is None:
            raise InputError(f"{self.path / name}: was written but cannot be read back; choose another folder for vectors")
        self.shards.append(shard)

    def is_sound(self, shard: Shard) -> bool:
        """Compare a shard with its checksum, and remove it if it is damaged."""
        flaw = self._sealed.flaw(shard.folder.name)
        if flaw is not None:
            self._remove_damaged(shard.folder.name, flaw)
            return False
        mark_used(shard.folder)
        return True

    def _open_shard(self, name: str) -> Shard | None:
        import pyarrow as pa

        folder = self._sealed.path(name)
        try:
            # Not pyarrow.memory_map: it would keep a file open per shard.
            mapped = np.memmap(folder / TEXTS, np.uint8, "r")
            batch = pa.ipc.open_file(pa.py_buffer(mapped)).get_batch(0)
            batch.validate()
            if not batch.schema.equals(self._schema()):
                raise ValueError(f"not a shard of {self._card.kind} vectors of width {self._card.dim}")
        except (OSError, pa.ArrowException, ValueError) as error:
            # Arrow raises an OSError without a number for content that is not its format.
            if getattr(error, "errno", None) not in (None, errno.EIO, errno.ENOENT):
                raise InputError(f"{folder}: cannot be read ({error}); the limit on open files may be too low: ulimit -n 4096") from error
            self._remove_damaged(name, " ".join(str(error).split()))
            return None
        column = batch.column("vectors")
        lists = hasattr(column, "offsets")
        lengths = np.diff(column.offsets.to_numpy()).astype(np.int32) if lists else np.ones(len(batch), np.int32)
        vectors = column.buffers()[-1]  # a batch without vectors may have no buffer for them
        start = vectors.address - mapped.ctypes.data if vectors else 0
        return Shard(folder, batch, lengths, (len(column.values) if lists else len(batch), self._card.dim), start)

    def _schema(self) -> pyarrow.Schema:
        import pyarrow as pa

        vector = pa.list_(pa.float32(), self._card.dim)
        vectors = vector if self._card.kind == "dense" else pa.large_list(vector)
        return pa.schema(
            {"key": pa.binary(KEY.itemsize), "tokens": pa.int32(), "truncated": pa.bool_(), "empty": pa.bool_(), "vectors": vectors}
        )

    def _lock_writers(self) -> AbstractContextManager[None]:
        return exclusive_lock(self.path / ".lock", "writing there", remedy="wait for it", wait=math.inf, keep=True)

    def _remove_damaged(self, name: str, flaw: str) -> None:
        logger.warning("%s: damaged (%s); its texts are encoded again", self._sealed.path(name), flaw)
        with suppress(InputError, OSError), self._lock_writers():  # a read-only folder keeps it, and it is not used
            if self._sealed.flaw(name):  # still, now that no other process writes
                self._sealed.remove(name)


@dataclass(frozen=True)
class _EncodeInWorker:
    """Encode successive chunks with a model that the worker loads."""

    model: WorkerModel
    role: Role
    threads: int

    def open(self, advance: Advance) -> Callable[[NumberedChunks], list[AnyEncoding]]:
        torch.set_num_threads(self.threads)
        model = self.model.load()
        return lambda item: [encoding for _, encoding in encode_here(model, item[1], list, self.role, advance=advance)]


def encode_chunks(
    model: DenseModel | TokenModel,
    chunks: Iterable[Sequence[str]],
    role: Role,
    *,
    executor: Executor,
    advance: Advance = lambda texts: None,
) -> Generator[tuple[Sequence[str], AnyEncoding], None, None]:
    """Encode chunks of texts, here or in workers, and yield the results in the order of the chunks; see `encode_here`.

    Workers load the model by its card. Queries take seconds and are always encoded in this process.

    Raises:
        InputError: A worker cannot load the model.
        WorkerError: Workers died repeatedly.
    """
    if role == "query" or not executor.remote:
        with closing(encode_here(model, chunks, list, role, advance=advance)) as encoded:
            yield from encoded
        return
    threads, source = executor.threads(torch.get_num_threads()), iter(chunks)
    together = _TOGETHER if isinstance(model, PretrainedModel) and model.encoder.device.type == "cuda" else 1
    items = enumerate(iter(lambda: tuple(islice(source, together)), ()))
    early, following = dict[int, list[tuple[Sequence[str], AnyEncoding]]](), 0
    with closing(executor.run(_EncodeInWorker(WorkerModel.of(model), role, threads), items, threads=threads, advance=advance)) as results:
        for (number, item), encodings in results:
            early[number] = list(zip(item, encodings, strict=True))
            while following in early:
                yield from early.pop(following)
                following += 1


class EmbeddingStore:
    """A folder of vectors, of any number of models.

    Args:
        folder: Folder; created on the first write.
        executor: Executor that encodes documents. This process writes the shards, in the order of the texts.
        limits: Sizes of encoding calls and shards.
        temporary: The folder is not in the user's cache, whose size is limited.
    """

    def __init__(
        self, folder: Path, executor: Executor = IN_PROCESS, *, limits: StoreLimits | None = None, temporary: bool = False
    ) -> None:
        self._folder, self._executor, self._limits = folder, executor, limits or StoreLimits()
        self._temporary = temporary

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
            progress: Show a progress bar over all texts.
            description: Label of the bar; by default ``queries`` or ``documents``.

        Raises:
            InputError: The folder cannot be written, or a vector is not finite (names the text). Vectors encoded before the error stay in
                the store.
            WorkerError: Workers died repeatedly.
            ValueError: The vectors contradict the model card.
        """
        limit = None if self._temporary else limit_of(self._folder)
        folder = VectorFolder(self._folder, model.card, role)
        with progress_bar(description or PLURALS[role], total, enabled=progress) as advance:
            request = _EncodeRequest(folder, model.card, role, advance, self._limits)
            try:
                chunks = request.chunks(texts)
                with closing(encode_chunks(model, chunks, role, executor=self._executor, advance=advance)) as encodings:
                    for chunk, encoding in encodings:
                        request.add(chunk, encoding)
            finally:
                request.commit()  # vectors that were encoded before an error are kept
        stored = request.stored()
        logger.info("%d texts, %d of them with stored vectors in %s", stored.counts.texts, stored.reused, folder.path)
        if limit is not None and stored.reused < stored.counts.texts:
            prune_cache(limit)
        return stored


@contextmanager
def open_embedding_store(folder: Path | None, executor: Executor = IN_PROCESS) -> Iterator[EmbeddingStore]:
    """Open the store in a folder; None for a temporary folder that is deleted at the end of the block."""
    if folder is not None:
        yield EmbeddingStore(folder, executor)
        return
    with TemporaryDirectory(prefix="quiver-vectors-") as temporary:
        yield EmbeddingStore(Path(temporary), executor, temporary=True)


class _EncodeRequest:
    """One call of `EmbeddingStore.encode`. New texts are numbered in the order in which they are encoded and stored."""

    def __init__(self, folder: VectorFolder, card: ModelCard, role: Role, advance: Advance, limits: StoreLimits) -> None:
        self._folder, self._card, self._role, self._advance, self._limits = folder, card, role, advance, limits
        self._first = np.cumsum([0, *(len(shard.lengths) for shard in folder.shards)]).tolist()  # number of each shard's first text
        self._verified: set[int] = set()
        self._keys = KeyTable()
        self._known = self._next = int(self._first[-1])
        if self._known:
            stored = [np.frombuffer(shard.texts.column("key").buffers()[1], KEY, len(shard.lengths)) for shard in folder.shards]
            self._keys.add(np.concatenate(stored), np.arange(self._known))
        self._reused = 0
        self._numbers: list[NDArray[np.int64]] = []
        self._pending: list[str] = []
        self._pending_keys = text_keys([])
        self._in_progress: deque[Keys] = deque()
        self._encoded: list[tuple[Keys, NDArray[np.int64], TextTokens, DenseVectors]] = []
        self._committed = limits.clock()

    def chunks(self, texts: Iterable[str]) -> Iterator[Sequence[str]]:
        """Yield the texts that have no vectors, in chunks; texts that do not fill a chunk wait for more."""
        stream = iter(texts)
        while read := list(islice(stream, self._limits.chunk_texts)):
            keys = text_keys(read)
            numbers = self._find(keys)
            self._reused += int(((numbers >= 0) & (numbers < self._known)).sum())
            unknown = np.flatnonzero(numbers < 0)
            _, first, same = np.unique(keys[unknown], return_index=True, return_inverse=True)
            order = np.argsort(first)
            numbers[unknown] = self._next + np.argsort(order)[same]
            new = unknown[first[order]]
            self._keys.add(keys[new], np.arange(self._next, self._next + len(new)))
            self._next += len(new)
            self._numbers.append(numbers)
            self._pending += [read[row] for row in new.tolist()]
            self._pending_keys = np.concatenate([self._pending_keys, keys[new]])
            self._advance(len(read) - len(new))
            yield from self._full_chunks(everything=False)
        yield from self._full_chunks(everything=True)

    def _find(self, keys: Keys) -> NDArray[np.int64]:
        """Numbers of the texts that are stored in a sound shard or pending; -1 for the others."""
        while True:
            numbers = self._keys.find(keys)
            stored = numbers[(numbers >= 0) & (numbers < self._known)]
            shards = set(np.unique(np.searchsorted(self._first, stored, side="right") - 1).tolist()) - self._verified
            damaged = [number for number in sorted(shards) if not self._folder.is_sound(self._folder.shards[number])]
            self._verified |= shards - set(damaged)
            if not damaged:
                return numbers
            for number in damaged:
                self._keys.drop(self._first[number], self._first[number + 1])

    def _full_chunks(self, *, everything: bool) -> Iterator[Sequence[str]]:
        limits = self._limits
        while self._pending and (
            everything or len(self._pending) >= limits.chunk_texts or sum(map(len, self._pending)) >= limits.chunk_characters
        ):
            ends = np.cumsum([len(text) for text in self._pending[: limits.chunk_texts]])
            size = max(1, int(np.searchsorted(ends, limits.chunk_characters, side="right")))
            texts, self._pending = self._pending[:size], self._pending[size:]
            self._in_progress.append(self._pending_keys[:size])
            self._pending_keys = self._pending_keys[size:]
            yield tuple(texts)

    def add(self, texts: Sequence[str], encoding: AnyEncoding) -> None:
        """Take the vectors of the next chunk; write a shard if one is due."""
        keys, limits = self._in_progress.popleft(), self._limits
        vectors, lengths, bad = stack_vectors(encoding, self._card, len(texts))
        if bad is not None:
            raise InputError(f"{self._card.source}: the vector of the {self._role} {texts[bad][:60]!r} is not finite")
        self._encoded.append((keys, lengths, encoding.tokens, vectors))
        count, size = sum(len(keys) for keys, *_ in self._encoded), sum(vectors.nbytes for *_, vectors in self._encoded)
        if count >= limits.shard_texts or size >= limits.shard_bytes or limits.clock() - self._committed >= limits.shard_seconds:
            self.commit()

    def commit(self) -> None:
        """Write a shard of the vectors encoded since the last one. They are kept until then, so that a second attempt writes them."""
        if self._encoded:
            keys, lengths, tokens, vectors = zip(*self._encoded, strict=True)
            self._folder.write(np.concatenate(keys), np.concatenate(lengths), tokens, vectors)
            self._encoded = []
            self._first.append(self._first[-1] + len(self._folder.shards[-1].lengths))
        self._committed = self._limits.clock()

    def stored(self) -> StoredVectors:
        """Look up the rows of all texts, after everything is committed."""
        numbers, shards = np.concatenate([np.empty(0, np.int64), *self._numbers]), self._folder.shards
        del self._keys, self._numbers
        # The lengths of a shard that is not used may be wrong, because it is not compared with its checksum; its number of rows is not.
        begins = np.cumsum([0, *(shard.shape[0] for shard in shards)], dtype=np.int64)
        first = [begin + np.cumsum(shard.lengths, dtype=np.int64) - shard.lengths for begin, shard in zip(begins, shards, strict=False)]

        def take_of_texts(columns: Iterable[NDArray[Any]]) -> NDArray[np.int64]:
            taken: NDArray[np.int64] = np.concatenate([np.empty(0, np.int32), *columns])[numbers].astype(np.int64)
            return taken

        names = ("tokens", "truncated", "empty")
        totals = [take_of_texts(shard.texts.column(name).to_numpy(zero_copy_only=False) for shard in shards).sum() for name in names]
        lengths = take_of_texts(shard.lengths for shard in shards)
        rows = _ShardRows(shards, begins, self._card.dim, take_of_texts(first), lengths)
        counts = TokenCounts(len(numbers), *map(int, totals))
        return StoredVectors(counts, self._reused, rows, None if self._card.kind == "dense" else lengths)


class _ShardRows:
    """Rows of texts, read from shards (`quiver.retrieval.records.Rows`)."""

    def __init__(
        self, shards: Sequence[Shard], begins: NDArray[np.int64], dim: int, first: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> None:
        self._shards, self._first_rows = shards, begins  # the number of the first row of each shard
        self._ends = np.cumsum(lengths)  # of the rows of each text, in the order of the texts
        self._shift = first - self._ends + lengths  # from a row in the order of the texts to that in the shards
        self.shape = (int(lengths.sum()), dim)

    def span(self, start: int, stop: int) -> DenseVectors:
        return self.take(np.arange(start, min(stop, self.shape[0])))

    def take(self, indices: NDArray[np.intp]) -> DenseVectors:
        out = np.empty((len(indices), self.shape[1]), np.float32)
        stored = indices + self._shift[np.searchsorted(self._ends, indices, side="right")]
        shards = np.searchsorted(self._first_rows, stored, side="right") - 1
        for shard in np.unique(shards).tolist():
            positions = np.flatnonzero(shards == shard)
            out[_slice_if_adjacent(positions)] = self._shards[shard].read(_slice_if_adjacent(stored[positions] - self._first_rows[shard]))
        return out


def _slice_if_adjacent(numbers: NDArray[np.intp]) -> NDArray[np.intp] | slice:
    """Numbers that follow each other as a slice, which copies rows faster."""
    return slice(int(numbers[0]), int(numbers[-1]) + 1) if (np.diff(numbers) == 1).all() else numbers
