"""A search over shards is the search of the index in one process: ids, scores to the last bit, errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster.index import ShardedIndex, open_sharded
from quiver.retrieval.cluster.shard import Shard, Sharding, ShardLostError, ShardSpec, ThreadHandle, ThreadLauncher
from quiver.retrieval.index import DamagedIndexError, Filter, compact_index, delete_documents, open_index
from quiver.retrieval.index.engines import ENGINE_MODULES
from quiver.retrieval.records import Query
from quiver.retrieval.search.retrievers import IndexSearcher

Build = Callable[..., Any]


@pytest.mark.parametrize("engine", sorted(ENGINE_MODULES))
def test_sharded_searches_equal_those_of_one_process(
    engine: str, tmp_path: Path, build: Build, assert_same: Any, filters: Mapping[str, Any], narrow: Mapping[str, Any]
) -> None:
    measured = engine != "bm25"  # which is always exact, and has no recall to measure
    built = build(tmp_path / "i", engine, measured=measured)
    index, queries, seen = open_index(built.path), built.queries(), 0
    expected: dict[tuple[str, ...], Any] = {}

    def compare(hits: Any, name: str, k: int, **options: Any) -> int:
        """The hits are those of one process, which searches once for all numbers of shards."""
        key = (name, str(k), str(options))
        if key not in expected:
            expected[key] = index.search(queries, k, filter=filters[name], **options)
        return int(assert_same(hits, expected[key]))

    for shards in (1, 2, 3, 4):
        with open_sharded(built.path, Sharding(shards=shards), ThreadLauncher()) as sharded:
            assert [len(shard.segments) for shard in sharded.plan.shards] == {1: [4], 2: [1, 3], 3: [1, 1, 2], 4: [1] * 4}[shards]
            for name, filter in filters.items():
                for k in (1, 7, 1000):
                    for effort in ("exact", "balanced", "fast", narrow[engine]):
                        hits = sharded.search(queries, k, filter=filter, effort=effort)
                        assert not hits.partial
                        seen += compare(hits, name, k, effort=effort)
                for target in (0.5, 0.9, 1.0) if measured else ():
                    found = sharded.search(queries, 10, filter=filter, target_recall=target)
                    seen += compare(found, name, 10, target_recall=target)
            assert_same(sharded.search(queries[:0], 3), index.search(queries[:0], 3))
            if measured:
                assert sharded.search_params_for(0.9, 10) == index.search_params_for(0.9, 10)
            assert (len(sharded), list(sharded.ids), sharded.kind) == (len(index), list(index.ids), index.kind)
    assert seen > (10_000 if measured else 6_000)  # BM25 ranks only documents that share a word with the query


def raised(act: Callable[[], object]) -> tuple[type[BaseException], str]:
    with pytest.raises(ValueError, match=r".") as caught:
        act()
    return type(caught.value), str(caught.value)


def test_a_sharded_index_refuses_with_the_same_errors(tmp_path: Path, build: Build) -> None:
    built = build(tmp_path / "i")
    index, queries = open_index(built.path), built.queries()
    with open_sharded(built.path, Sharding(shards=2), ThreadLauncher()) as sharded:
        wrong: list[tuple[Any, int, dict[str, Any]]] = [
            (queries, 0, {}),
            (queries[:, :3], 3, {}),
            (np.full_like(queries, np.nan), 3, {}),
            (np.full_like(queries, 1e38), 3, {}),
            (queries, 3, {"filter": Filter.parse(["nowhere=1"])}),
            (queries, 3, {"effort": "thorough"}),
            (queries, 3, {"effort": {"nprobe": 3}}),
            (queries, 3, {"target_recall": 2.0}),
            (queries, 3, {"target_recall": 0.9, "effort": "fast"}),
        ]
        for given, k, options in wrong:
            expected = raised(lambda given=given, k=k, options=options: index.search(given, k, **options))
            assert raised(lambda given=given, k=k, options=options: sharded.search(given, k, **options)) == expected
        sharded.search(queries, 3)
    with pytest.raises(ValueError, match="the shards were closed"):
        sharded.search(queries, 3)
    with pytest.raises(ValueError, match="the shards were closed"):
        sharded.roll()


def test_a_sharded_index_is_searched_with_a_model(tmp_path: Path, build: Build, other_word_sum: Any) -> None:
    built = build(tmp_path / "i")
    queries = [Query(f"q{number}", text) for number, text in enumerate(("w1 w2", "w3", "w9 w1"))]
    with open_sharded(built.path, Sharding(shards=2), ThreadLauncher()) as sharded:
        found = IndexSearcher(sharded.whole, built.model, sharded=sharded).search(queries, 5, filter=Filter.parse(["even=true"]))
        assert found.ids == IndexSearcher(open_index(built.path), built.model).search(queries, 5, filter=Filter.parse(["even=true"])).ids
        assert found.missing is None
        with pytest.raises(InputError, match="but the model given is word-sum-b"):
            IndexSearcher(sharded.whole, other_word_sum, sharded=sharded).search(queries, 5)


class Launcher(ThreadLauncher):
    """Remembers what it has started."""

    def __init__(self) -> None:
        super().__init__(self.opened)
        self.handles: list[ThreadHandle] = []
        self.before: Callable[[ShardSpec], object] = lambda spec: None

    def opened(self, spec: ShardSpec) -> Shard:
        self.before(spec)
        return Shard(spec)

    def launch(self, spec: ShardSpec) -> ThreadHandle:
        self.handles.append(super().launch(spec))
        return self.handles[-1]


def closed(handle: ThreadHandle) -> bool:
    answer = handle.search(None)  # type: ignore[arg-type]
    try:
        return isinstance(answer.exception(), ShardLostError)
    except CancelledError:  # the executor was shut down before it came to the search
        return True


def eventually(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_rolling_to_a_new_generation_does_not_interrupt_searches(tmp_path: Path, build: Build, assert_same: Any, fast: Any) -> None:
    built, launcher = build(tmp_path / "i"), Launcher()
    queries = built.queries()
    expected = {open_index(built.path).manifest.generation: open_index(built.path).search(queries, 20)}
    failures: list[BaseException] = []
    counts = {"searches": 0}
    stop = threading.Event()
    generations = set()

    def searching(sharded: ShardedIndex) -> None:
        while not stop.is_set():
            try:
                hits = sharded.search(queries, 20)
                matching = [number for number, each in expected.items() if [*map(list, each.ids)] == [*map(list, hits.ids)]]
                assert matching
                assert not hits.partial
                generations.update(matching)
            except Exception as error:
                failures.append(error)
            counts["searches"] += 1

    changes = (
        lambda: built.add(200, 9),
        lambda: delete_documents(built.path, ["d001", "d060", "d201"], disk=fast),
        lambda: compact_index(built.path, disk=fast),
        lambda: built.add(300, 9),
    )
    with open_sharded(built.path, Sharding(shards=2, replicas=2), launcher) as sharded:
        assert not sharded.roll()
        threads = [threading.Thread(target=searching, args=(sharded,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for change in changes:
                index = change()
                expected[index.manifest.generation] = index.search(queries, 20)
                enough, former = counts["searches"] + 20, [*launcher.handles]
                assert sharded.roll()
                assert sharded.whole.manifest.generation == index.manifest.generation
                while counts["searches"] < enough and not failures:
                    stop.wait(0.01)
                assert_same(sharded.search(queries, 20), expected[index.manifest.generation])
                assert eventually(lambda former=former: all(map(closed, former)))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert not failures
    assert counts["searches"] >= 80
    assert len(generations) >= 4
    assert len(launcher.handles) == 4 + 4 + 4 + 2 + 4  # compacting leaves one segment, and so one shard
    assert all(map(closed, launcher.handles))


def test_a_generation_that_cannot_be_opened_keeps_the_current_one(tmp_path: Path, build: Build, assert_same: Any) -> None:
    built, launcher = build(tmp_path / "i"), Launcher()
    queries = built.queries()
    with open_sharded(built.path, Sharding(shards=2), launcher) as sharded:
        before = sharded.search(queries, 9)
        index = built.add(200, 5)
        file = next((built.path / "segments" / index.manifest.segments[-1].name).glob("vectors.f32"))
        file.write_bytes(bytes(file.stat().st_size))
        with pytest.raises(DamagedIndexError, match="have changed since they were written"):
            sharded.roll()
        assert_same(sharded.search(queries, 9), before)
        assert [closed(handle) for handle in launcher.handles] == [False, False, True, True]
    assert all(map(closed, launcher.handles))


def test_a_generation_removed_while_shards_open_is_retried(tmp_path: Path, build: Build, assert_same: Any, fast: Any) -> None:
    built, launcher = build(tmp_path / "i"), Launcher()

    def commit_twice(spec: ShardSpec) -> None:
        """What was to be opened is gone when it is opened."""
        launcher.before = lambda spec: None
        compact_index(built.path, disk=fast)
        built.add(200, 5)
        built.add(210, 5)

    launcher.before = commit_twice
    with open_sharded(built.path, Sharding(shards=1), launcher) as sharded:
        assert sharded.whole.manifest.generation == open_index(built.path).manifest.generation
        assert_same(sharded.search(built.queries(), 9), open_index(built.path).search(built.queries(), 9))
    assert len(launcher.handles) == 2


def test_an_empty_index_has_no_shards(tmp_path: Path, build: Build, assert_same: Any, fast: Any) -> None:
    built = build(tmp_path / "i")
    delete_documents(built.path, list(open_index(built.path).ids), disk=fast)
    index = compact_index(built.path, disk=fast)
    with open_sharded(built.path, Sharding(shards=2, memory=1), ThreadLauncher()) as sharded:
        assert sharded.plan.shards == ()
        assert assert_same(sharded.search(built.queries(), 5), index.search(built.queries(), 5)) == 0


def test_a_folder_missing_on_the_machine_of_a_shard_is_reported(tmp_path: Path, build: Build) -> None:
    built = build(tmp_path / "i")

    def elsewhere(spec: ShardSpec) -> Shard:
        from dataclasses import replace

        return Shard(replace(spec, root=tmp_path / "not mounted"))

    with pytest.raises(InputError, match=r"not mounted: not an index on .*; every machine needs the index under the same path"):
        open_sharded(built.path, Sharding(shards=2), ThreadLauncher(elsewhere))
