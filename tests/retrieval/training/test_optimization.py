"""Optimizers and schedules: weight decay, learning rates, and the two sets of weights of schedule-free AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quiver.retrieval.training.recipe import Recipe, TrainingSection
from quiver.retrieval.training.state import has_two_weights, learning_rate_share, make_optimizer, warmup_steps, weights_for_use

MakeRecipe = Callable[..., Recipe]
Make = Callable[..., TrainingSection]

FREE = ("training.optimizer=schedule_free_adamw", "training.scheduler=constant")


@pytest.fixture
def training(make_recipe: MakeRecipe) -> Make:
    return lambda *overrides: make_recipe("dense", *overrides).training


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.ModuleDict({"embedding": nn.Embedding(5, 4), "linear": nn.Linear(4, 3), "norm": nn.LayerNorm(3), "frozen": nn.Linear(3, 3)})


def make(section: TrainingSection, module: nn.Module, steps: int = 10) -> tuple[Any, Any]:
    for parameter in module["frozen"].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    return make_optimizer(section, module.named_parameters(), steps)


def test_one_step_of_adamw_by_hand(training: Make) -> None:
    weight = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    section = training("training.weight_decay=0.01", "training.learning_rate=0.1", "training.warmup_ratio=0")
    optimizer, _ = make_optimizer(section, [("weight", weight)], 10)
    weight.grad = torch.tensor([[0.5, -4.0]])
    optimizer.step()
    # After one step the bias-corrected moments are the gradient and its square: each weight moves by lr against its sign.
    expected = [1.0 * (1 - 0.001) - 0.1, -2.0 * (1 - 0.001) + 0.1]
    torch.testing.assert_close(weight.detach(), torch.tensor([expected]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("ratio", "steps", "warmup"), [(0, 10, 0), (0.1, 10, 1), (0.1, 11, 2), (0.05, 1000, 50), (1, 7, 7)])
def test_the_warm_up_is_rounded_up(training: Make, ratio: float, steps: int, warmup: int) -> None:
    assert warmup_steps(training(f"training.warmup_ratio={ratio}"), steps) == warmup


def test_learning_rates_of_each_scheduler_by_hand(training: Make) -> None:
    shares = {
        name: [learning_rate_share(training(f"training.scheduler={name}", "training.warmup_ratio=0.2"), update, 10) for update in range(10)]
        for name in ("constant", "linear", "cosine")
    }
    rising, falling = [0.0, 0.5], [place / 8 for place in range(8)]
    assert shares["constant"] == rising + [1.0] * 8
    assert shares["linear"] == pytest.approx(rising + [1 - done for done in falling])
    assert shares["cosine"] == pytest.approx(rising + [0.5 + 0.5 * math.cos(math.pi * done) for done in falling])
    assert learning_rate_share(training("training.warmup_ratio=1"), 9, 10) == 0.9
    assert learning_rate_share(training("training.warmup_ratio=0"), 0, 1) == 1.0


def step(optimizer: Any, module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def state(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(first.equal(second) for first, second in zip(one, other, strict=True))


def test_schedule_free_adamw_has_two_sets_of_weights(training: Make) -> None:
    pytest.importorskip("schedulefree")
    module, other = model(), model()
    (optimizer, _), (untouched, _) = make(training(*FREE), module), make(training(*FREE), other)
    assert has_two_weights(optimizer)
    for one in (optimizer, untouched):
        one.train()
    for update in range(3):
        step(optimizer, module, update)
        step(untouched, other, update)
    trained = state(module)
    with weights_for_use(optimizer):
        used = state(module)
        assert not equal(used, trained)
    assert equal(state(module), trained)

    def fail() -> None:
        with weights_for_use(optimizer):
            raise ValueError("in the block")

    with pytest.raises(ValueError, match="in the block"):
        fail()
    assert equal(state(module), trained)
    assert all(group["train_mode"] for group in optimizer.param_groups)
    for update in (3, 4):  # looking at them has changed nothing that comes
        step(optimizer, module, update)
        step(untouched, other, update)
    assert equal(state(module), state(other))
    untouched.eval()
    with weights_for_use(optimizer):
        assert equal(state(module), state(other))
