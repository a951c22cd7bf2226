"""Peak memory, and keeping freed memory while a model is trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quiver.encoder.training.processes import peak_memory


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's memory is counted there")
def test_peak_memory_is_in_bytes() -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")
    [kilobytes] = [int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")]
    assert peak_memory() == pytest.approx(kilobytes * 1024, rel=0.05)


@pytest.mark.skipif(sys.platform != "linux" or torch.cuda.is_available(), reason="needs /proc, and no GPU")
def test_the_peak_of_a_process_is_not_that_of_the_process_that_started_it() -> None:
    large = bytearray(os.urandom(1)) * 2**30  # noqa: F841 - held while the other process begins
    code = "from quiver.encoder.training.processes import peak_memory; print(peak_memory())"
    # vfork and exec keep the peak of the parent in ru_maxrss; preexec_fn makes Python fork.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, preexec_fn=os.getpid)
    assert int(done.stdout) < 2**30
