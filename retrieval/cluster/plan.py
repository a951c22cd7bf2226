"""Assignment of segments to shards by their memory; deterministic.

A shard is a list of segments, which are write-once. The largest segments are placed first, each in the shard with the least memory: no
shard then takes more than 4/3 of the memory in an optimal plan.

Source of the bound: Graham, Bounds on Multiprocessing Timing Anomalies, SIAM Journal on Applied Mathematics 1969.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quiver.encoder.errors import InputError
from quiver.retrieval.index.documents.strings import is_texts
from quiver.retrieval.index.index import Index
from quiver.retrieval.index.mapped import DIGEST, count_blocks

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
    """Memory of a segment in a shard, in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True)
class PlannedShard:
    """One shard of a plan.

    Attributes:
        segments: Names of its segments, in the order of the manifest.
        bytes: Memory of the segments and the codec.
    """

    segments: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class ShardPlan:
    """The shards of one generation; none if the index has no segments.

    Attributes:
        generation: Generation of the index.
        shards: The shards; every segment is in one of them.
        replicas: Replicas per shard.
    """

    generation: int
    shards: tuple[PlannedShard, ...]
    replicas: int


def plan_shards(index: Index, sharding: Sharding) -> ShardPlan:
    """Distribute the segments of an open index.

    If there are fewer segments than requested shards, there are fewer shards, and a warning is logged.

    Raises:
        InputError: A segment, or the requested number of shards, needs more memory than allowed.
    """
    shared = sum(file.bytes + DIGEST * count_blocks(file.bytes) for file in index.manifest.codec.files.values())
    shards = spread(segment_needs(index), sharding, shared=shared, what=str(index.path))
    return ShardPlan(index.manifest.generation, shards, sharding.replicas)


def segment_needs(index: Index) -> list[SegmentNeed]:
    """Memory of each segment: resident data and memory-mapped files, without texts."""
    needs = []
    for entry, segment in zip(index.manifest.segments, index.segments, strict=True):
        mapped = sum(file.bytes for name, file in entry.files.items() if not is_texts(name))
        mapped += DIGEST * sum(count_blocks(file.bytes) for file in entry.files.values())  # the checksums of all files
        needs.append(SegmentNeed(entry.name, segment.vectors.size.resident + mapped))
    return needs


def spread(needs: Sequence[SegmentNeed], sharding: Sharding, *, shared: int, what: str) -> tuple[PlannedShard, ...]:
    """Distribute segments over shards.

    Args:
        needs: Memory of each segment, in the order of the manifest.
        sharding: Number or memory of shards.
        shared: Additional memory of every shard, in bytes.
        what: Name of the index, for errors.

    Raises:
        InputError: See `plan_shards`.

    Example:
        >>> needs = [SegmentNeed("a", 5), SegmentNeed("b", 4), SegmentNeed("c", 3), SegmentNeed("d", 3)]
        >>> [shard.segments for shard in spread(needs, Sharding(shards=2), shared=1, what="an index")]
        [('a', 'd'), ('b', 'c')]
        >>> [shard.bytes for shard in spread(needs, Sharding(memory=8), shared=1, what="an index")]
        [6, 5, 7]
    """
    if not needs:
        return ()
    _check_segments(needs, sharding.memory, shared=shared, what=what)
    if sharding.shards is not None:
        count = min(sharding.shards, len(needs))
        if count < sharding.shards:
            logger.warning("%s: the index has %d segments, so %d shards are used instead of %d", what, len(needs), count, sharding.shards)
        shards = _placed(needs, count, shared=shared)
        if sharding.memory is not None and (most := max(shard.bytes for shard in shards)) > sharding.memory:
            raise InputError(
                f"{what}: {count} shards need up to {most:,} bytes of memory each, more than {sharding.memory:,}; "
                "allow more memory or more shards"
            )
        return shards
    memory = sharding.memory or 0
    # One shard per segment always fits: each segment was checked.
    fewest = max(1, -(-sum(need.bytes for need in needs) // max(1, memory - shared)))
    tries = (_placed(needs, count, shared=shared) for count in range(fewest, len(needs) + 1))
    return next(shards for shards in tries if max(shard.bytes for shard in shards) <= memory)


def _check_segments(needs: Sequence[SegmentNeed], memory: int | None, *, shared: int, what: str) -> None:
    largest = max(needs, key=lambda need: need.bytes)
    if memory is not None and largest.bytes + shared > memory:
        raise InputError(
            f"{what}: segment {largest.name} needs {largest.bytes + shared:,} bytes of memory, more than {memory:,} per shard; "
            "allow as much, or rebuild the index with less --memory, which makes smaller segments"
        )


def _placed(needs: Sequence[SegmentNeed], count: int, *, shared: int) -> tuple[PlannedShard, ...]:
    """Place the largest segment first, each in the shard with the least memory; ties go to the first shard."""
    taken, members = [0] * count, [list[int]() for _ in range(count)]
    for place in sorted(range(len(needs)), key=lambda place: (-needs[place].bytes, place)):
        shard = min(range(count), key=lambda shard: (taken[shard], len(members[shard])))
        taken[shard] += needs[place].bytes
        members[shard].append(place)
    named = [tuple(needs[place].name for place in sorted(each)) for each in members]
    return tuple(PlannedShard(names, shared + size) for names, size in zip(named, taken, strict=True))
