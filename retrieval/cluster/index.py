"""An index that is searched over shards, with the same hits and scores as in one process, to the last bit.

Each shard has replicas. A lost replica is no longer asked, and a new one is started in the background, again and again until one opens. A
slow replica becomes suspect: others are asked first, until it answers a health check or is declared lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster.shard import (
    PackedRequest,
    ShardHandle,
    ShardHits,
    Sharding,
    ShardLauncher,
    ShardLostError,
    ShardPlan,
    ShardSpec,
    plan_shards,
)
from quiver.retrieval.index.documents import Filter, FilterLike
from quiver.retrieval.index.engines import Preset, Setting
from quiver.retrieval.index.index import Index, PartHits, SearchOptions, SearchRequest, merged, open_manifest
from quiver.retrieval.index.store.reading import Layout, Manifest, newest_manifest, open_newest
from quiver.retrieval.records import Hits, Missing, ModelCard

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 60.0  # longest pause between attempts to start a replica, in seconds


@dataclass(frozen=True)
class Timeouts:
    """Time limits of a search over shards, in seconds.

    Attributes:
        attempt: Time for a replica to answer before another one is asked too.
        answer: Time for a shard to answer before the search continues without it; infinity waits until all its replicas are lost.
        query: Time that each further query of a search adds to both.
        alive: Time for a slow replica to answer a health check before it is declared lost.
        start: Time for a shard to open.
        restart: Pause before the second attempt to start a replica; it doubles with every attempt, up to a minute.
    """

    attempt: float = 2.0
    answer: float = 30.0
    query: float = 0.1
    alive: float = 10.0
    start: float = 10 * 60.0
    restart: float = 1.0


@dataclass(eq=False)
class Replica:
    """One replica of a shard.

    Attributes:
        handle: Handle of the shard.
        waiting: Number of unanswered searches.
        suspect: Whether it was slow and has not answered a health check since.
        lost: Whether it is lost.
    """

    handle: ShardHandle
    waiting: int = field(default=0)
    suspect: bool = field(default=False)
    lost: bool = field(default=False)


class ReplicaSet:
    """The replicas of one shard. Several threads may use it at once.

    Args:
        spec: The shard.
        launcher: Starts replicas.
        count: Number of replicas.
        timeouts: Time limits.
    """

    def __init__(self, spec: ShardSpec, launcher: ShardLauncher, count: int, timeouts: Timeouts) -> None:
        self.spec = spec
        self._launcher = launcher
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._replicas = [Replica(launcher.launch(spec)) for _ in range(count)]

    @property
    def alive(self) -> int:
        """Number of replicas that are not lost."""
        return len(self._replicas)

    @property
    def suspects(self) -> int:
        """Number of replicas that were slow and have not answered a health check since."""
        return sum(replica.suspect for replica in tuple(self._replicas))

    def wait(self) -> None:
        """Wait until all are open.

        Raises:
            FileNotFoundError: A file of the index is missing.
            InputError: The index cannot be opened on the machine of a replica, or not in time.
        """
        for replica in tuple(self._replicas):
            self._opened(replica.handle)

    def ask(self, message: Any, *, asked: Collection[Replica]) -> tuple[Replica, Future[ShardHits]] | None:
        """Send a search to the replica with the fewest unanswered searches, suspect ones last.

        Args:
            message: The search.
            asked: Replicas that have been asked already.

        Returns:
            The replica and the future of its answer; None if there is no other replica.
        """
        with self._lock:
            others = [replica for replica in self._replicas if replica not in asked]
            if not others:
                return None
            chosen = min(others, key=lambda replica: (replica.suspect, replica.waiting))
            chosen.waiting += 1
            # The next search takes another one of those with equally few searches.
            self._replicas.remove(chosen)
            self._replicas.append(chosen)
        answer = chosen.handle.search(message)
        answer.add_done_callback(lambda _: self._answered(chosen))
        return chosen, answer

    def has_other(self, asked: Collection[Replica]) -> bool:
        """Whether there is a replica that has not been asked yet and is not suspect."""
        with self._lock:
            return any(replica not in asked and not replica.suspect for replica in self._replicas)

    def lost(self, replica: Replica, reason: BaseException) -> None:
        """Declare a replica lost, and start another in the background. Repeated reports are ignored."""
        with self._lock:
            if replica.lost or self._closed.is_set():
                return
            replica.lost = True
            self._replicas.remove(replica)
        logger.warning("%s: lost a replica, %d left; starting another (%s)", self.spec, self.alive, reason)
        replica.handle.close()
        threading.Thread(target=self._replace, name="shard-restart", daemon=True).start()

    def suspect(self, replica: Replica) -> None:
        """Ask a slow replica after the others until it answers a health check; if it does not, it is lost."""
        with self._lock:
            if replica.suspect or replica.lost or self._closed.is_set():
                return
            replica.suspect = True
        threading.Thread(target=self._check, args=(replica,), name="shard-check", daemon=True).start()

    def close(self) -> None:
        """Close all replicas and start no more."""
        with self._lock:
            self._closed.set()
            replicas, self._replicas = self._replicas, []
        for replica in replicas:
            replica.handle.close()

    def _answered(self, replica: Replica) -> None:
        with self._lock:
            replica.waiting -= 1

    def _check(self, replica: Replica) -> None:
        try:
            replica.handle.alive().result(timeout=self._timeouts.alive)
        except (FutureTimeoutError, CancelledError, ShardLostError) as error:
            self.lost(
                replica, ShardLostError(f"neither the search nor a health check was answered within {self._timeouts.alive:g} s: {error!r}")
            )
        else:
            with self._lock:
                replica.suspect = False

    def _replace(self) -> None:
        pause = self._timeouts.restart
        while not self._closed.is_set():
            handle = None
            try:
                handle = self._launcher.launch(self.spec)
                self._opened(handle)
            except (OSError, ValueError, MemoryError, RuntimeError) as error:
                if handle is not None:
                    handle.close()
                logger.warning("%s: a replica could not be started, next attempt in %g s: %s", self.spec, pause, error)
                self._closed.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            with self._lock:
                closed = self._closed.is_set()
                if not closed:
                    self._replicas.append(Replica(handle))
            if closed:
                handle.close()
            else:
                logger.warning("%s: started a replica, %d running", self.spec, self.alive)
            return

    def _opened(self, handle: ShardHandle) -> None:
        try:
            handle.opened().result(timeout=self._timeouts.start)
        except FutureTimeoutError as error:
            raise InputError(
                f"{self.spec}: not opened within {self._timeouts.start:g} s; it needs {self.spec.bytes:,} bytes of free memory "
                "on a machine of the cluster (see ray status)"
            ) from error
        except (ShardLostError, CancelledError) as error:
            raise InputError(f"{self.spec}: the process ended while the shard was opened ({error})") from error


def scatter(shards: Sequence[ReplicaSet], message: Any, *, queries: int, timeouts: Timeouts) -> list[ShardHits | None]:
    """Search all shards: ask a replica of each, and another one where it does not answer in time.

    Args:
        shards: The shards.
        message: The search, as made by the launcher.
        queries: Number of queries in it.
        timeouts: Time limits.

    Returns:
        The answer of each shard, in order; None if no replica answered.

    Raises:
        Exception: An error that a shard raised: an invalid query, or a damaged file.
    """
    more = timeouts.query * max(0, queries - 1)
    begun = time.monotonic()
    asking = [_Asking(shard, message, attempt=timeouts.attempt + more, end=begun + timeouts.answer + more) for shard in shards]
    while waiting := [each for each in asking if not each.settled]:
        pending = [future for each in waiting for future in each.pending]
        until = min(each.wakes for each in waiting) - time.monotonic()
        wait(pending, None if until == float("inf") else max(0.0, until), FIRST_COMPLETED)
        for each in waiting:
            each.look(time.monotonic())
    return [each.answer for each in asking]


class _Asking:
    """Search of one shard.

    Attributes:
        answer: The answer.
        settled: Whether there is an answer, or there will be none.
        pending: Futures of answers -> replicas.
        wakes: Time of the next action without an answer.
    """

    def __init__(self, shard: ReplicaSet, message: Any, *, attempt: float, end: float) -> None:
        self.answer: ShardHits | None = None
        self.settled = False
        self.pending: dict[Future[ShardHits], Replica] = {}
        self.wakes = end
        self._shard, self._message = shard, message
        self._attempt, self._end = attempt, end
        self._asked: set[Replica] = set()
        self._ask()

    def look(self, now: float) -> None:
        """Take an answer, or ask another replica."""
        for future in [future for future in self.pending if future.done()]:
            replica = self.pending.pop(future)
            error = ShardLostError("the replica was closed") if future.cancelled() else future.exception()
            if error is None:
                self.answer, self.settled = future.result(), True
                return
            if not isinstance(error, ShardLostError):
                raise error
            self._shard.lost(replica, error)
            if not self.pending:
                self._ask()
        if self.settled or now < self.wakes:
            return
        for replica in self.pending.values():
            self._shard.suspect(replica)
        if now >= self._end:
            self.settled = True
        elif self._shard.has_other(self._asked):
            self._ask()
        else:
            self.wakes = self._end

    def _ask(self) -> None:
        chosen = self._shard.ask(self._message, asked=self._asked)
        if chosen is None:
            self.settled = not self.pending
            return
        replica, future = chosen
        self._asked.add(replica)
        self.pending[future] = replica
        self.wakes = min(self._end, time.monotonic() + self._attempt)


@dataclass(frozen=True)
class Gathered:
    """Hits of a search over shards, with durations.

    Attributes:
        hits: The hits.
        seconds: Duration of the whole search.
        shards: Duration of the search in each shard, in seconds; None for a shard that did not answer.
    """

    hits: Hits
    seconds: float
    shards: tuple[float | None, ...]

    @property
    def overhead(self) -> float:
        """Time beyond the search of the slowest shard, in seconds: sending, waiting and merging."""
        return self.seconds - max((seconds for seconds in self.shards if seconds is not None), default=0.0)


class Fleet:
    """The opened shards of one generation. They are closed together, after the last search over them.

    Args:
        whole: The whole index, mapped in this process but not searched: it checks requests, and has ids and texts.
        plan: Assignment of segments to shards.
        launcher: Starts shards.
        timeouts: Time limits.
        verify: Verify the checksum of each block when it is first read.

    Raises:
        FileNotFoundError: A file of the index is missing.
        InputError: A shard cannot be opened.
    """

    def __init__(self, whole: Index, plan: ShardPlan, launcher: ShardLauncher, *, timeouts: Timeouts, verify: bool) -> None:
        self.whole = whole
        self.plan = plan
        self._launcher = launcher
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._searches, self._retired = 0, False
        specs = [ShardSpec.of(whole, shard, verify=verify) for shard in plan.shards]
        self.shards: tuple[ReplicaSet, ...] = ()
        with ExitStack() as undo:
            undo.callback(self._close)
            for spec in specs:
                self.shards += (ReplicaSet(spec, launcher, plan.replicas, timeouts),)
            for shard in self.shards:
                shard.wait()
            undo.pop_all()

    def gather(self, request: SearchRequest, timeouts: Timeouts | None = None) -> Gathered:
        """Search all shards.

        Args:
            request: Result of ``whole.request``.
            timeouts: Time limits for this search; None for those of the fleet.

        Raises:
            ValueError: The scores of a query overflow float32.
        """
        begun = time.perf_counter()
        packed = PackedRequest.of(request)
        answers = scatter(self.shards, self._launcher.message(packed), queries=packed.queries, timeouts=timeouts or self._timeouts)
        found: list[list[PartHits]] = [[] for _ in range(packed.queries)]
        for answer in answers:
            if answer is not None:
                for parts, each in zip(found, answer.each(), strict=True):
                    parts.append(each)
        hits = merged(found, request.k)
        lost = [shard.spec.part for shard, answer in zip(self.shards, answers, strict=True) if answer is None]
        if lost:
            segments = tuple(name for part in lost for name in part.segments)
            hits = replace(hits, missing=Missing(segments, sum(part.documents for part in lost)))
        seconds = time.perf_counter() - begun
        return Gathered(hits, seconds, tuple(None if answer is None else answer.seconds for answer in answers))

    @contextmanager
    def searched(self) -> Iterator[bool]:
        """Keep the shards open for a ``with`` block; yields False if they are closed already."""
        with self._lock:
            open_for_searches = not self._retired
            self._searches += open_for_searches
        try:
            yield open_for_searches
        finally:
            if open_for_searches:
                with self._lock:
                    self._searches -= 1
                    last = self._retired and not self._searches
                if last:
                    self._close()

    def retire(self) -> None:
        """Accept no more searches, and close the shards after the last one."""
        with self._lock:
            first, self._retired = not self._retired, True
            idle = first and not self._searches
        if idle:
            self._close()

    def _close(self) -> None:
        for shard in self.shards:
            shard.close()


class ShardedIndex:
    """An index whose segments are distributed over shards; made by `open_sharded`.

    It serves one generation; `roll` switches to the newest. Close it with ``close`` or a ``with`` block. Thread-safe.
    """

    def __init__(self, path: Path, sharding: Sharding, launcher: ShardLauncher, *, timeouts: Timeouts, verify: bool) -> None:
        self._layout = Layout(path.resolve())
        self._sharding = sharding
        self._launcher = launcher
        self._timeouts = timeouts
        self._verify = verify
        self._changing, self._closed = threading.Lock(), False
        self._fleet = self._started()

    def __enter__(self) -> ShardedIndex:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.whole)

    @property
    def whole(self) -> Index:
        """The index in this process, for ids, texts and settings.

        Its files are memory-mapped. Searching it here would take the memory of all shards.
        """
        return self._fleet.whole

    @property
    def plan(self) -> ShardPlan:
        """Assignment of segments to shards."""
        return self._fleet.plan

    @property
    def kind(self) -> str:
        """Name of the engine."""
        return self.whole.kind

    @property
    def ids(self) -> Sequence[str]:
        """Document ids in the order of addition."""
        return self.whole.ids

    @property
    def nbytes(self) -> int:
        """Size of the searched data, in bytes, without replicas."""
        return self.whole.nbytes

    @property
    def parameters(self) -> Mapping[str, Setting]:
        """Parameters of the engine, for reports."""
        return self.whole.parameters

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of running replicas of each shard."""
        return tuple(shard.alive for shard in self._fleet.shards)

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
        """The k best documents of each query, as `quiver.retrieval.index.index.Index.search` finds them.

        Args:
            queries: See there.
            k: See there.
            timeouts: Time limits for this search; None for those of the index.
            filter: See there.
            effort: See there.
            target_recall: See there.

        Returns:
            The hits. If no replica of a shard answered, ``missing`` lists its segments, and the hits are those of the other shards.

        Raises:
            InputError: See there.
            ValueError: See there.
        """
        return self.gather(queries, k, SearchOptions(filter, effort, target_recall), timeouts=timeouts).hits

    def gather(self, queries: Any, k: int, options: SearchOptions | None = None, *, timeouts: Timeouts | None = None) -> Gathered:
        """Search as `search` does, and return durations too."""
        while True:
            fleet = self._fleet
            with fleet.searched() as kept:
                if kept:
                    request = fleet.whole.request(queries, k, options or SearchOptions())
                    return fleet.gather(request, timeouts)
            self._check_open()

    def roll(self) -> bool:
        """Switch to the newest generation without interrupting searches; the old one is closed after its last search.

        Until then the shards of both generations take memory.

        Returns:
            Whether there was a newer generation.

        Raises:
            InputError: The newest generation cannot be opened; the current one stays in use.
        """
        with self._changing:
            self._check_open()
            former = self._fleet
            if newest_manifest(self._layout).generation == former.whole.manifest.generation:
                return False
            self._fleet = self._started()
            former.retire()
            logger.info("%s: switched to generation %d", self._layout.root, self.whole.manifest.generation)
            return True

    def close(self) -> None:
        """Close the shards after the last search."""
        with self._changing:
            self._closed = True
            self._fleet.retire()

    def search_params_for(self, target_recall: float, k: int) -> Mapping[str, Setting]:
        """See `quiver.retrieval.index.index.Index.search_params_for`."""
        return self.whole.search_params_for(target_recall, k)

    def presets(self, k: int = 10) -> Mapping[Preset, Mapping[str, Setting]]:
        """See `quiver.retrieval.index.index.Index.presets`."""
        return self.whole.presets(k)

    def check_filter(self, filter: FilterLike) -> Filter | None:
        """See `quiver.retrieval.index.index.Index.check_filter`."""
        return self.whole.check_filter(filter)

    def check_model(self, card: ModelCard) -> None:
        """See `quiver.retrieval.index.index.Index.check_model`."""
        self.whole.check_model(card)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self._layout.root}: the shards were closed; open the index again")

    def _started(self) -> Fleet:
        def opened(manifest: Manifest) -> Fleet:
            whole = open_manifest(self._layout, manifest, verify=self._verify)
            plan = plan_shards(whole, self._sharding)
            return Fleet(whole, plan, self._launcher, timeouts=self._timeouts, verify=self._verify)

        return open_newest(self._layout, opened)


def open_sharded(
    path: Path | str, sharding: Sharding, launcher: ShardLauncher, *, timeouts: Timeouts | None = None, verify: bool = True
) -> ShardedIndex:
    """Open the newest generation of an index over shards.

    Args:
        path: Folder of the index; every shard opens it under the same path.
        sharding: Number or memory of shards, and replicas.
        launcher: Starts the shards, such as `quiver.retrieval.cluster.ray_backend.RayLauncher`.
        timeouts: Time limits; None for the defaults.
        verify: Verify the checksum of each block when it is first read.

    Raises:
        DamagedIndexError: A file is missing, cut short or changed (names it).
        InputError: The folder is not an index, it does not fit into the memory of the shards, or a shard could not be started.
    """
    return ShardedIndex(Path(path), sharding, launcher, timeouts=timeouts or Timeouts(), verify=verify)
