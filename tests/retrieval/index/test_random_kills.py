"""Kills at random moments: no change that was acknowledged is lost, and readers see committed states alone.

The slow run (``-m slow``) makes a few; ``pytest -m exhaustive -s tests/retrieval/index/test_random_kills.py`` makes 600 and prints what it
counted. ``--basetemp`` on a memory file system makes it faster.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import imported_python

SCRIPT = Path(__file__).with_name("random_kills.py")
ENGINES = ["exact-dense", "ivf-dense", "ivf-tokens"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("engine", "kills"),
    [pytest.param(ENGINES[0], 6, marks=pytest.mark.slow), *(pytest.param(engine, 200, marks=pytest.mark.exhaustive) for engine in ENGINES)],
)
def test_acknowledged_changes_are_present_once_after_kills_and_readers_are_correct(engine: str, kills: int, tmp_path: Path) -> None:
    command = [imported_python(), str(SCRIPT), str(tmp_path / "kill"), engine, str(kills), "1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (done.returncode, lines[-3:], done.stderr[-2000:])
    assert [line for line in lines if line.startswith("WRONG")] == []
    sys.stdout.write(f"{lines[-1]}\n")
