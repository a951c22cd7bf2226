"""Measures of a ranking against judgements, with the semantics of trec_eval, and averages over data sets by the benchmarks' rules.

A measure is identified by its name, such as ``ndcg@10``: in code, in tables and on the command line. The rules:

- gains are the grades themselves (linear), discounted by log2(rank + 1), and the ideal ranking is over all judged documents;
- a document is relevant if its grade is at least 1, and a negative grade counts as 0;
- scores are compared as float32, and equal scores are ordered by document id, descending;
- the mean is over the judged queries; a query that is missing from the run scores 0;
- a group of collections counts as one data set in an average. It is complete if it has as many different collections of one split as its
  ``group_size`` says. Collections of different splits are never averaged, and a collection that is given twice counts once;
- an average is None if the score of one of its data sets is missing.

Functions of this module never change the run that they are given.

Source: trec_eval 9 (m_ndcg_cut, m_map, m_recip_rank, m_recall, m_P and its -c flag); linear gain is that of
Järvelin and Kekäläinen 2002, doi 10.1145/582415.582418; BEIR, arXiv:2104.08663, where CQADupStack is one data set, scored by the
unweighted mean of its twelve forums.
"""

from __future__ import annotations

import heapq
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.records import Qrels, Run


@dataclass(frozen=True)
class Found:
    """Relevant documents of one query and their ranks in a run.

    Attributes:
        ranks: Ranks of the relevant documents in the run, 1-based and ascending.
        gains: Grades of these documents, in the order of ``ranks``.
        ideal: Grades of all relevant documents, found or not, descending.
    """

    ranks: list[int]
    gains: list[int]
    ideal: list[int]

    def within(self, cut: int | None) -> int:
        """Number of relevant documents among the first ``cut`` documents (None: in the whole run)."""
        return len(self.ranks) if cut is None else bisect_right(self.ranks, cut)


def _dcg(ranks: Sequence[int], gains: Sequence[int]) -> float:
    return sum(gain / math.log2(rank + 1) for rank, gain in zip(ranks, gains, strict=True))


def _ndcg(found: Found, cut: int | None) -> float:
    inside = found.within(cut)
    ideal = found.ideal[:cut]
    return _dcg(found.ranks[:inside], found.gains[:inside]) / _dcg(range(1, len(ideal) + 1), ideal)


def _average_precision(found: Found, cut: int | None) -> float:
    ranks = found.ranks[: found.within(cut)]
    return sum(position / rank for position, rank in enumerate(ranks, start=1)) / len(found.ideal)


def _reciprocal_rank(found: Found, cut: int | None) -> float:
    return 1 / found.ranks[0] if found.within(cut) else 0.0


def _recall(found: Found, cut: int | None) -> float:
    return found.within(cut) / len(found.ideal)


def _precision(found: Found, cut: int | None) -> float:
    if cut is None:
        raise ValueError("precision needs a cut, such as p@10")
    return found.within(cut) / cut  # divide by the cut even if the run is shorter, as trec_eval does


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
    """One measure: a family and a cut-off rank.

    Attributes:
        family: A key of ``FAMILIES``.
        cut: Only the first ``cut`` documents count; None is the whole run, as for MAP.
    """

    family: str
    cut: int | None

    @property
    def name(self) -> str:
        """Name in tables and files: ``ndcg@10``, ``map``."""
        return self.family if self.cut is None else f"{self.family}@{self.cut}"

    def value(self, found: Found) -> float:
        """Value for one query, a fraction; 0 if no document is relevant or no relevant document was found.

        Example:
            >>> parse_measure("map").value(Found(ranks=[2, 4], gains=[1, 1], ideal=[1, 1]))
            0.5
        """
        return FAMILIES[self.family](found, self.cut) if found.ranks else 0.0


def parse_measure(name: str) -> Measure:
    """Parse the name of a measure, ``family@cut``; only ``map`` is allowed without a cut.

    Raises:
        InputError: The family is unknown, or the cut is missing or not a positive number.

    Example:
        >>> parse_measure("recall@100")
        Measure(family='recall', cut=100)
    """
    match = re.fullmatch(r"([a-z]+)(?:@([1-9][0-9]*))?", name)
    if match is None or match[1] not in FAMILIES or (match[2] is None and match[1] != "map"):
        families = ", ".join(f"{family}@K" for family in FAMILIES)
        raise InputError(f"unknown measure {name!r}: write map or one of {families} with a cut-off K >= 1, such as ndcg@10")
    return Measure(match[1], int(match[2]) if match[2] else None)


DEFAULT: tuple[str, ...] = ("ndcg@10", "map", "mrr@10", "recall@10", "recall@100", "recall@1000", "p@10")
"""Measures of every report; the first is the headline measure."""

