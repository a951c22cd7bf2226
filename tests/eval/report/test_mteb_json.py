"""Results in the format of MTEB: written and omitted tasks, and reading by mteb."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quiver.eval.report.hub import AGGREGATES, TASKS, task_results, without_task
from quiver.eval.results import CollectionResult, Results

MakeScored = Callable[..., CollectionResult]
MakeResults = Callable[..., Results]


def test_each_task_has_one_file(make_scored: MakeScored, make_results: MakeResults) -> None:
    results = make_results("alpha", make_scored("scifact", 0.65), make_scored("cosqa", 0.5))
    assert without_task(results) == ["cosqa.test"]
    (content,) = [dict(content) for name, content in task_results(results).items() if name == "SciFact.json"]
    assert content == {
        "dataset_revision": "c" * 40,
        "task_name": "SciFact",
        "mteb_version": None,
        "scores": {
            "test": [
                {
                    "ndcg_at_10": 0.65,
                    "mrr_at_10": 0.4,
                    "recall_at_10": 0.6,
                    "recall_at_100": 0.7,
                    "recall_at_1000": 0.8,
                    "precision_at_10": 0.1,
                    "map_at_1000": 0.25,
                    "main_score": 0.65,
                    "hf_subset": "default",
                    "languages": ["eng-Latn"],
                }
            ]
        },
        "evaluation_time": pytest.approx(12.9),
        "kg_co2_emissions": None,
        "date": "2030-01-02T03:04:05+00:00",
    }
    assert list(task_results(results)) == ["SciFact.json"]


def test_a_complete_group_has_its_parts_and_their_mean(make_scored: MakeScored, make_results: MakeResults) -> None:
    names = [name for name in TASKS if name.startswith("cqadupstack-")]
    assert len(names) == 12
    forums = [make_scored(name, 0.1 + 0.01 * n, group="cqadupstack", group_size=12) for n, name in enumerate(names)]
    whole = task_results(make_results("alpha", *forums))
    assert len(whole) == 13
    scores = whole["CQADupstackRetrieval.json"]["scores"]
    assert isinstance(scores, dict)
    assert scores["test"][0]["main_score"] == pytest.approx(0.155)
    assert "CQADupstackRetrieval.json" not in task_results(make_results("alpha", *forums[:11]))
    # Twelve parts, but of two splits, or with one part twice.
    mixed = [*forums[:11], replace(forums[11], split="dev")]
    assert "CQADupstackRetrieval.json" not in task_results(make_results("alpha", *mixed))
    assert "CQADupstackRetrieval.json" not in task_results(make_results("alpha", *forums[:11], forums[0]))
    # Complete in one split, with an additional part in another.
    beside = task_results(make_results("alpha", *forums, replace(forums[0], split="dev")))["CQADupstackRetrieval.json"]["scores"]
    assert beside == scores


@pytest.mark.parity
def test_mteb_reads_the_files(make_scored: MakeScored, make_results: MakeResults, tmp_path: Path) -> None:
    task_result = pytest.importorskip("mteb.results").TaskResult
    results = make_results("alpha", make_scored("scifact", 0.65), make_scored("mldr-en", 0.3), make_scored("mldr-ko", 0.5))
    for name, content in task_results(results).items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    scifact = task_result.from_disk(tmp_path / "SciFact.json")
    assert scifact.get_score() == 0.65
    assert scifact.languages == ["eng"]
    assert scifact.task.metadata.main_score == "ndcg_at_10"
    long = task_result.from_disk(tmp_path / "MultiLongDocRetrieval.json")
    assert long.get_score() == pytest.approx(0.4)
    assert long.get_score(languages=["kor"]) == 0.5


@pytest.mark.parity
def test_mteb_has_every_task_by_this_name() -> None:
    mteb = pytest.importorskip("mteb")
    for collection, task in TASKS.items():
        theirs = mteb.get_task(task.name)
        metadata = theirs.metadata
        assert theirs.ignore_identical_ids == task.exclude_self, collection
        assert metadata.dataset["path"] == task.data_set, collection
        assert metadata.main_score == "ndcg_at_10", collection
        assert metadata.hf_subsets_to_langscripts[task.subset] == list(task.languages), collection
    assert len(TASKS) == 15 + 12 + 13 + 6 + 13
    for group, name in AGGREGATES.items():
        parts = {task.name for collection, task in TASKS.items() if collection.startswith(f"{group}-")}
        assert {part.metadata.name for part in mteb.get_task(name).metadata.tasks} == parts
