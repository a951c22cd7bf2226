"""An index that is searched over shards, with the same hits and scores as in one process, to the last bit.

The largest segments are placed first, each in the shard with the least memory: no shard then takes more than 4/3 of the memory in an
optimal plan (Graham, Bounds on Multiprocessing Timing Anomalies, SIAM Journal on Applied Mathematics 1969). Each shard is a deployment of
Ray Serve, and those of a generation are one application, so that a search never sees two generations.
"""

from __future__ import annotations

import importlib
import logging
import socket
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np

from quiver.encoder.errors import InputError, first_line
from quiver.retrieval.cluster.ray_backend import connected_ray
from quiver.retrieval.index.documents import TEXTS_FILE, NamedHits, merged
from quiver.retrieval.index.engines import Setting
from quiver.retrieval.index.files import DIGEST, count_blocks
from quiver.retrieval.index.filters import FilterLike
from quiver.retrieval.index.index import IndexReader, SearchOptions, SearchRequest, open_manifest
from quiver.retrieval.index.store.reading import Layout, Manifest, newest_manifest, open_newest
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
    """A segment and its memory in a shard, in bytes: resident data and memory-mapped files without texts, and checksums of all files."""

    name: str
    bytes: int


class PlannedShard(NamedTuple):
    """One shard of a plan: names of its segments, in the order of the manifest, and memory of them and the codec, in bytes."""

    segments: tuple[str, ...]
    bytes: int


def plan_shards(index: IndexReader, sharding: Sharding) -> tuple[PlannedShard, ...]:
    """Distribute the segments of an open index: every segment is in one shard, and there are at most as many shards as segments.

    Raises:
        InputError: A segment, or the requested number of shards, needs more memory than allowed.
    """
    needs = []
    for entry, segment in zip(index.manifest.segments, index.segments, strict=True):
        mapped = sum(file.bytes for name, file in entry.files.items() if name != TEXTS_FILE)
        mapped += DIGEST * sum(count_blocks(file.bytes) for file in entry.files.values())
        needs.append(SegmentNeed(entry.name, segment.vectors.size.resident + mapped))
    shared = sum(file.bytes + DIGEST * count_blocks(file.bytes) for file in index.manifest.codec.files.values())
    return spread(needs, sharding, shared=shared, what=str(index.path))