MEASURES: Mapping[str, Measure] = {name: parse_measure(name) for name in DEFAULT}
"""The default measures by name."""


@dataclass(frozen=True)
class Scores:
    """Scores of a run, as fractions at full precision.

    Attributes:
        per_query: Query id -> measure name -> value, for every judged query in the order of the judgements.
        means: Measure name -> mean over the judged queries.
    """

    per_query: dict[str, dict[str, float]]
    means: dict[str, float]


def score(qrels: Qrels, run: Run, measures: Sequence[str] = DEFAULT) -> Scores:
    """Score a run over the judged queries; queries without judgements are ignored.

    Args:
        qrels: Judgements; a query without relevant documents scores 0, as in trec_eval.
        run: Scores of the retrieved documents, any number per query. They are ranked here; the run is not changed.
        measures: Names of measures; see `parse_measure`.

    Raises:
        InputError: There are no judgements or no measures, a name is unknown, or the run of a judged query holds NaN.

    Example:
        >>> qrels = {"q1": {"a": 1, "b": 0}, "q2": {"c": 1}}
        >>> score(qrels, {"q1": {"b": 2.0, "a": 1.0}}, ["mrr@10", "p@10"]).means
        {'mrr@10': 0.25, 'p@10': 0.05}
    """
    _check_judged(qrels)
    if not measures:
        raise InputError(f"measures is empty; the default is {', '.join(DEFAULT)}")
    parsed = [parse_measure(name) for name in measures]
    per_query = {}
    for query, grades in qrels.items():
        found = _found(query, grades, run.get(query, {}))
        per_query[query] = {measure.name: measure.value(found) for measure in parsed}
    # fsum makes the mean independent of the order of the queries.
    means = {m.name: math.fsum(values[m.name] for values in per_query.values()) / len(per_query) for m in parsed}
    return Scores(per_query, means)


def judged_at(qrels: Qrels, run: Run, k: int = 10) -> float:
    """Share of the first k documents that have a judgement of any grade, mean over the judged queries.

    If this share is low, the scores say little, since unjudged documents count as irrelevant. With fewer than k retrieved documents it is
    the share of those, and with none it is 0.

    Args:
        qrels: Judgements.
        run: Scores of the retrieved documents. They are ranked here; the run is not changed.
        k: Number of top documents to check, at most.

    Returns:
        The mean over the judged queries, a fraction.

    Raises:
        InputError: There are no judgements, or the run of a judged query holds NaN.
        ValueError: k < 1.

    Source: ``Judged@k`` of ir_measures, https://ir-measur.es. It has the same rules but orders equal scores by id, ascending.

    Example:
        >>> judged_at({"q": {"a": 1, "b": 0}}, {"q": {"a": 4.0, "x": 3.0, "b": 2.0, "y": 1.0}}, k=3)
        0.6666666666666666
    """
    if k < 1:
        raise ValueError(f"k must be >= 1, got {k}")
    _check_judged(qrels)
    return math.fsum(_judged_share(query, grades, run.get(query, {}), k) for query, grades in qrels.items()) / len(qrels)


def _judged_share(query: str, grades: Mapping[str, int], scores: Mapping[str, float], k: int) -> float:
    values = _values(query, scores)
    if not values.size:
        return 0.0
    if len(values) <= k:
        return sum(document in grades for document in scores) / len(values)
    documents, threshold = list(scores), np.partition(values, len(values) - k)[len(values) - k]
    # All documents above the k-th score are among the first k; of those with the k-th score, the ones with the greatest ids.
    first = [documents[position] for position in np.flatnonzero(values > threshold).tolist()]
    first += heapq.nlargest(k - len(first), (documents[position] for position in np.flatnonzero(values == threshold).tolist()))
    return sum(document in grades for document in first) / k


def _check_judged(qrels: Qrels) -> None:
    if not qrels:
        raise InputError("the qrels are empty: there is no judged query")


def _found(query: str, grades: Mapping[str, int], scores: Mapping[str, float]) -> Found:
    """Ranks of the relevant documents, by looking up their scores in the sorted scores; the ids are not sorted."""
    relevant = {document: grade for document, grade in grades.items() if grade >= 1}
    values = _values(query, scores)
    hits = [document for document in relevant if document in scores]
    own = _as_float32([scores[document] for document in hits])
    ascending = np.sort(values)
    first, last = np.searchsorted(ascending, own, side="left"), np.searchsorted(ascending, own, side="right")
    ranks = len(values) - last + 1
    if np.any(last - first > 1):
        ranks += _tied_before(hits, first.tolist(), last.tolist(), list(scores), np.argsort(values))
    placed = sorted(zip(ranks.tolist(), hits, strict=True))
    gains = [relevant[document] for _, document in placed]
    return Found([rank for rank, _ in placed], gains, sorted(relevant.values(), reverse=True))


