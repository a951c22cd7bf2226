"""Small encoders and batches around the lanes, panels and tasks of compiled kernels, and processors to run them on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

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
POST: dict[str, Any] = {"norm_position": "post", "final_norm": False, "first_attention_norm": True}
BIASES = dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_input_bias", "mlp_output_bias", "norm_bias"), True)
T = TypeVar("T")


def encoder_of(**changes: Any) -> Encoder:
    """An encoder in evaluation mode: `BASE` but for the changes, with biases and norms that do something."""
    torch.manual_seed(3)
    encoder = Encoder(replace(BASE, **changes))
    init_weights(encoder, seed=3)
    for name, weight in encoder.named_parameters():
        if weight.ndim == 1:
            weight.data.normal_(1.0 if name.endswith("weight") else 0.0, 0.2)
        else:
            weight.data.mul_(4)
    return encoder.eval()


def batch_of(lengths: tuple[int, ...], key_lengths: list[int] | None = None) -> PackedBatch:
    generator = torch.Generator().manual_seed(sum(lengths))
    return pack_ids([torch.randint(300, (length,), generator=generator).tolist() for length in lengths], key_lengths=key_lengths)


def by_threads(encoder: Encoder, batch: PackedBatch) -> Tensor:
    """An encoder's states of a batch, which have the same bits on one, two and three threads."""
    before, states = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            states.append(encoder(batch))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(state, states[0]) for state in states)
    return states[0]


def is_compiled(encoder: Encoder, batch: PackedBatch) -> bool:
    """Whether compiled kernels run the blocks of an encoder over a batch."""
    config, layers = encoder.config, cast("list[Block]", list(encoder.layers))
    half = torch.empty(0, config.rotary_width // 2)
    rope = (half, half) if config.positions == "rope" else None
    dtype = torch.float32 if encoder.prepacked == "int8" else encoder.embeddings.tokens.weight.dtype
    hidden = torch.zeros(batch.num_tokens, config.hidden_size, dtype=hidden_dtype(layers, batch, dtype, config.hidden_size, rope))
    return inference_is_supported(layers, batch, hidden, rope)


def by_operators(function: Callable[[], T]) -> T:
    """Run a function with PyTorch operators in place of compiled kernels."""
    with assume(kernels_run=False, amx_kernels_run=False):
        return function()


def run_as(code: str, processor: str, features: str, *arguments: str) -> str:
    """What code prints in a process whose kernels are compiled for another processor (LLVM's name and features)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("this is a processor of another kind")
    environment = {**os.environ, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features}
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
