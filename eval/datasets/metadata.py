"""Metadata of published collections: licence, version, sizes, group, scoring policy and sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quiver.eval.datasets.sources import Source


@dataclass(frozen=True)
class Metadata:
    """Facts about a collection other than its texts; None if unknown.

    Attributes:
        licence: Licence of the data as stated by its publisher.
        revision: Commit of a repository, or ``md5:...`` of an archive.
        url: Address of the publication.
        documents: Number of documents.
        queries: Number of judged queries in the split.
        group: Data set that the collection is a part of, such as ``cqadupstack``.
        group_size: Number of collections in the group; 1 without a group.
        bytes: Size of the download in bytes.
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
        key: Name to type: family, optional group, and name, such as ``beir/cqadupstack/android``.
        name: Name in tables and files; unique.
        split: Split of the published results.
        splits: All splits.
        sources: Name -> source; the first one is the default for downloads.
        metadata: Facts about the collection; the revision is that of the first source.
        exclude_self: Drop the document with the query's own id.
        use_title: Include titles in the text of the documents.
        note: Remark for readers who compare results.
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
        """The first source, which is the default."""
        return next(iter(self.sources.values()))
