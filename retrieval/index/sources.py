"""The file ``sources.json`` of an index: the sources that it was built from, so that it can be refreshed.

It is written after each commit and is no part of a generation. If it is missing or of another generation, because a process was killed or
documents were changed otherwise, a refresh reads every file again and compares passages; it never misses a change.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow.compute as pc

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home, read_json
from quiver.encoder.schema import RECORD, parse_record, with_config
from quiver.retrieval.data.files import FolderFiles
from quiver.retrieval.data.source import IN_MEMORY, STANDARD_INPUT, Corpus, has_no_path, holds_delimited, holds_files
from quiver.retrieval.data.tables import GivenDocuments
from quiver.retrieval.index.files import Disk, put_file
from quiver.retrieval.index.index import IndexReader
from quiver.retrieval.records import SourceOptions

logger = logging.getLogger(__name__)

FILE = "file"
"""Field that the passages of files have."""

_ROW = re.compile(r"[0-9]+(?:#[0-9]+)?")  # id of a row without an id, or of a passage of one


@with_config(RECORD)
@dataclass(frozen=True)
class IndexSource:
    """A source of an index."""

    source: str  # its name, with an absolute path
    options: SourceOptions  # how documents are made of it
    files: Mapping[str, str]  # path -> checksum of each file of a folder, as it is in the index
    ids: Literal["data", "files", "rows"]  # what gives the ids: the data, or else the paths of files or the numbers of rows
    documents: int | None  # number of documents at the last pass; None if it was not counted

    @property
    def is_files(self) -> bool:
        """Whether the documents are passages of files."""
        return self.ids == "files" or bool(self.files)


@with_config(RECORD)
@dataclass(frozen=True)
class IndexSources:
    """The sources of an index, in the order in which they were added."""

    generation: int  # whose documents have these checksums
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

    The kinds are rows and files; patterns of files are not taken over. An `InputError` if the source does not exist or is of no known type.
    """
    known = read_sources(root).sources
    name = source if has_no_path(source) else str(expand_home(source).absolute())
    if own := [each.options for each in known if _is_same(each.source, name)]:
        return own[-1]
    files = holds_files(source)
    latest = next((each.options for each in reversed(known) if each.is_files == files), SourceOptions())
    if files:
        return SourceOptions(passages=latest.passages)
    columns = latest.columns if latest.columns and holds_delimited(source) else ()
    return SourceOptions(latest.id, latest.title, latest.text, columns, latest.passages, lists=latest.lists)


def describe_source(corpus: Corpus, documents: int) -> IndexSource:
    """The source of a corpus whose last pass gave a number of documents, with the checksums of the files that it read."""
    if isinstance(corpus.read, FolderFiles):
        return IndexSource(corpus.source, corpus.options, dict(corpus.read.digests), "files", documents)
    return IndexSource(corpus.source, corpus.options, {}, "rows" if corpus.numbered() else "data", documents)


def is_rereadable(corpus: object) -> bool:
    """Whether a corpus can be read again by its name."""
    return isinstance(corpus, Corpus) and corpus.source not in (STANDARD_INPUT, IN_MEMORY)


def write_sources(root: Path, generation: int, sources: Iterable[IndexSource], disk: Disk) -> None:
    """Write the sources of a committed generation. The index is complete without them, so a full disk is only a warning."""
    content: dict[str, Any] = asdict(IndexSources(generation, tuple(sources)))
    try:
        put_file(sources_file(root), json.dumps(content, ensure_ascii=False).encode(), disk)
    except OSError as error:
        logger.warning("%s: cannot be written (%s); quiver index refresh needs the source", sources_file(root), error.strerror)


def remember_source(root: Path, generation: int, corpus: Any, documents: int, disk: Disk) -> None:
    """Add the corpus of an addition to the sources.

    If none is known, a refresh could not tell other documents of the index from those of a source without a label.
    """
    known = read_sources(root)
    if is_rereadable(corpus) and (known.sources or corpus.options.label):
        added = describe_source(corpus, documents)
        kept = [each for each in known.sources if each.source != added.source]
        # Another process may have changed documents between the two generations; the next refresh then compares all of them.
        write_sources(root, generation if known.generation == generation - 1 else -1, [*kept, added], disk)


