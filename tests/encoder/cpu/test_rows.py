"""Passes over rows by compiled kernels against PyTorch operators in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quiver.encoder.cpu.blocks import activation_gradients
from quiver.encoder.cpu.support import kernels_available, row_kernels_run
from quiver.encoder.ops import ACTIVATION_FUNCTIONS, rotate_

pytestmark = [
    pytest.mark.skipif(not kernels_available(), reason="no numba, OpenMP threads or fused multiplications here"),
    pytest.mark.usefixtures("two_threads"),
]


def numbers(*shape: int, spread: float = 3.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * spread


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("activation", ACTIVATION_FUNCTIONS)
def test_the_way_back_through_an_activation(activation: str, gate: bool) -> None:
    tokens, width = 331, 80
    inner, gradient = numbers(tokens, width * (2 if gate else 1)), numbers(tokens, width)
    inner[:3] = torch.tensor([0.0, 40.0, -40.0])[:, None]  # where nothing, all, or nothing of it is left
    exact = inner.double().requires_grad_()
    first, second = exact.chunk(2, dim=-1) if gate else (exact, torch.ones(()))
    gave = ACTIVATION_FUNCTIONS[activation](first) * second
    gave.backward(gradient.double())
    assert row_kernels_run(inner, width)
    activated, of_inner = activation_gradients(inner, gradient.clone(), activation, gate=gate)
    torch.testing.assert_close(activated, gave.detach().float(), atol=3e-6, rtol=3e-6)
    torch.testing.assert_close(of_inner, exact.grad.float(), atol=3e-6, rtol=3e-6)  # type: ignore[union-attr]


@pytest.mark.parametrize("activation", ACTIVATION_FUNCTIONS)
def test_nan_stays_nan(activation: str) -> None:
    inner = numbers(300, 32)
    inner[7] = torch.nan
    activated, of_inner = activation_gradients(inner, torch.ones(300, 16), activation, gate=True)
    assert activated[7].isnan().all()
    assert of_inner[7].isnan().all()
    assert activated[8].isfinite().all()


@pytest.mark.parametrize("half", [16, 32])
@pytest.mark.parametrize("layout", ["packed", "heads first"])
def test_rope(half: int, layout: str) -> None:
    tokens, heads, width = 333, 5, 64
    x = numbers(tokens, 3, heads, width)[:, 1] if layout == "packed" else numbers(heads, tokens, width).transpose(0, 1)
    angle = numbers(tokens, half, spread=100.0)
    cos, sin = angle.cos(), angle.sin()
    first, second, rest = x.double().split([half, half, width - 2 * half], dim=-1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    expected = torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1).float()
    assert row_kernels_run(x, half)
    torch.testing.assert_close(rotate_(x, cos, sin), expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(rotate_(x, cos, -sin), torch.cat((first, second, rest), -1).float(), atol=4e-6, rtol=0)


def test_rows_that_kernels_cannot_process_are_left_to_pytorch() -> None:
    x = numbers(400, 2, 48)
    assert row_kernels_run(x, 16)
    assert not row_kernels_run(x[:200], 16)
    assert not row_kernels_run(x, 24)
    assert not row_kernels_run(x.double(), 16)
    assert not row_kernels_run(x.transpose(1, 2), 16)
    assert not row_kernels_run(x.to("meta"), 16)
