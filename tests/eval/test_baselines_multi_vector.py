"""Multi-vector models that sentence-transformers 6 runs; older versions refuse them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights
from quiver.eval.baselines import load_baseline
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder

library = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.parity

TEXTS = ["a bird has two wings, and flies!", "granite is a hard stone", "the sea is deep and salt " * 12]
CONFIG = EncoderConfig.modernbert(
    vocab_size=448, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "local"], max_positions=64
)


@pytest.fixture(params=[True, False], ids=["expanded", "plain"])
def colbert(tmp_path: Path, request: pytest.FixtureRequest) -> ColBERT:
    """A saved Quiver ColBERT model."""
    tokenizer = Tokenizer.train(TEXTS * 2, vocab_size=384, max_length=64)
    for prefix in ("[Q] ", "[D] "):
        tokenizer.add_token(prefix)
    settings = replace(ColBERTSettings(query_length=12, document_length=24), query_expansion=request.param)
    folder = ModelFolder("colbert", Path(), projections=(Projection(32, 16),), similarity="maxsim", colbert=settings)
    model = ColBERT.from_parts(init_weights(Encoder(CONFIG), seed=1), tokenizer, folder, source=str(tmp_path / "colbert"))
    model.save_pretrained(tmp_path / "colbert")
    return model


@pytest.mark.skipif(not hasattr(library, "MultiVectorEncoder"), reason="sentence-transformers 6 brought multi-vector models")
def test_vectors_and_counts_equal_the_librarys(colbert: ColBERT) -> None:
    baseline = load_baseline("sentence-transformers", colbert.source, device="cpu")
    theirs = library.MultiVectorEncoder(colbert.source, device="cpu")
    for role, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        encoding, mine = baseline.encode_texts(TEXTS, role), colbert.encode_texts(TEXTS, role)
        for found, expected, ours in zip(encoding.vectors, encode(TEXTS, convert_to_numpy=True), mine.vectors, strict=True):
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_allclose(found, ours, atol=1e-4, rtol=0)
        np.testing.assert_array_equal(encoding.tokens.tokens, mine.tokens.tokens)
        np.testing.assert_array_equal(encoding.tokens.truncated, mine.tokens.truncated)
    card = baseline.card
    assert (card.kind, card.similarity, card.library, card.dim) == ("colbert", "maxsim", "sentence-transformers", 16)
    assert (card.query_length, card.document_length) == (12, 24)
    assert (card.query_prompt, card.document_prompt) == ("[Q] ", "[D] ")
    assert card.fingerprint == load_baseline("sentence-transformers", colbert.source).card.fingerprint
    assert baseline.encode_texts([], "query").vectors == []
