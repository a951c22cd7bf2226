"""Measures of a ranking against judgements, averages over data sets, confidence intervals, and significance tests.

Measures have the semantics of trec_eval, and averages follow the rules of the benchmarks. A measure is identified by its name, such as
``ndcg@10``: in code, in tables and on the command line. The rules:

- gains are the grades themselves (linear), discounted by log2(rank + 1), and the ideal ranking is over all judged documents;
- a document is relevant if its grade is at least 1, and a negative grade counts as 0;
- scores are compared as float32, and equal scores are ordered by document id, descending;
- the mean is over the judged queries; a query that is missing from the run scores 0;
- a group of collections counts as one data set in an average. It is complete if it has as many different collections of one split as its
  ``group_size`` says. Collections of different splits are never averaged, and a collection that is given twice counts once;
- an average is None if the score of one of its data sets is missing.

Functions of this module never change the run that they are given.

Intervals and tests are over queries. Both systems answer the same queries, so a comparison is paired. It makes no assumption about the
distribution of scores, only that the queries are a sample of those that users ask. A result says nothing about other collections or about
another training run of the same recipe.

A collection may have parts (the forums of CQADupStack), and an average is over collections. The score is then the unweighted mean of the
parts' means: queries are resampled, and signs flipped, within their part, and all parts have the same weight whatever their number of
queries. Parts and weights are fixed, not sampled.

Every interval and every p value is a function of the scores and the seed. It depends neither on the order of the queries, nor on which
system comes first, nor on the tests that are made with it. Memory is a few times the number of resamples or permutations (at the defaults
3 MB for one test, 16 MB for many), independent of the number of queries.

Sources: trec_eval 9 (m_ndcg_cut, m_map, m_recip_rank, m_recall, m_P and its -c flag); linear gain is that of Järvelin and Kekäläinen
2002, doi 10.1145/582415.582418; BEIR, arXiv:2104.08663, where CQADupStack is one data set, scored by the unweighted mean of its twelve
forums; Smucker, Allan and Carterette 2007, doi 10.1145/1321440.1321528 (the randomisation test on means over queries, and the case
against Wilcoxon's and the sign test); Efron 1979, doi 10.1214/aos/1176344552 (the bootstrap; the percentile interval is in Efron 1981,
doi 10.2307/3314608); Holm 1979, Scandinavian Journal of Statistics 6(2), 65-70; Phipson and Smyth 2010, doi 10.2202/1544-6115.1585 (a
sampled p is (b + 1) / (m + 1)).
"""

from __future__ import annotations

import heapq
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import model_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from quiver.encoder.errors import InputError
from quiver.encoder.schema import RECORD
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
    """One measure: a family and a cut-off rank."""

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
    """Scores of a run, as fractions at full precision."""

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
        found = _rank_relevant(query, grades, run.get(query, {}))
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
    values = _float32_scores(query, scores)
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


def _rank_relevant(query: str, grades: Mapping[str, int], scores: Mapping[str, float]) -> Found:
    """Ranks of the relevant documents, by looking up their scores in the sorted scores; the ids are not sorted."""
    relevant = {document: grade for document, grade in grades.items() if grade >= 1}
    values = _float32_scores(query, scores)
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


def _float32_scores(query: str, scores: Mapping[str, float]) -> NDArray[np.float32]:
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
        split: Split of the judgements; empty if it has no name.
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
        """Collection and split, as in files and tables: ``scifact.test``; the name alone if there is one split, without a name."""
        return f"{self.name}.{self.split}" if self.split else self.name


