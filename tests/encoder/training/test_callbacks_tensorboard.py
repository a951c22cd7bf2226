"""TensorBoard scalars: written, read, and replaced by a resumed run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.training.trainer import tensorboard


def test_written_scalars_can_be_read(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first, loss in ((1, 0.5), (4, 0.25)):  # killed after step 5, and resumed from step 3
        with tensorboard(tmp_path, step=first, enabled=True, names={"ndcg@10": "development/ndcg_at_10"}) as board:
            for step in range(first, 6):
                board.on_log(step, {"loss": loss, "learning_rate": 1e-4})
            board.on_log(5, {"ndcg@10": loss})
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert sorted(found.Tags()["scalars"]) == ["development/ndcg_at_10", "training/learning_rate", "training/loss"]
    assert [(event.step, event.value) for event in found.Scalars("training/loss")] == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.25), (5, 0.25)]
    assert [(event.step, event.value) for event in found.Scalars("development/ndcg_at_10")] == [(5, 0.25)]


def test_nothing_is_written_if_tensorboard_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def missing(name: str, *arguments: Any) -> Any:
        return None if name == "tensorboard" else real(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", missing)
    with tensorboard(tmp_path / "board", step=1, enabled=True) as board:
        board.on_log(1, {"loss": 0.5})
    assert not (tmp_path / "board").exists()
