"""Vectors of texts on disk, so that no text is encoded twice by the same model.

    FOLDER/<fingerprint>-<role>/manifest.json        which model the vectors come from
    FOLDER/<fingerprint>-<role>/000000-1a2b3c.shard  some thousand texts, see ``quiver.retrieval.data.vector_shards``

A text is known by a hash of its content, whichever collection it is in. Shards are only ever added, each whole and for good, every
few thousand texts or half a minute: a process that is killed loses what it encoded since, and may leave a temporary file, which a later
one removes. Several processes may write at once; what two of them encode twice is stored twice and found once. A shard that has
changed on the disk is set aside with a warning, and its texts are encoded again.

Vectors are stored as an index wants them: of length 1 where the model compares by cosine.

Shapes: B texts of a chunk, P texts in all, T rows of all texts, d vector width.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, write_json
from quiver.retrieval.cache import limit_of, mark_used, prune_cache
from quiver.retrieval.data.encoded_chunks import Chunk, Encoding, encode_chunks
from quiver.retrieval.data.text_keys import Keys, KeyTable, text_keys
from quiver.retrieval.data.vector_shards import FORMAT, SUFFIX, DamagedError, Shard, make_records, open_shard, write_shard
from quiver.retrieval.models.similarity import comparable
from quiver.retrieval.progress import Advance, progress_bar
from quiver.retrieval.protocols import IN_PROCESS, DenseModel, Executor, Rows, TokenModel
from quiver.retrieval.records import DenseEncoding, DenseVectors, ModelCard, Role, TokenCounts, TokenEncoding

logger = logging.getLogger(__name__)

VERSION = 1
MANIFEST = "manifest.json"
# Texts read at a time, and encoded in one call: enough to fill a batch, few enough that the bar moves every few seconds on a CPU.
_CHUNK = 512
# Long texts go in smaller calls, about 250,000 tokens each, so that a kill does not cost an hour of encoding.
_CHUNK_CHARACTERS = 1 << 20
# A shard is committed as soon as it has one of these.
_SHARD_TEXTS = 8192
_SHARD_BYTES = 64 << 20
_SHARD_SECONDS = 30.0
# Writing a shard takes seconds: a temporary file of this age belongs to a process that is gone.
_STALE_SECONDS = 3600.0


@dataclass(frozen=True)
class StoredVectors:
    """The vectors of some texts, in the order of the texts.

    Attributes:
        counts: What tokenising did to the texts.
        reused: Texts whose vectors were there before.
        rows: All rows, (T, d), which stay on the disk; T is P for a dense model.
        lengths: For a model with one vector a token how many rows each text has, (P,) int64; None for a dense model.
    """

    counts: TokenCounts
    reused: int
    rows: Rows
    lengths: NDArray[np.int64] | None


class VectorStore:
    """A folder of vectors, of any number of models.

    Args:
        folder: Made when something is written to it.
        executor: Who encodes documents; the shards are written here, in the order of the texts.
    """

    def __init__(self, folder: Path, executor: Executor = IN_PROCESS) -> None:
        self._folder = folder
        self._executor = executor

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
        """The vectors of texts, encoded where the store has none of this model.

        Args:
            model: Its fingerprint decides which vectors are its own.
            texts: P texts, consumed in chunks; one that occurs twice is encoded once.
            role: Queries and documents are kept apart.
            total: P where it is known, for the time to go.
            progress: Show a bar over all texts; without a total, the model's own for every chunk.
            description: Beside the bar; by default what the role is called.

        Raises:
            InputError: The folder cannot be written or holds something else, or a vector is not finite (names the text). What was
                encoded until then is kept.
            WorkerError: Workers died, again and again.
            ValueError: The vectors are not what the model's card says.
        """
        limit = limit_of(self._folder)
        folder = _model_folder(self._folder, model.card, role)
        named = description or ("queries" if role == "query" else "documents")
        with progress_bar(named, total or 0, enabled=progress) as advance:
            session = _Session(folder, model.card, role, advance)
            show = progress and total is None
            encodings = encode_chunks(model, session.chunks(texts), role, executor=self._executor, show=show)
            try:
                with closing(encodings):
                    for chunk, encoding in encodings:
                        session.keep(chunk, encoding)
            finally:
                # Also when the texts or the model fail: what has been encoded is not lost.
                session.commit()
        stored = session.stored()
        logger.info("%d texts, %d of them with vectors in %s", stored.counts.texts, stored.reused, folder)
        if limit is not None and stored.reused < stored.counts.texts:
            prune_cache(limit)
        return stored


@contextmanager
def vector_store(folder: Path | None, executor: Executor = IN_PROCESS) -> Iterator[VectorStore]:
    """The store in a folder, or for None one in a temporary folder that is gone when the block ends.

    Args:
        folder: The folder.
        executor: Who encodes documents.
    """
    if folder is not None:
        yield VectorStore(folder, executor)
        return
    with TemporaryDirectory(prefix="quiver-vectors-") as temporary:
        yield VectorStore(Path(temporary), executor)


def packed(encoding: DenseEncoding | TokenEncoding, card: ModelCard) -> tuple[DenseVectors, list[int]]:
    """An encoding as one matrix, (rows, d), and the number of rows of each text.

    Raises:
        ValueError: The vectors are not what the model's card says.
    """
    if isinstance(encoding, DenseEncoding):
        vectors, lengths = encoding.vectors, [1] * len(encoding.vectors)
    else:
        vectors, lengths = np.concatenate(encoding.vectors), [len(matrix) for matrix in encoding.vectors]
    if vectors.ndim != 2 or vectors.shape[1] != card.dim:
        raise ValueError(f"{card.source} gave vectors of width {vectors.shape[-1]}, its card says {card.dim}")
    return vectors, lengths


class _Session:
    """One walk over texts: every new text gets the next number, which is its place in the shards, and is encoded in that order."""

    def __init__(self, folder: Path, card: ModelCard, role: Role, advance: Advance) -> None:
        self._folder, self._card, self._role, self._advance = folder, card, role, advance
        self._shards = _open_shards(folder, self._card.dim)
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
        self._handed_out: deque[Keys] = deque()
        self._chunks = 0
        self._encoded: list[tuple[NDArray[np.void], DenseVectors]] = []
        self._committed = time.monotonic()

    def chunks(self, texts: Iterable[str]) -> Iterator[Chunk]:
        """What is to be encoded of some texts, in calls of one chunk; what does not fill a call waits for more."""
        stream = iter(texts)
        while read := list(islice(stream, _CHUNK)):
            self._look_up(read)
            yield from self._full_chunks(everything=False)
        yield from self._full_chunks(everything=True)

    def _look_up(self, texts: list[str]) -> None:
        """Number some texts; those that have no vectors are pending."""
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
        self._pending += [texts[place] for place in new.tolist()]
        self._pending_keys.append(keys[new])
        self._advance(len(texts) - len(new))

    def _find(self, keys: Keys) -> NDArray[np.int64]:
        """Numbers of the texts whose vectors are sound or still to come; -1 for the others."""
        while True:
            numbers = self._keys.find(keys)
            asked = numbers[(numbers >= 0) & (numbers < self._known)]
            shards = set(np.unique(np.searchsorted(self._first, asked, side="right") - 1).tolist()) - self._verified
            damaged = [number for number in sorted(shards) if not _is_sound(self._shards[number])]
            self._verified |= shards - set(damaged)
            if not damaged:
                return numbers
            for number in damaged:
                self._keys.drop(self._first[number], self._first[number + 1])

    def _full_chunks(self, *, everything: bool) -> Iterator[Chunk]:
        while self._pending and (everything or len(self._pending) >= _CHUNK or sum(map(len, self._pending)) >= _CHUNK_CHARACTERS):
            size = _chunk_size(self._pending)
            texts, self._pending = self._pending[:size], self._pending[size:]
            waiting = np.concatenate(self._pending_keys)
            self._handed_out.append(waiting[:size])
            self._pending_keys = [waiting[size:]]
            self._chunks += 1
            yield Chunk(self._chunks - 1, tuple(texts))

    def keep(self, chunk: Chunk, encoding: Encoding) -> None:
        """Take the vectors of the next chunk, and commit what has come together once it is due."""
        keys, texts = self._handed_out.popleft(), chunk.texts
        vectors, lengths = packed(encoding, self._card)
        if len(lengths) != len(texts):
            raise ValueError(f"{self._card.source} gave the vectors of {len(lengths)} texts for {len(texts)}")
        finite = np.isfinite(vectors).all(axis=1)
        if not finite.all():
            text = texts[int(np.searchsorted(np.cumsum(lengths), finite.argmin(), side="right"))]
            raise InputError(f"{self._card.source} gave a vector that is not finite for the {self._role} {text[:60]!r}; it cannot be used")
        self._encoded.append((make_records(keys, lengths, encoding.tokens), comparable(vectors, self._card)))
        self._advance(len(texts))
        if self._is_due():
            self.commit()

    def _is_due(self) -> bool:
        texts, size = sum(len(records) for records, _ in self._encoded), sum(vectors.nbytes for _, vectors in self._encoded)
        return texts >= _SHARD_TEXTS or size >= _SHARD_BYTES or time.monotonic() - self._committed >= _SHARD_SECONDS

    def commit(self) -> None:
        """Write what has been encoded since the last commit."""
        if self._encoded:
            records = np.concatenate([records for records, _ in self._encoded])
            # Numbered, so that of two shards with the same text the same one is found for ever: the older.
            path = self._folder / f"{len(self._shards):06d}-{uuid.uuid4().hex[:12]}{SUFFIX}"
            self._shards.append(write_shard(path, records, [vectors for _, vectors in self._encoded]))
            self._encoded = []
            self._first.append(self._first[-1] + len(records))
        self._committed = time.monotonic()

    def stored(self) -> StoredVectors:
        """All texts looked up, once everything is encoded and committed."""
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


class _ShardRows:
    """Rows in the order of some texts, read from shards; see ``quiver.retrieval.protocols.Rows``.

    Texts whose rows follow each other in the shards are one run, so that what is remembered is small where the order is that of the
    encoding, and never more than two numbers a text.
    """

    def __init__(self, shards: list[Shard], dim: int, first: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        filled = lengths > 0
        first, lengths = first[filled], lengths[filled]
        heads = np.flatnonzero(np.append(True, first[1:] != first[:-1] + lengths[:-1])[: len(first)])
        ends = np.cumsum(lengths)
        self._shape = (int(ends[-1]) if len(ends) else 0, dim)
        self._stored = first[heads]  # where a run begins in the shards
        self._begins = (ends - lengths)[heads]  # and in the order of the texts
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
            places = np.flatnonzero(shards == shard)
            local = stored[places] - self._first_rows[shard]
            if places[-1] - places[0] == len(places) - 1:
                self._shards[shard].read(local, out[places[0] : places[-1] + 1])
            else:
                part = np.empty((len(places), self._shape[1]), np.float32)
                self._shards[shard].read(local, part)
                out[places] = part
        return out


def _chunk_size(texts: list[str]) -> int:
    """How many of the first texts are encoded in one call; one at least."""
    ends = np.cumsum([len(text) for text in texts[:_CHUNK]])
    return max(1, int(np.searchsorted(ends, _CHUNK_CHARACTERS, side="right")))


def _model_folder(store: Path, card: ModelCard, role: Role) -> Path:
    """The folder of a model's vectors, made if it is not there."""
    if not re.fullmatch(r"[0-9a-f]{16,}", card.fingerprint):
        raise ValueError(f"a fingerprint is a hexadecimal number, got {card.fingerprint!r}")
    folder = store / f"{card.fingerprint}-{role}"
    wanted = {"format": FORMAT, "version": VERSION, "role": role} | {
        name: value for name, value in asdict(card).items() if name in ("fingerprint", "kind", "dim", "similarity")
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error.strerror}); name another folder for vectors") from error
    manifest = folder / MANIFEST
    if not manifest.is_file():
        write_json(manifest, wanted | {"source": card.source})
    found = read_json(manifest)
    for name, value in wanted.items():
        if found.get(name) != value:
            raise InputError(f"{manifest}: its {name} is {found.get(name)!r}, expected {value!r}; delete the folder to encode again")
    return folder


def _open_shards(folder: Path, dim: int) -> list[Shard]:
    """The sound shards of a folder, oldest first; others are set aside, and what a killed process has left is removed."""
    shards = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            shards.append(open_shard(path, dim))
        except DamagedError as error:
            _set_aside(path, error)
    for path in folder.glob(".*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
        except FileNotFoundError:
            continue  # another process was faster
    return shards


def _is_sound(shard: Shard) -> bool:
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
    except OSError:  # somebody else has done it, or the folder may only be read: it is not used in any case
        aside = path
    logger.warning("%s: damaged (%s); its texts are encoded again, the file may be deleted", aside, error)
