"""How large segments are, and which of them can be merged into one within the memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from retrieval.indexes.documents.table import DESCRIBED_COPIES, DOCUMENT_BYTES
from retrieval.indexes.engines import AnyCodec

FAN = 8
"""Segments that a merge of the newest ones waits for."""


class Extent(NamedTuple):
    """How large a segment is.

    Attributes:
        documents: Number of documents.
        vectors: Number of their vectors.
        described: Bytes of the files of their ids and metadata.
    """

    documents: int
    vectors: int
    described: int = 0

    def with_more(self, other: Extent) -> Extent:
        """Both together."""
        return Extent(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def groups(codec: AnyCodec, extents: Sequence[Extent], memory: int) -> list[range]:
    """Runs of segments that can be merged into one each.

    Args:
        codec: Says what merging takes.
        extents: How large each segment is.
        memory: Bytes that a merge may hold; a segment that takes more stays alone.
    """
    runs: list[range] = []
    begin, whole = 0, Extent(0, 0)
    for number, extent in enumerate(extents):
        whole = whole.with_more(extent)
        if number > begin and held(codec, whole) > memory:
            runs.append(range(begin, number))
            begin, whole = number, extent
    return [*runs, range(begin, len(extents))]


def recent(extents: Sequence[Extent]) -> int:
    """Where the newest segments begin that are worth merging, so that there are never many small ones, and none is merged often.

    As in log-structured stores: a segment joins those behind it while it is no larger than they are together, and a merge waits for
    `FAN` segments. N additions of one document leave no more than about `FAN` times log2(N) segments.

    Args:
        extents: How large each segment is.

    Returns:
        The first of them; the number of segments where a merge is not worth it yet.
    """
    begin, documents = len(extents), 0
    while begin and (begin == len(extents) or extents[begin - 1].documents <= documents):
        begin -= 1
        documents += extents[begin].documents
    return begin if len(extents) - begin >= FAN else len(extents)


def held(codec: AnyCodec, extent: Extent) -> int:
    """Bytes that writing or merging a segment holds at most."""
    return codec.memory(extent.documents, extent.vectors) + DOCUMENT_BYTES * extent.documents + DESCRIBED_COPIES * extent.described
