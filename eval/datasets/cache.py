"""Downloads, and the cache of downloaded collections: a complete folder per collection, with a record of its source and file checksums.

A download goes into a folder beside the cache and is published by one rename, so that readers see a complete collection or none. Processes
that download the same collection wait for each other.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import logging
import os
import shutil
import stat
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from filelock import FileLock

from quiver.encoder.errors import InputError
from quiver.encoder.files import cache_folder, file_sha256, read_json, sync_folder
from quiver.retrieval.data.corpus import Collection
from quiver.retrieval.progress import Advance, progress_bar
from quiver.retrieval.versions import installed_version

if TYPE_CHECKING:
    from quiver.eval.datasets.sources import Source

logger = logging.getLogger(__name__)


ATTEMPTS = 5
"""How often a connection that breaks is taken up again in one call."""

_BLOCK = 1 << 20
_TIMEOUT = 30.0  # seconds without a byte


def download(url: str, target: Path, *, md5: str, advance: Advance) -> None:
    """Fetch a file; it is under its name only when it is whole and its checksum right.

    What has arrived lies beside it as ``.part``, stays there when the connection breaks or the process is killed, and the next call goes on
    from there.

    Args:
        url: Of the file.
        target: Where it goes; its folder must exist.
        md5: Checksum it must have.
        advance: Takes the number of further bytes that are there.

    Raises:
        InputError: The server cannot be reached or has no such file, the connection kept breaking, the disk is full, or the checksum is
            another one: then nothing is kept.
    """
    part = target.with_name(f"{target.name}.part")
    advance(_size(part))
    try:
        for attempt in range(1, ATTEMPTS + 1):
            if _attempt(url, part, advance):
                break
            logger.info("%s: the connection broke at %d bytes (attempt %d)", url, _size(part), attempt)
        else:
            raise InputError(f"{url}: the connection broke {ATTEMPTS} times, last at {_size(part):,} bytes; the same command goes on")
    except OSError as error:
        raise reason(error, url, part.parent) from error
    found = _md5(part)
    if found != md5:
        part.unlink()
        raise InputError(f"{url}: corrupt download, its md5 is {found} and should be {md5}; nothing was kept, fetch it again")
    part.replace(target)


def unpack(archive: Path, folder: Path, *, progress: bool) -> None:
    """Unpack a zip archive into a folder.

    Args:
        archive: The archive.
        folder: Exists and is empty.
        progress: Show a bar.

    Raises:
        InputError: It is no archive or damaged (and is removed), a name in it leads out of the folder, or the disk has no room for what
            is in it.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [(member, folder / _safe(archive, member)) for member in opened.infolist() if not member.is_dir()]
            total = sum(member.file_size for member, _ in members)
            check_room(folder, total)
            with progress_bar(f"{archive.name}: unpacking (bytes)", total, enabled=progress) as advance:
                for member, path in members:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with opened.open(member) as source, path.open("xb") as target:
                        while block := source.read(_BLOCK):
                            target.write(block)
                            advance(len(block))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        archive.unlink(missing_ok=True)
        raise InputError(f"{archive.name}: not a sound zip archive ({error}); fetch it again") from error
    except OSError as error:
        raise reason(error, archive.name, folder) from error


def check_room(folder: Path, wanted: int) -> None:
    """Make sure that a disk has room.

    Raises:
        InputError: It has not.
    """
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise InputError(f"{folder}: {wanted / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free; set QUIVER_CACHE to a larger disk")


def reason(error: Exception, source: str, folder: Path) -> InputError:
    """What a failure to fetch means, in one line.

    Args:
        error: An error of the operating system, of urllib, or of a hub client.
        source: What was fetched.
        folder: Where it was to go.
    """
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return InputError(f"{folder}: the disk is full; make room, or set QUIVER_CACHE to a larger disk, and run the same command again")
    if isinstance(error, HTTPError):
        return InputError(f"{source}: the server answered {error.code} {error.reason}")
    if isinstance(error, PermissionError):
        return InputError(f"{folder}: cannot be written (no permission); set QUIVER_CACHE to another folder")
    told = error.reason if isinstance(error, URLError) else error
    first = str(told).strip().partition("\n")[0] or type(error).__name__
    return InputError(f"{source}: cannot be fetched ({first}); is there a network? Or fetch it elsewhere and copy the cache")


