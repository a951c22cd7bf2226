"""The choice of the attention backend, made in this one place.

Shapes: N packed tokens, H heads, K head width.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from quiver.encoder.attention import flash
from quiver.encoder.attention.packed import attend_packed
from quiver.encoder.attention.reference import attend_padded, attend_reference
from quiver.encoder.cpu.attention import attend_compiled
from quiver.encoder.cpu.attention import is_supported as compiled_is_supported
from quiver.encoder.cpu.kernels import bfloat16_kernels_run
from quiver.encoder.cpu.support import WIDTH_MULTIPLE
from quiver.encoder.errors import InputError
from quiver.encoder.packing import PackedBatch, PaddedBatch, effective_window

logger = logging.getLogger(__name__)

VARIABLE = "QUIVER_ATTENTION"
"""Environment variable that names the backend to use where it supports the call."""

Backend = Callable[[Tensor, Tensor, Tensor, PackedBatch, "int | None", "Tensor | None", float], Tensor]

BACKENDS: dict[str, Backend] = {
    **{name: partial(flash.attend_flash, name) for name in flash.KERNELS},
    "compiled": attend_compiled,
    "packed": attend_packed,
    "reference": attend_reference,
}

# The first backend that supports a call is taken; packed if none does. PyTorch's own flash kernel needs no package and is flash-attn 2
# itself; 3 and 4 are faster on the GPUs they are made for, and the package of 2 has ALiBi.
ORDER = ("flash_attn_4", "flash_attn_3", "aten_flash", "flash_attn_2", "compiled")


class AttentionCall(NamedTuple):
    """Everything that the choice of a backend depends on."""

    device_type: str
    dtype: torch.dtype
    head_width: int = 64
    capability: tuple[int, int] = (0, 0)
    """Compute capability of the CUDA device."""
    gradients: bool = False
    dropout: bool = False
    slopes: bool = False
    """Whether the call has ALiBi."""
    key_lengths: bool = False
    """Whether some tokens attend to others but are not attended to."""
    local: bool = False
    """Whether there is a window shorter than a sequence."""
    deterministic: bool = False
    """Whether gradients must be equal in every run."""
    installed: frozenset[str] = frozenset()
    """The keys of `LIMITS` that are installed and worth using here: `flash.installed` on CUDA, ``compiled`` on a CPU."""
    missing: frozenset[tuple[str, str]] = frozenset()
    """What their releases and builds lack: `flash.missing` on CUDA."""


@dataclass(frozen=True)
class BackendLimits:
    """What a backend supports, by the checks in the kernels' own entry points (torch 2.11, flash-attn 2.8, 3.0 and 4.0.0b)."""

    device: str = "cuda"
    """Device type."""
    absent: str = "it is not installed"
    """Why the backend may be unavailable on that device."""
    capability: tuple[int, int] = (8, 0)
    """Lowest CUDA compute capability."""
    beyond: tuple[int, int] = (99, 0)
    """First CUDA compute capability that is no longer supported."""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    multiple: int | None = None
    """The width of a head must be a multiple of this many bytes; None for any width."""
    widest: int = 256
    widest_gradient: int = 192
    """Widest head in training: with wider ones some GPUs lack the memory for the backward pass."""
    dropout: bool = False
    slopes: bool = False
    empty_query_blocks: bool = True
    """Whether a window may leave a whole block of queries without a key, as it does where many tokens are not attended to."""


LIMITS = {
    "aten_flash": BackendLimits(dropout=True),
    "flash_attn_2": BackendLimits(dropout=True, slopes=True),
    "flash_attn_3": BackendLimits(capability=(9, 0), beyond=(10, 0)),
    # For a block of queries that sees no key, 4.0.0b36 loads the first keys and masks them as if they were others (flash_fwd_sm90.py).
    "flash_attn_4": BackendLimits(capability=(9, 0), beyond=(12, 0), widest=128, widest_gradient=128, empty_query_blocks=False),
    "compiled": BackendLimits(
        device="cpu",
        absent="too few tokens, or no numba, OpenMP threads, fused multiply-add or (for bfloat16 inference) fast bfloat16 products here",
        capability=(0, 0),
        dtypes=(torch.float32, torch.bfloat16),
        multiple=WIDTH_MULTIPLE * torch.float32.itemsize,
        widest_gradient=256,
    ),
}


