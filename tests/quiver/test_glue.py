"""``quiver glue``: two tasks are trained, resumed and reported; mistakes are reported in one line."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights, save_encoder
from quiver.encoder.training.trainer import BarCallback

parquet = pytest.importorskip("pyarrow.parquet")

WORDS = ["bird", "sea", "wing", "stone", "tree", "river", "cloud", "field"]
COUNT = 240


def write_cola(folder: Path, name: str, split: str, *, labels: bool = True) -> None:
    """Write sentences of random words whose last word, well or badly, decides the label."""
    import pyarrow

    draw = random.Random(f"{name} {split}")
    said = [draw.randrange(2) for _ in range(COUNT)]
    sentences = [" ".join([*draw.choices(WORDS, k=5), "well" if right else "badly"]) for right in said]
    (folder / name).mkdir(parents=True, exist_ok=True)
    columns = {"sentence": sentences, "label": said if labels else [-1] * COUNT, "idx": list(range(COUNT))}
    parquet.write_table(pyarrow.table(columns), folder / name / f"{split}-00000-of-00001.parquet")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    for name in ("cola", "sst2"):
        for split in ("train", "validation"):
            write_cola(tmp_path / "glue", name, split)
    config = EncoderConfig.modernbert(
        vocab_size=320, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global"], max_positions=32
    )
    save_encoder(init_weights(Encoder(config), seed=1), tmp_path / "encoder")
    Tokenizer.train([" ".join(WORDS) + " well badly"] * 3, vocab_size=320, max_length=32).save(tmp_path / "encoder")
    updates = {"epochs": 4, "batch_size": 16, "learning_rate": "3e-3"}
    settings = {
        **dict.fromkeys(("name", "description", "source", "cost", "expected"), "small"),
        "kind": "glue",
        "model": {"init": str(tmp_path / "encoder")},
        "data": {"source": str(tmp_path / "glue"), "max_length": 32},
        "tasks": {"cola": updates, "sst2": dict(updates)},
        "training": {"seed": 3},
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def messages(err: str) -> list[str]:
    return [line for line in err.splitlines() if "initialized at random" not in line]


def test_tasks_are_trained_resumed_and_reported(
    quiver: Callable[..., Any], recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert quiver("validate", recipe).code == 0
    done = quiver("glue", recipe, "--out", out, "--task", "sst2")
    assert (done.code, messages(done.err)) == (0, [])
    assert f"report: {out / 'report.html'}" in done.out
    assert "1 of 8" in (out / "report.md").read_text()
    assert json.loads((out / "sst2" / "run.json").read_text())["command"].endswith("--task sst2")

    def terminated(self: BarCallback, step: int) -> None:
        if step == 2:  # after this step was asked whether to stop: the run ends with the third
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(BarCallback, "on_step", terminated)
        done = quiver("glue", recipe, "--out", out, "--resume")
    assert done.code == 1
    assert "stopped after step 3, with a checkpoint; repeat the command to resume" in done.err
    done = quiver("glue", recipe, "--out", out, "--resume", "--json")
    assert (done.code, messages(done.err)) == (0, [])
    results = json.loads(done.out)
    assert {task: run["scores"]["score"] > 0.9 for task, run in results["runs"].items()} == {"cola": True, "sst2": True}
    assert results["average"] == {"value": None, "known": 2, "members": 8}
    assert json.loads((out / "cola" / "run.json").read_text())["result"]["resumed_at"] == [3]
    assert "2 of 8" in (out / "report.md").read_text()
    done = quiver("glue", recipe, "--out", out)
    assert (done.code, "sst2: already contains a run" in done.err or "cola: already contains a run" in done.err) == (2, True)
