"""Blocks by compiled kernels against the same blocks by PyTorch operators: every family, activation, norm and width; fallbacks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quiver.encoder import Encoder, PackedBatch, optimize_for_inference, pack_ids
from quiver.encoder.cpu.linear import PrepackedLinear
from quiver.encoder.cpu.support import assume, kernels_available
from quiver.encoder.lora import add_lora
from tests.encoder.cpu.encoders import BIASES, POST, batch_of, by_operators, by_threads, encoder_of, is_compiled, run_as

pytestmark = pytest.mark.skipif(not kernels_available(), reason="no numba, OpenMP threads or fused multiplications here")

# Around the 48 or 24 lanes of a panel, and panels that two threads cannot share evenly. By default two of each.
LENGTHS = [(257, 1), (300, 40, 5), *(pytest.param(each, marks=pytest.mark.slow) for each in [(256,), (1, 2, 3, 480), (1200,)])]

CONFIGS: dict[str, dict[str, Any]] = {
    "modernbert": {},
    "plain mlp": {"mlp": "plain"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "silu": {"activation": "silu"},
    "relu": {"activation": "relu", "mlp": "plain"},
    "rmsnorm": {"norm": "rmsnorm"},
    "post-norm": POST,
    "biases": {**BIASES, **POST},
    "half of the head turned": {"hidden_size": 192, "rotary_fraction": 0.5},
    "alibi": {"positions": "alibi", "layer_types": ("global",) * 2},
    "absolute": {"positions": "absolute", "layer_types": ("global",) * 2},
}


@pytest.fixture(autouse=True)
def inference(two_threads: None) -> Iterator[None]:
    del two_threads
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_states_are_those_of_torch(name: str, lengths: tuple[int, ...]) -> None:
    encoder, batch = encoder_of(**CONFIGS[name]), batch_of(lengths)
    found = encoder(batch)
    assert is_compiled(encoder, batch)
    expected = by_operators(lambda: encoder(batch))
    exact = by_operators(lambda: copy.deepcopy(encoder).double()(batch)).float()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (found - exact).abs().max() <= 2 * (expected - exact).abs().max() + 2e-6


@pytest.mark.parametrize(("width", "heads"), [(64, 4), (96, 2), (160, 2), (256, 1)])
def test_every_width_of_a_head(width: int, heads: int) -> None:
    fraction = {16: 1.0, 48: 2 / 3, 80: 0.4, 256: 1.0}[width // heads]  # halves of what turns are multiples of 16, or nothing turns
    positions = {"positions": "absolute"} if width // heads == 16 else {"rotary_fraction": fraction}
    encoder, batch = encoder_of(hidden_size=width, num_heads=heads, **positions), batch_of((400, 31))
    found = encoder(batch)
    assert is_compiled(encoder, batch)
    torch.testing.assert_close(found, by_operators(lambda: encoder(batch)), atol=1e-5, rtol=0)


def test_tokens_that_only_read() -> None:
    encoder, batch = encoder_of(), batch_of((300, 64, 20), [200, 5, 20])
    found = encoder(batch)
    assert is_compiled(encoder, batch)
    torch.testing.assert_close(found, by_operators(lambda: encoder(batch)), atol=1e-5, rtol=0)


def test_neither_threads_nor_neighbours_change_a_bit() -> None:
    encoder, batch = encoder_of(), batch_of((500, 300, 64))
    states = by_threads(encoder, batch)
    alone = pack_ids([batch.ids[500:800].tolist()])
    assert torch.equal(encoder(alone), states[500:800])


@pytest.mark.parametrize("length", [1, 20, 64, 100])
def test_a_batch_invariant_text_has_the_same_bits_alone_and_in_a_batch(length: int) -> None:
    encoder, company = encoder_of(), batch_of((400, 20, 300, 77))
    ids = torch.randint(300, (length,), generator=torch.Generator().manual_seed(9)).tolist()
    alone = encoder(replace(pack_ids([ids]), batch_invariant=True))
    together = encoder(replace(pack_ids([ids, *(part.tolist() for part in company.unpack(company.ids)), ids]), batch_invariant=True))
    assert is_compiled(encoder, replace(pack_ids([ids]), batch_invariant=True))
    assert torch.equal(together[:length], alone)
    assert torch.equal(together[-length:], alone)


def test_half_precision_weights_are_widened() -> None:
    encoder, batch = encoder_of().bfloat16(), batch_of((300,))
    with assume(native_on_cpu=lambda dtype: dtype != torch.bfloat16):
        found = encoder(batch)
        assert is_compiled(encoder, batch)
        expected = by_operators(lambda: encoder(batch))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=0.04, rtol=0)  # one rounding, after the last norm


def test_prepacked_and_plain_matrices_give_one_result() -> None:
    encoder, batch = encoder_of(), batch_of((300, 20))
    prepacked = optimize_for_inference(copy.deepcopy(encoder))
    assert torch.equal(prepacked(batch), encoder(batch))
    assert torch.equal(prepacked.state_dict()["layers.0.attention.qkv.weight"], encoder.state_dict()["layers.0.attention.qkv.weight"])
    assert is_compiled(encoder, batch)
    assert is_compiled(prepacked, batch)


def test_matrices_that_kernels_cannot_read_are_packed_for_pytorch() -> None:
    read, left = optimize_for_inference(encoder_of()), optimize_for_inference(encoder_of(intermediate_size=150))
    assert all(matrix.rows() for matrix in read.modules() if isinstance(matrix, PrepackedLinear))
    assert not any(matrix.rows() for matrix in left.modules() if isinstance(matrix, PrepackedLinear))


def test_low_rank_updates_count() -> None:
    encoder, batch = encoder_of(), batch_of((300, 20))
    plain = encoder(batch)
    add_lora(encoder, rank=2, alpha=4, dropout=0.0, seed=0)
    for name, weight in encoder.named_parameters():
        if name.endswith("lora_b"):
            weight.data.normal_(0, 0.1)
    found = encoder.eval()(batch)
    assert is_compiled(encoder, batch)
    assert (found - plain).abs().max() > 0.01
    torch.testing.assert_close(found, by_operators(lambda: encoder(batch)), atol=1e-5, rtol=0)


def test_threads_of_python_share_an_encoder() -> None:
    encoder, batches = encoder_of(), [batch_of((300 + 31 * i, 5)) for i in range(6)]
    expected = [encoder(batch) for batch in batches]

    def encode(batch: PackedBatch) -> Tensor:
        with torch.inference_mode():
            return encoder(batch)

    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            assert all(map(torch.equal, pool.map(encode, batches), expected))


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_position": "parallel"},
        {"hidden_size": 72, "num_heads": 3, "positions": "absolute"},
        {"intermediate_size": 150},
        {"hidden_size": 48, "num_heads": 2, "positions": "absolute"},
        {"num_heads": 6},  # 8 cosines a head
    ],
    ids=str,
)
def test_unsupported_configurations_run_by_pytorch(changes: dict[str, Any]) -> None:
    encoder, batch = encoder_of(**changes), batch_of((300,))
    assert encoder(batch).isfinite().all()
    assert not is_compiled(encoder, batch)


def test_small_batches_and_float64_are_left_to_pytorch() -> None:
    encoder = encoder_of()
    assert not is_compiled(encoder, batch_of((200, 55)))
    assert not is_compiled(copy.deepcopy(encoder).double(), batch_of((300,)))


def calls_of_blocks(encoder: Encoder, batch: PackedBatch) -> int:
    """Encode a batch and count the calls of `Block.forward`."""
    calls: list[None] = []

    def counting(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (calls.append(None), forward(*arguments))[1]

    for layer in encoder.layers:
        layer.forward = counting(layer.forward)  # type: ignore[method-assign]
    encoder(batch)
    for layer in encoder.layers:
        del layer.forward
    return len(calls)


def test_an_encoder_runs_the_kernels_in_place_of_its_blocks() -> None:
    encoder, batch = encoder_of(), batch_of((300,))
    assert calls_of_blocks(encoder, batch) == 0
    assert calls_of_blocks(encoder, batch_of((200, 55))) == len(encoder.layers)
    assert by_operators(lambda: calls_of_blocks(encoder, batch)) == len(encoder.layers)
    with torch.enable_grad():
        assert calls_of_blocks(encoder, batch) == len(encoder.layers)  # a replaced `forward` is respected in training
    assert calls_of_blocks(encoder.train(), batch) == len(encoder.layers)  # dropout may be wanted
    assert calls_of_blocks(optimize_for_inference(encoder_of(), precision="int8"), batch_of((9,))) == 0


NARROW = """
import torch
from quiver.encoder import Encoder, EncoderConfig, pack_ids
from quiver.encoder.attention import attend
from quiver.encoder.cpu import codegen
assert (codegen.LANES, codegen.ROWS) == (24, 4), (codegen.LANES, codegen.ROWS)
torch.manual_seed(0)
config = EncoderConfig.modernbert(
    vocab_size=64, hidden_size=96, num_heads=3, intermediate_size=144, layer_types=["global", "local"], window=16)
