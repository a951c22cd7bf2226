"""torch.compile: the same results, and one compilation for all lengths."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from quiver.encoder import Encoder, EncoderConfig, compile_encoder, init_weights, pack_ids

PRE = EncoderConfig.modernbert(
    vocab_size=64, hidden_size=48, num_heads=2, intermediate_size=64, layer_types=["global", "local", "local"], window=16, max_positions=300
)
CONFIGS = {
    "pre": PRE,
    "post": replace(PRE, norm_position="post", final_norm=False, first_attention_norm=True),
    "parallel": replace(PRE, norm_position="parallel"),
}


def made(norms: str = "pre") -> Encoder:
    return init_weights(Encoder(CONFIGS[norms]), seed=0)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


# "aot_eager" traces forward and backward passes as inductor does, without the minute of a C++ compiler.
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler on a CPU"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("norms", CONFIGS)
def test_batches_of_every_layout_share_one_compilation(backend: str, norms: str) -> None:
    plain, encoder = made(norms), made(norms)
    assert compile_encoder(encoder, backend=backend) is encoder
    for length in (5, 17, 64, 200, 33):
        # The number of sequences, their groups and what is attended to differ too.
        texts = [[3] * length, *[[7, 8, 9]] * (length % 4)]
        batch = pack_ids(texts, key_lengths=[max(1, len(text) - length % 3) for text in texts])
        states = encoder(batch)
        torch.testing.assert_close(states, plain(batch), atol=1e-5, rtol=0)
        states.square().mean().backward()
        plain(batch).square().mean().backward()
        for found, expected in zip(encoder.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, atol=1e-5, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1  # three layers, five layouts
    assert not counters["recompiles"]
    assert not counters["graph_break"]


@pytest.mark.parametrize(("norms", "count"), [("pre", 1), ("post", 2), ("parallel", 0)])
def test_norms_are_compiled_with_the_mlp(norms: str, count: int) -> None:
    """Counted in the graph that the backend is given: norms, and the matrix products of the MLP."""
    names: list[str] = []

    def record(graph: Any, inputs: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.register_backend(record, name=f"record_{norms}")  # type: ignore[arg-type]  # any callable
    encoder = compile_encoder(made(norms), backend=f"record_{norms}")
    encoder(pack_ids([[1, 2, 3], [4, 5]]))
    assert sum("layer_norm" in name for name in names) == count
    assert sum("linear" in name for name in names) == 2


@pytest.mark.parametrize("norms", CONFIGS)
def test_names_and_copies_of_weights(norms: str) -> None:
    encoder = compile_encoder(made(norms), backend="aot_eager")
    assert list(encoder.state_dict()) == list(made(norms).state_dict())
    batch = pack_ids([[1, 2, 3]])
    expected, twin = encoder(batch), copy.deepcopy(encoder)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.zero_()
    torch.testing.assert_close(twin(batch), expected, atol=1e-6, rtol=0)
    assert expected.abs().max() > 0
