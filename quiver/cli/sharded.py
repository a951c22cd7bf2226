"""The options of ``quiver search`` that spread an index over Ray actors, and the index that they give."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from quiver.cli.output import say_error
from quiver.encoder import InputError
from quiver.retrieval.cluster.index import ShardedIndex, open_sharded
from quiver.retrieval.cluster.plan import Sharding
from quiver.retrieval.cluster.replicas import Timeouts
from quiver.retrieval.records import Missing
from quiver.retrieval.units import parse_size

logger = logging.getLogger(__name__)

ShardsOption = typer.Option("--shards", min=1, help="Spread the index over so many Ray actors (extra ray).")
ShardMemoryOption = typer.Option("--shard-memory", help="What it may take in one of them, such as 2GB; alone, as few as that allows.")
ReplicasOption = typer.Option("--replicas", min=1, help="How many times each shard is there; with 2 an actor may die.")
AddressOption = typer.Option("--address", help="The Ray cluster, such as auto or host:6379; by default one is started here.")

# Nobody waits at a screen for a file of queries: shards take the time they need, and one that dies is noticed all the same.
_PATIENCE = Timeouts(attempt=float("inf"), answer=float("inf"))


@dataclass(frozen=True)
class ShardChoices:
    """The options: None where they were not given."""

    shards: int | None
    memory: str | None
    replicas: int | None
    address: str | None


@contextmanager
def sharded(folder: Path, choices: ShardChoices, *, verify: bool) -> Iterator[ShardedIndex | None]:
    """The index over shards, for a ``with`` block; None where none of the options asks for shards.

    Raises:
        InputError: The options do not go together, Ray is not installed or not there, or the index does not fit or cannot be opened.
    """
    if choices.shards is None and choices.memory is None:
        if choices.replicas is not None or choices.address is not None:
            raise InputError("--replicas and --address are of shards; add --shards or --shard-memory")
        yield None
        return
    memory = None if choices.memory is None else parse_size(choices.memory)
    from quiver.retrieval.cluster.ray_shards import RayLauncher, connected

    spread = Sharding(choices.shards, memory, choices.replicas or 1)
    with connected(choices.address), open_sharded(folder, spread, RayLauncher(), patience=_PATIENCE, verify=verify) as index:
        yield index


def report_missing(missing: Missing | None, *, run: Path | None) -> None:
    """Say on standard error that shards were lost while they were searched.

    Raises:
        typer.Exit: A run was to be written: scores of a part of the documents would pass for those of all.
    """
    if missing is None:
        return
    lost = f"partial: {missing.documents:,} documents in {len(missing.segments)} segments were not searched, their shards were lost"
    if run is None:
        logger.warning("%s", lost)
        return
    say_error(f"{lost}; {run} is not written: run it again, or with --replicas 2")
    raise typer.Exit(1)
