"""Shards as actors of a real Ray cluster on this machine: the same hits, and actors that are killed, stopped and replaced."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster.index import ShardedIndex, Timeouts, open_sharded
from quiver.retrieval.cluster.ray_backend import RayCluster, RayLauncher
from quiver.retrieval.cluster.shard import Sharding, ShardSpec
from quiver.retrieval.index import DamagedIndexError, Filter, compact_index, delete_documents, open_index
from quiver.retrieval.index.engines import ENGINE_MODULES
from quiver.retrieval.records import Hits

# A machine that does other things must not look like a dead actor.
PATIENCE = Timeouts(attempt=60, answer=120, alive=60)


class Launcher(RayLauncher):
    """Remembers the actors of each shard."""

    def __init__(self) -> None:
        super().__init__()
        self.actors: dict[tuple[str, ...], list[Any]] = {}

    def launch(self, spec: ShardSpec) -> Any:
        handle = super().launch(spec)
        self.actors.setdefault(spec.part.segments, []).append(handle.actor)
        return handle

    def kill(self, segments: tuple[str, ...], which: int) -> None:
        import ray

        ray.kill(self.actors[segments][which], no_restart=True)


class Load:
    """Threads that search all the time.

    Attributes:
        searches: How many searches have ended.
        partial: How many of them were partial.
        failures: What went wrong.
    """

    def __init__(self, sharded: ShardedIndex, queries: Any, expected: Callable[[Hits], bool], threads: int = 2) -> None:
        self.searches, self.partial, self.failures = 0, 0, list[str]()
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._search, args=(sharded, queries, expected)) for _ in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def run_for(self, searches: int) -> None:
        enough, end = self.searches + searches, time.monotonic() + 120
        while self.searches < enough and not self.failures and time.monotonic() < end:
            time.sleep(0.005)

    def _search(self, sharded: ShardedIndex, queries: Any, expected: Callable[[Hits], bool]) -> None:
        while not self._stop.is_set():
            try:
                hits = sharded.search(queries, 10)
                problem = None if hits.partial or expected(hits) else "other hits"
            except Exception as error:
                problem = repr(error)
            with self._lock:
                self.searches += 1
                self.failures += [problem] if problem else []
                self.partial += problem is None and hits.partial


def say(what: str, load: Load) -> None:
    sys.stdout.write(f"\n  {what} under {load.searches} searches: {len(load.failures)} failed, {load.partial} partial\n")


def same(hits: Hits, expected: Hits) -> bool:
    scores = zip(hits.scores, expected.scores, strict=True)
    return [*map(list, hits.ids)] == [*map(list, expected.ids)] and all(ours.tobytes() == theirs.tobytes() for ours, theirs in scores)


def eventually(holds: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "has not come about"
        time.sleep(0.05)


def check_hits(sharded: ShardedIndex, built: Any, assert_same: Any, filters: Any, narrow: Any) -> int:
    index, queries, seen = open_index(built.path), built.queries(), 0
    many = built.queries([f"w{number % 20} w{number % 7}" for number in range(100)])  # large enough for Ray's shared memory
    seen += assert_same(sharded.search(many, 10), index.search(many, 10))
    for filter in filters.values():
        for k in (3, 1000):
            for effort in ("exact", "balanced", narrow[index.kind]):
                found = sharded.search(queries, k, filter=filter, effort=effort)
                seen += assert_same(found, index.search(queries, k, filter=filter, effort=effort))
        seen += assert_same(
            sharded.search(queries, 10, filter=filter, target_recall=0.9), index.search(queries, 10, filter=filter, target_recall=0.9)
        )
    return seen


@pytest.mark.slow
def test_the_same_hits_and_no_failed_query_when_an_actor_dies(
    cluster: None, tmp_path: Path, build: Any, assert_same: Any, filters: Any, narrow: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    built, launcher = build(tmp_path / "i", "ivf-tokens", measured=True), Launcher()
    queries, index = built.queries(), open_index(built.path)
    expected = index.search(queries, 10)
    with open_sharded(built.path, Sharding(shards=2, replicas=2), launcher, timeouts=PATIENCE) as sharded:
        assert sharded.replicas == (2, 2)
        assert check_hits(sharded, built, assert_same, filters, narrow) > 1000
        first, second = (shard.segments for shard in sharded.plan.shards)
        with Load(sharded, queries, lambda hits: same(hits, expected)) as load:
            load.run_for(50)
            launcher.kill(first, 0)
            load.run_for(50)
        eventually(lambda: sharded.replicas == (2, 2))  # it was started again
        with Load(sharded, queries, lambda hits: same(hits, expected)) as again:
            again.run_for(20)
            launcher.kill(first, 1)  # the one that had stood in
            launcher.kill(second, 0)
            again.run_for(50)
        with capsys.disabled():
            say("1 actor of 4 killed", load)
            say("2 of 4 killed, one of each shard", again)
        for each in (load, again):
            assert each.searches >= 50
            assert not each.failures
            assert not each.partial
        eventually(lambda: sharded.replicas == (2, 2))  # an actor that was still being started would escape the next kills
        # Without a replica: what the other shard has, and what is missing.
        for which in range(len(launcher.actors[second])):
            launcher.kill(second, which)
        hits = sharded.search(queries, 10)
        assert hits.missing is not None
        assert hits.partial
        assert hits.missing.segments == second
        names = [entry.name for entry in index.manifest.segments]
        there = [key for name, segment in zip(names, index.segments, strict=True) if name in first for key in segment.documents.ids.strings]
        assert hits.missing.documents == len(index) - sum(place is not None for place in index.locate(there))
        assert assert_same(hits, index.search(queries, 10, filter=Filter(ids=frozenset(there)), effort="exact")) > 10


def test_errors_of_a_ray_shard_are_raised_unchanged(cluster: None, tmp_path: Path, build: Any) -> None:
    built = build(tmp_path / "i")
    queries = np.full_like(built.queries(), 1e38)
    with open_sharded(built.path, Sharding(shards=1), RayLauncher(), timeouts=PATIENCE) as sharded:
        with pytest.raises(ValueError, match="do not fit into float32; the norms of the vectors are too large") as caught:
            sharded.search(queries, 3)
        with pytest.raises(ValueError, match=r".") as expected:
            open_index(built.path).search(queries, 3)
        assert (type(caught.value), str(caught.value)) == (type(expected.value), str(expected.value))
        assert sharded.replicas == (1,)
    file = next((built.path / "segments").glob("*/vectors.f32"))
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(
        DamagedIndexError, match=r"have changed since they were written; run quiver index repair to keep the intact documents$"
    ):
        open_sharded(built.path, Sharding(shards=1), RayLauncher(), timeouts=PATIENCE)


def test_launching_without_a_connection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("ray"), "is_initialized", lambda: False)
    with pytest.raises(InputError, match="not connected to a Ray cluster"):
        RayLauncher()


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", sorted(ENGINE_MODULES))
def test_every_engine(cluster: None, engine: str, tmp_path: Path, build: Any, assert_same: Any, filters: Any, narrow: Any) -> None:
    built = build(tmp_path / "i", engine, measured=True)
    with open_sharded(built.path, Sharding(shards=2), RayLauncher(), timeouts=PATIENCE) as sharded:
        assert check_hits(sharded, built, assert_same, filters, narrow) > 1000


@pytest.mark.exhaustive
def test_rolling_under_load_fails_no_query(
    cluster: None, tmp_path: Path, build: Any, fast: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    built = build(tmp_path / "i")
    queries = built.queries()
    expected = [open_index(built.path).search(queries, 10)]
    changes = [
        lambda: built.add(200, 9),
        lambda: delete_documents(built.path, ["d001", "d201"], disk=fast),
        lambda: compact_index(built.path, disk=fast),
    ]
    with open_sharded(built.path, Sharding(shards=2), RayLauncher(), timeouts=PATIENCE) as sharded:
        with Load(sharded, queries, lambda hits: any(same(hits, each) for each in expected)) as load:
            for change in changes:
                expected.append(change().search(queries, 10))
                load.run_for(30)
                assert sharded.roll()
                load.run_for(30)
                assert same(sharded.search(queries, 10), expected[-1])
        assert sharded.replicas == (1,)  # of one segment
    with capsys.disabled():
        say("3 generations rolled to", load)
    assert load.searches >= 180
    assert not load.failures
    assert not load.partial


class TwoSteps:
    """Has the second step of an item only when somebody has seen the first."""

    def __init__(self, seen: Path) -> None:
        self.seen = seen

    def open(self, advance: Callable[[int], None]) -> Callable[[int], int]:
        def work(item: int) -> int:
            advance(1)
            started = time.monotonic()
            while not self.seen.exists() and time.monotonic() < started + 30:
                time.sleep(0.01)
            advance(1)
            return item if self.seen.exists() else -1

        return work


def test_steps_of_an_actor_are_counted_while_it_works(cluster: None, tmp_path: Path) -> None:
    from ray import cloudpickle

    counted = list[int]()

    def advance(steps: int) -> None:
        counted.append(steps)
        (tmp_path / "seen").touch()

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # which the actors cannot import
    try:
        assert list(RayCluster(1).run(TwoSteps(tmp_path / "seen"), [5, 6], advance=advance)) == [(5, 5), (6, 6)]
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert sum(counted) == 4


@pytest.mark.slow
@pytest.mark.alone
def test_an_actor_that_is_stopped_and_one_whose_process_is_killed(
    cluster: None, tmp_path: Path, build: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray

    built, launcher = build(tmp_path / "i"), Launcher()
    queries = built.queries()
    expected = open_index(built.path).search(queries, 10)
    timeouts = Timeouts(attempt=0.5, answer=120, alive=3)
    with open_sharded(built.path, Sharding(shards=1, replicas=2), launcher, timeouts=timeouts) as sharded:
        ((actors),) = launcher.actors.values()
        processes = [ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) for actor in actors]
        with Load(sharded, queries, lambda hits: same(hits, expected)) as load:
            load.run_for(30)
            os.kill(processes[0], signal.SIGSTOP)  # hangs: neither answers nor ends
            load.run_for(30)
            eventually(lambda: len(actors) == 3 and sharded.replicas == (2,))
            os.kill(processes[1], signal.SIGKILL)
            load.run_for(30)
            eventually(lambda: len(actors) == 4 and sharded.replicas == (2,))
            load.run_for(30)
        with capsys.disabled():
            say("1 process stopped, 1 killed", load)
        assert not load.failures
        assert not load.partial
