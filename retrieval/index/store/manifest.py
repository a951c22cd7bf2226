"""The manifest: a complete description of one generation of an index, with checksums of itself and of every file.

It is JSON, so that people and other programs can read it. Unknown fields are rejected, because they would change what the index means.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from quiver.encoder.errors import InputError
from quiver.retrieval.index.errors import DamagedIndexError, unreadable
from quiver.retrieval.index.mapped import DIGEST, count_blocks
from quiver.retrieval.index.store.layout import FORMAT, VERSION, Layout, is_codec, is_file, is_segment, is_tombstones
from quiver.retrieval.records import ModelCard, TokenCounts

Record = TypeVar("Record", "FileEntry", "TombstonesEntry", "SegmentEntry", "CodecEntry", "Manifest", ModelCard, TokenCounts)

# Row numbers have 32 bits.
_MOST_DOCUMENTS = 1 << 32


@dataclass(frozen=True)
class FileEntry:
    """One file.

    Attributes:
        holds: Description of its content.
        bytes: Its size in bytes.
        sha256: SHA-256 of the digests of its blocks (`quiver.retrieval.index.mapped`).
    """

    holds: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class TombstonesEntry:
    """The deleted documents of a segment.

    Attributes:
        name: Name of the file in the folder of tombstones.
        documents: Number of deleted documents.
        bytes: Size of the file, which holds two copies.
        sha256: SHA-256 of one copy.
    """

    name: str
    documents: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SegmentEntry:
    """One segment of a generation.

    Attributes:
        name: Name of its folder.
        documents: Number of rows, including deleted ones.
        vectors: Number of vectors, including those of deleted documents.
        tokens: Token counts of its documents.
        files: Entries of its files, by name.
        deleted: The deleted documents; None if there are none.
    """

    name: str
    documents: int
    vectors: int
    tokens: TokenCounts
    files: Mapping[str, FileEntry]
    deleted: TombstonesEntry | None = None

    @property
    def alive(self) -> int:
        """Number of documents that are not deleted."""
        return self.documents - (self.deleted.documents if self.deleted else 0)


@dataclass(frozen=True)
class CodecEntry:
    """The codec of all segments.

    Attributes:
        engine: Name of the engine.
        name: Name of its folder.
        parameters: Sizes and settings for reports.
        files: Entries of its files, by name.
    """

    engine: str
    name: str
    parameters: Mapping[str, str | int | float | bool | None]
    files: Mapping[str, FileEntry]


@dataclass(frozen=True)
class Policy:
    """How documents are encoded, and what is stored of them.

    Attributes:
        use_title: Whether titles are encoded before the texts.
        separator: String between title and text.
        store_text: Whether the index stores texts.
        fields: Metadata fields that filters can test; None for all.
    """

    use_title: bool = True
    separator: str = " "
    store_text: bool = True
    fields: Sequence[str] | None = None


@dataclass(frozen=True)
class Manifest:
    """One committed generation of an index.

    Attributes:
        generation: Its number.
        created: Time of the commit, UTC, ISO 8601.
        operation: Operation that created it: build, add, delete, compact, calibrate or repair.
        versions: Versions of the packages that created it, by name.
        model: Card of the model whose vectors the index holds, with width, similarity and fingerprint.
        policy: How documents are encoded.
        codec: The codec of all segments.
        segments: The segments, in the order in which documents were added.
        calibration: Output of `quiver.retrieval.index.recall_table.Calibration.to_json`; None if the index is not calibrated.
    """

    generation: int
    created: str
    operation: str
    versions: Mapping[str, str]
    model: ModelCard
    policy: Policy
    codec: CodecEntry
    segments: tuple[SegmentEntry, ...]
    calibration: Mapping[str, Any] | None = field(default=None)

    @property
    def kind(self) -> str:
        """Name of the engine."""
        return self.codec.engine

    @property
    def documents(self) -> int:
        """Number of documents that are not deleted."""
        return sum(segment.alive for segment in self.segments)

    @property
    def deleted(self) -> int:
        """Number of deleted documents that still take up disk space."""
        return sum(segment.documents - segment.alive for segment in self.segments)

    @property
    def vectors(self) -> int:
        """Number of vectors, including those of deleted documents."""
        return sum(segment.vectors for segment in self.segments)

    @property
    def tokens(self) -> TokenCounts:
        """Token counts of the documents, including deleted ones."""
        counts = [segment.tokens for segment in self.segments]
        return TokenCounts(*(sum(getattr(count, name.name) for count in counts) for name in fields(TokenCounts)))

    @property
    def bytes(self) -> int:
        """Size of all files in bytes, without the manifest."""
        sizes = [entry.bytes for files in (self.codec.files, *(segment.files for segment in self.segments)) for entry in files.values()]
        checksums = DIGEST * sum(map(count_blocks, sizes))
        return sum(sizes) + checksums + sum(segment.deleted.bytes for segment in self.segments if segment.deleted)


def manifest_bytes(manifest: Manifest) -> bytes:
    """Content of the manifest's file; a lone surrogate, which a path may contain, is written as a JSON escape."""
    content = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    return (json.dumps({**content, "checksum": _checksum(content)}, indent=2, ensure_ascii=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


def read_manifest(path: Path) -> Manifest:
    """Read a manifest and verify its checksum.

    Raises:
        FileNotFoundError: The file does not exist.
        DamagedIndexError: The content is damaged, or belongs to another generation.
        InputError: It has another format version, or the file cannot be read for a reason other than damage.
    """
    try:
        stored = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    manifest = parse_manifest(stored, path)
    if path.name != Layout(path.parent).manifest(manifest.generation).name:
        raise DamagedIndexError(
            f"{path}: is the manifest of generation {manifest.generation}; the index is damaged, run quiver index repair"
        )
    return manifest


def parse_manifest(stored: bytes, path: Path) -> Manifest:
    """Parse the content of a manifest's file; see `read_manifest`.

    Args:
        stored: Content of the file.
        path: The file, for error messages.
    """
    try:
        content = json.loads(stored)
    except (ValueError, RecursionError) as error:
        raise DamagedIndexError(f"{path}: not JSON ({error}); the index is damaged, run quiver index repair") from error
    if not isinstance(content, dict) or content.pop("checksum", None) != _checksum(content):
        raise DamagedIndexError(f"{path}: its checksum does not match; the index is damaged, run quiver index repair")
    version = content.pop("version", None)
    if content.pop("format", None) != FORMAT or not isinstance(version, int):
        raise InputError(f"{path}: not the manifest of a Quiver index")
    if version != VERSION:
        raise InputError(f"{path}: {version_problem(version)}")
    try:
        return _to_manifest(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: the fields are not those of version {VERSION} ({error}); build the index again") from error


def version_problem(version: int) -> str:
    """Error message for an index of another format version, with the remedy."""
    remedy = "update Quiver" if version > VERSION else "build the index again"
    return f"index format version {version}, this Quiver reads version {VERSION}; {remedy}"


def _to_manifest(content: dict[str, Any]) -> Manifest:
    codec, segments = content["codec"], content["segments"]
    manifest = Manifest(
        **{
            **content,
            "model": _checked(ModelCard(**content["model"])),
            "policy": Policy(**content["policy"]),
            "codec": _checked(CodecEntry(**{**codec, "files": _files(codec["files"])})),
            "segments": tuple(_to_segment(segment) for segment in segments),
        }
    )
    names = [manifest.codec.name, *(segment.name for segment in manifest.segments)]
    if not is_codec(names[0]) or not all(map(is_segment, names[1:])) or len(set(names)) < len(names):
        raise ValueError("the name of a folder is not one that Quiver writes")
    return _checked(manifest)


def _to_segment(content: dict[str, Any]) -> SegmentEntry:
    deleted = content["deleted"]
    if deleted is not None:
        deleted = _checked(TombstonesEntry(**deleted))
        if not is_tombstones(deleted.name):
            raise ValueError("the name of a tombstone file is not one that Quiver writes")
    tokens, files = _checked(TokenCounts(**content["tokens"])), _files(content["files"])
    segment = _checked(SegmentEntry(**{**content, "tokens": tokens, "files": files, "deleted": deleted}))
    if segment.documents >= _MOST_DOCUMENTS or segment.alive < 0:
        raise ValueError(f"{segment.documents} documents, {segment.alive} of them not deleted")
    return segment


def _files(content: dict[str, Any]) -> dict[str, FileEntry]:
    for name in content:
        if not is_file(name):
            raise ValueError(f"{name!r} is not the name of a file")
    return {name: _checked(FileEntry(**entry)) for name, entry in content.items()}


def _checked(record: Record) -> Record:
    """Check that the strings of a record are strings and its numbers non-negative integers, since array sizes are computed from them."""
    for each in fields(record):
        value = getattr(record, each.name)
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if (each.type == "int" and not whole) or (each.type == "str" and not isinstance(value, str)):
            raise TypeError(f"{each.name} is {value!r}")
    return record


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
