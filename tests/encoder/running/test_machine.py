"""What a run has taken of its machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from encoder.running.machine import peak_memory


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's memory is counted there")
def test_memory_is_in_bytes() -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")
    [kilobytes] = [int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")]
    assert peak_memory() == pytest.approx(kilobytes * 1024, rel=0.05)
