"""Which rows make which batch: all of them once an epoch, no text twice, the same from any batch on and for any number of processes."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder import InputError
from retrieval.training.data import TrainingRows, prepare_rows
from retrieval.training.loop import batches as module
from retrieval.training.loop.batches import Batch, BatchOrder, read_columns, read_rows
from retrieval.training.loop.feed import EXAMPLES, Feed
from retrieval.training.loop.processes import Processes
from retrieval.training.sections import DataSection

SHARED = [
    {
        "query": f"query {place % 17}",
        "positive": f"answer {place}",
        "negative": f"answer {(place + 8) % 50}" if place % 3 else f"other {place}",
    }
    for place in range(50)
]
"""Every query stands in two or three rows, and the negatives of most are positives of others."""

MakeRows = Callable[..., TrainingRows]


@pytest.fixture
def make_rows(tmp_path: Path) -> MakeRows:
    def make(rows: list[dict[str, Any]], **settings: Any) -> TrainingRows:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        fields = tuple(key for key in rows[0] if key not in ("query", "scores"))
        return prepare_rows(DataSection(train=(str(path),), document_fields=fields, **settings), tmp_path / "work", seed=5)

    return make


@pytest.fixture
def drawn(rows_file: Path, tmp_path: Path) -> TrainingRows:
    """64 rows whose two negatives are drawn anew in every epoch."""
    section = DataSection((str(rows_file),), document_fields=("positive", "negatives"), documents_per_row=3, negatives="random")
    return prepare_rows(section, tmp_path / "work", seed=5)


def first(order: BatchOrder, count: int, start: int = 0) -> list[Batch]:
    return list(islice(order.batches(start), count))


def texts(row: dict[str, Any]) -> set[str]:
    return {value for value in row.values() if isinstance(value, str)}


@pytest.mark.parametrize("no_duplicates", [False, True])
def test_every_row_comes_once_an_epoch_in_another_order(make_rows: MakeRows, no_duplicates: bool) -> None:
    rows = make_rows([{"query": f"query {place}", "positive": f"answer {place}"} for place in range(66)])
    order = BatchOrder(rows, size=4, seed=3, no_duplicates=no_duplicates)
    assert order.per_epoch == 16
    found = first(order, 48)
    assert [batch.epoch for batch in found] == [0] * 16 + [1] * 16 + [2] * 16
    for epoch in range(3):
        seen = [row for batch in found[16 * epoch : 16 * epoch + 16] for row in batch.rows]
        assert len(set(seen)) == 64  # two do not fill a batch
        assert seen == torch.randperm(66, generator=torch.Generator().manual_seed(3 + epoch)).tolist()[:64]
    assert first(BatchOrder(rows, size=4, seed=3, no_duplicates=no_duplicates), 48) == found
    assert first(BatchOrder(rows, size=4, seed=9, no_duplicates=no_duplicates), 48) != found


def test_no_text_comes_twice_in_a_batch(make_rows: MakeRows) -> None:
    rows = make_rows(SHARED)
    assert all(len(texts(row)) == 3 for row in SHARED)
    assert any(
        len(set.union(*(texts(SHARED[row]) for row in batch.rows))) < 24
        for batch in first(BatchOrder(rows, size=8, seed=1, no_duplicates=False), 6)
    )
    seen: dict[int, Counter[int]] = {}
    for batch in first(BatchOrder(rows, size=8, seed=1, no_duplicates=True), 40):
        assert len(batch.rows) == 8
        assert len(set.union(*(texts(SHARED[row]) for row in batch.rows))) == 24
        seen.setdefault(batch.epoch, Counter()).update(batch.rows)
    assert len(seen) >= 7
    assert all(set(counts.values()) == {1} for counts in seen.values())


def test_a_row_that_repeats_a_text_comes_first_in_the_next_batch(make_rows: MakeRows) -> None:
    rows = make_rows([{"query": query, "positive": f"answer {place}"} for place, query in enumerate("aabcbdef")])
    put_off = 0
    for seed in range(12):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist()
        left, expected = list(order), []
        for _ in range(2):  # by hand: walk over what is left, take what fits
            taken: list[int] = []
            for row in left:
                if len(taken) < 4 and "aabcbdef"[row] not in {"aabcbdef"[other] for other in taken}:
                    taken.append(row)
            expected.append(taken)
            left = [row for row in left if row not in taken]
        if len(expected[1]) == 4:
            assert [batch.rows for batch in first(BatchOrder(rows, size=4, seed=seed, no_duplicates=True), 2)] == expected
            put_off += expected != [order[:4], order[4:]]
    assert put_off >= 3


def test_texts_are_compared_whatever_their_column(make_rows: MakeRows) -> None:
    rows = make_rows([{"query": "a", "positive": "b"}, {"query": "b", "positive": "c"}, {"query": "d", "positive": "e"}])
    for batch in first(BatchOrder(rows, size=2, seed=1, no_duplicates=True), 5):
        assert 2 in batch.rows


def test_equal_scores_are_no_repeated_text(make_rows: MakeRows) -> None:
    rows = make_rows([{"query": f"q{place}", "positive": f"p{place}", "scores": [1.0]} for place in range(4)], score_fields=("scores",))
    assert rows.scored
    assert len(first(BatchOrder(rows, size=4, seed=1, no_duplicates=True), 1)[0].rows) == 4


@pytest.mark.parametrize("no_duplicates", [False, True])
def test_it_goes_on_from_any_batch(drawn: TrainingRows, no_duplicates: bool) -> None:
    """Rows, epochs, and with them the negatives: from batch 5 on as if the first five had been."""

    def walk(start: int, count: int) -> list[tuple[Batch, list[dict[str, Any]]]]:
        order = BatchOrder(drawn, size=4, seed=3, no_duplicates=no_duplicates)
        drawn.set_epoch(77)  # whatever it was
        return [(batch, read_rows(drawn, batch.rows)) for batch in islice(order.batches(start), count)]

    whole = walk(0, 42)
    assert {batch.epoch for batch, _ in whole} >= {0, 1, 2}
    by_row = {(batch.epoch, number): row for batch, rows in whole for number, row in zip(batch.rows, rows, strict=True)}
    assert any(by_row[0, number] != row for (epoch, number), row in by_row.items() if epoch == 1 and (0, number) in by_row)
    for start in range(40):
        assert walk(start, 3) == whole[start : start + 3]
    assert walk(0, 42) == whole


@pytest.mark.parametrize("no_duplicates", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_processes_share_the_batches_of_one(drawn: TrainingRows, size: int, no_duplicates: bool) -> None:
    def feed(rank: int, processes: int, start: int = 0) -> list[dict[str, Any]]:
        order = BatchOrder(drawn, size=8, seed=3, no_duplicates=no_duplicates)

        def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            return {"lengths": torch.tensor([len(row["query"]) for row in rows])}

        return list(Feed(order, drawn, collate, Processes(rank, processes), start=start, count=17 - start))

    alone = feed(0, 1)
    assert len(alone) == 17
    assert {batch[EXAMPLES][0]["epoch"] for batch in alone} >= {0, 1, 2}
    if no_duplicates:
        for batch in alone:
            assert len(set.union(*(texts(row) for row in batch[EXAMPLES]))) == 8 * 4
    parts = [feed(rank, size) for rank in range(size)]
    for whole, *shared in zip(alone, *parts, strict=True):
        assert [row for part in shared for row in part[EXAMPLES]] == whole[EXAMPLES]
        assert torch.cat([part["lengths"] for part in shared]).equal(whole["lengths"])
        assert {len(part[EXAMPLES]) for part in shared} == {8 // size}
        assert set(whole[EXAMPLES][0]) == {"row", "epoch", "query", "document_1", "document_2", "document_3"}
    assert feed(0, 1, start=9) == [{"lengths": pytest.approx(batch["lengths"]), EXAMPLES: batch[EXAMPLES]} for batch in alone[9:]]


def test_a_feed_knows_how_many_are_left(drawn: TrainingRows) -> None:
    order = BatchOrder(drawn, size=8, seed=3, no_duplicates=False)
    feed = Feed(order, drawn, lambda rows: {}, Processes(), start=5, count=3)
    assert len(feed) == len(list(feed)) == 3


def test_rows_and_columns_say_the_same(drawn: TrainingRows) -> None:
    columns, rows = read_columns(drawn, [7, 3]), read_rows(drawn, [7, 3])
    assert [row["query"] for row in rows] == columns["query"] == [drawn.dataset[7]["query"], drawn.dataset[3]["query"]]
    assert all(list(row) == list(columns) for row in rows)


def test_too_few_rows(make_rows: MakeRows) -> None:
    rows = make_rows(SHARED[:5])
    with pytest.raises(InputError, match=r"data\.train: 5 rows are fewer than one batch of 6; lower training\.batch_size"):
        BatchOrder(rows, size=6, seed=1, no_duplicates=False)
    BatchOrder(rows, size=5, seed=1, no_duplicates=False)


def test_rows_that_fill_no_batch(make_rows: MakeRows) -> None:
    rows = make_rows([{"query": "the same", "positive": f"answer {place}"} for place in range(9)])
    with pytest.raises(InputError, match=r"data\.train: 9 rows do not fill one batch of 2 without a repeated text; lower"):
        next(BatchOrder(rows, size=2, seed=1, no_duplicates=True).batches(0))


def test_rows_that_are_left_out_are_told_of(make_rows: MakeRows, caplog: pytest.LogCaptureFixture) -> None:
    # Nine of the 16 rows have one query: a first batch takes all eight queries there are, and the rest do not make a second.
    rows = make_rows([{"query": f"query {place if place < 8 else 0}", "positive": f"answer {place}"} for place in range(16)])
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        found = first(BatchOrder(rows, size=8, seed=1, no_duplicates=True), 3)
    assert [batch.epoch for batch in found] == [0, 1, 2]
    assert [message.partition(";")[0] for message in caplog.messages] == [
        f"epoch {epoch} left out 8 of 16 rows, for they repeat texts" for epoch in (1, 2)
    ]


def test_nothing_is_said_of_a_few(make_rows: MakeRows, caplog: pytest.LogCaptureFixture) -> None:
    # The last two rows of the first epoch share a query: one row in a hundred.
    last = torch.randperm(200, generator=torch.Generator().manual_seed(1)).tolist()[-2:]
    rows = make_rows([{"query": "shared" if place in last else f"query {place}", "positive": f"answer {place}"} for place in range(200)])
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        found = first(BatchOrder(rows, size=2, seed=1, no_duplicates=True), 110)
    assert [batch.epoch for batch in found] == [0] * 99 + [1] * 11
    assert caplog.messages == []