def tell_apart(corpus: Corpus, known: Sequence[IndexSource], index: IndexReader) -> Corpus:
    """Give a source that is added to an index a label, so that its paths or numbers are not those of other documents there.

    A source that the index has keeps its label, or has none if the index was built from it. The label is the shortest end of the path
    that no other source has and no id begins with: ``docs``, or ``y/docs`` beside another ``docs``.
    """
    own = next((each for each in known if _is_same(each.source, corpus.source)), None)
    if own is not None:
        corpus = replace(corpus, source=own.source)
        label = own.options.label
    elif corpus.options.label or not (known or len(index)) or corpus.labelled is None or not corpus.numbered():
        return corpus
    else:
        label = _free_label(corpus, known, index)
    if label == corpus.options.label or corpus.labelled is None:
        return corpus
    return replace(corpus.labelled(label), source=corpus.source)


def _is_same(one: str, other: str) -> bool:
    return one == other or (not has_no_path(one) and not has_no_path(other) and os.path.realpath(one) == os.path.realpath(other))


def _free_label(corpus: Corpus, known: Sequence[IndexSource], index: IndexReader) -> str:
    if has_no_path(corpus.source):
        return corpus.source
    path = Path(corpus.source)
    parts = path.parts[1:] if path.anchor else path.parts
    shortest = 2 if isinstance(corpus.read, FolderFiles) and path.is_file() else 1  # the name of a file says little
    taken = [f"{each.options.label}/" for each in known if each.options.label]
    for count in range(min(shortest, len(parts)), len(parts) + 1):
        label = "/".join(parts[-count:])
        is_part = any(f"{label}/".startswith(other) or other.startswith(f"{label}/") for other in taken)
        if not is_part and not any(
            (segment.kept & pc.starts_with(segment.documents.ids.array, begin).to_numpy(zero_copy_only=False)).any()
            for segment in index.segments
            for begin in begins_of(label)
        ):
            return label
    raise InputError(f"{index.path}: has ids that begin as those of {corpus.source} would; give its rows ids, or rename it")


def begins_of(label: str) -> tuple[str, ...]:
    """What the ids of a source with a label begin with; empty without a label."""
    return (f"{label}#", f"{label}/") if label else ()


def check_replaced(path: Path, corpus: object, known: Sequence[IndexSource], ids: Sequence[str], *, replace_existing: bool) -> None:
    """Check that an addition replaces no document of the index that it should not; ``ids`` are those that the index already has.

    Raises:
        InputError: One would be replaced although that was not asked for, or its id is the number of a row of another source.
    """
    source = corpus.source if is_rereadable(corpus) and isinstance(corpus, Corpus) else ""
    others = [each for each in known if each.source != source]
    numbered = [each for each in others if each.ids == "rows" and not each.options.label]
    found = next((key for key in ids if _ROW.fullmatch(key)), None) if numbered else None
    # Python code and requests may name a row by its number; in a source, or as the number of another row, it is a coincidence.
    is_source = isinstance(corpus, Corpus) and corpus.source != IN_MEMORY
    if found is not None and (is_source or (isinstance(corpus, Corpus | GivenDocuments) and corpus.numbered())):
        raise InputError(
            f"{path}: document '{found}' would replace a row of {numbered[0].source}, whose rows have no ids and are numbered; give the"
            " documents ids that are no numbers, or choose another field with --id"
        )
    if ids and not replace_existing:
        if len(others) < len(known):
            raise InputError(
                f"{path}: {source} was added before (document '{ids[0]}' is in this index already); read it again with quiver index refresh"
                f" {path}, or replace its documents with --replace"
            )
        of, origin = (f" of {source}" if source else ""), " or ".join(each.source for each in others)
        already = f"document '{ids[0]}'{of} is in this index already{f', from {origin}' if origin else ''}"
        raise InputError(f"{path}: {already}; replace it with --replace if it is the same document, or give it another id")
