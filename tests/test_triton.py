"""The Triton kernels: right, on a GPU or in Triton's interpreter, and compiling for GPUs that are not there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(("file", "count"), [("encoder/triton_kernels.py", 76), ("retrieval/models/triton_maxsim.py", 23)])
def test_kernels_do_what_torchs_code_does(file: str, count: int) -> None:
    """In a process of its own: the interpreter must be switched on before Triton is imported."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{count} passed" in done.stdout


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack and local memory, as NVIDIA's tool in Triton reads them from machine code."""
    import triton

    (folder / "kernel.cubin").write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    shown = subprocess.run([tool, "--dump-resource-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", shown)}


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("element", ["*bf16", "*fp32"])
def test_kernels_compile_for_a_gpu_that_is_not_there(element: str, capability: int, tmp_path: Path) -> None:
    """Down to machine code without spilled registers, for an A100, an H100 and a B200; widths that are no powers of two."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from quiver.encoder.gpu import triton_kernels

    norm = {"width": 768, "block": 1024, "has_bias": True}
    tile = {"width": 1152, "block_rows": 8, "block_columns": 128}
    cases = [
        (triton_kernels.turn_kernel, {"heads": 24, "half": 24, "rest": 16, "block_rows": 32, "block_half": 32, "block_rest": 16}),
        (triton_kernels.norm_kernel, norm | {"centred": True, "has_update": True, "keep_statistics": True}),
        (triton_kernels.norm_backward_kernel, norm | {"centred": True, "has_grad_total": True}),
        (triton_kernels.norm_kernel, norm | {"centred": False, "has_update": False, "keep_statistics": False}),
        (triton_kernels.norm_backward_kernel, norm | {"centred": False, "has_grad_total": False}),
    ]
    for activation in ("gelu", "gelu_tanh", "silu", "relu"):
        cases += [
            (kernel, tile | {"activation": activation}) for kernel in (triton_kernels.gated_kernel, triton_kernels.gated_backward_kernel)
        ]
    kinds = dict.fromkeys(("rows", "tokens", "each", "source_token", "source_head", "target_token", "target_head"), "i32")
    kinds |= dict.fromkeys(("direction", "epsilon"), "fp32")
    kinds |= dict.fromkeys(("cos", "sin", "means", "scales", "weight_sums", "bias_sums"), "*fp32")
    for kernel, constants in cases:
        signature = {name: "constexpr" if name in constants else kinds.get(name, element) for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        # Pointers of tensors are aligned; only then do the kernels read 16 bytes at a time.
        aligned = {
            (place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if str(signature[name]).startswith("*")
        }
        compiled = triton.compile(ASTSource(kernel, signature, places, aligned), target=GPUTarget("cuda", capability, 32))
        used = resources(compiled.asm["cubin"], tmp_path)
        assert (used["STACK"], used["LOCAL"]) == (0, 0), (kernel.__name__, used)  # spilled registers would lie there
        assert used["REG"] <= 255
        assert ".v4.b32" in compiled.asm["ptx"], kernel.__name__
