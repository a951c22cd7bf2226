"""Collated texts are tokenized as in search: the model gives the vectors of search on them, in one pass or column by column."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiver.encoder import Encoder, EncoderConfig, InputError, Tokenizer, init_weights
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder

pytest.importorskip("pylate.models")

from quiver.retrieval.training.dataloader import Collator, teacher_scores
from quiver.retrieval.training.losses import SHARED, LossModel

QUERIES = ["How wide is the Window?", "", "wings, feathers and a beak! " * 9, " padded "]
DOCUMENTS = ["A bird has wings, feathers and a beak!", "?!", "the window of a local layer is wide: " * 9, ""]
ROLES: dict[str, Any] = {"query": "query", "document_1": "document", "document_2": "document"}
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
    return BiEncoder.from_parts(*parts, replace(plain, **settings))


def make_colbert(parts: tuple[Encoder, Tokenizer], **settings: Any) -> ColBERT:
    torch.manual_seed(3)
    colbert = replace(ColBERTSettings(query_length=16, document_length=24), **settings)
    return ColBERT.from_parts(*parts, ModelFolder("colbert", Path(), lower_case=True, projections=(Projection(16, 8),), colbert=colbert))


def columns(
    model: BiEncoder | ColBERT, rows: list[dict[str, str]] = ROWS, *, one_pass: bool = False, **settings: Any
) -> tuple[LossModel, list[dict[str, Any]]]:
    """The model as a loss calls it, and the features of each column of a batch."""
    max_length = settings.get("max_length")
    module = LossModel(model, max_length=max_length, pad_to_limit=settings.pop("pad_to_limit", False))
    batch = Collator(model, **settings)(rows)
    return module.eval(), module.columns(batch["texts"], batch["columns"], one_pass=one_pass)


@pytest.mark.parametrize("one_pass", [True, False])
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
def test_dense_batches_give_the_vectors_of_search(parts: tuple[Encoder, Tokenizer], settings: dict[str, Any], one_pass: bool) -> None:
    model = make_dense(parts, **settings)
    module, features = columns(model, one_pass=one_pass)
    for (column, role), one in zip(ROLES.items(), features, strict=True):
        with torch.no_grad():
            found = module(one)["sentence_embedding"].numpy()
        np.testing.assert_allclose(found, model.encode_texts([row[column] for row in ROWS], role).vectors, atol=1e-6)


@pytest.mark.parametrize("one_pass", [True, False])
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
def test_colbert_batches_give_the_vectors_of_search(parts: tuple[Encoder, Tokenizer], settings: dict[str, Any], one_pass: bool) -> None:
    model = make_colbert(parts, **settings)
    module, features = columns(model, one_pass=one_pass)
    for (column, role), one in zip(ROLES.items(), features, strict=True):
        with torch.no_grad():
            found = torch.nn.functional.normalize(module(one)["token_embeddings"], dim=-1)
        kept = one["attention_mask"] if role == "document" else one["attention_mask"] | module.do_query_expansion
        expected = model.encode_texts([row[column] for row in ROWS], role).vectors
        assert [len(text) for text in expected] == kept.sum(1).tolist()
        for vectors, mask, wanted in zip(found, kept, expected, strict=True):
            np.testing.assert_allclose(vectors[mask].numpy(), wanted, atol=1e-5)


PROMPT = "Find what answers this: "


@pytest.mark.parametrize("include", [True, False])
def test_a_limit_that_the_prompt_fills_is_refused(parts: tuple[Encoder, Tokenizer], include: bool) -> None:
    model = make_dense(parts, query_prompt=PROMPT, max_length=60, include_prompt=include)
    [ids] = model.tokenizer.encode([PROMPT.strip()], max_length=60).ids
    assert len(ids) < 50
    what = rf"training\.max_length: {len(ids)} tokens leave no room for the text of a query after its prompt or prefix"
    with pytest.raises(InputError, match=rf"^{what}; raise it, or shorten model\.query_prompt$"):
        Collator(model, max_length=len(ids))
    with pytest.raises(InputError, match=r"training\.max_length: 3 tokens leave no room for the text of a query"):
        Collator(model, max_length=3)
    alike, other = ([{"query": text, "document_1": text}] for text in ("window", "bird"))
    room = Collator(model, max_length=len(ids) + 1)
    assert not torch.equal(room(alike)["texts"][:1].ids, room(other)["texts"][:1].ids)
    full = replace(model.settings, query_prompt="", document_prompt=PROMPT * 9)
    with pytest.raises(InputError, match=r"model\.max_length: 60 tokens .* of a document .*, or shorten model\.document_prompt"):
        Collator(BiEncoder.from_parts(*parts, full))
    assert Collator(make_dense(parts, query_prompt="", document_prompt=""), max_length=3)(ROWS)["texts"].max_seqlen == 3


def test_one_warning_if_many_texts_are_truncated(
    parts: tuple[Encoder, Tokenizer], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"query": "wings", "document_1": "a bird", "document_2": "wings, feathers and a beak! " * 9 * (place == 0)} for place in range(4)
    ]
    once = Collator(make_dense(parts, max_length=20))
    for _ in range(40):
        once(rows)
    assert (once.counts["texts"], once.counts["truncated"], caplog.records) == (480, 40, [])
    many = Collator(make_dense(parts))
    for _ in range(40):
        many(ROWS)
        assert len(caplog.records) == (many.counts["texts"] >= 256)
    assert caplog.messages == [
        "33% of the texts so far are truncated; their remaining tokens are not trained on. The limit is the model's, or training.max_length"
    ]
    monkeypatch.setenv("RANK", "1")  # one process of several says it
    second = Collator(make_dense(parts))
    for _ in range(40):
        second(ROWS)
    assert len(caplog.records) == 1


def test_a_colberts_documents_share_a_padded_length(parts: tuple[Encoder, Tokenizer]) -> None:
    model = make_colbert(parts)
    short = [{**row, "document_1": "?!", "document_2": "a window"} for row in ROWS]
    _, (_, one, two) = columns(model, short)
    assert one["input_ids"].shape == two["attention_mask"].shape
    assert two["attention_mask"].shape[1] == max(one["packed"].max_seqlen, two["packed"].max_seqlen) + 1
    for rows, width, settings in (
        (ROWS, 24, {}),
        (short, 24, {"pad_to_limit": True}),
        (short, 20, {"pad_to_limit": True, "max_length": 20}),
    ):
        _, (_, *documents) = columns(model, rows, **settings)
        assert {column["input_ids"].shape for column in documents} == {(4, width)}


def test_merged_documents_are_ordered_row_by_row(parts: tuple[Encoder, Tokenizer]) -> None:
    model = make_colbert(parts)
    _, (_, one, two) = columns(model)
    _, (_, together) = columns(model, merge_documents=True)
    for key in ("input_ids", "attention_mask"):
        assert torch.equal(together[key], torch.stack([one[key], two[key]], 1).flatten(0, 1))


def test_minmax_keeps_the_proportions() -> None:
    labels = teacher_scores([[-2.0, 6.0, 0.0], [5.0, 5.0, 5.0]], minmax=True)
    torch.testing.assert_close(labels, torch.tensor([[0.0, 1.0, 0.25], [0.0, 0.0, 0.0]]))
    assert torch.equal(teacher_scores([[1, 2]], minmax=False), torch.tensor([[1.0, 2.0]]))


@pytest.mark.parametrize("make", [make_dense, make_colbert])
def test_features_are_made_without_reading_from_the_device(parts: tuple[Encoder, Tokenizer], make: Any) -> None:
    """On the meta device nothing can be read; on a GPU, reading makes every step wait."""
    model = make(parts)
    batch = Collator(model)(ROWS)
    here, there = (LossModel(model).columns(one, batch["columns"], one_pass=True) for one in (batch["texts"], batch["texts"].to("meta")))
    for one, other in zip(here, there, strict=True):
        assert one["packed"].offsets == other["packed"].offsets
        assert SHARED in one
        assert SHARED in other
        for key, value in one.items():
            if isinstance(value, torch.Tensor):
                assert (other[key].shape, other[key].device.type) == (value.shape, "meta")
