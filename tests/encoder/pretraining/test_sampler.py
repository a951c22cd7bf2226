"""The order of pieces: frequency per pass, continuation after a restored state, and bounded memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.encoder.pretraining.packing import PieceSampler, Share, cut


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 20), st.integers(0, 9))
def test_cut_covers_every_token_once_and_no_document_boundary(lengths: list[int], room: int, begin: int) -> None:
    ends = begin + np.cumsum(lengths)
    offsets, sizes = cut(ends, room, begin=begin)
    covered = [token for offset, size in zip(offsets, sizes, strict=True) for token in range(offset, offset + size)]
    assert covered == list(range(begin, int(ends[-1])))
    assert sizes.max() <= room
    assert set(ends.tolist()) <= set((offsets + sizes).tolist())
    assert len(offsets) == sum(-(-length // room) for length in lengths)


def test_a_document_of_a_million_tokens_is_cut() -> None:
    offsets, sizes = cut(np.array([7, 1_000_007, 1_000_010]), 1022)
    assert len(offsets) == 1 + 979 + 1
    assert sizes[:3].tolist() == [7, 1022, 1022]
    assert sizes[-2:].tolist() == [1_000_000 - 978 * 1022, 3]


LENGTHS = np.random.default_rng(5).integers(1, 30, size=400)
ENDS = np.cumsum(LENGTHS)
ROOM = 9


def sampler(times: list[tuple[int, float]], *, window: int = 1 << 22, block: int = 4) -> PieceSampler:
    """Sampler over consecutive sources, given as (number of documents, times per pass)."""
    lasts = np.cumsum([count for count, _ in times]).tolist()
    shares = [Share(last - count, last, often) for last, (count, often) in zip(lasts, times, strict=True)]
    return PieceSampler(ENDS, shares, room=ROOM, seed=(3, 0), block=block, window=window)


def a_pass(found: PieceSampler) -> list[tuple[int, int]]:
    """Pieces of the current pass; also takes the first piece of the next one."""
    number, held = found.passes, []
    while (piece := found.take()) and found.passes == number:
        held.append((piece.offset, piece.length))
    return held


def pieces(first: int, last: int) -> list[tuple[int, int]]:
    offsets, lengths = cut(ENDS[first:last], ROOM, begin=int(ENDS[first - 1]) if first else 0)
    return list(zip(offsets.tolist(), lengths.tolist(), strict=True))


@pytest.mark.parametrize("window", [1 << 22, 100, 7, 1])
@pytest.mark.parametrize("documents", [1, 8, 400])
def test_a_pass_contains_every_piece_once(window: int, documents: int) -> None:
    held = a_pass(sampler([(documents, 1.0)], window=window))
    assert sorted(held) == pieces(0, documents)


def test_windows_contain_pieces_from_the_whole_corpus() -> None:
    found = sampler([(400, 1.0)], window=100, block=1)
    everything = pieces(0, 400)
    number = {piece: place for place, piece in enumerate(everything)}
    first = [number[(piece.offset, piece.length)] for piece in (found.take() for _ in range(100))]
    quarters = Counter(place * 4 // len(everything) for place in first)
    assert all(quarters[quarter] >= 10 for quarter in range(4)), quarters
    assert first != sorted(first)


@pytest.mark.parametrize("window", [1 << 22, 60])
def test_upsampled_sources_repeat_their_pieces(window: int) -> None:
    found = sampler([(50, 3.0), (50, 1.0), (300, 0.5)], window=window)
    passes = [Counter(a_pass(found)) for _ in range(2)]
    for held in passes[:1]:  # the first piece of the second pass was taken with the first pass
        assert all(held[piece] == 3 for piece in pieces(0, 50))
        assert all(held[piece] == 1 for piece in pieces(50, 100))
        halves = [held[piece] for piece in pieces(100, 400)]
        assert set(halves) == {0, 1}
        assert abs(sum(halves) - len(halves) / 2) < 5 * (len(halves) / 4) ** 0.5
    assert passes[0] != passes[1], "each pass draws another half"


def test_a_source_outside_the_mix_is_not_read() -> None:
    shares = [Share(10, 20, 1.0), Share(300, 310, 2.0)]
    held = Counter(a_pass(PieceSampler(ENDS, shares, room=ROOM, seed=(1,), block=4, window=50)))
    assert held == Counter(pieces(10, 20)) + Counter(pieces(300, 310)) + Counter(pieces(300, 310))


@pytest.mark.parametrize("window", [1 << 22, 40])
def test_a_restored_sampler_continues(window: int) -> None:
    times = [(5, 1.0), (5, 2.5), (10, 0.5), (3, 0.25), (4, 3.0)]
    whole = sampler(times, window=window)
    for taken in (3, 13, 40, 61):
        for _ in range(taken):
            whole.take()
        resumed = sampler(times, window=window)
        resumed.restore(whole.state())
        ahead = sampler(times, window=window)
        ahead.restore(whole.state())
        expected = [whole.take() for _ in range(200)]
        assert [resumed.take() for _ in range(200)] == expected
        assert resumed.passes == whole.passes
    assert whole.passes > 4
