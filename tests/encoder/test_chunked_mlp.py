"""MLPs in chunks: the same numbers and gradients as in one piece, and less kept for the backward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import quiver.encoder.layers as layers
from quiver.encoder import EncoderConfig
from quiver.encoder.cpu.chunked_mlp import CHUNK, runs_in_chunks
from quiver.encoder.cpu.processor import has_onednn
from quiver.encoder.layers import MLP

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")

GATED = EncoderConfig.modernbert(vocab_size=300, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global"])
PLAIN = replace(GATED, mlp="plain", mlp_input_bias=True, mlp_output_bias=True)


def results(mlp: MLP, x: Tensor) -> list[Tensor | None]:
    """What comes out, and the gradients of the input and of all weights."""
    mlp.zero_grad()
    x = x.detach().clone().requires_grad_(x.requires_grad)
    output = mlp(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, *(weight.grad for weight in mlp.parameters())]


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu"])
@pytest.mark.parametrize("config", [GATED, PLAIN], ids=["gated", "plain"])
@pytest.mark.parametrize("tokens", [CHUNK, CHUNK + 1, 2 * CHUNK + 300])
def test_chunks_are_the_whole(monkeypatch: pytest.MonkeyPatch, config: EncoderConfig, activation: str, tokens: int) -> None:
    torch.manual_seed(0)
    mlp = MLP(replace(config, activation=activation))
    x = torch.randn(tokens, 32, requires_grad=True)
    assert runs_in_chunks(x, mlp.up, mlp.down)
    found = results(mlp, x)
    monkeypatch.setattr(layers, "runs_in_chunks", lambda *given: False)
    for mine, whole in zip(found, results(mlp, x), strict=True):
        assert mine is not None
        assert whole is not None
        torch.testing.assert_close(mine, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("frozen", ["input", "up.weight", "up.bias", "down.weight", "down.bias"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    torch.manual_seed(0)
    mlp, x = MLP(PLAIN), torch.randn(CHUNK + 5, 32, requires_grad=frozen != "input")
    named = dict(mlp.named_parameters())
    if frozen != "input":
        named[frozen].requires_grad_(False)
    _, of_x, *of_weights = results(mlp, x)
    without = [name for name, gradient in zip(["input", *named], [of_x, *of_weights], strict=True) if gradient is None]
    assert without == [frozen]


def test_only_where_it_serves() -> None:
    mlp, x = MLP(PLAIN), torch.randn(CHUNK, 32, requires_grad=True)
    assert runs_in_chunks(x, mlp.up, mlp.down)
    assert runs_in_chunks(x.detach(), mlp.up, mlp.down), "the weights want gradients"
    assert not runs_in_chunks(x[:-1], mlp.up, mlp.down)
    assert not runs_in_chunks(x.double(), mlp.up, mlp.down)
    assert not runs_in_chunks(x, torch.nn.Identity(), mlp.down)
    with torch.no_grad():
        assert not runs_in_chunks(x, mlp.up, mlp.down)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not runs_in_chunks(x, mlp.up, mlp.down)
    mlp.requires_grad_(False)
    assert not runs_in_chunks(x.detach(), mlp.up, mlp.down)


def test_dropout_between_the_matrices_is_kept() -> None:
    torch.manual_seed(0)
    mlp, x = MLP(replace(GATED, mlp_inner_dropout=0.5)), torch.randn(CHUNK, 32, requires_grad=True)
    assert not torch.equal(mlp.train()(x), mlp(x))
    assert torch.equal(mlp.eval()(x), mlp(x))


@pytest.mark.parametrize(("config", "inner"), [(GATED, 96), (PLAIN, 48)], ids=["gated", "plain"])
def test_one_inner_tensor_is_kept(config: EncoderConfig, inner: int) -> None:
    mlp, x = MLP(config), torch.randn(2 * CHUNK + 9, 32, requires_grad=True)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mlp(x)
    assert sum(kept) == len(x) * (32 + inner) + mlp.up.weight.numel() + mlp.down.weight.numel()
