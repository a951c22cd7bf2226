from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.feather
import pytest

from quiver.retrieval.training.data import TrainingRows, prepare_rows
from quiver.retrieval.training.recipe import DataSection


@pytest.fixture
def pools(write: Callable[..., Path], tmp_path: Path) -> DataSection:
    """Thirty rows with eight hard negatives each, and scores."""
    rows = [
        {"query": f"q{n}", "positive": f"p{n}", "negatives": [f"n{n}.{k}" for k in range(8)], "scores": [n, *range(8)]} for n in range(30)
    ]
    return DataSection(
        train=(str(write("rows.jsonl", rows)),),
        document_fields=("positive", "negatives"),
        score_fields=("scores",),
        documents_per_row=4,
        negatives="random",
    )


def negatives(row: dict[str, Any]) -> list[str]:
    return [row[f"document_{place}"] for place in (2, 3, 4)]


def check(rows: TrainingRows) -> None:
    """Every row has its positive and three different negatives of its own, in order and with their scores."""
    for number, row in enumerate(rows):
        assert (row["query"], row["document_1"], row["scores"][0]) == (f"q{number}", f"p{number}", number)
        taken = [int(text.removeprefix(f"n{number}.")) for text in negatives(row)]
        assert taken == sorted(set(taken)) == row["scores"][1:]


def test_every_epoch_draws_other_negatives_and_the_same_again(pools: DataSection, tmp_path: Path) -> None:
    rows = prepare_rows(pools, tmp_path / "work", seed=5)
    epochs = {}
    for epoch in (0, 1, 2, 0):
        rows.set_epoch(epoch)
        check(rows)
        drawn = [negatives(row) for row in rows]
        assert epochs.setdefault(epoch, drawn) == drawn
    assert epochs[0] != epochs[1] != epochs[2]
    assert [negatives(row) for row in prepare_rows(pools, tmp_path / "work", seed=5)] == epochs[0]
    assert [negatives(row) for row in prepare_rows(pools, tmp_path / "work", seed=6)] != epochs[0]
    assert rows.counts.sha256 == prepare_rows(pools, tmp_path / "work", seed=6).counts.sha256


def test_a_row_does_not_depend_on_the_rows_it_is_read_with(pools: DataSection, tmp_path: Path) -> None:
    rows = prepare_rows(pools, tmp_path / "work", seed=0)
    order = [3, 29, 3, 0]
    alone = [rows[number] for number in order]
    columns = rows.columns(order)
    assert list(columns) == rows.column_names == ["query", "document_1", "document_2", "document_3", "document_4", "scores"]
    assert [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)] == alone
    assert rows.columns([]) == {name: [] for name in columns}


def test_copies_read_the_same_epoch_and_hold_no_texts(pools: DataSection, tmp_path: Path) -> None:
    rows = prepare_rows(pools, tmp_path / "work", seed=0)
    before = rows[4]
    rows.set_epoch(1)
    after = rows[4]
    assert before != after
    assert copy.deepcopy(rows)[4] == after
    again = pickle.loads(pickle.dumps(rows))  # noqa: S301  # made by this test, as a worker process gets it
    assert again[4] == after
    assert len(pickle.dumps(rows)) < 2000


def test_the_files_open_in_any_arrow_reader(pools: DataSection, tmp_path: Path) -> None:
    prepare_rows(pools.replace(negatives="first"), tmp_path / "work", seed=0)
    [texts] = (tmp_path / "work").glob("*/texts.arrow")
    table = pyarrow.feather.read_table(texts.with_name("rows.arrow"))
    assert table.column_names == ["query", "documents", "scores"]
    column = pyarrow.feather.read_table(texts)["text"]
    first = table.slice(0, 1).to_pylist()[0]
    assert [column[number].as_py() for number in (first["query"], *first["documents"])] == ["q0", "p0", "n0.0", "n0.1", "n0.2"]
    assert first["scores"] == [0, 0, 1, 2]
