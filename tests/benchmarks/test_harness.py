"""What the benchmark scripts share: rounds, ratios, workers, results that resume."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.errors import InputError

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("harness")


def test_every_other_round_is_in_reverse(harness: Any) -> None:
    assert list(harness.interleave("ab", 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_no_round_begins_that_would_end_too_late(harness: Any) -> None:
    clock: Iterator[float] = iter(range(1000))  # every pass takes one second
    seconds = harness.time_rounds({"a": list, "b": list}, rounds=10, seconds=7, clock=lambda: next(clock))
    assert seconds == {"a": [1.0] * 3, "b": [1.0] * 3}
    clock = iter(range(1000))
    assert harness.time_rounds({"a": list}, rounds=4, seconds=0.1, clock=lambda: next(clock)) == {"a": [1.0]}


def test_ratios_are_of_the_same_round(harness: Any) -> None:
    rows = harness.with_ratios([{"backend": "other", "seconds": [4.0, 9.0, 2.0]}, {"backend": "quiver", "seconds": [2.0, 3.0, 4.0]}])
    assert rows[0]["ratio"] == [2.0, 3.0, 0.5]
    assert "ratio" not in rows[1]
    assert harness.RATIO.text(rows[0]) == "2.00 (0.50-3.00)"
    assert harness.markdown_table((harness.BACKEND, harness.RATIO, harness.MEMORY), rows).splitlines()[0] == "| backend | time / quiver's |"


def test_results_go_on_under_the_same_conditions_only(harness: Any, tmp_path: Path) -> None:
    made = harness.Results("T", {"rounds": 3}, tmp_path)
    made.add("case", "A case", (harness.BACKEND,), [{"backend": "quiver", "seconds": [1.0]}])
    assert harness.Results("T", {"rounds": 3}, tmp_path).cases == made.cases
    assert "## A case" in (tmp_path / "report.md").read_text()
    assert json.loads((tmp_path / "results.json").read_text())["conditions"]["versions"]["torch"]
    with pytest.raises(InputError, match=r"measured with other settings .*add --overwrite"):
        harness.Results("T", {"rounds": 4}, tmp_path)
    assert harness.Results("T", {"rounds": 4}, tmp_path, overwrite=True).cases == {}


@pytest.mark.slow
def test_a_worker_that_fails_or_dies_is_one_line(harness: Any) -> None:
    with pytest.raises(harness.WorkerError, match=r"^TypeError: "):
        harness.Worker(harness.describe, {"wrong": 1})
    with harness.Worker(harness.open_echo, {}, timeout=60) as worker:
        assert worker.ask([1, "a"]) == [1, "a"]
        with pytest.raises(harness.WorkerError, match=r"^killed by signal 9$"):
            worker.ask("kill")
