"""Quickstart: the whole path on a few steps, and, marked slow, for real with the figures it promises."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from encoder import InputError
from eval.quickstart import ANSWERS, QUESTIONS, quickstart
from retrieval.corpus import load_collection
from retrieval.indexes import open_index
from retrieval.models import load_model

pytest.importorskip("sentence_transformers")
pytest.importorskip("bm25s")

SMALL = (
    "model.architecture.hidden_size=32",
    "model.architecture.heads=2",
    "model.architecture.intermediate_size=48",
    "model.architecture.vocab_size=512",
    "model.max_length=32",
    "training.max_steps=3",
    "training.log_every=1",
)


def test_the_whole_path(tmp_path: Path) -> None:
    stages: list[str] = []
    result = quickstart(tmp_path, overrides=SMALL, command="quiver quickstart", say=stages.append)
    assert len(stages) == len(result.seconds) == 4
    collection = load_collection(tmp_path / "data" / "held_out", "test")
    assert len(collection.documents) == len(collection.queries) == result.held_out > 300
    assert result.train_pairs > 5 * result.held_out

    for name, results in (("untrained", result.untrained), ("trained", result.trained)):
        stored = json.loads((tmp_path / "results" / name / "results.json").read_text())
        assert stored["ndcg@10"] == results.headline
        assert stored["collections"][0]["queries"] == result.held_out
        assert stored["collections"][0]["baselines"][0]["measures"]["ndcg@10"] > 0.2  # BM25 is no accident
    prints = [load_model(tmp_path / name / "model").card.fingerprint for name in ("untrained", "trained")]
    assert prints[0] != prints[1]
    run = json.loads((tmp_path / "trained" / "run.json").read_text())
    assert run["result"]["steps"] == 3
    assert run["data"]["rows"] == result.train_pairs

    index = open_index(tmp_path / "index")
    assert len(index) == result.held_out
    assert set(result.answers) == set(QUESTIONS)
    assert len(QUESTIONS) == 3
    for answers in result.answers.values():
        assert len(answers) == ANSWERS
        assert [answer.score for answer in answers] == sorted((answer.score for answer in answers), reverse=True)
        assert all("def " in answer.code for answer in answers)
    report = result.report.read_text()
    for label in ("untrained/model", "trained/model", "bm25"):
        assert label in report

    with pytest.raises(InputError, match="holds data already"):
        quickstart(tmp_path, overrides=SMALL)


def test_packages_are_mined_too(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no_such_package"):
        quickstart(tmp_path / "out", packages=["no_such_package"], overrides=SMALL)
    small = (*SMALL, "training.max_steps=1")
    assert quickstart(tmp_path / "out", packages=["rich"], overrides=small, overwrite=True).train_pairs > 3200


@pytest.mark.slow
def test_the_promised_figures(tmp_path: Path) -> None:
    started = time.perf_counter()
    result = quickstart(tmp_path, command="quiver quickstart")
    seconds = time.perf_counter() - started
    assert result.trained.headline is not None
    assert result.untrained.headline is not None
    assert result.trained.headline >= 2.5 * result.untrained.headline
    assert seconds < 360
