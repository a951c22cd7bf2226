"""Models that sentence-transformers runs: vectors, prompts and lengths equal the library's; fingerprints differ between models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiver.encoder import InputError
from quiver.eval.baselines import load_baseline
from quiver.eval.baselines.models import SentenceTransformersModel
from quiver.retrieval.models.biencoder import BiEncoder

transformers = pytest.importorskip("transformers")
library = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.parity

TEXTS = ["a bird has two wings and flies", "", "  granite is a hard stone ", "the sea is deep and salt " * 12, "Fish"]
MakeModel = Callable[..., Path]


@pytest.fixture
def make_model(random_bert: Path, tmp_path: Path) -> MakeModel:
    """Save a model as the library does."""

    def make(
        name: str = "model",
        *,
        prompts: dict[str, str] | None = None,
        default: str | None = None,
        similarity: str = "cosine",
        pooling: str = "mean",
        max_length: int = 24,
    ) -> Path:
        first = library.models.Transformer(str(random_bert), max_seq_length=max_length)
        modules = [first, library.models.Pooling(first.get_word_embedding_dimension(), pooling_mode=pooling)]
        model = library.SentenceTransformer(
            modules=modules, prompts=prompts, default_prompt_name=default, similarity_fn_name=similarity, device="cpu"
        )
        model.save_pretrained(str(tmp_path / name))
        return tmp_path / name

    return make


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "BertForTokenClassification"])
def test_a_model_for_another_task_is_refused(random_bert: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(random_bert, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    with pytest.raises(InputError, match="pass a bi-encoder, a ColBERT model or an encoder without a head"):
        load_baseline("sentence-transformers", folder)


PROMPTS: list[dict[str, Any]] = [
    {},
    {"prompts": {"query": "find: ", "document": "passage: "}},
    {"prompts": {"query": "find: ", "passage": "passage: "}},
    {"prompts": {"task": "find: "}, "default": "task"},
]


@pytest.mark.parametrize("settings", PROMPTS, ids=str)
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_vectors_equal_the_librarys(make_model: MakeModel, settings: dict[str, Any], similarity: str) -> None:
    folder = make_model(similarity=similarity, **settings)
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    baseline = load_baseline("sentence-transformers", folder, device="cpu")
    np.testing.assert_array_equal(baseline.encode_texts(TEXTS, "query").vectors, theirs.encode_query(TEXTS))
    np.testing.assert_array_equal(baseline.encode_texts(TEXTS, "document").vectors, theirs.encode_document(TEXTS))
    card = baseline.card
    assert (card.source, card.kind, card.library) == (str(folder), "dense", "sentence-transformers")
    assert (card.dim, card.similarity, card.query_length, card.document_length) == (32, similarity, 24, 24)
    for role, prompt in (("query", card.query_prompt), ("document", card.document_prompt)):
        expected = theirs.encode(TEXTS, prompt=prompt)
        np.testing.assert_array_equal(baseline.encode_texts(TEXTS, role).vectors, expected)


def test_tokens_are_counted_by_the_librarys_tokenizer(make_model: MakeModel) -> None:
    folder = make_model(prompts={"query": "find: ", "document": ""})
    baseline = load_baseline("sentence-transformers", folder, device="cpu")
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    for role, prompt in (("query", "find: "), ("document", "")):
        tokens = baseline.encode_texts(TEXTS, role).tokens
        kept = theirs.tokenize([prompt + text for text in TEXTS])["attention_mask"].sum(dim=1)
        assert tokens.tokens.tolist() == kept.tolist()
        assert tokens.truncated.tolist() == [False, False, False, True, False]
        assert tokens.empty.tolist() == [False, True, False, False, False]
    theirs.max_seq_length = 60
    exact = int(theirs.tokenize([TEXTS[0]])["attention_mask"].sum())
    fits, cuts = (load_baseline("sentence-transformers", make_model(f"n{n}", max_length=n), device="cpu") for n in (exact, exact - 1))
    assert not fits.encode_texts([TEXTS[0]], "query").tokens.truncated[0]
    assert cuts.encode_texts([TEXTS[0]], "query").tokens.truncated[0]


def test_quiver_biencoder_agrees_on_minilm(minilm: Path) -> None:
    baseline, ours = load_baseline("sentence-transformers", minilm, device="cpu"), BiEncoder(minilm)
    for role in ("query", "document"):
        theirs = baseline.encode_texts(TEXTS, role)
        np.testing.assert_allclose(theirs.vectors, ours.encode_texts(TEXTS, role).vectors, atol=1e-5, rtol=0)
        assert theirs.counts == ours.encode_texts(TEXTS, role).counts
    assert baseline.card.fingerprint != ours.card.fingerprint
    assert (baseline.card.similarity, baseline.card.query_length) == ("cosine", 256)


def fingerprint(folder: Path) -> str:
    return load_baseline("sentence-transformers", folder, device="cpu").card.fingerprint


def test_fingerprints_differ_between_models(make_model: MakeModel, tmp_path: Path) -> None:
    variants: dict[str, dict[str, Any]] = {
        "same": {},
        "prompts": {"prompts": {"query": "find: ", "document": ""}},
        "documents": {"prompts": {"query": "", "document": "find: "}},
        "pooling": {"pooling": "cls"},
        "length": {"max_length": 25},
        "dot": {"similarity": "dot"},
    }
    found = {name: fingerprint(make_model(name, **settings)) for name, settings in variants.items()}
    assert fingerprint(make_model("again")) == found.pop("same") not in found.values()
    assert len(set(found.values())) == len(found)
    weights = library.SentenceTransformer(str(tmp_path / "same"), device="cpu")
    with torch.no_grad():
        weights[0].auto_model.embeddings.word_embeddings.weight[0, 0] += 1e-3
    weights.save_pretrained(str(tmp_path / "weights"))
    assert fingerprint(tmp_path / "weights") != fingerprint(tmp_path / "same")
    weights[0].tokenizer.add_tokens(["bird"])
    weights.save_pretrained(str(tmp_path / "tokens"))
    assert fingerprint(tmp_path / "tokens") != fingerprint(tmp_path / "weights")


def test_colbert_is_refused_by_versions_without_multi_vector_models(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model()
    settings = json.loads((folder / "config_sentence_transformers.json").read_text())
    (folder / "config_sentence_transformers.json").write_text(json.dumps({**settings, "model_type": "ColBERT"}))
    monkeypatch.delattr(library, "MultiVectorEncoder", raising=False)
    with pytest.raises(InputError, match=r"a multi-vector model, which sentence-transformers .* does not support; .*library pylate"):
        load_baseline("sentence-transformers", folder)
    with pytest.raises(InputError, match=r"a ColBERT model \(one vector per token\)"):
        SentenceTransformersModel(folder)


def test_missing_or_damaged_models_are_named(tmp_path: Path, make_model: MakeModel) -> None:
    with pytest.raises(InputError, match="no such model: neither a folder nor a Hugging Face Hub model"):
        load_baseline("sentence-transformers", tmp_path / "nothing")
    folder = make_model()
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError) as caught:
        load_baseline("sentence-transformers", folder)
    assert "\n" not in str(caught.value)
    (folder / "modules.json").write_text("[{")
    with pytest.raises(InputError, match=r"modules\.json: not JSON"):
        load_baseline("sentence-transformers", folder)
