"""Attention over bfloat16 by compiled kernels, with the instruction for pairs or the several that replace it elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quiver.encoder import Encoder, PackedBatch, pack_ids
from quiver.encoder.attention import attend, choose_backend
from quiver.encoder.attention.dispatch import describe
from quiver.encoder.cpu.kernels import assume
from quiver.encoder.cpu.support import kernels_available
from quiver.encoder.ops import rotate_, rotate_reference

pytestmark = pytest.mark.skipif(not kernels_available(), reason="no numba, OpenMP threads or fused multiplications here")


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


@pytest.mark.parametrize("spread", [1e-3, 30.0, 300.0])
@pytest.mark.parametrize("window", [None, 128])
def test_flat_and_steep_scores(spread: float, window: int | None) -> None:
    batch = batch_of((700,))
    q, k, v = heads(batch.num_tokens, spread=spread)
    k = k * torch.linspace(0.1, 3, len(k))[:, None, None].bfloat16()  # maxima rise on the way
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


@pytest.mark.parametrize("tokens", [400, 70])
@pytest.mark.parametrize("half", [16, 32, 24])
def test_rope_is_computed_in_float32(tokens: int, half: int) -> None:
    packed = torch.randn(tokens, 3, 2, 64, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    angles = torch.rand(tokens, half, generator=torch.Generator().manual_seed(half)) * 6
    expected = rotate_reference(packed, angles.cos(), angles.sin())[0]
    turned = rotate_(packed[:, 0], angles.cos(), angles.sin())
    assert turned.data_ptr() == packed.data_ptr()
    torch.testing.assert_close(turned, expected, atol=0, rtol=2**-7)  # the last place may round the other way
    assert (turned != expected).float().mean() < 0.01


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


NARROW = """
import torch
from quiver.encoder import pack_ids
from quiver.encoder.attention import attend
from quiver.encoder.cpu import codegen
from quiver.encoder.cpu.kernels import assume
torch.set_num_threads(2)
assert not codegen.bfloat16_is_native()
assumed = assume(bfloat16_kernels_run=True)
assumed.__enter__()
batch = pack_ids([[1] * length for length in (300, 17, 64, 1)], key_lengths=[300, 17, 20, 1])
q, k, v = torch.randn(3, 382, 2, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
for window in (None, 6, 128):
    with torch.no_grad():
        found = attend(q, k, v, batch, window, backend="compiled")
        expected = attend(q.double(), k.double(), v.double(), batch, window, backend="reference")
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=1e-2)
"""


KEPT = """
import torch
from quiver.encoder import pack_ids
from quiver.encoder.attention import attend
from quiver.encoder.cpu.kernels import assume
torch.set_num_threads(2)
with torch.no_grad(), assume(bfloat16_kernels_run=True):
    attend(*torch.ones(3, 300, 1, 32).bfloat16(), pack_ids([[1] * 300]), None, backend="compiled")
"""


@pytest.mark.slow
def test_code_that_was_kept_in_part(tmp_path: Path) -> None:
    """As where the first process was stopped while it compiled: what is kept goes into what is compiled now."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for removed in (("attention_kernels._pairs*",), ()):
        done = subprocess.run([sys.executable, "-c", KEPT], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for pattern in removed:
            files = list(tmp_path.rglob(pattern))
            assert files
            for file in files:
                file.unlink()


def test_rope_of_a_text_does_not_depend_on_the_batch() -> None:
    heads, angles = torch.randn(400, 2, 64, generator=torch.Generator().manual_seed(2)).bfloat16(), torch.rand(400, 16) * 6
    alone = rotate_(heads[:70].clone(), angles[:70].cos(), angles[:70].sin())
    assert torch.equal(rotate_(heads, angles.cos(), angles.sin())[:70], alone)


@pytest.mark.slow
def test_processors_without_the_instruction(run_as: Callable[..., str], older_processor: tuple[str, str]) -> None:
    run_as(NARROW, *older_processor)
