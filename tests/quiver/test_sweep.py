"""``quiver sweep`` with small real runs: output, files, resumption and refusals."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quiver.encoder.training.recipe_file import find_recipe
from quiver.retrieval import BiEncoder
from quiver.retrieval.training.recipe import load_recipe

TEXTS = {f"d{number}": f"a text about {word}" for number, word in enumerate(["birds", "fish", "stones", "salt", "wings", "seas"])}
SMALL = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 48, "vocab_size": 320, "max_positions": 64}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe for a tiny model, with its training pairs and development collection."""
    monkeypatch.chdir(tmp_path)
    dev = tmp_path / "dev"
    (dev / "qrels").mkdir(parents=True)
    (dev / "corpus.jsonl").write_text("".join(json.dumps({"_id": key, "text": text}) + "\n" for key, text in TEXTS.items()))
    (dev / "queries.jsonl").write_text('{"_id": "q1", "text": "birds"}\n{"_id": "q2", "text": "salt"}\n')
    (dev / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td0\t1\nq2\td3\t1\n")
    rows = [{"query": text.split()[-1], "positive": text} for text in TEXTS.values()]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = yaml.safe_load(find_recipe("quickstart").read_text(encoding="utf-8"))
    document["model"] |= {"architecture": {**document["model"]["architecture"], **SMALL}, "max_length": 16}
    document["data"] = {"train": "train.jsonl"}
    document["training"] |= {"batch_size": 3, "epochs": 2, "log_every": 1}
    document["development"] = {"data": "dev"}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def test_a_sweep_trains_selects_and_resumes(quiver: Callable[..., Any], recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    command = ("sweep", recipe, "--out", out, "training.learning_rate=1e-4,1e-2", "training.seed=1,2")
    done = quiver(*command)
    assert done.code == 0, done.err
    record = json.loads((out / "sweep.json").read_text())
    assert [run["status"] for run in record["runs"]] == ["finished"] * 4
    best = record["best"]
    assert best["mean"]["ndcg@10"] == max(candidate["mean"]["ndcg@10"] for candidate in record["candidates"])
    assert all(str(out / folder / "model") in done.out for folder in best["folders"])
    for run in record["runs"]:
        folder = out / run["folder"]
        BiEncoder(folder / "model")
        trained = json.loads((folder / "run.json").read_text())["recipe"]
        assert {path: trained["training"][path.partition(".")[2]] for path in run["settings"]} == run["settings"]
    said = next(line for line in done.out.splitlines() if line.startswith("to train it again: "))
    _, _, source, _, _, *overrides = shlex.split(said.removeprefix("to train it again: "))
    again = load_recipe(source, overrides)
    assert again.training.learning_rate == best["settings"]["training.learning_rate"]
    assert "sweep.svg" in (out / "sweep.md").read_text()
    assert (out / "sweep.svg").read_text().startswith("<svg")

    # Two runs are lost, one of them half-way: the same command trains these again and no other.
    before = {run["folder"]: (out / run["folder"] / "run.json").stat().st_mtime_ns for run in record["runs"]}
    (out / record["runs"][1]["folder"] / "run.json").unlink()
    quiet = quiver(*command, "--json")
    assert quiet.code == 0, quiet.err
    after = json.loads(quiet.out)
    assert after["best"] == {**best, "scores": after["best"]["scores"]}
    assert [run["scores"] for run in after["runs"]] == [run["scores"] for run in record["runs"]], "a run gone on with is the same run"
    changed = [folder for folder, when in before.items() if (out / folder / "run.json").stat().st_mtime_ns != when]
    assert changed == [record["runs"][1]["folder"]]


def test_a_sweep_recipe_pretrains_each_of_its_runs(quiver: Callable[..., Any], recipe: Path, tmp_path: Path) -> None:
    """The changed switches, both held-out scores and the probe's stand in one table; the second run is resumed after a kill."""
    phase = "{name: all, tokens: 2000, context: 32, global_theta: 1e4, learning_rate: 1e-3, batch_size: 8, micro_batch: 8}"
    (tmp_path / "texts.txt").write_text("\n".join(f"{text}, and number {number}" for number in range(60) for text in TEXTS.values()))
    settings = ["model.hidden_size=16", "model.intermediate_size=24", "model.layers=1", "model.vocabulary.size=320", f"phases=[{phase}]"]
    settings += ["data.sources=[{name: all, path: texts.txt, lines: true}]", "data.held_out=0.2", f"probe.recipe={recipe}"]
    settings += ["probe.settings=[model.init=x, model.tokenizer=, model.architecture=, training.epochs=1]"]
    runs = [{"name": "base", "seeds": [1, 2]}, {"name": "plain", "settings": ["model.mlp=plain", "model.norm=rmsnorm"]}]
    plan = {"name": "switches", "kind": "sweep", "recipe": "pretrain-small", "settings": settings, "runs": runs}
    (tmp_path / "switches.yaml").write_text(yaml.safe_dump(plan), encoding="utf-8")
    done = quiver("sweep", "switches.yaml", "--out", "out")
    assert done.code == 0, done.err
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [measure["key"] for measure in record["measures"]] == ["held_out_loss", "held_out_accuracy", "probe_score"]
    means = [candidate["mean"] for candidate in record["candidates"]]
    assert means == sorted(means, key=lambda mean: mean["held_out_loss"]), "a low loss is good"
    for run in record["runs"]:
        curves = json.loads((tmp_path / "out" / run["folder"] / "run.json").read_text())["result"]["curves"]
        assert run["scores"] == {key: curves[key][-1][1] for key in run["scores"]}
    table = [line for line in (tmp_path / "out" / "sweep.md").read_text().splitlines() if line.startswith("| ")]
    assert any("model.mlp=plain model.norm=rmsnorm" in line.replace("\\", "") for line in table)
    assert f"quiver pretrain pretrain-small --out {Path('out') / 'best'}" in done.out
    (tmp_path / "out" / record["runs"][1]["folder"] / "run.json").unlink()
    again = json.loads(quiver("sweep", "switches.yaml", "--out", "out", "--json").out)
    assert [run["scores"] for run in again["runs"]] == [run["scores"] for run in record["runs"]]


def test_torchrun_is_refused(quiver: Callable[..., Any], recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = quiver("sweep", recipe, "--out", "sweep")
    assert (done.code, "without torchrun" in done.err) == (2, True)
