"""A collection to a run: one function a kind of system, which is all that tells a model from BM25.

A model's vectors go through a ``VectorStore``, so that a text is encoded once for as long as the store lives, and from there through
a real index. An index that is not exact is compared with exact search over the same vectors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from eval.benchmark import Policy, cut, depth
from eval.bm25 import PARAMETERS, bm25_run
from eval.results import IndexUsed, Truncated
from retrieval.corpus import Collection
from retrieval.indexes.build import index_vectors
from retrieval.protocols import DenseModel, TokenModel
from retrieval.records import Hits, ModelCard
from retrieval.similarity import comparable
from retrieval.vectors import StoredVectors, VectorStore

OVERLAPS = (10, 100)
"""Depths at which an index is compared with exact search."""


@dataclass(frozen=True)
class Ranking:
    """A collection's run, already cut by its policy, and how it came about; the fields are those of ``CollectionResult``."""

    run: dict[str, dict[str, float]]
    index: IndexUsed
    truncated: Truncated
    seconds: Mapping[str, float]
    cached: int = 0


class Ranker(Protocol):
    """Ranks collections."""

    def __call__(self, collection: Collection, policy: Policy, k: int) -> Ranking:
        """The first k documents of every query."""


@dataclass
class Stopwatch:
    """Wall clock by step, in seconds."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, step: str) -> None:
        """What has passed since the last lap went into this step."""
        now = time.perf_counter()
        self.seconds[step] = self.seconds.get(step, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True)
class ModelRanker:
    """Ranks by a model's vectors.

    Attributes:
        model: Encodes texts.
        store: Where the vectors go.
        index: ``exact``, or a FAISS factory string with its settings; see ``retrieval.indexes.build.index_vectors``.
        progress: Show how far the encoding is.
    """

    model: DenseModel | TokenModel
    store: VectorStore
    index: str = "exact"
    progress: bool = False

    def __call__(self, collection: Collection, policy: Policy, k: int) -> Ranking:
        """The first k documents of every query.

        Raises:
            InputError: The index cannot be built for this model or collection.
        """
        watch, card = Stopwatch(), self.model.card
        # Queries first: they take seconds, and what is wrong with the model shows on them.
        queries = self._encode([query.text for query in collection.queries], "query", len(collection.queries))
        vectors = query_vectors(queries, card)
        watch.lap("encode_queries")
        ids: list[str] = []
        documents = self._encode(_contents(collection, policy, ids), "document", len(collection.documents))
        watch.lap("encode_documents")
        index = index_vectors(ids, documents, card, kind=self.index)
        watch.lap("index")
        hits = index.search(vectors, depth(k, policy))
        watch.lap("search")
        query_ids = [query.id for query in collection.queries]
        used = IndexUsed(
            kind=index.kind,
            parameters=index.parameters,
            recall=dict.fromkeys(map(_overlap_name, OVERLAPS), 1.0)
            if self.index == "exact"
            else self._overlaps(ids, documents, vectors, hits),
            bytes=index.nbytes,
            query_milliseconds=1000 * watch.seconds["search"] / len(query_ids),
        )
        return Ranking(
            run=cut(hits.to_run(query_ids), k, policy),
            index=used,
            truncated=Truncated(documents=documents.counts.truncated, queries=queries.counts.truncated),
            seconds=watch.seconds,
            cached=documents.reused,
        )

    def _encode(self, texts: Any, role: Any, total: int) -> StoredVectors:
        return self.store.encode(self.model, texts, role, total=total, progress=self.progress)

    def _overlaps(self, ids: Sequence[str], documents: StoredVectors, queries: Any, hits: Hits) -> dict[str, float]:
        exact = index_vectors(ids, documents, self.model.card).search(queries, max(OVERLAPS))
        return {_overlap_name(depth): overlap(exact, hits, depth) for depth in OVERLAPS}


def rank_with_bm25(collection: Collection, policy: Policy, k: int) -> Ranking:
    """The first k documents of every query by BM25."""
    started = time.perf_counter()
    run = bm25_run(collection, k=k, use_title=policy.use_title, exclude_self=policy.exclude_self)
    return Ranking(run, IndexUsed("bm25", PARAMETERS), Truncated(0, 0), {"search": time.perf_counter() - started})


BASELINES: Mapping[str, Callable[[Collection, Policy, int], Ranking]] = {"bm25": rank_with_bm25}
"""Baseline name -> how it ranks; each is a system of its own as well, ``model="bm25"``."""


def overlap(exact: Hits, hits: Hits, k: int) -> float:
    """Share of the exact search's first k documents that another search has among its own, a mean over queries.

    Example:
        >>> overlap(Hits([["a", "b"]], [np.ones(2)]), Hits([["b", "c"]], [np.ones(2)]), 2)
        0.5
    """
    shares = [len({*wanted[:k]} & {*found[:k]}) / len(wanted[:k]) for wanted, found in zip(exact.ids, hits.ids, strict=True)]
    return sum(shares) / len(shares)


def query_vectors(stored: StoredVectors, card: ModelCard) -> Any:
    """Vectors of queries as an index wants them: (Q, d), or for a ColBERT a list of (n_i, d)."""
    rows = stored.rows.take(np.arange(stored.rows.shape[0]))
    if stored.lengths is None:
        return comparable(rows, card)
    return np.split(rows, np.cumsum(stored.lengths)[:-1])


def _overlap_name(k: int) -> str:
    return f"overlap@{k}"


def _contents(collection: Collection, policy: Policy, ids: list[str]) -> Iterator[str]:
    """The documents' texts as they are encoded; their ids are collected on the way, so that the corpus is read once."""
    for document in collection.documents:
        ids.append(document.id)
        yield document.content(use_title=policy.use_title)
