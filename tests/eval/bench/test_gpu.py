"""The GPU benchmark: order and time of its stages, resumption, targets and report with stub stages; every stage in its small form."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from quiver.encoder import InputError
from quiver.eval.bench import gpu
from quiver.eval.bench.child import measure_memory
from quiver.eval.bench.gpu import (
    TARGETS,
    Results,
    Settings,
    StageResult,
    bench_gpu,
    draw_shares,
    read_results,
    report,
    run_in_child,
)
from quiver.eval.bench.gpu_stages import (
    SMALL,
    STAGES,
    Context,
    Measured,
    kernel_name,
    kernel_times,
    largest_on_gpu,
    matmul_rate,
)
from quiver.eval.bench.report import tables
from quiver.eval.bench.results import Case, NotRun, Row, Series, with_ratios
from quiver.eval.report.formats import Section, render_markdown

pytestmark = pytest.mark.usefixtures("quick_children")

CPU = Settings("cpu", minutes=1.0)


class Stub:
    """Stages that take a given time on a clock of their own."""

    def __init__(self, *, seconds: Mapping[str, float] | None = None, failing: tuple[str, ...] = ()) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, float, float]] = []
        self.failing = failing
        self._seconds = seconds or {}

    def clock(self) -> float:
        return self.now

    def run(self, name: str, settings: Settings, allowed: float, limit: float, out: Path) -> StageResult:
        del settings, out
        self.calls.append((name, allowed, limit))
        taken = min(self._seconds.get(name, allowed), limit)
        self.now += taken
        failure = "killed by signal 9" if name in self.failing else None
        cases = () if failure else (Case(name, f"{name} was measured", {}, ()),)
        return StageResult(name, failure, taken, allowed, "2026-01-01T00:00:00+00:00", cases, (), ("2 of 10 rounds",))

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]


def run(out: Path, stub: Stub, settings: Settings = CPU, **options: Any) -> Results:
    return bench_gpu(out, settings, run_stage=stub.run, clock=stub.clock, **options)


def test_stages_share_the_time_by_weight_and_what_one_leaves_goes_to_the_others(tmp_path: Path) -> None:
    stub = Stub(seconds={"tests": 1.0})
    lines: list[str] = []
    results = run(tmp_path, stub, say=lines.append)
    assert stub.names == list(STAGES) == [stage.name for stage in results.stages]
    weights = [weight for _, weight, _ in STAGES.values()]
    allowed = [seconds for _, seconds, _ in stub.calls]
    assert allowed[0] == pytest.approx(60 * weights[0] / sum(weights))
    assert allowed[1] == pytest.approx(59 * weights[1] / sum(weights[1:]))
    assert stub.now == pytest.approx(60), "all of the time, and no more"
    assert f"encoder-base: done, {allowed[1]:.0f} s" in lines
    assert "  2 of 10 rounds" in lines, "what was shortened is said"


def test_stages_that_hang_do_not_take_more_than_the_time_of_all(tmp_path: Path) -> None:
    stub = Stub(seconds=dict.fromkeys(STAGES, 1e9))
    lines: list[str] = []
    run(tmp_path, stub, say=lines.append)
    spent = 0.0
    for name, allowed, limit in stub.calls:
        assert limit == pytest.approx(min(60 - spent, 1.25 * allowed + 15)), name
        spent += limit
    assert spent <= 60
    assert 2 <= len(stub.calls) < len(STAGES)
    assert lines[-1].endswith(": no time left; repeat the command to go on")


def test_a_repeated_command_goes_on_and_repeats_only_what_failed(tmp_path: Path) -> None:
    first = Stub(seconds=dict.fromkeys(STAGES, 25.0), failing=("encoder-base",))
    lines: list[str] = []
    results = run(tmp_path, first, say=lines.append)
    assert first.names == ["tests", "encoder-base", "encoder-large"]
    assert lines[-1] == "texts: no time left; repeat the command to go on"
    assert read_results(tmp_path / "results.json") == results
    text = (tmp_path / "report.md").read_text()
    assert "| stage encoder-base | killed by signal 9 |" in text
    assert "| stage texts | not yet run |" in text

    second = Stub(seconds=dict.fromkeys(STAGES, 1.0))
    results = run(tmp_path, second)
    assert second.names == [name for name in STAGES if name not in ("tests", "encoder-large")]
    assert [stage.name for stage in results.stages] == list(STAGES), "in the order of the stages"
    assert all(stage.failure is None for stage in results.stages)
    third = Stub()
    assert run(tmp_path, third).stages == results.stages
    assert third.names == []
    run(tmp_path, third, overwrite=True, stages=["queries"])
    assert third.names == ["queries"]
    assert [stage.name for stage in read_results(tmp_path / "results.json").stages] == ["queries"]


def test_results_of_other_conditions_are_not_continued(tmp_path: Path) -> None:
    results = run(tmp_path, Stub(seconds=dict.fromkeys(STAGES, 1.0)))
    stub = Stub()
    with pytest.raises(InputError, match=r"results\.json: other seed \(42, now 7\); choose another --out, or add --overwrite"):
        run(tmp_path, stub, replace(CPU, seed=7))
    changed = json.loads((tmp_path / "results.json").read_text())
    changed["provenance"]["versions"]["torch"] = "1.0"
    (tmp_path / "results.json").write_text(json.dumps(changed))
    with pytest.raises(InputError, match=rf"other versions \(torch 1\.0, now {results.provenance.versions['torch']}"):
        run(tmp_path, stub)
    assert stub.names == []
    run(tmp_path, stub, replace(CPU, minutes=3.0), overwrite=True)
    assert stub.names == list(STAGES)
    with pytest.raises(InputError, match="unknown stage 'encoders'; choose from tests, encoder-base"):
        run(tmp_path, stub, stages=["encoders"])


def series(*values: float) -> Series:
    return Series.of(values)


def speed(name: str, tokens: Mapping[str, float]) -> Case:
    rows = [
        Row(backend, {"seconds": series(1e6 / rate), "tokens_per_second": series(rate)}, {"max_difference": 0.01})
        for backend, rate in tokens.items()
    ]
    return Case(name, f"{name}: documents", {}, with_ratios(rows, {"seconds": "time_ratio"}))


def on_gpu() -> Results:
    """Results as of an H200 that meets some of the targets; ColBERT was not measured."""
    cases = {
        "tests": (
            Case("tests", "pytest -m gpu: 1 passed, 1 failed, 0 skipped", {}, (Row("quiver", {}, {"message": "E"}, variant="a::b"),)),
        ),
        "encoder-base": (
            speed("base fixed-512", {"quiver": 2e6, "transformers-sdpa": 1e6}),
            speed("base variable-256", {"quiver": 1.5e6, "transformers-sdpa": 0.5e6}),
            speed("base fixed-8192", {"quiver": 1e6, "transformers-sdpa": 0.2e6, "transformers-flash": 0.4e6}),
            speed("base variable-4096", {"quiver": 1e6, "transformers-sdpa": 0.1e6, "transformers-flash": 0.5e6}),
            Case(
                "base largest batch",
                "base, largest batch",
                {},
                tuple(
                    Row(name, {}, {"length": length, "documents": documents, "failed": None, "reason": None}, variant=str(length))
                    for name, length, documents in (
                        ("quiver", 512, 4000),
                        ("quiver", 8192, 150),
                        ("transformers-sdpa", 512, 1500),
                        ("transformers-sdpa", 8192, 100),
                    )
                ),
            ),
        ),
        "texts": (
            speed("texts variable-256", {"quiver": 0.9e6, "quiver-model": 1e6, "sentence-transformers": 0.3e6}),
            speed("texts variable-4096", {"quiver": 0.8e6, "quiver-model": 1e6}),
        ),
        "training": (
            speed("training MLM", {"quiver": 3e5, "transformers": 1e5}),
            speed("training MNRL", {"quiver": 2e5, "sentence-transformers": 1e5}),
        ),
        "queries": (
            Case(
                "queries",
                "queries",
                {},
                with_ratios([Row("quiver", {"seconds": series(0.0015)}, {"p50": 1.5, "p95": 2.5})], {"seconds": "time_ratio"}),
            ),
        ),
        "search": (
            Case(
                "MaxSim search",
                "MaxSim search",
                {"queries": 500, "vectors": 11_000_000},
                (Row("quiver", {"seconds": series(2.0, 2.5, 3.0)}, {"queries_per_second": 200.0}),),
            ),
        ),
        "profile": (
            Case("matrix product", "matrix product", {"flops_per_second": 8e14}, ()),
            Case(
                "forward pass",
                "forward pass: base",
                {"seconds": 0.05, "flops": 1, "flops_per_second": 4e14, "kernel_seconds": 0.04, "kernels": 200, "busy": 0.8},
                (Row("quiver", {}, {"seconds": 0.03, "share": 0.75, "calls": 100}, variant="gemm"),),
            ),
        ),
    }
    stages = tuple(
        StageResult(name, None, 10.0, 20.0, "2026-01-01T00:00:00+00:00", cases.get(name, ()), (), ()) for name in STAGES if name in cases
    )
    provenance = bench_provenance()
    return Results(Settings("cuda"), stages, "NVIDIA H200", 989.4e12, (), provenance)


def bench_provenance() -> Any:
    from quiver.eval.results import provenance

    return provenance("quiver bench gpu --out bench")


EXPECTED = {
    "base, fixed 512": ("2,000,000", "yes"),
    "base, variable 256: share of the speed of fixed 512": ("0.75", "no"),
    "base, fixed 8,192: time of transformers' best backend / Quiver's": ("2.50", "yes"),
    "base, variable 4,096: time of transformers' best backend / Quiver's": ("2.00", "no"),
    "base, largest batch of 512 tokens / transformers'": ("2.67", "yes"),
    "base, largest batch of 8,192 tokens / transformers'": ("1.50", "no"),
    "text to vectors / the model alone, mean 256 tokens": ("0.90", "yes"),
    "text to vectors / the model alone, mean 4,096 tokens": ("0.80", "no"),
    "MLM step: time of transformers / Quiver's": ("3.00", "yes"),
    "MNRL step: time of sentence-transformers / Quiver's": ("2.00", "yes"),
    "ColBERT distillation step: time of PyLate / Quiver's": ("", "not measured"),
    "query at batch 1, median": ("1.50", "yes"),
    "exact MaxSim, 1,000 queries over 1 million documents of 110 tokens, extrapolated": ("50.00", "yes"),
}


def test_targets_are_compared_with_what_was_measured() -> None:
    [(_, header, rows)] = [found for found in tables(report(on_gpu())) if found[0] == "Targets"]
    assert header == ["", "target", "measured", "met"]
    assert {row[0]: (row[2], row[3]) for row in rows} == EXPECTED
    assert len(EXPECTED) == len(TARGETS)


def test_report_has_every_stage_and_the_share_of_the_peak() -> None:
    text = render_markdown(report(on_gpu()))
    assert text.startswith("# GPU benchmark: NVIDIA H200\n")
    assert "400.0 TFLOP/s, 50.0% of the rate of the matrix product measured here, 40.4% of the peak in bfloat16 by the data sheet" in text
    assert "Kernels ran for 80.0% of that time." in text
    assert "| gemm | 75.0% | 30.000 | 100 |" in text
    assert "| a::b | E |" in text
    assert "## Not run" in text
    assert "| stage encoder-large | not yet run |" in text
    unknown = render_markdown(report(replace(on_gpu(), peak_flops=None)))
    assert "data sheet" not in unknown
    assert "50.0% of the rate of the matrix product measured here." in unknown


def test_no_target_is_judged_without_a_gpu() -> None:
    small = replace(on_gpu(), settings=Settings("cpu"), peak_flops=None)
    text = render_markdown(report(small))
    assert text.startswith("# GPU benchmark in its small form on a CPU\n")
    assert gpu.SMALL_FORM in text
    assert "Targets" not in text
    assert "Extrapolated" not in text


def test_charts_show_speeds_and_shares(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = on_gpu()
    drawing = draw_shares({case.title: case.rows for case in results.stages[-1].cases if case.rows})
    [axes] = drawing.axes
    assert [bar.get_width() for container in axes.containers for bar in container] == [75]
    stub = Stub()
    bench_gpu(tmp_path, CPU, run_stage=lambda *a: replace(on_gpu().stages[1], name=a[0]), clock=stub.clock, stages=["encoder-base"])
    assert {"report.md", "results.json", "encoder-base.svg"} <= {path.name for path in tmp_path.iterdir()}
    assert "(encoder-base.svg)" in (tmp_path / "report.md").read_text()


def test_report_without_matplotlib_has_no_charts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest))
    assert "svg" not in render_markdown(report(on_gpu()))
    run(tmp_path, Stub(seconds=dict.fromkeys(STAGES, 1.0)))
    assert {path.name for path in tmp_path.iterdir()} == {"report.md", "results.json"}


# The stages themselves, in this process and in children.


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


def measure(stage: str, work: Path, *, seconds: float = 600.0) -> Measured:
    measured = Measured()
    STAGES[stage][2](Context("cpu", time.time() + seconds, work, 42), measured)
    return measured


EXTRA = all(map(importlib.util.find_spec, ("sentence_transformers", "transformers", "pylate", "accelerate", "datasets")))
needs_extra = pytest.mark.skipif(not EXTRA, reason="needs the extra train")


@needs_extra
def test_encoders_run_the_papers_sets_beside_transformers(work: Path) -> None:
    """The base encoder; the exhaustive test of the command checks both."""
    assert_papers_sets(measure("encoder-base", work), "base")


def assert_papers_sets(found: Measured | StageResult, size: str) -> None:
    assert [case.name for case in found.cases] == [f"{size} {name}" for name in SMALL.documents]
    for case in found.cases:
        assert [row.backend for row in case.rows] == ["quiver", "transformers-sdpa"]
        assert float(case.rows[1].values["max_difference"] or 1) < 1e-5
        assert case.metadata["dtype"] == "float32"
    assert [case.metadata["longest"] for case in found.cases] == [512, 379, 8192, 6069]
    assert {each.what for each in found.not_run} == {f"transformers-flash, {size}", f"largest batch, {size}"}
    assert not found.notes


@needs_extra
def test_texts_are_timed_beside_the_model_alone(work: Path) -> None:
    [case] = measure("texts", work).cases
    rows = {row.backend: row for row in case.rows}
    assert list(rows) == ["quiver", "quiver-model", "sentence-transformers"]
    assert all(float(row.values["max_difference"] or 0) < 1e-5 for row in case.rows)
    assert case.metadata["tokens"] == 379 + 351 + 313 + 121


@needs_extra
def test_training_steps_have_the_losses_of_the_libraries(work: Path) -> None:
    found = measure("training", work)
    assert [(case.name, case.rows[1].backend) for case in found.cases] == [
        ("training MNRL", "sentence-transformers"),
        ("training distillation", "pylate"),
        ("training MLM", "transformers"),
    ]
    assert all(float(case.rows[1].values["max_loss_difference"] or 0) < 1e-4 for case in found.cases)
    assert found.not_run == []


@needs_extra
def test_a_missing_library_is_one_line(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pylate" else find(name, *rest))
    found = measure("training", work)
    assert [case.name for case in found.cases] == ["training MNRL", "training MLM"]
    assert found.not_run == [NotRun("training, distillation", "training needs pylate: pip install 'quiver-retrieval[colbert]'")]


@needs_extra
def test_queries_are_timed_one_by_one(work: Path) -> None:
    [case] = measure("queries", work).cases
    assert [row.backend for row in case.rows] == ["quiver", "sentence-transformers"]
    for row in case.rows:
        assert len(row.series["seconds"].values) == SMALL.queries
        assert 0 < float(row.values["p50"] or 0) <= float(row.values["p95"] or 0)
        assert float(row.values["p50"] or 0) == pytest.approx(1000 * row.series["seconds"].median)


def test_searches_are_exact_and_say_their_sizes(work: Path) -> None:
    found = measure("search", work)
    assert [(case.name, case.metadata["queries"], case.metadata["vectors"]) for case in found.cases] == [
        ("MaxSim search", 4, 500),
        ("dense search", 4, 200),
    ]
    assert all(len(case.rows[0].series["seconds"].values) == 3 for case in found.cases)


def test_profiles_have_shares_and_flops(work: Path) -> None:
    product, forward, step = measure("profile", work).cases
    assert float(product.metadata["flops_per_second"] or 0) > 1e8
    # One document of 512 tokens, two layers of width 64: one global with all pairs, one local with a window of 128.
    matrices = 2 * 512 * (4 * 64**2 + 3 * 64 * 96)
    pairs = 512**2 + (512 + 2 * 64 * 512 - 64 * 65)
    assert forward.metadata["flops"] == 2 * (matrices + 2 * 64 * pairs)
    for case in (forward, step):
        assert sum(float(row.values["share"] or 0) for row in case.rows) == pytest.approx(1)
        assert len(case.rows) <= 16
        assert case.rows[-1].variant.endswith(" others")
        rate = float(case.metadata["flops"] or 0) / float(case.metadata["seconds"] or 1)
        assert case.metadata["flops_per_second"] == pytest.approx(rate)
    assert step.metadata["flops"] != forward.metadata["flops"]


def test_what_does_not_fit_is_said(work: Path) -> None:
    found = measure("search", work, seconds=-1.0)
    assert found.not_run == [NotRun("dense search", "no time left in the stage")]
    assert found.notes == ["MaxSim search: 1 of 3 rounds, because the time of the stage was over"] or found.notes == []


def test_a_case_that_grows_replaces_itself_and_is_saved(tmp_path: Path) -> None:
    measured = Measured(path=tmp_path / "partial.json")
    for title in ("one row", "two rows"):
        measured.add(Case("largest batch", title, {}, ()), rounds=10)
    assert [case.title for case in measured.cases] == ["two rows"]
    assert json.loads((tmp_path / "partial.json").read_text()) == json.loads(json.dumps(measured.record()))


def test_kernels_have_short_names_and_times() -> None:
    matrix = torch.randn(64, 64)
    times = kernel_times(lambda: [torch.mm(matrix, matrix) for _ in range(3)] and None, "cpu")
    assert times["aten::mm"][1] == 3
    assert times["aten::mm"][0] > 0
    assert len(kernel_name("x" * 500)) == 80
    assert matmul_rate("cpu", torch.float32, 64, repeats=1) > 0


class Event(NamedTuple):
    """What the profiler says of a kernel, an operator or a span."""

    key: str
    device_type: torch.autograd.DeviceType
    self_device_time_total: float
    count: int = 1
    is_user_annotation: bool = False
    self_cpu_time_total: float = 1000.0


def test_time_on_a_gpu_is_that_of_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    events = [
        Event("aten::mm", cpu, 40.0),  # the operator, with the time of the kernels that it started
        Event("nvjet_tst_128x256", cuda, 30.0, count=2),
        Event("Memcpy HtoD (Pinned -> Device)", cuda, 6.0),
        Event("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, int>(int)", cuda, 3.0),
        Event("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, int>(int)", cuda, 1.0),
        Event("Optimizer.step#AdamW.step", cuda, 500.0, is_user_annotation=True),
        Event("cudaLaunchKernel", cpu, 0.0),
    ]

    class Profile:
        def __init__(self, activities: list[Any]) -> None:
            assert torch.profiler.ProfilerActivity.CUDA in activities

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def key_averages(self) -> list[Event]:
            return events

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    assert kernel_times(lambda: None, "cuda") == {
        "nvjet_tst_128x256": (pytest.approx(30e-6), 2),
        "Memcpy HtoD": (pytest.approx(6e-6), 1),
        "at::native::vectorized_elementwise_kernel, CUDAFunctor_add": (pytest.approx(4e-6), 2),
    }
    events.clear()
    with pytest.raises(RuntimeError, match="the profiler saw no kernels"):
        kernel_times(lambda: None, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_kernels_of_a_gpu_are_seen_and_its_memory_is_counted() -> None:
    matrix = torch.randn(2048, 2048, device="cuda")

    def run() -> None:
        for _ in range(3):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()

    run()
    times = kernel_times(run, "cuda")
    assert sum(calls for _, calls in times.values()) >= 3
    assert not any(name.startswith(("aten::", "cuda")) for name in times)
    assert 1e12 < matmul_rate("cuda", torch.bfloat16, 4096) < 1e16
    product = 4 * 2048**2
    assert product <= int(measure_memory(run, on_cuda=True)["above"] or 0) <= 4 * product


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_largest_batch_of_a_gpu_is_found_in_this_process() -> None:
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, 2**30 / total))
    try:

        def measure(request: dict[str, Any]) -> dict[str, Any]:
            torch.cuda.empty_cache()
            torch.empty(len(request["batches"][0]), 2**20, dtype=torch.uint8, device="cuda")
            return {"above": 2**20 * len(request["batches"][0])}

        fits, fails, reason = largest_on_gpu(measure, 512, stop=lambda: False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert fails is not None
    # A mebibyte per document of the gibibyte that this process may have; earlier tests may hold some of it.
    assert 700 <= fits <= 1024
    assert fails - fits <= max(1, fits // 16)
    assert reason == "out of memory"


def memory_of(limit: int, tried: list[int]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A pass over documents of a kilobyte on a GPU that holds ``limit`` of them."""

    def measured(request: dict[str, Any]) -> dict[str, Any]:
        documents = len(request["batches"][0])
        tried.append(documents)
        if documents > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"above": 1000 * documents}

    return measured


