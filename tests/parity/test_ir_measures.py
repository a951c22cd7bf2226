"""The share of judged documents is ir_measures' Judged@k."""

from __future__ import annotations

import random

import pytest

from quiver.eval.metrics import judged_at

pytestmark = pytest.mark.parity


def test_judged_at_is_judged_at_k() -> None:
    ir_measures = pytest.importorskip("ir_measures")
    rng = random.Random(0)
    short = missing = 0
    for _ in range(300):
        documents = [f"d{number}" for number in range(rng.choice((4, 15, 40)))]
        qrels = {
            f"q{number}": {document: rng.randint(-1, 3) for document in rng.sample(documents, rng.randint(1, len(documents)))}
            for number in range(4)
        }
        # No two scores are equal: it orders ties the other way round. No run is empty: it divides by zero.
        run = {
            query: {document: float(place) for place, document in enumerate(rng.sample(documents, rng.randint(1, len(documents))))}
            for query in qrels
            if rng.random() < 0.8
        }
        for k in (1, 5, 10):
            theirs = ir_measures.calc_aggregate([ir_measures.Judged @ k], qrels, run)[ir_measures.Judged @ k] if run else 0.0
            assert judged_at(qrels, run, k) == pytest.approx(theirs, abs=1e-12)
            short += any(len(scores) < k for scores in run.values())
            missing += len(run) < len(qrels)
    assert min(short, missing) > 100
