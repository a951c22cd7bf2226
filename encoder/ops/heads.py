"""Queries, keys and values as thirds of one product, and their gradients as thirds of one tensor.

Shapes: N packed tokens, H heads, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def thirds(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(N, 3, H, K) to queries, keys and values, (N, H, K) each: views."""
    if qkv.device.type == "cpu" and qkv.requires_grad and not torch.compiler.is_compiling():
        views: tuple[Tensor, Tensor, Tensor] = _Thirds.apply(qkv)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return views
    q, k, v = qkv.unbind(1)
    return q, k, v


class _Thirds(torch.autograd.Function):
    """Unbinding whose gradient is not copied where attention has laid it out as it is wanted here."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> tuple[Tensor, ...]:
        del ctx
        return qkv.unbind(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        return joined(*gradients)


def room_for_thirds(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the gradients of queries, keys and values, each shaped as ``like`` (N, H, K), that `joined` need not copy."""
    q, k, v = like.new_empty(len(like), 3, *like.shape[1:]).unbind(1)
    return q, k, v


def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three tensors (N, H, K) as one (N, 3, H, K): the one they are thirds of, or else a copy.

    Example:
        >>> parts = room_for_thirds(torch.empty(2, 4, 8))
        >>> joined(*parts).data_ptr() == parts[0].data_ptr(), joined(*(part.clone() for part in parts)).shape
        (True, torch.Size([2, 3, 4, 8]))
    """
    heads, width = q.shape[1:]
    size = heads * width
    starts = [part.storage_offset() - q.storage_offset() for part in (q, k, v)]
    storages = {part.untyped_storage().data_ptr() for part in (q, k, v)}
    if len(storages) == 1 and starts == [0, size, 2 * size] and {q.stride(), k.stride(), v.stride()} == {(3 * size, width, 1)}:
        return q.as_strided((len(q), 3, heads, width), (3 * size, size, width, 1))
    return torch.stack((q, k, v), dim=1)
