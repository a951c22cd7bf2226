"""FlashAttention over packed batches: PyTorch's own kernel and the flash-attn packages, behind one contract.

All of them take cu_seqlens and a window as (left, right) distances, both ends included, and never hold an n x n tensor. Where a sequence
has fewer keys than queries, they align windows and ALiBi's distances to the last key, not the first; so batches with
`PackedBatch.key_lengths` can use flash attention in global layers only.

Shapes: N packed tokens, H heads, K head width, B sequences.
Source: FlashAttention-2, arXiv:2307.08691; FlashAttention-3, arXiv:2407.08608.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quiver.encoder.packing import PackedBatch, copy_to

logger = logging.getLogger(__name__)

# Module of flash_attn_varlen_func in each generation of flash-attn.
PACKAGES = {
    "flash_attn_2": "flash_attn.flash_attn_interface",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_4": "flash_attn.cute.interface",
}


# Keyword arguments that each function is called with.
_NEEDED = {
    "flash_attn_2": ("dropout_p", "window_size", "alibi_slopes"),
    "flash_attn_3": ("window_size",),
    # flash-attn 2.8 contains an early flash_attn.cute without max_seqlen_*, and without a backward pass for sequences of different lengths.
    "flash_attn_4": ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "window_size"),
}


@cache
def package_function(name: str) -> Callable[..., Any] | None:
    """Return flash_attn_varlen_func of one of `PACKAGES`.

    None if it is not installed or, with a warning, if it cannot be loaded or lacks an argument.
    """
    module = PACKAGES[name]
    try:
        function: Callable[..., Any] = importlib.import_module(module).flash_attn_varlen_func
    except ModuleNotFoundError as error:
        if not error.name or not f"{module}.".startswith(f"{error.name}."):
            logger.warning("%s is installed, but one of its dependencies is missing: %s", module, error)
        return None
    except (ImportError, AttributeError) as error:  # built for another PyTorch, or another package of that name
        logger.warning("%s is installed, but cannot be used: %s", module, error)
        return None
    if lacking := _lacking(function, _NEEDED[name]):
        logger.warning("%s is installed, but this release does not accept %s; another attention kernel is used", module, ", ".join(lacking))
        return None
    return function


def _lacking(function: Callable[..., Any], needed: Sequence[str]) -> list[str]:
    """Return the arguments that a function does not accept by name; empty if its signature cannot be read."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return []
    return [name for name in needed if name not in parameters]


@cache
def installed() -> frozenset[str]:
    """Return the backends of this module that are installed, whatever the device."""
    names = {name for name in PACKAGES if package_function(name) is not None}
    if torch.version.hip is None and torch.backends.cuda.is_flash_attention_available():
        names.add("aten_flash")
    return frozenset(names)


class Keys(NamedTuple):
    """Packed keys and values, and the borders of queries and keys."""

    k: Tensor
    v: Tensor
    borders: tuple[Tensor, Tensor, int, int]
    """Borders of the sequences of queries and of keys, (B + 1,) each, and the length of the longest of both."""


def readable(k: Tensor, v: Tensor, batch: PackedBatch) -> Keys:
    """Return the leading tokens of each sequence that can be attended to.

    Does not synchronize with the device: indices and borders are built on the host once per batch.
    """
    if batch.key_lengths is None:
        return Keys(k, v, (batch.cu_seqlens, batch.cu_seqlens, batch.max_seqlen, batch.max_seqlen))
    if "keys" not in batch.memo:
        with torch.inference_mode(False):  # tensors made in inference mode could not be used in training
            starts = batch.offsets[:-1]
            places = torch.cat([torch.arange(start, start + keys) for start, keys in zip(starts, batch.key_lengths, strict=True)])
            borders = torch.tensor((0, *batch.key_lengths)).cumsum(0).to(torch.int32)
            batch.memo["keys"] = copy_to(k.device, places, borders)
    places, borders = batch.memo["keys"]
    return Keys(k[places], v[places], (batch.cu_seqlens, borders, batch.max_seqlen, max(batch.key_lengths)))


def _sides(window: int | None) -> tuple[int, int]:
    """Return a window as flash attention counts it: distances to the left and right, -1 for no limit."""
    return (-1, -1) if window is None else (window // 2, window // 2)


def attend_aten_flash(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float
) -> Tensor:
    """PyTorch's flash kernel, called without the Python layer of varlen_attn; see `quiver.encoder.attention.attend`.

    PyTorch builds it without ALiBi, although the operator has an argument for it.
    """
    del slopes
    keys = readable(k, v, batch)
    left, right = _sides(window)
    output: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        keys.k,
        keys.v,
        *keys.borders,
        dropout,
        False,  # causal
        False,  # return the dropout mask
        window_size_left=left,
        window_size_right=right,
    )[0]
    return output


def _package(name: str) -> Callable[..., Any]:
    function = package_function(name)
    if function is None:
        raise ValueError(f"attention backend {name} needs the module {PACKAGES[name]}, which is not installed")
    return function


def attend_flash_attn_2(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float
) -> Tensor:
    """flash-attn 2, the one with ALiBi; see `quiver.encoder.attention.attend`."""
    keys = readable(k, v, batch)
    output: Tensor = _package("flash_attn_2")(
        q,
        keys.k,
        keys.v,
        *keys.borders,
        dropout_p=dropout,
        window_size=_sides(window),
        alibi_slopes=None if slopes is None else slopes.float(),
    )
    return output


def attend_flash_attn_3(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float
) -> Tensor:
    """flash-attn 3, for Hopper; see `quiver.encoder.attention.attend`."""
    del slopes, dropout
    keys = readable(k, v, batch)
    return _first(_package("flash_attn_3")(q, keys.k, keys.v, *keys.borders, window_size=_sides(window)))


def attend_flash_attn_4(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float
) -> Tensor:
    """flash-attn 4, for Hopper and Blackwell, compiled at its first call; see `quiver.encoder.attention.attend`."""
    del slopes, dropout
    keys = readable(k, v, batch)
    # By keyword: their order changed between releases.
    borders = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), keys.borders, strict=True))
    output = _package("flash_attn_4")(q, keys.k, keys.v, **borders, window_size=(None, None) if window is None else _sides(window))
    return _first(output)


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the output alone: some releases return log-sum-exps beside it."""
    return output[0] if isinstance(output, tuple) else output
