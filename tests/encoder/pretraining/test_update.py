"""One update against its definition: the mean over all asked tokens, whatever row they are in; and the held-out loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quiver.encoder import InputError
from quiver.encoder.heads import MaskedLM
from quiver.encoder.packing import concatenate
from quiver.encoder.pretraining.corpus import Corpus, open_corpus, prepare_corpus
from quiver.encoder.pretraining.evaluation import HeldOut
from quiver.encoder.pretraining.masking import Masker
from quiver.encoder.pretraining.optimizer import make_optimizer
from quiver.encoder.pretraining.phases import first_model, make_tokenizer
from quiver.encoder.pretraining.sections import PretrainingRecipe
from quiver.encoder.pretraining.snapshot import TrainState
from quiver.encoder.pretraining.stream import PhaseStream, RowMaker, UpdateBatch, held_out_rows
from quiver.encoder.pretraining.update import Updater
from quiver.encoder.tokenizer import Tokenizer
from quiver.encoder.training.processes import Processes

pytest.importorskip("optimi")

MakeRecipe = Callable[..., PretrainingRecipe]


@pytest.fixture
def prepared(make_recipe: MakeRecipe, tmp_path: Path) -> tuple[PretrainingRecipe, Tokenizer, Corpus, MaskedLM]:
    recipe = make_recipe("model.dropout=0")
    tokenizer = make_tokenizer(recipe)
    prepare_corpus(recipe.data, tokenizer, tmp_path / "corpus")
    return recipe, tokenizer, open_corpus(tmp_path / "corpus"), first_model(recipe, tokenizer)


def largest(prepared: tuple[PretrainingRecipe, Tokenizer, Corpus, MaskedLM]) -> UpdateBatch:
    """An update of three rows."""
    recipe, tokenizer, corpus, _ = prepared
    return list(PhaseStream(recipe, 0, corpus, tokenizer, Processes()).updates())[-1]


def updater(prepared: tuple[PretrainingRecipe, Tokenizer, Corpus, MaskedLM], out: Path) -> Updater:
    recipe, tokenizer, _, model = prepared
    phase = recipe.phases[0]
    train_state = TrainState(model.train(), make_optimizer(model, recipe.training, phase), None)
    return Updater(train_state, phase, 0, Processes(), "fp32", out, tokenizer)


def test_loss_and_gradient_are_those_of_all_rows_at_once(
    prepared: tuple[PretrainingRecipe, Tokenizer, Corpus, MaskedLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, taken = prepared[3], largest(prepared), {}
    assert len(batch.rows) == 3
    assert len({row.asked for row in batch.rows}) > 1, "rows of equal weight would hide a wrong mean"
    whole = model(concatenate([row.batch for row in batch.rows]), torch.cat([row.labels for row in batch.rows]))
    expected = dict(zip(dict(model.named_parameters()), torch.autograd.grad(whole.loss, list(model.parameters())), strict=True))
    one = updater(prepared, tmp_path)

    def step(*arguments: object) -> None:
        taken.update({name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None})

    monkeypatch.setattr(one.train_state.optimizer, "step", step)
    update = one.do(batch, step=1, tokens=300, stop=False)
    assert update.loss == pytest.approx(whole.loss.item(), rel=1e-6)
    assert update.learning_rate == pytest.approx(5e-3 * 300 / 600)
    assert update.grad_norm == pytest.approx(math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.values())), rel=1e-5)
    assert taken.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(taken[name], gradient, rtol=1e-4, atol=1e-7)
    assert one.train_state.stream is batch.state
    assert all(weight.grad is None for weight in model.parameters())


def test_a_gradient_that_is_no_number_changes_nothing(
    prepared: tuple[PretrainingRecipe, Tokenizer, Corpus, MaskedLM], tmp_path: Path
) -> None:
    model = prepared[3]
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    model.transform.dense.weight.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with pytest.raises(InputError, match=r"the norm of the gradient is (inf|nan) at step 4;"):
        updater(prepared, tmp_path).do(largest(prepared), step=4, tokens=1000, stop=False)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert (tmp_path / "nonfinite" / "step-000004" / "batch.safetensors").is_file()


def test_the_held_out_loss_is_the_mean_over_asked_tokens(prepared: tuple[PretrainingRecipe, Tokenizer, Corpus, MaskedLM]) -> None:
    recipe, tokenizer, corpus, model = prepared
    phase, training = recipe.phases[0], recipe.training
    held_out = HeldOut(recipe, phase, corpus.held_out, tokenizer, Processes())
    loss = held_out.loss(model.train())
    assert model.training
    assert held_out.loss(model) == loss, "the same tokens under the same masks"
    make = RowMaker(corpus.held_out, tokenizer, Masker(tokenizer, probability=training.held_out_mask_probability, seed=training.seed))
    rows = [make(row) for row in held_out_rows(corpus.held_out, phase, longest=48, most=recipe.data.held_out_tokens)]
    assert len(rows) > 1
    with torch.no_grad():
        whole = model.eval()(concatenate([row.batch for row in rows]), torch.cat([row.labels for row in rows]))
    assert loss == pytest.approx(float(whole.loss), rel=1e-5)
    share = sum(row.asked for row in rows) / sum(row.batch.num_tokens for row in rows)
    assert 0.07 < share < 0.22
