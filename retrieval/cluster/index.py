"""An index that is searched over shards: opened like one, asked like one, with the same hits and scores to the last bit.

What was opened is one generation; `ShardedIndex.roll` opens the newest one beside it, and then the searches go there.

Shapes: Q queries, k hits a query.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from quiver.retrieval.cluster.fleet import Fleet, Gathered
from quiver.retrieval.cluster.handles import ShardLauncher
from quiver.retrieval.cluster.plan import Sharding, ShardPlan, plan_shards
from quiver.retrieval.cluster.replicas import Timeouts
from quiver.retrieval.index.documents.metadata import Filter, FilterLike
from quiver.retrieval.index.engines import Preset, Setting
from quiver.retrieval.index.index import Index, open_manifest
from quiver.retrieval.index.store.layout import Layout
from quiver.retrieval.index.store.manifest import Manifest
from quiver.retrieval.index.store.reading import newest_manifest, open_newest
from quiver.retrieval.records import Hits, ModelCard

logger = logging.getLogger(__name__)


class ShardedIndex:
    """What `open_sharded` gives; it is closed by ``close``, or at the end of a ``with`` block. Several threads may search at once."""

    def __init__(self, path: Path, sharding: Sharding, launcher: ShardLauncher, *, patience: Timeouts, verify: bool) -> None:
        self._layout = Layout(path.resolve())
        self._sharding = sharding
        self._launcher = launcher
        self._patience = patience
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
        """The generation that is searched, as an index of this process, for ids, texts and settings.

        Its files are mapped; to search it here would take the memory that the shards are there for.
        """
        return self._fleet.whole

    @property
    def plan(self) -> ShardPlan:
        """Which segments are in which shard."""
        return self._fleet.plan

    @property
    def kind(self) -> str:
        """Name of the engine."""
        return self.whole.kind

    @property
    def ids(self) -> Sequence[str]:
        """Document ids in the order they were added."""
        return self.whole.ids

    @property
    def nbytes(self) -> int:
        """Size of what is searched, in all shards, each counted once."""
        return self.whole.nbytes

    @property
    def parameters(self) -> Mapping[str, Setting]:
        """What a report says beside the kind."""
        return self.whole.parameters

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many replicas of each shard there are now."""
        return tuple(shard.alive for shard in self._fleet.shards)

    def search(
        self,
        queries: Any,
        k: int,
        *,
        filter: FilterLike = None,
        effort: str | Mapping[str, Setting] | None = None,
        target_recall: float | None = None,
        patience: Timeouts | None = None,
    ) -> Hits:
        """The k best documents of each query, as `quiver.retrieval.index.index.Index.search` finds them.

        Args:
            queries: See there.
            k: See there.
            filter: See there.
            effort: See there.
            target_recall: See there.
            patience: Other limits of time for this search.

        Returns:
            The hits; where no replica of a shard answered, ``missing`` says what was not asked, and the hits are the best of the others.

        Raises:
            InputError: See there.
            ValueError: See there.
        """
        return self.gather(queries, k, filter=filter, effort=effort, target_recall=target_recall, patience=patience).hits

    def gather(
        self,
        queries: Any,
        k: int,
        *,
        filter: FilterLike = None,
        effort: str | Mapping[str, Setting] | None = None,
        target_recall: float | None = None,
        patience: Timeouts | None = None,
    ) -> Gathered:
        """`search`, and where its time went."""
        while True:
            fleet = self._fleet
            with fleet.searched() as kept:
                if kept:
                    request = fleet.whole.request(queries, k, filter=filter, effort=effort, target_recall=target_recall)
                    return fleet.gather(request, patience)
            self._check_open()

    def roll(self) -> bool:
        """Open the newest generation, and let go of the former once its last search has ended; no search waits or fails meanwhile.

        For that time the shards of both take memory.

        Returns:
            Whether there was a newer one.

        Raises:
            InputError: The newest cannot be opened; the former is searched as before.
        """
        with self._changing:
            self._check_open()
            former = self._fleet
            if newest_manifest(self._layout).generation == former.whole.manifest.generation:
                return False
            self._fleet = self._started()
            former.retire()
            logger.info("%s: now of generation %d", self._layout.root, self.whole.manifest.generation)
            return True

    def close(self) -> None:
        """Let the shards go once the last search has ended."""
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
            return Fleet(whole, plan, self._launcher, patience=self._patience, verify=self._verify)

        return open_newest(self._layout, opened)


def open_sharded(
    path: Path | str, sharding: Sharding, launcher: ShardLauncher, *, patience: Timeouts | None = None, verify: bool = True
) -> ShardedIndex:
    """Open an index over shards, at its newest committed state.

    Args:
        path: The folder, which every shard opens by the same path.
        sharding: How its segments are spread.
        launcher: Starts the shards, such as `quiver.retrieval.cluster.ray_shards.RayLauncher`.
        patience: Limits of time.
        verify: Shards compare each block of a file with its checksum when it is first read.

    Raises:
        DamagedIndexError: A file is missing, cut short or changed (names it).
        InputError: Not an index, it does not fit into the memory of the shards, or they could not be started.
    """
    return ShardedIndex(Path(path), sharding, launcher, patience=patience or Timeouts(), verify=verify)
