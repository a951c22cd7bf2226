"""The worst queries, with what was found, what was wanted and why."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quiver.eval.datasets.benchmarks import Policy
from quiver.eval.evaluation import QUERIES, SHOWN, worst_queries
from quiver.eval.metrics import score
from quiver.eval.results import TokenMatch
from quiver.retrieval.data.corpus import Collection
from quiver.retrieval.records import Document, Query


def _collection(documents: Sequence[Document], qrels: dict[str, dict[str, int]]) -> Collection:
    queries = tuple(Query(key, f"text of {key}") for key in qrels)
    return Collection(name="c", split="test", documents=tuple(documents), queries=queries, qrels=qrels, empty_texts=0)


DOCUMENTS = [Document(f"d{number}", f"text {number}", f"title {number}") for number in range(8)]


def test_the_worst_come_first_and_equals_by_id() -> None:
    qrels = {f"q{number:02}": {"d0": 1} for number in range(14)}
    run = {query: {"d0": 1.0} for query in ("q03", "q00")}
    worst = worst_queries(_collection(DOCUMENTS, qrels), Policy(), run, score(qrels, run))
    assert len(worst) == QUERIES
    assert [each.query for each in worst] == [f"q{number:02}" for number in range(14) if number not in (0, 3)][:QUERIES]
    assert {each.score for each in worst} == {0.0}
    assert all(each.found == () for each in worst)


def test_documents_are_shown_with_grade_rank_and_text() -> None:
    qrels = {"q": {"d1": 1, "d2": 3, "d3": 2, "d4": 1, "d5": 0, "d6": -1}}
    run = {"q": {"d5": 9.0, "d7": 8.0, "d4": 7.0, "d3": 7.0, "d0": 1.0}}
    (worst,) = worst_queries(_collection(DOCUMENTS, qrels), Policy(), run, score(qrels, run))
    assert worst.relevant == 4
    # Equal scores are ranked by id, descending: d4 before d3.
    assert [(each.id, each.grade, each.rank, each.score) for each in worst.found] == [
        ("d5", 0, 1, 9.0),
        ("d7", None, 2, 8.0),
        ("d4", 1, 3, 7.0),
    ]
    assert [(each.id, each.grade, each.rank, each.score) for each in worst.wanted] == [
        ("d2", 3, None, None),
        ("d3", 2, 4, 7.0),
        ("d1", 1, None, None),
    ]
    assert len(worst.wanted) == SHOWN
    assert worst.wanted[0].text == "title 2 text 2"


@pytest.mark.parametrize("found", [True, False])
def test_only_the_first_found_and_the_best_wanted_are_explained(found: bool) -> None:
    qrels = {"q": {"d1": 1, "d2": 2}}
    run = {"q": {"d3": 3.0, "d4": 2.0}} if found else {}
    asked: list[tuple[str, str]] = []

    def explain(query: str, document: str) -> list[TokenMatch]:
        asked.append((query, document))
        return [TokenMatch("text", "word", 0.5)]

    (worst,) = worst_queries(_collection(DOCUMENTS, qrels), Policy(), run, score(qrels, run), explain=explain)
    expected = [("text of q", "title 3 text 3")] if found else []
    assert asked == [*expected, ("text of q", "title 2 text 2")]
    assert [len(each.matches) for each in (*worst.found, *worst.wanted)] == ([1, 0] if found else []) + [1, 0]
