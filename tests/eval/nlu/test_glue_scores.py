"""Measures of GLUE against values computed by hand; tests/parity/test_glue.py compares them with scikit-learn and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quiver.eval.nlu.glue_tasks import accuracy, f1, matthews, pearson, spearman


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
