"""How large segments are, and which of them can be merged into one within the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quiver.retrieval.index.documents.table import DESCRIBED_COPIES, DOCUMENT_BYTES
from quiver.retrieval.index.engines import AnyCodec

FAN = 4
"""Segments that a merge of an addition with those before it waits for."""

FLOOR = 1 << 20
"""Bytes below which a segment costs about the same to write, whatever is in it: a dozen files, each synced."""


class Extent(NamedTuple):
    """How large a segment is.

    Attributes:
        documents: Number of documents.
        vectors: Number of their vectors.
        described: Bytes of the files of their ids and metadata.
        size: Bytes of all files.
    """

    documents: int
    vectors: int
    described: int = 0
    size: int = 0

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


def first_merged(extents: Sequence[Extent], fits: Callable[[Extent], bool]) -> int:
    """Where the segments begin that an addition is merged with, so that there are never many small ones and none is written often.

    A size-tiered merge policy, as Lucene and log-structured stores have it: going back from the addition, a segment joins while it is no
    larger than all that is newer than it, and a merge waits for `FAN` segments. A segment that is merged at least doubles: n additions of
    one size write each of them log2(n) times at most, and leave about log2(n) + `FAN` segments. Segments smaller than `FLOOR` count as
    that size; they are written more often, and are fewer.

    Args:
        extents: How large each segment is, without its deleted documents; the last one is the addition.
        fits: Whether a merged segment of an extent may be made.

    Returns:
        The first segment of the merge; the place of the addition where no merge is due.

    Example:
        >>> def first(*sizes):
        ...     return first_merged([Extent(1, 1, 0, size << 20) for size in sizes], lambda extent: True)
        >>> first(90, 1, 1), first(90, 1, 1, 1), first(90, 1, 1, 1, 1), first(90, 8, 4, 1, 1, 1, 1), first(90, 64, 9, 9, 9, 9)
        (2, 3, 1, 1, 2)
    """
    begin, whole = len(extents) - 1, extents[-1]
    while begin and extents[begin - 1].size <= max(whole.size, FLOOR) and fits(extents[begin - 1].with_more(whole)):
        begin -= 1
        whole = whole.with_more(extents[begin])
    return begin if len(extents) - begin >= FAN else len(extents) - 1


def held(codec: AnyCodec, extent: Extent) -> int:
    """Bytes that writing or merging a segment holds at most."""
    return codec.memory(extent.documents, extent.vectors) + DOCUMENT_BYTES * extent.documents + DESCRIBED_COPIES * extent.described
