"""Token-wise arithmetic in torch: by hand and by its laws; and who decides between torch and Triton."""

from __future__ import annotations

import importlib.util
import logging

import pytest
import torch
from torch import nn

from quiver.encoder import InputError
from quiver.encoder.layers import add_norm, choose_ops, rotate, rotate_reference, use_triton


def angles(tokens: int, pairs: int) -> torch.Tensor:
    return torch.rand(tokens, pairs, generator=torch.Generator().manual_seed(1)) * 50


@pytest.mark.parametrize("tokens", [3, 1500])
def test_rotation_of_a_part_of_each_head_and_its_gradient_are_those_of_the_reference(tokens: int) -> None:
    qkv, upstream = torch.randn(tokens, 3, 2, 16, requires_grad=True), torch.randn(3, tokens, 2, 16)
    angle = angles(tokens, 4)
    results = []
    for function in (rotate, rotate_reference):
        parts = function(qkv, angle.cos(), angle.sin())
        results.append((*parts, *torch.autograd.grad(parts, qkv, upstream.unbind(0))))
    torch.testing.assert_close(*results)


def test_a_half_precision_rotation_rounds_once() -> None:
    """At position 8,191 an angle in bfloat16 would be off by whole turns."""
    angle = torch.tensor([[8191.0, 81.91]])
    qkv = torch.randn(1, 3, 1, 4).bfloat16()
    q, _, _ = rotate(qkv.clone(), angle.cos(), angle.sin())
    exact, _, _ = rotate(qkv.double(), angle.double().cos(), angle.double().sin())
    torch.testing.assert_close(q.double(), exact, atol=0, rtol=2**-8)


def test_sum_and_norm() -> None:
    norm = nn.LayerNorm(6, bias=True)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    hidden, update = torch.randn(4, 6), torch.randn(4, 6)
    before = hidden.clone()
    total, normed = add_norm(hidden, update, norm)
    torch.testing.assert_close(total, hidden + update)
    torch.testing.assert_close(normed, norm(hidden + update))
    torch.testing.assert_close(hidden, before)  # with gradients the stream stays
    assert add_norm(hidden, None, nn.Identity()) == (hidden, hidden)
    with torch.no_grad():
        total, _ = add_norm(hidden, update, norm)
    assert total.data_ptr() == hidden.data_ptr()


@pytest.mark.parametrize(
    ("device", "dtype", "override", "name"),
    [
        ("cpu", torch.float32, None, "torch"),
        ("mps", torch.float16, None, "torch"),
        ("cuda", torch.bfloat16, None, "triton"),
        ("cuda", torch.float16, None, "triton"),
        ("cuda", torch.float32, None, "triton"),
        ("cuda", torch.float64, None, "torch"),
        ("cuda", torch.bfloat16, "torch", "torch"),
        ("cuda", torch.bfloat16, "triton", "triton"),
    ],
)
def test_the_implementation_follows_device_dtype_and_override(
    device: str, dtype: torch.dtype, override: str | None, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module)
    choose_ops.cache_clear()
    with caplog.at_level(logging.INFO, logger="quiver.encoder.layers"):
        assert [choose_ops(device, dtype, override) for _ in range(3)] == [name] * 3
    choose_ops.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        f"token-wise arithmetic on {device} in {str(dtype).removeprefix('torch.')}: {name}"
    ]


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    choose_ops.cache_clear()
    assert choose_ops("cuda", torch.bfloat16) == "torch"
    with pytest.raises(InputError, match="QUIVER_OPS is triton, which is not installed"):
        choose_ops("cuda", torch.bfloat16, "triton")
    choose_ops.cache_clear()


def test_a_wrong_override_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIVER_OPS", "cuda")
    with pytest.raises(InputError, match="QUIVER_OPS must be torch or triton, got 'cuda'"):
        use_triton(torch.ones(2))