def spread(needs: Sequence[SegmentNeed], sharding: Sharding, *, shared: int, what: str) -> tuple[PlannedShard, ...]:
    """Distribute segments over shards, each of which needs ``shared`` bytes in addition.

    Example:
        >>> needs = [SegmentNeed("a", 5), SegmentNeed("b", 4), SegmentNeed("c", 3), SegmentNeed("d", 3)]
        >>> [shard.segments for shard in spread(needs, Sharding(shards=2), shared=1, what="an index")]
        [('a', 'd'), ('b', 'c')]
        >>> [shard.bytes for shard in spread(needs, Sharding(memory=8), shared=1, what="an index")]
        [6, 5, 7]
    """
    if not needs:
        return ()
    memory, largest = sharding.memory, max(needs, key=lambda need: need.bytes)
    if memory is not None and largest.bytes + shared > memory:
        raise InputError(
            f"{what}: segment {largest.name} needs {largest.bytes + shared:,} bytes of memory, more than {memory:,} per shard; "
            "allow as much, or rebuild the index with less --memory, which makes smaller segments"
        )
    if sharding.shards is None:
        # One shard per segment always fits.
        fewest = max(1, -(-sum(need.bytes for need in needs) // max(1, (memory or 0) - shared)))
        tries = (_place_segments(needs, count, shared=shared) for count in range(fewest, len(needs) + 1))
        return next(shards for shards in tries if max(shard.bytes for shard in shards) <= (memory or 0))
    count = min(sharding.shards, len(needs))
    if count < sharding.shards:
        logger.warning("%s: the index has %d segments, so %d shards are used instead of %d", what, len(needs), count, sharding.shards)
    shards = _place_segments(needs, count, shared=shared)
    if memory is not None and (most := max(shard.bytes for shard in shards)) > memory:
        raise InputError(
            f"{what}: {count} shards need up to {most:,} bytes of memory each, more than {memory:,}; allow more memory or more shards"
        )
    return shards


def _place_segments(needs: Sequence[SegmentNeed], count: int, *, shared: int) -> tuple[PlannedShard, ...]:
    """Place the largest segment first, each in the shard with the least memory; ties go to the first shard."""
    taken, members = [shared] * count, [list[int]() for _ in range(count)]
    for position in sorted(range(len(needs)), key=lambda position: (-needs[position].bytes, position)):
        shard = min(range(count), key=lambda shard: (taken[shard], len(members[shard])))
        taken[shard] += needs[position].bytes
        members[shard].append(position)
    names = (tuple(needs[position].name for position in sorted(each)) for each in members)
    return tuple(map(PlannedShard, names, taken))


@dataclass(frozen=True)
class ShardSpec:
    """What a shard is opened with: its part of the manifest, which a later generation may remove, and its memory in bytes."""

    root: Path
    manifest: Manifest
    bytes: int
    verify: bool

    @classmethod
    def of(cls, index: IndexReader, shard: PlannedShard, *, verify: bool) -> ShardSpec:
        """Make the spec of a planned shard."""
        segments = tuple(entry for entry in index.manifest.segments if entry.name in shard.segments)
        return cls(index.path, replace(index.manifest, segments=segments), shard.bytes, verify)


class ShardNotOpenError(Exception):
    """A shard could not be opened; the argument is the error: a file is missing, or the index is damaged or not on this machine."""


class Shard:
    """An open shard, warmed up for its first query; thread-safe. In Ray Serve it is a deployment, and ``others`` are started with it.

    A shard that cannot be opened says why when it is searched, and is unhealthy after a time: Serve then starts another replica.
    """

    def __init__(self, spec: ShardSpec, others: Sequence[Any] = ()) -> None:
        del others
        self._begun, self._failure = time.monotonic(), None
        layout, model = Layout(spec.root), spec.manifest.model
        try:
            if not layout.format.is_file():
                raise InputError(f"{spec.root}: not an index on {socket.gethostname()}; every machine needs the index under the same path")
            self._index = open_manifest(layout, spec.manifest, verify=spec.verify)
            # The first search builds lists in memory and compiles kernels.
            query = np.ones((1, model.dim), np.float32)
            self._index.search([["word"]] if model.kind == "bm25" else query if model.kind == "dense" else [query], 10)
        except (OSError, ValueError) as error:
            self._failure = error

    def search(self, request: SearchRequest | None) -> Hits | None:
        """Search the segments of this shard; without a request, only tell whether it is open.

        Raises:
            ShardNotOpenError: It is not.
            ValueError: The scores of a query overflow float32.
        """
        if self._failure is not None:
            raise ShardNotOpenError(self._failure)
        return None if request is None else self._index.answer(request)

    def check_health(self) -> None:
        """Called by Serve."""
        if self._failure is not None and time.monotonic() - self._begun > _UNHEALTHY:
            raise self._failure


def merge_answers(answers: Sequence[Hits | None], specs: Sequence[ShardSpec], *, queries: int, k: int) -> Hits:
    """The k best hits of all shards for each query; what the shards without an answer have is missing."""
    there = [answer for answer in answers if answer is not None]
    hits = merged([[NamedHits(each.ids[query], each.scores[query]) for each in there] for query in range(queries)], k)
    lost = [spec.manifest for spec, answer in zip(specs, answers, strict=True) if answer is None]
    if lost:
        segments = tuple(entry.name for manifest in lost for entry in manifest.segments)
        hits = replace(hits, missing=Missing(segments, sum(manifest.documents for manifest in lost)))
    return hits


class ShardsClosedError(Exception):
    """The shards were closed while a search waited for them."""


class Shards(Protocol):
    """The opened shards of one generation, made of their specs, replicas per shard, and seconds for all of them to open; thread-safe."""

    def __init__(self, specs: Sequence[ShardSpec], replicas: int, seconds: float) -> None: ...

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of running replicas of each shard."""

    def search(self, request: SearchRequest, seconds: float) -> Sequence[Hits | None]:
        """The answer of each shard, in order; None where there was none in time. A `ShardsClosedError`, or the error of a shard."""

    def close(self) -> None:
        """End all shards after their searches."""


_PROCESS_BYTES = 450 << 20  # memory of a replica without the index: Python, torch, FAISS and compiled kernels
_INLINE_QUERIES = 16  # requests of more go through Ray's shared memory once; for smaller ones passing them with each call is faster
_SEARCHES = 4  # that a replica runs at the same time
_DRAIN = 120.0  # time for the searches of a closed generation to end, in seconds
_UNHEALTHY = 60.0  # time after which a replica that could not open its shard is replaced, in seconds
_NO_ANSWER = object()
_STATUS = 0.1  # interval between two looks at an application that starts, in seconds


class ServedShards:
    """Shards as an application of Ray Serve, which places replicas by the memory that each reserves.

    Raises:
        FileNotFoundError: A file of the index is missing.
        InputError: Ray is not installed or not connected, or a shard cannot be opened on its machine, or not in time.
    """

    def __init__(self, specs: Sequence[ShardSpec], replicas: int, seconds: float) -> None:
        self._ray = connected_ray()
        try:
            self._serve = importlib.import_module("ray.serve")
        except ImportError as error:
            raise InputError(f"Ray Serve is not installed ({error.name}); run: pip install 'quiver-retrieval[ray]'") from error
        self._specs, self._name, self._handles = specs, f"quiver-{uuid.uuid4().hex[:12]}", list[Any]()
        if not specs:
            return
        self._most = max(spec.bytes for spec in specs) + _PROCESS_BYTES
        if max((node["Resources"].get("memory", 0) for node in self._ray.nodes() if node["Alive"]), default=0) < self._most:
            logger.warning("%s: no machine of the cluster has %s bytes of memory; waiting for one", specs[0].root, f"{self._most:,}")
        options = {
            "num_replicas": replicas,
            "max_ongoing_requests": _SEARCHES,
            "health_check_period_s": 1.0,
            "graceful_shutdown_wait_loop_s": 0.1,
            "graceful_shutdown_timeout_s": _DRAIN,
            "logging_config": {"log_level": "ERROR", "enable_access_log": False},
        }
        deployments: list[Any] = []
        for number, spec in enumerate(specs):
            reserved = {"num_cpus": 0, "memory": spec.bytes + _PROCESS_BYTES}
            shard = self._serve.deployment(Shard).options(name=f"shard-{number}", ray_actor_options=reserved, **options)
            # An application has one deployment that others come with.
            deployments.append(shard.bind(spec, deployments[:]) if number == len(specs) - 1 else shard.bind(spec))
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # Serve tells each of its steps, here too
        self._serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        with ExitStack() as undo:
            undo.callback(self.close)  # also if the user interrupts
            application = self._serve.RunTarget(deployments[-1], self._name, route_prefix=None)
            self._serve.run_many([application], wait_for_applications_running=False)
            self._wait(time.monotonic() + seconds, seconds)
            undo.pop_all()

    def _wait(self, end: float, seconds: float) -> None:
        """Wait until all replicas run and one of each shard says that it is open."""
        while (status := self._serve.status().applications[self._name]).status not in ("RUNNING", "DEPLOY_FAILED", "UNHEALTHY"):
            if time.monotonic() > end:
                raise InputError(
                    f"{self._specs[0].root}: the shards were not opened within {seconds:g} s; a replica needs up to {self._most:,} bytes "
                    "of free memory on a machine of the cluster (see ray status)"
                )
            time.sleep(_STATUS)
        self._handles = [self._serve.get_deployment_handle(f"shard-{number}", self._name) for number in range(len(self._specs))]
        if status.status == "DEPLOY_FAILED" or _NO_ANSWER in self._ask(None, end):
            raise InputError(f"{self._specs[0].root}: a shard cannot be opened: {first_line(status.message or 'no replica answers')}")

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of running replicas of each shard."""
        found = self._serve.status().applications[self._name].deployments
        return tuple(found[f"shard-{number}"].replica_states.get("RUNNING", 0) for number in range(len(self._specs)))

    def search(self, request: SearchRequest, seconds: float) -> list[Hits | None]:
        """See `Shards`. A search whose replica is lost is sent to another one, or waits for the next one."""
        if not self._ray.is_initialized():  # otherwise Ray would start a cluster for the call
            raise ShardsClosedError
        message = request if len(request.queries) <= _INLINE_QUERIES else self._ray.put(request)
        return [None if answer is _NO_ANSWER else answer for answer in self._ask(message, time.monotonic() + seconds)]

    def _ask(self, message: Any, end: float) -> list[Any]:
        responses = [handle.search.remote(message) for handle in self._handles]
        return [self._answer(handle, response, message, end) for handle, response in zip(self._handles, responses, strict=True)]

    def _answer(self, handle: Any, response: Any, message: Any, end: float) -> Any:
        while True:
            try:
                return response.result(timeout_s=max(0.0, end - time.monotonic()))
            except (TimeoutError, FutureTimeoutError):
                response.cancel()
                return _NO_ANSWER
            except self._ray.exceptions.RayTaskError as error:
                cause = error.cause
                if not isinstance(cause, ShardNotOpenError) or message is None:
                    raise cause.args[0] if isinstance(cause, ShardNotOpenError) else cause from None
                time.sleep(_STATUS)
            except self._ray.exceptions.RayError as error:
                logger.warning("a replica of a shard was lost during a search, which is repeated (%s)", first_line(error))
            except self._serve.exceptions.RayServeException as error:
                raise ShardsClosedError from error
            response = handle.search.remote(message)

    def close(self) -> None:
        """See `Shards`."""
        if self._specs and self._ray.is_initialized():
            self._serve.delete(self._name)


@dataclass(frozen=True)
class Timeouts:
    """Time limits in seconds: ``answer`` for a shard to answer, ``query`` more for each further query, ``start`` for all shards to open.

    A lost replica may be replaced within the time for an answer.
    """

    answer: float = 30.0
    query: float = 0.1
    start: float = 10 * 60.0


class ShardedIndex:
    """An index whose segments are distributed over shards; made by `open_sharded`.

    It serves one generation; `roll` switches to the newest. Close it with ``close`` or a ``with`` block. Thread-safe.
    """

    def __init__(self, path: Path, sharding: Sharding, *, timeouts: Timeouts, verify: bool, start: type[Shards]) -> None:
        self._layout, self._sharding, self._timeouts = Layout(path.resolve()), sharding, timeouts
        self._verify, self._start = verify, start
        self._changing, self._closed = threading.Lock(), False
        self._serving = self._open_newest()

    def __enter__(self) -> ShardedIndex:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.whole)

    @property
    def whole(self) -> IndexReader:
        """The index in this process, for ids, texts and settings.

        Its files are memory-mapped. Searching it here would take the memory of all shards.
        """
        return self._serving.whole

    @property
    def plan(self) -> tuple[PlannedShard, ...]:
        """Assignment of segments to shards."""
        return self._serving.plan

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of running replicas of each shard."""
        return self._serving.shards.replicas

    def search(
        self,
        queries: Any,
        k: int,
        *,
        timeouts: Timeouts | None = None,
        filter: FilterLike = None,
        effort: str | Mapping[str, Setting] | None = None,
        target_recall: float | None = None,
    ) -> Hits:
        """The k best documents of each query, with the arguments and errors of `quiver.retrieval.index.index.Index.search`.

        ``timeouts`` are for this search; None for those of the index.

        Returns:
            The hits. If no replica of a shard answered, ``missing`` lists its segments, and the hits are those of the other shards.
        """
        options, limits = SearchOptions(filter, effort, target_recall), timeouts or self._timeouts
        while True:
            self._check_open()
            serving = self._serving
            request = serving.whole.request(queries, k, options)
            count = len(request.queries)
            try:
                answers = serving.shards.search(request, limits.answer + limits.query * max(0, count - 1))
            except ShardsClosedError as error:
                if serving is self._serving and not self._closed:  # not by `roll`
                    raise InputError(f"{self._layout.root}: the shards were stopped by another program; open the index again") from error
                continue
            return merge_answers(answers, serving.specs, queries=count, k=k)

    def roll(self) -> bool:
        """Switch to the newest generation without interrupting searches; the old one is closed after its last search.

        Until then the shards of both generations take memory. If the newest cannot be opened, the current one stays in use.

        Returns:
            Whether there was a newer generation.
        """
        with self._changing:
            self._check_open()
            former = self._serving
            if newest_manifest(self._layout).generation == former.whole.manifest.generation:
                return False
            self._serving = self._open_newest()
            former.shards.close()
            logger.info("%s: switched to generation %d", self._layout.root, self.whole.manifest.generation)
            return True

    def close(self) -> None:
        """Close the shards after the last search."""
        with self._changing:
            if not self._closed:
                self._closed = True
                self._serving.shards.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self._layout.root}: the shards were closed; open the index again")

    def _open_newest(self) -> _Serving:
        def opened(manifest: Manifest) -> _Serving:
            whole = open_manifest(self._layout, manifest, verify=self._verify)
            plan = plan_shards(whole, self._sharding)
            specs = [ShardSpec.of(whole, shard, verify=self._verify) for shard in plan]
            return _Serving(whole, plan, specs, self._start(specs, self._sharding.replicas, self._timeouts.start))

        return open_newest(self._layout, opened)


class _Serving(NamedTuple):
    """One generation: the whole index, mapped in this process to check requests and for ids and texts, and its shards."""

    whole: IndexReader
    plan: tuple[PlannedShard, ...]
    specs: Sequence[ShardSpec]
    shards: Shards


def open_sharded(
    path: Path | str, sharding: Sharding, *, timeouts: Timeouts | None = None, verify: bool = True, start: type[Shards] = ServedShards
) -> ShardedIndex:
    """Open the newest generation of an index over shards in the connected Ray cluster.

    Args:
        path: Folder of the index; every shard opens it under the same path.
        sharding: Number or memory of shards, and replicas.
        timeouts: Time limits; None for the defaults.
        verify: Verify the checksum of each block when it is first read.
        start: Starts the shards of a generation, from their specs, the number of replicas and the time to open.

    Raises:
        DamagedIndexError: A file is missing, cut short or changed (names it).
        InputError: Ray is not installed or not connected, the folder is not an index, it does not fit into the memory of the shards, or a
            shard could not be started.
    """
    return ShardedIndex(Path(path), sharding, timeouts=timeouts or Timeouts(), verify=verify, start=start)
