"""Documents of data sets that other libraries fetch: ``hub://`` through datasets, and ``ir:`` through ir_datasets.

``hub://OWNER/NAME[@REVISION][/CONFIG][:SPLIT]`` is a data set of the Hugging Face Hub, and ``hub://OWNER/NAME[@REVISION]/path/to/file`` one
of its files; ``CONFIG/SPLIT`` means the same as ``CONFIG:SPLIT``. ``ir:NAME``, such as ``ir:beir/scifact``, is one of
https://ir-datasets.com. Both are downloaded once, to the caches of these libraries, and read from there in every pass.

If ``QUIVER_HUB`` names a folder that holds ``OWNER/NAME``, a data set of the Hub is read there instead; ``hf download --repo-type dataset
OWNER/NAME --local-dir $QUIVER_HUB/OWNER/NAME`` makes such a copy, for machines without a network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from quiver.encoder.errors import InputError, download_errors, first_line, import_for
from quiver.encoder.files import expand_home
from quiver.retrieval.data.entries import EntryPosition
from quiver.retrieval.data.tables import Columns, Row, table_of
from quiver.retrieval.records import Document

HUB = "hub://"
"""Beginning of the name of a data set of the Hugging Face Hub."""

IR = "ir:"
"""Beginning of the name of a data set of ir_datasets."""

LOCAL_HUB = "QUIVER_HUB"
"""Environment variable: folder of local copies of data sets of the Hub."""

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".csv", ".csv.gz", ".tsv", ".tsv.gz")
"""Ends of the names of files of rows on the Hub."""

_PART = r"(?!\.\.?[/:@]|\.\.?$)[^\s/:@]+"
_HUB = re.compile(rf"{HUB}({_PART}/{_PART})(?:@({_PART}))?((?:/{_PART})*)(?::({_PART}))?")


class HubSource(NamedTuple):
    """A parsed name of a data set of the Hub, or of a file in it; None where a part was not named.

    Attributes:
        repository: ``OWNER/NAME``.
        revision: Branch, tag or commit; None for the main branch.
        config: Name of a configuration.
        split: Name of a split.
        file: Path of a file in the repository, instead of the two.

    Example:
        >>> HubSource.parse("hub://BeIR/scifact@main/corpus:corpus")
        HubSource(repository='BeIR/scifact', revision='main', config='corpus', split='corpus', file=None)
        >>> HubSource.parse("hub://Shitao/MLDR/mldr-v1.0-en/train.jsonl.gz").file
        'mldr-v1.0-en/train.jsonl.gz'
    """

    repository: str
    revision: str | None = None
    config: str | None = None
    split: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, source: str) -> HubSource:
        """Parse a name; raises InputError if it has another form."""
        found = _HUB.fullmatch(source)
        repository, revision, inside, split = found.groups() if found else ("", None, "", None)
        parts = inside.split("/")[1:]
        if parts and parts[-1].endswith(SUFFIXES) and split is None:
            return cls(repository, revision, file="/".join(parts))
        if found is None or len(parts) + (split is not None) > 2:
            raise InputError(
                f"{source}: must read {HUB}OWNER/NAME[@REVISION][/CONFIG][:SPLIT], such as {HUB}BeIR/scifact/corpus:corpus, or "
                f"{HUB}OWNER/NAME[@REVISION]/path/to/file with one of the suffixes {', '.join(SUFFIXES)}"
            )
        config, named = (*parts, None, None)[:2]
        return cls(repository, revision, config, split or named)

    @property
    def local(self) -> Path | None:
        """Folder of the local copy; None if there is none."""
        root = os.environ.get(LOCAL_HUB)
        folder = expand_home(root) / self.repository if root else None
        return folder if folder is not None and folder.is_dir() else None


def hub_documents(source: str, columns: Columns) -> Iterator[tuple[EntryPosition, Document]]:
    """Stream the documents of a data set of the Hub; errors name the row.

    Raises:
        InputError: The library is not installed, the data set or its split does not exist or cannot be downloaded, or a row is malformed.
    """
    yield from table_of(partial(_hub_rows, source), source.removeprefix(HUB), columns)


def ir_documents(source: str, columns: Columns) -> Iterator[tuple[EntryPosition, Document]]:
    """Stream the documents of a data set of ir_datasets; without a named text, a document's text is what the library takes for it."""
    yield from table_of(partial(_ir_rows, source, named=bool(columns.text)), source, columns)


def _hub_rows(source: str) -> Iterator[Row]:
    hub = HubSource.parse(source)
    datasets = import_for(f"{source}: reading this data set", "datasets", "datasets")
    where, revision = (str(hub.local), None) if hub.local else (hub.repository, hub.revision)
    try:
        if hub.file is not None:
            loaded: Any = datasets.load_dataset(where, data_files=hub.file, revision=revision, split="train")  # so one file is called
        else:
            loaded = datasets.load_dataset(where, hub.config, revision=revision, split=hub.split)
    except download_errors(ValueError) as error:
        raise InputError(f"{source}: cannot be loaded ({first_line(error)}); check the name and the network") from error
    if isinstance(loaded, dict):  # of splits
        if len(loaded) > 1:
            names = ", ".join(f"{source}:{name}" for name in loaded)
            raise InputError(f"{source}: has several splits; choose one of {names}")
        (loaded,) = loaded.values()
    return iter(loaded)


def _ir_rows(source: str, *, named: bool) -> Iterator[Row]:
    ir_datasets = import_for(f"{source}: reading this data set", "ir_datasets", "ir-datasets")
    try:
        dataset: Any = ir_datasets.load(source.removeprefix(IR))
    except KeyError as error:
        raise InputError(f"{source}: ir_datasets knows no data set of this name; https://ir-datasets.com lists them") from error
    if not dataset.has_docs():
        raise InputError(f"{source}: this data set has no documents")
    try:
        for document in dataset.docs_iter():
            row: dict[str, object] = document._asdict()
            yield row if named or "text" in row else {**row, "text": document.default_text()}
    except download_errors(ValueError) as error:
        raise InputError(f"{source}: cannot be read ({first_line(error)}); check the network") from error
