"""What a CPU multiplies well: which dtypes, and in which layout of the weights.

Everything here follows from what the processor is, never from a measurement while it runs: one machine, one result.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch

# The file in which Linux says what the processor is.
FACTS = Path("/proc/cpuinfo")


@cache
def is_intel() -> bool:
    """Whether the processor is Intel's, as far as the system tells."""
    facts = FACTS.read_text(encoding="utf-8", errors="replace") if FACTS.is_file() else platform.processor()
    return "GenuineIntel" in facts


def _has(*checks: str) -> bool:
    """Any of torch's checks of the processor; it names them with an underscore, and where one is gone the answer is the safe one."""
    return any(getattr(torch.cpu, check, bool)() for check in checks)


@cache
def native_on_cpu(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies in a dtype at least as fast as in float32; emulated half precision is several times slower.

    Intel's bfloat16 instructions outside of the matrix unit are no faster than its float32 ones, and what surrounds them makes them slower:
    products of ModernBERT-base run at 147 GFLOP/s in bfloat16 beside 250 in float32 (two cores of a Xeon of 2023, torch 2.10).
    """
    if dtype in (torch.float32, torch.float64):
        return True
    if dtype == torch.bfloat16:
        return has_amx() or has_fast_pairs()
    return dtype == torch.float16 and _has("_is_amx_fp16_supported")


@cache
def has_fast_pairs() -> bool:
    """Whether adding up products of pairs of bfloat16 has twice the rate of float32 products, as on AMD's processors from Zen 4 on.

    There one instruction of 64 multiplications and additions takes as long as one of 32 (231 and 115 GFLOP/s a core of an EPYC of 2022);
    on Intel's it takes twice as long.
    """
    return _has("_is_avx512_bf16_supported") and not is_intel()


@cache
def has_amx() -> bool:
    """Whether this processor has a matrix unit, and the system lets this process have it.

    Linux keeps the unit's registers only for processes that have asked for them, which this does.
    """
    return _has("_is_amx_tile_supported") and _has("_init_amx")


@cache
def has_vnni() -> bool:
    """Whether torch's kernels add up products of four 8-bit integers in one instruction, as AVX-512 has it."""
    return _has("_is_avx512_supported") and _has("_is_vnni_supported")


@cache
def has_fma() -> bool:
    """Whether this is an x86 processor that multiplies and adds in one instruction, which came with AVX2.

    Without it code that asks for that calls a function each time. On other kinds of processors compiled loops have not been measured.
    """
    return _has("_is_avx2_supported", "_is_avx512_supported")


@cache
def has_onednn() -> bool:
    """Whether this build of torch has oneDNN's packed products."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def multiplies_best_plain() -> bool:
    """Whether MKL's product of a thousand tokens with a plain weight is faster than oneDNN's with a packed one.

    On Intel's processors with AVX-512 the whole of ModernBERT-base is 1.15 times as fast with it (923 tokens/s beside 791, texts of 512
    tokens, two cores of a Xeon of 2023); elsewhere MKL keeps to slower instructions.
    """
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return has_mkl and _has("_is_avx512_supported") and is_intel()
