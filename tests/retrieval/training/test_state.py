"""Checkpoints: the model opens, training continues bit for bit, and no pickle is ever read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quiver.encoder import InputError
from quiver.encoder.lora import add_lora
from quiver.encoder.training.state import preserve_rng_state, random_state, seed_random, set_random_state
from quiver.encoder.training.trainer import STATE, Progress
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.training.model import build_model
from quiver.retrieval.training.recipe import Recipe
from quiver.retrieval.training.state import WEIGHTS, TrainState, load_trainable, make_optimizer, read_checkpoint, write_checkpoint
from tests.damage import Bomb

MakeRecipe = Callable[..., Recipe]

FREE = ("training.optimizer=schedule_free_adamw", "training.scheduler=constant")
LORA = ("training.lora.rank=2", "training.lora.alpha=4")
CASES = {
    "dense": ("dense",),
    "colbert": ("colbert",),
    "schedule-free": ("dense", *FREE),
    "LoRA": ("dense", *LORA),
    "LoRA, schedule-free, ColBERT": ("colbert", *LORA, *FREE),
}
STEPS = 12


def make(recipe: Recipe, model: Any = None) -> TrainState:
    """A train state as a run makes it, with a plain module instead of a loss model."""
    training = recipe.training
    if "schedule_free" in training.optimizer:
        pytest.importorskip("schedulefree")
    model = model if model is not None else build_model(recipe, [])
    if training.lora is not None:
        add_lora(model.encoder, rank=training.lora.rank, alpha=training.lora.alpha, dropout=0, seed=1)
    library = nn.ModuleDict({"encoder": model.encoder, "projections": model.projections})
    optimizer, schedule = make_optimizer(training, library.named_parameters(), STEPS)
    return TrainState(model, library, optimizer, schedule, lora=training.lora is not None)


def update(state: TrainState, count: int) -> None:
    """Run ``count`` steps with gradients drawn from torch's generator."""
    if callable(train := getattr(state.optimizer, "train", None)):
        train()
    for _ in range(count):
        for weight in state.trained().values():
            weight.grad = torch.randn(weight.shape)
        state.optimizer.step()
        state.schedule.step()


def trained(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in state.trained().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(one[name].equal(other[name]) for name in one)


PROGRESS = Progress(
    step=5,
    seconds=1.25,
    counts={"texts": 160, "truncated": 3},
    tokens=2048,
    window_updates=2,
    window_loss=0.1 + 0.2,
    window_tokens=700,
    window_seconds=0.3,
    best=[(1 / 3, 4)],
    resumed_at=[2, 4],
)


@pytest.mark.parametrize("case", CASES)
def test_training_continues_from_a_checkpoint_bit_for_bit(case: str, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(*CASES[case])
    with preserve_rng_state():
        seed_random(11)
        one = make(recipe)
        update(one, 5)
        states = [random_state(), {**random_state(), "python": (3, (1,) * 625, None)}]
        write_checkpoint(tmp_path, one, PROGRESS, states)
        at_five = trained(one)
        update(one, 7)
        whole = trained(one)

        seed_random(99)
        start = build_model(recipe, []) if one.lora else load_trainable(tmp_path)
        other = make(recipe, start)
        progress, random = read_checkpoint(tmp_path, other)
        assert progress == PROGRESS
        assert equal(trained(other), at_five)
        assert random[1]["python"] == (3, (1,) * 625, None)
        set_random_state(random[0])
        update(other, 7)
        assert equal(trained(other), whole)
        assert other.schedule.get_last_lr() == one.schedule.get_last_lr()
        assert not equal(at_five, whole)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_opens_as_the_model_for_use(case: str, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    with preserve_rng_state():
        seed_random(11)
        state = make(make_recipe(*CASES[case]))
        update(state, 3)
    before = trained(state)
    write_checkpoint(tmp_path, state, Progress(), [])
    assert equal(trained(state), before), "saving changes nothing"
    with state.model_for_use() as used:
        assert used is not None
        names = {name for name, _ in used.encoder.named_parameters()}
        expected = used.encode_texts(["open every file", "def sort_page(x): return x"], "document").vectors
    found = load_model(tmp_path).encode_texts(["open every file", "def sort_page(x): return x"], "document").vectors
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), atol=2e-6, rtol=0)
    assert (tmp_path / WEIGHTS).exists() == (case not in ("dense", "colbert"))
    plain = load_trainable(tmp_path)
    assert all(weight.requires_grad for weight in plain.encoder.parameters())
    assert not any("lora" in name for name, _ in plain.encoder.named_parameters())
    assert any("lora" in name for name in names) == ("LoRA" in case)


@pytest.mark.parametrize("save", [lambda bomb, path: path.write_bytes(pickle.dumps(bomb)), torch.save], ids=["pickle", "torch.save"])
def test_no_pickle_in_the_place_of_a_file_is_executed(save: Any, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe, folder, went_off = make_recipe("dense"), tmp_path / "step-000001", tmp_path / "went off"
    folder.mkdir()
    write_checkpoint(folder, make(recipe), Progress(step=1), [random_state()])
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "tokenizer_config.json"]  # for other libraries
    assert {"model.safetensors", "config.json", "tokenizer.json", "modules.json", "trainer.json"} <= {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        save(Bomb(went_off), path)
        with pytest.raises(InputError, match=path.name):
            read_checkpoint(folder, make(recipe, load_trainable(folder)))
        path.write_bytes(content)
    assert not went_off.exists()


def test_weights_of_another_model_are_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    state = make(make_recipe("dense", *LORA))
    write_checkpoint(tmp_path, state, Progress(), [])
    saved = load_file(tmp_path / WEIGHTS)
    for other in ({name: weight[..., :1].contiguous() for name, weight in saved.items()}, dict(list(saved.items())[1:])):
        save_file(other, tmp_path / WEIGHTS)
        with pytest.raises(InputError, match=rf"{WEIGHTS}: contains the weights of another model"):
            read_checkpoint(tmp_path, make(make_recipe("dense", *LORA)))


@pytest.mark.parametrize("missing", ["progress", "optimizer", "random"])
def test_a_checkpoint_of_another_version_is_refused(missing: str, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe("dense")
    write_checkpoint(tmp_path, make(recipe), Progress(), [])
    path = tmp_path / f"{STATE}.json"
    tree = json.loads(path.read_text())
    tree["state"]["dict"] = [[key, value] for key, value in tree["state"]["dict"] if key != missing]
    path.write_text(json.dumps(tree))
    with pytest.raises(InputError, match=r"written by another version of Quiver or torch .*; start the run again"):
        read_checkpoint(tmp_path, make(recipe, load_trainable(tmp_path)))
