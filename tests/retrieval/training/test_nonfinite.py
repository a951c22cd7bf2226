"""A non-finite loss or gradient stops a run before the step; earlier steps and checkpoints remain."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quiver.encoder import InputError
from quiver.retrieval.training.data import TrainingRows, prepare_rows
from quiver.retrieval.training.dataloader import BatchOrder
from quiver.retrieval.training.model import build_model
from quiver.retrieval.training.recipe import Recipe

MakeRecipe = Callable[..., Recipe]


def kept(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((folder / "batch.json").read_text()), load_file(folder / "batch.safetensors")


def poisoned(recipe: Recipe, work: Path) -> tuple[TrainingRows, Any, int, int]:
    """Rows, a model in which the embedding of one token is NaN, the number of the row with the token, and the token."""
    rows = prepare_rows(recipe.data, work, seed=1)
    model = build_model(recipe, [])
    [row] = [number for number in range(64) if "§" in rows[number]["document_1"]]
    [[_, token, *_]] = model.tokenizer.encode(["§"], max_length=24).ids
    with torch.no_grad():
        model.encoder.embeddings.tokens.weight[token] = math.nan
    return rows, model, row, token


@pytest.fixture
def odd_rows(rows_file: Path, tmp_path: Path) -> Path:
    """Rows of which one contains a character that no other has."""
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
    from quiver.retrieval.training.run import train_and_save

    return train_and_save


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.encoder.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name].nan_to_num(7.0), other[name].nan_to_num(7.0)) for name in one)


def test_a_non_finite_loss_of_one_text_stops_the_run_before_the_step(
    train: Callable[..., Any], make_recipe: MakeRecipe, odd_rows: Path, tmp_path: Path
) -> None:
    """Of the sixteen batches of the step, the one with the text is written, and no weight changes."""
    recipe = make_recipe("dense", f"data.train={odd_rows}", "training.accumulation=16", "training.epochs=2")
    rows, model, row, token = poisoned(recipe, tmp_path / "work")
    before = state(model)
    with pytest.raises(InputError, match=r"the loss is nan at step 1; the batch was saved to .*nonfinite/step-000001: check its texts"):
        train(recipe, rows, model, tmp_path / "out")
    assert same(state(model), before)
    assert not model.encoder.training
    described, tensors = kept(tmp_path / "out" / "nonfinite" / "step-000001")
    [batch] = described["batches"]
    [expected] = [batch.rows for batch in islice(BatchOrder(rows, size=4, seed=7, no_duplicates=False).batches(), 16) if row in batch.rows]
    assert [example["row"] for example in batch["rows"]] == expected
    assert [{key: example[key] for key in rows[number]} for example, number in zip(batch["rows"], expected, strict=True)] == [
        rows[number] for number in expected
    ]
    assert {example["epoch"] for example in batch["rows"]} == {0}
    ids, bounds = tensors["0.ids"], tensors["0.cu_seqlens"].tolist()
    assert len(bounds) == 1 + 4 * 4  # four rows of a query and three documents
    assert [place for place, (start, end) in enumerate(pairwise(bounds)) if token in ids[start:end]] == [4 + expected.index(row)]
    assert not list((tmp_path / "out" / "checkpoints").glob("*"))


def test_a_non_finite_gradient_with_a_finite_loss_stops_the_run(
    train: Callable[..., Any], make_recipe: MakeRecipe, rows_file: Path, tmp_path: Path
) -> None:
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
