"""A batch whose loss or gradient is no number: it is kept so that it can be looked at, and nothing has been updated."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from encoder import InputError
from retrieval.training.data import TrainingRows, prepare_rows
from retrieval.training.loop.batches import BatchOrder
from retrieval.training.loop.nonfinite import SeenBatch, keep_batches, nonfinite_error
from retrieval.training.sections import Recipe
from retrieval.training.start import build_model

MakeRecipe = Callable[..., Recipe]


def seen(loss: float, first: int) -> SeenBatch:
    rows = [{"row": first + place, "epoch": 1, "query": f"q{first + place}", "document_1": "d\u2028"} for place in range(2)]
    whole = torch.arange(first, first + 6).reshape(2, 3)
    features = {"query_input_ids": whole, "query_attention_mask": whole[:, 1], "twice": whole, "return_loss": True}
    return SeenBatch(rows, features, loss)


def kept(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((folder / "batch.json").read_text()), load_file(folder / "batch.safetensors")


def test_the_batches_whose_loss_is_no_number_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "nonfinite" / "step-000003"
    keep_batches(folder, [seen(0.5, 0), seen(math.nan, 10), seen(-math.inf, 20)], step=3, grad_norm=math.nan)
    described, tensors = kept(folder)
    assert described["step"] == 3
    assert described["grad_norm"] == "nan"
    assert [batch["loss"] for batch in described["batches"]] == ["nan", "-inf"]
    assert [[row["query"] for row in batch["rows"]] for batch in described["batches"]] == [["q10", "q11"], ["q20", "q21"]]
    assert described["batches"][0]["rows"][0] == {"row": 10, "epoch": 1, "query": "q10", "document_1": "d\u2028"}
    assert sorted(tensors) == [f"{place}.{name}" for place in (0, 1) for name in ("query_attention_mask", "query_input_ids", "twice")]
    assert tensors["0.query_input_ids"].tolist() == [[10, 11, 12], [13, 14, 15]]
    assert tensors["1.query_attention_mask"].tolist() == [21, 24]


def test_all_are_kept_where_it_is_the_gradient(tmp_path: Path) -> None:
    keep_batches(tmp_path, [seen(0.5, 0), seen(0.25, 10)], step=3, grad_norm=math.inf)
    described, _ = kept(tmp_path)
    assert [batch["loss"] for batch in described["batches"]] == [0.5, 0.25]
    assert described["grad_norm"] == "inf"


def test_what_is_said_of_it(tmp_path: Path) -> None:
    advice = f"its batch is in {tmp_path}: look at its texts, or lower training.learning_rate"
    assert str(nonfinite_error(tmp_path, step=3, loss=math.nan, grad_norm=math.nan)) == f"the loss is nan at step 3; {advice}"
    assert str(nonfinite_error(tmp_path, step=3, loss=0.5, grad_norm=math.inf)) == f"the norm of the gradient is inf at step 3; {advice}"


def poisoned(recipe: Recipe, work: Path) -> tuple[TrainingRows, Any, int, int]:
    """Rows of which one holds a token whose vector is no number, a model, the row's number, and the token."""
    rows = prepare_rows(recipe.data, work, seed=1)
    model = build_model(recipe, [])
    [row] = [number for number in range(64) if "§" in rows.dataset[number]["document_1"]]
    [[_, token, *_]] = model.tokenizer.encode(["§"], max_length=24).ids
    with torch.no_grad():
        model.encoder.embeddings.tokens.weight[token] = math.nan
    return rows, model, row, token


@pytest.fixture
def odd_rows(rows_file: Path, tmp_path: Path) -> Path:
    """One of them holds what no other does."""
    lines = rows_file.read_text().splitlines()
    row = json.loads(lines[37])
    lines[37] = json.dumps({**row, "positive": "§ " + row["positive"]})
    for place, line in enumerate(lines):  # and no other has it for a negative
        other = json.loads(line)
        other["negatives"] = ["def nothing(): pass", "def something(): return 1"]
        lines[place] = json.dumps(other)
    path = tmp_path / "odd.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def train() -> Callable[..., dict[str, Any]]:
    pytest.importorskip("pylate.models")
    from retrieval.training.run import train_and_save

    return train_and_save


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.encoder.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name].nan_to_num(7.0), other[name].nan_to_num(7.0)) for name in one)


