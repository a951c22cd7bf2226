"""A search over shards is the search of the index in one process: ids, scores to the last bit, errors, what is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster.index import Shard, ShardedIndex, Sharding, ShardNotOpenError, ShardsClosedError, ShardSpec, open_sharded
from quiver.retrieval.index import Filter, compact_index, open_index
from quiver.retrieval.index.engines import ENGINE_MODULES
from quiver.retrieval.records import Query
from quiver.retrieval.search.retrievers import IndexSearcher
from tests.retrieval.cluster.conftest import FAST, FILTERS, NARROW, InProcess, assert_same

Build = Callable[..., Any]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcess, "opened", [])
    monkeypatch.setattr(InProcess, "before", staticmethod(lambda specs: None))


def opened(path: Path, sharding: Sharding) -> ShardedIndex:
    return open_sharded(path, sharding, start=InProcess)


@pytest.mark.parametrize("engine", sorted(ENGINE_MODULES))
def test_sharded_searches_equal_those_of_one_process(engine: str, tmp_path: Path, build: Build) -> None:
    measured = engine != "bm25"  # which is always exact, and has no recall to measure
    built = build(tmp_path / "i", engine, measured=measured)
    index, queries, seen = open_index(built.path), built.queries(), 0
    cases: list[tuple[Any, int, dict[str, Any]]] = [
        (filter, k, {"effort": effort})
        for filter in FILTERS.values()
        for k in (1, 7, 1000)
        for effort in ("exact", "balanced", "fast", NARROW[engine])
    ]
    cases += [(filter, 10, {"target_recall": target}) for filter in FILTERS.values() for target in (0.5, 0.9, 1.0) if measured]
    expected = [index.search(queries, k, filter=filter, **options) for filter, k, options in cases]
    for shards in (1, 2, 3, 4):
        with opened(built.path, Sharding(shards=shards)) as sharded:
            sizes = [len(shard.segments) for shard in sharded.plan]
            assert (len(sizes), sum(sizes), min(sizes) > 0) == (shards, 4, True)
            for (filter, k, options), each in zip(cases, expected, strict=True):
                hits = sharded.search(queries, k, filter=filter, **options)
                assert not hits.partial
                seen += assert_same(hits, each)
            assert_same(sharded.search(queries[:0], 3), index.search(queries[:0], 3))
            assert len(sharded) == len(index)
    assert seen > (9_000 if measured else 5_000)  # BM25 ranks only documents that share a word with the query


def raised(act: Callable[[], object]) -> tuple[type[BaseException], str]:
    with pytest.raises(ValueError, match=r".") as caught:
        act()
    return type(caught.value), str(caught.value)


def test_a_sharded_index_refuses_with_the_same_errors(tmp_path: Path, build: Build) -> None:
    built = build(tmp_path / "i")
    index, queries = open_index(built.path), built.queries()
    with opened(built.path, Sharding(shards=2)) as sharded:
        wrong: list[tuple[Any, int, dict[str, Any]]] = [
            (queries, 0, {}),
            (queries[:, :3], 3, {}),
            (np.full_like(queries, np.nan), 3, {}),
            (np.full_like(queries, 1e38), 3, {}),
            (queries, 3, {"filter": Filter.parse(["nowhere = 1"])}),
            (queries, 3, {"effort": "thorough"}),
            (queries, 3, {"effort": {"nprobe": 3}}),
            (queries, 3, {"target_recall": 2.0}),
            (queries, 3, {"target_recall": 0.9, "effort": "fast"}),
        ]
        for given, k, options in wrong:
            expected = raised(lambda given=given, k=k, options=options: index.search(given, k, **options))
            assert raised(lambda given=given, k=k, options=options: sharded.search(given, k, **options)) == expected
        InProcess.opened[-1].close()  # by another program
        with pytest.raises(InputError, match="the shards were stopped by another program; open the index again"):
            sharded.search(queries, 3)
    for act in (lambda: sharded.search(queries, 3), sharded.roll):
        with pytest.raises(ValueError, match="the shards were closed"):
            act()


def test_a_sharded_index_is_searched_with_a_model(tmp_path: Path, build: Build, other_word_sum: Any) -> None:
    built = build(tmp_path / "i")
    queries = [Query(f"q{number}", text) for number, text in enumerate(("w1 w2", "w3", "w9 w1"))]
    with opened(built.path, Sharding(shards=2)) as sharded:
        searcher = IndexSearcher(sharded.whole, built.model, sharded=sharded)
        found = searcher.search(queries, 5, filter=Filter.parse(["even"]))
        assert found.ids == IndexSearcher(open_index(built.path), built.model).search(queries, 5, filter=Filter.parse(["even"])).ids
        assert found.missing is None
        with pytest.raises(InputError, match="but the model given is word-sum-b"):
            IndexSearcher(sharded.whole, other_word_sum, sharded=sharded).search(queries, 5)
        InProcess.opened[-1].lost = 0
        lost = searcher.search(queries, 5).missing
        assert lost is not None
        assert (lost.segments, lost.documents) == (sharded.plan[0].segments, InProcess.opened[-1].documents[0])


def test_a_new_generation_is_switched_to_and_a_damaged_one_is_not(tmp_path: Path, build: Build) -> None:
    built, queries = build(tmp_path / "i"), build(tmp_path / "j").queries()
    with opened(built.path, Sharding(shards=2, replicas=2)) as sharded:
        assert not sharded.roll()
        for change in (lambda: built.add(200, 9), lambda: compact_index(built.path, disk=FAST)):
            index = change()
            assert sharded.roll()
            assert_same(sharded.search(queries, 20), index.search(queries, 20))
        assert [each.closed for each in InProcess.opened] == [1, 1, 0]
        assert sharded.replicas == (2,)  # of one segment

        def fail(specs: Sequence[ShardSpec]) -> None:
            raise InputError("damaged")

        InProcess.before = staticmethod(fail)
        expected = sharded.search(queries, 9)
        built.add(300, 5)
        with pytest.raises(InputError, match="damaged"):
            sharded.roll()
        assert_same(sharded.search(queries, 9), expected)
    assert [each.closed for each in InProcess.opened] == [1, 1, 1]


def test_a_search_that_meets_a_closed_generation_is_answered_by_the_next(tmp_path: Path, build: Build) -> None:
    built = build(tmp_path / "i")
    with opened(built.path, Sharding(shards=2)) as sharded:
        first, index = InProcess.opened[0], built.add(200, 9)

        def closed_meanwhile(request: Any, seconds: float) -> Any:
            sharded.roll()
            raise ShardsClosedError

        first.search = closed_meanwhile  # type: ignore[method-assign]
        assert_same(sharded.search(built.queries(), 20), index.search(built.queries(), 20))


def test_a_generation_removed_while_shards_open_is_retried(tmp_path: Path, build: Build) -> None:
    built = build(tmp_path / "i")

    def commit_twice(specs: Sequence[ShardSpec]) -> None:
        """What was to be opened is gone when it is opened."""
        InProcess.before = staticmethod(lambda specs: None)
        compact_index(built.path, disk=FAST)
        built.add(200, 5)
        built.add(210, 5)

    InProcess.before = staticmethod(commit_twice)
    with opened(built.path, Sharding(shards=1)) as sharded:
        assert sharded.whole.manifest.generation == open_index(built.path).manifest.generation
        assert_same(sharded.search(built.queries(), 9), open_index(built.path).search(built.queries(), 9))


def test_a_folder_missing_on_the_machine_of_a_shard_is_reported(tmp_path: Path, build: Build) -> None:
    index = open_index(build(tmp_path / "i").path)
    with opened(index.path, Sharding(shards=2)) as sharded:
        spec = ShardSpec.of(index, sharded.plan[0], verify=True)
    shard = Shard(replace(spec, root=tmp_path / "not mounted"))
    with pytest.raises(ShardNotOpenError, match=r"not mounted: not an index on .*; every machine needs the index under the same path"):
        shard.search(None)
