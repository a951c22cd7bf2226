"""Turned features: Hadamard's matrix block by block, products unchanged, and what int8 gains where features stand out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from encoder.frozen import Int8Matrix
from encoder.rotation import block, rotated


@pytest.fixture
def random() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(5)
    return lambda *shape: torch.randn(*shape, generator=generator)


def test_blocks_divide_every_width() -> None:
    assert [block(width) for width in (384, 768, 2624, 96, 400, 20, 30, 1)] == [64, 64, 64, 16, 16, 4, 1, 1]


@pytest.mark.parametrize("width", [128, 48, 20, 7])
def test_neighbouring_features_are_turned_by_a_hadamard_matrix(width: int) -> None:
    size = block(width)
    signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])
    expected = torch.block_diag(*[signs] * (width // size))  # type: ignore[no-untyped-call]
    assert torch.equal(rotated(torch.eye(width)), expected)
    assert torch.equal(rotated(rotated(torch.eye(width))), size * torch.eye(width))


def test_products_of_what_is_turned_alike_are_the_same(random: Callable[..., Tensor]) -> None:
    x, weight = random(3, 9, 192).double(), random(10, 192).double()
    torch.testing.assert_close(rotated(x) @ (rotated(weight) / 64).t(), x @ weight.t())


def _as_they_come(x: Tensor, weight: Tensor, levels: int) -> Tensor:
    """A product of integers of features that are not turned."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    least = x.amin(1, keepdim=True)
    steps = (x.amax(1, keepdim=True) - least) / levels
    return (((x - least) / steps).round() * steps + least) @ ((weight / scales).round() * scales).t()


@pytest.mark.skipif(torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="torch has no 8-bit kernels here")
def test_a_feature_that_stands_out_costs_the_others_little(random: Callable[..., Tensor]) -> None:
    x, weight = random(200, 384), random(96, 384)
    for outlier in (1.0, 30.0):
        x[:, 7] = outlier * random(200)
        matrix = Int8Matrix(weight, None, read=False)
        exact = x @ weight.t()
        error, plain = ((found - exact).square().mean().sqrt() for found in (matrix(x), _as_they_come(x, weight, matrix.levels)))
        assert error < 1.05 * plain, outlier  # no worse where none does
    assert error < plain / 1.8
