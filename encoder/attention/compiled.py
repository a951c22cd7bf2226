"""Attention without gradients on a CPU by compiled loops (`encoder.compiled.attention`): no mask, no copy, no padding.

Shapes: N packed tokens, H heads, K head width.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import numpy as np
import torch
from torch import Tensor

from encoder.compiled import team
from encoder.packing import PackedBatch
from encoder.processor import has_fma

# Tokens from which a batch is worth the half second in which a process loads the compiler.
WORTHWHILE = 256


@cache
def _can() -> bool:
    return has_fma() and importlib.util.find_spec("numba") is not None and team.launcher() is not None


def serves(batch: PackedBatch) -> bool:
    """Whether the loops can run here, and are worth it for a batch."""
    return batch.num_tokens >= WORTHWHILE and not torch.compiler.is_compiling() and _can()


def attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float
) -> Tensor:
    """Attention by compiled loops, float32 and without gradients; see `encoder.attention.attend` for the contract."""
    from encoder.compiled import attention  # takes half a second, so not before it is needed

    del slopes, dropout  # the choice of the backend has seen to it that there are none
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    output = torch.empty(q.shape)
    memo = ("sequences", window is not None)
    if memo not in batch.memo:
        lengths = np.asarray(batch.lengths, np.int64)
        seen = np.asarray(batch.key_lengths or batch.lengths, np.int64)
        batch.memo[memo] = attention.sequences(np.cumsum(lengths) - lengths, lengths, seen, local=window is not None)
    heads = np.array([(x.data_ptr(), x.stride(0), x.stride(1)) for x in (q, k, v, output)], np.int64)
    attention.attend(heads, batch.memo[memo], (q.shape[1], q.shape[2]), window)
    return output
