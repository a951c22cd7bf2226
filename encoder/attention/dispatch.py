"""Which way attention is computed: the one place where that is decided.

Shapes: N packed tokens, H heads, K head width.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from quiver.encoder.attention import compiled, flash
from quiver.encoder.attention.packed import attend_packed
from quiver.encoder.attention.reference import attend_padded, attend_reference
from quiver.encoder.cpu.availability import MULTIPLE, pairs_run
from quiver.encoder.errors import InputError
from quiver.encoder.packing import PackedBatch, PaddedBatch

logger = logging.getLogger(__name__)

VARIABLE = "QUIVER_ATTENTION"
"""Environment variable that names the backend to use where it can be used."""

Backend = Callable[[Tensor, Tensor, Tensor, PackedBatch, "int | None", "Tensor | None", float], Tensor]

BACKENDS: dict[str, Backend] = {
    "varlen": flash.attend_varlen,
    "aten_flash": flash.attend_aten_flash,
    "flash_attn_2": flash.attend_flash_attn_2,
    "flash_attn_3": flash.attend_flash_attn_3,
    "flash_attn_4": flash.attend_flash_attn_4,
    "dense": flash.attend_dense,
    "compiled": compiled.attend_compiled,
    "packed": attend_packed,
    "reference": attend_reference,
}

# The first that can is taken, packed where none can. Torch's kernels need no package and are flash-attn 2 themselves;
# 3 and 4 are faster on the processors they are made for, and 2 has ALiBi. Without gradients the operator is called
# without varlen_attn's layer around it, which costs a kernel and some host time a call.
TRAINING = ("flash_attn_4", "varlen", "aten_flash", "flash_attn_2", "compiled")
INFERENCE = ("flash_attn_4", "flash_attn_3", "aten_flash", "flash_attn_2", "compiled")


class AttentionCall(NamedTuple):
    """What the choice of a backend depends on, and nothing else."""

    device_type: str
    dtype: torch.dtype
    head_width: int = 64
    capability: tuple[int, int] = (0, 0)
    """CUDA's compute capability."""
    gradients: bool = False
    dropout: bool = False
    slopes: bool = False
    """ALiBi."""
    key_lengths: bool = False
    """Some tokens only read."""
    local: bool = False
    """There is a window, and a sequence that it does not span."""
    equal_lengths: bool = False
    installed: frozenset[str] = frozenset()
    """Which of `LIMITS` are there and worth it: what `encoder.attention.flash.installed` says on CUDA, `compiled.is_supported` on a CPU."""


@dataclass(frozen=True)
class Limits:
    """What a backend can do.

    Source: the checks of the kernels' own entry points (torch 2.11, flash-attn 2.8, 3.0 and 4.0.0b).
    """

    device: str = "cuda"
    """Where it runs."""
    absent: str = "it is not installed"
    """Why it may be missing there."""
    capability: tuple[int, int] = (8, 0)
    """CUDA's least."""
    beyond: tuple[int, int] = (99, 0)
    """The first that is no longer served."""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    multiple: int = 16
    """Heads are multiples of so many bytes wide."""
    widest: int = 256
    widest_gradient: int = 192
    """Widest head in training: above it some processors lack the memory for the backward pass."""
    gradients: bool = True
    dropout: bool = False
    slopes: bool = False
    local: bool = True
    key_lengths: bool = True
    placed_key_lengths: bool = False
    """Windows or ALiBi where there are fewer keys than queries: flash attention aligns distances to the last key then."""
    mixed_lengths: bool = True


