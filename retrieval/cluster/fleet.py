"""The shards of one generation, started together and let go together once the last search over them has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from quiver.retrieval.cluster.handles import ShardLauncher
from quiver.retrieval.cluster.messages import PackedRequest
from quiver.retrieval.cluster.plan import ShardPlan
from quiver.retrieval.cluster.replicas import ReplicaSet, Timeouts
from quiver.retrieval.cluster.scatter import scatter
from quiver.retrieval.cluster.shard import ShardSpec
from quiver.retrieval.index.index import Index, SearchRequest
from quiver.retrieval.index.segments import PartHits, merged
from quiver.retrieval.records import Hits, Missing


@dataclass(frozen=True)
class Gathered:
    """What a search over shards found, and where its time went.

    Attributes:
        hits: The hits.
        seconds: From the request to the hits.
        shards: How long each shard searched, in seconds; None for one that did not answer.
    """

    hits: Hits
    seconds: float
    shards: tuple[float | None, ...]

    @property
    def overhead(self) -> float:
        """Seconds beyond the slowest shard's own search: sending, waiting and merging."""
        return self.seconds - max((seconds for seconds in self.shards if seconds is not None), default=0.0)


class Fleet:
    """The shards of one generation, all opened.

    Args:
        whole: The index, all its segments mapped and none searched: it checks requests, and knows ids and texts.
        plan: Which segments go where.
        launcher: Starts shards.
        patience: How long is waited for them.
        verify: Whether shards compare each block of a file with its checksum when it is first read.

    Raises:
        FileNotFoundError: A file of the index is missing.
        InputError: A shard cannot be opened.
    """

    def __init__(self, whole: Index, plan: ShardPlan, launcher: ShardLauncher, *, patience: Timeouts, verify: bool) -> None:
        self.whole = whole
        self.plan = plan
        self._launcher = launcher
        self._patience = patience
        self._lock = threading.Lock()
        self._searches, self._retired = 0, False
        specs = [ShardSpec.of(whole, shard, verify=verify) for shard in plan.shards]
        self.shards: tuple[ReplicaSet, ...] = ()
        with ExitStack() as undo:
            undo.callback(self._close)
            for spec in specs:
                self.shards += (ReplicaSet(spec, launcher, plan.replicas, patience),)
            for shard in self.shards:
                shard.wait()
            undo.pop_all()

    def gather(self, request: SearchRequest, patience: Timeouts | None = None) -> Gathered:
        """Search all shards.

        Args:
            request: What ``whole.request`` gave.
            patience: Other limits for this search.

        Raises:
            ValueError: A query makes scores that float32 cannot hold.
        """
        begun = time.perf_counter()
        packed = PackedRequest.of(request)
        answers = scatter(self.shards, self._launcher.message(packed), queries=packed.queries, patience=patience or self._patience)
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
        """Keep the shards until the end of a ``with`` block; False where they have been let go already."""
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
        """Take no more searches, and let the shards go when the last one has ended."""
        with self._lock:
            first, self._retired = not self._retired, True
            idle = first and not self._searches
        if idle:
            self._close()

    def _close(self) -> None:
        for shard in self.shards:
            shard.close()
