"""``quiver mine`` and ``quiver teacher-scores`` end to end with a real model of two layers; mistakes are reported in one line."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quiver.retrieval.models.loading import load_model
from quiver.retrieval.models.options import ModelOptions
from tests.damage import Bomb
from tests.quiver.conftest import make_bi_encoder

DOCUMENTS = {f"d{number}": f"a document about number {number} and {number * 7 % 11}" for number in range(12)}
QUERIES = {f"q{number}": f"number {number}" for number in range(5)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_bi_encoder(tmp_path / "model", DOCUMENTS.values())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", DOCUMENTS), ("queries", QUERIES)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"_id": key, "text": text}) + "\n" for key, text in texts.items()))
    (folder / "qrels" / "train.tsv").write_text("".join(f"q{number}\td{number}\t1\n" for number in range(5)))
    return folder


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"question": QUERIES[f"q{number}"], "pos": DOCUMENTS[f"d{number}"]}) + "\n" for number in range(5)))
    return path


def crossed(folder: Path) -> Path:
    """The configuration of a cross-encoder."""
    (folder / "crossed").mkdir()
    (folder / "crossed" / "config.json").write_text('{"model_type": "bert", "architectures": ["BertForSequenceClassification"]}')
    return folder / "crossed"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress((folder / "train.jsonl.gz").read_bytes()).splitlines()]


def test_mined_rows_are_scored_by_a_teacher(quiver: Callable[..., Any], model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "mined"
    mined = quiver("mine", data, "--model", model, "--out", out, "-n", 3, "--margin", "none", "--ranks", "2-8")
    assert mined.code == 0, mined.err
    assert "candidates" in mined.out
    assert "  documents_per_row: 4\n  short_rows: skip" in mined.out
    rows = rows_of(out)
    assert [row["query_id"] for row in rows] == list(QUERIES)
    assert all(len(row["negatives"]) == 3 and len(row["scores"]) == 4 for row in rows)
    scored = quiver("teacher-scores", out / "train.jsonl.gz", "--teacher", model, "--out", tmp_path / "scored", "--normalize", "min-max")
    assert scored.code == 0, scored.err
    assert "positive first" in scored.out
    for row in rows_of(tmp_path / "scored"):
        assert (min(row["scores"]), max(row["scores"])) == (0.0, 1.0)


def test_models_mine_and_score_with_the_lengths_prompts_and_width_of_the_options(
    quiver: Callable[..., Any], model: Path, data: Path, pairs: Path, tmp_path: Path
) -> None:
    options = ("--document-length", 14, "--query-prompt", "about: ", "--document-prompt", "text: ", "--truncate-dim", 8)
    settings = ModelOptions(document_length=14, query_prompt="about: ", document_prompt="text: ", truncate_dim=8)
    changed = load_model(model, options=settings)
    assert quiver("mine", data, "--model", model, "--out", tmp_path / "mined", "--margin", "none", *options).code == 0
    fields = ("--query-field", "question", "--document-field", "pos")
    assert quiver("teacher-scores", pairs, *fields, "--teacher", model, "--out", tmp_path / "scored", *options).code == 0
    for row in rows_of(tmp_path / "mined"):
        query, documents = changed.encode_query(row["query"]), changed.encode_document([row["positive"], *row["negatives"]])
        assert row["scores"] == pytest.approx(changed.similarity(query, documents)[0].tolist(), abs=1e-5)
    for row in rows_of(tmp_path / "scored"):
        query, document = changed.encode_query(row["question"]), changed.encode_document(row["pos"])
        assert row["scores"] == pytest.approx([float(changed.similarity(query, document))], abs=1e-5)
    assert json.loads((tmp_path / "scored" / "scoring.json").read_text())["teacher"]["fingerprint"] == changed.card.fingerprint
    assert quiver("index", "build", data, "--model", model, "--out", tmp_path / "index", *options).code == 0
    for arguments, message in (
        (("mine", data, "--index", tmp_path / "index"), "the model of an index has those of the index; remove the options"),
        (("mine", data, "--model", "bm25"), "the other options of a model are not for bm25, which is none"),
        (("teacher-scores", pairs, *fields, "--teacher", model, "--teacher", crossed(tmp_path)), "a cross-encoder has no prompts"),
    ):
        done = quiver(*arguments, "--out", tmp_path / "refused", "--query-prompt", "about: ")
        assert (done.code, message in done.err) == (2, True), done.err
    assert not (tmp_path / "refused").exists()


def test_mining_with_an_index_needs_no_model_option(quiver: Callable[..., Any], model: Path, data: Path, tmp_path: Path) -> None:
    assert quiver("index", "build", data, "--model", model, "--out", tmp_path / "index").code == 0
    rules = ("-n", 2, "--margin", "max-score=0.99", "--choose", "random", "--seed", 5, "--no-cache")
    by_index = quiver("mine", data, "--index", tmp_path / "index", "--out", tmp_path / "a", "--json", *rules)
    assert by_index.code == 0, by_index.err
    record = json.loads(by_index.out)
    assert record["rules"]["margins"] == [["max-score", 0.99]]
    assert record["data"]["index"] == str(tmp_path / "index")
    assert quiver("mine", data, "--model", model, "--out", tmp_path / "b", *rules).code == 0
    by_model = [{**row, "scores": pytest.approx(row["scores"], abs=1e-6)} for row in rows_of(tmp_path / "b")]
    assert rows_of(tmp_path / "a") == by_model


@pytest.mark.parametrize("kind", ["bi-encoder", "cross-encoder"])
def test_a_teacher_that_is_a_malicious_pickle_is_refused(
    kind: str, quiver: Callable[..., Any], bge_m3: Path, pairs: Path, tmp_path: Path
) -> None:
    if kind == "cross-encoder":
        pytest.importorskip("sentence_transformers")
        config = json.loads((bge_m3 / "config.json").read_text())
        changes = {"architectures": ["XLMRobertaForSequenceClassification"], "num_labels": 1}
        (bge_m3 / "config.json").write_text(json.dumps(config | changes))
        (bge_m3 / "modules.json").unlink()
    torch.save({"embeddings.word_embeddings.weight": Bomb(tmp_path / "went off")}, bge_m3 / "pytorch_model.bin")
    fields = ("--query-field", "question", "--document-field", "pos")
    done = quiver("teacher-scores", pairs, *fields, "--teacher", bge_m3, "--out", tmp_path / "out")
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert "pytorch_model.bin: refused, and nothing in it was executed" in done.err
    assert not (tmp_path / "went off").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (("--margin", "max-score=0"), r"--margin max-score=0 excluded 55 of 55 candidates; loosen it, or pass --margin none"),
        (("--margin", "none", "--ranks", "100-200"), r"--ranks 100-200 holds 0 candidates for 5 queries; lower its first rank"),
        (("--margin", "none", "-n", 30), r"no row has 30 negatives \(55 in all\), .* --ranks 1-200 holds 55 candidates"),
    ],
)
def test_mining_that_leaves_no_usable_row_fails_and_names_the_limit(
    quiver: Callable[..., Any], data: Path, tmp_path: Path, limits: tuple[Any, ...], reason: str
) -> None:
    for form in ((), ("--json",)):
        done = quiver("mine", data, "-m", "bm25", "--out", tmp_path / "mined", *limits, *form, "--overwrite")
        assert (done.code, "short_rows: skip" in done.out) == (1, False)
        assert re.search(reason, done.err), done.err