def _values(query: str, scores: Mapping[str, float]) -> NDArray[np.float32]:
    """Scores as float32, in the order of the mapping."""
    values = _as_float32(scores.values())
    if np.isnan(values).any():
        unranked = next(document for document, value in scores.items() if math.isnan(value))
        raise InputError(f"the score of document {unranked!r} for query {query!r} is NaN: the run cannot be ranked")
    return values


def _as_float32(values: Collection[float]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # a score beyond float32 becomes infinite, as in a C cast
        return np.fromiter(values, np.float32, len(values))


def _tied_before(
    hits: Sequence[str], first: Sequence[int], last: Sequence[int], documents: Sequence[str], ascending: NDArray[np.int64]
) -> list[int]:
    """For each hit, the number of documents with the same score and a greater id; these come before it.

    Comparing strings by code points gives the order of their UTF-8 bytes, so this is trec_eval's strcmp. Each group of equal scores is
    sorted once, so that a run with nothing but ties costs one sort instead of one pass per hit.
    """
    groups: dict[int, list[str]] = {}
    before = []
    for document, start, end in zip(hits, first, last, strict=True):
        if start not in groups:
            groups[start] = sorted(documents[position] for position in ascending[start:end].tolist())
        before.append(end - start - bisect_right(groups[start], document))
    return before


@dataclass(frozen=True)
class Part:
    """One collection and its score, as input to an average.

    Attributes:
        name: Name of the collection.
        split: Split of the judgements.
        group: Data set that the collection is a part of; None if it is a data set of its own.
        group_size: Number of collections in the group.
        value: Score of the collection; None if it was not scored.
    """

    name: str
    split: str
    group: str | None = None
    group_size: int = 1
    value: float | None = None

    @property
    def key(self) -> str:
        """Collection and split: ``scifact.test``."""
        return f"{self.name}.{self.split}"


@dataclass(frozen=True)
class Average:
    """An average over data sets.

    Attributes:
        value: The average; None if the score of a data set is missing.
        known: Number of data sets with a score.
        members: Number of data sets in the average.
    """

    value: float | None
    known: int
    members: int


def grouped(parts: Iterable[Part]) -> dict[str, list[Part]]:
    """Group collections into data sets: data set name -> its parts, each part once, in the order of the first parts.

    A group gives one data set with the group's name if all its parts are of the same split. Otherwise each split gives a data set of its
    own, named ``group.split``.

    Example:
        >>> android, english = Part("android", "test", "forums", 2), Part("english", "dev", "forums", 2)
        >>> list(grouped([android])), list(grouped([android, english]))
        (['forums'], ['forums.test', 'forums.dev'])
    """
    unique: dict[str, Part] = {}
    for part in parts:
        unique.setdefault(part.key, part)
    splits: dict[str, set[str]] = {}
    for part in unique.values():
        if part.group is not None:
            splits.setdefault(part.group, set()).add(part.split)
    found: dict[str, list[Part]] = {}
    for part in unique.values():
        if part.group is None:
            found[part.key] = [part]
        else:
            name = part.group if len(splits[part.group]) == 1 else f"{part.group}.{part.split}"
            # A collection and a group may share a name. They are still two data sets.
            found.setdefault(name if name not in unique else f"{name} (group)", []).append(part)
    return found


def is_whole(parts: Sequence[Part]) -> bool:
    """Whether a data set returned by `grouped` has all its parts."""
    return {part.group_size for part in parts} == {len(parts)}


def data_sets(parts: Iterable[Part]) -> dict[str, float | None]:
    """Score of each data set, in the order of the first parts; None if a part of the data set or its score is missing.

    Example:
        >>> parts = [Part("a", "test", value=0.5), Part("x", "test", "g", 2, 0.1), Part("y", "test", "g", 2, 0.3)]
        >>> data_sets(parts)
        {'a.test': 0.5, 'g': 0.2}
        >>> data_sets(parts[:2])
        {'a.test': 0.5, 'g': None}
    """
    scores: dict[str, float | None] = {}
    for name, members in grouped(parts).items():
        values = [part.value for part in members if part.value is not None]
        scores[name] = math.fsum(values) / len(values) if is_whole(members) and len(values) == len(members) else None
    return scores


def average(scores: Mapping[str, float | None], members: Sequence[str]) -> Average:
    """Unweighted mean over the named data sets; its value is None if the score of one of them is missing.

    Args:
        scores: Data set -> score.
        members: Names of the data sets to average.

    Example:
        >>> average({"a": 0.5, "b": None}, ["a", "b"])
        Average(value=None, known=1, members=2)
    """
    known = [score for score in (scores.get(name) for name in members) if score is not None]
    complete = bool(members) and len(known) == len(members)
    return Average(math.fsum(known) / len(known) if complete else None, len(known), len(members))
