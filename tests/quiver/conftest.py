"""A collection of six documents and a bi-encoder of one layer, for commands that evaluate or index."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.options import ModelFolder

TEXTS = {f"d{number}": f"a text about {word}" for number, word in enumerate(["birds", "fish", "stones", "salt", "wings", "seas"])}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "scifact"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"_id": key, "text": text}) + "\n" for key, text in TEXTS.items()))
    (folder / "queries.jsonl").write_text('{"_id": "q1", "text": "birds"}\n{"_id": "q2", "text": "salt"}\n')
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td0\t1\nq2\td3\t1\n")
    return folder


def make_bi_encoder(folder: Path, texts: Iterable[str], *, seed: int = 1, max_length: int = 16) -> Path:
    """Write a bi-encoder of one layer with random weights and a tokenizer of the texts."""
    tokenizer = Tokenizer.train(list(texts), vocab_size=300, max_length=64)
    config = EncoderConfig.modernbert(
        vocab_size=300, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global"], max_positions=64
    )
    settings = ModelFolder("dense", folder, max_length=max_length, normalize=True)
    BiEncoder.from_parts(init_weights(Encoder(config), seed=seed), tokenizer, settings).save_pretrained(folder)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_bi_encoder(tmp_path / "model", TEXTS.values())
