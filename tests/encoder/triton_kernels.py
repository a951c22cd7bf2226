"""The Triton kernels against torch's code. Run by tests/test_triton.py: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, EncoderConfig, init_weights, pack_ids
from quiver.encoder.heads import linear_cross_entropy
from quiver.encoder.layers import add_norm, embed, gated, normalize, rotate
from tests.triton_tools import mend_interpreter, sample_programs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    mend_interpreter()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

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


def compare(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> Outputs:
    """The kernel is as near to double precision as torch's code is, in outputs and gradients, which are returned."""
    exact = outcome(monkeypatch, "torch", function, [x.double() for x in inputs])
    plain = outcome(monkeypatch, "torch", function, inputs)
    found = outcome(monkeypatch, "triton", function, inputs)
    for kernel, reference, truth in zip(found, plain, exact, strict=True):
        assert kernel.dtype == reference.dtype
        assert kernel.shape == reference.shape
        unit = torch.finfo(kernel.dtype).eps * truth.abs().max()
        assert (kernel - truth).abs().max() <= 1.1 * (reference - truth).abs().max() + 2 * unit
    return found


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


def replace_parameters(norm: nn.LayerNorm | nn.RMSNorm, parameters: Sequence[Tensor]) -> None:
    """Put these parameters in the place of a module's own, so that they can be leaves of any dtype."""
    for (name, _), value in zip(list(norm.named_parameters()), parameters, strict=True):
        delattr(norm, name)
        setattr(norm, name, value)


