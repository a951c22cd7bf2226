"""Turns, ratios, spreads and differences of the encoder benchmark, with stand-ins whose numbers are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import quiver.eval.bench.encoder.rounds as module
from quiver.encoder import InputError
from quiver.eval.bench.encoder.results import (
    EncoderBenchmark,
    LargestBatch,
    NotRun,
    PeakMemory,
    SetTimes,
    Settings,
    Spread,
    library_times,
    read_benchmark,
    with_memory,
    write_benchmark,
)
from quiver.eval.bench.encoder.rounds import naming_who_ran_out, time_in_turns, torch_threads
from quiver.eval.provenance import provenance


def test_every_other_round_runs_backwards() -> None:
    turns: list[str] = []
    steps: list[int] = []
    passes = {name: (lambda name=name: turns.append(name)) for name in ("quiver", "a", "b")}
    seconds = time_in_turns(passes, rounds=3, advance=steps.append)
    assert turns == ["quiver", "a", "b", "b", "a", "quiver", "quiver", "a", "b"]
    assert [len(each) for each in seconds.values()] == [3, 3, 3]
    assert steps == [1] * 9
    with pytest.raises(ValueError, match="rounds must be >= 1, got 0"):
        time_in_turns(passes, rounds=0)


def test_each_pass_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])

    def taking(seconds: float) -> module.Pass:
        def run() -> None:
            now[0] += seconds

        return run

    assert time_in_turns({"quiver": taking(2), "peer": taking(5)}, rounds=2) == {"quiver": (2, 2), "peer": (5, 5)}


def test_spread() -> None:
    assert Spread.of([2, 4, 9]) == Spread(median=4, mean=5, deviation=pytest.approx(13**0.5), lowest=2, highest=9)
    assert Spread.of([3.0]) == Spread(3, 3, 0, 3, 3)


def test_ratios_are_by_round() -> None:
    quiver, peer = library_times(
        {"quiver": (1.0, 2.0, 4.0), "peer": (3.0, 2.0, 6.0)}, 120, differences={"quiver": 0.0, "peer": 0.5}, gradients=None
    )
    assert quiver.ratios == (1, 1, 1)
    assert peer.ratios == (3, 1, 1.5)
    assert (peer.ratio.median, peer.ratio.lowest, peer.ratio.highest) == (1.5, 1, 3)
    assert (quiver.tokens_per_second.median, peer.tokens_per_second.median) == (60, 40)
    assert peer.tokens_per_second.mean == pytest.approx((40 + 60 + 20) / 3)
    assert (peer.max_difference, peer.gradient_difference, peer.memory) == (0.5, None, None)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:126] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ],
)
def test_running_out_of_memory_names_who_and_where(error: RuntimeError) -> None:
    with (
        pytest.raises(InputError, match="peer ran out of memory on fixed-8192 in batches of 4; give a smaller --batch-size"),
        naming_who_ran_out("peer", "fixed-8192 in batches of 4"),
    ):
        raise error


def test_a_real_refusal_of_the_allocator_is_recognised() -> None:
    with pytest.raises(InputError, match="ran out of memory"), naming_who_ran_out("peer", "a set"):
        torch.empty(2**60, dtype=torch.uint8)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), naming_who_ran_out("peer", "a set"):
        raise RuntimeError("shapes differ")


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with torch_threads(None):
        assert torch.get_num_threads() == before


def benchmark() -> EncoderBenchmark:
    timed = library_times({"quiver": (1.0, 2.0), "peer": (3.0, 2.0)}, 120, differences={"quiver": 0, "peer": 1e-6}, gradients=None)
    times = with_memory(SetTimes("4+2", 2, 6, 2, 4, 2, timed), {"peer": PeakMemory(before=1000, above=200, reserved=None)})
    return EncoderBenchmark(
        model="tiny",
        family="modernbert",
        parameters=1000,
        settings=Settings(rounds=2, memory=True, memory_gib=0.5),
        sets=(times,),
        largest_batches=(LargestBatch("quiver", 4, 37, 38, "out of memory"), LargestBatch("peer", 4, 8, None, None)),
        not_run=(NotRun("transformers-flash", "needs CUDA"),),
        processor="a processor",
        load_average=(0.5, 0.25, 0.0),
        provenance=provenance("quiver bench encoder"),
    )


def test_results_survive_the_file(tmp_path: Path) -> None:
    write_benchmark(benchmark(), tmp_path / "results.json")
    assert read_benchmark(tmp_path / "results.json") == benchmark()


def test_memory_goes_to_the_library_it_was_measured_of() -> None:
    quiver, peer = benchmark().sets[0].libraries
    assert quiver.memory is None
    assert peer.memory == PeakMemory(1000, 200, None)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("quiver-encoder-benchmark/1", "quiver-encoder-benchmark/0", "the schema is 'quiver-encoder-benchmark/0'"),
        ('"family": "modernbert"', '"family": 3', r"results\.json\.family: must be a string"),
        ('"rounds": 2', '"rounds": 2, "speed": 3', r"results\.json\.settings: unknown field 'speed'"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "results.json"
    write_benchmark(benchmark(), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError, match=message):
        read_benchmark(path)
