"""The documents of an index as other stores want them: some at a time, each with its vectors and what is known of it.

The order is that in which documents were added, so that an export that was interrupted finds its place again.

Shapes: B documents of a batch, n_i vectors of document i, d width.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.index import Index
from quiver.retrieval.index.segments import OpenSegment

MOST = 256
"""Documents of a batch, at most."""

# Numbers of a batch, at most, unless one document has more: as JSON about ten megabytes, a third of what a Qdrant server takes.
_NUMBERS = 1 << 19

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://quiver.invalid/documents")


@dataclass(frozen=True)
class Batch:
    """Some documents.

    Attributes:
        ids: Their ids, B.
        payloads: ``id``, and where the index keeps texts ``title``, ``text`` and ``metadata``, B.
        vectors: Of each the vectors that the index keeps, B arrays (n_i, d) float32; of a bi-encoder one each.
    """

    ids: list[str]
    payloads: list[dict[str, Any]]
    vectors: list[NDArray[np.float32]]

    def __len__(self) -> int:
        return len(self.ids)


def batches(index: Index) -> Iterator[Batch]:
    """All documents, deleted ones left out, as many at a time as can be held and sent."""
    most = max(1, _NUMBERS // index.manifest.model.dim)
    for segment in index.segments:
        rows = np.flatnonzero(segment.kept)
        ends = np.cumsum(segment.vectors.lengths[rows])
        first = 0
        while first < len(rows):
            held = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, held + most, side="right")))
            last = min(last, first + MOST)
            yield _batch(segment, rows[first:last])
            first = last


def _batch(segment: OpenSegment, rows: NDArray[np.int64]) -> Batch:
    vectors, lengths = segment.vectors.vectors(rows)
    parts = np.split(np.asarray(vectors, np.float32), np.cumsum(lengths)[:-1])
    ids = segment.documents.ids.strings.take(rows)
    texts = segment.documents.texts
    payloads: list[dict[str, Any]] = [{"id": key} for key in ids]
    if texts is not None:
        for payload, row in zip(payloads, rows.tolist(), strict=True):
            document = texts[row]
            payload |= {"title": document.title, "text": document.text, "metadata": dict(document.metadata or {})}
    return Batch(ids, payloads, parts)


def state_of(index: Index) -> str:
    """What tells this committed state of an index from every other: what of a store was written from it, and what is older."""
    manifest = index.manifest
    return f"{manifest.model.fingerprint[:16]}-{manifest.generation}-{manifest.created}"


def point_id(key: str) -> str:
    """The name of a document in a store whose points are named by UUIDs: the same for ever.

    Example:
        >>> point_id("d1") == point_id("d1") != point_id("d2")
        True
    """
    return str(uuid.uuid5(_NAMESPACE, key))


def metadata_text(payload: dict[str, Any]) -> str | None:
    """A payload's metadata as JSON, for stores whose columns have one type; None where it has none."""
    metadata = payload.get("metadata")
    return json.dumps(metadata, ensure_ascii=False, sort_keys=True) if metadata else None
