"""Every benchmark script runs on the smallest input, compares with another library, and writes its results."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import imported_python

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = pytest.mark.slow


def run(script: str, *arguments: object, out: Path) -> dict[str, Any]:
    command = [imported_python(), str(FOLDER / f"{script}.py"), *map(str, arguments), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=out.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (out / "report.md").read_text().count("## ") >= 2
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    return results


def rows(results: dict[str, Any], case: str) -> dict[str, dict[str, Any]]:
    return {row["backend"]: row for row in results["cases"][case]["rows"]}


@pytest.mark.parametrize("script", ["encoder", "training", "index", "serving", "gpu"])
def test_the_options_in_the_documentation_exist(script: str) -> None:
    text = " ".join("\n".join((FOLDER.parent / "docs" / page).read_text() for page in ("benchmarks.md", "gpus.md", "cpus.md")).split())
    commands = re.findall(rf"python benchmarks/{script}\.py ([^`]*)", text)
    done = subprocess.run([imported_python(), str(FOLDER / f"{script}.py"), "--help"], capture_output=True, text=True)
    assert (done.returncode, "Example: python benchmarks/" in done.stdout) == (0, True), done.stderr
    options = {word for command in commands for word in command.split() if re.fullmatch(r"--?[a-z][a-z-]*", word)}
    assert options <= set(re.findall(r"--?[a-z][a-z-]*", done.stdout))
    assert commands or script == "serving"


def test_the_encoder_is_compared_with_transformers_and_sentence_transformers(minilm: Path, tmp_path: Path) -> None:
    found = rows(run("encoder", "-m", minilm, "--lengths", "8x2+5", "--train", "--rounds", 2, out=tmp_path / "ids"), "8x2+5")
    other = found["transformers-sdpa"]
    assert (len(other["ratio"]), found["quiver"]["difference"]) == (2, 0)
    assert 0 < other["difference"] < 1e-5
    (tmp_path / "texts.jsonl").write_text('{"_id": "a", "text": "owls have wings"}\n{"_id": "b", "text": "trout"}\n')
    arguments = ("-m", minilm, "--data", tmp_path / "texts.jsonl", "--rounds", 1, "--backend", "sentence-transformers")
    found = rows(run("encoder", *arguments, out=tmp_path / "texts"), "texts.jsonl")
    assert found["sentence-transformers"]["difference"] < 1e-5


def test_training_steps_have_the_losses_of_the_libraries(minilm: Path, tmp_path: Path) -> None:
    arguments = ("-m", minilm, "--rounds", 1, "--batch-size", 2, "--kind", "dense", "--kind", "mlm")
    results = run("training", *arguments, out=tmp_path / "out")
    assert rows(results, "msmarco, dense")["sentence-transformers"]["loss_difference"] < 1e-4
    assert rows(results, "msmarco, mlm")["transformers"]["loss_difference"] < 1e-4


def test_indexes_have_recall_latency_and_size(tmp_path: Path) -> None:
    folder, generator = tmp_path / "vectors", np.random.default_rng(0)
    folder.mkdir()
    for name, count in (("documents", 300), ("queries", 5)):
        vectors = generator.standard_normal((count, 16)).astype(np.float32)
        np.save(folder / f"{name}.npy", vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    arguments = (folder, "--engine", "exact", "--filter-share", 0.1, "--baseline", "faiss:Flat", "--rounds", 1)
    results = run("index", *arguments, out=tmp_path / "out")
    for row in results["cases"]["search"]["rows"]:
        assert (row["recall@1"], row["recall@10"]) == (1, 1), row
        assert row["p50"][0] > 0
    assert {row["backend"] for row in results["cases"]["search"]["rows"]} == {"exact", "faiss:Flat"}
    assert rows(results, "build")["faiss:Flat"]["disk"] > 300 * 16 * 4
    assert not (tmp_path / "out" / "work").exists()


def test_the_gpu_benchmark_runs_in_its_small_form_and_goes_on(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--minutes", 5, "--stage", "queries", "--stage", "search", "--stage", "profile")
    results = run("gpu", *arguments, out=tmp_path / "out")
    assert {"queries", "MaxSim search", "dense search", "forward pass", "training step"} <= results["cases"].keys(), results["notes"]
    assert results["cases"]["stages"]["done"] == ["profile", "queries", "search"]
    assert sum(row["share"] for row in results["cases"]["training step"]["rows"]) == pytest.approx(1)
    assert run("gpu", *arguments, out=tmp_path / "out")["cases"]["queries"] == results["cases"]["queries"]


def test_the_service_is_compared_with_calls_in_process(minilm: Path, tmp_path: Path) -> None:
    (tmp_path / "c" / "qrels").mkdir(parents=True)
    (tmp_path / "c" / "corpus.jsonl").write_text('{"_id": "a", "text": "owls have wings"}\n')
    (tmp_path / "c" / "queries.jsonl").write_text('{"_id": "q", "text": "wings"}\n')
    (tmp_path / "c" / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\n")
    results = run("serving", tmp_path / "c", "-m", minilm, "--queries", 4, "--clients", 2, "--rounds", 1, out=tmp_path / "out")
    for case in ("search", "embeddings"):
        assert rows(results, case)["service, 2 clients"]["requests_per_second"][0] > 0