def _attempt(url: str, part: Path, advance: Advance) -> bool:
    """One connection; whether the file is whole after it."""
    have = _size(part)
    headers = {"User-Agent": f"quiver/{installed_version('quiver-retrieval') or '0'}"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with urlopen(Request(url, headers=headers), timeout=_TIMEOUT) as response:
            if response.status != http.client.PARTIAL_CONTENT and have:
                advance(-have)  # the server sends it all again
                have = 0
            total = _total(response.headers, have)
            with part.open("ab" if have else "wb") as file:
                while block := response.read(_BLOCK):
                    file.write(block)
                    advance(len(block))
    except HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return True  # nothing is left to send; the checksum tells whether what is here is right
        raise
    except (http.client.HTTPException, ConnectionError, TimeoutError):
        return False
    return total is None or _size(part) >= total


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _total(headers: http.client.HTTPMessage, have: int) -> int | None:
    """Size of the whole file; http.client ends a body that was cut off without a word, so it must be known."""
    length = headers.get("Content-Length")
    return have + int(length) if length is not None else None


def _safe(archive: Path, member: zipfile.ZipInfo) -> Path:
    name = PurePosixPath(member.filename)
    linked = stat.S_ISLNK(member.external_attr >> 16)
    if name.is_absolute() or ".." in name.parts or "\\" in member.filename or ":" in member.filename or linked:
        raise InputError(f"{archive.name}: the name {member.filename!r} leads out of the folder; not unpacked")
    return Path(*name.parts)


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)  # the checksum that the publishers give
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


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

    def folder(self, source: Source) -> Path:
        """Where what is fetched from an source lies."""
        return self.root / source.unit

    def record(self, source: Source) -> Record | None:
        """What lies there; None if nothing does, or its record is damaged: that is as good as nothing, and fetching puts it right."""
        path = self.folder(source) / RECORD
        if not path.is_file():
            return None
        try:
            return _read_record(path)
        except InputError as error:
            _warn(f"{error}; taken for not fetched, and fetching the collection again puts it right")
            return None

    def fetch(self, source: Source, *, progress: bool = False) -> Record:
        """Make sure that a collection is here and sound: checksums are compared, and what is missing or damaged is fetched.

        Raises:
            InputError: It cannot be fetched: no network, a wrong checksum, a full disk; what was there stays.
        """
        work = self.root / _WORK
        try:
            work.mkdir(parents=True, exist_ok=True)
            with FileLock(work / f"{_slug(source)}.lock"):
                found = self._sound(source)
                if found is None and is_offline():
                    raise InputError(
                        f"{source.url}: not fetched, HF_HUB_OFFLINE is set; unset it, or copy {self.folder(source)} from elsewhere"
                    )
                return found or self._fetch(source, work, progress)
        except OSError as error:
            raise reason(error, source.url, self.root) from error

    def _sound(self, source: Source) -> Record | None:
        """The record of what is there, if every byte is as it was fetched."""
        folder = self.folder(source)
        record = self.record(source)
        if record is None or not all((folder / name).is_file() for name in record.files):
            return None
        return record if all(file_sha256(folder / name) == file.sha256 for name, file in record.files.items()) else None

    def _fetch(self, source: Source, work: Path, progress: bool) -> Record:
        staging, folder = work / _slug(source), self.folder(source)
        staging.mkdir(exist_ok=True)
        revision = source.fetch(staging, work, progress=progress)
        found = sorted(path for path in staging.rglob("*") if path.is_file() and path.name != RECORD)
        files = {path.relative_to(staging).as_posix(): FetchedFile(path.stat().st_size, file_sha256(path)) for path in found}
        record = Record(source.url, revision, files)
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
        source: What it was fetched from.
        name: What it is called.
        split: Which judgements.
    """

    cache: Cache
    source: Source
    name: str
    split: str

    def load(self) -> Collection:
        """Read and check it.

        Raises:
            InputError: A file is missing, cut or malformed; names file and line or row.
        """
        folder = self.cache.folder(self.source)
        record = self.cache.record(self.source)
        if record is None:
            raise InputError(f"{folder}: nothing was fetched there; run quiver collections fetch")
        for name, file in record.files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != file.bytes:
                raise InputError(f"{path}: not as it was fetched; run quiver collections fetch again, which puts it right")
        return self.source.load(folder, self.name, self.split)

    def __str__(self) -> str:
        return str(self.cache.folder(self.source))


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


def _slug(source: Source) -> str:
    return source.unit.replace("/", "--")
