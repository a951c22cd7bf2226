"""Probes of pretraining: their score is that of the short training alone, the weights do not change, and bad probes are refused early."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder import InputError
from quiver.encoder.errors import RunStoppedError
from quiver.encoder.files import read_json
from quiver.encoder.pretraining import run as pretraining_run
from quiver.encoder.pretraining.recipe import PretrainingRecipe, load_pretraining_recipe
from quiver.encoder.training.run_folder import LOG, read_log
from quiver.eval.nlu.glue_tasks import TASKS
from quiver.eval.probe import open_probe, pretrain
from quiver.eval.report.training import write_training_report
from quiver.eval.training import train
from tests.encoder.pretraining.conftest import described, write_texts
from tests.eval.conftest import MakeCollection
from tests.eval.nlu.conftest import learnable_rows, write_split

pytest.importorskip("optimi")
pytest.importorskip("sentence_transformers")

Make = Callable[..., PretrainingRecipe]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """``make({"recipe": ...}, "training.seed=3")``: a recipe of two phases and about 20 steps, with a probe."""
    texts = write_texts(tmp_path / "texts")

    def make_recipe(probe: dict[str, Any] | None, *overrides: str) -> PretrainingRecipe:
        path = tmp_path / "pretraining.json"
        path.write_text(json.dumps(described(texts) | {"probe": probe}))
        return load_pretraining_recipe(path, overrides)

    return make_recipe


@pytest.fixture
def retrieval(tmp_path: Path, make_collection: MakeCollection) -> dict[str, Any]:
    """A probe that trains a bi-encoder for three steps."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"query": f"a bird {n}", "positive": f"the sea {n}"}) + "\n" for n in range(12)))
    settings = {"data.train": rows, "development.data": make_collection(), "development.split": "test", "model.max_length": 24}
    changes = ("training.batch_size=4", "training.max_steps=3", "training.max_length=", "training.log_every=1")
    return {"recipe": "docstrings-dense", "settings": [*(f"{key}={value}" for key, value in settings.items()), *changes]}


def test_a_retrieval_probe_scores_what_the_recipe_trains_from_the_weights(make: Make, retrieval: dict[str, Any], tmp_path: Path) -> None:
    record = pretrain(make(retrieval | {"every": 12}), tmp_path / "out", device="cpu")
    curves, last = record["result"]["curves"], record["result"]["steps"]
    assert [step for step, _ in curves["probe_score"]] == [12, record["result"]["phases"][0]["last_step"], last]
    alone = train(
        "docstrings-dense", tmp_path / "alone", [*retrieval["settings"], f"model.init={tmp_path / 'out' / 'model'}"], device="cpu"
    )
    assert curves["probe_score"][-1] == [last, alone["result"]["development"][-1]["ndcg@10"]]
    plain = pretrain(make(None), tmp_path / "plain", device="cpu")
    names = ("model/model.safetensors", "tokenizer/tokenizer.json")
    assert [(tmp_path / "out" / name).read_bytes() for name in names] == [(tmp_path / "plain" / name).read_bytes() for name in names]
    assert curves["held_out_loss"] == plain["result"]["curves"]["held_out_loss"], "a probe adds no candidate for averaging"
    assert not (tmp_path / "out" / "probe").exists()
    report = write_training_report(tmp_path / "out").with_suffix(".md").read_text()
    assert "Probe by docstrings-dense" in report
    assert "Held-out accuracy" in report


def test_a_glue_probe_scores_the_tasks_that_it_names(make: Make, tmp_path: Path) -> None:
    for name in ("mnli", "rte"):
        write_split(tmp_path / "glue", TASKS[name], "train", learnable_rows(TASKS[name], 1, 32))
        write_split(tmp_path / "glue", TASKS[name], TASKS[name].held_out, learnable_rows(TASKS[name], 2, 30))
    settings = [f"data.source={tmp_path / 'glue'}", "data.max_length=24", "tasks.mnli.epochs=1", "tasks.mnli.evaluate_every="]
    record = pretrain(make({"recipe": "glue-base", "tasks": ["mnli"], "settings": settings}), tmp_path / "out", device="cpu")
    scores = [score for _, score in record["result"]["curves"]["probe_score"]]
    assert len(scores) == 2
    assert all(score * 30 == pytest.approx(round(score * 30)) for score in scores), "an accuracy over 30 examples"
    assert max(scores) > 0


def test_a_stop_during_a_probe_stops_the_run_which_resumes_with_it(make: Make, tmp_path: Path) -> None:
    calls: list[Path] = []

    def probe(folder: Path) -> float:
        calls.append(folder)
        assert (folder / "model" / "model.safetensors").is_file()
        if len(calls) == 1:
            raise RunStoppedError(3)
        return 0.25

    recipe, out = make({"recipe": "docstrings-dense", "every": 8}), tmp_path / "out"
    with pytest.raises(RunStoppedError) as stopped:
        pretraining_run.pretrain(recipe, out, probe=probe)
    assert stopped.value.step == 8
    assert not any("held_out_loss" in line for line in read_log(out / LOG) if line["step"] == 8)
    record = pretraining_run.pretrain(recipe, out, resume=True, probe=probe)
    assert record["result"]["resumed_at"] == [8]
    assert [value for _, value in record["result"]["curves"]["probe_score"]] == [0.25] * (len(calls) - 1)
    assert read_json(out / "recipe.json")["probe"]["every"] == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "nothing"}, r"^probe: no shipped recipe 'nothing'"),
        ({"recipe": "pretrain-small"}, r"^probe: pretrain-small has the kind pretraining; a probe trains a retriever"),
        ({"settings": ["data.trains=x"]}, r"^probe: .*data\.trains: unknown key, did you mean 'train'"),
        ({"settings": ["development="]}, r"add development\.data=FOLDER_OR_NAME to probe\.settings"),
        ({"settings": ["model.max_length=25"]}, r"model\.max_length must be <= 24, the shortest context of the phases, got 25; add model"),
        ({"settings": ["data.train=absent.jsonl"]}, r"^probe: absent\.jsonl: no such file or folder"),
        ({"tasks": ["mnli"]}, r"^probe: probe\.tasks are tasks of GLUE, and docstrings-dense trains a retriever"),
        ({"recipe": "glue-base", "settings": ["data.max_length=24"], "tasks": ["wnli"]}, r"^probe: .*wnli: not in the recipe"),
    ],
)
def test_a_probe_that_cannot_run_is_refused_before_the_run(
    make: Make, retrieval: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    settings = [*([] if changes.get("recipe") else retrieval["settings"]), *changes.get("settings", ())]
    with pytest.raises(InputError, match=message):
        open_probe(make(retrieval | changes | {"settings": settings}))


def test_a_recipe_with_a_probe_needs_one(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"quiver\.eval\.probe\.pretrain does that"):
        pretraining_run.pretrain(make({"recipe": "docstrings-dense"}), tmp_path / "out")
