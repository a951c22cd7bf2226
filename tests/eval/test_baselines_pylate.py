"""Models that PyLate runs: vectors and counts equal PyLate's, fingerprints differ between models, missing projections are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiver.encoder import InputError, Tokenizer
from quiver.eval import evaluate
from quiver.eval.baselines import load_baseline
from quiver.retrieval.models.colbert import ColBERT

transformers = pytest.importorskip("transformers")
models = pytest.importorskip("pylate.models")
pytestmark = pytest.mark.parity

TEXTS = ["a bird has two wings, and flies!", "", "granite is a hard stone", "the sea is deep and salt " * 12, "?"]
MakeModel = Callable[..., Path]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT with a small vocabulary, as transformers writes it."""
    folder = tmp_path_factory.mktemp("bert")
    Tokenizer.train(TEXTS * 2, vocab_size=384, max_length=64).save(folder)
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
    )
    model = transformers.BertModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def make_model(base: Path, tmp_path: Path) -> MakeModel:
    """Save a model as PyLate does, with a projection from a seed."""

    def make(name: str = "model", **settings: object) -> Path:
        torch.manual_seed(5)
        defaults: dict[str, Any] = {"embedding_size": 16, "query_length": 12, "document_length": 24}
        models.ColBERT(str(base), device="cpu", **defaults | settings).save_pretrained(str(tmp_path / name))
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
    documents = [json.loads(line) for line in (data / "corpus.jsonl").read_text().splitlines()]
    queries = [json.loads(line) for line in (data / "queries.jsonl").read_text().splitlines()]
    theirs = models.ColBERT(str(folder), device="cpu")
    texts = [f"{document['title']} {document['text']}".strip() for document in documents]
    matrices = theirs.encode(texts, is_query=False, show_progress_bar=False)
    judged = [line.split("\t") for line in (data / "qrels" / "test.tsv").read_text().splitlines()[1:]]
    values = []
    for query in queries:
        grades = {document: int(grade) for key, document, grade in judged if key == query["_id"]}
        if grades:
            vectors = theirs.encode([query["text"]], is_query=True, show_progress_bar=False)[0]
            scores = {document["_id"]: (vectors @ matrix.T).max(axis=1).sum() for document, matrix in zip(documents, matrices, strict=True)}
            order = sorted(scores, key=lambda document: -scores[document])
            gain = sum(grades.get(document, 0) / math.log2(rank + 2) for rank, document in enumerate(order[:10]))
            ideal = sum(grade / math.log2(rank + 2) for rank, grade in enumerate(sorted(grades.values(), reverse=True)))
            values.append(gain / ideal)
    assert len(values) == 3
    assert found.measures["ndcg@10"] == pytest.approx(sum(values) / 3, abs=1e-9)
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


def test_model_without_projection_is_refused(base: Path, minilm: Path) -> None:
    with pytest.raises(InputError, match="not a ColBERT model: it has no projection, and PyLate would initialise one at random"):
        load_baseline("pylate", base)
    with pytest.raises(InputError, match="must be a Transformer and Dense layers, found Transformer, Pooling, Normalize"):
        load_baseline("pylate", minilm)
