"""Comparisons of one pair of systems, by the functions that make many at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quiver.eval.metrics import PairedComparison, compare_pairs, sign_flips


def sign_flip(differences: Any, **options: Any) -> float:
    return sign_flips([differences], **options)[0]


def compare_parts(first: Mapping[str, Mapping[str, float]], second: Mapping[str, Mapping[str, float]], **options: Any) -> PairedComparison:
    return compare_pairs([(first, second)], **options)[0]


def compare_queries(first: Mapping[str, float], second: Mapping[str, float], **options: Any) -> PairedComparison:
    return compare_parts({"": first}, {"": second}, **options)
