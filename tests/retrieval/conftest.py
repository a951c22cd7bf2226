"""A dense and a ColBERT model without weights: the vector of a word is drawn from its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.retrieval.models.bm25 import BM25
from quiver.retrieval.records import DenseEncoding, ModelCard, Role, TextTokens, TokenEncoding

WIDTH = 256


@cache
def word_vector(word: str) -> NDArray[np.float32]:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big")
    vector = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
    vector /= np.linalg.norm(vector)
    vector.flags.writeable = False
    return vector


def describe(texts: Sequence[str]) -> TextTokens:
    """Count each word as one token; no text is truncated."""
    words = np.array([len(text.split()) for text in texts], np.int32)
    return TextTokens(words, np.zeros(len(texts), bool), np.array([not text for text in texts], bool))


class WordSum:
    """A dense model: the sum of the words' vectors."""

    def __init__(self, fingerprint: str = "a" * 64) -> None:
        self.card = ModelCard(f"word-sum-{fingerprint[0]}", "dense", fingerprint, WIDTH, "dot", 100, 100)
        self.calls: list[tuple[Role, list[str]]] = []

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> DenseEncoding:
        self.calls.append((role, list(texts)))
        vectors = np.zeros((len(texts), WIDTH), np.float32)
        for row, text in enumerate(texts):
            for word in text.split():
                vectors[row] += word_vector(word)
        return DenseEncoding(vectors, describe(texts))


class WordByWord:
    """A ColBERT model: one vector per word; a text without words has none."""

    def __init__(self, fingerprint: str = "c" * 64) -> None:
        self.card = ModelCard(f"word-by-word-{fingerprint[0]}", "colbert", fingerprint, WIDTH, "maxsim", 100, 100)

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> TokenEncoding:
        return TokenEncoding(
            [np.array([word_vector(word) for word in text.split()], np.float32).reshape(-1, WIDTH) for text in texts], describe(texts)
        )


@pytest.fixture
def word_sum() -> WordSum:
    return WordSum()


@pytest.fixture
def other_word_sum() -> WordSum:
    """The same vectors under another fingerprint."""
    return WordSum("b" * 64)


@pytest.fixture(scope="session")
def word_by_word() -> WordByWord:
    return WordByWord()


@pytest.fixture(scope="session")
def word_model() -> Callable[[str], WordSum | WordByWord | BM25]:
    """A new model for an engine: dense for the names that end so, BM25, otherwise with one vector per token."""
    return lambda engine: BM25() if engine == "bm25" else WordSum() if engine.endswith("dense") else WordByWord()
