"""Averages by the benchmarks' rules: groups once, nothing missing."""

from __future__ import annotations

import pytest

from quiver.eval.metrics import Average, Part, average, data_sets


def _forums(count: int, size: int = 12, *, split: str = "test") -> list[Part]:
    return [Part(f"cqadupstack-{number}", split, "cqadupstack", size, number / 100) for number in range(count)]


SCIFACT = Part("scifact", "test", value=0.6)


def test_a_group_counts_once_and_without_weights() -> None:
    scores = data_sets([SCIFACT, *_forums(12)])
    assert list(scores) == ["scifact.test", "cqadupstack"]
    assert scores["cqadupstack"] == pytest.approx(sum(range(12)) / 1200)
    assert average(scores, list(scores)) == Average(pytest.approx((0.6 + 0.055) / 2), 2, 2)


def test_a_group_that_lacks_a_part_has_no_score() -> None:
    scores = data_sets([SCIFACT, *_forums(11)])
    assert scores == {"scifact.test": 0.6, "cqadupstack": None}
    assert average(scores, list(scores)) == Average(None, 1, 2)


def test_parts_of_different_splits_do_not_make_a_group() -> None:
    assert data_sets([*_forums(6), *_forums(12, split="dev")[6:]]) == {"cqadupstack.test": None, "cqadupstack.dev": None}
    both = data_sets([*_forums(12), *_forums(1, split="dev")])
    assert both == {"cqadupstack.test": pytest.approx(0.055), "cqadupstack.dev": None}


def test_an_average_is_over_the_members_asked_for() -> None:
    scores = {"a": 0.2, "b": 0.4, "c": 0.9}
    assert average(scores, ["a", "b"]) == Average(pytest.approx(0.3), 2, 2)
    assert average(scores, ["a", "missing"]) == Average(None, 1, 2)
    assert average(scores, []) == Average(None, 0, 0)