LIMITS = {
    "varlen": Limits(),
    "aten_flash": Limits(dropout=True),
    "flash_attn_2": Limits(dropout=True, slopes=True),
    # What its builds have in common: those on PyPI leave out the backward pass, windows or float16.
    "flash_attn_3": Limits(capability=(9, 0), beyond=(10, 0), dtypes=(torch.bfloat16,), gradients=False, local=False),
    "flash_attn_4": Limits(capability=(9, 0), beyond=(12, 0), widest=128, widest_gradient=128),
    "dense": Limits(dropout=True, local=False, key_lengths=False, mixed_lengths=False),
    "compiled": Limits(
        device="cpu",
        absent="few tokens, or no numba, OpenMP threads, fused multiplications or, for inference in bfloat16, fast products of pairs here",
        capability=(0, 0),
        dtypes=(torch.float32, torch.bfloat16),
        multiple=MULTIPLE * torch.float32.itemsize,
        widest_gradient=256,
        placed_key_lengths=True,
    ),
}


def unsupported_reason(name: str, call: AttentionCall) -> str | None:
    """Why a backend cannot serve a call, in a few words; None where it can."""
    limits = LIMITS.get(name)
    if limits is None:  # packed and reference run everywhere
        return None
    widest = limits.widest_gradient if call.gradients else limits.widest
    width, multiple = call.head_width, limits.multiple // call.dtype.itemsize
    reasons = {
        f"it needs a {limits.device.upper()} device": call.device_type != limits.device,
        limits.absent: name not in call.installed,
        f"compute capability {'.'.join(map(str, call.capability))}": not limits.capability <= call.capability < limits.beyond,
        f"dtype {str(call.dtype).removeprefix('torch.')}": call.dtype not in limits.dtypes,
        f"head width {width} (multiples of {multiple} to {widest})": width % multiple != 0 or width > widest,
        "gradients": call.gradients and not limits.gradients,
        "dropout": call.dropout and not limits.dropout,
        "ALiBi": call.slopes and not limits.slopes,
        "windows": call.local and not limits.local,
        "tokens that only read": call.key_lengths and not limits.key_lengths,
        "windows or ALiBi with tokens that only read": call.key_lengths and (call.local or call.slopes) and not limits.placed_key_lengths,
        "unequal lengths": not call.equal_lengths and not limits.mixed_lengths,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


@cache
def choose_backend(call: AttentionCall, override: str | None = None) -> str:
    """Name of the backend for a kind of call; each choice is logged once, with what stood in the way of a better one.

    Args:
        call: What the choice depends on.
        override: A key of `BACKENDS` to take where it can serve the call.

    Raises:
        InputError: The override is no backend.

    Example:
        >>> choose_backend(AttentionCall("cpu", torch.float32))
        'packed'
        >>> here = dict(capability=(9, 0), installed=frozenset({"varlen", "aten_flash"}))
        >>> choose_backend(AttentionCall("cuda", torch.bfloat16, **here))
        'aten_flash'
        >>> choose_backend(AttentionCall("cuda", torch.bfloat16, gradients=True, **here))
        'varlen'
    """
    if override is not None and override not in BACKENDS:
        raise InputError(f"{VARIABLE} must be one of {', '.join(BACKENDS)}, got {override!r}")
    order = TRAINING if call.gradients else INFERENCE
    names: list[str] = [*([override] if override else []), *order, "packed"]
    name = next(candidate for candidate in names if unsupported_reason(candidate, call) is None)
    if override and name != override:
        logger.warning("%s=%s cannot serve this attention (%s): %s does", VARIABLE, override, unsupported_reason(override, call), name)
    elif call.device_type == "cuda" and name == "packed" and override is None:
        logger.info("%s: packed (no flash attention: %s)", _words(call), unsupported_reason("aten_flash", call))
    else:
        logger.info("%s: %s", _words(call), name)
    return name


def _words(call: AttentionCall) -> str:
    words = [name.replace("_", " ") for name in ("gradients", "dropout", "slopes", "key_lengths", "local") if getattr(call, name)]
    kind = f"attention on {call.device_type} in {str(call.dtype).removeprefix('torch.')}, head width {call.head_width}"
    return ", ".join((kind, *words))


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def describe(
    q: Tensor, batch: PackedBatch, *, window: int | None = None, slopes: Tensor | None = None, dropout: float = 0.0, gradients: bool = False
) -> AttentionCall:
    """The call that `attend` would make on these tensors."""
    cuda = q.device.type == "cuda"
    return AttentionCall(
        device_type=q.device.type,
        dtype=q.dtype,
        head_width=q.shape[-1],
        capability=_capability(q.device) if cuda else (0, 0),
        gradients=gradients,
        dropout=dropout > 0,
        slopes=slopes is not None,
        key_lengths=batch.key_lengths is not None,
        local=window is not None,
        equal_lengths=batch.max_seqlen * len(batch) == batch.num_tokens,
        installed=flash.installed() if cuda else _installed(q, batch, gradients=gradients),
    )


def _installed(q: Tensor, batch: PackedBatch, *, gradients: bool) -> frozenset[str]:
    """What can be used on a CPU, and is worth it."""
    paired = q.dtype == torch.bfloat16 and not gradients  # with them it is brought to float32
    return frozenset({"compiled"} if compiled.is_supported(batch, q) and (not paired or pairs_run()) else ())


def best_dtype(q: Tensor, batch: PackedBatch, slopes: Tensor | None) -> torch.dtype:
    """In which dtype heads are attended to best on a CPU without gradients: at least float32, or their own if compiled loops have it.

    Processors that do not multiply half precision faster gain nothing from it.

    Args:
        q: Numbers in their place, (N, H, K).
        batch: The packed batch.
        slopes: ALiBi's, if there are any.
    """
    override = os.environ.get(VARIABLE)
    narrow = override in (None, "compiled")
    reason = unsupported_reason("compiled", describe(q, batch, slopes=slopes)) if narrow else f"{VARIABLE}={override}"
    dtype = q.dtype if reason is None else torch.promote_types(q.dtype, torch.float32)
    if dtype != q.dtype:
        _note_dtype(dtype, q.dtype, reason)
    return dtype


@cache
def _note_dtype(dtype: torch.dtype, given: torch.dtype, reason: str) -> None:
    logger.info("attention on cpu in %s for states in %s (%s)", *(str(each).removeprefix("torch.") for each in (dtype, given)), reason)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PackedBatch | PaddedBatch,
    window: int | None,
    *,
    slopes: Tensor | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention of each sequence of a packed batch with itself, scaled by K ** -0.5.

    Args:
        q: Queries, (N, H, K).
        k: Keys, (N, H, K).
        v: Values, (N, H, K).
        batch: Where the sequences begin and end, and which tokens may be attended to; padded where a graph is made for
            other programs, which drops nothing out and takes no backend.
        window: A token sees |i - j| <= window // 2, both ends included; None for the whole sequence.
        slopes: ALiBi's slope of each head, (H,): a score loses slope * |i - j|; None without ALiBi.
        dropout: Probability of dropping an attention weight; packed on a CPU takes it to the nearest multiple of 1/256, as flash
            attention does, for global layers of texts that are not all short.
        backend: A key of `BACKENDS`; by default the environment variable QUIVER_ATTENTION where that backend can
            serve the call, else the best one that can.

    Returns:
        (N, H, K). A token that may see nothing gets zeros.

    Raises:
        ValueError: ``backend`` is unknown or cannot serve the call; says why.
        InputError: The environment variable names no backend.
    """
    if isinstance(batch, PaddedBatch):
        return attend_padded(q, k, v, batch, window, slopes)
    if window is not None and batch.max_seqlen - 1 <= window // 2:
        window = None  # every distance fits: local and global are the same, and global needs no mask
    gradients = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    call = describe(q, batch, window=window, slopes=slopes, dropout=dropout, gradients=gradients)
    if backend is None:
        backend = choose_backend(call, os.environ.get(VARIABLE))
    elif backend not in BACKENDS:
        raise ValueError(f"attention backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    elif reason := unsupported_reason(backend, call):
        raise ValueError(f"attention backend {backend} cannot serve this call: {reason}")
    return BACKENDS[backend](q, k, v, batch, window, slopes, dropout)
