"""Pooling of packed hidden states, compared with values computed by hand."""

from __future__ import annotations

import pytest
import torch

from quiver.encoder import pack_ids
from quiver.retrieval.models.batches import pool

BATCH = pack_ids([[9, 9, 9], [9]])
STATES = torch.tensor([[1.0, -1.0], [2.0, -2.0], [6.0, -6.0], [4.0, 5.0]])


@pytest.mark.parametrize(
    ("mode", "skip", "expected"),
    [
        ("cls", 0, [[1.0, -1.0], [4.0, 5.0]]),
        ("lasttoken", 0, [[6.0, -6.0], [4.0, 5.0]]),
        ("mean", 0, [[3.0, -3.0], [4.0, 5.0]]),
        ("max", 0, [[6.0, -1.0], [4.0, 5.0]]),
        ("mean", 1, [[4.0, -4.0], [0.0, 0.0]]),
    ],
)
def test_pooling_gives_values_computed_by_hand(mode: str, skip: int, expected: list[list[float]]) -> None:
    assert pool(STATES, BATCH, mode, skip=skip).tolist() == expected


def test_pooling_in_half_precision_does_not_saturate() -> None:
    states = torch.full((4000, 1), 3.0, dtype=torch.bfloat16)
    mean = pool(states, pack_ids([[1] * 4000]), "mean")
    assert mean.dtype == torch.float32
    assert mean.item() == 3.0
