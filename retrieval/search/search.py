"""Fuse several rankings, re-rank candidates, and say why a search found nothing. ``retrievers`` combines searches by these.

Shapes: Q queries, P candidates per query, k hits, d vector width.
Source: reciprocal rank fusion: Cormack, Clarke and Büttcher 2009, doi 10.1145/1571941.1572114. Weighted sums of normalized scores: Fox and
Shaw, TREC-2, 1994 (CombSUM); Bruch, Gai and Ingber, arXiv:2210.11934, on normalization. Re-ranking: ColBERT, arXiv:2004.12832, section 3.5;
MacAvaney and Tonellotto, arXiv:2404.14989, on BM25 candidates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import ranked
from quiver.retrieval.data.entries import STRING, typed_value
from quiver.retrieval.display import NOT_SHOWN
from quiver.retrieval.index import Filter
from quiver.retrieval.index.engines import check_k
from quiver.retrieval.index.index import IndexReader
from quiver.retrieval.records import Hits, Run

logger = logging.getLogger(__name__)

_COMPARED = 20  # documents of two indexes whose texts are compared
_ONE_CORPUS = 0.1  # least share of ids in common of two indexes of one corpus
_VALUES = 5  # most frequent values of a field that a message names
_VALUE = 40  # characters of each

Ranking: TypeAlias = Mapping[str, float]  # documents of one query: id -> score, ordered by score, then id, both descending
METHODS = ("rrf", "weighted")  # names of the methods of fusion


@dataclass(frozen=True)
class Fusion:
    """Method of fusing several rankings of a query.

    Attributes:
        method: ``rrf``: a document's score is the sum of weight / (constant + rank) over the rankings that contain it. ``weighted``: the
            sum of weight x normalized score; a ranking without the document contributes its lowest score.
        weights: One weight >= 0 per ranking; None for 1 each. A ranking of weight 0 is ignored.
        constant: Constant of reciprocal rank fusion; the smaller, the more the first ranks count. The paper uses 60.
        normalise: Normalization of each ranking's scores: ``min-max`` to 0..1, ``z-score`` to mean 0 and standard deviation 1.

    Raises:
        InputError: The method or normalization is unknown, the constant is negative, or the weights are invalid.
    """

    method: str = "rrf"
    weights: tuple[float, ...] | None = None
    constant: float = 60.0
    normalise: str = "min-max"

    def __post_init__(self) -> None:
        for name, value, known in (("fusion", self.method, METHODS), ("normalisation", self.normalise, ("min-max", "z-score"))):
            if value not in known:
                raise InputError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if not (math.isfinite(self.constant) and self.constant >= 0):
            raise InputError(f"the constant of reciprocal rank fusion must be >= 0, got {self.constant}")
        weights = self.weights
        if weights is not None and not (all(math.isfinite(weight) and weight >= 0 for weight in weights) and any(weights)):
            raise InputError(f"weights must be numbers >= 0, at least one of them > 0, got {', '.join(map(str, weights)) or 'none'}")

    def weights_of(self, count: int) -> tuple[float, ...]:
        """Return one weight per ranking.

        Raises:
            InputError: The number of weights differs from ``count``.
        """
        if self.weights is None:
            return (1.0,) * count
        if len(self.weights) != count:
            raise InputError(f"got {len(self.weights)} weights for {count} rankings; pass one weight per ranking, in their order")
        return self.weights


def fuse(rankings: Sequence[Ranking], fusion: Fusion) -> dict[str, float]:
    """Fuse several rankings of a query, best first.

    Args:
        rankings: At least one; each may be empty.
        fusion: Method, weights and normalization.

    Raises:
        InputError: The number of weights differs from the number of rankings.
        ValueError: There are no rankings, or a score is not finite.

    Example:
        >>> fuse([{"a": 9.0, "b": 8.0}, {"b": 0.2, "c": 0.1}], Fusion(constant=0, weights=(1, 2)))
        {'b': 2.5, 'c': 1.0, 'a': 1.0}
        >>> fuse([{"a": 9.0, "b": 8.0}, {"b": 0.2, "c": 0.1}], Fusion("weighted"))
        {'b': 1.0, 'a': 1.0, 'c': 0.0}
    """
    if not rankings:
        raise ValueError("there are no rankings to fuse")
    used = [(ranking, weight) for ranking, weight in zip(rankings, fusion.weights_of(len(rankings)), strict=True) if weight]
    terms = [(*_compute_contributions(ranking, fusion), weight) for ranking, weight in used]
    scores: dict[str, float] = {}
    for document in dict.fromkeys(document for ranking, _ in used for document in ranking):
        # fsum rounds once, so the order of the rankings does not matter.
        scores[document] = math.fsum(weight * known.get(document, missing) for known, missing, weight in terms)
    return {document: scores[document] for document in ranked(scores)}


def fuse_runs(runs: Sequence[Run], fusion: Fusion, *, k: int | None = None) -> dict[str, dict[str, float]]:
    """Fuse several runs; a query that a run lacks has an empty ranking there.

    Args:
        runs: At least one.
        fusion: Method, weights and normalization.
        k: Maximum documents per query; None for all.

    Returns:
        The queries of all runs in order of first appearance, documents best first.

    Raises:
        InputError: The number of weights differs from the number of runs.
        ValueError: There are no runs, k < 1, or a score is not finite.
    """
    if k is not None:
        k = check_k(k)
    queries = dict.fromkeys(query for run in runs for query in run)
    fused = {query: fuse([run.get(query, {}) for run in runs], fusion) for query in queries}
    return {query: dict(islice(scores.items(), k)) for query, scores in fused.items()}


def fuse_hits(hits: Sequence[Hits], fusion: Fusion, *, k: int) -> Hits:
    """The first k documents of each query in the fusion of several searches for the same Q queries."""
    if len({len(each) for each in hits}) != 1:
        raise ValueError(f"hits must have equal numbers of queries, got {', '.join(str(len(each)) for each in hits) or 'none'}")
    k, fused = check_k(k), [fuse([each.ranking(query) for each in hits], fusion) for query in range(len(hits[0]))]
    return Hits.of(dict(islice(ranking.items(), k)) for ranking in fused)


def differing_documents(first: IndexReader, other: IndexReader, *, shared: int | None = None) -> str | None:
    """Describe how the documents of two indexes differ: their ids, and the texts of some that have one id; None if they do not."""
    shared = first.shared_documents(other) if shared is None else shared
    parts, share = [], 1.0
    if not len(first) == len(other) == shared:
        share = shared / (len(first) + len(other) - shared)
        parts.append(f"{shared:,} documents are in both, {len(first):,} in one and {len(other):,} in the other ({share:.0%} in common)")
    # Passages of the same files differ if they were measured in the tokens of two models. In two corpora an equal id is a coincidence.
    if share > _ONE_CORPUS and first.manifest.policy.store_text and other.manifest.policy.store_text:
        same = list[bool]()
        keys = first.ids[:: max(1, len(first) // _COMPARED)]
        for key, place in zip(keys, other.locate(keys), strict=True):
            if place is not None:
                with suppress(InputError):  # a damaged text is reported where it is needed
                    same.append(first.document(key).text == other.documents.at(place).text)
        if not all(same):
            parts.append(f"of {len(same)} in both that were compared, {same.count(False)} have another text")
    return "; ".join(parts) or None


def check_fusible(first: IndexReader, other: IndexReader) -> None:
    """Refuse indexes that share no document; log a warning if they share only some."""
    shared = first.shared_documents(other)
    if not shared and len(first) and len(other):
        raise InputError(
            f"{other.path}: none of its {len(other):,} document ids is among the {len(first):,} of {first.path}; rankings are fused by"
            " document id, so build both indexes from one corpus"
        )
    difference = differing_documents(first, other, shared=shared)
    if difference is not None:
        hint = "; to fuse one index with BM25 over its own texts: --fuse bm25 (fuse='bm25')" if "have another text" in difference else ""
        logger.warning("%s and %s hold different documents: %s%s", first.path, other.path, difference, hint)


def describe_nothing_found(index: IndexReader, condition: Filter | None, *, wordless: str | None = None) -> str:
    """Say why a search found nothing; if no document matches the filter, with the most frequent values of its fields.

    ``wordless`` is what `quiver.retrieval.models.bm25.describe_wordless` says of the query, if words are searched for.
    """
    passing = len(index) if condition is None else index.count(condition)
    if condition is None or passing or not len(index):
        among = f"{passing:,} of {len(index):,} documents, which pass the filter" if passing < len(index) else f"{passing:,} documents"
        return f"nothing found in {among}{f': {wordless}' if wordless else ''}"
    names = [name for name in condition.fields if name in index.fields]
    parts = [f"nothing found: none of {len(index):,} documents matches the filter"]
    for name, facet in index.facets(names, most=_VALUES).items():
        shown = [(NOT_SHOWN.sub(" ", str(typed_value(value, STRING)))[:_VALUE] or '""', count) for value, count in facet.values]
        values = ", ".join(f"{value} ({count:,})" for value, count in shown)
        parts.append(f"values of {name}: {values}{', ...' if facet.distinct > len(facet.values) else ''}")
    return "; ".join(parts)


def _compute_contributions(ranking: Ranking, fusion: Fusion) -> tuple[Mapping[str, float], float]:
    """Unweighted contributions of a ranking: of each of its documents, and of all others."""
    if fusion.method == "rrf":
        return {document: 1 / (fusion.constant + rank) for rank, document in enumerate(ranked(ranking), start=1)}, 0.0
    scores: NDArray[np.float64] = np.fromiter(ranking.values(), np.float64, len(ranking))
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite to be normalized")
    if not len(scores):
        return {}, 0.0
    low, high, missing = float(scores.min()), float(scores.max()), 0.0
    if fusion.normalise == "min-max":
        # Documents with equal scores are equally good, and better than those that were not found.
        scores = np.ones_like(scores) if high == low else (scores - low) / (high - low)
    elif high == low:  # the deviation of equal numbers need not round to 0
        scores = np.zeros_like(scores)
    else:
        scores = (scores - scores.mean()) / scores.std()
        missing = float(scores.min())
    return dict(zip(ranking, scores.tolist(), strict=True)), missing


ScoreCandidates: TypeAlias = Callable[[Sequence[str], Sequence[Sequence[str]]], Sequence[NDArray[np.float32]]]
"""Texts of Q queries and the candidates of each -> the scores of each query's candidates, Q arrays (P,); see `rerank`."""


def rerank(hits: Hits, queries: Sequence[str], scorer: ScoreCandidates, k: int) -> Hits:
    """Re-rank hits by the scores of another model; their own scores are ignored, and candidates without vectors are left out."""
    k, rankings = check_k(k), []
    for documents, found in zip(hits.ids, scorer(queries, hits.ids), strict=True):
        scored = {document: score for document, score in zip(documents, found.tolist(), strict=True) if score != -math.inf}
        rankings.append({document: scored[document] for document in ranked(scored)[:k]})
    return Hits.of(rankings)
