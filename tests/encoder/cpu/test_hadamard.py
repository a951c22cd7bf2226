"""Rotated features: Hadamard's matrix block by block, products unchanged, and what int8 gains where features stand out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quiver.encoder.cpu.linear import Int8Matrix, hadamard, hadamard_size


@pytest.fixture
def random() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(5)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.mark.parametrize("width", [128, 48, 20, 7])
def test_neighbouring_features_are_rotated_by_a_regular_hadamard_matrix(width: int) -> None:
    size = hadamard_size(width)
    rotated = hadamard(torch.eye(width))
    blocks = torch.block_diag(*[torch.ones(size, size)] * (width // size))  # type: ignore[no-untyped-call]
    assert torch.equal(rotated.abs(), blocks)
    assert torch.equal(rotated @ rotated.t(), size * torch.eye(width))
    assert torch.equal(hadamard(torch.ones(2, width)), torch.full((2, width), size**0.5))


def test_products_of_what_is_rotated_alike_are_the_same(random: Callable[..., Tensor]) -> None:
    x, weight = random(3, 9, 192).double(), random(10, 192).double()
    torch.testing.assert_close(hadamard(x) @ (hadamard(weight) / 64).t(), x @ weight.t())


def test_a_token_is_rotated_to_the_same_bits_beside_others(random: Callable[..., Tensor]) -> None:
    x = random(70, 384)
    together = hadamard(x)
    assert all(torch.equal(hadamard(x[i : i + 1])[0], together[i]) for i in range(70))


@pytest.mark.skipif(torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="torch has no 8-bit kernels here")
class TestInt8:
    @staticmethod
    def errors(x: Tensor, weight: Tensor) -> tuple[float, float]:
        """Of a product as it is, and of one of features that are not rotated."""
        matrix = Int8Matrix(weight, None, plain_layout=False)
        scales = weight.abs().amax(1, keepdim=True) / 127
        least = x.amin(1, keepdim=True)
        steps = (x.amax(1, keepdim=True) - least) / matrix.levels
        plain = (((x - least) / steps).round() * steps + least) @ ((weight / scales).round() * scales).t()
        exact = x.double() @ weight.double().t()
        found, without = (float((each - exact).square().mean().sqrt()) for each in (matrix(x), plain))
        return found, without

    def test_a_feature_that_stands_out_costs_the_others_little(self, random: Callable[..., Tensor]) -> None:
        x, weight = random(200, 384), random(96, 384)
        x[:, 7] *= 30
        found, plain = self.errors(x, weight)
        assert found < plain / 1.8

    @pytest.mark.parametrize("shift", [0.0, 1.0, 100.0])
    def test_what_features_have_in_common_costs_nothing(self, random: Callable[..., Tensor], shift: float) -> None:
        found, plain = self.errors(random(200, 384) + shift, random(96, 384))
        assert found < 1.05 * plain

    def test_what_is_above_zero_costs_little(self, random: Callable[..., Tensor]) -> None:
        """Such numbers fill their grid best as they are; rotated they fill it as any others do."""
        found, plain = self.errors(random(200, 384).relu(), random(96, 384))
        assert found < 1.5 * plain
