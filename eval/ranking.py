"""A collection to a run: one function a kind of system, which is all that tells a model from BM25.

A model's vectors go through a ``EmbeddingStore``, so that a text is encoded once for as long as the store lives, and from there through
a real index. An index that is not exact is compared with exact search over the same vectors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from quiver.encoder.errors import InputError
from quiver.eval.benchmark import Policy, cut, depth
from quiver.eval.bm25 import bm25_run
from quiver.eval.results import IndexUsed, Truncated
from quiver.retrieval.data.corpus import Collection
from quiver.retrieval.data.embedding_store import EmbeddingStore, StoredVectors
from quiver.retrieval.index.engine_table import EXACT
from quiver.retrieval.index.engines import Setting
from quiver.retrieval.index.index import Index
from quiver.retrieval.index.memory import index_vectors
from quiver.retrieval.protocols import DenseModel, TokenModel
from quiver.retrieval.records import Hits, ModelCard
from quiver.retrieval.search.bm25 import PARAMETERS

OVERLAPS = (10, 100)
"""Depths at which an index is compared with exact search, as far as they are kept."""

TIE = 1e-6
"""Two scores closer than this, relatively, are one: float32 products in another order differ by so much."""


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
        engine: Index engine with settings, such as ``ivf-dense:nlist=64``; see `quiver.retrieval.index.engine_table.parse_engine`.
        effort: Search effort: a preset, or search parameters of the engine by name.
        progress: Show how far the encoding is.
    """

    model: DenseModel | TokenModel
    store: EmbeddingStore
    engine: str = EXACT
    effort: str | Mapping[str, Setting] = "balanced"
    progress: bool = False

    def __call__(self, collection: Collection, policy: Policy, k: int) -> Ranking:
        """The first k documents of every query.

        Raises:
            InputError: The index cannot be built for this model or collection.
        """
        watch, card = Stopwatch(), self.model.card
        # Queries first: they take seconds, and what is wrong with the model shows on them.
        queries = self._encode([query.text for query in collection.queries], "query", len(collection.queries))
        vectors = query_vectors(queries)
        watch.lap("encode_queries")
        ids: list[str] = []
        documents = self._encode(_contents(collection, policy, ids), "document", len(collection.documents))
        watch.lap("encode_documents")
        index = index_vectors(ids, documents.rows, card, lengths=documents.lengths, engine=self.engine)
        watch.lap("index")
        wanted = depth(k, policy)
        hits = _searched(index, vectors, wanted, card, self.effort)
        watch.lap("search")
        exact = index.kind.startswith("exact-")
        overlaps = tuple(cut for cut in OVERLAPS if cut <= k)
        return Ranking(
            run=cut(hits.to_run([query.id for query in collection.queries]), k, policy),
            index=IndexUsed(
                kind=EXACT if exact else index.kind,
                # The work of an approximate search also depends on the number of documents that are asked for.
                parameters={**index.parameters} if exact else {**index.parameters, **index.search_params(self.effort, wanted), "k": wanted},
                recall={_name(cut): 1.0 for cut in overlaps} if exact else self._overlaps(ids, documents, vectors, hits, overlaps),
                bytes=index.nbytes,
                query_milliseconds=1000 * watch.seconds["search"] / len(collection.queries),
            ),
            truncated=Truncated(documents=documents.counts.truncated, queries=queries.counts.truncated),
            seconds=watch.seconds,
            cached=documents.reused,
        )

    def _encode(self, texts: Any, role: Any, total: int) -> StoredVectors:
        return self.store.encode(self.model, texts, role, total=total, progress=self.progress)

    def _overlaps(self, ids: Sequence[str], documents: StoredVectors, queries: Any, hits: Hits, cuts: Sequence[int]) -> dict[str, float]:
        if not cuts:
            return {}
        exact = index_vectors(ids, documents.rows, self.model.card, lengths=documents.lengths).search(queries, max(cuts))
        return {_name(cut): overlap(exact, hits, cut) for cut in cuts}


def rank_with_bm25(collection: Collection, policy: Policy, k: int) -> Ranking:
    """The first k documents of every query by BM25."""
    started = time.perf_counter()
    run = bm25_run(collection, k=k, use_title=policy.use_title, exclude_self=policy.exclude_self)
    return Ranking(run, IndexUsed("bm25", PARAMETERS), Truncated(0, 0), {"search": time.perf_counter() - started})


BASELINES: Mapping[str, Callable[[Collection, Policy, int], Ranking]] = {"bm25": rank_with_bm25}
"""Baseline name -> how it ranks; each is a system of its own as well, ``model="bm25"``."""


def overlap(exact: Hits, hits: Hits, k: int) -> float:
    """Share of the exact search's first k documents that another search has among its own, a mean over queries.

    A document that scores as much as the k-th of the exact search is as good: which of equals are kept is a matter of ids.

    Example:
        >>> scores = [np.array([2.0, 1.0], np.float32)]
        >>> overlap(Hits([["a", "b"]], scores), Hits([["b", "c"]], [np.array([1.0, 0.5], np.float32)]), 2)
        0.5
    """
    shares = []
    for wanted, bar, found, scores in zip(exact.ids, exact.scores, hits.ids, hits.scores, strict=True):
        best = {*wanted[:k]}
        least = float(bar[len(best) - 1]) if best else 0.0
        tied = TIE * max(1.0, abs(least))
        # Not "at least as much": scores of compressed vectors may be too high.
        good = sum(document in best or abs(score - least) <= tied for document, score in zip(found[:k], scores[:k].tolist(), strict=True))
        shares.append(min(good, len(best)) / len(best) if best else 1.0)
    return sum(shares) / len(shares)


def _searched(index: Index, queries: Any, k: int, card: ModelCard, effort: str | Mapping[str, Setting]) -> Hits:
    try:
        return index.search(queries, k, effort=effort)
    except ValueError as error:  # the shapes are ours: what is left is what the model's vectors are
        raise InputError(f"{card.source}: its vectors cannot be searched: {error}") from error


def query_vectors(stored: StoredVectors) -> Any:
    """Vectors of queries as an index wants them: (Q, d), or for a ColBERT a list of (n_i, d)."""
    rows = stored.rows.span(0, stored.rows.shape[0])
    if stored.lengths is None:
        return rows
    return np.split(rows, np.cumsum(stored.lengths)[:-1])


def _name(k: int) -> str:
    return f"overlap@{k}"


def _contents(collection: Collection, policy: Policy, ids: list[str]) -> Iterator[str]:
    """The documents' texts as they are encoded; their ids are collected on the way, so that the corpus is read once."""
    for document in collection.documents:
        ids.append(document.id)
        yield document.content(use_title=policy.use_title)
