"""One shard: some segments of one generation, opened and searched; whatever process or machine it is in."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster.messages import PackedRequest, ShardHits
from quiver.retrieval.cluster.plan import PlannedShard
from quiver.retrieval.index.index import Index, open_manifest
from quiver.retrieval.index.store.layout import Layout
from quiver.retrieval.index.store.manifest import Manifest
from quiver.retrieval.records import Missing


@dataclass(frozen=True)
class ShardSpec:
    """All that opening a shard takes; a manifest that was removed meanwhile is in it.

    Attributes:
        root: Folder of the index, by the same path on every machine.
        manifest: The committed state, with the segments of this shard alone.
        fields: What the whole index can be filtered by.
        bytes: What the segments and the codec take in memory.
        verify: Compare each block of a file with its checksum when it is first read.
    """

    root: Path
    manifest: Manifest
    fields: Mapping[str, tuple[str, ...]]
    bytes: int
    verify: bool

    @classmethod
    def of(cls, index: Index, shard: PlannedShard, *, verify: bool) -> ShardSpec:
        """The spec of a planned shard of an index."""
        names = frozenset(shard.segments)
        segments = tuple(entry for entry in index.manifest.segments if entry.name in names)
        return cls(index.path, replace(index.manifest, segments=segments), dict(index.fields), shard.bytes, verify)

    @property
    def part(self) -> Missing:
        """What an answer is missing without it."""
        return Missing(tuple(entry.name for entry in self.manifest.segments), self.manifest.documents)

    def __str__(self) -> str:
        """As messages name it."""
        segments = self.manifest.segments
        return f"{self.root}: shard of {len(segments)} segments from {segments[0].name}, generation {self.manifest.generation}"


class Shard:
    """An opened shard, ready for its first query. Several threads may search at once.

    Args:
        spec: What to open.

    Raises:
        FileNotFoundError: A file is missing, or was removed by a later generation.
        InputError: The folder is not there on this machine, or the index is damaged.
    """

    def __init__(self, spec: ShardSpec) -> None:
        layout = Layout(spec.root)
        if not layout.format.is_file():
            raise InputError(f"{spec.root}: no index on {socket.gethostname()}; a shard opens it by the same path on its own machine")
        self._index = open_manifest(layout, spec.manifest, verify=spec.verify, fields=spec.fields)
        # What is made at the first search, lists in memory and compiled loops, is made before there is a query that waits for it.
        dim = spec.manifest.model.dim
        query = np.ones((1, dim), np.float32)
        self._index.search(query if spec.manifest.model.kind == "dense" else [query], 10)

    def search(self, message: PackedRequest) -> ShardHits:
        """The hits of this shard's segments.

        Raises:
            ValueError: A query makes scores that float32 cannot hold.
        """
        begun = time.perf_counter()
        found = ShardHits.of(self._index.answer(message.request()))
        return found.timed(time.perf_counter() - begun)
