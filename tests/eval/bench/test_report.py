"""Reports of the encoder benchmark: every figure in its place, columns only for what was measured, the paper beside its own sets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quiver.eval.bench.encoder import draw, report
from quiver.eval.bench.report import tables, write_report
from quiver.eval.bench.results import Benchmark, Case, NotRun, Row, Series, with_ratios
from quiver.eval.report.formats import render_markdown
from quiver.eval.results import Provenance


def a_case(name: str, documents: int, tokens: int) -> Case:
    seconds = {"quiver": (1.0, 1.0, 2.0), "transformers-sdpa": (3.0, 2.0, 4.0)}
    values = {
        "quiver": {"max_difference": 0.0, "memory_above": 100 * 2**20},
        "transformers-sdpa": {"max_difference": 2e-6, "memory_above": 350 * 2**20},
    }
    rows = [
        Row(
            backend,
            {
                "seconds": Series.of(each),
                "tokens_per_second": Series.of([tokens / one for one in each]),
                "documents_per_second": Series.of([documents / one for one in each]),
            },
            values[backend],
        )
        for backend, each in seconds.items()
    ]
    title = f"{name}: {documents} documents of 512 tokens"
    return Case(name, title, {"documents": documents, "tokens": tokens}, with_ratios(rows, {"seconds": "time_ratio"}))


@pytest.fixture
def benchmark() -> Benchmark:
    largest = Case(
        "largest batch",
        "Largest batch",
        {},
        (
            Row("quiver", {}, {"length": 512, "documents": 40, "failed": 41, "reason": "over the budget"}, "512"),
            Row("transformers-sdpa", {}, {"length": 512, "documents": 0, "failed": 1, "reason": "out of memory"}, "512"),
        ),
    )
    return Benchmark(
        subject="encoder",
        name="modernbert-base",
        metadata={"family": "modernbert", "parameters": 149_014_272},
        settings={"rounds": 3, "train": False, "dtype": "float32", "device": "cpu", "memory_gib": 2.0},
        cases=(a_case("fixed-512", 16, 8192), a_case("512x2+32x14", 16, 1472), largest),
        not_run=(NotRun("transformers-flash", "needs CUDA"),),
        processor="EPYC | 2 cores",
        load_average=(0.5, 0.25, 0.125),
        provenance=Provenance("quiver bench encoder --model modernbert-base", "2026-11-21T00:00:00+00:00", {"torch": "2.11.0"}, "Linux", 2),
    )


def test_speed_table_has_medians_ratios_and_memory(benchmark: Benchmark) -> None:
    _, header, (quiver, other) = next(tables(report(benchmark)))
    expected = ["backend", "tokens/s", "mean ± sd", "documents/s", "time / quiver's", "range", "max difference", "peak MiB"]
    assert header == expected
    assert quiver == ["quiver", "8,192", "6,827 ± 2,365", "16.0", "1.00", "1.00 to 1.00", "0.0e+00", "100"]
    assert other == ["transformers-sdpa", "2,731", "2,958 ± 1,043", "5.3", "2.00", "2.00 to 3.00", "2.0e-06", "350"]


def test_columns_that_were_not_measured_are_left_out(benchmark: Benchmark) -> None:
    case = benchmark.cases[0]
    rows = tuple(replace(row, values={"max_difference": 0.0}) for row in case.rows)
    _, header, cells = next(tables(report(replace(benchmark, cases=(replace(case, rows=rows),)))))
    assert "peak MiB" not in header
    assert {len(row) for row in cells} == {len(header)}


def test_own_rows_stand_beside_the_papers_table_2(benchmark: Benchmark) -> None:
    found = {title: (header, rows) for title, header, rows in tables(report(benchmark))}
    header, rows = next(content for title, content in found.items() if title.startswith("Table 2"))
    table = {row[0]: row[1:] for row in rows}
    assert header[1:] == ["BS 512", "fixed 512", "variable 256", "BS 8,192", "fixed 8,192", "variable 4,096"]
    assert table["quiver, this run"] == ["40", "6.8", "-", "-", "-", "-"]
    assert table["transformers-sdpa, this run"] == ["0", "3.0", "-", "-", "-", "-"]
    assert table["ModernBERT base, paper"] == ["1,604", "148.1", "147.3", "98", "123.7", "133.8"]
    assert table["BERT large, paper"] == ["792", "54.4", "27.2", "-", "-", "-"]
    assert len(table) == 15
    assert found["Largest batch"][1] == [
        ["quiver", "512", "40", "41", "over the budget"],
        ["transformers-sdpa", "512", "0", "1", "out of memory"],
    ]


def test_report_is_complete(benchmark: Benchmark) -> None:
    text = render_markdown(report(benchmark))
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings[0] == "# Encoder benchmark: modernbert-base"
    assert headings[1:3] == [f"## {case.title}" for case in benchmark.cases[:2]]
    assert headings[3:] == ["## Largest batch", "## Comparison with the paper", "## Chart", "## Not run", "## Machine"]
    assert "149.0 million parameters, float32, inference, on cpu" in text
    assert "| quiver, this run | 682.7 ± 295.60 | - | - | - |" in text  # 4/3 s for 1/512 of the paper's tokens
    assert "| ModernBERT base, paper | 28.3 ± 0.55 | 14.2 ± 0.01 | 542.4 ± 0.20 | 251.2 ± 0.32 |" in text
    assert "arXiv:2412.13663" in text
    assert "| transformers-flash | needs CUDA |" in text
    assert r"| Processor | EPYC \| 2 cores |" in text
    assert "quiver bench encoder --model modernbert-base\n" in text


def test_the_paper_is_shown_only_beside_inference_on_its_sets(benchmark: Benchmark) -> None:
    text = render_markdown(report(replace(benchmark, cases=benchmark.cases[1:2], not_run=())))
    assert "paper" not in text
    assert "## Largest batch" not in text
    assert "## Not run" not in text
    assert "paper" not in render_markdown(report(replace(benchmark, settings={**benchmark.settings, "train": True})))


def test_report_files(benchmark: Benchmark, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    write_report(report(benchmark), tmp_path, draw=lambda: draw(benchmark))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.png", "plot.svg", "report.html", "report.md"]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "plot.svg").read_bytes()[:1000]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 1
    assert "transformers-flash" in page


def test_chart_of_a_single_backend_has_no_ratios(benchmark: Benchmark) -> None:
    pytest.importorskip("matplotlib")
    case = benchmark.cases[1]
    (axes,) = draw(replace(benchmark, cases=(replace(case, rows=case.rows[:1]),))).axes
    heights = [bar.get_height() for container in axes.containers for bar in getattr(container, "patches", [])]
    assert heights == [pytest.approx(1.472 * 5 / 6)]
    throughput, ratios, _ = draw(benchmark).axes
    assert sum(len(getattr(container, "patches", [])) for container in throughput.containers) == 4
    assert [text.get_text() for text in ratios.texts] == ["2.00", "2.00", "quiver"]
