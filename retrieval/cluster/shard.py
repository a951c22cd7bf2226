"""Shards: the assignment of segments to them, and one shard, opened and searched in a process of its own; requests, hits and handles.

A shard is a list of segments, which are write-once. The largest segments are placed first, each in the shard with the least memory: no
shard then takes more than 4/3 of the memory in an optimal plan.

Source of the bound: Graham, Bounds on Multiprocessing Timing Anomalies, SIAM Journal on Applied Mathematics 1969.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.documents import Filter
from quiver.retrieval.index.files import DIGEST, count_blocks
from quiver.retrieval.index.index import Index, NamedHits, SearchRequest, open_manifest
from quiver.retrieval.index.store.reading import Layout, Manifest
from quiver.retrieval.index.strings import is_texts
from quiver.retrieval.index.words import WordQueries
from quiver.retrieval.records import Hits, Missing

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sharding:
    """How to distribute an index.

    Attributes:
        shards: Number of shards; None for as few as ``memory`` allows.
        memory: Memory for the index data per shard in bytes, in addition to the process (about 400 MB); None for no limit.
        replicas: Replicas per shard; with one, results lack its documents while a lost shard is restarted.

    Raises:
        ValueError: Neither shards nor memory is given, or a number is below 1.
    """

    shards: int | None = None
    memory: int | None = None
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.shards is None and self.memory is None:
            raise ValueError("pass shards or memory")
        for name, value in (("shards", self.shards), ("memory", self.memory), ("replicas", self.replicas)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")


class SegmentNeed(NamedTuple):
    """Memory of a segment in a shard, in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True)
class PlannedShard:
    """One shard of a plan.

    Attributes:
        segments: Names of its segments, in the order of the manifest.
        bytes: Memory of the segments and the codec.
    """

    segments: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class ShardPlan:
    """The shards of one generation; none if the index has no segments.

    Attributes:
        generation: Generation of the index.
        shards: The shards; every segment is in one of them.
        replicas: Replicas per shard.
    """

    generation: int
    shards: tuple[PlannedShard, ...]
    replicas: int


def plan_shards(index: Index, sharding: Sharding) -> ShardPlan:
    """Distribute the segments of an open index.

    If there are fewer segments than requested shards, there are fewer shards, and a warning is logged.

    Raises:
        InputError: A segment, or the requested number of shards, needs more memory than allowed.
    """
    shared = sum(file.bytes + DIGEST * count_blocks(file.bytes) for file in index.manifest.codec.files.values())
    shards = spread(segment_needs(index), sharding, shared=shared, what=str(index.path))
    return ShardPlan(index.manifest.generation, shards, sharding.replicas)


def segment_needs(index: Index) -> list[SegmentNeed]:
    """Memory of each segment: resident data and memory-mapped files, without texts."""
    needs = []
    for entry, segment in zip(index.manifest.segments, index.segments, strict=True):
        mapped = sum(file.bytes for name, file in entry.files.items() if not is_texts(name))
        mapped += DIGEST * sum(count_blocks(file.bytes) for file in entry.files.values())  # the checksums of all files
        needs.append(SegmentNeed(entry.name, segment.vectors.size.resident + mapped))
    return needs


