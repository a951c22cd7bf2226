"""One shard: some segments of one generation, opened and searched in a process of its own; requests, hits and handles."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster.plan import PlannedShard
from quiver.retrieval.index.documents import Filter
from quiver.retrieval.index.index import Index, NamedHits, SearchRequest, open_manifest
from quiver.retrieval.index.store.reading import Layout, Manifest
from quiver.retrieval.records import Hits, Missing

_ID_BYTES = 32  # approximate size of an id in a serialized filter


@dataclass(frozen=True)
class PackedRequest:
    """A `SearchRequest` in a few arrays: many small arrays would be slow to serialize.

    Shapes: Q queries, N vectors of all queries, d width.

    Attributes:
        vectors: (Q, d) for one vector per text; (N, d) for one per token, query after query.
        ends: End of the vectors of each query, (Q,); None for one vector per text.
        k: Number of hits per query.
        params: Search parameters in the form of the codec.
        filter: Condition on the documents.
    """

    vectors: NDArray[np.float32]
    ends: NDArray[np.int64] | None
    k: int
    params: Any
    filter: Filter | None

    @classmethod
    def of(cls, request: SearchRequest) -> PackedRequest:
        """Pack a request."""
        queries = request.queries
        if isinstance(queries, np.ndarray):
            return cls(queries, None, request.k, request.params, request.filter)
        vectors = np.concatenate(queries) if queries else np.zeros((0, 0), np.float32)
        ends = np.cumsum([len(query) for query in queries], dtype=np.int64)
        return cls(vectors, ends, request.k, request.params, request.filter)

    def request(self) -> SearchRequest:
        """Unpack the request; its queries are views."""
        queries = self.vectors if self.ends is None else np.split(self.vectors, self.ends[:-1]) if len(self.ends) else []
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
        dim = spec.manifest.model.dim
        query = np.ones((1, dim), np.float32)
        self._index.search(query if spec.manifest.model.kind == "dense" else [query], 10)

    def search(self, message: PackedRequest) -> ShardHits:
        """Search the segments of this shard.

        Raises:
            ValueError: A query makes scores that float32 cannot hold.
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