def unsupported_reason(name: str, call: AttentionCall) -> str | None:
    """Say in a few words why a backend does not support a call; None if it does."""
    limits = LIMITS.get(name)
    if limits is None:  # packed and reference support every call
        return None
    widest = limits.widest_gradient if call.gradients else limits.widest
    width, multiple = call.head_width, (limits.multiple or call.dtype.itemsize) // call.dtype.itemsize
    widths = f"multiples of {multiple} to {widest}" if limits.multiple else f"up to {widest}"
    reasons = {
        f"it needs a {limits.device.upper()} device": call.device_type != limits.device,
        limits.absent: name not in call.installed,
        f"compute capability {'.'.join(map(str, call.capability))}": not limits.capability <= call.capability < limits.beyond,
        f"dtype {str(call.dtype).removeprefix('torch.')}": call.dtype not in limits.dtypes,
        f"head width {width} ({widths})": width % multiple != 0 or width > widest,
        "dropout": call.dropout and not limits.dropout,
        "ALiBi": call.slopes and not limits.slopes,
        "windows with key lengths": call.key_lengths and call.local and not limits.empty_query_blocks,
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), None):
        return reason
    needed = {
        "gradients": call.gradients,
        flash.DETERMINISTIC: call.gradients and call.deterministic,
        "windows": call.local,
        f"dtype {str(call.dtype).removeprefix('torch.')}": True,
        "sequences of different lengths": True,
    }
    return next((f"this build has no {feature}" for feature, needs in needed.items() if needs and (name, feature) in call.missing), None)


@cache
def choose_backend(call: AttentionCall, override: str | None = None) -> str:
    """Choose the backend for a kind of call; each choice is logged once, with the reason why a better one was not possible.

    Example:
        >>> choose_backend(AttentionCall("cuda", torch.bfloat16, capability=(9, 0), installed=frozenset({"aten_flash"})))
        'aten_flash'
    """
    if override is not None and override not in BACKENDS:
        raise InputError(f"{VARIABLE} must be one of {', '.join(BACKENDS)}, got {override!r}")
    names: list[str] = [*([override] if override else []), *ORDER, "packed"]
    name = next(candidate for candidate in names if unsupported_reason(candidate, call) is None)
    if override and name != override:
        logger.warning("%s=%s does not support this attention (%s); using %s", VARIABLE, override, unsupported_reason(override, call), name)
    elif call.device_type == "cuda" and name == "packed" and override is None:
        logger.info(
            "%s: using packed, because flash attention is not usable (%s)", _describe_call(call), unsupported_reason("aten_flash", call)
        )
    else:
        logger.info("%s: using %s", _describe_call(call), name)
    return name


def _describe_call(call: AttentionCall) -> str:
    words = [
        name.replace("_", " ")
        for name in ("gradients", "dropout", "slopes", "key_lengths", "local", "deterministic")
        if getattr(call, name)
    ]
    kind = f"attention on {call.device_type} in {str(call.dtype).removeprefix('torch.')}, head width {call.head_width}"
    return ", ".join((kind, *words))


def describe(
    q: Tensor, batch: PackedBatch, *, window: int | None = None, slopes: Tensor | None = None, dropout: float = 0.0, gradients: bool = False
) -> AttentionCall:
    """Describe the call that `attend` would make on these tensors."""
    cuda = q.device.type == "cuda"
    if cuda:
        installed = flash.installed()
    else:
        paired = q.dtype == torch.bfloat16 and not gradients  # with gradients the inputs are converted to float32
        installed = frozenset({"compiled"} if compiled_is_supported(batch, q) and (not paired or bfloat16_kernels_run()) else ())
    return AttentionCall(
        device_type=q.device.type,
        dtype=q.dtype,
        head_width=q.shape[-1],
        capability=torch.cuda.get_device_capability(q.device) if cuda else (0, 0),
        gradients=gradients,
        dropout=dropout > 0,
        slopes=slopes is not None,
        key_lengths=batch.key_lengths is not None,
        local=window is not None,
        deterministic=gradients and flash.deterministic_is_requested(),
        installed=installed,
        missing=flash.missing() if cuda else frozenset(),
    )


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
    """Softmax attention within each sequence of a packed batch, scaled by K ** -0.5.

    Args:
        q: Queries, (N, H, K).
        k: Keys, (N, H, K).
        v: Values, (N, H, K).
        batch: The sequences, and which of their tokens can be attended to; a padded batch for ONNX export, without dropout or backend.
        window: A token sees |i - j| <= window // 2, both ends included; None for the whole sequence.
        slopes: ALiBi's slope of each head, (H,): a score loses slope * |i - j|; None without ALiBi.
        dropout: Probability of dropping an attention weight. On a CPU it is rounded to a multiple of 1/256, as in flash attention, in
            global layers with sequences of 64 tokens or more.
        backend: A key of `BACKENDS`. Default: the one in the environment variable QUIVER_ATTENTION if it supports the call, otherwise the
            best.

    Returns:
        (N, H, K). A token that sees nothing gets zeros.

    Raises:
        ValueError: ``backend`` is unknown or does not support the call; gives the reason.
        InputError: The environment variable names no backend.
    """
    if isinstance(batch, PaddedBatch):
        return attend_padded(q, k, v, batch, window, slopes)
    window = effective_window(batch.max_seqlen, window)
    gradients = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    call = describe(q, batch, window=window, slopes=slopes, dropout=dropout, gradients=gradients)
    if backend is None:
        backend = choose_backend(call, os.environ.get(VARIABLE))
    elif backend not in BACKENDS:
        raise ValueError(f"attention backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    elif reason := unsupported_reason(backend, call):
        raise ValueError(f"attention backend {backend} does not support this call: {reason}")
    return BACKENDS[backend](q, k, v, batch, window, slopes, dropout)
