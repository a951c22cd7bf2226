"""Several teachers as one: what each of them says of a pair, brought together in one score.

Teachers of several kinds score on scales of their own, a bi-encoder up to 1, a ColBERT up to the number of a query's tokens, a
cross-encoder in logits. Their scores are added up with weights that somebody knows, or each teacher's scores of a row count from 0 to 1.
The weights are known where the teachers were trained by a softmax over documents: the factor that it was given on their similarities,
divided by the number of teachers, makes the sum the mean of their logits.

Shapes: T teachers, B pairs of a part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from retrieval.training.mining.scoring import min_max
from retrieval.training.mining.scoring_data import ScoringData
from retrieval.training.mining.teachers import Scorer, Teacher


class Ensemble:
    """A teacher made of others; see `retrieval.training.mining.teachers.Teacher`.

    Args:
        teachers: T of them, at least two.
        weights: Of the sum of their scores, T of them; None for the mean of their scores after each teacher's scores of a row are brought
            to 0..1.

    Raises:
        InputError: There is one teacher alone, one is given twice, or the weights are not one for each, positive and finite.
    """

    def __init__(self, teachers: Sequence[Teacher], weights: Sequence[float] | None = None) -> None:
        if len(teachers) < 2:
            raise InputError("several teachers are two at least")
        members = [dict(teacher.description) for teacher in teachers]
        prints = [member["fingerprint"] for member in members]
        if len(set(prints)) < len(prints):
            raise InputError("a teacher is given twice; a weight makes it count more")
        if weights is not None and len(weights) != len(teachers):
            raise InputError(f"{len(weights)} weights for {len(teachers)} teachers; give one for each, in their order")
        if weights is not None and not all(isfinite(weight) and weight > 0 for weight in weights):
            raise InputError(f"weights of teachers must be positive numbers, got {', '.join(f'{weight:g}' for weight in weights)}")
        self._teachers = tuple(teachers)
        self._weights = None if weights is None else np.array(weights, np.float64)
        combined = {"members": members, "weights": None if weights is None else [*weights]}
        fingerprint = hashlib.sha256(json.dumps([prints, combined["weights"]]).encode()).hexdigest()
        self.description: Mapping[str, Any] = {"kind": "ensemble", **combined, "fingerprint": fingerprint}

    @contextmanager
    def scorer(self, data: ScoringData, *, cache: Path | None, progress: bool) -> Iterator[Scorer]:
        """The scorers of all; one after the other encodes what the rows name.

        Args:
            data: The rows.
            cache: Folder that keeps vectors; None keeps none.
            progress: Show bars.
        """
        with ExitStack() as stack:
            scorers = [stack.enter_context(teacher.scorer(data, cache=cache, progress=progress)) for teacher in self._teachers]

            def score(parts: Mapping[int, slice]) -> Iterator[tuple[int, NDArray[np.float32]]]:
                waiting: dict[int, dict[int, NDArray[np.float32]]] = {}  # each gives the parts in an order of its own
                for given in zip(*(one(parts) for one in scorers), strict=True):
                    for place, (number, scores) in enumerate(given):
                        waiting.setdefault(number, {})[place] = scores
                        if len(waiting[number]) == len(scorers):
                            there = waiting.pop(number)
                            ends = data.ends[parts[number].start + 1 : parts[number].stop] - data.ends[parts[number].start]
                            yield number, self._together([there[place] for place in range(len(scorers))], ends)

            yield score

    def _together(self, scores: Sequence[NDArray[np.float32]], ends: NDArray[np.int64]) -> NDArray[np.float32]:
        """One score a pair, (B,), from T arrays of them, NaN where one is not finite; rows end at ``ends``, the last one left out."""
        if self._weights is None:
            shares = [np.concatenate([min_max(row) for row in np.split(one, ends)]) for one in scores]
            together = np.mean(shares, axis=0, dtype=np.float64)
        else:
            together = self._weights @ np.array(scores, np.float64)
        # A row with a NaN has no smallest score: what is brought to 0..1 would not show it.
        return np.where(np.isfinite(scores).all(axis=0), together, np.nan).astype(np.float32)
