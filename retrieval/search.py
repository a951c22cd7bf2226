"""Queries and an index to a run: the one place where a model's query vectors meet an index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from encoder.errors import InputError
from retrieval.indexes.folder import IndexFolder
from retrieval.indexes.ranking import check_k
from retrieval.protocols import DenseModel, TokenModel, VectorIndex
from retrieval.records import DenseEncoding, Query, TokenCounts
from retrieval.similarity import comparable


@dataclass(frozen=True)
class SearchResult:
    """What a search gives.

    Attributes:
        run: Query id -> document id -> score, queries in the order given, documents best first.
        counts: What tokenising did to the queries.
    """

    run: dict[str, dict[str, float]]
    counts: TokenCounts


def search(
    index: VectorIndex[Any] | IndexFolder, model: DenseModel | TokenModel, queries: Sequence[Query], k: int, *, progress: bool = False
) -> SearchResult:
    """Search every query.

    Args:
        index: An opened folder, whose model is checked against ``model``, or an index in memory, which knows of no model.
        model: Encodes the queries; it must be the one that encoded the documents.
        queries: At least one, each with an id of its own.
        k: Hits a query; capped at the number of documents.
        progress: Show the model's progress.

    Raises:
        InputError: No queries, two queries with one id, or the folder was built with another model.
        ValueError: k < 1, or the query vectors do not fit the index.
    """
    check_k(k)
    if isinstance(index, IndexFolder):
        index.check_model(model.card)
    if not queries:
        raise InputError("there are no queries to search")
    query_ids = [query.id for query in queries]
    key, times = Counter(query_ids).most_common(1)[0]
    if times > 1:
        raise InputError(f"query id '{key}' is there {times} times; ids must be unique")
    encoding = model.encode([query.text for query in queries], "query", progress=progress)
    vectors = comparable(encoding.vectors, model.card) if isinstance(encoding, DenseEncoding) else encoding.vectors
    return SearchResult(index.search(vectors, k).to_run(query_ids), encoding.counts)
