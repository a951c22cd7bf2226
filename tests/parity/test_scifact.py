"""The published score of a published model on a published collection, through the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quiver.cli.main import main

pytestmark = [pytest.mark.parity, pytest.mark.data, pytest.mark.exhaustive]  # Cranfield is scored in CI: tests/eval/test_rankers.py


def test_minilm_reaches_its_published_score(
    minilm: Path, quiver_data: Path, scifact_vectors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [
        "evaluate",
        "--model",
        str(minilm),
        "--data",
        str(quiver_data / "scifact"),
        "--split",
        "test",
        "--out",
        str(tmp_path / "out"),
        "--cache",
        str(scifact_vectors),
    ]
    monkeypatch.setattr(sys, "argv", ["quiver", *arguments])
    main()  # a failure would leave by SystemExit
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["ndcg@10"] == pytest.approx(0.645, abs=0.001)  # 64.508 in MTEB's table
    collection = results["collections"][0]
    assert (collection["documents"], collection["queries"]) == (5183, 300)
    assert collection["measures"]["recall@100"] == pytest.approx(0.925, abs=0.001)
    assert collection["baselines"][0]["measures"]["ndcg@10"] == pytest.approx(0.657, abs=0.002)
