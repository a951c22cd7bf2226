"""Thousands of random runs full of corner cases score with us what they score with pytrec_eval, query by query."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.eval.metrics import DEFAULT, score

pytestmark = pytest.mark.parity

BATCH = 500
THEIRS = {
    "ndcg@10": "ndcg_cut_10",
    "map": "map",
    "map@10": "map_cut_10",
    "recall@10": "recall_10",
    "recall@100": "recall_100",
    "recall@1000": "recall_1000",
    "p@10": "P_10",
}
OURS = [*THEIRS, "mrr@10"]

Grades = dict[str, dict[str, int]]
Scores = dict[str, dict[str, float]]

SCORINGS: dict[str, Callable[[random.Random], float]] = {
    "spread": lambda rng: rng.random(),
    "few levels": lambda rng: float(rng.randint(0, 3)),
    "equal": lambda rng: 1.0,
    "equal as float32": lambda rng: 30 + rng.randint(0, 5) * 1e-7,
    "neighbours in float32": lambda rng: 30 + rng.randint(0, 5) * 2e-6,
    "negative and huge": lambda rng: -rng.random() * 1e30,
    "beyond float32": lambda rng: rng.choice([-1, 1]) * 10.0 ** rng.randint(37, 300),
    "infinite": lambda rng: rng.choice([-math.inf, 0.0, math.inf]),
    "tiny": lambda rng: rng.choice([-1, 1]) * 10.0 ** -rng.randint(36, 46),  # float32 is subnormal below 1e-38, zero below 1e-45
    "below float32": lambda rng: rng.choice([-1e-300, -0.0, 0.0, 1e-300]),
    "integers": lambda rng: rng.randint(-3, 3),
}
# Below -1 pytrec_eval ends the process with a segmentation fault; test_grades_below_minus_one_count_as_zero has those.
GRADES = ([0, 1], [-1, 0, 1, 2, 3], [-1, 0], [0, 0, 0, 1], [5], [0, 1, 1000])


def _ids(rng: random.Random, count: int) -> list[str]:
    return [rng.choice(("d", "D", "é", "文", "\U0001f600", "d-")) + str(number) for number in range(count)]


def _random_run(rng: random.Random, seen: Counter[str]) -> tuple[Grades, Scores]:
    documents = _ids(rng, rng.choice((3, 8, 20, 40, 60)) if rng.random() < 0.97 else 1200)
    qrels: Grades = {}
    run: Scores = {}
    for number in range(rng.randint(1, 5)):
        query = f"q{number}"
        grades = rng.choice(GRADES)
        qrels[query] = {document: rng.choice(grades) for document in rng.sample(documents, rng.randint(1, len(documents)))}
        seen["negative grade"] += min(qrels[query].values()) < 0
        seen["nothing relevant"] += max(qrels[query].values()) < 1
        if rng.random() < 0.15:
            seen["missing"] += 1
            continue
        name = rng.choice(list(SCORINGS))
        scoring = SCORINGS[name]
        run[query] = {document: scoring(rng) for document in rng.sample(documents, rng.randint(0, len(documents)))}
        seen[name] += 1
        seen["empty"] += not run[query]
        seen["more than 1000 found"] += len(run[query]) > 1000
        seen["more relevant than the cut"] += sum(grade >= 1 for grade in qrels[query].values()) > 10
    run["unjudged"] = {documents[0]: 1.0}
    return qrels, run


def _batches(runs: int, seen: Counter[str]) -> Iterator[list[tuple[Grades, Scores]]]:
    rng = random.Random(0)
    for _ in range(runs // BATCH):
        yield [_random_run(rng, seen) for _ in range(BATCH)]


def _their_values(batch: list[tuple[Grades, Scores]]) -> list[list[float]]:
    """One row a judged query, in order; all runs of the batch go to one evaluator, told apart by a prefix of the query."""
    pytrec_eval = pytest.importorskip("pytrec_eval")
    qrels = {f"{number}/{query}": grades for number, (judged, _) in enumerate(batch) for query, grades in judged.items()}
    run = {f"{number}/{query}": scores for number, (_, found) in enumerate(batch) for query, scores in found.items()}
    measures = {"ndcg_cut.10", "map", "map_cut.10", "recall.10,100,1000", "P.10", "recip_rank"}
    scored = pytrec_eval.RelevanceEvaluator(qrels, measures).evaluate(run)
    rows = []
    for query in qrels:
        values = scored.get(query, {})  # it leaves out the queries that the run does not have: they count 0
        reciprocal = values.get("recip_rank", 0.0)  # of the whole run; within the first ten it is at least 1/10
        rows.append([*(values.get(name, 0.0) for name in THEIRS.values()), reciprocal if reciprocal > 1 / 10.5 else 0.0])
    return rows


def test_random_runs() -> None:
    runs = 2_000
    assert set(DEFAULT) <= set(OURS)
    pytest.importorskip("pytrec_eval")
    seen: Counter[str] = Counter()
    compared = 0
    for batch in _batches(runs, seen):
        theirs = np.array(_their_values(batch))
        scored = [score(qrels, run, OURS) for qrels, run in batch]
        ours = np.array([[values[name] for name in OURS] for scores in scored for values in scores.per_query.values()])
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)
        ends = np.cumsum([len(qrels) for qrels, _ in batch])
        means = [rows.mean(axis=0) for rows in np.split(theirs, ends[:-1])]
        np.testing.assert_allclose([[scores.means[name] for name in OURS] for scores in scored], means, rtol=0, atol=1e-9)
        compared += len(batch)
    assert compared == runs
    corners = [*SCORINGS, "negative grade", "nothing relevant", "missing", "empty", "more than 1000 found", "more relevant than the cut"]
    assert {name: seen[name] for name in corners if seen[name] < runs // 200} == {}, "the random runs no longer cover the corners"


def test_grades_below_minus_one_count_as_zero() -> None:
    rng, seen = random.Random(2), Counter[str]()
    for _ in range(200):
        qrels, run = _random_run(rng, seen)
        lower = {
            query: {document: grade if grade >= 0 else -rng.randint(1, 9) for document, grade in grades.items()}
            for query, grades in qrels.items()
        }
        assert score(lower, run, OURS) == score(qrels, run, OURS)
    assert seen["negative grade"] > 50


def test_nan_is_refused_where_pytrec_eval_ranks_it() -> None:
    pytrec_eval = pytest.importorskip("pytrec_eval")
    qrels, run = {"q": {"a": 1}}, {"q": {"a": math.nan, "b": 1.0}}
    assert pytrec_eval.RelevanceEvaluator(qrels, {"recip_rank"}).evaluate(run)["q"]["recip_rank"] > 0
    with pytest.raises(InputError, match="score of document 'a' for query 'q' is NaN"):
        score(qrels, run)
