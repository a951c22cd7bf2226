"""Learning rate and weight decay against the formulas, and the settings of AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quiver.eval.nlu.fine_tuning import Schedule, learning_rate_share, make_optimizer, set_learning_rate
from quiver.eval.nlu.recipes import FineTuningSection, UpdatesSection


@pytest.mark.parametrize(("steps", "ratio", "warmup"), [(10, 0.1, 1), (37, 0.1, 4), (5, 0.0, 0), (4, 1.0, 4), (1, 0.1, 1)])
def test_the_learning_rate_rises_and_falls_linearly(steps: int, ratio: float, warmup: int) -> None:
    shares = [learning_rate_share(step, steps, warmup_ratio=ratio) for step in range(1, steps + 1)]
    assert shares[:warmup] == pytest.approx([(place + 1) / warmup for place in range(warmup)])
    assert shares[warmup:] == pytest.approx([1 - place / (steps - warmup) for place in range(steps - warmup)])
    assert max(shares) == 1
    assert min(shares) > 0


@pytest.mark.parametrize(("decoupled", "taken"), [(False, 1e-3 * 0.5 * 0.1), (True, 0.5 * 0.1)])
def test_weight_decay_is_coupled_to_the_learning_rate_or_decoupled(decoupled: bool, taken: float) -> None:
    """Without a gradient, a step only applies the decay: half of it at half the peak learning rate."""
    model = nn.Linear(3, 2)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    updates = UpdatesSection(epochs=1, batch_size=1, learning_rate=1e-3, weight_decay=0.1)
    optimizer = make_optimizer(model, updates, FineTuningSection(decoupled_decay=decoupled))
    set_learning_rate(optimizer, 1e-3 * 0.5)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    torch.testing.assert_close(model.weight, before["weight"] * (1 - taken))
    torch.testing.assert_close(model.bias, before["bias"], msg="a vector has no decay")


def test_every_epoch_has_every_example_once_in_another_order() -> None:
    schedule = Schedule(UpdatesSection(epochs=2.5, batch_size=4, learning_rate=1e-3), FineTuningSection(seed=3), "updates", examples=10)
    assert (schedule.per_epoch, schedule.steps) == (3, 8)
    epochs = [[member for step in range(first, first + 3) for member in schedule.members(step)] for first in (1, 4)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]
    assert [len(schedule.members(step)) for step in (1, 2, 3)] == [4, 4, 2]
    assert [step for step in range(9) if schedule.evaluation_due(step)] == [3, 6, 8]
    updates = UpdatesSection(epochs=2.5, batch_size=4, learning_rate=1e-3, evaluate_every=5)
    often = Schedule(updates, FineTuningSection(), "updates", examples=10)
    assert [step for step in range(9) if often.evaluation_due(step)] == [5, 8]
