"""Averages of weights against their definitions."""

from __future__ import annotations

import torch
from torch import nn

from quiver.encoder.training.averaging import MovingAverage


def step(model: nn.Module, number: int) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))


def test_the_moving_average_is_the_sum_of_weights_that_halve() -> None:
    model = nn.Linear(3, 2)
    half_life, states = 3.0, [model.weight.detach().clone().double()]
    average = MovingAverage(model, half_life=half_life)
    for number in range(10):
        step(model, number)
        average.update(model)
        states.append(model.weight.detach().clone().double())
    kept = 0.5 ** (1 / half_life)
    expected = kept**10 * states[0] + sum((1 - kept) * kept ** (10 - number) * states[number] for number in range(1, 11))
    before = model.bias.detach().clone()
    average.copy_to(model)
    torch.testing.assert_close(model.weight.detach().double(), expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(model.bias.detach(), before)


def test_a_restored_average_continues() -> None:
    model = nn.Linear(3, 2)
    whole = MovingAverage(model, half_life=2.0)
    step(model, 1)
    whole.update(model)
    kept = {name: mean.clone() for name, mean in whole.state().items()}
    resumed = MovingAverage(model, half_life=2.0)
    resumed.restore(kept)
    step(model, 2)
    for average in (whole, resumed):
        average.update(model)
    for name, mean in whole.state().items():
        assert torch.equal(mean, resumed.state()[name])
