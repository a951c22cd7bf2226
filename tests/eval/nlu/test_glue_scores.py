"""Measures of GLUE against values computed by hand; tests/parity/test_glue.py compares them with scikit-learn and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quiver.eval.nlu.glue_tasks import MEASURES, TASKS, accuracy, f1, matthews, measure, pearson, spearman


def test_measures_equal_values_computed_by_hand() -> None:
    ours, theirs = [1, 1, 1, 0, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0, 1, 0]  # 2 hits, 3 right refusals, 2 false alarms, 1 miss
    assert accuracy(ours, theirs) == 5 / 8
    assert f1(ours, theirs) == pytest.approx(2 * 2 / (2 * 2 + 2 + 1))
    assert matthews(ours, theirs) == pytest.approx((2 * 3 - 2 * 1) / math.sqrt(4 * 4 * 3 * 5))
    assert pearson([1, 2, 4], [2, 4, 8]) == pytest.approx(1)
    assert pearson([1, 2, 4], [8, 6, 2]) == pytest.approx(-1)
    assert spearman([1, 10, 100], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2, 3], [4, 5, 6, 7]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


@pytest.mark.parametrize(("ours", "theirs"), [([1, 1, 1], [0, 1, 0]), ([0, 0, 0], [0, 1, 0]), ([0, 1, 0], [1, 1, 1]), ([1], [1])])
def test_correlations_of_a_constant_are_zero(ours: list[int], theirs: list[int]) -> None:
    assert matthews(ours, theirs) == pearson(ours, theirs) == spearman(ours, theirs) == 0.0
    assert f1([0, 0], [0, 0]) == 0.0
    assert pearson([1e-200, 2e-200], [1.0, 2.0]) == 0.0, "differences whose squares are no numbers any more"


def test_counts_of_a_large_set_do_not_overflow() -> None:
    labels = np.arange(400_000) % 2
    assert matthews(labels, labels) == 1.0
    assert matthews(1 - labels, labels) == -1.0


def test_predictions_and_labels_must_have_equal_lengths() -> None:
    for name in MEASURES:
        with pytest.raises(ValueError, match="must be"):
            MEASURES[name]([1, 0], [1])
        with pytest.raises(ValueError, match="must be"):
            MEASURES[name]([], [])


def test_the_first_measure_of_a_task_is_its_score() -> None:
    first = {name: next(iter(measure(task, [0, 1, 1], [0, 1, 0]))) for name, task in TASKS.items()}
    assert first == {"cola": "matthews", **dict.fromkeys(("sst2", "mrpc", "qqp", "mnli", "qnli", "rte"), "accuracy"), "stsb": "spearman"}
    assert measure(TASKS["qqp"], [0, 1, 1], [0, 1, 0]) == {"accuracy": 2 / 3, "f1": 2 / 3}
    assert list(measure(TASKS["stsb"], [0.0, 1.0, 2.0], [0.0, 1.0, 5.0])) == ["spearman", "pearson"]
