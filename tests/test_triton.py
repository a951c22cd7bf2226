"""The Triton kernels: right, on a GPU or in Triton's interpreter, and compiling for GPUs that are not there."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from quiver.encoder.heads import linear_cross_entropy
from quiver.encoder.layers import add_norm, embed, gated, normalize, rotate
from tests.triton_tools import compile_launch, launches

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize(
    ("file", "count", "without"),
    [
        # Without float16: its code differs from that of bfloat16 in the conversions alone; it is compiled below.
        pytest.param("encoder/triton_kernels.py", 147, "dtype2", id="encoder", marks=pytest.mark.slow),
        pytest.param("retrieval/models/triton_maxsim.py", 50, "dtype2", id="maxsim", marks=pytest.mark.slow),
        pytest.param("encoder/triton_kernels.py", 208, "nothing", id="encoder-float16-too", marks=pytest.mark.exhaustive),
        pytest.param("retrieval/models/triton_maxsim.py", 73, "nothing", id="maxsim-float16-too", marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_do_what_torchs_code_does(file: str, count: int, without: str) -> None:
    """In a process of its own: the interpreter must be switched on before Triton is imported."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    options = ["-q", "-p", "no:cacheprovider", "-k", f"not {without}"]
    command = [sys.executable, "-m", "pytest", *options, str(Path(__file__).parent / file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{count} passed" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("file", ["encoder/triton_kernels.py", "retrieval/models/triton_maxsim.py"])
def test_kernels_do_what_torchs_code_does_on_a_gpu(file: str) -> None:
    """In bfloat16; the slow test runs all of them."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "dtype1", str(Path(__file__).parent / file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


NORMS: dict[str, Callable[[int], nn.LayerNorm | nn.RMSNorm]] = {
    "layernorm": nn.LayerNorm,
    "rmsnorm": lambda width: nn.RMSNorm(width, eps=1e-6),
}


def training(width: int, dtype: torch.dtype, norm: str, activation: str) -> None:
    """Every token-wise operation forward and backward, as a layer in training calls it, on a GPU of which there are only shapes."""
    tokens, heads = 4096, width // 64
    with torch.device("cuda"):
        table, rows = (
            torch.empty(1000, width, dtype=torch.float32, requires_grad=True),
            torch.empty(512, width, dtype=torch.float32, requires_grad=True),
        )
        module = NORMS[norm](width)
        ids = torch.empty(tokens, dtype=torch.int64)
        hidden, update = (torch.empty(tokens, width, dtype=dtype, requires_grad=True) for _ in range(2))
        up = torch.empty(tokens, 2 * 1152, dtype=dtype, requires_grad=True)
        qkv = torch.empty(tokens, 3, heads, 64, dtype=dtype, requires_grad=True) * 1
        angles = torch.empty(tokens, 32)
        states, labels = torch.empty(200, width, dtype=dtype), torch.empty(200, dtype=torch.int64)
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        outputs = [embed(ids, table, module, positions=(rows, ids), types=rows, dtype=torch.float32), gated(up, activation)]
        outputs += add_norm(hidden, update, module, dropout=0.1)
        outputs += [add_norm(hidden, update, module)[1], normalize(hidden, module), *rotate(qkv, angles, angles)]
        linear_cross_entropy(states, torch.empty(50368, width, dtype=dtype, device="cuda", requires_grad=True), None, labels)
    # The engine of autograd needs a device, so the backward passes are called one by one.
    for node in dict.fromkeys(output.grad_fn for output in outputs):
        node.apply(*(torch.empty_like(output) for output in outputs if output.grad_fn is node))


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("width", "norm", "activation", "dtype"),
    [
        (768, "layernorm", "gelu", torch.bfloat16),
        *(
            pytest.param(*case, dtype, marks=pytest.mark.slow)
            for case in ((768, "layernorm", "gelu"), (1024, "rmsnorm", "silu"), (768, "rmsnorm", "gelu_tanh"), (2304, "layernorm", "relu"))
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        ),
    ],
)
def test_kernels_compile_without_spills(
    width: int, norm: str, activation: str, dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Down to machine code, for an A100, an H100 and a B200, exactly as they are launched; 16 bytes per load."""
    monkeypatch.setattr("quiver.encoder.gpu.triton_norms.new_seed", lambda: 5)  # a random number has no value without tensors
    names = set()
    for launch in launches(monkeypatch, lambda: training(width, dtype, norm, activation)):
        code = compile_launch(launch, capability, tmp_path)
        names.add(name := launch.kernel.fn.__name__)
        logger.info("%s %d %s %s", name, capability, dtype, code)
        assert code.spilled == 0, (name, code)
        assert code.registers <= 255
        assert code.vectors == 16, (name, code)
    assert names == {"cross_entropy_kernel", "norm_kernel", "norm_backward_kernel", "gated_kernel", "gated_backward_kernel", "turn_kernel"}
