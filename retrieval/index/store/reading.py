"""A committed generation of an index: the paths of its files, its manifest, and how it is read.

    DIR/FORMAT                              format name and version
    DIR/HEAD                                number of the newest generation and a copy of its manifest
    DIR/LOCK                                held by the writing process
    DIR/manifests/m-<generation>.json       one committed state each, never changed
    DIR/codec/c-<sha256>/                   data that all segments share, never changed
    DIR/segments/s-<generation>-<number>/   documents and their vectors, never changed
    DIR/tombstones/t-<segment>-<generation> deleted rows of a segment, one bit each
    DIR/quarantine/<generation>/            files replaced by a repair; nothing reads them, and only their owner deletes them
    DIR/tmp/                                uncommitted files; only the holder of the lock touches them
    DIR/tmp/b-<fingerprint>/                pieces of a build that may be resumed; everything else is garbage once its writer has ended

The manifest describes one generation completely, with checksums of itself and of every file. It is JSON, so that people and other programs
can read it. Unknown fields are rejected, because they would change what the index means. Generation numbers are never reused.

Readers take no lock. Opened files stay readable as long as they are open, because files are never changed and a mapping outlives the name
of its file. Only a reader that is still opening the index can find files missing, if two commits have happened since it read the manifest;
it then starts again with the newer manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from quiver.encoder.errors import InputError
from quiver.encoder.schema import RECORD, Count, Field, SchemaError, parse_record, with_config
from quiver.retrieval.index.files import (
    DIGEST,
    FORMAT,
    VERSION,
    DamagedIndexError,
    FileEntry,
    Files,
    count_blocks,
    digests_sha256,
    file_digests,
    format_version,
    missing_file,
    read_around,
    read_digests,
    unreadable,
)
from quiver.retrieval.records import ModelCard, TokenCounts

_RESUMABLE = re.compile(r"b-[0-9a-f]+")
_DOOMED = "removed-"
_MANIFEST = re.compile(r"m-([0-9]{12})\.json")

# Row numbers have 32 bits.
_MOST_DOCUMENTS = 1 << 32

Opened = TypeVar("Opened")

NOTHING_COMMITTED = "nothing has been committed, the build was never finished; run the same one again, which resumes"
"""Error message for an index whose first build was interrupted."""

# Files that are parsed, not mapped, are always verified completely when they are opened.
_ALWAYS_HASHED = (".faiss", ".json")


class Layout:
    """Paths in the folder of an index."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.format, self.head, self.lock, self.quarantine = (root / name for name in ("FORMAT", "HEAD", "LOCK", "quarantine"))
        self.folders = tuple(root / name for name in ("manifests", "codec", "segments", "tombstones", "tmp"))
        self.manifests, self.codecs, self.segments, self.tombstones, self.temporary = self.folders

    def pieces(self, fingerprint: str) -> Path:
        """Folder of the pieces of a build."""
        return self.temporary / f"b-{fingerprint}"

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


def is_resumable(name: str) -> bool:
    """Whether an entry of the temporary folder is a build that can be resumed."""
    return _RESUMABLE.fullmatch(name) is not None


def _check_name(valid: re.Pattern[str], what: str, name: str) -> str:
    """Check a name: paths are made from it, and must not lead outside the folder."""
    if not valid.fullmatch(name):
        raise PydanticCustomError("name", "{shown} is not the name of {what}", {"shown": repr(name), "what": what})
    return name


