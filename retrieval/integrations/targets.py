"""Where an index is exported to: ``qdrant://FOLDER``, ``qdrant://http://HOST:6333`` or ``lancedb://FOLDER``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from quiver.encoder.errors import InputError
from quiver.retrieval.index.index import Index

_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Stored:
    """What was exported.

    Attributes:
        store: ``qdrant`` or ``lancedb``.
        where: Folder or address.
        collection: Name of the collection or the table.
        documents: Documents that are there now.
        written: How many of them were written this time; the others were there.
    """

    store: str
    where: str
    collection: str
    documents: int
    written: int


def export_to(index: Index, target: str, *, collection: str | None = None, overwrite: bool = False, progress: bool = False) -> Stored:
    """Write an index into another store. Started again it sends what is missing; from a newer state of the index, what has changed.

    Args:
        index: The index.
        target: As `SCHEMES` have it.
        collection: Name of the collection or the table; by default that of the index's folder.
        overwrite: Replace a collection that was made for other vectors.
        progress: Show a bar over the documents.

    Raises:
        InputError: There is no such store, its library is not installed, or it cannot be written.
    """
    scheme, separator, where = target.partition("://")
    if not separator or scheme not in SCHEMES or not where:
        raise InputError(f"--to {target!r}: must be {', '.join(f'{name}://{shape}' for name, (shape, _) in SCHEMES.items())}")
    name = re.sub(r"[^\w.-]", "-", index.path.name) if collection is None else collection
    if not _NAME.fullmatch(name):
        raise InputError(f"--collection {name!r}: must be letters, digits, '_', '-' and '.'")
    written = SCHEMES[scheme][1](index, where, name, overwrite, progress)
    return Stored(scheme, where, name, len(index), written)


def missing_library(what: str, library: str, error: ImportError) -> InputError:
    """The one line that says what to install."""
    return InputError(f"{what} needs {library}, which is not installed ({error.name}): pip install 'quiver-retrieval[interop]'")


def _to_qdrant(index: Index, where: str, name: str, overwrite: bool, progress: bool) -> int:
    try:
        from quiver.retrieval.integrations import qdrant
    except ImportError as error:
        raise missing_library("--to qdrant://", "qdrant-client", error) from error
    client = qdrant.open_client(where)
    try:
        return qdrant.write_collection(index, client, name, overwrite=overwrite, progress=progress)
    finally:
        client.close()


def _to_lancedb(index: Index, where: str, name: str, overwrite: bool, progress: bool) -> int:
    try:
        from quiver.retrieval.integrations import lance
    except ImportError as error:
        raise missing_library("--to lancedb://", "lancedb", error) from error
    return lance.write_table(index, where, name, overwrite=overwrite, progress=progress)


SCHEMES: dict[str, tuple[str, Callable[[Index, str, str, bool, bool], int]]] = {
    "qdrant": ("FOLDER_OR_ADDRESS", _to_qdrant),
    "lancedb": ("FOLDER", _to_lancedb),
}
"""Scheme -> what stands behind it, and what writes there."""
