"""The report of a run: from its record after the end, from its log before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder import InputError
from quiver.encoder.training.run_folder import RunLog
from quiver.eval.report.formats import render_markdown
from quiver.eval.report.training import read_run, summary, training_report, write_training_report
from quiver.retrieval.training.recipe import load_recipe

HOSTILE = "<script>alert(1)</script> | a\x00b\u202e `x`"
STEPS = [*range(10, 300, 10), 305]


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    development = ["development.data=data/dev", "training.learning_rate=8e-5", "training.seed=1234"]
    return json.loads(json.dumps(load_recipe("dpr-modernbert-base", development).model_dump())) | {"description": HOSTILE}


def _line(step: int) -> dict[str, float]:
    return {"step": step, "epoch": step / 305, "loss": 100 / step, "learning_rate": 8e-5, "grad_norm": 2.0, "tokens_per_second": 1e4 + step}


@pytest.fixture
def make_run(tmp_path: Path, recipe: dict[str, Any]) -> Callable[..., Path]:
    """A folder of a finished run with the keys of ``quiver.retrieval.training.run``."""

    def make(**result: Any) -> Path:
        lines = [_line(step) for step in STEPS]
        record = {
            "schema": "quiver-run/2",
            "recipe": recipe,
            "command": "quiver train dpr-modernbert-base --out runs/a",
            "date": "2026-11-21T12:00:00+00:00",
            "versions": {"python": "3.11.7", "torch": "2.11.0", "schedulefree": None},
            "platform": "Linux",
            "device": "cpu",
            "threads": 2,
            "processes": 1,
            "data": {"rows": 1_250_000, "documents_per_row": 2, "sha256": "ab" * 32, "skipped": 3, "revision": ""},
            "batch": {"rows": 64, "accumulation": 8, "processes": 8, "effective": 4096, "negatives_per_query": 127},
            "model": {"parameters": 149_000_000, "source": HOSTILE},
            "result": {
                "steps": 305,
                "epochs": 1.0,
                "losses": [[line["step"], line["loss"]] for line in lines],
                "learning_rates": [[line["step"], line["learning_rate"]] for line in lines],
                "grad_norms": [[line["step"], line["grad_norm"]] for line in lines],
                "tokens_per_second": [[line["step"], line["tokens_per_second"]] for line in lines],
                "development": [{"step": 150, "ndcg@10": 0.4321, "seconds": 60.0}, {"step": 305, "ndcg@10": 0.4123, "seconds": 125.0}],
                "kept_steps": [305],
                "texts": 200,
                "texts_truncated": 25,
                "tokens": 123_456,
                "seconds": 3725.4,
                "resumed_at": [120],
                "peak_memory_bytes": 62_464 * 2**20,
                **result,
            },
        }
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
        return folder

    return make


def test_the_report_shows_the_record(make_run: Callable[..., Path]) -> None:
    run = read_run(make_run())
    assert summary(run) == {
        "Updates": "305",
        "Last loss": "0.3279",
        "Best nDCG@10": "43.21 at step 150",
        "Tokens/s, median": "10,155",
        "Epochs": "1",
        "Weights": "step 305",
        "Training time": "1 h 2 min 5 s",
        "Tokens": "123,456",
        "Texts truncated": "25 of 200 (12.5%)",
        "Peak memory": "61 GiB",
    }
    text = render_markdown(training_report(run))
    for shown in (
        "| learning\\_rate | 8e-05 |",
        "| seed | 1234 |",
        "| Negatives per query | 127 |",
        "| torch | 2.11.0 |",
        "| 150 | **43.21** | 60 |",
    ):
        assert shown in text
    assert "schedulefree" not in text
    assert "```sh\nquiver train dpr-modernbert-base --out runs/a\n```" in text


def test_each_of_several_development_collections_has_a_column(make_run: Callable[..., Path]) -> None:
    scored = {"ndcg@10": 0.3, "ndcg@10 scifact.test": 0.4, "ndcg@10 fiqa.test": 0.2}
    run = read_run(make_run(development=[{"step": 150, **scored, "seconds": 60.0}, {"step": 305, "ndcg@10": 0.1, "seconds": 125.0}]))
    assert run.development_parts == {"scifact.test": {150: 0.4}, "fiqa.test": {150: 0.2}}
    text = render_markdown(training_report(run))
    assert "nDCG@10 is the mean over the collections" in text
    assert "| Step | nDCG@10 | scifact.test | fiqa.test | Seconds of training |" in text
    assert "| 150 | **30.00** | 40.00 | 20.00 | 60 |" in text
    assert "| 305 | 10.00 |  |  | 125 |" in text


def test_an_unfinished_run_is_read_from_its_log(tmp_path: Path, recipe: dict[str, Any]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
    assert summary(read_run(folder)) == {"Updates": "0"}
    page = write_training_report(folder)
    assert "Not finished" in page.read_text(encoding="utf-8")
    (folder / "begun.json").write_text(json.dumps({"schema": "quiver-begun/1", "command": "quiver train a", "data": {"rows": 7}}))
    log = RunLog(folder / "log.jsonl")
    for step in (10, 20):
        log.append(_line(step) | {"seconds": step / 2})
    log.append({"step": 20, "epoch": 0.1, "ndcg@10": 0.25, "seconds": 10.0})
    with (folder / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 30, "lo')
    run = read_run(folder)
    assert (run.finished, run.last_step, run.development) == (False, 20, ((20, 0.25, 10.0),))
    assert write_training_report(folder) == folder / "report.html"
    text = (folder / "report.md").read_text(encoding="utf-8")
    for shown in ("**Not finished**", "| 20 | 25.00 | 10 |", "| Rows | 7 |", "quiver train a"):
        assert shown in text
    assert (folder / "report.html").read_text(encoding="utf-8").count("<svg ") == 5


def test_other_folders_are_refused_in_one_line(make_run: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not a training run.*run\.json nor recipe\.json"):
        read_run(tmp_path)
    folder = make_run()
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    del record["result"]["tokens"]
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(InputError, match=r"run\.json: not the record of a run of this version \(KeyError: 'tokens'\)"):
        read_run(folder)
