"""Models that PyLate runs: vectors and counts equal PyLate's, fingerprints differ between models, missing projections are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiver.encoder import InputError
from quiver.eval import evaluate
from quiver.eval.baselines import load_baseline
from quiver.eval.metrics import score
from quiver.retrieval.data.corpus import load_collection
from quiver.retrieval.models.colbert import ColBERT

transformers = pytest.importorskip("transformers")
models = pytest.importorskip("pylate.models")
pytestmark = pytest.mark.parity

TEXTS = ["a bird has two wings, and flies!", "", "granite is a hard stone", "the sea is deep and salt " * 12, "?"]
MakeModel = Callable[..., Path]


@pytest.fixture
def make_model(random_bert: Path, tmp_path: Path) -> MakeModel:
    """Save a model as PyLate does, with a projection from a seed."""

    def make(name: str = "model", **settings: object) -> Path:
        torch.manual_seed(5)
        defaults: dict[str, Any] = {"embedding_size": 16, "query_length": 12, "document_length": 24}
        models.ColBERT(str(random_bert), device="cpu", **defaults | settings).save_pretrained(str(tmp_path / name))
        return tmp_path / name

    return make


SETTINGS: list[dict[str, Any]] = [
    {},
    {"do_query_expansion": False},
    {"attend_to_expansion_tokens": True},
    {"query_prefix": "", "document_prefix": "", "skiplist_words": []},
    {"prompts": {"task": "find: "}, "default_prompt_name": "task"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(settings) or "defaults")
def test_vectors_and_counts_equal_pylates(make_model: MakeModel, settings: dict[str, Any]) -> None:
    folder = make_model(**settings)
    theirs, baseline = models.ColBERT(str(folder), device="cpu"), load_baseline("pylate", folder, device="cpu")
    prompt = "find: " if "prompts" in settings else ""
    for role, length in (("query", 12), ("document", 24)):
        encoding = baseline.encode_texts(TEXTS, role)
        expected = theirs.encode(TEXTS, is_query=role == "query", show_progress_bar=False)
        for found, matrix in zip(encoding.vectors, expected, strict=True):
            np.testing.assert_array_equal(found, matrix)
        theirs.attend_to_expansion_tokens = False  # so that the mask tells the text from its expansion
        kept = theirs.tokenize([prompt + text for text in TEXTS], is_query=role == "query")["attention_mask"].sum(dim=1)
        assert encoding.tokens.tokens.tolist() == kept.tolist()
        assert encoding.tokens.truncated[3]
        assert encoding.tokens.tokens[3] == length
        assert encoding.tokens.empty.tolist() == [False, True, False, False, False]
    card = baseline.card
    assert (card.source, card.kind, card.library, card.similarity) == (str(folder), "colbert", "pylate", "maxsim")
    assert (card.dim, card.query_length, card.document_length) == (16, 12, 24)
    prefixes = ("", "") if "query_prefix" in settings else ("[Q] ", "[D] ")
    assert (card.query_prompt, card.document_prompt) == (prefixes[0] + prompt, prefixes[1] + prompt)


def test_quiver_colbert_agrees(make_model: MakeModel) -> None:
    folder = make_model()
    baseline, ours = load_baseline("pylate", folder, device="cpu"), ColBERT(folder)
    for role in ("query", "document"):
        theirs, mine = baseline.encode_texts(TEXTS, role), ours.encode_texts(TEXTS, role)
        assert theirs.counts == mine.counts
        for one, other in zip(theirs.vectors, mine.vectors, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=0)
    assert baseline.card.fingerprint != ours.card.fingerprint


def test_evaluation_score_equals_score_of_pylates_vectors(make_model: MakeModel, make_collection: Any) -> None:
    folder, data = make_model(), make_collection()
    found = evaluate(load_baseline("pylate", folder, device="cpu"), data, baselines=()).collections[0]
    collection = load_collection(data, "test")
    texts = [document.content() for document in collection.documents]
    theirs = models.ColBERT(str(folder), device="cpu")
    asked, held = (
        theirs.encode(each, is_query=is_query, show_progress_bar=False)
        for each, is_query in (([query.text for query in collection.queries], True), (texts, False))
    )
    run = {
        query.id: {
            document.id: float((vectors @ matrix.T).max(axis=1).sum()) for document, matrix in zip(collection.documents, held, strict=True)
        }
        for query, vectors in zip(collection.queries, asked, strict=True)
    }
    assert found.measures["ndcg@10"] == pytest.approx(score(collection.qrels, run).means["ndcg@10"], abs=1e-9)
    assert found.truncated.documents == sum(len(theirs.tokenizer([text])["input_ids"][0]) + 1 > 24 for text in texts)


def test_fingerprints_differ_between_models(make_model: MakeModel) -> None:
    variants: dict[str, dict[str, Any]] = {
        "same": {},
        "query_length": {"query_length": 13},
        "document_length": {"document_length": 25},
        "expansion": {"do_query_expansion": False},
        "attend": {"attend_to_expansion_tokens": True},
        "skiplist": {"skiplist_words": ["?"]},
        "prefix": {"query_prefix": "[A] "},
        "width": {"embedding_size": 8},
    }
    found = {name: load_baseline("pylate", make_model(name, **settings)).card.fingerprint for name, settings in variants.items()}
    assert len(set(found.values())) == len(found)
    assert load_baseline("pylate", make_model("again")).card.fingerprint == found["same"]


def test_model_without_projection_is_refused(random_bert: Path, minilm: Path) -> None:
    with pytest.raises(InputError, match="not a ColBERT model: it has no projection, and PyLate would initialise one at random"):
        load_baseline("pylate", random_bert)
    with pytest.raises(InputError, match="must be a Transformer and Dense layers, found Transformer, Pooling, Normalize"):
        load_baseline("pylate", minilm)
