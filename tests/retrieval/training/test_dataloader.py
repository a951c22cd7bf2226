"""Order of the rows: each once per epoch, no text twice in a batch, equal from any batch on and for any number of processes."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from quiver.encoder import InputError
from quiver.encoder.training.processes import Processes
from quiver.encoder.training.trainer import TrainingBatch
from quiver.retrieval.training.data import TrainingRows, prepare_rows
from quiver.retrieval.training.dataloader import Batch, BatchOrder, Collator, DataLoader, KeyedRow, without_shared_texts
from quiver.retrieval.training.recipe import DataSection

SHARED = [
    {
        "query": f"query {place % 17}",
        "positive": f"answer {place}",
        "negative": f"answer {(place + 8) % 50}" if place % 3 else f"other {place}",
    }
    for place in range(50)
]
"""Rows in which every query occurs two or three times, and most negatives are positives of other rows."""

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
    """64 rows whose two negatives are drawn in every epoch."""
    section = DataSection(train=(str(rows_file),), document_fields=("positive", "negatives"), documents_per_row=3, negatives="random")
    return prepare_rows(section, tmp_path / "work", seed=5)


def first(order: BatchOrder, count: int) -> list[Batch]:
    return list(islice(order.batches(), count))


def texts(row: dict[str, Any]) -> set[str]:
    return {value for value in row.values() if isinstance(value, str)}


@pytest.mark.parametrize("no_duplicates", [False, True])
def test_every_epoch_has_every_row_once_in_another_order(make_rows: MakeRows, no_duplicates: bool) -> None:
    rows = make_rows([{"query": f"query {place}", "positive": f"answer {place}"} for place in range(66)])
    order = BatchOrder(rows, size=4, seed=3, no_duplicates=no_duplicates)
    assert order.per_epoch == 16
    found = first(order, 48)
    assert [batch.epoch for batch in found] == [0] * 16 + [1] * 16 + [2] * 16
    assert [batch.number for batch in found] == [*range(1, 17)] * 3
    assert [batch.last for batch in found] == [*[False] * 15, True] * 3
    for epoch in range(3):
        seen = [row for batch in found[16 * epoch : 16 * epoch + 16] for row in batch.rows]
        assert len(set(seen)) == 64  # two do not fill a batch
        assert seen == torch.randperm(66, generator=torch.Generator().manual_seed(3 + epoch)).tolist()[:64]
    assert first(BatchOrder(rows, size=4, seed=3, no_duplicates=no_duplicates), 48) == found
    assert first(BatchOrder(rows, size=4, seed=9, no_duplicates=no_duplicates), 48) != found


def test_no_text_occurs_twice_in_a_batch(make_rows: MakeRows) -> None:
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


def test_a_deferred_row_comes_first_in_the_next_batch(make_rows: MakeRows) -> None:
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


@pytest.mark.parametrize("no_duplicates", [False, True])
def test_the_order_continues_from_any_batch(drawn: TrainingRows, no_duplicates: bool) -> None:
    """Rows, epochs and negatives after batch 5 are those of an order read from the beginning."""

    def walk(count: int, *start: int) -> list[tuple[Batch, list[dict[str, Any]]]]:
        order = BatchOrder(drawn, size=4, seed=3, no_duplicates=no_duplicates)
        drawn.set_epoch(77)  # whatever it was
        return [(batch, [drawn[row] for row in batch.rows]) for batch in islice(order.batches(*start), count)]

    whole = walk(42)
    assert {batch.epoch for batch, _ in whole} >= {0, 1, 2}
    by_row = {(batch.epoch, number): row for batch, rows in whole for number, row in zip(batch.rows, rows, strict=True)}
    assert any(by_row[0, number] != row for (epoch, number), row in by_row.items() if epoch == 1 and (0, number) in by_row)
    assert walk(3, 0, 0) == whole[:3]
    for place, (batch, _) in enumerate(whole[:39], start=1):
        assert walk(3, *batch.next_position) == whole[place : place + 3]
    assert walk(42) == whole


def walked_over(keys: list[frozenset[bytes]], size: int) -> list[list[int]]:
    """The batches by definition: each takes, of all remaining rows in order, those that fit."""
    left, batches = list(range(len(keys))), []
    while True:
        taken: list[int] = []
        for row in left:
            if len(taken) < size and all(keys[row].isdisjoint(keys[other]) for other in taken):
                taken.append(row)
        if len(taken) < size:
            return batches
        batches.append(taken)
        left = [row for row in left if row not in taken]


@pytest.mark.parametrize("texts_of_each", [1, 2, 4])
def test_batches_equal_those_of_a_walk_over_all_remaining_rows(texts_of_each: int) -> None:
    draw, put_off = random.Random(5), 0
    for known in (4, 9, 30, 200):  # from a text in every second row to hardly one twice
        keys = [frozenset(b"%d" % int(known * draw.random() ** 2) for _ in range(texts_of_each)) for _ in range(120)]
        for size in (1, 2, 3, 8):
            rows = (KeyedRow(number, key) for number, key in enumerate(keys))
            found = list(without_shared_texts(rows, size))
            assert found == walked_over(keys, size)
            put_off += [row for batch in found for row in batch] != list(range(len(found) * size))
    assert put_off >= 6


class CountedKeys(frozenset[bytes]):
    """Keys of a row that count how often they are compared."""

    comparisons = 0

    def __and__(self, other: AbstractSet[object]) -> frozenset[bytes]:
        CountedKeys.comparisons += 1
        return super().__and__(other)


@pytest.mark.parametrize("no_duplicates", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_several_processes_share_the_batches_of_one(drawn: TrainingRows, size: int, no_duplicates: bool) -> None:
    def feed(rank: int, processes: int, start: tuple[int, int] = (0, 0), count: int = 17) -> list[TrainingBatch]:
        order = BatchOrder(drawn, size=8, seed=3, no_duplicates=no_duplicates)

        return list(DataLoader(order, drawn, Collate(), Processes(rank, processes), start=start, count=count))

    alone = feed(0, 1)
    assert len(alone) == 17
    assert {batch.examples[0]["epoch"] for batch in alone} >= {0, 1, 2}
    if no_duplicates:
        for batch in alone:
            assert len(set.union(*(texts(row) for row in batch.examples))) == 8 * 4
    parts = [feed(rank, size) for rank in range(size)]
    for whole, *shared in zip(alone, *parts, strict=True):
        assert [row for part in shared for row in part.examples] == whole.examples
        assert {part.next_position for part in shared} == {whole.next_position}
        assert torch.cat([part.inputs["lengths"] for part in shared]).equal(whole.inputs["lengths"])
        assert {len(part.examples) for part in shared} == {8 // size}
        assert set(whole.examples[0]) == {"row", "epoch", "query", "document_1", "document_2", "document_3"}
        assert whole.counts["texts"] == sum(part.counts["texts"] for part in shared) == 8
        assert whole.tokens == sum(part.tokens for part in shared) == int(whole.inputs["lengths"].sum())
        assert whole.counts["truncated"] == sum(part.counts["truncated"] for part in shared)
    assert sum(batch.counts["truncated"] for batch in alone) > 5
    again = feed(0, 1, start=alone[8].next_position, count=8)
    assert [(batch.examples, batch.next_position) for batch in again] == [(batch.examples, batch.next_position) for batch in alone[9:]]


class Collate(Collator):
    """Returns the length of each query; one in eight counts as truncated."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.calls = 0

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        self.calls += 1
        lengths = [len(row["query"]) for row in rows]
        self.counts["texts"] += len(rows)
        self.counts["tokens"] += sum(lengths)
        self.counts["truncated"] += sum("everything" in row["query"] for row in rows)
        return {"lengths": torch.tensor(lengths)}


