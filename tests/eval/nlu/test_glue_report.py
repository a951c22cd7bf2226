"""Table 5 with a row for our results: the paper's figures, our scores, and blanks for missing tasks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from quiver.encoder import InputError
from quiver.encoder.files import write_json
from quiver.eval.metrics import average
from quiver.eval.nlu.fine_tuning import RUN_SCHEMA
from quiver.eval.nlu.glue import GlueResults, TaskRun, gather_results
from quiver.eval.nlu.glue_tasks import TASKS, TaskName
from quiver.eval.nlu.glue_training import TaskScores
from quiver.eval.report.paper import glue_layout


def run(task: TaskName, score: float) -> TaskRun:
    measures = dict.fromkeys(TASKS[task].measures, score)
    scores = TaskScores(task, TASKS[task].held_out, 100, score, measures)
    return TaskRun(
        scores,
        trained_on=1_234,
        from_mnli=task == "rte",
        learning_rate=8e-5,
        weight_decay=1e-6,
        epochs=2.0,
        batch_size=16,
        steps=90,
        planned_steps=156,
        best_step=50,
        seconds=12.3,
        seed=7,
    )


def results(**scores: float) -> GlueResults:
    runs = {name: run(name, scores[name]) for name in TASKS if name in scores}
    means: dict[str, float | None] = {name: each.scores.score for name, each in runs.items()}
    return GlueResults("mine", "models/<mine>", average(means, list(TASKS)), dict(runs))


def test_our_row_follows_the_rows_of_the_paper() -> None:
    layout = glue_layout([asdict(results(**dict.fromkeys(TASKS, 0.5) | {"mnli": 0.8912}))])
    assert layout.columns == ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE", "Average")
    theirs, ours = layout.lines[6], layout.lines[-1]
    assert (theirs.label, theirs.cells) == ("ModernBERT-base", (65.1, 96.0, 92.2, 91.8, 92.1, 89.1, 93.9, 87.4, 88.4))
    assert ours.cells[5] == pytest.approx(89.12)
    assert ours.cells[-1] == pytest.approx((7 * 50 + 89.12) / 8)
    assert (ours.measured, ours.origin) == ("8 of 8", "measured")
    assert len(layout.lines) == 13


def record(name: str, task: TaskName) -> dict[str, object]:
    updates = {"learning_rate": 8e-5, "weight_decay": 1e-6, "epochs": 2.0, "batch_size": 16}
    return {
        "schema": RUN_SCHEMA,
        "recipe": {"name": name, "model": {"init": "m"}, "tasks": {task: updates}, "training": {"seed": 7}},
        "counts": {"examples": 1_234},
        "result": {"steps": 90, "planned_steps": 156, "best_step": 50, "seconds": 12.3},
        "scores": {"task": task, "split": TASKS[task].held_out, "examples": 100, "score": 0.5, "measures": {TASKS[task].measures[0]: 0.5}},
    }


def test_records_are_collected_and_foreign_records_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="contains no complete run of quiver glue"):
        gather_results(tmp_path)
    for name in ("rte", "cola"):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "run.json", record("mine", name))  # type: ignore[arg-type]
    found = gather_results(tmp_path)
    assert list(found.runs) == ["cola", "rte"]
    assert (found.runs["rte"].trained_on, found.runs["rte"].from_mnli, found.average.known) == (1_234, False, 2)
    write_json(tmp_path / "rte" / "run.json", record("yours", "rte"))
    with pytest.raises(InputError, match=r"contains runs of several models: m \(mine\), m \(yours\)"):
        gather_results(tmp_path)
    write_json(tmp_path / "rte" / "run.json", record("mine", "rte") | {"schema": "quiver-run/2"})
    with pytest.raises(InputError, match="its schema is quiver-run/2, this version reads"):
        gather_results(tmp_path)
    write_json(tmp_path / "rte" / "run.json", {"schema": RUN_SCHEMA})
    with pytest.raises(InputError, match=r"one of its run.json files is damaged \(the field 'recipe' is missing"):
        gather_results(tmp_path)
