"""A ColBERT says which token of the vocabulary each of its vectors is of."""

from __future__ import annotations

import numpy as np
import pytest

from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.colbert import ColBERT
from tests.retrieval.models.small import make_colbert, make_tokenizer

TEXTS = ["a bird, any bird: it has wings.", "", "wings; wings, wings and a very long tail that no length would ever hold " * 3]


@pytest.fixture(scope="module")
def model() -> ColBERT:
    settings = {"query_length": 16, "document_length": 24, "skiplist": (",", ".", ";")}
    return make_colbert(make_tokenizer(TEXTS * 3), projections=(Projection(32, 16),), **settings)


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
