"""Where a collection can be had: an archive in BEIR's layout, or tables on the hub.

Each knows how it is fetched into a folder and how it is loaded from there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from quiver.encoder.errors import InputError
from quiver.eval.datasets.download import check_room, download, unpack
from quiver.eval.datasets.hub import fetch_files
from quiver.eval.datasets.layouts import CARD, HubTable, table_files
from quiver.eval.datasets.tables import table_documents, table_judgements, table_queries
from quiver.retrieval.data.corpus import BEIR_COLUMNS, Collection, Columns, assemble, load_collection
from quiver.retrieval.progress import progress_bar


class Origin(Protocol):
    """A place that a collection can be had from."""

    @property
    def unit(self) -> str:
        """What is fetched at once, as a path in the cache; several collections may be in one archive."""

    @property
    def url(self) -> str:
        """Where people can look at it."""

    @property
    def revision(self) -> str | None:
        """The version that is fetched; None where it is whatever is there."""

    def fetch(self, folder: Path, scratch: Path, *, progress: bool) -> str:
        """Fetch into a folder, which exists and may hold what an earlier attempt has left; the version that it was.

        Raises:
            InputError: It cannot be had.
        """

    def load(self, folder: Path, name: str, split: str) -> Collection:
        """Read and check the collection from the folder that `fetch` has filled.

        Raises:
            InputError: A file is missing or malformed; names file and line or row.
        """


@dataclass(frozen=True)
class ZipArchive:
    """An archive of folders in BEIR's layout.

    Attributes:
        unit: What is fetched at once, as a path in the cache.
        url: Of the archive.
        md5: Its checksum.
        bytes: Its size, for the bar.
        folder: The collection's folder inside.
    """

    unit: str
    url: str
    md5: str
    bytes: int
    folder: str

    @property
    def revision(self) -> str:
        """The checksum, which is all the version that an archive has."""
        return f"md5:{self.md5}"

    def fetch(self, folder: Path, scratch: Path, *, progress: bool) -> str:
        """Download, compare the checksum, unpack.

        Args:
            folder: Where it is unpacked; emptied first.
            scratch: Where the archive lies meanwhile, and what there is of it if the download is stopped.
            progress: Show bars.

        Raises:
            InputError: It cannot be had, or its checksum is another.
        """
        archive = scratch / self.url.rpartition("/")[2]
        if not archive.exists():
            check_room(scratch, self.bytes)
            with progress_bar(f"{archive.name}: downloading (bytes)", self.bytes, enabled=progress) as advance:
                download(self.url, archive, md5=self.md5, advance=advance)
        shutil.rmtree(folder)
        folder.mkdir()
        unpack(archive, folder, progress=progress)
        archive.unlink()
        return self.revision

    def load(self, folder: Path, name: str, split: str) -> Collection:
        """Read and check the collection.

        Raises:
            InputError: A file is missing or malformed; names file and line.
        """
        del name  # a folder has its own
        return load_collection(folder / self.folder, split)


@dataclass(frozen=True)
class HubTables:
    """Three tables in one or more repositories of the hub.

    Attributes:
        unit: What is fetched at once, as a path in the cache.
        documents: The corpus.
        queries: The queries; those the split does not judge are dropped at loading.
        judgements: The judgements.
        splits: The splits there may be, the benchmark's own first: that one has to be there.
        revisions: Repository -> commit; one that is not named is fetched as it is and its commit recorded.
        document_columns: What the fields of the corpus are called.
        query_columns: What those of the queries are called.
        graded: The judgements have grades; otherwise each says that a document is relevant.
    """

    unit: str
    documents: HubTable
    queries: HubTable
    judgements: HubTable
    splits: tuple[str, ...]
    revisions: Mapping[str, str] = field(default_factory=dict)
    document_columns: Columns = BEIR_COLUMNS
    query_columns: Columns = BEIR_COLUMNS
    graded: bool = True

    @property
    def url(self) -> str:
        """The repository of the documents."""
        return f"https://huggingface.co/datasets/{self.documents.repository}"

    @property
    def revision(self) -> str | None:
        """The commits, that of the documents' repository first; None where one is not fixed."""
        known = [self.revisions.get(repository) for repository in self._repositories()]
        return None if None in known else "+".join(filter(None, known))

    def fetch(self, folder: Path, scratch: Path, *, progress: bool) -> str:
        """Fetch the files of the three tables from the hub.

        Args:
            folder: Gets a folder for each repository; what an earlier call has left there is used.
            scratch: Not needed: the hub's client keeps what it has in ``folder``.
            progress: Show bars.

        Raises:
            InputError: A repository, a revision or a table is not there, or the hub cannot be reached.
        """
        del scratch
        commits = []
        for repository in self._repositories():
            place = folder / _folder(repository)
            place.mkdir(parents=True, exist_ok=True)
            choose = partial(self._choose, repository)
            commits.append(fetch_files(repository, self.revisions.get(repository), place, choose, progress=progress))
        return "+".join(commits)

    def load(self, folder: Path, name: str, split: str) -> Collection:
        """Read and check the collection.

        Raises:
            InputError: A file is missing or malformed; names file and row.
        """
        if split not in self.splits:
            raise InputError(f"{name}: no split '{split}'; the splits there are {', '.join(self.splits)}")
        files = {table: _local_files(folder, table.of_split(split)) for table in (self.documents, self.queries, self.judgements)}
        return assemble(
            name,
            split,
            documents=partial(table_documents, files[self.documents], self.document_columns),
            queries=partial(table_queries, files[self.queries], self.query_columns),
            judgements=table_judgements(files[self.judgements], graded=self.graded),
        )

    def _repositories(self) -> list[str]:
        return list(dict.fromkeys(table.repository for table in (self.documents, self.queries, self.judgements)))

    def _choose(self, repository: str, card: str, names: Sequence[str]) -> list[str]:
        """The files of the tables that are in a repository, for every split that it has."""
        found: dict[str, None] = {}
        for table in (self.documents, self.queries, self.judgements):
            for split in self.splits if table.repository == repository else ():
                found |= dict.fromkeys(table_files(table.of_split(split), card, names, required=split == self.splits[0]))
        return list(found)


def _local_files(folder: Path, table: HubTable) -> list[Path]:
    root = folder / _folder(table.repository)
    card = (root / CARD).read_text(encoding="utf-8", errors="replace") if (root / CARD).is_file() else ""
    return [root / name for name in table_files(table, card, list(_names(root)))]


def _names(root: Path) -> Iterator[str]:
    return (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def _folder(repository: str) -> str:
    return repository.replace("/", "--")
