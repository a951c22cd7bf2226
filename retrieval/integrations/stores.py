"""Export of an index to Qdrant or LanceDB: targets, and documents in batches with their vectors."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.export import row_blocks
from quiver.retrieval.index.index import Index, OpenSegment, check_has_vectors

BATCH_DOCUMENTS = 256
"""Default of the largest number of documents per batch."""

# Largest number of floats per batch, unless one document has more: about 10 MB of JSON, a third of the limit of a Qdrant server.
_NUMBERS = 1 << 19

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://quiver.invalid/documents")


@dataclass(frozen=True)
class DocumentBatch:
    """B documents with their vectors.

    Attributes:
        ids: Ids, (B,).
        payloads: ``id``, and if the index stores texts ``title``, ``text`` and ``metadata``, (B,).
        vectors: Stored vectors of each document, B arrays (n_i, d) float32; one vector each for a bi-encoder.
    """

    ids: list[str]
    payloads: list[dict[str, Any]]
    vectors: list[NDArray[np.float32]]

    def __len__(self) -> int:
        return len(self.ids)


def batches(index: Index, documents: int = BATCH_DOCUMENTS) -> Iterator[DocumentBatch]:
    """Yield all documents that are not deleted, in the order of addition, in batches of at most ``documents`` and about 10 MB."""
    most = max(1, _NUMBERS // index.manifest.model.dim)
    for segment in index.segments:
        for rows in row_blocks(segment, most, documents):
            yield _batch(segment, rows)


def _batch(segment: OpenSegment, rows: NDArray[np.int64]) -> DocumentBatch:
    vectors, lengths = segment.vectors.vectors(rows)
    parts = np.split(np.asarray(vectors, np.float32), np.cumsum(lengths)[:-1])
    ids = segment.documents.ids.strings.take(rows)
    texts = segment.documents.texts
    payloads: list[dict[str, Any]] = [{"id": key} for key in ids]
    if texts is not None:
        for payload, row in zip(payloads, rows.tolist(), strict=True):
            document = texts[row]
            payload |= {"title": document.title, "text": document.text, "metadata": dict(document.metadata or {})}
    return DocumentBatch(ids, payloads, parts)


def state_of(index: Index) -> str:
    """Identifier of a generation of an index, to recognize documents of older generations in a store."""
    manifest = index.manifest
    return f"{manifest.model.fingerprint[:16]}-{manifest.generation}-{manifest.created}"


def point_id(key: str) -> str:
    """Deterministic UUID of a document, for stores whose ids are UUIDs.

    Example:
        >>> point_id("d1") == point_id("d1") != point_id("d2")
        True
    """
    return str(uuid.uuid5(_NAMESPACE, key))


def metadata_text(payload: dict[str, Any]) -> str | None:
    """Metadata of a payload as JSON, for stores with typed columns; None without metadata."""
    metadata = payload.get("metadata")
    return json.dumps(metadata, ensure_ascii=False, sort_keys=True) if metadata else None


_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class ExportedStore:
    """Result of an export.

    Attributes:
        store: ``qdrant`` or ``lancedb``.
        where: Folder or address.
        collection: Name of the collection or table.
        documents: Number of documents in the collection.
        written: Number of documents written by this export; the others existed.
    """

    store: str
    where: str
    collection: str
    documents: int
    written: int


def export_to(
    index: Index,
    target: str,
    *,
    collection: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
    batch_documents: int = BATCH_DOCUMENTS,
) -> ExportedStore:
    """Export an index to a store: all documents that the store does not have from this generation.

    Args:
        index: The index.
        target: Target as described by `SCHEMES`.
        collection: Name of the collection or table. Default: the name of the index folder.
        overwrite: Replace a collection that was made for other vectors.
        progress: Show a progress bar.
        batch_documents: Largest number of documents that are sent at once.

    Raises:
        InputError: Unknown store, the index is one of BM25, its library is not installed, or it cannot be written.
    """
    check_has_vectors(index, "export")
    scheme, separator, where = target.partition("://")
    if not separator or scheme not in SCHEMES or not where:
        raise InputError(f"--store {target!r}: must be {', '.join(f'{name}://{shape}' for name, (shape, _) in SCHEMES.items())}")
    name = re.sub(r"[^\w.-]", "-", index.path.name) if collection is None else collection
    if not _NAME.fullmatch(name):
        raise InputError(f"--collection {name!r}: must be letters, digits, '_', '-' and '.'")
    written = SCHEMES[scheme][1](index, where, name, overwrite, progress, batch_documents)
    return ExportedStore(scheme, where, name, len(index), written)


def missing_library(what: str, library: str, error: ImportError) -> InputError:
    """Make the error for a library that is not installed."""
    return InputError(f"{what} needs {library}, which is not installed ({error.name}): pip install 'quiver-retrieval[interop]'")


def _to_qdrant(index: Index, where: str, name: str, overwrite: bool, progress: bool, documents: int) -> int:
    try:
        from quiver.retrieval.integrations import qdrant
    except ImportError as error:
        raise missing_library("--store qdrant://", "qdrant-client", error) from error
    client = qdrant.open_client(where)
    try:
        return qdrant.write_collection(index, client, name, overwrite=overwrite, progress=progress, batch_documents=documents)
    finally:
        client.close()


def _to_lancedb(index: Index, where: str, name: str, overwrite: bool, progress: bool, documents: int) -> int:
    try:
        from quiver.retrieval.integrations import lance
    except ImportError as error:
        raise missing_library("--store lancedb://", "lancedb", error) from error
    return lance.write_table(index, where, name, overwrite=overwrite, progress=progress, batch_documents=documents)


SCHEMES: dict[str, tuple[str, Callable[[Index, str, str, bool, bool, int], int]]] = {
    "qdrant": ("FOLDER_OR_ADDRESS", _to_qdrant),
    "lancedb": ("FOLDER", _to_lancedb),
}
"""Scheme -> form of the address, and the function that writes."""
