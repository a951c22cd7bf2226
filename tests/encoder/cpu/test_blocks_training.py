"""Blocks trained by compiled kernels against the same blocks by PyTorch operators: states and every gradient; what is left to PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, PackedBatch, compile_encoder
from quiver.encoder.cpu.blocks import training_unsupported_reason
from quiver.encoder.cpu.support import kernels_available
from quiver.encoder.lora import add_lora

pytestmark = pytest.mark.skipif(not kernels_available(), reason="no numba, OpenMP threads or fused multiplications here")

# Around the 48 or 24 lanes of a panel, and panels that two threads cannot share evenly. By default one of each.
LENGTHS = [(300, 40, 5), *(pytest.param(each, marks=pytest.mark.slow) for each in [(256,), (257, 1), (1, 2, 3, 480), (1200,)])]
BIASES = ("qkv_bias", "attention_output_bias", "mlp_input_bias", "mlp_output_bias", "norm_bias")

CONFIGS: dict[str, dict[str, Any]] = {
    "modernbert": {},
    "plain mlp": {"mlp": "plain"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "silu": {"activation": "silu"},
    "relu": {"activation": "relu", "mlp": "plain"},
    "gated relu": {"activation": "relu"},
    "biases": {**dict.fromkeys(BIASES, True), "first_attention_norm": True},
    "biases of a plain mlp": {**dict.fromkeys(BIASES, True), "mlp": "plain"},
    "half of the head turned": {"hidden_size": 192, "rotary_fraction": 0.5},
    "alibi": {"positions": "alibi", "layer_types": ("global",) * 2},
    "absolute": {"positions": "absolute", "layer_types": ("global",) * 2},
    "attention dropout of nothing": {"attention_dropout": 0.0},
}


Asked = Callable[[Encoder, PackedBatch], bool]
Check = Callable[[Encoder, PackedBatch], None]


@pytest.fixture
def encoder_of(encoder_of: Callable[..., Encoder]) -> Callable[..., Encoder]:
    """Makes the same encoders in training mode."""
    return lambda **changes: encoder_of(**changes).train()


def trained(encoder: Encoder, batch: PackedBatch) -> dict[str, Tensor]:
    """States, and the gradient of every weight that has one, in float32."""
    states = encoder(batch)
    direction = torch.linspace(-1, 1, states.shape[-1], dtype=states.dtype)
    (states @ direction).square().mean().backward()
    found = {"states": states.detach().float()}
    found |= {name: weight.grad.float() for name, weight in encoder.named_parameters() if weight.grad is not None}
    encoder.zero_grad()
    return found


@pytest.fixture
def check(by_operators: Callable[[Callable[[], Any]], Any], is_compiled: Asked) -> Check:
    """Checks that kernels train as exactly as PyTorch operators, measured in double precision, with gradients of the same weights."""

    def compare(encoder: Encoder, batch: PackedBatch) -> None:
        assert is_compiled(encoder, batch)
        found = trained(encoder, batch)
        expected = by_operators(lambda: trained(encoder, batch))
        exact = by_operators(lambda: trained(copy.deepcopy(encoder).double(), batch))
        assert found.keys() == expected.keys()
        for name, wanted in exact.items():
            scale = wanted.abs().max()
            error, of_torch = ((each[name] - wanted).abs().max() for each in (found, expected))
            assert error <= 3 * of_torch + 1e-5 * scale, name

    return compare


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_states_and_gradients_are_those_of_torch(
    encoder_of: Callable[..., Encoder],
    batch_of: Callable[..., PackedBatch],
    check: Check,
    name: str,
    lengths: tuple[int, ...],
) -> None:
    check(encoder_of(**CONFIGS[name]), batch_of(lengths))


def test_batches_beyond_one_chunk_of_the_mlp(
    encoder_of: Callable[..., Encoder], batch_of: Callable[..., PackedBatch], check: Check
) -> None:
    check(encoder_of(), batch_of((1200, 1100, 37)))


def test_tokens_that_only_read(encoder_of: Callable[..., Encoder], batch_of: Callable[..., PackedBatch], check: Check) -> None:
    check(encoder_of(), batch_of((300, 64, 20), [200, 5, 20]))


@pytest.mark.parametrize("kept", ["layers.0.", "layers.3.", "qkv", "mlp.up", "down", "norm", "tokens"])
def test_gradients_of_some_weights_only(
    encoder_of: Callable[..., Encoder], batch_of: Callable[..., PackedBatch], check: Check, kept: str
) -> None:
    encoder = encoder_of(**dict.fromkeys(BIASES, True))
    for name, weight in encoder.named_parameters():
        weight.requires_grad_(kept in name)
    check(encoder, batch_of((300, 40)))


def test_checkpointing_computes_the_same(
    encoder_of: Callable[..., Encoder], batch_of: Callable[..., PackedBatch], is_compiled: Asked
) -> None:
    encoder, batch = encoder_of(), batch_of((300, 40, 5))
    whole = trained(encoder, batch)
    encoder.gradient_checkpointing = True
    again = trained(encoder, batch)
    assert is_compiled(encoder, batch)
    assert all(torch.equal(again[name], gradient) for name, gradient in whole.items())


def test_gradients_add_up_over_two_passes(
    encoder_of: Callable[..., Encoder], batch_of: Callable[..., PackedBatch], is_compiled: Asked
) -> None:
    encoder, batch = encoder_of(), batch_of((300,))
    once = trained(encoder, batch)
    for _ in range(2):
        states = encoder(batch)
        (states @ torch.linspace(-1, 1, 96)).square().mean().backward()
    for name, weight in encoder.named_parameters():
        torch.testing.assert_close(weight.grad, 2 * once[name], rtol=1e-5, atol=1e-7)
    assert is_compiled(encoder, batch)


def test_weights_changed_in_between_are_an_error_as_ever(encoder_of: Callable[..., Encoder], batch_of: Callable[..., PackedBatch]) -> None:
    encoder, batch = encoder_of(), batch_of((300,))
    states = encoder(batch)
    with torch.no_grad():
        encoder.layers[1].mlp.down.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        states.sum().backward()


def test_blocks_that_kernels_cannot_train_are_left_to_pytorch(
    encoder_of: Callable[..., Encoder], batch_of: Callable[..., PackedBatch], is_compiled: Asked
) -> None:
    batch, heard = batch_of((300,)), []

    def answer(encoder: Encoder, *, backward: bool = True) -> bool:
        states = encoder(batch)
        if backward:
            states.float().sum().backward()
        return is_compiled(encoder, batch)

    assert answer(encoder_of())
    assert answer(encoder_of().eval())  # gradients are wanted, whatever the mode
    assert answer(encoder_of(mlp_output_dropout=0.1).eval())
    for dropout in ("mlp_output_dropout", "mlp_inner_dropout", "attention_output_dropout"):
        assert not answer(encoder_of(**{dropout: 0.1}))
    assert answer(encoder_of(attention_dropout=0.1))  # attention's own, which torch computes between the loops
    assert not answer(encoder_of(norm_position="post", final_norm=False, first_attention_norm=True))
    assert not answer(encoder_of(norm="rmsnorm"))
    assert not answer(encoder_of().bfloat16())
    assert not answer(encoder_of().requires_grad_(False), backward=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert not answer(encoder_of())
    listened = encoder_of()
    listened.layers[1].mlp.up.register_forward_hook(lambda *_: heard.append(True))
    assert not answer(listened)
    assert heard
    adapted = encoder_of()
    add_lora(adapted, rank=2, alpha=4, dropout=0.0, seed=0)
    assert not answer(adapted)
    assert training_unsupported_reason(compile_encoder(encoder_of()).layers[0]) == "modules of other kinds"  # type: ignore[arg-type]
    replaced = encoder_of()
    replaced.layers[1].attention.qkv = nn.Linear(96, 288, bias=False)
    assert not answer(replaced)
    encoder_of()(batch_of((20,))).sum().backward()
    assert not is_compiled(encoder_of(), batch_of((20,)))  # few tokens
