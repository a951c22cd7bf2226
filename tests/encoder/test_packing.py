"""Packing: literal layouts, nothing dropped, order kept, bad input refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quiver.encoder import pack, pack_ids, pack_padded
from quiver.encoder.packing import copy_to


def test_a_batch_written_out() -> None:
    batch = pack_ids([[7, 8], [9], [4, 5, 6]])
    assert batch.ids.tolist() == [7, 8, 9, 4, 5, 6]
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 6]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.offsets == (0, 2, 3, 6)
    assert batch.positions.tolist() == [0, 1, 0, 0, 1, 2]
    assert (batch.max_seqlen, batch.num_tokens, len(batch), batch.rows, batch.lengths) == (3, 6, 3, (0, 1, 2), (2, 1, 3))


def test_batches_are_filled_longest_first() -> None:
    batches = list(pack([[1], [2] * 3, [3] * 2, [4] * 3, [5]], max_tokens=5))
    assert [batch.rows for batch in batches] == [(1,), (3, 2), (0, 4)]
    assert [batch.ids.tolist() for batch in batches] == [[2, 2, 2], [4, 4, 4, 3, 3], [1, 5]]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=12), max_size=20), st.integers(12, 40))
def test_packing_loses_nothing(sequences: list[list[int]], budget: int) -> None:
    found = {}
    for batch in pack(sequences, max_tokens=budget):
        assert 1 <= batch.num_tokens <= budget
        states = batch.unpack(batch.ids[:, None])
        found.update(zip(batch.rows, [state[:, 0].tolist() for state in states], strict=True))
    assert [found[row] for row in range(len(sequences))] == sequences


@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=8))
def test_padding_is_packing_backwards(sequences: list[list[int]]) -> None:
    batch = pack_ids(sequences)
    padded = batch.pad(batch.ids[:, None])[..., 0]  # (B, S)
    assert padded.shape == (len(sequences), max(map(len, sequences)))
    again = pack_padded(padded, padded != 0)
    assert torch.equal(again.ids, batch.ids)
    assert torch.equal(again.positions, batch.positions)
    assert torch.equal(again.cu_seqlens, batch.cu_seqlens)
    assert again.offsets == batch.offsets


def test_tensors_keep_values_and_dtypes_on_their_way_to_a_device() -> None:
    tensors = [torch.arange(5), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.empty(0), torch.tensor([True, False])]
    for device in ("cpu", *["cuda"] * torch.cuda.is_available()):
        moved = copy_to(device, *tensors)
        assert all(one.device.type == device and torch.equal(one.cpu(), other) for one, other in zip(moved, tensors, strict=True))
        assert [one.dtype for one in moved] == [other.dtype for other in tensors]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pack_ids([]), "at least one sequence"),
        (lambda: pack_ids([[1], []]), "sequence 1 is empty"),
        (lambda: pack_ids([[1], []], rows=[5, 9]), "sequence 9 is empty"),
        (lambda: pack_ids([[1, 2]], key_lengths=[3]), "key length must be in 1..2, got 3"),
        (lambda: list(pack([[1] * 5], max_tokens=4)), "sequence 0 has 5 tokens; it must have 1 to 4"),
        (lambda: list(pack([[1], []], max_tokens=4)), "sequence 1 has 0 tokens"),
        (lambda: pack_padded(torch.ones(2, 3), torch.ones(3, 2)), "must share one shape"),
        (lambda: pack_padded(torch.ones(2, 2), torch.tensor([[1, 1], [0, 0]])), "row 1 contains only padding"),
        (lambda: pack_padded(torch.ones(1, 2), torch.tensor([[0, 1]])), "padding must be on the right"),
    ],
)
def test_misuse_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
