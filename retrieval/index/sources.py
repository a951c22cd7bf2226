"""The file ``sources.json`` of an index: the sources that it was built from, so that it can be refreshed.

It is written after each commit and is no part of a generation. If it is missing or of another generation, because a process was killed or
documents were changed otherwise, a refresh reads every file again and compares passages; it never misses a change.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home, read_json
from quiver.encoder.schema import RECORD, parse_record, with_config
from quiver.retrieval.data.files import FolderFiles
from quiver.retrieval.data.source import IN_MEMORY, STANDARD_INPUT, Corpus, SourceOptions, has_no_path, holds_delimited, holds_files
from quiver.retrieval.index.files import Disk, put_file

logger = logging.getLogger(__name__)


@with_config(RECORD)
@dataclass(frozen=True)
class IndexSource:
    """A source of an index.

    Attributes:
        source: Its name, with an absolute path.
        options: How documents are made of it.
        files: Path -> checksum of each file of a folder, as it is in the index.
    """

    source: str
    options: SourceOptions
    files: Mapping[str, str]


@with_config(RECORD)
@dataclass(frozen=True)
class IndexSources:
    """The sources of an index.

    Attributes:
        generation: Generation whose documents have these checksums.
        sources: In the order in which they were added.
    """

    generation: int
    sources: tuple[IndexSource, ...]


def sources_file(root: Path) -> Path:
    """Path of the file in the folder of an index."""
    return root / "sources.json"


def read_sources(root: Path) -> IndexSources:
    """Read the sources of an index; none of an unknown generation if the file is missing or damaged."""
    path = sources_file(root)
    if path.is_file():
        try:
            return parse_record(IndexSources, read_json(path), source=str(path))
        except InputError as error:
            logger.warning("%s; the sources of this index are not known", error)
    return IndexSources(-1, ())


def options_like(root: Path, source: str) -> SourceOptions:
    """Options for a source that is added to an index: its own if the index has it, otherwise those of the latest source of the same kind.

    The kinds are rows and files; patterns of files are not taken over.

    Args:
        root: Folder of the index.
        source: The source, as `open_corpus` takes it.

    Raises:
        InputError: The source does not exist or is of no known type.
    """
    known = read_sources(root).sources
    name = source if has_no_path(source) else str(expand_home(source).absolute())
    if own := [each.options for each in known if each.source == name]:
        return own[-1]
    files = holds_files(source)
    alike = [each.options for each in known if bool(each.files) == files]
    if not alike:
        return SourceOptions()
    if files:
        return SourceOptions(passages=alike[-1].passages)
    latest = alike[-1]
    columns = latest.columns if latest.columns and holds_delimited(source) else ()
    return SourceOptions(latest.id, latest.title, latest.text, columns, latest.passages, lists=latest.lists)


def describe_source(corpus: Corpus) -> IndexSource:
    """The source of a corpus, with the checksums of the files that its last pass read."""
    files = corpus.read.digests if isinstance(corpus.read, FolderFiles) else {}
    return IndexSource(corpus.source, corpus.options, dict(files))


def is_rereadable(corpus: object) -> bool:
    """Whether a corpus can be read again by its name."""
    return isinstance(corpus, Corpus) and corpus.source not in (STANDARD_INPUT, IN_MEMORY)


def forget_sources(root: Path, disk: Disk) -> None:
    """Remove the sources of an index that a build replaces."""
    if sources_file(root).exists():
        disk.unlink(sources_file(root))


def write_sources(root: Path, generation: int, sources: Iterable[IndexSource], disk: Disk) -> None:
    """Write the sources of a committed generation. The index is complete without them, so a full disk is only a warning."""
    content: dict[str, Any] = asdict(IndexSources(generation, tuple(sources)))
    try:
        put_file(sources_file(root), json.dumps(content, ensure_ascii=False).encode(), disk)
    except OSError as error:
        logger.warning("%s: cannot be written (%s); quiver index refresh needs the source", sources_file(root), error.strerror)


def remember_source(root: Path, generation: int, corpus: Any, disk: Disk) -> None:
    """Add the corpus of an addition to the sources; without any known source, there is nothing to add it to."""
    known = read_sources(root)
    if is_rereadable(corpus) and known.sources:
        added = describe_source(corpus)
        kept = [each for each in known.sources if each.source != added.source]
        # Another process may have changed documents between the two generations; the next refresh then compares all of them.
        write_sources(root, generation if known.generation == generation - 1 else -1, [*kept, added], disk)
