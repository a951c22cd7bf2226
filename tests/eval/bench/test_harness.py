"""The harness: choosing backends, interleaved rounds, ratios, results files and finished measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quiver.cli import bench
from quiver.encoder import InputError
from quiver.eval.bench import encoder, index_backends, training
from quiver.eval.bench import report as reports
from quiver.eval.bench.encoder_backends import BACKENDS, TEXT_BACKENDS
from quiver.eval.bench.gpu_stages import STAGES
from quiver.eval.bench.harness import Pass, Timing, check_out, choose, naming_out_of_memory, time_rounds, torch_threads
from quiver.eval.bench.results import Benchmark, Case, FinishedRows, NotRun, Row, Series, read_benchmark, with_ratios, write_benchmark
from quiver.eval.bench.training_backends import LOSSES
from quiver.eval.results import provenance


def test_every_other_round_runs_in_reverse() -> None:
    turns: list[str] = []
    steps: list[int] = []
    passes: dict[str, Pass] = {name: (lambda name=name: turns.append(name)) for name in ("quiver", "a", "b")}
    timings = time_rounds(passes, rounds=3, advance=steps.append)
    assert turns == ["quiver", "a", "b", "b", "a", "quiver", "quiver", "a", "b"]
    assert [len(each.seconds) for each in timings.values()] == [3, 3, 3]
    assert steps == [1] * 9
    with pytest.raises(ValueError, match="rounds must be >= 1, got 0"):
        time_rounds(passes, rounds=0)


def test_each_pass_is_timed_on_both_clocks() -> None:
    now = [0.0]

    def taking(seconds: float) -> Pass:
        def run() -> None:
            now[0] += seconds

        return run

    timings = time_rounds({"quiver": taking(2), "other": taking(5)}, rounds=2, clock=lambda: now[0], processor_clock=lambda: 2 * now[0])
    assert timings == {"quiver": Timing((2, 2), (4, 4)), "other": Timing((5, 5), (10, 10))}


def test_requested_backends_must_exist_and_run() -> None:
    available = ["quiver", "quiver-int8", "slow", "cuda"]
    reasons = {"cuda": "needs CUDA"}
    assert choose(["slow", "slow", "quiver"], available, reasons.get) == (["quiver", "slow"], [])
    assert choose([], available, reasons.get) == (["quiver"], [])
    assert choose(None, available, reasons.get) == (["quiver", "slow"], [NotRun("cuda", "needs CUDA")])
    with pytest.raises(InputError, match=r"unknown backend 'fast'; choose from quiver-int8, slow, cuda"):
        choose(["fast"], available, reasons.get)
    with pytest.raises(InputError, match=r"^cuda: needs CUDA"):
        choose(["cuda"], available, reasons.get)


def test_rounds_end_when_another_would_take_too_long() -> None:
    now = [0.0]

    def taking(seconds: float) -> Pass:
        def run() -> None:
            now[0] += seconds

        return run

    def rounds(seconds: float | None) -> list[int]:
        passes = {"quiver": taking(2), "other": taking(5)}
        timings = time_rounds(passes, rounds=4, seconds=seconds, clock=lambda: now[0])
        return [len(timing.seconds) for timing in timings.values()]

    assert rounds(None) == [4, 4]
    assert rounds(28) == [4, 4], "four rounds of 7 seconds"
    assert rounds(27) == [3, 3]
    assert rounds(15) == [2, 2], "two rounds take 14, and a third would take 21"
    assert rounds(0.1) == [1, 1], "the first always runs"


def test_series_summarises_rounds() -> None:
    found = Series.of([2, 4, 9])
    assert (found.median, found.mean, found.deviation, found.lowest, found.highest) == (4, 5, pytest.approx(13**0.5), 2, 9)
    assert Series.of([3.0]) == Series((3.0,), 3, 3, 0, 3, 3)


def test_ratios_are_by_round() -> None:
    rows = [Row("quiver", {"seconds": Series.of((1.0, 2.0, 4.0))}, {}), Row("other", {"seconds": Series.of((3.0, 2.0, 6.0))}, {})]
    quiver, other = with_ratios(rows, {"seconds": "time_ratio"})
    assert quiver.series["time_ratio"].values == (1, 1, 1)
    assert other.series["time_ratio"] == Series.of((3, 1, 1.5))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:126] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ],
)
def test_out_of_memory_names_backend_and_case(error: RuntimeError) -> None:
    with (
        pytest.raises(InputError, match="other ran out of memory on fixed-8192 in batches of 4; reduce --batch-size"),
        naming_out_of_memory("other", "fixed-8192 in batches of 4"),
    ):
        raise error


def test_torchs_allocator_error_is_recognised() -> None:
    with pytest.raises(InputError, match="ran out of memory"), naming_out_of_memory("other", "a set"):
        torch.empty(2**60, dtype=torch.uint8)


def test_other_errors_are_not_changed() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), naming_out_of_memory("other", "a set"):
        raise RuntimeError("shapes differ")


def test_threads_are_restored() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with torch_threads(None):
        assert torch.get_num_threads() == before


def benchmark() -> Benchmark:
    rows = (Row("quiver", {"seconds": Series.of([1.0, 2.0])}, {"max_difference": 0.0}), Row("other", {}, {"reason": None}, "nprobe=8"))
    return Benchmark(
        subject="encoder",
        name="tiny",
        metadata={"family": "modernbert", "parameters": 1000},
        settings={"rounds": 2, "memory_gib": 0.5, "train": False},
        cases=(Case("4+2", "two documents", {"documents": 2}, rows),),
        not_run=(NotRun("transformers-flash", "needs CUDA"),),
        processor="a processor",
        load_average=(0.5, 0.25, 0.0),
        provenance=provenance("quiver bench encoder"),
    )


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = benchmark()
    write_benchmark(written, tmp_path / "results.json")
    assert read_benchmark(tmp_path / "results.json") == written
    assert written.case("4+2").rows[1].variant == "nprobe=8"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("quiver-benchmark/2", "quiver-benchmark/1", "quiver-benchmark/1"),
        ('"processor": "a processor"', '"processor": 3', "processor"),
        ('"name": "tiny"', '"name": "tiny", "speed": 3', "speed"),
    ],
)
def test_damaged_results_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "results.json"
    write_benchmark(benchmark(), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError, match=message):
        read_benchmark(path)


def test_finished_rows_are_returned_only_for_the_same_key(tmp_path: Path) -> None:
    finished = FinishedRows(tmp_path / "finished")
    rows = {"search": benchmark().cases[0].rows}
    assert finished.load("ivf:nlist=4", "key") is None
    finished.save("ivf:nlist=4", "key", rows)
    assert finished.load("ivf:nlist=4", "key") == rows
    assert finished.load("ivf:nlist=4", "other key") is None
    assert finished.load("ivf-nlist-4", "key") is None
    finished.remove("ivf:nlist=4")
    assert finished.load("ivf:nlist=4", "key") is None


def test_output_folder_is_checked_before_the_benchmark(tmp_path: Path) -> None:
    check_out(tmp_path / "new" / "out", "results.json", overwrite=False)
    assert not (tmp_path / "new").exists()
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(InputError, match="results exist already; choose another --out, or add --overwrite"):
        check_out(tmp_path, "results.json", overwrite=False)
    check_out(tmp_path, "results.json", overwrite=True)
    with pytest.raises(InputError, match="is a file, not a folder"):
        check_out(tmp_path / "results.json" / "out", "results.json", overwrite=False)


def test_facts_keep_their_types(tmp_path: Path) -> None:
    changed = replace(benchmark(), metadata={"flag": True, "count": 1, "share": 0.5, "text": "1", "none": None})
    write_benchmark(changed, tmp_path / "results.json")
    metadata = read_benchmark(tmp_path / "results.json").metadata
    assert metadata == changed.metadata
    assert [type(each) for each in metadata.values()] == [bool, int, float, str, type(None)]


def test_names_in_help_texts_are_those_that_exist() -> None:
    assert tuple(encoder.PAPER_SETS) == bench.SETS
    assert ("quiver", *bench.BACKENDS) == tuple(BACKENDS)
    assert ("quiver", *bench.TEXT_BACKENDS) == tuple(TEXT_BACKENDS)
    assert tuple(training.WORKLOADS) == bench.WORKLOADS
    assert tuple(LOSSES) == bench.KINDS
    assert bench.BASELINES == index_backends.BASELINES
    assert tuple(STAGES) == bench.STAGES
    assert (bench.REPORT, bench.PAGE, bench.PLOT) == (reports.REPORT, reports.PAGE, reports.PLOT)
    assert (encoder.PAPER_DOCUMENTS, encoder.BATCH_TOKENS["cpu"], encoder.BATCH_TOKENS["cuda"]) == (8192, 8192, 131072)
