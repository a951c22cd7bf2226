"""Search an index with query texts: encode the queries, search, and return a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quiver.encoder.errors import InputError
from quiver.retrieval.index.documents.metadata import FilterLike
from quiver.retrieval.index.engines import Setting
from quiver.retrieval.index.index import Index
from quiver.retrieval.index.ranking import check_k
from quiver.retrieval.models.pooling import comparable
from quiver.retrieval.protocols import DenseModel, TokenModel
from quiver.retrieval.records import DenseEncoding, Missing, Query, TokenCounts

if TYPE_CHECKING:
    from quiver.retrieval.cluster.index import ShardedIndex


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        run: Query id -> document id -> score, queries in the order given, documents best first.
        counts: Token counts of the queries.
        missing: Part of a sharded index that was not searched; None if all of it was.
    """

    run: dict[str, dict[str, float]]
    counts: TokenCounts
    missing: Missing | None = None


def search(
    index: Index | ShardedIndex,
    model: DenseModel | TokenModel,
    queries: Sequence[Query],
    k: int,
    *,
    filter: FilterLike = None,
    effort: str | Mapping[str, Setting] | None = None,
    target_recall: float | None = None,
    progress: bool = False,
) -> SearchResult:
    """Search every query.

    Args:
        index: An index in this process or over shards, whose model is checked against ``model``.
        model: Encodes the queries; it must be the one that encoded the documents.
        queries: At least one, each with an id of its own.
        k: Number of hits per query; at most the number of documents.
        filter: Filter on the documents, see `quiver.retrieval.index.index.Index.search`.
        effort: Search effort; see `quiver.retrieval.index.index.Index.search`.
        target_recall: Recall to reach, instead of an effort; see there.
        progress: Show the model's progress.

    Raises:
        InputError: No queries, two queries with one id, the index was built with another model, the filter does not fit, or
            ``target_recall`` is given and recall was not measured.
        ValueError: k < 1, the query vectors do not fit the index, or both an effort and a target recall.
    """
    k = check_k(k)
    index.check_model(model.card)
    filter = index.check_filter(filter)
    if target_recall is not None:
        index.search_params_for(target_recall, k)  # says before anything is encoded that it was not measured
    if not queries:
        raise InputError("there are no queries to search")
    query_ids = [query.id for query in queries]
    key, times = Counter(query_ids).most_common(1)[0]
    if times > 1:
        raise InputError(f"query id '{key}' occurs {times} times; ids must be unique")
    encoding = model.encode([query.text for query in queries], "query", progress=progress)
    vectors = comparable(encoding.vectors, model.card) if isinstance(encoding, DenseEncoding) else encoding.vectors
    hits = index.search(vectors, k, filter=filter, effort=effort, target_recall=target_recall)
    return SearchResult(hits.to_run(query_ids), encoding.counts, hits.missing)
