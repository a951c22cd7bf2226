"""Folders of long jobs: locked, written in parts that are complete or absent, and resumed after a kill at any instruction.

    OUT/.NAME.lock           lock file of the process that works here; removed at its end
    OUT/NAME/plan.json       settings of an unfinished job, which a process that resumes it must equal
    OUT/NAME/000012.part     result of a part of the job: its sha256, then its bytes
    FOLDER/PART/seal.json    seal of a folder that is complete: size and checksum of each file, and what the job notes about it
    FOLDER/.PART.unfinished  a folder that a process is writing, or was when it was killed; never read, removed by the next writer

A name is taken by one rename, after everything under it was synced. All changes go through a `Disk`; errors of a full or read-only disk
become one line. Training runs, mining, teacher scores, prepared rows, stored vectors, index builds, evaluations and downloads use this.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from quiver.encoder.errors import InputError
from quiver.encoder.files import REAL, Disk, file_sha256, make_folders, put_file, read_json, remove, remove_tree

logger = logging.getLogger(__name__)

SEAL = "seal.json"
"""Usual name of the file that makes a folder a complete one."""

SETTINGS = "plan.json"
_SCHEMA = "quiver-work/1"
_PART = ".part"
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
# Errors that mean that a file is missing or damaged. Others, such as too many open files, may be temporary.
_SPOILT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)


# Locks and errors.


@contextmanager
def writable(folder: Path, remedy: str = "") -> Iterator[None]:
    """Turn an OSError in the block, as of a full or read-only disk, into an `InputError` of one line that names a folder and a remedy."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror or error}){remedy and f'; {remedy}'}") from error


@contextmanager
def exclusive_lock(file: Path, doing: str, *, remedy: str, wait: float = 0.0, keep: bool = False) -> Iterator[None]:
    """Hold a lock for the block; the operating system releases it when the process ends.

    The folder of the lock file is created if it is missing, and removed at the end if it was created and is empty. If another process still
    holds the lock after ``wait`` seconds (infinity: until it ends), an InputError says what it is ``doing`` and the ``remedy``; another
    one, that the folder is a file or cannot be written. ``keep`` leaves the lock file, for locks that many processes wait for.
    """
    folder, lock, until = file.parent, FileLock(file), time.monotonic() + wait
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; --out must name a folder")
    created = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=-1 if wait == math.inf else wait)
        while not file.exists():  # the previous holder has removed it, and a lock on a file without a name excludes nobody
            lock.release()
            if time.monotonic() >= until:
                raise Timeout(lock.lock_file)
            lock.acquire(timeout=-1 if wait == math.inf else max(0.0, until - time.monotonic()))
    except Timeout as error:
        holder, after = "", f" still {doing} after {wait:g} s" if wait else f" {doing}"
        with suppress(OSError, UnicodeDecodeError):
            holder = file.read_text(encoding="utf-8").strip()
        raise InputError(f"{folder}: {holder or 'another process'} is{after}; {remedy}") from error
    except (OSError, NotImplementedError) as error:  # filelock raises the latter where the file system has no locks
        raise InputError(f"{folder}: cannot be written ({getattr(error, 'strerror', None) or error})") from error
    try:
        with suppress(OSError):  # only a note for those who have to wait; the disk may be full
            file.write_text(f"process {os.getpid()} on {platform.node()}\n", encoding="utf-8")
        yield
    finally:
        if not keep:
            with suppress(OSError):  # Windows does not remove an open file; there filelock removes it
                file.unlink()
        lock.release()
        if created and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def remove_temporary(folder: Path, disk: Disk = REAL) -> None:
    """Remove the temporary files of `quiver.encoder.files.replacing` that killed processes have left; only while no other process works."""
    for path in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            remove(path, disk)


# Settings of a resumed job.


