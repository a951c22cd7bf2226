"""Every public function takes a path as text as well as a `Path`."""

from __future__ import annotations

import json
from pathlib import Path

import quiver


def test_public_names_take_paths_as_text(data: Path, model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"query": f"number {n}", "positive": f"a text of number {n}"}) + "\n" for n in range(4)))
    encoder = quiver.BiEncoder(str(model), device="cpu")
    encoder.save_pretrained(str(tmp_path / "copy"))
    assert len(list(quiver.open_corpus(str(data)))) == 6
    index = quiver.build_index(str(data), str(tmp_path / "copy"), str(tmp_path / "index"))
    assert len(quiver.open_index(str(tmp_path / "index"))) == len(index) == 6
    results = quiver.evaluate(str(model), str(data), out=str(tmp_path / "results"), baselines=(), device="cpu")
    assert (tmp_path / "results" / "results.json").is_file()
    assert results is not None
    overrides = {"model.init": str(model), "model.tokenizer": None, "model.architecture": None, "data.train": str(rows)}
    overrides |= {"training.batch_size": 2, "training.max_steps": 1}
    quiver.train("quickstart", str(tmp_path / "run"), overrides, device="cpu")
    colbert = {"kind": "colbert", "loss.name": "contrastive", "loss.scale": 20, "model.pooling": None, "model.normalize": None}
    colbert |= {"model.max_length": None, "model.colbert.document_length": 24, "model.colbert.query_length": 12}
    quiver.train("quickstart", str(tmp_path / "tokens"), {**overrides, **colbert}, device="cpu")
    assert quiver.ColBERT(str(tmp_path / "tokens" / "model"), device="cpu").settings.colbert.query_length == 12
