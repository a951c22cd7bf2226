"""Queries, keys and values as parts of one packed product, (N, 3, H, K), whose gradient need not be copied together.

Shapes: N packed tokens, H heads, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def empty_qkv(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate gradients of queries, keys and values, each shaped like ``like`` (N, H, K), which `join_qkv` need not copy."""
    q, k, v = like.new_empty(len(like), 3, *like.shape[1:]).unbind(1)
    return q, k, v


def is_packed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether three tensors (N, H, K) are the parts of one tensor (N, 3, H, K), such as those of `empty_qkv`."""
    heads, width = q.shape[1:]
    size = heads * width
    starts = [part.storage_offset() - q.storage_offset() for part in (q, k, v)]
    same = len({part.untyped_storage()._cdata for part in (q, k, v)}) == 1
    return same and starts == [0, size, 2 * size] and {q.stride(), k.stride(), v.stride()} == {(3 * size, width, 1)}


def join_qkv(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Join three tensors (N, H, K) to (N, 3, H, K): the tensor that they are parts of, otherwise a copy."""
    if not is_packed(q, k, v):
        return torch.stack((q, k, v), dim=1)
    heads, width = q.shape[1:]
    size = heads * width
    return q.as_strided((len(q), 3, heads, width), (3 * size, size, width, 1))
