"""The encoder benchmark's report and plot: every figure where it belongs, and nothing that was not measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quiver.encoder import InputError
from quiver.eval.bench.encoder.results import (
    EncoderBenchmark,
    LargestBatch,
    NotRun,
    PeakMemory,
    SetTimes,
    Settings,
    library_times,
    with_memory,
)
from quiver.eval.provenance import Provenance
from quiver.eval.published import ENCODER_EFFICIENCY
from quiver.eval.report.efficiency import largest_table, paper_table, render_efficiency, set_table, set_title, write_efficiency_report
from quiver.eval.report.efficiency_plot import check_plotting, write_efficiency_plot


def a_set(name: str, documents: int, tokens: int) -> SetTimes:
    seconds = {"quiver": (1.0, 1.0, 2.0), "transformers-sdpa": (3.0, 2.0, 4.0)}
    timed = library_times(seconds, tokens, differences={"quiver": 0.0, "transformers-sdpa": 2e-6}, gradients=None)
    memory = {"quiver": PeakMemory(2**30, 100 * 2**20, None), "transformers-sdpa": PeakMemory(2**30, 350 * 2**20, None)}
    return with_memory(SetTimes(name, documents, tokens, 512, 512, documents, timed), memory)


@pytest.fixture
def benchmark() -> EncoderBenchmark:
    return EncoderBenchmark(
        model="modernbert-base",
        family="modernbert",
        parameters=149_014_272,
        settings=Settings(rounds=3, memory=True, largest_batch=True, memory_gib=2.0),
        sets=(a_set("fixed-512", 16, 8192), a_set("512x2+32x14", 16, 1472)),
        largest_batches=(
            LargestBatch("quiver", 512, 40, 41, "over the budget"),
            LargestBatch("transformers-sdpa", 512, 0, 1, "out of memory"),
        ),
        not_run=(NotRun("transformers-flash", "needs CUDA"),),
        processor="EPYC | 2 cores",
        load_average=(0.5, 0.25, 0.125),
        provenance=Provenance("quiver bench encoder --model modernbert-base", "2026-11-21T00:00:00+00:00", {"torch": "2.11.0"}, "Linux", 2),
    )


def test_a_sets_table(benchmark: EncoderBenchmark) -> None:
    header, (quiver, peer) = set_table(benchmark.sets[0])
    assert header == ["", "tokens/s", "mean ± sd", "documents/s", "time / Quiver's", "over the rounds", "max difference", "peak MiB"]
    assert quiver == ["quiver", "8,192", "6,827 ± 2,365", "16.0", "1.00", "1.00 to 1.00", "0.0e+00", "100"]
    assert peer == ["transformers-sdpa", "2,731", "2,958 ± 1,043", "5.3", "2.00", "2.00 to 3.00", "2.0e-06", "350"]
    assert set_title(benchmark.sets[0]) == "fixed-512: 16 documents of 512 tokens, 8,192 in all, batches of 16"


def test_columns_that_were_not_measured_are_not_there(benchmark: EncoderBenchmark) -> None:
    header, rows = set_table(with_memory(benchmark.sets[0], {}))
    assert "peak MiB" not in header
    assert {len(row) for row in rows} == {len(header)}


def test_ours_beside_table_2(benchmark: EncoderBenchmark) -> None:
    header, rows = paper_table(benchmark, ENCODER_EFFICIENCY)
    table = {row[0]: row[1:] for row in rows}
    assert header[1:] == ["BS 512", "fixed 512", "variable 256", "BS 8,192", "fixed 8,192", "variable 4,096"]
    assert table["quiver, this run"] == ["40", "6.8", "-", "-", "-", "-"]
    assert table["transformers-sdpa, this run"] == ["0", "3.0", "-", "-", "-", "-"]
    assert table["ModernBERT base, paper"] == ["1,604", "148.1", "147.3", "98", "123.7", "133.8"]
    assert table["BERT large, paper"] == ["792", "54.4", "27.2", "-", "-", "-"]
    assert len(table) == 15


def test_the_largest_batches(benchmark: EncoderBenchmark) -> None:
    assert largest_table(benchmark)[1] == [
        ["quiver", "512", "40", "41", "over the budget"],
        ["transformers-sdpa", "512", "0", "1", "out of memory"],
    ]


def test_the_report(benchmark: EncoderBenchmark, tmp_path: Path) -> None:
    write_efficiency_report(benchmark, tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text == render_efficiency(benchmark)
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings[0] == "# Encoder benchmark: modernbert-base"
    assert headings[1:3] == [f"## {set_title(times)}" for times in benchmark.sets]
    assert headings[3:] == ["## Largest batch", "## Beside the paper", "## Not run", "## Where"]
    assert "149.0 million parameters, float32, inference, on cpu" in text
    assert "| quiver, this run | 682.7 ± 295.60 | - | - | - |" in text  # 4/3 s for 1/512 of the paper's tokens
    assert "| ModernBERT base, paper | 28.3 ± 0.55 | 14.2 ± 0.01 | 542.4 ± 0.20 | 251.2 ± 0.32 |" in text
    assert "arXiv:2412.13663" in text
    assert "| transformers-flash | needs CUDA |" in text
    assert r"| Processor | EPYC \| 2 cores |" in text
    assert "    quiver bench encoder --model modernbert-base\n" in text


def test_without_the_papers_sets_the_paper_is_not_there(benchmark: EncoderBenchmark) -> None:
    text = render_efficiency(replace(benchmark, sets=benchmark.sets[1:], largest_batches=(), not_run=()))
    assert "paper" not in text
    assert "## Largest batch" not in text
    assert "## Not run" not in text


def test_training_is_not_set_beside_inference(benchmark: EncoderBenchmark) -> None:
    assert "paper" not in render_efficiency(replace(benchmark, settings=replace(benchmark.settings, train=True)))


def test_the_plot(benchmark: EncoderBenchmark, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, svg = write_efficiency_plot(benchmark, tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in svg.read_bytes()[:1000]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.png", "plot.svg"]


def test_a_plot_of_one_library_has_no_ratios(benchmark: EncoderBenchmark) -> None:
    pytest.importorskip("matplotlib")
    from quiver.eval.report.efficiency_plot import draw

    alone = replace(benchmark, sets=tuple(replace(times, libraries=times.libraries[:1]) for times in benchmark.sets[1:]))
    (axes,) = draw(alone).axes
    assert [bar.get_height() for container in axes.containers for bar in getattr(container, "patches", [])] == [
        pytest.approx(1.472 * 5 / 6)
    ]
    throughput, ratios, _ = draw(benchmark).axes
    assert sum(len(getattr(container, "patches", [])) for container in throughput.containers) == 4
    assert [text.get_text() for text in ratios.texts] == ["2.00", "2.00", "quiver"]


def test_a_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"quiver-retrieval\[eval\]"):
        check_plotting()
