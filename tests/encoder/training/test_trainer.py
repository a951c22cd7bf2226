"""The training loop with a task of one weight matrix, whose steps can be computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quiver.encoder.training.checkpoints import Checkpoints
from quiver.encoder.training.log import RunLog, read_log
from quiver.encoder.training.processes import Processes, StopRequest
from quiver.encoder.training.trainer import Progress, RunOutput, Trainer, TrainerSettings, TrainingBatch


class Line:
    """The loss is the inner product of the weight (1, 2) and an input, so that the gradient is the input."""

    keep_best = 0
    device = torch.device("cpu")
    learning_rate_setting = "learning_rate"

    def __init__(self, steps: Sequence[Sequence[TrainingBatch]], scores: Sequence[float] = ()) -> None:
        self.module = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.module.weight)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1.0)
        self._steps = steps
        self._scores = iter(scores)

    @property
    def weight(self) -> list[float]:
        return [float(value) for value in self.module.weight[0].tolist()]

    def steps(self) -> Iterator[Sequence[TrainingBatch]]:
        return iter(self._steps)

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        product: Tensor = self.module(inputs["x"]).sum()
        return product

    def after_step(self, step: int) -> None:
        pass

    def finished(self, progress: Progress) -> bool:
        return progress.step == len(self._steps)

    def log_due(self, progress: Progress) -> bool:
        return True

    def learning_rate(self, step: int) -> float:
        return 1.0

    def position(self, progress: Progress) -> Mapping[str, float]:
        return {}

    def log_values(self, progress: Progress) -> Mapping[str, float]:
        return {}

    def evaluation_due(self, progress: Progress) -> bool:
        return True

    def evaluate(self) -> Mapping[str, float]:
        score = next(self._scores, None)
        return {} if score is None else {"score": score}

    def save_due(self, progress: Progress) -> bool:
        return False

    def save(self, folder: Path | None, progress: Progress, random_states: list[dict[str, Any]]) -> None:
        raise AssertionError("nothing is saved")

    def kept_steps(self, saved: list[int], progress: Progress) -> set[int]:
        return set()


def batch(first: float, second: float, weight: int | None = None) -> TrainingBatch:
    return TrainingBatch({"x": torch.tensor([[first, second]], dtype=torch.float32)}, [], tokens=1, weight=weight)


Train = Callable[..., Progress]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    def run(task: Line, **settings: Any) -> Progress:
        output = RunOutput(tmp_path, Checkpoints(tmp_path / "checkpoints"), RunLog(tmp_path / "log.jsonl"))
        progress = Progress()
        Trainer(task, TrainerSettings(7, **settings), output, Processes(), StopRequest(), progress).train()
        return progress

    return run


@pytest.mark.parametrize(("maximum", "weight"), [(1.0, [-0.6, -0.8]), (2.5, [-1.5, -2.0]), (6.0, [-3.0, -4.0]), (math.inf, [-3.0, -4.0])])
def test_a_gradient_is_scaled_to_the_maximum_norm_and_its_own_norm_is_logged(
    train: Train, tmp_path: Path, maximum: float, weight: list[float]
) -> None:
    task = Line([[batch(3, 4)]])
    train(task, max_grad_norm=maximum)
    assert task.weight == pytest.approx(weight, rel=1e-5)
    assert [line["grad_norm"] for line in read_log(tmp_path / "log.jsonl")] == [5.0]


def test_batches_of_a_step_count_equally_unless_they_have_weights(train: Train) -> None:
    equal, weighted = Line([[batch(2, 0), batch(0, 4)]]), Line([[batch(2, 0, 1), batch(0, 4, 3)]])
    train(equal)
    train(weighted)
    assert equal.weight == [-1.0, -2.0]
    assert weighted.weight == [-0.5, -3.0]


def test_gradients_of_a_step_are_not_added_to_those_of_the_next(train: Train) -> None:
    task = Line([[batch(1, 0)], [batch(0, 1)]])
    train(task)
    assert task.weight == [-1.0, -1.0]


@pytest.mark.parametrize(("lower", "best"), [(False, (0.9, 2)), (True, (0.1, 1))])
def test_the_first_of_equal_best_scores_is_the_best(train: Train, lower: bool, best: tuple[float, int]) -> None:
    task = Line([[batch(1, 1)] for _ in range(4)], [0.1, 0.9, 0.9, 0.1])
    assert train(task, lower_is_better=lower).best == [best]


def test_training_ends_after_as_many_evaluations_without_a_better_score_as_the_patience(train: Train) -> None:
    task = Line([[batch(1, 1)] for _ in range(6)], [0.1, 0.9, 0.9, 0.8, 1.0, 1.0])
    assert train(task, patience=2).step == 4