encoder, batch = Encoder(config).eval(), pack_ids([list(range(50)) * 7, [1, 2, 3]])
results = []
for widen in (Encoder.float, Encoder.double):
    widen(encoder)
    with torch.no_grad():
        states = encoder(batch)
    encoder(batch)[:, :9].square().sum().backward()
    results.append([states.float(), *(weight.grad.float() for weight in encoder.parameters() if weight.grad is not None)])
    encoder.zero_grad()
for found, expected in zip(*results, strict=True):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

batch = pack_ids([[1] * length for length in (300, 17, 64, 1)], key_lengths=[300, 17, 20, 1])
q, k, v = torch.randn(3, 382, 2, 48)
for window in (None, 6, 128):
    results = []
    for dtype, backend in ((torch.float32, "compiled"), (torch.float64, "reference")):
        heads = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        mixed = attend(*heads, batch, window, backend=backend)
        results.append([mixed, *torch.autograd.grad(mixed[:, :, :9].square().sum(), heads)])
        with torch.no_grad():
            results[-1].append(attend(*heads, batch, window, backend=backend))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected.float(), atol=5e-6, rtol=1e-5)
"""


@pytest.mark.slow
def test_a_processor_with_half_the_registers() -> None:
    run_as(NARROW, "haswell", "+avx2,+fma")


def test_a_copy_of_a_prepacked_encoder_has_its_own_weights() -> None:
    prepacked = optimize_for_inference(encoder_of())
    one, two = (each.layers[0].mlp.up.rows()[0][0] for each in (prepacked, copy.deepcopy(prepacked)))
    assert torch.equal(one, two)
    assert one.data_ptr() != two.data_ptr()
