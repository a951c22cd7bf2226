"""Metadata of published collections: licence, version, sizes, group, scoring policy and sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quiver.eval.datasets.sources import Source


@dataclass(frozen=True)
class Metadata:
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


@dataclass(frozen=True)
class Entry:
    """One published collection.

    Attributes:
        key: What is typed: family, perhaps group, and name, such as ``beir/cqadupstack/android``.
        name: What tables and files call it: no two collections have the same.
        split: The split that published numbers are on.
        splits: All splits that can be asked for.
        sources: Name -> where it can be had; the first is where it is fetched from if nothing else is asked for.
        metadata: What is known of it; the revision is that of the first source.
        exclude_self: A document with the query's own id is no answer to it.
        use_title: Titles are part of the documents' text.
        note: What somebody who compares numbers has to know.
    """

    key: str
    name: str
    split: str
    splits: tuple[str, ...]
    sources: Mapping[str, Source]
    metadata: Metadata
    exclude_self: bool = False
    use_title: bool = True
    note: str = ""

    @property
    def source(self) -> Source:
        """The first source."""
        return next(iter(self.sources.values()))
