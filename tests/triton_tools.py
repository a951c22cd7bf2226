"""Triton without a GPU: its interpreter, and machine code of the launches that a function would make."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
}


def mend_interpreter() -> None:
    """Work around defects of the interpreter of Triton 3.6. Call before the first kernel runs.

    It multiplies the bits of bfloat16 numbers instead of the numbers, and with numpy 2.4 it cannot count to a number that is known only at
    run time. Two thirds of its time go to what is done once here: it replaces the functions of the language at each launch and at each call
    of a function within a kernel, and makes a table of numpy's types at each operation.
    """
    from triton import language
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def dot(builder: Any, left: Any, right: Any, *others: Any) -> Any:
        wide = [builder.create_fp_ext(each, float32) if each.dtype.scalar == bfloat16 else each for each in (left, right)]
        return create_dot(builder, *wide, *others)

    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    numpy_type = interpreter._get_np_dtype
    of_numbers = functools.cache(numpy_type)
    interpreter._get_np_dtype = lambda kind: numpy_type(kind) if kind.scalar.is_ptr() else of_numbers(kind.scalar)


def sample_programs(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let the interpreter run about ``size`` programs of a larger grid, the last among them; each takes half a millisecond."""
    from triton.runtime import interpreter

    def some(*bounds: int) -> Iterable[int]:
        whole = range(*bounds)
        return whole if len(bounds) > 1 or len(whole) <= size else sorted({*whole[:: len(whole) // size], len(whole) - 1})

    monkeypatch.setattr(interpreter, "range", some, raising=False)


@dataclass(frozen=True)
class Launch:
    """A kernel and the arguments that it is launched with, options such as the number of warps among them."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def launches(monkeypatch: pytest.MonkeyPatch, function: Callable[[], object]) -> list[Launch]:
    """Call a function whose tensors are on the device "cuda", as an H100 of which there are only shapes; return its launches in order."""
    found: list[Launch] = []

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del grid, warmup
        found.append(Launch(kernel, arguments, options))

    with monkeypatch.context() as patch, FakeTensorMode():
        patch.setattr("triton.runtime.jit.JITFunction.run", run)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
        function()
    return found


@dataclass(frozen=True)
class MachineCode:
    """What the compiler made of a launch."""

    registers: int
    """Registers per thread."""
    spilled: int
    """Bytes of registers per thread that did not fit and lie in local memory."""
    shared: int
    """Bytes of shared memory per program."""
    vectors: int
    """Bytes of the widest access of a thread to global memory."""
    instructions: frozenset[str]
    """Kinds of matrix instructions: wgmma, tcgen05, mma."""


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_launch(launch: Launch, capability: int, folder: Path) -> MachineCode:
    """Compile a launch down to machine code for a compute capability (80, 90, 100), specialized as Triton specializes it at the launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    values = dict(zip(names, launch.arguments, strict=False)) | {name: launch.options[name] for name in names if name in launch.options}
    options = {name: value for name, value in launch.options.items() if name not in names}
    constant, divisible = set(), set()
    for each in launch.kernel.params:
        value = values[each.name]
        number = isinstance(value, int) and not each.do_not_specialize
        if each.is_constexpr or value is None or (number and value == 1):
            constant.add(each.name)
        elif isinstance(value, torch.Tensor):
            # Allocations are aligned; a view need not be.
            divisible |= {each.name} if value.storage_offset() * value.element_size() % 16 == 0 else set()
        elif number and value % 16 == 0:
            divisible.add(each.name)
    signature = {name: "constexpr" if name in constant else _kind(values[name]) for name in names}
    constants = {(names.index(name),): values[name] for name in names if name in constant}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name in divisible}
    compiled = triton.compile(
        ASTSource(launch.kernel, signature, constants, attributes), target=GPUTarget("cuda", capability, 32), options=options
    )
    ptx = compiled.asm["ptx"]
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    shown = subprocess.run([tool, "--dump-resource-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", shown)}
    widths = [int(count or 1) * int(bits) // 8 for count, bits in re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.[bu](\d+)", ptx)]
    widths += [int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (0x\w+)", ptx)]
    kinds = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
    return MachineCode(
        registers=used["REG"],
        spilled=used["STACK"] + used["LOCAL"],
        shared=compiled.metadata.shared,
        vectors=max(widths, default=0),
        instructions=frozenset(kind for kind, name in kinds.items() if name in ptx),
    )
