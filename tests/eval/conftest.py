"""A collection small enough to score by hand, and a model whose vectors anybody can compute."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiver.encoder import Tokenizer
from quiver.retrieval.records import DenseEncoding, ModelCard, Role, TextTokens, TokenEncoding

WIDTH = 512
LENGTH = 8

DOCUMENTS = {
    "d1": ("Wings", "a bird has two wings and flies"),
    "d2": ("Fish", "a fish swims in the deep sea"),
    "d3": ("Stone", "granite is a hard stone"),
    "d4": ("", "birds and fish are animals"),
    "d5": ("Sea", "the sea is deep and salt"),
}
QUERIES = {"q1": "bird wings", "q2": "deep sea fish", "q3": "granite", "unjudged": "salt"}
QRELS = {"q1": {"d1": 2, "d4": 1}, "q2": {"d2": 1, "d5": 1, "d3": 0}, "q3": {"d3": 1}}

MakeCollection = Callable[..., Path]


class BagOfWords:
    """A dense model: each word counts one at a position its hash gives, the first ``LENGTH`` words only, normalised."""

    def __init__(self) -> None:
        self.encoded: list[tuple[Role, list[str]]] = []

    @property
    def card(self) -> ModelCard:
        return ModelCard("bag of words", "dense", "0" * 64, WIDTH, "cosine", LENGTH, LENGTH)

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> DenseEncoding:
        self.encoded.append((role, list(texts)))
        vectors = np.zeros((len(texts), WIDTH), np.float32)
        words = [text.lower().split() for text in texts]
        for row, text in zip(vectors, words, strict=True):
            for word in text[:LENGTH]:
                row[int(hashlib.sha256(word.encode()).hexdigest(), 16) % WIDTH] += 1
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        lengths = np.array([len(text) for text in words], np.int32)
        return DenseEncoding(vectors, TextTokens(np.minimum(lengths, LENGTH), lengths > LENGTH, lengths == 0))


class WordByWord:
    """A token model with one vector per word, so that MaxSim counts the query words that a document contains."""

    def __init__(self, model: BagOfWords) -> None:
        self.dense = model
        self.card = ModelCard("words", "colbert", "1" * 64, model.card.dim, "maxsim", 8, 8)

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> TokenEncoding:
        vectors = [self.dense.encode_texts(text.split(), role).vectors for text in texts]
        lengths = np.array([len(matrix) for matrix in vectors], np.int32)
        return TokenEncoding(vectors, TextTokens(lengths, np.zeros(len(texts), bool), lengths == 0))


@pytest.fixture
def token_model(model: BagOfWords) -> WordByWord:
    return WordByWord(model)


@pytest.fixture
def model() -> BagOfWords:
    return BagOfWords()


@pytest.fixture
def make_collection(tmp_path: Path) -> MakeCollection:
    """Write a BEIR folder; everything that is not given is the collection above."""

    def make(
        name: str = "tiny",
        *,
        documents: Mapping[str, tuple[str, str]] = DOCUMENTS,
        queries: Mapping[str, str] = QUERIES,
        qrels: Mapping[str, Mapping[str, int]] = QRELS,
    ) -> Path:
        folder = tmp_path / "data" / name
        (folder / "qrels").mkdir(parents=True)
        corpus = [json.dumps({"_id": key, "title": title, "text": text}) for key, (title, text) in documents.items()]
        (folder / "corpus.jsonl").write_text("\n".join(corpus) + "\n", encoding="utf-8")
        asked = [json.dumps({"_id": key, "text": text}) for key, text in queries.items()]
        (folder / "queries.jsonl").write_text("\n".join(asked) + "\n", encoding="utf-8")
        judged = [f"{query}\t{document}\t{grade}" for query, grades in qrels.items() for document, grade in grades.items()]
        (folder / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]) + "\n", encoding="utf-8")
        return folder

    return make


@pytest.fixture(scope="session")
def random_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT with a small vocabulary, as transformers writes it."""
    transformers: Any = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    texts = ["a bird has two wings, and flies!", "granite is a hard stone", "the sea is deep and salt", "Fish find: passage: ?"]
    Tokenizer.train(texts * 2, vocab_size=384, max_length=64).save(folder)
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
    )
    model = transformers.BertModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder
