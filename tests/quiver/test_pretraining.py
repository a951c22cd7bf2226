"""``quiver pretrain``, its report, and ``quiver validate`` with recipes of several kinds."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder.packing import pack_ids
from quiver.eval.report.training import read_run, summary
from quiver.retrieval.models.pretrained import load_parts

pytest.importorskip("optimi")

RECIPE: dict[str, Any] = {
    **dict.fromkeys(("name", "description", "source", "cost", "expected"), "as in the test"),
    "kind": "pretraining",
    "model": {
        "init": "random",
        "tokenizer": "train",
        "vocabulary": {"size": 320, "unused": 8},
        "layers": 1,
        "hidden_size": 16,
        "heads": 2,
        "intermediate_size": 24,
    },
    "data": {"sources": [{"name": "lines", "path": "lines.txt", "lines": True}], "held_out": 0.1},
    "phases": [
        {"name": "only", "tokens": 800, "context": 16, "global_theta": 10_000, "learning_rate": 1e-2, "batch_size": 8, "micro_batch": 8}
    ],
    "training": {"seed": 1, "log_every": 1, "evaluate_every": 3},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    words = ("read", "write", "open", "close", "file", "line")
    (tmp_path / "lines.txt").write_text("\n".join(" ".join(words[: 1 + number % 6]) + f" {number}" for number in range(90)) + "\n")
    (tmp_path / "recipe.json").write_text(json.dumps(RECIPE))
    return tmp_path


def test_pretrain_writes_a_model_and_a_report(quiver: Callable[..., Any], folder: Path) -> None:
    done = quiver("pretrain", "recipe.json", "--out", "out", "phases.0.tokens=900")
    assert done.code == 0, done.err
    assert "model: out/model" in done.out
    record = json.loads((folder / "out" / "run.json").read_text())
    assert record["recipe"]["phases"][0]["tokens"] == 900
    assert record["command"].endswith("pretrain recipe.json --out out phases.0.tokens=900")
    report = (folder / "out" / "report.md").read_text()
    for text in (
        "# Pretraining run: as in the test",
        "Held-out loss",
        "Tokens/s",
        "Packing",
        "phase 1: only",
        "Gradient norm",
        "Model FLOP/s",
    ):
        assert text in report
    facts = summary(read_run(folder / "out"))
    assert facts["Updates"] == str(record["result"]["steps"])
    assert facts["Packing"] == f"{record['result']['packing']:.2%} of the rows"
    parts = load_parts(folder / "out" / "model")  # what quiver train starts from
    assert parts.encoder.config.max_positions == 16
    assert parts.encoder(pack_ids(parts.tokenizer.encode(["read the file"], max_length=16).ids)).shape[1] == 16
    if importlib.util.find_spec("jinja2") is not None:
        page = (folder / "out" / "report.html").read_text()
        assert page.count("<svg") >= 5
        assert "Held-out loss" in page
    again = quiver("pretrain", "recipe.json", "--out", "out")
    assert (again.code, again.out) == (2, "")
    assert "already contains a run" in again.err
    printed = quiver("pretrain", "recipe.json", "--out", "other", "--json")
    assert json.loads(printed.out)["schema"] == "quiver-run/pretraining-1"


LONGER = {"name": "longer", "tokens": 600, "context": 24, "batch_size": 4, "micro_batch": 2, "batch_warmup_tokens": 200}


def test_a_dry_run_predicts_what_the_run_records_and_writes_nothing(quiver: Callable[..., Any], folder: Path) -> None:
    phases = [RECIPE["phases"][0], {**RECIPE["phases"][0], **LONGER}]
    (folder / "recipe.json").write_text(json.dumps({**RECIPE, "phases": phases}))
    before = sorted(folder.rglob("*"))
    done = quiver("pretrain", "recipe.json", "--dry-run", "--json", "--device", "cpu")
    assert done.code == 0, done.err
    found, shown = json.loads(done.out), quiver("pretrain", "recipe.json", "--dry-run", "--out", "new").out
    for part in ("nothing was written", "│ updates ", "│ duration ", "│ longer ", "split documents", "packing"):
        assert part in shown
    assert sorted(folder.rglob("*")) == before
    assert quiver("pretrain", "recipe.json", "--out", "out", "--device", "cpu").code == 0
    record = json.loads((folder / "out" / "run.json").read_text())
    counts = record["corpus"]["counts"]["lines"]
    assert (found["documents"], found["corpus_tokens"]) == (counts["train"]["documents"], counts["train"]["tokens"])
    assert (found["held_out"], found["exact"]) == (counts["held_out"]["documents"], True)
    assert (found["parameters"], found["vocabulary"]) == (record["model"]["parameters"], record["model"]["vocabulary"]["ids"])
    assert abs(found["updates"] - record["result"]["steps"]) <= 2
    assert sum(phase["packing"] for phase in found["phases"]) / 2 == pytest.approx(record["result"]["packing"], abs=0.05)
    assert [phase["measured_updates"] for phase in found["phases"]] == [5, 5]
    assert found["seconds"] == sum(phase["seconds"] for phase in found["phases"]) > 0
    corpus = np.diff(np.fromfile(folder / "out" / "corpus" / "train.ends", "<i8"), prepend=0)
    assert [phase["split"] for phase in found["phases"]] == [(corpus > context - 2).mean() for context in (16, 24)]


def test_a_prepared_corpus_is_trained_on(quiver: Callable[..., Any], folder: Path) -> None:
    """The text files are deleted after --prepare, which has tokenized them. The model equals that of a single run."""
    done = quiver("pretrain", "recipe.json", "--out", "out", "--prepare")
    assert (done.code, done.out) == (0, "prepared: out; repeat the command with --resume instead of --prepare to train\n")
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["begun.json", "corpus", "recipe.json", "tokenizer"]
    again = quiver("pretrain", "recipe.json", "--out", "out", "--prepare")
    assert again.code == 2
    assert "contains an unfinished run; resume it with --resume, or choose another --out" in again.err
    assert quiver("pretrain", "recipe.json", "--out", "out", "--prepare", "--resume").code == 0
    assert quiver("pretrain", "recipe.json", "--out", "whole").code == 0
    (folder / "lines.txt").unlink()
    assert quiver("pretrain", "recipe.json", "--out", "out", "--resume").code == 0
    models = [(folder / name / "model" / "model.safetensors").read_bytes() for name in ("out", "whole")]
    assert models[0] == models[1]


def test_validate_accepts_recipes_of_every_kind(quiver: Callable[..., Any], folder: Path) -> None:
    done = quiver("validate", "recipe.json", "quickstart", "pretrain-base")
    assert (done.code, done.out.strip()) == (0, "3 recipes checked, no problems")
    broken = json.loads((folder / "recipe.json").read_text())
    broken["phases"][0]["micro_batch"] = 3
    (folder / "broken.json").write_text(json.dumps(broken, indent=2))
    done = quiver("validate", "broken.json")
    assert done.code == 2
    assert "phases.0.micro_batch: must divide batch_size 8, got 3" in done.err
