"""Measures: numbers worked out by hand; tests/parity/test_pytrec_eval.py holds them against pytrec_eval."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.eval.metrics import DEFAULT, judged_at, parse_measure, score

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


@pytest.mark.parametrize(("relevant", "expected"), [("c", 1.0), ("b", 1 / 2), ("a", 1 / 3)])
def test_ties_are_ordered_by_id_descending(relevant: str, expected: float) -> None:
    for run in ({"a": 1.0, "b": 1.0, "c": 1.0}, {"c": 1.0, "a": 1.0, "b": 1.0}):
        assert score({"q": {relevant: 1}}, {"q": run}, ["mrr@10"]).means["mrr@10"] == expected


def test_scores_are_compared_as_float32() -> None:
    # 30 + 1e-7 is 30 in float32, so the greater id is first.
    assert score({"q": {"b": 1}}, {"q": {"a": 30 + 1e-7, "b": 30.0}}, ["mrr@10"]).means["mrr@10"] == 1.0
    assert score({"q": {"b": 1}}, {"q": {"a": 30 + 1e-5, "b": 30.0}}, ["mrr@10"]).means["mrr@10"] == 0.5


def test_missing_and_empty_queries_score_zero_and_unjudged_are_left_out() -> None:
    qrels = {"found": {"a": 1}, "missing": {"a": 1}, "empty": {"a": 1}}
    scores = score(qrels, {"found": {"a": 1.0}, "empty": {}, "unjudged": {"a": 1.0}})
    assert list(scores.per_query) == ["found", "missing", "empty"]
    assert set(scores.per_query["missing"].values()) == set(scores.per_query["empty"].values()) == {0.0}
    assert scores.means["ndcg@10"] == 1 / 3


def test_mrr_stops_at_the_cut_and_map_does_not() -> None:
    run = {"q": {f"d{place:02d}": 20.0 - place for place in range(20)}}
    means = score({"q": {"d10": 1}}, run, ["mrr@10", "mrr@11", "map", "map@10"]).means
    assert means == {"mrr@10": 0.0, "mrr@11": 1 / 11, "map": 1 / 11, "map@10": 0.0}


def test_precision_divides_by_the_cut_where_the_run_is_shorter() -> None:
    assert score({"q": {"a": 1}}, {"q": {"a": 1.0}}, ["p@10"]).means["p@10"] == 0.1


def test_nan_names_query_and_document() -> None:
    with pytest.raises(InputError, match="document 'b' for query 'q7' is NaN"):
        score({"q7": {"a": 1}}, {"q7": {"a": 1.0, "b": math.nan}})


@pytest.mark.parametrize("name", ["ndcg", "recall", "ndcg@0", "ndcg@-1", "NDCG@10", "bpref@10", "p@", "", "map@ten", "ndcg@10 "])
def test_unknown_measures_list_what_exists(name: str) -> None:
    with pytest.raises(InputError, match="map or one of ndcg@K, map@K, mrr@K, recall@K, p@K"):
        parse_measure(name)


def test_nothing_to_score_is_an_error() -> None:
    with pytest.raises(InputError, match="qrels are empty"):
        score({}, {"q": {"a": 1.0}})
    with pytest.raises(InputError, match="measures is empty"):
        score({"q": {"a": 1}}, {}, [])


def test_many_relevant_documents_in_one_tie() -> None:
    # Ten groups of twenty equals, half of each relevant: the ranks are those of the sorted ids.
    documents = [f"d{place:03d}" for place in range(200)]
    scores = {document: float(place // 20) for place, document in enumerate(documents)}
    qrels = {"q": dict.fromkeys(documents[::2], 1)}
    # From d199 (not relevant) and d198 (relevant) downwards every second document is relevant.
    assert score(qrels, {"q": scores}, ["p@7", "recall@100"]).means == {"p@7": 3 / 7, "recall@100": 0.5}
    expected = sum(place / (2 * place) for place in range(1, 101)) / 100
    np.testing.assert_allclose(score(qrels, {"q": scores}, ["map"]).means["map"], expected, rtol=1e-15)


def test_judged_by_hand() -> None:
    qrels = {"full": {"a": 2, "b": 0, "c": -1}, "short": {"a": 1}, "missing": {"a": 1}, "empty": {"a": 1}}
    run = {
        "full": {"x": 9.0, "a": 8.0, "y": 7.0, "b": 6.0, "c": 5.0},  # of the first four a and b
        "short": {"a": 1.0, "z": 2.0},  # of the two that are found
        "empty": {},
        "unjudged": {"a": 1.0},
    }
    assert judged_at(qrels, run, 4) == (2 / 4 + 1 / 2 + 0 + 0) / 4
    assert judged_at(qrels, run, 1) == (0 + 0 + 0 + 0) / 4
    assert judged_at(qrels, run) == (3 / 5 + 1 / 2 + 0 + 0) / 4


def test_judged_refuses_what_cannot_be_ranked() -> None:
    with pytest.raises(InputError, match="document 'b' for query 'q7' is NaN"):
        judged_at({"q7": {"a": 1}}, {"q7": {"a": 1.0, "b": math.nan}})
    with pytest.raises(InputError, match="qrels are empty"):
        judged_at({}, {})
    with pytest.raises(ValueError, match="k must be >= 1, got 0"):
        judged_at({"q": {"a": 1}}, {}, 0)
