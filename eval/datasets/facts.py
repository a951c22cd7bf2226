"""What is known of a collection beside its texts: whose it is, which version, how large, what it is a part of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """What is known of a collection beside its texts; None where it is not known.

    Attributes:
        licence: Of the data, as its publisher states it.
        revision: A commit of a repository, or ``md5:...`` of an archive.
        url: Where it is published.
        documents: How many documents it has.
        queries: How many queries its split judges.
        group: The data set that it is one of several parts of, such as ``cqadupstack``.
        group_size: How many parts the group has; 1 without a group.
        bytes: Size of the download.
    """

    licence: str | None = None
    revision: str | None = None
    url: str | None = None
    documents: int | None = None
    queries: int | None = None
    group: str | None = None
    group_size: int = 1
    bytes: int | None = None
