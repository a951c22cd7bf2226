"""Fusion: values by hand, a second implementation, and hits of real indexes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import ranked
from quiver.retrieval.index import build_index
from quiver.retrieval.records import Document, Hits, Query
from quiver.retrieval.search.retrievers import Explanations, FusedRetriever
from quiver.retrieval.search.search import Fusion, differing_documents, fuse

A = {"d1": 0.9, "d2": 0.5, "d3": 0.1}
B = {"d2": 30.0, "d4": 20.0}


def test_reciprocal_rank_fusion_gives_values_computed_by_hand() -> None:
    fused = fuse([A, B], Fusion())
    assert fused == pytest.approx({"d2": 1 / 62 + 1 / 61, "d1": 1 / 61, "d4": 1 / 62, "d3": 1 / 63})
    assert list(fused) == ["d2", "d1", "d4", "d3"]
    weighted = fuse([A, B], Fusion(weights=(0.2, 1), constant=1))
    assert weighted == pytest.approx({"d2": 0.2 / 3 + 1 / 2, "d4": 1 / 3, "d1": 0.2 / 2, "d3": 0.2 / 4})


def test_weighted_fusion_gives_values_computed_by_hand() -> None:
    # Of A: 1, 0.5, 0, and 0 for d4; of B: 1, 0, and 0 for d1 and d3.
    fused = fuse([A, B], Fusion("weighted", weights=(2, 1)))
    assert fused == pytest.approx({"d1": 2.0, "d2": 2.0, "d4": 0.0, "d3": 0.0})
    assert list(fused) == ["d2", "d1", "d4", "d3"]
    # Of A: mean 0.5, deviation sqrt(0.32 / 3); of B: mean 25, deviation 5; what is missing gets the lowest.
    one = 0.4 / (0.32 / 3) ** 0.5
    fused = fuse([A, B], Fusion("weighted", normalise="z-score"))
    assert fused == pytest.approx({"d1": one - 1, "d2": 0 + 1, "d3": -one - 1, "d4": -one - 1})


def defined(rankings: Sequence[Mapping[str, float]], fusion: Fusion, weights: Sequence[float]) -> dict[str, float]:
    """The definitions, document by document."""
    scores: dict[str, float] = {}
    for document in {document for ranking in rankings for document in ranking}:
        total = 0.0
        for ranking, weight in zip(rankings, weights, strict=True):
            if fusion.method == "rrf":
                total += weight / (fusion.constant + ranked(ranking).index(document) + 1) if document in ranking else 0
                continue
            values = np.array(list(ranking.values()))
            value = ranking.get(document, values.min())
            if fusion.normalise == "min-max":
                total += weight * (value - values.min()) / (values.max() - values.min())
            else:
                total += weight * (value - values.mean()) / np.sqrt(((values - values.mean()) ** 2).mean())
        scores[document] = total
    return scores


@pytest.mark.parametrize("fusion", [Fusion(), Fusion(constant=3), Fusion("weighted"), Fusion("weighted", normalise="z-score")])
@pytest.mark.parametrize("weights", [None, (0.3, 2.0, 1.0)])
def test_fusion_agrees_with_its_definition_in_any_order_of_rankings(fusion: Fusion, weights: tuple[float, ...] | None) -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        chosen = [rng.choice(30, rng.integers(2, 25), replace=False) for _ in range(3)]
        rankings = [{f"d{key}": float(np.float32(rng.normal(5, 3))) for key in keys} for keys in chosen]
        factors = weights or (1.0, 1.0, 1.0)
        found = fuse(rankings, Fusion(fusion.method, weights, fusion.constant, fusion.normalise))
        expected = defined(rankings, fusion, factors)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert list(found) == ranked(found)
        for order in permutations(range(3)):
            shuffled = Fusion(fusion.method, tuple(factors[place] for place in order), fusion.constant, fusion.normalise)
            assert fuse([rankings[place] for place in order], shuffled) == found


@pytest.mark.parametrize("normalise", ["min-max", "z-score"])
def test_rankings_with_equal_scores_are_normalized(normalise: str) -> None:
    fusion = Fusion("weighted", normalise=normalise)
    assert fuse([A, {}], fusion) == fuse([A], fusion)
    assert fuse([{}, {}], fusion) == {}
    alone = fuse([A, {"d4": 7.0}], fusion)
    equal = fuse([A, {"d3": 0.1, "d4": 0.1}], fusion)
    if normalise == "min-max":  # what was found alone is the best of its list, not the worst
        assert alone == pytest.approx({"d1": 1.0, "d4": 1.0, "d2": 0.5, "d3": 0.0})
        assert equal == pytest.approx({"d1": 1.0, "d4": 1.0, "d3": 1.0, "d2": 0.5})
    else:
        own = fuse([A], fusion)
        assert alone == pytest.approx({**own, "d4": own["d3"]})


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"method": "borda"}, "fusion must be one of rrf, weighted, got 'borda'"),
        ({"normalise": "max"}, "normalisation must be one of min-max, z-score, got 'max'"),
        ({"constant": -1.0}, "must be >= 0, got -1.0"),
        ({"weights": (1.0, -1.0)}, "weights must be numbers >= 0, at least one of them > 0, got 1.0, -1.0"),
        ({"weights": (0.0, 0.0)}, "at least one of them > 0"),
        ({"weights": (float("nan"), 1.0)}, "weights must be numbers"),
        ({"weights": ()}, "got none"),
        ({"weights": (1.0,)}, "got 1 weights for 2 rankings"),
    ],
)
def test_rankings_that_cannot_be_fused_are_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fuse([A, B], Fusion(**choices))


def test_scores_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="scores must be finite"):
        fuse([{"a": float("-inf"), "b": 1.0}], Fusion("weighted"))
    with pytest.raises(ValueError, match="NaN"):
        fuse([{"a": float("nan")}], Fusion())
    with pytest.raises(ValueError, match="no rankings"):
        fuse([], Fusion())


class Fixed:
    """A retriever with one ranking for every query; ``None`` must not be searched."""

    def __init__(self, name: str, ranking: dict[str, float] | None) -> None:
        self.name, self._ranking = name, ranking
        self.asked: list[int] = []

    def search(self, queries: Sequence[Query], k: int, *, filter: object = None) -> Hits:
        assert self._ranking is not None, filter
        self.asked.append(k)
        return Hits.of([self._ranking for _ in queries])

    def describe(self) -> Mapping[str, object]:
        return {"kind": "fixed"}

    def explain(self, query: str, documents: Sequence[str]) -> Explanations:
        return {}


def test_a_retriever_of_weight_0_is_not_searched() -> None:
    first, second = Fixed("a", None), Fixed("b", B)
    found = FusedRetriever([first, second], Fusion(weights=(0, 1))).search([Query("q", "text")], 200)
    assert (found.lists["b"].ranking(0), second.asked, found.ids) == (B, [200], [["d2", "d4"]])
    with pytest.raises(InputError, match="got 1 weights for 2 rankings"):
        FusedRetriever([first, second], Fusion(weights=(1,)))


def test_equal_ids_of_two_collections_are_not_taken_for_changed_texts() -> None:
    one, other = (
        build_index([Document(f"{name}{number}", name) for number in range(20)] + [Document("1", name)], "bm25")
        for name in ("owl", "trout")
    )
    assert differing_documents(one, other) == "1 documents are in both, 21 in one and 21 in the other (2% in common)"
    changed = build_index([Document(f"owl{number}", "wings") for number in range(20)], "bm25")
    assert str(differing_documents(one, changed)).endswith("; of 20 in both that were compared, 20 have another text")
