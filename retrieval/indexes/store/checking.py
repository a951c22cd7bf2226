"""Looking at every byte of an index, and keeping what is whole of a damaged one.

Repair never touches what is whole: it commits a new generation, which is the newest one that is whole, or else the newest one without
its damaged segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from encoder.errors import InputError
from retrieval.indexes.disk import REAL, Disk
from retrieval.indexes.errors import DamagedIndexError
from retrieval.indexes.store.layout import Layout, entries
from retrieval.indexes.store.manifest import CodecEntry, Manifest, SegmentEntry, read_manifest
from retrieval.indexes.store.reading import check_format, read_alive, verify_files
from retrieval.indexes.store.writing import unreferenced, writing


@dataclass(frozen=True)
class GenerationReport:
    """One committed state.

    Attributes:
        generation: Its number.
        manifest: What it is; None where its manifest is damaged.
        problems: What is damaged, one line each.
        damaged_segments: Names of the segments among it.
    """

    generation: int
    manifest: Manifest | None
    problems: tuple[str, ...]
    damaged_segments: frozenset[str] = frozenset()

    @property
    def codec_is_whole(self) -> bool:
        """Whether all that is damaged is segments."""
        return self.manifest is not None and len(self.problems) == len(self.damaged_segments)


@dataclass(frozen=True)
class CheckReport:
    """What `check_index` found.

    Attributes:
        generations: All states that are there, oldest first; the last is the one that readers open.
        leftovers: Files and folders that no state needs: of an interrupted build, of a commit that did not come to its end, or of a writer
            that is at work.
    """

    generations: tuple[GenerationReport, ...]
    leftovers: tuple[Path, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """What is damaged in the newest state."""
        return self.generations[-1].problems if self.generations else ()


@dataclass(frozen=True)
class RepairReport:
    """What `repair_index` did.

    Attributes:
        generation: The newest state now.
        restored: The generation whose content it has.
        problems: What was damaged.
        documents_before: Documents of the newest state before; None where its manifest was damaged.
        documents: Documents now.
        removed: Files and folders that were removed.
    """

    generation: int
    restored: int
    problems: tuple[str, ...]
    documents_before: int | None
    documents: int
    removed: tuple[Path, ...]


def check_index(root: Path | str) -> CheckReport:
    """Read every file of every state and compare it with its checksum; nothing is changed.

    It takes minutes for a large index, in which a writer may commit: what is missing of a state that has been removed meanwhile is no
    damage, and that state is left out.

    Raises:
        InputError: It is no index, one of another format version, or a file of it may not be read.
    """
    layout = Layout(Path(root).resolve())
    check_format(layout)
    reports: tuple[GenerationReport, ...] = ()
    while not reports and (generations := layout.generations()):
        checked = [_check_generation(layout, generation) for generation in generations]
        there = set(layout.generations())
        reports = tuple(report for report in checked if report.generation in there)
    return CheckReport(reports, (*_leftovers(layout), *entries(layout.temporary)))


def repair_index(root: Path | str, *, wait: float = 0.0, disk: Disk = REAL) -> RepairReport:
    """Make the newest state one that is whole, and remove what no state needs, interrupted builds left alone.

    Raises:
        InputError: It is no index, another process is writing to it, a file may not be read, or nothing of it is whole.
    """
    root = Path(root)
    with writing(root, damaged=True, wait=wait, disk=disk) as writer:
        report = check_index(root)
        newest = report.generations[-1] if report.generations else None
        if newest is None:
            raise InputError(f"{root}: nothing has been committed; build it again")
        if not newest.problems and newest.manifest is not None:
            removed = writer.collect_garbage(keep=_whole_from_the_end(report.generations))
            count = newest.manifest.documents
            return RepairReport(newest.generation, newest.generation, (), count, count, tuple(removed))
        source, segments = _best(root, report.generations)
        restored = writer.commit(replace(source, operation="repair", segments=segments))
        removed = writer.collect_garbage(keep=1)
        before = newest.manifest.documents if newest.manifest is not None else None
        return RepairReport(restored.generation, source.generation, newest.problems, before, restored.documents, tuple(removed))


def _leftovers(layout: Layout) -> list[Path]:
    """What no state names; nothing where a state cannot be read, or a writer removes one in this moment."""
    try:
        return unreferenced(layout, layout.generations())
    except (DamagedIndexError, FileNotFoundError):
        return []


def _best(root: Path, reports: Sequence[GenerationReport]) -> tuple[Manifest, tuple[SegmentEntry, ...]]:
    """The newest state that is whole; or the newest one whose codec is, without its damaged segments."""
    for report in reversed(reports):
        if report.manifest is not None and not report.problems:
            return report.manifest, report.manifest.segments
    for report in reversed(reports):
        if report.manifest is not None and report.codec_is_whole:
            kept = tuple(segment for segment in report.manifest.segments if segment.name not in report.damaged_segments)
            if kept:
                return report.manifest, kept
    raise InputError(f"{root}: no state of this index is whole, nor is a segment of one; build it again")


def _whole_from_the_end(reports: Sequence[GenerationReport]) -> int:
    """How many of the newest states are whole, without one between them that is not; at least 1."""
    count = 0
    for report in reversed(reports):
        if report.problems:
            break
        count += 1
    return max(count, 1)


def _check_generation(layout: Layout, generation: int) -> GenerationReport:
    try:
        manifest = read_manifest(layout.manifest(generation))
    except (DamagedIndexError, FileNotFoundError) as error:
        return GenerationReport(generation, None, (str(error),))
    problems = [problem for problem in [_codec_problem(layout, manifest.codec)] if problem is not None]
    damaged = {}
    for segment in manifest.segments:
        problem = _segment_problem(layout, segment)
        if problem is not None:
            damaged[segment.name] = problem
    return GenerationReport(generation, manifest, (*problems, *damaged.values()), frozenset(damaged))


def _codec_problem(layout: Layout, codec: CodecEntry) -> str | None:
    try:
        verify_files(layout.codecs / codec.name, codec.files, full=True)
    except DamagedIndexError as error:
        return str(error)
    return None


def _segment_problem(layout: Layout, segment: SegmentEntry) -> str | None:
    try:
        verify_files(layout.segments / segment.name, segment.files, full=True)
        read_alive(layout, segment)
    except DamagedIndexError as error:
        return str(error)
    return None