def pretend_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Say that a GPU has this many bytes, and free nothing: a collection of all garbage takes half a second."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (size, 0))
    monkeypatch.setattr("quiver.eval.bench.gpu_stages.free_memory", lambda: None)


@pytest.mark.parametrize("limit", [1, 37, 127, 128, 1000, 5000])
def test_the_largest_batch_is_found_near_the_prediction(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_memory(monkeypatch, 1000 * limit)
    tried: list[int] = []
    fits, fails, reason = largest_on_gpu(memory_of(limit, tried), 512, stop=lambda: False)
    assert fails is not None
    assert fits <= limit < fails
    assert fails - fits <= max(1, limit / 16)
    assert reason == "out of memory"
    if limit >= 128:  # a batch of 65,536 tokens fits and predicts the rest
        assert len(tried) <= 6


def test_the_search_for_the_largest_batch_ends_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_memory(monkeypatch, 1_000_000)
    tried: list[int] = []
    fits, _, reason = largest_on_gpu(memory_of(1000, tried), 512, stop=lambda: len(tried) >= 2)
    assert (fits, reason) == (900, "no time left")
    assert tried == [128, 900]


def test_a_stage_that_crashes_is_recorded_with_its_reason_and_what_it_had_measured(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "tiny-base").write_text("not a folder")
    found = run_in_child("profile", CPU, 60.0, 60.0, tmp_path)
    assert found.failure is not None
    assert found.failure.endswith("(see stages.log)")
    assert "Traceback" in (tmp_path / "stages.log").read_text()
    assert [case.name for case in found.cases] == ["matrix product"], "measured before the model was opened"
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["tiny-base"]
    assert "matrix product" in render_markdown(report(replace(on_gpu(), stages=(found,))))


def test_a_stage_that_hangs_is_stopped(tmp_path: Path) -> None:
    started = time.monotonic()
    found = run_in_child("encoder-base", CPU, 0.1, 0.5, tmp_path)
    assert time.monotonic() - started < 30
    assert found.failure == "no answer within 0.5 seconds; stopped (see stages.log)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "cuda:1"), "--device must be cuda or cpu, got 'cuda:1'; choose a GPU by CUDA_VISIBLE_DEVICES"),
        (("--device", "cpu", "--stage", "encoder"), "unknown stage 'encoder'; choose from tests, encoder-base"),
        (("--device", "cpu", "--minutes", "0"), "--minutes"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, quiver: Callable[..., Any], options: tuple[str, ...], message: str) -> None:
    done = quiver("bench", "gpu", "--out", tmp_path / "out", *options)
    assert done.code == 2
    assert message in done.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_says_so(tmp_path: Path, quiver: Callable[..., Any]) -> None:
    done = quiver("bench", "gpu", "--out", tmp_path / "out", "--device", "cuda")
    assert (done.code, done.err) == (2, "quiver: error: device cuda is not available: PyTorch finds no GPUs here\n")


@pytest.mark.parametrize(
    "stages",
    [
        # The tests above measure the other stages, and run the command's function with all.
        pytest.param(["tests", "queries", "profile"], id="some", marks=pytest.mark.slow),
        pytest.param(list(STAGES), id="all", marks=pytest.mark.exhaustive),
    ],
)
@needs_extra
def test_the_command_runs_from_a_checkout(tmp_path: Path, quiver: Callable[..., Any], stages: list[str]) -> None:
    pytest.importorskip("matplotlib")
    chosen = [] if stages == list(STAGES) else [word for name in stages for word in ("--stage", name)]
    done = quiver("bench", "gpu", "--device", "cpu", "--minutes", "20", "--out", tmp_path / "out", *chosen)
    assert done.code == 0, done.err
    results = read_results(tmp_path / "out" / "results.json")
    assert [(stage.name, stage.failure) for stage in results.stages] == [(name, None) for name in stages]
    for stage in results.stages:
        if stage.name.startswith("encoder-"):
            assert_papers_sets(stage, stage.name.removeprefix("encoder-"))
    assert results.provenance.command is not None
    assert results.provenance.command.startswith("quiver bench gpu")
    headings = [block.title for block in report(results).blocks if isinstance(block, Section)]
    assert headings == [STAGES[name][0] for name in stages] + ["Not run", "Machine"]
    charts = {f"{name}.svg" for name in ("encoder-base", "profile") if name in stages}
    assert {*charts, "report.html"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert "no GPU is used" in done.err
    again = quiver("bench", "gpu", "--device", "cpu", "--minutes", "20", "--out", tmp_path / "out", "--json", *chosen)
    assert json.loads(again.out)["stages"] == json.loads((tmp_path / "out" / "results.json").read_text())["stages"]


RUN_TESTS = """
import sys, time
from pathlib import Path
from quiver.eval.bench.gpu_stages import Context, Measured, gpu_tests
root = Path(sys.argv[1])
gpu_tests(Context("cpu", time.time() + 100, root, 1), Measured(path=root / "partial.json"), root)
"""


def run_gpu_tests(root: Path, **files: str) -> tuple[int, str]:
    """Run the tests stage over other test files; the exit status and the standard error of its process."""
    (root / "tests").mkdir()
    for name, text in files.items():
        (root / "tests" / f"{name}.py").write_text(text)
    done = subprocess.run([sys.executable, "-c", RUN_TESTS, str(root)], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_a_test_that_crashes_does_not_cost_the_outcomes_before_it(tmp_path: Path) -> None:
    text = (
        "import os, pytest\npytestmark = pytest.mark.gpu\ndef test_first(): pass\ndef test_second(): assert False, 'no'\n"
        "def test_third(): os._exit(9)"
    )
    assert run_gpu_tests(tmp_path, test_some=text)[0] == 9
    [case] = json.loads((tmp_path / "partial.json").read_text())["cases"]
    assert case["title"] == "pytest -m gpu: 1 passed, 1 failed, 0 skipped"
    assert [row["variant"] for row in case["rows"]] == ["tests/test_some.py::test_second"]


def test_tests_that_cannot_be_run_are_an_error(tmp_path: Path) -> None:
    status, errors = run_gpu_tests(tmp_path, conftest="import nothing_of_that_name", test_some="# mark.gpu\ndef test_first(): pass")
    assert status == 1
    assert "RuntimeError: pytest could not run the tests (status 4)" in errors


def test_a_search_for_the_largest_batch_that_ended_early_gives_no_ratio(tmp_path: Path) -> None:
    def ratio(reason: str | None) -> object:
        values = ({"length": 512, "documents": count, "failed": None, "reason": reason} for count in (80, 20))
        rows = tuple(Row(name, {}, each) for name, each in zip(("quiver", "transformers"), values, strict=True))
        stage = StageResult("encoder-base", None, 1.0, 1.0, "", (Case("base largest batch", "", {}, rows),), (), ())
        results = replace(run(tmp_path, Stub(), overwrite=True), stages=(stage,))
        return next(measure(results) for target, measure in TARGETS if target.name.startswith("base, largest batch of 512"))

    assert ratio("out of memory") == 4
    assert ratio("no time left") is None
