"""One pass over tokens where torch's operators make five: RoPE, and the way back through activations and gates.

Tokens lie one after the other here, and a vector holds neighbouring numbers of one of them; nothing is brought to lanes.

Shapes: N tokens, I MLP width, H heads, K head width, R rotary width.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quiver.encoder.cpu.attention_tiles import next_index
from quiver.encoder.cpu.block_tiles import ACTIVATIONS, activation_gradients, rotate_row
from quiver.encoder.cpu.codegen import BFLOAT16, FLOAT32
from quiver.encoder.cpu.jit import Callback, jit
from quiver.encoder.cpu.support import run_on_threads as team_run

# Tokens of a task.
TOKENS_PER_TASK = 32

# Places of what a call consists of.
TAKEN, TOKENS, ROTATES = range(3)
# What TURNS says: bytes of a number of the heads that are turned; 0 for the way back.
# The way back: addresses of what was activated, of the gradient of what came out, of that of what was activated; I, which function, gated.
INNER, GRADIENT, OF_INNER, WIDTH, ACTIVATION, GATED = range(3, 9)
# RoPE: address of the heads, bytes from one token and from one head to the next, H; addresses of cosines and sines, R / 2.
HEADS, TOKEN_STRIDE, HEAD_STRIDE, COUNT, COSINES, SINES, HALF = range(3, 10)
SIZE = 10

_FLOAT = 4  # bytes


@jit
def _rotate(call: NDArray[np.int64], token: int) -> None:
    """All heads of a token to its position."""
    row, half = token * call[HALF] * _FLOAT, call[HALF]
    heads = call[HEADS] + token * call[TOKEN_STRIDE]
    for head in range(call[COUNT]):
        address = heads + head * call[HEAD_STRIDE]
        if call[ROTATES] == _FLOAT:
            rotate_row(FLOAT32, address, half, call[COSINES] + row, call[SINES] + row)
        else:
            rotate_row(BFLOAT16, address, half, call[COSINES] + row, call[SINES] + row)


@jit
def _activation_backward(call: NDArray[np.int64], token: int) -> None:
    """A token's way back through the activation."""
    width = call[WIDTH]
    place = token * width * _FLOAT
    inner = place * (1 + call[GATED])
    activation_gradients(call[ACTIVATION], call[GATED], call[INNER] + inner, width, call[GRADIENT] + place, call[OF_INNER] + inner)


@jit
def _run_all(call: NDArray[np.int64]) -> None:
    """Tasks until none is left; what every thread runs."""
    while True:
        first = next_index(call.ctypes.data + TAKEN * 8) * TOKENS_PER_TASK
        if first >= call[TOKENS]:
            return
        for token in range(first, min(first + TOKENS_PER_TASK, call[TOKENS])):
            if call[ROTATES]:
                _rotate(call, token)
            else:
                _activation_backward(call, token)


def _entry(pointer: Any) -> None:
    """`_run_all` on what the pointer points to."""
    _run_all(numba.carray(pointer, SIZE, np.int64))


_ENTRY = Callback(_entry)


def _run(tokens: int, *, turns: int, numbers: tuple[int, ...]) -> None:
    call = np.zeros(SIZE, np.int64)
    call[[TOKENS, ROTATES]] = tokens, turns
    call[3 : 3 + len(numbers)] = numbers
    team_run(_ENTRY.address, call.ctypes.data, torch.get_num_threads())


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """RoPE in place, on torch's threads.

    Args:
        heads: (N, H, K) float32 or bfloat16, the numbers of a head side by side.
        cos: Cosines of the tokens' positions, (N, R/2) float32 and contiguous; R/2 is a multiple of 16.
        sin: Sines, likewise.
    """
    size = heads.itemsize
    strides = heads.stride(0) * size, heads.stride(1) * size
    numbers = heads.data_ptr(), *strides, heads.shape[1], cos.data_ptr(), sin.data_ptr(), cos.shape[1]
    _run(len(heads), turns=size, numbers=numbers)


def activation_backward_(inner: Tensor, gradient: Tensor, of_inner: Tensor, activation: str) -> None:
    """What an activation or a gate gave, again, and the gradient of what it was given, on torch's threads.

    Args:
        inner: What it was given, (N, I) or, gated, (N, 2 I); all three are float32 and contiguous, I is a multiple of 16.
        gradient: Of what it gave, (N, I); becomes that itself.
        of_inner: Where the gradient of ``inner`` goes, shaped like it.
        activation: A key of `quiver.encoder.cpu.block_tiles.ACTIVATIONS`.
    """
    gated = inner.shape[1] != gradient.shape[1]
    numbers = inner.data_ptr(), gradient.data_ptr(), of_inner.data_ptr(), gradient.shape[1], ACTIVATIONS[activation], int(gated)
    _run(len(inner), turns=0, numbers=numbers)
