"""Which segments go into which shard: by what they take in memory, the same plan for the same index.

Segments are the unit: they are written once, so a shard is a list of names. The largest are placed first, each where least is: no shard
then takes more than 4/3 of what the best plan would need.

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
    """How an index is to be spread.

    Attributes:
        shards: How many shards; None for as few as the memory allows.
        memory: Bytes that the index's data may take in one shard, beside the process itself (some 400 MB); None for any number.
        replicas: How many times each shard is there; with one, its documents are missing from the answers while it is started again.

    Raises:
        ValueError: Neither shards nor memory is given, or a number is below 1.
    """

    shards: int | None = None
    memory: int | None = None
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.shards is None and self.memory is None:
            raise ValueError("give the number of shards, or the memory of one")
        for name, value in (("shards", self.shards), ("memory", self.memory), ("replicas", self.replicas)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")


class SegmentNeed(NamedTuple):
    """What a segment takes in the memory of a shard: its name, and bytes."""

    name: str
    bytes: int


@dataclass(frozen=True)
class PlannedShard:
    """One shard.

    Attributes:
        segments: Names of its segments, in the order of the manifest.
        bytes: What they and the codec take in memory.
    """

    segments: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class ShardPlan:
    """The shards of one generation; none where the index has no segments.

    Attributes:
        generation: Of the index.
        shards: Every segment is in one of them.
        replicas: How many times each is there.
    """

    generation: int
    shards: tuple[PlannedShard, ...]
    replicas: int


def plan_shards(index: Index, sharding: Sharding) -> ShardPlan:
    """Spread the segments of an index, which is opened but need not have been searched.

    Fewer shards than were asked for are planned where there are fewer segments, and a warning says so.

    Raises:
        InputError: A segment, or the number of shards asked for, needs more memory than there is; says how much.
    """
    shared = sum(file.bytes + DIGEST * count_blocks(file.bytes) for file in index.manifest.codec.files.values())
    shards = spread(segment_needs(index), sharding, shared=shared, what=str(index.path))
    return ShardPlan(index.manifest.generation, shards, sharding.replicas)


def segment_needs(index: Index) -> list[SegmentNeed]:
    """What each segment takes: what a search makes in memory, and the files it reads, which are mapped; texts are left on the disk."""
    needs = []
    for entry, segment in zip(index.manifest.segments, index.segments, strict=True):
        mapped = sum(file.bytes for name, file in entry.files.items() if not is_texts(name))
        mapped += DIGEST * sum(count_blocks(file.bytes) for file in entry.files.values())  # the checksums of all files
        needs.append(SegmentNeed(entry.name, segment.vectors.size.resident + mapped))
    return needs


def spread(needs: Sequence[SegmentNeed], sharding: Sharding, *, shared: int, what: str) -> tuple[PlannedShard, ...]:
    """Spread segments over shards.

    Args:
        needs: What each segment takes, in the order of the manifest.
        sharding: How they are to be spread.
        shared: Bytes that every shard takes beside them.
        what: The index, for errors.

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
            logger.warning("%s: has %d segments, so there are %d shards instead of %d", what, len(needs), count, sharding.shards)
        shards = _placed(needs, count, shared=shared)
        if sharding.memory is not None and (most := max(shard.bytes for shard in shards)) > sharding.memory:
            raise InputError(
                f"{what}: {count} shards need up to {most:,} bytes of memory each, and may take {sharding.memory:,}; "
                "allow more memory, or more shards"
            )
        return shards
    memory = sharding.memory or 0
    # A shard for each segment always does: each was found to fit.
    fewest = max(1, -(-sum(need.bytes for need in needs) // max(1, memory - shared)))
    tries = (_placed(needs, count, shared=shared) for count in range(fewest, len(needs) + 1))
    return next(shards for shards in tries if max(shard.bytes for shard in shards) <= memory)


def _check_segments(needs: Sequence[SegmentNeed], memory: int | None, *, shared: int, what: str) -> None:
    largest = max(needs, key=lambda need: need.bytes)
    if memory is not None and largest.bytes + shared > memory:
        raise InputError(
            f"{what}: segment {largest.name} needs {largest.bytes + shared:,} bytes of memory in one shard, which may take {memory:,}; "
            "allow as much, or build the index again with less --memory, which makes smaller segments"
        )


def _placed(needs: Sequence[SegmentNeed], count: int, *, shared: int) -> tuple[PlannedShard, ...]:
    """So many shards: the largest segment first, each where least is; ties go to the first."""
    taken, members = [0] * count, [list[int]() for _ in range(count)]
    for place in sorted(range(len(needs)), key=lambda place: (-needs[place].bytes, place)):
        shard = min(range(count), key=lambda shard: (taken[shard], len(members[shard])))
        taken[shard] += needs[place].bytes
        members[shard].append(place)
    named = [tuple(needs[place].name for place in sorted(each)) for each in members]
    return tuple(PlannedShard(names, shared + size) for names, size in zip(named, taken, strict=True))
