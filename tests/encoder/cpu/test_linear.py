"""Linear gives one result by every kind of product; half precision is computed in float32 where the CPU is not faster with it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from quiver.encoder import Encoder, EncoderConfig, init_weights, pack_ids
from quiver.encoder.cpu.linear import PACK_TOKENS, Linear, compute_dtype
from quiver.encoder.cpu.support import assume, native_on_cpu

CONFIG = EncoderConfig.modernbert(
    vocab_size=300,
    hidden_size=64,
    num_heads=2,
    intermediate_size=96,
    layer_types=["global", "local", "local"],
    max_positions=1500,
    window=32,
)


@pytest.mark.parametrize("tokens", [1, PACK_TOKENS - 1, PACK_TOKENS, 3 * PACK_TOKENS + 5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("plain", [True, False])
def test_packed_products_are_the_plain_product(tokens: int, bias: bool, parts: int, plain: bool) -> None:
    torch.manual_seed(0)
    layer = Linear(48, 36, bias=bias, parts=parts)
    x = torch.randn(tokens, 48)
    expected = F.linear(x, layer.weight, layer.bias)
    with torch.no_grad(), assume(prefers_plain_weights=plain):
        torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=0)
    weights = torch.randn(expected.shape)
    sources = [x.requires_grad_(), *layer.parameters()]
    with assume(prefers_plain_weights=plain):
        found = torch.autograd.grad((layer(x) * weights).sum(), sources)
    expected = torch.autograd.grad((F.linear(x, layer.weight, layer.bias) * weights).sum(), sources)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_a_changed_weight_is_never_stale() -> None:
    layer = Linear(32, 32, bias=False)
    x = torch.randn(PACK_TOKENS, 32)
    with torch.no_grad():
        before = layer(x)
        layer.weight.mul_(2)
        torch.testing.assert_close(layer(x), 2 * before, atol=1e-5, rtol=0)


def test_emulated_half_precision_is_computed_in_float32() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert compute_dtype(cuda, torch.bfloat16) == torch.bfloat16
    assert compute_dtype(cpu, torch.float32) == torch.float32
    for native in (True, False):
        with assume(native_on_cpu=native):
            assert compute_dtype(cpu, torch.bfloat16) == (torch.bfloat16 if native else torch.float32)
    assert native_on_cpu(torch.float32)
    assert native_on_cpu(torch.float64)


@pytest.mark.parametrize("native", [True, False])
def test_half_precision_weights_run_either_way(native: bool) -> None:
    """On a processor with bfloat16 instructions hidden states are bfloat16; on others they are float32."""
    encoder = init_weights(Encoder(CONFIG), seed=0).eval()
    batch = pack_ids([[5] * 70, list(range(200)), [7]])
    with torch.inference_mode():
        expected = encoder(batch)
        encoder.to(torch.bfloat16)
        exact = init_weights(Encoder(CONFIG), seed=0).eval()
        exact.load_state_dict({name: weight.float() for name, weight in encoder.state_dict().items()})
        rounded = exact(batch)
        with assume(native_on_cpu=lambda dtype: native or dtype == torch.float32, has_onednn=False):
            states = encoder(batch)
    assert states.dtype == torch.bfloat16
    assert (states.float() - expected).abs().mean() < 0.02
    if not native:  # only the last rounding is left
        torch.testing.assert_close(states, rounded.to(torch.bfloat16), atol=0.02, rtol=0)


def test_double_precision_stays_double() -> None:
    encoder = init_weights(Encoder(CONFIG), seed=3).double().eval()
    batch = pack_ids([list(range(300)), [9]])
    expected = encoder(batch).detach()
    with torch.inference_mode():
        torch.testing.assert_close(encoder(batch), expected, atol=1e-7, rtol=0)  # the rotary tables are float32


def test_a_batch_that_was_used_in_inference_can_be_trained_on() -> None:
    encoder = init_weights(Encoder(CONFIG), seed=3).train()
    batch = pack_ids([[1] * 70, [2, 3, 4], [5] * 70, [6, 7, 8]])
    with torch.inference_mode():
        encoder(batch)
    encoder(batch).square().sum().backward()
    assert all(weight.grad is not None for weight in encoder.parameters())
