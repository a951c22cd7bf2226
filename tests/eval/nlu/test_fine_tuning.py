"""Whole runs: killed and resumed runs equal uninterrupted ones, the best model is kept, patience stops a run, and refusals.

The task is a GLUE task, which has a head, dropout and a score. Span QA is tested in test_qa_training.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quiver.encoder import InputError, load_head
from quiver.encoder.files import read_json, write_json
from quiver.encoder.heads import SequenceClassifier
from quiver.encoder.training.run_folder import LOG, Checkpoints, read_log
from quiver.encoder.training.trainer import BarCallback
from quiver.eval.nlu.fine_tuning import Request
from quiver.eval.nlu.glue_training import PREDICTIONS, RESULTS, Start, TaskScores, TextTask, run_recipe, train_glue_task
from quiver.eval.nlu.recipes import GlueRecipe

MakeGlue = Callable[..., GlueRecipe]
TIMES = ("seconds", "tokens_per_second")
UPDATES = {"epochs": 2, "evaluate_every": 4, "batch_size": 20}  # 24 steps, evaluated after every fourth


class Killed(BaseException):
    """Simulates a kill: no code catches it."""


def train(recipe: GlueRecipe, out: Path, *, resume: bool = False, overwrite: bool = False) -> TaskScores:
    request = Request(run_recipe(recipe, "cola"), out, (RESULTS, PREDICTIONS), resume, overwrite)
    return train_glue_task(recipe, "cola", Start(recipe.model.init), request)


def after_step(step: int, do: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a function after a step, before that step is logged or saved."""

    def interrupted(self: BarCallback, done: int) -> None:
        if done == step:
            do()

    monkeypatch.setattr(BarCallback, "on_step", interrupted)


def die() -> None:
    raise Killed


def without_times(lines: list[Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def model_bytes(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def assert_same_run(out: Path, whole: Path) -> None:
    assert model_bytes(out) == model_bytes(whole)
    assert without_times(read_log(out / LOG)) == without_times(read_log(whole / LOG))
    last = max(Checkpoints(whole / "checkpoints").steps())
    assert max(Checkpoints(out / "checkpoints").steps()) == last
    folders = [each / "checkpoints" / f"step-{last:06d}" for each in (out, whole)]
    for name in ("model.safetensors", "trainer.safetensors"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), "weights, moments and generators"
    for name in (RESULTS, PREDICTIONS):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.fixture
def recipe(make_glue: MakeGlue) -> GlueRecipe:
    return make_glue("cola", updates=UPDATES)


@pytest.fixture(scope="module")
def whole(make_glue: MakeGlue, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was not interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    train(make_glue("cola", updates=UPDATES), out)
    return out


def test_a_run_saves_its_best_model(whole: Path) -> None:
    record = read_json(whole / "run.json")
    result = record["result"]
    assert (result["steps"], result["planned_steps"], result["stopped_early"], result["resumed_at"]) == (24, 24, False, [])
    assert [line["step"] for line in result["development"]] == [4, 8, 12, 16, 20, 24]
    scores = {line["step"]: line["matthews"] for line in result["development"]}
    assert result["best_step"] == min(step for step, score in scores.items() if score == max(scores.values()))
    assert record["scores"]["score"] == max(scores.values()) == read_json(whole / RESULTS)["score"]
    checkpoints = Checkpoints(whole / "checkpoints")
    assert checkpoints.steps() == sorted({result["best_step"], 24})
    best = load_head(SequenceClassifier, checkpoints.path(result["best_step"])).state_dict()
    for name, weight in load_head(SequenceClassifier, whole / "model").state_dict().items():
        assert torch.equal(weight, best[name])
    assert record["counts"] == {"examples": 240, "truncated": 0, "held_out": 60, "held_out_truncated": 0}
    assert set(record["sha256"]) == {"train", "validation"}
    assert record["recipe"]["tasks"]["cola"]["evaluate_every"] == 4
    assert {path.name for path in whole.iterdir()} == {
        *("begun.json", "checkpoints", "log.jsonl", "model", "predictions.json", "recipe.json", "results.json", "run.json")
    }


@pytest.mark.parametrize("fatal", [6, 13, 24])
def test_a_killed_and_resumed_run_equals_an_uninterrupted_run(
    recipe: GlueRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path, fatal: int
) -> None:
    """Kills in the first epoch, after its end (the next epoch has another order), and before the last step."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        after_step(fatal, die, patch)
        with pytest.raises(Killed):
            train(recipe, out)
    (out / "checkpoints" / ".step-000099.unfinished").mkdir()  # a kill leaves this file, an exception does not
    torch.manual_seed(99)
    train(recipe, out, resume=True)
    assert read_json(out / "run.json")["result"]["resumed_at"] == [4 * ((fatal - 1) // 4)]
    assert_same_run(out, whole)


def scripted(scores: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the scores of the evaluations by given ones."""
    given = iter(scores)
    monkeypatch.setattr(TextTask, "score", lambda self, model: {"matthews": next(given)})


@pytest.mark.parametrize(
    ("scores", "patience", "steps", "best"),
    [
        ([0.1, 0.3, 0.2, 0.3, 0.9, 0.9], 2, 16, 8),  # an equal score is not better
        ([0.1, 0.3, 0.2, 0.4, 0.3, 0.5], 2, 24, 24),
        ([0.5, 0.4, 0.9, 0.1, 0.1, 0.1], 1, 8, 4),
        ([0.1, 0.3, 0.2, 0.2, 0.2, 0.2], None, 24, 8),
    ],
)
def test_patience_stops_the_run_and_the_best_checkpoint_is_its_model(
    make_glue: MakeGlue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores: list[float], patience: int | None, steps: int, best: int
) -> None:
    recipe, out = make_glue("cola", updates=UPDATES, patience=patience), tmp_path / "out"
    scripted(scores, monkeypatch)
    train(recipe, out)
    result = read_json(out / "run.json")["result"]
    assert (result["steps"], result["best_step"], result["stopped_early"]) == (steps, best, steps < 24)
    assert Checkpoints(out / "checkpoints").steps() == sorted({best, steps})
    kept = load_head(SequenceClassifier, out / "checkpoints" / f"step-{best:06d}").state_dict()
    for name, weight in load_head(SequenceClassifier, out / "model").state_dict().items():
        assert torch.equal(weight, kept[name])


def test_a_run_is_resumed_only_with_the_same_recipe_and_data(
    make_glue: MakeGlue, glue_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, out = make_glue("cola", updates=UPDATES), tmp_path / "out"
    with monkeypatch.context() as patch:
        after_step(6, die, patch)
        with pytest.raises(Killed):
            train(recipe, out)
    with pytest.raises(InputError, match=r"--resume needs the recipe and data of the interrupted run; +training\.seed was 12, is 13$"):
        train(make_glue("cola", updates=UPDATES, seed=13), out, resume=True)
    begun = read_json(out / "begun.json")
    write_json(out / "begun.json", begun | {"sha256": begun["sha256"] | {"train": "0" * 64}})
    with pytest.raises(InputError, match=r"--resume needs the recipe and data of the interrupted run; +sha256\.train was"):
        train(recipe, out, resume=True)
    write_json(out / "begun.json", begun | {"threads": 64})
    train(make_glue("cola", updates=UPDATES, log_every=7), out, resume=True)
    assert "changed since the run was started: training.log_every; this does not affect the weights" in caplog.text
    assert "changed since the run was started: threads; the final weights may differ slightly" in caplog.text
