"""Export to LanceDB: one row per document, written in order, so that an interrupted export can be resumed.

    id, title, text         texts are null if the index stores none
    metadata                JSON, or null
    vector                  (d,) float32; for a ColBERT model a list of these; null for a document without vectors
    quiver_state            generation of the index that the row was written from

Tables of bi-encoders are searched with the distance ``dot``. LanceDB compares multi-vectors by cosine only: vectors of ColBERT models are
written at unit length, which gives MaxSim (the distance is the number of query tokens minus the score).

Shapes: n vectors of a query, d width, k hits.
Source: https://lancedb.github.io/lancedb/guides/multi-vector (lancedb 0.40).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from quiver.encoder.errors import InputError, first_line
from quiver.encoder.progress import progress_bar
from quiver.retrieval.index.index import Index
from quiver.retrieval.integrations.stores import BATCH_DOCUMENTS, DocumentBatch, batches, metadata_text, state_of

STATE, VECTOR = "quiver_state", "vector"

_UNIT = 1e-3  # tolerance on the length of vectors of an exact index


def write_table(
    index: Index, folder: Path | str, name: str, *, overwrite: bool = False, progress: bool = False, batch_documents: int = BATCH_DOCUMENTS
) -> int:
    """Write all documents of an index, except those that an interrupted export has written.

    Args:
        index: The index.
        folder: Folder of the database; created if it does not exist.
        name: Name of the table.
        overwrite: Replace a table of this name that was made for other vectors.
        progress: Show a progress bar.
        batch_documents: Largest number of documents that are sent at once.

    Returns:
        Number of documents written.

    Raises:
        InputError: The table exists for other vectors, ColBERT vectors are not of unit length, or the folder cannot be written.
    """
    state, schema = state_of(index), _schema(index)
    try:
        table = _prepared(lancedb.connect(str(folder)), name, schema, overwrite=overwrite)
        done = table.count_rows(_is(state))
        # If there are rows of older generations, rows are merged by id; otherwise they are appended.
        replacing = table.count_rows() > done
        written = seen = 0
        with progress_bar("documents", len(index), enabled=progress) as advance:
            for batch in batches(index, batch_documents):
                skipped = min(len(batch), max(0, done - seen))
                seen += len(batch)
                if skipped < len(batch):
                    rows = _rows(index, batch, skipped, state, schema)
                    if replacing:
                        table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(rows)
                    else:
                        table.add(rows)
                written += len(batch) - skipped
                advance(len(batch))
        if table.count_rows() > seen:
            table.delete(f"NOT ({_is(state)})")
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"LanceDB, {folder}, table {name!r}: {first_line(error)}") from error
    return written


def search_table(folder: Path | str, name: str, query: NDArray[np.float32], k: int) -> list[tuple[str, float]]:
    """Search a table.

    Args:
        folder: Folder of the database.
        name: Name of the table.
        query: (d,) for a bi-encoder; (n, d) of unit length for a ColBERT model.
        k: Number of hits.

    Returns:
        Document ids and scores, as in the index, best first.
    """
    table = lancedb.connect(str(folder)).open_table(name)
    distance, best = ("dot", 1.0) if query.ndim == 1 else ("cosine", float(len(query)))
    rows = table.search(query, vector_column_name=VECTOR).distance_type(distance).limit(k).select(["id", "_distance"]).to_list()
    return [(row["id"], best - float(row["_distance"])) for row in rows]


def _schema(index: Index) -> Any:
    card = index.manifest.model
    vector = pa.list_(pa.float32(), card.dim)
    if card.kind == "colbert":
        vector = pa.list_(vector)
    texts = [pa.field(name, pa.string()) for name in ("title", "text", "metadata")]
    return pa.schema([pa.field("id", pa.string(), nullable=False), *texts, pa.field(VECTOR, vector), pa.field(STATE, pa.string())])


def _prepared(database: Any, name: str, schema: Any, *, overwrite: bool) -> Any:
    try:
        table = database.open_table(name)
    except (FileNotFoundError, ValueError):  # the type depends on the version of LanceDB
        return database.create_table(name, schema=schema)
    if table.schema.field(VECTOR).type.equals(schema.field(VECTOR).type) if VECTOR in table.schema.names else False:
        return table
    if not overwrite:
        raise ValueError("the table exists for other vectors; choose another --collection, or pass --overwrite")
    return database.create_table(name, schema=schema, mode="overwrite")


def _rows(index: Index, batch: DocumentBatch, skipped: int, state: str, schema: Any) -> Any:
    colbert = index.manifest.model.kind == "colbert"
    vectors = [
        _unit(index, key, each) if colbert else each[0] for key, each in zip(batch.ids[skipped:], batch.vectors[skipped:], strict=True)
    ]
    payloads = batch.payloads[skipped:]
    columns = {
        "id": batch.ids[skipped:],
        "title": [payload.get("title") for payload in payloads],
        "text": [payload.get("text") for payload in payloads],
        "metadata": [metadata_text(payload) for payload in payloads],
        VECTOR: [(each.tolist() or None) for each in vectors],
        STATE: [state] * len(payloads),
    }
    return pa.table(columns, schema=schema)


def _unit(index: Index, key: str, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Normalize vectors. Decoded vectors are nearly of unit length; others would be compared differently by cosine.

    Raises:
        ValueError: The index is exact, and the vectors are not of unit length.
    """
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if index.kind.startswith("exact") and len(lengths) and float(np.abs(lengths - 1).max()) > _UNIT:
        raise ValueError(
            f"document '{key}' has vectors that are not of unit length, and LanceDB compares multi-vectors by cosine only; export to Qdrant"
        )
    unit: NDArray[np.float32] = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return unit


def _is(state: str) -> str:
    return f"{STATE} = '{state}'"
