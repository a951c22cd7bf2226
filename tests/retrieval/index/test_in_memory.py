"""Indexes in memory: from documents that are encoded, or from vectors that are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.embedding_store import EmbeddingStore
from quiver.retrieval.index import BuildOptions, build_index, index_vectors
from quiver.retrieval.records import DenseEncoding, DenseModel, Document, ModelCard, TextTokens, TokenCounts, TokenEncoding, TokenModel

DOCUMENTS = [
    Document("a", "granite is hard", "Stone"),
    Document("b", "a bird flies \u2028 high", ""),
    Document("c", "", ""),
    Document("é", "the sea\nis deep", "Sea"),
]


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_an_index_in_memory_is_that_of_a_folder(tmp_path: Path, word_sum: DenseModel, word_by_word: TokenModel, kind: str) -> None:
    model = word_sum if kind == "dense" else word_by_word
    documents = [document._replace(metadata={"row": row}) for row, document in enumerate(DOCUMENTS)]
    index, folder = build_index(documents, model), build_index(documents, model, tmp_path / "i")
    queries = model.encode_texts(["a bird flies", "sea"], "query").vectors
    for filter in (None, "row>1"):
        ours, theirs = index.search(queries, 3, filter=filter), folder.search(queries, 3, filter=filter)
        assert ours.ids == theirs.ids
        np.testing.assert_array_equal(ours.scores, theirs.scores)
    assert index.search(queries, 2).ids[0][0] == "b"
    assert index.manifest.segments[0].tokens == TokenCounts(4, 13, 0, 1)
    assert (index.kind, list(index.ids), index.nbytes) == (folder.kind, list(folder.ids), folder.nbytes)
    assert list(index.documents) == list(folder.documents)


@pytest.mark.parametrize("engine", ["pq-dense", "ivf-dense:nlist=8", "faiss-dense:factory=HNSW8,Flat", "ivf-tokens:centroids=16"])
def test_every_engine_works_without_a_folder(tmp_path: Path, word_sum: DenseModel, word_by_word: TokenModel, engine: str) -> None:
    model = word_by_word if "tokens" in engine else word_sum
    documents = [Document(f"d{row:03d}", f"word{row % 7} text{row % 11} end{row}") for row in range(150)]
    index = build_index(documents, model, options=BuildOptions(engine, calibrate=False))
    exact = build_index(documents, model, options=BuildOptions("exact"))
    queries = model.encode_texts(["word3 text4 end7", "end101"], "query").vectors
    assert index.kind == engine.partition(":")[0]
    assert [set(ids) & set(best) for ids, best in zip(index.search(queries, 3).ids, exact.search(queries, 1).ids, strict=True)] == [
        set(best) for best in exact.search(queries, 1).ids
    ]
    assert all(len(set(ids)) == 150 for ids in index.search(queries, 1000, effort="exact").ids)
    if "tokens" not in engine:
        folder = build_index(documents, model, tmp_path / "i", options=BuildOptions(engine, calibrate=False))
        assert folder.search(queries, 9).ids == index.search(queries, 9).ids


def test_no_documents_and_repeated_ids_are_refused(word_sum: DenseModel) -> None:
    with pytest.raises(InputError, match="no documents to index"):
        build_index(iter([]), word_sum)
    with pytest.raises(InputError, match="'a' occurs twice"):
        build_index([DOCUMENTS[0], DOCUMENTS[0]], word_sum)
    with pytest.raises(InputError, match="no document has the field 'year' to filter by"):
        build_index(DOCUMENTS, word_sum, options=BuildOptions(fields=["year"]))


def test_vectors_that_do_not_match_the_model_card_are_refused(word_sum: DenseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = one_token_each(4)
    monkeypatch.setattr(word_sum, "encode_texts", lambda texts, role, *, progress=False: DenseEncoding(np.ones((4, 5), np.float32), tokens))
    with pytest.raises(ValueError, match="width 5, its card says 256"):
        build_index(DOCUMENTS, word_sum)
    broken = np.ones((4, 256), np.float32)
    broken[1] = np.nan
    monkeypatch.setattr(word_sum, "encode_texts", lambda texts, role, *, progress=False: DenseEncoding(broken, tokens))
    with pytest.raises(InputError, match="document 'b' is not finite"):
        build_index(DOCUMENTS, word_sum)


def one_token_each(texts: int) -> TextTokens:
    return TextTokens(np.ones(texts, np.int32), np.zeros(texts, bool), np.zeros(texts, bool))


class Wide:
    """Vectors of 64 numbers from nothing: large, and no time is spent on them."""

    def __init__(self, kind: str) -> None:
        dense = kind == "dense"
        self.card = ModelCard("wide", "dense" if dense else "colbert", "d" * 64, 64, "cosine" if dense else "maxsim", 9, 9)

    def encode_texts(self, texts: Sequence[str], role: str, *, progress: bool = False) -> DenseEncoding | TokenEncoding:
        tokens = one_token_each(len(texts))
        vectors = np.full((len(texts), 64), 0.125, np.float32)
        return DenseEncoding(vectors, tokens) if self.card.kind == "dense" else TokenEncoding([row[None] for row in vectors], tokens)


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_a_model_keeps_the_vectors_it_gave(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.arange(1.0, 13.0, dtype=np.float32).reshape(4, 3)
    given = vectors.copy()
    model = Wide(kind)
    model.card = replace(model.card, dim=3)
    tokens = one_token_each(4)
    encoding = DenseEncoding(given, tokens) if kind == "dense" else TokenEncoding(list(given[:, None]), tokens)
    monkeypatch.setattr(model, "encode_texts", lambda texts, role, *, progress=False: encoding)
    index = build_index(DOCUMENTS, model)
    np.testing.assert_array_equal(given, vectors)
    query = np.array([[1.0, 0.0, 0.0]], np.float32)
    lengths = np.linalg.norm(vectors, axis=1) if kind == "dense" else 1
    hits = index.search(query if kind == "dense" else [query], 4)
    found = dict(zip(hits.ids[0], hits.scores[0], strict=True))
    np.testing.assert_allclose([found[document.id] for document in DOCUMENTS], vectors[:, 0] / lengths, rtol=1e-6)


@pytest.mark.parametrize("read_bytes", [0, 1 << 20])
@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_stored_vectors_make_the_same_index(
    tmp_path: Path, word_sum: DenseModel, word_by_word: TokenModel, kind: str, read_bytes: int
) -> None:
    model = word_sum if kind == "dense" else word_by_word
    stored = EmbeddingStore(tmp_path).encode(model, [document.content() for document in DOCUMENTS], "document")
    ids = [document.id for document in DOCUMENTS]
    index = index_vectors(ids, stored.rows, model.card, lengths=stored.lengths, read_bytes=read_bytes)
    built = build_index(DOCUMENTS, model)
    assert (list(index.ids), len(index), index.kind, index.nbytes) == (ids, 4, built.kind, built.nbytes)
    queries = model.encode_texts(["hard stone", "sea", "x y z"], "query").vectors
    ours, theirs = index.search(queries, 10), built.search(queries, 10)
    assert ours.ids == theirs.ids
    np.testing.assert_allclose(np.array(ours.scores), np.array(theirs.scores), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="3 ids for the vectors of 4"):
        index_vectors(["a", "b", "c"], stored.rows, model.card, lengths=stored.lengths)


def test_no_row_below_zero_leaves_an_index_of_faiss() -> None:
    """FAISS fills up with row -1 where the probed lists hold fewer vectors than asked for; NumPy would read it as the last document."""
    vectors = np.random.default_rng(0).standard_normal((1000, 32)).astype(np.float32)
    ids, card = [f"d{number}" for number in range(1000)], ModelCard("vectors", "dense", "", 32, "dot", 0, 0)
    index = index_vectors(ids, vectors, card, engine="faiss-dense:factory=IVF64,Flat")
    hits = index.search(vectors[:40], 10, effort={"nprobe": 1, "k_factor": 10.0})
    for number, found in enumerate(hits.ids):
        assert found[0] == ids[number]
        assert len(found) == len(set(found))
    assert sum("d999" in found for found in hits.ids) < 5
