"""The folder of a build that is under way: what is finished has a marker with its checksums, so that a killed build goes on from there.

    tmp/b-<fingerprint>/<name>/           files that are being written, or are finished, by the process that holds the index's lock
    tmp/b-<fingerprint>/<name>.<worker>/  the same, by a worker that has no lock: nobody else writes to a name with its own in it
    tmp/b-<fingerprint>/<name>.done       which of these folders is the piece, its files' sizes and checksums, and what else is known of
                                          it: appears in one step when all that is durable, and only if there is none yet

The fingerprint covers everything that decides the content of the pieces: the documents, the model, the settings, the codec that is there.
Work of another fingerprint is left alone, so that an unrelated addition goes ahead of one that was killed, which resumes when it is
repeated. Work that nobody resumes expires (`quiver.retrieval.index.store.writing.UNFINISHED_SECONDS`). Nothing in a piece depends on the
generation that is committed at the time: which ids exist already is looked up under the writers' lock whenever the work is resumed.

Two workers that make the same piece make the same bytes, and whichever is first is taken.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quiver.retrieval.index.disk import Disk, link_if_absent, remove_tree, write_file
from quiver.retrieval.index.errors import DamagedIndexError, unreadable
from quiver.retrieval.index.store.layout import Layout
from quiver.retrieval.index.store.manifest import FileEntry
from quiver.retrieval.index.store.reading import verify_files
from quiver.retrieval.index.store.writing import seal

logger = logging.getLogger(__name__)

_SUFFIX = ".done"


@dataclass(frozen=True)
class Finished:
    """A piece that is finished.

    Attributes:
        folder: Where its files are.
        holds: Its files, file name -> what it holds.
        facts: What else is known of it.
    """

    folder: Path
    holds: Mapping[str, str]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class PieceFolders:
    """Makes pieces in the folder of a build that is there.

    Attributes:
        folder: The folder.
        disk: Takes all changes.
        worker: Name of a worker, which nobody else has; empty for the process that holds the lock.
    """

    folder: Path
    disk: Disk
    worker: str = ""

    def finished(self, name: str) -> Finished | None:
        """A piece that is finished and whole; None for one that is to be made.

        Raises:
            InputError: It cannot be read, for a reason that is not damage, such as too many open files.
        """
        marker = self._marker(name)
        if not marker.is_file():
            return None
        try:
            content = _read_marker(marker)
            files = {file: FileEntry(**entry) for file, entry in content["files"].items()}
            folder = self.folder / content["folder"]
            verify_files(folder, files, full=True)
        except (DamagedIndexError, KeyError, TypeError) as error:
            # Not the whole error, which says what to do about an index: a commit that was killed has taken the files, or they are damaged.
            logger.warning("%s: its files are missing or damaged; this piece of the build is made again", self.folder / name)
            logger.debug("%s: %s", name, error)
            return None
        return Finished(folder, {file: entry.holds for file, entry in files.items()}, content["facts"])

    def discard(self, name: str) -> None:
        """Forget a piece that is not whole; for the process that holds the lock."""
        if self._marker(name).exists():
            self.disk.unlink(self._marker(name))

    def begin(self, name: str) -> Path:
        """An empty folder for a piece; what was there under that name is thrown away."""
        if not self.worker:
            self.discard(name)
        folder = self.folder / (f"{name}.{self.worker}" if self.worker else name)
        if folder.exists():
            remove_tree(folder, self.disk)
        self.disk.mkdir(folder)
        return folder

    def finish(self, name: str, folder: Path, holds: Mapping[str, str], facts: Mapping[str, Any]) -> Finished:
        """Make a piece durable, and note that it is finished.

        Args:
            name: The piece.
            folder: What ``begin`` gave.
            holds: Its files, file name -> what it holds.
            facts: What else is to be known of it, as JSON has it.

        Returns:
            The piece; where another worker was faster, that worker's.
        """
        files = {file: asdict(entry) for file, entry in seal(folder, holds, self.disk).items()}
        self.disk.sync_folder(self.folder)
        content = {"folder": folder.name, "files": files, "facts": dict(facts)}
        temporary = self.folder / f"{folder.name}.tmp"
        if temporary.exists():  # of this worker's own, or of a process that held the lock and was killed
            self.disk.unlink(temporary)
        write_file(temporary, json.dumps({**content, "checksum": _digest(content)}).encode(), self.disk)
        try:
            link_if_absent(temporary, self._marker(name), self.disk)
        except FileExistsError:
            self.disk.unlink(temporary)
            remove_tree(folder, self.disk)
            if (other := self.finished(name)) is None:
                raise
            return other
        self.disk.sync_folder(self.folder)
        return Finished(folder, dict(holds), dict(facts))

    def _marker(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"


class WorkFolder:
    """The folder of one build; the lock of the index is held.

    Args:
        layout: The index.
        plan: Everything that decides the result, as JSON has it.
        disk: Takes all changes.

    Attributes:
        folder: The folder.
        pieces: What is in it.
    """

    def __init__(self, layout: Layout, plan: Mapping[str, Any], *, disk: Disk) -> None:
        self._disk = disk
        self._layout = layout
        self.folder = layout.pieces(_digest(plan)[:24])
        self.pieces = PieceFolders(self.folder, disk)
        if self.folder.is_dir():
            logger.info("%s: going on with the build that was interrupted", layout.root)
        else:
            disk.mkdir(self.folder)
            disk.sync_folder(layout.temporary)

    @property
    def names(self) -> list[str]:
        """The pieces that are finished."""
        return sorted(path.stem for path in self.folder.iterdir() if path.suffix == _SUFFIX)

    def remove(self) -> None:
        """Remove the folder with all pieces."""
        # Renamed first: a worker whose build was killed may be about to make one more file in it, and now cannot. What is left of a
        # folder of this name is removed by whoever writes to the index next.
        doomed = self._layout.doomed(self.folder.name)
        self._disk.rename(self.folder, doomed)
        remove_tree(doomed, self._disk)


def _read_marker(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise DamagedIndexError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict) or content.pop("checksum", None) != _digest(content):
        raise DamagedIndexError(f"{path}: its checksum does not match")
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
