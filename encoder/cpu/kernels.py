"""Whether the compiled kernels run here, and for which dtypes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quiver.encoder.cpu.support import ASSUMED, CACHES, cpu_question, has_amx, has_fast_bfloat16, kernels_available

logger = logging.getLogger(__name__)


@contextmanager
def assume(**answers: Callable[..., bool] | bool) -> Iterator[None]:
    """Replace answers about this CPU by others, or by functions of the questions' arguments, for tests of the code for other CPUs.

    Answers that follow from others change with them. An answer that the CPU cannot live up to makes the process crash.
    """
    if unknown := answers.keys() - CACHES.keys():
        raise ValueError(f"must be one of {', '.join(CACHES)}, got {', '.join(sorted(unknown))}")
    before = dict(ASSUMED)

    def change(assumed: dict[str, Callable[..., bool] | bool]) -> None:
        ASSUMED.clear()
        ASSUMED.update(assumed)
        for answer in CACHES.values():
            answer.cache_clear()

    change(before | answers)
    try:
        yield
    finally:
        change(before)


@cpu_question
def kernels_run() -> bool:
    """Return whether the kernels do run here; logs a warning once if they should but do not."""
    if not kernels_available():
        return False
    try:
        from quiver.encoder.cpu import codegen, jit
    except ImportError as error:
        logger.warning("encoding on this CPU is slower than it could be: numba cannot be loaded (%s)", error)
        return False
    if not jit.can_cache():
        return False
    if reason := codegen.unsupported_reason():
        logger.warning("encoding on this CPU is slower than it could be: %s", reason)
        return False
    return True


@cpu_question
def bfloat16_kernels_run() -> bool:
    """Return whether the kernels multiply bfloat16 faster than float32 here."""
    if amx_kernels_run():
        return True
    if not has_fast_bfloat16() or not kernels_run():
        return False
    from quiver.encoder.cpu import codegen

    return codegen.bfloat16_is_native()


@cpu_question
def amx_kernels_run() -> bool:
    """Return whether the kernels multiply bfloat16 and int8 by AMX here."""
    if not has_amx() or not kernels_run():
        return False
    from quiver.encoder.cpu import codegen

    return codegen.amx_is_native()


@cpu_question
def int8_kernels_run(levels: int) -> bool:
    """Return whether the kernels multiply int8 weights with unsigned activations up to ``levels`` here."""
    if not kernels_run():
        return False
    from quiver.encoder.cpu import codegen

    return codegen.int8_levels() >= levels
