"""What this CPU supports: fast dtypes and weight layouts, PyTorch's threads, and the compiled kernels, by dtype and batch.

Every answer follows from the CPU and the installed packages, never from a timing at run time: one machine gives one result. Importing this
module loads neither numba nor a kernel.

Source: libgomp's entry point ``GOMP_parallel``, which LLVM's and Intel's OpenMP runtimes have too.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from quiver.encoder.packing import PackedBatch

logger = logging.getLogger(__name__)

Question = TypeVar("Question", bound=Callable[..., bool])

CACHES: dict[str, Any] = {}
ASSUMED: dict[str, Callable[..., bool] | bool] = {}


def cpu_question(function: Question) -> Question:
    """Answer a question about this CPU once per process, unless `assume` gives another answer."""
    name = function.__name__
    answer = CACHES[name] = cache(function)

    @wraps(function)
    def ask(*arguments: Any) -> bool:
        if name in ASSUMED:
            assumed = ASSUMED[name]
            return assumed(*arguments) if callable(assumed) else assumed
        return bool(answer(*arguments))

    return cast(Question, ask)


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


def cpu_features() -> list[str]:
    """Return the CPU features that numba compiles for, by which it also keeps its cache apart."""
    from numba.core.registry import cpu_target

    features: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return features.split(",")


def vector_width() -> int:
    """Return the number of floats in a vector of the compiled kernels."""
    return 16 if "+avx512f" in cpu_features() else 8


def int8_instruction() -> str | None:
    """Return the instruction for four 8-bit products that numba may use; None if there is none."""
    if vector_width() == 16:
        return "vpdpbusd" if "+avx512vnni" in cpu_features() else None
    return "{vex} vpdpbusd" if "+avxvnni" in cpu_features() else None


def kernel_int8_levels() -> int:
    """Return the largest unsigned activation of the kernels' int8 products; 0 where they are not supported.

    Without an instruction for four products, pairs are summed in 16 bits, which limits activations to 7 bits.
    """
    if int8_instruction() is not None:
        return 255
    return 127 if ("+avx2" if vector_width() == 8 else "+avx512bw") in cpu_features() else 0


def amx_is_native() -> bool:
    """Return whether the kernels' products of bfloat16 and int8 use AMX."""
    return {"+avx512f", "+amx-bf16", "+amx-int8"} <= set(cpu_features()) and has_amx()


@cache
def can_cache() -> bool:
    """Return whether compiled code can be cached on disk, if only in a private folder among the temporary files; logs once if not.

    Without a cache every process would spend seconds on compiling, more than most work gains, so the kernels are not used then.
    """
    from numba.core import config

    if _finds_folder():
        return True
    folder = _private_folder()
    if folder is not None:
        config.CACHE_DIR = str(folder)
        if _finds_folder():
            logger.warning("compiled code is cached in %s, the only writable folder; set NUMBA_CACHE_DIR to choose another", folder)
            return True
    logger.warning("compiled code cannot be cached, so the slower uncompiled path is used; set NUMBA_CACHE_DIR to a writable folder")
    return False


def _finds_folder() -> bool:
    from numba.core import caching

    try:
        caching.FunctionCache(_finds_folder)
    except RuntimeError:
        return False
    return True


def _private_folder() -> Path | None:
    """Return a temporary folder that only this user can write to, because code in it is executed; None if there is none."""
    if not hasattr(os, "getuid"):
        return None
    try:
        folder = Path(tempfile.gettempdir()) / f"quiver-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if is_private else None


@cpu_question
def kernels_run() -> bool:
    """Return whether the kernels do run here; logs a warning once if they should but do not."""
    if not kernels_available():
        return False
    try:
        from numba.core import config
    except ImportError as error:
        logger.warning("encoding on this CPU is slower than it could be: numba cannot be loaded (%s)", error)
        return False
    if not can_cache():
        return False
    reason = None
    if config.DISABLE_JIT:
        reason = "numba is told not to compile (NUMBA_DISABLE_JIT)"
    elif "+fma" not in cpu_features():
        reason = "numba is told to compile for a processor without fused multiplications"
    if reason is not None:
        logger.warning("encoding on this CPU is slower than it could be: %s", reason)
    return reason is None


@cpu_question
def bfloat16_kernels_run() -> bool:
    """Return whether the kernels multiply bfloat16 faster than float32 here."""
    if amx_kernels_run():
        return True
    return has_fast_bfloat16() and kernels_run() and "+avx512bf16" in cpu_features()


@cpu_question
def amx_kernels_run() -> bool:
    """Return whether the kernels multiply bfloat16 and int8 by AMX here."""
    return has_amx() and kernels_run() and amx_is_native()


@cpu_question
def int8_kernels_run(levels: int) -> bool:
    """Return whether the kernels multiply int8 weights with unsigned activations up to ``levels`` here."""
    return kernels_run() and kernel_int8_levels() >= levels


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


def supports_batch(batch: PackedBatch, q: Tensor) -> bool:
    """Return whether the kernels support a batch of queries or hidden states and are worth their overhead."""
    # A traced graph must not depend on the number of tokens, so this is checked first.
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    if traced or not is_plain(q):
        return False
    return (batch.batch_invariant or enough_tokens(batch.num_tokens)) and kernels_run()
