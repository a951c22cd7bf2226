"""Compiled attention in float32 and bfloat16 against its definition in double precision: lengths, windows, widths, layouts, threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from quiver.encoder import Encoder, EncoderConfig, PackedBatch, pack_ids
from quiver.encoder.attention import attend, choose_backend
from quiver.encoder.attention.dispatch import describe
from quiver.encoder.cpu.support import assume, kernels_available, supports_batch
from tests.encoder.cpu.encoders import encoder_of

pytestmark = pytest.mark.skipif(not kernels_available(), reason="no numba, OpenMP threads or fused multiplications here")

# Around a tile's 48 or 24 lanes and 8 or 4 rows, a panel's 64 keys, a window's halo, and a task's 8 blocks.
LENGTHS = [(256,), (257,), (1000,), (47, 48, 49, 1, 15, 16, 17, 63), (300, 1, 64, 65, 129), (5,) * 60, (383, 384, 385)]
WINDOWS = [None, 62, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 64, 128, 500))]
has_pairs = pytest.mark.skipif(not getattr(torch.cpu, "_is_avx512_bf16_supported", bool)(), reason="no bfloat16 instruction here")
in_float32 = pytest.mark.parametrize("dtype", [torch.float32], indirect=True)


def batch_of(lengths: tuple[int, ...], key_lengths: list[int] | None = None) -> PackedBatch:
    return pack_ids([[1] * length for length in lengths], key_lengths=key_lengths)


@pytest.fixture(autouse=True, params=[torch.float32, pytest.param(torch.bfloat16, marks=has_pairs)], ids=str)
def dtype(request: pytest.FixtureRequest, two_threads: None) -> Iterator[torch.dtype]:
    """The dtype of queries, keys and values; kernels attend to bfloat16 on every processor here."""
    del two_threads
    with torch.no_grad(), assume(bfloat16_kernels_run=True):
        yield request.param


def heads(tokens: int, dtype: torch.dtype = torch.float32, width: int = 64, *, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(tokens, 3, width, generator=generator) for _ in range(3))
    return (q * spread).to(dtype), k.to(dtype), (v + 0.5 * (dtype == torch.bfloat16)).to(dtype)


def definition(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
    return attend(q.double(), k.double(), v.double(), batch, window, backend="reference")


def check(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
    """Attend; in bfloat16 the result is off by no more than rounding: 2 ** -8 of each weight and so of their sum, and of the result."""
    found = attend(q, k, v, batch, window, backend="compiled")
    expected = definition(q, k, v, batch, window)
    assert found.dtype == q.dtype
    if q.dtype == torch.float32:
        torch.testing.assert_close(found, expected.float(), atol=3e-6, rtol=0)
        return found
    distance = found.double() - expected
    scale = definition(q, k, v.abs(), batch, window)
    assert (distance.abs() <= 2**-8 * (scale + 2 * expected.abs()) + 1e-6).all()
    # And about as far as torch's own kernel.
    other = attend(q, k, v, batch, window, backend="packed").double() - expected
    assert distance.square().mean() <= 1.1**2 * other.square().mean() + 1e-12
    return found


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_it_is_the_definition(lengths: tuple[int, ...], window: int | None, dtype: torch.dtype) -> None:
    batch = batch_of(lengths)
    check(*heads(batch.num_tokens, dtype), batch, window)


@pytest.mark.parametrize("width", [16, 32, 48, 80, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 64])
def test_every_width_of_a_head(width: int, window: int | None, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and width % 32:
        pytest.skip("left to PyTorch")
    check(*heads(277, dtype, width), batch_of((200, 77)), window)


@in_float32
def test_scores_that_rise_for_ever(dtype: torch.dtype) -> None:
    """What a query counts from may lag behind its maximum, but never so far that a power of two overflows."""
    batch = batch_of((3000,))
    v = heads(3000)[2]
    q, k = torch.zeros_like(v), torch.zeros_like(v)
    q[..., 0], k[..., 0] = 8, torch.arange(3000)[:, None] * 0.0625  # 5.8 powers of two per panel of keys, below what is rescaled
    found = attend(q, k, v, batch, None, backend="compiled")
    torch.testing.assert_close(found, definition(q, k, v, batch, None).float(), atol=1e-4, rtol=0)


@in_float32
@pytest.mark.parametrize("spread", [1e-3, 30.0, 300.0])
@pytest.mark.parametrize("window", [None, 128])
def test_flat_and_steep_scores(spread: float, window: int | None, dtype: torch.dtype) -> None:
    """Scores of some hundreds: what a query gathered before its maximum came must vanish, not overflow."""
    batch = batch_of((700,))
    q, k, v = heads(batch.num_tokens, spread=spread)
    k = k * torch.linspace(0.1, 3, len(k))[:, None, None]  # maxima rise on the way
    expected = definition(q, k, v, batch, window)
    found, other = (attend(q, k, v, batch, window, backend=backend) for backend in ("compiled", "packed"))
    assert found.isfinite().all()
    # A float32 score of 5,000 is off by some 1e-4 whoever computes it.
    assert (found - expected).abs().max() <= 2 * (other - expected).abs().max() + 3e-6


@pytest.mark.parametrize("window", [None, 8, 128])
def test_tokens_beyond_the_key_length_only_read(window: int | None, dtype: torch.dtype) -> None:
    batch = batch_of((240, 7, 12, 120), [5, 7, 1, 64])
    found = check(*heads(batch.num_tokens, dtype), batch, window)
    if window == 8:
        assert found[5 + 4 : 240].abs().max() == 0  # those that see nothing give zeros, not NaN


NANS = {torch.float32: (torch.int32, [0x7FC00000, 0x7FC00001, 0x7FC000FF, -1]), torch.bfloat16: (torch.int16, [0x7FC0, 0x7F81, -1])}


@pytest.mark.parametrize("window", [None, 32])
def test_values_of_another_sequence_do_not_leak_even_as_nan(window: int | None, dtype: torch.dtype) -> None:
    batch = batch_of((129, 131, 133))  # a value's neighbour in a pair would be another sequence's
    integers, patterns = NANS[dtype]
    for bits in patterns:
        q, k, v = heads(batch.num_tokens, dtype)
        for x in (q, k, v):
            x.view(integers)[129:260] = bits
        found = attend(q, k, v, batch, window, backend="compiled")
        assert found[:129].isfinite().all()
        assert found[260:].isfinite().all()
        assert found[129:260].isnan().all()  # and what is not a number is not hidden


def test_layouts(dtype: torch.dtype) -> None:
    """Heads of one packed product, heads first, numbers that do not lie side by side, and heads that begin within a pair."""
    batch = batch_of((100, 200))
    packed = torch.randn(300, 3, 2, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    q, k, v = packed.unbind(1)
    expected = check(*(x.contiguous() for x in (q, k, v)), batch, 32)
    first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    within = [torch.cat((x.new_empty(300, 2, 1), x), dim=2)[..., 1:] for x in (q, k, v)]
    behind = [torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x) for x in (q, k, v)]
    assert behind[0].data_ptr() % (2 * dtype.itemsize) == dtype.itemsize
    for layout in ((q, k, v), first, apart, within, behind):
        assert torch.equal(attend(*layout, batch, 32, backend="compiled"), expected)


@pytest.mark.parametrize("window", [None, 62])
def test_neither_threads_nor_neighbours_change_a_bit(window: int | None, dtype: torch.dtype) -> None:
    batch = batch_of((501, 30, 411, 64))
    q, k, v = heads(batch.num_tokens, dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results += [attend(q, k, v, batch, window, backend="compiled") for _ in range(3)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results[1:])
    alone = attend(q[531:942], k[531:942], v[531:942], batch_of((411,)), window, backend="compiled")
    assert torch.equal(alone, results[0][531:942])


def test_it_is_taken_for_large_batches_and_what_it_can_do(dtype: torch.dtype) -> None:
    small, large = batch_of((200,)), batch_of((200, 56))
    q = heads(256, dtype)[0]
    assert choose_backend(describe(q, large, window=128)) == "compiled"
    assert choose_backend(describe(q[:200], small, window=128)) == "packed"
    assert choose_backend(describe(q[:200], replace(small, batch_invariant=True), window=128)) == "compiled"
    assert choose_backend(describe(q, large, gradients=True)) == "compiled"
    assert choose_backend(describe(q.double(), large)) == "packed"
    assert choose_backend(describe(q, large, slopes=torch.ones(3))) == "packed"
    assert choose_backend(describe(q[:, :, :24], large)) == "packed"
    assert choose_backend(describe(q, batch_of((200, 56), [3, 3]), window=4)) == "compiled"
    with assume(bfloat16_kernels_run=False):
        assert choose_backend(describe(q, large)) == ("packed" if dtype == torch.bfloat16 else "compiled")


@in_float32
def test_an_encoder_gives_the_states_of_operators(dtype: torch.dtype) -> None:
    config = EncoderConfig.modernbert(
        vocab_size=64, hidden_size=64, num_heads=4, intermediate_size=48, layer_types=["global", "local", "local"], window=16
    )
    encoder = Encoder(config).eval()
    ids = torch.randint(64, (400,), generator=torch.Generator().manual_seed(5)).tolist()
    together = encoder(pack_ids([ids[:300], ids[300:], ids[:20]]))
    with torch.enable_grad():  # blocks by torch's operators
        expected = encoder(pack_ids([ids[:300], ids[300:], ids[:20]]))
    torch.testing.assert_close(together, expected.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(together[400:], encoder(pack_ids([ids[:20]])), atol=1e-5, rtol=0)


@has_pairs
@in_float32
def test_an_encoder_in_bfloat16_takes_it(caplog: pytest.LogCaptureFixture, dtype: torch.dtype) -> None:
    """Its states are about as far from float32's as with attention by PyTorch's operators."""
    generator = torch.Generator().manual_seed(1)
    batch = pack_ids([torch.randint(300, (length,), generator=generator).tolist() for length in (300, 40, 171)])
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


@in_float32
def test_fake_tensors_are_left_to_pytorch(dtype: torch.dtype) -> None:
    batch = batch_of((300,))
    q, k, v = heads(300)

    def chosen(x: Tensor) -> bool:
        return supports_batch(batch, x)

    assert chosen(q)
    assert not chosen(q.to("meta"))
    with FakeTensorMode() as mode:
        assert not chosen(mode.from_tensor(q))
    seen: list[bool] = []
    torch.vmap(lambda x: (seen.append(chosen(x)), x)[1])(q[None])
    with forward_ad.dual_level():
        seen.append(chosen(forward_ad.make_dual(q, torch.ones_like(q))))
    assert not any(seen)
    traced = torch.jit.trace(lambda a, b, c: attend(a, b, c, batch, 32), (q, k, v), check_trace=False)
    torch.testing.assert_close(traced(q, k, v), definition(q, k, v, batch, 32).float(), atol=3e-6, rtol=0)
