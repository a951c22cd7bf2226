"""Sweeps: runs that are trained, kept, resumed and retried; selection of the best; failures of one run and of all."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from quiver.encoder import InputError
from quiver.encoder.training.recipe_file import find_recipe
from quiver.eval.sweep import NDCG, Grid, Sweep, make_grid, run_sweep
from quiver.retrieval.training.recipe import SCORE, Recipe

RECIPE = {**yaml.safe_load(find_recipe("quickstart").read_text(encoding="utf-8")), "development": {"data": "dev"}}
RATES = "training.learning_rate=1e-5,3e-5,8e-5"


class Trainer:
    """Replacement for ``train``: writes the files of a run whose score is a function of its recipe."""

    def __init__(self, score: Callable[[Recipe], float]) -> None:
        self.score = score
        self.calls: list[tuple[str, bool]] = []
        self.fails: dict[str, Exception] = {}
        self.stops: dict[str, BaseException] = {}

    def __call__(self, recipe: Recipe, out: Path, *, resume: bool, data_folder: Path) -> None:
        self.calls.append((out.name, resume))
        out.mkdir(parents=True, exist_ok=True)
        (out / "begun.json").write_text(json.dumps({"schema": "quiver-begun/1"}))
        (out / "recipe.json").write_text(json.dumps(recipe.model_dump()))
        if out.name in self.stops:
            raise self.stops.pop(out.name)
        if out.name in self.fails:
            raise self.fails[out.name]
        final, best = self.score(recipe), recipe.development is not None and recipe.development.keep_best
        result = {
            "development": [{"step": 1, SCORE: final + 0.1, "seconds": 30.0}, {"step": 2, SCORE: final, "seconds": 60.0}],
            "kept_steps": [1] if best else [1, 2],
            "seconds": 61.0,
        }
        (out / "run.json").write_text(json.dumps({"schema": "quiver-run/2", "recipe": recipe.model_dump(), "result": result}))

    @property
    def trained(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture
def grid(tmp_path: Path) -> Callable[..., Grid]:
    def make(*settings: str, **sections: object) -> Grid:
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump({**RECIPE, **sections}), encoding="utf-8")
        return make_grid(path, settings)

    return make


def peak(recipe: Recipe) -> float:
    """Score that is best at 3e-5 and varies a little with the seed."""
    return 0.5 - 1e3 * abs(recipe.training.learning_rate - 3e-5) + 0.001 * recipe.training.seed


def test_every_run_is_trained_once_and_the_best_is_first(grid: Callable[..., Grid], tmp_path: Path) -> None:
    trainer, states = Trainer(peak), list[Sweep]()
    found = run_sweep(grid(RATES), tmp_path / "out", train=trainer, command="quiver sweep", changed=states.append)
    assert trainer.calls == [(f"learning_rate={rate}", False) for rate in ("1e-5", "3e-5", "8e-5")]
    assert [candidate.settings["training.learning_rate"] for candidate in found.candidates] == [3e-5, 1e-5, 8e-5]
    assert found.best == found.candidates[0]
    assert found.best.overrides == ("training.learning_rate=3e-5",)
    assert found.best.scores == {SCORE: (pytest.approx(0.512),)}
    assert [len([run for run in state.runs if run.status == "finished"]) for state in states] == [0, 1, 2, 3]
    assert states[1].best is not None, "what is known is said while the rest is trained"
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert (record["schema"], record["command"], record["measures"][0]["key"]) == ("quiver-sweep/2", "quiver sweep", "ndcg@10")
    assert record["best"] == record["candidates"][0]
    assert record["scored_on"] == "dev, split dev"
    assert record["runs"][1] == {
        "folder": "runs/learning_rate=3e-5",
        "settings": {"training.learning_rate": 3e-5},
        "status": "finished",
        "scores": {SCORE: pytest.approx(0.512)},
        "seconds": 61.0,
        "error": None,
    }


@pytest.mark.slow
def test_candidates_are_means_over_seeds(grid: Callable[..., Grid], tmp_path: Path) -> None:
    """The highest single score belongs to the candidate with the lower mean, which is not selected."""
    scores = {(1e-5, 1): 0.9, (1e-5, 2): 0.1, (3e-5, 1): 0.6, (3e-5, 2): 0.6}
    trainer = Trainer(lambda recipe: scores[recipe.training.learning_rate, recipe.training.seed])
    found = run_sweep(grid("training.learning_rate=1e-5,3e-5", "training.seed=1,2"), tmp_path, train=trainer)
    assert [(candidate.mean(NDCG), candidate.scores[SCORE]) for candidate in found.candidates] == [(0.6, (0.6, 0.6)), (0.5, (0.9, 0.1))]
    assert found.candidates[1].deviation(NDCG) == pytest.approx(statistics.stdev([0.9, 0.1]))
    assert found.best is not None
    assert found.best.overrides == ("training.learning_rate=3e-5",), "the seed is none of its settings"
    assert found.best.folders == ("runs/learning_rate=3e-5_seed=1", "runs/learning_rate=3e-5_seed=2")


@pytest.mark.slow
def test_a_stopped_sweep_resumes(grid: Callable[..., Grid], tmp_path: Path) -> None:
    trainer, lines = Trainer(peak), list[str]()
    trainer.stops["learning_rate=3e-5"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_sweep(grid(RATES), tmp_path, train=trainer)
    assert [run["status"] for run in json.loads((tmp_path / "sweep.json").read_text())["runs"]] == ["finished", "waiting", "waiting"]
    trainer.calls.clear()
    found = run_sweep(grid(RATES), tmp_path, train=trainer, report=lines.append)
    assert trainer.calls == [("learning_rate=3e-5", True), ("learning_rate=8e-5", False)]
    assert len(found.candidates) == 3
    assert found == run_sweep(grid(RATES), tmp_path / "whole", train=Trainer(peak))
    assert lines[:3] == ["1 of 3 runs are already finished", "run 2 of 3: learning_rate=3e-5", "nDCG@10 51.20"]
    assert lines[3].startswith("run 3 of 3: learning_rate=8e-5 (about ")


@pytest.mark.parametrize(
    "error",
    [
        InputError("the loss is not finite\nmore"),
        *(pytest.param(error, marks=pytest.mark.slow) for error in (RuntimeError("out of memory"), MemoryError(), OSError("disk"))),
    ],
)
def test_a_failed_run_is_recorded_and_the_others_continue(grid: Callable[..., Grid], tmp_path: Path, error: Exception) -> None:
    trainer = Trainer(peak)
    trainer.fails["learning_rate=3e-5"] = error
    found = run_sweep(grid(RATES), tmp_path, train=trainer)
    assert [run.status for run in found.runs] == ["finished", "failed", "finished"]
    assert found.runs[1].error == (str(error).splitlines()[0] if str(error) else "MemoryError")
    assert [candidate.settings["training.learning_rate"] for candidate in found.candidates] == [1e-5, 8e-5, 3e-5]
    trainer.fails.clear()
    trainer.calls.clear()
    again = run_sweep(grid(RATES), tmp_path, train=trainer)
    assert trainer.calls == [("learning_rate=3e-5", True)]
    assert again.best is not None
    assert again.best.settings == {"training.learning_rate": 3e-5}


def test_an_incomplete_candidate_is_not_selected(grid: Callable[..., Grid], tmp_path: Path) -> None:
    trainer = Trainer(peak)
    trainer.fails["learning_rate=3e-5_seed=2"] = RuntimeError("boom")
    found = run_sweep(grid("training.learning_rate=3e-5,8e-5", "training.seed=1,2"), tmp_path, train=trainer)
    assert found.best is not None
    assert found.best.settings == {"training.learning_rate": 8e-5}
    assert (found.candidates[1].missing, found.candidates[1].scores) == (1, {SCORE: (pytest.approx(0.501),)})


@pytest.mark.slow
def test_a_sweep_whose_runs_all_fail_says_why(grid: Callable[..., Grid], tmp_path: Path) -> None:
    trainer = Trainer(peak)
    trainer.fails = {f"learning_rate={rate}": InputError(f"no data for {rate}") for rate in ("1e-5", "3e-5", "8e-5")}
    with pytest.raises(InputError, match=f"every run failed, {tmp_path}/runs/learning_rate=1e-5 with: no data for 1e-5"):
        run_sweep(grid(RATES), tmp_path, train=trainer)
    assert [run["status"] for run in json.loads((tmp_path / "sweep.json").read_text())["runs"]] == ["failed"] * 3


@pytest.mark.parametrize("file", ["run.json", pytest.param("recipe.json", marks=pytest.mark.slow)])
def test_runs_of_another_recipe_are_refused(grid: Callable[..., Grid], tmp_path: Path, file: str) -> None:
    trainer = Trainer(peak)
    run_sweep(grid(RATES), tmp_path, train=trainer)
    if file == "recipe.json":
        (tmp_path / "runs" / "learning_rate=3e-5" / "run.json").unlink()
    trainer.calls.clear()
    changed = grid(RATES, training={**RECIPE["training"], "weight_decay": 0.5})
    with pytest.raises(InputError, match=r"another training\.weight_decay \(0\.01 there, 0\.5 now\).*--overwrite"):
        run_sweep(changed, tmp_path, train=trainer)
    assert trainer.calls == []
    other = tmp_path / "runs" / "mine" / "file"
    other.parent.mkdir()
    other.touch()
    trainer.stops["learning_rate=3e-5"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_sweep(changed, tmp_path, train=trainer, overwrite=True)
    assert trainer.calls == [("learning_rate=1e-5", False), ("learning_rate=3e-5", False)]
    trainer.calls.clear()
    run_sweep(changed, tmp_path, train=trainer)  # goes on: what was replaced is not replaced again, what was not is gone
    assert trainer.calls == [("learning_rate=3e-5", True), ("learning_rate=8e-5", False)]
    assert other.exists()


@pytest.mark.slow
def test_runs_that_differ_only_in_irrelevant_settings_are_kept(grid: Callable[..., Grid], tmp_path: Path) -> None:
    """They differ in description, log interval, or a setting that did not exist when they were started."""
    trainer = Trainer(peak)
    run_sweep(grid(RATES), tmp_path, train=trainer)
    for name in ("run.json", "recipe.json"):
        path = tmp_path / "runs" / "learning_rate=3e-5" / name
        found = json.loads(path.read_text())
        del found.get("recipe", found)["training"]["gradient_checkpointing"]
        path.write_text(json.dumps(found))
    left = tmp_path / "runs" / "learning_rate=8e-5" / "start"
    left.mkdir()
    trainer.calls.clear()
    again = grid(RATES, description="better words", training={**RECIPE["training"], "log_every": 7})
    assert run_sweep(again, tmp_path, train=trainer).best is not None
    assert trainer.calls == []
    assert not left.exists(), "of a run that was killed when it was complete"
