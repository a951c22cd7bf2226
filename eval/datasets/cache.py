"""The cache of downloaded collections: a complete folder per collection, sealed with its source and the checksums of its files.

Processes that download the same collection wait for each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from quiver.encoder.errors import InputError
from quiver.encoder.files import cache_folder
from quiver.encoder.work_folder import SealedFolder, SealedFolders, exclusive_lock
from quiver.eval.datasets.sources import Source, is_offline, reason
from quiver.retrieval.data.corpus import Collection, DuplicateJudgements

RECORD = "quiver.json"
"""Name of the seal in the folder of a downloaded collection."""

_DOWNLOADS = ".fetching"
_AGAIN = "this copy is ignored; quiver collections fetch downloads the collection again"


@dataclass(frozen=True)
class Record:
    """Record of a downloaded collection."""

    url: str
    revision: str
    files: dict[str, tuple[int, str]]

    @property
    def bytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(size for size, _ in self.files.values())


@dataclass(frozen=True)
class Cache:
    """Cache of downloaded collections, in subfolders of ``root``."""

    root: Path

    @classmethod
    def usual(cls) -> Cache:
        """The default cache: ``$QUIVER_CACHE/collections``, or ``quiver/collections`` in the user's cache folder."""
        return cls(cache_folder("collections"))

    def folder(self, source: Source) -> Path:
        """Folder of the files of a source."""
        return self.root / source.unit

    def record(self, source: Source) -> Record | None:
        """The record of a source; None if it was not downloaded or its record is damaged (a new download repairs it)."""
        return _record_of(self._folders.read(source.unit))

    def fetch(self, source: Source, *, progress: bool = False) -> Record:
        """Ensure that a source is in the cache: verify the checksums of its files, and download it if any is missing or damaged.

        An interrupted download is resumed.
        """
        work, name = self.root / _DOWNLOADS, source.unit
        lock = work / f"{name.replace('/', '--')}.lock"
        try:
            work.mkdir(parents=True, exist_ok=True)
            with exclusive_lock(lock, "downloading", remedy="wait for it", wait=math.inf, keep=True):
                if found := _record_of(self._folders.finished(name, _AGAIN)):
                    return found
                if is_offline():
                    raise InputError(
                        f"{source.url}: cannot be downloaded because HF_HUB_OFFLINE is set; unset it, or copy "
                        f"{self.folder(source)} from another machine"
                    )
                with self._folders.writing(name, resume=True) as part:
                    revision = source.fetch(part.folder, work, progress=progress)
                    part.about = {"url": source.url, "revision": revision}
                return Record(source.url, revision, part.files)
        except OSError as error:
            raise reason(error, source.url, self.root) from error

    @property
    def _folders(self) -> SealedFolders:
        return SealedFolders(self.root, "", seal=RECORD)


def _record_of(sealed: SealedFolder | None) -> Record | None:
    if sealed is None or not {"url", "revision"} <= sealed.about.keys():
        return None
    return Record(str(sealed.about["url"]), str(sealed.about["revision"]), sealed.files)


@dataclass(frozen=True)
class CachedCollection:
    """A downloaded collection that can be loaded."""

    cache: Cache
    source: Source
    name: str
    split: str

    def load(self, *, needs_corpus: bool = True, duplicates: DuplicateJudgements = "error") -> Collection:
        """Read and check the collection, which has a corpus.

        Raises:
            InputError: A file is missing, truncated or malformed; names file and line or row.
        """
        del needs_corpus
        folder = self.cache.folder(self.source)
        if self.source.is_local:
            return self.source.load(folder, self.name, self.split, duplicates=duplicates)
        record = self.cache.record(self.source)
        if record is None:
            raise InputError(f"{folder}: the collection is not in the cache; run quiver collections fetch")
        for name, (size, _) in record.files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != size:
                raise InputError(f"{path}: missing or changed since the download; run quiver collections fetch to repair it")
        return self.source.load(folder, self.name, self.split, duplicates=duplicates)

    def __str__(self) -> str:
        return self.source.url if self.source.is_local else str(self.cache.folder(self.source))
