"""Results that cannot be: what types do not see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.errors import InputError
from quiver.eval.evaluation import evaluate
from quiver.eval.results import Baseline, IndexUsed, Interval, Results, Truncated, check_collection, check_results


@pytest.fixture
def results(make_collection: Callable[..., Path]) -> Results:
    return evaluate("bm25", make_collection())


def test_what_an_evaluation_makes_is_possible(results: Results) -> None:
    check_results(results, "results.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interval": Interval(0.5, 0.4, 0.95, 1000)}, r"interval: low 0\.5 is above high 0\.4"),
        ({"seconds": {"search": -0.5}}, r"seconds\.search: must be >= 0, got -0\.5"),
        ({"measures": {"ndcg@10": 1.5}}, r"measures\.ndcg@10: must be within 0 and 1, got 1\.5"),
        ({"measures": {"map": 0.5}}, r"measures: has no ndcg@10"),
        ({"judged": -0.1}, r"judged: must be within 0 and 1, got -0\.1"),
        ({"queries": -1}, r"queries: must be >= 0, got -1"),
        ({"truncated": Truncated(0, -2)}, r"truncated\.queries: must be >= 0, got -2"),
        ({"index": IndexUsed("faiss", {}, {"overlap@10": 2.0})}, r"index\.recall\.overlap@10: must be within 0 and 1, got 2\.0"),
        ({"index": IndexUsed("faiss", {}, None, -1)}, r"index\.bytes: must be >= 0, got -1"),
        ({"index": IndexUsed("faiss", {}, None, 1, -2.5)}, r"index\.query_milliseconds: must be >= 0, got -2\.5"),
        ({"group_size": 0}, r"group_size: must be >= 1, got 0"),
    ],
)
def test_a_number_that_cannot_be_is_damage(change: Mapping[str, Any], message: str, results: Results) -> None:
    damaged = replace(results.collections[0], **change)
    with pytest.raises(InputError, match=rf"^file\.{message}.*; the file is damaged or was changed by hand$") as caught:
        check_collection(damaged, "file")
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=rf"results\.json\.collections\[0\]\.{message}"):
        check_results(replace(results, collections=(damaged,)), "results.json")


def test_a_baseline_is_checked_too(results: Results) -> None:
    collection = results.collections[0]
    baseline = Baseline("bm25", {}, collection.measures, collection.interval, None, None)
    check_collection(replace(collection, baselines=(baseline,)), "file")
    with pytest.raises(InputError, match=r"file\.baselines\[0\]\.interval: low 0\.9 is above high 0\.1"):
        check_collection(replace(collection, baselines=(replace(baseline, interval=Interval(0.9, 0.1, 0.95, 10)),)), "file")


def test_a_collection_is_there_once(results: Results) -> None:
    with pytest.raises(InputError, match=r"results\.json: holds 'tiny\.test' twice"):
        check_results(replace(results, collections=results.collections * 2), "results.json")
