"""Fields that say whether a document is relevant: used where they are named, refused where they would be ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.training.data import TrainingRows, prepare_rows
from quiver.retrieval.training.mining.negatives import MiningSystem, Output, Rules, mine_negatives
from quiver.retrieval.training.mining.texts import PairSource
from quiver.retrieval.training.recipe import DataSection

Prepare = Callable[..., TrainingRows]


@pytest.fixture
def prepare(write: Callable[..., Path], tmp_path: Path) -> Prepare:
    def make(rows: list[dict[str, Any]], **settings: Any) -> TrainingRows:
        path = write(settings.pop("name", "rows.jsonl"), rows)
        return prepare_rows(DataSection(train=(str(path),), **settings), tmp_path / "work", seed=3)

    return make


def pairs(name: str, *values: object) -> list[dict[str, Any]]:
    return [{"query": f"q{n}", "positive": f"p{n}", name: value} for n, value in enumerate(values)]


def queries(rows: TrainingRows) -> list[str]:
    return [row["query"] for row in rows]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("label", 1, 0),
        ("label", True, False),
        ("Label", "1", "0"),
        ("label", "true", "contradiction"),
        ("relevance", 1.0, -1),
        ("score", 1, 0.2),
        ("similarity", 1, 4.5),
        ("labels", [1], [0]),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_row_that_may_not_be_relevant_is_refused(prepare: Prepare, name: str, good: object, bad: object, suffix: str) -> None:
    if suffix == "parquet" and type(good) is not type(bad):
        pytest.skip("a column has one type")
    content = pairs(name, good, good, bad, good)
    ways_out = rf"set data\.label_field={name} .* or data\.ignore_fields=\[{name}\]"
    with pytest.raises(InputError, match=rf"rows\.{suffix}:3: the field '{name}' is .*{ways_out}"):
        prepare(content, name=f"rows.{suffix}")
    assert len(prepare(content, name=f"rows.{suffix}", ignore_fields=(name,))) == 4
    assert len(prepare(pairs(name, good, good), name=f"rows.{suffix}")) == 2


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_rows_with_label_zero_are_left_out_and_counted(prepare: Prepare, suffix: str) -> None:
    rows = prepare(pairs("label", 1, 0, 2, 0, 1), name=f"rows.{suffix}", label_field="label")
    assert (queries(rows), rows.counts.not_relevant, rows.counts.skipped) == (["q0", "q2", "q4"], 2, 0)
    with pytest.raises(InputError, match=r"no rows in .*\(2 not relevant\)"):
        prepare(pairs("label", 0, 0), name=f"other.{suffix}", label_field="label")


def test_labels_of_a_list_tell_positives_from_negatives(prepare: Prepare) -> None:
    content = [
        {"query": "q0", "passages": ["a", "b", "c"], "labels": [0, 1, 0]},
        {"query": "q1", "passages": ["a", "b", "c"], "labels": [0, 0, 0]},
        {"query": "q2", "passages": ["a", "b", "c"], "labels": [1, 0, 1]},
    ]
    with pytest.raises(InputError, match=r"rows\.jsonl:1: the field 'labels' is \[0, 1, 0\]"):
        prepare(content, document_fields=("passages",))
    with pytest.raises(InputError, match=r"rows\.jsonl:3: 2 documents are relevant by 'labels'; set data\.positives: each"):
        prepare(content, document_fields=("passages",), label_field="labels")
    rows = prepare(content, document_fields=("passages",), label_field="labels", positives="each")
    assert [(row["query"], row["document_1"], row["document_2"]) for row in rows] == [("q0", "b", "a"), ("q2", "a", "b"), ("q2", "c", "b")]
    assert rows.counts.not_relevant == 1


def test_scores_of_rows_with_negatives_are_not_labels(prepare: Prepare) -> None:
    content = [{"query": "q", "positive": "p", "negatives": ["n"], "score": 3.5, "scores": [9.0, 1.0]}]
    assert len(prepare(content, document_fields=("positive", "negatives"))) == 1
    with pytest.raises(InputError, match="the field 'label' is 0"):
        prepare([{**content[0], "label": 0}], document_fields=("positive", "negatives"))


def test_a_label_that_is_no_number_is_refused(prepare: Prepare) -> None:
    with pytest.raises(InputError, match=r"rows\.jsonl:2: a label in 'label' must be a number, true or false, got \"neutral\""):
        prepare(pairs("label", 1, "neutral"), label_field="label")


def test_mining_does_not_take_a_negative_for_a_positive(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write("rows.jsonl", pairs("label", 1, 0))
    with pytest.raises(InputError, match=r"rows\.jsonl:2: the field 'label' is 0, .*leave such rows out"):
        mine_negatives(PairSource((str(path),)), MiningSystem(None), tmp_path / "out", rules=Rules(negatives=1), output=Output())
