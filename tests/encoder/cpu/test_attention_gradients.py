"""Gradients of compiled attention against its definition in double precision: lengths, windows, widths, layouts, threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quiver.encoder import Encoder, EncoderConfig, PackedBatch, pack_ids
from quiver.encoder.attention import attend, choose_backend
from quiver.encoder.attention.dispatch import describe
from quiver.encoder.cpu.support import kernels_available
from tests.encoder.cpu.test_attention import LENGTHS, WINDOWS, batch_of

pytestmark = [
    pytest.mark.skipif(not kernels_available(), reason="no numba, OpenMP threads or fused multiplications here"),
    pytest.mark.usefixtures("two_threads"),
]


def inputs(batch: PackedBatch, width: int = 64, count: int = 3, *, spread: float = 1.0) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values with gradients, and what the output is given."""
    generator = torch.Generator().manual_seed(batch.num_tokens)
    q, k, v, given = (torch.randn(batch.num_tokens, count, width, generator=generator) for _ in range(4))
    return [x.requires_grad_() for x in (q * spread, k, v)], given


def gradients(heads: list[Tensor], given: Tensor, batch: PackedBatch, window: int | None, backend: str = "compiled") -> list[Tensor]:
    """The output and the gradients of queries, keys and values."""
    mixed = attend(heads[0], heads[1], heads[2], batch, window, backend=backend)
    return [mixed.detach(), *torch.autograd.grad(mixed, heads, given.to(mixed.dtype))]


def definition(heads: list[Tensor], given: Tensor, batch: PackedBatch, window: int | None) -> list[Tensor]:
    double = [x.detach().double().requires_grad_() for x in heads]
    return [x.float() for x in gradients(double, given, batch, window, "reference")]


def check(heads: list[Tensor], given: Tensor, batch: PackedBatch, window: int | None, tolerance: float = 5e-6) -> None:
    expected = definition(heads, given, batch, window)
    for found, wanted in zip(gradients(heads, given, batch, window), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_they_are_the_definitions(lengths: tuple[int, ...], window: int | None) -> None:
    batch = batch_of(lengths)
    check(*inputs(batch), batch, window)


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize(("lengths", "key_lengths"), [((257,), None), ((300, 1, 64, 65, 129), None), ((240, 7, 120), [5, 7, 64])], ids=str)
def test_those_of_bfloat16_are_no_further_off_than_torchs(
    lengths: tuple[int, ...], key_lengths: list[int] | None, window: int | None
) -> None:
    """They are computed in float32 from rounded numbers, and rounded."""
    batch = batch_of(lengths, key_lengths)
    heads, given = inputs(batch)
    heads, given = [x.detach().bfloat16().requires_grad_() for x in heads], given.bfloat16()
    assert choose_backend(describe(heads[0], batch, window=window, gradients=True)) == "compiled"
    exact = definition(heads, given, batch, window)
    found, torchs = (gradients(heads, given, batch, window, backend) for backend in ("compiled", "packed"))
    for mine, other, wanted in zip(found, torchs, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        errors = [(each.float() - wanted).square().mean().sqrt() for each in (mine, other)]
        assert errors[0] <= 1.1 * errors[1]
    if key_lengths is not None:
        assert found[2][5:240].abs().max() == found[3][5:240].abs().max() == 0  # nobody read them


@pytest.mark.parametrize("width", [16, 32, 48, 80, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 64])
def test_every_width_of_a_head(width: int, window: int | None) -> None:
    batch = batch_of((200, 77))
    check(*inputs(batch, width), batch, window)


@pytest.mark.parametrize("window", [None, 8, 128])
def test_tokens_beyond_the_key_length_only_read(window: int | None) -> None:
    batch = batch_of((240, 7, 12, 120), [5, 7, 1, 64])
    heads, given = inputs(batch)
    check(heads, given, batch, window)
    _, of_q, of_k, of_v = gradients(heads, given, batch, window)
    assert of_k[5:240].abs().max() == of_v[5:240].abs().max() == 0  # nobody read them
    if window == 8:
        assert of_q[5 + 4 : 240].abs().max() == 0  # and those that saw nothing depend on nothing


@pytest.mark.parametrize("window", [None, 32])
def test_values_of_another_sequence_do_not_leak_even_as_nan(window: int | None) -> None:
    batch = batch_of((130, 131, 132))
    heads, given = inputs(batch)
    with torch.no_grad():
        for x in (*heads, given):
            x[130:261] = torch.nan
    for found in gradients(heads, given, batch, window):
        assert found[:130].isfinite().all()
        assert found[261:].isfinite().all()
        assert found[130:261].isnan().all()


@pytest.mark.parametrize("window", [None, 64])
def test_neither_threads_nor_neighbours_change_a_bit(window: int | None) -> None:
    batch = batch_of((500, 30, 410, 64))
    heads, given = inputs(batch)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results += [gradients(heads, given, batch, window) for _ in range(3)]
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
    alone = gradients([x[530:940].detach().requires_grad_() for x in heads], given[530:940], batch_of((410,)), window)
    assert all(torch.equal(mine, all_of_it[530:940]) for mine, all_of_it in zip(alone, results[0], strict=True))


def test_an_encoder_is_trained_with_it() -> None:
    batch = batch_of((200, 56))
    (q, k, v), _ = inputs(batch)
    assert choose_backend(describe(q, batch, window=128, gradients=True)) == "compiled"
    assert choose_backend(describe(q, batch, dropout=0.1, gradients=True)) == "packed"
    assert choose_backend(describe(q[:200], batch_of((200,)), gradients=True)) == "packed"
    assert attend(q, k, v, batch, 128).grad_fn.name() == "_CompiledAttentionBackward"  # type: ignore[union-attr]
    config = EncoderConfig.modernbert(
        vocab_size=64, hidden_size=64, num_heads=4, intermediate_size=48, layer_types=["global", "local", "local"], window=16
    )
    encoder = Encoder(config).train()
    ids = torch.randint(64, (400,), generator=torch.Generator().manual_seed(5)).tolist()
    found = {}
    for name in ("compiled", "packed"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QUIVER_ATTENTION", name)
            encoder.gradient_checkpointing = name == "compiled"
            encoder(pack_ids([ids[:300], ids[300:], ids[:20]]))[:, :5].square().mean().backward()
        found[name] = {key: weight.grad.clone() for key, weight in encoder.named_parameters() if weight.grad is not None}
        encoder.zero_grad()
    assert found["compiled"].keys() == found["packed"].keys()
    for key, gradient in found["packed"].items():
        torch.testing.assert_close(found["compiled"][key], gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("spread", [1e-3, 300.0])
def test_flat_and_steep_scores(spread: float) -> None:
    batch = batch_of((700,))
    heads, given = inputs(batch, spread=spread)
    expected = definition(heads, given, batch, None)
    found, other = (gradients(heads, given, batch, None, backend) for backend in ("compiled", "packed"))
    for mine, torchs, wanted in zip(found, other, expected, strict=True):
        assert mine.isfinite().all()
        # A float32 score of 5,000 is off by some 1e-4 whoever computes it.
        assert (mine - wanted).abs().max() <= 6 * (torchs - wanted).abs().max() + 5e-6
