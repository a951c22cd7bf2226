"""Candidates of a first stage re-ranked by a ColBERT: MaxSim of the few documents that are worth it.

The vectors of the candidates come from an index that holds them, or from encoding their texts where there is none.

Shapes: Q queries, P candidates of a query, d width.
Source: ColBERT, arXiv:2004.12832, section 3.5 (re-ranking); MacAvaney and Tonellotto, arXiv:2404.14989, on BM25's candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.data.run import ranked
from quiver.retrieval.index import Index
from quiver.retrieval.index.ranking import check_k
from quiver.retrieval.models.maxsim import maxsim_packed
from quiver.retrieval.protocols import TokenModel
from quiver.retrieval.records import Query, Run

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