@dataclass(frozen=True)
class Average:
    """An average over data sets."""

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

    Example:
        >>> average({"a": 0.5, "b": None}, ["a", "b"])
        Average(value=None, known=1, members=2)
    """
    known = [score for score in (scores.get(name) for name in members) if score is not None]
    complete = bool(members) and len(known) == len(members)
    return Average(math.fsum(known) / len(known) if complete else None, len(known), len(members))


@pydantic_dataclass(frozen=True, config=RECORD)
class Interval:
    """Bootstrap interval of a mean over queries.

    Attributes:
        low: Lower end.
        high: Upper end.
        level: Confidence level, such as 0.95.
        resamples: Number of resamples drawn.
    """

    low: float
    high: float
    level: float
    resamples: int

    @model_validator(mode="after")
    def _in_order(self) -> Interval:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


LEVEL = 0.95
"""Confidence level of an interval."""

RESAMPLES = 10_000
"""Number of bootstrap resamples of the queries for an interval."""

PERMUTATIONS = 100_000
"""Maximum number of sign assignments for a p value; 1 / (PERMUTATIONS + 1) is the smallest p that a random sample can give."""

TIE = 1e-12
"""Scores that differ by at most this are a tie. Rounding is below 1e-14; the smallest step of a measure is that of MAP, about 1e-9."""

CHANGED = 10
"""Number of queries with the largest changes that a comparison lists in each direction."""


def bootstrap_interval(values: ArrayLike, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Percentile bootstrap interval of a mean over queries.

    Args:
        values: One score per query.
        level: Confidence level, 0 < level < 1.
        resamples: Number of samples drawn with replacement.
        seed: Random seed of the draws.

    Example:
        >>> bootstrap_interval([0.5, 0.5, 0.5])
        Interval(low=0.5, high=0.5, level=0.95, resamples=10000)
    """
    (interval,) = _intervals([[_check_finite(values)]], [1.0], level=level, resamples=resamples, seed=seed)
    return interval


def _intervals(
    tests: Sequence[Sequence[NDArray[np.float64]]], shares: Sequence[float], *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int
) -> list[Interval]:
    """The intervals of several tests with the same number of values in each part. The seed gives all of them the same draws, made once."""
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    if resamples < 1:
        raise ValueError(f"resamples must be >= 1, got {resamples}")
    means = [[math.fsum(values.tolist()) / len(values) for values in parts] for parts in tests]
    centres = [math.fsum(share * mean for share, mean in zip(shares, each, strict=True)) for each in means]
    # Sort, and make the mean >= 0: the draws then select the same values for any order of the queries, and exchanging the two systems
    # gives the mirrored interval.
    sides = [-1.0 if centre < 0 else 1.0 for centre in centres]
    rng = np.random.default_rng(seed)
    deviations = np.zeros((resamples, len(tests)))
    for place, share in enumerate(shares):
        # Resample deviations from the mean: equal scores then give an interval of width 0, free of rounding errors.
        ordered = [np.sort(side * (parts[place] - mean[place])) for side, parts, mean in zip(sides, tests, means, strict=True)]
        deviations += share / len(ordered[0]) * _resampled_sums(np.stack(ordered, axis=1), resamples, rng)
    intervals = []
    for side, centre, sums in zip(sides, centres, deviations.T, strict=True):
        low, high = sorted((side * np.quantile(sums, [(1 - level) / 2, (1 + level) / 2])).tolist())
        intervals.append(Interval(centre + low, centre + high, level, resamples))
    return intervals


