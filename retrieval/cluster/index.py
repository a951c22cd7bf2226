"""An index that is searched over shards, with the same hits and scores as in one process, to the last bit."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from quiver.retrieval.cluster.plan import Sharding, ShardPlan, plan_shards
from quiver.retrieval.cluster.replicas import ReplicaSet, Timeouts, scatter
from quiver.retrieval.cluster.shard import PackedRequest, ShardLauncher, ShardSpec
from quiver.retrieval.index.documents import Filter, FilterLike
from quiver.retrieval.index.engines import Preset, Setting
from quiver.retrieval.index.index import Index, PartHits, SearchRequest, merged, open_manifest
from quiver.retrieval.index.store.reading import Layout, Manifest, newest_manifest, open_newest
from quiver.retrieval.records import Hits, Missing, ModelCard

logger = logging.getLogger(__name__)


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
            ValueError: A query makes scores that float32 cannot hold.
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
        filter: FilterLike = None,
        effort: str | Mapping[str, Setting] | None = None,
        target_recall: float | None = None,
        timeouts: Timeouts | None = None,
    ) -> Hits:
        """The k best documents of each query, as `quiver.retrieval.index.index.Index.search` finds them.

        Args:
            queries: See there.
            k: See there.
            filter: See there.
            effort: See there.
            target_recall: See there.
            timeouts: Time limits for this search; None for those of the index.

        Returns:
            The hits. If no replica of a shard answered, ``missing`` lists its segments, and the hits are those of the other shards.

        Raises:
            InputError: See there.
            ValueError: See there.
        """
        return self.gather(queries, k, filter=filter, effort=effort, target_recall=target_recall, timeouts=timeouts).hits

    def gather(
        self,
        queries: Any,
        k: int,
        *,
        filter: FilterLike = None,
        effort: str | Mapping[str, Setting] | None = None,
        target_recall: float | None = None,
        timeouts: Timeouts | None = None,
    ) -> Gathered:
        """Search as `search` does, and return durations too."""
        while True:
            fleet = self._fleet
            with fleet.searched() as kept:
                if kept:
                    request = fleet.whole.request(queries, k, filter=filter, effort=effort, target_recall=target_recall)
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
            raise ValueError(f"{self._layout.root}: the shards were closed")

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
