"""Dropout on a CPU: what it drops, what the backward pass makes of it, and that no tensor is as large as all attention weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from quiver.encoder.attention import attend
from quiver.encoder.attention.dispatch import attend_dropping, length_groups
from quiver.encoder.dropout import DROPOUT_CHUNK, DropoutMask
from quiver.encoder.packing import PackedBatch, pack_ids
from tests.largest_tensor import LargestTensor

PROBABILITY = 0.25


def batch_of(lengths: tuple[int, ...], keys: list[int] | None = None) -> PackedBatch:
    return pack_ids([[5] * length for length in lengths], key_lengths=keys)


@pytest.fixture(params=[2**18, 500, 7], ids=lambda size: f"chunks of {size}")
def chunk(request: pytest.FixtureRequest) -> int:
    """Everything in one chunk, several (sequence, head) pairs per chunk, some queries of one pair per chunk."""
    size: int = request.param
    return size


def dropping(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, probability: float, chunk: int = DROPOUT_CHUNK) -> Tensor:
    """Attention that drops weights, which `attend` uses for sequences that are not all short."""
    return attend_dropping(q, k, v, length_groups(batch), probability, chunk=chunk)


def drawn(batch: PackedBatch, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(batch.num_tokens, heads, width, generator=generator, requires_grad=True) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("lengths", [(20,), (1,), (7, 20, 7, 1), (16,) * 5], ids=str)
@pytest.mark.parametrize("keys", [False, True], ids=["all keys", "some keys"])
def test_dropping_attention_is_its_definition(chunk: int, lengths: tuple[int, ...], keys: bool) -> None:
    """The mask is read off values that are unit vectors; with it, autograd through the written-out formula gives the same."""
    heads, width = 3, 24
    limits = [max(1, length // 2) for length in lengths] if keys else list(lengths)
    batch = batch_of(lengths, limits if keys else None)
    q, k, v = drawn(batch, heads, width)
    units = torch.zeros(batch.num_tokens, heads, width)
    for start, length in zip(batch.cu_seqlens.tolist(), lengths, strict=False):
        units[start : start + length, :, :length] = torch.eye(length)[:, None]
    torch.manual_seed(11)
    with torch.no_grad():
        weights = dropping(q, k, units, batch, PROBABILITY, chunk)
    torch.manual_seed(11)
    found = dropping(q, k, v, batch, PROBABILITY, chunk)
    expected = []
    for start, length, limit in zip(batch.cu_seqlens.tolist(), lengths, limits, strict=False):
        rows = slice(start, start + length)
        mask = (weights[rows, :, :limit] != 0).transpose(0, 1)  # (H, n, keys)
        scores = torch.einsum("ihk,jhk->hij", q[rows], k[rows][:limit]) * width**-0.5
        dropped = scores.softmax(-1) * mask / (1 - PROBABILITY)
        expected.append(torch.einsum("hij,jhk->ihk", dropped, v[rows][:limit]))
    reference = torch.cat(expected)
    torch.testing.assert_close(found, reference, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(4))
    for ours, theirs in zip(
        torch.autograd.grad(found, (q, k, v), upstream), torch.autograd.grad(reference, (q, k, v), upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6)


def test_each_weight_is_dropped_independently_with_the_given_probability() -> None:
    """Over heads, queries and keys the share is that of a binomial draw, and neighbours agree no more often than chance."""
    batch, width = batch_of((64,) * 20), 64
    q = torch.zeros(batch.num_tokens, 6, width)
    units = torch.eye(width).repeat(20, 1)[:, None].expand(-1, 6, -1).contiguous()
    torch.manual_seed(0)
    kept = attend(q, q, units, batch, None, dropout=PROBABILITY).ne(0).float()  # (N, H, keys)
    deviation = (PROBABILITY * (1 - PROBABILITY) / kept.numel()) ** 0.5
    assert abs(1 - PROBABILITY - kept.mean().item()) < 4 * deviation
    both = 0.75**2 + 0.25**2
    for first, second in ((kept[1:], kept[:-1]), (kept[:, 1:], kept[:, :-1]), (kept[..., 1:], kept[..., :-1])):
        agree = (first == second).float()
        assert abs(agree.mean().item() - both) < 5 * (both * (1 - both) / agree.numel()) ** 0.5


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.3, 0.9, 1e-9, 0.9999999])
def test_the_probability_is_rounded_to_the_nearest_level(probability: float) -> None:
    """Something is always dropped, and something kept."""
    level = 2**-8
    kept = DropoutMask(probability, seed=1)
    taken = 1 - 1 / kept.scale
    assert level * 0.999 <= taken <= 1 - level * 0.999
    if level < probability < 1 - level:
        assert abs(taken - probability) <= level / 2 * 1.001
    share = 1 - kept.fill(torch.empty(2**20)).mean(dtype=torch.float64).item()
    assert abs(share - taken) < 5 * (taken * (1 - taken) / 2**20) ** 0.5


def test_checkpointing_draws_the_same_again() -> None:
    """Gradients through a checkpointed layer are those without checkpointing."""
    batch = batch_of((70, 9))
    q, k, v = drawn(batch, 2, 8)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, batch, None, dropout=0.3)

    torch.manual_seed(2)
    plain = torch.autograd.grad(layer(q, k, v).square().sum(), (q, k, v))
    torch.manual_seed(2)
    again = torch.autograd.grad(checkpoint(layer, q, k, v, use_reentrant=False).square().sum(), (q, k, v))
    assert all(torch.equal(*pair) for pair in zip(plain, again, strict=True))


def test_autocast_takes_no_part_in_it() -> None:
    """A float32 call under autocast is the call without it, to the bit, and its gradients are."""
    batch = batch_of((80,))
    q, k, v = drawn(batch, 2, 16)
    found = []
    for enabled in (False, True):
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            mixed = attend(q, k, v, batch, None, dropout=0.1)
            found.append((mixed, *torch.autograd.grad(mixed.square().sum(), (q, k, v))))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_no_tensor_is_as_large_as_the_weights() -> None:
    batch = batch_of((1500,))
    q, k, v = drawn(batch, 4, 8)
    with LargestTensor() as largest:
        attend(q, k, v, batch, None, dropout=0.1).sum().backward()  # type: ignore[no-untyped-call]
    assert 0 < largest.elements <= 3 * DROPOUT_CHUNK < 4 * 1500**2
