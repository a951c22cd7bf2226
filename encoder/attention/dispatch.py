"""Which way attention is computed: the one place where that is decided.

Shapes: N packed tokens, H heads, K head width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from encoder.attention.packed import attend_packed
from encoder.attention.reference import attend_reference
from encoder.packing import PackedBatch

logger = logging.getLogger(__name__)

Backend = Callable[[Tensor, Tensor, Tensor, PackedBatch, "int | None", float], Tensor]

BACKENDS: dict[str, Backend] = {"packed": attend_packed, "reference": attend_reference}


@cache
def choose_backend(device_type: str, dtype: torch.dtype) -> str:
    """Name of the backend for tensors of this kind of device and dtype; the choice is logged once."""
    name = "packed"  # its blocks run everywhere
    logger.info("attention on %s in %s: %s", device_type, str(dtype).removeprefix("torch."), name)
    return name


def attend(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, *, dropout: float = 0.0, backend: str | None = None
) -> Tensor:
    """Softmax attention of each sequence of a packed batch with itself, scaled by K ** -0.5.

    Args:
        q: Queries, (N, H, K).
        k: Keys, (N, H, K).
        v: Values, (N, H, K).
        batch: Where the sequences begin and end, and which tokens may be attended to.
        window: A token sees |i - j| <= window // 2, both ends included; None for the whole sequence.
        dropout: Probability of dropping an attention weight.
        backend: A key of `BACKENDS`; by default the one for the tensors' device and dtype.

    Returns:
        (N, H, K). A token that may see nothing gets zeros.

    Raises:
        ValueError: The backend is unknown.
    """
    name = backend or choose_backend(q.device.type, q.dtype)
    if name not in BACKENDS:
        raise ValueError(f"attention backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name](q, k, v, batch, window, dropout)
