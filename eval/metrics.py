"""Measures of a ranking against judgements, with the semantics of trec_eval.

A measure is a value: ``ndcg@10`` is at once its name, its key in every table and what the command line takes. The rules:

- gains are the grades themselves (linear), discounted by log2(rank + 1), and the ideal ranking is over all judged documents;
- a document is relevant from grade 1 on, and a negative grade counts as 0;
- scores are compared as float32, and equal scores are ordered by document id, descending;
- the mean is over the judged queries: one that the run does not answer scores 0.

This module knows nothing of models, files or collections, and it never changes the run it is given.

Source: trec_eval 9 (m_ndcg_cut, m_map, m_recip_rank, m_recall, m_P and its -c flag); linear gain is that of
Järvelin and Kekäläinen 2002, doi 10.1145/582415.582418.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from retrieval.records import Qrels, Run


@dataclass(frozen=True)
class Found:
    """Where one query's relevant documents were found.

    Attributes:
        ranks: Ranks of the relevant documents in the run, 1-based and ascending.
        gains: Their grades, in the same places.
        ideal: The grades of all relevant documents, found or not, descending.
    """

    ranks: list[int]
    gains: list[int]
    ideal: list[int]

    def within(self, cut: int | None) -> int:
        """How many relevant documents are among the first ``cut`` (None: in the whole run)."""
        return len(self.ranks) if cut is None else bisect_right(self.ranks, cut)


def _dcg(ranks: Sequence[int], gains: Sequence[int]) -> float:
    return sum(gain / math.log2(rank + 1) for rank, gain in zip(ranks, gains, strict=True))


def _ndcg(found: Found, cut: int | None) -> float:
    inside = found.within(cut)
    ideal = found.ideal[:cut]
    return _dcg(found.ranks[:inside], found.gains[:inside]) / _dcg(range(1, len(ideal) + 1), ideal)


def _average_precision(found: Found, cut: int | None) -> float:
    ranks = found.ranks[: found.within(cut)]
    return sum(place / rank for place, rank in enumerate(ranks, start=1)) / len(found.ideal)


def _reciprocal_rank(found: Found, cut: int | None) -> float:
    return 1 / found.ranks[0] if found.within(cut) else 0.0


def _recall(found: Found, cut: int | None) -> float:
    return found.within(cut) / len(found.ideal)


def _precision(found: Found, cut: int | None) -> float:
    # trec_eval divides by the cut even where the run is shorter; a cut is always there, see parse_measure.
    return found.within(cut) / cut if cut else 0.0


FAMILIES: Mapping[str, Callable[[Found, int | None], float]] = {
    "ndcg": _ndcg,
    "map": _average_precision,
    "mrr": _reciprocal_rank,
    "recall": _recall,
    "p": _precision,
}
"""Family name -> value for one query with at least one relevant document."""


@dataclass(frozen=True)
class Measure:
    """One measure: a family and the rank it looks down to.

    Attributes:
        family: A key of ``FAMILIES``.
        cut: Only the first ``cut`` documents count; None is the whole run, as MAP has it.
    """

    family: str
    cut: int | None

    @property
    def name(self) -> str:
        """The measure as it is written in tables and files: ``ndcg@10``, ``map``."""
        return self.family if self.cut is None else f"{self.family}@{self.cut}"

    def value(self, found: Found) -> float:
        """The measure of one query, a fraction; 0 where no document is relevant or none was found.

        Example:
            >>> parse_measure("map").value(Found(ranks=[2, 4], gains=[1, 1], ideal=[1, 1]))
            0.5
        """
        return FAMILIES[self.family](found, self.cut) if found.ranks else 0.0


def parse_measure(name: str) -> Measure:
    """The measure of a name, ``family@cut``; only ``map`` may stand without a cut.

    Raises:
        InputError: No such family, or the cut is missing or not a positive number.

    Example:
        >>> parse_measure("recall@100")
        Measure(family='recall', cut=100)
    """
    match = re.fullmatch(r"([a-z]+)(?:@([1-9][0-9]*))?", name)
    if match is None or match[1] not in FAMILIES or (match[2] is None and match[1] != "map"):
        families = ", ".join(f"{family}@K" for family in FAMILIES)
        raise InputError(f"unknown measure {name!r}: write map or one of {families} with a cut K >= 1, such as ndcg@10")
    return Measure(match[1], int(match[2]) if match[2] else None)


DEFAULT: tuple[str, ...] = ("ndcg@10", "map", "mrr@10", "recall@10", "recall@100", "recall@1000", "p@10")
"""The measures of every report; the first is the headline."""

MEASURES: Mapping[str, Measure] = {name: parse_measure(name) for name in DEFAULT}
"""The default measures by name."""


@dataclass(frozen=True)
class Scores:
    """What a run scored, as fractions at full precision.

    Attributes:
        per_query: Query id -> measure name -> value, for every judged query in the order of the judgements.
        means: Measure name -> mean over the judged queries.
    """

    per_query: dict[str, dict[str, float]]
    means: dict[str, float]


def score(qrels: Qrels, run: Run, measures: Sequence[str] = DEFAULT) -> Scores:
    """Score a run; every judged query counts, and queries that nobody judged are left out.

    Args:
        qrels: Judgements; a query whose documents are all irrelevant scores 0, as in trec_eval.
        run: Scores of the documents found, any length; it is ranked here and not changed.
        measures: Names that ``parse_measure`` knows.

    Raises:
        InputError: Nothing is judged, no measure is asked for, a name is unknown, or a judged query's run holds NaN.

    Example:
        >>> qrels = {"q1": {"a": 1, "b": 0}, "q2": {"c": 1}}
        >>> score(qrels, {"q1": {"b": 2.0, "a": 1.0}}, ["mrr@10", "p@10"]).means
        {'mrr@10': 0.25, 'p@10': 0.05}
    """
    if not qrels:
        raise InputError("no query is judged: the qrels are empty")
    if not measures:
        raise InputError(f"no measure was asked for; the default is {', '.join(DEFAULT)}")
    parsed = [parse_measure(name) for name in measures]
    per_query = {}
    for query, grades in qrels.items():
        found = _found(query, grades, run.get(query, {}))
        per_query[query] = {measure.name: measure.value(found) for measure in parsed}
    # fsum makes the mean independent of the order of the queries.
    means = {m.name: math.fsum(values[m.name] for values in per_query.values()) / len(per_query) for m in parsed}
    return Scores(per_query, means)


def _found(query: str, grades: Mapping[str, int], scores: Mapping[str, float]) -> Found:
    """The ranks of the relevant documents, without sorting the ids: only theirs are looked up in the sorted scores."""
    relevant = {document: grade for document, grade in grades.items() if grade >= 1}
    values = _as_float32(scores.values())
    ascending = np.sort(values)
    if values.size and np.isnan(ascending[-1]):  # np.sort puts NaN last
        unranked = next(document for document, value in scores.items() if math.isnan(value))
        raise InputError(f"the score of document {unranked!r} for query {query!r} is NaN: the run cannot be ranked")
    hits = [document for document in relevant if document in scores]
    own = _as_float32([scores[document] for document in hits])
    first, last = np.searchsorted(ascending, own, side="left"), np.searchsorted(ascending, own, side="right")
    placed = []
    for document, value, below, upto in zip(hits, own, first.tolist(), last.tolist(), strict=True):
        rank = len(values) - upto + 1
        if upto - below > 1:
            rank += _tied_before(document, scores, values == value)
        placed.append((rank, relevant[document]))
    placed.sort()
    return Found([rank for rank, _ in placed], [gain for _, gain in placed], sorted(relevant.values(), reverse=True))


def _as_float32(values: Collection[float]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # a score beyond float32 is infinite, as a C cast has it
        return np.fromiter(values, np.float32, len(values))


def _tied_before(document: str, scores: Mapping[str, float], tied: NDArray[np.bool_]) -> int:
    """How many of the documents with this document's score come before it: those with the greater id.

    Code points order strings as the bytes of their UTF-8 do, so this is trec_eval's strcmp.
    """
    return sum(other > document for other, same in zip(scores, tied.tolist(), strict=True) if same)
