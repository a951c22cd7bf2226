"""Attention by compiled loops against its definition in double precision: lengths, windows, widths, layouts, threads."""

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
from quiver.encoder.cpu.attention import is_supported
from quiver.encoder.cpu.support import kernels_available

pytestmark = pytest.mark.skipif(not kernels_available(), reason="no numba, OpenMP threads or fused multiplications here")

# Around a tile's 48 or 24 lanes and 8 or 4 rows, a panel's 64 keys, a window's halo, and a task's 8 blocks.
LENGTHS = [(256,), (257,), (1000,), (47, 48, 49, 1, 15, 16, 17, 63), (300, 1, 64, 65, 129), (5,) * 60, (383, 384, 385)]
WINDOWS = [None, 62, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 64, 128, 500))]


def batch_of(lengths: tuple[int, ...], key_lengths: list[int] | None = None) -> PackedBatch:
    return pack_ids([[1] * length for length in lengths], key_lengths=key_lengths)


def heads(tokens: int, width: int = 64, count: int = 3, *, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(tokens, count, width, generator=generator) for _ in range(3))
    return q * spread, k, v


def definition(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
    with torch.no_grad():
        return attend(q.double(), k.double(), v.double(), batch, window, backend="reference").float()


@pytest.fixture(autouse=True)
def no_gradients(two_threads: None) -> Iterator[None]:
    del two_threads
    with torch.no_grad():
        yield


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_it_is_the_definition(lengths: tuple[int, ...], window: int | None) -> None:
    batch = batch_of(lengths)
    q, k, v = heads(batch.num_tokens)
    found = attend(q, k, v, batch, window, backend="compiled")
    torch.testing.assert_close(found, definition(q, k, v, batch, window), atol=3e-6, rtol=0)


@pytest.mark.parametrize("width", [16, 32, 48, 80, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 64])
def test_every_width_of_a_head(width: int, window: int | None) -> None:
    batch = batch_of((200, 77))
    q, k, v = heads(batch.num_tokens, width)
    found = attend(q, k, v, batch, window, backend="compiled")
    torch.testing.assert_close(found, definition(q, k, v, batch, window), atol=3e-6, rtol=0)


def test_scores_that_rise_for_ever() -> None:
    """What a query counts from may lag behind its maximum, but never so far that a power of two overflows."""
    batch = batch_of((3000,))
    v = heads(3000)[2]
    q, k = torch.zeros_like(v), torch.zeros_like(v)
    q[..., 0], k[..., 0] = 8, torch.arange(3000)[:, None] * 0.0625  # 5.8 powers of two per panel of keys, below what is rescaled
    found = attend(q, k, v, batch, None, backend="compiled")
    torch.testing.assert_close(found, definition(q, k, v, batch, None), atol=1e-4, rtol=0)


@pytest.mark.parametrize("spread", [1e-3, 30.0, 300.0])
@pytest.mark.parametrize("window", [None, 128])
def test_flat_and_steep_scores(spread: float, window: int | None) -> None:
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
def test_tokens_beyond_the_key_length_only_read(window: int | None) -> None:
    batch = batch_of((240, 7, 12, 120), [5, 7, 1, 64])
    q, k, v = heads(batch.num_tokens)
    found = attend(q, k, v, batch, window, backend="compiled")
    torch.testing.assert_close(found, definition(q, k, v, batch, window), atol=3e-6, rtol=0)
    if window == 8:
        assert found[5 + 4 : 240].abs().max() == 0  # those that see nothing give zeros, not NaN


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FC000FF, -1])
def test_values_of_another_sequence_do_not_leak_even_as_nan(bits: int) -> None:
    batch = batch_of((130, 131, 132))
    q, k, v = heads(batch.num_tokens)
    for x in (q, k, v):
        x.view(torch.int32)[130:261] = bits
    for window in (None, 32):
        found = attend(q, k, v, batch, window, backend="compiled")
        assert found[:130].isfinite().all()
        assert found[261:].isfinite().all()
        assert found[130:261].isnan().all()  # and what is not a number is not hidden


def test_layouts() -> None:
    """Heads of one packed product, heads first, and numbers that do not lie side by side."""
    batch = batch_of((100, 200))
    packed = torch.randn(300, 3, 2, 32, generator=torch.Generator().manual_seed(3))
    q, k, v = packed.unbind(1)
    expected = definition(q, k, v, batch, 32)
    first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for layout in ((q, k, v), first, apart):
        torch.testing.assert_close(attend(*layout, batch, 32, backend="compiled"), expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 64])
def test_neither_threads_nor_neighbours_change_a_bit(window: int | None) -> None:
    lengths = (500, 30, 410, 64)
    batch = batch_of(lengths)
    q, k, v = heads(batch.num_tokens)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results += [attend(q, k, v, batch, window, backend="compiled") for _ in range(3)]
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert torch.equal(result, results[0])
    alone = attend(q[530:940], k[530:940], v[530:940], batch_of((410,)), window, backend="compiled")
    assert torch.equal(alone, results[0][530:940])


def test_an_encoder_takes_it_for_large_batches_without_gradients() -> None:
    small, large = batch_of((200,)), batch_of((200, 56))
    q, _, _ = heads(256)
    assert choose_backend(describe(q, large, window=128)) == "compiled"
    assert choose_backend(describe(q[:200], small, window=128)) == "packed"
    assert choose_backend(describe(q[:200], replace(small, batch_invariant=True), window=128)) == "compiled"
    assert choose_backend(describe(q, large, gradients=True)) == "compiled"
    assert choose_backend(describe(q.double(), large)) == "packed"
    assert choose_backend(describe(q, large, slopes=torch.ones(3))) == "packed"
    assert choose_backend(describe(q[:, :, :24], large)) == "packed"
    assert choose_backend(describe(q, batch_of((200, 56), [3, 3]), window=4)) == "compiled"
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


def test_fake_tensors_are_left_to_pytorch() -> None:
    batch = batch_of((300,))
    q, k, v = heads(300)

    def chosen(x: Tensor) -> bool:
        return is_supported(batch, x)

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
    torch.testing.assert_close(traced(q, k, v), definition(q, k, v, batch, 32), atol=3e-6, rtol=0)
