"""``quiver export``: a model is exported with its run and scores; mistakes are reported in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from quiver.cli.models import Layout
from quiver.retrieval.models.export.export import LAYOUTS
from quiver.retrieval.models.loading import load_model
from tests.quiver.conftest import make_bi_encoder

DOCUMENTS = {"d1": "a bird has wings", "d2": "the sea is deep", "d3": "retrieval finds documents"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_bi_encoder(tmp_path / "runs" / "model", DOCUMENTS.values())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "birds"
    (folder / "qrels").mkdir(parents=True)
    corpus = [json.dumps({"_id": name, "title": "", "text": text}) for name, text in DOCUMENTS.items()]
    (folder / "corpus.jsonl").write_text("\n".join(corpus))
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q1", "text": "which animal has wings"}))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")
    return folder


def metadata(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    return found


def test_a_model_is_exported_with_its_run_and_scores(quiver: Callable[..., Any], model: Path, data: Path, tmp_path: Path) -> None:
    assert quiver("evaluate", "--model", model, "--data", data, "--out", tmp_path / "results").code == 0
    scored = json.loads((tmp_path / "results" / "results.json").read_text())["collections"][0]["measures"]
    record = {"schema": "quiver-run/2", "recipe": {"name": "birds"}, "model": {"fingerprint": load_model(model).card.fingerprint}}
    (model.parent / "run.json").write_text(json.dumps(record))
    out = tmp_path / "bird-search"
    known = ("--run-folder", model.parent, "--results", tmp_path / "results", "--language", "en")
    done = quiver("export", model, "--layout", "sentence-transformers", "--out", out, *known)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"model: {out} (sentence-transformers, ")
    [index] = metadata(out)["model-index"]
    assert index["name"] == "bird-search"
    values = {metric["name"]: metric["value"] for entry in index["results"] for metric in entry["metrics"]}
    assert values["nDCG@10"] == pytest.approx(scored["ndcg@10"], abs=1e-5)
    assert "name: birds\n" in (out / "README.md").read_text()
    assert load_model(out).card.fingerprint == record["model"]["fingerprint"]

    other = quiver("export", out, "--layout", "hf", "--out", tmp_path / "bare", "--results", data)
    assert other.code == 2
    assert other.err.count("\n") == 1


def test_an_export_is_described_as_json(quiver: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    done = quiver("export", model, "--layout", "hf", "--out", tmp_path / "out", "--json")
    printed = json.loads(done.out)
    assert printed.keys() == {"folder", "layout", "kind", "fingerprint", "bytes", "left_out"}
    assert (printed["layout"], printed["kind"], printed["left_out"]) == ("hf", "dense", [])
    assert printed["fingerprint"] == load_model(model).card.fingerprint


def test_all_layouts_are_offered() -> None:
    assert set(get_args(Layout)) == set(LAYOUTS)
