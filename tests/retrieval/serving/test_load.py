"""Constant load from another process: no error, and no request takes much longer than the others.

A real model (all-MiniLM-L6-v2): the milliseconds are those of a search, not of a toy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.retrieval.index import build_index
from quiver.retrieval.models.loading import load_model
from tests.retrieval.serving.conftest import documents

SPREAD = 5
"""Largest ratio of the 99th percentile to the median."""


@pytest.fixture(scope="module")
def index(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load") / "index"
    build_index(documents(), load_model(minilm), folder)
    return folder


def loaded(index: Path, serving: Callable[..., Any], seconds: int) -> dict[str, Any]:
    with serving(index) as child:
        command = [sys.executable, str(Path(__file__).with_name("load.py")), child.url, str(seconds), "2"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert child.stop() == 0
    found: dict[str, Any] = json.loads(done.stdout)
    sys.stdout.write(f"{found}\n")
    return found


@pytest.mark.slow
@pytest.mark.alone
def test_five_seconds_of_load_lose_no_request(index: Path, serving: Callable[..., Any]) -> None:
    found = loaded(index, serving, 5)
    assert found["errors"] == []
    assert found["requests"] > 50


@pytest.mark.exhaustive
def test_two_minutes_of_load_lose_no_request(index: Path, serving: Callable[..., Any]) -> None:
    found = loaded(index, serving, 120)
    assert found["errors"] == []
    assert found["p99"] < SPREAD * found["p50"]
