"""How long a command takes to start, in processor time, which other processes do not change: on a free core, the time on the clock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver import BiEncoder, Document, build_index
from quiver.retrieval.index import BuildOptions

pytestmark = pytest.mark.alone
ROUNDS = 3
TORCH = 1.2
"""Time to import torch on the machine of the bounds, in seconds: it tells how fast this machine is."""
OVER_TORCH = 0.8
"""Largest time of a first search beyond the import of torch there, in seconds."""


@pytest.fixture
def seconds() -> Callable[..., float]:
    """Processor time of the fastest of several Python processes with the given arguments; byte code is kept, as after an installation."""
    resource = pytest.importorskip("resource")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def measure(*arguments: str) -> float:
        times = []
        for _ in range(ROUNDS + 1):  # the first one compiles
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *arguments], env=environment, check=True, capture_output=True, timeout=120)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(times[1:])

    return measure


def test_quiver_is_imported_in_a_tenth_of_a_second_and_help_takes_four(seconds: Callable[..., float]) -> None:
    assert seconds("-c", "import quiver") < 0.1
    assert seconds("-m", "quiver.cli.main", "--help") < 0.4


@pytest.mark.parametrize("name", ["torch", "faiss", "numba", "rich", "typer"])
def test_importing_quiver_imports_no_library(name: str) -> None:
    check = f"import sys, quiver; sys.exit({name!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0


def test_the_first_search_of_a_small_index_takes_a_second_and_a_half(seconds: Callable[..., float], minilm: Path, tmp_path: Path) -> None:
    documents = [Document(f"d{number}", f"a text about the number {number}") for number in range(50)]
    build_index(documents, BiEncoder(minilm), tmp_path / "index", options=BuildOptions(calibrate=False))
    build_index(documents, "bm25", tmp_path / "words")
    assert seconds("-m", "quiver.cli.main", "search", str(tmp_path / "words"), "which text is about seven") < 1.5
    search = seconds("-m", "quiver.cli.main", "search", str(tmp_path / "index"), "which text is about seven")
    torch = seconds("-c", "import torch")
    allowed = OVER_TORCH * max(1.0, torch / TORCH)
    assert search - torch < allowed, f"{search:.2f} s, of which importing torch takes {torch:.2f} s; allowed beyond it: {allowed:.2f} s"
    if torch < 1.5 - OVER_TORCH:  # on a slower machine torch alone takes longer than that
        assert search < 1.5
