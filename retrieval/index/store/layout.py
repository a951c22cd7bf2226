"""Paths of the files of an index.

    DIR/FORMAT                              marks the folder as an index, with the format version
    DIR/HEAD                                the newest generation and a copy of its manifest
    DIR/LOCK                                held by the writing process
    DIR/manifests/m-<generation>.json       one committed state each, never changed
    DIR/codec/c-<sha256>/                   data shared by all segments, never changed
    DIR/segments/s-<generation>-<number>/   documents and their vectors, never changed
    DIR/tombstones/t-<segment>-<generation> which rows of a segment are deleted, one bit each
    DIR/quarantine/<generation>/            files replaced by a repair; nothing reads them, and only the user deletes them
    DIR/tmp/                                unfinished writes; only the holder of the lock uses it
    DIR/tmp/b-<fingerprint>/                pieces of a resumable build; everything else in tmp/ is garbage once its writer has ended

Generation numbers are never reused, even if files are lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FORMAT = "quiver-index"
VERSION = 4

_RESUMABLE = "b-"
_DOOMED = "removed-"
# [0-9] instead of \d, which also matches other Unicode digits.
_MANIFEST = re.compile(r"m-([0-9]{12})\.json")
_SEGMENT = re.compile(r"s-[0-9]{12}-[0-9]{4}")
_CODEC = re.compile(r"c-[0-9a-f]{24}")
_TOMBSTONES = re.compile(r"t-s-[0-9]{12}-[0-9]{4}-[0-9]{12}")
_FILE = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]*")


@dataclass(frozen=True)
class Layout:
    """Paths in the folder of an index.

    Attributes:
        root: The folder.
    """

    root: Path

    @property
    def format(self) -> Path:
        """File that identifies the folder as an index."""
        return self.root / "FORMAT"

    @property
    def head(self) -> Path:
        """File that names the newest generation."""
        return self.root / "HEAD"

    @property
    def quarantine(self) -> Path:
        """Folder of the files that repairs have replaced."""
        return self.root / "quarantine"

    @property
    def lock(self) -> Path:
        """The writers' lock."""
        return self.root / "LOCK"

    @property
    def manifests(self) -> Path:
        """Folder of the manifests."""
        return self.root / "manifests"

    @property
    def codecs(self) -> Path:
        """Folder of the codecs."""
        return self.root / "codec"

    @property
    def segments(self) -> Path:
        """Folder of the segments."""
        return self.root / "segments"

    @property
    def tombstones(self) -> Path:
        """Folder of the tombstones."""
        return self.root / "tombstones"

    @property
    def temporary(self) -> Path:
        """Folder of uncommitted files."""
        return self.root / "tmp"

    @property
    def folders(self) -> tuple[Path, ...]:
        """All folders of an index."""
        return self.manifests, self.codecs, self.segments, self.tombstones, self.temporary

    def pieces(self, fingerprint: str) -> Path:
        """Folder of the pieces of a build."""
        return self.temporary / f"{_RESUMABLE}{fingerprint}"

    def doomed(self, name: str) -> Path:
        """Path to which a folder is renamed before it is removed."""
        return self.temporary / f"{_DOOMED}{name}"

    def manifest(self, generation: int) -> Path:
        """Path of the manifest of a generation."""
        return self.manifests / f"m-{generation:012d}.json"

    def generations(self) -> list[int]:
        """Generations with a manifest, oldest first; empty if the folder does not exist."""
        if not self.manifests.is_dir():
            return []
        matches = (_MANIFEST.fullmatch(entry.name) for entry in self.manifests.iterdir())
        return sorted(int(match[1]) for match in matches if match)


def entries(folder: Path) -> list[Path]:
    """Content of a folder, sorted by name; empty if the folder does not exist."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def segment_name(generation: int, number: int) -> str:
    """Name of a segment, by its generation and its number among the segments added by it."""
    return f"s-{generation:012d}-{number:04d}"


def tombstones_name(segment: str, generation: int) -> str:
    """Name of the tombstones of a segment that a generation writes."""
    return f"t-{segment}-{generation:012d}"


def is_resumable(name: str) -> bool:
    """Whether an entry of the temporary folder is a build that can be resumed."""
    return name.startswith(_RESUMABLE)


def is_segment(name: str) -> bool:
    """Whether this is a valid name of a segment."""
    return bool(_SEGMENT.fullmatch(name))


def is_codec(name: str) -> bool:
    """Whether this is a valid name of a codec."""
    return bool(_CODEC.fullmatch(name))


def is_tombstones(name: str) -> bool:
    """Whether this is a valid name of tombstones."""
    return bool(_TOMBSTONES.fullmatch(name))


def is_file(name: str) -> bool:
    """Whether this is a valid file name in the folder of a segment or codec; it cannot point outside the folder."""
    return bool(_FILE.fullmatch(name))
