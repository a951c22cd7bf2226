"""Plans by hand, against the best there is, and the errors that say how much is needed."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster.index import SegmentNeed, Sharding, plan_shards, spread
from quiver.retrieval.index import open_index


def needs(*sizes: int) -> list[SegmentNeed]:
    return [SegmentNeed(f"s{place}", size) for place, size in enumerate(sizes)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.integers(1, 4))
def test_every_segment_is_in_one_shard_and_none_is_much_fuller_than_it_must_be(sizes: list[int], count: int) -> None:
    given_needs = needs(*sizes)
    shards = spread(given_needs, Sharding(shards=count), shared=3, what="an index")
    assert sorted(name for shard in shards for name in shard.segments) == sorted(need.name for need in given_needs)
    assert len(shards) == min(count, len(sizes))
    assert all(shard.segments for shard in shards)
    places = {need.name: place for place, need in enumerate(given_needs)}
    for shard in shards:
        assert [*shard.segments] == sorted(shard.segments, key=places.__getitem__)
        assert shard.bytes == 3 + sum(sizes[places[name]] for name in shard.segments)
    number = len(shards)
    best = min(
        max(sum(size for size, there in zip(sizes, choice, strict=True) if there == shard) for shard in range(number))
        for choice in itertools.product(range(number), repeat=len(sizes))
    )
    assert max(shard.bytes for shard in shards) - 3 <= best * (4 / 3 - 1 / (3 * number)) + 1e-9
    assert shards == spread(given_needs, Sharding(shards=count), shared=3, what="an index")


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(50, 120))
def test_shards_fit_the_memory_and_are_about_as_few_as_possible(sizes: list[int], room: int) -> None:
    shards = spread(needs(*sizes), Sharding(memory=room + 5), shared=5, what="an index")
    assert max(shard.bytes for shard in shards) <= room + 5
    assert len(shards) >= -(-sum(sizes) // room)
    if len(shards) > 1:  # one less would not have been within the budget
        fewer = spread(needs(*sizes), Sharding(shards=len(shards) - 1), shared=5, what="an index")
        assert max(shard.bytes for shard in fewer) > room + 5 or len(shards) - 1 < -(-sum(sizes) // room)


def test_a_segment_that_does_not_fit_is_refused_with_its_size(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InputError, match=r"an index: segment s1 needs 1,010 bytes of memory, more than 1,009 per shard; allow"):
        spread(needs(5, 1000, 7), Sharding(memory=1009), shared=10, what="an index")
    assert len(spread(needs(5, 1000, 7), Sharding(memory=1010), shared=10, what="an index")) == 2
    with pytest.raises(InputError, match=r"2 shards need up to 600 bytes of memory each, more than 500; allow more memory or more"):
        spread(needs(300, 300, 300), Sharding(shards=2, memory=500), shared=0, what="an index")
    with caplog.at_level(logging.WARNING):
        assert len(spread(needs(1, 2), Sharding(shards=5), shared=0, what="an index")) == 2
    assert "an index: the index has 2 segments, so 2 shards are used instead of 5" in caplog.text
    assert spread([], Sharding(shards=5, memory=1), shared=10, what="an index") == ()
    with pytest.raises(ValueError, match="pass shards or memory"):
        Sharding(replicas=2)
    for name in ("shards", "memory", "replicas"):
        with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
            Sharding(**{"shards": 2, name: 0})


def test_memory_of_a_segment_is_its_files_and_resident_data(tmp_path: Path, build: Callable[..., Any]) -> None:
    for engine in ("exact-dense", "ivf-tokens"):
        index, sizes = open_index(build(tmp_path / engine, engine).path), dict[str, int]()
        for entry, segment in zip(index.manifest.segments, index.segments, strict=True):
            searched = [path for path in (index.path / "segments" / entry.name).iterdir() if path.name != "texts.arrow"]
            sizes[entry.name] = segment.vectors.size.resident + sum(path.stat().st_size for path in searched)
        codec = sum(path.stat().st_size for path in (index.path / "codec" / index.manifest.codec.name).iterdir())
        plan = plan_shards(index, Sharding(shards=2, replicas=3))
        assert [shard.bytes for shard in plan] == [codec + sum(sizes[name] for name in shard.segments) for shard in plan]
        most = max(sizes.values()) + codec
        with pytest.raises(InputError, match=re.escape(f"needs {most:,} bytes of memory")):
            plan_shards(index, Sharding(memory=most - 1))
        assert len(plan_shards(index, Sharding(memory=most))) >= 2
