"""The vectors of a collection under a model, encoded once, as a folder that every system can read."""

from __future__ import annotations

from pathlib import Path

from quiver.encoder.errors import InputError
from quiver.eval.bench.index.vectors import VectorFolder, write_vectors
from quiver.retrieval.data.corpus import load_collection
from quiver.retrieval.data.embedding_store import open_embedding_store
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model


def encode_collection(
    data: Path, model: str, split: str, out: Path, *, cache: Path | None = None, limit_docs: int | None = None, progress: bool = False
) -> VectorFolder:
    """Encode documents and judged queries of a collection.

    Args:
        data: A BEIR folder.
        model: Folder or hub id of a bi-encoder or a ColBERT.
        split: Which judgements.
        out: The folder to write.
        cache: A store of vectors, which are not encoded again; None encodes all of them now.
        limit_docs: The first so many documents, with the queries that have a relevant one among them.
        progress: Show bars on standard error.

    Raises:
        InputError: Data or model cannot be read, or no query is left.
    """
    collection = load_collection(data, split)
    documents = [document for _, document in zip(range(limit_docs or len(collection.documents)), collection.documents, strict=False)]
    known = {document.id for document in documents}
    qrels = {query: {key: grade for key, grade in grades.items() if key in known} for query, grades in collection.qrels.items()}
    queries = [query for query in collection.queries if any(grade > 0 for grade in qrels.get(query.id, {}).values())]
    if not queries:
        raise InputError(f"{data}: no query of split {split!r} has a relevant document among the {len(documents):,} that are indexed")
    loaded = load_model(model)
    with open_embedding_store(cache) as store:
        texts = (document.content() for document in documents)
        encoded = store.encode(loaded, texts, "document", total=len(documents), progress=progress)
        asked = store.encode(loaded, [query.text for query in queries], "query", total=len(queries), progress=progress)
        # The store keeps vectors alone; an index of token vectors is told their tokens, as by a model that encodes for it.
        token_ids = None
        if isinstance(loaded, ColBERT):
            token_ids = (ids for document in documents for ids in loaded.document_token_ids([document.content()]))
        return write_vectors(
            out,
            (encoded.rows, encoded.lengths),
            (asked.rows, asked.lengths),
            ids=[document.id for document in documents],
            query_ids=[query.id for query in queries],
            qrels={query.id: qrels[query.id] for query in queries},
            token_ids=token_ids,
        )


def threads_up_to(most: int) -> tuple[int, ...]:
    """Powers of two, and the largest.

    Example:
        >>> threads_up_to(1), threads_up_to(6)
        ((1,), (1, 2, 4, 6))
    """
    powers = [2**power for power in range(most.bit_length()) if 2**power < most]
    return (*powers, most)
