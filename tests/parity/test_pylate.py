"""Our ColBERT against PyLate: token vectors and rankings of random models, expansion on and off, saved both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from quiver.encoder import Tokenizer
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.encoding import Precision, pool_tokens, quantize_embeddings
from quiver.retrieval.models.loading import load_model
from tests.parity.encoders import random_model, special_ids

models = pytest.importorskip("pylate.models")
rank = pytest.importorskip("pylate.rank")
pytestmark = pytest.mark.parity

DOCUMENTS = [
    "A bird has wings, feathers and a beak!",
    "The window of a local layer is 128 tokens wide.",
    "Retrieval: find (quickly) what was asked for; nothing else.",
    "",
    "MaxSim sums, over the query's tokens, the best similarity of each. " * 12,
    "?",
]
QUERIES = ["which animal has wings", "", "how wide is the window of a local layer? " * 6, "late interaction"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random ModernBERT with a small vocabulary, as transformers writes it."""
    folder = tmp_path_factory.mktemp("modernbert")
    tokenizer = Tokenizer.train(DOCUMENTS + QUERIES, vocab_size=512, max_length=512)
    tokenizer.save(folder)
    random_model("modernbert", folder, seed=11, local_attention=32, **special_ids(tokenizer))
    return folder


SETTINGS = [
    {},
    {"attend_to_expansion_tokens": True},
    {"do_query_expansion": False},
    {"query_length": 160, "document_length": 300},  # expansion tokens further from the text than the window reaches
    {"query_prefix": "", "document_prefix": "", "skiplist_words": []},
    {"query_length": 12, "document_length": 16, "skiplist_words": ["!", "no single token"]},
]


