"""The report of a sweep: candidates best first, the training command, cautions, and a chart with every point."""

from __future__ import annotations

import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

import pytest

from quiver.eval.report.training import cautions, sweep_chart, write_sweep_report
from quiver.eval.sweep import NDCG, Candidate, Sweep, SweepRun, Value

RATE, SIZE, SEED = "training.learning_rate", "training.batch_size", "training.seed"
SVG = "{http://www.w3.org/2000/svg}"


def candidate(settings: Mapping[str, Value], *scores: float, missing: int = 0) -> Candidate:
    overrides = tuple(f"{path}={value}" for path, value in settings.items())
    folders = tuple(f"runs/{overrides[0]}_{seed}" for seed in range(len(scores)))
    return Candidate(settings, overrides, folders, {NDCG.key: scores} if scores else {}, missing)


def sweep(axes: Mapping[str, tuple[Value, ...]], *candidates: Candidate, failed: str | None = None) -> Sweep:
    runs = [SweepRun(folder, each.settings, "finished", {NDCG.key: 0.5}, 1.0) for each in candidates for folder in each.folders]
    if failed is not None:
        runs.append(SweepRun("runs/broken", {}, "failed", error=failed))
    about = ("my recipe.yaml", "dense | code", "train", "quiver sweep x", "../data/dev, split dev", (NDCG,), ())
    return Sweep(*about, axes, tuple(runs), candidates)


ONE_SEED = sweep(
    {RATE: (1e-5, 3e-5, 8e-5)}, candidate({RATE: 3e-5}, 0.4567), candidate({RATE: 8e-5}, 0.4321), candidate({RATE: 1e-5}, 0.4001)
)


def test_the_table_is_best_first_and_names_the_command(tmp_path: Path) -> None:
    assert write_sweep_report(ONE_SEED, tmp_path) == [tmp_path / "sweep.md", tmp_path / "sweep.svg"]
    text = (tmp_path / "sweep.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows == [
        "| Rank | learning\\_rate | nDCG@10 |",
        "| --- | --- | --- |",
        "| 1 | 3e-5 | **45.67** |",
        "| 2 | 8e-5 | 43.21 |",
        "| 3 | 1e-5 | 40.01 |",
    ]
    assert "# Sweep of dense \\| code" in text
    assert "../data/dev, split dev" in text
    assert f"quiver train 'my recipe.yaml' --out {shlex.quote(str(tmp_path / 'best'))} training.learning_rate=3e-05" in text
    assert "`runs/training.learning_rate=3e-05_0/model`" in text
    assert (
        "![nDCG@10 of the candidates: learning\\_rate=3e-5 45.67, learning\\_rate=8e-5 43.21, learning\\_rate=1e-5 40.01](sweep.svg)"
        in text
    )
    assert "Failed" not in text


@pytest.mark.parametrize(("rate", "expected"), [(1e-5, "lowest"), (3e-5, None), (8e-5, "highest")])
def test_a_best_value_at_the_end_of_its_axis_gives_a_caution(rate: float, expected: str | None) -> None:
    found = sweep({RATE: (3e-5, 1e-5, 8e-5)}, candidate({RATE: rate}, 0.5), candidate({RATE: 0.0}, 0.1))
    found_lines = [line for line in cautions(found) if "value of the sweep" in line]
    assert len(found_lines) == (expected is not None)
    assert all(f"the {expected} value" in line for line in found_lines)


def test_candidates_within_the_noise_of_the_seeds_give_a_caution() -> None:
    """Two means of three seeds with a deviation of 0.01 each: two standard errors of the difference are 2 * 0.01 * sqrt(2 / 3) = 0.0163."""
    axes: Mapping[str, tuple[Value, ...]] = {RATE: (1e-5, 3e-5, 5e-5, 8e-5), SEED: (1, 2, 3)}
    best = candidate({RATE: 3e-5}, 0.49, 0.5, 0.51)
    near = candidate({RATE: 5e-5}, 0.474, 0.484, 0.494)
    far = candidate({RATE: 8e-5}, 0.473, 0.483, 0.493)
    found_lines = [line for line in cautions(sweep(axes, best, near, far)) if "standard errors" in line]
    assert found_lines == ["Less than two standard errors behind: learning_rate=5e-5. More seeds would separate them."]
    assert cautions(sweep(axes, best, far)) == []
    assert any("One seed per candidate" in line for line in cautions(ONE_SEED))


def lines(found: Sweep) -> list[tuple[list[float], list[float]]]:
    """(learning rates, points) of every line of the chart."""
    (axes,) = sweep_chart(found, [each for each in found.candidates if each.scores], NDCG).axes
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]


def test_the_chart_holds_every_candidate_and_every_seed(tmp_path: Path) -> None:
    axes: Mapping[str, tuple[Value, ...]] = {RATE: (1e-5, 3e-5), SIZE: (32, 64), SEED: (1, 2)}
    candidates = [candidate({RATE: rate, SIZE: size}, 0.41 + 5e2 * rate, 0.40 + 5e2 * rate) for size in (32, 64) for rate in (1e-5, 3e-5)]
    found = sweep(axes, *candidates)
    means, seeds = lines(found)[::2], lines(found)[1::2]
    assert means == [([1e-5, 3e-5], pytest.approx([41.0, 42.0]))] * 2, "one line for each batch size"
    assert [len(x) for x, _ in seeds] == [4, 4]
    write_sweep_report(found, tmp_path)
    texts = {text.text for text in ElementTree.parse(tmp_path / "sweep.svg").iter(f"{SVG}text")}
    assert {"batch_size=32", "batch_size=64", "1e-5", "3e-5", "learning rate"} <= texts
