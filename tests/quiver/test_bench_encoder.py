"""``quiver bench encoder``: output files, JSON, texts, and one-line errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder import Encoder, EncoderConfig, init_weights, save_encoder
from quiver.eval.bench.results import read_benchmark
from quiver.retrieval.planning import read_rates

pytestmark = pytest.mark.usefixtures("quick_children")


@pytest.fixture
def bench(quiver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(*arguments: object) -> Any:
        monkeypatch.setenv("COLUMNS", "160")
        return quiver("bench", "encoder", *arguments, "--device", "cpu")

    return run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = EncoderConfig.modernbert(
        vocab_size=300, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "local"], max_positions=512
    )
    folder = tmp_path_factory.mktemp("tiny")
    save_encoder(init_weights(Encoder(config), seed=1), folder)
    return folder


def test_token_ids_with_files(bench: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "deep" / "bench"
    done = bench("--model", tiny, "--set", "fixed-512", "--docs", 2, "--lengths", "64+32", "--no-baselines", "--rounds", 2, "--out", out)
    assert (done.code, done.err) == (0, "")
    assert "fixed-512: 2 documents of 512 tokens, 1,024 in total, batches of 2" in " ".join(done.out.split())
    assert "ModernBERT base, paper" in done.out
    assert sorted(path.name for path in out.iterdir()) == ["plot.png", "plot.svg", "report.html", "report.md", "results.json"]
    result = read_benchmark(out / "results.json")
    assert [case.name for case in result.cases] == ["fixed-512", "64+32"]
    assert [[row.backend for row in case.rows] for case in result.cases] == [["quiver"], ["quiver"]]
    assert result.settings["rounds"] == len(result.cases[0].rows[0].series["seconds"].values) == 2
    assert result.provenance.command is not None
    assert result.provenance.command.startswith("quiver bench encoder --model")
    again = bench("--model", tiny, "--lengths", "8", "--no-baselines", "--rounds", 1, "--out", out)
    assert again.code == 2
    assert "results.json: results exist already; choose another --out, or add --overwrite" in again.err
    assert bench("--model", tiny, "--lengths", "8", "--no-baselines", "--rounds", 1, "--out", out, "--overwrite").code == 0
    assert [case.name for case in read_benchmark(out / "results.json").cases] == ["8"]
    # `quiver estimate --rates` reads such a file.
    assert read_rates([out / "results.json"], tokens=8, kind="dense").tokens_per_second


def test_a_benchmark_is_printed_as_json(bench: Callable[..., Any], tiny: Path) -> None:
    done = bench("-m", tiny, "--lengths", "20x3", "--rounds", 2, "--no-baselines", "--train", "--json")
    assert done.code == 0
    content = json.loads(done.out)
    assert content["schema"] == "quiver-benchmark/2"
    (case,) = content["cases"]
    assert (case["metadata"]["documents"], case["metadata"]["tokens"], case["rows"][0]["values"]["gradient_difference"]) == (3, 60, 0.0)


def test_default_cases_are_the_sets_of_the_paper(bench: Callable[..., Any], tiny: Path) -> None:
    done = bench("-m", tiny, "--rounds", 1, "--no-baselines", "--docs", 2, "--json")
    content = json.loads(done.out)
    assert [case["name"] for case in content["cases"]] == ["fixed-512", "variable-256"]
    assert [skipped["what"] for skipped in content["not_run"]] == ["fixed-8192", "variable-4096"]  # longer than the model's positions
    cpu = json.loads(bench("-m", tiny, "--rounds", 1, "--no-baselines", "--table", "cpu", "--json").out)
    assert [case["name"] for case in cpu["cases"]] == ["512x8", "variable-256x16", "512x2+32x14"]


def test_texts_of_a_file_are_encoded(bench: Callable[..., Any], minilm: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"_id": str(n), "text": f"text number {n}"}) + "\n" for n in range(10)))
    common = ("--model", minilm, "--data", corpus, "--no-baselines")
    done = bench(*common, "--docs", 4, "--rounds", 2)
    assert (done.code, done.err) == (0, "")
    assert "corpus.jsonl: 4 documents of 5 tokens, 20 in total" in " ".join(done.out.split())
    assert "documents/s" in done.out
    assert json.loads(bench(*common, "--rounds", 1, "--json").out)["cases"][0]["metadata"]["documents"] == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "512y8"], "lengths '512y8'"),
        (["--set", "fixed-1"], "unknown set 'fixed-1'; choose from fixed-512"),
        (["--set", "fixed-512", "--docs", "9000"], "fixed-512 has 8,192 documents"),
        (["--lengths", "8", "--docs", "3"], "--docs is for --set and --data"),
        (["--table", "gpu"], "--table must be paper or cpu, got 'gpu'"),
        (["--data", "corpus.jsonl", "--lengths", "8"], "--data is for texts, --set and --lengths are for token ids"),
        (["--lengths", "8", "--backend", "fast"], "unknown backend 'fast'"),
        (["--lengths", "8", "--backend", "transformers-flash"], "transformers-flash: needs CUDA"),
        (["--lengths", "8", "--dtype", "int4"], "is not one of"),
        (["--lengths", "8", "--largest-batch"], "--memory-gib"),
        (["--lengths", "8", "--batch-size", "2", "--batch-tokens", "2"], "exclude each other"),
        (["--lengths", "8", "--rounds", "0"], "'--rounds'"),
    ],
)
def test_errors_are_reported_in_one_line(bench: Callable[..., Any], tiny: Path, arguments: list[str], message: str) -> None:
    done = bench("--model", tiny, *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1, done.err
    assert message in done.err


def test_a_failure_leaves_no_folder(bench: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    done = bench("--model", tiny, "--lengths", "513", "--out", tmp_path / "bench")
    assert (done.code, done.out) == (2, "")
    assert "512 positions" in done.err
    assert not (tmp_path / "bench").exists()
    (tmp_path / "file").write_text("")
    done = bench("--model", tiny, "--lengths", "8", "--out", tmp_path / "file" / "bench")
    assert "is a file, not a folder; choose another --out" in done.err


def test_missing_matplotlib_is_reported_before_the_benchmark(
    bench: Callable[..., Any], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = bench("--model", tiny, "--lengths", "8", "--out", tmp_path / "bench")
    assert (done.code, done.out) == (2, "")
    assert "quiver-retrieval[eval]" in done.err
    assert not (tmp_path / "bench").exists()
