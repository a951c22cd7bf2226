"""Attention without gradients on a CPU by compiled loops (`encoder.compiled.attention`): no mask, no copy, no padding.

Shapes: N packed tokens, H heads, K head width.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from encoder.compiled import team
from encoder.packing import PackedBatch
from encoder.processor import has_fma

logger = logging.getLogger(__name__)

# Tokens for each of torch's threads from which a batch is worth it: panels of some dozens have to keep them busy, and a process loads the
# loops for half a second, the first one for eight. A lone query of 8 to 20 tokens takes 1.3 to 2.3 times as long with them.
WORTHWHILE = 128
# Widths are multiples of what a vector holds.
MULTIPLE = 16


@cache
def available() -> bool:
    """Whether the loops should run here, as far as that can be told without loading them."""
    return has_fma() and importlib.util.find_spec("numba") is not None and team.launcher() is not None


@cache
def _loops() -> Any:
    """The compiled loops; None where they turn out not to run, which is said once."""
    try:
        from encoder.compiled import attention, vectors
    except ImportError as error:
        logger.warning("encoding on this CPU is slower than it could be: numba cannot be loaded (%s)", error)
        return None
    if reason := vectors.obstacle():
        logger.warning("encoding on this CPU is slower than it could be: %s", reason)
        return None
    return attention


def serves(batch: PackedBatch, q: Tensor) -> bool:
    """Whether the loops can run on these numbers, and are worth it for a batch.

    Args:
        batch: The packed batch.
        q: Its queries or hidden states.
    """
    # What is traced, transformed or differentiated forward has no numbers, or has more than numbers. Asked first: a graph of any number
    # of tokens must not ask for it.
    if torch.compiler.is_compiling() or _is_traced() or not is_plain(q):
        return False
    worth = batch.steady or batch.num_tokens >= WORTHWHILE * torch.get_num_threads()
    return worth and available() and _loops() is not None


def _is_traced() -> bool:
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is nothing but numbers in this machine's memory."""
    wrapped = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", bool)
    if type(x) not in (Tensor, nn.Parameter) or x.device.type != "cpu" or x.layout != torch.strided or wrapped(x):
        return False
    return forward_ad.unpack_dual(x).tangent is None  # type: ignore[no-untyped-call]


def attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float
) -> Tensor:
    """Attention by compiled loops, float32 and without gradients; see `encoder.attention.attend` for the contract."""
    loops = _loops()
    del slopes, dropout  # the choice of the backend has seen to it that there are none
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    output = q.new_empty(q.shape)
    memo = ("sequences", window is not None)
    if memo not in batch.memo:
        lengths = np.asarray(batch.lengths, np.int64)
        seen = np.asarray(batch.key_lengths or batch.lengths, np.int64)
        batch.memo[memo] = loops.sequences(np.cumsum(lengths) - lengths, lengths, seen, local=window is not None)
    heads = np.array([(x.data_ptr(), x.stride(0), x.stride(1)) for x in (q, k, v, output)], np.int64)
    loops.attend(heads, batch.memo[memo], (q.shape[1], q.shape[2]), window)
    return output
