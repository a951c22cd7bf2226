"""A collection under a ColBERT: the folder says which token each vector is of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights
from quiver.eval.bench.index import encode_collection
from quiver.retrieval.data.corpus import load_collection
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import ColBERTSettings, ModelFolder
from quiver.retrieval.models.pooling import Projection


def test_tokens_are_those_that_the_model_says(
    make_collection: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_collection()
    documents = list(load_collection(folder, "test").documents)
    tokenizer = Tokenizer.train([document.content() for document in documents] * 3, vocab_size=300)
    for prefix in ("[Q] ", "[D] "):
        tokenizer.add_token(prefix)
    config = EncoderConfig.modernbert(
        vocab_size=320, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global"], max_positions=64
    )
    settings = ColBERTSettings(query_length=16, document_length=24, query_prefix="[Q] ", document_prefix="[D] ", skiplist=(".",))
    model = ColBERT(
        init_weights(Encoder(config), seed=1),
        tokenizer,
        ModelFolder("colbert", Path(), projections=(Projection(32, 16),), similarity="maxsim", colbert=settings),
    )
    monkeypatch.setattr("quiver.eval.bench.index.sources.load_model", lambda source: model)
    expected = model.encode([document.content() for document in documents], "document")
    assert expected.token_ids is not None
    # Encoded now, and found in a cache, which keeps vectors alone.
    for name in ("new", "again"):
        found = encode_collection(folder, "tiny", "test", tmp_path / name, cache=tmp_path / "cache")
        vectors, token_ids = found.documents(0, len(documents))
        assert token_ids is not None
        assert np.array_equal(token_ids, np.concatenate(expected.token_ids))
        assert np.allclose(vectors, np.concatenate(expected.vectors), atol=1e-6)
