"""Small encoders and batches around the lanes, panels and tasks of compiled kernels, and threads and processors to run them on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from quiver.encoder import Encoder, EncoderConfig, PackedBatch, init_weights, pack_ids
from quiver.encoder.cpu.blocks import hidden_dtype, inference_is_supported
from quiver.encoder.cpu.support import assume
from quiver.encoder.layers import Block

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
    """Two PyTorch threads, whatever the environment says."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def by_threads() -> Callable[[Encoder, PackedBatch], Tensor]:
    """An encoder's states of a batch, which have the same bits on one, two and three threads."""

    def encode(encoder: Encoder, batch: PackedBatch) -> Tensor:
        before, states = torch.get_num_threads(), []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                states.append(encoder(batch))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(state, states[0]) for state in states)
        return states[0]

    return encode


@pytest.fixture
def is_compiled() -> Callable[[Encoder, PackedBatch], bool]:
    """Tells whether compiled kernels run the blocks of an encoder over a batch."""

    def asked(encoder: Encoder, batch: PackedBatch) -> bool:
        config, layers = encoder.config, cast("list[Block]", list(encoder.layers))
        half = torch.empty(0, config.rotary_width // 2)
        rope = (half, half) if config.positions == "rope" else None
        dtype = torch.float32 if encoder.prepacked == "int8" else encoder.embeddings.tokens.weight.dtype
        hidden = torch.zeros(batch.num_tokens, config.hidden_size, dtype=hidden_dtype(layers, batch, dtype, config.hidden_size, rope))
        return inference_is_supported(layers, batch, hidden, rope)

    return asked


@pytest.fixture
def by_operators() -> Callable[[Callable[[], Any]], Any]:
    """Runs a function with PyTorch operators in place of compiled kernels, and gives its result."""

    def run(function: Callable[[], Any]) -> Any:
        with assume(kernels_run=False):
            return function()

    return run


@pytest.fixture
def run_as() -> Callable[..., str]:
    """Runs code in a process whose kernels are compiled for another processor (LLVM name, features), and gives what it prints."""

    def run(code: str, processor: str, features: str, *arguments: str) -> str:
        if platform.machine() not in ("x86_64", "AMD64"):
            pytest.skip("this is a processor of another kind")
        environment = {**os.environ, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features}
        done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(
    params=[("haswell", "+avx2,+fma"), ("skylake-avx512", "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx2,+fma")], ids=lambda x: x[0]
)
def older_processor(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A processor without instructions for pairs and fours, which this one can run the code of: LLVM's name, and what it has."""
    name, features = request.param
    if "+avx512f" in features and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("this processor has no AVX-512")
    return name, features


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
