"""Bring an index up to date with its sources: encode what is new or changed, delete what is gone.

A file whose bytes are those of the last refresh is not read further. Of the others, each passage is compared with the stored document of
its id. New and changed documents and deletions are one commit, so that a killed refresh leaves the index as it was, and a repeat
resumes its encoding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np

from quiver.encoder.errors import EmptyInputError, InputError
from quiver.encoder.files import expand_home
from quiver.retrieval.data.entries import OnTypeError
from quiver.retrieval.data.files import FolderFiles
from quiver.retrieval.data.passages import PassageTokens
from quiver.retrieval.data.source import DEFAULTS, STANDARD_INPUT, Corpus, emptied_corpus, has_no_path, is_beir, open_corpus, tokens_of
from quiver.retrieval.index.build import add_documents, delete_documents
from quiver.retrieval.index.documents import rows_by_value
from quiver.retrieval.index.files import REAL, DamagedIndexError, Disk
from quiver.retrieval.index.index import IndexReader, open_index
from quiver.retrieval.index.pieces import DEFAULTS as BUILD
from quiver.retrieval.index.pieces import Model
from quiver.retrieval.index.sources import FILE, IndexSource, begins_of, describe_source, read_sources, write_sources
from quiver.retrieval.records import Document, SourceOptions

logger = logging.getLogger(__name__)

_CHUNK = 1024  # documents that are compared at a time
_SAFE = 0.5  # share of the documents that is deleted only if that is asked for


@dataclass(frozen=True)
class Refreshed:
    """Result of a refresh.

    Attributes:
        index: The index, unchanged after a dry run.
        added: Number of new documents.
        changed: Number of documents that were encoded again.
        deleted: Number of documents that were deleted.
        unchanged: Number of documents that stayed.
    """

    index: IndexReader
    added: int
    changed: int
    deleted: int
    unchanged: int


def refresh_index(  # noqa: PLR0913 - the public entry: one option for each choice
    path: Path | str,
    model: Model,
    source: str | Path | None = None,
    *,
    options: SourceOptions | None = None,
    dry_run: bool = False,
    force: bool = False,
    memory: int = BUILD.memory,
    wait: float = 0.0,
    progress: bool = False,
    types: Mapping[str, str] | None = None,
    on_type_error: OnTypeError = "error",
    disk: Disk = REAL,
) -> Refreshed:
    """Read the sources of an index again and make its documents equal to theirs.

    Documents that came neither from a file nor from a remembered table, such as those added from Python to an index of files, stay.

    Args:
        path: Folder of the index, which stores texts.
        model: The model that built the index.
        source: A source as `open_corpus` takes it; None for all sources that the index was built from and extended with. One that the
            index does not know takes the place of the only one that is no longer there, as after a folder was moved, or with ``force`` of
            the only one that there is, as when a copy was edited.
        options: How documents are made of ``source``; None for the options that it was last read with.
        dry_run: Only count.
        force: Delete even more than half of the documents, those of a source of which nothing is left, or any where a source takes the
            place of another; see ``source``. A source whose copy takes its place is not left with less than half.
        memory: Memory limit in bytes, see `add_documents`.
        wait: Seconds to wait for another writer to finish.
        progress: Show a bar over the documents that are encoded.
        types: As for `add_documents`.
        on_type_error: As for `add_documents`.
        disk: Performs all writes.

    Raises:
        InputError: The sources are not known, no longer there or malformed, the index stores no texts or was built by another model, or
            documents would be deleted that only ``force`` deletes.
    """
    path = Path(path)
    index = open_index(path)
    index.check_model(model.card)
    if not index.manifest.policy.store_text:
        raise InputError(f"{path}: was built with --no-text, so changed documents cannot be recognized; build it again")
    known = read_sources(path)
    trusted = known.generation == index.manifest.generation
    try:
        sources = _choose_sources(path, known.sources, source, options, force=force)
    except InputError as error:
        if force or not dry_run:
            raise
        sources = _choose_sources(path, known.sources, source, options, force=True)
        logger.warning("without --dry-run this would be refused: %s", error)
    chosen = [(_open_source(path, each, tokens_of(model)), each) for each in sources]
    # What takes the place of another may be a wrong one, from which all documents are gone.
    replaced = [each for each in known.sources if each.source not in [other.source for other in sources]]
    copied = any(has_no_path(each.source) or Path(each.source).exists() for each in replaced)
    limit = _SAFE if copied else None if force else 0.0 if replaced else _SAFE
    work = _Comparison(index, [corpus for corpus, _ in chosen], replaced)
    changes = chain.from_iterable(work.changes(corpus, each, trusted=trusted) for corpus, each in reversed(chosen))
    gone = partial(work.gone, limit, "build the index again" if copied else "add --force")
    if dry_run:
        for _ in changes:
            pass
        deleted, changed = work.gone(None), index
        try:
            gone()
        except InputError as error:
            logger.warning("without --dry-run this would be refused: %s", error)
    else:
        first = next(changes, None)
        if first is not None:
            changed = add_documents(
                path,
                chain([first], changes),
                model,
                replace_existing=True,
                delete=gone,
                memory=memory,
                wait=wait,
                progress=progress,
                types=types,
                on_type_error=on_type_error,
                disk=disk,
            )
            deleted = work.deleted
        else:
            deleted = gone()
            changed = delete_documents(path, deleted, wait=wait, disk=disk) if deleted else index
        steps = changed.manifest.generation - index.manifest.generation
        generation = changed.manifest.generation if steps <= 1 else -1  # another process has committed in between
        write_sources(path, generation, [describe_source(corpus, work.counts[corpus.source]) for corpus, _ in chosen], disk)
    return Refreshed(changed, work.added, work.changed, len(deleted), len(index) - work.changed - len(deleted))


def _choose_sources(
    path: Path, known: Sequence[IndexSource], source: str | Path | None, options: SourceOptions | None, *, force: bool
) -> Sequence[IndexSource]:
    """The sources to read; an `InputError` if none is known, or the given one is not among those that are."""
    if source is None:
        if not known:
            raise InputError(f"{path}: the sources of this index are not known; pass the source: quiver index refresh {path} SOURCE")
        return known
    if str(source) == STANDARD_INPUT:
        raise InputError("standard input cannot be read again; add its documents with quiver index add DIR - --replace")
    name = str(source) if has_no_path(source) else str(expand_home(source).absolute())
    if not known or name not in [each.source for each in known]:
        open_corpus(source, options or DEFAULTS)  # a source that is none is an error
    if not known:
        return [IndexSource(name, options or DEFAULTS, {}, "data", None)]
    if name not in [each.source for each in known]:
        gone = [each for each in known if not has_no_path(each.source) and not Path(each.source).exists()]
        moved = known if force and len(known) == 1 and not gone else gone
        if len(moved) != 1 or has_no_path(source):
            names = ", ".join(each.source for each in known)
            instead = f"--force reads {name} in place of {names}; " if len(known) == 1 and not has_no_path(source) else ""
            raise InputError(f"{path}: was built from {names}, not from {name}; {instead}quiver index add adds a source to those it has")
        logger.warning("%s takes the place of %s%s", name, moved[0].source, ", which is no longer there" if gone else "")
        known = [replace(each, source=name) if each is moved[0] else each for each in known]
    if options is None:
        return known
    return [replace(each, options=replace(options, label=each.options.label), files={}) if each.source == name else each for each in known]


def _open_source(path: Path, known: IndexSource, tokens: PassageTokens) -> Corpus:
    """Open a source of an index, even if nothing is left in it; an `InputError` if it is no longer there, or as `open_corpus`."""
    if not has_no_path(known.source) and not Path(known.source).exists():
        raise InputError(
            f"{path}: the source {known.source} is no longer there; if it was moved, pass its new path: quiver index refresh {path} SOURCE;"
            " to delete its documents, put an empty folder in its place and add --force"
        )
    try:
        corpus = open_corpus(known.source, known.options, tokens)
        there = Path(known.source)
        is_one_file = there.is_file() or is_beir(there)  # if it is empty, so is the source
        if is_one_file and not isinstance(corpus.read, FolderFiles):
            next(corpus.read(), None)
    except EmptyInputError:
        return emptied_corpus(known.source, known.options, files=known.is_files)
    return corpus


@dataclass
class _Comparison:
    """Compares documents with those of an index, and remembers which of the index have been seen."""

    index: IndexReader
    corpora: Sequence[Corpus]
    replaced: Sequence[IndexSource]  # sources whose place others take
    added: int = 0
    changed: int = 0
    deleted: list[str] = field(default_factory=list)  # ids of documents that are gone, see `gone`
    counts: dict[str, int] = field(default_factory=dict)  # number of documents of each source that was read
    emptied: list[str] = field(default_factory=list)  # sources that had documents and have none

    def __post_init__(self) -> None:
        self._seen = [np.zeros(len(segment.documents), bool) for segment in self.index.segments]
        self._new = set[str]()
        self._rows = rows_by_value([segment.documents for segment in self.index.segments], FILE)

    def changes(self, corpus: Corpus, known: IndexSource, *, trusted: bool) -> Iterator[Document]:
        """The new and changed documents of a corpus, the latest first; ``trusted``: files with the known checksums are in the index."""
        files, source = known.files if trusted else {}, corpus.source
        self.counts[source] = 0
        self._shadowed = list[str]()
        self._before, self._new_before = [seen.copy() for seen in self._seen], frozenset(self._new)
        files_read = corpus.read if isinstance(corpus.read, FolderFiles) else None
        if files_read is not None:
            corpus = replace(
                corpus, read=partial(files_read, lambda name, digest: files.get(name) == digest and self._skip_file(source, name))
            )
        documents = iter(corpus)
        try:
            while chunk := list(islice(documents, _CHUNK)):
                self.counts[source] += len(chunk)
                yield from self._compare(chunk)
        except EmptyInputError:
            if files_read is None:
                raise  # of several tables, others may have documents; files raise it only if there is one, which has no text any more
        for name in files_read.unreachable if files_read else ():
            self._skip_file(source, name)  # what the file holds now is unknown; its passages stay
        if self._shadowed and known.ids != "data":
            logger.warning(
                "%s: %s documents are left out, because a source that was added later has their ids, such as '%s'; rename their folder",
                source,
                f"{len(self._shadowed):,}",
                self._shadowed[0],
            )
        if not self.counts[source] and known.documents != 0:
            self.emptied.append(source)

    def _skip_file(self, source: str, name: str) -> bool:
        """Count the documents of a file as seen; whether there are any."""
        for segment, rows in self._rows.get(name, ()):
            self._seen[segment][rows] = True
            self.counts[source] += len(rows)
        return name in self._rows

    def _compare(self, documents: Sequence[Document]) -> Iterator[Document]:
        for document, place in zip(documents, self.index.locate([each.id for each in documents]), strict=True):
            if place is None:
                if document.id not in self._new_before:
                    self._new.add(document.id)
                    self.added += 1
                    yield document
                continue
            if self._before[place.segment][place.row]:
                self._shadowed.append(document.id)
                continue
            self._seen[place.segment][place.row] = True
            try:
                stored = self.index.documents.at(place)  # located with its chunk; one by one takes several times as long
                same = stored[:3] == document[:3] and _metadata_as_json(stored) == _metadata_as_json(document)
            except DamagedIndexError:
                same = False
            if not same:
                self.changed += 1
                yield document

    def gone(self, limit: float | None, remedy: str = "") -> list[str]:
        """Ids of the documents that came from the sources and were not seen; an `InputError` if they are more than a share, ``limit``."""
        # Those of a source with a label begin with it. Of the others passages of files have the field of their file, but rows of a table
        # are not told from documents that were added from Python.
        begins = tuple(begin for corpus in self.corpora for begin in begins_of(corpus.options.label))
        plain = [corpus for corpus in self.corpora if not corpus.options.label]
        rows = not all(isinstance(corpus.read, FolderFiles) for corpus in plain) or not all(each.is_files for each in self.replaced)
        found = []
        for segment, seen in zip(self.index.segments, self._seen, strict=True):
            for row in np.flatnonzero(segment.kept & ~seen).tolist():
                key = segment.documents.ids.strings[row]
                if key.startswith(begins) or rows or (plain and FILE in (self.index.document(key).metadata or {})):
                    found.append(key)
        if limit is not None and (len(found) > limit * len(self.index) or (found and self.emptied)):
            nothing = f"nothing is left of {', '.join(self.emptied)}; " if self.emptied else ""
            raise InputError(
                f"{self.index.path}: {nothing}{len(found):,} of {len(self.index):,} documents are no longer in the source and would be"
                f" deleted; if that is right, {remedy}"
            )
        self.deleted = found
        return found


def _metadata_as_json(document: Document) -> dict[str, object] | None:
    """Metadata as JSON gives them back: lists instead of tuples, None instead of nothing."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in (document.metadata or {}).items()} or None
