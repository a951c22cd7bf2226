"""Check an index: read every byte and compare it with its checksum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quiver.encoder.errors import InputError
from quiver.retrieval.index.errors import DamagedIndexError
from quiver.retrieval.index.mapped import CHECKSUMS, read_digests
from quiver.retrieval.index.store.layout import Layout, entries
from quiver.retrieval.index.store.manifest import FileEntry, Manifest, parse_manifest, read_manifest
from quiver.retrieval.index.store.reading import check_format, head_bytes, head_generation, head_manifest, verify_alive, verify_file
from quiver.retrieval.index.store.writing import unreferenced


@dataclass(frozen=True)
class GenerationReport:
    """Result of checking one generation.

    Attributes:
        generation: Its number.
        manifest: Its manifest; None if damaged.
        problems: Descriptions of the damage, one line each.
    """

    generation: int
    manifest: Manifest | None
    problems: tuple[str, ...]


@dataclass(frozen=True)
class CheckReport:
    """Result of `check_index`.

    Attributes:
        generations: All existing generations, oldest first; readers open the last.
        leftovers: Files and folders that no generation needs: of an interrupted build, an incomplete commit, or a writer at work.
        head_problems: Problems of HEAD or of the manifest that it names; the newest generation may be missing.
    """

    generations: tuple[GenerationReport, ...]
    leftovers: tuple[Path, ...]
    head_problems: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """Descriptions of the damage in the newest generation."""
        return (*self.head_problems, *(self.generations[-1].problems if self.generations else ()))


def check_index(root: Path | str) -> CheckReport:
    """Read every file of every generation and compare it with its checksum; nothing is changed.

    This takes minutes for a large index, and a writer may commit meanwhile: a generation that is removed during the check is left out of
    the report.

    Raises:
        InputError: The folder is not an index, has another format version, or a file cannot be read for a reason other than damage.
    """
    layout = Layout(Path(root).resolve())
    check_format(layout)
    reports: tuple[GenerationReport, ...] = ()
    while not reports and (generations := layout.generations()):
        checked = [_check_generation(layout, generation) for generation in generations]
        there = set(layout.generations())
        reports = tuple(report for report in checked if report.generation in there)
    return CheckReport(reports, (*_leftovers(layout), *entries(layout.temporary)), head_problems(layout))


def head_problems(layout: Layout) -> tuple[str, ...]:
    """Problems of HEAD or of the manifest that it names."""
    known = head_generation(layout)
    newest = max(layout.generations(), default=0)
    if known is None:
        committed = newest or entries(layout.segments)
        return (f"{layout.head}: missing or changed, so the newest generation is unknown",) if committed else ()
    if known > newest:
        return (f"{layout.manifest(known)}: missing, and it is the newest generation",)
    content = head_manifest(layout)
    if layout.head.read_bytes() != head_bytes(known, content) or (known and not _is_manifest(layout, content)):
        return (f"{layout.head}: changed; quiver index repair writes it again",)
    return ()


def _is_manifest(layout: Layout, content: bytes) -> bool:
    try:
        parse_manifest(content, layout.head)
    except InputError:
        return False
    return True


def _leftovers(layout: Layout) -> list[Path]:
    """Files that no generation names; empty if a generation cannot be read or a writer is removing one."""
    try:
        return unreferenced(layout, layout.generations())
    except (DamagedIndexError, FileNotFoundError):
        return []


def _check_generation(layout: Layout, generation: int) -> GenerationReport:
    try:
        manifest = read_manifest(layout.manifest(generation))
    except (DamagedIndexError, FileNotFoundError) as error:
        return GenerationReport(generation, None, (str(error),))
    problems = _problems(layout.codecs / manifest.codec.name, manifest.codec.files)
    for segment in manifest.segments:
        problems += _problems(layout.segments / segment.name, segment.files)
        try:
            verify_alive(layout, segment)
        except DamagedIndexError as error:
            problems.append(str(error))
    return GenerationReport(generation, manifest, tuple(problems))


def _problems(folder: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """Descriptions of the damage in a folder, one line per file."""
    problems = []
    for name, entry in files.items():
        try:
            verify_file(folder / name, entry.bytes, entry.sha256)
        except DamagedIndexError as error:
            problems.append(str(error))
    stored = b"".join(digests.tobytes() for digests in read_digests(folder, files).values())
    if not problems and (not (folder / CHECKSUMS).is_file() or (folder / CHECKSUMS).read_bytes() != stored):
        problems.append(f"{folder / CHECKSUMS}: missing or changed; quiver index repair writes it again")
    return problems
