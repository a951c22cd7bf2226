"""Rows with unequal numbers of negatives: used as they are, repeated, skipped, cut or refused, and counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.training.data import TrainingRows, prepare_rows
from quiver.retrieval.training.recipe import DataSection

NOTHING = object()


def row(number: int, negatives: object) -> dict[str, Any]:
    found = {"query": f"q{number}", "positive": f"p{number}", "negatives": negatives}
    return {key: value for key, value in found.items() if value is not NOTHING}


def wrong(number: int, count: int) -> list[str]:
    return [f"n{number}.{k}" for k in range(count)]


@pytest.fixture
def prepare(write: Callable[..., Path], tmp_path: Path) -> Callable[..., TrainingRows]:
    def make(rows: list[dict[str, Any]], **settings: Any) -> TrainingRows:
        path = write(settings.pop("name", "rows.jsonl"), rows)
        section = DataSection(train=(str(path),), document_fields=("positive", "negatives"), **settings)
        return prepare_rows(section, tmp_path / "work", seed=3)

    return make


def texts(rows: TrainingRows) -> list[list[str]]:
    return [[text for name, text in row.items() if name.startswith("document") and text is not None] for row in rows]


@pytest.mark.parametrize("first", [[], None, NOTHING, "", ["p0"], [" "]])
def test_the_first_row_does_not_decide_how_many_negatives_the_others_have(
    prepare: Callable[..., TrainingRows], first: object, caplog: pytest.LogCaptureFixture
) -> None:
    rows = prepare([row(0, first), *(row(n, wrong(n, 3)) for n in range(1, 5))])
    assert (rows.documents_per_row, len(rows), rows.counts.rows_short, rows.counts.skipped, rows.counts.rows_cut) == (4, 5, 1, 0, 0)
    assert texts(rows) == [["p0"], *([f"p{n}", *wrong(n, 3)] for n in range(1, 5))]
    assert rows[0] == {"query": "q0", "document_1": "p0", "document_2": None, "document_3": None, "document_4": None}
    assert caplog.messages == ["1 of 5 rows have fewer than 4 documents; data.short_rows: fewer"]


@pytest.mark.parametrize("place", [0, 2, 4])
def test_the_place_of_a_short_row_does_not_matter(prepare: Callable[..., TrainingRows], place: int) -> None:
    content = [row(n, wrong(n, 1 if n == place else 3)) for n in range(5)]
    skipped = prepare(content, short_rows="skip")
    assert (skipped.documents_per_row, len(skipped), skipped.counts.skipped, skipped.counts.rows_short) == (4, 4, 1, 0)
    with pytest.raises(InputError, match=rf"rows\.jsonl:{place + 1}: the row has 2 documents, 4 are needed; .*short_rows: skip"):
        prepare(content, short_rows="error")
    repeated = prepare(content, short_rows="repeat")
    assert (len(repeated), repeated.counts.rows_short) == (5, 1)
    assert texts(repeated)[place] == [f"p{place}", *wrong(place, 1) * 3]


def test_repeated_negatives_are_others_in_every_epoch_and_each_about_as_often(prepare: Callable[..., TrainingRows]) -> None:
    rows = prepare([row(0, wrong(0, 3)), row(1, wrong(1, 5)), row(2, [])], short_rows="repeat")
    assert (rows.documents_per_row, len(rows), rows.counts.rows_short, rows.counts.skipped) == (6, 2, 1, 1)
    epochs = []
    for epoch in range(8):
        rows.set_epoch(epoch)
        drawn = texts(rows)[0][1:]
        assert sorted(set(drawn)) == wrong(0, 3)
        assert {drawn.count(text) for text in wrong(0, 3)} == {1, 2}
        epochs.append(tuple(drawn))
    assert len(set(epochs)) > 1
    rows.set_epoch(0)
    assert tuple(texts(rows)[0][1:]) == epochs[0]


def test_longer_rows_are_cut_or_drawn_and_counted(prepare: Callable[..., TrainingRows], caplog: pytest.LogCaptureFixture) -> None:
    content = [row(n, wrong(n, n)) for n in range(6)]
    with caplog.at_level(logging.INFO, logger="quiver.retrieval.training.data.prepare"):
        first = prepare(content, documents_per_row=3)
    assert "3 of 6 rows have more than 3 documents; data.negatives: first" in caplog.messages
    assert (first.documents_per_row, first.counts.rows_short, first.counts.rows_cut) == (3, 2, 3)
    assert texts(first) == [[f"p{n}", *wrong(n, min(n, 2))] for n in range(6)]
    drawn = prepare(content, documents_per_row=3, negatives="random")
    assert (drawn.counts.rows_short, drawn.counts.rows_cut) == (2, 3)
    seen = set()
    for epoch in range(20):
        drawn.set_epoch(epoch)
        assert list(map(len, texts(drawn))) == [1, 2, 3, 3, 3, 3]
        seen.update(texts(drawn)[5][1:])
    assert seen == set(wrong(5, 5))


def test_teacher_scores_need_rows_of_equal_length_and_stay_with_their_documents(prepare: Callable[..., TrainingRows]) -> None:
    content = [{**row(n, wrong(n, n)), "scores": [9.0, *map(float, range(n))]} for n in range(1, 4)]
    with pytest.raises(InputError, match=r"rows\.jsonl:1: the row has 2 documents, 4 are needed"):
        prepare(content, score_fields=("scores",))
    rows = prepare(content, score_fields=("scores",), short_rows="repeat")
    for found in rows:
        assert len(found["scores"]) == 4
        documents = [found[f"document_{place}"] for place in range(2, 5)]
        assert found["scores"] == [9.0, *(float(text.partition(".")[2]) for text in documents)]
