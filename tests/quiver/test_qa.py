"""``quiver qa``: a model is trained, saved, loaded and evaluated again; mistakes are reported in one line."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights, save_encoder
from quiver.eval.nlu.answers import mean_scores, score_answers
from quiver.eval.nlu.questions import read_questions

WORDS = ["bird", "sea", "wing", "stone", "tree", "river", "cloud", "field", "road", "lamp"]


def write_numbers(path: Path, seed: int, count: int, *, impossible: int = 0) -> Path:
    """Write paragraphs of words with one number, which is the answer; the first paragraphs have no answer."""
    generator = random.Random(seed)
    paragraphs = []
    for number in range(count):
        line, answers = generator.choices(WORDS, k=30), []
        if number >= impossible:
            where, answer = generator.randrange(30), str(generator.randrange(10, 100))
            line[where] = answer
            answers = [{"text": answer, "answer_start": len(" ".join(line[:where])) + (where > 0)}]
        qa = {"id": f"{seed}-{number}", "question": "number?", "answers": answers, "is_impossible": not answers}
        paragraphs.append({"context": " ".join(line), "qas": [qa]})
    path.write_text(json.dumps({"version": "1", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tokenizer = Tokenizer.train([" ".join(WORDS) + " number?"] * 3, vocab_size=384, max_length=64)
    config = EncoderConfig.modernbert(
        vocab_size=384, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "global"], max_positions=64
    )
    save_encoder(init_weights(Encoder(config), seed=1), tmp_path / "encoder")
    tokenizer.save(tmp_path / "encoder")
    settings: dict[str, Any] = {
        "name": "numbers",
        "description": "numbers in lines of words",
        "kind": "span_qa",
        "source": "this test",
        "cost": "seconds",
        "expected": "most of them",
        "model": {"init": str(tmp_path / "encoder")},
        "data": {
            "train": str(write_numbers(tmp_path / "train.json", 1, 80)),
            "test": str(write_numbers(tmp_path / "test.json", 2, 30)),
            "official": "squad_v1",
        },
        "windows": {"max_length": 24, "overlap": 6, "max_question_length": 4, "max_answer_length": 4},
        "updates": {"epochs": 8, "batch_size": 8, "learning_rate": "3e-3"},
        "training": {"seed": 12},
    }
    path = tmp_path / "numbers.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_train_and_evaluate(quiver: Callable[..., Any], recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = quiver("qa", "train", recipe, "--out", out)
    assert (done.code, [line for line in done.err.splitlines() if "initialized at random" not in line]) == (0, [])
    assert f"model: {out / 'model'}" in done.out
    results = json.loads((out / "results.json").read_text())
    assert results["schema"] == "quiver-qa/1"
    assert results["scores"]["questions"] == 30
    assert results["scores"]["exact"] > 0.9
    assert results["windows"] >= 60
    record = json.loads((out / "run.json").read_text())
    assert record["schema"] == "quiver-run/fine-tuning-1"
    assert record["counts"]["questions"] == 80
    files = [tmp_path / "train.json", tmp_path / "test.json"]
    assert record["sha256"] == {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    assert record["counts"]["with_answer"] >= 80
    assert record["result"]["steps"] == record["result"]["losses"][-1][0]
    # The predictions are in the form of the official scripts, and score what was written.
    predictions = json.loads((out / "predictions.json").read_text())
    questions = read_questions(tmp_path / "test.json").questions
    mean = mean_scores(list(score_answers(questions, predictions, "squad_v1").values()))
    assert mean is not None
    assert (mean.exact, mean.f1) == (results["scores"]["exact"], results["scores"]["f1"])
    # The saved model, opened again, gives the same answers.
    lengths = ("--max-length", 24, "--overlap", 6, "--max-question-length", 4, "--max-answer-length", 4)
    asked = ("--data", tmp_path / "test.json", "--official", "squad_v1", "--out", tmp_path / "again")
    done = quiver("qa", "evaluate", "--model", out / "model", *asked, *lengths, "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["scores"] == results["scores"]
    assert json.loads((tmp_path / "again" / "predictions.json").read_text()) == predictions
    again = quiver("qa", "evaluate", "--model", out / "model", *asked, *lengths)
    assert again.code == 2
    assert "already exists; choose another --out, or pass --overwrite" in again.err
    again = quiver("qa", "evaluate", "--model", out / "model", *asked, "--overwrite")
    assert again.code == 2
    assert "windows.overlap" in again.err  # a question of 64 tokens leaves no room for 128 in windows of 64
    options = ("--overwrite", "--dtype", "bfloat16", "--device", "cpu", "--json")
    half = quiver("qa", "evaluate", "--model", out / "model", *asked, *lengths, *options)
    assert (half.code, half.err) == (0, "")
    assert json.loads((tmp_path / "again" / "results.json").read_text())["dtype"] == "bfloat16"
    assert abs(json.loads(half.out)["scores"]["f1"] - results["scores"]["f1"]) < 0.1
    small = quiver("qa", "evaluate", "--model", out / "model", *asked, *lengths, "--overwrite", "--dtype", "int8")
    assert (small.code, "--dtype int8 is for bi-encoders and ColBERT models" in small.err) == (2, True)
    # A run is trained over only when asked.
    again = quiver("qa", "train", recipe, "--out", out)
    assert (again.code, "already contains a run" in again.err) == (2, True)


def test_runs_are_compared_by_length_beside_the_paper(quiver: Callable[..., Any], recipe: Path, tmp_path: Path) -> None:
    """Truncation loses answers that windows find; a run of other questions, and a damaged one, are refused."""
    settings = ("data.official=korquad_v1", "updates.epochs=4")
    for name, changed in (("windows", ()), ("head", ("windows.paragraphs=head",)), ("divided", ("data.test=", "--split", "8:1:1"))):
        done = quiver("qa", "train", recipe, "--out", tmp_path / name, *settings, *changed)
        assert done.code == 0, done.err
    found = {name: json.loads((tmp_path / name / "results.json").read_text()) for name in ("windows", "head", "divided")}
    assert found["head"]["windows"] == 30 < found["windows"]["windows"]
    assert found["head"]["scores"]["exact"] < found["windows"]["scores"]["exact"]
    assert found["divided"]["scores"]["questions"] == 8
    out = tmp_path / "lengths.md"
    done = quiver("report", "qa", tmp_path / "windows", tmp_path / "head", "--out", out)
    assert done.code == 0, done.err
    text = out.read_text()
    assert "| BERT-1024 (paper) | 1024 | head | 77.23" in text
    for name in ("windows", "head"):
        exact = f"{100 * found[name]['scores']['exact']:.2f}"
        assert any(f"/{name} |" in line and exact in line for line in text.splitlines()), text
    assert [each["up_to"] for each in found["head"]["by_length"]] == [256]
    assert "1 to 256" in text
    other = quiver("report", "qa", tmp_path / "windows", tmp_path / "divided", "--out", out)
    assert (other.code, "compare results on the same questions" in other.err) == (2, True)
    (tmp_path / "head" / "results.json").write_text(json.dumps({**found["head"], "by_length": None}))
    damaged = quiver("report", "qa", tmp_path / "windows", tmp_path / "head", "--out", out)
    assert (damaged.code, damaged.err.count("\n"), "damaged" in damaged.err) == (2, 1, True)