def normed(
    norm: nn.LayerNorm | nn.RMSNorm, parameters: Sequence[Tensor], hidden: Tensor, update: Tensor | None, *, dropout: float = 0.0
) -> tuple[Tensor, ...]:
    """add_norm with these parameters."""
    replace_parameters(norm, parameters)
    total, result = (None, normalize(hidden, norm)) if update is None else add_norm(hidden, update, norm, dropout=dropout)
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
    monkeypatch.setattr("quiver.encoder.gpu.triton_norms.NORM_PROGRAMS", 8)
    hidden, update, weight = normal(43, 8), normal(43, 8, seed=5), 1 + normal(8, seed=6)

    def function(h: Tensor, u: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return normed(norms(8)["layernorm"], [w], h, u)

    first = compare(monkeypatch, function, [hidden, update, weight])
    second = outcome(monkeypatch, "triton", function, [hidden, update, weight])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_autocast_gets_norms_in_its_dtype_and_the_stream_stays_float32(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left for autocast to convert: neither norms and updates forward, nor gradients backward."""
    monkeypatch.setenv("QUIVER_OPS", "triton")
    norm = nn.LayerNorm(48).to(DEVICE)
    hidden, update = normal(5, 48, dtype=torch.bfloat16).requires_grad_(), normal(5, 48, dtype=torch.bfloat16, seed=5).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        total, normed = add_norm(hidden, update, norm, dropout=dropout)
        assert (total.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
        again, last = add_norm(total, update, norm, dropout=dropout, dtype=torch.float32)
        with torch.no_grad():
            assert [each.dtype for each in add_norm(hidden, update, norm)] == [torch.float32, torch.bfloat16]
    assert (again.dtype, last.dtype) == (torch.float32, torch.float32)
    (normed.float().sum() + last.sum()).backward()
    assert (hidden.grad.dtype, update.grad.dtype, norm.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    torch.testing.assert_close(normed.float(), norm(total).detach(), atol=2e-2, rtol=1e-2)


def dropped(update: Tensor, probability: float, seed: int) -> Tensor:
    """An update after dropout: the sum with a stream of zeros."""
    torch.manual_seed(seed)
    return add_norm(torch.zeros_like(update), update, nn.LayerNorm(update.shape[1]).to(DEVICE), dropout=probability)[0]


@pytest.mark.parametrize(("tokens", "width", "probability"), [(1, 3, 0.1), (1, 3, 0.5), (40, 48, 0.5), (64, 768, 0.1)])
def test_dropout_keeps_the_mean_and_depends_on_the_seed_alone(
    tokens: int, width: int, probability: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIVER_OPS", "triton")
    update = torch.ones(tokens, width, device=DEVICE)
    first, second, other = (dropped(update, probability, seed) for seed in (0, 0, 1))
    assert torch.equal(first, second)
    kept = first != 0
    assert torch.allclose(first[kept], torch.tensor(1 / (1 - probability), device=DEVICE), rtol=1e-4)
    if tokens * width > 1000:
        assert not torch.equal(first, other)
        deviation = (probability * (1 - probability) / kept.numel()) ** 0.5
        assert abs(kept.float().mean().item() - (1 - probability)) < 5 * deviation
        # Neither neighbours nor the same place of another token or seed go together.
        for left, right in ((kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1]), (kept, other != 0), (kept[:, 8:], kept[:, :-8])):
            both = (left & right).float().mean().item()
            assert abs(both - (1 - probability) ** 2) < 6 * deviation


@functools.cache
def mask_of_ones(tokens: int, width: int) -> Tensor:
    return dropped(torch.ones(tokens, width, device=DEVICE), 0.3, seed=7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["layernorm", "biased", "rmsnorm"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 5), (33, 48), (3, 1792)])
def test_dropout_sum_and_norm_with_gradients(
    tokens: int, width: int, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against PyTorch's operators with the same mask, in double precision too."""
    monkeypatch.setenv("QUIVER_OPS", "triton")
    parameters = [1 + normal(width, dtype=dtype, seed=seed) for seed in range(2 if kind == "biased" else 1)]
    hidden, update = 1 + 2 * normal(tokens, width, dtype=dtype, seed=4), normal(tokens, width, dtype=dtype, seed=5)
    mask = mask_of_ones(tokens, width)

    def function(h: Tensor, u: Tensor, *p: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(7)
        if os.environ["QUIVER_OPS"] == "torch":
            return normed(norms(width)[kind], p, h, u * mask.to(u.dtype) if u.dtype == torch.float64 else (u.float() * mask).to(u.dtype))
        return normed(norms(width)[kind], p, h, u, dropout=0.3)

    compare(monkeypatch, function, [hidden, update, *parameters])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["layernorm", "biased", "rmsnorm"])
@pytest.mark.parametrize(("positions", "types"), [(False, False), (True, False), (True, True), (False, True)])
def test_embeddings(positions: bool, types: bool, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of the tables too: of words that are used often, and never."""
    width = 40
    ids = torch.tensor([3, 0, 3, 6, 3, 1], device=DEVICE)
    places = torch.tensor([0, 1, 2, 0, 1, 2], device=DEVICE)
    count = 2 if kind == "biased" else 1
    tables = [normal(7, width, dtype=dtype, seed=4)] + [normal(rows, width, dtype=dtype, seed=rows) for rows in (5, 2)]
    parameters = [1 + normal(width, dtype=dtype, seed=seed) for seed in range(count)]

    def function(*inputs: Tensor) -> list[Tensor]:
        tokens, table, kinds = inputs[:3]
        norm = norms(width)[kind]
        replace_parameters(norm, inputs[3:])
        result = embed(
            ids, tokens, norm, positions=(table, places) if positions else None, types=kinds if types else None, dtype=tokens.dtype
        )
        return [result + 0 * (table.sum() + kinds.sum())]

    compare(monkeypatch, function, [*tables, *parameters])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("with_bias", "z_loss"), [(True, 0.0), (False, 0.01)])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 3), (40, 257), (140, 96), (3, 5003)])
def test_cross_entropy_of_a_vocabulary(
    rows: int, vocabulary: int, with_bias: bool, z_loss: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of more rows than a chunk has, and of a vocabulary that is no multiple of a block."""
    labels = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    labels[0], labels[-1] = 0, vocabulary - 1
    inputs = [2 * normal(rows, 16, dtype=dtype), normal(vocabulary, 16, dtype=dtype, seed=2), normal(vocabulary, dtype=dtype, seed=3)]

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        found = linear_cross_entropy(hidden, weight, bias if with_bias else None, labels, z_loss=z_loss)
        return [found.loss + 0 * bias.sum(), found.z_loss, *([] if torch.is_grad_enabled() else [found.correct])]

    first = compare(monkeypatch, function, inputs)
    second = outcome(monkeypatch, "triton", function, inputs)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    monkeypatch.setenv("QUIVER_OPS", "triton")
    with torch.no_grad():
        loss, squares, correct = function(*inputs)
        monkeypatch.setenv("QUIVER_OPS", "torch")
        assert correct == function(*inputs)[2]
    torch.testing.assert_close([loss, squares], first[:2])


def test_cross_entropy_of_extreme_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIVER_OPS", "triton")
    weight = torch.tensor([[1e4], [-1e4], [torch.inf], [torch.nan]], device=DEVICE)
    hidden, label = torch.ones(1, 1, device=DEVICE), torch.tensor([1], device=DEVICE)
    assert linear_cross_entropy(hidden, weight[:2], None, label).loss.item() == 2e4
    assert not linear_cross_entropy(hidden, weight[:3], None, label).loss.isfinite()
    assert linear_cross_entropy(hidden, weight, None, label).loss.isnan()
    outside = torch.tensor([3, -1], device=DEVICE)  # beyond the vocabulary: no other memory is read
    assert linear_cross_entropy(hidden.expand(2, -1), weight[:2], None, outside).loss.isnan()


def test_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIVER_OPS", "triton")
    nothing, norm = torch.empty(0, 16, device=DEVICE), nn.LayerNorm(16).to(DEVICE)
    assert [each.shape for each in add_norm(nothing, nothing.clone(), norm, dropout=0.1)] == [(0, 16)] * 2
    assert gated(nothing, "gelu").shape == (0, 8)
    angle = torch.empty(0, 4, device=DEVICE)
    assert [each.shape for each in rotate(torch.empty(0, 3, 2, 8, device=DEVICE), angle, angle)] == [(0, 2, 8)] * 3
    ids = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert embed(ids, normal(5, 16), norm, dtype=torch.float32).shape == (0, 16)


def test_a_million_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs some programs of each grid, the first and the last among them; what the others write is not compared."""
    tokens, width = 2**20, 8
    hidden, update, norm = normal(tokens, width), normal(tokens, width, seed=5), nn.LayerNorm(width).to(DEVICE)
    ids, angles = torch.arange(tokens, device=DEVICE) % 11, normal(tokens, 4, seed=6)

    def run() -> list[Tensor]:
        qkv = hidden.view(tokens, 1, 1, width).repeat(1, 3, 1, 1)
        embedded = embed(ids, normal(11, width), norm, dtype=torch.float32)
        return [*add_norm(hidden.clone(), update, norm), gated(hidden, "gelu"), *rotate(qkv, angles, angles), embedded]

    monkeypatch.setenv("QUIVER_OPS", "torch")
    with torch.no_grad():
        expected = run()
    monkeypatch.setenv("QUIVER_OPS", "triton")
    if DEVICE == "cpu":
        sample_programs(monkeypatch, 50)
    with torch.no_grad():
        found = run()
    for one, other in zip(found, expected, strict=True):
        same = torch.isclose(one, other, atol=1e-5, rtol=1e-5).flatten(1).all(1)
        assert same[0]
        assert same[-1]
        assert same.sum() >= (50 if DEVICE == "cpu" else tokens)


def test_rotation_of_gradients_that_are_packed_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place: attention has written them where the gradient of the product has to be."""
    angle, received = normal(6, 8), normal(6, 3, 2, 16, seed=5)
    monkeypatch.setenv("QUIVER_OPS", "torch")
    leaf = normal(6, 3, 2, 16).requires_grad_()
    (expected,) = torch.autograd.grad(rotate(leaf * 1, angle.cos(), angle.sin()), leaf, [each.clone() for each in received.unbind(1)])
    monkeypatch.setenv("QUIVER_OPS", "triton")
    product = leaf * 1
    (found,) = torch.autograd.grad(rotate(product, angle.cos(), angle.sin()), product, received.unbind(1))
    assert found.data_ptr() == received.data_ptr()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("norm_position", ["pre", "post", "parallel"])
def test_checkpointing_replays_dropout(norm_position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIVER_OPS", "triton")
    config = small_config(norm_position, attention_output_dropout=0.2, mlp_output_dropout=0.2, layer_types=("global", "local"))
    encoder = init_weights(Encoder(config), seed=0).to(DEVICE)
    batch = pack_ids([list(range(1, 6)), [5, 6]])
    states = []
    for checkpointing in (False, True):
        torch.manual_seed(3)
        encoder.gradient_checkpointing = checkpointing
        encoder.zero_grad()
        encoder(batch).square().mean().backward()
        states.append([weight.grad.clone() for weight in encoder.parameters()])
    for found, expected in zip(*states, strict=True):
        torch.testing.assert_close(found, expected)
    plain = encoder.eval()(batch)
    assert not torch.equal(plain, encoder.train()(batch))


def small_config(norm_position: str, **changes: Any) -> EncoderConfig:
    config = EncoderConfig.modernbert(
        vocab_size=64,
        hidden_size=48,
        num_heads=2,
        intermediate_size=40,
        layer_types=["global", "local", "local"],
        window=8,
        max_positions=64,
    )
    return replace(config, norm_position=norm_position, first_attention_norm=norm_position == "post", **changes)


@pytest.mark.parametrize(("norm_position", "checkpointing"), [("pre", False), ("pre", True), ("post", False), ("parallel", False)])
def test_an_encoder_by_kernels(norm_position: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the backward pass computes a block, with its kernels in place, once more."""
    encoder = init_weights(Encoder(small_config(norm_position)), seed=0).to(DEVICE)
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
