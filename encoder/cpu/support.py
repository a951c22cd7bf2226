"""What this CPU supports: fast dtypes and weight layouts, and PyTorch's threads for compiled kernels.

Every answer follows from the CPU and the installed packages, never from a timing at run time: one machine gives one result.
`quiver.encoder.cpu.kernels` says whether the kernels run, and replaces answers. Importing either loads neither numba nor a kernel.

Source: libgomp's entry point ``GOMP_parallel``, which LLVM's and Intel's OpenMP runtimes have too.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import platform
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

logger = logging.getLogger(__name__)

Question = TypeVar("Question", bound=Callable[..., bool])

CACHES: dict[str, Any] = {}
ASSUMED: dict[str, Callable[..., bool] | bool] = {}


def cpu_question(function: Question) -> Question:
    """Answer a question about this CPU once per process, unless `quiver.encoder.cpu.kernels.assume` gives another answer."""
    name = function.__name__
    answer = CACHES[name] = cache(function)

    @wraps(function)
    def ask(*arguments: Any) -> bool:
        if name in ASSUMED:
            assumed = ASSUMED[name]
            return assumed(*arguments) if callable(assumed) else assumed
        return bool(answer(*arguments))

    return cast(Question, ask)


# The file in which Linux describes the CPU.
CPU_INFO = Path("/proc/cpuinfo")


@cpu_question
def is_intel(cpu_info: Path = CPU_INFO) -> bool:
    """Return whether the CPU is made by Intel, as far as the operating system says in a file, or else Python."""
    described = cpu_info.read_text(encoding="utf-8", errors="replace") if cpu_info.is_file() else platform.processor()
    return "GenuineIntel" in described


def _has(*checks: str) -> bool:
    """Return whether any of PyTorch's private CPU checks says yes; a check that a release lacks counts as no."""
    return any(getattr(torch.cpu, check, bool)() for check in checks)


@cpu_question
def native_on_cpu(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies a dtype at least as fast as float32; emulated half precision is several times slower.

    Intel's bfloat16 instructions outside the matrix unit are no faster than its float32 ones, and conversions make them slower: products of
    ModernBERT-base reach 147 GFLOP/s in bfloat16 and 250 in float32 (two cores of a Xeon of 2023, torch 2.10).
    """
    if dtype in (torch.float32, torch.float64):
        return True
    if dtype == torch.bfloat16:
        return has_amx() or has_fast_bfloat16()
    return dtype == torch.float16 and _has("_is_amx_fp16_supported")


@cpu_question
def has_fast_bfloat16() -> bool:
    """Return whether bfloat16 dot products run at twice the rate of float32 products: on AMD CPUs from Zen 4 on, not on Intel's."""
    return _has("_is_avx512_bf16_supported") and not is_intel()


@cpu_question
def has_amx() -> bool:
    """Return whether this CPU has the AMX matrix unit and the operating system grants it to this process, which requests it here."""
    return _has("_is_amx_tile_supported") and _has("_init_amx")


@cpu_question
def has_vnni() -> bool:
    """Return whether PyTorch's kernels sum four 8-bit products in one instruction (AVX-512 VNNI)."""
    return _has("_is_avx512_supported") and _has("_is_vnni_supported")


@cpu_question
def has_fma() -> bool:
    """Return whether this is an x86 CPU with fused multiply-add (AVX2); without it each multiply-add is a function call."""
    return _has("_is_avx2_supported", "_is_avx512_supported")


@cpu_question
def has_onednn() -> bool:
    """Return whether this build of PyTorch has oneDNN's packed products."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cpu_question
def prefers_plain_weights() -> bool:
    """Return whether MKL multiplies a thousand tokens with a plain weight faster than oneDNN does with a packed one.

    On Intel CPUs with AVX-512, ModernBERT-base as a whole is 1.15 times as fast with MKL (923 tokens/s against 791, texts of 512 tokens,
    two cores of a Xeon of 2023); on other CPUs MKL uses slower instructions.
    """
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return has_mkl and _has("_is_avx512_supported") and is_intel()


# Bytes per cache line. A vector that spans two lines takes twice as long to load.
CACHE_LINE = 64

Launch = Callable[[int, int, int, int], None]
"""(address of the function, address of its argument, threads, flags): every thread calls the function; returns when all have returned."""


@cache
def openmp_launcher() -> Launch | None:
    """Return the function that runs code on PyTorch's OpenMP threads, beside whose spinning others are slow; None if there are none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Looked up through the library that uses it: another package may have loaded its own OpenMP runtime.
        launch = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        logger.info("the compiled kernels run on Linux, on PyTorch's GNU OpenMP threads; PyTorch's own operators are used here")
        return None
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    launch.restype = None
    found: Launch = launch
    return found


@cpu_question
def kernels_available() -> bool:
    """Return whether the compiled kernels should run here, without loading them."""
    return has_fma() and importlib.util.find_spec("numba") is not None and openmp_launcher() is not None


def run_on_threads(function: int, argument: int, threads: int) -> None:
    """Call the compiled function at an address with the address of its argument, on up to so many PyTorch threads at once."""
    launch = openmp_launcher()
    if launch is None:
        raise RuntimeError("this build of torch does not run on OpenMP threads")
    launch(function, argument, threads, 0)


def thread_scratch(threads: int, size: int) -> Tensor:
    """Allocate scratch memory for each thread, (threads, at least ``size``) bytes; every row starts at a cache line."""
    return torch.empty(threads, -(-size // CACHE_LINE) * CACHE_LINE, dtype=torch.uint8, device="cpu")


# Tokens per thread from which the kernels pay off: each thread needs several panels of tokens, and a process spends half a second on
# loading the kernels, the first process ten, five more for training. A lone query of 8 to 20 tokens takes 1.3 to 2.3 times as long with
# them.
MIN_TOKENS_PER_THREAD = 128
# Widths must be multiples of the number of floats in a vector.
WIDTH_MULTIPLE = 16
# A token whose values span less than this is quantised to one integer, because dividing by less overflows.
SMALLEST_SPAN = 1e-30


def enough_tokens(tokens: int) -> bool:
    """Return whether a batch is large enough for the kernels to pay off."""
    return tokens >= MIN_TOKENS_PER_THREAD * torch.get_num_threads()


def is_plain(x: Tensor) -> bool:
    """Return whether a tensor is plain data in CPU memory."""
    wrapped = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", bool)
    if type(x) not in (Tensor, nn.Parameter) or x.device.type != "cpu" or x.layout != torch.strided or wrapped(x):
        return False
    return forward_ad.unpack_dual(x).tangent is None  # type: ignore[no-untyped-call]
