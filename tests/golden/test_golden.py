"""What the first version gave, item by item, see record.py.

``pytest -m exhaustive tests/golden``; one item: ``-k train.mnrl``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
GOLDEN = FOLDER / "golden.json"

pytestmark = [pytest.mark.exhaustive, pytest.mark.data]


def items() -> list[str]:
    return list(json.loads(GOLDEN.read_text(encoding="utf-8"))["items"])


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, indexes and vectors that the items share."""
    return tmp_path_factory.mktemp("golden")


@pytest.mark.parametrize("item", items())
def test_it_gives_what_it_gave(item: str, work: Path, quiver_data: Path, minilm: Path) -> None:
    del minilm  # skips where it is not installed
    words = [sys.executable, str(FOLDER / "record.py"), "--only", item, "--work", str(work), "--compare", str(GOLDEN)]
    environment = {**os.environ, "QUIVER_DATA": str(quiver_data), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
