"""RoPE's tables and their scalings, and ALiBi's slopes, against the published formulas."""

from __future__ import annotations

import math

import pytest
import torch

from quiver.encoder.config import RopeScaling
from quiver.encoder.layers import RotaryTable, alibi_slopes, rope_frequencies


def test_linear_scaling_divides_every_frequency() -> None:
    plain, _ = rope_frequencies(10_000.0, 64)
    scaled, factor = rope_frequencies(10_000.0, 64, RopeScaling("linear", 4.0, 512))
    torch.testing.assert_close(scaled, plain / 4)
    assert factor == 1.0


def test_yarn_keeps_high_frequencies_and_divides_low_ones() -> None:
    plain, _ = rope_frequencies(160_000.0, 64)
    scaled, factor = rope_frequencies(160_000.0, 64, RopeScaling("yarn", 4.0, 8192))
    turns = 8192 * plain / (2 * math.pi)
    # The ramp's ends are rounded outwards to whole pairs, so only pairs beyond them are exactly kept or divided.
    assert torch.equal(scaled[turns > 64], plain[turns > 64])
    torch.testing.assert_close(scaled[turns < 0.5], plain[turns < 0.5] / 4)
    between = (turns < 16) & (turns > 2)
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 4).all()
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    assert rope_frequencies(1e4, 64, RopeScaling("yarn", 4.0, 8192, attention_factor=1.0))[1] == 1.0


def test_yarns_factor_scales_the_table() -> None:
    table = RotaryTable(theta=10_000.0, rotary_width=16, max_positions=8, scaling=RopeScaling("yarn", 2.0, 4))
    torch.testing.assert_close(table.cos.square() + table.sin.square(), torch.full((8, 8), (0.1 * math.log(2) + 1) ** 2))


def test_ntk_stretches_the_base() -> None:
    scaled, _ = rope_frequencies(10_000.0, 64, RopeScaling("ntk", 2.0, 8192))
    expected = [1 / (20_000 ** (2 * pair / 64)) / 2 ** (2 / 64) for pair in range(32)]
    torch.testing.assert_close(scaled, torch.tensor(expected))


def test_slopes_are_the_papers() -> None:
    torch.testing.assert_close(alibi_slopes(8), torch.tensor([2.0**-power for power in range(1, 9)]))
    torch.testing.assert_close(alibi_slopes(16), torch.tensor([2.0 ** (-power / 2) for power in range(1, 17)]))
    # 12 heads: the eight of 8, then the odd-numbered of 16.
    torch.testing.assert_close(alibi_slopes(12)[8:], torch.tensor([2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]))
