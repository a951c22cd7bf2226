"""Two processes average their gradients while the backward pass runs, whatever weights and batches each of them has."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import torch
from torch import nn

from quiver.encoder.training.processes import Processes
from quiver.encoder.training.sharding import GradientReducer
from tests.processes import imported_python

WORKER = """
import json, sys
import torch
from torch import distributed, nn
from quiver.encoder.training.sharding import GradientReducer
from quiver.encoder.training.processes import Processes

rank = int(sys.argv[1])
distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))
inputs = torch.randn(4, 3, 8)
begun = []
reduce = distributed.all_reduce

def counted(tensor, *arguments, **options):
    begun.append(tensor.numel())
    return reduce(tensor, *arguments, **options)

distributed.all_reduce = counted

def forward(x, used=range(6)):
    for layer in used:
        x = torch.tanh(layers[layer](x))
    return x.square().mean()

def gradients():
    return [None if layer.weight.grad is None else layer.weight.grad.tolist() for layer in layers]

found = {}
reducer = GradientReducer(layers.parameters(), Processes(rank, 2), bucket_bytes=2 * 8 * 8 * 4)  # two matrices each

# Two batches of this process: the first adds, the second reduces.
seen = []
layers[0].weight.register_hook(lambda gradient: seen.append(len(begun)))
forward(inputs[2 * rank]).backward()
reducer.begin()
forward(inputs[2 * rank + 1]).backward()
found["unused"] = len(reducer.finish().weights)
found["accumulated"], found["begun_before_the_first_layer"], found["buckets"] = gradients(), seen.copy(), begun.copy()
layers.zero_grad()

# One process has no batch.
if rank:
    reducer.begin()
    forward(inputs[0]).backward()
unused = reducer.finish()
unused.drop([float(mark) for mark in unused.marks])
found["one"] = gradients()
layers.zero_grad()

# Each process uses other layers; nobody uses the last.
reducer.begin()
forward(inputs[0], [0, 1, 2 + rank, 4]).backward()
unused = reducer.finish()
found["before"] = [weight.grad is not None for weight in layers.parameters()]
unused.drop([float(mark) for mark in unused.marks])
found["apart"] = gradients()
layers.zero_grad()

# A loss that runs three backward passes, and one that says that it runs fewer.
for name, said in (("several", 3), ("fewer", 2)):
    before = len(begun)
    reducer.begin(said)
    try:
        for part in inputs[rank].split(1):
            forward(part).backward()
        reducer.finish()
        found[name] = (gradients(), len(begun) - before)
    except RuntimeError as error:
        found[name] = str(error)
    layers.zero_grad()
print(json.dumps(found))
distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes has found."""
    meeting = tmp_path_factory.mktemp("processes") / "meeting"
    pair = [
        subprocess.Popen([imported_python(), "-c", WORKER, str(rank), str(meeting)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in pair]
    finally:
        for process in pair:
            process.kill()
    return [json.loads(text[text.index("{") :]) for text in printed]


def expected(parts: list[tuple[torch.Tensor, list[int]]], share: float) -> list[torch.Tensor | None]:
    """Gradients of the layers in one process, from batches and the layers that each uses."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))
    for x, used in parts:
        state = x
        for layer in used:
            state = torch.tanh(layers[layer](state))
        (state.square().mean() * share).backward()
    return [layer.weight.grad for layer in layers]


@pytest.fixture
def inputs() -> torch.Tensor:
    torch.manual_seed(0)
    _ = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))
    return torch.randn(4, 3, 8)


def check(got: list[Any], wanted: list[torch.Tensor | None]) -> None:
    assert [one is None for one in got] == [one is None for one in wanted]
    for one, other in zip(got, wanted, strict=True):
        if other is not None:
            torch.testing.assert_close(torch.tensor(one), other, rtol=1e-6, atol=1e-7)


EVERY = list(range(6))


def test_the_last_batch_reduces_the_sum_of_all(found: list[dict[str, Any]], inputs: torch.Tensor) -> None:
    wanted = expected([(batch, EVERY) for batch in inputs], 0.5)
    for one in found:
        check(one["accumulated"], wanted)
        assert one["buckets"] == [2 * 64 + 2] * 3  # two matrices, and a mark of each
        assert one["unused"] == 0


def test_buckets_are_reduced_while_the_backward_pass_runs(found: list[dict[str, Any]]) -> None:
    """When the gradient of the first layer is computed, the four layers behind it have been sent; no earlier batch has sent anything."""
    assert [one["begun_before_the_first_layer"] for one in found] == [[0, 2]] * 2


def test_a_process_without_a_batch_takes_part(found: list[dict[str, Any]], inputs: torch.Tensor) -> None:
    for one in found:
        check(one["one"], expected([(inputs[0], EVERY)], 0.5))


def test_a_weight_that_no_process_has_used_keeps_no_gradient(found: list[dict[str, Any]], inputs: torch.Tensor) -> None:
    wanted = expected([(inputs[0], [0, 1, 2, 4]), (inputs[0], [0, 1, 3, 4])], 0.5)
    assert wanted[5] is None
    for one in found:
        assert one["before"] == [True] * 6
        check(one["apart"], wanted)


def test_a_loss_of_several_backward_passes_is_reduced_once(found: list[dict[str, Any]], inputs: torch.Tensor) -> None:
    wanted = expected([(part, EVERY) for batch in inputs[:2] for part in batch.split(1)], 0.5)
    for one in found:
        gradients, reductions = one["several"]
        check(gradients, wanted)
        assert reductions == 3


def test_gradients_that_arrive_after_their_reduction_are_an_error(found: list[dict[str, Any]]) -> None:
    assert all("the loss runs more backward passes than Task.backward_passes returned" in one["fewer"] for one in found)


def test_one_process_reduces_nothing() -> None:
    weight = nn.Parameter(torch.ones(2))
    reducer = GradientReducer([weight], Processes())
    reducer.begin()
    weight.sum().backward()
    assert reducer.finish().weights == []
    assert weight.grad is not None
