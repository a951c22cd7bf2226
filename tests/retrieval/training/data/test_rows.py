from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.retrieval.training.data import TrainingRows, prepare_rows
from quiver.retrieval.training.sections import DataSection

pytest.importorskip("datasets")


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
    """Every row has its positive and three different negatives of its own, in their order and with their scores."""
    for number, row in enumerate(rows.dataset):
        assert (row["query"], row["document_1"], row["scores"][0]) == (f"q{number}", f"p{number}", number)
        taken = [int(text.removeprefix(f"n{number}.")) for text in negatives(row)]
        assert taken == sorted(set(taken)) == row["scores"][1:]


def test_every_epoch_draws_other_negatives_and_the_same_again(pools: DataSection, tmp_path: Path) -> None:
    rows = prepare_rows(pools, tmp_path / "work", seed=5)
    epochs = {}
    for epoch in (0, 1, 2, 0):
        rows.set_epoch(epoch)
        check(rows)
        drawn = [negatives(row) for row in rows.dataset]
        assert epochs.setdefault(epoch, drawn) == drawn
    assert epochs[0] != epochs[1] != epochs[2]
    assert [negatives(row) for row in prepare_rows(pools, tmp_path / "work", seed=5).dataset] == epochs[0]
    assert [negatives(row) for row in prepare_rows(pools, tmp_path / "work", seed=6).dataset] != epochs[0]
    assert rows.sha256 == prepare_rows(pools, tmp_path / "work", seed=6).sha256


def test_every_negative_has_the_same_chance(pools: DataSection, tmp_path: Path) -> None:
    rows = prepare_rows(pools, tmp_path / "work", seed=0)
    counts: Counter[str] = Counter()
    for epoch in range(20):
        rows.set_epoch(epoch)
        counts.update(text.partition(".")[2] for row in rows.dataset for text in negatives(row))
    # 600 rows, each takes 3 of 8: a standard deviation of 11.9 around 225.
    assert len(counts) == 8
    np.testing.assert_allclose(list(counts.values()), 225, atol=50)


def test_texts_are_all_that_may_be_drawn(pools: DataSection, tmp_path: Path) -> None:
    texts = list(prepare_rows(pools, tmp_path / "work", seed=0).texts())
    assert len(texts) == 30 * 10
    assert texts[:10] == ["q0", "p0", *(f"n0.{k}" for k in range(8))]


def test_the_first_negatives(pools: DataSection, tmp_path: Path) -> None:
    rows = prepare_rows(pools.replace(negatives="first"), tmp_path / "work", seed=0)
    rows.set_epoch(3)
    check(rows)
    assert negatives(rows.dataset[7]) == ["n7.0", "n7.1", "n7.2"]


def test_a_row_does_not_depend_on_how_it_is_asked_for(pools: DataSection, tmp_path: Path) -> None:
    dataset = prepare_rows(pools, tmp_path / "work", seed=0).dataset
    order = [3, 29, 3, 0]
    alone = [dataset[number] for number in order]
    assert dataset.__getitems__(order) == alone
    columns = dataset[order]
    assert list(columns) == dataset.column_names == ["query", "document_1", "document_2", "document_3", "document_4", "scores"]
    assert [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)] == alone
    assert list(dataset.select(order)) == alone


def test_copies_are_in_the_same_epoch_and_hold_no_texts(pools: DataSection, tmp_path: Path) -> None:
    rows = prepare_rows(pools, tmp_path / "work", seed=0)
    copies = [copy.deepcopy(rows.dataset), rows.dataset.remove_columns("scores"), rows.dataset.select(range(30))]
    before = rows.dataset[4]
    rows.set_epoch(1)
    after = rows.dataset[4]
    assert before != after
    for other in copies:
        assert other[4] == {name: after[name] for name in other.column_names}
    again = pickle.loads(pickle.dumps(rows.dataset))  # noqa: S301  # our own, as a worker process gets it
    assert again[4] == after
    assert len(pickle.dumps(rows.reader)) < 2000


def test_worker_processes_read_the_same_rows(pools: DataSection, tmp_path: Path) -> None:
    loader = pytest.importorskip("torch.utils.data").DataLoader
    rows = prepare_rows(pools, tmp_path / "work", seed=0)
    rows.set_epoch(2)
    expected = [rows.dataset[number] for number in range(6)]
    batches = loader(rows.dataset.select(range(6)), batch_size=3, num_workers=1, collate_fn=list, multiprocessing_context="fork")
    assert [row for batch in batches for row in batch] == expected


def test_the_librarys_sampler_sees_the_texts(write: Callable[..., Path], tmp_path: Path) -> None:
    samplers = pytest.importorskip("sentence_transformers.sampler")
    torch = pytest.importorskip("torch")
    path = write("rows.jsonl", [{"query": f"q{n}", "positive": f"p{n % 3}", "score": "1"} for n in range(12)])
    rows = prepare_rows(DataSection(train=(str(path),), score_fields=("score",)), tmp_path / "work", seed=0)
    sampler = samplers.NoDuplicatesBatchSampler(
        rows.dataset, batch_size=3, drop_last=True, valid_label_columns=["scores"], generator=torch.Generator()
    )
    batches = list(sampler)
    assert len(batches) == 4
    for batch in batches:
        assert len({rows.dataset[number]["document_1"] for number in batch}) == 3
