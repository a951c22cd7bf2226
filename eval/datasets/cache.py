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

from quiver.encoder.environment import installed_version
from quiver.encoder.errors import InputError, first_line
from quiver.encoder.files import cache_folder, file_sha256, read_json, sync_folder
from quiver.encoder.progress import Advance, progress_bar
from quiver.retrieval.data.corpus import Collection, DuplicateJudgements

if TYPE_CHECKING:
    from quiver.eval.datasets.sources import Source

logger = logging.getLogger(__name__)


ATTEMPTS = 5
"""Maximum number of connection attempts per call; each resumes where the previous one broke off."""

_BLOCK = 1 << 20
_TIMEOUT = 30.0  # seconds without receiving a byte


def download(url: str, target: Path, *, md5: str, advance: Advance) -> None:
    """Download a file; it gets its final name only when it is complete and its checksum is right.

    Received bytes are kept beside the target as ``.part``. They remain if the connection breaks or the process is killed, and the next
    call resumes from there.

    Args:
        url: Address of the file.
        target: Path to write; its folder must exist.
        md5: Expected checksum.
        advance: Progress callback, called with the number of bytes to add: first those kept from an earlier call, then those received.
            The number is negative if the server sends the file from the beginning again.

    Raises:
        InputError: The server cannot be reached or lacks the file, the connection broke repeatedly, the disk is full, or the checksum is
            wrong (then the received bytes are deleted).
    """
    part = target.with_name(f"{target.name}.part")
    advance(_size(part))
    try:
        for attempt in range(1, ATTEMPTS + 1):
            if _attempt(url, part, advance):
                break
            logger.info("%s: the connection broke at %d bytes (attempt %d)", url, _size(part), attempt)
        else:
            raise InputError(
                f"{url}: the connection broke {ATTEMPTS} times, last at {_size(part):,} bytes; run the same command again to resume"
            )
    except OSError as error:
        raise reason(error, url, part.parent) from error
    found = _md5(part)
    if found != md5:
        part.unlink()
        raise InputError(f"{url}: corrupt download: md5 is {found}, expected {md5}. The file was deleted; download it again")
    part.replace(target)


