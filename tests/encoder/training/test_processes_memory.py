"""Peak memory, and keeping freed memory while a model is trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quiver.encoder.training.processes import CHOSEN, glibc, peak_memory

ALLOCATE = """
import os
import resource
import torch
from quiver.encoder.training.processes import keep_freed_memory

def held():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        torch.empty(1_000_000).fill_(1)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * os.sysconf("SC_PAGE_SIZE") // 2**20

def rise():
    before = held()
    large = torch.empty(50_000_000).fill_(1)
    del large
    return (held() - before) // 2**20

rise()
print(rise())
with keep_freed_memory():
    print(rise())
print(rise())
print(faults(), faults())
"""


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is done beside a GPU")
@pytest.mark.parametrize(
    ("chosen", "kept"),
    [({}, True), pytest.param({"MALLOC_ARENA_MAX": "2"}, False, marks=pytest.mark.slow)],
    ids=["by default", "the user chose"],
)
def test_freed_memory_is_kept_while_a_model_is_trained(chosen: dict[str, str], *, kept: bool) -> None:
    """200 MB of freed memory stay in the process inside the block and return to the system outside it; 4 MB always stay."""
    if not Path("/proc/self/statm").exists() or glibc() is None:
        pytest.skip("needs glibc and /proc")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(CHOSEN)} | chosen
    child = subprocess.run([sys.executable, "-c", ALLOCATE], env=environment, capture_output=True, text=True, check=True)
    before, inside, after, _, fetched = map(int, child.stdout.split())
    assert before < 20
    assert (inside > 150) == kept
    assert after < 20
    assert fetched < 20, "MB that the system handed out for 100 tensors, one after the other"
