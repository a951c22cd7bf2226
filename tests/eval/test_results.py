"""Values that a result cannot have are refused when it is built and when it is read, with their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.schema import SchemaError, parse_record
from quiver.eval.evaluation import evaluate
from quiver.eval.results import Results


@pytest.fixture
def results(make_collection: Callable[..., Path]) -> Results:
    return evaluate("bm25", make_collection())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interval": {"low": 0.5, "high": 0.4, "level": 0.95, "resamples": 1000}}, r"interval: low 0\.5 is above high 0\.4"),
        ({"seconds": {"search": -0.5}}, r"seconds\.search: must be >= 0, got -0\.5"),
        ({"measures": {"ndcg@10": 1.5}}, r"measures\.ndcg@10: must be within 0 and 1, got 1\.5"),
        ({"measures": {"map": 0.5}}, r"measures: ndcg@10 is missing"),
        ({"judged": -0.1}, r"judged: must be within 0 and 1, got -0\.1"),
        ({"queries": -1}, r"queries: must be >= 0, got -1"),
        ({"truncated": {"documents": 0, "queries": -2}}, r"truncated\.queries: must be >= 0, got -2"),
        (
            {"index": {"kind": "faiss", "parameters": {}, "recall": {"overlap@10": 2.0}}},
            r"index\.recall\.overlap@10: must be within 0 and 1",
        ),
        ({"index": {"kind": "faiss", "parameters": {}, "bytes": -1}}, r"index\.bytes: must be >= 0, got -1"),
        ({"index": {"kind": "faiss", "parameters": {}, "query_milliseconds": -2.5}}, r"index\.query_milliseconds: must be >= 0, got -2\.5"),
        ({"group_size": 0}, r"group_size: must be >= 1, got 0"),
    ],
)
def test_an_impossible_number_is_refused(change: Mapping[str, Any], message: str, results: Results) -> None:
    content = asdict(results)
    content["collections"][0].update(change)
    with pytest.raises(SchemaError, match=rf"^results\.json: collections\.0\.{message}") as caught:
        parse_record(Results, content, source="results.json")
    assert "\n" not in str(caught.value)
