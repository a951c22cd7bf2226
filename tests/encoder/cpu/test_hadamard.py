"""Rotated features: the same bits in any batch, and what int8 gains where features stand out. The definition is in test_blocks_int8.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quiver.encoder.cpu.linear import Int8Matrix, hadamard


@pytest.fixture
def random() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(5)
    return lambda *shape: torch.randn(*shape, generator=generator)


def test_a_token_is_rotated_to_the_same_bits_beside_others(random: Callable[..., Tensor]) -> None:
    x = random(70, 384)
    together = hadamard(x)
    assert all(torch.equal(hadamard(x[i : i + 1])[0], together[i]) for i in range(70))


@pytest.mark.skipif(torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="torch has no 8-bit kernels here")
@pytest.mark.parametrize(
    ("change", "share"),
    [
        (lambda x: x * torch.where(torch.arange(384) == 7, 30, 1), 1 / 1.8),  # a feature that stands out costs the others little
        (lambda x: x + 100, 1.05),  # what features have in common costs nothing
        (torch.relu, 1.5),  # such numbers fill their grid best as they are; rotated they fill it as any others do
    ],
    ids=["outlier", "shift", "positive"],
)
def test_a_rotated_product_is_nearer_than_a_plain_one(
    random: Callable[..., Tensor], change: Callable[[Tensor], Tensor], share: float
) -> None:
    x, weight = change(random(200, 384)), random(96, 384)
    matrix = Int8Matrix(weight, None, plain_layout=False)
    scales = weight.abs().amax(1, keepdim=True) / 127
    least = x.amin(1, keepdim=True)
    steps = (x.amax(1, keepdim=True) - least) / matrix.levels
    plain = (((x - least) / steps).round() * steps + least) @ ((weight / scales).round() * scales).t()
    exact = x.double() @ weight.double().t()
    found, without = ((each - exact).square().mean().sqrt() for each in (matrix(x), plain))
    assert found < share * without
