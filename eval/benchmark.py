"""What is evaluated: a collection, its split, and the policy that its published numbers follow.

A policy is data. It is applied in one place, ``cut``, which returns a new run and changes none: harnesses that pop ids
from the caller's run score it differently the second time.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home
from quiver.eval.datasets.cache import Cache, CachedCollection, is_offline
from quiver.eval.datasets.metadata import Entry, Metadata
from quiver.eval.datasets.registry import find, held, missing, near, registry, shortest
from quiver.retrieval.data.corpus import Collection, load_collection
from quiver.retrieval.data.run import ranked
from quiver.retrieval.records import Run

__all__ = ["Benchmark", "CollectionReader", "LocalFolder", "Metadata", "Policy", "cut", "depth", "resolve"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policy:
    """How a collection is scored.

    Attributes:
        exclude_self: A document with the id of the query is no answer to it, and is dropped before the cut.
        use_title: Titles are part of the documents' text.
    """

    exclude_self: bool = False
    use_title: bool = True


class CollectionReader(Protocol):
    """Where a collection comes from."""

    def load(self) -> Collection:
        """Read and check it.

        Raises:
            InputError: It is not there, or malformed; names file and line.
        """

    def __str__(self) -> str:
        """The folder it lies in, for messages."""


@dataclass(frozen=True)
class LocalFolder:
    """A BEIR folder: ``corpus.jsonl[.gz]``, ``queries.jsonl[.gz]`` and ``qrels/<split>.tsv``."""

    folder: Path
    split: str

    def load(self) -> Collection:
        """Read and check it.

        Raises:
            InputError: A file is missing or malformed; names file and line.
        """
        return load_collection(self.folder, self.split)

    def __str__(self) -> str:
        return str(self.folder)


@dataclass(frozen=True)
class Benchmark:
    """One split of a collection and how it is scored.

    Attributes:
        name: What tables and files call it.
        split: Which judgements.
        policy: How its runs are made and scored.
        metadata: What is known of it.
        source: Reads it.
    """

    name: str
    split: str
    policy: Policy
    metadata: Metadata
    source: CollectionReader

    @classmethod
    def of_folder(cls, folder: Path, split: str | None = None, *, name: str | None = None, policy: Policy | None = None) -> Benchmark:
        """The benchmark of a local BEIR folder.

        A folder that is called what BEIR calls a collection (``msmarco``, ``cqadupstack/android``), in whatever case, is taken for it:
        its name, its policy, its licence, the group that it is a part of and the split that its published numbers are on. Which version
        it is, nobody knows. Of any other folder nothing is known but what it holds.

        Args:
            folder: ``corpus.jsonl[.gz]``, ``queries.jsonl[.gz]`` and ``qrels/<split>.tsv``; its name is the one given (a link keeps its
                own).
            split: Which judgements; None means the published ones where the folder has them, otherwise ``test``.
            name: Another name.
            policy: Another policy.
        """
        # Of the path as it was given: a link called arguana may lead to a folder of any name, and the policy goes with the collection.
        own = Path(os.path.abspath(folder))  # noqa: PTH100 - Path.resolve would follow the link
        entry = _beir_entry(own)
        if entry is None:
            split = "test" if split is None else split
            return cls(name or own.name, split, policy or Policy(), Metadata(), LocalFolder(folder, split))
        if split is None:
            split = entry.split if (folder / "qrels" / f"{entry.split}.tsv").is_file() else "test"
            logger.info("%s: taken for %s by its name; split %s", folder, entry.key, split)
        metadata = Metadata(entry.metadata.licence, group=entry.metadata.group, group_size=entry.metadata.group_size)
        return cls(name or entry.name, split, policy or _policy_of(entry), metadata, LocalFolder(folder, split))

    @property
    def key(self) -> str:
        """The collection with its split, as files and tables name it: ``scifact.test``."""
        return f"{self.name}.{self.split}"

    def load(self) -> Collection:
        """Read and check the collection.

        Raises:
            InputError: It is not there, or a file is missing or malformed; names file and line.
        """
        return self.source.load()


def resolve(
    data: str | Path, split: str | None = None, *, offline: bool = False, cache: Path | None = None, progress: bool = False
) -> list[Benchmark]:
    """The benchmarks that a folder or a name stands for; a named one that is not in the cache is fetched first.

    Args:
        data: A local BEIR folder, or a name of the registry: one collection (``beir/scifact``), a group (``beir/cqadupstack``) or a
            family (``beir``). A folder of such a name is taken if it holds a corpus.
        split: Which judgements; None means the published ones of each, and ``test`` for a folder of no published collection's name.
        offline: Fetch nothing.
        cache: Folder of the fetched collections, if not ``$QUIVER_CACHE/collections`` or one in the user's cache folder.
        progress: Show how far fetching is.

    Raises:
        InputError: There is no such folder, name or split, or the split is empty; or something is missing and must not or cannot be
            fetched (names all that is missing, and the command that fetches it).
    """
    if split is not None and not split.strip():
        raise InputError("the split is empty; name one, such as test, or leave it away")
    folder, entries = expand_home(data), find(str(data))
    if folder.is_dir() and not (entries and not any((folder / f"corpus.jsonl{end}").is_file() for end in ("", ".gz"))):
        return [Benchmark.of_folder(folder, split)]
    if not entries:
        raise InputError(
            f"unknown collection {str(data)!r}: no such folder; give a BEIR folder with corpus.jsonl, queries.jsonl and "
            f"qrels/{split or 'test'}.tsv, or a name ({near(str(data))})"
        )
    for entry in entries:
        if split is not None and split not in entry.splits:
            raise InputError(f"{entry.key}: no split '{split}'; existing splits: {', '.join(entry.splits)}")
    here = Cache.usual() if cache is None else Cache(cache)
    absent = missing(entries, here)
    if absent and (offline or is_offline()):
        raise InputError(
            f"offline, and not in {here.root}: {', '.join(entry.key for entry in absent)}; fetch what is missing where there is a network: "
            f"quiver collections fetch {' '.join(shortest(absent))}"
        )
    for entry in absent:
        if held(entry, here) is None:  # an archive may hold several
            here.fetch(entry.source, progress=progress)
    return [_published(entry, split or entry.split, here) for entry in entries]


def _published(entry: Entry, split: str, cache: Cache) -> Benchmark:
    found = held(entry, cache)
    if found is None:
        raise InputError(f"{entry.key}: was in {cache.root} a moment ago and is gone; fetch it again")
    source, record = found
    queries = entry.metadata.queries if split == entry.split else None
    size = entry.metadata.bytes if source == entry.source else None
    metadata = replace(entry.metadata, revision=record.revision, url=record.url, queries=queries, bytes=size)
    return Benchmark(entry.name, split, _policy_of(entry), metadata, CachedCollection(cache, source, entry.name, split))


def _beir_entry(folder: Path) -> Entry | None:
    """The collection of BEIR that a folder has the name of: its own or, for a forum of CQADupStack, with that of the folder around it."""
    *_, group, own = ("", *folder.parts)
    names = (f"beir/{own}", f"beir/{group}/{own}")
    return next((registry()[name.lower()] for name in names if name.lower() in registry()), None)


def _policy_of(entry: Entry) -> Policy:
    return Policy(exclude_self=entry.exclude_self, use_title=entry.use_title)


def depth(k: int, policy: Policy) -> int:
    """How many documents to retrieve so that k are left after ``cut``."""
    return k + policy.exclude_self


def cut(run: Run, k: int, policy: Policy) -> dict[str, dict[str, float]]:
    """The first k documents of every query, best first, after the policy has had its say; the given run stays as it is.

    Example:
        >>> run = {"a": {"a": 3.0, "b": 2.0, "c": 1.0}}
        >>> cut(run, 1, Policy(exclude_self=True)), cut(run, 1, Policy())
        ({'a': {'b': 2.0}}, {'a': {'a': 3.0}})
    """
    kept = {}
    for query, scores in run.items():
        order = [document for document in ranked(scores) if not (policy.exclude_self and document == query)]
        kept[query] = {document: scores[document] for document in order[:k]}
    return kept
