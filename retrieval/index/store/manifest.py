"""The manifest: everything that is known of one committed state of an index, with a checksum of itself and of every file.

It is JSON, so that people and other programs can read it. Unknown fields are refused: they would change what the index means.
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

# Rows are numbered in 32 bits.
_MOST_DOCUMENTS = 1 << 32


@dataclass(frozen=True)
class FileEntry:
    """One file.

    Attributes:
        holds: What it holds.
        bytes: Its size.
        sha256: Of the digests of its blocks (`quiver.retrieval.index.mapped`).
    """

    holds: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class TombstonesEntry:
    """Which documents of a segment are deleted.

    Attributes:
        name: The file in the folder of tombstones.
        documents: How many are deleted.
        bytes: Size of the file, which holds them twice.
        sha256: Of either copy.
    """

    name: str
    documents: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SegmentEntry:
    """One segment of a generation.

    Attributes:
        name: Its folder.
        documents: Rows it has, deleted ones included.
        vectors: Vectors it has, those of deleted documents included.
        tokens: What tokenising did to its documents.
        files: File name -> what it holds, its size and its checksum.
        deleted: Which rows are deleted; None where none is.
    """

    name: str
    documents: int
    vectors: int
    tokens: TokenCounts
    files: Mapping[str, FileEntry]
    deleted: TombstonesEntry | None = None

    @property
    def alive(self) -> int:
        """Documents that are not deleted."""
        return self.documents - (self.deleted.documents if self.deleted else 0)


@dataclass(frozen=True)
class CodecEntry:
    """What all segments share.

    Attributes:
        engine: Name of the engine.
        name: Its folder.
        parameters: What a report says beside the name.
        files: File name -> what it holds, its size and its checksum.
    """

    engine: str
    name: str
    parameters: Mapping[str, str | int | float | bool | None]
    files: Mapping[str, FileEntry]


@dataclass(frozen=True)
class Policy:
    """How documents became vectors, and what is kept of them.

    Attributes:
        use_title: Whether titles were encoded before the texts.
        separator: What stood between title and text.
        store_text: Whether the documents' texts are in the index.
        fields: The fields of the metadata that can be filtered by; None for all.
    """

    use_title: bool = True
    separator: str = " "
    store_text: bool = True
    fields: Sequence[str] | None = None


@dataclass(frozen=True)
class Manifest:
    """A committed state of an index.

    Attributes:
        generation: Its number.
        created: When it was committed, UTC, ISO 8601.
        operation: What made it: build, add, delete, compact, calibrate or repair.
        versions: Package -> version that made it.
        model: The model whose vectors it holds, with width, similarity and fingerprint.
        policy: How documents became vectors.
        codec: What all segments share.
        segments: The segments, in the order in which documents were added.
        calibration: What was measured of its search, as `quiver.retrieval.index.recall_table` writes it; None where nothing was.
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
        """Documents that are in the index."""
        return sum(segment.alive for segment in self.segments)

    @property
    def deleted(self) -> int:
        """Documents that are deleted and still take room."""
        return sum(segment.documents - segment.alive for segment in self.segments)

    @property
    def vectors(self) -> int:
        """Vectors it holds, those of deleted documents included."""
        return sum(segment.vectors for segment in self.segments)

    @property
    def tokens(self) -> TokenCounts:
        """What tokenising did to the documents, deleted ones included."""
        counts = [segment.tokens for segment in self.segments]
        return TokenCounts(*(sum(getattr(count, name.name) for count in counts) for name in fields(TokenCounts)))

    @property
    def bytes(self) -> int:
        """Size of all files, the manifest left out."""
        sizes = [entry.bytes for files in (self.codec.files, *(segment.files for segment in self.segments)) for entry in files.values()]
        checksums = DIGEST * sum(map(count_blocks, sizes))
        return sum(sizes) + checksums + sum(segment.deleted.bytes for segment in self.segments if segment.deleted)


def manifest_bytes(manifest: Manifest) -> bytes:
    """The manifest as its file has it; half a surrogate pair, which a path may hold, stands there as JSON's escape of it."""
    content = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    return (json.dumps({**content, "checksum": _checksum(content)}, indent=2, ensure_ascii=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


def read_manifest(path: Path) -> Manifest:
    """Read a manifest and compare its checksum.

    Raises:
        FileNotFoundError: It is gone.
        DamagedIndexError: It is not what was written, or that of another generation.
        InputError: It is of another format version, or may not be read.
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
    """The manifest that some bytes hold; see `read_manifest`.

    Args:
        stored: The content of a file.
        path: The file, for messages.
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
    """What to do about an index of another format version."""
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
        raise ValueError("a folder's name is none that Quiver gives")
    return _checked(manifest)


def _to_segment(content: dict[str, Any]) -> SegmentEntry:
    deleted = content["deleted"]
    if deleted is not None:
        deleted = _checked(TombstonesEntry(**deleted))
        if not is_tombstones(deleted.name):
            raise ValueError("the name of tombstones is none that Quiver gives")
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
    """The record itself, once its words are words and its numbers whole and not negative: the sizes of arrays come from them."""
    for each in fields(record):
        value = getattr(record, each.name)
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if (each.type == "int" and not whole) or (each.type == "str" and not isinstance(value, str)):
            raise TypeError(f"{each.name} is {value!r}")
    return record


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
