"""Memory from outside: the search for the largest batch, children that end in every way, and a real one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quiver.encoder import Encoder, EncoderConfig, init_weights, save_encoder
from quiver.eval.bench.encoder.children import Child, ChildError, ChildModel, Killed, largest_batch, peak_memory, search_largest
from quiver.eval.bench.encoder.results import LargestBatch, PeakMemory, Settings

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory on a CPU is read from Linux's /proc")

# Speaks the protocol; how it ends when it is asked for more than `limit` documents is in the model's name: "37 killed".
FAKE = """
import json, os, sys
model = json.loads(sys.stdin.readline())["model"]
limit, how = model.split()
print(json.dumps({"weights": 1000}), flush=True)
for line in sys.stdin:
    documents = len(json.loads(line)["batches"][0])
    if documents <= int(limit) or how == "measured":
        print(json.dumps({"before": 7, "above": 100 * documents, "reserved": None}), flush=True)
    elif how == "out-of-memory":
        print(json.dumps({"out_of_memory": True}), flush=True)
    elif how == "killed":
        os.kill(os.getpid(), 9)
    else:
        sys.stderr.write("Traceback\\nRuntimeError: the kernel does not like this\\n")
        sys.exit(1)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "fake_child.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "fake_child"


def model(name: str, **settings: object) -> ChildModel:
    return ChildModel("ids", "quiver", name, Settings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 4, 37, 63, 64, 65, 999])
def test_the_search_finds_the_exact_limit(limit: int) -> None:
    tried: list[int] = []

    def refusal(documents: int) -> str | None:
        tried.append(documents)
        return "too many" if documents > limit else None

    assert search_largest(refusal, ceiling=1000) == (limit, limit + 1, "too many")
    assert len(tried) == len(set(tried)) <= 2 * max(1, limit).bit_length() + 1


@pytest.mark.parametrize("ceiling", [1, 2, 100, 128])
def test_nothing_above_the_ceiling_is_tried(ceiling: int) -> None:
    tried: list[int] = []
    assert search_largest(lambda documents: tried.append(documents), ceiling=ceiling) == (ceiling, None, None)  # type: ignore[func-returns-value]
    assert max(tried) == ceiling


def test_the_limit_is_as_exact_as_asked_for() -> None:
    fits, fails, _ = search_largest(lambda documents: "too many" if documents > 7000 else None, ceiling=1 << 20, tolerance=1 / 64)
    assert fits <= 7000 < (fails or 0)
    assert (fails or 0) - fits <= fits / 64


@pytest.mark.parametrize(("how", "reason"), [("out-of-memory", "out of memory"), ("killed", "killed by signal 9")])
def test_the_largest_batch_of_children_that_fail(fake: str, how: str, reason: str) -> None:
    found = largest_batch(model(f"11 {how}"), 4, ceiling=1000, tolerance=0, module=fake)
    assert found == LargestBatch("quiver", 4, 11, 12, reason)


def test_the_largest_batch_within_a_budget(fake: str) -> None:
    budget = (1000 + 100 * 23) / 2**30  # the weights and 23 documents
    found = largest_batch(model("0 measured", memory_gib=budget), 4, ceiling=1000, tolerance=0, module=fake)
    assert found == LargestBatch("quiver", 4, 23, 24, "over the budget")


def test_another_failure_is_an_error_with_the_last_line(fake: str) -> None:
    with pytest.raises(ChildError, match=r"^RuntimeError: the kernel does not like this$"):
        largest_batch(model("3 raise"), 4, ceiling=1000, tolerance=0, module=fake)


def test_a_killed_child_is_told_from_a_failed_one(fake: str) -> None:
    with Child(model("1 killed"), module=fake) as child, pytest.raises(Killed, match="signal 9"):
        child.ask({"batches": [[4, 4]]})


def test_a_child_that_never_starts(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="No module named"):
        Child(model("1 killed"), module="no_such_module_of_ours")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = EncoderConfig.modernbert(
        vocab_size=300, hidden_size=64, num_heads=2, intermediate_size=96, layer_types=["global", "local"], max_positions=64
    )
    folder = tmp_path_factory.mktemp("tiny")
    save_encoder(init_weights(Encoder(config), seed=1), folder)
    return str(folder)


@LINUX
def test_a_real_child_measures_a_real_run(tiny: str) -> None:
    small = peak_memory(model(tiny, threads=1), {"batches": [[64]]})
    large = peak_memory(model(tiny, threads=1), {"batches": [[64] * 400]})
    assert isinstance(small, PeakMemory)
    assert small.before > 2**20
    # 25,600 tokens: their hidden states alone are 25,600 x 64 floats, and a batch of one document needs next to nothing.
    assert large.above > 25_600 * 64 * 4 > small.above
    assert large.reserved is None


@LINUX
def test_a_real_child_finds_a_real_limit(tiny: str) -> None:
    settings = {"threads": 1, "memory_gib": 0.02}
    found = largest_batch(model(tiny, **settings), 64, ceiling=4096, tolerance=0.25)
    assert found.failed is not None
    assert 8 <= found.documents < found.failed <= 2048
    assert found.reason == "over the budget"


def test_a_real_child_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match=r"^InputError: .*neither modules\.json nor config\.json"):
        peak_memory(model(str(tmp_path)), {"batches": [[1]]})
