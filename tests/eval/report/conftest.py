"""Results made by hand, for reports over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quiver.eval.provenance import Provenance
from quiver.eval.results import (
    Baseline,
    CollectionResult,
    IndexUsed,
    Interval,
    Results,
    ShownDocument,
    System,
    Truncated,
    WorstQuery,
)

MEASURES = {"ndcg@10": 0.5, "map": 0.25, "mrr@10": 0.4, "recall@10": 0.6, "recall@100": 0.7, "recall@1000": 0.8, "p@10": 0.1}
WORST = WorstQuery(
    query="q1",
    text="what | is\n<b>it</b>",
    score=0.0,
    found=(ShownDocument("d9", "not *this*", None, 1, 0.75),),
    wanted=(ShownDocument("d1", "but this", 2, 37, 0.25), ShownDocument("d2", "or this", 1, None, None)),
    relevant=4,
)


@pytest.fixture
def make_scored() -> Callable[..., CollectionResult]:
    """A collection with a score, everything else as given or the same for all."""

    def make(name: str, score: float, *, floor: float | None = None, **changed: Any) -> CollectionResult:
        interval = Interval(score - 0.05, score + 0.05, 0.95, 10_000)
        baselines = ()
        if floor is not None:
            below = Interval(floor - 0.04, floor + 0.04, 0.95, 10_000)
            baselines = (Baseline("bm25", {"k1": 0.9, "stemmer": None}, MEASURES | {"ndcg@10": floor}, below, None, None),)
        scored = CollectionResult(
            name=name,
            split="test",
            group=None,
            group_size=1,
            in_domain=False,
            licence="CC BY 4.0",
            revision="c" * 40,
            documents=5183,
            queries=300,
            judgements=339,
            use_title=True,
            exclude_self=False,
            k=1000,
            measures=MEASURES | {"ndcg@10": score},
            interval=interval,
            judged=0.125,
            unanswered=2,
            truncated=Truncated(documents=1234, queries=7),
            empty_texts=1,
            index=IndexUsed("exact", {"similarity": "cosine"}, {"overlap@10": 1.0, "overlap@100": 1.0}, 3 * 2**20, 0.125),
            cached=4321,
            seconds={"encode_documents": 12.34, "search": 0.56},
            run=None,
            per_query=None,
            query_texts=None,
            data_sha256=f"{name:0<64}",
            worst=(WORST,),
            baselines=baselines,
        )
        return replace(scored, **changed)

    return make


@pytest.fixture
def make_results() -> Callable[..., Results]:
    """A system with collections."""

    def make(source: str, *collections: CollectionResult, command: str | None = "quiver evaluate", **changed: Any) -> Results:
        kind = changed.pop("kind", "dense")
        system = System(source, kind, fingerprint="f" * 64, dim=384, similarity="cosine", query_length=256, document_length=256)
        origin = Provenance(command, "2030-01-02T03:04:05+00:00", {"torch": "2.11", "quiver": "0.1", "python": "3.11"}, "Linux", 2)
        return Results(replace(system, **changed), collections, origin)

    return make