def pylate_model(base: Path, folder: Path, settings: dict[str, object]) -> models.ColBERT:
    torch.manual_seed(12)
    model = models.ColBERT(str(base), embedding_size=128, device="cpu", model_kwargs={"attn_implementation": "sdpa"}, **settings)
    model.save_pretrained(str(folder))
    return model


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(settings) or "defaults")
def test_token_vectors_and_rankings_are_pylates(base: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    theirs = pylate_model(base, tmp_path / "model", settings)
    ours = load_model(tmp_path / "model")
    assert isinstance(ours, ColBERT)
    their_queries = theirs.encode(QUERIES, is_query=True, show_progress_bar=False)
    their_documents = theirs.encode(DOCUMENTS, is_query=False, show_progress_bar=False)
    our_queries, our_documents = ours.encode_query(QUERIES), ours.encode_document(DOCUMENTS)
    for expected, found in [*zip(their_queries, our_queries, strict=True), *zip(their_documents, our_documents, strict=True)]:
        np.testing.assert_allclose(found, np.asarray(expected), atol=1e-5, rtol=0)
    from quiver.retrieval.index import index_vectors

    full = [place for place, vectors in enumerate(our_documents) if len(vectors)]
    kept = [our_documents[place] for place in full]
    index = index_vectors([str(place) for place in full], np.concatenate(kept), ours.card, lengths=[len(each) for each in kept])
    hits = index.search(our_queries, k=len(full))
    expected = rank.rerank(
        documents_ids=[[str(place) for place in full]] * len(QUERIES),
        queries_embeddings=their_queries,
        documents_embeddings=[[their_documents[place] for place in full]] * len(QUERIES),
    )
    assert [list(ids) for ids in hits.ids] == [[str(row["id"]) for row in rows] for rows in expected]


@pytest.mark.parametrize("settings", SETTINGS[:3], ids=lambda settings: ",".join(settings) or "defaults")
def test_a_saved_model_opens_in_pylate(base: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    pylate_model(base, tmp_path / "theirs", settings)
    ours = ColBERT(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    again = models.ColBERT(str(tmp_path / "ours"), device="cpu", model_kwargs={"attn_implementation": "sdpa"})
    for expected, found in zip(ours.encode_query(QUERIES), again.encode(QUERIES, is_query=True, show_progress_bar=False), strict=True):
        np.testing.assert_allclose(np.asarray(found), expected, atol=1e-5, rtol=0)
    assert ColBERT(tmp_path / "ours").card.fingerprint == ours.card.fingerprint


CALLS: dict[str, dict[str, Any]] = {
    "queries": {"is_query": True},
    "is_query by default": {},
    "documents": {"is_query": False},
    "batch_size": {"is_query": False, "batch_size": 2},
    "convert_to_tensor": {"is_query": False, "convert_to_tensor": True},
    "convert_to_numpy=False": {"convert_to_numpy": False},
    "padding": {"is_query": False, "padding": True},
    "normalize_embeddings=False": {"is_query": False, "normalize_embeddings": False},
    "prompt": {"prompt": "find: "},
    "prompt_name": {"prompt_name": "query"},
    "device": {"device": "cpu"},
}


@pytest.mark.parametrize("given", [QUERIES, QUERIES[0]], ids=["list", "text"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_encode_gives_what_pylate_gives(base: Path, tmp_path: Path, call: str, given: Any) -> None:
    theirs = pylate_model(base, tmp_path / "model", {})
    expected = theirs.encode(given, show_progress_bar=False, **CALLS[call])
    found = ColBERT(tmp_path / "model").encode(given, show_progress_bar=False, **CALLS[call])
    if isinstance(given, str):
        expected, found = [expected], [found]
    assert isinstance(found, list)
    for one, other in zip(expected, found, strict=True):
        assert type(one) is type(other)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(np.asarray(other), np.asarray(one), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("factor", "protected"), [(2, 1), (3, 0), (100, 1), (2, 7)])
def test_pooled_vectors_are_pylates(base: Path, tmp_path: Path, factor: int, protected: int) -> None:
    """Of random vectors: those of the random model are so alike that rounding decides which are merged."""
    rng = np.random.default_rng(factor)
    documents = [rng.standard_normal((length, 16)).astype(np.float32) for length in (1, 2, 7, 8, 50)]
    documents = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in documents]
    theirs = models.ColBERT.pool_embeddings_hierarchical(None, [torch.from_numpy(each) for each in documents], factor, protected)
    for document, expected in zip(documents, theirs, strict=True):
        found = pool_tokens(document, factor, protected=protected)
        np.testing.assert_array_equal(found[:protected], document[:protected])
        # PyLate's clusters have another order.
        both = [matrix[np.lexsort(matrix.T)] for matrix in (expected.numpy(), found)]
        np.testing.assert_allclose(both[1], both[0], atol=1e-6)
    pylate_model(base, tmp_path / "model", {})
    model = ColBERT(tmp_path / "model")
    for one, pooled in zip(
        model.encode(DOCUMENTS, is_query=False),
        model.encode(DOCUMENTS, is_query=False, pool_factor=factor, protected_tokens=protected),
        strict=True,
    ):
        np.testing.assert_array_equal(pooled, pool_tokens(one, factor, protected=protected))
    assert len(model.encode(QUERIES, pool_factor=factor)[0]) == 32


@pytest.mark.parametrize("padding", [False, True])
def test_quantized_vectors_are_those_of_all_texts_together(base: Path, tmp_path: Path, padding: bool) -> None:
    """PyLate 1.6 has the argument, but every value other than float32 fails."""
    pylate_model(base, tmp_path / "model", {})
    model = ColBERT(tmp_path / "model")
    plain = model.encode(DOCUMENTS, is_query=False, padding=padding)
    for precision in get_args(Precision)[1:]:
        found = model.encode(DOCUMENTS, is_query=False, padding=padding, precision=precision)
        assert [each.shape[:-1] for each in found] == [each.shape[:-1] for each in plain]
        expected = quantize_embeddings(np.concatenate([each.reshape(-1, 128) for each in plain]), precision)
        np.testing.assert_array_equal(np.concatenate([each.reshape(-1, each.shape[-1]) for each in found]), expected)


def test_similarities_are_pylates_sums(base: Path, tmp_path: Path) -> None:
    theirs = pylate_model(base, tmp_path / "model", {})
    model = ColBERT(tmp_path / "model")
    documents = [text for text in DOCUMENTS if text not in ("", "?")]
    queries, padded = model.encode_query(QUERIES, convert_to_tensor=True), model.encode_document(documents, padding=True)
    plain = [torch.from_numpy(each) for each in model.encode_document(documents)]
    expected = torch.cat([theirs.similarity(torch.stack(queries), each[None]) for each in plain], dim=1)
    for given in (model.encode_document(documents), padded, np.concatenate(padded)):
        torch.testing.assert_close(model.similarity(queries, given), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(model.similarity_pairwise(queries, padded), expected.diagonal(), atol=1e-4, rtol=0)
    torch.testing.assert_close(model.similarity(queries[0], padded), expected[:1], atol=1e-4, rtol=0)
    assert model.similarity([torch.tensor([[1.0, 0]])], [np.float32([[-1, 0], [0, 0]])]).item() == -1  # padding is not the nearest vector
    assert model.similarity([], padded).shape == (0, len(documents))
    assert model.similarity(queries, []).shape == (len(queries), 0)
    assert model.encode([]) == []