def spread(needs: Sequence[SegmentNeed], sharding: Sharding, *, shared: int, what: str) -> tuple[PlannedShard, ...]:
    """Distribute segments over shards.

    Args:
        needs: Memory of each segment, in the order of the manifest.
        sharding: Number or memory of shards.
        shared: Additional memory of every shard, in bytes.
        what: Name of the index, for errors.

    Raises:
        InputError: See `plan_shards`.

    Example:
        >>> needs = [SegmentNeed("a", 5), SegmentNeed("b", 4), SegmentNeed("c", 3), SegmentNeed("d", 3)]
        >>> [shard.segments for shard in spread(needs, Sharding(shards=2), shared=1, what="an index")]
        [('a', 'd'), ('b', 'c')]
        >>> [shard.bytes for shard in spread(needs, Sharding(memory=8), shared=1, what="an index")]
        [6, 5, 7]
    """
    if not needs:
        return ()
    _check_segments(needs, sharding.memory, shared=shared, what=what)
    if sharding.shards is not None:
        count = min(sharding.shards, len(needs))
        if count < sharding.shards:
            logger.warning("%s: the index has %d segments, so %d shards are used instead of %d", what, len(needs), count, sharding.shards)
        shards = _placed(needs, count, shared=shared)
        if sharding.memory is not None and (most := max(shard.bytes for shard in shards)) > sharding.memory:
            raise InputError(
                f"{what}: {count} shards need up to {most:,} bytes of memory each, more than {sharding.memory:,}; "
                "allow more memory or more shards"
            )
        return shards
    memory = sharding.memory or 0
    # One shard per segment always fits: each segment was checked.
    fewest = max(1, -(-sum(need.bytes for need in needs) // max(1, memory - shared)))
    tries = (_placed(needs, count, shared=shared) for count in range(fewest, len(needs) + 1))
    return next(shards for shards in tries if max(shard.bytes for shard in shards) <= memory)


def _check_segments(needs: Sequence[SegmentNeed], memory: int | None, *, shared: int, what: str) -> None:
    largest = max(needs, key=lambda need: need.bytes)
    if memory is not None and largest.bytes + shared > memory:
        raise InputError(
            f"{what}: segment {largest.name} needs {largest.bytes + shared:,} bytes of memory, more than {memory:,} per shard; "
            "allow as much, or rebuild the index with less --memory, which makes smaller segments"
        )


def _placed(needs: Sequence[SegmentNeed], count: int, *, shared: int) -> tuple[PlannedShard, ...]:
    """Place the largest segment first, each in the shard with the least memory; ties go to the first shard."""
    taken, members = [0] * count, [list[int]() for _ in range(count)]
    for position in sorted(range(len(needs)), key=lambda position: (-needs[position].bytes, position)):
        shard = min(range(count), key=lambda shard: (taken[shard], len(members[shard])))
        taken[shard] += needs[position].bytes
        members[shard].append(position)
    named = [tuple(needs[position].name for position in sorted(each)) for each in members]
    return tuple(PlannedShard(names, shared + size) for names, size in zip(named, taken, strict=True))


_ID_BYTES = 32  # approximate size of an id in a serialized filter


@dataclass(frozen=True)
class PackedRequest:
    """A `SearchRequest` in a few arrays: many small arrays would be slow to serialize.

    Shapes: Q queries, N vectors of all queries, d width.

    Attributes:
        vectors: (Q, d) for one vector per text; (N, d) for one per token, query after query; the words of queries as they are.
        ends: End of the vectors of each query, (Q,); None for one vector per text.
        k: Number of hits per query.
        params: Search parameters in the form of the codec.
        filter: Condition on the documents.
    """

    vectors: NDArray[np.float32] | WordQueries
    ends: NDArray[np.int64] | None
    k: int
    params: Any
    filter: Filter | None

    @classmethod
    def of(cls, request: SearchRequest) -> PackedRequest:
        """Pack a request."""
        queries = request.queries
        if isinstance(queries, np.ndarray | WordQueries):
            return cls(queries, None, request.k, request.params, request.filter)
        vectors = np.concatenate(queries) if queries else np.zeros((0, 0), np.float32)
        ends = np.cumsum([len(query) for query in queries], dtype=np.int64)
        return cls(vectors, ends, request.k, request.params, request.filter)

    def request(self) -> SearchRequest:
        """Unpack the request; its queries are views."""
        queries: Any = self.vectors
        if self.ends is not None:
            queries = np.split(queries, self.ends[:-1]) if len(self.ends) else []
        return SearchRequest(queries, self.k, self.params, self.filter)

    @property
    def queries(self) -> int:
        """Number of queries Q."""
        return len(self.vectors if self.ends is None else self.ends)

    @property
    def nbytes(self) -> int:
        """Approximate serialized size in bytes."""
        ids = 0 if self.filter is None or self.filter.ids is None else len(self.filter.ids)
        return self.vectors.nbytes + _ID_BYTES * ids


@dataclass(frozen=True)
class ShardHits:
    """Hits of a shard, n for all Q queries.

    Attributes:
        ids: Document ids of all queries, (n,).
        scores: Scores, (n,).
        ends: End of the hits of each query, (Q,).
        seconds: Duration of the search.
    """

    ids: list[str]
    scores: NDArray[np.float32]
    ends: NDArray[np.int64]
    seconds: float = 0.0

    @classmethod
    def of(cls, hits: Hits) -> ShardHits:
        """Pack the hits of an index.

        Example:
            >>> packed = ShardHits.of(Hits([["b", "a"], ["c"]], [np.float32([2, 1]), np.float32([3])]))
            >>> packed.ids, packed.ends.tolist(), [each.ids for each in packed.each()]
            (['b', 'a', 'c'], [2, 3], [['b', 'a'], ['c']])
        """
        ids = [key for found in hits.ids for key in found]
        scores = np.concatenate([np.zeros(0, np.float32), *hits.scores])
        return cls(ids, scores, np.cumsum([len(found) for found in hits.ids], dtype=np.int64))

    def timed(self, seconds: float) -> ShardHits:
        """Return a copy with the duration of the search."""
        return replace(self, seconds=seconds)

    def each(self) -> Sequence[NamedHits]:
        """The hits of each query."""
        ends = self.ends.tolist()
        return [NamedHits(self.ids[begin:end], self.scores[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class ShardSpec:
    """Everything needed to open a shard, including the manifest, which a later generation may have removed.

    Attributes:
        root: Folder of the index; the same path on every machine.
        manifest: Manifest with the segments of this shard only.
        fields: Fields of the whole index -> types.
        bytes: Memory of the segments and the codec.
        verify: Verify the checksum of each block when it is first read.
    """

    root: Path
    manifest: Manifest
    fields: Mapping[str, tuple[str, ...]]
    bytes: int
    verify: bool

    @classmethod
    def of(cls, index: Index, shard: PlannedShard, *, verify: bool) -> ShardSpec:
        """Make the spec of a planned shard."""
        names = frozenset(shard.segments)
        segments = tuple(entry for entry in index.manifest.segments if entry.name in names)
        return cls(index.path, replace(index.manifest, segments=segments), dict(index.fields), shard.bytes, verify)

    @property
    def part(self) -> Missing:
        """Segments and documents that a search misses without this shard."""
        return Missing(tuple(entry.name for entry in self.manifest.segments), self.manifest.documents)

    def __str__(self) -> str:
        """Name of the shard in messages."""
        segments = self.manifest.segments
        return f"{self.root}: shard of {len(segments)} segments from {segments[0].name}, generation {self.manifest.generation}"


class Shard:
    """An open shard, warmed up for its first query; thread-safe.

    Args:
        spec: The shard.

    Raises:
        FileNotFoundError: A file is missing, or was removed by a later generation.
        InputError: The folder does not exist on this machine, or the index is damaged.
    """

    def __init__(self, spec: ShardSpec) -> None:
        layout = Layout(spec.root)
        if not layout.format.is_file():
            raise InputError(f"{spec.root}: not an index on {socket.gethostname()}; every machine needs the index under the same path")
        self._index = open_manifest(layout, spec.manifest, verify=spec.verify, fields=spec.fields)
        # The first search builds lists in memory and compiles kernels.
        model = spec.manifest.model
        if model.kind == "bm25":
            self._index.search([["word"]], 10)
        else:
            query = np.ones((1, model.dim), np.float32)
            self._index.search(query if model.kind == "dense" else [query], 10)

    def search(self, message: PackedRequest) -> ShardHits:
        """Search the segments of this shard.

        Raises:
            ValueError: The scores of a query overflow float32.
        """
        begun = time.perf_counter()
        found = ShardHits.of(self._index.answer(message.request()))
        return found.timed(time.perf_counter() - begun)


class ShardLostError(Exception):
    """The process or machine of a shard has ended or is unreachable. Another replica may answer the query."""


class ShardHandle(Protocol):
    """One replica of a shard. Its futures fail with `ShardLostError` if it is lost, otherwise with the error of the shard."""

    def opened(self) -> Future[None]:
        """Completes when the shard can be searched."""

    def alive(self) -> Future[None]:
        """Completes when the process answers a health check, also during a search."""

    def search(self, message: Any) -> Future[ShardHits]:
        """Search the shard.

        Args:
            message: Result of ``ShardLauncher.message``.
        """

    def close(self) -> None:
        """End the process; unanswered searches may fail."""


class ShardLauncher(Protocol):
    """Starts shards; thread-safe."""

    def message(self, request: PackedRequest) -> Any:
        """Prepare a request for sending, once for all shards."""

    def launch(self, spec: ShardSpec) -> ShardHandle:
        """Start a shard without waiting until it is open."""


class ThreadHandle:
    """A shard in a thread of this process.

    Args:
        spec: The shard.
        open_shard: Opens the shard.
    """

    def __init__(self, spec: ShardSpec, open_shard: Callable[[ShardSpec], Shard]) -> None:
        self._pool = ThreadPoolExecutor(1, "shard")
        self._shard = self._pool.submit(open_shard, spec)

    def opened(self) -> Future[None]:
        """See `ShardHandle`."""
        return self._pool.submit(self._wait)

    def alive(self) -> Future[None]:
        """See `ShardHandle`."""
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def search(self, message: PackedRequest) -> Future[ShardHits]:
        """See `ShardHandle`."""
        try:
            return self._pool.submit(lambda: self._shard.result().search(message))
        except RuntimeError as error:
            failed: Future[ShardHits] = Future()
            failed.set_exception(ShardLostError(f"the shard was closed ({error})"))
            return failed

    def close(self) -> None:
        """See `ShardHandle`."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _wait(self) -> None:
        self._shard.result()


class ThreadLauncher:
    """Starts shards in threads of this process, for experiments and tests.

    Args:
        open_shard: Opens a shard.
    """

    def __init__(self, open_shard: Callable[[ShardSpec], Shard] = Shard) -> None:
        self._open = open_shard

    def message(self, request: PackedRequest) -> PackedRequest:
        """See `ShardLauncher`."""
        return request

    def launch(self, spec: ShardSpec) -> ThreadHandle:
        """See `ShardLauncher`."""
        return ThreadHandle(spec, self._open)
