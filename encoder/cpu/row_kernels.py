"""Kernels that process tokens row by row, in one pass where PyTorch operators make five: RoPE, and activation gradients.

A vector holds neighbouring values of one token; tokens are not transposed to lanes.

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

# Tokens per task.
TOKENS_PER_TASK = 32

# Layout of the arguments.
TAKEN, TOKENS, ROTATES = range(3)
# ROTATES: bytes per value of the heads to rotate; 0 for activation gradients.
# Activation gradients: addresses of the activation's input, of the gradient of its output and of the gradient of its input; I, index of the
# activation, whether it is gated.
INNER, GRADIENT, OF_INNER, WIDTH, ACTIVATION, GATED = range(3, 9)
# RoPE: address of the heads, strides of token and head in bytes, H; addresses of cosines and sines, R / 2.
HEADS, TOKEN_STRIDE, HEAD_STRIDE, COUNT, COSINES, SINES, HALF = range(3, 10)
SIZE = 10

_FLOAT = 4  # bytes


@jit
def _rotate(call: NDArray[np.int64], token: int) -> None:
    """Rotate all heads of a token."""
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
    """Backpropagate through the activation of a token."""
    width = call[WIDTH]
    place = token * width * _FLOAT
    inner = place * (1 + call[GATED])
    activation_gradients(call[ACTIVATION], call[GATED], call[INNER] + inner, width, call[GRADIENT] + place, call[OF_INNER] + inner)


@jit
def _run_all(call: NDArray[np.int64]) -> None:
    """Run tasks until none is left; every thread runs this."""
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
    """C entry of `_run_all`."""
    _run_all(numba.carray(pointer, SIZE, np.int64))


_ENTRY = Callback(_entry)


def _run(tokens: int, *, turns: int, numbers: tuple[int, ...]) -> None:
    call = np.zeros(SIZE, np.int64)
    call[[TOKENS, ROTATES]] = tokens, turns
    call[3 : 3 + len(numbers)] = numbers
    team_run(_ENTRY.address, call.ctypes.data, torch.get_num_threads())


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Apply RoPE in place, on PyTorch's threads.

    Args:
        heads: (N, H, K) float32 or bfloat16, contiguous within a head.
        cos: Cosines of the tokens' positions, (N, R/2) float32 and contiguous; R/2 is a multiple of 16.
        sin: Sines, likewise.
    """
    size = heads.itemsize
    strides = heads.stride(0) * size, heads.stride(1) * size
    numbers = heads.data_ptr(), *strides, heads.shape[1], cos.data_ptr(), sin.data_ptr(), cos.shape[1]
    _run(len(heads), turns=size, numbers=numbers)


def activation_backward_(inner: Tensor, gradient: Tensor, of_inner: Tensor, activation: str) -> None:
    """Recompute an activation or gate and compute the gradient of its input, on PyTorch's threads.

    Args:
        inner: Input of the activation, (N, I) or, gated, (N, 2 I); all three tensors are float32 and contiguous, I is a multiple of 16.
        gradient: Gradient of its output, (N, I); overwritten by the output.
        of_inner: Receives the gradient of ``inner``, in its shape.
        activation: A key of `quiver.encoder.cpu.block_tiles.ACTIVATIONS`.
    """
    gated = inner.shape[1] != gradient.shape[1]
    numbers = inner.data_ptr(), gradient.data_ptr(), of_inner.data_ptr(), gradient.shape[1], ACTIVATIONS[activation], int(gated)
    _run(len(inner), turns=0, numbers=numbers)
