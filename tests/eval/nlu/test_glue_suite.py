"""Whole runs on the layout of GLUE: scores above chance, tasks that start from MNLI, resuming, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quiver.encoder import InputError, SequenceClassifier, load_head
from quiver.encoder.files import read_json
from quiver.eval.nlu.fine_tuning import fine_tune
from quiver.eval.nlu.glue import train_glue
from quiver.eval.nlu.glue_tasks import TASKS
from quiver.eval.nlu.glue_training import open_glue_model
from quiver.eval.nlu.recipes import GlueRecipe

MakeGlue = Callable[..., GlueRecipe]


@pytest.mark.slow
def test_every_task_is_learned(make_glue: MakeGlue, tmp_path: Path) -> None:
    """Chance gives a correlation of 0 and an accuracy of at most 0.6 on 60 rows; every model starts below these."""
    results = train_glue(make_glue(*TASKS, from_mnli=("rte", "mrpc", "stsb")), tmp_path / "out")
    assert list(results.runs) == list(TASKS)
    for task, run in results.runs.items():
        assert run.scores.score > 0.85, (task, run)
        assert run.scores.examples == 60
        assert run.trained_on == 240
        assert run.from_mnli is (task in ("rte", "mrpc", "stsb"))
        assert list(run.scores.measures) == list(TASKS[task].measures)
        predictions = read_json(tmp_path / "out" / task / "predictions.json")
        assert len(predictions) == 60
        assert set(predictions.values()) <= set(TASKS[task].labels) or TASKS[task].is_regression
    assert results.average.value == pytest.approx(sum(run.scores.score for run in results.runs.values()) / 8)
    written = read_json(tmp_path / "out" / "results.json")
    assert (written["schema"], written["average"]["known"], list(written["runs"])) == ("quiver-glue/1", 8, list(TASKS))


def test_a_task_starts_from_mnli_with_new_labels(make_glue: MakeGlue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, out = make_glue("mnli", "rte", from_mnli=("rte",), updates={"epochs": 0.3}), tmp_path / "out"
    firsts: dict[str, dict[str, torch.Tensor]] = {}

    def noted(session: Any, first_model: Any, *, step: int | None) -> Any:
        model = first_model()
        firsts[session.schedule.setting] = {name: weight.clone() for name, weight in model.state_dict().items()}
        return fine_tune(session, lambda: model, step=step)

    monkeypatch.setattr("quiver.eval.nlu.fine_tuning.fine_tune", noted)
    results = train_glue(recipe, out)
    assert [run.from_mnli for run in results.runs.values()] == [False, True]
    mnli, begun = load_head(SequenceClassifier, out / "mnli" / "model").state_dict(), firsts["tasks.rte"]
    for name, weight in begun.items():
        if name.startswith("out."):
            assert weight.shape[0] == 2
            assert mnli[name].shape[0] == 3
        else:
            assert torch.equal(weight, mnli[name]), name
    assert not torch.equal(begun["encoder.embeddings.tokens.weight"], firsts["tasks.mnli"]["encoder.embeddings.tokens.weight"])
    assert torch.equal(begun["out.weight"], open_glue_model(recipe.model.init, TASKS["rte"], seed=12)[0].out.weight), "drawn by the seed"
    assert read_json(out / "rte" / "run.json")["start"]["task"] == "mnli"


def test_a_task_that_starts_from_mnli_requires_an_mnli_model(make_glue: MakeGlue, tmp_path: Path) -> None:
    recipe = make_glue("mnli", "rte", from_mnli=("rte",), updates={"epochs": 0.2})
    with pytest.raises(InputError, match=r"missing\. rte start from the model trained on MNLI; train MNLI too, or set model\.from_mnli="):
        train_glue(recipe, tmp_path / "out", tasks=["rte"])
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="--task cola: not in the recipe, which trains mnli, rte"):
        train_glue(recipe, tmp_path / "out", tasks=["cola"])
    assert list(train_glue(recipe, tmp_path / "out", tasks=["mnli"]).runs) == ["mnli"]
    results = train_glue(recipe, tmp_path / "out", tasks=["rte"])  # a separate session finds the model of the first one
    assert list(results.runs) == ["mnli", "rte"]
    assert (results.average.value, results.average.known, results.average.members) == (None, 2, 8)


def test_complete_tasks_are_skipped_and_others_resumed(make_glue: MakeGlue, tmp_path: Path) -> None:
    recipe, out = make_glue("cola", "rte", updates={"epochs": 0.4}), tmp_path / "out"
    train_glue(recipe, out, tasks=["cola"])
    before = (out / "cola" / "run.json").read_bytes()
    with pytest.raises(InputError, match=r"cola: already contains a run; choose another --out, or pass --overwrite"):
        train_glue(recipe, out)
    assert not (out / "rte").exists(), "refused before anything is trained"
    results = train_glue(recipe, out, resume=True)
    assert list(results.runs) == ["cola", "rte"]
    assert (out / "cola" / "run.json").read_bytes() == before
    other = make_glue("cola", "rte", updates={"epochs": 0.4, "learning_rate": 1e-3})
    with pytest.raises(
        InputError, match=r"cola: holds a complete run of another recipe \(tasks\.cola\.learning_rate was 0\.003, is 0\.001"
    ):
        train_glue(other, out, resume=True)
    train_glue(other, out, overwrite=True)
    assert [read_json(out / task / "run.json")["recipe"]["tasks"][task]["learning_rate"] for task in ("cola", "rte")] == [1e-3, 1e-3]
