"""torch.compile: the same results, and one compilation for all lengths."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from quiver.encoder import Encoder, EncoderConfig, compile_encoder, init_weights, pack_ids

CONFIG = EncoderConfig.modernbert(
    vocab_size=64, hidden_size=48, num_heads=2, intermediate_size=64, layer_types=["global", "local", "local"], window=16, max_positions=300
)


def made() -> Encoder:
    return init_weights(Encoder(CONFIG), seed=0)


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
def test_batches_of_every_length_share_one_compilation(backend: str) -> None:
    plain, encoder = made(), made()
    assert compile_encoder(encoder, backend=backend) is encoder
    torch._dynamo.reset()
    counters.clear()
    for length in (5, 17, 64, 200):
        batch = pack_ids([[3] * length, *[[7, 8, 9]] * (length % 4)])  # the number of sequences and their groups differ too
        states = encoder(batch)
        torch.testing.assert_close(states, plain(batch), atol=1e-5, rtol=0)
        states.square().mean().backward()
        plain(batch).square().mean().backward()
        for found, expected in zip(encoder.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, atol=1e-5, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1  # three layers, four lengths
    assert not counters["graph_break"]


def test_names_and_copies_of_weights() -> None:
    encoder = compile_encoder(made(), backend="aot_eager")
    assert list(encoder.state_dict()) == list(made().state_dict())
    twin = copy.deepcopy(encoder)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.zero_()
    assert all(layer.mlp.forward.__self__ is layer.mlp for layer in twin.layers)
    assert twin(pack_ids([[1, 2, 3]])).abs().max() > 0
