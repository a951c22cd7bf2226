"""Batches with a non-finite loss or gradient, as written for inspection."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from quiver.encoder.training.run_folder import keep_batches


def seen(loss: float, first: int) -> tuple[float, list[dict[str, Any]], dict[str, Any]]:
    rows = [{"row": first + place, "epoch": 1, "query": f"q{first + place}", "document_1": "d\u2028"} for place in range(2)]
    whole = torch.arange(first, first + 6).reshape(2, 3)
    features = {"query_input_ids": whole, "query_attention_mask": whole[:, 1], "twice": whole, "return_loss": True}
    return loss, rows, features


def test_batches_with_a_non_finite_loss_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "nonfinite" / "step-000003"
    keep_batches(folder, [seen(0.5, 0), seen(math.nan, 10), seen(-math.inf, 20)], step=3, grad_norm=math.nan)
    described, tensors = json.loads((folder / "batch.json").read_text()), load_file(folder / "batch.safetensors")
    assert described["step"] == 3
    assert described["grad_norm"] == "nan"
    assert [batch["loss"] for batch in described["batches"]] == ["nan", "-inf"]
    assert [[row["query"] for row in batch["rows"]] for batch in described["batches"]] == [["q10", "q11"], ["q20", "q21"]]
    assert described["batches"][0]["rows"][0] == {"row": 10, "epoch": 1, "query": "q10", "document_1": "d\u2028"}
    assert sorted(tensors) == [f"{place}.{name}" for place in (0, 1) for name in ("query_attention_mask", "query_input_ids", "twice")]
    assert tensors["0.query_input_ids"].tolist() == [[10, 11, 12], [13, 14, 15]]
    assert tensors["1.query_attention_mask"].tolist() == [21, 24]


def test_all_batches_are_written_if_only_the_gradient_is_not_finite(tmp_path: Path) -> None:
    keep_batches(tmp_path, [seen(0.5, 0), seen(0.25, 10)], step=3, grad_norm=math.inf)
    described = json.loads((tmp_path / "batch.json").read_text())
    assert [batch["loss"] for batch in described["batches"]] == [0.5, 0.25]
    assert described["grad_norm"] == "inf"
