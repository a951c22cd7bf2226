"""The folder of a build that is under way: what is finished has a marker with its checksums, so that a killed build goes on from there.

    tmp/b-<fingerprint>/<name>/        files that are being written, or are finished
    tmp/b-<fingerprint>/<name>.done    their sizes and checksums, and what else is known of them: written when they are durable

The fingerprint is of everything that decides the result: the documents, the model, the settings. A build of something else in the same
index does not mix with it, and does not silently throw it away either.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from encoder.errors import InputError
from encoder.files import read_json
from retrieval.indexes.disk import Disk, put_file, remove_tree
from retrieval.indexes.errors import DamagedIndexError
from retrieval.indexes.store.layout import Layout
from retrieval.indexes.store.manifest import FileEntry
from retrieval.indexes.store.reading import verify_files
from retrieval.indexes.store.writing import seal

logger = logging.getLogger(__name__)

_SUFFIX = ".done"


class WorkFolder:
    """The pieces of one build; the lock of the index is held.

    Args:
        layout: The index.
        plan: Everything that decides the result, as JSON has it.
        restart: Throw away what an interrupted build of something else has left.
        disk: Takes all changes.

    Raises:
        InputError: There is an interrupted build of something else, and it is not to be thrown away.
    """

    def __init__(self, layout: Layout, plan: Mapping[str, Any], *, restart: bool, disk: Disk) -> None:
        self.disk = disk
        self.folder = layout.pieces(_digest(plan)[:24])
        for other in layout.interrupted_builds():
            if other != self.folder or restart:
                if not restart:
                    raise InputError(
                        f"{layout.root}: a build of other documents or settings was interrupted here; run that one again, which resumes, "
                        "or throw it away with --restart (restart=True)"
                    )
                remove_tree(other, disk)
        if self.folder.is_dir():
            logger.info("%s: going on with the build that was interrupted", layout.root)
        else:
            disk.mkdir(self.folder)
            disk.sync_folder(layout.temporary)

    def finished(self, name: str) -> dict[str, Any] | None:
        """What was noted of a piece that is finished and whole; None for one that is to be made."""
        marker = self.folder / f"{name}{_SUFFIX}"
        if not marker.is_file():
            return None
        try:
            content = read_json(marker)
            if content.pop("checksum", None) != _digest(content):
                raise DamagedIndexError(f"{marker}: its checksum does not match")
            files = {file: FileEntry(**entry) for file, entry in content["files"].items()}
            verify_files(self.folder / name, files, full=True)
        except (InputError, KeyError, TypeError) as error:
            logger.warning("%s: is made again (%s)", self.folder / name, error)
            return None
        return {**content["facts"], "holds": {file: entry.holds for file, entry in files.items()}}

    def begin(self, name: str) -> Path:
        """An empty folder for a piece; what is there of it is thrown away."""
        folder, marker = self.folder / name, self.folder / f"{name}{_SUFFIX}"
        if marker.exists():
            self.disk.unlink(marker)
        if folder.exists():
            remove_tree(folder, self.disk)
        self.disk.mkdir(folder)
        return folder

    def finish(self, name: str, holds: Mapping[str, str], facts: Mapping[str, Any]) -> None:
        """Make a piece durable, and note that it is finished.

        Args:
            name: The piece.
            holds: Its files, file name -> what it holds.
            facts: What else is to be known of it, as JSON has it.
        """
        files = {file: asdict(entry) for file, entry in seal(self.folder / name, holds, self.disk).items()}
        self.disk.sync_folder(self.folder)
        content = {"files": files, "facts": dict(facts)}
        marker = json.dumps({**content, "checksum": _digest(content)}).encode()
        put_file(self.folder / f"{name}{_SUFFIX}", marker, self.disk)

    @property
    def names(self) -> list[str]:
        """The pieces that are finished."""
        return sorted(path.stem for path in self.folder.iterdir() if path.suffix == _SUFFIX)

    def remove(self) -> None:
        """Remove the folder with all pieces."""
        remove_tree(self.folder, self.disk)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
