"""Child processes: the protocol, every way in which a child ends, memory, and the search for the largest batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.encoder import Encoder, EncoderConfig, init_weights, save_encoder
from quiver.eval.bench.child import Child, ChildError, KilledError, ask_once
from quiver.eval.bench.encoder import largest_batch, search_largest

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory on a CPU is read from Linux's /proc")
TOKEN_IDS = "quiver.eval.bench.encoder:open_token_ids"

# A target with a limit of documents, and what it does above the limit.
STUB = """
import os, sys, time

def open_stub(limit, above):
    print("libraries print to standard output")
    def reply(request):
        documents = len(request["batches"][0])
        if documents <= limit or above == "measured":
            return {"before": 7, "above": 100 * documents, "reserved": None}
        if above == "out-of-memory":
            raise RuntimeError("CUDA error: out of memory")
        if above == "killed":
            os.kill(os.getpid(), 9)
        if above == "sleeps":
            time.sleep(600)
        raise RuntimeError("the kernel does not like this\\nadvice")
    return reply, {"weights": 1000}
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Child]:
    (tmp_path / "stub_child.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(limit: int, above: str, timeout: float | None = None) -> Child:
        return Child("stub_child:open_stub", {"limit": limit, "above": above}, label="stub", timeout=timeout)

    return start


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 4, 37, 63, 64, 65, 999])
def test_search_finds_the_exact_limit(limit: int) -> None:
    tried: list[int] = []

    def refusal(documents: int) -> str | None:
        tried.append(documents)
        return "too many" if documents > limit else None

    assert search_largest(refusal, ceiling=1000) == (limit, limit + 1, "too many")
    assert len(tried) == len(set(tried)) <= 2 * max(1, limit).bit_length() + 1


@pytest.mark.parametrize("ceiling", [1, 2, 100, 128])
def test_search_tries_nothing_above_the_ceiling(ceiling: int) -> None:
    tried: list[int] = []
    assert search_largest(lambda documents: tried.append(documents), ceiling=ceiling) == (ceiling, None, None)  # type: ignore[func-returns-value]
    assert max(tried) == ceiling


def test_search_stops_at_the_tolerance() -> None:
    fits, fails, _ = search_largest(lambda documents: "too many" if documents > 7000 else None, ceiling=1 << 20, tolerance=1 / 64)
    assert fits <= 7000 < (fails or 0)
    assert (fails or 0) - fits <= fits / 64


@pytest.mark.parametrize(("above", "reason"), [("out-of-memory", "out of memory"), ("killed", "killed by signal 9")])
def test_largest_batch_survives_children_that_run_out_of_memory(stub: Callable[..., Child], above: str, reason: str) -> None:
    found = largest_batch(lambda: stub(5, above), 4, memory_gib=None, ceiling=1000, tolerance=0)
    assert found == {"length": 4, "documents": 5, "failed": 6, "reason": reason}


def test_largest_batch_stays_within_the_budget(stub: Callable[..., Child]) -> None:
    budget = (1000 + 100 * 23) / 2**30  # the weights and 23 documents
    found = largest_batch(lambda: stub(0, "measured"), 4, memory_gib=budget, ceiling=1000, tolerance=0)
    assert found == {"length": 4, "documents": 23, "failed": 24, "reason": "over the budget"}


def test_other_failures_raise_the_first_line_of_the_error(stub: Callable[..., Child]) -> None:
    with pytest.raises(ChildError, match=r"^RuntimeError: the kernel does not like this$"):
        largest_batch(lambda: stub(3, "raises"), 4, memory_gib=None, ceiling=1000, tolerance=0)


@pytest.mark.slow
def test_killed_and_slow_children_are_told_apart(stub: Callable[..., Child]) -> None:
    with stub(1, "killed") as child, pytest.raises(KilledError, match="signal 9"):
        child.ask({"batches": [[4, 4]]})
    with stub(1, "sleeps", 5.0) as child, pytest.raises(ChildError, match="no answer within 5 seconds; stopped"):
        child.ask({"batches": [[4, 4]]})


def test_a_target_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(ChildError, match="No module named"):
        Child("no_such_module_of_ours:open", {}, label="stub")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = EncoderConfig.modernbert(
        vocab_size=300, hidden_size=64, num_heads=2, intermediate_size=96, layer_types=["global", "local"], max_positions=64
    )
    folder = tmp_path_factory.mktemp("tiny")
    save_encoder(init_weights(Encoder(config), seed=1), folder)
    return str(folder)


def arguments(model: str, **settings: object) -> dict[str, object]:
    return {"backend": "quiver", "model": model, "settings": settings}


@LINUX
def test_memory_grows_with_the_batch(tiny: str) -> None:
    with Child(TOKEN_IDS, arguments(tiny, threads=1), label="quiver") as child:
        small, large = child.ask({"batches": [[64]]}), child.ask({"batches": [[64] * 100]})
    assert small["before"] > 2**20
    # 6,400 tokens: their hidden states alone are 6,400 x 64 floats, and a batch of one document needs next to nothing.
    assert large["above"] > 6_400 * 64 * 4 > small["above"]
    assert large["reserved"] is None


@LINUX
def test_largest_batch_of_an_encoder_is_measured(tiny: str) -> None:
    child = arguments(tiny, threads=1, memory_gib=0.02)
    found = largest_batch(lambda: Child(TOKEN_IDS, child, label="quiver"), 64, memory_gib=0.02, ceiling=4096, tolerance=0.25)
    assert 8 <= int(found["documents"] or 0) < int(found["failed"] or 0) <= 2048
    assert found["reason"] == "over the budget"


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match=r"^InputError: .*neither modules\.json nor config\.json"):
        ask_once(TOKEN_IDS, arguments(str(tmp_path)), {"batches": [[1]]}, label="quiver")
