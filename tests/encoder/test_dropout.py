"""Dropout on a CPU: what it drops, what the backward pass makes of it, and that no tensor is as large as all attention weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from quiver.encoder.attention import attend
from quiver.encoder.attention.packed import attend_dropping, length_groups
from quiver.encoder.dropout import DROPOUT_CHUNK, Dropout, DropoutMask, drop
from quiver.encoder.packing import PackedBatch, pack_ids

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
    groups = length_groups(batch)
    if groups.order is None or groups.inverse is None:
        return attend_dropping(q, k, v, groups, probability, chunk=chunk)
    q, k, v = (x[groups.order] for x in (q, k, v))
    return attend_dropping(q, k, v, groups, probability, chunk=chunk)[groups.inverse]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dropout_keeps_scales_and_passes_the_same_back(chunk: int, dtype: torch.dtype) -> None:
    x = torch.ones(33, 41, dtype=dtype).t().requires_grad_()  # not contiguous
    torch.manual_seed(5)
    y = drop(x, PROBABILITY, training=True, chunk=chunk)
    y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]
    assert set(y.flatten().tolist()) == {0.0, torch.tensor(4 / 3, dtype=dtype).item()}
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    assert abs(y.ne(0).double().mean().item() - 0.75) < 4 * (0.1875 / y.numel()) ** 0.5


@pytest.mark.parametrize(("bits", "level"), [(torch.int8, 2**-8), (torch.int16, 2**-16)])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.3, 0.9, 1e-9, 0.9999999])
def test_the_probability_is_rounded_to_the_nearest_level(bits: torch.dtype, level: float, probability: float) -> None:
    """Something is always dropped, and something kept."""
    kept = DropoutMask(probability, seed=1, bits=bits)
    taken = 1 - 1 / kept.scale
    assert level * 0.999 <= taken <= 1 - level * 0.999
    if level < probability < 1 - level:
        assert abs(taken - probability) <= level / 2 * 1.001
    share = 1 - kept.fill(torch.empty(2**20)).mean(dtype=torch.float64).item()
    assert abs(share - taken) < 5 * (taken * (1 - taken) / 2**20) ** 0.5


def test_nothing_everything_and_what_is_no_probability() -> None:
    """As torch has it."""
    x = torch.ones(100)
    assert torch.equal(drop(x, 0.0, training=True), x)
    assert torch.equal(Dropout(1.0)(x), torch.zeros(100))
    with pytest.raises(ValueError, match="probability"):
        drop(x, 1.5, training=True)


def test_module_drops_in_training_alone_and_follows_torchs_seed() -> None:
    module, x = Dropout(0.5), torch.ones(1000)
    torch.manual_seed(1)
    first, second = module(x), module(x)
    torch.manual_seed(1)
    assert torch.equal(module(x), first)
    assert not torch.equal(first, second)
    assert module.eval()(x) is x
    assert torch.equal(Dropout(0.0)(x), x)


def test_checkpointing_draws_the_same_again() -> None:
    """Gradients through a checkpointed layer are those without checkpointing."""
    batch = batch_of((70, 9))
    q, k, v = drawn(batch, 2, 8)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return drop(attend(q, k, v, batch, None, dropout=0.3), 0.3, training=True)

    torch.manual_seed(2)
    plain = torch.autograd.grad(layer(q, k, v).square().sum(), (q, k, v))
    torch.manual_seed(2)
    again = torch.autograd.grad(checkpoint(layer, q, k, v, use_reentrant=False).square().sum(), (q, k, v))
    assert all(torch.equal(*pair) for pair in zip(plain, again, strict=True))


def test_a_pass_without_gradients_is_replayed_with_them() -> None:
    """As GradCache does it: vectors first, then the same random state again for the gradients."""
    batch = batch_of((80, 70))
    q, k, v = drawn(batch, 2, 8)
    state = torch.get_rng_state()
    with torch.no_grad():
        first = drop(attend(q, k, v, batch, None, dropout=0.3), 0.3, training=True)
    torch.set_rng_state(state)
    again = drop(attend(q, k, v, batch, None, dropout=0.3), 0.3, training=True)
    assert again.requires_grad
    assert torch.equal(first, again)


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


def test_half_precision_is_that_of_the_result_alone() -> None:
    batch = batch_of((80,))
    wide = drawn(batch, 2, 16)
    half = tuple(x.detach().bfloat16().requires_grad_() for x in wide)
    torch.manual_seed(7)
    expected = attend(*(x.detach().float().requires_grad_() for x in half), batch, None, dropout=0.1)
    torch.manual_seed(7)
    mixed = attend(*half, batch, None, dropout=0.1)
    assert mixed.dtype is torch.bfloat16
    assert torch.equal(mixed, expected.bfloat16())


class _Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation gives."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor):
                self.values = max(self.values, one.numel())
        return result


def test_no_tensor_is_as_large_as_the_weights() -> None:
    batch = batch_of((1500,))
    q, k, v = drawn(batch, 4, 8)
    with _Largest() as largest:
        attend(q, k, v, batch, None, dropout=0.1).sum().backward()  # type: ignore[no-untyped-call]
    assert 0 < largest.values <= 3 * DROPOUT_CHUNK < 4 * 1500**2
