"""Whole runs on the layout of GLUE: scores above chance, tasks that start from MNLI, resuming, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quiver.encoder import InputError, SequenceClassifier, load_head
from quiver.encoder.files import file_sha256, read_json
from quiver.eval.nlu.fine_tuning import fine_tune
from quiver.eval.nlu.glue import task_grid, train_glue
from quiver.eval.nlu.glue_tasks import TASKS
from quiver.eval.nlu.glue_training import open_glue_model
from quiver.eval.nlu.recipes import GlueRecipe, load_glue_recipe

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

    def noted(request: Any, prepared: Any, first_model: Any, *, step: int | None) -> Any:
        model = first_model()
        firsts[prepared.schedule.setting] = {name: weight.clone() for name, weight in model.state_dict().items()}
        return fine_tune(request, prepared, lambda: model, step=step)

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


def test_each_task_is_swept_by_itself_and_the_best_runs_have_rows_in_the_tables_of_the_paper(
    quiver: Callable[..., Any], make_glue: MakeGlue, tmp_path: Path
) -> None:
    """Two tasks with two learning rates each: RTE starts from the best model of MNLI, and repeating the command trains nothing."""
    recipe = make_glue("mnli", "rte", from_mnli=("rte",), updates={"epochs": 0.3})
    (tmp_path / "tiny.json").write_text(json.dumps(recipe.model_dump(exclude_none=True)))
    settings = ("tasks.mnli.learning_rate=3e-3,1e-5", "tasks.rte.learning_rate=3e-3,1e-4")
    fixed = [f"tasks.{task}.{name}" for task in ("mnli", "rte") for name in ("weight_decay=1e-6", "epochs=0.3")]
    out = tmp_path / "sweep, all"
    command = ("sweep", tmp_path / "tiny.json", *settings, *fixed, "--out", out)
    done = quiver(*command)
    assert done.code == 0, done.err
    sweeps = {task: read_json(out / task / "sweep.json") for task in ("mnli", "rte")}
    assert [len(each["runs"]) for each in sweeps.values()] == [2, 2]
    best = {task: out / task / each["best"]["folders"][0] / task for task, each in sweeps.items()}
    for run in sweeps["rte"]["runs"]:
        record = read_json(out / "rte" / run["folder"] / "rte" / "run.json")
        assert record["recipe"]["model"]["mnli"] == str(best["mnli"])
        assert record["start"]["sha256"] == file_sha256(best["mnli"] / "model" / "model.safetensors")
    written = read_json(out / "results.json")
    for task, folder in best.items():
        assert written["runs"][task]["scores"] == read_json(folder / "run.json")["scores"]
        scores = [run["scores"]["glue"] for run in sweeps[task]["runs"]]
        assert written["runs"][task]["scores"]["score"] == max(scores)
    before = {path: path.stat().st_mtime_ns for path in (out).rglob("run.json")}
    assert quiver(*command).code == 0
    assert before == {path: path.stat().st_mtime_ns for path in (out).rglob("run.json")}
    table = tmp_path / "paper.md"
    refused = quiver("report", out, "--out", table)
    assert (refused.code, "whose report is made by: quiver report write --layout paper" in refused.err) == (2, True)
    assert quiver("report", out, "--layout", "paper", "--against", "ModernBERT-base", "--out", table).code == 0
    label = f"{recipe.model.init} ({recipe.name})"
    ours = [line for line in table.read_text().splitlines() if line.startswith(f"| {label} |")]
    assert [line.split("|")[-2].strip() for line in ours] == ["2 of 8", "GLUE 2 of 8"]
    assert f"{100 * written['runs']['rte']['scores']['score']:.1f}" in ours[0]
    assert quiver("sweep", tmp_path / "tiny.json", "training.beta2=0.9,0.99", "--out", tmp_path / "other", *fixed).code == 0
    assert (tmp_path / "other" / "sweep.json").is_file(), "a setting of all tasks is swept over runs of all tasks"
    lost = out / "rte" / sweeps["rte"]["runs"][1]["folder"] / "rte"
    (lost / "run.json").unlink()
    for file in (best["mnli"] / "model").iterdir():
        file.unlink()
    failed = quiver(*command)
    assert (failed.code, f"1 of 4 runs failed, {lost.parent} with: " in failed.err) == (1, True), failed.err


def test_the_grid_and_the_batch_are_those_of_the_authors() -> None:
    """Typed from appendix E.1, and from the authors' answer on the batch size; the shipped settings lie on the grid."""
    rates, decays = [1e-5, 3e-5, 5e-5, 8e-5], [1e-6, 5e-6, 8e-6, 1e-5]
    for name in ("glue-base", "glue-large"):
        shipped = load_glue_recipe(name)
        for task in shipped.trained:
            epochs = [1.0, 2.0, 3.0] if task in ("sst2", "mnli", "rte") else [2.0, 5.0, 10.0]
            grid = task_grid(name, task)
            assert len(grid.runs) == 48
            assert [list(values) for values in grid.axes.values()] == [rates, decays, epochs]
            updates = shipped.updates(task)
            assert updates is not None
            assert (updates.learning_rate in rates, updates.weight_decay in decays, updates.epochs in epochs) == (True, True, True)
            assert updates.batch_size == 64
