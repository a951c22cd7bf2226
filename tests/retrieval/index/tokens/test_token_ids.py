"""A ColBERT says which token of the vocabulary each of its vectors is of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder

TEXTS = ["a bird, any bird: it has wings.", "", "wings; wings, wings and a very long tail that no length would ever hold " * 3]


@pytest.fixture(scope="module")
def model() -> ColBERT:
    tokenizer = Tokenizer.train(TEXTS * 3, vocab_size=340)
    for prefix in ("[Q] ", "[D] "):
        tokenizer.add_token(prefix)
    shape = {"num_heads": 2, "intermediate_size": 48, "layer_types": ["global", "local"], "max_positions": 64}
    config = EncoderConfig.modernbert(vocab_size=384, hidden_size=32, **shape)
    settings = ColBERTSettings(query_length=16, document_length=24, query_prefix="[Q] ", document_prefix="[D] ", skiplist=(",", ".", ";"))
    folder = ModelFolder("colbert", Path(), projections=(Projection(32, 16),), similarity="maxsim", colbert=settings)
    return ColBERT.from_parts(init_weights(Encoder(config), seed=1), tokenizer, folder)


def test_of_documents_the_tokens_that_are_kept(model: ColBERT) -> None:
    encoding = model.encode_texts(TEXTS, "document")
    skipped = {model.tokenizer.token_id(word) for word in ",.;"}
    prefix = model.tokenizer.token_id("[D] ")
    assert encoding.token_ids is not None
    assert [each.tolist() for each in model.document_token_ids(TEXTS)] == [each.tolist() for each in encoding.token_ids]
    dropped = 0
    for text, ids, vectors in zip(TEXTS, encoding.token_ids, encoding.vectors, strict=True):
        spoken = model.tokenizer.encode([text], max_length=23).ids[0]
        spoken = [spoken[0], prefix, *spoken[1:]]
        assert ids.tolist() == [token for token in spoken if token not in skipped]
        assert (ids.dtype, len(ids)) == (np.uint32, len(vectors))
        dropped += len(spoken) - len(ids)
    assert dropped > 2


def test_of_queries_the_expansion_too(model: ColBERT) -> None:
    encoding = model.encode_texts(TEXTS, "query")
    mask = model.tokenizer.special_id("mask")
    assert encoding.token_ids is not None
    for ids, vectors in zip(encoding.token_ids, encoding.vectors, strict=True):
        assert len(ids) == len(vectors) == 16
        assert ids[1] == model.tokenizer.token_id("[Q] ")
    assert (encoding.token_ids[1][-8:] == mask).all()
