"""Torch or Triton: which code does the token-wise arithmetic. The one place where that is decided.

Triton kernels make one pass over memory where torch makes several. They run on CUDA tensors; in Triton's interpreter
(TRITON_INTERPRET=1) also on a CPU, slowly, which is how they are tested without a GPU. Under torch.compile it is always
torch's code: there the compiler fuses it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache

import torch
from torch import Tensor

from quiver.encoder.errors import InputError

logger = logging.getLogger(__name__)

VARIABLE = "QUIVER_OPS"
"""Environment variable that overrides the choice: torch or triton."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def choose_ops(device_type: str, dtype: torch.dtype, override: str | None = None) -> str:
    """Name of the code for tensors of this kind of device and dtype; the choice is logged once.

    Args:
        device_type: cpu, cuda, mps, ...
        dtype: Of the tensors.
        override: torch or triton; None for the best there is.

    Raises:
        InputError: The override is unknown, or triton where it is not installed.

    Example:
        >>> choose_ops("cpu", torch.float32)
        'torch'
    """
    if override not in (None, "torch", "triton"):
        raise InputError(f"{VARIABLE} must be torch or triton, got {override!r}")
    installed = importlib.util.find_spec("triton") is not None
    if override == "triton" and not installed:
        raise InputError(f"{VARIABLE} is triton, which is not installed: install it or unset the variable")
    interpreted = override == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    able = installed and dtype in DTYPES and (device_type == "cuda" or interpreted)
    name = "triton" if able and override != "torch" else "torch"
    logger.info("token-wise arithmetic on %s in %s: %s", device_type, str(dtype).removeprefix("torch."), name)
    return name


def fused(x: Tensor) -> bool:
    """Whether a Triton kernel does the work on ``x``."""
    if torch.compiler.is_compiling() or not x.numel():
        return False
    return choose_ops(x.device.type, x.dtype, os.environ.get(VARIABLE)) == "triton"