def setting_changes(was: object, now: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield the dotted path and both values of each setting that differs; lists of equally many mappings are compared item by item.

    Example:
        >>> list(setting_changes({"rules": {"seed": 1, "negatives": 7}}, {"rules": {"seed": 2, "negatives": 7}}))
        [('rules.seed', 1, 2)]
    """
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now) and all(isinstance(item, Mapping) for item in was + now):
        was, now = ({str(position): item for position, item in enumerate(items)} for items in (was, now))
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*was, *now]):
            yield from setting_changes(was.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif was != now:
        yield path, was, now


def describe_changes(changes: Iterable[tuple[str, object, object]]) -> str:
    """Describe the result of `setting_changes` in one line.

    Example:
        >>> describe_changes([("rules.seed", 1, 2), ("index", None, "bm25")])
        'rules.seed was 1, is 2; index was null, is "bm25"'
    """
    return "; ".join(f"{path} was {json.dumps(was)}, is {json.dumps(now)}" for path, was, now in changes)


# Sealed folders.


class OtherVersionError(InputError):
    """Another version of Quiver has sealed a folder."""


@dataclass
class SealedFolder:
    """A folder of files that is being written, or is complete."""

    folder: Path  # a hidden one while it is written
    about: dict[str, Any] = field(default_factory=dict)  # what is stored in the seal beside the files, as JSON
    files: dict[str, tuple[int, str]] = field(default_factory=dict)  # path inside the folder -> bytes and sha256, once it is complete


@dataclass(frozen=True)
class SealedFolders:
    """Folders of files, each written whole or not at all and verified before it is used."""

    folder: Path  # contains them; need not exist yet
    schema: str  # of the seals, ``family/version``; empty for seals without one
    seal: str = SEAL  # name of the seal in each folder
    disk: Disk = REAL  # performs all writes

    def path(self, name: str) -> Path:
        """Path of a folder, which need not exist."""
        return self.folder / name

    def names(self) -> list[str]:
        """Names that have a seal, sorted; checksums are not compared."""
        return sorted(path.parent.name for path in self.folder.glob(f"[!.]*/{self.seal}"))

    def read(self, name: str) -> SealedFolder | None:
        """Read a seal without comparing the files; None if it is missing or damaged.

        An `OtherVersionError` if another version has written it, an `InputError` if it cannot be read for a reason other than damage.
        """
        path = self.path(name) / self.seal
        try:
            content = json.loads(path.read_bytes())
            schema, digest, files = str(content.pop("schema", "")), content.pop("sha256", None), content.pop("files")
            sizes = {file: (int(entry["bytes"]), str(entry["sha256"])) for file, entry in files.items()}
        except OSError as error:
            if error.errno not in _SPOILT:
                raise InputError(f"{path}: cannot be read ({error.strerror})") from error
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if schema != self.schema and schema.partition("/")[0] == self.schema.partition("/")[0]:
            raise OtherVersionError(f"{path.parent}: its schema is {schema}, this version reads {self.schema}")
        if schema != self.schema or digest not in (None, _sha256_of_json([content, files])):
            return None
        return SealedFolder(path.parent, content, sizes)

    def flaw(self, name: str) -> str | None:
        """Read a folder in full; return what is wrong with it, None if nothing is. Errors are those of `read`."""
        sealed = self.read(name)
        if sealed is None:
            return f"{self.seal} is missing or damaged"
        for file, (size, digest) in sealed.files.items():
            path = sealed.folder / file
            try:
                if not path.is_file():
                    return f"{file} is missing"
                if path.stat().st_size != size or file_sha256(path) != digest:
                    return f"{file} is damaged"
            except OSError as error:
                if error.errno not in _SPOILT:
                    raise InputError(f"{path}: cannot be read ({error.strerror})") from error
                return f"{file} is unreadable ({error.strerror})"
        return None

    def finished(self, name: str, redo: str) -> SealedFolder | None:
        """Return a folder that is complete and intact; None if it is missing, or damaged or of another version (with a warning).

        ``redo`` is what happens to a damaged one, for the warning, such as "preparing the rows again". Errors are those of `read`, but for
        another version.
        """
        if not (self.path(name) / self.seal).exists():
            return None
        try:
            flaw = self.flaw(name)
            problem = flaw and f"{self.path(name)}: {flaw}"
        except OtherVersionError as error:
            problem = str(error)
        if problem:
            logger.warning("%s; %s", problem, redo)
        return None if problem else self.read(name)

    @contextmanager
    def writing(self, name: str, *, resume: bool = False, worker: str = "") -> Iterator[SealedFolder]:
        """Yield a hidden folder to write into; it is sealed and takes its name when the block ends without an error.

        One of that name is replaced at the end. ``resume`` yields what an earlier process or a failed block has left; otherwise the folder
        is empty, and removed if the block fails. ``worker`` is the unique name of one of several processes that may write the same folder;
        the first one to finish counts. ``about`` is set in the block; after it the folder has its final path and files.
        """
        hidden = self._hidden_path(name, worker)
        if hidden.exists() and not resume:
            remove_tree(hidden, self.disk)
        if not hidden.exists():
            make_folders(hidden, self.disk)
        part = SealedFolder(hidden)
        try:
            yield part
            self._write_seal(part)
            if not worker and self.path(name).exists():  # damaged, or without a seal
                self.remove(name)
            try:
                self.disk.rename(hidden, self.path(name))
            except OSError:
                if not worker or (first := self.finished(name, "making it again")) is None:
                    raise
                part.about, part.files = first.about, first.files
            self.disk.sync_folder(hidden.parent)
            part.folder = self.path(name)
        finally:
            if hidden.exists() and not resume:
                remove_tree(hidden, self.disk)

    def make(self, name: str, build: Callable[[SealedFolder], None], *, doing: str, redo: str) -> SealedFolder:
        """Return the intact folder of a name; build it if it is missing or damaged, while other processes that want it wait.

        ``build`` writes the files into the folder that it gets, and sets its ``about``. For ``doing`` see `exclusive_lock`, for ``redo``
        `finished`. An `InputError` if the folder cannot be written.
        """
        with writable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = self.path(name).with_name(f".{self.path(name).name}.lock")
            with exclusive_lock(lock, doing, remedy="wait for it", wait=math.inf, keep=True):
                found = self.finished(name, redo)
                if found is None:
                    with self.writing(name) as found:
                        build(found)
        return found

    def remove(self, name: str) -> None:
        """Remove a folder: first its name, so that a kill leaves nothing that looks complete."""
        hidden = self._hidden_path(name, "removed")
        if hidden.exists():
            remove_tree(hidden, self.disk)
        if self.path(name).exists():
            self.disk.rename(self.path(name), hidden)
            remove_tree(hidden, self.disk)

    def remove_unfinished(self) -> None:
        """Remove what killed processes have left; only for the process that holds the lock."""
        for path in self.folder.glob(".*.unfinished"):
            remove(path, self.disk)

    def _hidden_path(self, name: str, worker: str) -> Path:
        target = self.path(name)
        return target.with_name(f".{target.name}{worker and f'.{worker}'}.unfinished")

    def _write_seal(self, part: SealedFolder) -> None:
        if taken := {"schema", "files", "sha256"} & part.about.keys():
            raise ValueError(f"{', '.join(sorted(taken))}: these names of the seal cannot be used in about")
        (part.folder / f"{self.seal}.tmp").unlink(missing_ok=True)  # left where a killed process is resumed
        inside = sorted(path for path in part.folder.rglob("*") if path != part.folder / self.seal)
        for path in inside:
            if path.is_file():
                self.disk.sync_file(path)
                part.files[path.relative_to(part.folder).as_posix()] = (path.stat().st_size, file_sha256(path))
        for folder in (*(path for path in inside if path.is_dir()), part.folder):
            self.disk.sync_folder(folder)
        files = {file: {"bytes": size, "sha256": digest} for file, (size, digest) in part.files.items()}
        schema = {"schema": self.schema} if self.schema else {}
        content = {**schema, **part.about, "files": files, "sha256": _sha256_of_json([part.about, files])}
        put_file(part.folder / self.seal, json.dumps(content, indent=2, allow_nan=False).encode() + b"\n", self.disk)


def _sha256_of_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# Unfinished jobs.


class WorkFolder:
    """The folder ``path`` of an unfinished job inside its output folder, see `open_work`."""

    def __init__(self, path: Path, disk: Disk = REAL) -> None:
        self.path, self._disk = path, disk
        self._doomed = path.with_name(f"{path.name}-removed")

    def agree(self, settings: Mapping[str, object]) -> None:
        """Record settings of the job; an `InputError` if a recorded one differs, or another version of Quiver began the job."""
        file, now = self.path / SETTINGS, json.loads(json.dumps(settings))  # tuples become lists, as in the file
        was = read_json(file) if file.is_file() else {}
        start_over = "or --overwrite to start over"
        if was and was.get("schema") != _SCHEMA:
            raise InputError(f"{self.path.parent}: another version of Quiver began this run; finish it with that version, {start_over}")
        if changes := [change for name, value in now.items() if name in was for change in setting_changes(was[name], value, name)]:
            raise InputError(
                f"{self.path.parent}: holds an unfinished run with other settings: {describe_changes(changes)}; use the same settings to "
                f"resume it, {start_over}"
            )
        if not was or not now.keys() <= was.keys():
            put_file(file, json.dumps({"schema": _SCHEMA, **was, **now}, indent=2).encode() + b"\n", self._disk)

    def save(self, name: str, content: bytes) -> None:
        """Save the result of a part, whole or not at all; an `InputError` if it cannot be written."""
        with writable(self.path, "free space and run the command again"):
            put_file(self.path / f"{name}{_PART}", hashlib.sha256(content).digest() + content, self._disk)

    def find(self, name: str) -> bytes | None:
        """Return the result of a part; None if it is missing, or damaged (with a warning)."""
        path = self.path / f"{name}{_PART}"
        if not path.is_file():
            return None
        content = path.read_bytes()
        if content[:32] == hashlib.sha256(content[32:]).digest():
            return content[32:]
        logger.warning("%s: damaged; computing this part again", path)
        return None

    def read(self, name: str) -> bytes:
        """Return the result of a part; an `InputError` if it is missing or damaged."""
        content = self.find(name)
        if content is None:
            raise InputError(f"{self.path}: the part {name} is missing or damaged; run the command again")
        return content

    def names(self) -> list[str]:
        """Names of the parts with a result, sorted."""
        return sorted(path.name.removesuffix(_PART) for path in self.path.glob(f"*{_PART}"))

    def scratch(self, name: str) -> Path:
        """Create an empty folder inside this one, for files that only this process uses."""
        folder = self.path / name
        if folder.exists():
            remove_tree(folder, self._disk)
        self._disk.mkdir(folder)
        return folder

    def remove(self) -> None:
        """Remove the folder: first its name, so that half of it is never resumed."""
        if self.path.exists():
            self.remove_leftovers()
            self._disk.rename(self.path, self._doomed)
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Remove what a killed process has left beside the folder: half of a removed one, and temporary files of the result."""
        if self._doomed.exists():
            remove_tree(self._doomed, self._disk)
        remove_temporary(self.path.parent, self._disk)


def _is_job_folder(path: Path) -> bool:
    """Whether a job made a folder: it has the settings of one, or nothing because the job was killed before it wrote them."""
    if path.is_symlink() or not path.is_dir():
        return False
    if not (path / SETTINGS).is_file():
        return all(file.name == f"{SETTINGS}.tmp" for file in path.iterdir())
    with suppress(InputError):
        return str(read_json(path / SETTINGS).get("schema")).partition("/")[0] == _SCHEMA.partition("/")[0]
    return False


@contextmanager
def open_work(
    out: Path, name: str, settings: Mapping[str, object], *, doing: str, overwrite: bool = False, disk: Disk = REAL
) -> Iterator[WorkFolder]:
    """Begin a job in a folder, or resume the unfinished one there; the work folder stays after an error if a part of the job is finished.

    ``out`` is created if missing, and removed if nothing is in it at the end; the job removes the folder ``name`` in it at its end. For
    ``doing`` see `exclusive_lock`. An InputError if the folder has an unfinished job with other ``settings``, which ``overwrite`` discards,
    or a folder of that name that is none; if another process works there; or if it cannot be written.
    """
    work = WorkFolder(out / name, disk)
    remedy = "wait for it, or choose another --out"
    with exclusive_lock(out / f"{name}.lock", doing, remedy=remedy):
        if (work.path.exists() or work.path.is_symlink()) and not _is_job_folder(work.path):
            raise InputError(f"{out}: holds {name}, which is not from an unfinished run; choose another --out")
        with writable(out):
            work.remove_leftovers()
            if overwrite:
                work.remove()
            if not work.path.exists():
                make_folders(work.path, disk)
            work.agree(settings)
        try:
            yield work
        finally:
            if work.path.exists() and not work.names():
                work.remove()
