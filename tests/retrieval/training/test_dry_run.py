"""A dry run predicts what a run records: rows, updates, tokens and truncation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quiver.encoder import InputError
from quiver.encoder.training.recipe_file import find_recipe
from quiver.retrieval.training import dry_run as module
from quiver.retrieval.training.dry_run import dry_run
from quiver.retrieval.training.recipe import Recipe
from quiver.retrieval.training.run import train

MakeRecipe = Callable[..., Recipe]

CASES = {
    "two epochs that drop two rows": ("dense", "training.epochs=2", "data.limit=62"),
    "accumulated": ("dense", "training.accumulation=3", "training.max_length=8"),
    "no text twice": ("dense", "training.no_duplicates=true", "training.epochs=2"),
    "half an epoch": ("colbert", "training.epochs=0.5"),
    "cached": ("dense", "loss.name=cached_mnrl", "loss.mini_batch_size=2"),
    "distilled": ("colbert", "loss.name=distillation", "data.score_fields=[scores]", "data.documents_per_row=5"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_figures_are_those_of_the_run(make_recipe: MakeRecipe, tmp_path: Path, case: str) -> None:
    recipe = make_recipe(*CASES[case])
    found = dry_run(recipe, device="cpu")
    record = train(recipe, tmp_path / "run", device="cpu")
    result = record["result"]
    assert found.exact
    assert (found.rows, found.skipped, found.documents_per_row) == tuple(
        record["data"][key] for key in ("rows", "skipped", "documents_per_row")
    )
    assert found.batch == record["batch"]
    assert (found.updates, found.texts, found.tokens) == (result["steps"], result["texts"], result["tokens"])
    assert found.truncated == result["texts_truncated"] / result["texts"]
    assert found.truncated > 0 or case != "accumulated"
    assert found.parameters == record["model"]["parameters"]
    assert found.seconds == found.tokens / found.tokens_per_second > 0
    assert found.measured_batches == module.BATCHES


def test_low_rank_matrices_are_the_trained_weights(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("dense", "training.lora.rank=2", "training.lora.alpha=4")
    assert 0 < dry_run(recipe, device="cpu").parameters < 0.2 * dry_run(make_recipe(), device="cpu").parameters


def test_of_many_rows_the_tokens_are_estimated_from_a_sample(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = dry_run(make_recipe(), device="cpu")
    monkeypatch.setattr(module, "COUNTED", 21)
    sampled = dry_run(make_recipe(), device="cpu")
    assert not sampled.exact
    assert sampled.updates == counted.updates
    assert sampled.texts == counted.texts
    assert sampled.tokens != counted.tokens
    assert math.isclose(sampled.tokens, counted.tokens, rel_tol=0.05)


def test_the_time_limit_ends_the_measurement_after_a_batch(make_recipe: MakeRecipe) -> None:
    found = dry_run(make_recipe(), device="cpu", seconds=0.0)
    assert found.measured_batches == 1
    assert found.tokens_per_second > 0


def test_a_batch_that_does_not_fit_is_one_line(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(self: module.Trainer) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module.Trainer, "train", exhausted)
    with pytest.raises(InputError, match=r"out of memory on cpu in a batch of 4 rows; lower training\.batch_size"):
        dry_run(make_recipe(), device="cpu")


def test_the_command_prints_and_writes_nothing(
    quiver: Callable[..., Any], make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_recipe()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    before = sorted(tmp_path.rglob("*"))
    done = quiver("train", "recipe.json", "--dry-run")
    assert done.code == 0
    for part in ("│ updates ", "│ tokens ", "│ truncated texts ", "│ duration ", "nothing was written"):
        assert part in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    told = json.loads(quiver("train", "recipe.json", "--dry-run", "--json", "--out", "runs/new").out)
    assert (told["rows"], told["updates"]) == (64, 16)
    assert told["peak_memory"] is None or told["peak_memory"] > 50e6
    assert sorted(tmp_path.rglob("*")) == before
    for arguments, message in (
        (("train", "recipe.json"), "add --out FOLDER, or --dry-run"),
        (("train", "recipe.json", "--dry-run", "--resume", "--out", "x"), "remove --resume"),
        (("train", "recipe.json", "--dry-run", "data.train=nowhere.jsonl"), "nowhere.jsonl"),
        (("train", "recipe.json", "--dry-run", "model.init=nowhere/at/all"), "nowhere/at/all"),
        (("train", "recipe.json", "--dry-run", "training.batch_size=65"), "64 rows do not fill one batch of 65"),
        (("train", "recipe.json", "--dry-run", "development.data=nowhere"), "nowhere"),
    ):
        failed = quiver(*arguments)
        assert (failed.code, failed.err.count("\n")) == (2, 1), failed.err
        assert message in failed.err
    assert sorted(tmp_path.rglob("*")) == before


def test_missing_training_data_are_named_before_development_data_with_the_command_of_the_recipe(
    quiver: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are missing in an empty folder; a recipe of the user has a head as well; data of the user have no command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    own = (find_recipe("docstrings-dense").read_text()).replace(
        "quiver collections docstrings --out data/code", "make \\\n#            data"
    )
    Path("own.yaml").write_text(own.replace("name: docstrings-dense", "name: own"))
    docstrings = "quiver collections docstrings --out data/code"
    for command, source, fetch in (
        ("train docstrings-dense --dry-run", "data/code/train.jsonl.gz", docstrings),
        ("train docstrings-dense --out run", "data/code/train.jsonl.gz", docstrings),
        ("sweep docstrings-dense --out sweep", "data/code/train.jsonl.gz", docstrings),
        ("train own.yaml --dry-run", "data/code/train.jsonl.gz", "make data"),
        ("pretrain pretrain-small --dry-run", "data/code/train.jsonl.gz", docstrings),
        (
            "glue glue-base --out run model.init=.",
            "hub://nyu-mll/glue",
            "hf download --repo-type dataset nyu-mll/glue --revision bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c",
        ),
    ):
        failed = quiver(*command.split())
        assert (failed.code, failed.err.count("\n")) == (2, 1), failed.err
        assert failed.err.startswith(f"quiver: error: {source}"), failed.err
        assert failed.err.endswith(f"; download the data of this recipe with: {fetch}\n")
    Path("mine.jsonl").write_text('{"query": "a", "positive": "b"}\n')
    for rows in ("other.jsonl", "mine.jsonl"):  # too few rows is not a matter of the recipe's data
        failed = quiver("train", "docstrings-dense", "--dry-run", f"data.train={rows}", "development=")
        assert (failed.code, "of this recipe" in failed.err) == (2, False), failed.err
