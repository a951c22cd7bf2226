"""The Triton kernels against torch's code. Run by test_triton.py: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, EncoderConfig, init_weights, pack_ids
from quiver.encoder.ops import add_norm, gated, normalize, rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]

Outputs = list[Tensor]


def outcome(monkeypatch: pytest.MonkeyPatch, code: str, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> Outputs:
    """Outputs and the gradients of a fixed weighting of them, by one of the two codes."""
    monkeypatch.setenv("QUIVER_OPS", code)
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = list(function(*[leaf * 1 for leaf in leaves]))  # kernels may overwrite what they get
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device) for x in outputs]
    loss = torch.stack([(x.double() * weight).sum() for x, weight in zip(outputs, weights, strict=True)]).sum()
    return [x.detach() for x in outputs] + list(torch.autograd.grad(loss, leaves))


def compare(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
    """The kernel is as near to double precision as torch's code is, in outputs and gradients."""
    exact = outcome(monkeypatch, "torch", function, [x.double() for x in inputs])
    plain = outcome(monkeypatch, "torch", function, inputs)
    found = outcome(monkeypatch, "triton", function, inputs)
    for kernel, reference, truth in zip(found, plain, exact, strict=True):
        assert kernel.dtype == reference.dtype
        assert kernel.shape == reference.shape
        unit = torch.finfo(kernel.dtype).eps * truth.abs().max()
        assert (kernel - truth).abs().max() <= 1.1 * (reference - truth).abs().max() + 2 * unit


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "rotary"), [(1, 1, 8, 8), (37, 3, 48, 48), (37, 3, 48, 24), (130, 2, 64, 64), (5, 7, 96, 40)]
)
def test_rotation(tokens: int, heads: int, width: int, rotary: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    angle = torch.rand(tokens, rotary // 2, generator=torch.Generator().manual_seed(3)).to(DEVICE) * 8191
    compare(monkeypatch, lambda qkv: rotate(qkv, angle.cos(), angle.sin()), [normal(tokens, 3, heads, width, dtype=dtype)])


def test_rotation_is_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIVER_OPS", "triton")
    qkv, angle = normal(6, 3, 2, 16), normal(6, 8)
    for product in (qkv, (qkv.clone().requires_grad_() * 1)):
        q, k, v = rotate(product, angle.cos(), angle.sin())
        assert [x.data_ptr() for x in (q, k, v)] == [product[:, part].data_ptr() for part in range(3)]


def test_gradients_from_strided_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention may give the gradients of q, k and v with any strides."""
    angle = normal(6, 8)
    received = [normal(2, 6, 16, seed=5).transpose(0, 1), normal(6, 16, 2, seed=6).transpose(1, 2), normal(6, 2, 16, seed=7)]
    gradients = []
    for code in ("torch", "triton"):
        monkeypatch.setenv("QUIVER_OPS", code)
        leaf = normal(6, 3, 2, 16).requires_grad_()
        gradients += torch.autograd.grad(rotate(leaf * 1, angle.cos(), angle.sin()), leaf, received)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (13, 130), (19, 96)])
def test_gates(tokens: int, width: int, activation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    up = 3 * normal(tokens, 2 * width, dtype=dtype)
    compare(monkeypatch, lambda up: [gated(up, activation)], [up])


def test_gates_far_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    up = torch.tensor([[-300.0, -40.0, 0.0, 40.0, 300.0] + [1.0] * 5], device=DEVICE)
    for activation in ("gelu", "gelu_tanh", "silu", "relu"):
        values = outcome(monkeypatch, "triton", lambda up, name=activation: [gated(up, name)], [up])
        torch.testing.assert_close(values[0], torch.tensor([[0.0, 0.0, 0.0, 40.0, 300.0]], device=DEVICE), atol=1e-6, rtol=1e-6)
        assert all(value.isfinite().all() for value in values)


def norms(width: int) -> dict[str, nn.LayerNorm | nn.RMSNorm]:
    return {"layernorm": nn.LayerNorm(width, bias=False), "biased": nn.LayerNorm(width), "rmsnorm": nn.RMSNorm(width, eps=1e-6)}


def normed(norm: nn.LayerNorm | nn.RMSNorm, parameters: Sequence[Tensor], hidden: Tensor, update: Tensor | None) -> tuple[Tensor, ...]:
    """add_norm with these parameters in the module's place, so that they can be leaves of any dtype."""
    for (name, _), value in zip(list(norm.named_parameters()), parameters, strict=True):
        delattr(norm, name)
        setattr(norm, name, value)
    total, result = (None, normalize(hidden, norm)) if update is None else add_norm(hidden, update, norm)
    return (result,) if total is None else (total, result)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["layernorm", "biased", "rmsnorm"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (33, 48), (6, 384), (5, 768), (3, 1792)])
def test_norms(tokens: int, width: int, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [1 + normal(width, dtype=dtype, seed=seed) for seed in range(2 if kind == "biased" else 1)]
    hidden, update = 1 + 2 * normal(tokens, width, dtype=dtype, seed=4), normal(tokens, width, dtype=dtype, seed=5)
    compare(monkeypatch, lambda h, u, *p: normed(norms(width)[kind], p, h, u), [hidden, update, *parameters])
    compare(monkeypatch, lambda h, *p: normed(norms(width)[kind], p, h, None), [hidden, *parameters])


@pytest.mark.parametrize("used", [0, 1])
def test_a_sum_or_a_norm_nobody_uses(used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a post-norm block the sum is dropped; the norm is where a layer is frozen out."""
    hidden, update = normal(5, 48, seed=4), normal(5, 48, seed=5)
    weight = 1 + normal(48)

    def function(h: Tensor, u: Tensor, w: Tensor) -> list[Tensor]:
        return [normed(norms(48)["layernorm"], [w], h, u)[used] + 0 * w.sum()]

    compare(monkeypatch, function, [hidden, update, weight])


def test_a_half_precision_update_of_a_float32_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under autocast: the sum and its norm stay float32, the update's gradient is half."""
    hidden, update, weight = normal(5, 48), normal(5, 48, dtype=torch.bfloat16, seed=5), 1 + normal(48, seed=6)
    results = [
        outcome(monkeypatch, code, lambda h, u, w: normed(norms(48)["layernorm"], [w], h, u), [hidden, update, weight])
        for code in ("torch", "triton")
    ]
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)  # the dtypes too


def test_the_gradient_of_a_weight_has_the_same_bits_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with more tokens than programs, and not a multiple of their number."""
    from quiver.encoder.gpu import triton_kernels

    monkeypatch.setattr(triton_kernels, "NORM_PROGRAMS", 8)
    hidden, update, weight = normal(43, 8), normal(43, 8, seed=5), 1 + normal(8, seed=6)

    def function(h: Tensor, u: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return normed(norms(8)["layernorm"], [w], h, u)

    first, second = (outcome(monkeypatch, "triton", function, [hidden, update, weight]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    compare(monkeypatch, function, [hidden, update, weight])


def test_without_gradients_the_stream_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIVER_OPS", "triton")
    hidden, update, norm = normal(5, 48), normal(5, 48, seed=5), nn.LayerNorm(48).to(DEVICE)
    expected = hidden + update
    with torch.no_grad():
        total, result = add_norm(hidden, update, norm)
        assert total.data_ptr() == hidden.data_ptr()
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(result, norm(expected))
    hidden.copy_(expected)
    for weight in norm.parameters():
        weight.requires_grad_(False)
    total, _ = add_norm(hidden, update, norm)  # gradients on, none wanted: the stream is somebody's
    torch.testing.assert_close(hidden, expected)
    torch.testing.assert_close(total, expected + update)


@pytest.mark.parametrize(("norm_position", "checkpointing"), [("pre", False), ("pre", True), ("post", False), ("parallel", False)])
def test_an_encoder_by_kernels(norm_position: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the backward pass computes a block, with its kernels in place, once more."""
    config = EncoderConfig.modernbert(
        vocab_size=64,
        hidden_size=48,
        num_heads=2,
        intermediate_size=40,
        layer_types=["global", "local", "local"],
        window=8,
        max_positions=64,
    )
    config = type(config)(**{**vars(config), "norm_position": norm_position, "first_attention_norm": norm_position == "post"})
    encoder = init_weights(Encoder(config), seed=0).to(DEVICE)
    encoder.gradient_checkpointing = checkpointing
    batch = pack_ids([list(range(1, 31)), [5, 6, 7]])
    states = []
    for code in ("torch", "triton"):
        monkeypatch.setenv("QUIVER_OPS", code)
        encoder.zero_grad()
        hidden = encoder(batch)
        hidden.square().mean().backward()
        states.append([hidden.detach(), *(weight.grad.clone() for weight in encoder.parameters())])
    for found, expected in zip(*states, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