def _resampled_sums(values: NDArray[np.float64], resamples: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Sums of ``len(values)`` rows drawn with replacement, without ever holding a matrix of all draws."""
    sums = np.zeros((resamples, values.shape[1]))
    drawn = np.empty_like(sums)
    for _ in range(len(values)):
        # As in `_random_sums`, "clip" spares a copy.
        sums += np.take(values, rng.integers(len(values), size=resamples), axis=0, out=drawn, mode="clip")
    return sums


def sign_flips(tests: Sequence[ArrayLike], *, permutations: int = PERMUTATIONS, seed: int = 0) -> list[float]:
    """Two-sided p values of paired randomisation tests: the probability that random signs give a sum at least this far from 0.

    Under the null hypothesis the two systems are exchangeable, so each query's difference has either sign with equal probability. If
    there are at most ``permutations`` sign assignments, all are enumerated. Otherwise ``permutations`` random ones are drawn, and the
    observed one is counted as well, so that p is never 0 and the test keeps its level. The seed gives all tests the same random signs, so
    these are drawn once for many.

    Args:
        tests: Differences of each test, one per query, second system minus first; for a weighted mean of means, scaled by the weight of the
            query's part. Their numbers may differ. Zeros do not change a sum and are dropped first, so a few nonzero differences are
            enumerated even among many zeros.
        permutations: Maximum number of sign assignments.
        seed: Random seed of the draws; unused if all assignments are enumerated.

    Returns:
        p of each test, 0 < p <= 1; 1 if all its differences are zero.

    Raises:
        ValueError: A test is empty or holds a value that is not finite, or ``permutations`` < 1.

    Example:
        Of the eight sums of +-1, +-2 and +-3, two are as far from 0 as 6.

        >>> sign_flips([[1.0, 2.0, 3.0], [0.0, 0.0], [1.0, 1.0]])
        [0.25, 1.0, 0.5]
    """
    if permutations < 1:
        raise ValueError(f"permutations must be >= 1, got {permutations}")
    p_values, sampled = [1.0] * len(tests), []
    for position, differences in enumerate(tests):
        given = _check_finite(differences)
        # The random signs make the sign of a difference irrelevant. With sorted absolute values, p depends neither on the order of the
        # queries nor on which system comes first.
        sizes = np.sort(np.abs(given[given != 0]))
        # Sums that are mathematically equal differ by rounding, and must count as equal.
        reached = abs(math.fsum(given.tolist())) - 1e-12 * math.fsum(sizes.tolist())
        if len(sizes) < permutations.bit_length():  # 2**len(sizes) <= permutations
            p_values[position] = float(np.mean(np.abs(_enumerated_sums(sizes)) >= reached))
        else:
            sampled.append((position, sizes, reached))
    sampled.sort(key=lambda test: len(test[1]))  # tests of a batch cost as much as the longest of them
    for first in range(0, len(sampled), BATCH):
        positions, batch, thresholds = zip(*sampled[first : first + BATCH], strict=True)
        sums = _random_sums(batch, permutations, np.random.default_rng(seed))
        for position, count in zip(positions, np.count_nonzero(np.abs(sums, out=sums) >= thresholds, axis=0).tolist(), strict=True):
            p_values[position] = (count + 1) / (permutations + 1)
    return p_values


BATCH = 16
"""Number of tests that share random signs."""

_BLOCK, _CHUNK = 8, 8192
"""Bytes per assignment that are drawn at a time, and number of assignments whose sums stay in the processor's cache meanwhile."""


def _enumerated_sums(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """All 2**n sums of n rows with either sign."""
    sums = np.zeros((1, *sizes.shape[1:]))
    for size in sizes:
        sums = np.concatenate([sums + size, sums - size])
    return sums


def _random_sums(tests: Sequence[NDArray[np.float64]], permutations: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Sums of the sizes of each test with random signs, (permutations, tests); a test with fewer sizes than others gets zeros.

    Eight sizes at a time: a random byte looks up one of their 256 sums, for all tests at once.
    """
    padded = np.zeros((math.ceil(max(map(len, tests)) / 8) * 8, len(tests)))
    for column, sizes in enumerate(tests):
        padded[: len(sizes), column] = sizes
    eights = padded.reshape(-1, 8, len(tests))
    size = _CHUNK // min(4, len(tests))
    sums, looked_up = np.zeros((permutations, len(tests))), np.empty((size, len(tests)))
    draws = np.empty((_BLOCK, permutations), np.uint8)
    for start in range(0, len(eights), _BLOCK):
        tables = [_enumerated_sums(eight[::-1]) for eight in eights[start : start + _BLOCK]]  # (256, tests)
        for place in range(len(tables)):
            draws[place] = rng.integers(256, size=permutations, dtype=np.uint8)
        for first in range(0, permutations, size):
            chunk = sums[first : first + size]
            for table, rows in zip(tables, draws[: len(tables), first : first + size].astype(np.intp), strict=True):
                # No row is out of range; "clip" spares NumPy a copy.
                chunk += np.take(table, rows, axis=0, out=looked_up[: len(chunk)], mode="clip")
    return sums


def holm(p_values: Sequence[float]) -> list[float]:
    """P values after Holm's step-down correction for multiple tests, in the given order.

    A corrected p is below alpha exactly if Holm's test at level alpha rejects. The probability of at least one false rejection is at most
    alpha, whatever the dependence between the tests.

    Example:
        >>> holm([0.04, 0.01, 0.03])
        [0.06, 0.03, 0.06]
    """
    if wrong := [p for p in p_values if not 0 <= p <= 1]:
        raise ValueError(f"p must be between 0 and 1, got {wrong[0]}")
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, position in enumerate(sorted(range(len(p_values)), key=lambda position: p_values[position])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[position]))
        corrected[position] = highest
    return corrected


@dataclass(frozen=True)
class Change:
    """Scores of two systems on one query."""

    part: str
    query: str
    first: float
    second: float

    @property
    def difference(self) -> float:
        """Second score minus first score."""
        return self.second - self.first


@dataclass(frozen=True)
class PairedComparison:
    """Comparison of two systems by one measure on the same queries.

    Attributes:
        first: Mean score of the first system; with several parts, the mean of their means.
        second: Mean score of the second system, computed in the same way.
        difference: ``second - first``.
        interval: Bootstrap interval of the difference.
        p: p value of the two-sided sign-flip test of difference 0, not corrected for multiple comparisons.
        wins: Number of queries on which the second system scores higher by more than ``TIE``.
        ties: Number of queries on which the scores differ by at most ``TIE``.
        losses: Number of queries on which the first system scores higher by more than ``TIE``.
        gained: Queries with the largest gains of the second system, largest first; ties are ordered by part and id.
        lost: Queries with the largest losses of the second system, in the same order.
    """

    first: float
    second: float
    difference: float
    interval: Interval
    p: float
    wins: int
    ties: int
    losses: int
    gained: tuple[Change, ...]
    lost: tuple[Change, ...]


Scored: TypeAlias = Mapping[str, Mapping[str, float]]
"""Part -> query id -> score."""


def compare_pairs(
    pairs: Sequence[tuple[Scored, Scored]], *, weights: Sequence[float] | None = None, changed: int = CHANGED, seed: int = 0
) -> list[PairedComparison]:
    """Compare pairs of systems, such as by one measure each, by the weighted mean of their means over parts.

    Args:
        pairs: Scores of the first and of the second system, all of them on the same parts and queries.
        weights: Weights of the parts, with sum 1; None gives all parts the same weight.
        changed: Maximum number of queries to list in each direction.
        seed: Random seed of the intervals and the tests.

    Raises:
        ValueError: Two systems have different parts or queries, there are none, or a score is not finite.

    Example:
        >>> (result,) = compare_pairs([({"": {"q1": 0.5, "q2": 0.5, "q3": 1.0}}, {"": {"q1": 0.75, "q2": 1.0, "q3": 1.0}})])
        >>> result.difference, result.p, (result.wins, result.ties, result.losses)
        (0.25, 0.5, (2, 1, 0))
        >>> [change.query for change in result.gained]
        ['q2', 'q1']
    """
    if not pairs:
        raise ValueError("there is nothing to compare: pairs is empty")
    queries = {part: list(scores) for part, scores in pairs[0][0].items()}
    if any(scores.keys() != queries.keys() for pair in pairs for scores in pair) or any(
        scores[part].keys() != pairs[0][0][part].keys() for pair in pairs for scores in pair for part in queries
    ):
        raise ValueError("two systems can only be compared on the same queries")
    if not all(queries.values()):
        raise ValueError("there is nothing to compare: a part has no queries")
    shares = _check_weights(weights, len(queries))
    ids = [(part, query) for part, each in queries.items() for query in each]
    sides = [
        [[_check_finite([scores[part][query] for query in each]) for part, each in queries.items()] for scores in pair] for pair in pairs
    ]
    differences = [_differences(first, second) for first, second in sides]
    p_values = sign_flips([_scale_differences(shares, each) for each in differences], seed=seed)
    compared = []
    for (first, second), each, interval, p in zip(sides, differences, _intervals(differences, shares, seed=seed), p_values, strict=True):
        means, changes = [_mean_of_means(side, shares) for side in (first, second)], np.concatenate(each)
        one, other = np.concatenate(first), np.concatenate(second)
        compared.append(
            PairedComparison(
                first=means[0],
                second=means[1],
                difference=means[1] - means[0],
                interval=interval,
                p=p,
                wins=int(np.count_nonzero(changes > 0)),
                ties=int(np.count_nonzero(changes == 0)),
                losses=int(np.count_nonzero(changes < 0)),
                gained=_most_changed(ids, one, other, changes, changed),
                lost=_most_changed(ids, one, other, -changes, changed),
            )
        )
    return compared


def _most_changed(
    ids: Sequence[tuple[str, str]], first: NDArray[np.float64], second: NDArray[np.float64], gains: NDArray[np.float64], count: int
) -> tuple[Change, ...]:
    """The ``count`` queries with the largest gains above 0; ties are ordered by part and id."""
    places = np.flatnonzero(gains > 0)
    if 0 < count < len(places):
        places = places[gains[places] >= np.partition(gains[places], -count)[-count] - 2 * TIE]
    changes = [Change(ids[place][0], ids[place][1], first[place].item(), second[place].item()) for place in places.tolist()]
    # Round, so that mathematically equal gains are ordered by id.
    return tuple(sorted(changes, key=lambda change: (-round(abs(change.difference), 12), change.part, change.query))[:count])


def paired_tests(
    pairs: Sequence[tuple[Sequence[ArrayLike], Sequence[ArrayLike]]], *, weights: Sequence[float] | None = None, seed: int = 0
) -> list[tuple[float, float]]:
    """The difference and p of `compare_pairs`, without the intervals, which take most of its time.

    Example:
        >>> paired_tests([([[0.5, 0.5]], [[0.75, 1.0]])])
        [(0.375, 0.5)]
    """
    scaled = [
        _scale_differences(
            _check_weights(weights, len(first)), _differences(list(map(_check_finite, first)), list(map(_check_finite, second)))
        )
        for first, second in pairs
    ]
    return [(math.fsum(each.tolist()), p) for each, p in zip(scaled, sign_flips(scaled, seed=seed), strict=True)]


def _differences(first: Sequence[NDArray[np.float64]], second: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Second scores minus first, part by part. Ties count as zero everywhere: a rounding error is not evidence."""
    pairs = list(zip(first, second, strict=True))
    if any(len(ours) != len(theirs) for ours, theirs in pairs):
        raise ValueError("two systems can only be compared on the same queries")
    differences = [theirs - ours for ours, theirs in pairs]
    return [np.where(np.abs(each) <= TIE, 0.0, each) for each in differences]


def _scale_differences(shares: Sequence[float], differences: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Differences as parts of the difference of the weighted means: they sum up to it."""
    return np.concatenate([share / len(values) * values for share, values in zip(shares, differences, strict=True)])


def _mean_of_means(parts: Sequence[NDArray[np.float64]], weights: Sequence[float]) -> float:
    return math.fsum(weight * (math.fsum(part.tolist()) / len(part)) for weight, part in zip(weights, parts, strict=True))


def _check_weights(weights: Sequence[float] | None, parts: int) -> list[float]:
    if parts == 0:
        raise ValueError("no parts given")
    if weights is None:
        return [1 / parts] * parts
    if len(weights) != parts or not math.isclose(math.fsum(weights), 1) or min(weights) <= 0:
        raise ValueError(f"weights must be {parts} positive numbers that sum to 1, got {list(weights)}")
    return list(weights)


def _check_finite(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"values must hold one number per query, at least one; got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError("values must be finite")
    return array
