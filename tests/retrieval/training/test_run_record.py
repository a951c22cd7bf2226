"""The run record: negatives per query computed by hand, data, batch, and curves from the log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.encoder.training.trainer import Progress
from quiver.retrieval.training.data import TrainingRows, prepare_rows
from quiver.retrieval.training.recipe import SCORE, Recipe
from quiver.retrieval.training.run import base_model, describe_batch, describe_result

MakeRecipe = Callable[..., Recipe]

SCORED = "data.score_fields=scores"
GATHERED = "loss.gather_across_devices=true"


@pytest.mark.parametrize(
    ("recipe", "processes", "negatives"),
    [
        (("dense",), 1, 4 * 3 - 1),
        (("dense",), 2, 4 * 3 - 1),  # each process has its own
        (("dense", GATHERED), 2, 8 * 3 - 1),
        (("dense", "loss.name=cached_mnrl", GATHERED), 4, 16 * 3 - 1),
        (("dense", "training.accumulation=8"), 1, 4 * 3 - 1),  # it adds none
        (("dense", "loss.name=kl", SCORED), 2, 2),
        (("dense", "loss.name=margin_mse", SCORED), 1, 2),
        (("colbert",), 1, 4 * 3 - 1),
        (("colbert", "loss.name=cached_contrastive", GATHERED), 2, 8 * 3 - 1),
        (("colbert", "loss.name=distillation", SCORED), 2, 2),
    ],
)
def test_negatives_per_query_are_counted_for_each_loss_and_setup(
    make_recipe: MakeRecipe, rows: TrainingRows, recipe: tuple[str, ...], processes: int, negatives: int
) -> None:
    assert rows.documents_per_row == 3
    assert describe_batch(make_recipe(*recipe), rows, processes)["negatives_per_query"] == negatives


def test_the_base_model_is_recorded_only_if_it_is_on_the_hub(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``runs/start`` may be a folder or a Hub id; an existing folder takes precedence, as when a model is loaded."""
    assert base_model(make_recipe("dense")) is None  # it starts from a folder
    started = make_recipe("dense", "model.init=runs/start")
    assert base_model(started) == "runs/start"
    (tmp_path / "runs" / "start").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert base_model(started) is None


@pytest.fixture
def rows(make_recipe: MakeRecipe, tmp_path: Path) -> TrainingRows:
    return prepare_rows(make_recipe("dense").data, tmp_path / "work", seed=1)


def test_the_record_describes_batch_and_data(make_recipe: MakeRecipe, rows: TrainingRows) -> None:
    recipe = make_recipe("dense", "training.accumulation=8", "data.revision=2026-11", GATHERED)
    expected = {"rows": 4, "accumulation": 8, "processes": 2, "effective": 64, "negatives_per_query": 23}
    assert describe_batch(recipe, rows, 2) == expected
    assert rows.counts._asdict() == {
        "rows": 64,
        "documents_per_row": 3,
        "sha256": rows.counts.sha256,
        "skipped": 0,
        "not_relevant": 0,
        "rows_short": 0,
        "rows_cut": 64,
        "copies": 0,
    }


def test_the_result_is_taken_from_log_and_progress() -> None:
    line = {"epoch": 0.1, "learning_rate": 1e-5, "grad_norm": 2.0, "tokens_per_second": 100.0, "seconds": 1.5}
    log = [{"step": 1, "loss": 0.5, **line}, {"step": 1, "epoch": 0.1, SCORE: 0.25, "seconds": 1.75}, {"step": 2, "loss": 0.25, **line}]
    progress = Progress(step=2, seconds=3.5, counts={"texts": 24, "truncated": 1}, tokens=300, best=[(0.25, 1)], resumed_at=[1])
    result = describe_result(log, progress, epochs=0.2, kept_steps=[1])
    assert result.pop("peak_memory_bytes") > 2**20
    assert result == {
        "steps": 2,
        "epochs": 0.2,
        "losses": [(1, 0.5), (2, 0.25)],
        "learning_rates": [(1, 1e-5), (2, 1e-5)],
        "grad_norms": [(1, 2.0), (2, 2.0)],
        "tokens_per_second": [(1, 100.0), (2, 100.0)],
        "development": [{"step": 1, SCORE: 0.25, "seconds": 1.75}],
        "kept_steps": [1],
        "texts": 24,
        "texts_truncated": 1,
        "tokens": 300,
        "seconds": 3.5,
        "resumed_at": [1],
    }
