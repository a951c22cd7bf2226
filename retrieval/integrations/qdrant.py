"""Export to Qdrant: one point per document with an id derived from the document id, so that repeated writes are idempotent.

A collection has one vector per point for a bi-encoder, and two named vectors per point for a ColBERT model:

    tokens    one vector per token, compared by MaxSim, without an HNSW graph
    mean      their mean, with an HNSW graph; it finds the candidates that MaxSim ranks

Both are compared by inner product. An index stores vectors scaled for it (unit length if the model's similarity is cosine), so scores are
those of the index if queries are scaled by ``quiver.retrieval.models.encoding.comparable``; otherwise only their scale differs.

The payload has ``id``, ``title``, ``text``, ``metadata`` (filter by ``metadata.year``), and ``quiver_state``: the generation of the
index that a point was written from. Points of that generation are not sent again; those of older ones are deleted at the end.

Shapes: n vectors of a query, d width, k hits.
Source: https://qdrant.tech/documentation/concepts/vectors/#multivectors and /concepts/hybrid-queries (qdrant-client 1.20).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import ApiException, ResponseHandlingException

from quiver.encoder.errors import InputError, first_line
from quiver.encoder.progress import progress_bar
from quiver.retrieval.index.index import Index
from quiver.retrieval.integrations.stores import BATCH_DOCUMENTS, DocumentBatch, batches, point_id, state_of

TOKENS, MEAN = "tokens", "mean"
"""Names of the two vectors of ColBERT models."""

STATE = "quiver_state"
KEY_VARIABLE = "QDRANT_API_KEY"
"""Environment variable with the API key of a server."""

CANDIDATES = 200
"""Default number of candidates that the mean vector finds for MaxSim."""


def open_client(where: str) -> Any:
    """Open a client for a server (http:// or https://), a folder, or ``:memory:``.

    Raises:
        InputError: The folder is in use by another client.
    """
    if where.startswith(("http://", "https://")):
        return QdrantClient(url=where, api_key=os.environ.get(KEY_VARIABLE), check_compatibility=False)
    if where == ":memory:":
        return QdrantClient(where)
    try:
        return QdrantClient(path=where)
    except RuntimeError as error:
        raise InputError(f"{where}: {first_line(error)}") from error


def write_collection(
    index: Index, client: Any, name: str, *, overwrite: bool = False, progress: bool = False, batch_documents: int = BATCH_DOCUMENTS
) -> int:
    """Write all documents of an index, except those that an interrupted export has written.

    Args:
        index: The index.
        client: Qdrant client.
        name: Name of the collection.
        overwrite: Replace a collection of this name that was made for other vectors.
        progress: Show a progress bar.
        batch_documents: Largest number of documents that are sent at once.

    Returns:
        Number of documents sent.

    Raises:
        InputError: The collection exists for other vectors, or the server does not answer or refuses.
    """
    try:
        _prepare(index, client, name, overwrite=overwrite)
        state, sent = state_of(index), 0
        with progress_bar("documents", len(index), enabled=progress) as advance:
            for batch in batches(index, batch_documents):
                points = _missing(client, name, batch, state, colbert=index.manifest.model.kind == "colbert")
                if points:
                    client.upsert(name, points=points, wait=True)
                sent += len(points)
                advance(len(batch))
        stale = models.Filter(must_not=[models.FieldCondition(key=STATE, match=models.MatchValue(value=state))])
        client.delete(name, points_selector=models.FilterSelector(filter=stale), wait=True)
    except (ApiException, ResponseHandlingException, ConnectionError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"Qdrant, collection {name!r}: {reason[0]}") from error
    return sent


def search_collection(
    client: Any, name: str, query: NDArray[np.float32], k: int, *, candidates: int | None = CANDIDATES
) -> list[tuple[str, float]]:
    """Search a collection.

    Args:
        client: Qdrant client.
        name: Name of the collection.
        query: (d,) for a bi-encoder, (n, d) for a ColBERT model.
        k: Number of hits.
        candidates: For ColBERT models: number of candidates found by the mean; None compares all documents by MaxSim.

    Returns:
        Document ids and scores, best first.
    """
    if query.ndim == 1:
        found = client.query_points(name, query=query.tolist(), limit=k, with_payload=["id"])
    else:
        first = None
        if candidates is not None:
            first = models.Prefetch(query=query.mean(axis=0).tolist(), using=MEAN, limit=max(k, candidates))
        found = client.query_points(name, prefetch=first, query=query.tolist(), using=TOKENS, limit=k, with_payload=["id"])
    return [(point.payload["id"], float(point.score)) for point in found.points]


def _prepare(index: Index, client: Any, name: str, *, overwrite: bool) -> None:
    card = index.manifest.model
    plain = models.VectorParams(size=card.dim, distance=models.Distance.DOT)
    vectors: Any = plain
    if card.kind == "colbert":
        comparator = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
        # An HNSW graph of all token vectors would be larger than the vectors.
        tokens = plain.model_copy(update={"multivector_config": comparator, "hnsw_config": models.HnswConfigDiff(m=0)})
        vectors = {TOKENS: tokens, MEAN: plain}
    if client.collection_exists(name):
        if _shape(client.get_collection(name).config.params.vectors) == _shape(vectors):
            return
        if not overwrite:
            raise InputError(
                f"Qdrant, collection {name!r}: the collection exists for other vectors; choose another --collection, or pass --overwrite"
            )
        client.delete_collection(name)
    client.create_collection(name, vectors_config=vectors)


def _shape(vectors: Any) -> Any:
    """Names, widths, distances and multi-vector settings of vectors, to compare collections."""
    named = vectors if isinstance(vectors, dict) else {"": vectors}
    return {name: (each.size, each.distance, each.multivector_config is not None) for name, each in named.items()}


def _missing(client: Any, name: str, batch: DocumentBatch, state: str, *, colbert: bool) -> list[Any]:
    """Points of a batch that were not written from this generation."""
    names = [point_id(key) for key in batch.ids]
    known = client.retrieve(name, ids=names, with_payload=[STATE], with_vectors=False)
    there = {str(point.id) for point in known if point.payload and point.payload.get(STATE) == state}
    points = []
    for point, payload, vectors in zip(names, batch.payloads, batch.vectors, strict=True):
        if point not in there:
            given: Any = vectors[0].tolist() if not colbert else _named(vectors)
            points.append(models.PointStruct(id=point, vector=given, payload={**payload, STATE: state}))
    return points


def _named(vectors: NDArray[np.float32]) -> dict[str, Any]:
    """Vectors of a document of a ColBERT model by name; empty for a document without vectors, which is never found."""
    return {TOKENS: vectors.tolist(), MEAN: vectors.mean(axis=0).tolist()} if len(vectors) else {}
