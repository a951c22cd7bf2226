"""FlashAttention over packed batches: PyTorch's own kernel and the flash-attn packages, behind one contract.

All of them take cu_seqlens and a window as (left, right) distances, both ends included, and never hold an n x n tensor. Where a sequence
has fewer keys than queries (`PackedBatch.key_lengths`), they align windows and ALiBi's distances to the last key. The attended tokens come
first, so their distances count from the first key. Such sequences are therefore reversed: the last key is then the first token, and as
windows and ALiBi are symmetric, every distance is right. Global layers without ALiBi have no distances and keep their order.

Shapes: N packed tokens, H heads, K head width, B sequences.
Source: FlashAttention-2, arXiv:2307.08691; FlashAttention-3, arXiv:2407.08608; the alignment: flash_attn_varlen_func of flash-attn 2.8.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from quiver.encoder.packing import PackedBatch, copy_to, effective_window

logger = logging.getLogger(__name__)

Integers = NDArray[np.int64]

# Module of flash_attn_varlen_func in each generation of flash-attn.
PACKAGES = {
    "flash_attn_2": "flash_attn.flash_attn_interface",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_4": "flash_attn.cute.interface",
}

# Keyword arguments that each function is called with; without "deterministic" there is no deterministic backward pass.
_NEEDED = {
    "flash_attn_2": ("softmax_scale", "window_size", "dropout_p", "alibi_slopes"),
    "flash_attn_3": ("softmax_scale", "window_size"),
    # flash-attn 2.8 contains an early flash_attn.cute without max_seqlen_*, and without a backward pass for sequences of different lengths.
    "flash_attn_4": ("softmax_scale", "window_size", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
}

DETERMINISTIC = "deterministic gradients"
# What a build of flash-attn 3 leaves out, by the flags that its setup.py writes into the module flash_attn_config.
_BUILD_FLAGS = {"BACKWARD": "gradients", "LOCAL": "windows", "FP16": "dtype float16", "VARLEN": "sequences of different lengths"}


@cache
def package_function(name: str) -> Callable[..., Any] | None:
    """Return flash_attn_varlen_func of one of `PACKAGES`; None if it is not installed or, with a warning, cannot be used."""
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
    if lacking := [argument for argument in _NEEDED[name] if not _accepts(function, argument)]:
        logger.warning("%s is installed, but this release does not accept %s; another attention kernel is used", module, ", ".join(lacking))
        return None
    return function


def _accepts(function: Callable[..., Any], argument: str) -> bool:
    """Return whether a function accepts an argument by name; true if its signature cannot be read."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return argument in parameters or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


@cache
def installed() -> frozenset[str]:
    """Return the backends of this module that are installed, whatever the device."""
    names = {name for name in PACKAGES if package_function(name) is not None}
    if torch.version.hip is None and torch.backends.cuda.is_flash_attention_available():
        names.add("aten_flash")
    return frozenset(names)


@cache
def missing() -> frozenset[tuple[str, str]]:
    """Return what the installed releases and builds lack, as (backend, feature): older releases, and builds for inference only."""
    found = set()
    for name in installed() & PACKAGES.keys():
        function = package_function(name)
        if function is not None and not _accepts(function, "deterministic"):
            found.add((name, DETERMINISTIC))
    if "flash_attn_3" in installed():
        try:
            flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
        except (ImportError, AttributeError, KeyError):  # of before its setup.py wrote that down, whose default is to leave nothing out
            flags = {}
        found |= {("flash_attn_3", feature) for flag, feature in _BUILD_FLAGS.items() if flags.get(f"FLASHATTENTION_DISABLE_{flag}")}
    return frozenset(found)


