"""The cache of fetched collections: a folder for each, whole or not there, with a record of what it is and the checksums of its files.

Fetching happens beside it and ends with one rename, so that a reader sees all of a collection or nothing. Two processes that fetch the same
one take turns.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock

from quiver.encoder.errors import InputError
from quiver.encoder.files import cache_folder, file_sha256, read_json, sync_folder
from quiver.eval.datasets.download import reason
from quiver.eval.datasets.origins import Origin
from quiver.retrieval.data.corpus import Collection

logger = logging.getLogger(__name__)

RECORD = "quiver.json"
"""The file in a fetched folder that says what it is."""

_WORK = ".fetching"


@dataclass(frozen=True)
class FetchedFile:
    """A file of a fetched collection.

    Attributes:
        bytes: Its size.
        sha256: Checksum of its bytes.
    """

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """What a fetched folder holds.

    Attributes:
        url: Where it came from.
        revision: Which version: commits, or ``md5:...`` of an archive.
        files: Path from the folder -> the file.
    """

    url: str
    revision: str
    files: Mapping[str, FetchedFile]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files.values())


@dataclass(frozen=True)
class Cache:
    """Fetched collections under one folder."""

    root: Path

    @classmethod
    def usual(cls) -> Cache:
        """``$QUIVER_CACHE/collections``, or ``quiver/collections`` in the user's cache folder.

        Raises:
            InputError: As `cache_folder`.
        """
        return cls(cache_folder("collections"))

    def folder(self, origin: Origin) -> Path:
        """Where what is fetched from an origin lies."""
        return self.root / origin.unit

    def record(self, origin: Origin) -> Record | None:
        """What lies there; None if nothing does, or its record is damaged: that is as good as nothing, and fetching puts it right."""
        path = self.folder(origin) / RECORD
        if not path.is_file():
            return None
        try:
            return _read_record(path)
        except InputError as error:
            _warn(f"{error}; taken for not fetched, and fetching the collection again puts it right")
            return None

    def fetch(self, origin: Origin, *, progress: bool = False) -> Record:
        """Make sure that a collection is here and sound: checksums are compared, and what is missing or damaged is fetched.

        Raises:
            InputError: It cannot be fetched: no network, a wrong checksum, a full disk; what was there stays.
        """
        work = self.root / _WORK
        try:
            work.mkdir(parents=True, exist_ok=True)
            with FileLock(work / f"{_slug(origin)}.lock"):
                found = self._sound(origin)
                if found is None and is_offline():
                    raise InputError(
                        f"{origin.url}: not fetched, HF_HUB_OFFLINE is set; unset it, or copy {self.folder(origin)} from elsewhere"
                    )
                return found or self._fetch(origin, work, progress)
        except OSError as error:
            raise reason(error, origin.url, self.root) from error

    def _sound(self, origin: Origin) -> Record | None:
        """The record of what is there, if every byte is as it was fetched."""
        folder = self.folder(origin)
        record = self.record(origin)
        if record is None or not all((folder / name).is_file() for name in record.files):
            return None
        return record if all(file_sha256(folder / name) == file.sha256 for name, file in record.files.items()) else None

    def _fetch(self, origin: Origin, work: Path, progress: bool) -> Record:
        staging, folder = work / _slug(origin), self.folder(origin)
        staging.mkdir(exist_ok=True)
        revision = origin.fetch(staging, work, progress=progress)
        found = sorted(path for path in staging.rglob("*") if path.is_file() and path.name != RECORD)
        files = {path.relative_to(staging).as_posix(): FetchedFile(path.stat().st_size, file_sha256(path)) for path in found}
        record = Record(origin.url, revision, files)
        (staging / RECORD).write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            shutil.rmtree(folder)  # it was found damaged
        staging.rename(folder)
        sync_folder(folder.parent)
        return record


@dataclass(frozen=True)
class CachedCollection:
    """A fetched collection that can be loaded.

    Attributes:
        cache: Where it lies.
        origin: What it was fetched from.
        name: What it is called.
        split: Which judgements.
    """

    cache: Cache
    origin: Origin
    name: str
    split: str

    def load(self) -> Collection:
        """Read and check it.

        Raises:
            InputError: A file is missing, cut or malformed; names file and line or row.
        """
        folder = self.cache.folder(self.origin)
        record = self.cache.record(self.origin)
        if record is None:
            raise InputError(f"{folder}: nothing was fetched there; run quiver collections fetch")
        for name, file in record.files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != file.bytes:
                raise InputError(f"{path}: not as it was fetched; run quiver collections fetch again, which puts it right")
        return self.origin.load(folder, self.name, self.split)

    def __str__(self) -> str:
        return str(self.cache.folder(self.origin))


def _read_record(path: Path) -> Record:
    content = read_json(path)
    files = content.get("files")
    if not isinstance(content.get("url"), str) or not isinstance(content.get("revision"), str) or not isinstance(files, dict):
        raise InputError(f"{path}: damaged; it must hold url, revision and files")
    for name, file in files.items():
        kinds = {key: type(value) for key, value in file.items()} if isinstance(file, dict) else None
        if kinds != {"bytes": int, "sha256": str}:
            raise InputError(f"{path}: damaged; {name!r} must have bytes and sha256")
    return Record(content["url"], content["revision"], {name: FetchedFile(**file) for name, file in files.items()})


@cache
def _warn(message: str) -> None:
    """Warn once: the twelve forums of one archive share its record, and each asks for it."""
    logger.warning("%s", message)


def is_offline() -> bool:
    """Whether the environment forbids the network, by the switch of the hub's client."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _slug(origin: Origin) -> str:
    return origin.unit.replace("/", "--")
