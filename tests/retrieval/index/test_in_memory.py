"""Indexes in memory: from documents that are encoded, or from vectors that are stored."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.embedding_store import EmbeddingStore
from quiver.retrieval.index import (
    ExactColBERTIndex,
    ExactDenseIndex,
    FaissDenseIndex,
    build_in_memory,
    check_kind,
    in_memory,
    index_vectors,
)
from quiver.retrieval.protocols import DenseModel, TokenModel
from quiver.retrieval.records import DenseEncoding, Document, ModelCard, TextTokens, TokenCounts, TokenEncoding

DOCUMENTS = [
    Document("a", "granite is hard", "Stone"),
    Document("b", "a bird flies \u2028 high", ""),
    Document("c", "", ""),
    Document("é", "the sea\nis deep", "Sea"),
]


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_the_models_kind_decides_the_index(word_sum: DenseModel, word_by_word: TokenModel, kind: str) -> None:
    model = word_sum if kind == "dense" else word_by_word
    built = build_in_memory(model, DOCUMENTS)
    assert isinstance(built.index, ExactDenseIndex if kind == "dense" else ExactColBERTIndex)
    assert built.index.search(model.encode(["a bird flies"], "query").vectors, 2).ids[0][0] == "b"
    assert built.counts == TokenCounts(4, 13, 0, 1)


def test_no_documents_and_repeated_ids_are_refused(word_sum: DenseModel) -> None:
    with pytest.raises(InputError, match="no documents to index"):
        build_in_memory(word_sum, iter([]))
    with pytest.raises(InputError, match="'a' is there twice"):
        build_in_memory(word_sum, [DOCUMENTS[0], DOCUMENTS[0]])


def test_a_model_whose_vectors_are_not_what_its_card_says(word_sum: DenseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = one_token_each(4)
    monkeypatch.setattr(word_sum, "encode", lambda texts, role, *, progress=False: DenseEncoding(np.ones((4, 5), np.float32), tokens))
    with pytest.raises(ValueError, match="width 5, its card says 256"):
        build_in_memory(word_sum, DOCUMENTS)
    broken = np.ones((4, 256), np.float32)
    broken[1] = np.nan
    monkeypatch.setattr(word_sum, "encode", lambda texts, role, *, progress=False: DenseEncoding(broken, tokens))
    with pytest.raises(InputError, match="document 'b' is not finite"):
        build_in_memory(word_sum, DOCUMENTS)


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_the_parts_are_given_back_while_they_move_into_the_matrix(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_memory, "_CHUNK", 100)
    part, scale = in_memory._part, in_memory.make_comparable
    parts: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched_part(*arguments: Any) -> Any:
        made = part(*arguments)
        parts.append(weakref.ref(made.vectors))
        return made

    def watched_scale(*arguments: Any) -> None:
        alive.append(sum(vectors() is not None for vectors in parts))
        scale(*arguments)

    monkeypatch.setattr(in_memory, "_part", watched_part)
    monkeypatch.setattr(in_memory, "make_comparable", watched_scale)
    model, documents = Wide(kind), [Document(f"d{number}", "") for number in range(4000)]
    tracemalloc.start()
    try:
        built = build_in_memory(model, documents)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert alive == list(range(40, 0, -1))
    # The parts, the matrix whose pages are taken only as theirs are given back, and the ids: no third copy.
    assert peak < 2.8 * 4000 * 64 * 4
    assert built.index.search(model.encode([""], "query").vectors, 1).ids[0] == ["d999"]


def one_token_each(texts: int) -> TextTokens:
    return TextTokens(np.ones(texts, np.int32), np.zeros(texts, bool), np.zeros(texts, bool))


class Wide:
    """Vectors of 64 numbers from nothing: large, and no time is spent on them."""

    def __init__(self, kind: str) -> None:
        dense = kind == "dense"
        self.card = ModelCard("wide", "dense" if dense else "colbert", "d" * 64, 64, "cosine" if dense else "maxsim", 9, 9)

    def encode(self, texts: Sequence[str], role: str, *, progress: bool = False) -> DenseEncoding | TokenEncoding:
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
    monkeypatch.setattr(model, "encode", lambda texts, role, *, progress=False: encoding)
    index = build_in_memory(model, DOCUMENTS).index
    np.testing.assert_array_equal(given, vectors)
    query = np.array([[1.0, 0.0, 0.0]], np.float32)
    lengths = np.linalg.norm(vectors, axis=1) if kind == "dense" else 1
    hits = index.search(query if kind == "dense" else [query], 4)
    found = dict(zip(hits.ids[0], hits.scores[0], strict=True))
    np.testing.assert_allclose([found[document.id] for document in DOCUMENTS], vectors[:, 0] / lengths, rtol=1e-6)


def test_one_bar_over_all_documents(word_sum: DenseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_memory, "_CHUNK", 3)
    bars: list[tuple[str, int, list[int]]] = []

    @contextmanager
    def recorded(description: str, total: int, *, enabled: bool) -> Iterator[Callable[[int], None]]:
        steps: list[int] = []
        if enabled and total:
            bars.append((description, total, steps))
        yield steps.append

    monkeypatch.setattr(in_memory, "progress_bar", recorded)
    asked: list[bool] = []
    encode = word_sum.encode

    def watched(texts: Sequence[str], role: str, *, progress: bool = False) -> DenseEncoding:
        asked.append(progress)
        return encode(texts, role)

    monkeypatch.setattr(word_sum, "encode", watched)
    build_in_memory(word_sum, DOCUMENTS, progress=True)
    assert bars == [("documents", 4, [3, 1])]
    assert asked == [False] * 2
    build_in_memory(word_sum, iter(DOCUMENTS), progress=True)  # no total, no time to go: the model shows its own
    assert len(bars) == 1
    assert asked[2:] == [True, True]
    build_in_memory(word_sum, DOCUMENTS)
    assert len(bars) == 1
    assert asked[4:] == [False, False]


@pytest.mark.parametrize("in_memory", [0, 1 << 20])
@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_stored_vectors_make_the_same_index(
    tmp_path: Path, word_sum: DenseModel, word_by_word: TokenModel, kind: str, in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quiver.retrieval.index.in_memory._IN_MEMORY", in_memory)
    model = word_sum if kind == "dense" else word_by_word
    stored = EmbeddingStore(tmp_path).encode(model, [document.content() for document in DOCUMENTS], "document")
    index, built = index_vectors([document.id for document in DOCUMENTS], stored, model.card), build_in_memory(model, DOCUMENTS)
    assert type(index) is type(built.index)
    assert (list(index.ids), len(index), index.kind, index.nbytes) == (
        list(built.index.ids),
        4,
        built.index.kind,
        built.index.nbytes,
    )
    assert stored.counts == built.counts
    queries = model.encode(["hard stone", "sea", "x y z"], "query").vectors
    ours, theirs = index.search(queries, 10), built.index.search(queries, 10)
    assert ours.ids == theirs.ids
    np.testing.assert_array_equal(np.array(ours.scores), np.array(theirs.scores))
    with pytest.raises(ValueError, match="3 ids for the vectors of 4"):
        index_vectors(["a", "b", "c"], stored, model.card)


def test_the_kind_of_an_index_is_checked_before_anything_is_encoded(tmp_path: Path, word_sum: DenseModel, word_by_word: TokenModel) -> None:
    for kind in ("exact", "Flat", "IVF1024,PQ16x4fs,RFlat?nprobe=8&k_factor=2"):
        check_kind(kind, word_sum.card)
    check_kind("exact", word_by_word.card)
    stored = EmbeddingStore(tmp_path).encode(word_sum, ["a b", "c"], "document")
    index = index_vectors(["x", "y"], stored, word_sum.card, kind="Flat")
    assert isinstance(index, FaissDenseIndex)
    assert index.search(word_sum.encode(["b"], "query").vectors, 1).ids == [["x"]]
    tokens = EmbeddingStore(tmp_path).encode(word_by_word, ["a b", "c"], "document")
    for card, vectors, kind, message in (
        (word_sum.card, stored, "exacty", "index 'exacty': FAISS cannot make it for width 256"),
        (word_sum.card, stored, "Flat?nprobe=3", "index 'Flat': 'nprobe' is no setting of its search; it takes none"),
        (word_by_word.card, tokens, "Flat", "index 'Flat': a ColBERT is searched with 'exact', the only kind for one vector a token"),
    ):
        for call in (
            lambda kind=kind, card=card: check_kind(kind, card),
            lambda *, a=(vectors, card), kind=kind: index_vectors(["x", "y"], *a, kind=kind),
        ):
            with pytest.raises(InputError) as caught:
                call()
            assert str(caught.value).startswith(message)