def test_an_abandoned_dataloader_leaves_no_thread(drawn: TrainingRows) -> None:
    before = threading.active_count()
    batches = iter(DataLoader(BatchOrder(drawn, size=8, seed=3, no_duplicates=True), drawn, Collate(), Processes(), start=(0, 0), count=4))
    next(batches)
    assert threading.active_count() == before + 1
    del batches
    assert threading.active_count() == before


def test_fewer_rows_than_a_batch_are_refused(make_rows: MakeRows) -> None:
    rows = make_rows(SHARED[:5])
    with pytest.raises(InputError, match=r"data\.train: 5 rows do not fill one batch of 6; lower training\.batch_size"):
        BatchOrder(rows, size=6, seed=1, no_duplicates=False)
    BatchOrder(rows, size=5, seed=1, no_duplicates=False)


def test_rows_that_fill_no_batch_without_repeated_texts_are_refused(make_rows: MakeRows) -> None:
    rows = make_rows([{"query": "the same", "positive": f"answer {place}"} for place in range(9)])
    with pytest.raises(InputError, match=r"data\.train: 9 rows do not fill one batch of 2 without a repeated text; lower"):
        next(BatchOrder(rows, size=2, seed=1, no_duplicates=True).batches())


def test_many_left_out_rows_cause_a_warning(make_rows: MakeRows, caplog: pytest.LogCaptureFixture) -> None:
    # Nine of the 16 rows have one query: a first batch takes all eight queries there are, and the rest do not make a second.
    rows = make_rows([{"query": f"query {place if place < 8 else 0}", "positive": f"answer {place}"} for place in range(16)])
    with caplog.at_level(logging.WARNING, logger="quiver.retrieval.training.dataloader"):
        found = first(BatchOrder(rows, size=8, seed=1, no_duplicates=True), 3)
        told = caplog.messages
        assert first(BatchOrder(rows, size=8, seed=1, no_duplicates=True, warn=False), 3) == found
    assert [(batch.epoch, batch.number, batch.last) for batch in found] == [(0, 1, True), (1, 1, True), (2, 1, True)]
    assert [message.partition(";")[0] for message in told] == [
        f"epoch {epoch} leaves out 8 of 16 rows because they repeat texts" for epoch in (1, 2, 3)
    ]
    assert caplog.messages == told, "one process tells it"
