"""Explanations: contributions add up to the score of the search, for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights
from quiver.encoder.errors import InputError
from quiver.retrieval.index import BuildOptions, build_index
from quiver.retrieval.index.tokens.token_quantizer import pool
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder
from quiver.retrieval.records import Document, Role, TokenEncoding
from quiver.retrieval.search.explain import explain, explain_texts, text_tokens, token_matches

DOCUMENTS = [
    Document("d1", "Birds have wings. A bird flies.", "On  birds"),
    Document("d2", "the sea is deep, and the sea is wide: no bird swims in it"),
    Document("d3", "granite"),
]
QUERY = "which bird flies?"


@pytest.fixture(scope="module")
def model() -> ColBERT:
    tokenizer = Tokenizer.train([QUERY, *(document.content() for document in DOCUMENTS)] * 2, vocab_size=320)
    for prefix in ("[Q] ", "[D] "):
        tokenizer.add_token(prefix)
    config = EncoderConfig.modernbert(
        vocab_size=384, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global"], max_positions=64
    )
    colbert = ColBERTSettings(query_length=24, document_length=60)
    torch.manual_seed(5)  # the projection's weights decide which tokens meet
    folder = ModelFolder("colbert", Path(), projections=(Projection(32, 16),), similarity="maxsim", colbert=colbert)
    return ColBERT.from_parts(init_weights(Encoder(config), seed=5), tokenizer, folder)


class Pooled:
    """The model with fewer vectors a document, as an index with a pool factor keeps them."""

    def __init__(self, model: ColBERT) -> None:
        self._model = model
        self.card = model.card

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> TokenEncoding:
        encoding = self._model.encode_texts(texts, role, progress=progress)
        if role == "document":
            merged = [pool(each, np.array([len(each)]), None, factor=3)[0] for each in encoding.vectors]
            encoding = replace(encoding, vectors=merged, token_ids=None)
        return encoding


def test_pooled_vectors_are_matched_to_their_nearest_token(tmp_path: Path, model: ColBERT) -> None:
    index = build_index(DOCUMENTS, Pooled(model), tmp_path / "i")
    stored, lengths = index.segments[0].vectors.vectors(np.arange(3))
    ends = np.cumsum(lengths)
    query = model.encode_query([QUERY])[0]
    hits = index.search([query], 3)
    for each in explain(index, model, QUERY, hits.ids[0]):
        row = int(each.document[1]) - 1
        kept = stored[ends[row] - lengths[row] : ends[row]]
        tokens = text_tokens(model, each.text or "", "document")
        encoded = model.encode_document([each.text or ""])[0]
        assert len(kept) < len(tokens) == len(encoded)
        assert sum(match.similarity for match in each.matches) == pytest.approx(
            float(hits.scores[0][list(hits.ids[0]).index(each.document)])
        )
        owners = (encoded @ kept.T).argmax(axis=1)
        for vector, match in zip(query, each.matches, strict=True):
            best = int((kept @ vector).argmax())
            candidates = [place for place in range(len(tokens)) if owners[place] == best]
            assert match.document in [tokens[place] for place in candidates]
            assert match.similarity == pytest.approx(float(kept[best] @ vector), abs=1e-6)


def test_texts_are_explained_without_an_index(model: ColBERT) -> None:
    explained = explain_texts(model, QUERY, {"a": "a bird flies", "b": ""})
    assert [(each.document, each.text) for each in explained] == [("a", "a bird flies"), ("b", "")]
    assert list(explained[0].matches) == token_matches(model, QUERY, "a bird flies")
    assert explained[0].score == pytest.approx(sum(match.similarity for match in explained[0].matches))
    bare = replace(model.settings.colbert, skiplist=("[CLS]", "[SEP]"), document_prefix="")
    without = ColBERT.from_parts(model.encoder, model.tokenizer, replace(model.settings, colbert=bare))
    (nothing,) = explain_texts(without, QUERY, {"b": ""})
    assert (nothing.score, nothing.matches) == (-np.inf, ())


@pytest.mark.parametrize("store_text", [True, False])
def test_a_bi_encoder_explains_by_similarity(tmp_path: Path, word_sum: Any, store_text: bool) -> None:
    index = build_index(DOCUMENTS, word_sum, tmp_path / "i", options=BuildOptions(store_text=store_text))
    hits = index.search(word_sum.encode_texts([QUERY], "query").vectors, 2)
    explained = explain(index, word_sum, QUERY, hits.ids[0])
    assert [each.score for each in explained] == hits.scores[0].tolist()
    assert [each.text for each in explained] == [index.text_of(key) if store_text else None for key in hits.ids[0]]
    assert [each.matches for each in explained] == [(), ()]


def test_documents_that_cannot_be_explained_are_refused(tmp_path: Path, model: ColBERT, word_sum: Any, other_word_sum: Any) -> None:
    index = build_index(DOCUMENTS, word_sum, tmp_path / "dense")
    with pytest.raises(InputError, match="but the model given is word-sum-b"):
        explain(index, other_word_sum, QUERY, ["d1"])
    with pytest.raises(InputError, match="has no document 'd9'"):
        explain(index, word_sum, QUERY, ["d9"])
    bare = build_index(DOCUMENTS, model, tmp_path / "bare", options=BuildOptions(store_text=False))
    with pytest.raises(InputError, match="built without texts"):
        explain(bare, model, QUERY, ["d1"])
