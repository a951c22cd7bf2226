"""Small encoders and batches around the lanes, panels and tasks of compiled loops, and threads to run them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from encoder import Encoder, EncoderConfig, PackedBatch, init_weights, pack_ids

BASE = EncoderConfig.modernbert(
    vocab_size=300,
    hidden_size=96,
    num_heads=3,
    intermediate_size=144,
    layer_types=["global", "local", "local", "global"],
    max_positions=1500,
    window=32,
)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Torch's threads, whatever the environment says."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def encoder_of() -> Callable[..., Encoder]:
    """Makes an encoder in evaluation mode: `BASE` but for what it is given, biases and norms that do something."""

    def make(**changes: Any) -> Encoder:
        torch.manual_seed(3)
        encoder = Encoder(replace(BASE, **changes))
        init_weights(encoder, seed=3)
        for name, weight in encoder.named_parameters():
            if weight.ndim == 1:
                weight.data.normal_(1.0 if name.endswith("weight") else 0.0, 0.2)
            else:
                weight.data.mul_(4)
        return encoder.eval()

    return make


@pytest.fixture
def batch_of() -> Callable[..., PackedBatch]:
    """Makes a batch of texts of given lengths and, if they are given, key lengths."""

    def make(lengths: tuple[int, ...], key_lengths: list[int] | None = None) -> PackedBatch:
        generator = torch.Generator().manual_seed(sum(lengths))
        return pack_ids([torch.randint(300, (length,), generator=generator).tolist() for length in lengths], key_lengths=key_lengths)

    return make
