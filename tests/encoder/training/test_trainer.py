"""The training loop with a task of one weight matrix, whose steps can be computed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quiver.encoder import InputError
from quiver.encoder.packing import pack_ids
from quiver.encoder.training.processes import Processes, StopRequest
from quiver.encoder.training.run_folder import read_log
from quiver.encoder.training.trainer import Callback, Progress, Trainer, TrainerSettings, TrainingBatch


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

    def next_phase(self) -> bool:
        return False

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        product: Tensor = self.module(inputs["x"]).sum()
        return product

    def backward_passes(self, inputs: Mapping[str, Any]) -> int:
        return 1

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
    def run(task: Line, progress: Progress | None = None, callbacks: Sequence[Callback] = (), **settings: Any) -> Progress:
        progress = progress or Progress()
        Trainer(task, TrainerSettings(7, callbacks=callbacks, **settings), tmp_path, Processes(), StopRequest(), progress).train()
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


def test_callbacks_of_a_step_see_the_progress_with_it(train: Train) -> None:
    progress, seen = Progress(), []

    class Counter(Callback):
        def on_step(self, step: int) -> None:
            seen.append((step, progress.step, progress.tokens))

    train(Line([[batch(1, 0)], [batch(0, 1), batch(1, 1)]]), progress, [Counter()])
    assert seen == [(1, 1, 1), (2, 2, 3)]


class Packed(Line):
    """The loss of a packed batch is not finite."""

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        return self.module.weight.sum() * math.nan


def test_a_packed_batch_with_a_non_finite_loss_can_be_built_again(train: Train, tmp_path: Path) -> None:
    packed = pack_ids([[5, 6, 7], [8]], key_lengths=[2, 1])
    inputs = {"texts": packed, "columns": (1, 1), "label": torch.tensor([[0.5]])}
    with pytest.raises(InputError, match="the loss is nan at step 1"):
        train(Packed([[TrainingBatch(inputs, [{"row": 3}], tokens=4)]]))
    folder = tmp_path / "nonfinite" / "step-000001"
    tensors = load_file(folder / "batch.safetensors")
    bounds = tensors["0.cu_seqlens"].tolist()
    sequences = [tensors["0.ids"][start:end].tolist() for start, end in pairwise(bounds)]
    again = pack_ids(sequences, key_lengths=tensors["0.key_lengths"].tolist())
    assert (again.ids.tolist(), again.offsets, again.key_lengths) == (packed.ids.tolist(), packed.offsets, packed.key_lengths)
    assert (tensors["0.columns"].tolist(), tensors["0.label"].tolist()) == ([1, 1], [[0.5]])
    assert json.loads((folder / "batch.json").read_text())["batches"] == [{"loss": "nan", "rows": [{"row": 3}]}]


READS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__")
"""Methods of a tensor for whose result the host waits for the device."""


class Unevaluated(Line):
    """Evaluation restores the random generators, for which it reads tensors of the host."""

    def evaluation_due(self, progress: Progress) -> bool:
        return False


class Done:
    """A reduction that is complete."""

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("weight", [None, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_a_step_reads_from_the_device_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, weight: int | None) -> None:
    """A second process with the same batches is simulated: every sum over the processes is twice the value of this one."""
    task, read = Unevaluated([[batch(3, 4, weight), batch(1, 2, weight)] for _ in range(3)]), []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, async_op=False: (tensor.mul_(size), Done())[1])
    for name in READS:
        method = getattr(Tensor, name)
        monkeypatch.setattr(
            Tensor, name, lambda tensor, *arguments, name=name, method=method: read.append(name) or method(tensor, *arguments)
        )
    Trainer(task, TrainerSettings(7, max_grad_norm=100.0), tmp_path, Processes(0, size), StopRequest(), Progress()).train()
    monkeypatch.undo()
    assert read == ["tolist"] * 3
    assert task.weight == pytest.approx([-6.0, -9.0])
    assert [line["loss"] for line in read_log(tmp_path / "log.jsonl")] == pytest.approx([0.0, -13.0, -26.0])


def test_a_run_on_a_cpu_reports_no_activations(train: Train, tmp_path: Path) -> None:
    progress = train(Line([[batch(1, 0)]]))
    [line] = read_log(tmp_path / "log.jsonl")
    assert "activation_bytes" not in line
    assert "activation_bytes" not in progress.totals()
