"""Attention over bfloat16 by compiled kernels, with the instruction for pairs or the several that replace it elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from quiver.encoder import Encoder, PackedBatch, pack_ids
from quiver.encoder.attention import attend, choose_backend
from quiver.encoder.attention.dispatch import describe
from quiver.encoder.cpu.kernels import assume
from quiver.encoder.cpu.support import kernels_available

HAS_PAIRS = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
pytestmark = pytest.mark.skipif(not (kernels_available() and HAS_PAIRS), reason="no numba, OpenMP threads or bfloat16 instruction here")


@pytest.fixture(autouse=True)
def inference(two_threads: None) -> Iterator[None]:
    """Kernels attend to bfloat16 on every processor here."""
    del two_threads
    with torch.no_grad(), assume(bfloat16_kernels_run=True):
        yield


def batch_of(lengths: tuple[int, ...], key_lengths: list[int] | None = None) -> PackedBatch:
    return pack_ids([[1] * length for length in lengths], key_lengths=key_lengths)


def heads(tokens: int, width: int = 64, count: int = 3, *, spread: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(tokens, count, width, generator=generator) for _ in range(3))
    return [x.bfloat16() for x in (q * spread, k, v + 0.5)]


def definition(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
    return attend(q.double(), k.double(), v.double(), batch, window, backend="reference")


def check(found: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> None:
    """No further from the definition than rounding takes it: 2 ** -8 of each weight and so of their sum, and of the result."""
    assert found.dtype == torch.bfloat16
    expected = definition(q, k, v, batch, window)
    distance = found.double() - expected
    scale = definition(q, k, v.abs(), batch, window)
    assert (distance.abs() <= 2**-8 * (scale + 2 * expected.abs()) + 1e-6).all()
    # And about as far as torch's own kernel.
    other = attend(q, k, v, batch, window, backend="packed").double() - expected
    assert distance.square().mean() <= 1.1**2 * other.square().mean() + 1e-12


@pytest.mark.parametrize("window", [None, 62, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 64, 128, 500))])
@pytest.mark.parametrize("lengths", [(256,), (257,), (1000,), (47, 48, 49, 1, 15, 16, 17, 63), (300, 1, 64, 65, 129), (5,) * 60], ids=str)
def test_it_is_the_definition(lengths: tuple[int, ...], window: int | None) -> None:
    batch = batch_of(lengths)
    q, k, v = heads(batch.num_tokens)
    check(attend(q, k, v, batch, window, backend="compiled"), q, k, v, batch, window)


@pytest.mark.parametrize("width", [32, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 62])
def test_every_width_of_a_head(width: int, window: int | None) -> None:
    batch = batch_of((200, 77))
    q, k, v = heads(batch.num_tokens, width)
    check(attend(q, k, v, batch, window, backend="compiled"), q, k, v, batch, window)


@pytest.mark.parametrize("window", [None, 8, 126])
def test_tokens_beyond_the_key_length_only_read(window: int | None) -> None:
    batch = batch_of((240, 7, 12, 120), [5, 7, 1, 64])
    q, k, v = heads(batch.num_tokens)
    found = attend(q, k, v, batch, window, backend="compiled")
    expected = definition(q, k, v, batch, window)
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=0)
    if window == 8:
        assert found[5 + 4 : 240].abs().max() == 0  # those that see nothing give zeros, not NaN


@pytest.mark.parametrize("bits", [0x7FC0, 0x7F81, -1])
def test_values_of_another_sequence_do_not_leak_even_as_nan(bits: int) -> None:
    batch = batch_of((129, 131, 133))  # a value's neighbour in a pair would be another sequence's
    q, k, v = heads(batch.num_tokens)
    for x in (q, k, v):
        x.view(torch.int16)[129:260] = bits
    for window in (None, 32):
        found = attend(q, k, v, batch, window, backend="compiled")
        assert found[:129].isfinite().all()
        assert found[260:].isfinite().all()
        assert found[129:260].isnan().all()  # and what is not a number is not hidden


def test_layouts() -> None:
    """Heads of one packed product, heads first, numbers that do not lie side by side, and heads that begin within a pair."""
    batch = batch_of((100, 200))
    packed = torch.randn(300, 3, 2, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    q, k, v = packed.unbind(1)
    expected = attend(*(x.contiguous() for x in (q, k, v)), batch, 32, backend="compiled")
    first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    within = []
    behind = []
    for x in (q, k, v):
        wide = torch.empty(300, 2, 33, dtype=torch.bfloat16)
        wide[..., 1:] = x
        within.append(wide[..., 1:])
        behind.append(torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x))
    assert behind[0].data_ptr() % 4 == 2
    for layout in ((q, k, v), first, apart, within, behind):
        assert torch.equal(attend(*layout, batch, 32, backend="compiled"), expected)


@pytest.mark.parametrize("window", [None, 62])
def test_neither_threads_nor_neighbours_change_a_bit(window: int | None) -> None:
    batch = batch_of((501, 30, 411, 64))
    q, k, v = heads(batch.num_tokens)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results += [attend(q, k, v, batch, window, backend="compiled") for _ in range(2)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results[1:])
    alone = attend(q[531:942], k[531:942], v[531:942], batch_of((411,)), window, backend="compiled")
    assert torch.equal(alone, results[0][531:942])


def test_what_it_is_taken_for() -> None:
    batch = batch_of((300,))
    q = heads(300)[0]
    assert choose_backend(describe(q, batch, window=128)) == "compiled"
    assert choose_backend(describe(q, batch, gradients=True)) == "compiled"
    assert choose_backend(describe(q[..., :48], batch)) == "packed"
    assert choose_backend(describe(q, batch, slopes=torch.ones(3))) == "packed"
    assert choose_backend(describe(q[:200], batch_of((200,)))) == "packed"
    with assume(bfloat16_kernels_run=False):
        assert choose_backend(describe(q, batch)) == "packed"


def test_an_encoder_in_bfloat16_takes_it(encoder_of: Callable[..., Encoder], caplog: pytest.LogCaptureFixture) -> None:
    """Its states are about as far from float32's as with attention by PyTorch's operators."""
    lengths = (300, 40, 171)
    generator = torch.Generator().manual_seed(1)
    batch = pack_ids([torch.randint(300, (length,), generator=generator).tolist() for length in lengths])
    encoder = encoder_of()
    expected = encoder(batch)
    distances, chosen = [], []
    encoder.bfloat16()
    for run in (True, False):
        caplog.clear()
        choose_backend.cache_clear()  # each choice is logged once
        with (
            assume(native_on_cpu=True, bfloat16_kernels_run=run, amx_kernels_run=False),
            caplog.at_level("INFO", "quiver.encoder.attention"),
        ):
            distances.append((encoder(batch).float() - expected).square().mean().sqrt().item())
        chosen += [record.getMessage() for record in caplog.records]
    assert chosen
    assert all("in bfloat16" in message for message in chosen)
    assert {message.rsplit(": ", 1)[1] for message in chosen} == {"using compiled", "using packed"}
    assert distances[0] <= 1.25 * distances[1]
