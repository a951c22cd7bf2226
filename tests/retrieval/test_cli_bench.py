"""``quiver bench encoder`` from the command line: token ids with files, texts as the README has them, and every mistake in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder import Encoder, EncoderConfig, init_weights, save_encoder
from quiver.eval.bench.encoder import read_benchmark


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
    done = bench("--model", tiny, "--set", "fixed-512", "--docs", 2, "--lengths", "64+32", "--no-peers", "--rounds", 2, "--out", out)
    assert (done.code, done.err) == (0, "")
    assert "fixed-512: 2 documents of 512 tokens, 1,024 in all, batches of 2" in " ".join(done.out.split())
    assert "ModernBERT base, paper" in done.out
    assert sorted(path.name for path in out.iterdir()) == ["plot.png", "plot.svg", "report.md", "results.json"]
    result = read_benchmark(out / "results.json")
    assert [times.name for times in result.sets] == ["fixed-512", "64+32"]
    assert [[each.name for each in times.libraries] for times in result.sets] == [["quiver"], ["quiver"]]
    assert result.settings.rounds == len(result.sets[0].libraries[0].seconds) == 2
    assert result.provenance.command is not None
    assert result.provenance.command.startswith("quiver bench encoder --model")
    again = bench("--model", tiny, "--lengths", "8", "--no-peers", "--rounds", 1, "--out", out)
    assert again.code == 2
    assert "results.json: there is a result already; give another --out, or --overwrite" in again.err
    assert bench("--model", tiny, "--lengths", "8", "--no-peers", "--rounds", 1, "--out", out, "--overwrite").code == 0
    assert [times.name for times in read_benchmark(out / "results.json").sets] == ["8"]


def test_json_for_machines(bench: Callable[..., Any], tiny: Path) -> None:
    done = bench("-m", tiny, "--lengths", "20x3", "--rounds", 2, "--no-peers", "--train", "--json")
    assert done.code == 0
    content = json.loads(done.out)
    assert content["schema"] == "quiver-encoder-benchmark/1"
    (times,) = content["sets"]
    assert (times["documents"], times["tokens"], times["libraries"][0]["gradient_difference"]) == (3, 60, 0.0)


def test_the_default_is_the_papers_table(bench: Callable[..., Any], tiny: Path) -> None:
    done = bench("-m", tiny, "--rounds", 1, "--no-peers", "--docs", 2, "--json")
    content = json.loads(done.out)
    assert [times["name"] for times in content["sets"]] == ["fixed-512", "variable-256"]
    assert [skipped["what"] for skipped in content["not_run"]] == ["fixed-8192", "variable-4096"]  # longer than the model's positions
    cpu = json.loads(bench("-m", tiny, "--rounds", 1, "--no-peers", "--table", "cpu", "--json").out)
    assert [times["name"] for times in cpu["sets"]] == ["512x8", "variable-256x16", "512x2+32x14"]


def test_texts_as_in_the_readme(bench: Callable[..., Any], minilm: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"_id": str(n), "text": f"text number {n}"}) + "\n" for n in range(10)))
    done = bench("--model", minilm, "--data", corpus, "--docs", 4, "--rounds", 2, "--no-peers")
    assert (done.code, done.err) == (0, "")
    assert "corpus.jsonl: 4 documents of 5 tokens, 20 in all" in " ".join(done.out.split())
    assert "texts/s" in done.out
    assert json.loads(bench("--model", minilm, "--data", corpus, "--rounds", 1, "--no-peers", "--json").out)["sets"][0]["documents"] == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "512y8"], "lengths '512y8'"),
        (["--set", "fixed-1"], "unknown set 'fixed-1'; there are fixed-512"),
        (["--set", "fixed-512", "--docs", "9000"], "fixed-512 has 8,192 documents"),
        (["--lengths", "8", "--docs", "3"], "--docs is for the paper's sets and for --data"),
        (["--table", "gpu"], "--table must be paper or cpu, got 'gpu'"),
        (["--data", "corpus.jsonl", "--lengths", "8"], "--data is for texts, --set and --lengths are for token ids"),
        (["--lengths", "8", "--peers", "fast"], "unknown peer 'fast'"),
        (["--lengths", "8", "--peers", "transformers-flash"], "transformers-flash: needs CUDA"),
        (["--lengths", "8", "--dtype", "int4"], "dtype must be one of"),
        (["--lengths", "8", "--largest-batch"], "--memory-gib"),
        (["--lengths", "8", "--batch-size", "2", "--batch-tokens", "2"], "not both"),
        (["--lengths", "8", "--rounds", "0"], "'--rounds'"),
    ],
)
def test_mistakes_are_one_line(bench: Callable[..., Any], tiny: Path, arguments: list[str], message: str) -> None:
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
    assert "is a file, not a folder; give another --out" in done.err


def test_a_plot_that_cannot_be_drawn_is_found_before_the_work(
    bench: Callable[..., Any], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = bench("--model", tiny, "--lengths", "8", "--out", tmp_path / "bench")
    assert (done.code, done.out) == (2, "")
    assert "quiver-retrieval[eval]" in done.err
    assert not (tmp_path / "bench").exists()