# [0-9] instead of \d, which also matches other Unicode digits.
FileName: TypeAlias = Annotated[str, AfterValidator(partial(_check_name, re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]*"), "a file"))]
CodecName: TypeAlias = Annotated[str, AfterValidator(partial(_check_name, re.compile(r"c-[0-9a-f]{24}"), "a codec"))]
SegmentName: TypeAlias = Annotated[str, AfterValidator(partial(_check_name, re.compile(r"s-[0-9]{12}-[0-9]{4}"), "a segment"))]
TombstonesName: TypeAlias = Annotated[
    str, AfterValidator(partial(_check_name, re.compile(r"t-s-[0-9]{12}-[0-9]{4}-[0-9]{12}"), "tombstones"))
]


@dataclass(frozen=True)
class TombstonesEntry:
    """The deleted documents of a segment."""

    name: TombstonesName  # name of the file in the folder of tombstones
    documents: Count  # number of deleted documents
    bytes: Count  # size of the file, which holds two copies
    sha256: str  # SHA-256 of one copy


@dataclass(frozen=True)
class SegmentEntry:
    """One segment of a generation."""

    name: SegmentName  # name of its folder
    documents: Annotated[int, Field(ge=0, lt=_MOST_DOCUMENTS)]  # number of rows, including deleted ones
    vectors: Count  # number of vectors, including those of deleted documents
    tokens: TokenCounts  # token counts of its documents
    files: Mapping[FileName, FileEntry]  # entries of its files, by name
    deleted: TombstonesEntry | None  # the deleted documents; None if there are none

    @property
    def alive(self) -> int:
        """Number of documents that are not deleted."""
        return self.documents - (self.deleted.documents if self.deleted else 0)


@dataclass(frozen=True)
class CodecEntry:
    """The codec of all segments."""

    engine: str  # name of the engine
    name: CodecName  # name of its folder
    parameters: Mapping[str, str | int | float | bool | None]  # sizes and settings for reports
    files: Mapping[FileName, FileEntry]  # entries of its files, by name


@dataclass(frozen=True)
class Policy:
    """How documents are encoded, and what is stored of them.

    Attributes:
        use_title: Whether titles are encoded before the texts.
        separator: String between title and text.
        store_text: Whether the index stores texts.
        fields: Metadata fields that filters can test; None for all.
        types: Type of each field that filters can test, see `quiver.retrieval.data.entries`.
    """

    use_title: bool = True
    separator: str = " "
    store_text: bool = True
    fields: Sequence[str] | None = None
    types: Mapping[str, str] = field(default_factory=dict)


@with_config(RECORD)
@dataclass(frozen=True)
class Manifest:
    """One committed generation of an index.

    Attributes:
        created: Time of the commit, UTC, ISO 8601.
        operation: build, add, delete, compact, calibrate or repair.
        versions: Versions of the packages that created it, by name.
        model: Card of the model whose vectors the index holds, with width, similarity and fingerprint.
        segments: The segments, in the order in which documents were added.
        calibration: Output of `quiver.retrieval.index.recall_table.Calibration.to_json`; None if the index is not calibrated.
    """

    generation: Count
    created: str
    operation: str
    versions: Mapping[str, str]
    model: ModelCard
    policy: Policy
    codec: CodecEntry
    segments: tuple[SegmentEntry, ...]
    calibration: Mapping[str, Any] | None = field(default=None)

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
        return total_counts([segment.tokens for segment in self.segments])

    @property
    def bytes(self) -> int:
        """Size of all files in bytes, without the manifest."""
        sizes = [entry.bytes for files in (self.codec.files, *(segment.files for segment in self.segments)) for entry in files.values()]
        checksums = DIGEST * sum(map(count_blocks, sizes))
        return sum(sizes) + checksums + sum(segment.deleted.bytes for segment in self.segments if segment.deleted)


def total_counts(counts: Sequence[TokenCounts]) -> TokenCounts:
    """The sum of the token counts of several sets of texts."""
    return TokenCounts(*(sum(getattr(count, field.name) for count in counts) for field in fields(TokenCounts)))


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
    """Parse the content of a manifest's file, which errors name; see `read_manifest`."""
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
        manifest = parse_record(Manifest, content, source=str(path))
        problems = _impossible(manifest)
    except SchemaError as error:
        problems = error.problems
    if problems:
        said = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in "; ".join(problems))
        raise InputError(f"{path}: not a manifest of version {VERSION} ({said}); build the index again")
    return replace(manifest, model=replace(manifest.model, source=content["model"]["source"]))  # may have lone surrogates


def version_problem(version: int) -> str:
    """Error message for an index of another format version, with the remedy."""
    remedy = "update Quiver" if version > VERSION else "build the index again"
    return f"index format version {version}, this version of Quiver reads version {VERSION}; {remedy}"


def _impossible(manifest: Manifest) -> list[str]:
    """Relations between fields of a manifest that do not hold."""
    problems = [
        f"{segment.name} has {segment.documents} documents, but more are deleted" for segment in manifest.segments if segment.alive < 0
    ]
    names = {segment.name for segment in manifest.segments}
    return ["two segments have the same name", *problems] if len(names) < len(manifest.segments) else problems


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_format(layout: Layout) -> None:
    """Check that a folder is an index of this format version.

    Raises:
        DamagedIndexError: It is an index, but its FORMAT file is missing or damaged.
        InputError: It is not an index, or has another format version (names it).
    """
    version = format_version(layout.root)
    if version is None:
        if layout.generations():
            raise DamagedIndexError(f"{layout.format}: missing or changed; the index is damaged, run quiver index repair")
        root = layout.root
        what = "the folder is not an index" if root.is_dir() else "a file, not an index folder"
        what = f"{what}; quiver index build makes one of documents" if root.exists() else "no such folder"
        raise InputError(f"{root}: {what}")
    if version != VERSION:
        raise InputError(f"{layout.root}: {version_problem(version)}")


def newest_manifest(layout: Layout) -> Manifest:
    """Read the newest manifest.

    Raises:
        DamagedIndexError: The newest manifest is missing or damaged; names the newest generation known to have existed.
        InputError: The folder is not an index, has another format version, or has no committed generation.
    """
    check_format(layout)
    while True:
        known = head_generation(layout)  # read first: a generation is committed before the head names it
        generations = layout.generations()
        if not generations and (known == 0 or (known is None and not entries(layout.segments))):
            raise InputError(f"{layout.root}: {NOTHING_COMMITTED}")
        if known is None:
            raise _not_newest(layout, f"{layout.head}: missing or changed, so the newest generation is unknown", generations)
        if not generations or generations[-1] < known:
            raise _not_newest(layout, f"{layout.manifest(known)}: missing, and it is the newest generation", generations)
        try:
            return read_manifest(layout.manifest(generations[-1]))
        except FileNotFoundError as error:
            if generations == layout.generations():  # a link that leads nowhere
                raise unreadable(layout.manifest(generations[-1]), error) from error
        except DamagedIndexError as error:
            raise _not_newest(layout, f"generation {generations[-1]} is the newest, but {error}", generations[:-1]) from error


def read_generation(layout: Layout, generation: int) -> Manifest:
    """Read the manifest of a given generation; raises DamagedIndexError if it is damaged, InputError if it does not exist."""
    check_format(layout)
    try:
        return read_manifest(layout.manifest(generation))
    except FileNotFoundError as error:
        there = ", ".join(map(str, layout.generations())) or "none"
        raise InputError(f"{layout.root}: generation {generation} does not exist; there are {there}") from error


def head_generation(layout: Layout) -> int | None:
    """The newest committed generation according to HEAD; 0 before the first commit, None if HEAD is missing or damaged."""
    content = read_around(layout.head, Path.read_bytes)
    if content is None:
        return None
    named = [_named(line) for line in content.split(b"\n", 2)[:2]]
    return max((generation for generation in named if generation is not None), default=None)


def head_bytes(generation: int, manifest: bytes) -> bytes:
    """Content of HEAD: two identical lines that name the generation, so that one may be damaged, and a copy of its manifest."""
    return 2 * _head_line(generation) + manifest


def head_manifest(layout: Layout) -> bytes:
    """The copy of the newest manifest in HEAD; empty if there is none."""
    parts = (read_around(layout.head, Path.read_bytes) or b"").split(b"\n", 2)
    return parts[2] if len(parts) == 3 else b""


def _head_line(generation: int) -> bytes:
    said = f"{FORMAT} generation {generation}"
    return f"{said} {hashlib.sha256(said.encode()).hexdigest()[:16]}\n".encode()


def _named(line: bytes) -> int | None:
    words = line.split()
    if len(words) != 4 or not words[2].isdigit():
        return None
    generation = int(words[2])
    return generation if _head_line(generation) == line + b"\n" else None


def _not_newest(layout: Layout, problem: str, older: Sequence[int]) -> DamagedIndexError:
    """Error if the newest generation cannot be opened. Older ones lack later changes, so they are opened only by number."""
    remedy = "quiver index repair --dry-run says what can be restored"
    if older:
        remedy += f"; --generation {older[-1]} (generation={older[-1]} in Python) opens that older state as it was"
    return DamagedIndexError(f"{problem}; {remedy}")


def open_newest(layout: Layout, opener: Callable[[Manifest], Opened]) -> Opened:
    """Open the newest generation, or a newer one committed meanwhile; the opener raises FileNotFoundError or InputError for a missing file.

    Raises:
        DamagedIndexError: A file is missing or damaged.
        InputError: As `newest_manifest`.
    """
    while True:
        manifest = newest_manifest(layout)
        try:
            return opener(manifest)
        except (FileNotFoundError, InputError) as error:
            if layout.generations()[-1:] == [manifest.generation]:
                if isinstance(error, FileNotFoundError):
                    raise missing_file(Path(error.filename)) from error
                raise


def open_files(folder: Path, files: Mapping[str, FileEntry], *, verify: bool) -> Files:
    """Open the files of a folder; if ``verify``, each block is verified when it is first read. Files that are parsed always are."""
    digests = read_digests(folder, files)
    checked = {name: each for name, each in digests.items() if verify or name.endswith(_ALWAYS_HASHED)}
    return Files(folder, checked, sizes={name: entry.bytes for name, entry in files.items()})


def verify_files(folder: Path, files: Mapping[str, FileEntry], *, full: bool) -> None:
    """Compare the files of a folder with the manifest: sizes, and with ``full`` all checksums, else those of files that are parsed.

    Raises:
        DamagedIndexError: A file is missing, truncated or changed (names it).
        InputError: A file cannot be read for a reason other than damage.
    """
    for name, entry in files.items():
        verify_file(folder / name, entry.bytes, entry.sha256 if full or name.endswith(_ALWAYS_HASHED) else None)


def verify_file(path: Path, size: int, sha256: str | None) -> None:
    """Verify the size and, if given, the checksum of a file; raises as `verify_files`."""
    try:
        found = path.stat().st_size
        if found != size:
            raise DamagedIndexError(f"{path}: {found} bytes, but {size} were written; the index is damaged, run quiver index repair")
        if sha256 is not None and digests_sha256(file_digests(path)) != sha256:
            raise DamagedIndexError(f"{path}: the content has changed since it was written; the index is damaged, run quiver index repair")
    except OSError as error:
        raise unreadable(path, error) from error


def read_alive(layout: Layout, segment: SegmentEntry) -> NDArray[np.bool_] | None:
    """Bitmap of the rows of a segment that are not deleted, (documents,); None if none is deleted.

    Raises:
        DamagedIndexError: The tombstones are missing, or both copies in their file have changed.
    """
    if segment.deleted is None:
        return None
    whole = [bits for bits in _tombstones(layout, segment.deleted) if bits is not None]
    path = layout.tombstones / segment.deleted.name
    if not whole:
        raise DamagedIndexError(f"{path}: the content has changed since it was written; the index is damaged, run quiver index repair")
    if len(whole[0]) != -(-segment.documents // 8):
        raise DamagedIndexError(f"{path}: does not fit its segment; the index is damaged, run quiver index repair")
    alive: NDArray[np.bool_] = np.unpackbits(whole[0], count=segment.documents, bitorder="little") == 0
    if int(np.count_nonzero(alive)) != segment.alive:
        raise DamagedIndexError(f"{path}: does not fit its segment; the index is damaged, run quiver index repair")
    return alive


def verify_alive(layout: Layout, segment: SegmentEntry) -> None:
    """Verify both copies of a segment's tombstones; raises DamagedIndexError."""
    read_alive(layout, segment)
    if segment.deleted is not None and any(bits is None for bits in _tombstones(layout, segment.deleted)):
        path = layout.tombstones / segment.deleted.name
        raise DamagedIndexError(f"{path}: one of its two copies has changed; quiver index repair writes it again")


def _tombstones(layout: Layout, entry: TombstonesEntry) -> list[NDArray[np.uint8] | None]:
    """The two copies of the tombstones; None for a damaged one."""
    path = layout.tombstones / entry.name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    half = entry.bytes // 2
    copies = [content[:half], content[half : entry.bytes]]
    return [np.frombuffer(copy, np.uint8) if hashlib.sha256(copy).hexdigest() == entry.sha256 else None for copy in copies]


def tombstones_bytes(alive: NDArray[np.bool_]) -> bytes:
    """Content of tombstones: one bit per row, set if it is deleted."""
    return np.packbits(~alive, bitorder="little").tobytes()
