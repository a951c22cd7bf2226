"""The pretraining task: one step against its definition, the held-out loss, and the required content of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from quiver.encoder import InputError, Tokenizer
from quiver.encoder.packing import PackedBatch, pack_ids
from quiver.encoder.pretraining.corpus import open_corpus
from quiver.encoder.pretraining.recipe import PretrainingRecipe
from quiver.encoder.pretraining.run import prepare
from quiver.encoder.pretraining.stream import Masker, RowMaker, held_out_rows
from quiver.encoder.pretraining.task import STATES, HeldOut, PretrainingTask, Session
from quiver.encoder.training.processes import Processes, StopRequest
from quiver.encoder.training.run_folder import LOG, Checkpoints, read_log
from quiver.encoder.training.state import read_state, write_state
from quiver.encoder.training.trainer import Progress, Trainer, TrainerSettings, TrainingBatch, load_train_state

pytest.importorskip("optimi")

MakeRecipe = Callable[..., PretrainingRecipe]


@pytest.fixture
def session(make_recipe: MakeRecipe, tmp_path: Path) -> Session:
    recipe, out = make_recipe("model.attention_output_dropout=0", "training.log_every=1"), tmp_path / "out"
    prepare(recipe, out)
    tokenizer = Tokenizer.from_pretrained(out / "tokenizer")
    return Session(recipe, out, Checkpoints(out / "checkpoints"), open_corpus(out / "corpus"), tokenizer, Processes(), "cpu")


def concatenated(batches: Sequence[PackedBatch]) -> PackedBatch:
    return pack_ids([ids.tolist() for batch in batches for ids in batch.unpack(batch.ids)])


def train_three_rows(task: PretrainingTask, session: Session, monkeypatch: pytest.MonkeyPatch) -> list[TrainingBatch]:
    """Train on the first step of the stream that has three rows."""
    for number, batches in enumerate(task.steps(), start=1):
        if len(batches) == 3:
            break
        task.after_step(number)
    monkeypatch.setattr(task, "steps", lambda: iter([batches]))
    monkeypatch.setattr(task, "next_phase", lambda: False)
    Trainer(task, TrainerSettings(7, counts=("room", "flops")), session.out, Processes(), StopRequest(), Progress()).train()
    return batches


def test_a_step_equals_one_batch_of_all_its_rows(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    task, taken = PretrainingTask(session, Progress()), {}

    def step(*arguments: object) -> None:
        taken.update({name: weight.grad.clone() for name, weight in task.model.named_parameters() if weight.grad is not None})

    monkeypatch.setattr(task.optimizer, "step", step)
    batches = train_three_rows(task, session, monkeypatch)
    assert len({batch.weight for batch in batches}) > 1, "rows of equal weight would hide a wrong mean"
    model = task.model.train()
    whole = model(concatenated([batch.inputs["packed"] for batch in batches]), torch.cat([batch.inputs["labels"] for batch in batches]))
    expected = dict(zip(dict(model.named_parameters()), torch.autograd.grad(whole.loss, list(model.parameters())), strict=True))
    [line] = read_log(session.out / LOG)
    assert line["loss"] == pytest.approx(whole.loss.item(), rel=1e-6)
    assert line["batch_size"] == 12
    assert line["grad_norm"] == pytest.approx(math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.values())), rel=1e-5)
    assert taken.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(taken[name], gradient, rtol=1e-4, atol=1e-7)
    assert all(weight.grad is None for weight in model.parameters())


def test_held_out_loss_and_accuracy_are_means_over_masked_tokens(session: Session) -> None:
    recipe, corpus, tokenizer = session.recipe, session.corpus, session.tokenizer
    phase, training, model = recipe.phases[0], recipe.training, PretrainingTask(session, Progress()).model
    held_out = HeldOut(recipe, phase, corpus.held_out, tokenizer, Processes())
    measures = held_out.measure(model.train())
    assert model.training
    assert held_out.measure(model) == measures, "the same tokens under the same masks"
    make = RowMaker(corpus.held_out, tokenizer, Masker(tokenizer, probability=training.held_out_mask_probability, seed=training.seed))
    rows = [make(row) for row in held_out_rows(corpus.held_out, phase, longest=48, most=recipe.data.held_out_tokens)]
    assert len(rows) > 1
    with torch.no_grad():
        batch, labels = concatenated([row.batch for row in rows]), torch.cat([row.labels for row in rows])
        whole = model.eval()(batch, labels)
        positions = (labels >= 0).nonzero()[:, 0]
        correct = model.logits(batch, positions).argmax(1) == labels[positions]
    assert measures["held_out_loss"] == pytest.approx(float(whole.loss), rel=1e-5)
    assert measures["held_out_accuracy"] == pytest.approx(correct.double().mean())
    share = sum(row.masked for row in rows) / sum(row.batch.num_tokens for row in rows)
    assert 0.07 < share < 0.22


@pytest.mark.parametrize("left_out", ["stream", "phase_tokens", "progress"])
def test_a_checkpoint_of_another_version_is_refused(session: Session, tmp_path: Path, left_out: str) -> None:
    task, folder = PretrainingTask(session, Progress()), tmp_path / "checkpoint"
    folder.mkdir()
    task.save(folder, Progress(), [])
    load_train_state(folder, STATES)
    state = read_state(folder / "trainer")
    del state[left_out]
    write_state(folder / "trainer", state)
    with pytest.raises(InputError, match=r"checkpoint: written by another version of Quiver .* start the run again$"):
        load_train_state(folder, STATES)
