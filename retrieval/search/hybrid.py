"""Combine rankings: fuse several rankings of a query, and re-rank candidates with a ColBERT model.

Fusion sees only rankings, document id -> score: of runs, index hits or BM25. Documents are identified by their ids. Re-ranking takes the
candidates' vectors from an index, or encodes their texts.

Shapes: Q queries, P candidates per query, k hits, d vector width.
Source: reciprocal rank fusion: Cormack, Clarke and Büttcher 2009, doi 10.1145/1571941.1572114. Weighted sums of normalized scores: Fox and
Shaw, TREC-2, 1994 (CombSUM); Bruch, Gai and Ingber, arXiv:2210.11934, on normalization. Re-ranking: ColBERT, arXiv:2004.12832, section 3.5;
MacAvaney and Tonellotto, arXiv:2404.14989, on BM25 candidates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.run import ranked
from quiver.retrieval.index import Index
from quiver.retrieval.index.documents.metadata import FilterLike
from quiver.retrieval.index.engines import Setting
from quiver.retrieval.index.ranking import check_k
from quiver.retrieval.models.maxsim import maxsim_packed
from quiver.retrieval.protocols import DenseModel, TokenModel
from quiver.retrieval.records import Hits, Query, Run
from quiver.retrieval.search.bm25_index import WordIndex
from quiver.retrieval.search.search import search

logger = logging.getLogger(__name__)


Ranking: TypeAlias = Mapping[str, float]
"""The documents of one query, id -> score; the order is by score, then id, both descending."""

Terms: TypeAlias = tuple[Mapping[str, float], float]
"""What a ranking says of the documents that it has, before its weight, and of all others."""


@dataclass(frozen=True)
class Fusion:
    """How several rankings of a query become one.

    Attributes:
        method: ``rrf``: a document's score is the sum of weight / (constant + rank) over the rankings that have it. ``weighted``: the sum
            of weight x normalised score, where a ranking gives a document that it does not have its own lowest.
        weights: One for each ranking, at least 0; None for 1 each. A ranking of weight 0 counts for nothing, and the documents that only
            it has are left out.
        constant: Of reciprocal ranks: how much the first ranks are worth above later ones. 60 is the paper's.
        normalise: Of scores: ``min-max`` to 0 to 1, ``z-score`` to mean 0 and standard deviation 1, for every ranking of every query.

    Raises:
        InputError: There is no such method or normalisation, the constant is negative, or the weights are none.
    """

    method: str = "rrf"
    weights: tuple[float, ...] | None = None
    constant: float = 60.0
    normalise: str = "min-max"

    def __post_init__(self) -> None:
        for name, value, known in (("fusion", self.method, METHODS), ("normalisation", self.normalise, NORMALISATIONS)):
            if value not in known:
                raise InputError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if not (math.isfinite(self.constant) and self.constant >= 0):
            raise InputError(f"the constant of reciprocal ranks must be >= 0, got {self.constant}")
        weights = self.weights
        if weights is not None and not (all(math.isfinite(weight) and weight >= 0 for weight in weights) and any(weights)):
            raise InputError(f"weights must be numbers >= 0, one of them above 0, got {', '.join(map(str, weights)) or 'none'}")

    def weights_of(self, count: int) -> tuple[float, ...]:
        """The weights of so many rankings.

        Raises:
            InputError: There are more or fewer weights.
        """
        if self.weights is None:
            return (1.0,) * count
        if len(self.weights) != count:
            raise InputError(f"{count} rankings are fused, but {len(self.weights)} weights are given; give one for each, in their order")
        return self.weights


def fuse(rankings: Sequence[Ranking], fusion: Fusion) -> dict[str, float]:
    """One ranking from several of the same query, best first.

    Args:
        rankings: One at least; each may be empty.
        fusion: How.

    Raises:
        InputError: Not as many weights as rankings.
        ValueError: No rankings, or a score that is not finite.

    Example:
        >>> fuse([{"a": 9.0, "b": 8.0}, {"b": 0.2, "c": 0.1}], Fusion(constant=0, weights=(1, 2)))
        {'b': 2.5, 'c': 1.0, 'a': 1.0}
        >>> fuse([{"a": 9.0, "b": 8.0}, {"b": 0.2, "c": 0.1}], Fusion("weighted"))
        {'b': 1.0, 'a': 1.0, 'c': 0.0}
    """
    if not rankings:
        raise ValueError("there are no rankings to fuse")
    used = [(ranking, weight) for ranking, weight in zip(rankings, fusion.weights_of(len(rankings)), strict=True) if weight]
    terms = [(*METHODS[fusion.method](ranking, fusion), weight) for ranking, weight in used]
    scores: dict[str, float] = {}
    for document in dict.fromkeys(document for ranking, _ in used for document in ranking):
        # fsum rounds once: the order of the rankings decides nothing.
        scores[document] = math.fsum(weight * known.get(document, missing) for known, missing, weight in terms)
    return {document: scores[document] for document in ranked(scores)}


def fuse_runs(runs: Sequence[Run], fusion: Fusion, *, k: int | None = None) -> dict[str, dict[str, float]]:
    """One run from several; a query that a run does not have has found nothing there.

    Args:
        runs: One at least.
        fusion: How.
        k: Documents kept of each query; None for all.

    Returns:
        The queries of all runs in the order in which they first come, documents best first.

    Raises:
        InputError: Not as many weights as runs.
        ValueError: No runs, k < 1, or a score that is not finite.
    """
    if k is not None:
        k = check_k(k)
    queries = dict.fromkeys(query for run in runs for query in run)
    fused = {query: fuse([run.get(query, {}) for run in runs], fusion) for query in queries}
    return {query: dict(list(scores.items())[:k]) for query, scores in fused.items()}


def fuse_hits(hits: Sequence[Hits], fusion: Fusion, *, k: int) -> Hits:
    """The hits of several searches for the same queries as those of one.

    Args:
        hits: Of one search at least, each of the same Q queries in the same order.
        fusion: How.
        k: Hits kept of each query.

    Raises:
        InputError: Not as many weights as searches.
        ValueError: No hits, not of as many queries, or k < 1.
    """
    if len({len(each) for each in hits}) != 1:
        raise ValueError(f"the hits of as many queries are needed, got {', '.join(str(len(each)) for each in hits) or 'none'}")
    names = [str(query) for query in range(len(hits[0]))]
    fused = fuse_runs([each.to_run(names) for each in hits], fusion, k=k)
    return Hits([list(fused[name]) for name in names], [np.array(list(fused[name].values()), np.float32) for name in names])


def differing_documents(first: Index, other: Index) -> str | None:
    """How the documents of two indexes differ, by their ids, as a part of a sentence; None where both have the same."""
    return _difference(first.shared_documents(other), len(first), len(other))


def check_fusible(first: Index, other: Index) -> None:
    """Refuse to fuse the rankings of two indexes that have no document in common; log a warning where they have only some.

    Raises:
        InputError: Both have documents, and no id is in both.
    """
    shared = first.shared_documents(other)
    if not shared and len(first) and len(other):
        raise InputError(
            f"{other.path}: none of its {len(other):,} document ids is among the {len(first):,} of {first.path}; rankings are fused by"
            " document id, so build both indexes from one corpus"
        )
    difference = _difference(shared, len(first), len(other))
    if difference is not None:
        logger.warning("%s and %s hold different documents: %s", first.path, other.path, difference)


def _difference(shared: int, first: int, other: int) -> str | None:
    if first == other == shared:
        return None
    share = shared / (first + other - shared)
    return f"{shared:,} documents are in both, {first:,} in one and {other:,} in the other ({share:.0%} in common)"


class System(Protocol):
    """What ranks documents for queries: an index with its model, BM25, or anything else."""

    def __call__(self, queries: Sequence[Query], k: int) -> Run:
        """The k best documents of each query."""


@dataclass(frozen=True)
class Fused:
    """What a search by several systems gives.

    Attributes:
        run: Query id -> document id -> fused score, documents best first.
        lists: What each system found; empty for one of weight 0, which was not asked.
    """

    run: dict[str, dict[str, float]]
    lists: tuple[Run, ...]


def search_fused(systems: Sequence[System], queries: Sequence[Query], k: int, *, fusion: Fusion, depth: int = 100) -> Fused:
    """Ask several systems and fuse what they find.

    Args:
        systems: One at least.
        queries: Each with an id of its own.
        k: Documents kept of each query.
        fusion: How rankings become one.
        depth: Documents that each system is asked for, if that is more than k: what one ranks low another may rank high.

    Raises:
        InputError: Not as many weights as systems, or a system cannot search.
        ValueError: No systems, or k < 1.
    """
    k = check_k(k)
    weights = fusion.weights_of(len(systems))
    lists = tuple(system(queries, max(k, depth)) if weight else {} for system, weight in zip(systems, weights, strict=True))
    run = fuse_runs(lists, fusion, k=k)
    return Fused({query.id: run.get(query.id, {}) for query in queries}, lists)


def index_system(
    index: Index,
    model: DenseModel | TokenModel,
    *,
    filter: FilterLike = None,
    effort: str | Mapping[str, Setting] | None = None,
    target_recall: float | None = None,
    progress: bool = False,
) -> System:
    """An index with its model as a system; see `quiver.retrieval.search.search.search`."""

    def system(queries: Sequence[Query], k: int) -> Run:
        return search(index, model, queries, k, filter=filter, effort=effort, target_recall=target_recall, progress=progress).run

    return system


def word_system(words: WordIndex, *, filter: FilterLike = None) -> System:
    """BM25 over the documents of an index as a system."""
    return lambda queries, k: words.search([query.text for query in queries], k, filter=filter).to_run([query.id for query in queries])


def _reciprocal_ranks(ranking: Ranking, fusion: Fusion) -> Terms:
    return {document: 1 / (fusion.constant + rank) for rank, document in enumerate(ranked(ranking), start=1)}, 0.0


def _normalised_scores(ranking: Ranking, fusion: Fusion) -> Terms:
    scores: NDArray[np.float64] = np.fromiter(ranking.values(), np.float64, len(ranking))
    if not np.isfinite(scores).all():
        raise ValueError("only finite scores can be normalised")
    if not len(scores):
        return {}, 0.0
    normalised, missing = NORMALISATIONS[fusion.normalise](scores)
    return dict(zip(ranking, normalised.tolist(), strict=True)), missing


def _min_max(scores: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    low, high = float(scores.min()), float(scores.max())
    # Equal scores do not tell these documents from each other, but from those that were not found.
    return (np.ones_like(scores) if high == low else (scores - low) / (high - low)), 0.0


def _z_score(scores: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    if float(scores.min()) == float(scores.max()):  # the deviation of equal numbers need not round to 0
        return np.zeros_like(scores), 0.0
    normalised = (scores - scores.mean()) / scores.std()
    return normalised, float(normalised.min())


METHODS: Mapping[str, Callable[[Ranking, Fusion], Terms]] = {"rrf": _reciprocal_ranks, "weighted": _normalised_scores}
"""Name -> what a ranking says of documents."""

NORMALISATIONS: Mapping[str, Callable[[NDArray[np.float64]], tuple[NDArray[np.float64], float]]] = {
    "min-max": _min_max,
    "z-score": _z_score,
}
"""Name -> the scores of a ranking on a common scale, and what a document gets that the ranking does not have."""


# Texts that are encoded at a time: their vectors are in memory until the queries that want them are done.
_TEXTS = 2048


class Scorer(Protocol):
    """Scores given documents for queries: a second stage."""

    def __call__(self, queries: Sequence[str], candidates: Sequence[Sequence[str]]) -> Sequence[NDArray[np.float32]]:
        """For each of Q query texts the scores of its candidates by id, Q arrays (P,); minus infinity for one that has no vector."""


def rerank(run: Run, queries: Sequence[Query], scorer: Scorer, k: int) -> dict[str, dict[str, float]]:
    """Score what a first stage has found anew; its own scores decide nothing more.

    Args:
        run: The candidates, query id -> document id -> score.
        queries: Their queries; one that the run does not have has no candidates.
        scorer: The second stage.
        k: Documents kept of each query.

    Returns:
        The run by the second stage's scores, documents best first. A candidate without a vector is left out, as a search of the second
        stage's own would not find it.

    Raises:
        InputError: The scorer cannot score a candidate.
        ValueError: k < 1, or a score is NaN.
    """
    k = check_k(k)
    candidates = [list(run.get(query.id, {})) for query in queries]
    scores = scorer([query.text for query in queries], candidates)
    reranked = {}
    for query, documents, found in zip(queries, candidates, scores, strict=True):
        kept = {document: score for document, score in zip(documents, found.tolist(), strict=True) if score != -math.inf}
        reranked[query.id] = {document: kept[document] for document in ranked(kept)[:k]}
    return reranked


@dataclass(frozen=True)
class IndexScorer:
    """Scores documents by the vectors that a ColBERT's index keeps of them; nothing but the queries is encoded.

    Attributes:
        index: Has all candidates.
        model: The one that built it.

    Raises:
        InputError: The index is of another model.
    """

    index: Index
    model: TokenModel

    def __post_init__(self) -> None:
        self.index.check_model(self.model.card)

    def __call__(self, queries: Sequence[str], candidates: Sequence[Sequence[str]]) -> list[NDArray[np.float32]]:
        """See `Scorer`.

        Raises:
            InputError: The index does not have a candidate.
        """
        vectors = self.model.encode(queries, "query").vectors
        return [self.index.scores(query, documents) for query, documents in zip(vectors, candidates, strict=True)]


@dataclass(frozen=True)
class TextScorer:
    """Scores documents by encoding their texts, where no index has their vectors.

    Attributes:
        model: A ColBERT.
        text_of: Document id -> its text, as it is to be encoded.
    """

    model: TokenModel
    text_of: Callable[[str], str]

    def __call__(self, queries: Sequence[str], candidates: Sequence[Sequence[str]]) -> list[NDArray[np.float32]]:
        """See `Scorer`; a document that several queries have as a candidate is encoded once for those that stand near each other.

        Raises:
            InputError: There is no text of a candidate.
        """
        vectors = self.model.encode(queries, "query").vectors
        scores: list[NDArray[np.float32]] = []
        while len(scores) < len(queries):
            first = last = len(scores)
            wanted: dict[str, int] = {}
            while last < len(queries) and (last == first or len({*wanted, *candidates[last]}) <= _TEXTS):
                for document in candidates[last]:
                    wanted.setdefault(document, len(wanted))
                last += 1
            documents = self.model.encode([self.text_of(document) for document in wanted], "document").vectors if wanted else []
            for query, asked in zip(vectors[first:last], candidates[first:last], strict=True):
                chosen = [documents[wanted[document]] for document in asked]
                tokens = np.concatenate([np.zeros((0, query.shape[1]), np.float32), *chosen])
                offsets = np.cumsum([0, *map(len, chosen)], dtype=np.int64)
                scores.append(maxsim_packed([query], tokens, offsets)[0])
        return scores
