"""The packed attention against its definition: every length, window and batch; gradients; key lengths; no leakage."""

from __future__ import annotations

import pytest
import torch

from quiver.encoder import PackedBatch, pack_ids
from quiver.encoder.attention import attend

LENGTHS = [(1,), (63,), (64, 65), (129,), (1000,), (1, 63, 64, 65, 129, 300, 1), (5,) * 40, (70, 3, 70, 3)]


def inputs(batch: PackedBatch, *, dtype: torch.dtype = torch.float64, grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(batch.num_tokens, 2, 8, generator=generator, dtype=dtype).requires_grad_(grad) for _ in range(3)]


def batch_of(lengths: tuple[int, ...], key_lengths: list[int] | None = None) -> PackedBatch:
    return pack_ids([[1] * length for length in lengths], key_lengths=key_lengths)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [None, 2, 62, 64, 128])
def test_packed_is_the_definition(lengths: tuple[int, ...], window: int | None) -> None:
    batch = batch_of(lengths)
    q, k, v = inputs(batch)
    expected = attend(q, k, v, batch, window, backend="reference")
    torch.testing.assert_close(attend(q, k, v, batch, window, backend="packed"), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("window", [None, 8, 16])
def test_tokens_beyond_the_key_length_only_read(window: int | None) -> None:
    batch = batch_of((40, 7, 12, 12), [5, 7, 1, 12])
    q, k, v = inputs(batch, grad=True)
    found = attend(q, k, v, batch, window, backend="packed")
    torch.testing.assert_close(found, attend(q, k, v, batch, window, backend="reference"), atol=1e-10, rtol=0)
    (gradient,) = torch.autograd.grad(found.sum(), v)
    assert gradient[5:40].abs().max() == 0  # nobody read them
    if window == 8:
        assert found[5 + 4 :][:20].abs().max() == 0  # and those that see nothing give zeros, not NaN


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(
    ("lengths", "key_share"), [((20, 20, 30), 1), ((90, 3, 40), 4), ((5, 130), 4), ((90, 3, 40), 1), ((5, 130), 1), ((300, 20), 4)]
)
def test_states_and_gradients_are_the_definitions(lengths: tuple[int, ...], key_share: int, window: int | None) -> None:
    batch = batch_of(lengths, [max(1, length // key_share) for length in lengths] if key_share > 1 else None)
    q, k, v = inputs(batch, grad=True)
    weight = torch.randn(batch.num_tokens, 2, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    results = []
    for backend in ("packed", "reference"):
        mixed = attend(q, k, v, batch, window, backend=backend)
        results.append((mixed, *torch.autograd.grad((mixed * weight).sum(), (q, k, v))))
        with torch.inference_mode():
            torch.testing.assert_close(attend(q, k, v, batch, window, backend=backend), mixed.detach(), atol=1e-10, rtol=0)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("window", [None, 32])
def test_sequences_do_not_leak_into_each_other(window: int | None) -> None:
    batch = batch_of((20, 50, 31))
    q, k, v = inputs(batch)
    before = attend(q, k, v, batch, window)
    k[20:70], v[20:70], q[20:70] = 1e3, -1e3, 1e3
    after = attend(q, k, v, batch, window)
    assert torch.equal(before[:20], after[:20])
    assert torch.equal(before[70:], after[70:])


def test_an_unknown_backend_is_named() -> None:
    batch = batch_of((2,))
    with pytest.raises(ValueError, match="packed, reference, got 'magic'"):
        attend(*inputs(batch), batch, None, backend="magic")


@pytest.mark.parametrize("lengths", [(1,), (300, 5), (129, 40, 129), (33,) * 4], ids=str)
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("keys", [False, True])
def test_alibi_is_the_definition(lengths: tuple[int, ...], window: int | None, keys: bool) -> None:
    batch = batch_of(lengths, [max(1, length // 2) for length in lengths] if keys else None)
    q, k, v = inputs(batch, grad=True)
    slopes = torch.tensor([0.5, 0.02])
    results = {}
    for backend in ("packed", "reference"):
        mixed = attend(q, k, v, batch, window, slopes=slopes, backend=backend)
        results[backend] = (mixed, *torch.autograd.grad(mixed.square().sum(), (q, k, v)))
        with torch.inference_mode():  # its own path: slices instead of whole tensors
            torch.testing.assert_close(attend(q, k, v, batch, window, slopes=slopes, backend=backend), mixed.detach(), atol=1e-10, rtol=0)
    for packed, reference in zip(results["packed"], results["reference"], strict=True):
        torch.testing.assert_close(packed, reference, atol=1e-6, rtol=0)  # the penalty is float32


@pytest.mark.parametrize("slopes", [None, torch.tensor([0.5, 0.02])], ids=["plain", "alibi"])
def test_long_batches_in_slices_are_the_definition(slopes: torch.Tensor | None) -> None:
    batch = batch_of((2500, 1, 700, 64, 2100))  # several slices of local blocks, borders inside and between them
    q, k, v = inputs(batch)
    with torch.inference_mode():
        mixed = attend(q, k, v, batch, 128, slopes=slopes, backend="packed")
        expected = attend(q, k, v, batch, 128, slopes=slopes, backend="reference")
    torch.testing.assert_close(mixed, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_alibi_in_training_keeps_no_weight_of_a_long_text(dropout: float) -> None:
    """The weights of both heads would be 18 million numbers, and so would ALiBi's penalty."""
    batch = batch_of((3000,))
    q, k, v = inputs(batch, dtype=torch.float32, grad=True)
    slopes = torch.tensor([0.5, 0.02])
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        torch.manual_seed(3)
        mixed = attend(q, k, v, batch, None, slopes=slopes, dropout=dropout, backend="packed")
    assert sum(kept.values()) < 20 * q.nbytes
    found = torch.autograd.grad(mixed.square().sum(), (q, k, v))
    if not dropout:
        expected = attend(q, k, v, batch, None, slopes=slopes, backend="reference")
        torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=0)
        for one, other in zip(found, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    else:  # the same weights are dropped when they are computed again: the output is linear in the values
        torch.testing.assert_close((found[2] * v).sum(), 2 * mixed.square().sum(), rtol=1e-4, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(
    ("dtype", "width", "alibi"),
    [
        (torch.float32, 64, False),
        (torch.float32, 26, False),
        (torch.float64, 64, False),
        (torch.float32, 64, True),
        (torch.bfloat16, 64, True),
    ],
)
def test_memory_on_a_gpu_does_not_grow_with_the_square_of_the_length(
    dtype: torch.dtype, width: int, alibi: bool, window: int | None
) -> None:
    peaks = []
    for length in (4096, 8192):
        batch = batch_of((length,) * 2).to("cuda")
        qkv = torch.randn(batch.num_tokens, 3, 12, width, dtype=dtype, device="cuda", requires_grad=True)
        slopes = torch.rand(12, device="cuda") if alibi else None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        attend(*qkv.unbind(1), batch, window, slopes=slopes, backend="packed").square().sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        weights = 2 * 12 * length**2 * dtype.itemsize
    assert peaks[1] < 2.5 * peaks[0]
    assert peaks[1] < weights / 2
