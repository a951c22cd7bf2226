from __future__ import annotations

import pytest

from quiver.retrieval.training.data.prepare import SAMPLE_BLOCK, RowSample
from quiver.retrieval.training.data.sources import Example


def chosen(rows: int, sample: RowSample, block: int = SAMPLE_BLOCK) -> tuple[list[int], int]:
    """The rows sampled from a stream, and the number of rows written."""
    written: list[Example] = []
    for start in range(0, rows, block):
        for example in sample.wanted([Example(str(number), "", [], []) for number in range(start, min(rows, start + block))]):
            sample.add(example)
            written.append(example)
    return [int(written[number].location) for number in sample.order().tolist()], len(written)


def test_shuffling_is_a_permutation_by_seed() -> None:
    orders = [chosen(3000, RowSample(shuffle=True, limit=None, seed=seed))[0] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(3000))


@pytest.mark.parametrize("limit", [1, 10, 1500, 20_000, 30_000])
def test_a_limit_takes_the_beginning_of_the_shuffled_order(limit: int) -> None:
    whole, _ = chosen(20_000, RowSample(shuffle=True, limit=None, seed=3))
    part, written = chosen(20_000, RowSample(shuffle=True, limit=limit, seed=3))
    assert part == whole[:limit]
    assert chosen(20_000, RowSample(shuffle=True, limit=limit, seed=3), block=7)[0] == part
    if limit <= 1500:
        assert written < 9000  # of 20,000: what is not wanted is hardly written
