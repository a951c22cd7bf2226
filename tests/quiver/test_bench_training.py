"""``quiver bench training``: output files, JSON, and one-line errors."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights, save_encoder
from quiver.eval.bench.results import read_benchmark
from quiver.eval.bench.training_backends import ENGLISH

EXTRA = ("sentence_transformers", "transformers", "pylate", "accelerate", "datasets")
pytestmark = [
    pytest.mark.skipif(not all(map(importlib.util.find_spec, EXTRA)), reason="needs the extra train"),
    pytest.mark.usefixtures("quick_children"),
]


@pytest.fixture
def bench(quiver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(*arguments: object) -> Any:
        monkeypatch.setenv("COLUMNS", "160")
        return quiver("bench", "training", *arguments)

    return run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer.train([ENGLISH] * 2, vocab_size=1024, max_length=256)
    config = EncoderConfig.modernbert(
        vocab_size=1024, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "local"], max_positions=256
    )
    folder = tmp_path_factory.mktemp("tiny")
    save_encoder(init_weights(Encoder(config), seed=1), folder)
    tokenizer.save(folder)
    return folder


def test_both_kinds_write_files(bench: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "bench"
    done = bench("--model", tiny, "--rounds", 2, "--batch-size", 2, "--out", out)
    assert (done.code, done.err) == (0, "")
    printed = " ".join(done.out.split())
    assert "msmarco, dense (mnrl): 2 rows of a query and 2 documents" in printed
    assert "msmarco, colbert (contrastive): 2 rows" in printed
    assert "sentence-transformers" in printed
    assert "pylate" in printed
    assert sorted(path.name for path in out.iterdir()) == ["plot.png", "plot.svg", "report.html", "report.md", "results.json"]
    found = read_benchmark(out / "results.json")
    assert found.settings["rounds"] == 2
    assert found.provenance.command is not None
    assert found.provenance.command.startswith("quiver bench training --model")
    assert {"transformers", "sentence-transformers", "pylate"} <= set(found.provenance.versions)
    again = bench("--model", tiny, "--out", out)
    assert again.code == 2
    assert "results.json: results exist already; choose another --out, or add --overwrite" in again.err


def test_texts_of_a_collection_as_json(bench: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "qrels").mkdir(parents=True)
    (data / "corpus.jsonl").write_text("".join(json.dumps({"_id": f"d{n}", "text": f"time {n} year"}) + "\n" for n in range(9)))
    (data / "queries.jsonl").write_text("".join(json.dumps({"_id": f"q{n}", "text": f"people {n}"}) + "\n" for n in range(6)))
    rows = "".join(f"q{n}\td{n}\t1\n" for n in range(6))
    (data / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows)
    arguments = ("-m", tiny, "--kind", "dense", "--loss", "margin_mse", "--rounds", 2, "--batch-size", 2, "--no-baselines", "--data", data)
    done = bench(*arguments, "--split", "dev", "--json")
    assert (done.code, done.err) == (0, "")
    content = json.loads(done.out)
    assert content["schema"] == "quiver-benchmark/2"
    [case] = content["cases"]
    metadata = case["metadata"]
    assert (metadata["loss"], metadata["rows"], [row["backend"] for row in case["rows"]]) == ("margin_mse", 2, ["quiver"])
    assert metadata["longest"] < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "short"], "unknown workload 'short'; choose from msmarco, long"),
        (["--workload", "long"], "long has texts of 2,048 tokens, the model has 256 positions"),
        (["--kind", "sparse"], "--kind must be one of dense, colbert, mlm, got 'sparse'"),
        (["--loss", "kl"], "--loss needs a single kind of model"),
        (["--kind", "colbert", "--loss", "kl"], "the loss of a colbert model must be one of contrastive"),
        (["--data", "nowhere"], "nowhere"),
        (["--batch-size", "1"], "'--batch-size'"),
    ],
)
def test_errors_are_reported_in_one_line(bench: Callable[..., Any], tiny: Path, arguments: list[str], message: str) -> None:
    done = bench("--model", tiny, *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1, done.err
    assert message in done.err
