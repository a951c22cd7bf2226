"""Whether compiled loops run here, and on which numbers; importing this loads none of them."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Container
from functools import cache

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from quiver.encoder.cpu import team
from quiver.encoder.cpu.processor import has_amx, has_fast_pairs, has_fma

logger = logging.getLogger(__name__)

# Tokens for each of torch's threads from which a batch is worth it: panels of some dozens have to keep them busy, and a process loads the
# loops for half a second, the first one for ten, five more to train. A lone query of 8 to 20 tokens takes 1.3 to 2.3 times as long with
# them.
WORTHWHILE = 128
# Widths are multiples of what a vector holds.
MULTIPLE = 16
# Tokens whose numbers are closer together than this are brought to one integer: what divides by less has no end.
SMALLEST_SPAN = 1e-30


@cache
def available() -> bool:
    """Whether the loops should run here, as far as that can be told without loading them."""
    return has_fma() and importlib.util.find_spec("numba") is not None and team.launcher() is not None


@cache
def loops_run() -> bool:
    """Whether they turn out to run; where not, though they should, that is said once."""
    if not available():
        return False
    try:
        from quiver.encoder.cpu import compiling, vectors
    except ImportError as error:
        logger.warning("encoding on this CPU is slower than it could be: numba cannot be loaded (%s)", error)
        return False
    if not compiling.keeps_code():
        return False
    if reason := vectors.unsupported_reason():
        logger.warning("encoding on this CPU is slower than it could be: %s", reason)
        return False
    return True


@cache
def pairs_run() -> bool:
    """Whether the loops multiply bfloat16 faster here than float32."""
    if tiles_run():
        return True
    if not has_fast_pairs() or not loops_run():
        return False
    from quiver.encoder.cpu import vectors

    return vectors.pairs_are_native()


@cache
def tiles_run() -> bool:
    """Whether the loops multiply bfloat16 and 8-bit integers by AMX here."""
    if not has_amx() or not loops_run():
        return False
    from quiver.encoder.cpu import vectors

    return vectors.tiles_are_native()


@cache
def quads_run(levels: int) -> bool:
    """Whether the loops multiply 8-bit integers here, those without a sign up to ``levels``."""
    if not loops_run():
        return False
    from quiver.encoder.cpu import vectors

    return vectors.quads_reach() >= levels


def worthwhile(tokens: int) -> bool:
    """Whether so many tokens are worth it."""
    return tokens >= WORTHWHILE * torch.get_num_threads()


def has_numbers(x: Tensor) -> bool:
    """Whether a tensor is nothing but numbers: what is traced, transformed or differentiated forward is less, or more."""
    return not torch.compiler.is_compiling() and not _is_traced() and is_plain(x)


def serves_rows(rows: Tensor, width: int, dtypes: Container[torch.dtype] = (torch.float32,), *, batch_invariant: bool = False) -> bool:
    """Whether a pass over tokens (`quiver.encoder.cpu.token_rows`) can run on them, and is worth it.

    Args:
        rows: One row a token; the numbers of the last dimension have to lie side by side.
        width: What is taken vector by vector.
        dtypes: Which ones the pass reads.
        batch_invariant: It is worth it for a few of them, too: a number must not depend on how many there are.
    """
    if not has_numbers(rows) or rows.dtype not in dtypes or rows.stride(-1) != 1 or width % MULTIPLE:
        return False
    return (batch_invariant or worthwhile(len(rows))) and loops_run()


def _is_traced() -> bool:
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is nothing but numbers in this machine's memory."""
    wrapped = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", bool)
    if type(x) not in (Tensor, nn.Parameter) or x.device.type != "cpu" or x.layout != torch.strided or wrapped(x):
        return False
    return forward_ad.unpack_dual(x).tangent is None  # type: ignore[no-untyped-call]
