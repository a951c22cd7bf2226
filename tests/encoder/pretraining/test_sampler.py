"""The order of pieces: every one once a pass, upsampled as asked, the same again from its state."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from encoder.pretraining.sampler import PieceSampler, cut


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 20), st.integers(0, 9))
def test_cut_covers_every_token_once_and_no_document_boundary(lengths: list[int], room: int, begin: int) -> None:
    ends = begin + np.cumsum(lengths)
    offsets, sizes = cut(ends, room, begin=begin)
    covered = [token for offset, size in zip(offsets, sizes, strict=True) for token in range(offset, offset + size)]
    assert covered == list(range(begin, int(ends[-1])))
    assert sizes.max() <= room
    assert set(ends.tolist()) <= set((offsets + sizes).tolist())
    assert len(offsets) == sum(-(-length // room) for length in lengths)


def test_a_document_of_a_million_tokens() -> None:
    offsets, sizes = cut(np.array([7, 1_000_007, 1_000_010]), 1022)
    assert len(offsets) == 1 + 979 + 1
    assert sizes[:3].tolist() == [7, 1022, 1022]
    assert sizes[-2:].tolist() == [1_000_000 - 978 * 1022, 3]


def sampler(times: list[float], *, serial: int = 0) -> PieceSampler:
    count = len(times)
    return PieceSampler(np.arange(count) * 10, np.arange(count) + 1, np.array(times), seed=(3, 0), serial=serial)


def test_a_pass_holds_every_piece_once_in_another_order_than_the_last() -> None:
    found = sampler([1.0] * 50)
    first, second = ([found.take() for _ in range(50)] for _ in range(2))
    for held in (first, second):
        assert sorted(piece.offset for piece in held) == [place * 10 for place in range(50)]
        assert all(piece.length == piece.offset // 10 + 1 for piece in held)
    assert [piece.offset for piece in first] != [piece.offset for piece in second]
    assert [piece.serial for piece in first + second] == list(range(100))
    expected = np.random.Generator(np.random.PCG64DXSM([3, 0, 1]))
    expected.random(50)
    assert [piece.offset // 10 for piece in second] == expected.permutation(50).tolist()


def test_upsampling() -> None:
    found = sampler([3.0] * 20 + [1.0] * 20 + [0.5] * 400)
    passes: list[Counter[int]] = [Counter(), Counter()]
    while (piece := found.take()) and found.passes < 2:
        passes[found.passes][piece.offset // 10] += 1
    for held in passes:
        assert [held[place] for place in range(40)] == [3] * 20 + [1] * 20
        halves = [held[place] for place in range(40, 440)]
        assert set(halves) == {0, 1}
        assert 150 < sum(halves) < 250
    assert passes[0] != passes[1], "the half is drawn anew"


def test_it_goes_on_where_it_was() -> None:
    times = [1.0, 2.5, 0.5, 1.0, 0.25, 3.0]
    whole, resumed = sampler(times), sampler(times)
    for _ in range(13):
        whole.take()
    resumed.restore(whole.state())
    assert [resumed.take() for _ in range(40)] == [whole.take() for _ in range(40)]
    assert resumed.passes == whole.passes > 2
