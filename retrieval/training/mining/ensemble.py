"""Several teachers as one: what each of them says of a pair, brought together in one score.

Teachers of several kinds score on scales of their own: a bi-encoder by cosine up to 1, a ColBERT up to the number of a query's tokens, a
cross-encoder in logits. Their scores are added up with weights that somebody knows, or each teacher's scores of a row count from 0 to 1.
The weights are known where the teachers were trained by a softmax over documents: the factor that it was given on their similarities,
divided by the number of teachers, makes the sum the mean of their logits.

The teachers score one after the other, and what each gives is kept: this module only says what they are together.

Shapes: T teachers, n documents of a row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.training.mining.teachers import Teacher


class Ensemble:
    """Teachers whose scores are brought together.

    Args:
        members: T of them, at least two.
        weights: Of the sum of their scores, T of them; None for the mean of their scores after each teacher's scores of a row are brought
            to 0..1.

    Attributes:
        members: The teachers.
        weights: Their weights, or None.
        description: What the record says of it; the ``fingerprint`` is that of its members in their order, whatever their weights.

    Raises:
        InputError: As `check_weights`, or two of the teachers are the same.
    """

    def __init__(self, members: Sequence[Teacher], weights: Sequence[float] | None = None) -> None:
        check_weights(len(members), weights)
        described = [dict(member.description) for member in members]
        prints = [member["fingerprint"] for member in described]
        for place, one in enumerate(prints):
            if one in prints[:place]:
                raise InputError(f"{described[place]['source']}: given twice as a teacher; to make it count more give it a weight")
        self.members = tuple(members)
        self.weights = None if weights is None else tuple(weights)
        fingerprint = hashlib.sha256(json.dumps(prints).encode()).hexdigest()
        self.description: Mapping[str, Any] = {
            "kind": "ensemble",
            "members": described,
            "weights": self.weights,
            "fingerprint": fingerprint,
        }

    def together(self, scores: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
        """What the teachers' scores of a row, T finite arrays (n,), are together, (n,); infinite where the weights are too great."""
        if self.weights is None:
            together: NDArray[np.float64] = np.mean([min_max(one) for one in scores], axis=0)
        else:
            with np.errstate(over="ignore"):  # infinite then, and refused as such
                together = np.array(self.weights) @ np.array(scores, np.float64)
        return together


def check_weights(teachers: int, weights: Sequence[float] | None) -> None:
    """Refuse weights that so many teachers cannot be brought together with.

    Raises:
        InputError: There are fewer than two teachers, or the weights are not one for each, positive and finite.
    """
    if teachers < 2:
        raise InputError(f"an ensemble has two teachers at least, got {teachers}")
    if weights is not None and len(weights) != teachers:
        raise InputError(f"{len(weights)} weights for {teachers} teachers; give one for each, in their order")
    if weights is not None and not all(isfinite(weight) and weight > 0 for weight in weights):
        raise InputError(f"weights of teachers must be positive numbers, got {', '.join(f'{weight:g}' for weight in weights)}")


def min_max(scores: NDArray[np.float32] | NDArray[np.float64]) -> NDArray[np.float64]:
    """The scores of one row, (n,), brought to 0..1; all zero where they are equal.

    Example:
        >>> min_max(np.array([1.0, 3.0, 2.0], np.float32)).tolist()
        [0.0, 1.0, 0.5]
    """
    exact = scores.astype(np.float64)  # float32 may not hold the difference
    low, high = exact.min(), exact.max()
    return (exact - low) / (high - low) if high > low else np.zeros_like(exact)