class KernelCall(NamedTuple):
    """The arguments of a kernel beside queries, keys and values."""

    borders: tuple[Tensor, Tensor, int, int]
    """Borders of the sequences of queries and of keys, (B + 1,) int32 each, and the length of the longest of both."""
    scale: float  # factor of the scores
    window: int | None = None
    slopes: Tensor | None = None  # ALiBi's slope of each head, (H,) float32
    dropout: float = 0.0

    @property
    def sides(self) -> tuple[int, int]:
        """The window as flash attention counts it: distances to the left and right, -1 for no limit."""
        return (-1, -1) if self.window is None else (self.window // 2, self.window // 2)


def _aten_flash(q: Tensor, k: Tensor, v: Tensor, call: KernelCall) -> Tensor:
    """PyTorch's kernel, which is flash-attn 2 without ALiBi, called without the Python layer of varlen_attn."""
    left, right = call.sides
    output: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        *call.borders,
        call.dropout,
        False,  # causal
        False,  # return the dropout mask
        scale=call.scale,
        window_size_left=left,
        window_size_right=right,
    )[0]
    return output


def deterministic_is_requested() -> bool:
    """Return whether torch's deterministic mode demands deterministic gradients (with ``warn_only`` it does not)."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _call_package(name: str, q: Tensor, k: Tensor, v: Tensor, call: KernelCall) -> Tensor:
    """One generation of flash-attn; 2 is the one with ALiBi and dropout, 3 is for Hopper, 4 for Hopper and Blackwell."""
    function = package_function(name)
    if function is None:
        raise ValueError(f"attention backend {name} needs the module {PACKAGES[name]}, which is not installed")
    # By keyword: their order changed between releases.
    options: dict[str, Any] = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), call.borders, strict=True))
    options |= {"softmax_scale": call.scale, "window_size": call.sides}
    if name == "flash_attn_2":
        options |= {"dropout_p": call.dropout, "alibi_slopes": call.slopes}
    if name == "flash_attn_4" and call.window is None:
        options["window_size"] = (None, None)
    if deterministic_is_requested():
        options["deterministic"] = True
    output = function(q, k, v, **options)
    found: Tensor = output[0] if isinstance(output, tuple) else output  # some releases return log-sum-exps beside it
    return found


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, KernelCall], Tensor]] = {
    "aten_flash": _aten_flash,
    "flash_attn_2": partial(_call_package, "flash_attn_2"),
    "flash_attn_3": partial(_call_package, "flash_attn_3"),
    "flash_attn_4": partial(_call_package, "flash_attn_4"),
}

# The kernels copy 16 bytes at a time: heads of other widths, of some small BERTs, are padded.
_WIDTH_MULTIPLE = 8


def attend_flash(
    name: str, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float
) -> Tensor:
    """Flash attention by one of `KERNELS`; see `quiver.encoder.attention.attend` for the contract."""
    width = q.shape[-1]
    if width % _WIDTH_MULTIPLE:
        q, k, v = (F.pad(x, (0, -width % _WIDTH_MULTIPLE)) for x in (q, k, v))
    slopes = None if slopes is None else slopes.float()
    borders = (batch.cu_seqlens, batch.cu_seqlens, batch.max_seqlen, batch.max_seqlen)
    call = KernelCall(borders, width**-0.5, window, slopes, dropout)
    mixed = KERNELS[name](q, k, v, call) if batch.key_lengths is None else _attend_parts(KERNELS[name], q, k, v, _find_parts(batch), call)
    return mixed[..., :width] if width % _WIDTH_MULTIPLE else mixed


@dataclass(frozen=True)
class Part:
    """Neighbouring sequences of a batch with `PackedBatch.key_lengths`."""

    tokens: int  # number of their tokens, n
    borders: tuple[Tensor, Tensor, int, int]  # as in `KernelCall`
    reverse: Tensor | None = None
    """Permutation that reverses the tokens of each sequence, and so its own inverse, (n,); None if all tokens are attended to."""
    keys: Tensor | None = None  # the attended tokens of each reversed sequence, indices of tokens; None if all are


_PARTS = "flash_parts"


@torch.inference_mode(False)  # tensors made in inference mode could not be used in training
def _find_parts(batch: PackedBatch) -> list[Part]:
    """Return the sequences before, from and after those with unattended tokens; built on the host once per batch."""
    if _PARTS in batch.memo:
        known: list[Part] = batch.memo[_PARTS]
        return known
    lengths, attended = np.asarray(batch.lengths), np.asarray(batch.key_lengths or batch.lengths)
    [shorter] = np.nonzero(attended < lengths)
    bounds = (0, int(shorter[0]), int(shorter[-1]) + 1, len(batch))

    def moved(*numbers: Integers) -> list[Tensor]:
        return copy_to(batch.ids.device, *map(torch.from_numpy, numbers))

    parts = []
    for number, (first, last) in enumerate(pairwise(bounds)):
        if first == last:
            continue
        offsets = np.asarray(batch.offsets[first : last + 1]) - batch.offsets[first]
        tokens, longest = int(offsets[-1]), int(lengths[first:last].max())
        if number != 1:
            [borders] = moved(offsets.astype(np.int32))
            parts.append(Part(tokens, (borders, borders, longest, longest)))
            continue
        counts = attended[first:last]
        reverse, keys, key_offsets = reversal(lengths[first:last], counts)
        borders, key_borders, *places = moved(offsets.astype(np.int32), key_offsets.astype(np.int32), reverse, keys)
        # Not the greatest number of keys: flash-attn 2 ignores a side of the window that is not below it, though queries may be farther.
        parts.append(Part(tokens, (borders, key_borders, longest, longest), *places))
    batch.memo[_PARTS] = parts
    return parts


def reversal(lengths: Integers, attended: Integers) -> tuple[Integers, Integers, Integers]:
    """Return the permutation that reverses each of B neighbouring sequences, (n,), their attended tokens in that order, and the borders.

    Example:
        >>> [x.tolist() for x in reversal(np.array([3, 2]), np.array([2, 1]))]
        [[2, 1, 0, 4, 3], [1, 0, 3], [0, 2, 3]]
    """
    starts = lengths.cumsum() - lengths
    # Token i of a sequence from a to b moves to a + b - 1 - i. The attended tokens are the last of the reversed sequence.
    reverse = np.repeat(2 * starts + lengths - 1, lengths) - np.arange(lengths.sum())
    borders = np.concatenate(([0], attended.cumsum()))
    keys = np.repeat(starts + attended - 1 + borders[:-1], attended) - np.arange(borders[-1])
    return reverse, keys, borders


def with_part(batch: PackedBatch, part: Part) -> PackedBatch:
    """Return a batch with unattended tokens that attention reads from one part, whatever its lengths on the host."""
    return replace(batch, key_lengths=batch.lengths, memo={_PARTS: [part]})


def _attend_parts(kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, parts: list[Part], call: KernelCall) -> Tensor:
    outputs = []
    # One split instead of a slice per part: the backward of a slice is a full tensor of zeros, that of the split one concatenation.
    pieces = zip(*(torch.split(x, [part.tokens for part in parts]) for x in (q, k, v)), strict=True)
    for part, (query, key, value) in zip(parts, pieces, strict=True):
        window = effective_window(part.borders[2], call.window)
        own = call._replace(borders=part.borders, window=window)
        if part.keys is None or part.reverse is None:
            outputs.append(kernel(query, key, value, own))
            continue
        key, value = _take(key, part.keys), _take(value, part.keys)
        if window is None and call.slopes is None:
            outputs.append(kernel(query, key, value, own))
        else:
            outputs.append(_take(kernel(_take(query, part.reverse), key, value, own), part.reverse))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """Return the given rows, each at most once."""
    taken: Tensor = _Take.apply(x, rows)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return taken


class _Take(torch.autograd.Function):
    """Rows that are taken at most once: their gradients are copied. Indexing would sort the rows to add gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.rows, ctx.size = rows, len(x)
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.size, *gradient.shape[1:]).index_copy_(0, ctx.rows, gradient), None
