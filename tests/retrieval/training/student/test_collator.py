"""What the collator makes of a text is what search makes of it: the library's model on its features gives our model's vectors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encoder import Encoder, EncoderConfig, Tokenizer, init_weights
from retrieval.biencoder import BiEncoder
from retrieval.colbert import ColBERT
from retrieval.model_folder import ColBERTSettings, ModelFolder
from retrieval.projection import Projection

pytest.importorskip("pylate.models")

from retrieval.training.student.build import colbert_library, dense_library
from retrieval.training.student.collator import Collator, teacher_scores

QUERIES = ["How wide is the Window?", "", "wings, feathers and a beak! " * 9, " padded "]
DOCUMENTS = ["A bird has wings, feathers and a beak!", "?!", "the window of a local layer is wide: " * 9, ""]
ROWS = [{"query": query, "document_1": text, "document_2": text[::-1]} for query, text in zip(QUERIES, DOCUMENTS, strict=True)]


@pytest.fixture(scope="module")
def parts() -> tuple[Encoder, Tokenizer]:
    tokenizer = Tokenizer.train(QUERIES + DOCUMENTS, vocab_size=300, max_length=64)
    for prefix in ("[Q] ", "[D] "):
        tokenizer.add_token(prefix)
    config = EncoderConfig.modernbert(
        vocab_size=320, hidden_size=16, num_heads=2, intermediate_size=24, layer_types=["global", "local"], window=8, max_positions=64
    )
    return init_weights(Encoder(config), seed=5).eval(), tokenizer


def make_dense(parts: tuple[Encoder, Tokenizer], **settings: Any) -> BiEncoder:
    plain = ModelFolder("dense", Path(), max_length=24, query_prompt="Find: ", document_prompt="Code ", normalize=True)
    return BiEncoder(*parts, replace(plain, **settings))


def make_colbert(parts: tuple[Encoder, Tokenizer], **settings: Any) -> ColBERT:
    torch.manual_seed(3)
    colbert = replace(ColBERTSettings(query_length=16, document_length=24), **settings)
    return ColBERT(*parts, ModelFolder("colbert", Path(), lower_case=True, projections=(Projection(16, 8),), colbert=colbert))


def features(batch: dict[str, torch.Tensor], column: str) -> dict[str, torch.Tensor]:
    return {key[len(column) + 1 :]: value for key, value in batch.items() if key.startswith(f"{column}_")}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lower_case": True, "normalize": False},
        {"include_prompt": False},
        {"include_prompt": False, "pooling": "max"},
        {"include_prompt": False, "pooling": "cls"},
        {"pooling": "lasttoken", "query_prompt": ""},
    ],
    ids=str,
)
def test_dense_features_give_the_vectors_of_search(parts: tuple[Encoder, Tokenizer], settings: dict[str, Any]) -> None:
    model = make_dense(parts, **settings)
    batch = Collator(model)(ROWS)
    assert next(iter(batch)) == "query_input_ids"
    library = dense_library(model).eval()
    for column, role in (("query", "query"), ("document_1", "document"), ("document_2", "document")):
        with torch.no_grad():
            found = library(features(batch, column))["sentence_embedding"].numpy()
        np.testing.assert_allclose(found, model.encode([row[column] for row in ROWS], role).vectors, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attend_to_expansion": True},
        {"query_expansion": False},
        {"query_prefix": "", "document_prefix": "", "skiplist": ()},
        {"query_length": 40},  # further from the text than the window reaches
    ],
    ids=str,
)
def test_colbert_features_give_the_vectors_of_search(parts: tuple[Encoder, Tokenizer], settings: dict[str, Any]) -> None:
    model = make_colbert(parts, **settings)
    batch = Collator(model)(ROWS)
    library = colbert_library(model).eval()
    for column, role in (("query", "query"), ("document_1", "document"), ("document_2", "document")):
        read = features(batch, column)
        with torch.no_grad():
            found = torch.nn.functional.normalize(library(dict(read))["token_embeddings"], dim=-1)
        if role == "document":
            kept = read["attention_mask"].bool() & library.skiplist_mask(read["input_ids"], library.skiplist)
        else:
            kept = read["attention_mask"].bool() | model.settings.colbert.query_expansion
        expected = model.encode([row[column] for row in ROWS], role).vectors
        assert [len(text) for text in expected] == kept.sum(1).tolist()
        for vectors, mask, wanted in zip(found, kept, expected, strict=True):
            np.testing.assert_allclose(vectors[mask].numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize("kind", [make_dense, make_colbert])
def test_what_is_cut_is_counted_as_search_counts_it(parts: tuple[Encoder, Tokenizer], kind: Any) -> None:
    model = kind(parts)
    counts = [model.encode([row[column] for row in ROWS], "query" if column == "query" else "document").counts for column in ROWS[0]]
    collator = Collator(model)
    for passes in (1, 2):
        collator(ROWS)
        assert collator.counts.texts == 12 * passes
        assert collator.counts.truncated == passes * sum(one.truncated for one in counts) > 0
        assert collator.counts.tokens == passes * sum(one.tokens for one in counts)


def test_a_shorter_length_in_training_leaves_the_model_alone(parts: tuple[Encoder, Tokenizer]) -> None:
    dense, colbert = make_dense(parts), make_colbert(parts)
    short = Collator(dense, max_length=9)(ROWS)
    assert {short[f"{column}_input_ids"].shape[1] for column in ROWS[0]} == {9}
    shorter = replace(dense.settings, max_length=9)
    expected = BiEncoder(*parts, shorter).encode_documents([row["document_1"] for row in ROWS])
    found = dense_library(dense).eval()(features(short, "document_1"))["sentence_embedding"].detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    read = Collator(colbert, max_length=9)(ROWS)
    assert {read[f"{column}_input_ids"].shape[1] for column in ROWS[0]} == {9}
    assert Collator(dense, max_length=999)(ROWS)["query_input_ids"].shape[1] == 24
    assert (dense.max_length, colbert.settings.colbert.document_length) == (24, 24)


def test_a_colberts_documents_share_a_length(parts: tuple[Encoder, Tokenizer]) -> None:
    model = make_colbert(parts)
    short = [{**row, "document_1": "?!", "document_2": "a window"} for row in ROWS]
    batch = Collator(model)(short)
    mask = batch["document_2_attention_mask"]
    assert batch["document_1_input_ids"].shape == mask.shape
    assert mask.shape[1] == max(batch[f"document_{place}_attention_mask"].sum(1).max() for place in (1, 2)) + 1
    assert Collator(model)(ROWS)["document_1_input_ids"].shape == (4, 24)
    assert Collator(model, filled=True)(short)["document_2_input_ids"].shape == (4, 24)
    assert Collator(model, filled=True, max_length=20)(short)["document_2_input_ids"].shape == (4, 20)


def test_merged_documents_stand_row_by_row(parts: tuple[Encoder, Tokenizer]) -> None:
    model = make_colbert(parts)
    apart, together = Collator(model)(ROWS), Collator(model, merged=True)(ROWS)
    for key in ("input_ids", "attention_mask"):
        one, two = (apart[f"document_{place}_{key}"] for place in (1, 2))
        assert torch.equal(together[f"documents_{key}"], torch.stack([one, two], 1).flatten(0, 1))
    assert {key for key in together if key.startswith("document_")} == set()


def test_scores_are_labels(parts: tuple[Encoder, Tokenizer]) -> None:
    scored = [{**row, "scores": [float(place), 3.0]} for place, row in enumerate(ROWS)]
    model = make_dense(parts)
    assert torch.equal(Collator(model)(scored)["label"], torch.tensor([[0.0, 3.0], [1.0, 3.0], [2.0, 3.0], [3.0, 3.0]]))
    torch.testing.assert_close(Collator(model, minmax=True)(scored)["label"], torch.tensor([[0.0, 1.0]] * 3 + [[0.0, 0.0]]))
    assert "label" not in Collator(model)(ROWS)
    assert Collator.valid_label_columns == ["scores"]


def test_minmax_keeps_the_proportions() -> None:
    labels = teacher_scores([[-2.0, 6.0, 0.0], [5.0, 5.0, 5.0]], minmax=True)
    torch.testing.assert_close(labels, torch.tensor([[0.0, 1.0, 0.25], [0.0, 0.0, 0.0]]))
    assert torch.equal(teacher_scores([[1, 2]], minmax=False), torch.tensor([[1.0, 2.0]]))
