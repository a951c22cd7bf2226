"""The file ``sources.json`` of an index: the sources that it was built from, so that it can be refreshed.

It is written after each commit and is no part of a generation. If it is missing or of another generation, because a process was killed or
documents were changed otherwise, a refresh reads every file again and compares passages; it never misses a change.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json
from quiver.encoder.schema import RECORD, parse_record, with_config
from quiver.retrieval.data.files import FolderFiles
from quiver.retrieval.data.hub import HUB, IR
from quiver.retrieval.data.source import STANDARD_INPUT, Corpus, SourceOptions
from quiver.retrieval.data.tables import is_delimited, is_table
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
    """Options for another source of an index: those of its latest source of the same kind, without patterns of files.

    Args:
        root: Folder of the index.
        source: The other source, as `open_corpus` takes it.
    """
    for known in reversed(read_sources(root).sources):
        if known.source == (source if "://" in source else str(Path(source).absolute())):
            return known.options
        if (_is_rows(known.source) or known.options.names_fields) == _is_rows(source):
            columns = known.options.columns if is_delimited(Path(source)) else ()
            return replace(known.options, columns=columns, include=(), exclude=())
    return SourceOptions()


def _is_rows(source: str) -> bool:
    """Whether a source is known by its name to be a table; folders hold files or tables."""
    return source == STANDARD_INPUT or source.startswith((HUB, IR)) or is_table(Path(source))


def describe_source(corpus: Corpus) -> IndexSource:
    """The source of a corpus, with the checksums of the files that its last pass read."""
    files = corpus.read.digests if isinstance(corpus.read, FolderFiles) else {}
    return IndexSource(corpus.source, corpus.options, dict(files))


def is_rereadable(corpus: object) -> bool:
    """Whether a corpus can be read again by its name."""
    return isinstance(corpus, Corpus) and corpus.source != STANDARD_INPUT


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
