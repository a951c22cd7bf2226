"""A corpus under a model, for another harness to search: what mteb and beir ask of a retriever, in our records.

Documents are encoded once into a ``EmbeddingStore``; they are indexed when somebody first searches all of them, for a harness that
re-ranks never does.

Shapes: Q queries, P documents, d vector width, n_i token vectors of text i.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.eval.ranking import query_vectors
from quiver.retrieval.data.embedding_store import EmbeddingStore
from quiver.retrieval.index.exact.colbert import ExactColBERTIndex
from quiver.retrieval.index.exact.dense import ExactDenseIndex
from quiver.retrieval.index.in_memory import index_vectors
from quiver.retrieval.protocols import DenseModel, TokenModel, VectorIndex
from quiver.retrieval.records import Query


class VectorSearch:
    """Documents of one corpus, encoded.

    Args:
        model: Encodes documents now and queries later.
        store: Where the vectors go.
        ids: P document ids.
        texts: Their texts, titles joined in; read once.
        index: ``exact``, or a FAISS factory string with its settings; see ``quiver.retrieval.index.in_memory.index_vectors``.
        progress: Show how far the encoding is.
    """

    def __init__(
        self,
        model: DenseModel | TokenModel,
        store: EmbeddingStore,
        ids: Sequence[str],
        texts: Iterable[str],
        *,
        index: str,
        progress: bool,
    ) -> None:
        self._model = model
        self._store = store
        self._ids = ids
        self._kind = index
        self._documents = store.encode(model, texts, "document", total=len(ids), progress=progress)
        lengths = self._documents.lengths
        self._offsets = None if lengths is None else np.cumsum([0, *lengths], dtype=np.int64)

    def search(self, queries: Sequence[Query], k: int, *, progress: bool) -> dict[str, dict[str, float]]:
        """The k best documents of each query, best first.

        Raises:
            InputError: The index cannot be built for this model or corpus.
        """
        return self._index.search(self._query_vectors(queries, progress), k).to_run([query.id for query in queries])

    def rerank(
        self, queries: Sequence[Query], candidates: Mapping[str, Sequence[str]], k: int, *, progress: bool
    ) -> dict[str, dict[str, float]]:
        """The k best of each query's own candidates, scored exactly whatever the index is.

        Args:
            queries: Q queries.
            candidates: Query id -> document ids; a query without any gets none.
            k: Documents kept for a query.
            progress: Show how far the encoding is.

        Raises:
            InputError: A candidate is not in the corpus.
        """
        vectors = self._query_vectors(queries, progress)
        run: dict[str, dict[str, float]] = {}
        for row, query in enumerate(queries):
            rows = self._findable_rows(query.id, candidates.get(query.id, ()))
            run[query.id] = {}
            if rows:
                run |= self._exact(rows).search(vectors[row : row + 1], k).to_run([query.id])
        return run

    @cached_property
    def _index(self) -> VectorIndex[Any]:
        return index_vectors(self._ids, self._documents, self._model.card, kind=self._kind)

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {document: row for row, document in enumerate(self._ids)}

    def _query_vectors(self, queries: Sequence[Query], progress: bool) -> Any:
        stored = self._store.encode(self._model, [query.text for query in queries], "query", total=len(queries), progress=progress)
        return query_vectors(stored)

    def _findable_rows(self, query: str, documents: Sequence[str]) -> list[int]:
        """Rows of the documents that have a vector, each once."""
        if unknown := [document for document in documents if document not in self._rows]:
            raise InputError(f"query '{query}' is to rank the document '{unknown[0]}', which is not in the corpus")
        rows = [self._rows[document] for document in dict.fromkeys(documents)]
        return [row for row in rows if self._offsets is None or self._offsets[row] < self._offsets[row + 1]]

    def _exact(self, rows: Sequence[int]) -> VectorIndex[Any]:
        ids = [self._ids[row] for row in rows]
        if self._offsets is None:
            vectors = self._documents.rows.take(np.array(rows, np.int64))
            return ExactDenseIndex.from_vectors(ids, vectors)
        places: list[NDArray[np.int64]] = [np.arange(self._offsets[row], self._offsets[row + 1]) for row in rows]
        return ExactColBERTIndex.from_packed(ids, self._documents.rows.take(np.concatenate(places)), [len(place) for place in places])
