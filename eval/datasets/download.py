"""An archive from a web server onto the disk: resumed where it broke off, compared with its checksum, unpacked without trust.

Nothing here knows what is in an archive. Progress is told to a function, in bytes.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import logging
import shutil
import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from quiver.encoder.errors import InputError
from quiver.retrieval.progress import Advance, progress_bar
from quiver.retrieval.versions import installed_version

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
