"""What the collator makes of a text is what search makes of it: the library's model on its features gives our model's vectors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiver.encoder import Encoder, EncoderConfig, InputError, Tokenizer, init_weights
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.encoding import Projection
from quiver.retrieval.models.loading import ColBERTSettings, ModelFolder

pytest.importorskip("pylate.models")

from quiver.retrieval.training.student.build import colbert_library, dense_library
from quiver.retrieval.training.student.collator import Collator, teacher_scores
from quiver.retrieval.training.student.native import LENGTHS, pack_features

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


READINGS: list[tuple[Any, dict[str, Any]]] = [
    (make_dense, {}),
    (make_dense, {"include_prompt": False}),
    (make_colbert, {}),
    (make_colbert, {"attend_to_expansion": True}),
    (make_colbert, {"query_expansion": False}),
]


@pytest.mark.parametrize(("kind", "settings"), READINGS)
def test_the_lengths_are_those_of_the_mask(parts: tuple[Encoder, Tokenizer], kind: Any, settings: dict[str, Any]) -> None:
    model = kind(parts, **settings)
    for batch in (Collator(model)(ROWS), Collator(model, merged=True)(ROWS), Collator(model, filled=True)(ROWS)):
        masks = {key.removesuffix("attention_mask"): value for key, value in batch.items() if key.endswith("attention_mask")}
        assert len(masks) in (2, 3)
        for column, mask in masks.items():
            assert batch[f"{column}lengths"] == tuple(mask.sum(1).tolist())


@pytest.mark.parametrize(("kind", "settings"), READINGS)
def test_a_batch_is_packed_without_asking_the_device_it_lies_on(
    parts: tuple[Encoder, Tokenizer], kind: Any, settings: dict[str, Any]
) -> None:
    """On the meta device nothing can be read: a count of the mask there, which would make a GPU wait, is an error."""
    batch = Collator(kind(parts, **settings))(ROWS)
    moved = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    for column in ROWS[0]:
        here, there = (pack_features(features(one, column)) for one in (batch, moved))
        assert there.ids.device.type == there.positions.device.type == there.cu_seqlens.device.type == "meta"
        assert (there.offsets, there.key_lengths, there.ids.shape) == (here.offsets, here.key_lengths, here.ids.shape)
        without = {key: value for key, value in features(batch, column).items() if key != LENGTHS}
        plain = pack_features(without)
        assert (plain.offsets, plain.key_lengths) == (here.offsets, here.key_lengths)
        assert torch.equal(plain.ids, here.ids)
        assert isinstance(batch.get(f"{column}_prompt_length", 0), int)


PROMPT = "Find what answers this: "


@pytest.mark.parametrize("include", [True, False])
def test_a_limit_that_its_prompt_fills_is_refused(parts: tuple[Encoder, Tokenizer], include: bool) -> None:
    model = make_dense(parts, query_prompt=PROMPT, max_length=60, include_prompt=include)
    [ids] = model.tokenizer.encode([PROMPT.strip()], max_length=60).ids
    assert len(ids) < 50
    what = rf"training\.max_length: the {len(ids)} tokens of a query are filled before its text begins"
    with pytest.raises(InputError, match=rf"^{what}; raise it, or shorten model\.query_prompt$"):
        Collator(model, max_length=len(ids))
    with pytest.raises(InputError, match=r"training\.max_length: the 3 tokens of a query"):
        Collator(model, max_length=3)
    alike, other = ([{"query": text, "document_1": text}] for text in ("window", "bird"))
    room = Collator(model, max_length=len(ids) + 1)
    assert not torch.equal(room(alike)["query_input_ids"], room(other)["query_input_ids"])
    full = replace(model.settings, query_prompt="", document_prompt=PROMPT * 9)
    with pytest.raises(InputError, match=r"model\.max_length: the 60 tokens of a document .*, or shorten model\.document_prompt"):
        Collator(BiEncoder(*parts, full))
    assert Collator(make_dense(parts, query_prompt="", document_prompt=""), max_length=3)(ROWS)["query_input_ids"].shape[1] == 3


def test_a_limit_that_its_prefix_fills_is_refused(parts: tuple[Encoder, Tokenizer]) -> None:
    with pytest.raises(InputError, match=r"training\.max_length: the 3 tokens of a query are filled before its text begins; raise it$"):
        Collator(make_colbert(parts), max_length=3)
    with pytest.raises(InputError, match=r"model\.colbert\.document_length: the 3 tokens of a document"):
        Collator(make_colbert(parts, document_length=3), max_length=9)
    assert Collator(make_colbert(parts), max_length=4)(ROWS)["document_1_input_ids"].shape[1] == 4
    assert Collator(make_colbert(parts, query_prefix="", document_prefix=""), max_length=3)(ROWS)["query_input_ids"].shape[1] == 3


def test_one_warning_where_many_texts_are_cut(
    parts: tuple[Encoder, Tokenizer], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"query": "wings", "document_1": "a bird", "document_2": "wings, feathers and a beak! " * 9 * (place == 0)} for place in range(4)
    ]
    once = Collator(make_dense(parts, max_length=20))
    for _ in range(40):
        once(rows)
    assert (once.counts.texts, once.counts.truncated, caplog.records) == (480, 40, [])
    many = Collator(make_dense(parts))
    for _ in range(40):
        many(ROWS)
        assert len(caplog.records) == (many.counts.texts >= 256)
    assert caplog.messages == ["33% of the texts so far are cut to the model's or to training.max_length; what is behind is not trained on"]
    monkeypatch.setenv("RANK", "1")  # one process of several says it
    second = Collator(make_dense(parts))
    for _ in range(40):
        second(ROWS)
    assert len(caplog.records) == 1


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
