"""Values that a result cannot have are refused when it is built and when it is read, with their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pydantic
import pytest

from quiver.encoder.errors import InputError
from quiver.encoder.schema import RECORD, SchemaError, parse_record
from quiver.eval.evaluation import evaluate
from quiver.eval.results import Parameter, Results


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


def test_a_baseline_is_checked_too(results: Results) -> None:
    content = asdict(results)
    [collection] = content["collections"]
    interval = {"low": 0.9, "high": 0.1, "level": 0.95, "resamples": 10}
    collection["baselines"] = [
        {"name": "bm25", "parameters": {}, "measures": collection["measures"], "interval": interval, "run": None, "per_query": None}
    ]
    with pytest.raises(InputError, match=r"collections\.0\.baselines\.0\.interval: low 0\.9 is above high 0\.1"):
        parse_record(Results, content, source="results.json")


@pydantic.dataclasses.dataclass(frozen=True, config=RECORD)
class Record:
    number: float
    maybe: float | None
    counted: Mapping[str, float]
    settings: Mapping[str, Parameter]


GOOD: Mapping[str, object] = {"number": 1, "maybe": 0.5, "counted": {"a": 2}, "settings": {"k": 3, "fast": True, "none": None}}


def test_a_record_has_the_types_of_its_fields() -> None:
    record = parse_record(Record, GOOD, source="file")
    assert record == Record(1.0, 0.5, {"a": 2.0}, {"k": 3, "fast": True, "none": None})
    assert (type(record.number), type(record.counted["a"]), type(record.settings["k"])) == (float, float, int)
    assert parse_record(Record, {**GOOD, "maybe": None}, source="file").maybe is None
    assert type(parse_record(Record, {**GOOD, "maybe": 3}, source="file").maybe) is float


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"number": True}, "number: must be a number, got true"),
        ({"maybe": "0.5"}, "maybe: must be a number, got '0.5'"),
        ({"counted": []}, "counted: must be a mapping"),
        ({"numbr": 1}, "numbr: unknown key, did you mean 'number'"),
    ],
)
def test_a_value_of_another_type_is_refused(change: Mapping[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_record(Record, {**GOOD, **change}, source="file")
