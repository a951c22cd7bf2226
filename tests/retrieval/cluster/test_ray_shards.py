"""Shards as deployments of a real Ray Serve on this machine: the same hits, and replicas that are killed and replaced."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster import WorkerError
from quiver.retrieval.cluster.index import ShardedIndex, Sharding, Timeouts, open_sharded
from quiver.retrieval.cluster.ray_backend import RayCluster, connected_ray
from quiver.retrieval.index import DamagedIndexError, Filter, compact_index, delete_documents, open_index
from quiver.retrieval.records import Hits
from tests.retrieval.cluster.conftest import FAST, assert_same

# A machine that does other things must not look like a dead replica.
PATIENCE = Timeouts(answer=120)


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


def same(hits: Hits, expected: Hits) -> bool:
    scores = zip(hits.scores, expected.scores, strict=True)
    return [*map(list, hits.ids)] == [*map(list, expected.ids)] and all(ours.tobytes() == theirs.tobytes() for ours, theirs in scores)


def eventually(holds: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "has not come about"
        time.sleep(0.05)


def replica_processes() -> dict[int, list[int]]:
    """Shard -> the processes of its running replicas."""
    found: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "cmdline").read_bytes().split(b"\0")[0].decode()
        except OSError:
            continue
        if title.startswith("ray::ServeReplica:quiver-"):
            found.setdefault(int(title.split("shard-")[1].split()[0].split(".")[0]), []).append(int(process.name))
    return found


@pytest.fixture
def opened() -> Iterator[Callable[..., ShardedIndex]]:
    """``opened(path, sharding)``, closed at the end."""
    indexes: list[ShardedIndex] = []

    def made(path: Path, sharding: Sharding, timeouts: Timeouts = PATIENCE) -> ShardedIndex:
        indexes.append(open_sharded(path, sharding, timeouts=timeouts))
        return indexes[-1]

    yield made
    for index in indexes:
        index.close()


@pytest.mark.slow
def test_the_same_hits_and_no_failed_query_when_replicas_are_killed(cluster: None, opened: Any, tmp_path: Path, build: Any) -> None:
    built = build(tmp_path / "i", "ivf-tokens")
    queries, index = built.queries(), open_index(built.path)
    expected = index.search(queries, 10)
    sharded = opened(built.path, Sharding(shards=2, replicas=2))
    assert sharded.replicas == (2, 2)
    many = built.queries([f"w{number % 20} w{number % 7}" for number in range(2500)])  # large enough for Ray's shared memory
    assert assert_same(sharded.search(many, 10), index.search(many, 10)) > 1000
    with Load(sharded, queries, lambda hits: same(hits, expected)) as load:
        load.run_for(50)
        before = replica_processes()
        os.kill(before[0][0], signal.SIGKILL)
        load.run_for(50)
        eventually(lambda: sorted(map(len, replica_processes().values())) == [2, 2] and sharded.replicas == (2, 2))
        assert before[0][0] not in replica_processes()[0]
        load.run_for(20)
        os.kill(before[0][1], signal.SIGKILL)  # the one that had stood in
        os.kill(before[1][0], signal.SIGKILL)
        load.run_for(50)
    assert load.searches >= 170
    assert not load.failures
    assert not load.partial
    # Without a replica: what the other shard has, and what is missing; then it is there again.
    for pid in replica_processes()[1]:
        os.kill(pid, signal.SIGKILL)
    hits = sharded.search(queries, 10, timeouts=Timeouts(answer=0.3, query=0))
    first, second = (shard.segments for shard in sharded.plan)
    assert hits.missing is not None
    assert hits.missing.segments == second
    names = [entry.name for entry in index.manifest.segments]
    there = [key for name, segment in zip(names, index.segments, strict=True) if name in first for key in segment.documents.ids.strings]
    assert hits.missing.documents == len(index) - sum(place is not None for place in index.locate(there))
    assert assert_same(hits, index.search(queries, 10, filter=Filter(ids=frozenset(there)), effort="exact")) > 10
    assert same(sharded.search(queries, 10), expected)


@pytest.mark.slow
def test_a_new_generation_is_switched_to_under_load(cluster: None, opened: Any, tmp_path: Path, build: Any) -> None:
    built = build(tmp_path / "i")
    queries = built.queries()
    expected = [open_index(built.path).search(queries, 10)]
    changes = [lambda: built.add(200, 9), lambda: compact_index(built.path, disk=FAST)]
    sharded = opened(built.path, Sharding(shards=2))
    assert not sharded.roll()
    with Load(sharded, queries, lambda hits: any(same(hits, each) for each in expected)) as load:
        for change in changes:
            expected.append(change().search(queries, 10))
            load.run_for(20)
            assert sharded.roll()
            load.run_for(20)
            assert same(sharded.search(queries, 10), expected[-1])
    assert sharded.replicas == (1,)  # of one segment
    assert not load.failures
    assert not load.partial
    # A generation that cannot be opened keeps the current one.
    file = next((built.path / "segments" / built.add(300, 9).manifest.segments[-1].name).glob("vectors.f32"))
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(DamagedIndexError, match=r"have changed since they were written; run quiver index repair"):
        sharded.roll()
    assert same(sharded.search(queries, 10), expected[-1])
    eventually(lambda: list(map(len, replica_processes().values())) == [1])
    delete_documents(built.path, list(open_index(built.path).ids), disk=FAST)
    compact_index(built.path, disk=FAST)
    assert sharded.roll()
    assert (sharded.plan, [*map(list, sharded.search(queries, 5).ids)]) == ((), [[]] * len(queries))


@pytest.mark.slow
def test_errors_of_a_shard_are_raised_unchanged(cluster: None, opened: Any, tmp_path: Path, build: Any) -> None:
    built = build(tmp_path / "i")
    queries = np.full_like(built.queries(), 1e38)
    sharded = opened(built.path, Sharding(shards=1))
    with pytest.raises(ValueError, match="do not fit into float32; the norms of the vectors are too large") as caught:
        sharded.search(queries, 3)
    with pytest.raises(ValueError, match=r".") as expected:
        open_index(built.path).search(queries, 3)
    assert (type(caught.value), str(caught.value)) == (type(expected.value), str(expected.value))
    sharded.close()
    with pytest.raises(ValueError, match="the shards were closed; open the index again"):
        sharded.search(built.queries(), 3)


def test_shards_without_a_connection_are_refused(tmp_path: Path, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("ray"), "is_initialized", lambda: False)
    with pytest.raises(InputError, match="not connected to a Ray cluster"):
        connected_ray()
    with pytest.raises(InputError, match="not connected to a Ray cluster"):
        open_sharded(build(tmp_path / "i").path, Sharding(shards=1))


class Steps:
    """Squares numbers in two steps; 7 takes its process along, as often as asked, 8 is a mistake, 9 a bug at first."""

    def __init__(self, folder: Path, deaths: int = 0) -> None:
        self.folder, self.deaths = folder, deaths

    def open(self, advance: Callable[[int], None]) -> Callable[[int], int]:
        (self.folder / f"opened-{os.getpid()}").touch()

        def work(item: int) -> int:
            advance(1)
            attempt = len(list(self.folder.glob(f"{item}-*")))
            (self.folder / f"{item}-{attempt}").touch()
            if item == 7 and attempt < self.deaths:
                os._exit(9)
            if item == 8:
                raise InputError("8 is a mistake")
            if item == 9 and attempt == 0:
                raise TypeError("a bug")
            advance(1)
            return item * item

        return work


@pytest.fixture
def by_value() -> Iterator[None]:
    """Tasks of this module, which processes of the cluster cannot import."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.slow
def test_tasks_count_their_steps_and_are_repeated(cluster: None, by_value: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counted = list[int]()
    assert sorted(RayCluster(1).run(Steps(tmp_path), [5, 6, 4], advance=counted.append)) == [(4, 16), (5, 25), (6, 36)]
    assert sum(counted) == 6
    assert len(list(tmp_path.glob("opened-*"))) == 1  # one process, which keeps what it has loaded
    assert dict(RayCluster(2).run(Steps(tmp_path, deaths=1), [1, 7, 9, 3], advance=counted.append)) == {1: 1, 3: 9, 7: 49, 9: 81}
    assert sum(counted) == 14
    assert caplog.text.count("a work item is repeated by another worker") == 2
    assert "TypeError: a bug" in caplog.text
    with pytest.raises(InputError, match="8 is a mistake"):
        list(RayCluster(1).run(Steps(tmp_path), [8]))
    assert len(list(tmp_path.glob("8-*"))) == 1
    with pytest.raises(WorkerError, match="failed 3 times, the last time with: "):
        list(RayCluster(1).run(Steps(tmp_path, deaths=9), [7]))
