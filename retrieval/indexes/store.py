"""The folder of an index: a manifest with checksums, files that are written once, commits that are whole or not there.

    DIR/manifest.json        what the index is, and the size and sha256 of every file; carries a checksum of itself
    DIR/g-1a2b3c4d5e6f/...   the files of one generation

A new index is written beside its target and renamed into place. Overwriting moves a new generation in beside the old one, replaces
the manifest in one step and then removes the old files, so that after a kill at any instruction the folder opens as the old or as the
new index. Readers take no lock: an index that is open stays readable while it is overwritten, and only an opening that falls into that
very moment finds its files gone and has to be repeated. This module knows nothing of vectors or models; no file is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from encoder.data_files import file_sha256
from encoder.errors import InputError
from encoder.files import sync_folder
from retrieval.records import ModelCard, TokenCounts

FORMAT = "quiver-index"
VERSION = 1
MANIFEST = "manifest.json"
_GENERATION = re.compile(r"g-[0-9a-f]{12}")


@dataclass(frozen=True)
class FileEntry:
    """One file of an index: what it holds, its size in bytes and the sha256 of its content."""

    holds: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Description:
    """What is known of an index before its files are.

    Attributes:
        kind: Which index reads the files, such as ``exact-dense``.
        count: Number of documents.
        created: When it was built, UTC, ISO 8601.
        versions: Package -> version that built it.
        model: The model whose vectors it holds, with width, similarity and fingerprint.
        use_title: Whether titles were encoded before the texts.
        separator: What stood between title and text.
        store_text: Whether the documents' texts are in the index.
        tokens: What tokenising did to the documents.
    """

    kind: str
    count: int
    created: str
    versions: Mapping[str, str]
    model: ModelCard
    use_title: bool
    separator: str
    store_text: bool
    tokens: TokenCounts


@dataclass(frozen=True)
class Manifest(Description):
    """A committed index.

    Attributes:
        generation: The subfolder that holds the files.
        files: File name -> what it holds, its size and its checksum.
    """

    generation: str
    files: Mapping[str, FileEntry]


@dataclass(frozen=True)
class Staging:
    """An index that is being written: nobody finds it before ``commit``.

    Attributes:
        target: Where the index will be.
        root: Temporary folder beside it.
        generation: Name of the subfolder of ``root`` that takes the files.
        replaces: Whether an index is at the target.
    """

    target: Path
    root: Path
    generation: str
    replaces: bool

    @property
    def data(self) -> Path:
        """The folder to write the index's files into."""
        return self.root / self.generation


@contextmanager
def staging(target: Path, *, overwrite: bool) -> Iterator[Staging]:
    """A place to write an index to; what has not been committed when the block ends is removed.

    A process that is killed leaves a folder ``.<name>.<hex>.building`` beside the target, which may be deleted.

    Args:
        target: Folder of the index; it may be missing or empty.
        overwrite: Allows an index to be there, which is replaced. Never another folder with files in it.

    Raises:
        InputError: The target is taken, or the folder above it cannot be written.
    """
    target = target.resolve()
    replaces = _is_index(target)
    if replaces and not overwrite:
        raise InputError(f"{target}: there is an index already; choose another folder or ask for it to be overwritten")
    if not replaces and (target.is_file() or (target.is_dir() and any(target.iterdir()))):
        raise InputError(f"{target}: not empty and not an index; choose another folder")
    root = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}.building"
    place = Staging(target, root, f"g-{uuid.uuid4().hex[:12]}", replaces)
    try:
        place.data.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error.strerror})") from error
    try:
        yield place
    finally:
        shutil.rmtree(root, ignore_errors=True)


def commit(place: Staging, description: Description, holds: Mapping[str, str]) -> Manifest:
    """Make a staged index durable and put it in its place.

    Args:
        place: Where its files have been written.
        description: What the index is.
        holds: Every file in ``place.data`` -> what it holds.

    Raises:
        InputError: In the meantime somebody put another folder at the target.
    """
    files = {}
    for name in sorted(holds):
        path = place.data / name
        _sync_file(path)
        files[name] = FileEntry(holds[name], path.stat().st_size, file_sha256(path))
    manifest = Manifest(
        **{name: getattr(description, name) for name in Description.__dataclass_fields__}, generation=place.generation, files=files
    )
    (place.root / MANIFEST).write_text(_manifest_text(manifest), encoding="utf-8")
    _sync_file(place.root / MANIFEST)
    for folder in (place.data, place.root):
        sync_folder(folder)
    if place.replaces:
        _replace(place)
    else:
        try:
            place.root.rename(place.target)
        except OSError as error:
            raise InputError(f"{place.target}: cannot be put there ({error.strerror})") from error
        sync_folder(place.target.parent)
    return manifest


def open_folder(path: Path, *, verify: bool = True) -> tuple[Manifest, Path]:
    """Read the manifest of an index and check its files against it.

    Args:
        path: Folder of the index.
        verify: Read every file and compare its sha256; otherwise sizes alone are compared.

    Returns:
        The manifest and the folder of its files.

    Raises:
        InputError: Not an index, one of another format version, or a file that is missing, cut short or changed (named).
    """
    manifest = _read_manifest(path / MANIFEST)
    folder = path / manifest.generation
    for name, entry in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise InputError(f"{file}: missing; the index is damaged, build it again")
        size = file.stat().st_size
        if size != entry.bytes:
            raise InputError(f"{file}: {size} bytes, but {entry.bytes} were written; the index is damaged, build it again")
        if verify and file_sha256(file) != entry.sha256:
            raise InputError(f"{file}: the content has changed since it was written; the index is damaged, build it again")
    return manifest, folder


def _replace(place: Staging) -> None:
    target = place.target
    place.data.rename(target / place.generation)
    sync_folder(target)
    (place.root / MANIFEST).replace(target / MANIFEST)
    sync_folder(target)
    for folder in target.iterdir():
        if _GENERATION.fullmatch(folder.name) and folder.name != place.generation:
            shutil.rmtree(folder, ignore_errors=True)


def _is_index(path: Path) -> bool:
    """Whether a folder holds an index of ours of any version; its files may be damaged."""
    try:
        fields = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(fields, dict) and fields.get("format") == FORMAT


def _manifest_text(manifest: Manifest) -> str:
    fields = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    return json.dumps({**fields, "checksum": _checksum(fields)}, indent=2, ensure_ascii=False) + "\n"


def _checksum(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode("utf-8")).hexdigest()


def _read_manifest(path: Path) -> Manifest:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {path.parent} is not an index") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); the index is damaged, build it again") from error
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise InputError(f"{path}: not the manifest of a Quiver index")
    version = fields.pop("version", None)
    if version != VERSION:
        raise InputError(f"{path}: index format version {version}, this Quiver reads version {VERSION}; build the index again")
    checksum = fields.pop("checksum", None)
    if checksum != _checksum({"format": FORMAT, "version": VERSION, **fields}):
        raise InputError(f"{path}: its checksum does not match; the index is damaged, build it again")
    try:
        manifest = Manifest(
            **{
                **fields,
                "model": ModelCard(**fields["model"]),
                "tokens": TokenCounts(**fields["tokens"]),
                "files": {name: FileEntry(**entry) for name, entry in fields["files"].items()},
            }
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: the fields are not those of version {VERSION} ({error}); build the index again") from error
    if not _GENERATION.fullmatch(manifest.generation) or any(Path(name).name != name for name in manifest.files):
        raise InputError(f"{path}: names a file outside the index; do not use it")
    return manifest


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
