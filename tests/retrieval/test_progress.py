"""Slices of work between which a progress bar moves."""

from __future__ import annotations

import pytest

from quiver.retrieval.progress import timed_slices


@pytest.mark.parametrize(
    ("scan", "item", "most", "sizes"),
    [
        (0.0, 0.001, None, {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}),  # until a slice takes a second
        (0.0, 0.001, 100, {1, 2, 4, 8, 16, 32, 64, 100}),
        (0.0, 20.0, None, {1, 2}),  # an item takes longer than a second
        (30.0, 1.0, None, {1, 2, 4, 8, 16, 32, 64}),  # every slice reads the corpus from disk, which longer slices do less often
    ],
)
def test_slices_take_about_a_second_and_grow_where_that_saves_time(scan: float, item: float, most: int | None, sizes: set[int]) -> None:
    work, seen = [0.0], list[slice]()
    for part in timed_slices(5001, most=most, clock=lambda: sum(work)):
        work.append(scan + item * (part.stop - part.start))
        seen.append(part)
    assert [position for part in seen for position in range(part.start, part.stop)] == list(range(5001))
    assert {part.stop - part.start for part in seen[:-1]} == sizes


def test_there_are_no_slices_of_nothing() -> None:
    assert list(timed_slices(0)) == []
