"""An index as a table of LanceDB: a row a document, written in order, so that an export that was interrupted goes on behind the last.

    id, title, text         as they are; texts are null where the index keeps none
    metadata                JSON, or null
    vector                  (d,) float32; of a ColBERT model a list of such, null where a document has none
    quiver_state            from which state of the index the row was written

A bi-encoder's table is searched with the distance ``dot``. Several vectors a row LanceDB compares by cosine alone: a ColBERT's are written
at unit length, and then it is MaxSim (a distance is the number of query tokens minus the score).

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

from quiver.encoder.errors import InputError
from quiver.retrieval.index.index import Index
from quiver.retrieval.integrations.points import Batch, batches, metadata_text, state_of
from quiver.retrieval.progress import progress_bar

STATE, VECTOR = "quiver_state", "vector"

# How far from unit length a vector of an index that keeps them as they came may be.
_UNIT = 1e-3


def write_table(index: Index, folder: Path | str, name: str, *, overwrite: bool = False, progress: bool = False) -> int:
    """Write all documents of an index; what an interrupted export has written stays.

    Args:
        index: The index.
        folder: Of the database; made if it is not there.
        name: Of the table.
        overwrite: Replace a table of this name that was made for other vectors.
        progress: Show a bar over the documents.

    Returns:
        Documents that were written now.

    Raises:
        InputError: There is such a table for other vectors, the ColBERT's vectors are not of unit length, or the folder cannot be written.
    """
    state, schema = state_of(index), _schema(index)
    try:
        table = _prepared(lancedb.connect(str(folder)), name, schema, overwrite=overwrite)
        done = table.count_rows(_is(state))
        # Rows of older states are replaced one by one; where there are none, new ones are put behind the last.
        replacing = table.count_rows() > done
        written = seen = 0
        with progress_bar("documents", len(index), enabled=progress) as advance:
            for batch in batches(index):
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
        raise InputError(f"LanceDB, {folder}, table {name!r}: {str(error).splitlines()[0]}") from error
    return written


def search_table(folder: Path | str, name: str, query: NDArray[np.float32], k: int) -> list[tuple[str, float]]:
    """The k best documents of a table.

    Args:
        folder: Of the database.
        name: Of the table.
        query: (d,) of a bi-encoder, (n, d) of unit length each of a ColBERT.
        k: Hits.

    Returns:
        Document ids and scores as ours are, best first.
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
    except (FileNotFoundError, ValueError):  # which of the two has changed from version to version
        return database.create_table(name, schema=schema)
    if table.schema.field(VECTOR).type.equals(schema.field(VECTOR).type) if VECTOR in table.schema.names else False:
        return table
    if not overwrite:
        raise ValueError("made for other vectors; choose another --collection, or --overwrite")
    return database.create_table(name, schema=schema, mode="overwrite")


def _rows(index: Index, batch: Batch, skipped: int, state: str, schema: Any) -> Any:
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
    """Vectors at unit length: what a code decodes to is nearly so; what came longer or shorter cosine would compare otherwise.

    Raises:
        ValueError: The index keeps vectors as they came, and these are not of unit length.
    """
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if index.kind.startswith("exact") and len(lengths) and float(np.abs(lengths - 1).max()) > _UNIT:
        raise ValueError(f"document '{key}' has vectors that are not of unit length, and LanceDB compares several a row by cosine alone")
    unit: NDArray[np.float32] = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return unit


def _is(state: str) -> str:
    return f"{STATE} = '{state}'"
