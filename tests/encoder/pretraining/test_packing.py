"""The packer: no piece lost or repeated, no row too long, rows nearly full, no piece waits forever, state restored."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.encoder.pretraining.packing import SPECIAL, Piece, SequencePacker


def stream(lengths: list[int], *, first: int = 0) -> Callable[[], Piece]:
    numbers = itertools.count(first)

    def take() -> Piece:
        serial = next(numbers)
        return Piece(0, lengths[serial % len(lengths)], serial)

    return take


def used(row: list[Piece]) -> int:
    return sum(piece.length + SPECIAL for piece in row)


def best_fit(waiting: list[Piece], count: int, room: int) -> list[list[Piece]]:
    """Best-fit packing by comparing every piece with every row."""
    rows: list[list[Piece]] = [[] for _ in range(count)]
    for piece in waiting:
        fitting = [(room - used(row), place) for place, row in enumerate(rows) if used(row) + piece.length + SPECIAL <= room]
        if fitting:
            rows[min(fitting)[1]].append(piece)
    return rows


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.floats(1, 4),
    st.integers(32, 90),
)
def test_no_piece_is_dropped_or_repeated_and_no_row_is_too_long(lengths: list[int], counts: list[int], buffer: float, room: int) -> None:
    packer = SequencePacker(stream(lengths), buffer=buffer)
    serials: list[int] = []
    for count in counts:
        rows = packer.rows(count, room=room)
        assert len(rows) == count
        assert all(0 < used(row) <= room for row in rows), "no row is empty"
        shortest = min((piece.length + SPECIAL for piece in packer.waiting), default=room + 1)
        assert all(room - used(row) < shortest for row in rows), "no waiting piece would have fitted"
        serials += [piece.serial for row in rows for piece in row]
    waiting = [piece.serial for piece in packer.waiting]
    assert waiting == sorted(waiting)
    assert sorted([*serials, *waiting]) == list(range(len(serials) + len(waiting)))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 5), st.integers(32, 90))
def test_packing_is_best_fit_in_order_of_arrival(lengths: list[int], count: int, room: int) -> None:
    packer = SequencePacker(stream(lengths), buffer=3)
    probe = SequencePacker(stream(lengths), buffer=3)
    for _ in range(3):
        probe.fill(count * room * 3)
        assert packer.rows(count, room=room) == best_fit(list(probe.waiting), count, room)
        probe.rows(count, room=room)


@pytest.mark.parametrize(
    ("context", "micro_batch", "mean"),
    [(1024, 96, 600.0), (8192, 12, 3000.0), (256, 16, 90.0), (256, 16, 5000.0)],
    ids=["base", "long", "small", "split documents"],
)
def test_rows_are_more_than_99_percent_full(context: int, micro_batch: int, mean: float) -> None:
    """Lengths of documents are log-normal, as in natural text; documents longer than the context are split."""
    generator = np.random.default_rng(3)
    documents = np.maximum(1, generator.lognormal(np.log(mean) - 0.5, 1.0, size=4000)).astype(int)
    room = context - SPECIAL
    lengths = [min(room, length - start) for length in documents.tolist() for start in range(0, length, room)]
    generator.shuffle(lengths)
    packer = SequencePacker(stream(lengths), buffer=5)
    rows = [row for _ in range(12) for row in packer.rows(4, room=micro_batch * context)]
    share = sum(map(used, rows)) / (len(rows) * micro_batch * context)
    assert share > 0.99


def test_a_restored_packer_continues() -> None:
    lengths = [5, 30, 11, 2, 24, 9, 17]
    whole = SequencePacker(stream(lengths), buffer=3)
    whole.rows(2, room=64)
    state, taken = whole.state(), 1 + max(piece.serial for piece in whole.waiting)
    resumed = SequencePacker(stream(lengths, first=taken), buffer=3)
    resumed.restore(state)
    assert resumed.waiting == whole.waiting
    for count in (1, 3, 2):
        assert resumed.rows(count, room=64) == whole.rows(count, room=64)
