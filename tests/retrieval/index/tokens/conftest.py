"""Small collections of token vectors that cluster as those of a model do: every token has a direction, every occurrence strays from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.retrieval.index.engines import Sample
from quiver.retrieval.records import ModelCard


@dataclass(frozen=True)
class Collection:
    vectors: NDArray[np.float32]
    lengths: NDArray[np.int64]
    token_ids: NDArray[np.uint32]

    @property
    def sample(self) -> Sample:
        return Sample(self.vectors, self.lengths, self.token_ids)

    @property
    def card(self) -> ModelCard:
        return ModelCard("a model", "colbert", "0" * 64, self.vectors.shape[1], "maxsim", 32, 128)

    @property
    def ranks(self) -> NDArray[np.uint32]:
        return np.arange(len(self.lengths), dtype=np.uint32)

    def documents(self) -> list[NDArray[np.float32]]:
        return np.split(self.vectors, np.cumsum(self.lengths)[:-1])

    def scores(self, query: NDArray[np.float32]) -> NDArray[np.float64]:
        """MaxSim in double precision."""
        every = [
            (query.astype(float) @ tokens.astype(float).T).max(axis=1).sum() if len(tokens) else -np.inf for tokens in self.documents()
        ]
        return np.array(every)

    def queries(self, count: int, seed: int = 9) -> list[NDArray[np.float32]]:
        """Some tokens of a document each, astray again."""
        rng = np.random.default_rng(seed)
        filled = [document for document in self.documents() if len(document)]
        chosen = [filled[row] for row in rng.choice(len(filled), count)]
        return [unit(doc[rng.integers(0, len(doc), rng.integers(3, 20))], rng, 0.05) for doc in chosen]


def unit(vectors: NDArray[np.float32], rng: np.random.Generator, noise: float) -> NDArray[np.float32]:
    astray = vectors + noise * rng.standard_normal(vectors.shape)
    return (astray / np.linalg.norm(astray, axis=1, keepdims=True)).astype(np.float32)


def collection(documents: int = 400, *, width: int = 32, vocabulary: int = 300, seed: int = 0, empty: float = 0.1) -> Collection:
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.random(documents) < empty, 0, rng.integers(1, 40, documents)).astype(np.int64)
    ids = (vocabulary * rng.random(int(lengths.sum())) ** 3).astype(np.uint32)
    directions = rng.standard_normal((vocabulary, width))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return Collection(unit(directions[ids].astype(np.float32), rng, 0.7 / width**0.5), lengths, ids)


@pytest.fixture(scope="session")
def make_collection() -> Callable[..., Collection]:
    return collection