def test_one_text_of_an_update_stops_the_run_before_it(
    train: Callable[..., Any], make_recipe: MakeRecipe, odd_rows: Path, tmp_path: Path
) -> None:
    """Of the sixteen batches of the update the one with the text is kept, and every weight is as it was."""
    recipe = make_recipe("dense", f"data.train={odd_rows}", "training.accumulation=16", "training.epochs=2")
    rows, model, row, token = poisoned(recipe, tmp_path / "work")
    before = state(model)
    with pytest.raises(InputError, match=r"the loss is nan at step 1; its batch is in .*nonfinite/step-000001: look at its texts"):
        train(recipe, rows, model, tmp_path / "out")
    assert same(state(model), before)
    assert not model.encoder.training
    described, tensors = kept(tmp_path / "out" / "nonfinite" / "step-000001")
    [batch] = described["batches"]
    [expected] = [batch.rows for batch in islice(BatchOrder(rows, size=4, seed=7, no_duplicates=False).batches(), 16) if row in batch.rows]
    assert [example["row"] for example in batch["rows"]] == expected
    assert [{key: example[key] for key in rows.dataset[number]} for example, number in zip(batch["rows"], expected, strict=True)] == [
        rows.dataset[number] for number in expected
    ]
    assert {example["epoch"] for example in batch["rows"]} == {0}
    assert {"0.query_input_ids", "0.document_1_input_ids", "0.document_3_attention_mask"} <= set(tensors)
    assert [place for place, ids in enumerate(tensors["0.document_1_input_ids"]) if token in ids] == [expected.index(row)]
    assert not list((tmp_path / "out" / "checkpoints").glob("*"))


def test_it_is_the_update_that_comes_to_the_text(
    train: Callable[..., Any], make_recipe: MakeRecipe, odd_rows: Path, tmp_path: Path
) -> None:
    """What was done before it stays, with its checkpoint and its lines."""
    recipe = make_recipe("dense", f"data.train={odd_rows}", "training.save_every=1", "training.log_every=1")
    rows, model, row, _ = poisoned(recipe, tmp_path / "work")
    batches = list(islice(BatchOrder(rows, size=4, seed=7, no_duplicates=False).batches(), 16))
    [step] = [number for number, batch in enumerate(batches, start=1) if row in batch.rows]
    assert step > 1, "the seed puts it behind the first"
    with pytest.raises(InputError, match=f"the loss is nan at step {step};"):
        train(recipe, rows, model, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "nonfinite").iterdir()] == [f"step-{step:06d}"]
    assert (tmp_path / "out" / "checkpoints" / f"step-{step - 1:06d}").is_dir()
    assert len((tmp_path / "out" / "log.jsonl").read_text().splitlines()) == step - 1


def test_a_gradient_alone(train: Callable[..., Any], make_recipe: MakeRecipe, rows_file: Path, tmp_path: Path) -> None:
    recipe = make_recipe("dense", "training.accumulation=2")
    rows, model = prepare_rows(recipe.data, tmp_path / "work", seed=1), build_model(recipe, [])
    weight = model.encoder.embeddings.tokens.weight
    weight.register_hook(lambda gradient: gradient * math.inf)
    before = state(model)
    with pytest.raises(InputError, match=r"the norm of the gradient is (inf|nan) at step 1;"):
        train(recipe, rows, model, tmp_path / "out")
    assert same(state(model), before)
    described, _ = kept(tmp_path / "out" / "nonfinite" / "step-000001")
    assert len(described["batches"]) == 2
    assert all(0 < batch["loss"] < 10 for batch in described["batches"])
    assert described["grad_norm"] in ("inf", "nan")


def test_losses_that_cancel_out_to_no_number(
    train: Callable[..., Any], make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from retrieval.training.loop.trainer import Trainer

    real, signs = Trainer.compute_loss, iter([math.inf, -math.inf])
    monkeypatch.setattr(Trainer, "compute_loss", lambda *arguments, **others: real(*arguments, **others) * next(signs))
    recipe = make_recipe("dense", "training.accumulation=2")
    rows, model = prepare_rows(recipe.data, tmp_path / "work", seed=1), build_model(recipe, [])
    with pytest.raises(InputError, match="the loss is nan at step 1;"):
        train(recipe, rows, model, tmp_path / "out")
    described, _ = kept(tmp_path / "out" / "nonfinite" / "step-000001")
    assert [batch["loss"] for batch in described["batches"]] == ["inf", "-inf"]