def unpack(archive: Path, folder: Path, *, progress: bool) -> None:
    """Unpack a zip archive into a folder.

    Args:
        archive: Path of the archive.
        folder: Existing, empty folder.
        progress: Show a progress bar.

    Raises:
        InputError: The file is not a zip archive or is damaged (it is then deleted), a member would be written outside the folder, or the
            disk has too little space.
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
        raise InputError(f"{archive.name}: not a valid zip archive ({error}); download it again") from error
    except OSError as error:
        raise reason(error, archive.name, folder) from error


def check_room(folder: Path, wanted: int) -> None:
    """Check that a disk has enough free space.

    Args:
        folder: Folder on the disk.
        wanted: Required space in bytes.

    Raises:
        InputError: There is less free space.
    """
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise InputError(f"{folder}: {wanted / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free; set QUIVER_CACHE to a larger disk")


def reason(error: Exception, source: str, folder: Path) -> InputError:
    """Convert a download failure to an error with a one-line explanation.

    Args:
        error: Error of the operating system, of urllib or of a hub client.
        source: Name of the download.
        folder: Target folder.
    """
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return InputError(f"{folder}: the disk is full; make room, or set QUIVER_CACHE to a larger disk, and run the same command again")
    if isinstance(error, HTTPError):
        return InputError(f"{source}: the server answered {error.code} {error.reason}")
    if isinstance(error, PermissionError):
        return InputError(f"{folder}: cannot be written (no permission); set QUIVER_CACHE to another folder")
    cause = error.reason if isinstance(error, URLError) else error
    return InputError(
        f"{source}: download failed ({first_line(cause)}); check the network, or download on another machine and copy the cache"
    )


def _attempt(url: str, part: Path, advance: Advance) -> bool:
    """Receive bytes over one connection; return whether the file is complete afterwards."""
    have = _size(part)
    headers = {"User-Agent": f"quiver/{installed_version('quiver-retrieval') or '0'}"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with urlopen(Request(url, headers=headers), timeout=_TIMEOUT) as response:
            if response.status != http.client.PARTIAL_CONTENT and have:
                advance(-have)  # the server ignored the range and sends the whole file again
                have = 0
            total = _total(response.headers, have)
            with part.open("ab" if have else "wb") as file:
                while block := response.read(_BLOCK):
                    file.write(block)
                    advance(len(block))
    except HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return True  # no bytes are left to send; the checksum decides whether the file is right
        raise
    except (http.client.HTTPException, ConnectionError, TimeoutError):
        return False
    return total is None or _size(part) >= total


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _total(headers: http.client.HTTPMessage, have: int) -> int | None:
    """Size of the complete file; it must be known because http.client does not report a body that was cut off."""
    length = headers.get("Content-Length")
    return have + int(length) if length is not None else None


def _safe(archive: Path, member: zipfile.ZipInfo) -> Path:
    name = PurePosixPath(member.filename)
    linked = stat.S_ISLNK(member.external_attr >> 16)
    if name.is_absolute() or ".." in name.parts or "\\" in member.filename or ":" in member.filename or linked:
        raise InputError(f"{archive.name}: member {member.filename!r} would be written outside the target folder; nothing was unpacked")
    return Path(*name.parts)


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)  # the publishers provide md5 checksums
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


RECORD = "quiver.json"
"""Name of the record file in the folder of a downloaded collection."""

_WORK = ".fetching"


@dataclass(frozen=True)
class FetchedFile:
    """A file of a downloaded collection.

    Attributes:
        bytes: Size in bytes.
        sha256: Checksum of the content.
    """

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """Record of a downloaded collection.

    Attributes:
        url: Address of the source.
        revision: Commits, or ``md5:...`` of an archive.
        files: Path relative to the folder -> the file.
    """

    url: str
    revision: str
    files: Mapping[str, FetchedFile]

    @property
    def bytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(file.bytes for file in self.files.values())


@dataclass(frozen=True)
class Cache:
    """Cache of downloaded collections, in subfolders of ``root``."""

    root: Path

    @classmethod
    def usual(cls) -> Cache:
        """The default cache: ``$QUIVER_CACHE/collections``, or ``quiver/collections`` in the user's cache folder.

        Raises:
            InputError: See `cache_folder`.
        """
        return cls(cache_folder("collections"))

    def folder(self, source: Source) -> Path:
        """Folder of the files of a source."""
        return self.root / source.unit

    def record(self, source: Source) -> Record | None:
        """The record of a source; None if it was not downloaded or its record is damaged (a new download repairs it)."""
        path = self.folder(source) / RECORD
        if not path.is_file():
            return None
        try:
            return _read_record(path)
        except InputError as error:
            _warn(f"{error}; ignoring this copy. Download the collection again to repair it")
            return None

    def fetch(self, source: Source, *, progress: bool = False) -> Record:
        """Ensure that a source is in the cache: verify the checksums of its files, and download it if any is missing or damaged.

        Raises:
            InputError: The download failed: no network, a wrong checksum, or a full disk. Existing files are kept.
        """
        work = self.root / _WORK
        try:
            work.mkdir(parents=True, exist_ok=True)
            with FileLock(work / f"{_slug(source)}.lock"):
                found = self._sound(source)
                if found is None and is_offline():
                    raise InputError(
                        f"{source.url}: cannot be downloaded because HF_HUB_OFFLINE is set; unset it, or copy "
                        f"{self.folder(source)} from another machine"
                    )
                return found or self._fetch(source, work, progress)
        except OSError as error:
            raise reason(error, source.url, self.root) from error

    def _sound(self, source: Source) -> Record | None:
        """The record of a source if all its files have their recorded checksums, otherwise None."""
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
            shutil.rmtree(folder)  # its files were found to be damaged
        staging.rename(folder)
        sync_folder(folder.parent)
        return record


@dataclass(frozen=True)
class CachedCollection:
    """A downloaded collection that can be loaded.

    Attributes:
        cache: Cache that holds the collection.
        source: Source that it was downloaded from.
        name: Name of the collection.
        split: Split of the judgements.
    """

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
        record = self.cache.record(self.source)
        if record is None:
            raise InputError(f"{folder}: the collection is not in the cache; run quiver collections fetch")
        for name, file in record.files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != file.bytes:
                raise InputError(f"{path}: missing or changed since the download; run quiver collections fetch to repair it")
        return self.source.load(folder, self.name, self.split, duplicates=duplicates)

    def __str__(self) -> str:
        return str(self.cache.folder(self.source))


def _read_record(path: Path) -> Record:
    content = read_json(path)
    files = content.get("files")
    if not isinstance(content.get("url"), str) or not isinstance(content.get("revision"), str) or not isinstance(files, dict):
        raise InputError(f"{path}: damaged; run quiver collections fetch again")
    for name, file in files.items():
        kinds = {key: type(value) for key, value in file.items()} if isinstance(file, dict) else None
        if kinds != {"bytes": int, "sha256": str}:
            raise InputError(f"{path}: damaged; {name!r} must have bytes and sha256")
    return Record(content["url"], content["revision"], {name: FetchedFile(**file) for name, file in files.items()})


@cache
def _warn(message: str) -> None:
    """Log each warning once: the twelve forums in one archive share a record, and the record is read for each of them."""
    logger.warning("%s", message)


def is_offline() -> bool:
    """Whether the environment forbids network access by ``HF_HUB_OFFLINE``."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _slug(source: Source) -> str:
    return source.unit.replace("/", "--")
