"""Measures: numbers worked out by hand, and equality with pytrec_eval on random runs full of corner cases."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from encoder.errors import InputError
from eval.metrics import DEFAULT, MEASURES, Measure, parse_measure, score
from retrieval.run import ranked

LOG3 = math.log2(3)


def test_golden_graded() -> None:
    # Ranked a (grade 0), b (2), c (unjudged), d (1); e (3) is not found.
    qrels = {"q": {"a": 0, "b": 2, "d": 1, "e": 3}}
    run = {"q": {"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}}
    means = score(qrels, run).means
    dcg = 2 / LOG3 + 1 / math.log2(5)
    ideal = 3 + 2 / LOG3 + 1 / 2
    expected = {
        "ndcg@10": dcg / ideal,
        "map": (1 / 2 + 2 / 4) / 3,
        "mrr@10": 1 / 2,
        "recall@10": 2 / 3,
        "recall@100": 2 / 3,
        "recall@1000": 2 / 3,
        "p@10": 2 / 10,
    }
    assert list(means) == list(DEFAULT)
    np.testing.assert_allclose(list(means.values()), [expected[name] for name in means], rtol=1e-15)


def test_gain_is_linear_and_ideal_is_over_all_judged() -> None:
    run = {"q": {"low": 2.0, "high": 1.0}}
    found = score({"q": {"low": 1, "high": 3}}, run, ["ndcg@10"]).means["ndcg@10"]
    np.testing.assert_allclose(found, (1 + 3 / LOG3) / (3 + 1 / LOG3), rtol=1e-15)
    missed = score({"q": {"low": 1, "high": 3, "absent": 3}}, run, ["ndcg@10"]).means["ndcg@10"]
    np.testing.assert_allclose(missed, (1 + 3 / LOG3) / (3 + 3 / LOG3 + 1 / 2), rtol=1e-15)


def test_ideal_is_cut_too() -> None:
    qrels = {"q": {f"d{place}": 1 for place in range(30)}}
    run = {"q": {f"d{place}": 30.0 - place for place in range(30)}}
    assert score(qrels, run, ["ndcg@10", "recall@10"]).means == {"ndcg@10": 1.0, "recall@10": 1 / 3}


@pytest.mark.parametrize(("relevant", "expected"), [("c", 1.0), ("b", 1 / 2), ("a", 1 / 3)])
def test_ties_are_ordered_by_id_descending(relevant: str, expected: float) -> None:
    for run in ({"a": 1.0, "b": 1.0, "c": 1.0}, {"c": 1.0, "a": 1.0, "b": 1.0}):
        assert score({"q": {relevant: 1}}, {"q": run}, ["mrr@10"]).means["mrr@10"] == expected


def test_scores_are_compared_as_float32() -> None:
    # 30 + 1e-7 is 30 in float32, so the greater id is first.
    assert score({"q": {"b": 1}}, {"q": {"a": 30 + 1e-7, "b": 30.0}}, ["mrr@10"]).means["mrr@10"] == 1.0
    assert score({"q": {"b": 1}}, {"q": {"a": 30 + 1e-5, "b": 30.0}}, ["mrr@10"]).means["mrr@10"] == 0.5


def test_scores_beyond_float32_are_infinite_and_tie() -> None:
    assert score({"q": {"b": 1}}, {"q": {"a": 1e300, "b": 1e200}}, ["mrr@10"]).means["mrr@10"] == 1.0


def test_missing_and_empty_queries_score_zero_and_unjudged_are_left_out() -> None:
    qrels = {"found": {"a": 1}, "missing": {"a": 1}, "empty": {"a": 1}}
    scores = score(qrels, {"found": {"a": 1.0}, "empty": {}, "unjudged": {"a": 1.0}})
    assert list(scores.per_query) == ["found", "missing", "empty"]
    assert set(scores.per_query["missing"].values()) == set(scores.per_query["empty"].values()) == {0.0}
    assert scores.means["ndcg@10"] == 1 / 3


def test_a_query_without_relevant_documents_scores_zero() -> None:
    scores = score({"q": {"a": 0, "b": -1}}, {"q": {"a": 1.0, "b": 2.0}})
    assert set(scores.per_query["q"].values()) == {0.0}


def test_mrr_stops_at_the_cut_and_map_does_not() -> None:
    run = {"q": {f"d{place:02d}": 20.0 - place for place in range(20)}}
    means = score({"q": {"d10": 1}}, run, ["mrr@10", "mrr@11", "map", "map@10"]).means
    assert means == {"mrr@10": 0.0, "mrr@11": 1 / 11, "map": 1 / 11, "map@10": 0.0}


def test_precision_divides_by_the_cut_where_the_run_is_shorter() -> None:
    assert score({"q": {"a": 1}}, {"q": {"a": 1.0}}, ["p@10"]).means["p@10"] == 0.1


def test_nan_names_query_and_document() -> None:
    with pytest.raises(InputError, match="document 'b' for query 'q7' is NaN"):
        score({"q7": {"a": 1}}, {"q7": {"a": 1.0, "b": math.nan}})


def test_the_run_is_not_changed() -> None:
    run = {"q": {"b": 1.0, "q": 3.0, "a": 2.0}}
    before = {query: list(scores.items()) for query, scores in run.items()}
    score({"q": {"a": 1}}, run)
    assert {query: list(scores.items()) for query, scores in run.items()} == before


@pytest.mark.parametrize("name", ["ndcg", "recall", "ndcg@0", "ndcg@-1", "NDCG@10", "bpref@10", "p@", "", "map@ten", "ndcg@10 "])
def test_unknown_measures_list_what_exists(name: str) -> None:
    with pytest.raises(InputError, match="map or one of ndcg@K, map@K, mrr@K, recall@K, p@K"):
        parse_measure(name)


def test_a_measure_is_its_name() -> None:
    assert parse_measure("recall@7") == Measure("recall", 7)
    assert [measure.name for measure in MEASURES.values()] == list(MEASURES) == list(DEFAULT)


def test_nothing_to_score_is_an_error() -> None:
    with pytest.raises(InputError, match="qrels are empty"):
        score({}, {"q": {"a": 1.0}})
    with pytest.raises(InputError, match="no measure"):
        score({"q": {"a": 1}}, {}, [])


def _random_case(rng: random.Random) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, float]]]:
    documents = [rng.choice(["d", "D", "é", "文"]) + str(number) for number in range(rng.randint(3, 60))]
    scorings: list[Callable[[], float]] = [
        lambda: rng.random(),
        lambda: float(rng.randint(0, 3)),
        lambda: 30 + rng.randint(0, 5) * 1e-7,
        lambda: -rng.random() * 1e30,
        lambda: 1.0,
    ]
    qrels: dict[str, dict[str, int]] = {}
    run: dict[str, dict[str, float]] = {}
    for number in range(rng.randint(1, 6)):
        grades = rng.choice([[0, 1], [-1, 0, 1, 2, 3], [0, -1], [5]])
        qrels[f"q{number}"] = {document: rng.choice(grades) for document in rng.sample(documents, rng.randint(1, len(documents)))}
        if rng.random() < 0.8:  # the others are missing from the run
            scoring = rng.choice(scorings)
            run[f"q{number}"] = {document: scoring() for document in rng.sample(documents, rng.randint(0, len(documents)))}
    return qrels, run


@pytest.mark.parity
def test_equal_to_pytrec_eval() -> None:
    pytrec_eval = pytest.importorskip("pytrec_eval")
    names = {
        "ndcg_cut.10": "ndcg@10",
        "map": "map",
        "map_cut.10": "map@10",
        "recall.10": "recall@10",
        "recall.100": "recall@100",
        "recall.1000": "recall@1000",
        "P.10": "p@10",
    }
    compared = seen_ties = seen_missing = seen_empty = seen_irrelevant = 0
    for seed in range(200):
        qrels, run = _random_case(random.Random(seed))
        ours = score(qrels, run, [*names.values(), "mrr@10"])
        theirs = pytrec_eval.RelevanceEvaluator(qrels, set(names)).evaluate(run)
        cut = {query: {document: scores[document] for document in ranked(scores)[:10]} for query, scores in run.items()}
        reciprocal = pytrec_eval.RelevanceEvaluator(qrels, {"recip_rank"}).evaluate(cut)
        for query in qrels:
            expected = {our: theirs.get(query, {}).get(their.replace(".", "_"), 0.0) for their, our in names.items()}
            expected["mrr@10"] = reciprocal.get(query, {}).get("recip_rank", 0.0)
            np.testing.assert_allclose([ours.per_query[query][name] for name in expected], list(expected.values()), rtol=0, atol=1e-9)
            compared += 1
            seen_ties += len({np.float32(value) for value in run.get(query, {}).values()}) < len(run.get(query, {}))
            seen_missing += query not in run
            seen_empty += query in run and not run[query]
            seen_irrelevant += max(qrels[query].values()) < 1
        for name, mean in ours.means.items():
            np.testing.assert_allclose(mean, np.mean([values[name] for values in ours.per_query.values()]), rtol=0, atol=1e-12)
    assert compared > 500
    assert min(seen_ties, seen_missing, seen_empty, seen_irrelevant) >= 5, "the random cases no longer cover the corners"


def test_ranks_agree_with_the_run_files_order() -> None:
    for seed in range(50):
        qrels, run = _random_case(random.Random(seed))
        for query, scores in run.items():
            first = next((place for place, document in enumerate(ranked(scores), start=1) if qrels[query].get(document, 0) >= 1), None)
            expected = 0.0 if first is None else 1 / first
            assert score({query: qrels[query]}, run, ["mrr@1000"]).means["mrr@1000"] == expected
