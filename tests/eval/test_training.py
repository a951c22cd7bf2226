"""Training from Python: what the command line can do, by names, paths, mappings and recipes, with development scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quiver
from quiver.encoder import InputError
from quiver.retrieval.training.recipe import load_recipe

pytest.importorskip("sentence_transformers")


@pytest.fixture
def command_line(request: pytest.FixtureRequest) -> Any:
    """The fixture ``quiver``, whose name is the module's here."""
    return request.getfixturevalue("quiver")


SMALL = {
    "model": {"architecture": {"hidden_size": 16, "heads": 2, "intermediate_size": 24, "vocab_size": 320, "layers": 1}, "max_length": 24},
    "training.batch_size": 4,
    "training.max_steps": 2,
    "training.log_every": 1,
    "training.warmup_ratio": 0,
}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"query": f"number {n}", "positive": f"a text of number {n}"}) + "\n" for n in range(12)))
    return path


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    folder = tmp_path / "held-out"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"_id": f"d{n}", "text": f"a text of number {n}"}) + "\n" for n in range(4)))
    (folder / "queries.jsonl").write_text('{"_id": "q", "text": "number 1"}\n')
    (folder / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq\td1\t1\n")
    return folder


def test_a_recipe_is_a_name_a_path_a_mapping_or_an_object(rows: Path, tmp_path: Path) -> None:
    changes = {**SMALL, "data.train": rows}
    recipe = load_recipe("quickstart", changes)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(recipe.model_dump()))
    records = [
        quiver.train("quickstart", str(tmp_path / "name"), changes, device="cpu"),
        quiver.train(recipe, str(tmp_path / "object"), device="cpu"),
        quiver.train(recipe=str(file), out=tmp_path / "path", device="cpu"),
        quiver.train(recipe.model_dump(), tmp_path / "mapping", device="cpu"),
    ]
    assert len({record["model"]["fingerprint"] for record in records}) == 1
    assert [record["result"]["steps"] for record in records] == [2] * 4
    assert (tmp_path / "name" / "report.md").is_file()
    assert quiver.BiEncoder(str(tmp_path / "name" / "model"), device="cpu").dim == 16


def test_overrides_are_texts_or_values() -> None:
    texts = load_recipe("quickstart", ["training.batch_size=8", "data.train=[a.jsonl, b.jsonl]", "model.query_prompt=", "development=null"])
    values = {"training": {"batch_size": 8}, "data.train": (Path("a.jsonl"), "b.jsonl"), "model.query_prompt": None, "development": None}
    assert load_recipe("quickstart", values) == texts
    assert texts.training.batch_size == 8
    assert load_recipe("quickstart", "training.batch_size=8").training.batch_size == 8
    with pytest.raises(InputError, match=r"training\.batch_sise: unknown key, did you mean 'batch_size'"):
        load_recipe("quickstart", {"training.batch_sise": 8})


def test_the_development_collection_of_a_recipe_is_scored(rows: Path, collection: Path, tmp_path: Path) -> None:
    changes = {**SMALL, "data.train": rows, "development": {"data": str(collection), "every": 1}}
    record = quiver.train("quickstart", tmp_path / "run", changes, device="cpu")
    assert [line["step"] for line in record["result"]["development"]] == [1, 2]
    without = quiver.train("quickstart", tmp_path / "without", {**changes, "development": None}, device="cpu")
    assert without["result"]["development"] == []
    assert without["model"]["fingerprint"] == record["model"]["fingerprint"]
    missing = {**changes, "development": {"data": str(tmp_path / "nothing")}}
    with pytest.raises(InputError, match=r"development\.data: .*development=null trains without one"):
        quiver.train("quickstart", tmp_path / "missing", missing, device="cpu")
    assert not (tmp_path / "missing").exists()


def claims(record: dict[str, Any]) -> dict[str, Any]:
    recipe = record["recipe"]
    return {name: recipe[name] for name in ("description", "source", "cost", "expected")} | {"revision": record["data"]["revision"]}


def test_a_run_on_other_data_does_not_claim_what_the_recipe_measured(command_line: Callable[..., Any], rows: Path, tmp_path: Path) -> None:
    record = quiver.train("docstrings-dense-small", tmp_path / "run", tiny_start(tmp_path, rows), device="cpu")
    assert claims(record) == {"description": None, "source": None, "cost": None, "expected": None, "revision": ""}
    run, out = tmp_path / "run", tmp_path / "card"
    exported = command_line("export", run / "model", "--layout", "hf", "--run-folder", run, "--out", out)
    assert exported.code == 0, exported.err
    card = (out / "README.md").read_text()
    assert "docstrings-dense-small" in card
    for claim in ("code search model", "AnswerDotAI", "CPU core", "nDCG@10", "docstrings-dense`", "| Source |"):
        assert claim not in card
    own = {**tiny_start(tmp_path, rows), "description": "numbers", "data.revision": "of today", "training.max_steps": 1}
    record = quiver.train("docstrings-dense-small", tmp_path / "own", own, device="cpu")
    assert claims(record) == {"description": "numbers", "source": None, "cost": None, "expected": None, "revision": "of today"}


def tiny_start(tmp_path: Path, rows: Path) -> dict[str, Any]:
    if not (tmp_path / "start").exists():
        quiver.train("quickstart", tmp_path / "start", {**SMALL, "data.train": rows, "training.max_steps": 1}, device="cpu")
    return {"model.init": tmp_path / "start" / "model", "data.train": rows, "training.batch_size": 4, "training.max_length": 16}
