"""Deleting documents of an index, compacting and measuring it; adding to it is `quiver.retrieval.index.build`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quiver.encoder.errors import InputError
from quiver.retrieval.index.build import committed, live_extent, remeasured, versions, without
from quiver.retrieval.index.calibration import HITS, QUERIES, calibrate
from quiver.retrieval.index.disk import REAL, Disk
from quiver.retrieval.index.encoded import Model
from quiver.retrieval.index.extents import groups
from quiver.retrieval.index.index import Index, open_index, open_manifest
from quiver.retrieval.index.options import DEFAULTS
from quiver.retrieval.index.segments import merge_segments
from quiver.retrieval.index.store.manifest import SegmentEntry
from quiver.retrieval.index.store.writing import StoreWriter, writing
from quiver.retrieval.models.pooling import comparable
from quiver.retrieval.records import DenseEncoding


def delete_documents(path: Path | str, ids: Sequence[str], *, wait: float = 0.0, disk: Disk = REAL) -> Index:
    """Delete documents: nobody finds them any more; the room they take is given back when the index is compacted.

    Args:
        path: The index.
        ids: Ids of its documents; one that is there twice is deleted once.
        wait: Seconds to wait for another writer to finish.
        disk: Takes all changes.

    Returns:
        The index without them.

    Raises:
        InputError: There is no such document; none is deleted then.
    """
    path = Path(path)
    with writing(path, wait=wait, disk=disk) as writer:
        before = committed(writer)
        index = open_manifest(writer.layout, before)
        wanted = list(dict.fromkeys(ids))
        missing = [key for key, place in zip(wanted, index.locate(wanted), strict=True) if place is None]
        if missing:
            others = f" (nor are {len(missing) - 1} others)" if len(missing) > 1 else ""
            raise InputError(f"{path}: document '{missing[0]}' is not in this index{others}; nothing was deleted")
        if wanted:
            changed = zip(index.segments, without(index, wanted), before.segments, strict=True)
            segments = [entry if after is former else writer.delete(entry, after.kept) for former, after, entry in changed]
            writer.commit(replace(before, operation="delete", versions=versions(), segments=tuple(segments)))
        writer.collect_garbage()
    return open_index(path)


def compact_index(path: Path | str, *, memory: int = DEFAULTS.memory, wait: float = 0.0, disk: Disk = REAL) -> Index:
    """Make as few segments as the memory allows, without the documents that are deleted; nothing is encoded or trained again.

    An index that was measured is measured again where it gets a larger segment than it had then.

    Args:
        path: The index.
        memory: Bytes that it may hold.
        wait: Seconds to wait for another writer to finish.
        disk: Takes all changes.

    Returns:
        The index; the one that was there if there is nothing to do.
    """
    path, begun = Path(path), time.monotonic()
    with writing(path, wait=wait, disk=disk) as writer:
        before = committed(writer)
        index = open_manifest(writer.layout, before)
        extents = [live_extent(segment, entry) for segment, entry in zip(index.segments, before.segments, strict=True)]
        segments: list[SegmentEntry] = []
        for run in groups(index.codec, extents, memory) if extents else ():
            segments += _compacted(writer, index, run)
        if tuple(segments) != before.segments:
            draft = replace(before, operation="compact", versions=versions(), segments=tuple(segments))
            opened = open_manifest(writer.layout, draft).segments
            writer.commit(remeasured(draft, index, opened, begun, memory=memory, progress=False))
        writer.collect_garbage()
    return open_index(path)


def calibrate_index(  # noqa: PLR0913 - the public entry: one option for each choice
    path: Path | str,
    model: Model | None = None,
    *,
    queries: Sequence[str] | None = None,
    count: int = QUERIES,
    ks: Sequence[int] = HITS,
    seed: int = 0,
    wait: float = 0.0,
    progress: bool = False,
    disk: Disk = REAL,
) -> Index:
    """Measure the recall and latency of an index, and keep what was measured in it: a new generation, of the same documents.

    Args:
        path: The index.
        model: The one that built the index; wanted with queries.
        queries: Texts of real queries, which tell more than those that are made of the index's own vectors where there are none.
        count: Queries that are searched, at most.
        ks: Numbers of hits; as for `quiver.retrieval.index.calibration.calibrate`.
        seed: Of what is chosen at random.
        wait: Seconds to wait for another writer to finish.
        progress: Show bars.
        disk: Takes all changes.

    Returns:
        The index; its ``calibration`` is what was measured.

    Raises:
        InputError: Another model built the index, or there is nothing to find.
        ValueError: Queries without a model, or ``count`` or ``ks`` is too small.
    """
    path = Path(path)
    with writing(path, wait=wait, disk=disk) as writer:
        before = committed(writer)
        index = open_manifest(writer.layout, before)
        vectors = None if queries is None else _encoded(index, model, queries, progress=progress)
        found = calibrate(index, queries=vectors, count=count, ks=ks, seed=seed, progress=progress)
        writer.commit(replace(before, operation="calibrate", versions=versions(), calibration=found.to_json()))
        writer.collect_garbage()
    return open_index(path)


def _encoded(index: Index, model: Model | None, queries: Sequence[str], *, progress: bool) -> Any:
    """The vectors of queries, as ``Index.search`` takes them."""
    if model is None:
        raise ValueError("queries want the model that built the index, to encode them")
    index.check_model(model.card)
    encoding = model.encode(queries, "query", progress=progress)
    return comparable(encoding.vectors, model.card) if isinstance(encoding, DenseEncoding) else encoding.vectors


def _compacted(writer: StoreWriter, index: Index, run: range) -> list[SegmentEntry]:
    """Some successive segments as one, or as none where all their documents are deleted."""
    chosen = [index.segments[number] for number in run]
    if not any(segment.kept.any() for segment in chosen):
        return []
    if len(chosen) == 1 and chosen[0].alive is None:
        return [index.manifest.segments[run[0]]]
    folder = writer.scratch("compact")
    merged = merge_segments(chosen, index.codec, folder, writer.disk)
    return [writer.add_segment(folder, merged.holds, documents=merged.documents, vectors=merged.vectors, tokens=merged.tokens)]
