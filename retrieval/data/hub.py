"""Documents of data sets that other libraries fetch: ``hub://`` through datasets, and ``ir:`` through ir_datasets.

``hub://OWNER/NAME[@REVISION][/CONFIG][:SPLIT]`` is a data set of the Hugging Face Hub; ``ir:NAME``, such as ``ir:beir/scifact``, is one of
https://ir-datasets.com. Both are downloaded once, to the caches of these libraries, and read from there in every pass.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import EntryPosition
from quiver.retrieval.data.tables import Columns, Row, table_of
from quiver.retrieval.records import Document

HUB = "hub://"
"""Beginning of the name of a data set of the Hugging Face Hub."""

IR = "ir:"
"""Beginning of the name of a data set of ir_datasets."""

_PART = r"[^\s/:@]+"
_HUB = re.compile(rf"{HUB}({_PART}/{_PART})(?:@({_PART}))?(?:/({_PART}))?(?::({_PART}))?")


class HubSource(NamedTuple):
    """A parsed name of a data set of the Hub; None where a part was not named.

    Example:
        >>> HubSource.parse("hub://BeIR/scifact@main/corpus:corpus")
        HubSource(repository='BeIR/scifact', revision='main', config='corpus', split='corpus')
    """

    repository: str
    revision: str | None
    config: str | None
    split: str | None

    @classmethod
    def parse(cls, source: str) -> HubSource:
        """Parse a name.

        Raises:
            InputError: It has another form.
        """
        found = _HUB.fullmatch(source)
        if found is None:
            raise InputError(f"{source}: must read {HUB}OWNER/NAME[@REVISION][/CONFIG][:SPLIT], such as {HUB}BeIR/scifact/corpus:corpus")
        return cls(*found.groups())


def hub_documents(source: str, columns: Columns) -> Iterator[tuple[EntryPosition, Document]]:
    """Stream the documents of a data set of the Hub; errors name the row.

    Raises:
        InputError: The library is not installed, the data set or its split does not exist or cannot be downloaded, or a row is malformed.
    """
    yield from table_of(_hub_rows(source), source.removeprefix(HUB), columns)


def ir_documents(source: str, columns: Columns) -> Iterator[tuple[EntryPosition, Document]]:
    """Stream the documents of a data set of ir_datasets; without a named text, a document's text is what the library takes for it.

    Raises:
        InputError: The library is not installed, the data set does not exist, has no documents or cannot be downloaded.
    """
    yield from table_of(_ir_rows(source, named=bool(columns.text)), source, columns)


def _hub_rows(source: str) -> Iterator[Row]:
    hub = HubSource.parse(source)
    datasets = _imported("datasets", source)
    try:
        loaded: Any = datasets.load_dataset(hub.repository, hub.config, revision=hub.revision, split=hub.split)
    except _client_errors() as error:
        raise InputError(f"{source}: cannot be loaded ({_first_line(error)}); check the name and the network") from error
    if isinstance(loaded, dict):  # of splits
        if len(loaded) > 1:
            names = ", ".join(f"{source}:{name}" for name in loaded)
            raise InputError(f"{source}: has several splits; choose one of {names}")
        (loaded,) = loaded.values()
    return iter(loaded)


def _ir_rows(source: str, *, named: bool) -> Iterator[Row]:
    ir_datasets = _imported("ir_datasets", source)
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
    except _client_errors() as error:
        raise InputError(f"{source}: cannot be read ({_first_line(error)}); check the network") from error


def _imported(name: str, source: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(f"{source}: reading this data set needs {name}: pip install {name}") from error


def _client_errors() -> tuple[type[Exception], ...]:
    """Errors of a download: of the system, of a value such as an unknown config, and of the loaded web clients."""
    names = (("httpx", "HTTPError"), ("aiohttp", "ClientError"), ("datasets", "DatasetsError"))
    found = (getattr(sys.modules.get(module), name, None) for module, name in names)
    return (OSError, ValueError, RuntimeError, *(one for one in found if isinstance(one, type) and issubclass(one, Exception)))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
